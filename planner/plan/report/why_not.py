"""Compares the best plan around a pinned recipe with the best plan, or names the limits that rule the recipe out.

The recipe is planned as :func:`autopar.plan` would plan it, on the graph that the plan carries. What differs is told
in total, by use and by distinct block, either of which adds up to the total. Where nothing is possible,
:mod:`planner.search.conflict` says which limits leave no plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from planner.analysis.flips import Flip, PricedPlan, flips
from planner.analysis.memory import Usage, usage
from planner.analysis.memory.storages import is_before
from planner.analysis.pipeline.peak_report import peak_micro_batched
from planner.analysis.pipeline.staged import Staged
from planner.analysis.prediction import seconds_by_use
from planner.base.errors import InfeasibleError, PinError, PlanError
from planner.base.formatting import in_bytes, in_lines, in_seconds, labelled
from planner.formulation.assignment import Assignment
from planner.formulation.certificate import Decided
from planner.formulation.constraints.pins import Pins
from planner.formulation.decision_names import called, state_of
from planner.formulation.variables import Variable
from planner.plan.document.document import WITHOUT_GRAPH, Document
from planner.plan.document.pareto_point import GIB, memory_unit
from planner.search.branch_and_bound import Searched
from planner.search.candidates import PROVED
from planner.search.conflict import MEMORY, Conflict, Recipe, as_written, conflict_of
from planner.search.search import check_time_limit
from planner.solve.problem import evaluate

Number = TypeVar("Number", int, float)

ELSEWHERE = "shared by blocks, and outputs"
ROUNDING = 1e-9
"""Part of a step that adding in another order may make."""


@dataclass(frozen=True)
class BlockDifference:
    """What the pinned plan costs more than the plan, over all instances of a block on one device.

    Attributes:
        extra_s: of what its operators compute and communicate.
        extra_bytes: of what is alive at each plan's fullest moment: what the block made, and the parameters that only
            it reads, with their optimizer state.
    """

    name: str
    extra_s: float
    extra_bytes: int


@dataclass(frozen=True)
class WhyNot:
    """A pinned recipe beside the plan; prints as text.

    Attributes:
        pin: the recipe.
        step_time_s, peak_bytes: of the plan.
        mesh: of the best plan around the recipe; empty if there is none.
        extra_s, extra_bytes: what that plan takes more than the plan; infinite and 0 if there is none.
        uses_s, uses_bytes: the same by use, see :class:`planner.analysis.prediction.Prediction`; what does not differ
            is left out.
        blocks: the same by distinct block. Empty where one of both runs micro-batched: there the busiest rank decides,
            and not every block is on it.
        proven: whether both plans are proven to be the best.
        pinned: what the plan was pinned to that the recipe does not pin alike, but for sizes of axes that agree.
        left_out: why the plan's search did not look at such a step, where it is a micro-batched one.
        flips: at which speeds of links, arithmetic and memory the two plans take equally long, see
            :func:`planner.analysis.flips.flips`.
        fits_from_bytes: of each device's memory that it takes for the recipe to have a plan, where there is none since
            it is short; else 0.
        seconds_per_gib: what the plan would take longer for each GiB less of memory, where the curve was given that
            says so; else 0.
        conflict: why there is none.
    """

    pin: Mapping[str, Any]
    step_time_s: float
    peak_bytes: int
    mesh: str = ""
    extra_s: float = math.inf
    extra_bytes: int = 0
    uses_s: Mapping[str, float] = field(default_factory=dict)
    uses_bytes: Mapping[str, int] = field(default_factory=dict)
    blocks: tuple[BlockDifference, ...] = ()
    proven: bool = True
    pinned: Mapping[str, Any] = field(default_factory=dict)
    left_out: str = ""
    flips: tuple[Flip, ...] = ()
    fits_from_bytes: int = 0
    seconds_per_gib: float = 0.0
    conflict: Conflict | None = None

    def __str__(self) -> str:
        head = f"why not {', '.join(as_written(name, value) for name, value in self.pin.items()) or 'free'}"
        if self.conflict is not None:
            needed = f"  it has a plan from {in_bytes(self.fits_from_bytes)} a device on\n" * bool(self.fits_from_bytes)
            return f"{head}: it cannot be\n{self.conflict}\n{needed}{self._price()}"
        share = self.extra_s / self.step_time_s if self.step_time_s else 0.0
        proof = "" if self.proven else " (of the best plans found in the time)"
        head += f": mesh {self.mesh}{proof}"
        totals = [
            (
                "step",
                f"{_seconds(self.extra_s) or '+0 s'} ({share * 100:+.2f} %): "
                f"{in_seconds(self.step_time_s + self.extra_s)} instead of {in_seconds(self.step_time_s)}",
            ),
            ("", _parts(self.uses_s, _seconds)),
            (
                "memory",
                f"{_bytes(self.extra_bytes) or '+0 B'}: {in_bytes(self.peak_bytes + self.extra_bytes)} "
                f"instead of {in_bytes(self.peak_bytes)}",
            ),
            ("", _parts(self.uses_bytes, _bytes)),
            ("flips", in_lines(f"with {each}" for each in self._flips())),
        ]
        rows = [head, labelled(row for row in totals if row[1])]
        if self.extra_s < -PROVED * self.step_time_s:
            rows.append(f"  it is faster: {self._why_not_found()}")
        elif self.pinned:
            rows.append(f"  it stands by itself: what it does not pin is free, the plan's {self._pins()} too")
        rows += ["  by block, with bytes at each plan's fullest moment:"] if self.blocks else []
        width = max((len(block.name) for block in self.blocks), default=0)
        for block in self.blocks:
            cells = f"{_seconds(block.extra_s).rjust(10)}  {_bytes(block.extra_bytes).rjust(11)}".rstrip()
            rows += [f"    {block.name.ljust(width)}  {cells}"] if cells else []
        return "\n".join(rows) + f"\n{self._price()}"

    __repr__ = __str__

    def _flips(self) -> Iterator[str]:
        """What would turn the order of the two plans, as they are."""
        yield from map(str, self.flips)
        if self.extra_bytes < 0:
            least = in_bytes(self.peak_bytes + self.extra_bytes)
            yield f"less than {in_bytes(self.peak_bytes)} of memory a device, which the plan takes; this one {least}"

    def _price(self) -> str:
        """What memory is worth."""
        if not self.seconds_per_gib:
            return ""
        unit, size = memory_unit(self.peak_bytes)
        price = in_seconds(self.seconds_per_gib * size / GIB)
        return f"  each {unit} less would cost the plan {price} a step at least\n"

    def _pins(self) -> str:
        """What the plan was pinned to, and the recipe is not, as the user wrote it."""
        return ", ".join(as_written(name, value) for name, value in self.pinned.items())

    def _why_not_found(self) -> str:
        """Why the plan's search did not come to what is faster, and what would."""
        if self.pinned:
            return f"the plan was pinned to {self._pins()}, and this recipe is not. Plan again with this pin instead"
        if self.left_out:
            return f"the plan's search left out {self.left_out}. Plan again with this pin"
        return "the plan's search did not find it. Plan again with this pin, or for longer"


