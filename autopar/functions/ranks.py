"""Ranks: a Function applied rank by rank, where all ranks are simulated in one process.

The tensors of a simulation stand for those of all ranks at once, which code that torch cannot look into does not take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed._local_tensor import LocalTensor
from torch.utils._python_dispatch import _disable_current_modes


class EachRank(Function):
    """``apply(run, *tensors)``: what ``run`` gives on each rank, and its gradients."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Sequence[Tensor]], list[Tensor]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ranks = next(t for t in tensors if isinstance(t, LocalTensor))._local_tensors.keys()
        ctx.inputs, ctx.results = {}, {}
        for rank in ranks:
            with _disable_current_modes(), torch.enable_grad():
                ctx.inputs[rank] = [_of(t, rank).detach().requires_grad_(t.is_floating_point()) for t in tensors]
                ctx.results[rank] = run(ctx.inputs[rank])
        found = [_together({rank: results[at] for rank, results in ctx.results.items()}) for at in _places(ctx.results)]
        trained = [result.requires_grad for result in next(iter(ctx.results.values()))]
        ctx.mark_non_differentiable(*(t for t, is_trained in zip(found, trained, strict=True) if not is_trained))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found: dict[int, Sequence[Tensor | None]] = {}
        for rank, results in ctx.results.items():
            with _disable_current_modes():
                pairs = [(r, _of(g, rank)) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
                wanted = [t for t in ctx.inputs[rank] if t.requires_grad]
                roots, given = [r for r, _ in pairs], [g for _, g in pairs]
                asked = iter(torch.autograd.grad(roots, wanted, given, allow_unused=True))
                found[rank] = [next(asked) if t.requires_grad else None for t in ctx.inputs[rank]]
        together = ({rank: each[at] for rank, each in found.items()} for at in _places(found))
        return None, *(None if any(part is None for part in each.values()) else _together(each) for each in together)


def _of(tensor: Tensor, rank: int) -> Tensor:
    return tensor._local_tensors[rank] if isinstance(tensor, LocalTensor) else tensor


def _together(parts: Any) -> Tensor:
    with torch.no_grad():
        return LocalTensor({rank: part.detach() for rank, part in parts.items()})


def _places(found: Any) -> range:
    return range(len(next(iter(found.values()))))
