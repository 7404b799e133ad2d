"""Resharding from memory: what ranks hold under one plan becomes what they hold under another, without files.

The boxes are those of checkpoints, and so is what is filled with them (``load``); only that they come in messages from
ranks that hold them, and from a checkpoint of the same moment where none does.
"""

from __future__ import annotations

import io
import math
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from autopar.checkpoint import files
from autopar.checkpoint.contents import MODEL, Index, same
from autopar.checkpoint.exchange import Places, Region, exchange, transfers
from autopar.checkpoint.files import Stored
from autopar.checkpoint.load import take
from autopar.checkpoint.parts import Box, Part
from autopar.checkpoint.save import held_by_rank, idle, states_of
from autopar.checkpoint.together import Ranks
from autopar.runtime.module import ParallelModule
from planner.base.errors import CheckpointError
from planner.base.formatting import in_all_bytes

PROBED = 1024
"""So many elements of every tensor are compared with a checkpoint that is to be of the same moment."""
HOLDING, RESHARDING = "holding the state of a run", "resharding what ranks hold"

Cells = Mapping[str, Sequence[Region]]
"""Name of a tensor -> the regions that a plan cuts it into."""


@dataclass(frozen=True)
class HeldState:
    """What one rank holds of a training run at one moment; made by :func:`hold`.

    The tensors are those of the module and its optimizer, not copies.

    Attributes:
        moment: a name of the moment, the same on all ranks.
        tensors: shape and dtype of every tensor, by its name in a checkpoint.
        cells: of every tensor, wherever they are.
        places: of every tensor what is here: number of the cell -> its box, and the part that it lies in.
        packed: what is no tensor.
    """

    moment: str
    tensors: Mapping[str, TensorStorageMetadata]
    cells: Cells
    places: Mapping[str, Mapping[int, tuple[Box, Tensor]]] = field(repr=False)
    packed: bytes = field(repr=False)


def hold(
    module: nn.Module,
    optimizer: Any = None,
    *,
    extra: Mapping[str, Any] | None = None,
    leaving: Collection[int] = (),
) -> HeldState:
    """Hold on to a training run while its processes form another group, for :func:`reshard`; every rank must call it.

    The module and the optimizer are let go of afterwards, and not trained on: what is held are their tensors.

    Args:
        module, optimizer, extra: as of :func:`autopar.save_checkpoint`.
        leaving: ranks that will not be there any more; what only they hold is sent to the others' hosts now.

    Raises:
        CheckpointError: there is what cannot be saved either, or ``leaving`` names all ranks, or one that is none.
    """
    ranks, found = idle(module), dict[str, Part]()

    def share() -> _Contribution:
        _check_leaving(leaving, ranks)
        parts, index = held_by_rank(module, optimizer, ranks)
        found.update(parts)
        tensors = {name: (tuple(map(Region.of, part.boxes)), _described(part)) for name, part in parts.items()}
        stage, number = 0, ranks.rank
        if isinstance(module, ParallelModule):
            stage, number = 0 if module.pipeline is None else module.pipeline.rank, module.rank
        states = states_of(extra) if ranks.rank == 0 else {}
        return _Contribution(secrets.token_hex(8), stage, tensors, None if number else index, states)

    shares = ranks.each(HOLDING, share)

    def pack() -> bytes:
        index = Index.joined(each.index for each in shares if each.index is not None)
        return files.packed({**vars(index), "extra": shares[0].extra}, "the optimizer")

    packed = ranks.each(HOLDING, pack)[0]
    cells, holders = _cells(shares)
    tensors = {name: described for each in shares for name, (_, described) in each.tensors.items()}
    places: dict[str, dict[int, tuple[Box, Tensor]]] = {}
    for name, part in found.items():
        numbers = {region: number for number, region in enumerate(cells[name])}
        here = ((numbers.get(Region.of(box)), box) for box in part.boxes)
        is_own = {number for number, held_by in enumerate(holders[name]) if ranks.rank in held_by}
        places[name] = {number: (box, part.local) for number, box in here if number is not None and number in is_own}
    state = HeldState(shares[0].moment, tensors, cells, places, packed)
    return _handed_over(state, holders, leaving, ranks)


