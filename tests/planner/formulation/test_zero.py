"""ZeRO by module: parameters are stored and gathered as pinned, the rest as the search says; what cannot be is said."""

from __future__ import annotations

import math
from dataclasses import replace
from html import unescape
from typing import Any

import pytest

from planner.base.errors import PinError, PlanError
from planner.cost.model import CostModel
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.pins import Pins
from planner.formulation.search_space import Space
from planner.formulation.strategies import rules_of
from planner.formulation.training import Training
from planner.formulation.unsharding import PER_MICRO_BATCH
from planner.plan.document.fingerprint import model_facts
from planner.plan.plan import Plan, refold, restore
from tests.planner.plans import WHOLE, cluster, filtered, plan_of, residual_mlp, unwrapped

GRAPH = residual_mlp(layers=4, width=64, batch=48)
STEM, UP, DOWN, HEAD = ([f"{path}.weight", f"{path}.bias"] for path in ("stem", "layers.*.up", "layers.*.down", "head"))
ALL = (*STEM, *UP, *DOWN, *HEAD)


def sharded(plan: Plan) -> set[str]:
    """The parameters that the axis of the data, the last, stores in shards; a rank has all of the others."""
    found = {name for name, layout in plan.parameters.items() if layout.split()[-1].startswith("S")}
    for name in plan.parameters:
        leaf = plan.account.leaves[name]
        assert leaf.local_bytes * (plan.mesh.sizes[-1] if name in found else 1) == 4 * math.prod(leaf.shape)
    return found


def gathering_again(plan: Plan) -> dict[str, int]:
    """How many instances of blocks gather again in backward."""
    return {block.name: block.recompute["gathered"] for block in plan.blocks if "gathered" in block.recompute}


@pytest.mark.parametrize(
    "zero, stored, again",
    [
        ({"stem": 0, "head": 0, "layers.*": 3}, (*UP, *DOWN), {"layers.*": 4}),
        ({"stem": 2, "head": 0, "layers.*": 3}, (*STEM, *UP, *DOWN), {"layers.*": 4}),
        ({"*": 2}, ALL, {}),
        ({"head": 3, "layers.*": 1, "stem": 0}, (*UP, *DOWN, *HEAD), {"head": 1}),
        ({"*.bias": 0, "*": 3}, (STEM[0], UP[0], DOWN[0], HEAD[0]), {"layers.*": 4, "head": 1}),
        ({"stem": 0, "head": 0, "layers.*": 2, "*": 3}, (*UP, *DOWN), {}),
        ({"layers.*.up": 0, "layers.*": 3, "*": 0}, (*DOWN,), {"layers.*": 4}),
        ({"layers.?.up.weight": 3, "*": 0}, (UP[0],), {"layers.*": 4}),
        ({"layers": 3, "*": 0}, (*UP, *DOWN), {"layers.*": 4}),
        ({"layers.?": 3, "*": 0}, (*UP, *DOWN), {"layers.*": 4}),
    ],
    ids=str,
)
@pytest.mark.parametrize("recompute", ["none", None])
def test_the_first_glob_that_matches_says_how(
    zero: dict[str, int], stored: tuple[str, ...], again: dict[str, int], recompute: str | None
) -> None:
    pin: dict[str, Any] = {"zero": zero, **({"recompute": recompute} if recompute else {})}
    plan = plan_of(GRAPH, pin=pin)
    assert plan.mesh.names == ("data",)
    assert sharded(plan) == {*stored}
    assert gathering_again(plan) == again
    assert plan.certificate.holds
    assert f"zero {zero}" in str(plan) and "no data axis" not in str(plan)
    assert Plan.from_dict(plan.to_dict()) == plan and Pins.parse(plan.pin).to_dict()["zero"] == zero


@pytest.mark.parametrize(
    "devices, pin",
    [
        (1, {"zero": 3}),
        (1, {"zero": {"layers.*": 2}, "micro_batches": 2}),
        (4, {"zero": 0, "tensor": 4}),
        (4, {"zero": {"head": 0}, "data": 1, "tensor": 4}),
        (2, {"zero": 1, "pipeline": 2, "micro_batches": 2}),
    ],
    ids=str,
)
def test_the_report_says_where_there_is_nothing_to_store_on(devices: int, pin: dict[str, Any]) -> None:
    plan = plan_of(GRAPH, cluster(devices), pin)
    told = f"zero {pin['zero']} (there is no data axis to store parameters on)"
    assert told in unwrapped(plan) and told in unescape(plan.to_html())


