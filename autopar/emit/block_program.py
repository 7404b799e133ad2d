"""One local program under construction: operators in the layouts that an assignment gives them.

Nothing is decided here: operators run as the assignment says, and reshardings are the routes it names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from autopar.emit.local_ops import LocalCall, begun, local_form
from autopar.functions.carry import carried_in
from autopar.runtime.layers import LOCAL_FORMS
from autopar.runtime.layers.loss import MEAN
from autopar.runtime.layers.segment import run_segment
from autopar.runtime.offload.block_hooks import enter_block
from autopar.runtime.spmd.micro_batch import of_this_micro_batch
from autopar.runtime.spmd.parameters import gather_parameters, replicate_parameters
from autopar.runtime.spmd.resharding import convert
from planner.formulation.assignment import Assignment
from planner.formulation.overlap import needs_of, overlapped
from planner.formulation.remat.backward_slice import Again
from planner.formulation.resharding import GATHERED, ReshardStep, Route
from planner.ir.folding import Block
from planner.ir.graph import Node, Ref
from planner.ir.layout import MICRO, I, Layout, Mark, Mesh, P, R, Shard, local_outer
from planner.ops import saved_places

STATE, OFFLOAD, COMPILER = "state", "offload", "compiler"
WEIGHT = "is_weight"
"""The mark of placeholders of parameters, in ``meta``."""


class ProgramBuilder:
    """A program under construction.

    Attributes:
        values: where each value is found, in the layout in which its readers find it.
        ready: parameters in the layouts in which operators use them; over micro-batches, as they are in all of them.
        gathered: those of them that are in memory of their own.
        counts: what is known of all micro-batches before the first, by name, see :func:`known_before`.
        gatherings: those of the block's parameters that are perhaps on their way, by the number of their bucket.
        sent: what operators began to send, by name, and the operands that they took for it.
        taken: what each operator takes and makes, by its name and place: operands, then results.
    """

    def __init__(
        self, assignment: Assignment, targets: Mapping[str, Any], device: torch.device, is_of_micro_batch: bool = True
    ):
        self.assignment, self.targets, self.device, self.is_of_micro_batch = (
            assignment,
            targets,
            device,
            is_of_micro_batch,
        )
        self.mesh = assignment.space.mesh
        self.graph = fx.Graph()
        self.values: dict[Ref, fx.Node] = {}
        self.taken: dict[tuple[str, int], fx.Node] = {}
        self.ready: dict[tuple[Ref, Layout], fx.Node] = {}
        self.gathered: set[fx.Node] = set()
        self.counts: dict[str, fx.Node] = {}
        self.gatherings: dict[int, fx.Node] = {}
        self.sent: dict[str, tuple[fx.Node, dict[Taken, fx.Node]]] = {}
        self._attributes: dict[str, fx.Node] = {}
        self._entered: Counter[str] = Counter()

    def enter(self, entry: Entry, path: str = "") -> None:
        """A placeholder for what enters the program of the block at ``path``."""
        if isinstance(entry, str):
            self.counts[entry] = self.graph.placeholder(entry)
            return
        ref = entry if isinstance(entry, Ref) else entry[0]
        source = self.assignment.space.graph.by_name[ref.node]
        name = leaf_name(source, path) if source.is_leaf else value_name(ref)
        times = self._entered[name]
        self._entered[name] += 1
        value = self.graph.placeholder(f"{name}__{times}" if times else name)
        value.meta[WEIGHT] = source.op == "param"
        if isinstance(entry, Ref):
            self.values[entry] = value
        else:
            self.ready[entry] = value

    def found(self, entry: Entry) -> fx.Node:
        """What enters a block, where it is called."""
        if isinstance(entry, str):
            return self.counts[entry]
        return self.values[entry] if isinstance(entry, Ref) else self.ready[entry]

    def attribute(self, name: str) -> fx.Node:
        """A process group or the run state, read once at the top of the program."""
        if name not in self._attributes:
            first = next((n for n in self.graph.nodes if n.op not in ("placeholder", "get_attr")), None)
            with self.graph.inserting_before(first) if first is not None else self.graph.inserting_after():
                self._attributes[name] = self.graph.get_attr(name)
        return self._attributes[name]

    def step(self, value: fx.Node, step: ReshardStep, reduce_dtype: torch.dtype | None = None) -> fx.Node:
        if self._is_of_micro_batches(step) and self.is_of_micro_batch and step.rule in ("I>P", "R>P", "R>S"):
            dim = step.dst.dim if isinstance(step.dst, Shard) else None
            return _call(
                self.graph, of_this_micro_batch, (value, self.attribute(MICRO), dim), f"{value.name}_micro_batch"
            )
        if self._is_here(step.axis):
            return value
        src = _local_text(step.before, step.axis, self.mesh.sizes)
        dst = _local_text(step.after, step.axis, self.mesh.sizes)
        group = self.attribute(self.mesh.axes[step.axis].name)
        more = (reduce_dtype,) if reduce_dtype is not None and step.rule in GATHERED else ()
        return _call(self.graph, convert, (value, group, src, dst, *more), f"{value.name}_{dst[0].lower()}")

    def _is_here(self, axis: int) -> bool:
        """Whether nothing crosses an axis: it has one rank, or micro-batches, over which the runtime sums."""
        return self.mesh.axes[axis].size == 1 or self.mesh.axes[axis].name == MICRO

    def _is_of_micro_batches(self, step: ReshardStep) -> bool:
        axis = self.mesh.axes[step.axis]
        return axis.name == MICRO and axis.size > 1

    def converted(self, value: fx.Node, route: Route, reduce_dtype: torch.dtype | None = None) -> fx.Node:
        for step in route:
            value = self.step(value, step, reduce_dtype)
        return value

    def reduce_dtype(self, ref: Ref) -> torch.dtype | None:
        """In which a parameter's gradient is reduced, where that is wider than its own."""
        space = self.assignment.space
        wide = space.training.reduce_dtype if space.widening(ref) > 1 else None
        return None if wide is None else getattr(torch, wide)

    def read(self, ref: Ref, route: Route) -> fx.Node:
        """A value converted; a sum over micro-batches that is read before the last of them is known before the
        first.
        """
        known = self.counts[sum_name(ref)] if sums_early(self.mesh, route) else self.values[ref]
        return self.converted(known, route, self.reduce_dtype(ref))

    def reshard_shared(self, ref: Ref) -> None:
        """Put a value into the layout in which its readers find it; a parameter without what is summed once a step."""
        route = self.assignment.shared_route(ref)
        route = route[self.assignment.summed_first(ref, route) :]
        if self.assignment.only_sums_gradient(ref):
            self.sum(ref, route)
        else:
            self.values[ref] = self.read(ref, route)

    def sum(self, ref: Ref, route: Route) -> None:
        """Sum the gradient of a parameter, in one call an axis."""
        for step in route:
            self.values[ref] = self.made_replicated([ref], [self.values[ref]], (step,))[0]

    def sum_parameters(self, block: Block) -> None:
        """Sum the gradients of what each micro-batch gathers, as far as that is done once a step, bucket by bucket."""
        for bucket in self.assignment.gather_buckets(block):
            current = [self.values[ref] for ref in bucket]
            for steps in tuple(zip(*bucket.values(), strict=True))[: self.assignment.summed_together(bucket)]:
                current = self.made_replicated(bucket, current, steps)
            self.values.update(zip(bucket, current, strict=True))

    def gather_parameters_of(self, block: Block) -> None:
        """Gather what the block uses replicated, and sum its gradients, in one call per bucket and axis; what is summed
        once a step, elsewhere.
        """
        ahead = self.assignment.ahead(block)
        for number, bucket in enumerate(self.assignment.gather_buckets(block)):
            once = self.assignment.summed_together(bucket)
            current = [self.values[ref] for ref in bucket]
            for place, steps in enumerate(zip(*bucket.values(), strict=True)):
                if place < once:
                    continue
                gathering = self.gatherings.get(number) if place == ahead.get(number) else None
                current = self.made_replicated(bucket, current, steps, gathering)
            for (ref, route), value in zip(bucket.items(), current, strict=True):
                self.ready[ref, route[-1].after] = value

    def made_replicated(
        self,
        refs: Iterable[Ref],
        values: list[fx.Node],
        steps: tuple[ReshardStep, ...],
        gathering: fx.Node | None = None,
    ) -> list[fx.Node]:
        """Parameters of one dtype made replicated on an axis, together; the same step of each."""
        axis, rule = steps[0].axis, steps[0].rule
        if self._is_here(axis):
            return values
        group, reduce_dtype = self.attribute(self.mesh.axes[axis].name), self.reduce_dtype(next(iter(refs)))
        wide: dict[str, Any] = {} if reduce_dtype is None else {"reduce_dtype": reduce_dtype}
        if rule == "I>R":
            call = self.graph.call_function(replicate_parameters, (tuple(values), group), wide)
        else:
            shards = tuple(_local_text(step.before, axis, self.mesh.sizes) for step in steps)
            more = () if gathering is None else (gathering,)
            call = self.graph.call_function(gather_parameters, (tuple(values), group, shards, *more), wide)
        found = [_call(self.graph, getitem, (call, i), f"{value.name}_r") for i, value in enumerate(values)]
        if rule != "I>R" or not self.gathered.isdisjoint(values):
            self.gathered.update(found)
        return found

    def operand(self, node: Node, position: int) -> fx.Node:
        """An operand in the layout that the operator wants."""
        ref = node.inputs[position]
        choice = self.assignment.choice(node)
        layout = choice.operands[position]
        value, route = self.ready.get((ref, layout)), self.assignment.operand_route(node, position)
        if value is None:
            value = self.read(ref, route)
        elif self.assignment.space.unsharding.once_per_step:
            steps = (*self.assignment.shared_route(ref), *route)
            value = self.converted(value, tuple(step for step in steps if self._is_of_micro_batches(step)))
        strict = tuple(s.operands[position] for s in choice.axes)
        return self.relabel(value, layout, strict)

    def relabel(self, value: fx.Node, have: Layout, want: Layout) -> fx.Node:
        """For values without a gradient R and I are one type; say which is meant, at no cost."""
        for axis, (src, dst) in enumerate(zip(have, want, strict=True)):
            if src != dst:
                assert {src, dst} == {R, I}, f"{src} is not {dst}"
                value = self.step(value, ReshardStep(axis, src, dst, have))
                have = (*have[:axis], dst, *have[axis + 1 :])
        return value

    def emit(self, node: Node, kept: frozenset[Ref]) -> None:
        """One operator: operands converted, its local form, results resharded."""
        choice = self.assignment.choice(node)
        sent, seen = self.sent.pop(node.name, (None, {}))
        operands = self._operands(node, range(len(node.inputs)), seen)
        self.taken.update({(node.name, place): value for place, value in enumerate(operands)})
        remaining = iter(operands)
        args = {name: self._argument(value, remaining) for name, value in node.args}
        emitted = local_form(self._local_call(node, args, sent))
        emitted.meta["node"], emitted.meta["choice"] = node, choice
        refs = [Ref(node.name, i) for i in range(len(node.results))]
        space = self.assignment.space
        used = [ref for ref in refs if space.is_read(ref) or ref in kept]
        for ref in used:
            multiple = len(refs) > 1 or self.targets[node.name]._schema.returns[0].type.kind() == "ListType"
            value = _call(self.graph, getitem, (emitted, ref.index), value_name(ref)) if multiple else emitted
            tensor = node.results[ref.index]
            if not tensor.grad and any(t.grad for t in space.graph.input_types(node)) and _is_float(tensor.dtype):
                value = self.graph.call_function(torch.ops.aten.detach.default, (value,))
            value.meta["produced"] = ref
            self.taken[node.name, len(node.inputs) + ref.index] = value
            strict = tuple(s.results[ref.index] for s in choice.axes)
            self.values[ref] = self.relabel(value, strict, choice.results[ref.index])
            if space.is_read(ref):
                self.reshard_shared(ref)

    def begin(self, node: Node) -> None:
        """What an operator sends while others are computed, which are emitted next."""
        seen: dict[Taken, fx.Node] = {}
        needs = needs_of([call for _, call in self.assignment.choice(node).inner])
        self.sent[node.name] = begun(self._local_call(node, {}), self._operands(node, needs, seen)), seen

    def _operands(self, node: Node, positions: Iterable[int], seen: dict[Taken, fx.Node]) -> list[fx.Node]:
        """Operands as the operator takes them; of those that are taken alike one is made, and noted in ``seen``."""
        choice, operands = self.assignment.choice(node), []
        for position in positions:
            strict = tuple(s.operands[position] for s in choice.axes)
            key = (node.inputs[position], choice.operands[position], strict)
            if key not in seen:
                seen[key] = self.operand(node, position)
            operands.append(seen[key])
        return operands

    def _local_call(self, node: Node, args: dict[str, Any], sent: fx.Node | None = None) -> LocalCall:
        return LocalCall(
            self.graph,
            node,
            self.assignment.space.graph.input_types(node),
            self.assignment.space.rules[node.name],
            self.assignment.choice(node),
            self.mesh,
            self.targets[node.name],
            args,
            lambda axis: self.attribute(self.mesh.axes[axis].name),
            lambda: self.attribute(STATE),
            self.counts.get(count_name(node)),
            sent,
            self.assignment.space.scaling(node, self.assignment.choice(node)),
        )

    def recomputing(self, block: Block, again: Again) -> fx.Graph:
        """Finish the program as :func:`recompute` takes it; returns the one of the statements that are run again."""
        graph, wanted = self.assignment.space.graph, []
        stops = {*self.ready.values(), *self.graph.find_nodes(op="placeholder")} - self.gathered
        at_of = {node.name: at for at, node in enumerate(block.nodes)}
        for at, node in enumerate(block.nodes):
            for i, ref in enumerate(node.inputs):
                made = at_of.get(ref.node, -1), ref.index
                # What an operator takes of something kept is kept as it takes it, unless that is resharded again, or is
                # what a resharding that runs again leaves.
                is_kept = ref.node not in at_of or made[0] in again.lasting or made in again.as_made
                is_again = made in again.as_made and made in again.delivered | again.values
                is_passed = is_again and self.assignment.operand_effect(node, i) != "copy"
                if is_kept and i not in again.taken[at] and not is_passed:
                    stops.add(self.taken[node.name, i])
            for index in (i for each, i in again.as_made if each == at):
                ref = Ref(node.name, index)
                if at in again.lasting:
                    stops.add(self.taken[node.name, len(node.inputs) + index])
                if (at, index) not in again.delivered and self.assignment.shared_effect(ref) == "copy":
                    stops.add(self.values[ref])
            if any(t.grad for t in node.results):
                wanted += [(at, place) for place in saved_places(node, graph.input_types(node))]
            if at in again.drawing:
                wanted.append((at, len(node.inputs)))
        discarded: dict[fx.Node, None] = {}
        for at, place in wanted:
            node = block.nodes[at]
            index = place - len(node.inputs)
            value = self.taken.get((node.name, place))
            if value is not None and value not in stops and (index < 0 or (at, index) in again.values):
                discarded[value] = None
        needed: dict[fx.Node, None] = {}
        waiting = list(discarded)
        while waiting:
            value = waiting.pop()
            if value not in needed and value not in stops:
                needed[value] = None
                waiting.extend(value.all_input_nodes)
        gatherings = [*self.gatherings.values()]
        sources = [v for v in self.graph.nodes if v in stops and any(user in needed for user in v.users)]
        sources = [value for value in sources if value not in gatherings]
        program, copies = fx.Graph(), {}
        for value in (*sources, *gatherings):
            copies[value] = program.placeholder(value.name)
        for value in self.graph.nodes:
            if value in needed:
                copies[value] = program.node_copy(value, copies.__getitem__)
        program.output(tuple(copies[value] for value in discarded))
        outputs = one_or_all(self.values[ref] for ref in block.outputs)
        self.graph.output((outputs, tuple(discarded), tuple(sources)))
        return program

    def _argument(self, value: object, operands: Any) -> Any:
        if isinstance(value, Ref):
            return next(operands)
        if isinstance(value, tuple):
            return [self._argument(v, operands) for v in value]
        if value == "device":
            return self.device
        if isinstance(value, str) and value.startswith("torch."):
            return getattr(torch, value.removeprefix("torch."))
        return value


