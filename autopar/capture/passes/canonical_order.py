"""Orders what no parameter reaches (masks, positions) by its first use, so that equal blocks have equal graphs.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from autopar.graph.program import Body, Call, Program, module_path
from autopar.graph.tensors import first_with


@dataclass(frozen=True)
class _MovableOperator:
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


_Unit = _MovableOperator | Call
"""An operator, or a call that is in order by itself."""


@dataclass(frozen=True, eq=False)
class _Form:
    """A body, given which of its operands are free.

    Attributes:
        free: the nodes that are.
        places: of these in the body.
        reached, unreached: the modules of the nodes that are not free, and of those that are, each once.
    """

    body: Body
    free: frozenset[fx.Node]
    places: tuple[int, ...]
    reached: tuple[str, ...]
    unreached: tuple[str, ...]

    @property
    def is_closed(self) -> bool:
        """Whether no run goes on in the calls before and after."""
        return self.free.isdisjoint((self.body.nodes[0], self.body.nodes[-1]))


def canonical_order(program: Program) -> Program:
    """Put every run in the order of its readers.

    Args:
        program: without dead code.
    """
    leaving = program.leaving
    elsewhere = {name for call in program.calls for name in call.operands}.union(leaving)
    forms = list(_forms(program))
    module = _modules(forms)
    bodies: dict[object, Body] = {}
    units: list[_Unit] = []
    for call, form in forms:
        if not form.free:
            units.append(call)
        elif form.is_closed and elsewhere.isdisjoint([call.names[at] for at in form.places]):
            runs = first_with([module(call.module_path(path)) for path in form.unreached])
            if (form, runs) not in bodies:
                (bodies[form, runs],) = (found.body for found in _calls(_ordered(_operators(call, form), module, {})))
            units.append(call.of(bodies[form, runs]))
        else:
            units += _operators(call, form)
    read = {name: -at for at, name in reversed([*enumerate(leaving)])}
    return replace(program, calls=tuple(_calls(_ordered(units, module, read))))


def _forms(program: Program) -> Iterator[tuple[Call, _Form]]:
    """Every call that has operators, with its form."""
    free = {leaf.name for leaf in program.leaves if leaf.kind != "param"}
    known: dict[tuple[Body, tuple[bool, ...]], _Form] = {}
    for call in program.calls:
        if call.body.nodes:
            key = call.body, tuple([name in free for name in call.operands])
            if key not in known:
                known[key] = _form(*key)
            free.update([call.names[at] for at in known[key].places])
            yield call, known[key]


def _form(body: Body, operands: Sequence[bool]) -> _Form:
    free = {node for node, is_free in zip(body.operands, operands, strict=True) if is_free}
    for node in body.nodes:
        if free.issuperset(node.all_input_nodes) and not node.is_impure():
            free.add(node)
    own = free.intersection(body.nodes)
    reached = dict.fromkeys(module_path(node) for node in body.nodes if node not in own)
    unreached = dict.fromkeys(module_path(node) for node in body.nodes if node in own)
    places = tuple(at for at, node in enumerate(body.nodes) if node in own)
    return _Form(body, frozenset(own), places, tuple(reached), tuple(unreached))


def _modules(forms: Sequence[tuple[Call, _Form]]) -> Callable[[str], str]:
    """For a module the next one above it, or itself, that parameters reach.

    Such a module begins and ends between runs, so that none leaves a block for another.
    """
    within = {""}
    for call, form in forms:
        for path in map(call.module_path, form.reached):
            while path not in within:
                within.add(path)
                path = path.rpartition(".")[0]

    def module(path: str) -> str:
        return path if path in within else module(path.rpartition(".")[0])

    return module


def _operators(call: Call, form: _Form) -> Iterator[_MovableOperator]:
    body = call.body
    names = dict(zip((*body.operands, *body.nodes), (*call.operands, *call.names), strict=True))
    for node, name in zip(body.nodes, call.names, strict=True):
        reads = tuple(names[operand] for operand in node.all_input_nodes)
        yield _MovableOperator(name, node, call, reads, call.module_path(module_path(node)), node in form.free)


def _ordered(units: Iterable[_Unit], module: Callable[[str], str], read: dict[str, int]) -> list[_Unit]:
    """Units with every run in the order of its readers.

    Args:
        read: names that are read after all units; the larger the number, the earlier for the first time.
    """

    def run(unit: _Unit) -> str | None:
        return module(unit.path) if isinstance(unit, _MovableOperator) and unit.is_free else None

    moment, read = itertools.count(1), dict(read)
    stretches: list[list[Any]] = []
    grouped: list[tuple[str | None, list[Any]]] = [(key, list(found)) for key, found in itertools.groupby(units, run)]
    for key, found in reversed(grouped):
        stretch = found if key is None else _depth_first(found, read)
        read.update((name, next(moment)) for unit in reversed(stretch) for name in reversed(_reads(unit)))
        stretches.append(stretch)
    return list(itertools.chain.from_iterable(reversed(stretches)))


def _reads(unit: _Unit) -> tuple[str, ...]:
    """What a unit reads, in order of first use."""
    return unit.operands if isinstance(unit, Call) else unit.reads


def _depth_first(run: Sequence[_MovableOperator], read: Mapping[str, int]) -> list[_MovableOperator]:
    """Every operator as late as the first to read it allows.

    Args:
        read: names that are read after the run; the larger the number, the earlier for the first time.
    """
    inside = {operator.name: operator for operator in run}
    done: dict[str, _MovableOperator] = {}
    pending = sorted(inside.keys() & read.keys(), key=read.__getitem__)
    while pending:
        operator = inside[pending[-1]]
        missing = next((name for name in operator.reads if name in inside and name not in done), None)
        if missing is None:
            done[pending.pop()] = operator
        else:
            pending.append(missing)
    assert len(done) == len(run), "the program has no dead code"
    return list(done.values())


def _calls(units: Sequence[_Unit]) -> Iterator[Call]:
    """Calls that hold the units in this order: of the bodies there are, or where a run was changed, of parts."""
    parts: dict[tuple[Body, tuple[fx.Node, ...]], Body] = {}
    for call, found in itertools.groupby(units, _call_of):
        nodes = tuple(unit.node for unit in found if isinstance(unit, _MovableOperator))
        whole = not nodes or nodes == call.body.nodes
        yield call if whole else call.of(parts.setdefault((call.body, nodes), Body(nodes)))


def _call_of(unit: _Unit) -> Call:
    return unit.call if isinstance(unit, _MovableOperator) else unit