def why_not(
    plan: Document,
    pin: Mapping[str, Any],
    staged: Staged | None = None,
    *,
    time_limit_s: float = 60.0,
    seconds_per_gib: float = 0.0,
) -> WhyNot:
    """The best plan around a pinned recipe, beside a plan.

    Args:
        plan: one that carries its decisions.
        pin: the recipe, as :func:`autopar.plan` takes it; it stands by itself, without what the plan had pinned.
        staged: how the plan runs micro-batched, if it does.
        time_limit_s: for every search that it takes.
        seconds_per_gib: the price of memory where the plan is, if that is known.

    Raises:
        PlanError: the plan was read from a file, without its model.
        PinError: the recipe is malformed, or offloads. One that only cannot be is an answer.
        InputError: the time limit is not positive.
    """
    if plan.assignment is None:
        raise PlanError(WITHOUT_GRAPH)
    check_time_limit(time_limit_s)
    if not pin:
        raise PinError(
            f"why_not takes a recipe to compare with, and was given {pin!r}: give pins, e.g. {{'tensor': 8}}"
        )
    if Pins.parse(pin).tier != "device":
        raise PinError(
            f"pin 'offload' is {pin['offload']!r}, and why_not compares plans with all model data on the device: plan "
            "with this pin, and compare what the two plans predict"
        )
    if {"table", "tables"} & pin.keys():
        raise PinError(
            "pins 'table' and 'tables' put embedding tables into slabs, which makes another program of the model: plan "
            "with this pin, and compare what the two plans predict"
        )
    if {"schedule", "virtual_stages"} & pin.keys() and "pipeline" not in pin:
        raise PinError(
            "pins 'schedule' and 'virtual_stages' are a pipeline's, and the recipe stands by itself: pin 'pipeline', "
            "its number of stages, too"
        )
    pinned = {name: value for name, value in pin.items() if value is not None}
    recipe = Recipe(plan.assignment, plan.cluster, pinned, time_limit_s, plan.search.max_axes)
    facts = plan.predicted.step_time_s, plan.predicted.peak_bytes
    found = recipe.search((*recipe.pin, MEMORY))
    if not isinstance(found, Searched):
        excess_bytes = found.excess_bytes if isinstance(found, InfeasibleError) else 0
        device = plan.cluster.device
        usable_bytes = device.usable_bytes + excess_bytes if excess_bytes > 0 else 0
        needed = math.ceil(usable_bytes / (1 - device.reserve_fraction))
        conflict = conflict_of(recipe)
        return WhyNot(pin, *facts, fits_from_bytes=needed, seconds_per_gib=seconds_per_gib, conflict=conflict)
    other = PricedPlan(found.assignment, found.staged)
    if other.staged is not None:
        time_s, memory_bytes = other.staged.time_s, peak_micro_batched(other.assignment, other.staged).by_use()
        blocks: tuple[BlockDifference, ...] = ()
    else:
        memory = found.memory or usage(found.assignment)
        time_s, memory_bytes = seconds_by_use(found.assignment), memory.by_use()
        blocks = () if plan.pipeline is not None else _differences(plan.assignment, found.assignment, memory)
    return WhyNot(
        pin,
        *facts,
        mesh=str(found.best.config),
        extra_s=found.evaluation.time_s - facts[0],
        extra_bytes=found.peak_bytes - facts[1],
        uses_s=_more(plan.predicted.time_s, time_s, ROUNDING * facts[0]),
        uses_bytes=_more(plan.predicted.memory_bytes, memory_bytes),
        blocks=blocks,
        proven=found.status == "optimal" and plan.search.status == "optimal",
        pinned=_pinned_otherwise(plan.pin, Pins.parse(pinned).to_dict(), found.best.config.sizes),
        left_out=_no_micro_batches(plan.search.left_out) if other.staged is not None else "",
        flips=flips(PricedPlan(plan.assignment, staged), other),
        seconds_per_gib=seconds_per_gib,
    )


