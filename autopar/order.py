"""Order: what no parameter reaches is computed in the order in which it is read.

Libraries make masks and tables of positions for every kind of layer before the first layer, and often walk a set of
kinds to do so. In which order Python walks a set of strings differs from process to process (``PYTHONHASHSEED``), and
with it would the graph, the names in it, and so what each rank takes for the model.

A *run* is a stretch of operators one after another that read inputs, buffers and constants alone, and draw nothing at
random. Any order in which operands come first computes the same, so a run takes its order from its readers: depth
first, from the value that is read first. That is a matter of the graph alone. All else stays in its place, in the
order in which the model computed it: blocks stay whole, and random numbers are drawn in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.program import Body, Call, Program, module_path


@dataclass(frozen=True)
class _Operator:
    """One operator of a program.

    Attributes:
        name: of its result.
        node, call: which node of the call's body it is.
        reads: names of its operands, in the order of its arguments.
        path: the module that calls it.
    """

    name: str
    node: fx.Node
    call: Call
    reads: tuple[str, ...]
    path: str


def in_order(program: Program) -> Program:
    """Put every run in the order of its readers.

    Args:
        program: without dead code.
    """
    stretches = _stretches(program)
    moment = itertools.count()
    leaving = [*program.outputs, *(name for _, name in program.updates)]
    read = {name: next(moment) for name in reversed(leaving) if name is not None}
    for at in reversed(range(len(stretches))):
        is_run, operators = stretches[at]
        if is_run:
            stretches[at] = is_run, operators = True, _depth_first(operators, read)
        read.update((name, next(moment)) for operator in reversed(operators) for name in reversed(operator.reads))
    ordered = [operator for _, operators in stretches for operator in operators]
    return replace(program, calls=tuple(_calls(ordered)))


def _stretches(program: Program) -> list[tuple[bool, Sequence[_Operator]]]:
    """The operators in order, cut into runs (true) and what is between them."""
    operators = [operator for call in program.calls for operator in _operators(call)]
    free = {leaf.name for leaf in program.leaves if leaf.kind != "param"}
    for operator in operators:
        if free.issuperset(operator.reads) and not operator.node.is_impure():
            free.add(operator.name)
    # A module that parameters reach begins and ends between runs, so that none leaves a block for another.
    within = {""}
    for path in {operator.path for operator in operators if operator.name not in free}:
        parts = path.split(".")
        within.update(".".join(parts[: end + 1]) for end in range(len(parts)))

    def module(path: str) -> str:
        return path if path in within else module(path.rpartition(".")[0])

    def run(operator: _Operator) -> str | None:
        return module(operator.path) if operator.name in free else None

    return [(key is not None, tuple(found)) for key, found in itertools.groupby(operators, run)]


def _operators(call: Call) -> Iterator[_Operator]:
    body = call.body
    names = dict(zip((*body.operands, *body.nodes), (*call.operands, *call.names), strict=True))
    for node, name in zip(body.nodes, call.names, strict=True):
        reads = tuple(names[operand] for operand in node.all_input_nodes)
        yield _Operator(name, node, call, reads, call.module_path(module_path(node)))


def _depth_first(run: Sequence[_Operator], read: Mapping[str, int]) -> tuple[_Operator, ...]:
    """Every operator as late as the first to read it allows.

    Args:
        read: names that are read after the run; the larger the number, the earlier for the first time.
    """
    inside = {operator.name: operator for operator in run}
    done: dict[str, _Operator] = {}
    pending = sorted(inside.keys() & read.keys(), key=read.__getitem__)
    while pending:
        operator = inside[pending[-1]]
        missing = next((name for name in operator.reads if name in inside and name not in done), None)
        if missing is None:
            done[pending.pop()] = operator
        else:
            pending.append(missing)
    assert len(done) == len(run), "the program has no dead code"
    return tuple(done.values())


def _calls(operators: Sequence[_Operator]) -> Iterator[Call]:
    """Calls that hold the operators in this order: of the bodies there are, or where a run was changed, of parts."""
    parts: dict[tuple[Body, tuple[fx.Node, ...]], Body] = {}
    for call, found in itertools.groupby(operators, lambda operator: operator.call):
        part = tuple(found)
        nodes = tuple(operator.node for operator in part)
        if nodes == call.body.nodes:
            yield call
            continue
        body = parts.setdefault((call.body, nodes), Body(nodes))
        names = {node: name for each in part for node, name in zip(each.node.all_input_nodes, each.reads, strict=True)}
        yield replace(
            call,
            body=body,
            operands=tuple(names[operand] for operand in body.operands),
            names=tuple(operator.name for operator in part),
        )
