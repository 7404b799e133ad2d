"""Turns a description into the pins that hold a plan to it, so that our own model says what it takes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from planner.base.errors import ConfigError
from planner.interchange.parallelism import NORMS, WORDS, Parallelism, told

FACTORS = {"column": "n", "gathered column": "n", "row": "k", "split row": "k"}


def unpinned(d: Parallelism, stored: str) -> tuple[str, ...]:
    """What a description says, or its tool decides, that no pins hold a plan to: the search decides it, or the model.

    Args:
        stored: dtype of the parameters of the model that is planned.
    """

    def names() -> Iterator[str]:
        if d.pipeline > 1:
            yield "stage_layers"
        if d.tensor > 1 and not (d.products and all(kind in FACTORS for kind in d.products.values())):
            yield "products"
        if d.recompute_layers is not None:
            yield "recompute_layers"
        if d.recompute_modules not in ((), (NORMS,)):
            yield "recompute_modules"
        if d.stored not in ("", stored):
            yield "stored"

    return tuple(in_words(d, name) for name in names())


def in_words(d: Parallelism, name: str) -> str:
    """A field of a description, and what it says; of sharded layers, that they are."""
    return WORDS[name] if name == "products" else f"{WORDS[name]} ({told(name, getattr(d, name))})"


def pins_of(d: Parallelism, modules: Collection[str] = ()) -> dict[str, Any]:
    """The pins of a description that is resolved; :func:`unpinned` says what is left to the search.

    Args:
        modules: of the model, all that have operators of their own.

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
    found["offload"] = d.offload
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
    if d.recompute_modules == (NORMS,):
        kept = [path for path in modules if "norm" not in path.rpartition(".")[2]]
        found["recompute"] = {"keep": kept} if len(kept) < len(modules) else "none"
    elif d.recompute_layers is None and not d.recompute_modules:
        found["recompute"] = d.recompute
    if d.tensor > 1 and (layers := {path: FACTORS[kind] for path, kind in d.products.items() if kind in FACTORS}):
        found["layers"] = {f"*{path}": {"tensor": factor} for path, factor in layers.items()}
    return found
