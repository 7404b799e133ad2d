"""Step time under offload: makes each rank's transfer schedule, simulates it, and takes the fastest number of chunks
that stay on the device.

The step of every rank is a trace of chunks (:mod:`planner.analysis.offload.step_trace`), of which a transfer schedule
says what moves when. Where the plan says *auto*, as many chunks stay on the device as make the step shortest, of a few
counts that are tried.

With micro-batches each rank of a pipeline has a transfer schedule of its own. What it waits for in the forwards, and in
the backwards, of a stage is part of what the stage takes for each micro-batch, and the schedule is simulated with that.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from planner.analysis.memory import Usage, usage
from planner.analysis.offload.chunks import SAVED, Chunk, gradients, home_bytes, moving_bytes, parameters
from planner.analysis.offload.step_trace import UPDATE_THERE, RankStep, without
from planner.analysis.pipeline.staged import Staged
from planner.analysis.prediction import Prediction
from planner.base.errors import InfeasibleError
from planner.base.formatting import in_all_bytes
from planner.formulation.assignment import Assignment
from planner.solve.transfers import Trace, TransferSchedule, fewest_bytes, shortest_step, simulate

MORE = "hosts with more memory, or pin 'offload' 'disk'"
"""The way out of hosts that are too small."""
SHARES = (1.0, 0.75, 0.5)
"""Parts of what can stay that are tried, beside nothing: room for what moves may be worth more."""


@dataclass(frozen=True)
class _Way:
    """A step of one rank with some chunks on the device throughout.

    Attributes:
        table: what moves.
    """

    step: RankStep
    stays: tuple[Chunk, ...]
    table: TransferSchedule

    @cached_property
    def held_bytes(self) -> int:
        """Of what stays."""
        return home_bytes(self.step.assignment, self.stays)

    @cached_property
    def update_s(self) -> float:
        """Seconds of updates, wherever."""
        return _update_s(self.table.trace)

    @cached_property
    def computing_s(self) -> float:
        """Seconds that the device computes, updates aside."""
        return _computing_s(self.table.trace)

    @cached_property
    def exposed_s(self) -> tuple[float, float]:
        """Seconds of updates and of moving that are not hidden."""
        if not self.step.overlaps:
            return self.update_s, sum(self.table.link_s.values())
        if self.step.assignment.space.training.update != "backward":
            return self.update_s, max(0.0, simulate(self.table).step_s - self.computing_s - self.update_s)
        moments = self.table.trace.moments
        updates = [moment for moment in moments if moment.on == "host" or moment.name == UPDATE_THERE]
        there = [moment for moment in updates if moment.on == "device"]  # after all that the host does
        still_s, step_s = (simulate(without(self.table, left)).step_s for left in (updates, there))
        update_s = math.fsum(moment.seconds for moment in there) + max(0.0, step_s - still_s)
        return update_s, max(0.0, still_s - self.computing_s)

    @cached_property
    def step_s(self) -> float:
        """Seconds of the rank's step, without what it waits for other ranks."""
        return self.computing_s + sum(self.exposed_s)

    @property
    def fullest(self) -> tuple[str, dict[str, int]]:
        """The fullest moment, and bytes by use in it."""
        table = self.table
        fullest = table.trace.moments[table.occupied_bytes.index(table.high_water_bytes)]
        bytes_by_use = {
            "stays": self.held_bytes,
            "chunks": table.high_water_bytes - fullest.other_bytes,
            "beside": fullest.other_bytes - self.held_bytes,
        }
        return fullest.name, {use: size for use, size in bytes_by_use.items() if self.stays or use != "stays"}


def _fastest_way(step: RankStep) -> _Way:
    """What stays on the device with the shortest step, as far as home holds the rest.

    A transfer schedule is made of those alone that may be faster than the best one: computing, and updating where it
    comes after, take as long whatever moves.

    Raises:
        InfeasibleError: home holds none of them.
    """
    choices: list[tuple[Chunk, ...]] = [()] if step.assignment.space.training.tier != "either" else _may_stay(step)
    moving = [moving_bytes(step.assignment, [c for c in step.chunks if c not in stays]) for stays in choices]
    _check_home(step, min(moving))
    # Where nothing overlaps, the shortest step is the one that moves the fewest bytes.
    solve, budget_bytes = (shortest_step if step.overlaps else fewest_bytes), _budget_bytes(step)
    is_after = step.assignment.space.training.update != "backward"
    sized = zip(choices, moving, strict=True)
    fitting = [(stays, step.trace(stays), size) for stays, size in sized if size <= step.home.memory_bytes]
    least_s = [_computing_s(trace) + is_after * _update_s(trace) for _, trace, _ in fitting]
    best: _Way | None = None
    lacking = list[tuple[int, int]]()
    for number in sorted(range(len(fitting)), key=lambda number: least_s[number]):
        if best is not None and least_s[number] >= best.step_s:
            break
        stays, trace, size = fitting[number]
        way = _Way(step, stays, solve(trace, budget_bytes))
        saved = saved_bytes(way.table)
        if size + saved > step.home.memory_bytes:
            lacking.append((size + saved, saved))
        elif best is None or way.step_s < best.step_s:
            best = way
    if best is None:
        _check_home(step, *min(lacking))
    assert best is not None
    return best