def reshard(
    held: HeldState | None,
    module: nn.Module,
    optimizer: Any = None,
    *,
    extra: Mapping[str, Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Go on from what ranks hold, in a module of another plan, on other ranks; every rank must call it.

    It does what :func:`autopar.load_checkpoint` does, to the bit, and fails as it does.

    Args:
        held: what :func:`hold` returned on this process; ``None``: it has come since.
        module, optimizer, extra: as of :func:`autopar.load_checkpoint`.
        checkpoint: one of the same moment, from which comes what no rank holds any more.

    Returns:
        The ``extra`` that is held, with states for what had them.

    Raises:
        CheckpointError: nobody holds anything, or not of one moment; some of it nobody holds, and there is no
            checkpoint, or one of another moment; or as of :func:`autopar.load_checkpoint`.
        DiskError: of a plan with model data on disk, a file cannot be read or written.
    """
    ranks = idle(module)

    def announce() -> _HeldCells | None:
        if held is None:
            return None
        if not isinstance(held, HeldState):
            raise CheckpointError(
                f"held is of type {type(held).__name__}: give what autopar.hold returned, or None on a rank that comes"
            )
        return _HeldCells(held, {name: tuple(here) for name, here in held.places.items()})

    offers = ranks.each(RESHARDING, announce)
    stored = None if checkpoint is None else (lambda: Stored.open(checkpoint))
    return take(
        lambda: _HeldTogether(held, offers, ranks, stored and stored()), ranks, RESHARDING, module, optimizer, extra
    )


# ---- what ranks tell one another -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Contribution:
    """What a rank has when the state is held: of every tensor its regions; and, of who speaks for its stage, the rest.

    Attributes:
        moment: the name that rank 0 gives it counts.
        stage: the rank's place in the pipeline.
    """

    moment: str
    stage: int
    tensors: Mapping[str, tuple[tuple[Region, ...], TensorStorageMetadata]]
    index: Index | None
    extra: Mapping[str, Any]


class _HeldCells:
    """A rank's held state without its tensors; ``numbers``: of the cells that are there."""

    def __init__(self, held: HeldState, numbers: Mapping[str, tuple[int, ...]]):
        self.moment, self.tensors, self.cells, self.packed = held.moment, held.tensors, held.cells, held.packed
        self.numbers = numbers


def _described(part: Part) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(part.local.dtype), torch.Size(part.shape), [])


def _cells(shares: Sequence[_Contribution]) -> tuple[dict[str, list[Region]], dict[str, list[list[int]]]]:
    """The regions of every tensor, and the ranks that hold each; of what several stages have the first's."""
    stage = dict[str, int]()
    for each in shares:
        stage.update({name: min(each.stage, stage.get(name, each.stage)) for name in each.tensors})
    found: dict[str, dict[Region, list[int]]] = {}
    for rank, each in enumerate(shares):
        for name, (regions, _) in each.tensors.items():
            if each.stage == stage[name]:
                for region in regions:
                    found.setdefault(name, {}).setdefault(region, []).append(rank)
    cells = {name: list(of_tensor) for name, of_tensor in found.items()}
    return cells, {name: list(of_tensor.values()) for name, of_tensor in found.items()}


def _check_leaving(leaving: Collection[int], ranks: Ranks) -> None:
    unknown = [rank for rank in leaving if rank not in range(ranks.size)]
    if unknown or len({*leaving}) == ranks.size:
        raise CheckpointError(
            f"leaving is {sorted(leaving)}, and there are ranks 0 to {ranks.size - 1}: name some of them, not all; if "
            "all of them leave, save a checkpoint"
        )


def _handed_over(
    state: HeldState, holders: Mapping[str, Sequence[Sequence[int]]], leaving: Collection[int], ranks: Ranks
) -> HeldState:
    """The same with what only ranks have that leave, dealt out to the others."""
    staying = [rank for rank in range(ranks.size) if rank not in leaving]
    wanted: list[dict[str, list[Region]]] = [{} for _ in range(ranks.size)]
    dealt = [
        (name, number)
        for name in sorted(holders)
        for number, held_by in enumerate(holders[name])
        if all(rank in leaving for rank in held_by)
    ]
    places = {name: {**here} for name, here in state.places.items()}
    added: dict[str, list[tuple[Box, Tensor]]] = {}
    for turn, (name, number) in enumerate(dealt):
        region, target = state.cells[name][number], staying[turn % len(staying)]
        wanted[target].setdefault(name, []).append(region)
        if target == ranks.rank:
            box = Box(region.offsets, region.sizes, (0,) * len(region.sizes))
            place = box, torch.empty(region.sizes, dtype=state.tensors[name].properties.dtype)
            added.setdefault(name, []).append(place)
            places.setdefault(name, {})[number] = place
    found, _ = transfers(state.cells, holders, wanted, _spans(ranks, HOLDING))
    held = {name: [*here.values()] for name, here in state.places.items()}
    exchange(found, held, added, _dtypes(state.tensors), ranks.rank, *_way(ranks))
    return replace(state, places=places)


def _spans(ranks: Ranks, task: str) -> tuple[int, ...]:
    """Ranks of a machine, and of all: the same on every rank, all of which must call it.

    Where machines have different numbers of ranks it is what divides all of them.
    """
    here = ranks.each(task, lambda: int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size)))
    return min(math.gcd(*here), ranks.size), ranks.size


