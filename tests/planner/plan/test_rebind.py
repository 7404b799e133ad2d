"""Plans carried to other models, batches and clusters: what holds is as it was, what does not is listed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from planner.base.errors import InfeasibleError, PlanError
from planner.cost.cluster import ClusterSpec
from planner.formulation.certificate import Decided
from planner.formulation.constraints.pins import Pins
from planner.formulation.pinned_space import pinned_space
from planner.formulation.training import Training
from planner.ir.folding import fold
from planner.ir.graph import Graph
from planner.plan.document.encoding import dump
from planner.plan.document.fingerprint import model_facts
from planner.plan.plan import Plan, refold, reprice, restore
from planner.plan.rebinding.matching import matched_blocks
from planner.plan.rebinding.rebind import rebind
from planner.search.search import GAP
from planner.solve.problem import evaluate
from tests.planner.plans import Build, cluster, plan_of, residual_mlp, unwrapped


@cache
def planned(devices: int = 4, layers: int = 3, **pin: Any) -> Plan:
    return plan_of(residual_mlp(layers), cluster(devices), pin)


def rebound(plan: Plan, graph: Graph, spec: ClusterSpec | None = None, **more: Any) -> Plan:
    return rebind(plan, graph, model_facts(graph, "ResidualMLP"), spec or plan.cluster, **more)


def reread(plan: Plan) -> Plan:
    return Plan.from_dict(json.loads(dump(plan.to_dict())))


def told(changes: Iterable[Any]) -> list[str]:
    return [f"{change.what}: {change.old} -> {change.new}" for change in changes]


def priced_again(plan: Plan, graph: Graph) -> Plan:
    """A plan as its file is read, restored for its model and priced, as ``autopar.evaluate`` does."""
    plan, facts, pins = reread(plan), model_facts(graph, "ResidualMLP"), Pins.parse(plan.pin)
    stages = 1 if plan.pipeline is None else plan.pipeline.ranks
    training = Training(plan.optimizer_bytes_per_element, unsharding=plan.unsharding)
    space = pinned_space(graph, refold(plan, graph, facts), plan.mesh, plan.cluster, pins, training, stages)
    return reprice(plan, restore(plan, space, facts))


def strategies(plan: Plan) -> dict[str, set[str]]:
    """Of every operator by name, whichever block it is in."""
    found: dict[str, set[str]] = {}
    for block in plan.blocks:
        for name, label in block.ops.items():
            found.setdefault(f"{block.name.partition('.')[0]}.{name}", set()).add(label)
    return found


PINS: list[dict[str, Any]] = [
    {},
    {"tensor": 4},
    {"data": 2, "tensor": 2, "zero": 3, "recompute": "full"},
    {"pipeline": 2, "micro_batches": 4, "data": 2, "zero": 1, "recompute": "full"},
]


# ---- what holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pin", PINS, ids=str)
@pytest.mark.parametrize("is_read", [False, True], ids=["own", "file"])
def test_the_same_model_on_the_same_cluster_has_the_same_plan(pin: dict[str, Any], is_read: bool) -> None:
    plan = planned(**pin)
    found = rebound(reread(plan) if is_read else plan, residual_mlp())
    assert not found.changes
    assert replace(found, search=plan.search, rebinding=None) == plan


@pytest.mark.parametrize("pin", PINS, ids=str)
@pytest.mark.parametrize(
    "graph",
    [residual_mlp(12), residual_mlp(width=320), residual_mlp(5, 384, 1024)],
    ids=["deeper", "wider", "larger batch, too"],
)
def test_other_sizes_have_the_same_strategies_and_the_price_of_their_file(pin: dict[str, Any], graph: Graph) -> None:
    plan = planned(**pin)
    found = rebound(plan, graph)
    assert strategies(found) == strategies(plan)
    assert {*found.parameters.values()} == {*plan.parameters.values()}
    assert {change.what for change in found.changes} <= {"blocks of the stages"}
    again = priced_again(found, graph)
    assert again == found
    assert found.assignment is not None and found.assignment.space.graph == graph


def test_every_instance_of_a_deeper_model_recomputes_as_those_of_its_kind() -> None:
    plan = planned(data=2, tensor=2, zero=3, recompute="full")
    found = rebound(plan, residual_mlp(12))
    assert sum(block.recompute.get("full", 0) for block in found.blocks) == 12


def test_a_pipeline_is_cut_anew_into_as_many_stages() -> None:
    plan = planned(pipeline=2, micro_batches=4, data=2, zero=1, recompute="full")
    found = rebound(plan, residual_mlp(12))
    assert plan.pipeline is not None and found.pipeline is not None
    assert (found.pipeline.ranks, found.pipeline.virtual_stages) == (plan.pipeline.ranks, plan.pipeline.virtual_stages)
    sizes = [high - low for low, high in itertools.pairwise(found.pipeline.bounds)]
    assert max(sizes) - min(sizes) <= 2
    assert sorted(found.pipeline.recompute["full"]) == [at for b in found.blocks if b.count > 1 for at in b.at]


def test_operators_are_found_by_what_follows_what_where_modules_have_other_names() -> None:
    def renamed(layers: int) -> Graph:
        graph = residual_mlp(layers)

        def other(name: str) -> str:
            return name.replace("layers", "h").replace("up", "fc1").replace("down", "fc2").replace("stem", "wte")

        nodes = (replace(node, path=other(node.path), target=other(node.target)) for node in graph.nodes)
        return replace(graph, nodes=tuple(nodes))

    plan = planned(tensor=4)
    found = rebound(plan, renamed(6))
    assert not found.changes
    assert [*strategies(found).values()] == [*strategies(plan).values()]
    assert found.parameters["h.*.fc1.weight"] == plan.parameters["layers.*.up.weight"]


def test_blocks_that_a_plan_decides_apart_stay_so_and_the_longest_run_takes_the_depth() -> None:
    plan, at = planned(tensor=4), {1: (0,), 2: (1, 4), 3: (2, 3)}
    layers = next(block for block in plan.blocks if block.name == "layers.*")
    first, last = plan.blocks[0], plan.blocks[-1]
    apart = [
        replace(layers, name=f"layers.{kind}", count=len(own), at=tuple(1 + n for n in own)) for kind, own in at.items()
    ]
    blocks = (replace(first, at=(0,)), *apart, replace(last, at=(6,)))
    found = matched_blocks(replace(plan, blocks=blocks), fold(residual_mlp(8)))
    assert [found.like[instance.kind] for instance in found.folded.instances] == [0, 1, 2, 3, 3, 3, 3, 3, 2, 4]


# ---- devices ---------------------------------------------------------------------------------------------------------


def test_more_devices_are_the_axis_of_the_batch() -> None:
    found = rebound(planned(data=2, tensor=2), residual_mlp(), cluster(8))
    assert found.sizes == {"data": 4, "tensor": 2}
    assert found.pin == {"data": 4, "tensor": 2}
    assert told(found.changes) == ["mesh axis 'data': 2 -> 4"]
    assert priced_again(found, residual_mlp()) == found


def test_without_an_axis_of_the_batch_there_is_one_whose_decisions_are_searched() -> None:
    found = rebound(planned(tensor=4), residual_mlp(), cluster(8))
    assert found.sizes == {"data": 2, "tensor": 4}
    assert strategies(found)["layers.up: linear"] == {"data:m0 tensor:n"}


def test_an_axis_inside_a_node_stays_inside_a_smaller_node() -> None:
    big, small = ClusterSpec.preset("dgx-h100", devices=8), ClusterSpec.preset("dgx-h100", nodes=4, devices=16)
    plan = plan_of(residual_mlp(batch=4096), big, {"tensor": 8})
    found = rebound(plan, residual_mlp(batch=4096), small)
    assert found.sizes == {"data": 4, "tensor": 4}
    assert "it was inside a node, which has 4 here" in found.changes[0].why


def test_micro_batches_divide_the_batch_among_the_ranks() -> None:
    plan = planned(pipeline=2, micro_batches=4, data=2)
    found = rebound(plan, residual_mlp(batch=36), cluster(12))
    assert found.sizes == {"pipeline": 2, "micro": 3, "data": 6}
    assert "micro-batches: 4 -> 3" in told(found.changes)
    assert found.pin["micro_batches"] == 3


# ---- what does not hold ----------------------------------------------------------------------------------------------


def test_what_a_width_does_not_divide_is_listed_with_the_numbers_and_all_else_is_as_it_was() -> None:
    graph = residual_mlp(width=258)
    plan = planned(tensor=4)
    found = rebound(plan, graph)
    before, after = strategies(plan), strategies(found)
    changed = {change.what: change for change in found.changes}
    assert {name for name in before if before[name] == after[name]} == {
        "layers.up: linear",
        "layers.relu",
        "layers.down: linear",
        "head.mean",
    }
    assert before["stem.linear"] == {"tensor:n"}
    assert changed["linear of block 'stem'"].why == "n is 258, which 4 ranks of tensor do not divide"
    assert priced_again(found, graph) == found


def with_norm(layers: int, width: int = 256, batch: int = 512) -> Graph:
    """The same with an operator more in every layer."""
    b = Build()
    value = b.linear("stem", b.leaf("x", batch, width), width, "stem", has_bias=True)
    for i in range(layers):
        path = f"layers.{i}"
        hidden = b.relu(f"relu{i}", b.linear(f"up{i}", value, 4 * width, f"{path}.up", has_bias=True), path)
        hidden = b.call(f"tanh{i}", "tanh.default", batch, 4 * width, path=f"{path}.act", self=hidden)
        value = b.add(f"add{i}", value, b.linear(f"down{i}", hidden, width, f"{path}.down", has_bias=True), path)
    return b.mean(b.linear("head", value, 64, "head", has_bias=True))


def test_a_new_operator_is_decided_as_is_best_with_all_else_held_fixed() -> None:
    """Against trying every way to run it, by the one definition of cost."""
    graph = with_norm(6)
    found = rebound(planned(), graph)
    assert [change.what for change in found.changes if not change.old] == ["act: tanh of block 'layers.*'"]
    assignment = found.assignment
    assert assignment is not None
    space = assignment.space
    new = next(v for v in space.variables if v[0] == "op" and "tanh0" in space.members[v])

    def time_s(option: Any) -> float:
        changed = replace(assignment, chosen={**assignment.chosen, new: option})
        problem = Decided(changed, space.decision_graph).problem(None, assignment.recompute)
        return evaluate(problem, (0,) * len(problem.vertices)).time_s

    every = [time_s(option) for option in space.options[new]]
    assert len(every) > 4
    assert found.predicted.step_time_s == pytest.approx(min(every), rel=1e-12)


def test_what_the_model_no_longer_has_is_listed() -> None:
    plan = plan_of(with_norm(3), pin={"data": 2, "tensor": 2})
    found = rebound(plan, residual_mlp(6))
    assert told(found.changes) == ["act: tanh of block 'layers.*': data:d0 tensor:d1 -> "]


def test_a_model_with_hardly_anything_in_common_is_refused_with_what_both_have() -> None:
    b = Build()
    value = b.leaf("x", 64, 64)
    for i in range(8):
        value = b.call(f"sin{i}", "sin.default", 64, 64, path=f"waves.{i}", self=value)
    with pytest.raises(PlanError) as error:
        rebound(planned(tensor=4), b.mean(value))
    said = unwrapped(error.value)
    assert "3 x layers.* (up: linear, down: linear" in said and "1 x waves (0: sin" in said and "autopar.plan" in said


def test_pins_that_do_not_fit_are_dropped_with_the_reason() -> None:
    plan = planned(data=2, tensor=2, recompute="full", reduce_dtype="float64")
    found = rebound(plan, residual_mlp(batch=1))
    assert found.pin == {"recompute": "full", "reduce_dtype": "float64"}
    assert [change.what for change in found.changes][:2] == ["pin 'data'", "pin 'tensor'"]
    assert "the batch is 1" in found.changes[0].why


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_recomputes_the_least_with_which_it_does() -> None:
    plan = plan_of(residual_mlp(batch=4096), cluster(4, "1 GiB"), {"data": 2, "tensor": 2})
    deep = residual_mlp(24, batch=4096)
    free = rebound(plan, deep)
    tight = cluster(4, int(free.predicted.peak_bytes / 0.9 * 0.75))
    found = rebound(plan, deep, tight)
    assert not any(block.recompute for block in free.blocks)
    assert found.predicted.peak_bytes <= tight.device.usable_bytes < free.predicted.peak_bytes
    assert found.changes[-1].what == "recomputation"
    assert strategies(found) == strategies(free)


def test_a_pipeline_that_does_not_fit_has_more_stages_or_micro_batches() -> None:
    plan = plan_of(residual_mlp(4), cluster(8), {"pipeline": 2, "micro_batches": 4, "data": 4, "recompute": "none"})
    deep = residual_mlp(24)
    free = rebound(plan, deep)
    tight = cluster(8, int(free.predicted.peak_bytes / 0.9 * 0.7))
    found = rebound(plan, deep, tight)
    assert found.predicted.peak_bytes <= tight.device.usable_bytes
    assert any(change.why == "with fewer the step does not fit in memory" for change in found.changes)


def test_what_fits_in_no_way_is_refused_with_the_bytes() -> None:
    with pytest.raises(InfeasibleError, match=r"take .* bytes.* a device can use .* more devices") as error:
        rebound(planned(tensor=4), residual_mlp(3), cluster(4, "1 MiB"))
    assert error.value.excess_bytes > 0


# ---- beside a fresh search -------------------------------------------------------------------------------------------


def test_the_bound_of_arithmetic_and_that_of_a_search_are_below_what_a_search_finds() -> None:
    plan, graph = planned(data=2, tensor=2), residual_mlp(6)
    alone, compared = rebound(plan, graph), rebound(plan, graph, time_limit_s=20.0)
    fresh = plan_of(graph, pin={"data": 2, "tensor": 2})
    assert compared.rebinding is not None and alone.rebinding is not None
    assert (alone.rebinding.bound_by, compared.rebinding.bound_by) == ("arithmetic", "search")
    fresh_s = compared.rebinding.fresh_step_s
    assert fresh_s is not None and (1 - GAP) * fresh_s <= fresh.predicted.step_time_s <= fresh_s * (1 + 1e-9)
    bounds = [plan.predicted.step_time_s * (1 - plan.search.gap) for plan in (alone, compared)]
    assert 0 < bounds[0] <= bounds[1] <= fresh.predicted.step_time_s * (1 + 1e-9)
    assert bounds[1] >= fresh.predicted.step_time_s * (1 - GAP)


# ---- as any other plan -----------------------------------------------------------------------------------------------


def test_a_rebound_plan_says_where_it_comes_from_and_keeps_its_changes_in_its_file() -> None:
    plan = planned(tensor=4)
    found = rebound(plan, residual_mlp(width=258))
    again = reread(found)
    assert again.changes == found.changes
    assert f"rebound from the plan {plan.digest()} of ResidualMLP" in unwrapped(found)
    assert "n is 258, which 4 ranks of tensor do not divide" in unwrapped(again)
    assert "not compared with a fresh search" in unwrapped(found) and "compared with no other" in found.sentence
    assert "Rebound" in found.to_html()


def test_a_rebound_plan_can_be_explained_and_asked_why_not() -> None:
    found = rebound(planned(data=2, tensor=2), residual_mlp(6))
    assert "up: linear" in str(found.explain("layers.0.up"))
    assert found.why_not({"tensor": 4}, time_limit_s=10.0)
    assert found.certificate.holds
    assert found.at(batch=1024).step_time_s > 0
