"""Roles: a row of the table is all that a new kind of axis needs to be pinned, obeyed and refused."""

from __future__ import annotations

import pytest

from planner.base.errors import PinError
from planner.formulation.constraints.labels import LABELS, Label, at_factors
from planner.formulation.constraints.pins import Pins
from planner.formulation.constraints.roles import REST, ROLES, Role
from planner.formulation.training import Training
from planner.ir.graph import Graph
from planner.search.search import search
from tests.planner.plans import cluster, plan_of, residual_mlp

GRAPH = residual_mlp(layers=2, width=64, batch=48)
HIDDEN = at_factors(lambda node, rule: {"n"} if node.path.endswith(".up") else set())


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An axis for the hidden features of the layers, which has the batch in all other operators."""
    monkeypatch.setitem(LABELS, "hidden", Label(HIDDEN, "hidden dim", "shards hidden features, and there are none"))
    monkeypatch.setitem(ROLES, "hidden", Role("hidden", "hidden", "any", elsewhere="batch"))


def test_a_row_can_be_pinned_and_is_obeyed() -> None:
    pins = Pins.parse({"hidden": 2})
    assert pins.to_dict() == {"hidden": 2}
    assignment = search(GRAPH, cluster(4), pins, Training()).assignment
    assert assignment.space.mesh.names == ("data", "hidden"), "data has the ranks that are left"
    found = {name: str(assignment.choice(GRAPH.by_name[name]).axes[1]) for name in ("stem", "up0", "relu1", "down1")}
    assert found == {"stem": "m0", "up0": "n", "relu1": "d1", "down1": "k"}
    assert [str(each) for each in assignment.choice(GRAPH.by_name["up0"]).axes] == ["m0", "n"]


def test_reports_name_what_it_shards() -> None:
    assert "hidden dim" in str(plan_of(GRAPH, cluster(4), {"hidden": 4}).explain("layers.0.up"))


@pytest.mark.parametrize(
    "graph, devices, pin, message",
    [
        (GRAPH, 5, {"hidden": 5}, "pin 'hidden' is 5 but input 'x' has a batch of 48"),
        (
            residual_mlp(layers=0, width=64, batch=48),
            4,
            {"hidden": 4},
            "pin 'hidden' shards hidden features, and there",
        ),
        (
            residual_mlp(layers=2, width=9, batch=40),
            5,
            {"hidden": 5},
            "is 5 but the hidden dim has length 36, which",
        ),
        (GRAPH, 2, {"hiden": 2}, "no decision called 'hiden'; known: .*hidden"),
        (GRAPH, 4, {REST: 2}, r"\(hidden, tensor, table, ulysses, context, expert_tensor, expert, model\)"),
    ],
)
def test_errors_name_it(graph: Graph, devices: int, pin: dict[str, int], message: str) -> None:
    with pytest.raises(PinError, match=message):
        plan_of(graph, cluster(devices), pin)
