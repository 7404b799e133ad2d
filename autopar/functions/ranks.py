"""Applies a Function for one rank after another, where one process simulates all ranks.

The tensors of a simulation stand for those of all ranks at once, which code that torch cannot look into does not take.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._local_tensor import LocalTensor
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode


def for_each_rank_no_grad(run: Callable[..., tuple[Tensor, ...]], *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """As :func:`for_each_rank`, where gradients are found otherwise: in a Function, which may write to its tensors."""
    simulated = next((t for t in tensors if isinstance(t, LocalTensor)), None)
    if simulated is None:
        return run(*tensors)
    found = {}
    for rank in simulated._local_tensors:
        with _disable_current_modes(), torch.no_grad():
            found[rank] = run(*(None if t is None else _of(t, rank) for t in tensors))
    return tuple(_together({rank: results[at] for rank, results in found.items()}) for at in _places(found))


def for_each_rank(run: Callable[..., Any], *tensors: Tensor | int | None) -> Any:
    """``run(*tensors)``, a tensor or several; where one process simulates all ranks, on those of each rank, and all are
    tensors.
    """
    given = [t for t in tensors if t is not None]
    if not any(hasattr(t, "_local_tensors") for t in given):
        return run(*tensors)

    several: list[bool] = []

    def of_rank(own: Sequence[Tensor]) -> list[Tensor]:
        rest = iter(own)
        found = run(*(None if t is None else next(rest) for t in tensors))
        several.append(isinstance(found, tuple))
        return [*found] if several[-1] else [found]

    found = EachRank.apply(of_rank, *given)
    return found if several[0] else found[0]


class EachRank(Function):
    """``apply(run, *tensors)``: what ``run`` gives on each rank, and its gradients.

    What autograd saves on each rank is saved here as one tensor of all ranks, so that it is let go, and asked for, when
    that of a rank would be.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[[Sequence[Tensor]], list[Tensor]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ranks = next(t for t in tensors if isinstance(t, LocalTensor))._local_tensors.keys()
        ctx.saved, ctx.inputs, ctx.results = _Saved(), {}, {}
        for rank in ranks:
            with _disable_current_modes(), torch.enable_grad(), ctx.saved.by(rank):
                ctx.inputs[rank] = [_of(t, rank).detach().requires_grad_(t.is_floating_point()) for t in tensors]
                ctx.results[rank] = run(ctx.inputs[rank])
        ctx.save_for_backward(*ctx.saved.together())
        found = [_together({rank: results[at] for rank, results in ctx.results.items()}) for at in _places(ctx.results)]
        trained = [result.requires_grad for result in next(iter(ctx.results.values()))]
        ctx.mark_non_differentiable(*(t for t, is_trained in zip(found, trained, strict=True) if not is_trained))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found: dict[int, Sequence[Tensor | None]] = {}
        for rank, results in ctx.results.items():
            with _disable_current_modes() as modes, ctx.saved.found(lambda: ctx.saved_tensors, modes):
                pairs = [(r, _of(g, rank)) for r, g in zip(results, gradients, strict=True) if r.requires_grad]
                wanted = [t for t in ctx.inputs[rank] if t.requires_grad]
                roots, given = [r for r, _ in pairs], [g for _, g in pairs]
                asked = iter(torch.autograd.grad(roots, wanted, given, retain_graph=True, allow_unused=True))
                found[rank] = [next(asked) if t.requires_grad else None for t in ctx.inputs[rank]]
        together = ({rank: each[at] for rank, each in found.items()} for at in _places(found))
        return None, *(None if any(part is None for part in each.values()) else _together(each) for each in together)


class _Saved:
    """What autograd saves on each rank, and gets back when it asks for it."""

    def __init__(self) -> None:
        self._by_rank: dict[int, list[Tensor]] = {}
        self._find: Callable[[], tuple[Tensor, ...]] | None = None
        self._found: tuple[Tensor, ...] | None = None

    def by(self, rank: int) -> contextlib.AbstractContextManager[None]:
        """Inside, what autograd saves is of a rank."""
        own = self._by_rank.setdefault(rank, [])

        def pack(tensor: Tensor) -> tuple[int, int]:
            own.append(tensor.detach())
            return rank, len(own) - 1

        return saved_tensors_hooks(pack, self._unpack)

    def together(self) -> list[Tensor]:
        """What was saved, of all ranks; it is not held any longer."""
        by_rank, self._by_rank = self._by_rank, {}
        return [_together(dict(zip(by_rank, each, strict=True))) for each in zip(*by_rank.values(), strict=True)]

    @contextlib.contextmanager
    def found(self, find: Callable[[], tuple[Tensor, ...]], modes: Sequence[Any]) -> Iterator[None]:
        """Inside, what autograd asks for is what ``find`` gives, which runs in ``modes``, innermost first."""

        def in_modes() -> tuple[Tensor, ...]:
            for mode in reversed(modes):
                _push_mode(mode)
            try:
                return find()
            finally:
                for _ in modes:
                    _pop_mode()

        self._find = in_modes
        try:
            yield
        finally:
            self._find = None

    def _unpack(self, place: tuple[int, int]) -> Tensor:
        rank, number = place
        if self._found is None:
            assert self._find is not None, "autograd asks in backward"
            self._found = self._find()
        return _of(self._found[number], rank)


def _of(tensor: Tensor, rank: int) -> Tensor:
    return tensor._local_tensors[rank] if isinstance(tensor, LocalTensor) else tensor


def _together(parts: Any) -> Tensor:
    with torch.no_grad():
        return LocalTensor({rank: part.detach() for rank, part in parts.items()})


def _places(found: Any) -> range:
    return range(len(next(iter(found.values()))))
