"""Bounds and evaluates a candidate, more closely each time.

It falls into its pipelines, one for each schedule and number of virtual stages. First all of them are bounded by work
and communication and by whole blocks, with the costs of the fewest micro-batches for all multiples; then, one at a
time, by whole blocks within the memory of ranks (:mod:`planner.solve.pipeline.packing`), and at last so with costs of
its own; then each that is left is solved with what its stages wait and hold (:mod:`planner.search.pipeline_bounds`) and
cut for that, if it is likely to be faster than the best plan; its bound is proved where that prunes it, or at the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from planner.analysis.pipeline.chain import Link
from planner.analysis.pipeline.staged import QUICK, THOROUGH, enumerated, stage, ways_of
from planner.formulation.decisions import DecisionGraph
from planner.formulation.search_space import Space
from planner.formulation.unsharding import PER_MICRO_BATCH
from planner.search.candidates import (
    Branch,
    Candidate,
    FoundPlan,
    begin,
    begin_together,
    better,
    close,
    cutoff_s,
    is_near,
    is_reached,
    target_s,
    together,
)
from planner.search.expectations import FreeSeconds
from planner.search.parallel_config import ParallelConfig
from planner.search.pipeline_bounds import ChoicesInOrder, PipelineBounds
from planner.search.search_context import SearchContext
from planner.solve.choices import lightest, lower_bound_between
from planner.solve.pipeline.master import Paths
from planner.solve.pipeline.simulate import Path
from planner.solve.pipeline.stages import Pipeline

FEW = 200
"""So many plans of a pipeline are looked at one by one."""
PERHAPS_FEW = 2000
"""So many before a proof may be few after it: what solves it then may have fewer ways to recompute."""
RAISED = 0.01
"""Part of a step by which a closer bound makes it worth to look first whether others are more promising."""


class Evaluated(NamedTuple):
    """What became of a branch; what is known of its configuration if memory and waiting cost nothing, by micro-batches;
    and paths of its schedule that were met.
    """

    branches: tuple[Branch, ...]
    free_s: dict[int, float]
    paths: tuple[Path, ...]


class Evaluator:
    """Evaluates the candidates of one search, and keeps what is known of each meanwhile.

    What it says of a candidate depends on those that it evaluated before that differ in micro-batches alone, and on no
    others.
    """

    def __init__(self, context: SearchContext, decision_graph: DecisionGraph):
        self.context, self.decision_graph = context, decision_graph
        self._free_s: FreeSeconds = {}
        self._bounds: dict[ParallelConfig, PipelineBounds] = {}
        self._paths: dict[tuple[object, Pipeline], Paths] = {}
        self._relaxed: dict[ParallelConfig, tuple[float, tuple[tuple[int, ...], ...]]] = {}
        self._typical: dict[ParallelConfig, tuple[tuple[int, ...], ...]] = {}

    def evaluate(self, branch: Branch, best: FoundPlan | None, is_proof: bool, paths: Iterable[Path]) -> Evaluated:
        """Evaluate a branch once more, all that it covers or its pipelines.

        Args:
            is_proof: it is to be bounded rather than cut, where it may be either.
            paths: those of its schedule that others met.
        """
        known = None if branch.pipeline is None else self._paths_of(branch.candidate.config, branch.pipeline)
        before = 0 if known is None else known.add(paths)
        branches = self._evaluate(branch, best, is_proof)
        free_s = self._free_s.get(branch.candidate.config.any_micro_batches, {})
        return Evaluated(tuple(branches), dict(free_s), () if known is None else tuple(known.found[before:]))

    def _evaluate(self, branch: Branch, best: FoundPlan | None, is_proof: bool) -> list[Branch]:
        if branch.pipeline is None:
            return self._by_pipeline(branch, best)
        if branch.others:
            first, *others = branch.every
            return [*self._evaluate(first, best, is_proof), *(self._bounded_by_packing(each, best) for each in others)]
        if branch.likely_s and branch.is_by_itself:
            return [self._closer(branch, best, is_proof)]
        closer = self._bounded_by_packing(branch, best)
        if _is_much_closer(closer, branch):
            return [closer]
        if not closer.is_by_itself:
            fewer = self._fewer(closer)
            if fewer is not None:
                self._bounds_of(fewer)
                return [raised(self._free_s, closer)]
            branch = self._by_itself(closer)
            closer = self._bounded_by_packing(branch, best)
            if _is_much_closer(closer, branch):
                return [closer]
        return [self._estimated(closer, best)]

    def _fewer(self, branch: Branch) -> ParallelConfig | None:
        """The same with the fewest micro-batches that have too few samples for the ranks, if that is not bounded yet:
        where it takes long, so do those with more.
        """
        known = self._free_s.get(branch.candidate.config.any_micro_batches, {})
        return next((each for each in branch.scarce[:-1] if each.mesh.micro_batches not in known), None)

    def _by_pipeline(self, branch: Branch, best: FoundPlan | None) -> list[Branch]:
        """Every pipeline of a configuration, bounded by its work and communication, if memory and waiting were free;
        and of those with a multiple of its micro-batches, if it covers others.

        The same configuration with parameters gathered in each micro-batch, where that may be, communicates as much at
        least; its memory is another.
        """
        reached, waiting = list[Branch](), list[Branch]()
        for each in branch.every:
            (reached if is_reached(each.candidate.bound_s, best) else waiting).append(each)
        fewest = waiting[0].candidate.config
        multiples = [
            each for each in waiting if each.candidate.config.mesh.micro_batches % fewest.mesh.micro_batches == 0
        ]
        multiples = multiples if self.context.is_even else waiting[:1]
        rest = [each for each in waiting if each not in multiples]
        found = [*reached, *([together(rest)] if rest else [])]
        bounds = self._bounds_of(fewest)
        counts = [each.candidate.config.mesh.micro_batches for each in multiples]
        free_s = bounds.free_of(counts, math.inf if best is None else best.evaluation.time_s)
        again, scarce = [], [each.candidate.config for each in multiples if each.doubt > 1.0]
        for each in multiples:
            config, micro_batches = each.candidate.config, each.candidate.config.mesh.micro_batches
            peak_bytes = bounds.costs.least_bytes(fewest.mesh.micro_batches / micro_batches)
            is_fitting = peak_bytes <= self.context.limit_bytes
            bound_s = max(free_s[micro_batches], each.candidate.bound_s) if is_fitting else math.inf
            status = "infeasible" if math.isinf(bound_s) else "not tried"
            candidate = replace(each.candidate, status=status, bound_s=bound_s, peak_bytes=peak_bytes, proof="work")
            each = replace(each, candidate=candidate, bounded_by=fewest, met=bounds.choices)
            each = replace(each, scarce=tuple(scarce[: scarce.index(config) + 1]) if config in scarce else ())
            for pipeline in self.context.pipelines(config, len(self.decision_graph.folded.instances)):
                work_s = 0.0 if is_reached(bound_s, best) else bounds.work_s(pipeline, free_s[micro_batches])
                found.append(_raised_to(replace(each, pipeline=pipeline), work_s, "work"))
            if (
                config.micro_batched
                and config.unsharding.once_per_step
                and PER_MICRO_BATCH in self.context.pins.unshardings
                and config.mesh.size > 1
            ):
                least_s = max(bounds.free_s, each.candidate.bound_s) if math.isfinite(bounds.free_s) else 0.0
                gathering = replace(config, unsharding=PER_MICRO_BATCH)
                again.append(begin(gathering, least_s, each.doubt))
        return [*found, *begin_together(again)]

    def _by_itself(self, branch: Branch) -> Branch:
        """A pipeline with the costs of its own configuration, with which nothing is solved yet."""
        config = branch.candidate.config
        assert branch.pipeline is not None
        bounds = self._bounds_of(config)
        branch = _raised_to(branch, bounds.work_s(branch.pipeline, bounds.free_s), "work")
        return replace(branch, bounded_by=config, met=bounds.choices, likely_s=0.0)

    def _bounded_by_packing(self, branch: Branch, best: FoundPlan | None) -> Branch:
        """A pipeline bounded by whole blocks within time and memory."""
        assert branch.pipeline is not None and branch.bounded_by is not None
        bounds, enough_s = self._bounds_of(branch.bounded_by), cutoff_s(self.context, best)
        before = time.monotonic()
        bound_s = bounds.packed_s(branch.pipeline, enough_s)
        self.context.took("solve", before)
        closer = _raised_to(branch, bound_s, "packing")
        return replace(closer, likely_s=bound_s) if bound_s >= enough_s else closer

    def _bounds_of(self, config: ParallelConfig) -> PipelineBounds:
        """Those of a configuration with its own number of micro-batches, found once."""
        if config not in self._bounds:
            before = time.monotonic()
            found = self._bounds[config] = self.context.bounds(self.decision_graph, config)
            if self.context.is_even:
                self._free_s.setdefault(config.any_micro_batches, {})[config.mesh.micro_batches] = found.free_s
            self.context.took("build", before)
        return self._bounds[config]

    def _paths_of(self, config: ParallelConfig, pipeline: Pipeline) -> Paths:
        """The paths of a pipeline's schedule that were met on its mesh, or elsewhere before."""
        key = config.any_micro_batches, pipeline
        if key not in self._paths:
            self._paths[key] = Paths(pipeline)
        return self._paths[key]

    def _space(self, branch: Branch) -> Space:
        return self.context.formulate(self.decision_graph, branch.candidate.config)

    def _estimated(self, branch: Branch, best: FoundPlan | None) -> Branch:
        """A pipeline with what its stages wait and hold; bounded only where it is likely to be slower than the best
        plan, and cut at once while there is none.

        What another one of its configuration takes so, in parts of blocks, may be less than what this one takes at
        least in whole ones: then this one's is expected to say no more, and it is cut for the other's choices.
        """
        relaxed_s, choices = self._relaxed.get(branch.candidate.config, (math.inf, ()))
        if best is not None and relaxed_s <= branch.candidate.bound_s < math.inf:
            return replace(branch, met=choices, likely_s=branch.candidate.bound_s)
        branch, _ = self._at_prices(branch, best, is_proof=False)
        return branch if best is not None else self._cut(branch, best)

    def _closer(self, branch: Branch, best: FoundPlan | None, is_proof: bool) -> Branch:
        """A pipeline whose relaxation was solved: cut, then proved, at last cut with all effort.

        Args:
            is_proof: it is proved before it is cut.
        """
        if not (branch.is_sought or (is_proof and not branch.is_priced)):
            return self._cut(branch, best)
        if not branch.is_priced:
            return self._proved(branch, best)
        return self._cut(branch, best, THOROUGH)

    def _proved(self, branch: Branch, best: FoundPlan | None) -> Branch:
        """A pipeline bounded with what its stages wait and hold, whatever its cut and its recomputation; and cut for
        what solved that, where few plans may be better, or none is known: else others are proved first.
        """
        branch, left = self._bounded_by_packing(branch, best), None
        if not is_near(self.context, branch, best):
            in_order = self._ways(branch) <= PERHAPS_FEW
            branch, left = self._at_prices(branch, best, is_proof=True, in_order=in_order)
        branch = replace(branch, is_priced=True)
        if is_near(self.context, branch, best):
            return close(replace(branch, is_done=True), best)
        if left is not None and self._ways(branch) > FEW:
            left = None
        if best is not None and left is None:
            return branch
        found = self._cut(branch, best, THOROUGH)
        if left is not None and found.candidate.status != "optimal" and (best is not None or found.best is None):
            found = self._enumerated(found, best, left)
        is_open = found.candidate.status != "optimal" and best is None and found.best is not None
        return self._proved(found, found.best) if is_open else found

    def _ways(self, branch: Branch) -> int:
        """In how many ways a pipeline may be cut."""
        assert branch.pipeline is not None
        return ways_of(self.context.links(self._space(branch), branch.met[-1]), branch.pipeline)

    def _enumerated(self, branch: Branch, best: FoundPlan | None, left: ChoicesInOrder) -> Branch:
        """A pipeline of a small model with its plans looked at one by one, up to :data:`FEW`: those that may be faster
        than the best by more than the gap, which prices alone may not tell; where there is no best, until one fits.
        """
        assert branch.pipeline is not None
        best, before = better(best, branch), time.monotonic()
        config, more, is_first = branch.candidate.config, FEW, best is None
        bound_s = math.inf
        for least_s, choices in left:
            cutoff = cutoff_s(self.context, best)
            if least_s >= cutoff or more < 0 or (is_first and best is not None) or self.context.is_late():
                bound_s = least_s
                break
            links = self.context.links_anew(self._space(branch), choices)
            more -= ways_of(links, branch.pipeline)
            found = enumerated(links, branch.pipeline, self.context.limit_bytes, cutoff)
            if found is not None:
                best = FoundPlan.of(config, choices, found)
                branch = replace(branch, candidate=branch.candidate.costing(found.evaluation), best=best)
        self.context.took("solve", before)
        bound_s = min(bound_s, cutoff_s(self.context, best))
        candidate = replace(branch.candidate, bound_s=max(branch.candidate.bound_s, bound_s), proof="search")
        return close(replace(branch, candidate=candidate), best)

    def _at_prices(
        self, branch: Branch, best: FoundPlan | None, is_proof: bool, in_order: bool = False
    ) -> tuple[Branch, ChoicesInOrder | None]:
        assert branch.pipeline is not None and branch.is_by_itself
        config = branch.candidate.config
        bounds, paths = self._bounds_of(config), self._paths_of(config, branch.pipeline)
        before = time.monotonic()
        found = bounds.of(paths, cutoff_s(self.context, best), is_proof, branch.candidate.bound_s, in_order)
        self.context.took("solve", before)
        if found.expected_s > 0.0:
            self._relaxed[config] = found.expected_s, found.choices
        branch = _raised_to(branch, found.time_s, "relaxation")
        bound_s = branch.candidate.bound_s
        status = "infeasible" if math.isinf(bound_s) else "none found" if branch.is_sought else "not tried"
        candidate = replace(branch.candidate, status=status)
        likely_s = max(found.expected_s, bound_s)
        return replace(branch, candidate=candidate, met=found.choices, likely_s=likely_s), found.left

    def _cut(self, branch: Branch, best: FoundPlan | None, effort: int = QUICK) -> Branch:
        """A pipeline cut for what solves its relaxation; where several solutions make the same chain, for one."""
        before, tried = time.monotonic(), list[tuple[Link, ...]]()
        for choices in dict.fromkeys((*reversed(branch.met), *self._typical_choices(branch.candidate.config))):
            links = self.context.links(self._space(branch), choices)
            if links not in tried:
                tried.append(links)
                branch = self._with_pipeline(branch, choices, best, effort)
                best = better(best, branch)
        if best is None:  # nothing fits so far
            space = self._space(branch).holding(branch.candidate.config.in_flight)
            light = lightest(space.problem(self.context.limit_bytes, self.context.levels.ends(space.folded)[1]))
            branch = self._with_pipeline(branch, light, best, effort)
            best = better(best, branch)
        self.context.took("solve", before)
        branch = replace(branch, is_sought=True, is_done=branch.is_priced and effort == THOROUGH)
        return close(branch, best) if branch.is_done else branch

    def _typical_choices(self, config: ParallelConfig) -> tuple[tuple[int, ...], ...]:
        """What solves the problem of a typical rank, with a price on what all micro-batches in flight hold."""
        if config not in self._typical:
            space = self.context.formulate(self.decision_graph, config).holding(config.in_flight)
            ends = self.context.levels.ends(space.folded)
            first, last = (space.problem(self.context.limit_bytes, end) for end in ends)
            self._typical[config] = lower_bound_between(first, last).choices
        return self._typical[config]

    def _with_pipeline(
        self, branch: Branch, choices: tuple[int, ...] | None, best: FoundPlan | None, effort: int
    ) -> Branch:
        """The branch with a pipeline of these choices as its plan, if one is found that fits and is faster."""
        if choices is None:
            return branch
        assert branch.pipeline is not None
        links = self.context.links(self._space(branch), choices)
        below_s = branch.candidate.objective_s if best is None else min(target_s(best), branch.candidate.objective_s)
        found = stage(links, [branch.pipeline], self.context.limit_bytes, below_s, effort)
        if found is None:
            return branch
        candidate = replace(branch.candidate.costing(found.evaluation), status="feasible")
        return replace(branch, candidate=candidate, best=FoundPlan.of(branch.candidate.config, choices, found))


