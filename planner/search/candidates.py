"""Parallel configurations as candidates of the search, and how closely each was evaluated.

A configuration begins as a :class:`Candidate` of which only arithmetic is known; a :class:`Branch` of it is evaluated
ever more closely (:mod:`planner.search.candidate_evaluation`), until it is closed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from planner.analysis.pipeline.staged import Staged, price
from planner.formulation.decisions import DecisionGraph
from planner.formulation.search_space import Space
from planner.ir.layout import Mesh
from planner.search.parallel_config import ParallelConfig
from planner.search.search_context import SearchContext
from planner.solve.pipeline.stages import Cut, Pipeline
from planner.solve.problem import Evaluation

PROVED = 1e-6


@dataclass(frozen=True)
class Candidate:
    """One parallel configuration, and what is known of its plans.

    Attributes:
        config: the stages of its pipeline and the mesh of each.
        status: ``optimal`` (its best plan was found), ``feasible`` (a plan was found before the time limit),
            ``pruned`` (none can beat the best plan), ``infeasible`` (none fits), ``none found`` (none better was
            found, nor excluded), ``not tried`` (time limit).
        objective_s: seconds of its best plan found; infinite where none was sought, or none fits.
        bound_s: no plan of it is faster; infinite: none fits.
        peak_bytes: of that plan; without one, what every plan of it needs at least.
        proof: what proved the bound: ``arithmetic``, ``work``, ``packing``, ``relaxation`` or ``search``.
    """

    config: ParallelConfig
    status: str
    objective_s: float
    bound_s: float
    peak_bytes: int
    proof: str = "relaxation"

    @property
    def mesh(self) -> Mesh:
        """That of one stage."""
        return self.config.mesh

    def costing(self, found: Evaluation) -> Candidate:
        """The same with a plan that costs so much as its best."""
        return replace(self, objective_s=found.time_s, peak_bytes=found.peak_bytes)

    def having(self, found: Evaluation) -> Candidate:
        """The same with a plan that costs so much found as its best."""
        is_proved = found.time_s - self.bound_s <= PROVED * found.time_s
        return replace(self.costing(found), status="optimal" if is_proved else "feasible")

    def facts(self) -> dict[str, Any]:
        """What a plan says of it: see :class:`planner.plan.document.document.Search`."""
        return {
            "mesh": self.config.sizes,
            **({} if self.config.unsharding.once_per_step else {"gathers": self.config.unsharding.name}),
            "status": self.status,
            "step_time_s": self.objective_s,
            "bound_s": self.bound_s,
            "peak_bytes": self.peak_bytes,
            "proof": self.proof,
        }


@dataclass(frozen=True)
class Incumbent:
    """The best plan known: choices of a space, and how they run: as one stage, several, and what is recomputed."""

    space: Space
    choices: tuple[int, ...]
    staged: Staged

    @property
    def config(self) -> ParallelConfig:
        return ParallelConfig(self.space.stages, self.space.mesh, self.space.training.unsharding)

    @property
    def evaluation(self) -> Evaluation:
        """What it costs."""
        return self.staged.evaluation

    @cached_property
    def found(self) -> FoundPlan:
        """The same without what its decisions say."""
        return FoundPlan.of(self.config, self.choices, self.staged)


@dataclass(frozen=True)
class FoundPlan:
    """A plan that was found: choices of a configuration, and how they run; and what it costs."""

    config: ParallelConfig
    choices: tuple[int, ...]
    pipeline: Pipeline
    cut: Cut
    prefetch: bool
    evaluation: Evaluation

    @classmethod
    def of(cls, config: ParallelConfig, choices: tuple[int, ...], staged: Staged) -> FoundPlan:
        """That of choices that run so."""
        return cls(config, choices, staged.pipeline, staged.cut, staged.prefetch, staged.evaluation)

    def incumbent(self, context: SearchContext, decision_graph: DecisionGraph) -> Incumbent:
        """The same with all that its decisions say."""
        space = context.formulate(decision_graph, self.config)
        links = context.links(space, self.choices)
        return Incumbent(space, self.choices, price(links, self.pipeline, self.cut, self.prefetch))


@dataclass(frozen=True)
class Branch:
    """How closely a candidate was evaluated.

    It is of one ``pipeline`` of its configuration, that of one stage where there are no others; until its work is known
    also of ``others``, the same configuration with more micro-batches, and while it is packed perhaps of other
    pipelines; once its work is known ``scarce``, those of these configurations that have at most as many micro-batches
    and too few samples for the ranks, if it has too few.

    ``is_sought`` once a pipeline was cut, ``is_priced`` once its relaxation is proved, ``is_done`` once it was cut for
    that with all effort, or need not be. ``bounded_by`` is the configuration with whose costs it is bounded, which may
    have fewer micro-batches; ``met`` are choices that solve the relaxation of a pipeline, or of another schedule of its
    configuration, and ``likely_s`` what it takes with those, or at least where packing proved enough of it or more than
    that relaxation; ``best`` is the best plan found there.
    """

    candidate: Candidate
    bounded_by: ParallelConfig | None = None
    is_priced: bool = False
    is_sought: bool = False
    is_done: bool = False
    others: tuple[Branch, ...] = ()
    doubt: float = 1.0
    scarce: tuple[ParallelConfig, ...] = ()
    pipeline: Pipeline | None = None
    likely_s: float = 0.0
    met: tuple[tuple[int, ...], ...] = ()
    best: FoundPlan | None = None

    @property
    def is_by_itself(self) -> bool:
        """Whether it is bounded with its own costs."""
        return self.bounded_by == self.candidate.config

    @cached_property
    def every(self) -> tuple[Branch, ...]:
        """It by itself, and each of the others."""
        return (replace(self, others=()), *self.others) if self.others else (self,)

    @cached_property
    def bound_s(self) -> float:
        """No plan of any of them is faster."""
        return min(branch.candidate.bound_s for branch in self.every)

    @cached_property
    def expected_s(self) -> float:
        """Seconds that its plans may take: its bound, or unless waiting is in it that of a pipeline of even stages."""
        if self.likely_s and self.is_by_itself:
            return max(self.candidate.bound_s, self.likely_s)
        if self.likely_s:
            return self.likely_s * self.doubt
        return self.bound_s * self.doubt * (1.0 if self.pipeline is None else self.pipeline.stretch)


def begin(config: ParallelConfig, bound_s: float, doubt: float = 1.0) -> Branch:
    """A configuration of which only arithmetic is known."""
    return Branch(Candidate(config, "not tried", math.inf, bound_s, 0, "arithmetic"), doubt=doubt)


def begin_together(branches: Iterable[Branch]) -> list[Branch]:
    """The same, with those of one mesh and more micro-batches among the others of the one with the fewest."""
    found: dict[object, list[Branch]] = {}
    for branch in branches:
        config = branch.candidate.config
        found.setdefault((config.any_micro_batches, config.mesh.micro_batches == 1), []).append(branch)
    return [together(branches) for branches in found.values()]


def together(branches: Iterable[Branch]) -> Branch:
    """One branch of one mesh, the others of which have more micro-batches."""
    least, *others = sorted(branches, key=lambda branch: branch.candidate.config.mesh.micro_batches)
    return replace(least, others=tuple(others))


def better(best: FoundPlan | None, branch: Branch) -> FoundPlan | None:
    """The best plan known, or a branch's that is faster."""
    if branch.best is None:
        return best
    if best is not None and branch.best.evaluation.time_s >= best.evaluation.time_s * (1 - 1e-9):
        return best
    return branch.best


