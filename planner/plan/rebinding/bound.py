"""What no plan can beat, where a plan was not searched for: by arithmetic, or by a fresh search of some seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.base.errors import InfeasibleError, PinError
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.mesh_candidates import MAX_AXES
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.ir.graph import Graph
from planner.search.parallel_config import Arithmetic, ParallelConfig, micro_batched, without_micro_batches
from planner.search.search import GAP, search
from planner.search.search_context import Progress


@dataclass(frozen=True)
class FreshBound:
    """Seconds that a step takes at least, as a search reckons them, and who says so.

    Attributes:
        by: ``arithmetic`` or ``search``.
        step_s: of the plan that the search found; ``None``: there was none, or it found none.
        candidates, unseen: as in :class:`planner.plan.document.document.Search`.
    """

    seconds: float
    by: str = "arithmetic"
    step_s: float | None = None
    candidates: tuple[Mapping[str, Any], ...] = ()
    unseen: int = 0
    took: Mapping[str, float] = field(default_factory=dict)


def arithmetic_bound(assignment: Assignment, config: ParallelConfig, pins: Pins) -> FreshBound:
    """The least of all configurations, of which each has the work of all operators to divide.

    Args:
        assignment: the decisions, of which the model and the cluster count alone.
        config: theirs, which is one of them.
    """
    space = assignment.space
    graph, cluster = space.graph, space.cost.cluster
    configs = {config, *without_micro_batches(cluster, pins, MAX_AXES)}
    with contextlib.suppress(PinError):  # what is pinned leaves no other
        configs.update(micro_batched(cluster, pins, graph, len(space.folded.instances), MAX_AXES))
    arithmetic = Arithmetic(space.decision_graph, space.cost, space.training)
    return FreshBound(min(arithmetic.bound_s(each, pins.schedule) for each in configs))


def searched_bound(
    graph: Graph,
    cluster: ClusterSpec,
    pins: Pins,
    training: Training,
    time_limit_s: float,
    progress: Progress | None,
) -> FreshBound | None:
    """That of a search under the same pins; ``None``: it finds nothing that fits, in memory or the pins."""
    start = time.monotonic()
    try:
        found = search(graph, cluster, pins, training, time_limit_s=time_limit_s, gap=GAP, progress=progress)
    except (InfeasibleError, PinError):
        return None
    seen, step_s = tuple(candidate.facts() for candidate in found.evaluated), found.planned_step_s
    took = {"search": time.monotonic() - start}
    return FreshBound(found.bound_s, "search", step_s, seen, len(found.candidates) - len(seen), took)
