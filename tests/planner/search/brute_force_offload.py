"""Brute force over plans whose model data has its home on the host, and what blocks save maybe too.

Every assignment, cut and level of recomputation is priced by ``planned_step``: with the transfer schedules that it
makes. What they keep on the device is theirs to decide, so that is not counted out. Left out is only what takes the
device alone longer than something that was found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

from planner.analysis.memory import Usage, usage
from planner.analysis.offload.step_timing import largest_working_set
from planner.analysis.pipeline.chain import chain_of
from planner.analysis.pipeline.staged import Staged, price
from planner.analysis.planned_step import planned_step
from planner.base.errors import InfeasibleError
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import Assignment, assignment_of
from planner.formulation.training import Training
from planner.ir.graph import Graph
from planner.solve.pipeline.stages import Pipeline
from planner.solve.pipeline.stages import evaluate as evaluate_cut
from tests.planner.search.brute_force import ROUNDING, BruteForce, Optimum, Parts, TooLargeError, Whole

Home = Literal["host", "either"]
HOMES: tuple[Home, ...] = ("host", "either")
Plan = tuple[Assignment, Staged | None, float, Usage | None]
"""A plan as ``planned_step`` takes it."""


def best_offloaded(graph: Graph, cluster: ClusterSpec, home: Home, most: int = 200) -> Optimum:
    """The best plan with model data at home on the host that fits the device and the host.

    Args:
        most: plans that are priced, beyond which it is :class:`TooLargeError`.
    """
    found: list[tuple[float, Callable[[], Plan]]] = []
    for activations in (0, "all"):
        brute = BruteForce(graph, cluster, 2 * most, training=Training(tier=home, activations=activations))
        for whole in brute.whole.values():
            found += _whole(whole)
        for parts in brute.parts.values():
            found += _parts(parts)
    best = Optimum()
    for number, (least_s, plan) in enumerate(sorted(found, key=lambda each: each[0])):
        if least_s * (1 - ROUNDING) >= best.time_s:
            break
        if number >= most:
            raise TooLargeError("steps with transfer schedules")
        made = plan()
        step_s = offloaded_s(*made)
        assert least_s <= step_s * (1 + ROUNDING), "a step is shorter than what its devices compute"
        if step_s < best.time_s:
            assignment, staged, *_ = made
            saved = assignment.space.training.activations
            best = Optimum(step_s, 0, f"{assignment.recompute if staged is None else staged.levels}, leaving {saved}")
    return best


def offloaded_s(assignment: Assignment, staged: Staged | None, time_s: float, memory: Usage | None) -> float:
    """Seconds of a step with model data at home on the host, infinite where it does not fit."""
    recomputing = assignment
    if staged is not None:
        recomputing = replace(assignment, recompute=staged.recompute(assignment.space.folded))
    usable_bytes = assignment.space.cost.cluster.device.usable_bytes
    if largest_working_set(recomputing, memory, staged).bytes > usable_bytes:
        return math.inf
    try:
        return planned_step(assignment, staged, time_s, memory)[1].step_time_s
    except InfeasibleError:  # the host is full
        return math.inf


def _whole(whole: Whole) -> Iterator[tuple[float, Callable[[], Plan]]]:
    """Steps in one piece, with what they take without the update, which the host does."""

    def plan(amount: int, row: int, time_s: float) -> Plan:
        assignment = assignment_of(whole.space, whole.rows[row].tolist(), whole.amounts[amount])
        return assignment, None, time_s, usage(assignment)

    for amount, row, time_s, updating_s in whole.times:
        yield time_s - updating_s, partial(plan, amount, row, time_s)


def _parts(parts: Parts) -> Iterator[tuple[float, Callable[[], Plan]]]:
    """Steps of several micro-batches or stages, with what a rank computes on average."""
    if len(parts.rows) > parts.most:
        raise TooLargeError(f"{len(parts.rows)} assignments")

    def plan(row: list[int], pipeline: Pipeline, bounds: tuple[int, ...], savings: tuple[int, ...]) -> Plan:
        links = parts.links(row)
        staged = price(links, pipeline, evaluate_cut(pipeline, chain_of(links), bounds, savings))
        return assignment_of(parts.space, row), staged, staged.step_s, None

    for row in parts.rows.tolist():
        links = parts.links(row)
        work_s = math.fsum(link.block.work_s for link in links)
        least_s = parts.config.mesh.micro_batches * work_s / parts.config.stages
        if math.isinf(least_s):
            continue
        for pipeline in parts.pipelines:
            for inner in itertools.combinations(range(1, len(links)), pipeline.stages - 1):
                for savings in itertools.product(*(range(len(link.block.savings)) for link in links)):
                    yield least_s, partial(plan, row, pipeline, (0, *inner, len(links)), savings)
