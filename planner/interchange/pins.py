"""Turns a description into the pins that hold a plan to it, so that our own model says what it takes."""

from __future__ import annotations

from typing import Any

from planner.base.errors import ConfigError
from planner.interchange.parallelism import Parallelism

FACTORS = {"column": "n", "gathered column": "n", "row": "k", "split row": "k"}


def pins_of(d: Parallelism) -> dict[str, Any]:
    """The pins of a description that is resolved; what neither it nor the format says is left to the search.

    Raises:
        ConfigError: experts are shared in a way that no pins say.
    """
    on_tensor = d.expert > 1 and d.tensor > 1 and d.expert_tensor == 1 and d.expert % d.tensor == 0
    expert = d.expert // d.tensor if on_tensor else d.expert
    if d.data % expert:
        raise ConfigError(
            f"{d.expert} ranks that share experts are not among {d.data} data-parallel ones alone: not priced here"
        )
    found: dict[str, Any] = {"data": d.data // expert, "pipeline": d.pipeline, "micro_batches": d.micro_batches}
    found |= {name: getattr(d, name) for name in ("replicate", "tensor", "context") if getattr(d, name) > 1}
    if expert > 1:
        found["expert"] = expert
    if on_tensor:
        found["expert_tensor"] = 1
    elif d.expert_tensor > 1 and d.tensor == 1:
        found |= {"expert_tensor": d.expert_tensor, "data": found["data"] // d.expert_tensor}
    if d.tensor > 1:
        found["sequence_parallel"] = d.sequence_parallel
    if d.context > 1 and d.context_kind:
        found["context_kind"] = d.context_kind
    if d.data * d.context > 1:
        found["zero"] = d.zero
    if d.pipeline > 1:
        found |= {"schedule": d.schedule, "virtual_stages": d.virtual_stages}
    if d.recompute_layers is None:
        found["recompute"] = d.recompute
    if d.offload != "none":
        found["offload"] = d.offload
    if d.tensor > 1 and (layers := {path: FACTORS[kind] for path, kind in d.products.items() if kind in FACTORS}):
        found["layers"] = {f"*{path}": {"tensor": factor} for path, factor in layers.items()}
    return found
