"""Best-first branch and bound over parallel configurations: the best plan within a memory limit, and what is proved of
it.

Every configuration of the cluster that the pins allow (:mod:`planner.search.parallel_config`) is a candidate with a
lower bound on the step time of all its plans, with any amount of recomputation. The candidate of least bound is
evaluated next, always more closely (:mod:`planner.search.candidate_evaluation`), until its plan is found or its bound
reaches the best plan known; then every other bound does too, and nothing better can exist. Where there are many, usual
shapes and those near the best plan's come first, and the evaluation of a candidate that was begun takes turns with that
of any: there may not be time for all. Several are under way at a time (:mod:`planner.search.evaluations`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

from planner.analysis.memory import Usage, usage
from planner.analysis.offload.step_timing import WorkingSet, largest_working_set
from planner.analysis.pipeline.staged import Staged
from planner.analysis.planned_step import planned_step
from planner.analysis.prediction import Prediction
from planner.base.errors import InputError
from planner.base.formatting import in_seconds
from planner.formulation.assignment import Assignment, assignment_of
from planner.formulation.certificate import ROUNDING
from planner.formulation.decisions import DecisionGraph
from planner.formulation.unsharding import PER_STEP
from planner.search.candidate_evaluation import RAISED, raised
from planner.search.candidates import (
    PROVED,
    Branch,
    Candidate,
    FoundPlan,
    Incumbent,
    begin,
    begin_together,
    better,
    close,
    is_near,
    is_reached,
)
from planner.search.evaluations import AHEAD, AHEAD_OF_PROOF, Evaluations
from planner.search.expectations import LIKELY, Expectations, doubt_of
from planner.search.parallel_config import Arithmetic, ParallelConfig, batch_of, seeds
from planner.search.pipeline_refinement import refined
from planner.search.search_context import SearchContext
from planner.search.unfolding import may_differ, refolded, unfolded
from planner.solve.problem import Evaluation, evaluate
from planner.solve.transfers import TransferSchedule

NEAR = 2.0
"""Shapes at most so many doublings from the best plan's, and their pipelines, are evaluated before others; see
:meth:`ParallelConfig.distance`.
"""
BESIDE = 1.0
"""Pipelines at most so many doublings from the best plan's are evaluated before any."""
SQUEEZED = 1.5
"""Until a plan is known, pipelines that memory makes so many times as long as others are expected to be wait for those.
"""

SETTLED = 40
"""After so many evaluations without a better plan most are for the proof."""
OF_PROOF = 4
"""Of so many evaluations then all but one."""


class ParallelConfigs(NamedTuple):
    """What is searched: configurations without micro-batches, and others."""

    plain: tuple[ParallelConfig, ...]
    micro_batched: tuple[ParallelConfig, ...]


