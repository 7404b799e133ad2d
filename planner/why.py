"""Why not: the best plan around a pinned recipe beside the best plan, or the limits that rule the recipe out.

The recipe is planned as :func:`autopar.plan` would plan it, on the graph that the plan carries. What differs is told
in total and by distinct block. Where nothing is possible, :mod:`planner.conflict` says which limits leave no plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.certificate import Decided
from planner.conflict import MEMORY, Conflict, Recipe, as_written, conflict_of
from planner.document import WITHOUT_GRAPH, Document
from planner.errors import PinError, PlanError
from planner.explore import Searched
from planner.formulate import Assignment, Role
from planner.layout import MICRO
from planner.looks import PROVED
from planner.pins import Pins
from planner.problem import evaluate
from planner.search import check_time_limit
from planner.words import in_bytes, in_seconds

ELSEWHERE = "shared by blocks, and outputs"
TEMPORARY = "temporary"


@dataclass(frozen=True)
class BlockDifference:
    """What the pinned plan costs more than the plan, over all instances of a block on one device."""

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
        blocks: the same by distinct block; bytes as the search adds them up, not all alive at once. Empty where one of
            both runs in turns: there the busiest rank decides, and not every block is on it.
        proven: whether both plans are proven to be the best.
        looked: whether the plan's search looked at steps in turns; or that plan takes one turn.
        conflict: why there is none.
    """

    pin: Mapping[str, Any]
    step_time_s: float
    peak_bytes: int
    mesh: str = ""
    extra_s: float = math.inf
    extra_bytes: int = 0
    blocks: tuple[BlockDifference, ...] = ()
    proven: bool = True
    looked: bool = True
    conflict: Conflict | None = None

    def __str__(self) -> str:
        head = f"why not {', '.join(as_written(name, value) for name, value in self.pin.items()) or 'free'}"
        if self.conflict is not None:
            return f"{head}: it cannot be\n{self.conflict}\n"
        share = self.extra_s / self.step_time_s if self.step_time_s else 0.0
        proof = "" if self.proven else " (of the best plans found in the time)"
        rows = [
            f"{head}: mesh {self.mesh}{proof}",
            f"  step    {_seconds(self.extra_s)} ({share * 100:+.2f} %): {in_seconds(self.step_time_s + self.extra_s)} "
            f"instead of {in_seconds(self.step_time_s)}",
            f"  memory  {_bytes(self.extra_bytes)}: {in_bytes(self.peak_bytes + self.extra_bytes)} "
            f"instead of {in_bytes(self.peak_bytes)}",
        ]
        if self.extra_s < -PROVED * self.step_time_s:
            rows.append(
                "  it is faster: the plan's search did not find it. Plan again with this pin, or for longer"
                if self.looked
                else "  it is faster: the plan's search did not look at pipelines and micro-batches. Plan again with "
                "pipelines=True"
            )
        rows += ["  by block, in bytes that need not all be alive at once:"] if self.blocks else []
        width = max((len(block.name) for block in self.blocks), default=0)
        rows += [
            f"    {block.name.ljust(width)}  {_seconds(block.extra_s).rjust(10)}  {_bytes(block.extra_bytes).rjust(11)}"
            for block in self.blocks
        ]
        return "\n".join(rows) + "\n"

    __repr__ = __str__


