"""Formulas: what a plan's step takes, in closed form in the batch and the sequence length.

The planned decisions are taken at sizes that know their formula (:mod:`planner.polynomial`), so that counting bytes,
calls and operations gives formulas as well as numbers; nothing is fitted. Seconds are those of the cost model's closed
forms: a roofline for every operator, the cheapest algorithm for every collective.

What seconds leave out: the tiles and waves of products and attention on GPUs, and what was measured (a calibration);
``plan.at(...)`` has both. Bytes leave nothing out as long as a step does the same in the same order, which other sizes
change only where another route between two layouts becomes the cheapest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import sympy

from planner.conversion import Collective, local_bytes
from planner.cost import CostModel
from planner.formulate import Assignment
from planner.graph import Node, Ref
from planner.heap import Held
from planner.layout import Axis, Layout
from planner.memory import usage
from planner.ops import OPS
from planner.pins import ATTENTION
from planner.polynomial import Powers, terms_of
from planner.predict import collectives, conversions, sorted_calls, use_again
from planner.scale import OtherSizes
from planner.strategy import Choice
from planner.traffic import Passes

Number = float | Fraction
Terms = Mapping[Powers, Any]
"""Coefficients of a polynomial, fractions or floats, by the powers of batch and sequence."""
Symbols = tuple[sympy.Symbol, sympy.Symbol]

CONSTANT: Powers = (0, 0)


@dataclass(frozen=True, repr=False)
class Formulas:
    """A step on the fullest and slowest rank, as sympy expressions in :attr:`batch` and :attr:`sequence`.

    Attributes:
        batch, sequence: the symbols ``b`` and ``s``, for the *global* batch and the sequence length.
        planned: their numbers as planned.
        parameters_bytes, gradients_bytes, optimizer_bytes: held when backward is over.
        saved_bytes: activations held when forward is over.
        peak_bytes: at the fullest moment: the largest of all moments that may be it.
        flops: operations of forward and backward on one rank, those that are repeated too.
        collectives: (kind, axis, phase, bytes that each rank passes in, how often a step makes the call).
        compute_s, recompute_s, communication_s, gradients_s, optimizer_s: as in :class:`planner.predict.Prediction`.
        left_out: why there is no formula in the other size, where only one can be followed.
    """

    batch: sympy.Symbol
    sequence: sympy.Symbol
    planned: Mapping[sympy.Symbol, int]
    parameters_bytes: sympy.Expr
    gradients_bytes: sympy.Expr
    optimizer_bytes: sympy.Expr
    saved_bytes: sympy.Expr
    peak_bytes: sympy.Expr
    flops: sympy.Expr
    collectives: tuple[tuple[str, str, str, sympy.Expr, int], ...]
    compute_s: sympy.Expr
    recompute_s: sympy.Expr
    communication_s: sympy.Expr
    gradients_s: sympy.Expr
    optimizer_s: sympy.Expr
    left_out: str = ""

    @property
    def step_time_s(self) -> sympy.Expr:
        """Seconds of the whole step."""
        return self.compute_s + self.recompute_s + self.communication_s + self.gradients_s + self.optimizer_s

    def _rows(self) -> list[tuple[str, int, sympy.Expr]]:
        """Bytes and operations: what of, how often, and how much each time."""
        named = {
            "parameters": self.parameters_bytes,
            "gradients": self.gradients_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.saved_bytes,
            "flops": self.flops,
        }
        calls = [
            (f"{kind.replace('_', '-')}, {axis}, {phase}", count, size)
            for kind, axis, phase, size, count in self.collectives
        ]
        return [*((name, 1, value) for name, value in named.items()), *calls]

    def __str__(self) -> str:
        rows = [(name, f"{count} * ({value})" if count > 1 else f"{value}") for name, count, value in self._rows()]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)

    __repr__ = __str__

    def latex(self) -> str:
        """Bytes and operations as LaTeX, aligned, one to a line."""
        lines = [
            rf"\text{{{name}}} &= "
            + (rf"{count} \times \left({sympy.latex(value)}\right)" if count > 1 else sympy.latex(value))
            for name, count, value in self._rows()
        ]
        return "\\begin{aligned}\n" + " \\\\\n".join(lines) + "\n\\end{aligned}"

    def _repr_latex_(self) -> str:
        """What a notebook shows."""
        return f"$$\n{self.latex()}\n$$"


def formulas(sizes: OtherSizes) -> Formulas:
    """The formulas of a plan.

    Raises:
        PlanError: neither batch nor sequence length can be followed.
    """
    scale, left_out = sizes.widest()
    planned = scale.followed.batch, scale.followed.sequence
    assignment = scale.symbolic()
    batch, sequence = sympy.symbols("b s", positive=True, integer=True)
    symbols: Symbols = (batch, sequence)
    memory = usage(assignment)
    seconds = _seconds(assignment)

    def held(storages: tuple[Held, ...], use: str) -> sympy.Expr:
        return _expression(terms_of(sum(each.all_bytes for each in storages if each.use == use)), symbols)

    moments = _undominated(list(map(terms_of, scale.moments)))
    gradients, hidden = (seconds[use].expression(symbols) for use in ("gradients", "hidden"))
    return Formulas(
        batch,
        sequence,
        {symbol: number for symbol, number in zip(symbols, planned, strict=True) if number},
        held(memory.left, "parameters"),
        held(memory.left, "gradients"),
        held(memory.left, "optimizer"),
        held(memory.kept, "activations"),
        _pick(sympy.Max, moments, symbols),
        _expression(_flops(assignment), symbols),
        tuple(_call(call, count, symbols) for call, count in sorted_calls(collectives(assignment))),
        seconds["compute"].expression(symbols),
        seconds["recompute"].expression(symbols),
        seconds["communication"].expression(symbols),
        sympy.Max(0, gradients - hidden, evaluate=False) if hidden != 0 else gradients,
        seconds["optimizer"].expression(symbols),
        left_out,
    )


def _call(call: Collective, count: int, symbols: Symbols) -> tuple[str, str, str, sympy.Expr, int]:
    return call.kind, call.axis, call.phase, _expression(terms_of(call.bytes_in), symbols), count


# ---- operations and seconds ------------------------------------------------------------------------------------------


def _flops(assignment: Assignment) -> Terms:
    """Operations of one rank, forward and backward."""
    total: dict[Powers, Any] = {}
    for node, times, again in _operators(assignment):
        passes = 1 + _heavier(node) if any(t.grad for t in node.results) else 1
        _add(total, _flops_of(assignment, node), passes * times + again)
    return total


def _operators(assignment: Assignment) -> Iterator[tuple[Node, int, int]]:
    """The first member of every operator's role, how many there are, and how many of them run again in backward."""
    space = assignment.space
    for role, names in space.members.items():
        node = space.graph.by_name[names[0]]
        if not node.is_leaf:
            yield node, len(names), space.skeleton.runs_again(role, assignment.recompute)


