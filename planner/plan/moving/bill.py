"""The bill of moving: bytes that every rank keeps, sends, receives and reads to go on under another plan, and seconds.

Nothing is priced but what moves: parameters, their optimizer state with masters, and buffers. Gradients do not live
from step to step. Messages of all ranks are under way at once, so the rank and link with most to carry decides; a link
carries both directions at once, and a level of the network as much per device as the cluster says.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from planner.base.errors import InputError, PlanError
from planner.base.formatting import in_bytes, in_seconds
from planner.cost.cluster import ClusterSpec
from planner.ir.elements import DisjointParts, Elements, count, elements_of
from planner.ir.graph import ITEM_BYTES, Ref
from planner.ir.layout import Layout, Mesh, over_micro_batches
from planner.plan.document.document import WITHOUT_GRAPH
from planner.plan.further_stages import homes
from planner.plan.moving.sources import level_between, source_of
from planner.plan.plan import Plan


@dataclass(frozen=True)
class RankBill:
    """What one rank of the new plan keeps, and what it gets from where, in bytes.

    Attributes:
        was: the rank that it was; ``None``: it comes.
        kept_bytes: of what it holds, what it held.
        sent_bytes, received_bytes: by the level of the network that they cross.
        lost_bytes: of what it holds, what no rank that stays held: only a checkpoint has it.
    """

    rank: int
    was: int | None
    kept_bytes: int
    sent_bytes: Mapping[str, int]
    received_bytes: Mapping[str, int]
    lost_bytes: int

    @property
    def held_bytes(self) -> int:
        """What it holds afterwards."""
        return self.kept_bytes + sum(self.received_bytes.values()) + self.lost_bytes

    @property
    def carried_bytes(self) -> int:
        """What it sends and receives."""
        return sum(self.sent_bytes.values()) + sum(self.received_bytes.values())


@dataclass(frozen=True)
class MovingBill:
    """What moving from one plan to another takes.

    Attributes:
        state_bytes: of the whole model's parameters, optimizer state and buffers, once.
        ranks: of the new plan.
        message_s: of what ranks send one another.
        copy_s: of what is put together in their memory.
        read_s: of what only a checkpoint has; ``None``: there is some, and the cluster does not say how fast its disk
            is.
        checkpoint_s: of saving all under the old plan and loading it under the new one instead; ``None`` likewise.
    """

    state_bytes: int
    ranks: tuple[RankBill, ...]
    message_s: float
    copy_s: float
    read_s: float | None
    checkpoint_s: float | None

    @property
    def seconds(self) -> float | None:
        """What it takes in all; ``None``: what is to be read is not known to take how long."""
        return None if self.read_s is None else self.message_s + self.copy_s + self.read_s

    @property
    def kept_bytes(self) -> int:
        """What stays where it is, of all ranks together."""
        return sum(each.kept_bytes for each in self.ranks)

    @property
    def received_bytes(self) -> dict[str, int]:
        """What is sent, of all ranks together, by the level of the network that it crosses."""
        return dict(sum((Counter(each.received_bytes) for each in self.ranks), Counter[str]()))

    @property
    def lost_bytes(self) -> int:
        """What only a checkpoint has, of all ranks together."""
        return sum(each.lost_bytes for each in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, with what is worked out of it."""
        sums = {"seconds": self.seconds, "kept_bytes": self.kept_bytes, "lost_bytes": self.lost_bytes}
        return {**sums, "received_bytes": self.received_bytes, **asdict(self), "ranks": [*map(asdict, self.ranks)]}

    def __str__(self) -> str:
        """A line for all of it, and one for ranks that follow one another and do the same."""
        alike = itertools.groupby(self.ranks, _does)
        return "\n".join([self.line, *(f"  {_numbers(ranks)} {does}" for does, ranks in alike)])

    @property
    def line(self) -> str:
        """Bytes and seconds of all of it."""
        parts = [f"{in_bytes(self.kept_bytes)} stay"]
        parts += [f"{in_bytes(sent)} are sent over {level}" for level, sent in self.received_bytes.items()]
        if self.lost_bytes:
            parts.append(f"{in_bytes(self.lost_bytes)} only a checkpoint has")
        unknown = "not known to take how long, as the cluster file does not say how fast its disk is"
        takes = unknown if self.seconds is None else in_seconds(self.seconds)
        through = "" if self.checkpoint_s is None else f" ({in_seconds(self.checkpoint_s)} through a checkpoint)"
        return f"{', '.join(parts)}: {takes}{through}"


