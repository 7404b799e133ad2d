"""Offload: a step of a plan whose model data is at home on the host or on disk, as a trace, and its timetable.

Parameters come in *chunks*, one for all that the same blocks read: a parameter that one block reads is in that block's
chunk. A chunk is an item of the trace, fetched for forward, and again for backward where autograd reads the parameters'
own memory there; its gradients are another, made by backward and evicted. The host then updates all of them at once:
whatever optimizer the user brings steps over memory of the host, and so does clipping. Or it updates each chunk when
the block is undone that it entered by, beside what the device goes on with.

A chunk may also *stay*: its parameters, gradients and optimizer state are on the device throughout and are updated
there, and nothing of it is in the trace. As many stay as make the step shortest, of a few counts that are tried.

What several blocks read, or what is converted before them, enters the program before the first block, and its gradient
leaves it when the last is undone.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

from planner.chain import Link as BlockLink
from planner.chain import links_of
from planner.cluster import Home
from planner.conversion import local_bytes
from planner.errors import InfeasibleError
from planner.formulate import Assignment, Tier
from planner.graph import Ref
from planner.heap import BEFORE, Direction
from planner.memory import Usage, enters_before, readers_of
from planner.predict import Prediction, predict
from planner.recompute import Level, used
from planner.timetable import Item, Link, Moment, Timetable, Trace, Use, fewest_bytes, shortest_step, simulate
from planner.words import in_bytes

ALIGN_BYTES = 64
"""Parameters begin at multiples of it in their chunk."""
UPDATE, UPDATE_THERE = "update", "update what stays"
MORE = "hosts with more memory, or pin 'offload' 'disk'"
"""The way out of hosts that are too small."""
SHARES = (1.0, 0.75, 0.5)
"""Parts of what can stay that are tried, beside nothing: room for what moves may be worth more."""


@dataclass(frozen=True)
class Chunk:
    """Parameters that move together, in memory that is theirs alone.

    Attributes:
        name: the path of their block; the first of them and how many more, where they enter before all blocks.
        leaves: their names in the graph, in order.
        readers: the numbers of the blocks that read them.
        starts: the byte at which each begins; the last is where the chunk ends.
        gradient_bytes: of the gradients of those that are trained.
        is_before: whether they enter the program before the first block, and their gradients leave it after all.
    """

    name: str
    leaves: tuple[str, ...]
    readers: tuple[int, ...]
    starts: tuple[int, ...]
    gradient_bytes: int
    is_before: bool

    @property
    def bytes(self) -> int:
        """Of the chunk."""
        return self.starts[-1]

    @property
    def entered(self) -> int:
        """The number of the block that hands it to the program, or :data:`planner.heap.BEFORE`."""
        return BEFORE if self.is_before else self.readers[0]


def chunks_of(assignment: Assignment) -> tuple[Chunk, ...]:
    """The chunks of a model, in the order in which they are first read; what no block reads is in none."""
    together: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for name, readers in readers_of(assignment).items():
        together.setdefault((readers, enters_before(assignment, name, readers)), []).append(name)
    return tuple(_chunk(assignment, names, *key) for key, names in together.items())


def _chunk(assignment: Assignment, names: list[str], readers: tuple[int, ...], is_before: bool) -> Chunk:
    graph, starts, gradients = assignment.space.graph, [0], 0
    for name in names:
        tensor = graph.by_name[name].results[0]
        size = local_bytes(tensor, assignment.produced(Ref(name)), assignment.space.mesh)
        starts.append(-(-(starts[-1] + size) // ALIGN_BYTES) * ALIGN_BYTES)
        gradients += size if tensor.grad else 0
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    called = f"{graph.by_name[names[0]].target}{more}" if is_before else label(assignment, readers[0])
    return Chunk(called, tuple(names), readers, tuple(starts), gradients, is_before)


def label(assignment: Assignment, number: int) -> str:
    """A block by its number and its path."""
    folded = assignment.space.folded
    instance = folded.instances[number]
    return f"{number} {instance.block.path or folded.names[instance.kind]}"


def parameters(chunk: Chunk) -> str:
    """The item of a chunk's parameters."""
    return f"parameters {chunk.name}"


def gradients(chunk: Chunk) -> str:
    """The item of a chunk's gradients."""
    return f"gradients {chunk.name}"


