"""Sends boxes of tensors from ranks that hold them to ranks that want them, in messages of bounded size.

All ranks work out all transfers alike, from what everyone holds and wants, so that every message is expected.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from autopar.checkpoint.parts import PIECE_BYTES, Box
from autopar.runtime.host.disk import check_there
from autopar.runtime.host.pages import READ, WRITE
from planner.plan.moving.sources import source_of

ALIGNED = 16
"""Bytes at whose multiples values begin in a message, so that they can be read as any dtype."""

UNUSABLE = "What ranks hold cannot be put together again: load the last checkpoint, with another offload_path"


class Region(NamedTuple):
    """A box of a whole tensor: where it begins, and its sizes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(box: Box) -> Region:
        """That of a box, wherever it lies in a rank's part."""
        return Region(box.offsets, box.sizes)

    def meet(self, other: Region) -> Region | None:
        """What is in both; ``None``: nothing."""
        low = tuple(map(max, self.offsets, other.offsets))
        ends = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        sizes = tuple(min(a + n, b + m) - at for (a, n, b, m), at in zip(ends, low, strict=True))
        return Region(low, sizes) if all(size > 0 for size in sizes) else None

    def cut(self, most: int) -> Iterator[Region]:
        """Regions of at most so many elements."""
        return map(Region.of, Box(self.offsets, self.sizes, self.offsets).cut(most))


Places = Mapping[str, Sequence[tuple[Box, Tensor]]]
"""Name of a tensor -> boxes of it, each with the part that it lies in."""


class Transfer(NamedTuple):
    """A region of a tensor that goes from one rank to another, or stays with one."""

    name: str
    source: int
    target: int
    region: Region


def transfers(
    cells: Mapping[str, Sequence[Region]],
    holders: Mapping[str, Sequence[Sequence[int]]],
    wanted: Sequence[Mapping[str, Sequence[Region]]],
    spans: Sequence[int],
) -> tuple[list[Transfer], list[dict[str, list[Region]]]]:
    """Who sends what to whom.

    Args:
        cells: of every tensor the regions that it was cut into, which do not overlap.
        holders: of every cell the ranks that hold it.
        wanted: by rank what it is to hold.
        spans: ranks in one unit of each level of the network, innermost first.

    Returns:
        The transfers, in an order that is the same on all ranks, and by rank what it wants and nobody holds.
    """
    found: list[Transfer] = []
    lost: list[dict[str, list[Region]]] = [{} for _ in wanted]
    for name in sorted({name for of_rank in wanted for name in of_rank}):
        for rank, of_rank in enumerate(wanted):
            for want in of_rank.get(name, ()):
                for cell, held_by in zip(cells[name], holders[name], strict=True):
                    region = want.meet(cell)
                    if region is None:
                        continue
                    if held_by:
                        found.append(Transfer(name, source_of(rank, held_by, spans), rank, region))
                    else:
                        lost[rank].setdefault(name, []).append(region)
    return found, lost


def exchange(
    found: Iterable[Transfer],
    held: Places,
    wanted: Places,
    dtypes: Mapping[str, torch.dtype],
    rank: int,
    group: ProcessGroup | None,
    device: torch.device,
) -> int:
    """Carry transfers out; every rank of the group must call it with the same ones.

    Args:
        held, wanted: of this rank.
        dtypes: in which tensors are held; where they are wanted in another, values are cast.
        group: whose ranks they are; ``None``: this process is alone.
        device: where messages are.

    Returns:
        Bytes that this rank sent.
    """
    if group is not None:  # torch leaves undefined what comes of messages that only some ranks of a new group send
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    sent_bytes = 0
    for each in _rounds(found, dtypes):
        outgoing, incoming = defaultdict[int, list[Transfer]](list), defaultdict[int, list[Transfer]](list)
        for transfer in each:
            if transfer.source == transfer.target == rank:
                _written(wanted, transfer).copy_(_read(held, transfer))
            elif transfer.source == rank:
                outgoing[transfer.target].append(transfer)
            elif transfer.target == rank:
                incoming[transfer.source].append(transfer)
        letters = {peer: _Letter(of_peer, dtypes, device) for peer, of_peer in incoming.items()}
        ops = [dist.P2POp(dist.irecv, letter.bytes, group=group, group_peer=peer) for peer, letter in letters.items()]
        for peer, of_peer in outgoing.items():
            letter = _Letter(of_peer, dtypes, device)
            for transfer, values in letter:
                values.copy_(_read(held, transfer))
                sent_bytes += values.nbytes
            ops.append(dist.P2POp(dist.isend, letter.bytes, group=group, group_peer=peer))
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        for letter in letters.values():
            for transfer, values in letter:
                _written(wanted, transfer).copy_(values)
    return sent_bytes


class _Letter:
    """A message of several regions, and the values of each as a view of it."""

    def __init__(self, found: Sequence[Transfer], dtypes: Mapping[str, torch.dtype], device: torch.device):
        self._found, self._dtypes = found, dtypes
        size = sum(_aligned(_bytes(transfer, dtypes)) for transfer in found)
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)

    def __iter__(self) -> Iterator[tuple[Transfer, Tensor]]:
        at = 0
        for transfer in self._found:
            size = _bytes(transfer, self._dtypes)
            yield transfer, self.bytes[at : at + size].view(self._dtypes[transfer.name]).view(transfer.region.sizes)
            at += _aligned(size)


def _bytes(transfer: Transfer, dtypes: Mapping[str, torch.dtype]) -> int:
    return math.prod(transfer.region.sizes) * dtypes[transfer.name].itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _rounds(found: Iterable[Transfer], dtypes: Mapping[str, torch.dtype]) -> Iterator[list[Transfer]]:
    """Transfers of which no rank sends or receives more at once than a piece is large."""
    now: list[Transfer] = []
    load = defaultdict[tuple[str, int], int](int)
    for whole in found:
        most = max(1, PIECE_BYTES // dtypes[whole.name].itemsize)
        for transfer in (whole._replace(region=region) for region in whole.region.cut(most)):
            size, ends = _bytes(transfer, dtypes), (("from", transfer.source), ("to", transfer.target))
            if any(load[end] and load[end] + size > PIECE_BYTES for end in ends):
                yield now
                now, load = [], defaultdict(int)
            now.append(transfer)
            for end in ends:
                load[end] += size
    yield now


def _read(places: Places, transfer: Transfer) -> Tensor:
    found = _inside(places, transfer)
    check_there(found, READ, transfer.name, UNUSABLE)
    return found


def _written(places: Places, transfer: Transfer) -> Tensor:
    found = _inside(places, transfer)
    check_there(found, WRITE, transfer.name, UNUSABLE)
    return found


def _inside(places: Places, transfer: Transfer) -> Tensor:
    """The region of a transfer as a view of the part that it lies in."""
    offsets, sizes = transfer.region
    for box, local in places[transfer.name]:
        starts = [at - first for at, first in zip(offsets, box.offsets, strict=True)]
        fits = (0 <= at <= whole - size for at, size, whole in zip(starts, sizes, box.sizes, strict=True))
        if all(fits):
            view = box.of(local)
            for dim, (at, size) in enumerate(zip(starts, sizes, strict=True)):
                view = view.narrow(dim, at, size)
            return view
    raise AssertionError(f"{transfer} is in none of the parts of this rank")