def _does(rank: RankBill) -> str:
    parts = [f"keeps {in_bytes(rank.kept_bytes)}"]
    for does, found in (("receives", rank.received_bytes), ("sends", rank.sent_bytes)):
        parts += [f"{does} {in_bytes(size)} over {level}" for level, size in found.items()]
    if rank.lost_bytes:
        parts.append(f"reads {in_bytes(rank.lost_bytes)}")
    was = "" if rank.was == rank.rank else "comes, " if rank.was is None else f"was rank {rank.was}, "
    return was + ", ".join(parts)


def _numbers(ranks: Iterable[RankBill]) -> str:
    first, *others = (each.rank for each in ranks)
    return f"ranks {first} to {others[-1]}: each" if others else f"rank {first}:"


def moving_bill(old: Plan, new: Plan, was: Sequence[int | None] | None = None) -> MovingBill:
    """What it takes to go on under another plan of the same model.

    Args:
        old, new: plans with their model's graph, as ``autopar.plan`` and ``autopar.evaluate`` return them.
        was: for every rank of the new plan the rank of the old one that it was, or ``None`` if it comes; left out: the
            first ranks stay, as many as there are in both.

    Raises:
        PlanError: a plan was read from a file, they are of different models, or have embedding tables in slabs.
        InputError: ``was`` does not say it of every rank, or names one twice, or one that was not there.
    """
    before, after = old.cluster.world_size, new.cluster.world_size
    was = _stayed(was, before, after)
    now = {rank: number for number, rank in enumerate(was) if rank is not None}
    spans, levels = new.cluster.spans, new.cluster.levels
    kept, lost = Counter[int](), Counter[int]()
    sent = {number: Counter[str]() for number in range(after)}
    received = {number: Counter[str]() for number in range(after)}
    state_bytes = 0
    for (held, wanted), size in _pairs(old, new).items():
        state_bytes += size * held.elements
        holders: dict[Elements, list[int]] = {}
        for rank, elements in held.by_rank():
            holders.setdefault(elements, [])
            if rank in now:
                holders[elements].append(now[rank])
        for held_by in holders.values():
            held_by.sort()
        parts = DisjointParts(holders)
        for rank, elements in wanted.by_rank():
            for part, common in parts.overlapping(elements):
                if not holders[part]:
                    lost[rank] += common * size
                    continue
                source = source_of(rank, holders[part], spans)
                if source == rank:
                    kept[rank] += common * size
                else:
                    level = levels[level_between(rank, source, spans)].name
                    received[rank][level] += common * size
                    sent[source][level] += common * size
    ranks = tuple(
        RankBill(number, was[number], kept[number], dict(sent[number]), dict(received[number]), lost[number])
        for number in range(after)
    )
    return _priced(MovingBill(state_bytes, ranks, 0.0, 0.0, 0.0, None), old.cluster, new.cluster)


def _stayed(was: Sequence[int | None] | None, before: int, after: int) -> tuple[int | None, ...]:
    """For every new rank the old one."""
    if was is None:
        return tuple(rank if rank < before else None for rank in range(after))
    staying = [rank for rank in was if rank is not None]
    if len(was) != after:
        raise InputError(f"was has {len(was)} entries, and there are {after} ranks now: give each the rank that it was")
    wrong = next((rank for rank in staying if rank not in range(before) or staying.count(rank) > 1), None)
    if wrong is not None:
        raise InputError(
            f"was names rank {wrong}{' twice' * (wrong in range(before))}, and the old plan has ranks 0 to "
            f"{before - 1}: give each of the new ranks the one that it was, or None if it comes"
        )
    return tuple(was)


