"""Turns: the blocks of an assignment as a chain, and the best pipeline found for it.

An assignment says how one stage's ranks share each block; here its blocks, in the order of the graph, become a chain of
:class:`planner.pipeline.stages.Block`: seconds and bytes of one micro-batch on one rank, with the levels of
recomputation as ways to save. :func:`stage` tries the schedules and has :mod:`planner.pipeline.partition` cut the chain
for the best of them.

What happens once a step is left to the end of it: gathering parameters, reducing gradients, and the update. It is
counted for the rank that takes longest, after the last micro-batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise

import numpy as np

from planner.conversion import local_bytes
from planner.errors import InfeasibleError
from planner.exchange import crossing
from planner.fold import Folded
from planner.formulate import Assignment
from planner.graph import Node, Ref
from planner.layout import MICRO, PIPELINE, Axis, Layout
from planner.memory import USES
from planner.ops import OPS
from planner.ops.table import contraction_flops
from planner.pipeline.partition import cut
from planner.pipeline.schedule import versions
from planner.pipeline.simulate import Times, bubble
from planner.pipeline.simulate import step_s as simulated_s
from planner.pipeline.stages import Block, Chain, Cut, Pipeline, Saving, blocks_of, bound_s, stage_times
from planner.problem import Evaluation, Floats
from planner.recompute import LEVELS, Amount, Level, Recompute, ladder

BEST = 2
"""So many pipelines are cut for: those whose even cut, saving everything, takes least; more while none fits."""
QUICK, THOROUGH = 100, 1000
"""Effort for cuts that are one of many, and for the last; see :data:`planner.pipeline.partition.EFFORT`."""
TRIES = 3
"""So often a chain is cut anew with less memory when what works beside it did not fit."""


@dataclass(frozen=True)
class Shared:
    """What a rank of a pipeline has to do with a leaf that blocks of another one read too.

    Attributes:
        held: bytes by use.
        gather_s, reduce_s, update_s: once a step, as in :class:`Link`.
        sum_s: adding up its gradients, those of two ranks; of more it is hardly more.
    """

    held: Mapping[str, int]
    gather_s: float
    reduce_s: float
    update_s: float
    sum_s: float


@dataclass(frozen=True)
class Link:
    """One block of the chain, and what :class:`planner.pipeline.stages.Block` leaves out.

    Attributes:
        communication_s: what of the block's seconds is communication.
        gather_s, reduce_s, update_s: once a step: gathering parameters, reducing gradients as far as the last backward
            does not hide it, the optimizer's update.
        held: what of the block's held bytes is of which use, see :data:`planner.memory.USES`.
        levels: for each way to save, the level of recomputation that it is.
        working_bytes: for each way to save, what its operators need while they run and what it has made again.
        shared: the leaves that other blocks read too, by name. The first block that reads one counts it as its own.
    """

    block: Block
    communication_s: float
    gather_s: float
    reduce_s: float
    update_s: float
    held: Mapping[str, int]
    levels: tuple[Level, ...]
    working_bytes: tuple[int, ...]
    shared: tuple[tuple[str, Shared], ...] = ()

    @property
    def once_s(self) -> float:
        """Seconds once a step."""
        return self.gather_s + self.reduce_s + self.update_s

    @property
    def leanest(self) -> Link:
        """The same that saves least, whatever it takes."""
        return self.only(self.levels[-1])

    def only(self, level: Level) -> Link:
        """The same at one level of recomputation; a block that never recomputes stays as it is."""
        way = self.levels.index(level if level in self.levels else "none")
        kept = slice(way, way + 1)
        block = replace(self.block, savings=self.block.savings[kept])
        return replace(self, block=block, levels=self.levels[kept], working_bytes=self.working_bytes[kept])


@dataclass(frozen=True)
class TurnTimes:
    """What a step in turns is simulated from: seconds of a micro-batch by stage, and once a step by rank.

    See :class:`planner.pipeline.simulate.Times` and :class:`Link`.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    send_s: tuple[float, ...]
    gather_s: tuple[float, ...]
    reduce_s: tuple[float, ...]
    update_s: tuple[float, ...]

    @property
    def of_stages(self) -> Times:
        """The part that the schedule is simulated with."""
        return Times(*(np.array(each) for each in (self.forward_s, self.input_s, self.weight_s, self.send_s)))

    def bubble(self, micro_batches: int, step_s: float) -> float:
        """The part of the schedule's time in which ranks compute nothing, of all ranks together.

        Args:
            step_s: of the whole step, with what happens once.
        """
        once_s = max(map(sum, zip(self.gather_s, self.reduce_s, self.update_s, strict=True)))
        return bubble(micro_batches, self.of_stages, len(self.update_s), step_s - once_s)