def why_not(plan: Document, pin: Mapping[str, Any], *, time_limit_s: float = 60.0) -> WhyNot:
    """The best plan around a pinned recipe, beside a plan.

    Args:
        plan: one that carries its decisions.
        pin: the recipe, as :func:`autopar.plan` takes it; it stands by itself, without what the plan had pinned.
        time_limit_s: for every search that it takes.

    Raises:
        PlanError: the plan was read from a file, without its model.
        PinError: the recipe is malformed, or offloads. One that only cannot be is an answer.
        InputError: the time limit is not positive.
    """
    if plan.assignment is None:
        raise PlanError(WITHOUT_GRAPH)
    check_time_limit(time_limit_s)
    if Pins.parse(pin).tier != "device":
        raise PinError(
            f"pin 'offload' is {pin['offload']!r}, and why_not compares plans with all model data on the device: plan "
            "with this pin, and compare what the two plans predict"
        )
    if {"schedule", "virtual_stages"} & pin.keys() and "pipeline" not in pin:
        raise PinError(
            "pins 'schedule' and 'virtual_stages' are a pipeline's, and the recipe stands by itself: pin 'pipeline', "
            "its number of stages, too"
        )
    recipe = Recipe(plan.assignment, plan.cluster, {k: v for k, v in pin.items() if v is not None}, time_limit_s)
    facts = plan.predicted.step_time_s, plan.predicted.peak_bytes
    found = recipe.search((*recipe.pin, MEMORY))
    if not isinstance(found, Searched):
        return WhyNot(pin, *facts, conflict=conflict_of(recipe))
    space = found.assignment.space
    return WhyNot(
        pin,
        *facts,
        mesh=str(found.best.division),
        extra_s=found.evaluation.time_s - facts[0],
        extra_bytes=found.peak_bytes - facts[1],
        blocks=()
        if plan.assignment.space.in_turns or space.in_turns
        else _differences(plan.assignment, found.assignment),
        proven=found.status == "optimal" and plan.search.status == "optimal",
        looked=not space.in_turns or plan.assignment.space.in_turns or _saw_turns(plan),
    )


def _saw_turns(plan: Document) -> bool:
    """Whether any candidate of the plan's search has stages or micro-batches."""
    return any(set(each["mesh"]) & {"pipeline", MICRO} for each in plan.search.candidates)


# ---- what differs ----------------------------------------------------------------------------------------------------


def _differences(plan: Assignment, other: Assignment) -> tuple[BlockDifference, ...]:
    """By block, as the plan orders them; together all that the plans differ by."""
    before, after = _by_block(plan), _by_block(other)
    names = dict.fromkeys([*before, *after])
    for last in (ELSEWHERE, TEMPORARY):
        names[last] = names.pop(last, None)
    pairs = [(name, before.get(name, (0.0, 0)), after.get(name, (0.0, 0))) for name in names]
    return tuple(BlockDifference(name, b[0] - a[0], b[1] - a[1]) for name, a, b in pairs if a != b)


def _by_block(assignment: Assignment) -> dict[str, tuple[float, int]]:
    """Seconds and bytes by block: together the step time and the peak.

    Communication belongs to the block that reads; what of it backward does not hide is spread over all that might
    have been hidden. Bytes that are there only for a while are nobody's.
    """
    space = Decided(assignment, assignment.space.skeleton)
    problem = space.problem(None, assignment.recompute)
    blocks = [_block(assignment, role) for role in space.roles]
    time_s, background_s, held = dict.fromkeys(blocks, 0.0), dict.fromkeys(blocks, 0.0), dict.fromkeys(blocks, 0)
    for block, vertex in zip(blocks, problem.vertices, strict=True):
        time_s[block] += float(vertex.time_s[0])
        background_s[block] += float(vertex.background_s[0])
        held[block] += int(vertex.held_bytes[0])
    for edge in problem.edges:
        block = blocks[edge.head]
        time_s[block] += float(edge.time_s[0, 0])
        background_s[block] += float(edge.background_s[0, 0])
        held[block] += int(edge.held_bytes[0, 0])
    total = evaluate(problem, (0,) * len(blocks))
    exposed = total.exposed_background_s / (sum(background_s.values()) or 1.0)
    found = {name: (time_s[name] + exposed * background_s[name], held[name]) for name in time_s}
    return {**found, TEMPORARY: (0.0, total.peak_bytes - sum(held.values()))}


def _block(assignment: Assignment, role: Role) -> str:
    """The block that a role belongs to; blocks that a plan decides apart have one name."""
    if role[0] == "relay":
        assert isinstance(role[1], tuple)
        return _block(assignment, role[1])
    if len(role) != 3:
        return ELSEWHERE
    return assignment.space.folded.names[int(str(role[1]))].partition("#")[0]


def _seconds(extra: float) -> str:
    return f"{'-' if extra < 0 else '+'}{in_seconds(abs(extra))}"


def _bytes(extra: float) -> str:
    return f"{'-' if extra < 0 else '+'}{in_bytes(abs(extra))}"
