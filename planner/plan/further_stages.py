"""Micro-batched plans of further programs: blocks stay in the stages whose ranks hold their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from planner.analysis.pipeline.chain import chain_of, links_of
from planner.analysis.pipeline.staged import Staged, price
from planner.base.errors import InfeasibleError, InputError, ScheduleError
from planner.base.formatting import in_all_bytes
from planner.formulation.assignment import Assignment
from planner.formulation.remat.levels import LEVELS, Level, at_levels, used
from planner.ir.folding import Folded, Instance
from planner.ir.graph import Graph
from planner.plan.document.document import PipelinePlan
from planner.plan.plan import Plan
from planner.solve.pipeline.schedule import placed
from planner.solve.pipeline.stages import Pipeline
from planner.solve.pipeline.stages import evaluate as cut_of

Homes = Mapping[str, frozenset[int]]
"""Name of a parameter or buffer -> the pipeline ranks that hold it."""


def homes(folded: Folded, pipeline: PipelinePlan) -> Homes:
    """Which pipeline ranks hold what: those of the stages whose blocks read it; the first what none reads."""
    ranks, found = _ranks(pipeline), dict[str, frozenset[int]]()
    for stage, (low, high) in enumerate(pairwise(pipeline.bounds)):
        for instance in folded.instances[low:high]:
            for name in _stored(folded.graph, instance):
                found[name] = found.get(name, frozenset()) | {ranks[stage]}
    leaves = (leaf.target or leaf.name for leaf in folded.graph.applying("param", "buffer"))
    return {**dict.fromkeys(leaves, frozenset({ranks[0]})), **found}


def stage_further(plan: Plan, assignment: Assignment, held: Homes) -> Staged:
    """How decisions for other inputs run in the stages of a plan.

    Recomputes what the plan does, and where that does not fit all that it can.

    Raises:
        InputError: blocks cannot be cut into these stages.
        InfeasibleError: it does not fit in memory.
    """
    assert plan.pipeline is not None
    folded, usable = assignment.space.folded, plan.cluster.device.usable_bytes
    bounds = bounds_of(plan.pipeline, folded, held)
    alone = [len(folded.kinds[instance.kind]) == 1 for instance in folded.instances]
    as_planned = [_level(plan, number) for number in range(len(folded.instances))]
    found = _staged(plan, assignment, bounds, [_of(one, each) for one, each in zip(alone, as_planned, strict=True)])
    if found.peak_bytes > usable:
        found = _staged(plan, assignment, bounds, [_of(one, "full") for one in alone])
    if found.peak_bytes > usable:
        raise InfeasibleError(
            f"a step with these inputs takes {in_all_bytes(found.peak_bytes)} of a device, and {plan.cluster.name!r} "
            f"has devices that can use {in_all_bytes(usable)}: give a smaller batch, or plan for the larger inputs",
            found.peak_bytes - usable,
        )
    return found


def bounds_of(pipeline: PipelinePlan, folded: Folded, held: Homes) -> tuple[int, ...]:
    """Where other blocks are cut into the same stages: a block is where its parameters are, and in the stage of the
    block before it where it may be in several.

    Raises:
        InputError: blocks do not follow one another as the stages do, or leave one empty.
    """
    ranks = _ranks(pipeline)
    needed = [_stored(folded.graph, instance) for instance in folded.instances]
    at_home = [[all(rank in held[name] for name in names) for rank in ranks] for names in needed]
    if len(needed) == pipeline.bounds[-1]:
        stages = [stage for stage, (low, high) in enumerate(pairwise(pipeline.bounds)) for _ in range(low, high)]
        if all(fits[stage] for stage, fits in zip(stages, at_home, strict=True)):
            return pipeline.bounds
    reaches = _reaching_the_end(at_home)
    if reaches[0][0]:
        stage, bounds = 0, [0]
        for number in range(1, len(needed)):
            if not reaches[number][stage]:
                bounds.append(number)
                stage += 1
        return (*bounds, len(needed))
    raise InputError(
        f"for these inputs the model has {len(needed)} blocks, which cannot be cut into the plan's {len(ranks)} stages "
        "so that each finds its parameters where they are: give inputs of the planned form, or load "
        "pmodel.full_state_dict() into a module that is planned for these"
    )


def _reaching_the_end(fits: Sequence[Sequence[bool]]) -> list[list[bool]]:
    """Of each block and stage: whether it fits there, and those after it fit there and in all later stages."""
    stages = len(fits[0])
    found = [[own and stage == stages - 1 for stage, own in enumerate(fits[-1])]]
    for own in reversed(fits[:-1]):
        after = [*found[-1], False]
        found.append([own[stage] and (after[stage] or after[stage + 1]) for stage in range(stages)])
    return found[::-1]


def _ranks(pipeline: PipelinePlan) -> tuple[int, ...]:
    """The pipeline rank of every stage."""
    return placed(pipeline.schedule, pipeline.ranks, pipeline.virtual_stages)


def _stored(graph: Graph, instance: Instance) -> list[str]:
    """The parameters and buffers that a block reads."""
    leaves = (graph.by_name[ref.node] for ref in instance.block.inputs)
    return [leaf.target or leaf.name for leaf in leaves if leaf.op in ("param", "buffer")]


def _level(plan: Plan, number: int) -> Level:
    """At which level the plan recomputes a block; what keeps other results than those with a name, in full."""
    assert plan.pipeline is not None
    named = {str(level): level for level in LEVELS}
    found = (level for level, numbers in plan.pipeline.recompute.items() if number in numbers)
    return next((named.get(level, "full") for level in found), "none")


def _of(is_alone: bool, level: Level) -> Level:
    """Blocks that do not repeat do not recompute."""
    return "none" if is_alone and level != "gathered" else level


def _staged(plan: Plan, assignment: Assignment, bounds: Sequence[int], levels: Sequence[Level]) -> Staged:
    assert plan.pipeline is not None
    folded, micro_batches = assignment.space.folded, assignment.space.mesh.micro_batches
    pipeline = Pipeline(plan.pipeline.schedule, plan.pipeline.ranks, micro_batches, plan.pipeline.virtual_stages)
    links = links_of(assignment, used(at_levels(folded, levels), folded), pipeline.schedule)
    ways = (level if level in link.levels else "none" for link, level in zip(links, levels, strict=True))
    savings = [link.levels.index(level) for link, level in zip(links, ways, strict=True)]
    try:
        cut = cut_of(pipeline, chain_of(links), bounds, savings)
    except ScheduleError as error:
        raise InputError(f"these inputs leave no step of the plan's schedule: {error}") from error
    return replace(price(links, pipeline, cut, plan.unsharding.prefetch), micro_batches=micro_batches)