@dataclass(frozen=True)
class Staged:
    """A chain on a pipeline: the cut, and what all of a step takes.

    Attributes:
        links: the chain, block by block.
        step_s: the simulated schedule and what happens once a step.
        rank_bytes: of every rank at its fullest.
    """

    pipeline: Pipeline
    links: tuple[Link, ...]
    cut: Cut
    step_s: float
    rank_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.rank_bytes)

    @property
    def evaluation(self) -> Evaluation:
        """What it takes, as of a plan in one turn; nothing of its communication is told apart."""
        return Evaluation(self.step_s, 0.0, self.peak_bytes, True)

    def at(self, level: Level) -> tuple[int, ...]:
        """Which blocks recompute at a level, by number."""
        return tuple(number for number, chosen in enumerate(self._levels) if chosen == level)

    def recompute(self, folded: Folded) -> Recompute:
        """How many instances of each kind recompute; which of them is the cut's to say."""
        kinds = [instance.kind for instance in folded.instances]
        counts = [Counter(kinds[number] for number in self.at(level)) for level in ("full", "selective")]
        full, selective = counts
        return Recompute(tuple(Amount(full[kind], selective[kind]) for kind in range(len(folded.kinds))))

    @cached_property
    def time_s(self) -> dict[str, float]:
        """Seconds of the step by use on the rank that has most to do, see :class:`planner.predict.Prediction`."""
        names, turns = ("compute", "recompute", "communication", "gradients", "optimizer"), self.pipeline.micro_batches
        ranks = np.zeros((self.pipeline.ranks, len(names)))
        for rank, link, way in self._placed:
            block = link.block
            work_s = block.forward_s + block.input_s + block.weight_s - link.communication_s
            again_s = block.savings[way].recompute_s
            ranks[rank, :3] += (turns * work_s, turns * again_s, turns * link.communication_s)
        ranks[:, 2:] += _once_s(self.links, self.pipeline, self.cut.bounds)
        busiest = ranks[ranks.sum(axis=1).argmax()].tolist()
        return {**dict(zip(names, busiest, strict=True)), "bubble": self.step_s - math.fsum(busiest)}

    @cached_property
    def times(self) -> TurnTimes:
        """What the step is simulated from."""
        once = _once_s(self.links, self.pipeline, self.cut.bounds).T
        found = stage_times(chain_of(self.links), self.cut.bounds, self.cut.savings)
        stages = (found.forward_s, found.input_s, found.weight_s, found.send_s)
        return TurnTimes(*(tuple(each.tolist()) for each in (*stages, *once)))

    @property
    def bubble(self) -> float:
        """See :meth:`TurnTimes.bubble`."""
        return self.times.bubble(self.pipeline.micro_batches, self.step_s)

    @cached_property
    def memory_bytes(self) -> dict[str, int]:
        """Bytes by use on the fullest rank."""
        fullest = self.rank_bytes.index(self.peak_bytes)
        found, working = Counter[str](), 0
        for rank, link, way in self._placed:
            if rank == fullest:
                found.update(link.held)
                working = max(working, link.working_bytes[way])
        for rank, each in _also_read(self.links, self.pipeline, self.cut.bounds):
            if rank == fullest:
                found.update(each.held)
        found["activations"] += self.peak_bytes - working - found.total()
        found["temporary"] = working
        return {use: found[use] for use in USES}

    @property
    def _levels(self) -> Iterator[Level]:
        """At which level every block recomputes."""
        return (link.levels[way] for link, way in zip(self.links, self.cut.savings, strict=True))

    @property
    def _placed(self) -> Iterator[tuple[int, Link, int]]:
        """The rank of every block, the block, and how it saves."""
        for home, (low, high) in zip(self.pipeline.placed, pairwise(self.cut.bounds), strict=True):
            for link, way in zip(self.links[low:high], self.cut.savings[low:high], strict=True):
                yield home, link, way


