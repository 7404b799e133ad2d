"""Explore: the best plan within a limit to memory, over all divisions of the cluster, and what is proved of it.

Every division of the cluster that the pins allow (:mod:`planner.search.parallel_config`) is a candidate with a lower
bound on the step time of all its plans, with any amount of recomputation. The candidate of least bound is looked at
next, always more closely (:mod:`planner.search.candidate_bounds`), until its plan is found or its bound reaches the
best plan known; then every other bound does too, and nothing better can exist. Where there are many, usual shapes and
those near the best plan's come first, and a look at a candidate that was begun takes turns with a look at any: there
may not be time for all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from planner.analysis.memory import Usage, usage
from planner.analysis.offload.step_timing import WorkingSet, largest_working_set, offloaded
from planner.analysis.pipeline.staged import Staged
from planner.analysis.prediction import Prediction, predict, predict_micro_batched
from planner.base.formatting import in_seconds
from planner.formulation.assignment import Assignment, assignment_of
from planner.formulation.decisions import Skeleton
from planner.formulation.remat.levels import Ladder, ladder
from planner.search.candidate_bounds import (
    PROVED,
    Best,
    Candidate,
    Look,
    Setting,
    begin,
    better,
    close,
    is_near,
    is_reached,
    left_behind,
    look_closer,
)
from planner.search.infeasibility import check_divisible
from planner.search.parallel_config import Arithmetic, Division, seeds
from planner.search.pipeline_refinement import filled
from planner.search.unfolding import apart, may_differ, together_again
from planner.solve.problem import Evaluation
from planner.solve.transfers import Timetable

NEAR = 2.0
"""Shapes at most so many doublings from the best plan's are looked at before others; see :meth:`Division.distance`."""


class Divisions(NamedTuple):
    """What is looked at: divisions without micro-batches, and others."""

    plain: tuple[Division, ...]
    micro_batched: tuple[Division, ...]


@dataclass(frozen=True)
class Searched:
    """The result of a search.

    Attributes:
        best: the best plan.
        candidates: every mesh, best first; what is only bounded stands at its bound.
        status, gap: ``optimal`` with gap 0 when every candidate was solved or bounded away, among plans that
            decide equal blocks alike where the model has more than :data:`APART_OPERATORS` operators.
        seconds: by step: ``fold``, ``build``, ``solve``.
        memory: of the plan followed statement by statement; ``None`` with micro-batches.
    """

    best: Best
    candidates: tuple[Candidate, ...]
    status: str
    gap: float
    seconds: Mapping[str, float]
    memory: Usage | None = None

    @cached_property
    def assignment(self) -> Assignment:
        """The best plan's decisions."""
        return assignment_of(self.best.space, self.best.choices, self.best.recompute)

    @property
    def staged(self) -> Staged | None:
        """How they run on a pipeline, or with micro-batches; its cut says what is made again, not the assignment."""
        return self.best.staged

    @property
    def evaluation(self) -> Evaluation:
        """What they cost, by the one definition of cost."""
        return self.best.evaluation

    @property
    def recomputing(self) -> Assignment:
        """The decisions, with what the cut says is made again."""
        if self.staged is None:
            return self.assignment
        return replace(self.assignment, recompute=self.staged.recompute(self.assignment.space.folded))

    @property
    def peak_bytes(self) -> int:
        """Of the plan, as predicted."""
        return self.evaluation.peak_bytes if self.memory is None else self.memory.peak_bytes

    @property
    def bound_s(self) -> float:
        """No plan is faster, by the search's reckoning of memory."""
        return self.evaluation.time_s * (1 - self.gap)

    def above(self, bound_s: float) -> Searched:
        """The same where what is proved is that no plan is faster than this."""
        gap = 1 - bound_s / self.evaluation.time_s if self.evaluation.time_s else 0.0
        return replace(self, status="feasible", gap=gap) if gap > PROVED else self

    def working_set(self) -> WorkingSet:
        """The largest of the plan; see :func:`planner.analysis.offload.step_timing.largest_working_set`."""
        return largest_working_set(self.recomputing, self.memory, self.staged)

    @cached_property
    def offloaded(self) -> tuple[tuple[Timetable, ...], Prediction]:
        """The timetables of the step and what they predict (:mod:`planner.analysis.offload.step_timing`)."""
        assignment, staged = self.recomputing, self.staged
        before = (
            predict(assignment, 0.0, self.memory) if staged is None else predict_micro_batched(self.assignment, staged)
        )
        return offloaded(assignment, self.memory, before, staged)

    @property
    def offloaded_s(self) -> float:
        """Seconds of that step."""
        return self.offloaded[1].step_time_s

    def followed(self, memory: Usage | None = None) -> Searched:
        """The same with the plan followed: its own peak in the row of its division, where the search has only a sum."""
        if self.staged is not None:  # stage by stage, by whoever asks
            return self
        memory = memory or usage(self.assignment)
        division, peak_bytes = Division(1, self.assignment.space.mesh), memory.peak_bytes
        rows = [replace(row, peak_bytes=peak_bytes) if row.division == division else row for row in self.candidates]
        return replace(self, candidates=tuple(rows), memory=memory)


