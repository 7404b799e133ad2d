"""Axes of searched meshes: named by what the plan found shards on them, and by that alone."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost.cluster import ClusterSpec
from planner.formulation.training import Training
from planner.ir.graph import Graph
from planner.plan.plan import Plan, reprice
from planner.search import micro_batch_search as searching
from planner.search.search import search
from tests.planner.formulation.test_pins import attention
from tests.planner.plan.damage import assigned
from tests.planner.plans import cluster, plan_of, residual_mlp, whole

H100S = ClusterSpec.preset("dgx-h100", nodes=2)


CASES: dict[str, tuple[Graph, ClusterSpec, tuple[str, ...]]] = {
    "one device": (residual_mlp(), cluster(1), ("all",)),
    "copies": (residual_mlp(batch=2**14, width=16), cluster(4), ("replicate", "data")),
    "a small batch": (residual_mlp(batch=7, width=512), cluster(2), ("tensor",)),
    "wide": (residual_mlp(), cluster(4), ("tensor_a", "tensor_b")),
    "more devices than are of use": (residual_mlp(layers=2, batch=2048), H100S, ("idle", "data")),
    "long": (attention(3072), cluster(3), ("context",)),
}


@pytest.mark.parametrize("case", CASES)
def test_an_axis_is_called_by_what_most_of_its_work_is_sharded_by(case: str) -> None:
    graph, spec, names = CASES[case]
    assert plan_of(graph, spec).mesh.names == names


@pytest.mark.parametrize("pin", [{}, {"micro_batches": 4}, {"pipeline": 2, "micro_batches": 4}], ids=str)
def test_names_decide_nothing(pin: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the search nor after the file was read: no axis shards what its name says unless that was found."""
    graph = residual_mlp()
    named = search(graph, cluster(4), whole(pin), Training())
    monkeypatch.setattr(searching, "named", lambda context, found: found)
    free = search(graph, cluster(4), whole(pin), Training())
    assert {"outer", "inner", "all"} & {*free.best.config.mesh.names}
    assert not {"outer", "inner", "all"} & {*named.best.config.mesh.names}
    assert named.evaluation == free.evaluation and named.best.choices == free.best.choices
    monkeypatch.undo()

    plan = plan_of(graph, pin=pin)
    loaded = Plan.from_dict(plan.to_dict())
    again = assigned(loaded, graph)
    assert plan.assignment is not None and again.chosen == plan.assignment.chosen
    assert reprice(loaded, again).predicted == plan.predicted


def test_the_chosen_mesh_has_its_names_among_the_candidates_too() -> None:
    plan = plan_of(residual_mlp())
    own = [each for each in plan.search.candidates if each["mesh"] == plan.sizes]
    assert [each["step_time_s"] for each in own] == [plan.predicted.step_time_s]
    assert "next all 4, 0.57 % slower" in str(plan)


def without_names(plan: Plan) -> Plan:
    """The same plan as a file of before axes had names says it."""
    names = dict(zip(plan.mesh.names, ("outer", "inner"), strict=True))

    def text(value: Any) -> Any:
        if isinstance(value, dict):
            return {names.get(key, key): text(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [text(each) for each in value]
        if isinstance(value, str):
            words = (word.partition(":") for word in value.split(" "))
            return " ".join(names.get(name, name) + colon + rest for name, colon, rest in words)
        return value

    return Plan.from_dict(text(plan.to_dict()))


def test_files_with_axes_of_no_meaning_still_mean_the_same() -> None:
    graph = residual_mlp()
    plan = plan_of(graph)
    old = without_names(plan)
    assert old.mesh.names == ("outer", "inner") and "mesh    outer 2 x inner 2" in str(old)
    assert reprice(old, assigned(old, graph)).predicted.step_time_s == plan.predicted.step_time_s
    assert old.sentence == plan.sentence


def test_axes_that_pins_name_keep_their_names() -> None:
    plan = plan_of(residual_mlp(), pin={"layers": {"head": {"inner": "k"}}})
    assert plan.mesh.names == ("outer", "inner")
