"""Predicts what one step of an assignment does: every collective, and where bytes and seconds go.

The collectives are enumerated as the rewrite emits them, call by call, so that a counter around
``torch.distributed`` must observe exactly the same. Seconds and bytes are those of the solver's
objective, by use: they add up to its step time. Bytes are those of :mod:`planner.analysis.memory`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from planner.analysis.memory import LARGEST, Usage, usage
from planner.analysis.memory.remat_demand import gathered_again, is_asked
from planner.analysis.pipeline.peak_report import peak_micro_batched
from planner.analysis.pipeline.staged import MicroBatchTimes, Staged
from planner.base.formatting import in_bytes, in_lines, in_seconds, in_shares, labelled
from planner.base.symbolic_float import at_least_zero
from planner.formulation.assignment import Assignment, GatherBucket
from planner.formulation.remat.levels import Level
from planner.formulation.resharding import Collective, Route
from planner.formulation.stage_boundaries import Exchange, crossing, exchanges
from planner.formulation.strategies import Choice
from planner.formulation.variables import Variable
from planner.ir.folding import Instance
from planner.ir.graph import Node, Ref
from planner.ir.layout import MICRO, PIPELINE, Layout
from planner.solve.pipeline.schedule import Schedule


@dataclass(frozen=True, repr=False)
class Prediction:
    """One training step on the slowest rank, and the fullest.

    Attributes:
        step_time_s: seconds of the whole step.
        peak_bytes: bytes at the peak.
        time_s: seconds by use: ``compute``, ``recompute`` (what backward recomputes, and what that communicates),
            ``communication`` (of activations, and gathering parameters, in backward too),
            ``gradients`` (their reduction, as far as backward does not hide it), ``optimizer``, ``bubble`` (waiting
            for other stages), ``offload`` (waiting for what moves between the device and the host).
        memory_bytes: bytes at the peak by use: ``parameters``, ``gradients``, ``optimizer``, ``gathered``
            (parameters that are used in a larger layout than they are stored in), ``activations`` (inputs, and what
            forward made), ``temporary`` (gradients of activations, and what operators need while they run).
        collectives: each distinct call and how often a step makes it; with micro-batches, by one rank of every stage
            together.
        fullest_at: what runs at the peak; with micro-batches also which rank of the pipeline is fullest, and
            how many micro-batches are in flight on it.
        largest: the largest tensors alive then, and their bytes; with micro-batches those of all micro-batches in
            flight together, ``x 4``.
        exchanges: each distinct call among the ranks of a pipeline, and how often a step makes it.
        micro_batches: what a micro-batched step is simulated from.
    """

    step_time_s: float
    peak_bytes: int
    time_s: Mapping[str, float]
    memory_bytes: Mapping[str, int]
    collectives: tuple[tuple[Collective, int], ...]
    fullest_at: str = ""
    largest: tuple[tuple[str, int], ...] = ()
    exchanges: tuple[tuple[Exchange, int], ...] = ()
    micro_batch_times: MicroBatchTimes | None = None

    def __str__(self) -> str:
        rows = [
            ("step", in_seconds(self.step_time_s)),
            ("", in_shares(self.time_s, self.step_time_s, in_seconds)),
            ("memory", f"{in_bytes(self.peak_bytes)} on the fullest device"),
            ("", in_shares(self.memory_bytes, self.peak_bytes, in_bytes)),
        ]
        return labelled([*rows, *([("", self.fullest)] if self.fullest_at else [])])

    __repr__ = __str__

    @property
    def fullest(self) -> str:
        """When or where memory is fullest, and with what."""
        told = in_lines(f"fullest in {self.fullest_at}".split(", "))
        largest = [f"{name} {in_bytes(size)}" for name, size in self.largest[:3]]
        return told + ("\n" + in_lines([f"with {largest[0]}", *largest[1:], "..."]) if largest else "")

    @property
    def calls(self) -> tuple[tuple[Collective, int], ...]:
        """Collectives and exchanges, the latter on the axis of stages: what one rank of every stage passes in."""
        found = Counter(dict(self.collectives))
        for each, count in self.exchanges:
            passing = 1 if each.kind == "send" else len(each.ranks)
            found[Collective(each.kind, PIPELINE, each.bytes_in, each.phase)] += count * passing
        return tuple(sorted_calls(found))


Calls = Counter[Collective]


def collectives(
    assignment: Assignment,
    bounds: Sequence[int] = (),
    late: Sequence[int] = (),
    stages: Collection[int] | None = None,
) -> Calls:
    """Every collective call of one forward and backward pass on one rank.

    Args:
        bounds: where the blocks are cut into stages, if they are: the calls are those of one rank of every stage.
        late: of each stage, of how many micro-batches it finds the gradients of weights later than others, see
            :attr:`planner.solve.pipeline.schedule.Schedule.late`.
        stages: of these alone; ``None``: of every one.
    """
    calls: Calls = Counter()
    for each in calls_by_block(assignment, bounds, late, stages).values():
        calls.update(each)
    return calls


def collectives_of_rank(assignment: Assignment, schedule: Schedule, bounds: Sequence[int], rank: int) -> Calls:
    """Those of one rank of a pipeline, but for messages: of its stages, and on the axis of stages, sums of gradients of
    parameters that other ranks read, too.
    """
    home = schedule.rank_of
    calls = collectives(assignment, bounds, schedule.late, [stage for stage, at in enumerate(home) if at == rank])
    for each, count in exchanges(assignment, home, bounds).items():
        if each.kind == "all_reduce" and each.is_made_by(rank):
            calls[Collective(each.kind, PIPELINE, each.bytes_in, each.phase)] += count
    return calls


def calls_by_block(
    assignment: Assignment,
    bounds: Sequence[int] = (),
    late: Sequence[int] = (),
    stages: Collection[int] | None = None,
) -> dict[int | None, Calls]:
    """Distinct block -> its calls over all instances; ``None`` holds those of leaves and outputs."""
    space, instances = assignment.space, assignment.space.folded.instances
    ranges = [range(low, high) for low, high in pairwise(bounds)] or [range(len(instances))]
    own = range(len(ranges)) if stages is None else stages
    blocks = {number for stage in own for number in ranges[stage]}
    reading = _stages_reading(assignment, ranges)
    made_in = {ref: n for n, each in enumerate(ranges) for number in each for ref in instances[number].block.outputs}
    found: dict[int | None, Calls] = {None: Counter()}
    for instance, level, twice, times in _alike(assignment, blocks, _backward_twice(assignment, bounds, late)):
        calls = found.setdefault(instance.kind, Counter())
        again = _calls_again(assignment, instance, level)
        for call, count in (_block_calls(assignment, instance) + again).items():
            calls[call] += count * times
        if twice and is_asked(assignment, instance, level, of_weights=True):
            for call, count in again.items():
                calls[call] += count // space.mesh.micro_batches * twice * times
    for leaf in filter(space.is_read, space.decision_graph.variables.resharded_leaves):
        backward = leaf in space.graph.differentiated
        route = assignment.shared_route(leaf)
        calls = _route_calls(assignment, leaf, route, backward, assignment.summed_first(leaf, route))
        often = len(reading[leaf.node].intersection(own))
        found[None].update({call: count * often for call, count in calls.items()})
    for position, ref in enumerate(space.leaving):
        if made_in.get(ref, len(ranges) - 1) not in own:
            continue
        backward = position in space.graph.roots
        found[None].update(_route_calls(assignment, ref, assignment.output_route(position), backward))
    return found


def _backward_twice(assignment: Assignment, bounds: Sequence[int], late: Sequence[int]) -> list[int]:
    """In how many micro-batches each instance runs its backward in two parts, each of which needs what it recomputes.

    Where nothing with a gradient comes from the stage before, all is left to the second part.
    """
    space = assignment.space
    found = [0] * len(space.folded.instances)
    behind = crossing(space.folded) if any(late) else []
    for micro_batches, (low, high) in zip(late, pairwise(bounds), strict=False):
        if micro_batches and low and not space.graph.differentiated.isdisjoint(behind[low - 1]):
            found[low:high] = [micro_batches] * (high - low)
    return found


def _stages_reading(assignment: Assignment, stages: Sequence[range]) -> dict[str, set[int]]:
    """Leaf with a reshard point -> the stages that read it, each for itself; the first where none does."""
    readers: dict[str, set[int]] = {
        leaf.node: set() for leaf in assignment.space.decision_graph.variables.resharded_leaves
    }
    for stage, blocks in enumerate(stages):
        for number in blocks:
            for ref in assignment.space.folded.instances[number].block.inputs:
                if ref.node in readers:
                    readers[ref.node].add(stage)
    return {name: found or {0} for name, found in readers.items()}


def sorted_calls(calls: Mapping[Collective, int]) -> list[tuple[Collective, int]]:
    """Calls in a fixed order: backward before forward, by axis, kind and bytes."""
    return sorted(calls.items(), key=lambda item: (item[0].phase, item[0].axis, item[0].kind, item[0].bytes_in))


@dataclass(frozen=True)
class Conversion:
    """A value changes layout: as operand number ``place`` of ``reader``, or (no reader) once it is made."""

    ref: Ref
    source: Layout
    target: Layout
    place: str
    reader: str = ""


def conversions(assignment: Assignment) -> list[tuple[Conversion, int]]:
    """Every resharding of a step, of one representative of those that are alike, and how often it occurs."""
    space = assignment.space
    found: list[tuple[Conversion, int]] = []

    def add(conversion: Conversion, times: int) -> None:
        if conversion.source != conversion.target:
            found.append((conversion, times))

    def deliver(ref: Ref, times: int) -> None:
        if space.reshard_point_of(ref) is not None:
            produced, shared = assignment.produced(ref), assignment.consumer_layout(ref)
            add(Conversion(ref, produced, shared, f"result {ref.index}"), times)

    for leaf in space.decision_graph.variables.resharded_leaves:
        deliver(leaf, 1)
    for instance, *_, times in _alike(assignment):
        for node in instance.block.nodes:
            for index in range(len(node.results)):
                deliver(Ref(node.name, index), times)
            for position, ref in _operands(assignment, node):
                wanted = assignment.choice(node).operands[position]
                add(Conversion(ref, assignment.consumer_layout(ref), wanted, f"operand {position}", node.name), times)
    for position, ref in enumerate(space.leaving):
        add(
            Conversion(ref, assignment.consumer_layout(ref), assignment.output_layout(position), f"output {position}"),
            1,
        )
    return found


def _alike(
    assignment: Assignment, blocks: Collection[int] | None = None, twice: Sequence[int] = ()
) -> list[tuple[Instance, Level, int, int]]:
    """One instance of each block, entry layout and level of recomputation, in how many micro-batches it runs its
    backward twice, and how many there are: they do the same.

    Args:
        blocks: by number of the instance, of which there are no others; ``None``: all.
    """
    space, variable_of = assignment.space, assignment.space.variable_of
    found: dict[object, tuple[Instance, Level, int, int]] = {}
    layouts: dict[tuple[Variable, int], Layout] = {}
    for number, (instance, (kind, nth)) in enumerate(
        zip(space.folded.instances, space.decision_graph.blocks.numbers, strict=True)
    ):
        if blocks is not None and number not in blocks:
            continue
        level, often = assignment.recompute.level(kind, nth), twice[number] if twice else 0
        read = tuple(space.is_read(ref) for ref in instance.block.outputs)
        flows = tuple(ref in space.graph.differentiated for ref in instance.block.outputs)
        values = [(variable_of[ref.node], ref.index) for ref in instance.block.inputs]
        for value, ref in zip(values, instance.block.inputs, strict=True):
            if value not in layouts:
                layouts[value] = assignment.consumer_layout(ref)
        key = (kind, level, often, read, flows, tuple([layouts[value] for value in values]))
        first, _, _, times = found.get(key, (instance, level, often, 0))
        found[key] = first, level, often, times + 1
    return list(found.values())


def _operands(assignment: Assignment, node: Node) -> list[tuple[int, Ref]]:
    """Operands by position; a value that is taken twice in one layout is converted once."""
    choice = assignment.choice(node)
    first = {(ref, choice.operands[position]): position for position, ref in reversed([*enumerate(node.inputs)])}
    return sorted((position, ref) for (ref, _), position in first.items())


def _route_calls(assignment: Assignment, ref: Ref, route: Route, backward: bool, once: int = 0) -> Calls:
    """Calls of a resharding; those of ``backward`` are made only if a gradient comes back through it.

    Args:
        once: so many of the first steps are taken once a step.
    """
    space, found = assignment.space, Calls()
    micro_batches = space.gathers_per_step if space.graph.by_name[ref.node].op == "param" else space.mesh.micro_batches
    for place, step in enumerate(route):
        for call in step.collectives(space.graph.type_of(ref), space.mesh, space.widening(ref)):
            if call.axis != MICRO and (backward or call.phase == "forward"):
                found[call] += 1 if place < once else micro_batches
    return found


def _block_calls(assignment: Assignment, instance: Instance) -> Calls:
    """Calls of one instance of a block: reshardings of operands and results, local forms, and gathered parameters."""
    space = assignment.space
    graph, mesh = space.graph, space.mesh
    calls: Calls = Counter()
    reached: set[Ref] = set()
    for node in instance.block.nodes:
        for index in range(len(node.results)):
            ref = Ref(node.name, index)
            if space.is_read(ref):
                backward = ref in graph.differentiated
                calls.update(_route_calls(assignment, ref, assignment.shared_route(ref), backward))
        choice = assignment.choice(node)
        differentiated = any(Ref(node.name, i) in graph.differentiated for i in range(len(node.results)))
        for position, ref in _operands(assignment, node):
            if differentiated:
                reached.add(ref)
            if not assignment.gathering_route(node, position):
                route = assignment.operand_route(node, position)
                calls.update(_route_calls(assignment, ref, route, differentiated))
        for axis, inner, bytes_in, times in space.inner_calls(space.rules[node.name], choice, differentiated):
            calls[Collective(inner.kind, axis.name, bytes_in, inner.phase)] += times * mesh.micro_batches
    for bucket in assignment.gather_buckets(instance.block):
        calls.update(_bucket_calls(assignment, bucket, backward=not reached.isdisjoint(bucket)))
    return calls


def _bucket_calls(assignment: Assignment, bucket: GatherBucket, backward: bool) -> Calls:
    """Calls that gather a bucket, one per step; those of ``backward`` reduce its gradients."""
    calls: Calls = Counter()
    space = assignment.space
    once = assignment.summed_together(bucket)
    for place, steps in enumerate(zip(*bucket.values(), strict=True)):
        times = 1 if place < once else space.gathers_per_step
        made = [
            step.collectives(space.graph.type_of(ref), space.mesh, space.widening(ref))
            for ref, step in zip(bucket, steps, strict=True)
        ]
        for each in zip(*made, strict=True):
            if each[0].axis != MICRO and (backward or each[0].phase == "forward"):
                calls[replace(each[0], bytes_in=sum(call.bytes_in for call in each))] += times
    return calls


def _calls_again(assignment: Assignment, instance: Instance, level: Level) -> Calls:
    """Calls that one instance of a block recomputes in backward, to recompute."""
    space = assignment.space
    calls: Calls = Counter()
    if not is_asked(assignment, instance, level):
        return calls
    again = assignment.again(instance.kind, level)

    def add(ref: Ref, route: Route) -> None:
        repeat(_route_calls(assignment, ref, route, backward=False))

    def repeat(forward: Calls) -> None:
        calls.update({replace(call, phase="backward"): count for call, count in forward.items()})

    for at, node in enumerate(instance.block.nodes):
        choice = assignment.choice(node)
        for index in range(len(node.results)):
            if (at, index) in again.delivered and space.is_read(Ref(node.name, index)):
                add(Ref(node.name, index), assignment.shared_route(Ref(node.name, index)))
        taken = {(node.inputs[position], choice.operands[position]): position for position in again.taken[at]}
        for (ref, _), position in taken.items():
            if space.unsharding.once_per_step and space.graph.by_name[ref.node].op == "param":
                continue
            if not assignment.gathering_route(node, position):
                add(ref, assignment.operand_route(node, position))
        if at in again.operators:
            inside = space.inner_calls(space.rules[node.name], choice, differentiated=False)
            for axis, inner, bytes_in, times in inside:
                calls[Collective(inner.kind, axis.name, bytes_in, "backward")] += times * space.mesh.micro_batches
    gathered = gathered_again(assignment, instance, level)
    for bucket in assignment.gather_buckets(instance.block):
        if not gathered.isdisjoint(bucket):
            repeat(_bucket_calls(assignment, bucket, backward=False))
    return calls


def use_again(assignment: Assignment, ref: Ref) -> str:
    """The use of seconds in which a value is converted again in backward."""
    return "communication" if assignment.space.graph.by_name[ref.node].op == "param" else "recompute"


def _converted_again_s(assignment: Assignment) -> dict[str, float]:
    """Seconds of the reshardings that backward repeats, by use."""
    space, seconds = assignment.space, {"communication": 0.0, "recompute": 0.0}
    decision_graph, recompute = space.decision_graph, assignment.recompute
    always, if_larger = decision_graph.flows_again(recompute), decision_graph.as_made(recompute).again
    for flow in dict.fromkeys((*always, *if_larger)):
        tail, head, ref, positions = flow
        source = assignment.chosen[tail]
        layout = source.results[ref.index] if isinstance(source, Choice) else source
        reader = assignment.chosen[head]
        wanted = [reader.operands[p] for p in positions] if isinstance(reader, Choice) else [reader]
        for each in dict.fromkeys(wanted):
            times = always.get(flow, 0) + if_larger.get(flow, 0) * assignment.is_larger(ref, layout, each)
            seconds[use_again(assignment, ref)] += space.conversion_s(ref, layout, each)[0] * times
    return seconds


def predict_micro_batched(assignment: Assignment, staged: Staged) -> Prediction:
    """The same for a micro-batched step: seconds of the busiest rank and its waiting, bytes of the fullest; the
    collectives of one rank of every stage together.
    """
    fullest = peak_micro_batched(assignment, staged)
    recomputing = replace(assignment, recompute=staged.recompute(assignment.space.folded))
    return Prediction(
        staged.step_s,
        staged.peak_bytes,
        staged.time_s,
        fullest.by_use(),
        tuple(sorted_calls(collectives(recomputing, staged.cut.bounds, staged.pipeline.late))),
        fullest.at,
        fullest.largest[:LARGEST],
        exchanges=tuple(exchanges(assignment, staged.pipeline.placed, staged.cut.bounds).items()),
        micro_batch_times=staged.times,
    )


def predict(assignment: Assignment, step_time_s: float, memory: Usage | None = None) -> Prediction:
    """Break a step down by use; ``step_time_s`` is the evaluation's, ``memory`` what it holds where that is known."""
    time = seconds_by_use(assignment)
    memory = memory or usage(assignment)
    return Prediction(
        step_time_s,
        memory.peak_bytes,
        time,
        memory.by_use(),
        tuple(sorted_calls(collectives(assignment))),
        memory.peak_at,
        tuple((held.name, held.bytes) for held in memory.alive[:LARGEST]),
    )


