"""Search: from a graph and a cluster to the best plan found, with what is proved about it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.cluster import ClusterSpec
from planner.cost import CostModel
from planner.errors import InfeasibleError, PinError
from planner.fold import Folded, fold
from planner.formulate import Assignment, Space, Training, rules_of
from planner.graph import Graph
from planner.layout import Mesh
from planner.mesh import candidate_meshes, pinned_mesh
from planner.pins import Pins, filters
from planner.problem import Answer, Evaluation, Problem, evaluate
from planner.rules import Rule
from planner.solve import solve

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """One mesh that was tried: what the solver answered."""

    mesh: Mesh
    status: str
    objective_s: float
    bound_s: float
    peak_bytes: int


@dataclass(frozen=True)
class Searched:
    """The result of a search.

    Attributes:
        assignment: the best plan's decisions.
        evaluation: what they cost, by the one definition of cost.
        candidates: every mesh tried, best first.
        status, gap: ``optimal`` with gap 0 when every candidate was solved or bounded away.
        seconds: by step: ``fold``, ``build``, ``solve``.
    """

    assignment: Assignment
    evaluation: Evaluation
    candidates: tuple[Candidate, ...]
    status: str
    gap: float
    seconds: Mapping[str, float]


def search(
    graph: Graph,
    cluster: ClusterSpec,
    pins: Pins,
    training: Training,
    *,
    folding: bool = True,
    time_limit_s: float = 60.0,
    progress: Progress | None = None,
) -> Searched:
    """The fastest plan that fits the cluster's memory, over all meshes that the pins allow.

    Raises:
        PinError: the pins do not fit the model or the cluster.
        InfeasibleError: nothing fits in memory; says by how much, and what would.
    """
    start = time.monotonic()
    deadline = start + time_limit_s
    cost = CostModel(cluster)
    folded = fold(graph) if folding else fold(graph, minimum=len(graph.nodes) + 2)
    rules = rules_of(graph)
    seconds = {"fold": time.monotonic() - start, "build": 0.0, "solve": 0.0}
    meshes = (pinned_mesh(cluster, pins.sizes),) if pins.sizes else candidate_meshes(cluster)
    limit = cluster.device.usable_bytes
    best: tuple[Space, Answer, Evaluation] | None = None
    candidates: list[Candidate] = []
    bounds: list[float] = []
    for mesh in meshes:
        if progress is not None:
            progress(f"mesh {' x '.join(map(str, mesh.sizes))}")
        before = time.monotonic()
        space, problem = _pose(folded, mesh, cost, training, rules, pins, limit)
        seconds["build"] += time.monotonic() - before
        before = time.monotonic()
        cutoff = best[2].time_s if best is not None else math.inf
        answer = solve(problem, time_limit_s=max(1.0, deadline - before), cutoff_s=cutoff)
        seconds["solve"] += time.monotonic() - before
        evaluation = evaluate(problem, answer.choices)
        candidates.append(Candidate(mesh, answer.status, evaluation.time_s, answer.bound_s, evaluation.peak_bytes))
        bounds.append(answer.bound_s)
        if evaluation.feasible and (best is None or evaluation.time_s < best[2].time_s * (1 - 1e-9)):
            best = space, answer, evaluation
    if best is None:
        raise InfeasibleError(_why_nothing_fits(graph, cluster, candidates, limit, training, pins))
    space, answer, evaluation = best
    bound = min(evaluation.time_s, *bounds)
    gap = (evaluation.time_s - bound) / evaluation.time_s if evaluation.time_s else 0.0
    status = "optimal" if gap <= 1e-6 else "feasible"
    candidates.sort(key=lambda c: (c.peak_bytes > limit, c.objective_s))
    return Searched(space.assignment(answer), evaluation, tuple(candidates), status, max(0.0, gap), seconds)


def _pose(
    folded: Folded,
    mesh: Mesh,
    cost: CostModel,
    training: Training,
    rules: Mapping[str, Rule],
    pins: Pins,
    limit: int,
) -> tuple[Space, Problem]:
    allow, allow_leaf = filters(pins, folded.graph, rules, mesh)
    space = Space(folded, mesh, cost, training, rules, allow, allow_leaf)
    empty = [role for role, options in space.options.items() if not options]
    if empty:
        raise PinError(
            f"the pins leave no way to run {space.describe(empty[0])} on mesh {mesh.sizes}; relax one of them"
        )
    return space, space.problem(limit)


def _why_nothing_fits(
    graph: Graph,
    cluster: ClusterSpec,
    candidates: list[Candidate],
    limit: int,
    training: Training,
    pins: Pins,
) -> str:
    least = min(candidates, key=lambda c: c.peak_bytes)
    params = sum(t.size_bytes for node in graph.leaves if node.op == "param" for t in node.results)
    mesh = " x ".join(f"{name} {size}" for name, size in zip(least.mesh.names, least.mesh.sizes, strict=True))
    needed = math.ceil(least.peak_bytes / (1 - cluster.device.reserve_fraction))
    pinned = " Relaxing the pins may also help." if pins.to_dict() else ""
    return (
        f"no plan fits {cluster.name!r}: each of its {cluster.world_size} devices can use {limit:,} bytes, and the "
        f"leanest plan (mesh {mesh}) needs {least.peak_bytes:,}, {least.peak_bytes - limit:,} too many "
        f"(the parameters alone are {params:,} bytes in all, {training.optimizer_bytes_per_element} more per element "
        f"for the optimizer). What would fit: devices with memory_bytes of at least {needed:,}, "
        f"about {math.ceil(cluster.world_size * least.peak_bytes / limit)} devices like these, or a smaller global "
        f"batch.{pinned}"
    )
