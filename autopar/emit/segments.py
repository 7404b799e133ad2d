"""Groups the operators of a block program between two collectives into segments, which are compiled.

Collectives, random operators, layers of the runtime and operators of a model's own are calls between segments, as they
are without compilation: gradients go through autograd's nodes of each. A segment is pure, and takes its parameters as
arguments. What it returns is in memory of its own: views that others read are made behind it.

A block that recomputes has two programs, and what runs again is in segments of its own, which both have: values that
are discarded inside of one are neither returned nor named, since all that it saves is made anew with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch._ops import OpOverload

from autopar.emit.block_program import STATE, WEIGHT, eliminate_dead_code, getitem, module_of, one_or_all
from autopar.runtime.layers import LOCAL_FORMS
from autopar.runtime.layers.segment import Compiler, Segment, run_segment
from planner.ops import OPS

BEGINS = frozenset(form.begins for form in LOCAL_FORMS.values() if form.begins is not None)
"""What sends for another statement, which waits, while those between them are computed."""


@dataclass
class _SegmentPlan:
    """Operators that become a segment.

    Attributes:
        runs_again: whether backward recomputes them.
        views: what others read of their memory, which is made behind the segment, in order.
        inputs: what it takes, in order.
        outputs: those of ``nodes`` that others, or ``views``, read.
    """

    runs_again: bool
    nodes: list[fx.Node] = field(default_factory=list)
    views: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    name: str = ""


def in_segments(
    name: str,
    program: fx.Graph,
    again: fx.Graph | None,
    compiler: Compiler,
) -> tuple[fx.Graph, fx.Graph | None, dict[str, Segment]]:
    """A block program in segments, the one of what it runs again, and the segments by the names of their attributes.

    Args:
        name: of the block's program.
        program, again: as :meth:`ProgramBuilder.recomputing` leaves them; without recomputation there is no second.
        compiler: where backward is split, what reads a weight is in no segment: its backward would run twice.
    """
    eliminate_dead_code(program)
    repeated = set() if again is None else {node.name for node in again.nodes if node.op == "call_function"}
    weights = _of_weights(program) if compiler.splits_backward else set()
    order = _ordered(program, repeated, lambda node: _is_local(node) and weights.isdisjoint(node.all_input_nodes))
    groups = [each for each in order if isinstance(each, _SegmentPlan)]
    result, results = _returned(program)
    let_go: set[str] = set()
    if again is not None:
        outputs, discarded, kept = results
        let_go = _inside(discarded, groups, {result}) - {value.name for value in _nodes_in((outputs, kept))}
        results = outputs, tuple(value for value in discarded if value.name not in let_go), kept
    leaving, segments = {*_nodes_in(results)}, dict[str, Segment]()
    for number, group in enumerate(groups):
        inside = {*group.nodes}
        _return_no_views(group, {v for v in inside if v in leaving or not inside.union((result,)).issuperset(v.users)})
        inside = {*group.nodes}
        group.inputs = [*dict.fromkeys(v for node in group.nodes for v in node.all_input_nodes if v not in inside)]
        group.name = f"{name}_segment_{number}"
        segments[group.name] = _segment(group, compiler)
    made = _rebuilt(program, order, results)
    if again is None:
        return made, None, segments
    values = tuple(value for value in _returned(again)[1] if value.name not in let_go)
    return made, _rebuilt(again, _again_ordered(again, groups), values), segments


def _returned(program: fx.Graph) -> tuple[fx.Node, Any]:
    """The statement that returns, and what it does."""
    result = next(iter(program.find_nodes(op="output")))
    return result, result.args[0]


def _inside(values: Iterable[fx.Node], groups: Sequence[_SegmentPlan], apart: set[fx.Node]) -> set[str]:
    """The names of those that are read only in the segment that makes them, and by statements ``apart``."""
    member = {node: group for group in groups for node in group.nodes}
    return {
        value.name
        for value in values
        if value in member and all(user in apart or member.get(user) is member[value] for user in value.users)
    }


def _return_no_views(group: _SegmentPlan, read: set[fx.Node]) -> None:
    """Let a segment return what is in memory of its own, given what others read of it, and do only what that takes.

    torch replays on outputs the views that they are, from sequences which its cache on disk spoils (torch 2.13: sizes
    of ``_unsafe_view`` dangle, so that another process reads other memory; pytorch/pytorch#185630).
    """
    views, inside, outputs = set[fx.Node](), {*group.nodes}, set[fx.Node]()
    waiting = [*read]
    while waiting:
        value = waiting.pop()
        if not _is_view(value):
            outputs.add(value)
        elif value not in views:
            views.add(value)
            waiting += [source for source in value.all_input_nodes if source in inside]
    needed: set[fx.Node] = set()
    for node in reversed(group.nodes):
        if node in outputs or not needed.isdisjoint(node.users):
            needed.add(node)
    group.views = [node for node in group.nodes if node in views]
    group.outputs = [node for node in group.nodes if node in outputs]
    group.nodes = [node for node in group.nodes if node in needed]


def _is_view(node: fx.Node) -> bool:
    """Whether a statement returns memory of an operand, or may; a cast does not."""
    if node.target is getitem:
        return _is_view(node.all_input_nodes[0])
    assert isinstance(node.target, OpOverload)
    row = OPS.get(str(node.target))
    return _is_annotated(node.target) and (row is None or row.view)


def _is_annotated(target: OpOverload) -> bool:
    """Whether torch's schema says that a result may share the memory of an operand."""
    return any(argument.alias_info is not None for argument in target._schema.arguments)


def _again_ordered(again: fx.Graph, groups: Sequence[_SegmentPlan]) -> list[fx.Node | _SegmentPlan]:
    """The statements of what runs again, with segments where their last operators are."""
    last = {group.nodes[-1].name: group for group in groups}
    others = {node.name for group in groups for node in (*group.nodes, *group.views)} - last.keys()
    return [last.get(node.name, node) for node in again.nodes if node.name not in others]


def _is_local(node: fx.Node) -> bool:
    """Whether a statement is an operator of torch's own on local tensors; what draws is a call of the runtime's."""
    target = node.target
    if target is getitem:
        return _is_local(node.all_input_nodes[0])
    return isinstance(target, OpOverload) and target.namespace == "aten" and not target._schema.is_mutable


def _of_weights(program: fx.Graph) -> set[fx.Node]:
    """Values that are made of parameters alone."""
    found: set[fx.Node] = set()
    for node in program.nodes:
        read = [value for value in node.all_input_nodes if value.op != "get_attr"]
        if node.meta.get(WEIGHT) or (read and found.issuperset(read)):
            found.add(node)
    return found


def _ordered(
    program: fx.Graph, repeated: set[str], may_join: Callable[[fx.Node], bool]
) -> list[fx.Node | _SegmentPlan]:
    """Statements and groups of them in an order in which they may run. A statement that does not read what is in the
    open group comes before it, so that calls which have nothing to do with it do not close it; but one that waits for
    what another began comes behind it, which hides the wait.
    """
    found: list[fx.Node | _SegmentPlan] = []
    group: _SegmentPlan | None = None

    def close() -> None:
        nonlocal group
        if group is not None:
            found.extend([group] if _pays(group.nodes) else group.nodes)
        group = None

    for node in program.nodes:
        if may_join(node):
            runs_again = node.name in repeated
            if group is None or group.runs_again != runs_again:
                close()
                group = _SegmentPlan(runs_again)
            group.nodes.append(node)
        elif node.op != "output":
            read = {*node.all_input_nodes}
            if group is not None and (not read.isdisjoint(group.nodes) or any(v.target in BEGINS for v in read)):
                close()
            found.append(node)
    close()
    return found


def _pays(nodes: Sequence[fx.Node]) -> bool:
    """Whether there is anything to fuse: at least two statements compute, and are no views."""
    return sum(isinstance(node.target, OpOverload) and not _is_annotated(node.target) for node in nodes) > 1


def _segment(group: _SegmentPlan, compiler: Compiler) -> Segment:
    graph, made, number = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, str]()
    for value in group.inputs:
        made[value] = graph.placeholder(value.name)
        number[value] = f"%{len(number)}"
    text = []
    for node in group.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
        text.append(f"{node.target}{fx.node.map_arg((node.args, node.kwargs), lambda v: _Number(number[v]))}")
        number[node] = f"%{len(number)}"
    graph.output(one_or_all(made[value] for value in group.outputs))
    text.append(" ".join(number[value] for value in group.outputs))
    return Segment(group.name, module_of({}, graph, group.name), tuple(text), compiler)


