"""Published runs of mixtures of experts, and what the planner predicts for them.

As :mod:`benchmarks.planned_runs` does it: the model of Transformers is captured on the meta device, the published
configuration is pinned, and the step is the plan's own. :data:`DIFFERS` says what the run does otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.driver.trace import trace
from benchmarks.planned_runs import TRAINING, Run, priced
from benchmarks.published import ROWS
from planner.cost.cluster import ClusterSpec
from planner.cost.kernels import Attention
from planner.ir.graph import Node
from planner.search.branch_and_bound import Searched

ROWS_2026 = ROWS.with_name("published_runs_2026.json")
ON_ONE_NODE = {"data": "t", "expert": "t.dispatch", "tensor": "t.dispatch"}
"""Eight experts on the eight GPUs of a node, whole: dispatched over four pairs and within them; another node has them,
too. So Megatron lays out ranks that share experts."""
DIFFERS = (
    "Transformers' models, every eager kernel by itself; the device is given all the memory that is needed, and "
    "nothing is recomputed (the sources do not say what their runs recompute)",
    "Mixtral: its step follows from operations of products and of causal attention, three times those of a forward. "
    "Where the run has each expert is not in its row: on the eight GPUs of a node, whole, or halved over ranks of "
    "tensor parallelism eight of which span two nodes. Both are priced, with experts that get as many tokens",
    "gpt-oss: Transformers has its attention with sinks as operators that write scores down, the run as a flash "
    "kernel. *Besides* is what the kernel would take, less what these operators do",
)


def runs() -> list[Run]:
    """Every row of the sets of mixtures."""
    sets = {each["id"]: each for each in json.loads(ROWS_2026.read_text(encoding="utf-8"))["sets"]}
    makers = {"moe-mixtral-8x22b-h100": mixtral, "moe-gpt-oss-120b-h100": gpt_oss}
    return [run for which, make in makers.items() for run in make(which, sets[which])]


def mixtral(which: str, described: Mapping[str, Any]) -> list[Run]:
    """Dropless, and with as many tokens for every expert, which is what is priced, in both layouts of experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    model, stated, gpus = described["model"], described["parallel"], _gpus(described)
    h, ffn, heads, s = model["hidden"], model["ffn_hidden"], model["heads"], model["sequence"]
    attention = 2 * h**2 * (1 + model["kv_heads"] / heads) + s * h
    layer = 2 * attention + 2 * model["top_k"] * 3 * h * ffn
    flops = 3 * stated["global_batch"] * s * (model["layers"] * layer + 2 * h * model["vocab"])
    config = MixtralConfig(
        num_hidden_layers=model["layers"],
        hidden_size=h,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=model["kv_heads"],
        num_local_experts=model["experts"],
        num_experts_per_tok=model["top_k"],
        vocab_size=model["vocab"],
        max_position_embeddings=s,
        use_cache=False,
    )
    common = {
        "pipeline": stated["pipeline"],
        "schedule": "interleaved_1f1b",
        "virtual_stages": stated["virtual_stages"],
        "micro_batches": stated["global_batch"] * stated["pipeline"] * stated["tensor"] // gpus,
        "tensor": stated["tensor"],
        "sequence_parallel": True,
        "zero": 1,
        "recompute": "none",
    }
    pins = [
        {**common, "data": 2, "expert": 4, "layers": {"*.experts": ON_ONE_NODE}},
        {**common, "expert": stated["expert"]},
    ]
    traced, cluster = _traced(MixtralForCausalLM, config, stated["global_batch"], s), _cluster(described)
    found = []
    for pin in pins:
        seconds = [flops / (gpus * row["achieved_tflops_per_gpu"] * 1e12) for row in described["rows"]]
        run, _ = priced(Run(which, "", pin, seconds[0]), traced, cluster, TRAINING)
        names = (row["name"] for row in described["rows"])
        found += [replace(run, name=name, published_s=each) for name, each in zip(names, seconds, strict=True)]
    return found


