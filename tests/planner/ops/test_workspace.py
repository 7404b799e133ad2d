"""What an operator needs while it runs, by hand, and the search's own sum of memory beside the timeline."""

from __future__ import annotations

import pytest

from planner.analysis.memory import usage
from planner.ir.graph import Graph
from planner.ir.layout import I, Layout, P, R, Shard
from planner.ops.workspace import Working, working
from tests.planner.plans import Build, cluster, plan_of, residual_mlp


def made() -> Graph:
    b = Build()
    x, w = b.leaf("x", 8, 4), b.leaf("w", 4, 4, op="param")
    mm = b.call("mm", "mm.default", 8, 4, self=b.call("first", "mm.default", 8, 4, self=x, mat2=w), mat2=w)
    added = b.add("add", b.relu("relu", mm), mm)
    view = b.call("view", "view.default", 32, self=b.add("twice", added, added), size=(32,))
    return b.mean(b.call("strange", "house.strange.default", 32, value=view))


GRAPH = made()


def of(name: str) -> Working:
    return working(GRAPH, GRAPH.by_name[name])


def needs(name: str, *layouts: Layout) -> int:
    """Bytes where every tensor is whole on a rank, and has one of these layouts."""
    node = GRAPH.by_name[name]
    sizes = [tensor.size_bytes for tensor in (*GRAPH.input_types(node), *node.results)]
    return max(of(name).moments(sizes, layouts or ((Shard(0),),) * len(sizes)))


def most(name: str, sizes: tuple[int, ...], layouts: tuple[Layout, ...]) -> int:
    return max(of(name).moments(sizes, layouts))


def test_what_is_saved_and_parameters_are_held_already() -> None:
    activation, weight = 8 * 4 * 4, 4 * 4 * 4
    assert of("mm").forward == (2,) and of("mm").parameters == (1,)
    assert needs("mm") == 2 * activation + weight  # backward: gradients of its result and of both operands
    assert of("relu").forward == (0,)  # its result is saved
    assert needs("relu") == 2 * activation
    assert of("strange").forward == ()  # backward of an operator that no table knows may need all of it


def test_a_gradient_that_is_passed_on_takes_nothing() -> None:
    activation = 8 * 4 * 4
    assert of("add").backward == (2,) and needs("add") == 3 * activation  # forward
    assert of("twice").forward == (0, 2) and needs("twice") == 2 * activation  # one tensor, read twice
    assert of("view") == Working() and needs("view") == 0


def test_a_sum_over_ranks_is_made_beside_its_terms() -> None:
    activation = 8 * 4 * 4
    whole, term = ((R,), (R,), (I,)), ((Shard(1),), (Shard(0),), (P,))
    assert most("first", (activation, 0, activation), term) == 2 * activation
    assert most("first", (activation, 0, activation), whole) == activation  # the gradient of its result alone
    assert most("mm", (activation, 0, 0), whole) == 2 * activation  # that of its operand, and the sum of that
    assert most("mm", (activation, 0, 0), term) == activation


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("pin", [{"data": 4}, {"data": 4, "zero": 3}, {"data": 2, "tensor": 2}], ids=str)
def test_the_sum_is_the_timeline_or_more(pin: dict[str, object], recompute: str) -> None:
    """More by the gradients, which come into being when activations go, and by little else; but for the parameters of
    the next layer, which are gathered ahead.
    """
    plan = plan_of(residual_mlp(layers=6, batch=4096), cluster(4), {**pin, "recompute": recompute})
    found = usage(plan.assignment)
    gradients = sum(held.bytes for held in found.left if held.use == "gradients")
    hidden = 4096 // 4 * 1024 * 4  # the widest tensor of a layer, its samples on as many ranks as there are
    ahead = 4 * (2 * 256 * 1024 + 256 + 1024) if "zero" in pin else 0
    assert found.peak_bytes - ahead <= plan.certificate.peak_bytes <= found.peak_bytes + gradients + 2 * hidden