def _flops_of(assignment: Assignment, node: Node) -> Terms:
    """Forward operations of an operator on one rank."""
    space, row = assignment.space, OPS.get(node.op)
    if row is None:
        return {}
    axes = zip(space.mesh.axes, assignment.choice(node).axes, strict=True)
    ranks = math.prod(axis.size for axis, strategy in axes if strategy.factor)
    return _times(terms_of(row.flops(node, space.graph.input_types(node), space.rules[node.name])), Fraction(1, ranks))


def _heavier(node: Node) -> Fraction:
    """Operations of backward for each of forward: two products for one; flash attention computes its scores again."""
    return Fraction(5, 2) if node.op == ATTENTION else Fraction(2)


class _Seconds:
    """A sum of polynomials, and of the largest or smallest of several."""

    def __init__(self) -> None:
        self._plain: dict[Powers, Any] = {}
        self._picked: Counter[tuple[bool, tuple[tuple[tuple[Powers, Any], ...], ...]]] = Counter()

    def add(self, options: Sequence[Terms], times: float, *, smallest: bool = False) -> None:
        """``times`` the largest of ``options``, or the smallest."""
        kept = _undominated(options, smallest=smallest)
        if len(kept) == 1:
            _add(self._plain, kept[0], times)
        else:
            self._picked[smallest, tuple(tuple(sorted(each.items())) for each in kept)] += times  # type: ignore[assignment]

    def expression(self, symbols: Symbols) -> sympy.Expr:
        """The sum."""
        picked = [
            times * _pick(sympy.Min if smallest else sympy.Max, list(map(dict, options)), symbols)
            for (smallest, options), times in self._picked.items()
        ]
        return sympy.Add(_expression(self._plain, symbols), *picked)


