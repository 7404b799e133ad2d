"""Recipes that nobody pinned: what they decide is the same on the mesh of no names, in seconds and in bytes."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from planner.analysis.memory import usage
from planner.base.errors import InfeasibleError
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import assignment_of
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.search.candidates import Branch
from planner.search.min_memory import MinMemoryPlan, begun, min_memory_plans
from planner.search.recipes import by_recipe, freed
from planner.search.search import search
from planner.search.search_context import SearchContext
from planner.solve.problem import evaluate
from tests.planner.plans import residual_mlp, whole


def looked(monkeypatch: pytest.MonkeyPatch, devices: int, pin: dict[str, object]) -> tuple[SearchContext, list[Branch]]:
    """What a search in vain has looked at."""
    seen: list[tuple[SearchContext, list[Branch]]] = []

    def watched(context: SearchContext, branches: list[Branch], *others: Any, **named: Any) -> list[MinMemoryPlan]:
        seen.append((context, branches))
        return min_memory_plans(context, branches, *others, **named)

    monkeypatch.setattr("planner.search.memory_fitting.min_memory_plans", watched)
    with pytest.raises(InfeasibleError):
        search(residual_mlp(layers=1, width=8, batch=8), ClusterSpec.local(devices, 1, 2), whole(pin), Training())
    return seen[0]


def test_a_recipe_decides_the_same_where_no_axis_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    context, branches = looked(monkeypatch, 4, {})
    held = by_recipe(context, branches, math.inf)
    names = {branch.candidate.config.mesh.names for branch in held}
    assert names == {("tensor",), ("data",), ("data", "tensor")}
    minimal = [lean for branch in held for lean in min_memory_plans(context, [branch])]
    assert {lean.best.config.mesh.names for lean in minimal} == names
    for lean in minimal:
        free = freed(lean.best, branches)
        assert free.config in {branch.candidate.config for branch in branches}
        assert evaluate(free.space.problem(None, free.recompute), free.choices) == lean.best.evaluation
        assert usage(assignment_of(free.space, free.choices, free.recompute)).peak_bytes == lean.bytes


def test_recipes_micro_batched_stay_micro_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    context, branches = looked(monkeypatch, 4, {"pipeline": 2, "micro_batches": 4})
    held = by_recipe(context, branches, math.inf)
    assert {branch.candidate.config.mesh.names for branch in held} == {("micro", "tensor"), ("micro", "data")}
    for lean in min_memory_plans(context, held):
        free = freed(lean.best, branches)
        assert (free.config.stages, free.config.mesh.micro_batches) == (2, 4)
        assert free.staged is lean.best.staged and free.staged is not None


def test_no_recipe_where_one_is_pinned_or_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    context, branches = looked(monkeypatch, 2, {})
    assert begun(branches) == branches and by_recipe(context, branches, math.inf)
    assert by_recipe(context, branches, time.monotonic() - 1) == []
    pinned = replace(context, pins=Pins.parse({"data": 2}))
    assert by_recipe(pinned, branches, math.inf) == []


def test_one_device_has_no_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    context, branches = looked(monkeypatch, 1, {})
    assert by_recipe(context, branches, math.inf) == []
