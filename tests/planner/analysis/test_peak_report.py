"""What is alive at the peak of a micro-batched step, tensor by tensor; all of it together is the peak."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planner.analysis.memory.storages import PeakReport
from planner.analysis.pipeline.peak_report import COMING, SECOND, SENT, WEIGHTS, peak_micro_batched
from planner.base.errors import PlanError
from planner.formulation.decision_names import called
from planner.formulation.training import Training
from planner.ir.graph import Graph, Node, Ref
from planner.plan.plan import Plan
from planner.search.search import search
from tests.planner.plans import cluster, plan_of, residual_mlp, unwrapped, whole

GRAPH = residual_mlp(layers=6, batch=64)
PINS: tuple[dict[str, Any], ...] = (
    {"micro_batches": 4, "data": 4},
    {"micro_batches": 4, "data": 4, "zero": 3},
    {"micro_batches": 4, "data": 4, "zero": 3, "recompute": "full"},
    {"pipeline": 2, "micro_batches": 8, "data": 2},
    {"pipeline": 2, "micro_batches": 8, "data": 2, "zero": 2, "recompute": "selective"},
    {"pipeline": 2, "micro_batches": 8, "tensor": 2, "schedule": "gpipe"},
    {"pipeline": 2, "micro_batches": 8, "data": 2, "zero": 3, "schedule": "interleaved_1f1b"},
    {"pipeline": 2, "micro_batches": 8, "data": 2, "zero": 2, "schedule": "2bw"},
    {"pipeline": 2, "micro_batches": 8, "data": 2, "zero": 3, "schedule": "2bw"},
    {"pipeline": 2, "micro_batches": 8, "data": 2, "schedule": "zbv", "recompute": "full"},
)


def fullest_of(graph: Graph, pin: dict[str, Any], memory: str = "1 GiB") -> PeakReport:
    """Of the plan that the search finds; what is alive is checked to add up."""
    found = search(graph, cluster(4, memory), whole(pin), Training())
    fullest = peak_micro_batched(found.assignment, found.staged)
    assert fullest.bytes == sum(held.all_bytes for held in fullest.alive) == found.staged.peak_bytes
    assert sum(fullest.by_use().values()) == fullest.bytes
    assert [held.all_bytes for held in fullest.alive] == sorted((h.all_bytes for h in fullest.alive), reverse=True)
    return fullest


@pytest.mark.parametrize("pin", PINS, ids=str)
@pytest.mark.parametrize("which", ["residual", "shared"])
def test_what_is_named_adds_up_to_the_peak_use_by_use(pin: dict[str, Any], which: str) -> None:
    """Also where several blocks, perhaps of several stages, read one weight."""
    graph = GRAPH if which == "residual" else tied()
    fullest = fullest_of(graph, pin)
    names = {name for node in graph.nodes for name in (called(node), node.path) if name}
    others = (COMING, SENT, SECOND, WEIGHTS, "for stage ", "gathering", "a chunk", "gradients")
    assert all(any(name in held.name for name in (*others, *names)) for held in fullest.alive)
    assert not any(held.bytes < 0 for held in fullest.alive)


def tied() -> Graph:
    """The last layer reads a weight of the first one."""
    nodes = {node.name: node for node in GRAPH.nodes if node.name != "up5_w"}
    old = nodes["up5"]
    args = tuple((key, Ref("up0_w") if key == "weight" else value) for key, value in old.args)
    nodes["up5"] = Node(old.name, old.op, args, old.results, old.path)
    return Graph(tuple(nodes.values()), GRAPH.outputs)


def test_tensors_by_hand() -> None:
    """Two stages of 1f1b, two ranks each that share all weights: the first stage has two micro-batches in flight.

    A micro-batch is 4 samples, of which each rank has all, and of the wide hidden layer half.
    """
    fullest = fullest_of(GRAPH, {"pipeline": 2, "micro_batches": 16, "tensor": 2, "schedule": "1f1b"})
    assert (
        fullest.at == "backward layers.2.down: aten.linear.default, with 2 micro-batches in flight, on pipeline rank 0"
    )
    held = {each.name: (each.use, each.bytes, each.times) for each in fullest.alive}
    wide, narrow = 1024 * 4 // 2, 256 * 4
    sent = 4 * narrow  # a micro-batch, until its gradient comes: for that there is room, and what runs has had one
    assert held["values for stage 1 as they were sent"] == ("temporary", sent, 1)
    assert held["gradients for stage 0 that are coming"] == ("temporary", sent, 1)
    assert held["gradient of layers.2: add.Tensor"] == ("temporary", sent, 1)
    assert held["layers.0: add.Tensor"] == ("activations", sent, 2)
    assert held["x"] == ("activations", 64 * narrow, 1)  # with all its micro-batches
    assert held["layers.0: relu"] == ("activations", 4 * wide, 2)
    assert held["stem: linear"][2] == 2
    for name in ("layers.0.up.weight", "gradient of layers.0.up.weight", "state of layers.0.up.weight"):
        assert held[name][1] == 256 * 1024 * 4 // 2 * (2 if "state" in name else 1)


def test_gradients_are_there_twice_when_they_are_summed_over_ranks() -> None:
    fullest = fullest_of(GRAPH, {"pipeline": 2, "micro_batches": 16, "data": 2, "schedule": "1f1b", "zero": 0})
    assert fullest.at == "reducing gradients, on pipeline rank 0"
    held = {each.name: (each.use, each.bytes) for each in fullest.alive}
    for leaf in ("stem.weight", "layers.0.up.weight", "layers.2.down.bias"):
        assert held[f"gradient of {leaf}"] == held[f"sum over ranks of the gradient of {leaf}"]
    assert not any(": " in name for name in held)  # nothing of micro-batches
    pinned: dict[str, Any] = {"pipeline": 2, "micro_batches": 16, "schedule": "1f1b"}
    assert fullest_of(GRAPH, {**pinned, "tensor": 2}).at.startswith("backward")


def test_a_parameter_that_several_blocks_use_has_a_gradient_of_each() -> None:
    """On a rank that has both, and not where each of two ranks has one."""
    name = "gradient of layers.0.up.weight"
    for stages, graph, count in ((1, tied(), 2), (1, GRAPH, 1), (2, tied(), 1)):
        pin = {"pipeline": stages, "micro_batches": 16, "tensor": 4 // stages, "schedule": "1f1b"}
        fullest = fullest_of(graph, pin if stages > 1 else {"micro_batches": 16, "tensor": 4})
        assert sum(each.name == name for each in fullest.alive) == count
        assert all(each.bytes == 1024 * 256 * 4 // (4 // stages) for each in fullest.alive if each.name == name)


def test_gathered_once_are_parameters_and_gradients_in_all_versions() -> None:
    for schedule, versions in (("1f1b", 1), ("2bw", 2)):
        pin = {"pipeline": 2, "micro_batches": 8, "data": 2, "schedule": schedule}
        once, each = (fullest_of(GRAPH, {**pin, "zero": zero}) for zero in (2, 3))
        whole = 256 * 1024 * 4
        held = {each.name: (each.bytes, each.times) for each in once.alive if "layers.0.up.weight" in each.name}
        assert held["gathered layers.0.up.weight"] == (whole, versions)
        assert held["gradient of gathered layers.0.up.weight"] == (whole, versions)  # also of the batch before
        assert held["layers.0.up.weight"] == (whole // 2, 1)
        last = "layers.2.up.weight"  # of the block that works
        held = {other.name: (other.bytes, other.times) for other in each.alive if last in other.name}
        assert held[last] == (whole // 2, versions)
        bucket = 4 * (2 * 256 * 1024 + 256 + 1024) // 2  # one storage of all that a block reduces at once
        assert held[f"gradient of {last}"] == (bucket, versions)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_the_next_block_of_a_stage_gathers_is_on_its_way(recompute: str) -> None:
    """Whole, and this rank's parts behind one another: to the layer after, or to the one before that gathers again."""
    pin = {"pipeline": 2, "micro_batches": 8, "data": 2, "zero": 3, "schedule": "1f1b", "recompute": recompute}
    found = search(GRAPH, cluster(4), whole(pin), Training())
    (_, high, _), paths = found.staged.cut.bounds, [each.block.path for each in found.assignment.space.folded.instances]
    assert paths[:high] == ["stem", "layers.0", "layers.1", "layers.2"]
    layer_bytes = 4 * (2 * 256 * 1024 + 256 + 1024) * 3 // 2
    first, _ = found.staged.alive.runs
    levels, forward = [*first.levels], first.on_the_way
    assert [sum(each) for each in forward] == [
        layer_bytes,
        layer_bytes,
        layer_bytes,
        0,
    ]  # nothing comes from another stage
    assert (recompute == "full") == (levels[1:] == ["full"] * 3)
    alive = fullest_of(GRAPH, pin).alive
    assert any(held.name == COMING for held in alive)
    once = search(GRAPH, cluster(4), whole({**pin, "zero": 2}), Training())
    assert once.staged is not None and not any(sum(each) for run in once.staged.alive.runs for each in run.on_the_way)