@dataclass(frozen=True)
class Searched:
    """The result of a search.

    Attributes:
        best: the best plan.
        candidates: every mesh, best first; what is only bounded stands at its bound.
        status, gap: ``optimal`` with gap 0 when every candidate was solved or pruned, among plans that
            decide equal blocks alike where the model has more than :data:`UNFOLDED_OPERATORS` operators.
        seconds: by step: ``fold``, ``build``, ``solve``; waiting for other processes is in the last.
        memory: of the plan followed statement by statement; ``None`` with micro-batches.
        left_out: what was not searched, and why; see :mod:`planner.search.left_out`.
    """

    best: Incumbent
    candidates: tuple[Candidate, ...]
    status: str
    gap: float
    seconds: Mapping[str, float]
    memory: Usage | None = None
    left_out: str = ""

    @cached_property
    def assignment(self) -> Assignment:
        """The best plan's decisions."""
        staged, folded = self.best.staged, self.best.space.folded
        recompute = staged.least_recompute(folded) if self.staged is not None else staged.recompute(folded)
        return assignment_of(self.best.space, self.best.choices, recompute)

    @property
    def staged(self) -> Staged | None:
        """How they run on a pipeline, or with micro-batches; its cut says what is recomputed, not the assignment."""
        return self.best.staged if self.best.config.micro_batched else None

    @cached_property
    def evaluation(self) -> Evaluation:
        """What they cost, by the one definition of cost; what they hold is as simulated."""
        found = self.best.evaluation
        if self.staged is not None:
            return found
        problem = self.best.space.problem(None, self.assignment.recompute)
        return replace(evaluate(problem, self.best.choices), peak_bytes=found.peak_bytes)

    @property
    def recomputing(self) -> Assignment:
        """The decisions, with what the cut says is recomputed."""
        if self.staged is None:
            return self.assignment
        return replace(self.assignment, recompute=self.staged.recompute(self.assignment.space.folded))

    @property
    def peak_bytes(self) -> int:
        """Of the plan, as predicted."""
        return self.evaluation.peak_bytes if self.memory is None else self.memory.peak_bytes

    @property
    def evaluated(self) -> tuple[Candidate, ...]:
        """The candidates of which more than arithmetic is known, or that it pruned."""
        return tuple(row for row in self.candidates if row.proof != "arithmetic" or row.status != "not tried")

    @property
    def bound_s(self) -> float:
        """No plan that fits is faster."""
        is_offloaded = self.best.space.training.tier != "device"
        return (self.planned_step_s if is_offloaded else self.evaluation.time_s) * (1 - self.gap)

    def above(self, bound_s: float) -> Searched:
        """The same where what is proved is that no plan is faster than this."""
        gap = 1 - bound_s / self.evaluation.time_s if self.evaluation.time_s else 0.0
        return replace(self, status="feasible", gap=gap) if gap > PROVED else self

    def of_planned_step(self, bound_s: float) -> Searched:
        """The same where what is proved is that no plan's step is predicted to take less than this."""
        assert bound_s <= self.planned_step_s * (1 + ROUNDING), (bound_s, self.planned_step_s)
        return self.bounded(bound_s, self.planned_step_s)

    def bounded(self, bound_s: float, step_s: float | None = None) -> Searched:
        """The same where what is proved, by other means too, is that no plan is faster than this.

        Args:
            step_s: what it takes itself; left out: by the search's reckoning.
        """
        step_s = self.evaluation.time_s if step_s is None else step_s
        gap = max(0.0, 1 - bound_s / step_s) if step_s else 0.0
        return replace(self, status="feasible" if gap > PROVED else "optimal", gap=gap if gap > PROVED else 0.0)

    def working_set(self) -> WorkingSet:
        """The largest of the plan; see :func:`planner.analysis.offload.step_timing.largest_working_set`."""
        return largest_working_set(self.recomputing, self.memory, self.staged)

    @cached_property
    def planned_step(self) -> tuple[tuple[TransferSchedule, ...], Prediction]:
        """The transfer schedules of the step, if there are any, and what is predicted of it."""
        return planned_step(self.assignment, self.staged, self.evaluation.time_s, self.memory)

    @property
    def planned_step_s(self) -> float:
        """Seconds of that step."""
        return self.planned_step[1].step_time_s

    def followed(self, memory: Usage | None = None) -> Searched:
        """The same with a step in one piece followed statement by statement."""
        return self if self.staged is not None else replace(self, memory=memory or usage(self.assignment))


@dataclass(frozen=True)
class NothingFits:
    """No plan within the memory limit was met: what became of every configuration, the branches that say so, and those
    of them in which equal blocks decide alike.
    """

    rows: list[Candidate]
    branches: list[Branch]
    folded: list[Branch]