def gpt_oss(which: str, described: Mapping[str, Any]) -> list[Run]:
    """The 120B model; what its scores take is beside what a flash kernel would."""
    from transformers import GptOssConfig, GptOssForCausalLM

    model, stated, gpus = described["model"], described["parallel"], _gpus(described)
    config = GptOssConfig(num_hidden_layers=model["layers"], vocab_size=model["vocab"], use_cache=False)
    wanted = {
        "hidden_size": model["hidden"], "intermediate_size": model["ffn_hidden"], "num_attention_heads": model["heads"],
        "num_key_value_heads": model["kv_heads"], "head_dim": model["head_dim"], "num_local_experts": model["experts"],
        "num_experts_per_tok": model["top_k"], "sliding_window": model["sliding_window"],
    }  # fmt: skip
    assert {name: getattr(config, name) for name in wanted} == wanted
    s, batch = model["sequence"], stated["global_batch"]
    ranks = gpus // (stated["pipeline"] * stated["tensor"])
    pin = {
        "pipeline": stated["pipeline"],
        "micro_batches": batch // ranks,
        "data": ranks // stated["expert"],
        "expert": stated["expert"],
        "zero": 1,
        "recompute": "none",
    }
    (row,) = described["rows"]
    published_s = batch * s / (row["tokens_per_s_per_gpu"] * gpus)
    traced = _traced(GptOssForCausalLM, config, batch, s)
    run, found = priced(Run(which, row["name"], pin, published_s), traced, _cluster(described), TRAINING)
    return [run if found is None else replace(run, besides={"attention": _flash_s(found, model) - _scores_s(found, s)})]


def _scores_s(found: Searched, sequence: int) -> float:
    """Seconds of a step in operators that read or make scores, on a stage of average length."""
    space = found.assignment.space

    def has_scores(node: Node) -> bool:
        tensors = (*space.graph.input_types(node), *node.results)
        return any(len(t.shape) == 4 and min(t.shape[-2:]) >= sequence for t in tensors)

    total = 0.0
    for kind in space.folded.kinds:
        for node in filter(has_scores, kind[0].block.nodes):
            work = space.work(node, found.assignment.choice(node))
            total += len(kind) * (work.forward_s + work.backward_s)
    return total / space.stages * space.mesh.micro_batches


def _flash_s(found: Searched, model: Mapping[str, int]) -> float:
    """Seconds of a step in a flash kernel instead: causal in every other layer, within the window in the rest."""
    space, s = found.assignment.space, model["sequence"]
    whole = Attention(model["heads"], s, s, model["head_dim"], causal=True)
    slid = Attention(model["heads"], s, model["sliding_window"], model["head_dim"], causal=False)
    kernels = (whole, whole.backward, slid, slid.backward)
    pair_s = sum(space.cost.compute_s(k.flops, 0, "bfloat16", kernel=k) for k in kernels)
    return pair_s * model["layers"] / 2 / space.stages * space.mesh.micro_batches


def _gpus(described: Mapping[str, Any]) -> int:
    return int(described["cluster"]["nodes"] * described["cluster"]["devices_per_node"])


def _cluster(described: Mapping[str, Any]) -> ClusterSpec:
    """With room for all that is held."""
    spec = ClusterSpec.preset("dgx-h100", nodes=described["cluster"]["nodes"])
    return spec.model_copy(update={"device": spec.device.model_copy(update={"memory_bytes": 2**40})})


def _traced(kind: type[nn.Module], config: Any, batch: int, sequence: int) -> Any:
    with torch.device("meta"):
        made = kind(config).to(torch.bfloat16).train()
        ids = torch.zeros(batch, sequence, dtype=torch.long)
    return trace(made, example_kwargs={"input_ids": ids, "labels": ids.clone()})


def summary(found: Iterable[Run]) -> str:
    """The error of every row in words."""
    told = []
    for run in found:
        more = f" ({run.error_besides:+.1%} with what the run does besides)" if run.besides else ""
        told.append(f"{run.name}: {run.error:+.1%}{more}")
    return ", ".join(told)
