"""Why not: the best plan around a pinned recipe beside the best plan, or the limits that rule the recipe out.

The recipe is planned as :func:`autopar.plan` would plan it, on the graph that the plan carries. What differs is told
in total and by distinct block. Where nothing is possible, sets of the limits in play (each pin, and the memory of a
device) are tried, smallest first, until one is impossible by itself: nothing outside it is to blame.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from planner.certificate import Decided
from planner.cluster import ClusterSpec
from planner.document import WITHOUT_GRAPH, Document
from planner.errors import InfeasibleError, PinError, PlanError
from planner.explore import Searched
from planner.formulate import Assignment, Role
from planner.layout import MICRO
from planner.looks import PROVED
from planner.pins import Pins
from planner.problem import evaluate
from planner.search import GAP, check_time_limit, search
from planner.words import in_bytes, in_seconds

MEMORY = "memory"
UNLIMITED_BYTES = 2**50
ELSEWHERE = "shared by blocks, and outputs"
TEMPORARY = "temporary"


@dataclass(frozen=True)
class BlockDifference:
    """What the pinned plan costs more than the plan, over all instances of a block on one device."""

    name: str
    extra_s: float
    extra_bytes: int


@dataclass(frozen=True)
class Conflict:
    """Limits that cannot all hold.

    Attributes:
        limits: a smallest set of them, in the user's words.
        reason: what goes wrong under just these.
        relax: the smallest sets of limits without which the recipe becomes possible.
        excess_bytes: what the leanest plan of the recipe needs beyond a device's memory; 0 if memory is not at stake.
    """

    limits: tuple[str, ...]
    reason: str
    relax: tuple[tuple[str, ...], ...]
    excess_bytes: int = 0


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
        head = f"why not {', '.join(_limit(name, value) for name, value in self.pin.items()) or 'free'}"
        if self.conflict is not None:
            return "\n".join([f"{head}: it cannot be", *self._refusal(self.conflict)]) + "\n"
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

    @staticmethod
    def _refusal(conflict: Conflict) -> list[str]:
        rows = [f"  together impossible: {', '.join(conflict.limits)}", f"  because: {conflict.reason}"]
        if conflict.excess_bytes:
            rows.append(f"  smallest excess: {in_bytes(conflict.excess_bytes)} per device")
        ways = [" and ".join(names) for names in conflict.relax]
        rows.append(f"  leave out or change: {', or '.join(ways)}" if ways else "  nothing short of all of it helps")
        return rows


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
    recipe = _Recipe(plan.assignment, plan.cluster, dict(pin), time_limit_s)
    facts = plan.predicted.step_time_s, plan.predicted.peak_bytes
    found = recipe.search(frozenset({*pin, MEMORY}))
    if not isinstance(found, Searched):
        return WhyNot(pin, *facts, conflict=_conflict(recipe, found))
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


# ---- what cannot be --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Recipe:
    """A pinned recipe, any of whose limits may be left out; searches for what remains."""

    assignment: Assignment
    cluster: ClusterSpec
    pin: Mapping[str, Any]
    time_limit_s: float

    def search(self, limits: frozenset[str]) -> Searched | Exception:
        """The best plan under some of the limits, or why there is none."""
        pin = {name: value for name, value in self.pin.items() if name in limits}
        if "tensor" not in pin:  # which it is a part of
            pin.pop("sequence_parallel", None)
        if not pin.keys() & {"pipeline", "micro_batches"}:
            pin = {name: value for name, value in pin.items() if name not in ("schedule", "virtual_stages")}
        cluster = self.cluster
        if MEMORY not in limits:
            device = cluster.device.model_copy(update={"memory_bytes": UNLIMITED_BYTES})
            cluster = cluster.model_copy(update={"device": device})
        space = self.assignment.space
        try:
            return search(
                space.graph,
                cluster,
                Pins.parse(pin),
                space.training,
                time_limit_s=self.time_limit_s,
                gap=GAP,
                pipelines=space.in_turns,
            )
        except (PinError, InfeasibleError) as error:
            return error

    def words(self, limits: Iterable[str]) -> tuple[str, ...]:
        """Limits as the user wrote them."""
        usable = in_bytes(self.cluster.device.usable_bytes)
        return tuple(
            f"{usable} of memory per device" if name == MEMORY else f"pin {_limit(name, self.pin[name])}"
            for name in limits
        )


def _conflict(recipe: _Recipe, error: Exception) -> Conflict:
    """The smallest set of limits that is impossible by itself, and the smallest sets to drop."""
    limits = (*recipe.pin, MEMORY)
    outcomes: dict[frozenset[str], Searched | Exception] = {frozenset(limits): error}

    def outcome(names: Iterable[str]) -> Searched | Exception:
        key = frozenset(names)
        if key not in outcomes:
            outcomes[key] = recipe.search(key)
        return outcomes[key]

    subsets = [each for size in range(1, len(limits) + 1) for each in itertools.combinations(limits, size)]
    guilty = next(each for each in subsets if isinstance(outcome(each), Exception))
    reason = outcome(guilty)
    relax: list[tuple[str, ...]] = []
    for dropped in subsets:
        if relax and len(dropped) > len(relax[0]):
            break
        # What leaves the guilty set whole cannot help.
        if set(dropped) & set(guilty) and isinstance(outcome(set(limits) - set(dropped)), Searched):
            relax.append(dropped)
    excess = error.excess_bytes if isinstance(error, InfeasibleError) else 0
    return Conflict(recipe.words(guilty), str(reason), tuple(map(recipe.words, relax)), max(0, excess))


def _limit(name: str, value: object) -> str:
    return f"{name} = {value}"


def _seconds(extra: float) -> str:
    return f"{'-' if extra < 0 else '+'}{in_seconds(abs(extra))}"


def _bytes(extra: float) -> str:
    return f"{'-' if extra < 0 else '+'}{in_bytes(abs(extra))}"
