"""What a plan's step takes, in closed form in the batch, the sequence length and the micro-batches.

The planned decisions are taken at sizes that know their formula (:mod:`planner.base.symbolic_int`) in a space whose
times do (:mod:`planner.sizes.closed_form_costs`), so that counting bytes, calls, operations and seconds gives formulas
as well as numbers; nothing is fitted. ``plan.at(...)`` has what seconds leave out: tiles and waves on GPUs, and what
was measured.

Bytes leave nothing out as long as a step does the same in the same order, which other sizes change only where another
route between two layouts becomes the cheapest. Of a micro-batched step, seconds are those along the path through its
schedule that is longest at the planned sizes; where another one becomes longer the step takes more. How often that path
does what, and how many micro-batches are in flight, follows from the number of micro-batches for those that
:attr:`Formulas.valid_micro_batches` has (:mod:`planner.solve.pipeline.growth`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import sympy

from planner.analysis.memory import usage
from planner.analysis.memory.storages import Held
from planner.analysis.pipeline.peak_report import peak_micro_batched
from planner.analysis.pipeline.rank_memory import moments
from planner.analysis.pipeline.staged import WORKS, Staged
from planner.analysis.prediction import Calls, collectives, seconds_by_use, sorted_calls
from planner.base.errors import PlanError
from planner.base.symbolic_float import Atom, Formula, Pick, formula_of, rest, times, undominated
from planner.base.symbolic_int import Size, added, along
from planner.formulation.assignment import Assignment
from planner.formulation.resharding import Collective
from planner.ir.graph import Node
from planner.ops import attends
from planner.ops.attention import sight
from planner.sizes.closed_form_costs import ClosedSpace
from planner.sizes.rescale import OtherSizes, check_size
from planner.solve.pipeline.growth import Counts, Growth, Line, growth
from planner.solve.pipeline.running import Running
from planner.solve.pipeline.simulate import critical

SYMBOLS = sympy.symbols("b s m", positive=True, integer=True)
"""The batch, the sequence length and the number of micro-batches."""


@dataclass(frozen=True, repr=False)
class Formulas:
    """A step on the fullest and slowest rank, as sympy expressions in :attr:`batch`, :attr:`sequence` and
    :attr:`micro_batches`.

    Attributes:
        batch, sequence, micro_batches: the symbols ``b``, ``s`` and ``m``, for the *global* batch, the sequence length
            and into how many micro-batches a micro-batched step cuts the batch.
        planned: their numbers as planned, of those that the expressions are in.
        valid_micro_batches: the numbers of micro-batches for which they hold, with micro-batches as large as planned;
            of larger or smaller ones another path through the schedule may be longer. ``None``: they are not in ``m``.
        parameters_bytes, gradients_bytes, optimizer_bytes: held when backward is over; with micro-batches always.
        gathered_bytes: with micro-batches, what parameters are gathered into for all micro-batches; without
            micro-batches they are block by block, and part of the peak alone.
        saved_bytes: activations held when forward is over; with micro-batches those of all micro-batches in flight.
        peak_bytes: at the peak: the largest of all moments that may be it.
        flops: operations of forward and backward on one rank, those that are repeated too; of a step, all its
            micro-batches included.
        collectives: (kind, axis, phase, bytes that each rank passes in, how often a step makes the call: a number, or
            an expression in ``m``).
        compute_s, recompute_s, communication_s, gradients_s, optimizer_s, bubble_s: as in
            :class:`planner.analysis.prediction.Prediction`.
        left_out: why there is no formula in one of the three, where that is so.
    """

    batch: ClassVar[sympy.Symbol] = SYMBOLS[0]
    sequence: ClassVar[sympy.Symbol] = SYMBOLS[1]
    micro_batches: ClassVar[sympy.Symbol] = SYMBOLS[2]
    planned: Mapping[sympy.Symbol, int]
    parameters_bytes: sympy.Expr
    gradients_bytes: sympy.Expr
    optimizer_bytes: sympy.Expr
    gathered_bytes: sympy.Expr
    saved_bytes: sympy.Expr
    peak_bytes: sympy.Expr
    flops: sympy.Expr
    collectives: tuple[tuple[str, str, str, sympy.Expr, int | sympy.Expr], ...]
    compute_s: sympy.Expr
    recompute_s: sympy.Expr
    communication_s: sympy.Expr
    gradients_s: sympy.Expr
    optimizer_s: sympy.Expr
    bubble_s: sympy.Expr
    left_out: str = ""
    valid_micro_batches: Counts | None = None

    def check(self, micro_batches: int) -> None:
        """Refuse a number of micro-batches for which the expressions do not hold.

        Raises:
            PlanError: says for which they do, or why they are for the planned one alone.
        """
        check_size("micro_batches", micro_batches)
        if self.valid_micro_batches is None and micro_batches != self.planned.get(self.micro_batches, micro_batches):
            raise PlanError(f"these formulas hold for the planned micro-batches alone: {self.left_out}")
        if self.valid_micro_batches is not None and micro_batches not in self.valid_micro_batches:
            raise PlanError(
                f"these formulas hold for {self.valid_micro_batches} micro-batches, and not for "
                f"{micro_batches}: there the longest path through the schedule is another one; "
                "plan.at(micro_batches=...) simulates it"
            )

    @property
    def step_time_s(self) -> sympy.Expr:
        """Seconds of the whole step."""
        used = self.compute_s + self.recompute_s + self.communication_s + self.gradients_s + self.optimizer_s
        return used + self.bubble_s

    def _rows(self, show: Callable[[Any], str], repeated: str) -> list[tuple[str, str]]:
        """Bytes and operations: what of, and how much.

        Args:
            repeated: how often, and how much each time.
        """
        named = {
            "parameters": self.parameters_bytes,
            "gradients": self.gradients_bytes,
            "optimizer": self.optimizer_bytes,
            **({"gathered": self.gathered_bytes} if self.gathered_bytes != 0 else {}),
            "activations": self.saved_bytes,
            "flops": self.flops,
        }
        calls = [
            (f"{kind.replace('_', '-')}, {axis}, {phase}", count, size)
            for kind, axis, phase, size, count in self.collectives
        ]
        return [
            (name, show(value) if count == 1 else repeated.format(_factor(count, show), show(value)))
            for name, count, value in [*((name, 1, value) for name, value in named.items()), *calls]
        ]

    def __str__(self) -> str:
        rows = self._rows(str, "{} * ({})")
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)

    __repr__ = __str__

    def latex(self) -> str:
        """Bytes and operations as LaTeX, aligned, one to a line."""
        lines = [
            rf"\text{{{name}}} &= {value}" for name, value in self._rows(sympy.latex, r"{} \times \left({}\right)")
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
    staged = scale.restage(scale.planned)
    grown, why = (None, "") if staged is None else _growth(scale.planned, staged)
    assignment = scale.symbolic(ClosedSpace, micro_batched=grown is not None)
    staged = scale.restage(assignment)
    found = _without_micro_batches(assignment) if staged is None else _micro_batched(assignment, staged, grown)
    peaks = undominated(map(formula_of, found.moments))
    micro_batches = assignment.space.mesh.micro_batches if staged is not None else 0
    planned = scale.followed.batch, scale.followed.sequence, int(micro_batches)
    return Formulas(
        planned={symbol: number for symbol, number in zip(SYMBOLS, planned, strict=True) if number},
        **{f"{use}_bytes": _of(found.held.get(use, 0)) for use in ("parameters", "gradients", "optimizer", "gathered")},
        saved_bytes=_of(found.held.get("activations", 0)),
        peak_bytes=_pick(sympy.Max, peaks),
        flops=_expression(found.flops),
        collectives=tuple(_call(call, count) for call, count in sorted_calls(found.collectives)),
        **{f"{use}_s": _of(found.seconds.get(use, 0.0)) for use in (*WORKS, "bubble")},
        left_out="; ".join(filter(None, (left_out, why, _windows_left_out(assignment)))),
        valid_micro_batches=None if grown is None else grown.counts,
    )


def _windows_left_out(assignment: Assignment) -> str:
    """What seconds say of attention with sliding windows, where there is any."""
    operators = assignment.space.graph.operators
    if not any(attends(node.op) and sight(node).window is not None for node in operators):
        return ""
    return (
        "seconds have attention with sliding windows as one kernel, without its pieces and what they wait for: see at"
    )


def _growth(assignment: Assignment, staged: Staged) -> tuple[Growth | None, str]:
    """How a plan's schedule grows with its micro-batches, or why that cannot be told."""
    pipeline = staged.pipeline
    if assignment.space.mesh.micro_batches == 1:
        return None, "of one micro-batch a step is another program, so that there is none in m"
    found = growth(pipeline, staged.times.of_stages)
    if found is not None and found.counts.least == 1:  # which is another program
        found = replace(found, counts=replace(found.counts, least=1 + found.counts.step))
    if found is None or (found.counts.least == found.counts.most):
        return None, (
            f"{pipeline.schedule} of {pipeline.micro_batches} micro-batches on {pipeline.ranks} ranks does not grow "
            "evenly to those of more or fewer, so that there is none in m"
        )
    return found, ""


