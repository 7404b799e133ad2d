"""Saved: what blocks save for backward and may leave the device in between, what that changes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from planner.analysis.memory import Usage, usage
from planner.analysis.offload.chunks import SAVED, chunks_of, home_bytes, label
from planner.base.errors import InfeasibleError, PinError
from planner.base.formatting import in_all_bytes
from planner.formulation.assignment import Assignment
from planner.ir.graph import Graph
from planner.plan.plan import Plan, reprice
from planner.solve.transfers import ItemUse
from tests.planner.plans import Build, residual_mlp, unwrapped
from tests.planner.search.test_offload import GRAPH, cluster, gpu, offload, with_usable

ALL = {"activations": "all"}
WIDE, NARROW = 64 * 4 * 128 * 4, 64 * 128 * 4
"""Bytes of a layer's hidden values, and of what it adds them to."""


def roomy(graph: Graph = GRAPH, **pin: Any) -> Plan:
    """A plan of which anything may leave, and nothing must."""
    return offload(graph, cluster(), **{"activations": "all", "recompute": "none", **pin})


def saved_in(plan: Plan) -> dict[str, int]:
    """Bytes of the items of what is saved, by name."""
    return {item.name: item.bytes for item in plan.transfer_schedule.trace.items if item.name.startswith(SAVED)}


def leaving(plan: Plan) -> int:
    """How many of them leave."""
    return sum(name.startswith(SAVED) for entry in plan.transfer_schedule.entries for name in entry.evict)


def stays(assignment: Assignment) -> Usage:
    """The same followed with all that is saved on the device."""
    space = assignment.space
    space.training, before = replace(space.training, activations=0), space.training
    try:
        return usage(assignment)
    finally:
        space.training = before


def chained(layers: int = 4) -> Graph:
    """``relu(linear(h))``, layer after layer: what a layer's relu saves the next layer's product saves, too."""
    b = Build()
    value = b.leaf("x", 32, 64)
    for number in range(layers):
        path = f"layers.{number}"
        value = b.relu(f"relu{number}", b.linear(f"linear{number}", value, 64, path), path)
    return b.mean(value)


def test_a_block_s_own_values_are_an_item_counted_by_hand() -> None:
    """A layer saves what enters it and its relu's result, which two operators save; the stem only the input."""
    plan = roomy()
    layers = {f"saved {number + 1} layers.{number}": NARROW + WIDE for number in range(4)}
    assert saved_in(plan) == {**layers, "saved 5 head": NARROW}
    uses = plan.transfer_schedule.trace.item["saved 2 layers.1"].uses
    assert uses == (ItemUse("forward 2 layers.1", "w"), ItemUse("backward 2 layers.1"))


def test_a_block_that_recomputes_has_only_what_it_keeps_leave() -> None:
    assert saved_in(roomy(recompute="full"))["saved 2 layers.1"] == NARROW
    assert saved_in(roomy(recompute="selective"))["saved 2 layers.1"] == NARROW + WIDE  # of the product, not the relu


def test_what_two_blocks_save_is_in_one_item_and_back_for_both() -> None:
    plan = roomy(chained())
    size = 32 * 64 * 4
    assert set(saved_in(plan).values()) == {size} and len(saved_in(plan)) == 4
    name = next(name for name in saved_in(plan) if name.endswith(" of 1, 2"))
    names = [label(plan.assignment, number) for number in (1, 2)]
    uses = plan.transfer_schedule.trace.item[name].uses
    assert uses == (
        ItemUse(f"forward {names[1]}", "w"),
        ItemUse(f"backward {names[1]}"),
        ItemUse(f"backward {names[0]}"),
    )


def test_what_is_beside_is_less_by_what_may_leave() -> None:
    """In blocks that neither save nor read it by exactly its bytes; in others by no more than it."""
    for graph in (GRAPH, chained(), residual_mlp(layers=3, width=64, batch=64, early=True)):
        for recompute in ("none", "full"):
            assignment = roomy(graph, recompute=recompute).assignment
            moved, still = usage(assignment), stays(assignment)
            assert moved.saved and not still.saved
            for (direction, number), size in still.by_block.items():
                if direction == "forward":
                    gone = sum(each.bytes for each in moved.saved if each.left < number)
                    partly = sum(each.bytes for each in moved.saved if each.left == number)
                else:
                    gone = sum(each.bytes for each in moved.saved if max(each.savers) < number)
                    partly = sum(each.bytes for each in moved.saved if min(each.savers) <= number <= max(each.savers))
                assert size - gone - partly <= moved.by_block[direction, number] <= size - gone


def test_a_count_is_of_the_first_blocks() -> None:
    assert [*saved_in(roomy(activations=2))] == ["saved 1 layers.0", "saved 2 layers.1"]
    assert not saved_in(roomy(activations="none")) and not saved_in(roomy(activations=0))
    with pytest.raises(PinError, match=r"'activations' is 6, but 5 blocks save .*: pin that many, or 'all'"):
        roomy(activations=6)


