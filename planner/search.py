"""Search: from a graph and a cluster to the best plan found, with what is proved about it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.cluster import ClusterSpec
from planner.cost import CostModel
from planner.errors import InfeasibleError, PinError
from planner.fold import Block, Folded, fold, fold_off, relabel
from planner.formulate import Assignment, Role, Space, Training, rules_of
from planner.graph import Graph, Ref
from planner.layout import Layout, Mesh
from planner.mesh import candidate_meshes, pinned_mesh
from planner.pins import Pins, filters
from planner.problem import Answer, Evaluation, Problem, evaluate
from planner.rules import Rule
from planner.solve import solve
from planner.strategy import Choice

Progress = Callable[[str], None]
PROVED = 1e-6
APART_OPERATORS = 400
"""Up to so many operators a model is also decided node by node, without one decision for equal blocks."""


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
        status, gap: ``optimal`` with gap 0 when every candidate was solved or bounded away, among plans that
            decide equal blocks alike where the model has more than :data:`APART_OPERATORS` operators.
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
    folded = fold(graph) if folding else fold_off(graph)
    rules = rules_of(graph)
    seconds = {"fold": time.monotonic() - start, "build": 0.0, "solve": 0.0}
    meshes = (pinned_mesh(cluster, pins.sizes),) if pins.sizes else candidate_meshes(cluster)
    limit = cluster.device.usable_bytes
    best: Best | None = None
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
    if len(folded.instances) > len(folded.kinds):
        before = time.monotonic()
        alike = best
        best, apart_bounds = _apart(folded, meshes, cost, training, rules, pins, limit, best, deadline)
        bounds = apart_bounds or bounds
        if best is not None and best is not alike:
            space, answer, evaluation = best
            candidates.append(
                Candidate(space.mesh, answer.status, evaluation.time_s, answer.bound_s, evaluation.peak_bytes)
            )
        seconds["solve"] += time.monotonic() - before
    if best is None:
        raise InfeasibleError(_why_nothing_fits(graph, cluster, candidates, limit, training, pins))
    space, answer, evaluation = best
    bound = min(evaluation.time_s, *bounds)
    gap = (evaluation.time_s - bound) / evaluation.time_s if evaluation.time_s else 0.0
    status = "optimal" if gap <= PROVED else "feasible"
    candidates.sort(key=lambda c: (c.peak_bytes > limit, c.objective_s))
    return Searched(space.assignment(answer), evaluation, tuple(candidates), status, max(0.0, gap), seconds)


Best = tuple[Space, Answer, Evaluation]


def _apart(
    folded: Folded,
    meshes: tuple[Mesh, ...],
    cost: CostModel,
    training: Training,
    rules: Mapping[str, Rule],
    pins: Pins,
    limit: int,
    best: Best | None,
    deadline: float,
) -> tuple[Best | None, list[float]]:
    """Let the instances of a block differ, where the whole model is small enough to decide node by node.

    A chain of equal layers may want to alternate (column, row, column, ...), which one decision for all
    of them cannot say. Instances that end up alike are one kind again.

    Returns:
        The best of what was known and what was found, and the lower bound of every mesh; no bounds where
        the model is too large.
    """
    operators = sum(len(instance.block.nodes) for instance in folded.instances)
    if operators > APART_OPERATORS:
        return best, []
    bounds = []
    split = relabel(folded, range(len(folded.instances)))
    for mesh in meshes:
        space, problem = _pose(split, mesh, cost, training, rules, pins, limit)
        # Half of what counts as proved, so that a bound that reaches the cutoff proves it.
        cutoff = best[2].time_s * (1 - PROVED / 2) if best is not None else math.inf
        answer = solve(problem, time_limit_s=max(1.0, deadline - time.monotonic()), cutoff_s=cutoff)
        bounds.append(answer.bound_s)
        evaluation = evaluate(problem, answer.choices)
        if evaluation.feasible and evaluation.time_s < cutoff:
            best = _together(folded, space, answer, cost, training, rules, pins, limit)
    return best, bounds


def _together(
    folded: Folded,
    space: Space,
    answer: Answer,
    cost: CostModel,
    training: Training,
    rules: Mapping[str, Rule],
    pins: Pins,
    limit: int,
) -> Best:
    """The same decisions with instances that decide alike folded into one kind."""
    chosen = space.assignment(answer)
    labels = [
        tuple(
            (chosen.chosen[space.role_of[name]], *(chosen.delivered(Ref(name, i)) for i in range(results)))
            for name, results in _decided(instance.block, space)
        )
        for instance in space.folded.instances
    ]
    merged, problem = _pose(relabel(folded, labels), space.mesh, cost, training, rules, pins, limit)
    picks = []
    for role in merged.roles:
        decision = chosen.chosen.get(role) if role[0] == "output" else _decision(merged, role, chosen)
        picks.append(list(merged.options[role]).index(decision))
    evaluation = evaluate(problem, tuple(picks))
    return merged, Answer(tuple(picks), evaluation.time_s, answer.bound_s, answer.status, answer.seconds), evaluation


def _decided(block: Block, space: Space) -> list[tuple[str, int]]:
    """Nodes whose decisions belong to a block: its own, and the leaves that only it reads."""
    own = space.skeleton.own
    leaves = [ref.node for ref in block.inputs if space.role_of[ref.node][0] == "leaf" and ref.node in own]
    return [(node.name, len(node.results)) for node in block.nodes] + [(name, 1) for name in leaves]


def _decision(space: Space, role: Role, chosen: Assignment) -> Choice | Layout:
    """What the unfolded decisions say for a role of the folded space."""
    if role[0] == "relay":
        producer = role[1]
        assert isinstance(producer, tuple)
        assert isinstance(role[2], int)
        return chosen.delivered(Ref(space.members[producer][0], role[2]))
    name = space.members[role][0]
    return chosen.chosen[chosen.space.role_of[name]]


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
    if any(math.isfinite(c.bound_s) for c in candidates):
        return (
            f"no plan that fits {cluster.name!r} was found before the time limit, but none was ruled out either: "
            f"the leanest one seen (mesh {mesh}) needs {least.peak_bytes:,} bytes of {limit:,}. Give a longer "
            "time_limit_s, or pin decisions to narrow the search."
        )
    return (
        f"no plan fits {cluster.name!r}: each of its {cluster.world_size} devices can use {limit:,} bytes, and the "
        f"leanest plan (mesh {mesh}) needs {least.peak_bytes:,}, {least.peak_bytes - limit:,} too many "
        f"(the parameters alone are {params:,} bytes in all, {training.optimizer_bytes_per_element} more per element "
        f"for the optimizer). What would fit: devices with memory_bytes of at least {needed:,}, "
        f"about {math.ceil(cluster.world_size * least.peak_bytes / limit)} devices like these, or a smaller global "
        f"batch.{pinned}"
    )
