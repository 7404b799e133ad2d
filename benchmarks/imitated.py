"""Published runs of modern stacks, imitated: a plan on a cluster whose ``software`` says what those stacks do.

As :mod:`benchmarks.planned_runs` does it, but with compiled layers, gathers and tensor parallelism beside products, and
float8 where the run had them, by name. :data:`HELD_OUT` are runs that nothing was looked at for: as the others should
be, so should they.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch

from autopar.driver.trace import Traced, trace
from benchmarks.planned_runs import TRAINING, Run, copies_s, made_again_s, priced
from benchmarks.published import llama_cluster
from planner.cost.software import Software

FULL, BY_OPERATOR = "full", "by operator"
EAGER = {"overlaps": ["gathers"]}
COMPILED = {"compile": "layers", "overlaps": ["gathers"]}
ASYNC = {"compile": "layers", "overlaps": ["gathers", "tensor"]}
SIZES = {"Llama 3 8B": (32, 4096, 14336, 32), "Llama 3 70B": (80, 8192, 28672, 64), "Qwen3 32B": (64, 5120, 25600, 64)}
"""Layers, width, hidden features of the perceptron, and heads."""
NAMES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
DIFFERS = (
    "All devices are the torchtitan team's H100 with 96 GB at 2.4 TB/s and 500 W, given all the memory that is needed. "
    "Transformers' models, which repeat heads of keys as the runs do; torchtitan compiles each layer by itself. *By "
    "operator* recomputation also makes every other product again, and plans none: *besides* has these, and the copies "
    "of FSDP2's buffers. pytorch #149990 does not say its local batch: that of the team's later runs is taken. Peaks "
    "are of plans whose blocks save what eager ones do"
)


@dataclass(frozen=True)
class Published:
    """A row of a source.

    Attributes:
        sharded, tensor: ranks of FSDP, and of tensor parallelism with a sharded sequence.
        batch: samples of a data rank.
        software: what the stack does, as a cluster file says it.
    """

    model: str
    sharded: int
    tensor: int
    batch: int
    sequence: int
    recompute: str
    software: Mapping[str, Any]
    tokens_per_s: float
    gib: float | None = None

    @property
    def name(self) -> str:
        tensor = f" x TP {self.tensor}" if self.tensor > 1 else ""
        return f"{self.model}, FSDP {self.sharded}{tensor}, batch {self.batch}"


RUNS = (
    Published("Llama 3 8B", 8, 1, 2, 8192, BY_OPERATOR, EAGER, 5762, 82.4),
    Published("Llama 3 8B", 8, 1, 2, 8192, BY_OPERATOR, COMPILED, 6667, 77.0),
    Published("Llama 3 8B", 128, 1, 2, 8192, BY_OPERATOR, EAGER, 5605, 67.0),
    Published("Llama 3 8B", 128, 1, 2, 8192, BY_OPERATOR, COMPILED, 6514, 62.0),
    Published("Llama 3 70B", 16, 8, 16, 8192, FULL, COMPILED, 598, 71.51e9 / 2**30),
    Published("Llama 3 70B", 16, 8, 16, 8192, FULL, ASYNC, 673, 71.08e9 / 2**30),
    Published("Qwen3 32B", 4, 8, 16, 4096, FULL, EAGER, 876, 43.45),
    Published("Qwen3 32B", 4, 8, 32, 4096, FULL, EAGER, 883, 70.79),
    Published("Qwen3 32B", 8, 8, 32, 4096, FULL, EAGER, 873, 63.27),
)
"""``../shared/validation``: torchtitan's benchmarks of December 2024, pytorch #149990, and torchtitan #1690."""
FLOAT8 = {"float8": True}
HELD_OUT = (
    Published("Llama 3 70B", 32, 8, 16, 8192, FULL, COMPILED, 597.3),
    Published("Llama 3 70B", 32, 8, 16, 8192, FULL, ASYNC, 652.4),
    Published("Llama 3 70B", 32, 8, 16, 8192, FULL, COMPILED | FLOAT8, 809.8),
    Published("Llama 3 70B", 32, 8, 16, 8192, FULL, ASYNC | FLOAT8, 942.4),
    Published("Llama 3 8B", 8, 8, 12, 8192, BY_OPERATOR, COMPILED, 4378),
    Published("Llama 3 8B", 8, 8, 12, 8192, BY_OPERATOR, ASYNC, 4809.4),
    Published("Llama 3 8B", 8, 1, 2, 8192, BY_OPERATOR, COMPILED | FLOAT8, 8532, 76.8),
    Published("Llama 3 8B", 128, 1, 2, 8192, BY_OPERATOR, COMPILED | FLOAT8, 8380, 61.8),
)
"""pytorch/torchtitan, ``benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md`` (bfloat16 and tensorwise float8), and
the float8 rows of ``benchmarks/llama3_h100_202412_torchtitan.md``."""


