"""A million tokens in one sequence: plans for 8 to 64 GPUs, and a published run beside what is predicted for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from benchmarks.planned_mixtures import ROWS_2026
from planner.cost.cluster import ClusterSpec
from planner.plan.plan import Plan

TOKENS, PARTS = 2**20, 16
ENOUGH_BYTES = 2 * 10**11
"""Memory of a device that runs what is published without moving anything to the host."""
LIMIT_S = 300.0
"""For a search; the first plan that fits takes longer where others use the machine."""


class LossOfPart(nn.Module):
    """The loss of some tokens, added to that of others."""

    def __init__(self, head: nn.Linear):
        super().__init__()
        self.head = head

    def forward(self, total: Tensor, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(hidden).float()
        return total + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class LossInParts(nn.Module):
    """A causal language model whose logits are made of every ``parts``-th token at a time, so that each rank has some
    of each: modules that are alike, which backward recomputes as it does layers. ``labels`` are shifted already.
    """

    def __init__(self, model: Any, parts: int = PARTS):
        super().__init__()
        self.body, self.parts = model.model, nn.ModuleList(LossOfPart(model.lm_head) for _ in range(parts))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.body(input_ids=input_ids).last_hidden_state
        total = torch.zeros((), device=hidden.device)
        each = (t.unflatten(1, (-1, len(self.parts))).unbind(2) for t in (hidden, labels))
        for part, some, wanted in zip(self.parts, *each, strict=True):
            total = part(total, some, wanted)
        return total / labels.numel()


@dataclass(frozen=True)
class Long:
    """One plan, and the seconds and bytes that the run took, if there was one; ``kept_bytes`` are of the plan's, which
    the run has on the host: what enters each layer.
    """

    model: str
    gpus: int
    kernel: str
    sentence: str
    step_s: float
    peak_bytes: int
    kept_bytes: int = 0
    measured_s: float | None = None
    measured_bytes: float | None = None


def llama() -> nn.Module:
    """Llama 3 8B, on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


def qwen3(stated: dict[str, Any]) -> nn.Module:
    """The model of a published run, on the meta device."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=stated["hidden"], intermediate_size=stated["ffn_hidden"], num_hidden_layers=stated["layers"],
        num_attention_heads=stated["heads"], num_key_value_heads=stated["kv_heads"], head_dim=stated["head_dim"],
        vocab_size=stated["vocab"], max_position_embeddings=stated["sequence"], use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        return Qwen3ForCausalLM(config).bfloat16()


def plans() -> list[Long]:
    """Llama 8B on one to eight nodes, then the published run, with each kernel that the device may run."""
    found = []
    for nodes in (1, 2, 8):
        pin = {"context": 8 * nodes, "zero": 3, "recompute": "full"}
        plan = _planned(llama(), ClusterSpec.preset("dgx-h100", nodes=nodes), pin)
        found.append(_long("Llama 8B", "flash_2", plan))
    sets = {each["id"]: each for each in json.loads(ROWS_2026.read_text(encoding="utf-8"))["sets"]}
    run = sets["context-qwen3-8b-h100"]
    (row,) = run["rows"]
    pin = {"context": run["parallel"]["context"], "context_kind": "zigzag_gather", "zero": 3, "recompute": "full"}
    model = run["model"]
    kept = model["layers"] * TOKENS // run["parallel"]["context"] * model["hidden"] * 2
    for kernel in ("flash_2", "cudnn", "flash_3"):
        spec = ClusterSpec.preset("dgx-h100")
        changed = {"memory_bytes": ENOUGH_BYTES, "attention_kernel": kernel}
        spec = spec.model_copy(update={"device": spec.device.model_copy(update=changed)})
        plan = _planned(qwen3(model), spec, pin)
        found.append(_long("Qwen3 8B", kernel, plan, kept, row["step_time_s"], 1e9 * row["peak_memory_gb"]))
    return found


def _planned(model: nn.Module, cluster: ClusterSpec, pin: dict[str, Any]) -> Plan:
    ids = torch.empty(1, TOKENS, dtype=torch.int64, device="meta")
    inputs = {"input_ids": ids, "labels": ids}
    return autopar.plan(LossInParts(model), cluster, example_kwargs=inputs, pin=pin, time_limit_s=LIMIT_S)


def _long(model: str, kernel: str, plan: Plan, kept_bytes: int = 0, *measured: float) -> Long:
    predicted, gpus = plan.predicted, plan.cluster.world_size
    return Long(model, gpus, kernel, plan.sentence, predicted.step_time_s, predicted.peak_bytes, kept_bytes, *measured)
