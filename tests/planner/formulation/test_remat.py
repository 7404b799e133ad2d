"""What a block recomputes at each level, the frontier of amounts, and their laws."""

from __future__ import annotations

from collections import Counter

import pytest

from planner.formulation.remat.backward_slice import Again, Backward
from planner.formulation.remat.levels import (
    COMPUTED,
    LEVELS,
    Amount,
    Recompute,
    pareto_frontier,
)
from planner.ir.folding import fold
from planner.ir.graph import Graph
from tests.planner.plans import Build, named, plan_of, residual_mlp

GRAPH = residual_mlp(layers=4)
FOLDED = fold(GRAPH)
LAYER = next(kind for kind, instances in enumerate(FOLDED.kinds) if len(instances) == 4)


def names_of(found: Again, attribute: str) -> set[str]:
    nodes = FOLDED.kinds[LAYER][0].block.nodes
    return {nodes[at].name for at in getattr(found, attribute)}


def analysed(level: str) -> Again:
    return Backward(GRAPH, FOLDED.kinds[LAYER][0].block).again(level)  # type: ignore[arg-type]


def test_a_layer_keeps_its_contractions_or_nothing() -> None:
    """``value + down(relu(up(value)))``: ``down`` needs the relu, recomputed from ``up``, or from ``value``."""
    selective, full = analysed("selective"), analysed("full")
    assert names_of(selective, "lasting") == {"up0", "down0"} and not full.lasting
    assert names_of(selective, "operators") == {"relu0"}
    assert names_of(full, "operators") == {"up0", "relu0"}  # the sum and ``down`` serve no gradient in the layer
    nodes = [node.name for node in FOLDED.kinds[LAYER][0].block.nodes]
    up, relu, down = (nodes.index(name) for name in ("up0", "relu0", "down0"))
    assert selective.dropped[down] == full.dropped[down] == ()  # the relu counts where it is needed first:
    assert selective.dropped[relu] == full.dropped[relu] == (1,)
    assert selective.kept[relu] == (0,) and full.kept[relu] == ()
    # Weights are converted again wherever their operator needs them; what a kept operator made is not.
    assert full.taken[up] == {0, 1, 2} and selective.taken[up] == {0, 1}
    assert selective.taken[relu] == frozenset() and full.taken[relu] == {0}


def dropping(rate: float) -> Graph:
    """Layers of ``value + dropout(linear(attention(dropout(value))))``."""
    b, shape = Build(), (2, 4, 16, 8)
    value = b.leaf("x", *shape)
    options = {"attn_mask": None, "dropout_p": rate, "is_causal": False, "scale": None, "enable_gqa": False}
    for i in range(4):
        path = f"layers.{i}"
        noisy = b.call(f"before{i}", "dropout.default", *shape, path=path, input=value, p=rate, train=True)
        attention = {"query": noisy, "key": noisy, "value": noisy, **options}
        mixed = b.call(f"attention{i}", "scaled_dot_product_attention.default", *shape, path=path, **attention)
        down = b.linear(f"down{i}", mixed, 8, path)
        dropped = b.call(f"after{i}", "dropout.default", *shape, path=path, input=down, p=rate, train=True)
        value = b.add(f"add{i}", value, dropped, path)
    return b.mean(value)


def test_what_was_drawn_is_drawn_again() -> None:
    """To draw a mask again takes its operand: the last product too. Without dropout attention draws nothing."""
    found = {}
    for rate in (0.1, 0.0):
        graph = dropping(rate)
        block = max(fold(graph).kinds, key=len)[0].block
        for level in ("full", "selective"):
            each = Backward(graph, block).again(level)  # type: ignore[arg-type]
            names = [node.name[:-1] for node in block.nodes]
            found[rate, level] = tuple({names[at] for at in places} for places in (each.operators, each.drawing))
            masks = {name for name, places in zip(names, each.dropped, strict=True) if name != "attention" and places}
            assert masks == ({"before", "after"} if rate else set())  # as large as what is dropped
    assert found == {
        (0.1, "full"): ({"before", "attention", "down", "after"}, {"before", "attention", "after"}),
        (0.1, "selective"): ({"before", "after"}, {"before", "after"}),
        (0.0, "full"): ({"before", "attention"}, set()),
        (0.0, "selective"): ({"before"}, set()),
    }