def runs(rows: Iterable[Published]) -> list[Run]:
    """The plan of every row."""
    traced: dict[object, Traced] = {}
    found = []
    for row in rows:
        key = (row.model, row.sharded * row.batch, row.sequence)
        if key not in traced:
            traced.clear()  # one at a time is enough to hold
            traced[key] = _traced(*key)
        found.append(_planned(row, traced[key]))
    return found


def _planned(row: Published, traced: Traced) -> Run:
    pin: dict[str, Any] = {"data": row.sharded, "zero": 3}
    pin["recompute"] = "selective" if row.recompute == BY_OPERATOR else "full"
    if row.tensor > 1:
        pin |= {"tensor": row.tensor, "sequence_parallel": True}
    published_s = row.batch * row.sequence / (row.tokens_per_s * row.tensor)
    spec = llama_cluster(row.sharded * row.tensor)
    roomy = spec.device.model_copy(update={"memory_bytes": 2**40})
    cluster = spec.model_copy(update={"device": roomy, "software": Software(**row.software)})
    run, found = priced(Run("imitated", row.name, pin, published_s, row.gib), traced, cluster, TRAINING)
    if found is None:
        return run
    left = {"copies": copies_s(found) / row.tensor}
    if row.recompute == BY_OPERATOR:
        left["made again"] = made_again_s(found)
    return replace(run, besides=left)


def _traced(model: str, batch: int, sequence: int) -> Traced:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = dict(zip(NAMES, SIZES[model], strict=True))
    common = {**sizes, "num_key_value_heads": 8, "use_cache": False, "max_position_embeddings": sequence}
    with torch.device("meta"):
        if model == "Qwen3 32B":
            made = Qwen3ForCausalLM(Qwen3Config(head_dim=128, vocab_size=151936, **common))
        else:
            made = LlamaForCausalLM(LlamaConfig(vocab_size=128256, **common))
        made = made.to(torch.bfloat16).train()
        ids = torch.zeros(batch, sequence, dtype=torch.long)
    # Capture lets attention share heads of keys; these stacks repeat them.
    with patch("autopar.capture.flatten.grouped_heads", lambda program: program):
        return trace(made, example_kwargs={"input_ids": ids, "labels": ids.clone()})


def table(rows: Iterable[Published], found: Iterable[Run]) -> list[dict[str, str]]:
    """Rows for people."""
    told = []
    for row, run in zip(rows, found, strict=True):
        with_it = run.predicted_s + sum(run.besides.values())
        shares = {use: seconds / with_it for use, seconds in run.seconds.items()}
        told.append(
            {
                "run": row.name,
                "recompute": row.recompute,
                "software": ", ".join(_words(row.software)),
                "published s": f"{run.published_s:.2f}",
                "predicted s": f"{with_it:.2f}",
                "error": f"{run.error_besides:+.1%}",
                "of which": ", ".join(f"{use} {share:.0%}" for use, share in shares.items() if share > 0.005),
                "besides s": ", ".join(f"{what} {s:.2f}" for what, s in run.besides.items()),
                "peak GiB": f"{run.gib:.1f}",
                "published GiB": "" if run.published_gib is None else f"{run.published_gib:.1f}",
            }
        )
    return told


def _words(software: Mapping[str, Any]) -> Iterable[str]:
    yield from (["compiled layers"] if software.get("compile") else ["eager"])
    yield from (f"{each} overlapped" for each in software.get("overlaps", ()))
    yield from (["float8"] if software.get("float8") else [])


def errors(found: Iterable[Run]) -> str:
    """Mean and worst, in words."""
    sizes = [abs(run.error_besides) for run in found]
    return f"mean error {math.fsum(sizes) / len(sizes):.1%}, worst {max(sizes):.1%}"