def _call(call: Collective, count: int) -> tuple[str, str, str, sympy.Expr, int | sympy.Expr]:
    return call.kind, call.axis, call.phase, _of(call.bytes_in), _of(count) if isinstance(count, Size) else count


def _factor(count: int | sympy.Expr, show: Callable[[Any], str]) -> str:
    """A count as a factor."""
    return show(count) if isinstance(count, int) or count.is_Symbol or count.is_Integer else f"({show(count)})"


@dataclass(frozen=True)
class _Grown:
    """A step whose numbers know how they grow: those of :class:`Formulas`, by use where there are several.

    Attributes:
        moments: bytes of every moment; the largest is the peak.
    """

    held: Mapping[str, int]
    moments: Iterable[int]
    flops: Formula
    collectives: Calls
    seconds: Mapping[str, float]


def _without_micro_batches(assignment: Assignment) -> _Grown:
    space, memory = assignment.space, usage(assignment)
    flops: Formula = {}
    for variable, names in space.members.items():
        node = space.graph.by_name[names[0]]
        if not node.is_leaf:
            again = space.decision_graph.runs_again(variable, assignment.recompute)
            flops = added(flops, _flops(assignment, node, len(names), again))
    return _Grown(
        {**_by_use(memory.left), "activations": _by_use(memory.kept).get("activations", 0)},
        dict.fromkeys(total for _, total in memory.moments),
        flops,
        collectives(assignment),
        seconds_by_use(assignment),
    )