def _update_s(trace: Trace) -> float:
    """Seconds of updates, wherever."""
    return math.fsum(m.seconds for m in trace.moments if m.on == "host" or m.name == UPDATE_THERE)


def _computing_s(trace: Trace) -> float:
    """Seconds that the device computes, updates aside."""
    return math.fsum(moment.seconds for moment in trace.moments) - _update_s(trace)


def _budget_bytes(step: RankStep) -> int:
    return step.assignment.space.cost.cluster.device.usable_bytes


def _may_stay(step: RankStep) -> list[tuple[Chunk, ...]]:
    """What may stay on the device: chunks that save most of the link's time for their bytes, first."""
    trace = step.trace()
    there = {moment.name for moment in trace.moments if moment.on == "device"}
    moved = {item.name: item.bytes * sum(use.moment in there for use in item.uses) for item in trace.items}

    def worth(chunk: Chunk) -> float:
        return (moved[parameters(chunk)] + moved.get(gradients(chunk), 0)) / (home_bytes(step.assignment, [chunk]) or 1)

    ordered = sorted(step.chunks, key=worth, reverse=True)
    counts = range(1, len(ordered) + 1)
    most = bisect_right(
        counts, 0, key=lambda count: max(step.trace(ordered[:count]).needed_bytes) - _budget_bytes(step)
    )
    return [tuple(ordered[:count]) for count in dict.fromkeys((0, *(int(most * share) for share in SHARES)))]


def _check_home(step: RankStep, needed: int, saved: int = 0) -> None:
    """Refuse a host's memory, or a disk, that does not hold what is at home there.

    Args:
        saved: how many of the bytes are what leaves between forward and backward.
    """
    has, on_disk = step.home.memory_bytes, step.assignment.space.training.on_disk
    if needed > has:
        less = " and let the activations of fewer blocks leave (pin 'activations')" if saved else ""
        raise InfeasibleError(
            f"the {'disk' if on_disk else 'host'} has {in_all_bytes(has)} for each device, and a device's part of "
            f"parameters, gradients and optimizer state is {in_all_bytes(needed - saved)}"
            f"{f', of activations that leave {in_all_bytes(saved)} more' if saved else ''}: shard them over more "
            f"devices (pin 'zero' 2 or 3, or 'tensor'){less}, or take {'larger disks' if on_disk else MORE}",
            needed - has,
        )


def saved_bytes(table: TransferSchedule) -> int:
    """Bytes at home of what blocks save that leaves between forward and backward."""
    return sum(saved_homes(table))


def saved_homes(table: TransferSchedule) -> tuple[int, ...]:
    """Bytes of the memories at home in which what blocks save takes turns, falling.

    Each is of one size; an item has one of its own size from its eviction until it is dropped for the last time. So
    micro-batches that are not in flight together share theirs.
    """
    last = {name: place for place, entry in enumerate(table.entries) for name in entry.drop}
    taken: set[str] = set()
    now, most = Counter[int](), Counter[int]()
    for place, entry in enumerate(table.entries):
        for name in taken.intersection(entry.drop):
            if last[name] == place:
                taken.remove(name)
                now[table.trace.item[name].bytes] -= 1
        for name in entry.evict:
            if name.startswith(SAVED) and name not in taken:
                taken.add(name)
                now[table.trace.item[name].bytes] += 1
        most |= now
    return tuple(sorted(most.elements(), reverse=True))


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


def largest_working_set(assignment: Assignment, memory: Usage | None, staged: Staged | None = None) -> WorkingSet:
    """That of the moment which needs the most: no smaller budget will do.

    Where model data has its home on the device, all of it is beside chunks.

    Args:
        memory: as in :func:`offloaded`.
    """
    if assignment.space.training.tier == "device":
        assert memory is not None
        return WorkingSet(memory.peak_at, 0, memory.peak_bytes)
    found = []
    for step in _steps(assignment, memory, 0.0, staged):
        trace = step.trace()
        most = max(trace.needed_bytes)
        moment = trace.moments[trace.needed_bytes.index(most)]
        found.append(WorkingSet(_where(step, moment.name), most - moment.other_bytes, moment.other_bytes))
    return max(found, key=lambda each: each.bytes)