def _no_micro_batches(left_out: str) -> str:
    """Of what a search left out what is about micro-batched steps."""
    return "; ".join(each for each in left_out.split("; ") if "micro-batches" in each)


def _pinned_otherwise(pin: Mapping[str, Any], recipe: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Pins of the plan that the recipe does not repeat, but for axes that have the pinned size all the same."""
    found = {name: value for name, value in pin.items() if value is not None and recipe.get(name) != value}
    return {name: value for name, value in found.items() if name not in sizes or sizes[name] != value}


# ---- what differs ----------------------------------------------------------------------------------------------------


def _more(before: Mapping[str, Number], after: Mapping[str, Number], noise: float = 0.0) -> dict[str, Number]:
    """What is more or less than before, beyond noise, in the order of before."""
    names = dict.fromkeys([*before, *after])
    found = {name: after.get(name, 0) - before.get(name, 0) for name in names}
    return {name: more for name, more in found.items() if abs(more) > noise}


def _differences(plan: Assignment, other: Assignment, memory: Usage) -> tuple[BlockDifference, ...]:
    """By block, as the plan orders them; together all that the plans differ by.

    Args:
        memory: of the other.
    """
    before, after = _seconds_by_block(plan), _seconds_by_block(other)
    extra_s = _more(before, after, ROUNDING * math.fsum(before.values()))
    extra_bytes = _more(_bytes_by_block(plan, usage(plan)), _bytes_by_block(other, memory))
    names = dict.fromkeys([*before, *after])
    names[ELSEWHERE] = names.pop(ELSEWHERE, None)
    differing = (name for name in names if name in extra_s or name in extra_bytes)
    return tuple(BlockDifference(name, extra_s.get(name, 0.0), extra_bytes.get(name, 0)) for name in differing)


def _seconds_by_block(assignment: Assignment) -> dict[str, float]:
    """Seconds by block: together the step time.

    Communication belongs to the block that reads; what of it backward does not hide is spread over all that might
    have been hidden.
    """
    space = Decided(assignment, assignment.space.decision_graph)
    problem = space.problem(None, assignment.recompute)
    blocks = [_block(assignment, variable) for variable in space.variables]
    time_s, background_s = dict.fromkeys(blocks, 0.0), dict.fromkeys(blocks, 0.0)
    for block, vertex in zip(blocks, problem.vertices, strict=True):
        time_s[block] += float(vertex.time_s[0])
        background_s[block] += float(vertex.background_s[0])
    for edge in problem.edges:
        time_s[blocks[edge.head]] += float(edge.time_s[0, 0])
        background_s[blocks[edge.head]] += float(edge.background_s[0, 0])
    exposed_s = evaluate(problem, (0,) * len(blocks)).exposed_background_s
    share = exposed_s / (sum(background_s.values()) or 1.0)
    return {name: time_s[name] + share * background_s[name] for name in time_s}


def _bytes_by_block(assignment: Assignment, memory: Usage) -> dict[str, int]:
    """Bytes at the peak by block: together the peak. Leaves belong to the block that alone reads them."""
    space, found = assignment.space, Counter[str]()
    leaves = [(leaf, _block(assignment, space.variable_of[leaf.name])) for leaf in space.graph.leaves]
    owners = {name: block for leaf, block in leaves for name in (called(leaf), state_of(leaf))}
    for held in memory.alive:
        if is_before(held.block):
            block = owners.get(held.name, ELSEWHERE)
        else:
            block = _name(assignment, space.folded.instances[held.block].kind)
        found[block] += held.all_bytes
    return dict(found)


def _block(assignment: Assignment, variable: Variable) -> str:
    """The block that a variable belongs to; blocks that a plan decides apart have one name."""
    if variable[0] == "reshard_point":
        assert isinstance(variable[1], tuple)
        return _block(assignment, variable[1])
    if len(variable) != 3:
        return ELSEWHERE
    return _name(assignment, int(str(variable[1])))


def _name(assignment: Assignment, kind: int) -> str:
    return assignment.space.folded.names[kind].partition("#")[0]


def _parts(uses: Mapping[str, Number], show: Callable[[float], str]) -> str:
    """What differs by use, with its sign; what is nothing in the digits shown is left out."""
    shown = ((name, show(extra)) for name, extra in uses.items())
    return in_lines(f"{name} {extra}" for name, extra in shown if extra)


def _seconds(extra: float) -> str:
    return _signed(extra, in_seconds)


def _bytes(extra: float) -> str:
    return _signed(extra, in_bytes)


def _signed(extra: float, show: Callable[[float], str]) -> str:
    """``"+29.2 ms"``; empty where the digits shown are all 0."""
    shown = show(abs(extra))
    return "" if float(shown.split()[0]) == 0 else f"{'-' if extra < 0 else '+'}{shown}"
