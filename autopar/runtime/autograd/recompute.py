"""Runs a block without saving for backward what can be recomputed (activation checkpointing).

The block's program returns, beside its outputs, the values to discard and those to make them from. While it runs,
autograd hands over every tensor that it saves; when it returns, those that lie in the memory of a value to discard are
let go. The first of them that backward asks for makes all of them again, in one run of a second program that holds
just the statements which that takes. Nothing else about autograd changes: gradients are the same to the last bit.

Statements that draw random numbers draw the same again. What backward needs of them beside their operands and results,
such as a mask, is no value of the program: it is let go too, and saved anew when they run again, in the same order. So
is what experts make of their rows.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._local_tensor import LocalTensor
from torch.fx import GraphModule

from autopar.runtime.autograd.saved_handle import Holder, SavedHandle
from autopar.runtime.layers import REGIONS
from autopar.runtime.spmd.prefetch_gather import PrefetchedGather
from autopar.runtime.spmd.random_state import RandomState
from autopar.runtime.spmd.run_state import RunState

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
Place = int | tuple[int, int]
"""A value to discard, by its number; or a tensor saved in a region of random numbers: the numbers of both."""


def recompute(
    program: GraphModule, again: GraphModule, *inputs: Tensor | PrefetchedGather, holder: Holder | None = None
) -> Any:
    """Run ``program`` and return its outputs.

    Args:
        program: returns (outputs, values to discard, values to keep).
        again: takes the values to keep, then all gatherings; returns the values to discard.
        inputs: what ``program`` takes: tensors, then gatherings.
        holder: is told of what is held until backward, if that may leave the device.
    """
    if not torch.is_grad_enabled():
        return program(*inputs)[0]
    cells: list[_Cell] = []
    hold: Callable[[Tensor], SavedHandle] = SavedHandle if holder is None else holder.hold
    state = _state_of(program)

    def pack(tensor: Tensor) -> _Cell:
        cells.append(_Cell(tensor, state.random.now))
        return cells[-1]

    with saved_tensors_hooks(pack, _Cell.unpack), state.random.recorded() as seeds:
        outputs, discarded, kept = program(*inputs)
    regions = _entered(program, again, seeds) if seeds else {}
    frame = _Frame(
        again, discarded, [(hold(value), value.requires_grad) for value in kept], gatherings_of(inputs), state, regions
    )
    places: dict[int, Place] = {memory_of(value): place for place, value in reversed([*enumerate(discarded)])}
    stay = {memory_of(value) for value in kept}
    seen: Counter[int] = Counter()
    for cell in cells:
        place = places.get(memory_of(cell.tensor))
        if cell.region is not None and cell.region in frame.regions:
            place = (cell.region, seen[cell.region]) if place is None else place
            seen[cell.region] += 1
        if place is not None and memory_of(cell.tensor) not in stay:
            cell.discard(frame, place)
        else:
            cell.held = hold(cell.tensor)
    cells.clear()  # what autograd has saved keeps ``pack`` alive, and would keep all of the block's with it
    return outputs


def gatherings_of(inputs: Sequence[Any]) -> tuple[PrefetchedGather, ...]:
    """Those among what a block takes."""
    return tuple(value for value in inputs if isinstance(value, PrefetchedGather))


def _state_of(program: GraphModule) -> RunState:
    """The run state of a program; one that does not name it neither draws nor asks whether it trains."""
    found = getattr(program, "state", None)
    return found if isinstance(found, RunState) else RunState(RandomState(0))


def _entered(program: GraphModule, again: GraphModule, seeds: list[int]) -> dict[int, int]:
    """The regions of random numbers that ``again`` enters: number in ``program``, seed. A statement enters one."""
    before, after = ([n.name for n in each.graph.nodes if n.target in REGIONS] for each in (program, again))
    assert len(before) == len(seeds), "every statement of a region is one"
    numbers = {name: number for number, name in enumerate(before)}
    return {numbers[name]: seeds[numbers[name]] for name in after}


class _Cell:
    """A tensor that autograd saved: itself, or where it will be found; ``region``: while drawing in that region."""

    __slots__ = ("frame", "geometry", "held", "place", "region")

    def __init__(self, tensor: Tensor, region: int | None):
        self.held: SavedHandle | None = SavedHandle(tensor)
        self.region = region
        self.frame: _Frame | None = None
        self.place: Place = -1
        self.geometry: Geometry = ((), (), 0)

    @property
    def tensor(self) -> Tensor:
        assert self.held is not None
        return self.held.read()

    def discard(self, frame: _Frame, place: Place) -> None:
        """Let go of the tensor; it will be a view of what the frame finds at ``place``."""
        self.geometry = _geometry(self.tensor)
        self.frame, self.place, self.held = frame, place, None
        frame.uses[place] += 1

    def unpack(self) -> Tensor:
        """The tensor, recomputed if need be."""
        if self.frame is None:
            return self.tensor
        size, stride, offset = self.geometry
        return self.frame.value(self.place).as_strided(size, stride, offset)


class _Frame:
    """What one run of a block keeps: values to make others from, and while backward needs them, these.

    Attributes:
        regions: seeds of the regions of random numbers that are entered again, by number.
        uses: how many saved tensors are views of what is at each place.
    """

    def __init__(
        self,
        again: GraphModule,
        discarded: Sequence[Tensor],
        kept: Sequence[tuple[SavedHandle, bool]],
        gatherings: Sequence[PrefetchedGather],
        state: RunState,
        regions: Mapping[int, int],
    ):
        self.uses: Counter[Place] = Counter()
        self.regions = regions
        self._again, self._kept = again, kept
        self._gatherings = gatherings
        self._geometries = [_geometry(value) for value in discarded]
        self._state, self._training, self._autocast = state, state.training, _autocast_now()
        self._made: dict[Place, Tensor] = {}
        self._left: Counter[Place] = Counter()

    def value(self, place: Place) -> Tensor:
        """A value that was discarded. It is dropped with its last use, and recomputed if it is used once more."""
        if place not in self._made:
            self._make()
        made = self._made[place]
        self._left[place] -= 1
        if not self._left[place]:
            del self._made[place]
        return made

    def _make(self) -> None:
        training, self._state.training = self._state.training, self._training
        try:
            with self._autocast():
                made = self._drawn() if self.regions else self._run()
        finally:
            self._state.training = training
        for place, geometry in enumerate(self._geometries):
            if _geometry(made[place]) != geometry:
                raise RuntimeError(
                    f"value {place} of a block that recomputes was recomputed with size, strides and offset "
                    f"{_geometry(made[place])}, in forward with {geometry}: what autograd saved of it would be read "
                    "wrongly. Plan with pin={'recompute': 'none'}, and report this"
                )
        self._left = self.uses.copy()
        self._made = {place: made[place] for place in self.uses}

    def _run(self) -> dict[Place, Tensor]:
        with torch.no_grad():
            return dict(enumerate(self._again(*(held.read() for held, _ in self._kept), *self._gatherings)))

    def _drawn(self) -> dict[Place, Tensor]:
        """The same with random numbers: run as in forward, so that autograd saves what it saved then."""
        found: dict[Place, Tensor] = {}
        seen: Counter[int] = Counter()
        random = self._state.random

        def pack(tensor: Tensor) -> None:
            if random.now is not None:
                place = random.now, seen[random.now]
                seen[random.now] += 1
                if place in self.uses:
                    found[place] = tensor.detach()

        kept = [held.read().detach().requires_grad_(differs) for held, differs in self._kept]
        with torch.enable_grad(), saved_tensors_hooks(pack, _none), random.replayed(self.regions.items()):
            made = self._again(*kept, *self._gatherings)
        return found | {place: value.detach() for place, value in enumerate(made)}


def _none(_: None) -> Tensor:
    raise AssertionError("nothing runs backward through what is recomputed")


def _geometry(tensor: Tensor) -> Geometry:
    """Where a tensor's elements lie in its memory."""
    return tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset())


def memory_of(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    if isinstance(tensor, LocalTensor):
        return memory_of(next(iter(tensor._local_tensors.values())))
    return tensor.untyped_storage()._cdata


def _autocast_now() -> Any:
    """A context factory that restores the autocast state of this moment, of every device type."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    states = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
    caches = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for kind, dtype in states:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=caches))
            yield

    return restored