@pytest.mark.parametrize(
    "micro_batches", [{}, {"micro_batches": 2, "pipeline": 1}, {"micro_batches": 2, "pipeline": 2}], ids=str
)
@pytest.mark.parametrize("way", [0, 1, 2, 3])
def test_one_way_for_all_is_the_same_however_it_is_written(way: int, micro_batches: dict[str, int]) -> None:
    plans = [
        plan_of(GRAPH, pin={"zero": zero, **micro_batches}) for zero in (way, {"*": way}, {"layers.*": way, "*": way})
    ]
    for plan in plans[1:]:
        assert (plan.blocks, plan.parameters, plan.pipeline) == (
            plans[0].blocks, plans[0].parameters, plans[0].pipeline
        )  # fmt: skip
        assert plan.predicted == plans[0].predicted


def test_what_matches_nothing_is_left_to_the_search() -> None:
    """Where there is room it is stored whole, where there is none sharded; what is pinned stays as it is."""
    roomy = plan_of(GRAPH, pin={"zero": {"layers.*.down": 3}})
    assert sharded(roomy) == {*DOWN}
    least = plan_of(GRAPH, pin={"zero": 3}).predicted.peak_bytes
    tight = plan_of(GRAPH, cluster(memory=int(1.2 * least / 0.9)), {"zero": {"head": 0}})
    assert {UP[0], DOWN[0]} <= sharded(tight) <= {*ALL} - {*HEAD}


@pytest.mark.parametrize("stages", [0, 1, 2])
def test_equal_blocks_may_be_pinned_apart(stages: int) -> None:
    micro_batches = {"micro_batches": 2, "pipeline": stages} if stages else {}
    plan = plan_of(GRAPH, pin={"zero": {"layers.0.*": 0, "layers.1.*": 0, "layers.*": 3, "*": 0}, **micro_batches})
    assert sharded(plan) == {f"{name} #2" for name in (*UP, *DOWN)}
    assert [plan.account.leaves[name].stands_for for name in (UP[0], f"{UP[0]} #2")] == ["0-1", "2-3"]
    assert Plan.from_dict(plan.to_dict()) == plan


def test_a_module_is_pinned_with_all_below_it_and_none_of_a_longer_name() -> None:
    graph = residual_mlp(layers=11, width=64, batch=48)
    plan = plan_of(graph, pin={"zero": {"layers.1": 0, "layers": 3, "*": 0}})
    whole = {name: leaf.stands_for for name, leaf in plan.account.leaves.items() if name not in sharded(plan)}
    assert {"layers.1.up.weight", "layers.1.down.bias"} <= whole.keys()
    assert {plan.account.leaves[name].stands_for for name in sharded(plan)} == {"0, 2-10"}
    assert len(sharded(plan)) == len((*UP, *DOWN))


def test_an_equal_block_that_is_pinned_apart_from_all_others_recomputes_nothing() -> None:
    plan = plan_of(GRAPH, pin={"zero": {"layers.0.*": 0, "*": 3}, "recompute": "full"})
    assert {block.name: dict(block.recompute) for block in plan.blocks if block.recompute} == {
        "layers.*": {"full": 3},
        "head": {"gathered": 1},
    }


def test_micro_batched_one_way_is_left_to_gather() -> None:
    gathers = {
        str(zero): Pins.parse({"data": 2, "micro_batches": 2, "zero": zero}).unshardings
        for zero in ({"stem": 0}, {"stem": 0, "layers.*": 2}, {"layers.*": 3}, {"*": 0})
    }
    names = [tuple(each.name for each in ways) for ways in gathers.values()]
    assert names == [("once", "each"), ("once",), ("each",), ("once",)]
    for way, at in ((2, "once"), (3, "each")):
        plan = plan_of(GRAPH, pin={"data": 4, "micro_batches": 2, "zero": {"head": 0, "layers.*": way, "stem": 0}})
        assert plan.unsharding.name == at and sharded(plan) == {*UP, *DOWN}
    mixed = {"stem": 2, "layers.*": 3}
    with pytest.raises(
        PinError, match=r"with micro-batches all parameters that are sharded are gathered once a step \(1, 2\), or"
    ):
        plan_of(GRAPH, pin={"data": 4, "micro_batches": 2, "zero": mixed})
    assert Pins.parse({"micro_batches": 2, "zero": mixed, "offload": "host"}).unshardings == (PER_MICRO_BATCH,)


@pytest.mark.parametrize(
    "zero, message",
    [
        ({}, r"pin 'zero' is \{\}; parameters are stored whole \(0\), .* or by module path"),
        ([3], r"pin 'zero' is \[3\]"),
        ("3", "pin 'zero' is '3'"),
        (True, "pin 'zero' is True"),
        (2.0, r"pin 'zero' is 2\.0"),
        ({"head": 4}, r"pin 'zero' has 4 for 'head'; it maps module paths \(with \* and \?\) to ways: parameters"),
        ({"head": True}, "pin 'zero' has True for 'head'"),
        ({"head": None}, "pin 'zero' has None for 'head'"),
        ({3: 3}, "pin 'zero' has 3 for 3"),
    ],
    ids=str,
)
def test_a_wrong_way_is_refused_before_anything_is_planned(zero: object, message: str) -> None:
    with pytest.raises(PinError, match=message):
        Pins.parse({"zero": zero})