Taken = tuple[Ref, Layout, Layout]
"""A value as an operator takes it."""

Entry = Ref | tuple[Ref, Layout] | str
"""What enters a program: a value as its readers find it, a parameter as it is used, what all micro-batches know by
name.
"""


def entries_of(block: Block, assignment: Assignment) -> tuple[Entry, ...]:
    """What a block takes, in order: its inputs, parameters as they are used where that is made of them once a step."""
    space = assignment.space
    if not space.micro_batched:
        return block.inputs
    if not space.unsharding.once_per_step:
        return (*block.inputs, *known_before(block, assignment))
    values: list[Entry] = [ref for ref in block.inputs if not is_param(assignment, ref)]
    return (*values, *parameters_of(block, assignment), *known_before(block, assignment))


def known_before(block: Block, assignment: Assignment) -> dict[str, Node | Ref]:
    """What a block must know of all micro-batches before the first, by name: of how many tokens a loss is the mean, and
    sums without a gradient that are read before the last, such as what a loss that is written out divides by.
    """
    found: dict[str, Node | Ref] = {}
    for node in block.nodes:
        if counts(node, assignment):
            found[count_name(node)] = node
        routes = [(ref, assignment.operand_route(node, position)) for position, ref in enumerate(node.inputs)]
        made = (Ref(node.name, index) for index in range(len(node.results)))
        routes += [(ref, assignment.shared_route(ref)) for ref in made if assignment.space.is_read(ref)]
        found |= {sum_name(ref): ref for ref, route in routes if sums_early(assignment.space.mesh, route)}
    return found