@pytest.mark.parametrize(
    "pin", [{"pipeline": 2, "micro_batches": 8, "tensor": 2, "schedule": "1f1b"}, {"data": 4}], ids=str
)
def test_plans_say_what_is_alive(pin: dict[str, Any]) -> None:
    """Without micro-batches and in several: the plan, its file, its report, its timeline, and explanations."""
    plan = plan_of(GRAPH, cluster(4), pin)
    predicted, fullest = plan.predicted, plan.fullest
    assert (fullest.bytes, fullest.at) == (predicted.peak_bytes, predicted.fullest_at)
    assert predicted.largest and {name for name, _ in predicted.largest} <= {name for name, _ in fullest.largest}
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again.predicted.largest == predicted.largest
    largest = predicted.largest[0][0]
    told = f"fullest in {predicted.fullest_at}"
    shown = unwrapped(plan)
    assert told in shown and f"with {largest}" in shown
    assert told in plan.to_html() and f"<td>{largest}</td>" in plan.to_html()
    explained = plan.explain("layers.0.up.weight", time_limit_s=0.5)
    assert all("layers.0.up.weight" in held.name for held in explained.alive)
    assert {held.use for held in explained.alive} >= {"parameters", "optimizer"}
    assert f"alive at the peak, {fullest.at}: " in str(explained)
    if "pipeline" in pin:
        drawn = plan.timeline()
        assert drawn.fullest.startswith(f"{told} with {largest}")
        assert all(drawn.fullest in shown for shown in (str(drawn), drawn.to_svg(), json.dumps(drawn.trace())))
        relu = plan.explain("layers.0")
        assert any(held.title == "layers.0: relu x 2" for held in relu.alive)
    with pytest.raises(PlanError, match="was read from a file"):
        again.fullest  # noqa: B018