def _way(ranks: Ranks) -> tuple[ProcessGroup | None, torch.device]:
    """The group that messages take, and where they lie: on GPUs where these communicate."""
    if ranks.group is not None and "nccl" in dist.get_backend_config():
        return dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())
    return ranks.group, torch.device("cpu")


def _dtypes(tensors: Mapping[str, TensorStorageMetadata]) -> dict[str, torch.dtype]:
    return {name: described.properties.dtype for name, described in tensors.items()}


# ---- what they hold together -----------------------------------------------------------------------------------------


class _HeldTogether:
    """What all ranks hold of one moment, read as a checkpoint is.

    Args:
        held: on this rank.
        offers: of all.
        stored: a checkpoint for what nobody holds.

    Raises:
        CheckpointError: nobody holds anything, or not of one moment.
    """

    def __init__(
        self, held: HeldState | None, offers: Sequence[_HeldCells | None], ranks: Ranks, stored: Stored | None
    ):
        there = {rank: offer for rank, offer in enumerate(offers) if offer is not None}
        if not there:
            raise CheckpointError("no rank holds anything: go on with autopar.load_checkpoint on all of them")
        first_rank, first = next(iter(there.items()))
        other = next((rank for rank, offer in there.items() if offer.moment != first.moment), None)
        if other is not None:
            raise CheckpointError(
                f"ranks {first_rank} and {other} hold states of different moments: give what one call of autopar.hold "
                "returned on all of them, and None on ranks that have come since"
            )
        self._ranks, self._stored, self._packed = ranks, stored, first.packed
        aliases = {MODEL + alias: MODEL + name for alias, name in self.contents["aliases"].items()}
        names = {**{name: name for name in first.tensors}, **aliases}
        self.tensors = {name: first.tensors[saved] for name, saved in names.items()}
        self._cells = {name: first.cells[saved] for name, saved in names.items()}
        self._holders = {
            name: [
                [rank for rank, offer in there.items() if number in offer.numbers.get(saved, ())]
                for number in range(len(first.cells[saved]))
            ]
            for name, saved in names.items()
        }
        places = {} if held is None else held.places
        self._held: Places = {name: [*places.get(saved, {}).values()] for name, saved in names.items()}

    def __str__(self) -> str:
        """As errors call it."""
        return "the state that ranks hold"

    @cached_property
    def contents(self) -> Any:
        """What is held that is no tensor."""
        return torch.load(io.BytesIO(self._packed), weights_only=True)

    def names(self, kind: str) -> list[str]:
        """The tensors whose names begin so, without that: ``model.`` or ``optim.``."""
        return sorted(name.removeprefix(kind) for name in self.tensors if name.startswith(kind))

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Raise :class:`CheckpointError` where the checkpoint for what nobody holds is damaged, or of another moment;
        some of every tensor that is here is compared with it.
        """
        if self._stored is None:
            return
        self._stored.verify(share, shares)
        probes = {}
        for name, here in self._held.items():
            shape = self._stored.tensors[name].size if name in self._stored.tensors else None
            if shape != self.tensors[name].size:
                raise CheckpointError(f"{self._stored} has {name} with shape {shape}, not {self.tensors[name].size}")
            for box, local in here[:1]:
                probe = next(box.cut(PROBED))
                values, start = torch.empty(probe.sizes, dtype=local.dtype), (0,) * len(probe.sizes)
                probes[name] = [Box(probe.offsets, probe.sizes, start)], values, probe.of(local)
        self._stored.read({name: (boxes, values) for name, (boxes, values, _) in probes.items()})
        differs = [name for name, (_, saved, own) in probes.items() if not _to_the_bit(saved, own)]
        theirs = self._stored.contents
        differs += [f"{what} state" for what in ("random", "groups") if not same(theirs[what], self.contents[what])]
        if differs:
            raise CheckpointError(
                f"{self._stored} is of another moment than what ranks hold: {len(differs)} values differ, "
                f"{differs[0].removeprefix(MODEL)} the first. Save one at the moment of autopar.hold, name the ranks "
                "that leave to it (leaving=...), or go on with autopar.load_checkpoint on all ranks"
            )

    def read(self, wanted: Mapping[str, tuple[list[Box], Tensor]]) -> None:
        """Fill boxes of parts of tensors; all ranks call it.

        Raises:
            CheckpointError: some of it nobody holds, and there is no checkpoint.
        """
        regions = {name: [*map(Region.of, boxes)] for name, (boxes, _) in wanted.items()}
        everyone = self._ranks.each(RESHARDING, lambda: regions)
        found, lost = transfers(self._cells, self._holders, everyone, _spans(self._ranks, RESHARDING))
        if any(lost) and self._stored is None:
            self._refuse(lost)
        into = {name: [(box, local) for box in boxes] for name, (boxes, local) in wanted.items()}
        exchange(found, self._held, into, _dtypes(self.tensors), self._ranks.rank, *_way(self._ranks))
        if self._stored is not None:
            mine = lost[self._ranks.rank].items()
            boxes = {name: [_within(wanted[name][0], region) for region in of_tensor] for name, of_tensor in mine}
            self._stored.read({name: (of_tensor, wanted[name][1]) for name, of_tensor in boxes.items()})

    def _refuse(self, lost: Sequence[Mapping[str, Sequence[Region]]]) -> None:
        names = sorted({name for of_rank in lost for name in of_rank})
        dtypes = _dtypes(self.tensors)
        cells = {(name, region) for of_rank in lost for name in of_rank for region in of_rank[name]}
        size = sum(torch.Size(region.sizes).numel() * dtypes[name].itemsize for name, region in cells)
        raise CheckpointError(
            f"{in_all_bytes(size)} in {len(names)} tensors, {names[0].removeprefix(MODEL)} the first, are held by no "
            "rank: give a checkpoint of the same moment (checkpoint=...), name the ranks that leave to autopar.hold "
            "(leaving=...), or go on with autopar.load_checkpoint on all ranks"
        )


def _to_the_bit(one: Tensor, other: Tensor) -> bool:
    """Whether tensors hold the same bytes, also where they are not numbers."""
    views = (each.cpu().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return one.dtype == other.dtype and torch.equal(*views)


def _within(boxes: Sequence[Box], region: Region) -> Box:
    """A region as a box of the part that has these boxes, one of which it is in."""
    for box in boxes:
        if region.meet(Region.of(box)) == region:
            starts = zip(box.within, region.offsets, box.offsets, strict=True)
            within = tuple(start + at - first for start, at, first in starts)
            return Box(region.offsets, region.sizes, within, box.inside)
    raise AssertionError(f"{region} is in none of {boxes}")