def holds_all(assignment: Assignment, staged: Staged) -> bool:
    """Whether the devices of a micro-batched step have room for all that moves at once, so that it moves once a
    step.
    """
    traces = [(step.trace(), _budget_bytes(step)) for step in _steps(assignment, None, 0.0, staged)]
    return all(
        max(moment.other_bytes for moment in trace.moments) + sum(item.bytes for item in trace.items) <= budget_bytes
        for trace, budget_bytes in traces
    )


def _where(step: RankStep, moment: str) -> str:
    """A moment, with the rank of the pipeline where there are several."""
    is_alone = step.staged is None or step.staged.pipeline.ranks == 1
    return moment if is_alone else f"{moment}, on pipeline rank {step.rank}"


def stages_followed(assignment: Assignment, memory: Usage | None, staged: Staged | None) -> list[Usage]:
    """What every stage holds in a forward and a backward of a micro-batch; of a step without micro-batches what it
    holds.

    Args:
        memory, staged: as in :func:`offloaded`.
    """
    if staged is None:
        assert memory is not None
        return [memory]
    return [usage(assignment, range(*ends)) for ends in pairwise(staged.cut.bounds)]


def _steps(assignment: Assignment, memory: Usage | None, on_device_s: float, staged: Staged | None) -> list[RankStep]:
    """The step of every rank of the pipeline, or of the only one."""
    usages = stages_followed(assignment, memory, staged)
    if staged is None:
        return [RankStep(assignment, {0: usages[0]}, on_device_s)]
    placed = staged.pipeline.placed
    return [
        RankStep(
            assignment, {stage: usages[stage] for stage, home in enumerate(placed) if home == rank}, 0.0, staged, rank
        )
        for rank in range(staged.pipeline.ranks)
    ]


def offloaded(
    assignment: Assignment, memory: Usage | None, prediction: Prediction, staged: Staged | None = None
) -> tuple[tuple[TransferSchedule, ...], Prediction]:
    """The transfer schedules of a step, one for each rank of the pipeline, and what is predicted of the step that obeys
    them.

    Args:
        memory: what the step holds besides chunks and gradients; not needed with micro-batches.
        prediction: of the step, as if nothing stayed and nothing were moved beside computing.
        staged: how it runs micro-batched, if it does; the assignment recomputes as it says.

    Raises:
        InfeasibleError: the host's memory, or the disk, does not hold the model's data.
    """
    times = prediction.time_s.items()
    on_device_s = math.fsum(seconds for use, seconds in times if use not in ("optimizer", "offload"))
    ways = [_fastest_way(step) for step in _steps(assignment, memory, on_device_s, staged)]
    fullest = max(ways, key=lambda way: way.table.high_water_bytes)
    moment, bytes_by_use = fullest.fullest
    found = replace(
        prediction,
        peak_bytes=fullest.table.high_water_bytes,
        memory_bytes=bytes_by_use,
        fullest_at=_where(fullest.step, moment),
        largest=(),
    )
    if staged is not None:
        return tuple(way.table for way in ways), _micro_batched(found, staged, ways)
    (way,) = ways
    update_s, waits_s = way.exposed_s
    time_s = {**prediction.time_s, "optimizer": update_s, "offload": waits_s}
    return (way.table,), replace(found, step_time_s=way.step_s, time_s=time_s)


def _micro_batched(prediction: Prediction, staged: Staged, ways: Sequence[_Way]) -> Prediction:
    """The prediction of a micro-batched step whose stages take what they wait for, too, on the average of
    micro-batches.
    """
    assert prediction.micro_batch_times is not None
    micro_batches, forward_s, input_s = (
        staged.pipeline.micro_batches,
        [*prediction.micro_batch_times.forward_s],
        [*prediction.micro_batch_times.input_s],
    )
    once_s, exposed_s = [], []
    for way in ways:
        way_of, waits_s = way.step.way_of(), way.step.waits_s(way.table)
        once_s.append(way.update_s)
        exposed_s.append(math.fsum(waits_s.values()))
        for name, seconds in waits_s.items():
            if name not in way_of:
                once_s[-1] += seconds
                continue
            stage, direction = way_of[name]
            (forward_s if direction == "forward" else input_s)[stage] += seconds / micro_batches
    times = replace(
        prediction.micro_batch_times, forward_s=tuple(forward_s), input_s=tuple(input_s), update_s=tuple(once_s)
    )
    step_s = times.step_s(staged.pipeline)
    busy = max(range(len(ways)), key=lambda rank: ways[rank].computing_s + ways[rank].update_s + exposed_s[rank])
    time_s: Mapping[str, float] = {
        **staged.rank_s(busy),
        "optimizer": ways[busy].update_s,
        "offload": exposed_s[busy],
    }
    busy_s = math.fsum(seconds for use, seconds in time_s.items() if use != "bubble")
    time_s = {**time_s, "bubble": max(0.0, step_s - busy_s)}
    return replace(prediction, step_time_s=step_s, time_s=time_s, micro_batch_times=times)
