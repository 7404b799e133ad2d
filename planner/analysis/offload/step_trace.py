"""Trace of a step under offload: which chunks one rank uses at each moment, if model data lies on host or disk.

A chunk is an item of the trace, fetched for forward, and again for backward where autograd reads the parameters' own
memory there; its gradients are another, made by backward and evicted. The host then updates all of them at once, or
each chunk when the block runs its backward that it entered by, beside what the device goes on with.

A micro-batched step is the actions of its schedule one after another: a micro-batch's forward, or backward, of the
blocks of a stage. The first backward of a block makes its gradients, and the others add to them; where they have left
the device meanwhile, they come back for it.

What blocks save for backward may be items, too, where the plan lets it leave: made in forward, read in backward; of
each micro-batch others.

A chunk that *stays* is on the device throughout, and is updated there; nothing of it is in the trace.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from planner.analysis.memory import Usage
from planner.analysis.memory.storages import BEFORE, Direction
from planner.analysis.offload.chunks import (
    Chunk,
    before,
    chunks_of,
    gradients,
    home_bytes,
    moments_of,
    of_micro_batch,
    parameters,
    run_in_backward,
    saved_item,
    update,
    updated_early,
)
from planner.analysis.pipeline.chain import Link, links_of
from planner.analysis.pipeline.leaf_memory import Leaves
from planner.analysis.pipeline.staged import Staged
from planner.cost.cluster import Home
from planner.formulation.assignment import Assignment
from planner.formulation.remat.levels import Level, used
from planner.formulation.resharding import local_bytes
from planner.formulation.stage_boundaries import crossing
from planner.formulation.training import Tier
from planner.ir.graph import Ref
from planner.ir.layout import MICRO, Shard
from planner.solve.pipeline.schedule import Action, schedule
from planner.solve.transfers import Item, ItemUse, Moment, TierLink, Trace, TransferSchedule, simulate

UPDATE, UPDATE_THERE = "update", "update what stays"
OUTPUTS = "outputs"
"""The moment in which those of all micro-batches are put together."""
ONE_MICRO_BATCH = (Action(0, "F", 0), Action(0, "B", 0))
"""The actions of a step without micro-batches."""

Way = tuple[int, Direction]
"""A stage and a direction."""


@dataclass(frozen=True)
class RankStep:
    """A step of an assignment on one rank of a pipeline, or on the only one.

    Attributes:
        usages: what a forward and a backward of each of its stages hold besides chunks and gradients.
        on_device_s: seconds that blocks take of the device without micro-batches, all together; they are shared out by
            what each takes. With micro-batches the stages' chain has them.
        staged: how it runs micro-batched, if it does.
        rank: of the pipeline.
    """

    assignment: Assignment
    usages: Mapping[int, Usage]
    on_device_s: float
    staged: Staged | None = None
    rank: int = 0

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Those that a block of this rank reads."""
        return chunks_of(self.assignment, self._numbers)

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """What is done, in order."""
        if self.staged is None:
            return ONE_MICRO_BATCH
        pipeline = self.staged.pipeline
        found = schedule(pipeline.schedule, pipeline.ranks, pipeline.micro_batches, pipeline.virtual_stages)
        return found.rows[self.rank]

    @cached_property
    def blocks(self) -> dict[int, range]:
        """The numbers of the blocks of each stage of this rank."""
        if self.staged is None:
            return {0: range(len(self.assignment.space.folded.instances))}
        bounds = self.staged.cut.bounds
        stages = sorted({action.stage for action in self.actions})
        return {stage: range(bounds[stage], bounds[stage + 1]) for stage in stages}

    @cached_property
    def _numbers(self) -> frozenset[int]:
        return frozenset(number for blocks in self.blocks.values() for number in blocks)

    @cached_property
    def _leaves(self) -> Leaves:
        return Leaves(self.assignment, 1)  # whose outputs are the same in all versions of the weights

    # ---- the trace ---------------------------------------------------------------------------------------------

    def trace(self, stays: Collection[Chunk] = ()) -> Trace:
        """The step, with chunks that stay on the device throughout."""
        moves = [chunk for chunk in self.chunks if chunk not in stays]
        trained = [chunk for chunk in moves if chunk.gradient_bytes]
        held = home_bytes(self.assignment, stays)
        early = {chunk.entered: chunk for chunk in updated_early(self.assignment, trained)}
        moments: list[Moment] = []
        uses: dict[str, list[ItemUse]] = {name: [] for chunk in moves for name in (parameters(chunk), gradients(chunk))}
        for at, (action, others) in enumerate(zip(self.actions, self._of_others, strict=True)):
            is_again = any(each.kind != "F" and each.stage == action.stage for each in self.actions[:at])
            for number in self._entered(action, moves):
                name = self._called(number, action)
                moments.append(self._moment(name, number, action, others + held, is_again))
                for chunk in self._read_by.get(number, ()):
                    if chunk in moves and (action.kind == "F" or self._reads_again(chunk, number)):
                        uses[parameters(chunk)].append(ItemUse(name))
                for chunk in self._made_by.get(number, ()) if action.kind != "F" else ():
                    if chunk in moves:
                        made = uses[gradients(chunk)]
                        made.append(ItemUse(name, "rw" if made else "w"))
                if action.kind != "F" and number in early:
                    moments.append(Moment(update(early[number]), self.update_s(early[number], "host"), on="host"))
        if self.staged is not None:  # beside all micro-batches' what they are put together into
            moments.append(Moment(OUTPUTS, 0.0, self._left_bytes(2 * self._micro_batches) + held))
        if any(chunk.gradient_bytes for chunk in stays):
            moments.append(Moment(UPDATE_THERE, sum(self.update_s(chunk, "device") for chunk in stays), held))
        if moves:
            late = [chunk for chunk in trained if chunk not in early.values()]
            moments.append(Moment(UPDATE, sum(self.update_s(chunk, "host") for chunk in late), on="host"))
        items = []
        for chunk in moves:
            own = update(chunk) if chunk in early.values() else UPDATE
            # Whatever is not trained, and what is updated by then, may be changed between steps, too.
            ends = [ItemUse(moment, "rw") for moment in dict.fromkeys((own, UPDATE))]
            items.append(Item(parameters(chunk), chunk.bytes, (*uses[parameters(chunk)], *ends)))
            if uses[gradients(chunk)]:
                items.append(Item(gradients(chunk), chunk.gradient_bytes, (*uses[gradients(chunk)], ItemUse(own))))
        items += self._saved_items()
        link = TierLink(self.home.fetch_bytes_per_s, self.home.evict_bytes_per_s)
        return Trace(tuple(moments), tuple(items), {"host": link})

    def _saved_items(self) -> list[Item]:
        """What blocks save for backward and may leave in between, of each micro-batch."""
        found = []
        for there in (action for action in self.actions if action.kind == "F"):
            again = Action(there.stage, "B", there.micro_batch)
            for saved in self.usages[there.stage].saved:
                back = (ItemUse(self._called(number, again)) for number in reversed(saved.savers))
                uses = (ItemUse(self._called(saved.left, there), "w"), *back)
                name = of_micro_batch(saved_item(self.assignment, saved), self._micro_batch(there))
                found.append(Item(name, saved.bytes, uses))
        return found

    def _entered(self, action: Action, moves: Collection[Chunk]) -> Iterator[int]:
        """The numbers that an action enters, in order."""
        blocks, first = self.blocks[action.stage], before(action.stage)
        if action.kind == "F":
            if any(chunk in moves for chunk in self._read_by.get(first, ())):
                yield first
            yield from blocks
            return
        yield from (number for number in reversed(blocks) if number in self._runs_backward)
        if any(chunk in moves and chunk.gradient_bytes for chunk in self._made_by.get(first, ())):
            yield first

    def _called(self, number: int, action: Action) -> str:
        name = self._names[number][action.kind != "F"]
        return of_micro_batch(name, self._micro_batch(action))

    def _micro_batch(self, action: Action) -> int | None:
        """The micro-batch of an action, where a step has several."""
        return None if self.staged is None else action.micro_batch

    @cached_property
    def _names(self) -> dict[int, tuple[str, str]]:
        return moments_of(self.assignment, 1 if self.staged is None else self.staged.pipeline.stages)

    @cached_property
    def _runs_backward(self) -> frozenset[int]:
        return frozenset(run_in_backward(self.assignment))

    @cached_property
    def _read_by(self) -> dict[int, list[Chunk]]:
        """The chunks that each block of this rank reads, or that enter before those of a stage."""
        found: dict[int, list[Chunk]] = {}
        for chunk in self.chunks:
            stages = [stage for stage, blocks in self.blocks.items() if any(n in blocks for n in chunk.readers)]
            ends = [before(stage) for stage in stages if chunk.is_before]
            for number in (*ends, *(n for n in chunk.readers if n in self._numbers)):
                found.setdefault(number, []).append(chunk)
        return found

    @cached_property
    def _made_by(self) -> dict[int, list[Chunk]]:
        """The chunks whose gradients are complete, of a micro-batch, when a block runs its backward, or all of a
        stage.
        """
        found: dict[int, list[Chunk]] = {}
        for number, chunks in self._read_by.items():
            for chunk in chunks:
                ends = (
                    number <= BEFORE if chunk.is_before else number == chunk.entered and number in self._runs_backward
                )
                if ends and chunk.gradient_bytes:
                    found.setdefault(number, []).append(chunk)
        return found

    def _reads_again(self, chunk: Chunk, number: int) -> bool:
        """Whether backward of a block reads a chunk; what is converted before all blocks may be read in any."""
        stage = next((stage for stage, blocks in self.blocks.items() if number in blocks), None)
        read = {} if stage is None else self.usages[stage].read_again
        return not {*read.get(number, ()), *read.get(BEFORE, ())}.isdisjoint(chunk.leaves)

    # ---- what is beside chunks ---------------------------------------------------------------------------------

    def _moment(self, name: str, number: int, action: Action, others: int, is_again: bool) -> Moment:
        """A block in an action; ``others``: what is there of other micro-batches; ``is_again``: other backwards came
        before.
        """
        direction: Direction = "forward" if action.kind == "F" else "backward"
        followed = self.usages[action.stage].by_block.get((direction, max(number, BEFORE)))
        beside = (followed or 0) + others
        made = self._made_by.get(number, ()) if direction == "backward" else ()
        if is_again:
            beside += self._added_by.get(number, 0)
        if self.staged is not None and followed is None:  # nothing runs there: what waited for the end is added up
            beside += sum(chunk.gradient_bytes for chunk in made if chunk.is_before)
        return Moment(name, self._seconds.get((direction, number), 0.0), beside)

    @property
    def _micro_batches(self) -> int:
        return sum(action.kind == "F" for action in self.actions) // len(self.blocks)

    @cached_property
    def _of_others(self) -> list[int]:
        """Bytes that are held, while each action runs, of other micro-batches and stages, and of what has left."""
        if self.staged is None:
            return [0 for _ in self.actions]
        found, alive, done = [], set[tuple[int, int]](), 0
        leaves = sum(usage.leaf_bytes for usage in self.usages.values()) + self._passing_bytes
        for stage, kind, micro_batch in self.actions:
            done += kind == "F" and stage == max(self.blocks)
            others = sum(
                self.usages[other].saved_bytes for other, each in alive if (other, each) != (stage, micro_batch)
            )
            found.append(others + leaves - self.usages[stage].leaf_bytes + self._left_bytes(done))
            (alive.add if kind == "F" else alive.discard)((stage, micro_batch))
        return found

    @property
    def _passing_bytes(self) -> int:
        """One message each way between stages of this rank and those of others: what is being received, and sent."""
        assert self.staged is not None
        graph, mesh, placed = self.assignment.space.graph, self.assignment.space.mesh, self.staged.pipeline.placed
        behind, found = crossing(self.assignment.space.folded), 0
        for stage, blocks in self.blocks.items():
            sides = ((stage - 1, blocks.start - 1), (stage + 1, blocks.stop - 1))
            for last in (last for other, last in sides if 0 <= other < len(placed) and placed[other] != self.rank):
                for ref in behind[last]:
                    size = local_bytes(graph.type_of(ref), self.assignment.consumer_layout(ref), mesh)
                    found += size * (1 + (ref in graph.differentiated))
        return found

    def _left_bytes(self, done: int) -> int:
        """Inputs of all other micro-batches, and outputs, of which so many micro-batches gave something."""
        space, assignment = self.assignment.space, self.assignment
        taken = [leaf for leaf in space.graph.leaves if leaf.op == "input"]
        cut = [leaf for leaf in taken if isinstance(assignment.produced(Ref(leaf.name))[0], Shard)]
        inputs = sum(local_bytes(leaf.results[0], assignment.produced(Ref(leaf.name)), space.mesh) for leaf in cut)
        outputs = sum(sum(self._leaves.outputs(number, done).values()) for number in self._numbers) if done else 0
        return inputs * (space.mesh.micro_batches - 1) + outputs

    @cached_property
    def _added_by(self) -> dict[int, int]:
        """What the backward of each block makes so, the same in every micro-batch."""
        return {number: sum(map(self._added_bytes, made)) for number, made in self._made_by.items()}

    def _added_bytes(self, chunk: Chunk) -> int:
        """Bytes that a backward makes of a chunk before they are added to the gradients of those before it."""
        if chunk.is_before:  # they wait for the end as they are, which is simulated
            return 0
        graph, mesh = self.assignment.space.graph, self.assignment.space.mesh
        trained = [graph.by_name[name] for name in chunk.leaves if graph.by_name[name].results[0].grad]
        sizes = [local_bytes(node.results[0], self.assignment.produced(Ref(node.name)), mesh) for node in trained]
        block = self.assignment.space.folded.instances[chunk.entered].block
        together = {
            ref.node
            for each in self.assignment.gather_buckets(block)
            for ref, route in each.items()
            if any(mesh.axes[step.axis].size > 1 and mesh.axes[step.axis].name != MICRO for step in route)
        }
        return sum(sizes) if not together.isdisjoint(chunk.leaves) else max(sizes, default=0)

    # ---- seconds -----------------------------------------------------------------------------------------------

    def update_s(self, chunk: Chunk, tier: Tier) -> float:
        """Seconds of the update of a chunk where it is at home."""
        space, stored = self.assignment.space, self.assignment.produced
        return math.fsum(space.update_s(space.graph.by_name[name], stored(Ref(name)), tier) for name in chunk.leaves)

    @cached_property
    def _seconds(self) -> dict[tuple[Direction, int], float]:
        """Seconds on the device of every block, by direction and number."""
        recompute, decision_graph = self.assignment.recompute, self.assignment.space.decision_graph
        links = self.staged.links if self.staged else links_of(self.assignment, used(recompute, decision_graph.folded))
        found: dict[tuple[Direction, int], float] = {}
        for number, (link, (kind, nth)) in enumerate(zip(links, decision_graph.blocks.numbers, strict=True)):
            found["forward", number] = link.block.forward_s + link.gather_s
            if number in self._runs_backward:
                found["backward", number] = link.block.input_s + link.block.weight_s + link.reduce_s
                found["backward", number] += _again_s(link, recompute.level(kind, nth))
        if self.staged is not None:
            return found
        scale = self.on_device_s / (math.fsum(found.values()) or 1.0)
        return {key: seconds * scale for key, seconds in found.items()}

    def waits_s(self, table: TransferSchedule) -> dict[str, float]:
        """Seconds that the device waits for what moves, by the moment on whose entry it does, updates aside."""
        if self.overlaps:
            updates = [moment for moment in table.trace.moments if moment.on == "host"]
            return simulate(without(table, updates)).waiting_s
        found = {}
        for moment, entry in zip(table.trace.moments, table.entries, strict=True):
            ways = ("fetch", entry.fetch), ("evict", entry.evict)
            found[moment.name] = math.fsum(
                table.trace.seconds(table.trace.item[name], way) for way, names in ways for name in names
            )
        return found

    def way_of(self) -> dict[str, Way]:
        """The stage and the direction of every moment of a block."""
        return {
            self._called(number, action): (action.stage, "forward" if action.kind == "F" else "backward")
            for action in self.actions
            for number in (before(action.stage), *self.blocks[action.stage])
        }

    @cached_property
    def home(self) -> Home:
        """Where chunks are at home."""
        space = self.assignment.space
        return space.cost.cluster.home(space.training.on_disk)

    @property
    def overlaps(self) -> bool:
        """Whether anything moves while something else is computed; on CPUs moving takes the cores that compute."""
        return not self.assignment.space.cost.cluster.on_cpu


def without(table: TransferSchedule, left: Collection[Moment]) -> TransferSchedule:
    """The same transfer schedule where some moments take no time."""
    moments = tuple(replace(each, seconds=0.0) if each in left else each for each in table.trace.moments)
    return replace(table, trace=replace(table.trace, moments=moments))


def _again_s(link: Link, level: Level) -> float:
    ways = dict(zip(link.levels, link.block.savings, strict=True))
    return ways[level].recompute_s if level in ways else 0.0