def branch_and_bound(
    context: SearchContext, decision_graph: DecisionGraph, configs: ParallelConfigs, known: Incumbent | None = None
) -> Searched | NothingFits:
    """The fastest plan within the memory limit, over all configurations; ``known`` if none is faster.

    Raises:
        InputError: the model has no operators.
    """
    if not decision_graph.folded.instances:
        raise InputError(
            "the model has no operators, so there is nothing to divide: it returns what it is given. Plan a model that "
            "computes something, or run this one as it is"
        )
    best, branches = _best_first(context, decision_graph, (*configs.plain, *configs.micro_batched), known)
    rows, proofs = _rows(branches), branches
    found = best
    if configs.plain and may_differ(decision_graph.folded):
        best, row, closer = _branch_and_bound_unfolded(context, decision_graph, configs.plain, found)
        if row is not None:
            rows = [*(each for each in rows if each.config != row.config), row]
        proofs = [*closer, *(branch for branch in branches if branch.candidate.config.micro_batched)]
        least = _least_of_each(closer)
        rows = [replace(each, bound_s=min(each.bound_s, least.get(each.config, math.inf))) for each in rows]
    if best is None:
        return NothingFits(rows, proofs, branches)
    bounds = [branch.candidate.bound_s for branch in proofs]
    if best is found and best is not known:
        best = refined(context, best, _least_of_each(proofs))
    return completed(context, best, rows, bounds)


def completed(context: SearchContext, best: Incumbent, rows: list[Candidate], bounds: Iterable[float]) -> Searched:
    """The result, with a bound for the plans of every candidate."""
    found = Searched(best, (), "optimal", 0.0, context.seconds)
    evaluation, bound_s = found.evaluation, min(bounds)
    rows = [row.having(evaluation) if row.config == best.config else row for row in rows]
    rows.sort(key=partial(standing, evaluation.time_s))
    return replace(found, candidates=tuple(rows)).bounded(bound_s)


def standing(time_s: float, row: Candidate) -> tuple[bool, float, float]:
    """Sorts candidates: those that may have the fastest plan first, where the best one takes ``time_s``."""
    return row.status == "infeasible", min(row.objective_s, max(row.bound_s, time_s)), row.objective_s


def _branch_and_bound_unfolded(
    context: SearchContext,
    decision_graph: DecisionGraph,
    plain: tuple[ParallelConfig, ...],
    alike: Incumbent | None,
) -> tuple[Incumbent | None, Candidate | None, list[Branch]]:
    """The best plan where equal blocks may differ, what became of its configuration if it is better than the best
    known, and what became of all.
    """
    apart = context.apart(decision_graph.blocks.numbers)
    best, branches = _best_first(apart, unfolded(decision_graph), plain, alike)
    if best is None or best is alike:
        return best, None, branches
    best = refined(apart, best, _least_of_each(branches))
    before = time.monotonic()
    best = refolded(context, decision_graph.folded, best)
    found, config = best.evaluation, best.config
    bound_s = next(branch.candidate.bound_s for branch in branches if branch.candidate.config == config)
    status = "optimal" if found.time_s - bound_s <= PROVED * found.time_s else "feasible"
    context.took("solve", before)
    return best, Candidate(config, status, found.time_s, bound_s, found.peak_bytes), branches