def _raised_to(branch: Branch, bound_s: float, proof: str) -> Branch:
    """The branch with a bound that is proved so, if it is above the one that is known."""
    if bound_s <= branch.candidate.bound_s:
        return branch
    return replace(branch, candidate=replace(branch.candidate, bound_s=bound_s, proof=proof))


def _is_much_closer(closer: Branch, branch: Branch) -> bool:
    """Whether a bound was raised so that others may be more promising, or to what is enough."""
    is_raised = closer.candidate.bound_s > branch.candidate.bound_s * (1 + RAISED)
    return is_raised or closer.likely_s != branch.likely_s


def raised(known: FreeSeconds, branch: Branch) -> Branch:
    """The branch bounded by what plans with fewer micro-batches take where memory and waiting cost nothing."""
    if branch.is_priced:
        return branch
    bounds_s = [_least_s(known, each.candidate) for each in branch.every]
    if bounds_s == [each.candidate.bound_s for each in branch.every]:
        return branch
    first, *others = (
        replace(each, candidate=replace(each.candidate, bound_s=bound_s))
        for bound_s, each in zip(bounds_s, branch.every, strict=True)
    )
    return replace(first, others=tuple(others))


def _least_s(known: FreeSeconds, candidate: Candidate) -> float:
    """Its bound, or what is known of fewer micro-batches."""
    config = candidate.config
    fewer = known.get(config.any_micro_batches, {}).items()
    found = (free_s for micro_batches, free_s in fewer if config.mesh.micro_batches % micro_batches == 0)
    return max(candidate.bound_s, *found, 0.0)