def update(chunk: Chunk) -> str:
    """The moment in which the host updates a chunk in the middle of backward."""
    return f"update {chunk.name}"


def moments_of(assignment: Assignment) -> dict[int, tuple[str, str]]:
    """The names of the moments of each block's forward and backward, by its number; those of
    :data:`planner.heap.BEFORE` come before all forwards and after all backwards, where anything moves then.
    """
    numbers = range(len(assignment.space.folded.instances))
    called = {number: label(assignment, number) for number in numbers}
    return {BEFORE: ("begin", "end"), **{n: (f"forward {name}", f"backward {name}") for n, name in called.items()}}


def undone(assignment: Assignment) -> list[int]:
    """The numbers of the blocks that have a backward, in the order of forward."""
    graph = assignment.space.graph
    blocks = [instance.block for instance in assignment.space.folded.instances]
    return [n for n, block in enumerate(blocks) if any(ref in graph.differentiated for ref in block.outputs)]


def home_bytes(assignment: Assignment, chunks: Collection[Chunk]) -> int:
    """What chunks take where they are at home: parameters, gradients and optimizer state."""
    space = assignment.space
    names = [name for chunk in chunks for name in chunk.leaves]
    state = sum(space.state_bytes(space.graph.by_name[name], assignment.produced(Ref(name))) for name in names)
    return sum(chunk.bytes + chunk.gradient_bytes for chunk in chunks) + state