def close(branch: Branch, best: FoundPlan | None) -> Branch:
    """A branch that is evaluated no further."""
    candidate = branch.candidate
    if math.isinf(candidate.bound_s):
        status = "infeasible"
    elif branch.best and candidate.objective_s - candidate.bound_s <= PROVED * candidate.objective_s:
        status = "optimal"
    elif is_reached(candidate.bound_s, best):
        status = "pruned"
    else:
        is_known = branch.is_priced or branch.likely_s > 0.0
        status = "feasible" if branch.best else "none found" if is_known else "not tried"
    return replace(branch, candidate=replace(candidate, status=status))


def target_s(best: FoundPlan | Incumbent) -> float:
    """Only plans below this are worth seeking: half of what counts as proved, so that reaching it proves."""
    return best.evaluation.time_s * (1 - PROVED / 2)


def cutoff_s(context: SearchContext, best: FoundPlan | Incumbent | None) -> float:
    """Seconds of a step from which on plans are not looked for: none would be faster by more than the gap."""
    return math.inf if best is None else min(target_s(best), best.evaluation.time_s * (1 - context.gap))


def is_near(context: SearchContext, branch: Branch, best: FoundPlan | None) -> bool:
    """Whether a branch need not be searched: it is bounded, and no plan of it can be faster by more than the gap."""
    is_bounded = branch.is_priced or branch.likely_s > 0.0
    return is_bounded and best is not None and branch.candidate.bound_s >= best.evaluation.time_s * (1 - context.gap)


def is_reached(bound_s: float, best: FoundPlan | None) -> bool:
    """Whether a bound leaves nothing that would beat the best plan."""
    return math.isinf(bound_s) or (best is not None and bound_s >= target_s(best))