def _seconds(assignment: Assignment) -> dict[str, _Seconds]:
    """Seconds by use as in :func:`planner.predict.predict`, and what ``hidden`` of ``gradients`` computing hides."""
    space = assignment.space
    cost, graph, axes = space.cost, space.graph, space.mesh.axes
    uses = ("compute", "recompute", "communication", "gradients", "hidden", "optimizer")
    found = {use: _Seconds() for use in uses}
    for leaf in graph.leaves:
        found["optimizer"].add([{CONSTANT: space.storage(leaf, assignment.produced(Ref(leaf.name)))[0]}], 1)
    for node, times, again in _operators(assignment):
        flows = any(t.grad for t in node.results)
        forward, backward = _rooflines(assignment, node)
        found["compute"].add(forward, times)
        found["recompute"].add(forward, again)
        if flows:
            found["compute"].add(backward, times)
            found["hidden"].add(backward, times * space.overlap)
        for number, inner in assignment.choice(node).inner:
            size = space.inner_bytes(space.rules[node.name], assignment.choice(node), inner)
            prices = _prices(cost, inner.kind, axes[number], size)
            if inner.phase == "forward" or flows:
                found["communication"].add(prices, times, smallest=True)
            if inner.phase == "forward":
                found["recompute"].add(prices, again, smallest=True)
    for each, times in conversions(assignment):
        returns = "gradients" if graph.by_name[each.ref.node].op == "param" else "communication"
        for prices, phase in _conversion(assignment, each.ref, each.source, each.target):
            found["communication" if phase == "forward" else returns].add(prices, times, smallest=True)
    for (tail, head, ref, positions), times in space.skeleton.flows_again(assignment.recompute).items():
        source, reader = assignment.chosen[tail], assignment.chosen[head]
        layout = source.results[ref.index] if isinstance(source, Choice) else source
        wanted = [reader.operands[p] for p in positions] if isinstance(reader, Choice) else [reader]
        for target in dict.fromkeys(wanted):
            for prices, phase in _conversion(assignment, ref, layout, target):
                if phase == "forward":
                    found[use_again(assignment, ref)].add(prices, times, smallest=True)
    return found


def _conversion(assignment: Assignment, ref: Ref, source: Layout, target: Layout) -> Iterator[tuple[list[Terms], str]]:
    """Prices of every collective and every copy on the way from one layout to another, with their phase."""
    space = assignment.space
    cost, tensor = space.cost, space.graph.type_of(ref)
    copied_s, start_s = 1 / _bandwidth(cost), cost.cluster.device.launch_overhead_s
    for step in space.table(ref).route(source, target) if source != target else ():
        touched = sum(local_bytes(tensor, layout, space.mesh) for layout in (step.before, step.after))
        if step.rule not in ("I>R", "R>I"):
            for phase in ("forward", "backward") if tensor.grad else ("forward",):
                yield [_affine(start_s, copied_s, touched)], phase
        for call in step.collectives(tensor, space.mesh):
            yield _prices(cost, call.kind, space.mesh.axes[step.axis], call.bytes_in), call.phase