@dataclass(frozen=True)
class Nothing:
    """No plan within the setting's memory: what became of every division, and the looks that prove it."""

    rows: list[Candidate]
    looks: list[Look]


def explore(
    setting: Setting, skeleton: Skeleton, divisions: Divisions, known: Best | None = None
) -> Searched | Nothing:
    """The fastest plan within the setting's memory, over all divisions; ``known`` if none is faster."""
    rungs = ladder(skeleton.folded, setting.levels)
    best, looks = _best_first(setting, skeleton, (*divisions.plain, *divisions.micro_batched), rungs, known)
    rows, proofs = _rows(looks), looks
    if divisions.plain and may_differ(skeleton.folded):
        best, row, closer = _explore_apart(setting, skeleton, divisions.plain, rungs, best)
        if row is not None:
            rows = [*(each for each in rows if each.division != row.division), row]
        proofs = [*closer, *(look for look in looks if look.candidate.division.micro_batched)]
    if best is None:
        return Nothing(rows, proofs)
    return completed(setting, best, rows, [look.candidate.bound_s for look in proofs])


def completed(setting: Setting, best: Best, rows: list[Candidate], bounds: Iterable[float]) -> Searched:
    """The result, with a bound for the plans of every candidate."""
    bound_s = min(bounds)
    if best.staged is not None:
        best = filled(setting, best, bound_s)
        rows = [row.having(best.evaluation) if row.division == best.division else row for row in rows]
    time_s = best.evaluation.time_s
    bound_s = min(time_s, bound_s)
    gap = (time_s - bound_s) / time_s if time_s else 0.0
    rows.sort(key=lambda c: (c.status == "infeasible", min(c.objective_s, max(c.bound_s, time_s)), c.objective_s))
    return Searched(
        best,
        tuple(rows),
        "optimal" if gap <= PROVED else "feasible",
        gap if gap > PROVED else 0.0,
        setting.seconds,
    )


def _explore_apart(
    setting: Setting, skeleton: Skeleton, plain: tuple[Division, ...], rungs: Ladder, alike: Best | None
) -> tuple[Best | None, Candidate | None, list[Look]]:
    """The best plan where equal blocks may differ, what became of its division if it is better than the best known,
    and what became of all.
    """
    best, looks = _best_first(setting, apart(skeleton), plain, rungs.apart(skeleton.numbers), alike)
    if best is None or best is alike:
        return best, None, looks
    before = time.monotonic()
    best = together_again(setting, skeleton.folded, best)
    found, division = best.evaluation, best.division
    bound_s = next(look.candidate.bound_s for look in looks if look.candidate.division == division)
    status = "optimal" if found.time_s - bound_s <= PROVED * found.time_s else "feasible"
    setting.took("solve", before)
    return best, Candidate(division, status, found.time_s, bound_s, found.peak_bytes), looks


