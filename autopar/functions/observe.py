"""Runs a ``torch.autograd.Function`` and its backward once on shapes, to see what they save, compute and move.

Tensors without data are enough. A backward that decides on values is seen as far as it gets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autopar.graph.tensors import storage_of
from planner.base.errors import CaptureError


@dataclass(frozen=True)
class ObservedFunction:
    """What a Function does on tensors of some shapes.

    Attributes:
        results: shapes of its results.
        untrained: results that it does not differentiate.
        ungraded: operands to which its backward gives no gradient.
        saves: words for operands and results (``in0``, ``out1``) that autograd saves, and backward asks for.
        holds: those that the context holds by itself (``ctx.x = x``), or that backward does not ask for: they are never
            let go and recomputed.
        others: what it keeps besides, as pairs of an operand or result that is like it, and bytes for each of its
            elements.
        flops: of the products in its forward, for each element of the first result.
        moves: bytes that its operators read and write, forward and backward, for each byte of its operands and results.
        works: bytes of the tensors that backward makes, at their peak, but for the gradients it gives, for each byte
            of the first operand or result, whichever is larger.
        is_whole: whether backward ran to its end.
    """

    results: tuple[tuple[int, ...], ...]
    untrained: frozenset[int] = frozenset()
    ungraded: frozenset[int] = frozenset()
    saves: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    others: tuple[tuple[int, float], ...] = ()
    flops: float = 0.0
    moves: tuple[float, float] = (1.0, 2.0)
    works: float = 0.0
    is_whole: bool = True


def observe(apply: Callable[[Sequence[Tensor]], Sequence[Tensor]], inputs: Sequence[Tensor]) -> ObservedFunction:
    """What happens while ``apply`` and its backward run once on ``inputs``, some of which want gradients.

    Where backward raises, on tensors without data, it is taken to ask for all that was saved.

    Raises:
        CaptureError: it does what no plan can carry.
        Exception: whatever ``apply`` raises.
    """
    packed: list[Tensor] = []
    asked: list[Tensor] = []

    def unpack(tensor: Tensor) -> Tensor:
        asked.append(tensor)
        return tensor

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, unpack), _Meter(inputs) as forward:
        results = apply(inputs)
    shapes = tuple(tuple(t.shape) for t in results)
    flops = forward.flops / (results[0].numel() or 1)
    size = sum(map(_bytes, [*inputs, *results])) or 1
    roots, wanted = [t for t in results if t.requires_grad], [t for t in inputs if t.requires_grad]
    if not roots or not wanted:
        return ObservedFunction(shapes, flops=flops, moves=(forward.moved / size, 0.0))
    held = [t for t in pytree.tree_leaves(vars(roots[0].grad_fn)) if isinstance(t, Tensor)]
    given, is_whole = [torch.ones_like(t) for t in roots], True
    found: Sequence[Tensor | None] = [*wanted]
    with _Meter([*inputs, *results, *given, *packed, *held]) as backward:
        try:
            found = torch.autograd.grad(roots, wanted, given, allow_unused=True)
        except CaptureError:
            raise
        except Exception:  # whatever code without values to decide on raises
            is_whole = False
    gives = sum(_bytes(t) for t in found if t is not None) if is_whole else 0
    graded = iter(found)
    words = {storage_of(t): f"out{place}" for place, t in enumerate(results)}
    words |= {storage_of(t): f"in{place}" for place, t in enumerate(inputs)}
    saved = packed if asked or not is_whole else []
    saves = dict.fromkeys(words[storage_of(t)] for t in saved if storage_of(t) in words)
    every = {storage_of(t): t for t in (*packed, *held)}
    holds = [words[storage] for storage in every if storage in words and words[storage] not in saves]
    return ObservedFunction(
        shapes,
        frozenset(place for place, t in enumerate(results) if not t.requires_grad),
        frozenset(place for place, t in enumerate(inputs) if t.requires_grad and next(graded) is None),
        tuple(saves),
        tuple(holds),
        tuple(_like(t, [*inputs, *results]) for storage, t in every.items() if storage not in words),
        flops,
        (forward.moved / size, max(backward.moved / size, 0.0 if is_whole else 2.0)),
        max(0, backward.peak - gives) / max(1, _bytes(inputs[0]), _bytes(results[0])),
        is_whole,
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _like(tensor: Tensor, measures: Sequence[Tensor]) -> tuple[int, float]:
    """The measure with the most dims alike, then next in size, and the tensor's bytes for each element of that."""

    def distance(place: int) -> tuple[int, int]:
        alike = sum(a == b for a, b in zip(tensor.shape, measures[place].shape, strict=False))
        return -alike, abs(measures[place].numel() - tensor.numel())

    place = min(range(len(measures)), key=distance)
    return place, tensor.untyped_storage().nbytes() / (measures[place].numel() or 1)


class _Meter(TorchDispatchMode):
    """Counts operators that run inside.

    Attributes:
        peak: the most bytes of tensors that were made inside and were alive at one time.
        moved: bytes that were read and written.
        flops: of products, as torch counts them.
    """

    def __init__(self, before: Sequence[Tensor]):
        super().__init__()
        self.peak = self.moved = self.flops = 0
        self._before = set(map(storage_of, before))
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read, made = (
            [t for t in pytree.tree_leaves(each) if isinstance(t, Tensor)] for each in ((args, kwargs), result)
        )
        given = set(map(storage_of, read))
        for tensor in made:
            if storage_of(tensor) not in given | self._before:
                storage = tensor.untyped_storage()
                self._alive[storage_of(tensor)] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        if func._schema.is_mutable or any(storage_of(t) not in given for t in made):  # no view
            self.moved += sum(map(_bytes, [*read, *made]))
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result
