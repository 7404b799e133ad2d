"""Certificates: what a plan costs does not depend on folding, on any model, mesh, pin or limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.formulation.certificate import Decided, certify
from planner.formulation.constraints.pins import Pins
from planner.formulation.decisions import DecisionGraph
from planner.formulation.training import Training
from planner.ir.folding import relabel
from planner.plan.plan import Plan
from planner.search.search import search
from planner.solve.problem import Problem, evaluate
from tests.planner.plans import cluster, plan_of, residual_mlp, unwrapped
from tests.planner.search.test_search import chain

MODELS = {
    "mlp": residual_mlp(),
    "deep": residual_mlp(layers=12, width=64),
    "strange": residual_mlp(strange=True),
    "chain": chain(5, width=32),
    "linear": chain(4, width=32, relu=False),
    "single": chain(1),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("devices", [1, 2, 4, 6])
def test_folded_and_unfolded_cost_the_same(name, devices):
    plan = plan_of(MODELS[name], cluster(devices))
    certificate = plan.certificate
    assert certificate.holds, str(certificate)
    assert certificate.difference_s == pytest.approx(0, abs=1e-12 * certificate.objective_s)
    assert certificate.difference_bytes == 0
    assert certificate.objective_s == pytest.approx(plan.predicted.step_time_s, rel=1e-12)
    assert certificate.peak_bytes >= plan.predicted.peak_bytes  # a sum, against what is alive at once
    assert certificate.bound_s == pytest.approx(certificate.objective_s, rel=1e-6)


@pytest.mark.parametrize("pin", [{"data": 4}, {"tensor": 4}, {"data": 2, "tensor": 2}, {"data": 4, "zero": 3}])
def test_under_pins(pin):
    assert plan_of(MODELS["mlp"], pin=pin).certificate.holds


def test_every_decision_and_every_edge_of_the_graph_is_priced():
    graph = residual_mlp(layers=12, width=64)
    certificate = plan_of(graph).certificate
    assert certificate.decisions >= len(graph.nodes) + len(graph.outputs)
    assert certificate.edges >= sum(len(node.inputs) for node in graph.nodes)


def test_a_fold_that_counts_wrongly_is_found():
    """An operator that the fold forgets is priced on the unfolded graph only."""
    plan = plan_of(MODELS["deep"])
    members = plan.assignment.space.decision_graph.variables.members
    variable = max(
        (variable for variable in members if variable[0] == "op"), key=lambda variable: len(members[variable])
    )
    members[variable].pop()
    certificate = certify(plan.assignment, 0.0)
    assert not certificate.holds
    assert certificate.difference_s < 0 and "NOT CERTIFIED" in str(certificate)


def test_stages_that_divide_no_size_are_no_miscount():
    """Of every decision the average rank's share is rounded; what all stages hold together is not, and says it all."""
    graph = residual_mlp(layers=7, width=100, batch=24)
    found = search(graph, cluster(3), Pins.parse({"pipeline": 3, "micro_batches": 2}), Training())
    decision_graph = found.assignment.space.decision_graph
    unfolded = DecisionGraph(
        relabel(decision_graph.folded, range(len(decision_graph.folded.instances))), decision_graph.rules
    )
    rounded = [peak_bytes(Decided(found.assignment, each).problem(None)) for each in (decision_graph, unfolded)]
    assert rounded[0] != rounded[1]
    certificate = certify(found.assignment, 0.0)
    assert certificate.holds and 0 <= certificate.peak_bytes - 3 * rounded[0] < 3 * certificate.decisions
    members = decision_graph.variables.members
    repeated = max(
        (variable for variable in members if variable[0] == "leaf"), key=lambda variable: len(members[variable])
    )
    members[repeated].pop()
    certificate = certify(found.assignment, 0.0)
    assert not certificate.holds and certificate.difference_bytes < 0


def peak_bytes(problem: Problem) -> int:
    """Of a problem in which everything is decided."""
    return evaluate(problem, (0,) * len(problem.vertices)).peak_bytes


def test_the_report_shows_it():
    plan = plan_of(MODELS["mlp"])
    shown = unwrapped(plan)
    assert f" proof {plan.certificate} layouts by axis" in shown
    assert "differing by 0 s and 0 bytes" in shown and "no plan that fits is below" in shown
    assert "certified" not in str(Plan.from_dict(plan.to_dict()))


@pytest.mark.parametrize(
    "pin, memory, of, without",
    [
        (
            {"pipeline": 2, "micro_batches": 4},
            "1 GiB",
            "the average of 2 ranks, with the least that it waits",
            "bubble",
        ),
        (
            {"pipeline": 2, "micro_batches": 4, "schedule": "zero_bubble"},
            "1 GiB",
            "the average of 2 ranks",
            "the schedule with its bubble, and what the slowest rank takes more",
        ),
        ({"data": 4, "micro_batches": 4}, "22 MiB", "a step that makes nothing again", "what the cut recomputes"),
        ({"data": 4, "micro_batches": 4}, "1 GiB", "", ""),
        ({"data": 4, "micro_batches": 4, "recompute": "full"}, "1 GiB", "", ""),
        ({"data": 4}, "1 GiB", "", ""),
    ],
)
def test_it_says_what_of_a_step_it_is_of_and_what_not(pin, memory, of, without):
    plan = plan_of(residual_mlp(layers=6), cluster(4, memory), pin)
    found, step_s = plan.certificate, plan.predicted.step_time_s
    assert found.holds and found.of.startswith(of) and without in found.without
    if of:
        assert found.objective_s < 0.95 * step_s
        assert f"certified, of {of}" in str(found) and f"with which a step takes {step_s:.9g} s; no plan" in str(found)
    else:
        assert found.objective_s == pytest.approx(step_s, rel=1e-12)
        assert str(found).startswith("certified: folded") and "; not of" not in str(found)
    assert not replace(found, bound_s=1.01 * step_s).holds


def test_a_broken_bound_does_not_hold():
    certificate = plan_of(MODELS["single"]).certificate
    assert not replace(certificate, bound_s=certificate.objective_s * 1.01).holds