# ---- from an assignment to a chain -----------------------------------------------------------------------------------


def links_of(assignment: Assignment, level: Level | None = None, schedule: str | None = None) -> tuple[Link, ...]:
    """The blocks of an assignment as a chain; its own recomputation aside, which the cut decides anew.

    Args:
        level: the only one at which blocks that can recompute may; left out: any.
        schedule: that of the pipeline, where it is known, since 2bw holds two versions of the weights.
    """
    links = _Chain(assignment, versions(schedule)).links
    return links if level is None else tuple(link.only(level) for link in links)


class _Chain:
    """The links of one assignment; blocks that are entered and left alike are worked out once."""

    def __init__(self, assignment: Assignment, versions: int):
        self.assignment, self.space, self.versions = assignment, assignment.space, versions
        self.graph, self.folded = self.space.graph, self.space.folded
        self.levels = {level: ladder(self.folded, level).steps[0] for level in LEVELS}
        self._known: dict[object, Link] = {}

    @cached_property
    def links(self) -> tuple[Link, ...]:
        return tuple(self._link(number, sent) for number, sent in enumerate(self._sent_s()))

    def _sent_s(self) -> list[float]:
        """Seconds to send on, after each block, all values of it and earlier ones that later ones read."""
        space, graph, delivered = self.space, self.graph, self.assignment.delivered
        axis = Axis(PIPELINE, space.stages, space.mesh.size)
        sizes = (
            sum(local_bytes(graph.type_of(ref), delivered(ref), space.mesh) for ref in refs)
            for refs in crossing(self.folded)
        )
        return [space.cost.collective_s("send", axis, size) if size else 0.0 for size in sizes]

    def _link(self, number: int, send_s: float) -> Link:
        instance = self.folded.instances[number]
        leaves = self._leaves[number]
        shared = tuple(name for name in leaves if len(self.space.role_of[name]) == 2)
        entered = tuple(self.assignment.delivered(ref) for ref in instance.block.inputs)
        left = tuple((self.space.is_read(ref), self._leaving(ref)) for ref in instance.block.outputs)
        key = (instance.kind, entered, left, shared, send_s)
        if key not in self._known:
            self._known[key] = self._work_out(number, leaves, send_s)
        read = dict.fromkeys(ref.node for ref in instance.block.inputs if ref.node in self._shared)
        return replace(self._known[key], shared=tuple((name, self._shared[name]) for name in read))

    @cached_property
    def _shared(self) -> dict[str, Shared]:
        """The leaves that several blocks read."""
        readers = Counter(name for each in self.folded.instances for name in {ref.node for ref in each.block.inputs})
        pair = Axis(PIPELINE, 2, self.space.stages * self.space.mesh.size // 2)
        found: dict[str, Shared] = {}
        for name in (leaf.name for leaf in self.graph.leaves if readers[leaf.name] > 1 and self.space.stages > 1):
            layout, delivered = self.assignment.produced(Ref(name)), self.assignment.delivered(Ref(name))
            update_s, held = self._stored(name)
            gather_s, reduce_s, gathered = self._conversion(Ref(name), layout, delivered)
            sum_s = self.space.cost.collective_s("all_reduce", pair, held["gradients"]) if held["gradients"] else 0.0
            held.update(self._versions_of(name, gathered))
            found[name] = Shared(held, gather_s, reduce_s, update_s, sum_s)
        return found

    def _stored(self, name: str) -> tuple[float, Counter[str]]:
        """Seconds to update a leaf, and the bytes that are held of it, by use."""
        node, layout = self.graph.by_name[name], self.assignment.produced(Ref(name))
        update_s, all_bytes = self.space.storage(node, layout)
        if node.op != "param" or not node.results[0].grad:
            return update_s, Counter({"parameters" if node.op in ("param", "buffer") else "activations": all_bytes})
        size = local_bytes(node.results[0], layout, self.space.mesh)
        return update_s, Counter(parameters=size, gradients=size, optimizer=all_bytes - 2 * size)

    def _versions_of(self, name: str, gathered: int) -> Counter[str]:
        """Bytes of all versions of a leaf as operators use it, less what is stored anyway.

        Args:
            gathered: of what it is gathered into, with its gradient; 0: it is used as it is stored.
        """
        node, more = self.graph.by_name[name], self.versions - 1
        if gathered or node.op != "param" or not node.results[0].grad:
            return Counter(gathered=self.versions * gathered)
        size = local_bytes(node.results[0], self.assignment.produced(Ref(name)), self.space.mesh)
        return Counter(parameters=more * size, gradients=more * size)

    @cached_property
    def _leaves(self) -> list[list[str]]:
        """The leaves that are held with each block: with the first that reads them."""
        found: list[list[str]] = []
        seen: set[str] = set()
        for instance in self.folded.instances:
            names = dict.fromkeys(ref.node for ref in instance.block.inputs if self.graph.by_name[ref.node].is_leaf)
            found.append([name for name in names if name not in seen])
            seen.update(names)
        return found

    def _work_out(self, number: int, leaves: list[str], send_s: float) -> Link:
        instance, space = self.folded.instances[number], self.space
        turns = space.mesh.micro_batches
        forward = input_ = weight = communication = gather = reduce = hidden = update = 0.0
        held, grown, working = Counter[str](), Counter[str](), 0
        for name in leaves:
            layout = self.assignment.produced(Ref(name))
            update_s, stored = self._stored(name)
            update += update_s
            held.update(stored)
            delivered = self.assignment.delivered(Ref(name))
            there, back, gathered = self._conversion(Ref(name), layout, delivered)
            summed = self._summed_s(Ref(name), layout, delivered)
            weight, gather, reduce = weight + summed, gather + there, reduce + back - turns * summed
            grown[name] += gathered
        for node in instance.block.nodes:
            work = space.work(node, self.assignment.choice(node))
            forward += work.forward_s + work.inner_forward_s
            weighted = work.backward_s / 2 if self._has_weights(node) else 0.0
            input_ += work.backward_s - weighted + work.inner_backward_s
            weight, communication = weight + weighted, communication + work.inner_s
            hidden += work.backward_s * space.overlap
            working = max(working, work.transient_bytes)
            for ref, source, target in self._moves(node):
                there, back, gathered = self._conversion(ref, source, target)
                if self.graph.by_name[ref.node].op == "param":
                    summed = self._summed_s(ref, source, target)
                    weight, gather, reduce = weight + summed, gather + there, reduce + back - turns * summed
                    grown[ref.node] += gathered
                else:
                    forward, input_, communication = forward + there, input_ + back, communication + there + back
        for name in {**dict.fromkeys(leaves), **+grown}:
            held.update(self._versions_of(name, grown[name]))
        levels = LEVELS if len(self.folded.kinds[instance.kind]) > 1 else LEVELS[:1]
        savings = tuple(Saving(self._again_s(number, level), self._saved(number, level)) for level in levels)
        name = self.folded.names[instance.kind]
        return Link(
            Block(name, forward, input_, weight, sum(held.values()), savings, send_s),
            communication,
            gather,
            max(0.0, reduce - hidden),
            update,
            held,
            levels,
            tuple(working + self._dropped(number, level) for level in levels),
        )

    def _moves(self, node: Node) -> list[tuple[Ref, Layout, Layout]]:
        """Conversions of a node's operands, each value to each layout once, then of what it delivers."""
        assignment = self.assignment
        wanted = dict.fromkeys(zip(node.inputs, assignment.choice(node).operands, strict=True))
        found = [(ref, assignment.delivered(ref), layout) for ref, layout in wanted]
        for ref in (Ref(node.name, index) for index in range(len(node.results))):
            found.append((ref, assignment.produced(ref), assignment.delivered(ref)))
            found += [(ref, assignment.delivered(ref), layout) for layout in self._leaving(ref)]
        return [(ref, source, target) for ref, source, target in found if source != target]

    def _leaving(self, ref: Ref) -> tuple[Layout, ...]:
        """The layouts in which a value leaves the model."""
        return tuple(map(self.assignment.output_layout, self._positions.get(ref, ())))

    @cached_property
    def _positions(self) -> dict[Ref, list[int]]:
        """The numbers as which values leave the model."""
        found: dict[Ref, list[int]] = {}
        for position, ref in enumerate(self.space.leaving):
            found.setdefault(ref, []).append(position)
        return found

    def _conversion(self, ref: Ref, source: Layout, target: Layout) -> tuple[float, float, int]:
        """Seconds forward and backward, and the bytes of what a parameter is gathered into."""
        if source == target:
            return 0.0, 0.0, 0
        table, tensor = self.space.table(ref), self.graph.type_of(ref)
        at, to = table.index[source], table.index[target]
        grown = self.graph.by_name[ref.node].op == "param" and table.held[to] > table.held[at]
        more = int(table.held[to]) if grown else 0
        copies = 2 if tensor.grad and self.space.mesh.micro_batches > 1 else 1
        return float(table.forward_s[at, to]), float(table.backward_s[at, to]), more * copies

    def _summed_s(self, ref: Ref, source: Layout, target: Layout) -> float:
        """Seconds to add a parameter's gradient of one micro-batch to that of the others."""
        space, table = self.space, self.space.table(ref)
        steps = table.route(source, target) if source != target else ()
        summed = (step for step in steps if space.mesh.axes[step.axis].name == MICRO)
        pairs = [(table.index[step.before], table.index[step.after]) for step in summed]
        return math.fsum(float(table.backward_s[pair]) for pair in pairs) / space.mesh.micro_batches

    def _has_weights(self, node: Node) -> bool:
        """Whether an operator is a product with a parameter, so that half of its backward is the weight's."""
        row = OPS.get(node.op)
        return row is not None and row.flops is contraction_flops and any(map(self._is_weight, node.inputs))

    def _is_weight(self, ref: Ref) -> bool:
        node = self.graph.by_name[ref.node]
        row = OPS.get(node.op)
        if row is not None and row.view and len(node.inputs) == 1:
            return self._is_weight(node.inputs[0])
        return node.op == "param"

    def _saved(self, number: int, level: Level) -> int:
        recompute, assignment = self.levels[level], self.assignment
        nodes = self.folded.instances[number].block.nodes
        return sum(self.space.saved_bytes(node, assignment.choice(node), recompute) for node in nodes)

    def _again_s(self, number: int, level: Level) -> float:
        """Seconds of what a block makes again."""
        if level == "none":
            return 0.0
        instance, space, seconds = self.folded.instances[number], self.space, 0.0
        again = space.skeleton.again(instance.kind, level)
        for at, node in enumerate(instance.block.nodes):
            choice = self.assignment.choice(node)
            if at in again.operators:
                work = space.work(node, choice)
                seconds += work.forward_s + work.inner_forward_s
            wanted = {(node.inputs[i], choice.operands[i]) for i in again.taken[at]}
            moves = [(ref, self.assignment.delivered(ref), to) for ref, to in wanted]
            made = [Ref(node.name, index) for index in range(len(node.results)) if (at, index) in again.values]
            moves += [(ref, self.assignment.produced(ref), self.assignment.delivered(ref)) for ref in made]
            activations = [move for move in moves if self.graph.by_name[move[0].node].op != "param"]
            seconds += math.fsum(self._conversion(*move)[0] for move in activations)
        return seconds

    def _dropped(self, number: int, level: Level) -> int:
        """Bytes that a block has made again while it is undone."""
        if level == "none":
            return 0
        instance, space = self.folded.instances[number], self.space
        again = space.skeleton.again(instance.kind, level)
        return sum(
            space.bytes_of(node, self.assignment.choice(node), places)
            for node, places in zip(instance.block.nodes, again.dropped, strict=True)
        )


# ---- from a chain to a pipeline --------------------------------------------------------------------------------------


def stage(
    links: Sequence[Link],
    choices: Iterable[Pipeline],
    limit_bytes: int | None,
    cutoff_s: float = math.inf,
    effort: int = QUICK,
) -> Staged | None:
    """The pipeline of shortest step among some, as far as it beats ``cutoff_s``; ``None`` if none does, or none fits.

    Args:
        effort: what looking for each cut may take, see :func:`planner.pipeline.partition.cut`.
    """
    chain = chain_of(links)
    best: Staged | None = None
    for number, pipeline in enumerate(sorted(choices, key=lambda each: _even_s(each, chain))):
        if number >= BEST and (best is not None or cutoff_s < math.inf):
            break
        least_s = cutoff_s if best is None else best.step_s
        if bound_s(pipeline, chain) < least_s:
            found = _cut(links, pipeline, limit_bytes, least_s, effort)
            if found is not None and found.step_s < least_s:
                best = found
    return best


def chain_of(links: Sequence[Link]) -> Chain:
    """Links as a chain with counts."""
    return [(block, len(list(same))) for block, same in groupby(link.block for link in links)]


def _even_s(pipeline: Pipeline, chain: Chain) -> float:
    """Seconds of a cut into stages of about equal work that saves everything."""
    blocks = blocks_of(chain)
    total, done, bounds = math.fsum(block.work_s for block in blocks), 0.0, [0]
    for at, block in enumerate(blocks):
        left = len(blocks) - at
        wanted = pipeline.stages - len(bounds)
        if at > bounds[-1] and wanted and (left <= wanted or done >= total * len(bounds) / pipeline.stages):
            bounds.append(at)
        done += block.work_s
    times = stage_times(chain, (*bounds, len(blocks)), [0] * len(blocks))
    p = pipeline
    return simulated_s(p.schedule, p.ranks, p.micro_batches, p.virtual_stages, times)


def _cut(
    links: Sequence[Link], pipeline: Pipeline, limit_bytes: int | None, cutoff_s: float, effort: int
) -> Staged | None:
    """The best cut of a chain that fits with what works beside it."""
    spare = max(min(link.working_bytes) for link in links)
    for _ in range(TRIES):
        try:
            room = None if limit_bytes is None else max(0, limit_bytes - spare)
            found = cut(pipeline, chain_of(links), room, cutoff_s, effort)
        except InfeasibleError:
            return None
        if found is None:
            return None
        priced = price(links, pipeline, found)
        if limit_bytes is None or priced.peak_bytes <= limit_bytes:
            return priced
        spare += priced.peak_bytes - limit_bytes
    return None


def price(links: Sequence[Link], pipeline: Pipeline, found: Cut) -> Staged:
    """All that a step of a cut takes."""
    working = [0] * pipeline.ranks
    for home, (low, high) in zip(pipeline.placed, pairwise(found.bounds), strict=True):
        for link, way in zip(links[low:high], found.savings[low:high], strict=True):
            working[home] = max(working[home], link.working_bytes[way])
    beside = list(working)
    for home, each in _also_read(links, pipeline, found.bounds):
        beside[home] += sum(each.held.values())
    held = tuple(held + more for held, more in zip(found.rank_bytes, beside, strict=True))
    once_s = float(_once_s(links, pipeline, found.bounds).sum(axis=1).max())
    return Staged(pipeline, tuple(links), found, found.step_s + once_s, held)


def _once_s(links: Sequence[Link], pipeline: Pipeline, bounds: Sequence[int]) -> Floats:
    """Seconds once a step of every rank [rank, what]: gathering, reducing and the update."""
    found = np.zeros((pipeline.ranks, 3))
    for home, (low, high) in zip(pipeline.placed, pairwise(bounds), strict=True):
        for link in links[low:high]:
            found[home] += link.gather_s, link.reduce_s, link.update_s
    for home, each in _also_read(links, pipeline, bounds):
        found[home] += each.gather_s, each.reduce_s + each.sum_s, each.update_s
    return found


def _also_read(links: Sequence[Link], pipeline: Pipeline, bounds: Sequence[int]) -> Iterator[tuple[int, Shared]]:
    """What ranks have to do with leaves that blocks of others read too, beside what the first such block counts."""
    readers: dict[str, dict[int, Shared]] = {}
    for home, (low, high) in zip(pipeline.placed, pairwise(bounds), strict=True):
        for link in links[low:high]:
            for name, each in link.shared:
                readers.setdefault(name, {})[home] = each
    for ranks in (found for found in readers.values() if len(found) > 1):
        for number, (rank, each) in enumerate(ranks.items()):
            yield rank, each if number else Shared({}, 0.0, 0.0, 0.0, each.sum_s)