def test_the_ladder_goes_from_nothing_to_everything() -> None:
    steps, kinds = pareto_frontier(FOLDED, named(FOLDED)), len(FOLDED.kinds)
    assert [step.amounts[LAYER] for step in steps] == [
        *([Amount()] * LAYER),
        *(Amount.of({"gathered": some}) for some in range(5)),
        *([Amount.of({"gathered": 4})] * (kinds - LAYER - 1)),
        *(Amount.of({"resharded": some, "gathered": 4 - some}) for some in range(1, 5)),
        *(Amount.of({"selective": some, "resharded": 4 - some}) for some in range(1, 5)),
        *(Amount.of({"full": full, "selective": 4 - full}) for full in range(1, 5)),
    ]
    assert not steps[0] and all(steps[1:])
    assert pareto_frontier(FOLDED, named(FOLDED, ("none",), ("none",))) == steps[:1]
    for level, step in (("gathered", kinds + 3), ("resharded", kinds + 7), ("selective", kinds + 11), ("full", -1)):
        assert pareto_frontier(FOLDED, named(FOLDED, (level,), ("gathered",))) == (steps[step],)
    assert pareto_frontier(FOLDED, named(FOLDED, LEVELS[1:], ("gathered",))) == steps[kinds + 3 :]
    held = pareto_frontier(FOLDED, named(FOLDED, COMPUTED, ("none",)))
    assert len(held) == 13 and not any(amount.count("gathered") for step in held for amount in step.amounts)
    assert len(pareto_frontier(FOLDED, named(FOLDED, ("full",)))) == kinds


def test_levels_go_to_the_first_instances() -> None:
    amounts = Recompute((Amount(), Amount.of({"gathered": 1, "selective": 2, "full": 1}), Amount()))
    assert [amounts.level(1, nth) for nth in range(5)] == ["full", "selective", "selective", "gathered", "none"]
    assert amounts.levels(1) == (("full", range(1)), ("selective", range(1, 3)), ("gathered", range(3, 4)))
    assert amounts.levels(0) == ()
    without = Recompute((Amount(), Amount.of({"full": 1, "selective": 2}), Amount()))
    assert amounts.without_gathered() == without
    assert amounts.mapped(lambda kind, level: "none" if (kind, level) == (1, "gathered") else level) == without
    assert amounts.mapped(lambda kind, level: "none" if kind == 0 else level) == amounts
    both = Amount.of({"resharded": 1, "gathered": 2, "full": 1})
    lowered = both.mapped(lambda level: "gathered" if level == "resharded" else level)
    assert lowered == Amount.of({"gathered": 3, "full": 1})


def test_zero_3_gathers_again_what_zero_2_holds() -> None:
    plans = [plan_of(GRAPH, pin={"data": 4, "zero": zero, "recompute": "none"}) for zero in (0, 2, 3)]
    whole, held, again_ = plans
    assert not any(b.recompute for plan in (whole, held) for b in plan.blocks)
    # The stem's input has no gradient, so that backward does not need its weight.
    assert {b.name: dict(b.recompute) for b in again_.blocks if b.recompute} == {
        "layers.*": {"gathered": 4},
        "head": {"gathered": 1},
    }
    gathers = []
    for plan in plans:
        gathers.append(Counter[str]())
        for call, count in plan.predicted.collectives:
            gathers[-1][call.phase] += count if call.kind == "all_gather" else 0
    assert [(each["forward"], each["backward"]) for each in gathers] == [(0, 0), (6, 0), (6, 5)]
    assert again_.predicted.peak_bytes < held.predicted.peak_bytes < whole.predicted.peak_bytes
    times = [plan.predicted.time_s["communication"] for plan in plans]
    assert times[0] < times[1] < times[2] < 2 * times[1]
    assert all(plan.certificate.holds for plan in plans)


@pytest.mark.parametrize("level", ["selective", "full"])
def test_a_pinned_level_is_planned_predicted_and_read_back(level: str) -> None:
    plan = plan_of(GRAPH, pin={"data": 4, "zero": 3, "recompute": level})
    free = plan_of(GRAPH, pin={"data": 4, "zero": 2, "recompute": "none"})
    layers = {"layers.*": {level: 4}}
    assert {b.name: dict(b.recompute) for b in plan.blocks if b.recompute} == layers | {"head": {"gathered": 1}}
    holding = plan_of(GRAPH, pin={"data": 4, "zero": 2, "recompute": level})
    assert {b.name: dict(b.recompute) for b in holding.blocks if b.recompute} == layers
    assert plan.predicted.time_s["recompute"] > 0 == free.predicted.time_s["recompute"]
    assert sum(plan.predicted.time_s.values()) == pytest.approx(plan.predicted.step_time_s)
    assert plan.predicted.peak_bytes < free.predicted.peak_bytes
    assert plan.certificate.holds
    assert type(plan).from_dict(plan.to_dict()).blocks == plan.blocks