def _rooflines(assignment: Assignment, node: Node) -> tuple[list[Terms], list[Terms]]:
    """Arithmetic and memory, each with the start of the kernel and with what backward runs besides; forward and
    backward.
    """
    space, choice = assignment.space, assignment.choice(node)
    device, attends, traffic = space.cost.cluster.device, node.op == ATTENTION, space.traffic(node)
    tensors = zip((*space.graph.input_types(node), *node.results), (*choice.operands, *choice.results), strict=True)
    sizes = [terms_of(local_bytes(tensor, layout, space.mesh)) for tensor, layout in tensors]

    def memory(passes: Passes, starts: int) -> Terms:
        each = (
            _times(size, times / _bandwidth(space.cost)) for size, times in zip(sizes, passes, strict=True) if times
        )
        return _sum({CONSTANT: starts * device.launch_overhead_s}, *each)

    flops, besides = _flops_of(assignment, node) if traffic.runs else {}, memory(traffic.besides, traffic.starts)
    found = []
    for backward, passes in enumerate((traffic.forward, traffic.backward)):
        share = device.attention_efficiency[backward] if attends else device.matmul_efficiency
        rate = device.peak(node.results[0].dtype if node.results else "float32") * share
        arithmetic = _times(flops, (float(_heavier(node)) if backward else 1.0) / rate)
        starts, more = {CONSTANT: device.launch_overhead_s * any(passes)}, besides if backward else {}
        found.append([_sum(arithmetic, starts, more), _sum(memory(passes, int(any(passes))), more)])
    return found[0], found[1]


def _bandwidth(cost: CostModel) -> float:
    device = cost.cluster.device
    return device.memory_bandwidth_bytes_per_s * device.memory_efficiency


def _prices(cost: CostModel, kind: str, axis: Axis, bytes_in: int) -> list[Terms]:
    """What each algorithm of a collective takes."""
    return [_affine(*term, bytes_in) for term in cost.collective_terms(kind, axis)]


def _affine(start_s: float, seconds_per_byte: float, size: int) -> Terms:
    return _sum({CONSTANT: start_s}, _times(terms_of(size), seconds_per_byte))


# ---- polynomials -----------------------------------------------------------------------------------------------------


def _times(terms: Terms, factor: Number) -> Terms:
    return {powers: value * factor for powers, value in terms.items()}


def _add(total: dict[Powers, Any], terms: Terms, times: Number) -> None:
    for powers, value in terms.items():
        total[powers] = total.get(powers, 0) + value * times


def _sum(*all_terms: Terms) -> Terms:
    total: dict[Powers, Any] = {}
    for terms in all_terms:
        _add(total, terms, 1)
    return total


def _undominated(options: Sequence[Terms], *, smallest: bool = False) -> list[Terms]:
    """Without those that another one exceeds in every coefficient, and so at all sizes."""
    found: list[Terms] = []
    for option in options:
        if any(_exceeds(other, option, smallest) for other in found):
            continue
        found = [other for other in found if not _exceeds(option, other, smallest)]
        found.append(option)
    return found


def _exceeds(one: Terms, other: Terms, smallest: bool) -> bool:
    low, high = (one, other) if smallest else (other, one)
    return all(low.get(powers, 0) <= high.get(powers, 0) for powers in {*low, *high})


def _pick(of: type, options: Sequence[Terms], symbols: Symbols) -> sympy.Expr:
    """The largest or smallest, unevaluated where there are several: sympy would compare each with each."""
    expressions = [_expression(terms, symbols) for terms in options]
    return of(*expressions, evaluate=False) if len(expressions) > 1 else expressions[0]


def _expression(terms: Terms, symbols: Symbols) -> sympy.Expr:
    batch, sequence = symbols
    return sympy.Add(*(_number(value) * batch**i * sequence**j for (i, j), value in terms.items() if value))


def _number(value: Number) -> sympy.Expr:
    return sympy.Rational(value.numerator, value.denominator) if isinstance(value, Fraction) else sympy.sympify(value)