def sums_early(mesh: Mesh, route: Route) -> bool:
    """Whether a resharding sums over micro-batches."""
    return any(mesh.axes[step.axis].name == MICRO and step.before[step.axis] == P for step in route)


def count_name(loss: Node) -> str:
    """The name of the number of tokens of which a loss is the mean."""
    return f"{loss.name}_count"


def sum_name(ref: Ref) -> str:
    """The name of a value's sum over all micro-batches."""
    return f"{value_name(ref)}_sum"


def parameters_of(block: Block, assignment: Assignment) -> tuple[tuple[Ref, Layout], ...]:
    """Each parameter of a block in each layout in which an operator uses it."""
    used = (
        (ref, assignment.choice(node).operands[position])
        for node in block.nodes
        for position, ref in enumerate(node.inputs)
        if is_param(assignment, ref)
    )
    return tuple(dict.fromkeys(used))


def counts(node: Node, assignment: Assignment) -> bool:
    """Whether an operator is a mean over tokens of all micro-batches, of which some may not count."""
    form = LOCAL_FORMS.get(node.op)
    if form is None or "token_groups" not in form.groups or dict(node.args).get("reduction", MEAN) != MEAN:
        return False
    target = node["target"]
    if not isinstance(target, Ref) or "float" in assignment.space.graph.type_of(target).dtype:
        return False
    axes = zip(assignment.choice(node).axes, assignment.space.mesh.names, strict=True)
    return any(strategy.sharded in form.groups["token_groups"] for strategy, name in axes if name == MICRO)


