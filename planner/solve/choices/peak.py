"""Turn a problem into its assignment of least peak memory, for when nothing fits the limit."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from planner.solve.choices.best import BestFound
from planner.solve.choices.cheapest import LeastWeighted, low_peak
from planner.solve.choices.eliminate import decode, eliminate
from planner.solve.choices.model import ChoiceModel, build_model, drop_forbidden
from planner.solve.choices.tree import build_tree
from planner.solve.choices.window import MAX_ENTRIES, held_only, search
from planner.solve.problem import Problem, evaluate


def least_peak(problem: Problem, deadline: float) -> tuple[int, ...]:
    """The choices of least peak; forbidden ones only when every assignment is forbidden.

    Where elimination is not exact, less and less is looked for until ``deadline`` (``time.monotonic``).
    """
    weighed = _weigh(problem)
    choices = _least_allowed_peak(weighed, deadline)
    if choices is None:
        choices = _least_allowed_peak(_allow_everything(weighed), deadline)
    assert choices is not None, "without forbidden choices every assignment is allowed"
    return choices


def _weigh(problem: Problem) -> Problem:
    """The problem with its held bytes for seconds, forbidden choices and pairs as they were."""
    vertices = tuple(
        replace(
            vertex,
            time_s=np.where(np.isfinite(vertex.time_s + vertex.background_s), vertex.held_bytes, math.inf),
            background_s=np.zeros(vertex.choices),
            cover_s=np.zeros(vertex.choices),
        )
        for vertex in problem.vertices
    )
    edges = tuple(
        replace(
            edge,
            time_s=np.where(np.isfinite(edge.time_s + edge.background_s), edge.held_bytes, math.inf),
            background_s=np.zeros(edge.time_s.shape),
        )
        for edge in problem.edges
    )
    return Problem(vertices, edges, problem.limit_bytes)


def _allow_everything(weighed: Problem) -> Problem:
    return Problem(
        tuple(replace(vertex, time_s=vertex.held_bytes.astype(np.float64)) for vertex in weighed.vertices),
        tuple(replace(edge, time_s=edge.held_bytes.astype(np.float64)) for edge in weighed.edges),
        weighed.limit_bytes,
    )


def _least_allowed_peak(weighed: Problem, deadline: float) -> tuple[int, ...] | None:
    # Without a limit a model counts no bytes; here any limit will do.
    model = drop_forbidden(build_model(replace(weighed, limit_bytes=0)))
    if model is None:
        return None
    tree = build_tree(model, MAX_ENTRIES)

    def least_memory(part: ChoiceModel) -> LeastWeighted:
        done = eliminate(part, tree, held_only(part))
        return LeastWeighted(done.bound, part, decode(done))

    capped = low_peak(model, least_memory)
    choices = None if capped is None else capped.choices
    if tree.exact and not len(model.rooms):
        return choices
    if choices is None:
        choices = _find(weighed, None, deadline)
    if choices is None:
        return None
    low, high = 0, evaluate(weighed, choices).peak_bytes
    while low < high:
        middle = (low + high) // 2
        lower = _find(weighed, middle, deadline)
        if lower is None:
            low = middle + 1
        else:
            choices, high = lower, evaluate(weighed, lower).peak_bytes
    return choices


def _find(weighed: Problem, limit_bytes: int | None, deadline: float) -> tuple[int, ...] | None:
    """An assignment within the limit that holds as little as possible, if there is one and time suffices."""
    problem = replace(weighed, limit_bytes=limit_bytes)
    model, best = drop_forbidden(build_model(problem)), BestFound(problem, math.inf)
    if model is not None:
        search(model, best, deadline)
    return best.choices