class _HeldTensor(NamedTuple):
    """How a plan stores tensors of one shape, on the ranks of these stages."""

    shape: tuple[int, ...]
    layout: Layout
    mesh: Mesh
    stages: frozenset[int]

    @property
    def elements(self) -> int:
        return count(tuple(((0, size),) for size in self.shape))

    def by_rank(self) -> Iterator[tuple[int, Elements]]:
        """Every rank that holds some of it, and which elements."""
        for stage in sorted(self.stages):
            for rank in range(self.mesh.size):
                yield stage * self.mesh.size + rank, elements_of(self.shape, self.layout, self.mesh, rank)


def _pairs(old: Plan, new: Plan) -> Counter[tuple[_HeldTensor, _HeldTensor]]:
    """How tensors are stored under both plans -> bytes of an element of all of them that are."""
    if old.model.get("fingerprint") != new.model.get("fingerprint"):
        raise PlanError(
            f"the plans are of different models or batches, {old.model.get('class')} and {new.model.get('class')} with "
            f"fingerprints {old.model.get('fingerprint')} and {new.model.get('fingerprint')}: give plans of one"
        )
    held, wanted = _stored(old), _stored(new)
    found = Counter[tuple[_HeldTensor, _HeldTensor]]()
    for name, (how, size) in held.items():
        found[how, wanted[name][0]] += size
    return found


def _stored(plan: Plan) -> dict[str, tuple[_HeldTensor, int]]:
    """By name how a plan stores every parameter and buffer, and the bytes of an element with its optimizer state."""
    if plan.assignment is None:
        raise PlanError(WITHOUT_GRAPH)
    if plan.tables is not None and plan.tables.in_slabs:
        raise PlanError(
            f"the plan has {len(plan.tables.in_slabs)} embedding tables in slabs of its ranks, of which no bill of "
            "moving is made: save a checkpoint, and load it under the other plan"
        )
    space = plan.assignment.space
    mesh, is_at = space.mesh.micro_batched(1), {} if plan.pipeline is None else homes(space.folded, plan.pipeline)
    found = {}
    for leaf in space.graph.applying("param", "buffer"):
        name, tensor = leaf.target or leaf.name, leaf.results[0]
        layout = over_micro_batches(plan.assignment.produced(Ref(leaf.name)), space.mesh)
        state = plan.optimizer_bytes_per_element if leaf.op == "param" and tensor.grad else 0
        stages = is_at.get(name, frozenset({0}))
        found[name] = _HeldTensor(tensor.shape, layout, mesh, stages), ITEM_BYTES.get(tensor.dtype, 4) + state
    return found


def _priced(bill: MovingBill, old: ClusterSpec, new: ClusterSpec) -> MovingBill:
    """The same with its seconds."""
    device, disk = new.device, new.disk
    message_s = max(
        (
            level.latency_s + each.get(level.name, 0) / level.bandwidth_bytes_per_s
            for level in new.levels
            for rank in bill.ranks
            for each in (rank.sent_bytes, rank.received_bytes)
            if each.get(level.name)
        ),
        default=0.0,
    )
    written = max((rank.kept_bytes + rank.carried_bytes for rank in bill.ranks), default=0)
    copy_s = 2 * written / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
    read_s: float | None = 0.0
    if bill.lost_bytes:
        read_s = None if disk is None else max(rank.lost_bytes for rank in bill.ranks) / disk.read_bytes_per_s
    checkpoint_s = None
    if disk is not None and old.disk is not None:
        save_s = bill.state_bytes / old.world_size / old.disk.write_bytes_per_s
        checkpoint_s = save_s + max(rank.held_bytes for rank in bill.ranks) / disk.read_bytes_per_s
    return replace(bill, message_s=message_s, copy_s=copy_s, read_s=read_s, checkpoint_s=checkpoint_s)
