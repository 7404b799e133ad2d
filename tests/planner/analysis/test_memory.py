"""What a step holds of memory, moment by moment: by hand on a small graph and by law on planned ones."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from planner.analysis.memory import LARGEST, Usage, usage
from planner.analysis.memory.steady_state import Wiring
from planner.analysis.memory.step import follow
from planner.analysis.memory.storages import USES, Direction, Held, Storage, StorageTracker
from planner.analysis.memory.walk import Walk
from planner.cost.cluster import ClusterSpec
from planner.cost.model import CostModel
from planner.formulation.assignment import assignment_of
from planner.formulation.constraints.pins import Pins
from planner.formulation.remat.levels import Amount, Recompute
from planner.formulation.search_space import Space
from planner.formulation.strategies import rules_of
from planner.formulation.training import Tier, Training
from planner.ir.folding import fold
from planner.ir.graph import Graph
from planner.ir.layout import Mesh
from planner.solve.choices.bound import lower_bounds
from tests.planner.plans import Build, cluster, filtered, plan_of, residual_mlp

PINS = (
    {"data": 4},
    {"data": 4, "zero": 3},
    {"tensor": 4},
    {"data": 2, "tensor": 2},
    {"data": 2, "tensor": 2, "zero": 3},
)


def usage_of(graph: Graph, pin: dict[str, int], on: ClusterSpec | None = None) -> Usage:
    assignment = plan_of(graph, on, pin=pin).assignment
    assert assignment is not None
    return usage(assignment)


def product(rows: int = 64, width: int = 32) -> Graph:
    """``mean(relu(x w))`` of ``x [rows, width]`` and a square ``w``, float32."""
    b = Build()
    x, w = b.leaf("x", rows, width), b.leaf("w", width, width, op="param")
    return b.mean(b.relu("relu", b.call("mm", "mm.default", rows, width, self=x, mat2=w)))


def test_a_product_by_hand() -> None:
    found = usage_of(product(), {"data": 4})
    activation, weight = 64 * 32 * 4 // 4, 32 * 32 * 4
    always = activation + weight + 2 * weight + weight  # input, parameter, Adam's moments, the last step's bucket
    at = dict(found.moments)
    # The relu holds its operand until it has its result; the result is what its backward needs.
    assert at["forward relu: aten.relu.default"] == always + 2 * activation
    # Its result, the gradient of that, and the gradient of its operand.
    assert at["backward relu: aten.relu.default"] == always + 3 * activation
    assert at["backward mm: aten.mm.default"] == always + activation + weight
    # The gradient alone: the copy of it that is summed over ranks lies in the bucket.
    assert at["backward sum of gradients"] == always + weight
    assert found.peak_bytes == always + 3 * activation
    assert sum(held.bytes for held in found.left if held.use == "gradients") == weight


def test_buckets_stay_on_the_host_alone() -> None:
    graph = product(rows=8)
    clusters = ClusterSpec.local(4), ClusterSpec.preset("dgx-h100", devices=4)
    at_host, at_gpu = (dict(usage_of(graph, {"data": 4}, each).moments) for each in clusters)
    weight = 32 * 32 * 4
    assert at_host["forward mm: aten.mm.default"] == at_gpu["forward mm: aten.mm.default"] + weight
    assert at_host["backward sum of gradients"] == at_gpu["backward sum of gradients"]


@pytest.mark.parametrize("pin", PINS, ids=str)
def test_what_is_left_is_what_a_step_keeps(pin: dict[str, int]) -> None:
    graph = residual_mlp()
    plan = plan_of(graph, pin=pin)
    found = usage(plan.assignment)
    left = Counter[str]()
    for held in found.left:
        left[held.use] += held.bytes
    assert left["gradients"] == left["parameters"]
    assert left["optimizer"] == 2 * left["parameters"]
    inputs = sum(node.results[0].size_bytes for node in graph.leaves if node.op == "input")
    assert left["activations"] == inputs // dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)).get("data", 1)
    assert left["temporary"] == left["gathered"] == 0


@pytest.mark.parametrize("pin", PINS, ids=str)
def test_the_peak_is_what_is_alive_then(pin: dict[str, int]) -> None:
    found = usage_of(residual_mlp(), pin)
    assert found.peak_bytes == sum(held.bytes for held in found.alive) == max(size for _, size in found.moments)
    assert set(found.by_use()) == set(USES)
    assert sum(found.by_use().values()) == found.peak_bytes
    assert f"{found.peak_bytes:,} bytes in {found.peak_at}" in str(found)


def test_activations_grow_with_depth_and_other_bytes_too() -> None:
    sizes = [usage_of(residual_mlp(layers), {"data": 4}).peak_bytes for layers in (2, 3, 4, 5)]
    steps = [b - a for a, b in itertools.pairwise(sizes)]
    assert len(set(steps)) == 1
    assert steps[0] > 0


def test_zero_3_holds_less_and_shows_what_is_gathered() -> None:
    whole, cut = (usage_of(residual_mlp(), {"data": 4, "zero": zero}).by_use() for zero in (0, 3))
    assert cut["optimizer"] * 4 == whole["optimizer"]
    assert cut["gathered"] > 0
    assert whole["gathered"] == 0


DEEP = 40
LEVELS_OF_LAYERS = {
    "nothing again": Amount(),
    "some of each": Amount.of({"full": 12, "selective": 13, "gathered": 14}),
    "but a few": Amount.of({"full": DEEP - 4}),
}


def deep(pin: Mapping[str, Any], amount: Amount, spec: ClusterSpec, tier: Tier = "device") -> Wiring:
    """Layers that each read an early value and the layer before, some of which recompute."""
    pins, graph = Pins.parse(pin), residual_mlp(DEEP, width=32, early=True)
    mesh = Mesh.of(**{axis: size for axis, size in pin.items() if axis != "zero"})
    folded, rules = fold(graph), rules_of(graph)
    space = Space(folded, mesh, CostModel(spec), Training(tier=tier), rules, *filtered(pins, graph, rules, mesh))
    amounts = tuple(amount if len(each) > 1 else Amount() for each in folded.kinds)
    choices = lower_bounds(space.problem(None)).choices
    assert choices is not None
    return Wiring(assignment_of(space, choices, Recompute(amounts)))


@pytest.mark.parametrize("amount", LEVELS_OF_LAYERS.values(), ids=LEVELS_OF_LAYERS)
@pytest.mark.parametrize("pin", [PINS[0], PINS[1], PINS[4]], ids=str)
def test_what_repeats_need_not_be_followed(pin: dict[str, int], amount: Amount) -> None:
    gpus = ClusterSpec.preset("dgx-h100", devices=4)
    on: tuple[tuple[ClusterSpec, Tier], ...] = ((cluster(), "device"), (gpus, "device"), (gpus, "host"))
    for spec, tier in on:
        wiring = deep(pin, amount, spec, tier)
        some, every = usage(wiring.assignment), follow(Walk(wiring, []))
        assert len(some.moments) < len(every.moments)
        assert max(size for _, size in some.moments) == some.peak_bytes == every.peak_bytes
        assert some.peak_at == every.peak_at
        assert some.by_use() == every.by_use()
        assert [(each.name, each.bytes) for each in some.alive[:LARGEST]] == [
            (each.name, each.bytes) for each in every.alive[:LARGEST]
        ]
        assert some.by_block == every.by_block
        assert some.read_again == every.read_again
        for held in (lambda found: found.alive), (lambda found: found.kept), (lambda found: found.left):
            assert by_use_and_bytes(held(some)) == by_use_and_bytes(held(every))


@pytest.mark.parametrize("layers", range(13, 21))
def test_values_may_outlive_what_is_not_followed(layers: int) -> None:
    """Every layer reads what the two before it made."""
    b = Build()
    made = [b.leaf("x", 64, 32)] * 2
    for number in range(layers):
        path = f"layers.{number}"
        relu = b.relu(f"r{number}", b.linear(f"y{number}", made[-1], 32, path), path)
        made.append(b.add(f"a{number}", relu, made[-2], path))
    plan = plan_of(b.mean(made[-1]), pin={"data": 4, "recompute": "none", "zero": 0})
    some, every = usage(plan.assignment), follow(Walk(Wiring(plan.assignment), []))
    assert (some.peak_bytes, some.by_use(), some.by_block) == (every.peak_bytes, every.by_use(), every.by_block)


def by_use_and_bytes(held: Iterable[Held]) -> Counter[tuple[str, int]]:
    """How many storages there are of each use and size."""
    found = Counter[tuple[str, int]]()
    for each in held:
        if each.bytes:
            found[each.use, each.bytes] += each.times
    return found


def test_what_does_not_repeat_evenly_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    wiring = deep({"data": 4}, Amount(), cluster())
    every = follow(Walk(wiring, []))
    repeat = StorageTracker.repeat

    def forgetful(heap: StorageTracker, direction: Direction, numbers: range, times: int) -> list[Storage]:
        return repeat(heap, direction, numbers, times)[1:]  # of which one will not be freed

    monkeypatch.setattr(StorageTracker, "repeat", forgetful)
    assert usage(wiring.assignment) == every
