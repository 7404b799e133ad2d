"""Cuts stages anew and recomputes as a plan does, and more where the step would not fit in memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from planner.analysis.memory import Usage, usage
from planner.analysis.offload.step_timing import largest_working_set
from planner.analysis.pipeline.chain import chain_of, links_of
from planner.analysis.pipeline.staged import QUICK, THOROUGH, Staged, price, stage, waiting
from planner.base.errors import ScheduleError
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.pins import Pins
from planner.formulation.constraints.zero import ways_of_kinds
from planner.formulation.remat.levels import (
    ALONE,
    LEVELS,
    Amount,
    Level,
    Levels,
    Recompute,
    at_levels,
    named_by_kind,
    pareto_frontier,
    used,
)
from planner.formulation.search_space import Space
from planner.ops.aliasing import shares
from planner.plan.document.document import BlockPlan, Document
from planner.plan.rebinding.matching import Matching
from planner.search.remat_selection import keeping, with_levels_between
from planner.solve.pipeline.stages import Pipeline
from planner.solve.pipeline.stages import evaluate as cut_of

SHOWN = 8
"""So many stages are told one by one."""


@dataclass(frozen=True)
class Fitted:
    """Decisions, and how they run: micro-batched as ``staged`` says, or with this ``memory``.

    Attributes:
        needed_bytes: of the fullest device.
        recomputes_alike: whether it recomputes what the plan does, in proportion.
    """

    assignment: Assignment
    staged: Staged | None
    memory: Usage | None
    needed_bytes: int
    recomputes_alike: bool


class Fitting:
    """What a plan recomputes, for another model.

    Args:
        matching: what the plan says of which decision.
        space: every decision to take for the model.
        pins: that leave levels of recomputation.
    """

    def __init__(self, matching: Matching, space: Space, pins: Pins):
        self.plan, self.matching, self.space, self.pins = matching.plan, matching, space, pins

    @property
    def planned(self) -> Recompute:
        """As many instances of each block recompute at each level as in the plan, in proportion."""
        found = []
        for kind, instances in enumerate(self.space.folded.kinds):
            number = self.matching.blocks.like[kind]
            block = None if number is None else self.plan.blocks[number]
            parts = {} if block is None else self._parts(kind, block)
            if block is not None and len(instances) == 1 < block.count:
                parts = {level: part for level, part in parts.items() if level in ALONE}
            counts, left = dict[Level, int](), len(instances)
            for level, part in parts.items():
                counts[level] = min(left, math.ceil(part * len(instances) - 1e-9))
                left -= counts[level]
            found.append(Amount.of(counts))
        return Recompute(tuple(found))

    def without_micro_batches(self, assignment: Assignment, cluster: ClusterSpec) -> Fitted:
        """The decisions with what the plan recomputes, or the least with which they fit, or all that can be."""
        usable = cluster.device.usable_bytes

        def followed(recompute: Recompute) -> Fitted:
            made = replace(assignment, recompute=assignment.what_it_comes_to(recompute))
            memory = usage(made)
            is_planned = recompute is assignment.recompute
            return Fitted(made, None, memory, largest_working_set(made, memory).bytes, is_planned)

        found = followed(assignment.recompute)
        if found.needed_bytes <= usable:
            return found
        steps = pareto_frontier(self.space.folded, self._levels)
        known = {len(steps) - 1: followed(steps[-1])}

        def fits(step: int) -> bool:
            known.setdefault(step, followed(steps[step]))
            return known[step].needed_bytes <= usable

        return known[bisect_left(range(len(steps) - 1), True, key=fits)]

    def in_stages(self, assignment: Assignment, pipeline: Pipeline, cluster: ClusterSpec) -> Fitted:
        """The decisions in the plan's stages with what it recomputes, if there are the same blocks; in others, if there
        are not, or these do not fit.
        """
        usable, staged = cluster.device.usable_bytes, self._as_planned(assignment, pipeline)
        is_planned = staged is not None and staged.peak_bytes <= usable
        if staged is None or not is_planned:
            staged = self._cut(assignment, pipeline, usable)
        needed = staged.peak_bytes
        if self.space.training.tier != "device":
            decided = replace(assignment, recompute=staged.recompute(self.space.folded))
            needed = largest_working_set(decided, None, staged).bytes
        return Fitted(assignment, staged, None, needed, is_planned)

    def _cut(self, assignment: Assignment, pipeline: Pipeline, limit_bytes: int) -> Staged:
        """The fastest stages that fit, or those that need least."""
        links = links_of(assignment, self._levels, pipeline.schedule)
        found = stage(links, [pipeline], limit_bytes, effort=THOROUGH)
        if found is None:
            lightest = stage([link.least_memory for link in links], [pipeline], None, effort=QUICK)
            assert lightest is not None, "every decision is possible, and every stage has a block"
            found = waiting(lightest)
        return found

    # ---- what the plan recomputes ----

    def _as_planned(self, assignment: Assignment, pipeline: Pipeline) -> Staged | None:
        """The plan's own stages and levels; ``None``: they are of other blocks, or stages."""
        planned, folded = self.plan.pipeline, self.space.folded
        if planned is None or len(planned.bounds) != pipeline.stages + 1 or planned.bounds[-1] != len(folded.instances):
            return None
        levels = [self._level(number) for number in range(len(folded.instances))]
        links = links_of(assignment, used(at_levels(folded, levels), folded), pipeline.schedule)
        ways = (level if level in link.levels else "none" for link, level in zip(links, levels, strict=True))
        savings = [link.levels.index(level) for link, level in zip(links, ways, strict=True)]
        try:
            cut = cut_of(pipeline, chain_of(links), planned.bounds, savings)
        except ScheduleError:
            return None
        return price(links, pipeline, cut, planned.unsharding.prefetch)

    def _level(self, number: int) -> Level:
        """That of a block of a plan with as many blocks."""
        assert self.plan.pipeline is not None
        kind = self.space.folded.instances[number].kind
        like = self.matching.blocks.like[kind]
        names = (name for name, numbers in self.plan.pipeline.recompute.items() if number in numbers)
        name = next(names, "none")
        may = like is not None and (len(self.space.folded.kinds[kind]) > 1 or name == "gathered")
        return (self._named(kind, self.plan.blocks[like], name) or "none") if may and like is not None else "none"

    def _parts(self, kind: int, block: BlockPlan) -> Mapping[Level, float]:
        """Which part of a block's instances the plan recomputes at each level."""
        named = ((self._named(kind, block, name), count / block.count) for name, count in block.recompute.items())
        return {level: share for level, share in named if level is not None}

    def _named(self, kind: int, block: BlockPlan, name: str) -> Level | None:
        """A level by its name in the plan; of results that are kept those that the block still makes."""
        if name not in block.keeps:
            return next((level for level in LEVELS if level == name), None)
        nodes = self.space.folded.kinds[kind][0].block.nodes
        found = (self.matching.operator(kind, op) for op in block.keeps[name])
        return tuple(sorted({at for at in found if at is not None and not shares(nodes[at])})) or "full"

    @property
    def _levels(self) -> Levels:
        """The levels that a search would choose from."""
        folded, decision_graph = self.space.folded, self.space.decision_graph
        levels = named_by_kind(folded, map(self.pins.levels, ways_of_kinds(folded, self.pins.zero)))
        if self.pins.recompute is None:
            return with_levels_between(levels, decision_graph, self.space.cost)
        return keeping(levels, decision_graph, self.pins.keep) if self.pins.keep else levels


def recomputing(plan: Document) -> Counter[str]:
    """How many blocks of a plan recompute, by level."""
    if plan.pipeline is not None:
        return Counter({level: len(numbers) for level, numbers in plan.pipeline.recompute.items()})
    return sum((Counter(block.recompute) for block in plan.blocks), Counter[str]())


def recomputing_text(plan: Document) -> str:
    """``"full 12, gathered 4 of 32 blocks"``."""
    counts = ", ".join(f"{level} {count}" for level, count in recomputing(plan).items())
    return f"{counts or 'none'} of {sum(block.count for block in plan.blocks)} blocks"


def stages_text(bounds: Sequence[int]) -> str:
    """``"1 + 2 + 2 blocks"``, or ``"32 stages of 3 to 5 blocks"``."""
    sizes = [high - low for low, high in pairwise(bounds)]
    if len(sizes) > SHOWN:
        return f"{len(sizes)} stages of {min(sizes)} to {max(sizes)} blocks"
    return " + ".join(map(str, sizes)) + " blocks"