def _by_use(storages: Iterable[Held]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in storages:
        found[each.use] = found.get(each.use, 0) + each.all_bytes
    return found


def _micro_batched(assignment: Assignment, staged: Staged, grown: Growth | None) -> _Grown:
    """A micro-batched step: seconds and operations of its busiest rank, bytes of its fullest, along the longest path of
    the schedule at the planned sizes.

    Args:
        grown: how the schedule grows with its micro-batches; ``None``: they stay as many.
    """
    space = assignment.space
    recomputing = replace(assignment, recompute=staged.recompute(space.folded))
    schedule, held = _schedule(staged, grown), peak_micro_batched(assignment, staged).by_use()
    if not staged.alive.peaks_at_end(staged.peak_rank):
        held["activations"] = held["activations"] + _more_in_flight(staged, schedule.running)
    return _Grown(
        held,
        dict.fromkeys(moments(staged.alive, schedule.running)),
        _flops_micro_batched(assignment, staged),
        collectives(recomputing, staged.cut.bounds, schedule.late),
        _seconds_micro_batched(staged, schedule),
    )


@dataclass(frozen=True)
class _Schedule:
    """What a schedule does, as sizes where it grows with its micro-batches.

    Attributes:
        work, sends, late: as in :class:`planner.solve.pipeline.growth.Growth`, for one number of micro-batches.
        running: what each rank holds beside its actions.
    """

    work: Sequence[Sequence[int]]
    sends: Sequence[int]
    running: Sequence[Sequence[Running]]
    late: tuple[int, ...]


def _schedule(staged: Staged, grown: Growth | None) -> _Schedule:
    p = staged.pipeline
    if grown is None:
        _, path = critical(p.schedule, p.ranks, p.micro_batches, p.virtual_stages, staged.times.of_stages)
        return _Schedule(path.work.astype(int).tolist(), path.sends.astype(int).tolist(), staged.alive.running, p.late)

    def of(lines: Iterable[Line]) -> tuple[int, ...]:
        return tuple(along(staged.micro_batches, *line) for line in lines)

    running = [
        [each.with_numbers(of(lines)) for each, lines in zip(planned, held, strict=True)]
        for planned, held in zip(staged.alive.running, grown.held, strict=True)
    ]
    return _Schedule([*map(of, grown.work)], of(grown.sends), running, of(grown.late))


def _more_in_flight(staged: Staged, running: Sequence[Sequence[Running]]) -> int:
    """Bytes that the rank with the highest peak has saved of micro-batches at its fullest moment, less those that are
    planned.
    """
    alive, rank = staged.alive, staged.peak_rank
    planned = alive.peak(rank).beside
    more = running[rank][alive.running[rank].index(planned)]
    pairs = zip(alive.stages_of(rank), more.counts, planned.counts, strict=True)
    return sum((count - before) * alive.stages[stage].saved_bytes for stage, count, before in pairs)


def _flops_micro_batched(assignment: Assignment, staged: Staged) -> Formula:
    """Of the busiest rank, for all micro-batches."""
    space, levels, total = assignment.space, staged.levels, dict[Atom, Any]()
    for number in staged.alive.blocks_of(staged.busiest):
        instance, level = space.folded.instances[number], levels[number]
        again = space.decision_graph.blocks.again(instance.kind, level).operators if level != "none" else ()
        for at, node in enumerate(instance.block.nodes):
            total = added(total, _flops(assignment, node, 1, int(at in again)))
    return times(total, staged.micro_batches)


def _seconds_micro_batched(staged: Staged, schedule: _Schedule) -> dict[str, float]:
    """By use, of the busiest rank; its waiting is what the longest path and the rank last done take more."""
    step_s = max(map(sum, staged.once_s))
    for stage, link, way in staged.alive.placed:
        block = link.block
        backward_s = block.input_s + block.savings[way].recompute_s
        for often, seconds in zip(schedule.work, (block.forward_s, backward_s, block.weight_s), strict=True):
            step_s += seconds * often[stage]
    for count, end in zip(schedule.sends, staged.cut.bounds[1:-1], strict=True):
        step_s += staged.links[end - 1].block.send_s * count
    found = dict(staged.time_s)
    del found["bubble"]
    return {**found, "bubble": rest(step_s, sum(found.values()))}


def _flops(assignment: Assignment, node: Node, count: int, again: int) -> Formula:
    """Operations of so many operators, forward and backward, of which some run forward again."""
    space = assignment.space
    assert isinstance(space, ClosedSpace)
    passes = 1 + space.heavier(node) if any(t.grad for t in node.results) else 1
    return times(space.flops(node, assignment.choice(node)), passes * count + again)


# ---- sympy -----------------------------------------------------------------------------------------------------------


def _of(number: float) -> sympy.Expr:
    return _expression(formula_of(number))


def _expression(formula: Formula) -> sympy.Expr:
    """The sum of all atoms."""
    return sympy.Add(*(_number(value) * _atom(atom) for atom, value in formula.items() if value))


def _atom(atom: Atom) -> sympy.Expr:
    if isinstance(atom, Pick):
        return _pick(sympy.Max if atom.largest else sympy.Min, map(dict, atom.options))
    return sympy.Mul(*(symbol**power for symbol, power in zip(SYMBOLS, atom, strict=True)))


def _pick(of: type, options: Iterable[Formula]) -> sympy.Expr:
    """The largest or smallest, unevaluated where there are several: sympy would compare each with each."""
    expressions = list(map(_expression, options))
    return of(*expressions, evaluate=False) if len(expressions) > 1 else expressions[0]


def _number(value: float | Fraction) -> sympy.Expr:
    return sympy.Rational(value.numerator, value.denominator) if isinstance(value, Fraction) else sympy.sympify(value)