@dataclass(frozen=True)
class _Step:
    """A step of an assignment, block by block.

    Attributes:
        usage: what the step holds besides chunks and gradients.
        prediction: of the step; its seconds on the device are shared out by what the blocks take.
    """

    assignment: Assignment
    usage: Usage
    prediction: Prediction

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        return chunks_of(self.assignment)

    @cached_property
    def budget_bytes(self) -> int:
        return self.assignment.space.cost.cluster.device.usable_bytes

    def trace(self, stays: Collection[Chunk] = ()) -> Trace:
        """The step as a trace, with chunks that stay on the device throughout."""
        moves = [chunk for chunk in self.chunks if chunk not in stays]
        trained = [chunk for chunk in moves if chunk.gradient_bytes]
        names = {n: each for n, each in self._names.items() if n != BEFORE or any(chunk.is_before for chunk in moves)}
        backwards = [*reversed(undone(self.assignment)), *[BEFORE] * any(chunk.is_before for chunk in trained)]
        held = home_bytes(self.assignment, stays)
        early = {chunk.entered: chunk for chunk in trained if self._is_updated_early(chunk, backwards)}
        moments = [self._moment("forward", names[n][0], n, held) for n in sorted(names)]
        for n in backwards:
            moments.append(self._moment("backward", names[n][1], n, held))
            if n in early:
                moments.append(Moment(update(early[n]), self._update_s(early[n], "host"), on="host"))
        if any(chunk.gradient_bytes for chunk in stays):
            moments.append(Moment(UPDATE_THERE, sum(self._update_s(chunk, "device") for chunk in stays), held))
        if moves:
            late = [chunk for chunk in trained if chunk not in early.values()]
            moments.append(Moment(UPDATE, sum(self._update_s(chunk, "host") for chunk in late), on="host"))
        items = []
        for chunk in moves:
            uses = [Use(names[n][0]) for n in (*[BEFORE] * chunk.is_before, *chunk.readers)]
            uses += [
                Use(names[n][1]) for n in reversed(chunk.readers) if n in backwards and self._reads_again(chunk, n)
            ]
            own = update(chunk) if chunk in early.values() else UPDATE
            # Whatever is not trained, and what is updated by then, may be changed between steps, too.
            uses += [Use(moment, "rw") for moment in dict.fromkeys((own, UPDATE))]
            items.append(Item(parameters(chunk), chunk.bytes, tuple(uses)))
            if chunk.gradient_bytes and chunk.entered in backwards:
                made = Use(names[chunk.entered][1], "w")
                items.append(Item(gradients(chunk), chunk.gradient_bytes, (made, Use(own))))
        link = Link(self.home.fetch_bytes_per_s, self.home.evict_bytes_per_s)
        return Trace(tuple(moments), tuple(items), {"host": link})

    @cached_property
    def _names(self) -> dict[int, tuple[str, str]]:
        return moments_of(self.assignment)

    def _moment(self, direction: Direction, name: str, number: int, held: int) -> Moment:
        beside = self.usage.by_block.get((direction, number), 0)
        return Moment(name, self._seconds.get((direction, number), 0.0), beside + held)

    def _reads_again(self, chunk: Chunk, number: int) -> bool:
        """Whether backward of a block reads a chunk; what is converted before all blocks may be read in any."""
        read = self.usage.read_again
        return not {*read.get(number, ()), *read.get(BEFORE, ())}.isdisjoint(chunk.leaves)

    def _is_updated_early(self, chunk: Chunk, backwards: Collection[int]) -> bool:
        """Whether its gradients are complete before all blocks are undone, and the host does not wait for that."""
        in_backward = self.assignment.space.training.update == "backward"
        return in_backward and not chunk.is_before and chunk.entered in backwards

    def _update_s(self, chunk: Chunk, tier: Tier) -> float:
        space, stored = self.assignment.space, self.assignment.produced
        return math.fsum(space.update_s(space.graph.by_name[name], stored(Ref(name)), tier) for name in chunk.leaves)

    @cached_property
    def _seconds(self) -> dict[tuple[Direction, int], float]:
        """Seconds on the device of every block, by direction and number, that add up to the prediction's."""
        recompute, skeleton = self.assignment.recompute, self.assignment.space.skeleton
        links = links_of(self.assignment, used(recompute, skeleton.folded))
        found: dict[tuple[Direction, int], float] = {}
        for number, (link, (kind, nth)) in enumerate(zip(links, skeleton.numbers, strict=True)):
            found["forward", number] = link.block.forward_s + link.gather_s
            found["backward", number] = link.block.input_s + link.block.weight_s + link.reduce_s
            found["backward", number] += _again_s(link, recompute.level(kind, nth))
        times = self.prediction.time_s.items()
        on_device = math.fsum(seconds for use, seconds in times if use not in ("optimizer", "offload"))
        scale = on_device / (math.fsum(found.values()) or 1.0)
        return {key: seconds * scale for key, seconds in found.items()}

    def may_stay(self) -> list[tuple[Chunk, ...]]:
        """What may stay on the device: chunks that save most of the link's time for their bytes, first."""
        trace = self.trace()
        there = {moment.name for moment in trace.moments if moment.on == "device"}
        moved = {item.name: item.bytes * sum(use.moment in there for use in item.uses) for item in trace.items}

        def worth(chunk: Chunk) -> float:
            return (moved[parameters(chunk)] + moved.get(gradients(chunk), 0)) / (
                home_bytes(self.assignment, [chunk]) or 1
            )

        ordered = sorted(self.chunks, key=worth, reverse=True)
        counts = range(1, len(ordered) + 1)
        most = bisect_right(
            counts, 0, key=lambda count: max(self.trace(ordered[:count]).needed_bytes) - self.budget_bytes
        )
        return [tuple(ordered[:count]) for count in dict.fromkeys((0, *(int(most * share) for share in SHARES)))]

    def moving_bytes(self, stays: Collection[Chunk]) -> int:
        """What is at home on the host or on disk."""
        return home_bytes(self.assignment, self.chunks) - home_bytes(self.assignment, stays)

    def check_home(self, stays: Collection[Chunk]) -> None:
        """Refuse a host's memory, or a disk, that does not hold what is at home there."""
        needed, has, on_disk = self.moving_bytes(stays), self.home.memory_bytes, self.on_disk
        if needed > has:
            raise InfeasibleError(
                f"the {'disk' if on_disk else 'host'} has {has:,} bytes for each device ({in_bytes(has)}), and a "
                f"device's part of parameters, gradients and optimizer state is {needed:,} bytes: shard them over more "
                f"devices (pin 'zero' 2 or 3, or 'tensor'), or take {'larger disks' if on_disk else MORE}",
                needed - has,
            )

    @property
    def on_disk(self) -> bool:
        return self.assignment.space.training.on_disk

    @cached_property
    def home(self) -> Home:
        return self.assignment.space.cost.cluster.home(self.on_disk)

    @property
    def overlaps(self) -> bool:
        """Whether anything moves while something else is computed; on CPUs moving takes the cores that compute."""
        return self.assignment.space.cost.cluster.backend != "gloo"

    def timetable(self, stays: Collection[Chunk]) -> Timetable:
        """The timetable of the shortest step; where nothing overlaps that is the one that moves the fewest bytes."""
        return (shortest_step if self.overlaps else fewest_bytes)(self.trace(stays), self.budget_bytes)

    def predicted(self, table: Timetable, stays: Collection[Chunk]) -> Prediction:
        """What the step takes that obeys a timetable."""
        moments = table.trace.moments
        updates = [moment for moment in moments if moment.on == "host" or moment.name == UPDATE_THERE]
        update_s = math.fsum(moment.seconds for moment in updates)
        computing_s = math.fsum(moment.seconds for moment in moments) - update_s
        waits_s = sum(table.link_s.values())
        if self.overlaps and self.assignment.space.training.update == "backward":
            there = [moment for moment in updates if moment.on == "device"]  # after all that the host does
            still_s, step_s = (simulate(_without(table, left)).step_s for left in (updates, there))
            update_s = math.fsum(moment.seconds for moment in there) + max(0.0, step_s - still_s)
            waits_s = max(0.0, still_s - computing_s)
        elif self.overlaps:
            waits_s = max(0.0, simulate(table).step_s - computing_s - update_s)
        held, fullest = home_bytes(self.assignment, stays), moments[table.occupied_bytes.index(table.high_water_bytes)]
        bytes_by_use = {
            "stays": held,
            "chunks": table.high_water_bytes - fullest.other_bytes,
            "beside": fullest.other_bytes - held,
        }
        return replace(
            self.prediction,
            step_time_s=computing_s + update_s + waits_s,
            peak_bytes=table.high_water_bytes,
            time_s={**self.prediction.time_s, "optimizer": update_s, "offload": waits_s},
            memory_bytes={use: size for use, size in bytes_by_use.items() if stays or use != "stays"},
            fullest_at=fullest.name,
            largest=(),
        )