def seconds_by_use(assignment: Assignment) -> dict[str, float]:
    """Where the seconds of a step without micro-batches go, see :class:`Prediction`."""
    space = assignment.space
    uses = ("compute", "recompute", "communication", "gradients", "optimizer", "offload")
    time = dict.fromkeys(uses, 0.0)
    cover = 0.0
    for variable, names in space.members.items():
        node, times = space.graph.by_name[names[0]], len(names)
        if node.is_leaf:
            layout = assignment.produced(Ref(node.name))
            if node.op == "param":
                time["optimizer"] += space.update_s(node, layout) * times
                time["offload"] += space.moved_s(node, layout) * times
            continue
        work = space.work(node, assignment.choice(node))
        time["compute"] += (work.forward_s + work.backward_s) * times
        time["communication"] += work.inner_s * times
        again = space.decision_graph.runs_again(variable, assignment.recompute)
        time["recompute"] += (work.forward_s + work.inner_forward_s) * again
        cover += work.backward_s * space.overlap * times
    for each, times in conversions(assignment):
        forward_s, backward_s = space.conversion_s(each.ref, each.source, each.target)
        time["communication"] += forward_s * times
        is_param = space.graph.by_name[each.ref.node].op == "param"
        time["gradients" if is_param else "communication"] += backward_s * times
    for use, seconds in _converted_again_s(assignment).items():
        time[use] += seconds
    if space.unsharding.overlaps_reduce:
        time["gradients"] = at_least_zero(time["gradients"] - cover)
    if space.training.tier == "device":
        del time["offload"]
    return time
