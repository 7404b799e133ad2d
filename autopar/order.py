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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
        is_free: whether no parameter reaches it, and it draws nothing at random.
    """

    name: str
    node: fx.Node
    call: Call
    reads: tuple[str, ...]
    path: str
    is_free: bool


_Unit = _Operator | Call
"""An operator, or a call of which none is free."""


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
        is_run, units = stretches[at]
        if is_run:
            stretches[at] = is_run, units = True, _depth_first(units, read)
        read.update((name, next(moment)) for unit in reversed(units) for name in reversed(_reads(unit)))
    ordered = [unit for _, units in stretches for unit in units]
    return replace(program, calls=tuple(_calls(ordered)))


def _stretches(program: Program) -> list[tuple[bool, Sequence[Any]]]:
    """All units in order, cut into runs (true), which are operators, and what is between them."""
    units = list(_units(program))
    # A module that parameters reach begins and ends between runs, so that none leaves a block for another.
    within = {""}
    for path in (path for unit in units for path in _paths_reached(unit)):
        while path not in within:
            within.add(path)
            path = path.rpartition(".")[0]

    def module(path: str) -> str:
        return path if path in within else module(path.rpartition(".")[0])

    def run(unit: _Unit) -> str | None:
        return module(unit.path) if isinstance(unit, _Operator) and unit.is_free else None

    return [(key is not None, tuple(found)) for key, found in itertools.groupby(units, run)]


def _units(program: Program) -> Iterator[_Unit]:
    free = {leaf.name for leaf in program.leaves if leaf.kind != "param"}
    known: dict[tuple[Body, tuple[bool, ...]], frozenset[fx.Node]] = {}
    for call in program.calls:
        body = call.body
        if not body.nodes:
            continue
        key = body, tuple([name in free for name in call.operands])
        if key not in known:
            known[key] = _free(*key)
        if not known[key]:
            yield call
            continue
        names = dict(zip((*body.operands, *body.nodes), (*call.operands, *call.names), strict=True))
        free.update(names[node] for node in known[key])
        for node, name in zip(body.nodes, call.names, strict=True):
            reads = tuple(names[operand] for operand in node.all_input_nodes)
            yield _Operator(name, node, call, reads, call.module_path(module_path(node)), node in known[key])


def _free(body: Body, operands: Sequence[bool]) -> frozenset[fx.Node]:
    """The nodes of a body that are free where these of its operands are."""
    free = {node for node, is_free in zip(body.operands, operands, strict=True) if is_free}
    for node in body.nodes:
        if free.issuperset(node.all_input_nodes) and not node.is_impure():
            free.add(node)
    return frozenset(free.intersection(body.nodes))


def _paths_reached(unit: _Unit) -> Iterable[str]:
    """The modules of what is not free."""
    if isinstance(unit, Call):
        return map(unit.module_path, unit.body.paths)
    return () if unit.is_free else (unit.path,)


def _reads(unit: _Unit) -> tuple[str, ...]:
    """What a unit reads, in order of first use; names that it makes itself are read by no other."""
    return unit.operands if isinstance(unit, Call) else unit.reads


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


def _calls(units: Sequence[_Unit]) -> Iterator[Call]:
    """Calls that hold the units in this order: of the bodies there are, or where a run was changed, of parts."""
    parts: dict[tuple[Body, tuple[fx.Node, ...]], Body] = {}
    for call, found in itertools.groupby(units, _call_of):
        part = [unit for unit in found if isinstance(unit, _Operator)]
        nodes = tuple(operator.node for operator in part)
        if not part or nodes == call.body.nodes:
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


def _call_of(unit: _Unit) -> Call:
    return unit.call if isinstance(unit, _Operator) else unit