@pytest.mark.parametrize(
    "pin, message",
    [
        ({"zero": {"heads": 3}}, "no parameter, and no module that has one, matches 'heads'; close are: 'head'"),
        ({"zero": {"layers.4": 3}}, r"matches 'layers.4'; close are: 'layers\.\d"),
        ({"zero": {"layers.0": 3, "layers.0.up": 0}}, "'layers.0.up' pins nothing, since 'layers.0' and others before"),
        ({"zero": {"§": 3}}, "matches '§'; there are: 'stem', 'layers', 'layers.0'"),
        (
            {"zero": {"*": 3, "head": 0}},
            r"'head' pins nothing, since '\*' and others before it match all that .* put it first",
        ),
        (
            {"zero": {"*.up": 2, "layers.*": 3}},
            r"is 3 for 'layers.0.down.bias', and 2 for 'layers.0.up.bias', which block 'layers.\*' reads too",
        ),
        ({"zero": {"layers.*": 3}, "tensor": 4}, "the other pins leave no data axis"),
    ],
    ids=str,
)
def test_ways_that_do_not_fit_are_refused(pin: dict[str, Any], message: str) -> None:
    with pytest.raises(PinError, match=message):
        plan_of(GRAPH, pin=pin)


def read_back(plan: Plan) -> Assignment:
    """A file applied to the model that it is of."""
    facts, rules, pins = model_facts(GRAPH, "ResidualMLP"), rules_of(GRAPH), Pins.parse(plan.pin)
    kept = filtered(pins, GRAPH, rules, plan.mesh)
    space = Space(refold(plan, GRAPH, facts), plan.mesh, CostModel(plan.cluster), Training(), rules, *kept)
    return restore(plan, space, facts)


def test_a_file_must_respect_its_pin() -> None:
    plan = plan_of(GRAPH, pin={"zero": {"stem": 0, "head": 0, "layers.*": 3}})
    assert read_back(plan).chosen == plan.assignment.chosen

    def edited(zero: dict[str, int]) -> Plan:
        return replace(plan, pin={**plan.pin, "zero": zero})

    read_back(edited({"stem": 0, "layers.*": 3}))
    with pytest.raises(PlanError, match=r"head\.weight"):
        read_back(edited({"stem": 0, "*": 3}))
    with pytest.raises(
        PlanError, match=r"is 2 for 'layers.0.up.weight' and 3 for 'layers.1.up.weight', and its blocks"
    ):
        read_back(edited({"layers.0.*": 2, "layers.*": 3}))


def test_why_not_says_that_globs_of_the_plan_are_left_out() -> None:
    """A recipe stands by itself: of a mapping, too, the globs that it does not have are free."""
    plan = plan_of(GRAPH, pin={"zero": {"head": 2, "layers.*": 1, "*": 0}})
    assert str(plan.why_not({"zero": {"head": 2, "layers.*": 1, "*": 0}})).count("stands by itself") == 0
    answer = plan.why_not({"zero": {"head": 2, "layers.*": 1, "*": 3}, **WHOLE})
    pinned = {"head": 2, "layers.*": 1, "*": 0}
    assert answer.pinned == {"zero": pinned} and answer.extra_s > 0
    assert f"it stands by itself: what it does not pin is free, the plan's zero = {pinned} too" in str(answer)
    freer = plan.why_not({"zero": {"head": 2}, **WHOLE})
    assert freer.pinned == {"zero": pinned} and freer.extra_s < 0
    assert f"it is faster: the plan was pinned to zero = {pinned}, and this recipe is not" in str(freer)


def test_why_not_tells_what_it_costs() -> None:
    plan = plan_of(GRAPH, pin={"data": 4, "zero": {"head": 0, "*": 3}})
    whole = plan.why_not({"data": 4, "zero": {"head": 0, "*": 0}})
    assert whole.extra_s < 0 < whole.extra_bytes and "why not data = 4, zero = {'head': 0, '*': 0}: mesh" in str(whole)
    tight = plan_of(GRAPH, cluster(memory=int(1.2 * plan.predicted.peak_bytes / 0.9)), {"data": 4, "zero": 3})
    told = str(tight.why_not({"data": 4, "zero": {"*": 0}}))
    assert "it cannot be" in told and "zero = {'*': 0}" in told