def is_param(assignment: Assignment, ref: Ref) -> bool:
    """Whether a value is a parameter as it is stored."""
    return assignment.space.graph.by_name[ref.node].op == "param"


def block_body(
    block: Block, assignment: Assignment, targets: Mapping[str, Any], device: torch.device
) -> ProgramBuilder:
    """The program of a block, without its output."""
    body = ProgramBuilder(assignment, targets, device)
    for entry in entries_of(block, assignment):
        body.enter(entry, block.path)
    for number in assignment.ahead(block):
        body.gatherings[number] = body.graph.placeholder(f"gathering_{number}")
    if not assignment.space.unsharding.once_per_step:
        body.gather_parameters_of(block)
    begins: dict[str, list[Node]] = {}
    for node in block.nodes:
        needs = needs_of([call for _, call in assignment.choice(node).inner])
        for first in overlapped(block.nodes, node, needs)[:1] if needs else ():
            begins.setdefault(first.name, []).append(node)
    for node in block.nodes:
        for other in begins.get(node.name, ()):
            body.begin(other)
        body.emit(node, frozenset(block.outputs))
    return body


def one_or_all(values: Iterable[fx.Node]) -> fx.Node | tuple[fx.Node, ...]:
    """What a program returns."""
    found = tuple(values)
    return found[0] if len(found) == 1 else found


