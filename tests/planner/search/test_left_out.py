"""What a model leaves out of the space is said with its reason, and is an error where a pin asks for it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from planner.base.errors import InfeasibleError, PinError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.ir.graph import Graph, Ref
from planner.search.branch_and_bound import Searched
from planner.search.search import search
from tests.planner.plans import WHOLE, Build, residual_mlp
from tests.planner.search.test_optimum import random_cluster

GRAPH = residual_mlp(layers=2, width=64, batch=64)


def planned(graph: Graph, pin: dict[str, Any] | None = None, memory: int | str = "64 MiB", **options: Any) -> Searched:
    spec = ClusterSpec.local(4, memory, cores=2, host_memory_bytes="1 GiB")
    return search(graph, spec, Pins.parse(pin), Training(), **options)


def mixing(layers: int = 1) -> Graph:
    """``x - mean of x over the batch``: no micro-batch is done before all have begun."""
    b = Build()
    y = b.leaf("x", 64, 32)
    for layer in range(layers):
        y = b.linear(f"y{layer}", y, 32)
    m = b.call("m", "mean.dim", 32, self=y, dim=(0,), keepdim=False, dtype=None)
    return b.mean(b.relu("r", b.call("c", "sub.Tensor", 64, 32, self=y, other=m, alpha=1)))


def no_loss() -> Graph:
    *nodes, _ = GRAPH.nodes
    return Graph(tuple(nodes), (Ref(nodes[-1].name),))


@pytest.mark.parametrize(
    "graph, pin, options, said",
    [
        (no_loss(), {}, {}, "pipelines and micro-batches, since the model returns no loss"),
        (GRAPH, {}, {"folding": False}, "pipelines and micro-batches, since folding is off"),
        (
            GRAPH,
            {"offload": "host", "update": "backward"},
            {},
            "pipelines and micro-batches, since pin 'update' is",
        ),
        (mixing(), {}, {}, "micro-batches, since sub.Tensor on operands of shapes (64, 32), (32,) mixes samples"),
    ],
    ids=["no loss", "folding off", "updates in backward", "mixed samples"],
)
def test_what_cannot_be_is_left_out_and_said(
    graph: Graph, pin: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    found = planned(graph, pin, **options)
    assert found.left_out.startswith(said) and found.staged is None
    assert not any(each.config.micro_batched for each in found.candidates)
    assert planned(graph, {**pin, **WHOLE}, **options).left_out == ""
    assert planned(GRAPH).left_out == ""


def test_a_batch_that_cannot_be_cut_passes_a_pipeline_whole_where_nothing_else_fits() -> None:
    pin = {"zero": 0, "offload": "none"}
    room = 3 * planned(mixing(8), {**pin, "pipeline": 4}, memory="1 GiB").peak_bytes // 2
    found = planned(mixing(8), pin, memory=room)
    assert found.best.config.stages > 1 and found.best.config.mesh.micro_batches == 1
    assert found.left_out.startswith("micro-batches, since sub.Tensor")


def test_pins_that_ask_for_it_are_refused() -> None:
    with pytest.raises(PinError, match=r"no micro-batches can be cut .* mixes samples"):
        planned(mixing(), {"micro_batches": 2})
    with pytest.raises(PinError, match="are a pipeline's, and left out are pipelines and micro-batches, since the mo"):
        planned(no_loss(), {"schedule": "1f1b"})


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_where_all_fits_micro_batches_without_stages_would_only_save_memory(seed: int) -> None:
    """So they are not looked at there: none of their plans is faster, whatever the cluster."""
    spec = random_cluster(random.Random(seed), (2, 2))
    found = search(GRAPH, spec, Pins.parse({"pipeline": 1}), Training())
    assert found.status == "optimal" and not any(each.config.micro_batched for each in found.candidates)
    for micro_batches in (2, 8):
        pins = Pins.parse({"pipeline": 1, "micro_batches": micro_batches})
        parts = search(GRAPH, spec, pins, Training(), gap=0.1)
        assert parts.evaluation.time_s >= found.evaluation.time_s * (1 - 1e-9)


def test_devices_that_can_share_no_operator_share_the_blocks() -> None:
    """A batch of one, and widths of prime numbers, where one has no room for all of them."""
    b = Build()
    value = b.leaf("x", 1, 61)
    for layer in range(4):
        value = b.linear(f"layer{layer}", value, 61, f"layers.{layer}")
    graph, spec = b.mean(value), ClusterSpec.local(2, "200 KiB", cores=2)
    with pytest.raises(InfeasibleError):
        search(graph, spec, Pins.parse(WHOLE), Training())
    assert search(graph, spec, Pins(), Training()).best.config.stages == 2
