"""Rewrites a captured graph into the local program of one rank, in plain PyTorch.

One :class:`torch.fx.GraphModule` per distinct block (and entry layout, and level of recomputation), called once per
instance by a root program. A block that recomputes has a second one, with the statements that are run again. Nothing
is decided here: operators run as the assignment says, and reshardings are the routes it names.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

import torch
from torch import fx

from autopar.capture.capture import Captured
from autopar.emit.block_program import (
    COMPILER,
    OFFLOAD,
    STATE,
    ProgramBuilder,
    bind_results,
    block_body,
    entries_of,
    getitem,
    identifier,
    module_of,
    one_or_all,
)
from autopar.emit.segments import in_segments
from autopar.runtime.autograd.recompute import recompute
from autopar.runtime.offload.block_hooks import enter_block, leave_block
from autopar.runtime.spmd.parameters import complete_parameters, gather_ahead
from planner.analysis.memory.readers import read_alone
from planner.analysis.memory.remat_demand import gathered_again
from planner.analysis.memory.steady_state import Wiring
from planner.analysis.memory.storages import BEFORE, is_before
from planner.analysis.offload.chunks import Chunk, chunks_of, parameters
from planner.formulation.assignment import Assignment
from planner.formulation.remat.levels import Level
from planner.ir.folding import Block, Instance
from planner.ir.graph import Ref


@dataclass(frozen=True)
class Rewritten:
    """The emitted program.

    Attributes:
        module: the root; its placeholders are ``leaves`` in order, its result is (outputs..., updates...).
        leaves: names of the graph's leaf nodes.
        programs: name of each distinct block program -> how often it is called.
    """

    module: fx.GraphModule
    leaves: tuple[str, ...]
    programs: Mapping[str, int]


def rewrite(captured: Captured, assignment: Assignment, groups: Mapping[str, Any], device: torch.device) -> Rewritten:
    """Emit the program of one rank; a micro-batched step has others, see :mod:`autopar.emit.stage_programs`.

    Args:
        captured: the model's graph, for the operators' targets.
        assignment: what to do, from the planner.
        groups: process group of every mesh axis, by name; ``"state"`` holds the run state, ``"offload"`` what moves
            parameters between tiers, if they move, ``"compiler"`` what compiles blocks, if they are compiled.
        device: where factory operators create tensors.
    """
    assert not assignment.space.micro_batched
    root = Root(targets_of(captured), assignment, groups, device)
    graph = assignment.space.graph
    for leaf in graph.leaves:
        root.body.enter(Ref(leaf.name))
    root.enter(BEFORE, [chunk for chunk in root.chunks if chunk.is_before])
    for leaf in graph.leaves:
        root.body.reshard_shared(Ref(leaf.name))
    for number in range(len(assignment.space.folded.instances)):
        root.call(number)
    root.body.graph.output(tuple(root.leaving(position) for position in range(len(assignment.space.leaving))))
    return Rewritten(root.module("Root"), tuple(leaf.name for leaf in graph.leaves), root.calls)


class Root:
    """A program that calls those of blocks.

    Args:
        targets: the operator of every node, see :func:`targets_of`.
        assignment, groups, device: as in :func:`rewrite`.
        received: what comes from outside and is held there until the program returns.
        last: the number of the last block that is called.

    Attributes:
        body: the program itself.
        calls: name of each distinct block program -> how often it is called.
        chunks: those that move.
    """

    def __init__(
        self,
        targets: Mapping[str, Any],
        assignment: Assignment,
        groups: Mapping[str, Any],
        device: torch.device,
        received: Sequence[Ref] = (),
        last: int | None = None,
    ):
        self.targets, self.assignment, self.groups, self.device = targets, assignment, groups, device
        self._received, self._last = received, last
        self.body = ProgramBuilder(assignment, targets, device)
        self.calls: dict[str, int] = {}
        self._names = program_names(assignment)
        offload = groups.get(OFFLOAD)
        self.chunks = [] if offload is None else [c for c in chunks_of(assignment) if offload.moves(parameters(c))]
        self._wiring = Wiring(assignment) if offload is not None and offload.saved.may_leave else None
        self._made: dict[tuple[object, ...], str] = {}
        self._before: tuple[fx.Node | None, tuple[fx.Node, ...]] = (None, ())
        self._again: tuple[fx.Node, ...] = ()
        self._completed = read_alone(assignment) if assignment.space.training.updates_on_device else {}
        self._holder: dict[str, Any] = {}

    def call(self, number: int) -> None:
        """Call an instance of a block, by its number."""
        assignment, space, graph = self.assignment, self.assignment.space, self.body.graph
        instance, (kind, nth) = space.folded.instances[number], space.decision_graph.blocks.numbers[number]
        level = assignment.recompute.level(kind, nth)
        read = tuple(space.is_read(ref) for ref in instance.block.outputs)
        key = (kind, level, read, *(assignment.consumer_layout(ref) for ref in instance.block.inputs))
        if key not in self._made:
            self._made[key] = self._program(instance.block, kind, level)
        name = self._made[key]
        self.calls[name] += 1
        at_home = self.enter(number, [chunk for chunk in self.chunks if chunk.entered == number])
        gatherings = self._gatherings(instance.block)
        self._complete(number)
        inputs = (*(self.body.found(entry) for entry in entries_of(instance.block, assignment)), *gatherings.values())
        self.body.values.update(at_home)
        if level == "none":
            call = graph.call_module(name, inputs)
        else:
            programs = (self.body.attribute(name), self.body.attribute(_again(name)))
            holder: dict[str, Any] = {"holder": self.body.attribute(OFFLOAD)} if self._wiring is not None else {}
            call = graph.call_function(recompute, (*programs, *inputs), holder)
        if gatherings:
            self._before = call, tuple(gatherings.values())
            again = tuple(gatherings[chunk] for chunk in self._gathers_again(instance, level))
            self._again = again or self._again
        bind_results(graph, call, instance.block.outputs, self.body.values)
        self.leave(number, instance.block)

    def _complete(self, number: int) -> None:
        """Let backward update what this block alone reads when it is over with it, if the plan does."""
        body, refs = self.body, self._completed.get(number, ())
        if refs:
            path = self.assignment.space.folded.instances[number].block.path
            args = (tuple(body.values[ref] for ref in refs), f"block {number}{path and f' ({path})'}")
            call = body.graph.call_function(complete_parameters, args)
            for place, (ref, value) in enumerate(zip(refs, args[0], strict=True)):
                name = f"{value.name}_own"
                body.values[ref] = body.graph.create_node("call_function", getitem, (call, place), {}, name=name)

    def _gatherings(self, block: Block) -> dict[int, fx.Node]:
        """Those of a block, by the number of their chunk, made before the block before is called, which starts them."""
        graph, found, chunks = self.body.graph, {}, self.assignment.gather_buckets(block)
        before, previous = self._before
        for number, place in self.assignment.ahead(block).items():
            chunk = chunks[number]
            step = next(iter(chunk.values()))[place]
            group = self.body.attribute(self.assignment.space.mesh.axes[step.axis].name)
            parts = tuple(self.body.values[ref] for ref in chunk)
            with graph.inserting_before(before) if before is not None else nullcontext():
                args = (parts, group, previous, self._again)
                found[number] = graph.create_node("call_function", gather_ahead, args, {}, name="gathering")
        return found

    def _gathers_again(self, instance: Instance, level: Level) -> list[int]:
        """The chunks of an instance that backward gathers again, by their number. Micro-batched, where backward may be
        in two parts, those that each of these gathers.
        """
        of_weights = self.assignment.space.micro_batched
        again = gathered_again(self.assignment, instance, level, of_weights)
        chunks = self.assignment.gather_buckets(instance.block)
        return [number for number in self.assignment.ahead(instance.block) if not again.isdisjoint(chunks[number])]

    def enter(self, number: int, chunks: Collection[Chunk]) -> dict[Ref, fx.Node]:
        """Have the parameters of a block on the device, or those that enter before all blocks, if parameters move;
        returns what they are at home.
        """
        body, at_home = self.body, {}
        if OFFLOAD in self.groups and (chunks or not is_before(number)):
            refs = [Ref(name) for chunk in chunks for name in chunk.leaves]
            at_home = {ref: body.values[ref] for ref in refs}
            call = body.graph.call_function(enter_block, (body.attribute(OFFLOAD), number, tuple(at_home.values())))
            for place, ref in enumerate(refs):
                body.values[ref] = body.graph.call_function(getitem, (call, place))
        return at_home

    def leave(self, number: int, block: Block) -> None:
        """Note where backward enters a block, if parameters move."""
        body, refs = self.body, block.outputs
        if OFFLOAD in self.groups:
            values = tuple(body.values[ref] for ref in refs)
            reached = self.assignment.space.graph.differentiated
            apart = tuple(place for place, ref in enumerate(refs) if ref not in reached)
            args = (body.attribute(OFFLOAD), number, values, *((apart,) if apart else ()))
            needed: dict[str, Any] = (
                {} if self._wiring is None else {"needed": tuple(self._needed_after(number, self._wiring))}
            )
            call = body.graph.call_function(leave_block, args, needed)
            for place, ref in enumerate(refs):
                body.values[ref] = body.graph.call_function(getitem, (call, place))

    def _needed_after(self, number: int, wiring: Wiring) -> Iterator[fx.Node]:
        """What was made before the next block, by blocks or for several of them, and is read later or held anyway."""
        leaving = {*self.assignment.space.leaving, *(self._received if number != self._last else ())}
        for ref, last in wiring.last.items():
            is_made = wiring.made[ref] <= number if ref in wiring.made else bool(self.assignment.shared_route(ref))
            if is_made and (last > number or ref in leaving) and ref in self.body.values:  # of another stage otherwise
                yield self.body.values[ref]

    def _program(self, block: Block, kind: int, level: Level) -> str:
        """Emit a distinct block; returns its name."""
        suffix = f"keeps_{len(level)}" if isinstance(level, tuple) else level
        base = self._names[kind] if level == "none" else f"{self._names[kind]}_{suffix}"
        name = base if base not in self.calls else self._another(base)
        self.calls[name] = 0
        body = block_body(block, self.assignment, self.targets, self.device)
        program, again, holder = body.graph, None, dict(self.groups)
        if level == "none":
            program.output(one_or_all(body.values[ref] for ref in block.outputs))
        else:
            again = body.recomputing(block, self.assignment.again(kind, level))
        if COMPILER in self.groups:
            program, again, segments = in_segments(name, program, again, self.groups[COMPILER])
            holder |= segments
        if again is not None:
            self._holder[_again(name)] = module_of(holder, again, _again(name))
        self._holder[name] = module_of(holder, program, name)
        return name

    def _another(self, base: str) -> str:
        """A name for one more program of a distinct block, which no program has or will have."""
        number = sum(name.startswith(base) for name in self.calls)
        taken = {*self.calls, *self._names}
        return next(name for name in (f"{base}_{n}" for n in itertools.count(number)) if name not in taken)

    def leaving(self, position: int) -> fx.Node:
        """A value as it leaves the model."""
        ref = self.assignment.space.leaving[position]
        return self.body.converted(self.body.values[ref], self.assignment.output_route(position))

    def module(self, name: str) -> fx.GraphModule:
        """The finished program."""
        return module_of({**self._holder, **self.groups}, self.body.graph, name)


def targets_of(captured: Captured) -> dict[str, Any]:
    """The operator of every node."""
    calls = captured.program.calls
    return {name: node.target for call in calls for name, node in zip(call.names, call.body.nodes, strict=True)}


def program_names(assignment: Assignment) -> list[str]:
    """A Python identifier for each kind of block."""
    found: list[str] = []
    taken = (*assignment.space.mesh.names, STATE, OFFLOAD)
    for path in assignment.space.folded.names:
        name = identifier(path.replace(".*", ""))
        while name in found or name in taken or iskeyword(name) or hasattr(fx.GraphModule, name):
            name += "_"
        found.append(name)
    return found


def _again(name: str) -> str:
    """The program of what a block recomputes."""
    return f"{name}_again"