def _without(table: Timetable, left: Collection[Moment]) -> Timetable:
    """The same timetable where some moments take no time."""
    moments = tuple(replace(each, seconds=0.0) if each in left else each for each in table.trace.moments)
    return replace(table, trace=replace(table.trace, moments=moments))


def _again_s(link: BlockLink, level: Level) -> float:
    ways = dict(zip(link.levels, link.block.savings, strict=True))
    return ways[level].recompute_s if level in ways else 0.0


@dataclass(frozen=True)
class WorkingSet:
    """What a moment of a step cannot do without: the chunks that it uses, and all that is there beside them."""

    moment: str
    chunk_bytes: int
    beside_bytes: int

    @property
    def bytes(self) -> int:
        """Of both."""
        return self.chunk_bytes + self.beside_bytes


def largest_working_set(assignment: Assignment, usage: Usage) -> WorkingSet:
    """That of the moment which needs the most: no smaller budget will do.

    Where model data is at home on the device, all of it is beside chunks.
    """
    if assignment.space.training.tier == "device":
        return WorkingSet(usage.peak_at, 0, usage.peak_bytes)
    trace = _Step(assignment, usage, predict(assignment, 0.0, usage)).trace()
    most = max(trace.needed_bytes)
    moment = trace.moments[trace.needed_bytes.index(most)]
    return WorkingSet(moment.name, most - moment.other_bytes, moment.other_bytes)


def offloaded(assignment: Assignment, usage: Usage, prediction: Prediction) -> tuple[Timetable, Prediction]:
    """The timetable of a step, and what is predicted of the step that obeys it.

    Args:
        usage: what the step holds besides chunks and gradients.
        prediction: of the step, as if nothing stayed and nothing were moved beside computing.

    Raises:
        InfeasibleError: the host's memory, or the disk, does not hold the model's data.
    """
    step = _Step(assignment, usage, prediction)
    ways: list[tuple[Chunk, ...]] = [()] if assignment.space.training.tier != "either" else step.may_stay()
    step.check_home(min(ways, key=step.moving_bytes))
    found = []
    for stays in ways:
        if step.moving_bytes(stays) <= step.home.memory_bytes:
            table = step.timetable(stays)
            found.append((table, step.predicted(table, stays)))
    return min(found, key=lambda each: each[1].step_time_s)


def offloaded_s(assignment: Assignment, usage: Usage) -> float:
    """Seconds of the step of :func:`offloaded`."""
    _, predicted = offloaded(assignment, usage, predict(assignment, 0.0, usage))
    return predicted.step_time_s