def bind_results(graph: fx.Graph, call: fx.Node, refs: tuple[Ref, ...], values: dict[Ref, fx.Node]) -> None:
    """Note where the results of a call are found."""
    if len(refs) == 1:
        values[refs[0]] = call
        return
    for i, ref in enumerate(refs):
        values[ref] = _call(graph, getitem, (call, i), value_name(ref))


def module_of(holder: dict[str, Any], graph: fx.Graph, name: str) -> fx.GraphModule:
    """A finished program, with what it names of ``holder``."""
    used = {str(node.target).split(".")[0] for node in graph.nodes if node.op in ("get_attr", "call_module")}
    eliminate_dead_code(graph)
    graph.lint()
    module = fx.GraphModule({key: value for key, value in holder.items() if key in used}, graph, name)
    module.meta["functions"] = carried_in(graph)  # it owns them: torch knows no more than their operators
    return module


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Leave out what nobody reads, and has no effect either."""
    effects = (enter_block, run_segment)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or node.target in effects)


def _local_text(layout: Layout, axis: int, sizes: tuple[int, ...]) -> str:
    """A local type as the runtime reads it: strips counted on one rank."""
    local_type = layout[axis]
    if isinstance(local_type, Mark):
        return str(local_type)
    return str(Shard(local_type.dim, local_outer(layout, axis, sizes)))


def identifier(text: str) -> str:
    """A Python identifier that reads like ``text``."""
    word = "".join(c if c.isalnum() else "_" for c in text).strip("_") or "block"
    return f"block_{word}" if word[0].isdigit() else word


def value_name(ref: Ref) -> str:
    """A value's name in programs."""
    return ref.node if ref.index == 0 else f"{ref.node}_{ref.index}"


def leaf_name(leaf: Node, path: str) -> str:
    """A leaf's own name below the block that reads it: ``self_attn_q_proj_weight``."""
    target = leaf.target or leaf.name
    return identifier(target.removeprefix(f"{path}.") if path else target)


def _call(graph: fx.Graph, function: Any, args: tuple[Any, ...], name: str) -> fx.Node:
    return graph.create_node("call_function", function, args, {}, name=name)


def _is_float(dtype: str) -> bool:
    return "float" in dtype or "complex" in dtype


def getitem(values: Any, index: int) -> Any:
    """One of several results."""
    return values[index]
