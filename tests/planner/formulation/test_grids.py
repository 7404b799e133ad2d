"""Grids: what pins of two and three axes make of a model, what that moves, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from planner.analysis.prediction import predict
from planner.base.errors import PinError
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.ir.graph import Graph, Ref
from planner.ir.layout import Shard
from planner.search.search import search
from tests.planner.plans import Build, cluster, plan_of, residual_mlp, whole

COLUMNS, PANELS = {"layers.*": {"column": "n"}}, {"layers.*": {"column": "n.panels"}}
SWAPPED = {"layers.*.up": {"input": "n", "output": "k"}, "layers.*.down": {"input": "k", "output": "n"}}
ITEM = 4
"""Bytes of an element."""
MOVED = {
    "all_gather": lambda ranks: ranks - 1,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "send": lambda ranks: 1,
}
"""What a rank sends in a ring, as times what it passes in."""


def transformer(layers: int, batch: int = 4, hidden: int = 64, length: int = 16) -> Graph:
    """Norms, products to four times the hidden size and back, and residuals; no biases, and nothing is affine."""
    b = Build()
    value = b.linear("stem", b.leaf("x", batch, length, hidden), hidden, "stem")
    for i in range(layers):
        path = f"layers.{i}"
        normed = b.relu(f"before{i}", value, path)
        wide = b.relu(f"relu{i}", b.linear(f"up{i}", normed, 4 * hidden, f"{path}.up"), path)
        value = b.add(f"add{i}", value, b.linear(f"down{i}", wide, hidden, f"{path}.down"), path)
    norm = {"normalized_shape": (hidden,), "weight": None, "bias": None, "eps": 1e-5, "cudnn_enable": True}
    value = b.call("norm", "layer_norm.default", batch, length, hidden, path="norm", input=value, **norm)
    return b.mean(b.linear("head", value, hidden, "head"))


def found(graph: Graph, ranks: int, pin: dict[str, Any]) -> Assignment:
    return search(graph, cluster(ranks), whole(pin), Training()).assignment


def moved(assignment: Assignment) -> float:
    """Elements that a rank sends in a step, all calls together."""
    mesh = assignment.space.mesh
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    calls = predict(assignment, 0.0).collectives
    return sum(count * MOVED[call.kind](sizes[call.axis]) * call.bytes_in / ITEM for call, count in calls)


@pytest.mark.parametrize("batch", [4, 8])
@pytest.mark.parametrize(
    "ranks, pin, volume",
    [
        # Of Y[M, N] = X[M, K] W[K, N], forward and backward; each gathered operand once more, or kept (3-D, 1-D).
        (4, {"tensor": [2, 2], "layers": COLUMNS, "recompute": "full"}, lambda mk, kn, mn: 3 / 4 * (mk + kn)),
        (16, {"tensor": [4, 4], "layers": COLUMNS, "recompute": "full"}, lambda mk, kn, mn: 9 / 16 * (mk + kn)),
        (
            8,
            {"tensor": [2, 2], "depth": 2, "layers": COLUMNS, "recompute": "full"},
            lambda mk, kn, mn: 3 / 4 * (mk / 2 + kn) + 2 / 2 * kn / 4,
        ),
        (4, {"tensor": [2, 2], "layers": PANELS, "recompute": "resharded"}, lambda mk, kn, mn: 3 / 4 * (mk + kn)),
        (
            8,
            {"tensor": [2, 2, 2], "layers": SWAPPED, "recompute": "none"},
            lambda mk, kn, mn: 2 / 8 * (mk + kn + mn),
        ),
        (
            8,
            {"tensor": 8, "layers": {"*.up": {"tensor": "n"}, "*.down": {"tensor": "k"}}, "recompute": "none"},
            lambda mk, kn, mn: 2 * 7 / 8 * 2 / 5 * mk,
        ),
    ],
)
def test_a_layer_moves_what_formulas_say(batch: int, ranks: int, pin: dict[str, Any], volume: Any) -> None:
    """Of every call of one layer: Optimus 3(q-1)/q^2 (MK + KN); with depth d 3(q-1)/q^2 (MK/d + KN) + 2(d-1)/d KN/q^2;
    3-D 2(q-1)/q^3 (MK + KN + MN); 1-D an all-reduce of what enters and of what leaves.
    """
    three, two = (moved(found(transformer(layers, batch), ranks, pin)) for layers in (3, 2))
    tokens, hidden = 16 * batch, 64
    mk = mn = tokens * (hidden + 4 * hidden)
    assert three - two == volume(mk, 2 * 4 * hidden**2, mn)


def test_everything_is_shared_by_all_ranks_of_a_grid() -> None:
    for ranks, tensor in ((4, [2, 2]), (8, [2, 2, 2])):
        layers = COLUMNS if ranks == 4 else SWAPPED
        assignment = found(transformer(2, batch=8), ranks, {"tensor": tensor, "layers": layers})
        for name in ("up0_w", "down1_w", "before0", "relu1", "norm"):
            layout = assignment.produced(Ref(name))
            assert all(isinstance(each, Shard) for each in layout), f"{name} is {layout}"


def test_streamed_products_hide_what_goes_around_and_save_shards() -> None:
    rings = {"*.up": {"tensor": "n.ring"}, "*.down": {"tensor": "k.ring"}}
    graph, spec = transformer(2, batch=8, hidden=4096, length=4096), ClusterSpec.preset("dgx-h100")
    whole_, streamed = (
        search(graph, spec, whole({"tensor": 8, "layers": layers, "recompute": "none"}), Training())
        for layers in ({"*.up": {"tensor": "n"}, "*.down": {"tensor": "k"}}, rings)
    )
    waits = [predict(each.assignment, 0.0).time_s["communication"] for each in (streamed, whole_)]
    assert waits[0] < waits[1] / 4 and streamed.best.evaluation.time_s < whole_.best.evaluation.time_s
    assert streamed.memory is not None and whole_.memory is not None
    assert streamed.memory.saved_bytes < whole_.memory.saved_bytes / 2
    up = streamed.assignment.choice(graph.by_name["up1"])
    assert (up.operands[0], up.results[0]) == ((Shard(1),), (Shard(2),))
    free = search(graph, spec, whole({"tensor": 8, "streamed": True}), Training()).assignment
    assert free.choice(graph.by_name["up1"]) == up, "found where there are enough tokens"
    short = transformer(2, batch=8, hidden=4096, length=64)
    for few in (search(short, spec, whole({"tensor": 8, "streamed": True}), Training()), whole_):
        assert not any(axis.way.streamed for node in short.operators for axis in few.assignment.choice(node).axes)
    with pytest.raises(PinError, match=r"n.ring has size 2, which 4 ranks do not divide"):
        found(transformer(2, length=6), 4, {"tensor": 4, "layers": rings})


def test_pins_keep_their_form() -> None:
    for pin in ({"data": 2, "tensor": [2, 4], "streamed": True}, {"depth": 2, "tensor": [4, 4]}, {"tensor": [2, 2, 3]}):
        assert Pins.parse(pin).to_dict() == pin
    assert Pins.parse({"depth": 2, "tensor": (2, 2)}).sizes == {"depth": 2, "row": 2, "column": 2}
    plan = plan_of(transformer(2, batch=8), cluster(8), {"tensor": [2, 2]})
    assert plan.mesh.names == ("data", "row", "column"), "data has the ranks that are left"


@pytest.mark.parametrize(
    "graph, devices, pin, message",
    [
        (transformer(2), 4, {"tensor": [4]}, r"pin 'tensor' is \[4\]; .* \[row, column\], or three, \[input, output"),
        (transformer(2), 4, {"tensor": "2x2"}, r"pin 'tensor' is '2x2'; .* the ranks along each axis of a grid: two"),
        (transformer(2), 4, {"depth": 2}, "share the batch, and pin 'tensor' is not given: pin 'tensor' to"),
        (transformer(2), 4, {"tensor": [2, 0]}, r"pin 'tensor' is \[2, 0\]; .* whole numbers from 1"),
        (transformer(2), 4, {"row": 2, "column": 2}, "no decision called 'column', 'row'; known: .*depth"),
        (transformer(2), 4, {"2.5d": 4}, r"for '2.5d' pin 'tensor': \[row, column\] and 'depth'"),
        (
            transformer(2),
            4,
            {"tensor": [2, 2], "layers": {"*": {"tensor": "n"}}},
            "no axis 'tensor'; the mesh has row, column$",
        ),
        (transformer(2), 4, {"depth": 2, "tensor": 2}, "pin 'depth' is how many 2-D grids .* pin 'tensor' is 2: pin"),
        (transformer(2), 8, {"depth": 2, "tensor": [1, 2, 2]}, "pin 'depth' is how many 2-D grids"),
        (
            transformer(2),
            4,
            {"tensor": [2, 2], "sequence_parallel": True},
            r"'sequence_parallel' is True, but a grid, pin 'tensor' \[2, 2\], shards norms and residuals",
        ),
        (transformer(2), 8, {"depth": 3, "tensor": [2, 2]}, "pinned depth 3 x row 2 x column 2 = 12 does not divide"),
        (
            residual_mlp(layers=2, width=64, batch=20),
            16,
            {"depth": 4, "tensor": [2, 2]},
            r"the product of pins 'depth' and 'tensor' \(row\) is 8 but input 'x' has a batch of 20",
        ),
        (transformer(2), 4, {"tensor": 4, "streamed": 2}, "pin 'streamed' is 2; it is True or False"),
        (transformer(2), 3, {"tensor": [1, 3]}, "pin 'tensor': axis 'column' is 3, .* hidden dim .* none: 64; pin"),
    ],
)
def test_refuses_grids_that_cannot_be(graph: Graph, devices: int, pin: dict[str, Any], message: str) -> None:
    with pytest.raises(PinError, match=message):
        plan_of(graph, cluster(devices), pin)
