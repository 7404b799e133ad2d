"""The programs of a pipeline's stages, from a captured graph, an assignment and the stage boundaries.

A stage converts its parameters into the layouts in which its operators use them once a step, and then runs the same
program for one micro-batch after the other; or its blocks convert them, in each micro-batch. What leaves a stage goes
to the next one, values that only later ones read included. A loss that is a mean over all tokens that count needs to
know how many do before the first backward, whether it counts them itself or is divided by their sum: a third program
finds what one micro-batch adds to that, from the inputs alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from autopar.capture.capture import Captured
from autopar.emit.block_program import (
    ProgramBuilder,
    entries_of,
    is_param,
    known_before,
    module_of,
    parameters_of,
    sums_early,
)
from autopar.emit.local_ops import draws, is_random
from autopar.emit.rewrite import Root, targets_of
from autopar.runtime.layers.loss import token_count
from autopar.runtime.pipeline.stage import Passed, Stage
from planner.analysis.offload.chunks import Chunk, before
from planner.base.errors import PlanError
from planner.formulation.assignment import Assignment
from planner.formulation.stage_boundaries import crossing
from planner.ir.graph import Node, Ref
from planner.ir.layout import MICRO, I, Layout, R, local_shape


@dataclass(frozen=True)
class Joints:
    """Where the programs of a stage fit the plan.

    Attributes:
        used: the parameters that ``gather`` gives, each with the layout.
        received, sent: the values that come from the stage before, and go to the one after.
    """

    used: tuple[tuple[Ref, Layout], ...]
    received: tuple[Ref, ...]
    sent: tuple[Ref, ...]


def stages_of(
    captured: Captured,
    assignment: Assignment,
    bounds: Sequence[int],
    groups: Mapping[str, Any],
    device: torch.device,
) -> list[Outline]:
    """Every stage in order; a process emits the programs of those that it runs.

    Args:
        captured, groups, device: as in :func:`autopar.emit.rewrite.rewrite`; ``"micro"`` names the micro-batches.
        assignment: what to do, on the mesh of one stage.
        bounds: stage ``s`` has the blocks from ``bounds[s]`` up to, not including, ``bounds[s + 1]``.

    Raises:
        PlanError: the model does something that a micro-batched step cannot.
    """
    _check(assignment)
    cut = _Cut(assignment, bounds)
    targets = targets_of(captured)
    outlines = [Outline(targets, cut, number, groups, device) for number in range(len(bounds) - 1)]
    _check_updates(outlines)
    return outlines


def _check(assignment: Assignment) -> None:
    space = assignment.space
    returned = [ref.node for ref in space.leaving if is_param(assignment, ref)]
    if returned:
        target = space.graph.by_name[returned[0]].target
        raise PlanError(
            f"the model returns its parameter {target!r}, which a micro-batched step does not: return a result"
        )


def _check_updates(outlines: Sequence[Outline]) -> None:
    """Refuse buffers that one stage changes and another reads, which would have to wait for it."""
    home = {name: outline.number for outline in outlines for name in outline.updates}
    for outline in outlines:
        for name in outline.leaves:
            if home.get(name, outline.number) != outline.number:
                buffer = outline.graph.by_name[name].target
                raise PlanError(
                    f"the model changes its buffer {buffer!r} in stage {home[name]} and reads it in stage "
                    f"{outline.number}: pin fewer stages, or 'pipeline' 1 (micro-batches alone), which leaves one"
                )


class _Cut:
    """What each stage has, and what goes from one to the next.

    Attributes:
        crossing: after each stage, the values that it or earlier ones made and later ones read.
        outputs: of each stage, the positions of the outputs that leave the model there.
    """

    def __init__(self, assignment: Assignment, bounds: Sequence[int]):
        self.assignment, self.space = assignment, assignment.space
        self.numbers = [range(low, high) for low, high in pairwise(bounds)]
        instances, behind = self.space.folded.instances, crossing(self.space.folded)
        home = {number: stage for stage, numbers in enumerate(self.numbers) for number in numbers}
        made = {ref: home[number] for number, each in enumerate(instances) for ref in each.block.outputs}
        count = len(self.numbers)
        self.crossing = [behind[numbers[-1]] for numbers in self.numbers]
        self.outputs = [
            [position for position, ref in enumerate(self.space.leaving) if made.get(ref, count - 1) == stage]
            for stage in range(count)
        ]


class Outline:
    """What a stage has of the model; its programs are emitted from that.

    Attributes:
        parameters, leaves, outputs: as in :class:`autopar.runtime.pipeline.stage.Stage`.
        updates: the leaves of the buffers that it changes.
        draws: how often its program draws random numbers.
    """

    def __init__(
        self, targets: Mapping[str, Any], cut: _Cut, number: int, groups: Mapping[str, Any], device: torch.device
    ):
        self.targets, self.cut, self.number, self.groups, self.device = targets, cut, number, groups, device
        self.assignment, self.space = cut.assignment, cut.space
        self.graph = self.space.graph
        self.blocks = [self.space.folded.instances[at].block for at in cut.numbers[number]]
        self.received = cut.crossing[number - 1] if number else []
        self.sent = cut.crossing[number]
        self.outputs = tuple(cut.outputs[number])
        self.known: dict[str, Node | Ref] = {}
        for block in self.blocks:
            self.known |= known_before(block, self.assignment)
        self.behind = {name: self._behind(each) for name, each in self.known.items()}
        read = [ref for block in self.blocks for ref in entries_of(block, self.assignment) if isinstance(ref, Ref)]
        read += [self.space.leaving[position] for position in self.outputs]
        taken = {ref.node for ref in read}.union(*self.behind.values())
        stored = {ref.node for block in self.blocks for ref in block.inputs if is_param(self.assignment, ref)}
        self.leaves = tuple(leaf.name for leaf in self.graph.leaves if leaf.name in taken - stored)
        self.parameters = tuple(leaf.name for leaf in self.graph.leaves if leaf.name in stored)
        buffers = {leaf.target: leaf.name for leaf in self.graph.leaves if leaf.op == "buffer"}
        changed = (position - len(self.graph.outputs) for position in self.outputs)
        self.updates = tuple(buffers[self.graph.updates[at][0]] for at in changed if at >= 0)
        self.draws = sum(draws(node, targets[node.name]) for block in self.blocks for node in block.nodes)

    @property
    def joints(self) -> Joints:
        """What the programs take and give."""
        if not self.space.unsharding.once_per_step:
            stored = tuple((Ref(name), self._summed(Ref(name))) for name in self.parameters)
            return Joints(stored, tuple(self.received), tuple(self.sent))
        used = (key for block in self.blocks for key in parameters_of(block, self.assignment))
        once = tuple((ref, self._in_all_micro_batches(layout)) for ref, layout in used)
        return Joints(once, tuple(self.received), tuple(self.sent))

    def _summed(self, parameter: Ref) -> Layout:
        """The layout of a parameter that micro-batches gather: stored, apart from where its gradient is summed once."""
        routes = [self.assignment.shared_route(parameter)]
        routes += [
            bucket[parameter]
            for block in self.blocks
            for bucket in self.assignment.gather_buckets(block)
            if parameter in bucket
        ]
        found = self.assignment.produced(parameter)
        for route in routes:
            for step in route[: self.assignment.summed_first(parameter, route)]:
                found = step.after
        return found

    def _in_all_micro_batches(self, layout: Layout) -> Layout:
        """The layout of a parameter before a micro-batch takes its part of it."""
        taken = [
            name == MICRO and local_type != I for name, local_type in zip(self.space.mesh.names, layout, strict=True)
        ]
        return tuple(R if is_taken else each for is_taken, each in zip(taken, layout, strict=True))

    def stage(self) -> Stage:
        """All of it, with programs."""
        return Stage(
            number=self.number,
            first_block=self.cut.numbers[self.number].start,
            parameters=self.parameters,
            leaves=self.leaves,
            received=tuple(map(self._passed, self.received)),
            sent=tuple(map(self._passed, self.sent)),
            outputs=self.outputs,
            gather=self._gather() if self.space.unsharding.once_per_step else self._sums(),
            count=self._count() if self.known else None,
            program=self._program() if self.space.unsharding.once_per_step else self._program_of_stored(),
        )

    def _passed(self, ref: Ref) -> Passed:
        tensor = self.graph.type_of(ref)
        shape = local_shape(tensor.shape, self.assignment.consumer_layout(ref), self.space.mesh.sizes)
        assert shape is not None
        return Passed(shape, getattr(torch, tensor.dtype), ref in self.graph.differentiated)

    def _entered(self, leaves: Sequence[str], is_of_micro_batch: bool) -> ProgramBuilder:
        """A program that takes leaves, each as its readers find it."""
        body = ProgramBuilder(self.assignment, self.targets, self.device, is_of_micro_batch)
        for name in leaves:
            body.enter(Ref(name))
        for name in leaves:
            body.reshard_shared(Ref(name))
        return body

    def _gather(self) -> fx.GraphModule:
        """Parameters as they are stored -> as the blocks use them, block by block."""
        body = self._entered(self.parameters, is_of_micro_batch=False)
        results = []
        for block in self.blocks:
            body.ready.clear()
            body.gather_parameters_of(block)
            for node in block.nodes:
                for position, ref in enumerate(node.inputs):
                    key = ref, self.assignment.choice(node).operands[position]
                    if is_param(self.assignment, ref) and key not in body.ready:
                        route = self.assignment.operand_route(node, position)
                        body.ready[key] = body.converted(body.values[ref], route, body.reduce_dtype(ref))
            results += [body.ready[key] for key in parameters_of(block, self.assignment)]
        body.graph.output(tuple(results))
        return module_of(dict(self.groups), body.graph, "Gather")

    def _sums(self) -> fx.GraphModule | None:
        """Parameters as they are stored -> as micro-batches gather them, with gradients that are summed once a step;
        ``None`` where none are.
        """
        body = ProgramBuilder(self.assignment, self.targets, self.device, is_of_micro_batch=False)
        for parameter in map(Ref, self.parameters):
            route = self.assignment.shared_route(parameter)
            body.enter(parameter)
            body.sum(parameter, route[: self.assignment.summed_first(parameter, route)])
        for block in self.blocks:
            body.sum_parameters(block)
        results = tuple(body.values[Ref(name)] for name in self.parameters)
        if all(value.op == "placeholder" for value in results):
            return None
        body.graph.output(results)
        return module_of(dict(self.groups), body.graph, "Sums")

    def _count(self) -> fx.GraphModule:
        """Leaves -> what one micro-batch adds to each number that is known before."""
        body = self._entered(self.leaves, is_of_micro_batch=True)
        done: set[str] = set()
        results = []
        for name, each in self.known.items():
            for node in self.graph.nodes:
                if node.name in self.behind[name] and not node.is_leaf and node.name not in done:
                    body.emit(node, frozenset(Ref(node.name, i) for i in range(len(node.results))))
                    done.add(node.name)
            results.append(self._term(body, each))
        body.graph.output(tuple(results))
        return module_of(dict(self.groups), body.graph, "Count")

    def _term(self, body: ProgramBuilder, each: Node | Ref) -> fx.Node:
        """One micro-batch's term of a sum, or the number of its tokens that a loss counts."""
        if isinstance(each, Ref):
            node = self.graph.by_name[each.node]
            return body.taken[each.node, len(node.inputs) + each.index]
        target, weight = (self._operand(body, each, name) for name in ("target", "weight"))
        ignored: Any = each["ignore_index"]
        return body.graph.call_function(token_count, (target, weight, ignored))

    def _operand(self, body: ProgramBuilder, loss: Node, name: str) -> fx.Node | None:
        ref = loss[name]
        return body.operand(loss, loss.inputs.index(ref)) if isinstance(ref, Ref) else None

    def _behind(self, each: Node | Ref) -> set[str]:
        """The operators and leaves that a number follows from.

        Raises:
            PlanError: it is not known before the step.
        """
        if isinstance(each, Ref):
            what, start = f"{each.node} is a sum over the batch that the forward reads, and", [each.node]
        else:
            what = f"{each.name} is a mean over tokens, and how many count"
            start = [ref.node for ref in (each["target"], each["weight"]) if isinstance(ref, Ref)]
        found: set[str] = set()
        waiting = list(start)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += [ref.node for ref in self.graph.by_name[name].inputs]
        for node in (self.graph.by_name[name] for name in self.graph.by_name if name in found):
            why = self._unknown(node)
            if why:
                raise PlanError(
                    f"{what} depends on {why}, so that it is not known before a micro-batched step: plan without "
                    "pipelines and micro_batches, or compute it outside of the model and pass it in"
                )
        return found

    def _unknown(self, node: Node) -> str:
        """What an operator has that is only known in the step; empty: nothing."""
        if node.op == "param":
            return repr(node.target)
        if node.is_leaf:
            return ""
        if is_random(node, self.targets[node.name]):
            return f"the random numbers of {node.name} ({node.op})"
        routes = (self.assignment.operand_route(node, position) for position in range(len(node.inputs)))
        if any(sums_early(self.space.mesh, route) for route in routes):
            return f"another sum over the batch, which {node.name} ({node.op}) reads"
        return ""

    def _program_of_stored(self) -> fx.GraphModule:
        """(parameters, leaves, received values, counts) -> (sent values, outputs); each block gathers its own."""
        numbers = self.cut.numbers[self.number]
        root = Root(self.targets, self.assignment, self.groups, self.device, self.received, numbers[-1])
        body, first = root.body, before(self.number)
        for ref in (*map(Ref, (*self.parameters, *self.leaves)), *self.received):
            body.enter(ref)
        for name in self.known:
            body.enter(name)
        root.enter(first, [chunk for chunk in root.chunks if chunk.is_before and self._reads(chunk)])
        for name in (*self.parameters, *self.leaves):
            body.reshard_shared(Ref(name))
        for number in numbers:
            root.call(number)
        return self._finished(root)

    def _reads(self, chunk: Chunk) -> bool:
        """Whether a block of this stage reads a chunk."""
        return any(number in self.cut.numbers[self.number] for number in chunk.readers)

    def _program(self) -> fx.GraphModule:
        """(used parameters, leaves, received values, counts) -> (sent values, outputs)."""
        root = Root(self.targets, self.assignment, self.groups, self.device)
        body = root.body
        used = []
        for block in self.blocks:
            body.ready = {}
            for key in parameters_of(block, self.assignment):
                body.enter(key)
            used.append(body.ready)
        for ref in (*map(Ref, self.leaves), *self.received):
            body.enter(ref)
        for name in self.known:
            body.enter(name)
        for name in self.leaves:
            body.reshard_shared(Ref(name))
        for number, ready in zip(self.cut.numbers[self.number], used, strict=True):
            body.ready = ready
            root.call(number)
        return self._finished(root)

    def _finished(self, root: Root) -> fx.GraphModule:
        """The program of a stage that has called its blocks."""
        results = [root.body.values[ref] for ref in self.sent]
        results += [root.leaving(position) for position in self.outputs]
        root.body.graph.output(tuple(results))
        return root.module("Stage")