class _Number(str):
    """A value's number, which writes itself without quotes."""

    __repr__ = str.__str__


def _rebuilt(program: fx.Graph, order: Iterable[fx.Node | _SegmentPlan], results: Any) -> fx.Graph:
    """A program with calls of segments in place of their operators."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    by_name = {node.name: node for node in program.nodes}
    for each in order:
        if isinstance(each, fx.Node):
            if each.op != "output":
                made[each] = graph.node_copy(each, made.__getitem__)
            continue
        state = next((n for n in graph.nodes if n.op == "get_attr" and n.target == STATE), None)
        state = graph.get_attr(STATE) if state is None else state
        inputs = (made[by_name[value.name]] for value in each.inputs)
        outputs = [by_name[value.name] for value in each.outputs]
        name = outputs[0].name if len(outputs) == 1 else f"{each.name}_results"
        args = (state, graph.get_attr(each.name), *inputs)
        call = graph.create_node("call_function", run_segment, args, {}, name)
        if len(outputs) == 1:
            made[outputs[0]] = call
        else:
            for place, value in enumerate(outputs):
                made[value] = graph.create_node("call_function", getitem, (call, place), {}, value.name)
        for view in each.views:
            made[by_name[view.name]] = graph.node_copy(by_name[view.name], made.__getitem__)
    graph.output(fx.node.map_arg(results, made.__getitem__))
    return graph


def _nodes_in(values: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(values, found.append)
    return found