def _best_first(
    context: SearchContext,
    decision_graph: DecisionGraph,
    configs: tuple[ParallelConfig, ...],
    known: Incumbent | None,
) -> tuple[Incumbent | None, list[Branch]]:
    """Best first over the configurations, starting from the best plan known; what became of each, in their order."""
    arithmetic, schedule = Arithmetic(decision_graph, context.cost, context.training), context.pins.schedule
    batch, span = batch_of(decision_graph.graph), context.cost.cluster.spans[0]
    bounds = {config: arithmetic.bound_s(config, schedule) for config in configs}
    waiting = begin_together(begin(config, bounds[config], doubt_of(config, batch, span)) for config in configs)
    is_split = any(config.micro_batched for config in configs)
    ordered, larger = seeds(bounds, context.cost.cluster, decision_graph.graph) if is_split else ([], set())
    first = {config: number for number, config in enumerate(ordered)}
    closed, turns, likely_s = list[Branch](), itertools.count(), dict[ParallelConfig, float]()
    expectations = Expectations(batch)
    best = known if known is None else known.found
    under_way, since = Evaluations(context, decision_graph), 0
    while waiting or under_way.branches:
        is_late = context.is_late()
        if best is not None and is_late:
            left = under_way.left()
            for each in left:
                best = better(best, each)
            closed += [close(each, best) for branch in (*waiting, *left) for each in branch.every]
            break
        waiting = [raised(under_way.free_s, branch) for branch in waiting]
        over = [is_near(context, branch, best) or is_reached(branch.bound_s, best) for branch in waiting]
        closed += [close(each, best) for branch in itertools.compress(waiting, over) for each in branch.every]
        waiting = [branch for branch, is_over in zip(waiting, over, strict=True) if not is_over]
        is_settled = since > SETTLED
        ahead = 1 if best is None else AHEAD_OF_PROOF if is_settled else AHEAD
        while waiting and len(under_way.branches) < ahead:
            chosen, is_proof = _of_turn(waiting, next(turns), best, expectations, is_settled)
            branch = min(chosen, key=lambda branch: _priority(branch, first, larger, likely_s, best, expectations))
            others = _packed_alike(branch, waiting) if is_settled else []
            begun = {id(each) for each in (branch, *others)}
            waiting = [each for each in waiting if id(each) not in begun]
            branch = replace(branch, others=tuple(others)) if others else branch
            if is_late and not branch.is_by_itself and len(closed) + 1 < len(configs):
                closed += [close(each, best) for each in branch.every]
                continue
            if branch.pipeline is None:
                context.say(f"mesh {branch.candidate.config}")
            under_way.begin(branch, best, is_proof)
        since += 1
        evaluated = under_way.next() if under_way.branches else ()
        expectations.learn_work(under_way.free_s)
        for each in evaluated:
            before, best = best, better(best, each)
            since = since if best is before else 0
            if best is not None and best is not before:
                context.say(f"  {in_seconds(best.evaluation.time_s)} a step on {best.config}, the best so far")
            if before is not None and each.is_sought and not each.is_priced:
                expectations.learn_excess(each, before)
            (closed if each.is_done else waiting).append(each)
            # Where a schedule is too slow because it does not fit, another one may.
            if each.likely_s and not is_reached(each.candidate.bound_s, best):
                config = each.candidate.config
                likely_s[config] = min(likely_s.get(config, math.inf), each.expected_s)
    order = {(each.stages, each.mesh): number for number, each in enumerate(configs)}

    def place(branch: Branch) -> tuple[int, bool, int]:
        config = branch.candidate.config
        virtual_stages = branch.pipeline.virtual_stages if branch.pipeline is not None else 0
        return order[config.stages, config.mesh], not config.unsharding.once_per_step, virtual_stages

    if best is not None and (known is None or best is not known.found):
        known = best.incumbent(context, decision_graph)
    return known, sorted(closed, key=place)


def _of_turn(
    waiting: list[Branch], turn: int, best: FoundPlan | None, expectations: Expectations, is_settled: bool
) -> tuple[list[Branch], bool]:
    """Those of which one is evaluated next, and whether for the proof: configurations that were not begun, pipelines
    that are likely to be faster, and other pipelines take turns, and what was cut comes last; with the one of least
    bound, which decides how much is proved, once the best plan is settled.
    """
    if is_settled:
        turn, of_proof = divmod(turn, OF_PROOF)
        least = min(waiting, key=lambda branch: branch.bound_s)
        if of_proof and not least.is_priced:
            return [least], True
    kinds: tuple[list[Branch], ...] = [], [], []
    for branch in waiting:
        if not branch.is_sought:
            kinds[0 if branch.pipeline is None else 1 + (not expectations.is_likely(branch, best))].append(branch)
    in_turn = (kinds[(turn + more) % len(kinds)] for more in range(len(kinds)))
    chosen = next((each for each in in_turn if each), waiting)
    if best is None and chosen[0].pipeline is not None:
        enough_s = SQUEEZED * min(expectations.of(branch) for branch in chosen)
        chosen = [each for each in chosen if each.candidate.proof == "work" or expectations.of(each) <= enough_s]
    return chosen, False


