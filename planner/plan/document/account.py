"""What each operator of each distinct block does under an assignment, and what it costs.

``Assignment -> (BlockDetail per block, LeafDetail per leaf)``: layouts, reshardings with their
collectives, seconds and bytes. The figures come from the same tables as the solver's costs, so that
they add up to the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from planner.analysis.prediction import calls_by_block, conversions, sorted_calls
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.labels import LABELS, Labels, label_blocks
from planner.formulation.decision_names import Section, fillings, pattern, variable_names
from planner.formulation.resharding import Collective, local_bytes
from planner.formulation.search_space import Space
from planner.formulation.strategies import Choice
from planner.formulation.variables import Variable
from planner.ir.graph import Node, Ref
from planner.ir.layout import MICRO, format_layout
from planner.ops import OPS, attends
from planner.ops.sharding_rule import AxisStrategy, find
from planner.plan.document.detail import Account, BlockDetail, LeafDetail, Move, OpDetail

Names = Mapping[Variable, tuple[Section, str]]
Meanings = Callable[[Node, Choice], tuple[str, ...]]


def account(assignment: Assignment) -> Account:
    """Write down what an assignment makes of every operator and leaf."""
    space = assignment.space
    names = variable_names(space)
    moves = _moves(assignment, names)
    reads = _parameters_read(space)
    meaning_of = meanings(space)
    called = calls_by_block(assignment)
    ops: list[dict[str, OpDetail]] = [{} for _ in space.folded.kinds]
    leaves: dict[str, LeafDetail] = {}
    for variable, members in space.members.items():
        section, name = names[variable]
        if isinstance(section, str):
            leaves[name] = _leaf_detail(assignment, members, moves.get(("after", variable), ()))
        else:
            detail = _op_detail(assignment, variable, names, meaning_of, reads)
            before, after = moves.get(("before", variable), ()), moves.get(("after", variable), ())
            ops[section[1]][name] = replace(detail, before=tuple(before), after=tuple(after))
    blocks = [BlockDetail(each, tuple(sorted_calls(called.get(kind, {})))) for kind, each in enumerate(ops)]
    return Account(tuple(blocks), leaves)


def _leaf_detail(assignment: Assignment, members: Sequence[str], after: Iterable[Move]) -> LeafDetail:
    space = assignment.space
    nodes = [space.graph.by_name[member] for member in members]
    node, names = nodes[0], [each.target or each.name for each in nodes]
    tensor = node.results[0]
    layout = assignment.produced(Ref(node.name))
    size = local_bytes(tensor, layout, space.mesh)
    held = max(size, space.storage(node, layout)[1])
    return LeafDetail(tensor.shape, tensor.dtype, len(nodes), size, held - size, tuple(after), fillings(names))


def _op_detail(
    assignment: Assignment, variable: Variable, names: Names, meaning_of: Meanings, reads: Mapping[Ref, Ref]
) -> OpDetail:
    space = assignment.space
    graph, members = space.graph, space.members[variable]
    node = graph.by_name[members[0]]
    choice, row, rule = assignment.choice(node), OPS.get(node.op), space.rules[node.name]
    work = space.work(node, choice)
    differentiated = any(t.grad for t in node.results)
    inner = [
        Collective(call.kind, axis.name, bytes_in, call.phase)
        for axis, call, bytes_in, times in space.inner_calls(rule, choice, differentiated)
        for _ in range(times)
    ]
    places = (position for position, ref in enumerate(node.inputs) if ref in reads)
    parameters = dict.fromkeys(
        _name_of_all(space, names, [reads[graph.by_name[m].inputs[position]].node for m in members])
        for position in places
    )
    operands = [
        (_name_of(space, names, ref, variable[1]), format_layout(layout))
        for ref, layout in zip(node.inputs, choice.operands, strict=True)
    ]
    paths = [graph.by_name[m].path for m in members]
    return OpDetail(
        path=pattern(paths),
        meaning=meaning_of(node, choice),
        operands=tuple(operands),
        results=tuple(map(format_layout, choice.results)),
        shape=node.results[0].shape if node.results else (),
        parameters=tuple(parameters),
        flops=row.flops(node, graph.input_types(node), rule) if row is not None else 0,
        forward_s=work.forward_s,
        backward_s=work.backward_s,
        saved_bytes=assignment.saved_bytes(node),
        transient_bytes=space.transient_bytes(node, choice),
        inner=tuple(inner),
        inner_s=work.inner_s,
        stands_for=fillings(paths),
    )


def _name_of_all(space: Space, names: Names, leaves: Sequence[str]) -> str:
    """What the parameters are called that an operator reads in the instances of its block."""
    variables = {space.variable_of[leaf] for leaf in leaves}
    return (
        names[variables.pop()][1]
        if len(variables) == 1
        else pattern([space.graph.by_name[leaf].target for leaf in leaves])
    )


def _name_of(space: Space, names: Names, ref: Ref, kind: object) -> str:
    """What a value is called in block ``kind``: a leaf, an operator of the block, or one of another block."""
    section, name = names[space.variable_of[ref.node]]
    name += f" result {ref.index}" if ref.index else ""
    away = isinstance(section, tuple) and section[1] != kind
    return f"{name} in {space.folded.names[section[1]]}" if away and isinstance(section, tuple) else name


# ---- reshardings -----------------------------------------------------------------------------------------------------


def _moves(assignment: Assignment, names: Names) -> dict[tuple[str, Variable], list[Move]]:
    """Every resharding by where it happens: before an operator (variable), or after the one that makes the value."""
    space, graph = assignment.space, assignment.space.graph
    found: dict[tuple[str, Variable], dict[object, Move]] = {}

    for each, times in conversions(assignment):
        variable = space.variable_of[each.reader or each.ref.node]
        at = found.setdefault(("before" if each.reader else "after", variable), {})
        key = (each.place, each.source, each.target)
        if key in at:
            at[key] = replace(at[key], times=at[key].times + times)
            continue
        table, tensor, widening = space.table(each.ref), graph.type_of(each.ref), space.widening(each.ref)
        pair = table.index[each.source], table.index[each.target]
        route = table.route(each.source, each.target)
        at[key] = Move(
            _name_of(space, names, each.ref, variable[1] if variable[0] == "op" else None),
            format_layout(each.source),
            format_layout(each.target),
            tuple(f"{step.rule} {space.mesh.axes[step.axis].name}" for step in route),
            tuple(c for step in route for c in step.collectives(tensor, space.mesh, widening) if c.axis != MICRO),
            float(table.forward_s[pair]),
            float(table.backward_s[pair]),
            times,
        )
    return {where: list(moves.values()) for where, moves in found.items()}


# ---- strategies in words ---------------------------------------------------------------------------------------------


def meanings(space: Space) -> Meanings:
    """A function that says per axis what a choice shards (:class:`planner.plan.document.detail.OpDetail`)."""
    reads = _parameters_read(space)
    words = {which: label.word for which, label in LABELS.items() if label.word}
    labels = {word: label_blocks(space.decision_graph, which) for which, word in words.items()}
    return lambda node, choice: tuple(_meaning(space, node, strategy, labels, reads) for strategy in choice.axes)


def _meaning(
    space: Space, node: Node, strategy: AxisStrategy, labels: Mapping[str, Labels], reads: Mapping[Ref, Ref]
) -> str:
    """What an operator shards on one axis: ``batch``, ``sequence``, ``heads``, ``columns`` or ``rows`` of a
    weight, ``vocabulary``, ``dim 2`` of the result; ``whole`` when every rank does all, ``terms`` of a sum; the name of
    the way where it has one, as ``dispatch``, unless that does the same otherwise.
    """
    if not strategy.factor:
        return "terms" if strategy.kind == "partial" else "whole"
    if strategy.way.name and not strategy.way.streamed:
        return strategy.way.name
    rule = space.rules[node.name]
    for word, dims in labels.items():
        if (strategy.factor, strategy.outer) in dims.parts(node, rule):
            return word
    place = next((at for dims in rule.results if (at := find(dims, strategy.factor, rule.sizes))), None)
    weighted = any(
        ref in reads and find(dims, strategy.factor, rule.sizes)
        for ref, dims in zip(node.inputs, rule.operands, strict=True)
    )
    row = OPS.get(node.op)
    if weighted and row is not None and row.looks_up == "rows":
        return "features" if place else "vocabulary"
    if weighted and row is not None and row.contracts:
        return "columns" if place else "rows"
    if attends(node.op):
        return "heads"
    return f"dim {place[0]}" if place else "terms"


def _parameters_read(space: Space) -> dict[Ref, Ref]:
    """Value -> the parameter that it is, or is a view of."""
    found: dict[Ref, Ref] = {}
    for node in space.graph.nodes:
        row = OPS.get(node.op)
        if node.op == "param":
            found[Ref(node.name)] = Ref(node.name)
        elif row is not None and row.view and node.inputs and node.inputs[0] in found and len(node.inputs) == 1:
            found.update({Ref(node.name, i): found[node.inputs[0]] for i in range(len(node.results))})
    return found