def _best_first(
    setting: Setting, skeleton: Skeleton, divisions: tuple[Division, ...], rungs: Ladder, best: Best | None
) -> tuple[Best | None, list[Look]]:
    """Best first over the divisions, starting from the best plan known; what became of each, in their order."""
    arithmetic, schedule = Arithmetic(skeleton, setting.cost), setting.pins.schedule
    waiting = [begin(division, arithmetic.bound_s(division, schedule), rungs) for division in divisions]
    is_split = any(division.micro_batched for division in divisions)
    usual = seeds(divisions, setting.cost.cluster, skeleton.graph) if is_split else []
    first = {division: number for number, division in enumerate(usual)}
    closed, is_deeper = list[Look](), False
    while waiting:
        is_late = setting.is_late()
        if best is not None and is_late:
            waiting += [other for look in waiting for other in left_behind(setting, look)]
            closed += [close(look, best) for look in waiting]
            break
        # To look for plans where it is promising, or to prove bounds: where there are many divisions, in turn.
        is_deeper = is_split and not is_deeper
        begun = [look for look in waiting if look.is_priced and not look.is_tried] if is_deeper else []
        look = min(begun or waiting, key=lambda look: _micro_batch(look, first, best))
        waiting.remove(look)
        is_left_out = is_late and look.is_dear and len(closed) + 1 < len(divisions)
        if is_left_out or is_near(setting, look, best) or is_reached(look.candidate.bound_s, best):
            closed.append(close(look, best))
            waiting += left_behind(setting, look)
            continue
        for each in look_closer(setting, skeleton, look, best):
            known, best = best, better(best, each)
            if best is not None and best is not known:
                setting.say(f"  {in_seconds(best.evaluation.time_s)} a step on {best.division}, the best so far")
            (closed if each.is_done else waiting).append(each)
    check_divisible(setting, skeleton.graph, closed)
    order = {(each.stages, each.mesh): number for number, each in enumerate(divisions)}

    def place(look: Look) -> tuple[int, bool, int]:
        division = look.candidate.division
        return order[division.stages, division.mesh], division.gathers == "each", look.low

    return best, sorted(closed, key=place)


def _micro_batch(look: Look, first: Mapping[Division, int], best: Best | None) -> tuple[float, float]:
    """Which look is next, the least: plans of ``first``, then of divisions like the best plan's, then by bound."""
    division, bound_s = look.candidate.division, look.candidate.bound_s
    if not look.is_tried:
        for wanted in (division, replace(division, gathers="once"))[: 1 + (best is None)]:
            if wanted in first:
                return -1, first[wanted]
    if look.is_tried or best is None:
        return NEAR + 1, bound_s
    return min(division.distance(best.division), NEAR + 1), bound_s


def _rows(looks: list[Look]) -> list[Candidate]:
    """What became of every division, whatever its recomputation."""
    found: dict[Division, list[Candidate]] = {}
    for look in looks:
        found.setdefault(look.candidate.division, []).append(look.candidate)
    return [_joined(each) for each in found.values()]


def _joined(looks: list[Candidate]) -> Candidate:
    """One candidate of the looks at parts of it."""
    best, open_ = min(looks, key=lambda each: each.objective_s), min(looks, key=lambda each: each.bound_s)
    peak_bytes = best.peak_bytes if math.isfinite(best.objective_s) else min(each.peak_bytes for each in looks)
    status = best.status if math.isfinite(best.objective_s) else open_.status
    if status == "optimal" and open_.bound_s < best.objective_s * (1 - PROVED) and open_.status != "bounded away":
        status = "feasible"
    return Candidate(best.division, status, best.objective_s, open_.bound_s, peak_bytes, open_.proof)