@pytest.mark.parametrize("micro_batches", [{}, {"micro_batches": 2}], ids=str)
def test_a_count_beyond_the_blocks_is_refused_before_the_search(
    micro_batches: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.search.offload_search.fastest", None)
    with pytest.raises(PinError, match=r"pin 'activations' is 99, but the model has 6 blocks: pin that many at most"):
        roomy(activations=99, **micro_batches)
    with pytest.raises(TypeError):  # what is in range is searched
        roomy(activations=6, **micro_batches)


def needed(plan: Plan) -> int:
    return max(plan.transfer_schedule.trace.needed_bytes)


def test_a_device_too_small_for_all_that_is_saved_is_enough_where_it_leaves() -> None:
    """And the fewer blocks' may leave, the larger it must be."""
    sizes = [needed(roomy(activations=count)) for count in ("none", 1, 2, "all")]
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0] - 2 * WIDE
    spec = with_usable(cluster(), sizes[-1])
    with pytest.raises(InfeasibleError, match="largest working set"):
        offload(spec=spec, activations="none", recompute="none")
    plan = offload(spec=spec, activations="all", recompute="none")
    assert leaving(plan) >= 3 and plan.predicted.peak_bytes <= sizes[-1]
    assert f"activations of {leaving(plan)} of 5 blocks on the host between forward and backward" in unwrapped(plan)
    moved = sum(
        plan.transfer_schedule.trace.item[name].bytes
        for entry in plan.transfer_schedule.entries
        for name in entry.fetch
    )
    assert (
        plan.transfer_schedule.bytes_moved["host", "fetch"] == moved > sum(saved_in(plan).values()) - WIDE - 2 * NARROW
    )
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan and again.activations == "all"
    assert reprice(plan, plan.assignment) == plan


def test_links_that_hide_it_make_leaving_cost_nothing() -> None:
    """On a GPU moving is simulated beside computing; what is waited for is no more than the link's time."""
    plan = offload(residual_mlp(8, 128, 256), gpu("4 MiB"), activations="all", recompute="none")
    assert leaving(plan) and plan.transfer_schedule is not None
    assert 0 <= plan.predicted.time_s["offload"] < sum(plan.transfer_schedule.link_s.values())


def test_a_host_too_small_for_what_leaves_is_refused_with_its_numbers() -> None:
    spec = with_usable(cluster(), needed(roomy()))
    plan = offload(spec=spec, activations="all", recompute="none")
    left = [name for entry in plan.transfer_schedule.entries for name in entry.evict if name.startswith(SAVED)]
    more, data = sum(saved_in(plan)[name] for name in left), home_bytes(plan.assignment, chunks_of(plan.assignment))
    for missing in (0, 1000):
        host = spec.host.model_copy(update={"memory_bytes": data + more - missing})
        small = spec.model_copy(update={"host": host})
        if not missing:
            assert offload(spec=small, activations="all", recompute="none").transfer_schedule == plan.transfer_schedule
            continue
        with pytest.raises(InfeasibleError) as caught:
            offload(spec=small, activations="all", recompute="none")
        assert caught.value.excess_bytes == missing
        for part in (
            f"{in_all_bytes(data)}, of activations that leave {in_all_bytes(more)} more",
            "fewer blocks leave",
        ):
            assert part in str(caught.value)


# ---- what the search chooses -----------------------------------------------------------------------------------------


def test_it_leaves_where_that_is_faster_than_making_it_again() -> None:
    graph = residual_mlp(layers=8, width=256, batch=2048)
    stays, chosen, leaves = (offload(graph, gpu("60 MiB"), **pin) for pin in ({"activations": "none"}, {}, ALL))
    assert stays.predicted.time_s["recompute"] > 0 and not leaving(stays)
    assert (
        leaving(chosen)
        and chosen.predicted == leaves.predicted
        and chosen.transfer_schedule == leaves.transfer_schedule
    )
    assert chosen.predicted.step_time_s < 0.96 * stays.predicted.step_time_s
    assert chosen.predicted.peak_bytes <= chosen.cluster.device.usable_bytes and chosen.certificate.holds
    assert chosen.activations == "all" and reprice(chosen, chosen.assignment) == chosen


def test_it_leaves_where_nothing_else_fits() -> None:
    graph, spec = residual_mlp(layers=8, width=256, batch=2048), gpu("40 MiB")
    with pytest.raises(InfeasibleError):
        offload(graph, spec, activations="none")
    found = offload(graph, spec)
    assert leaving(found) and found.search.status == "feasible" and 0 < found.search.gap < 1


def test_it_stays_where_all_fits_and_where_the_host_has_no_room_for_it() -> None:
    plenty = offload(spec=cluster())
    assert not saved_in(plenty) and plenty.activations == 0
    graph, spec = residual_mlp(layers=8, width=256, batch=2048), gpu("60 MiB")
    stays = offload(graph, spec, activations="none")
    host = spec.host.model_copy(update={"memory_bytes": home_bytes(stays.assignment, chunks_of(stays.assignment))})
    found = offload(graph, spec.model_copy(update={"host": host}))
    assert not leaving(found) and found.predicted.step_time_s == stays.predicted.step_time_s


def test_room_that_it_leaves_is_model_data_s() -> None:
    graph = residual_mlp(layers=6, width=128, batch=1024)
    stays, chosen = (offload(graph, gpu("20 MiB"), offload="auto", **pin) for pin in ({"activations": "none"}, {}))
    assert leaving(chosen) and chosen.predicted.step_time_s < stays.predicted.step_time_s