def test_more_micro_batches_in_flight_hold_more_of_the_same() -> None:
    """When the first backward is over, and gradients are there."""
    few, many = (
        fullest_of(GRAPH, {"pipeline": 2, "micro_batches": n, "tensor": 2, "schedule": "gpipe"}) for n in (4, 8)
    )
    times = [{held.name: held.times for held in each.alive}["layers.0: relu"] for each in (few, many)]
    assert times == [3, 7]


def test_while_the_first_backward_runs_gradients_are_those_of_what_is_undone() -> None:
    """With gpipe, where more is saved of one micro-batch than gradients take."""
    graph = residual_mlp(layers=6, batch=8192)
    fullest = fullest_of(graph, {"pipeline": 2, "micro_batches": 4, "tensor": 2, "schedule": "gpipe"}, "8 GiB")
    assert fullest.at == "backward layers.5: aten.relu.default, with 4 micro-batches in flight, on pipeline rank 1"
    came = {f"gradient of {layer}.{name}" for layer in ("head", "layers.5.down") for name in ("weight", "bias")}
    assert {held.name for held in fullest.alive if held.use == "gradients"} == came
    assert {held.times for held in fullest.alive if held.name.endswith("relu") and "of" not in held.name} == {4}


def test_gradients_as_they_are_stored_come_when_those_of_a_block_are_sent() -> None:
    pin = {"pipeline": 2, "micro_batches": 8, "data": 2, "zero": 2, "schedule": "1f1b"}
    at_end = fullest_of(GRAPH, pin)
    assert at_end.at == "reducing gradients, on pipeline rank 0"
    held = {each.name: (each.use, each.bytes) for each in at_end.alive}
    whole = 256 * 1024 * 4
    assert held["gradient of layers.0.up.weight"] == ("gradients", whole // 2)
    sent = {name: size for name, (_, size) in held.items() if name.endswith("as it is sent")}
    (layer,) = {name.split(".up")[0].split(".down")[0] for name in sent}  # one block's at a time
    assert sent[f"{layer}.up.weight as it is sent"] == whole and sum(sent.values()) == 4 * (2 * 256 * 1024 + 256 + 1024)
    computing = fullest_of(residual_mlp(layers=6, batch=32768), pin, "8 GiB")
    assert "in flight" in computing.at and not any("sent to" in each.name for each in computing.alive)
    names = {each.name for each in computing.alive}
    assert "gradient of gathered layers.0.up.weight" in names and "gradient of layers.0.up.weight" not in names


def test_every_rank_is_given_all_inputs() -> None:
    """Also those that only blocks of another rank read."""
    found = search(GRAPH, cluster(4), whole({"pipeline": 2, "micro_batches": 8, "tensor": 2}), Training())
    alive, (x,) = found.staged.alive, (leaf for leaf in GRAPH.leaves if leaf.op == "input")
    assert [alive.given_bytes(rank) for rank in range(2)] == [0, x.results[0].size_bytes]
    own = sum(link.block.held_bytes for link in alive.links)
    assert sum(alive.held) == own + x.results[0].size_bytes