def _packed_alike(branch: Branch, waiting: list[Branch]) -> list[Branch]:
    """Pipelines that are bounded as low with the same costs as one, and by their work alone so far: once prices of
    memory are found for that, packing each takes about a millisecond.
    """
    if branch.pipeline is None or branch.is_by_itself or branch.likely_s:
        return []
    low = [each for each in waiting if each is not branch and each.bound_s <= branch.bound_s * (1 + RAISED)]
    by_work = [each for each in low if each.candidate.proof == "work" and not each.likely_s]
    return [each for each in by_work if each.pipeline is not None and each.bounded_by == branch.bounded_by]


def _priority(
    branch: Branch,
    first: Mapping[ParallelConfig, int],
    larger: Collection[ParallelConfig],
    likely_s: Mapping[ParallelConfig, float],
    best: FoundPlan | None,
    expectations: Expectations,
) -> tuple[float, ...]:
    """The least is evaluated next: pipelines beside the best plan's, and other schedules of what was solved, that may
    be faster by more than :data:`LIKELY`; ``first``; configurations near the best plan's; then by what is expected.

    Of pipelines only the ``larger`` go on being first once a plan is known, if they may be faster, one schedule of
    each: others are expected to take as long.

    Args:
        likely_s: what is likely of the configurations of which a schedule was solved.
    """
    if branch.is_sought:  # so are all others
        return branch.is_priced, branch.bound_s
    config, expected_s = branch.candidate.config, expectations.of(branch)
    is_sibling = branch.pipeline is not None and not branch.likely_s and config in likely_s
    if is_sibling:
        expected_s = max(expected_s, likely_s[config])
    if best is not None and branch.pipeline is not None:
        is_beside = is_sibling or config.distance(best.config) <= BESIDE
        if is_beside and expected_s < best.evaluation.time_s * (1 - LIKELY):
            return -2, expected_s
    is_larger = branch.pipeline is not None and config in larger and not (is_sibling or branch.likely_s)
    if branch.pipeline is None or best is None or (is_larger and expected_s < best.evaluation.time_s):
        every = [each.candidate.config for each in branch.every]
        wanted = every if best is not None else [replace(each, unsharding=PER_STEP) for each in every]
        places = [first[each] for each in wanted if each in first]
        if places:
            return -1, min(places), expected_s
    if branch.pipeline is not None:
        return int(best is not None and config.distance(best.config) > NEAR), expected_s
    distances = () if best is None else (each.candidate.config.distance(best.config) for each in branch.every)
    return min((NEAR, *distances)), expected_s


def _least_of_each(branches: list[Branch]) -> dict[ParallelConfig, float]:
    """The bound of all plans of every configuration."""
    return {row.config: row.bound_s for row in _rows(branches)}


def _rows(branches: list[Branch]) -> list[Candidate]:
    """What became of every configuration, whatever its recomputation."""
    found: dict[ParallelConfig, list[Candidate]] = {}
    for branch in branches:
        found.setdefault(branch.candidate.config, []).append(branch.candidate)
    return [_joined(each) for each in found.values()]


def _joined(candidates: list[Candidate]) -> Candidate:
    """One candidate of those of its branches."""
    best, open_ = min(candidates, key=lambda each: each.objective_s), min(candidates, key=lambda each: each.bound_s)
    peak_bytes = best.peak_bytes if math.isfinite(best.objective_s) else min(each.peak_bytes for each in candidates)
    status = best.status if math.isfinite(best.objective_s) else open_.status
    if status == "optimal" and open_.bound_s < best.objective_s * (1 - PROVED) and open_.status != "pruned":
        status = "feasible"
    return Candidate(best.config, status, best.objective_s, open_.bound_s, peak_bytes, open_.proof)
