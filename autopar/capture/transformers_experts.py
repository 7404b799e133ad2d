"""While a model of Transformers is captured, its experts are one operator, whatever ``experts_implementation`` says.

Experts of Transformers ask a table for the function that runs them. While a model is captured that function is ours,
under every name of the table and under ``eager``, a loop that reads values. What lies between the products of an
expert is the model's own code: it is compared on numbers with what the operator can do. Experts that do something else
run as the configuration says.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from autopar.operators.expert import ACTIVATIONS, SWISH, Expert, Layout
from autopar.operators.experts import experts

TABLE = "transformers.integrations.moe"
"""The module of the table; where it is not imported, no model has experts of Transformers."""


Function = Callable[..., Tensor]
"""What runs experts: a function of a module, its tokens, the experts chosen for each and their weights."""


def experts_whole() -> contextlib.AbstractContextManager[None]:
    """While inside, experts of Transformers call :func:`autopar.experts` where it computes the same."""
    return _instead(_operator_or)


def experts_in_loops() -> contextlib.AbstractContextManager[None]:
    """While inside, what :func:`autopar.experts` would run is the loop of its class, which computes in every dtype."""
    return _instead(_loop_or)


@contextlib.contextmanager
def _instead(change: Callable[[Function | None], Function]) -> Iterator[None]:
    """While inside, the table has other functions; that of the loop is ``None``."""
    table = getattr(sys.modules.get(TABLE), "ALL_EXPERTS_FUNCTIONS", None)
    if table is None:
        yield
        return
    before = dict(table._local_mapping)
    named = {name: table[name] for name in table}
    table._local_mapping.update({name: change(named.get(name)) for name in (*named, "eager", None)})
    try:
        yield
    finally:
        table._local_mapping.clear()
        table._local_mapping.update(before)


def _looped(module: nn.Module, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    return inspect.unwrap(type(module).forward)(module, x, indices, weights)


def _loop_or(function: Function | None) -> Function:
    """What runs experts by their loop, in place of a function of the table."""

    def run(module: nn.Module, *tensors: Tensor) -> Tensor:
        found = function if function is not None and expert_of(module) is None else _looped
        return found(module, *tensors)

    return run


def _operator_or(function: Function | None) -> Function:
    """What runs experts in place of a function of the table, or of the loop that their class has (``None``)."""

    def run(module: nn.Module, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        expert = expert_of(module)
        if expert is None:
            return (function or _looped)(module, x, indices, weights)
        first = "up_proj" if expert.gate == "none" else "gate_up_proj"
        names = (first, "down_proj", *((f"{first}_bias", "down_proj_bias") if module.has_bias else ()))
        return experts(
            x,
            indices,
            weights,
            *(getattr(module, name) for name in names),
            activation=expert.activation,
            gate=expert.gate,
            alpha=expert.alpha,
            limit=expert.limit,
            offset=expert.offset,
            transposed=expert.transposed,
        )

    return run


def expert_of(module: Any) -> Expert | None:
    """What experts of Transformers compute, in terms of the operator; ``None`` if it cannot, or if two forms of it do
    on all numbers that are tried.
    """
    if getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False):
        return None
    has_gate = getattr(module, "has_gate", True)
    between = module._apply_gate if has_gate else module.act_fn
    gates: tuple[Layout, ...] = ("halves", "pairs") if has_gate else ("none",)
    plain = [Expert(gate=gate, transposed=module.is_transposed) for gate in gates]
    numbers = {key: float(abs(value)) for key, value in vars(module).items() if type(value) in (int, float) and value}
    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng([]):
        probe = _probe(sorted(filter(math.isfinite, numbers.values())))
        # What it may be off by for rounding, which rows of small numbers tell from any other alpha or activation.
        tolerance = 1e-13 * (1 + probe.abs().amax(-1, keepdim=True)).square()
        try:
            wanted = between(probe)
        except Exception:  # it takes more than the numbers of a row: parameters without data, other shapes
            return None
        fitting = [
            found
            for found in _candidates(plain, numbers)
            if (got := found.between(probe)).shape == wanted.shape and bool(((got - wanted).abs() <= tolerance).all())
        ]
    return fitting[0] if len(fitting) == 1 else None


def _probe(numbers: Sequence[float]) -> Tensor:
    """Rows from 1/4 to a million, and rows with values on both sides of each of ``numbers``: where one is a limit, its
    clamp shows.
    """
    scales = torch.tensor([*(4.0**power for power in range(-1, 11)), *numbers], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    return scales.unsqueeze(-1) * torch.randn(len(scales), 64, dtype=torch.float64, generator=generator)


def _candidates(plain: Sequence[Expert], numbers: Mapping[str, float]) -> Iterator[Expert]:
    """What experts may compute, no two alike; a number may be what a module calls alpha, or limit, if its name ends
    so.
    """
    alphas, limits = ({n for key, n in numbers.items() if key.endswith(name)} for name in ("alpha", "limit"))
    acts = [replace(each, activation=name) for each in plain for name in ACTIVATIONS]
    acts += [replace(each, activation=SWISH, alpha=alpha) for each in plain for alpha in (alphas | {1.702}) - {1.0}]
    for act in acts:
        for limit in {0.0} | limits:
            yield from (replace(act, limit=limit, offset=offset) for offset in ((0.0, 1.0) if act.made > 1 else (0.0,)))
