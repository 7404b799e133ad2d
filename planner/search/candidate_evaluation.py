"""Bounds and evaluates a candidate, more closely each time.

It falls into its pipelines, one for each schedule and number of virtual stages. First all of them are bounded by work
and communication and by whole blocks, with the costs of the fewest micro-batches for all multiples; then, one at a
time, by whole blocks within the memory of ranks (:mod:`planner.solve.pipeline.packing`); then each that is left is
solved with what its stages wait and hold (:mod:`planner.search.pipeline_bounds`) and cut for that, if it is likely to
be faster than the best plan; its bound is proved where that prunes it, or at the end.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from planner.analysis.pipeline.chain import links_of
from planner.analysis.pipeline.staged import QUICK, THOROUGH, enumerated, stage, ways_of
from planner.formulation.assignment import assignment_of
from planner.formulation.decisions import DecisionGraph
from planner.formulation.unsharding import PER_MICRO_BATCH
from planner.search.candidates import (
    Branch,
    Candidate,
    Incumbent,
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
from planner.search.parallel_config import ParallelConfig
from planner.search.pipeline_bounds import PipelineBounds
from planner.search.search_context import SearchContext
from planner.solve.choices import lightest, lower_bound_between
from planner.solve.pipeline.master import Paths

LIKELY = 0.02
"""A pipeline that is likely to be faster than the best plan by this part is cut before others are bounded closely."""
DOUBT = 1.5
"""So many times longer a step is expected where samples are too few for the ranks; see :func:`doubt_of`."""
GROWTH = 0.08
"""A step is expected to grow by this power of the micro-batches beyond those that it is bounded with."""
FEW = 500
"""So many plans of a pipeline are looked at one by one."""
BETTER = 500
"""Effort for cutting what gave the best plan once more."""
RAISED = 0.01
"""Part of a step by which a closer bound makes it worth to look first whether others are more promising."""
SIMILAR = 4
"""Up to so many times the micro-batches costs are near enough to those of a multiple to solve relaxations with them."""


def doubt_of(config: ParallelConfig, batch: int, span: int) -> float:
    """How many times longer than bounds say a step is expected: some where micro-batches have fewer samples than ranks
    to share them, unless the last axis is within a node and there are enough for the others.
    """
    samples = max(1, batch) // config.mesh.micro_batches
    ranks, last = config.mesh.size, config.mesh.sizes[-1]
    return 1.0 if samples >= ranks or (last <= span and samples >= ranks // last) else DOUBT


def evaluate_candidate(
    context: SearchContext, decision_graph: DecisionGraph, branch: Branch, best: Incumbent | None
) -> list[Branch]:
    """Evaluate a branch once more, all that it covers or its pipelines."""
    if branch.pipeline is None:
        return _by_pipeline(context, decision_graph, branch, best)
    if branch.likely_s and branch.formulated is not None:
        return [(_proved if branch.is_sought else _cut_closely)(context, branch, best)]
    closer = _bounded_by_packing(context, branch, best)
    if _is_much_closer(closer, branch):
        return [closer]
    if closer.likely_s or not _is_similar(closer):
        fewer = _fewer(context, closer)
        if fewer is not None:
            _own_bounds(context, decision_graph, fewer)
            return [raised(context, closer)]
        branch = _by_itself(context, decision_graph, closer)
        closer = _bounded_by_packing(context, branch, best)
        if _is_much_closer(closer, branch):
            return [closer]
    return [_estimated(context, closer, best)]


def raised(context: SearchContext, branch: Branch) -> Branch:
    """The branch bounded by what plans with fewer micro-batches take where memory and waiting cost nothing."""
    if branch.is_priced:
        return branch
    bounds_s = [_least_s(context, each.candidate) for each in branch.every]
    if bounds_s == [each.candidate.bound_s for each in branch.every]:
        return branch
    first, *others = (
        replace(each, candidate=replace(each.candidate, bound_s=bound_s))
        for bound_s, each in zip(bounds_s, branch.every, strict=True)
    )
    return replace(first, others=tuple(others))


def _least_s(context: SearchContext, candidate: Candidate) -> float:
    """Its bound, or what is known of fewer micro-batches."""
    config = candidate.config
    known = context.free_s.get(config.any_micro_batches, {})
    found = (free_s for fewer, free_s in known.items() if config.mesh.micro_batches % fewer == 0)
    return max(candidate.bound_s, *found, 0.0)


def _fewer(context: SearchContext, branch: Branch) -> ParallelConfig | None:
    """The same with the fewest micro-batches that have too few samples for the ranks, if that is not bounded yet: where
    it takes long, so do those with more.
    """
    known = context.free_s.get(branch.candidate.config.any_micro_batches, {})
    return next((each for each in branch.scarce[:-1] if each.mesh.micro_batches not in known), None)


def _by_pipeline(
    context: SearchContext, decision_graph: DecisionGraph, branch: Branch, best: Incumbent | None
) -> list[Branch]:
    """Every pipeline of a configuration, bounded by its work and communication, if memory and waiting were free; and of
    those with a multiple of its micro-batches, if it covers others.

    The same configuration with parameters gathered in each micro-batch, where that may be, communicates as much at
    least; its memory is another.
    """
    reached, waiting = list[Branch](), list[Branch]()
    for each in branch.every:
        (reached if is_reached(each.candidate.bound_s, best) else waiting).append(each)
    fewest = waiting[0].candidate.config
    multiples = [each for each in waiting if each.candidate.config.mesh.micro_batches % fewest.mesh.micro_batches == 0]
    multiples = multiples if context.is_even else waiting[:1]
    rest = [each for each in waiting if each not in multiples]
    found = [*reached, *([together(rest)] if rest else [])]
    context.say(f"mesh {fewest}")
    before = time.monotonic()
    bounds = context.bounds(decision_graph, fewest)
    context.took("build", before)
    again, scarce = [], [each.candidate.config for each in multiples if each.doubt > 1.0]
    for each in multiples:
        config, micro_batches = each.candidate.config, each.candidate.config.mesh.micro_batches
        peak_bytes = bounds.costs.least_bytes(fewest.mesh.micro_batches / micro_batches)
        bound_s = max(bounds.free_s, each.candidate.bound_s) if peak_bytes <= context.limit_bytes else math.inf
        status = "infeasible" if math.isinf(bound_s) else "not tried"
        candidate = replace(each.candidate, status=status, bound_s=bound_s, peak_bytes=peak_bytes, proof="work")
        growth = (micro_batches / fewest.mesh.micro_batches) ** GROWTH
        each = replace(each, candidate=candidate, bounds=bounds, met=bounds.choices, growth=growth)
        each = replace(each, scarce=tuple(scarce[: scarce.index(config) + 1]) if config in scarce else ())
        if config == fewest:
            each = replace(each, formulated=bounds.costs.space)
        for pipeline in context.pipelines(config, len(decision_graph.folded.instances)):
            packed_s = 0.0 if is_reached(bound_s, best) else bounds.packed_s(pipeline)
            found.append(_raised_to(replace(each, pipeline=pipeline), packed_s, "work"))
        if (
            config.micro_batched
            and config.unsharding.once_per_step
            and PER_MICRO_BATCH in context.pins.unshardings
            and config.mesh.size > 1
        ):
            least_s = max(bounds.free_s, each.candidate.bound_s) if math.isfinite(bounds.free_s) else 0.0
            gathering = replace(config, unsharding=PER_MICRO_BATCH)
            again.append(begin(gathering, least_s, each.doubt))
    return [*found, *begin_together(again)]


def _by_itself(context: SearchContext, decision_graph: DecisionGraph, branch: Branch) -> Branch:
    """A pipeline with the costs of its own configuration, with which nothing is solved yet."""
    config = branch.candidate.config
    assert branch.pipeline is not None
    bounds = _own_bounds(context, decision_graph, config)
    branch = _raised_to(branch, max(bounds.free_s, bounds.packed_s(branch.pipeline)), "work")
    return replace(branch, formulated=bounds.costs.space, bounds=bounds, met=bounds.choices, likely_s=0.0)


def _raised_to(branch: Branch, bound_s: float, proof: str) -> Branch:
    """The branch with a bound that is proved so, if it is above the one that is known."""
    if bound_s <= branch.candidate.bound_s:
        return branch
    return replace(branch, candidate=replace(branch.candidate, bound_s=bound_s, proof=proof))


def _bounded_by_packing(context: SearchContext, branch: Branch, best: Incumbent | None) -> Branch:
    """A pipeline bounded by whole blocks within time and memory."""
    assert branch.pipeline is not None and branch.bounds is not None
    before, enough_s = time.monotonic(), cutoff_s(context, best)
    bound_s = branch.bounds.packed_s(branch.pipeline, enough_s)
    context.took("solve", before)
    closer = _raised_to(branch, bound_s, "packing")
    return replace(closer, likely_s=bound_s) if bound_s >= enough_s else closer


def _is_much_closer(closer: Branch, branch: Branch) -> bool:
    """Whether a bound was raised so that others may be more promising, or to what is enough."""
    is_raised = closer.candidate.bound_s > branch.candidate.bound_s * (1 + RAISED)
    return is_raised or closer.likely_s != branch.likely_s


def _is_similar(branch: Branch) -> bool:
    """Whether costs of the bounds that are known are near enough to its own to solve relaxations with them."""
    assert branch.bounds is not None
    fewest = branch.bounds.costs.space.mesh.micro_batches
    return branch.candidate.config.mesh.micro_batches <= SIMILAR * fewest


def _own_bounds(context: SearchContext, decision_graph: DecisionGraph, config: ParallelConfig) -> PipelineBounds:
    """Those of a configuration with its own number of micro-batches, found once."""
    if config not in context.own_bounds:
        before = time.monotonic()
        context.own_bounds[config] = context.bounds(decision_graph, config)
        context.took("build", before)
    return context.own_bounds[config]


def _estimated(context: SearchContext, branch: Branch, best: Incumbent | None) -> Branch:
    """A pipeline with what its stages wait and hold; bounded only where it is likely to be slower than the best plan,
    and cut at once while there is none.
    """
    branch = _at_prices(context, branch, best, is_proof=False)
    return branch if best is not None or branch.formulated is None else _cut_closely(context, branch, best)


def is_likely(branch: Branch, best: Incumbent | None) -> bool:
    """Whether a pipeline was solved but not cut, and is likely to be faster than the best plan."""
    is_solved = branch.likely_s > 0.0 and branch.formulated is not None and not branch.is_sought
    return is_solved and (best is None or branch.expected_s < best.evaluation.time_s * (1 - LIKELY))


def _cut_closely(context: SearchContext, branch: Branch, best: Incumbent | None) -> Branch:
    """A pipeline cut, with more effort where it gives the best plan."""
    found = _cut(context, branch, best)
    known, before = better(best, found), time.monotonic()
    if known is not None and known is not best:
        found = _with_pipeline(context, found, known.choices, known, BETTER)
        context.took("solve", before)
    return found


def _proved(context: SearchContext, branch: Branch, best: Incumbent | None) -> Branch:
    """A pipeline bounded with what its stages wait and hold, whatever its cut and its recomputation; and cut for what
    solved that.
    """
    branch = replace(_at_prices(context, branch, best, is_proof=True), is_priced=True)
    if is_near(context, branch, best):
        return close(branch, best)
    found = _cut(context, branch, best, THOROUGH)
    return found if found.candidate.status == "optimal" else _enumerated(context, branch.bounds, found, best)


def _enumerated(
    context: SearchContext, bounds: PipelineBounds | None, branch: Branch, best: Incumbent | None
) -> Branch:
    """A pipeline of a small model with all its plans looked at that may be faster than the best by more than the gap:
    what is proved under prices may leave one.
    """
    assert branch.pipeline is not None and bounds is not None
    best, before = better(best, branch), time.monotonic()
    enough_s = cutoff_s(context, best)
    known = bounds.below(enough_s, FEW)
    if known is None or (known and len(known) * _ways_of(context, branch, known[0][1]) > FEW):
        return branch
    bound_s = enough_s
    for least_s, choices in known:
        if context.is_late():
            bound_s = min(bound_s, least_s)
            break
        if least_s < cutoff_s(context, best):
            links = links_of(assignment_of(branch.space, choices), context.levels, context.pins.schedule)
            found = enumerated(links, branch.pipeline, context.limit_bytes, cutoff_s(context, best))
            if found is not None:
                best = Incumbent(branch.space, choices, found)
                branch = replace(branch, candidate=branch.candidate.costing(found.evaluation), best=best)
    context.took("solve", before)
    bound_s = min(bound_s, cutoff_s(context, best))
    candidate = replace(branch.candidate, bound_s=max(branch.candidate.bound_s, bound_s), proof="search")
    return close(replace(branch, candidate=candidate), best)


def _ways_of(context: SearchContext, branch: Branch, choices: tuple[int, ...]) -> int:
    assert branch.pipeline is not None
    return ways_of(context.links(branch.space, choices), branch.pipeline)


def _at_prices(context: SearchContext, branch: Branch, best: Incumbent | None, is_proof: bool) -> Branch:
    assert branch.pipeline is not None and branch.bounds is not None
    before = time.monotonic()
    paths = context.paths.setdefault(branch.pipeline, Paths(branch.pipeline))
    found = branch.bounds.of(paths, cutoff_s(context, best), is_proof)
    context.took("solve", before)
    branch = _raised_to(branch, found.time_s, "relaxation")
    bound_s = branch.candidate.bound_s
    status = "infeasible" if math.isinf(bound_s) else "none found" if branch.is_sought else "not tried"
    candidate = replace(branch.candidate, status=status)
    return replace(branch, candidate=candidate, met=found.choices, likely_s=max(found.expected_s, bound_s))


def _cut(context: SearchContext, branch: Branch, best: Incumbent | None, effort: int = QUICK) -> Branch:
    """A pipeline cut for what solves its relaxation."""
    before = time.monotonic()
    for choices in dict.fromkeys((*reversed(branch.met), *_typical(context, branch))):
        branch = _with_pipeline(context, branch, choices, best, effort)
        best = better(best, branch)
    if best is None:  # nothing fits so far
        space = branch.space.holding(branch.candidate.config.in_flight)
        light = lightest(space.problem(context.limit_bytes, context.levels.ends(space.folded)[1]))
        branch = _with_pipeline(context, branch, light, best, effort)
        best = better(best, branch)
    context.took("solve", before)
    branch = replace(branch, is_sought=True)
    return close(branch, best) if branch.is_done else branch


def _typical(context: SearchContext, branch: Branch) -> tuple[tuple[int, ...], ...]:
    """What solves the problem of a typical rank, with a price on what all micro-batches in flight hold."""
    if branch.space not in context.typical:
        space = branch.space.holding(branch.candidate.config.in_flight)
        first, last = (space.problem(context.limit_bytes, end) for end in context.levels.ends(space.folded))
        context.typical[branch.space] = lower_bound_between(first, last).choices
    return context.typical[branch.space]


def _with_pipeline(
    context: SearchContext, branch: Branch, choices: tuple[int, ...] | None, best: Incumbent | None, effort: int
) -> Branch:
    """The branch with a pipeline of these choices as its plan, if one is found that fits and is faster."""
    if choices is None:
        return branch
    assert branch.pipeline is not None
    links = context.links(branch.space, choices)
    below_s = branch.candidate.objective_s if best is None else min(target_s(best), branch.candidate.objective_s)
    found = stage(links, [branch.pipeline], context.limit_bytes, below_s, effort)
    if found is None:
        return branch
    candidate = replace(branch.candidate.costing(found.evaluation), status="feasible")
    return replace(branch, candidate=candidate, best=Incumbent(branch.space, choices, found))
