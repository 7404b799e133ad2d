"""The step over time: without micro-batches, too, and what is alive in every stretch of it."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from planner.analysis.memory import usage
from planner.base.errors import PlanError
from planner.plan.plan import Plan, restage
from tests.planner.plan.shown import gpt2, mlp
from tests.planner.plans import WHOLE, cluster, plan_of, residual_mlp
from tests.planner.search.test_offload import gpu, offload

GRAPH = residual_mlp(layers=6, width=64, batch=512)
PINS: dict[str, dict[str, Any]] = {
    "whole": {**WHOLE, "data": 4},
    "recomputing": {**WHOLE, "recompute": "full"},
    "micro-batches": {"pipeline": 1, "micro_batches": 4},
    "1f1b": {"pipeline": 4, "micro_batches": 8, "schedule": "1f1b", "recompute": "full"},
    "interleaved": {"pipeline": 2, "micro_batches": 4, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    "zbv": {"pipeline": 2, "micro_batches": 8, "schedule": "zbv"},
}


@cache
def planned(name: str) -> Plan:
    return plan_of(GRAPH, cluster(4), PINS[name])


@pytest.mark.parametrize("name", ["whole", "recomputing"])
def test_blocks_and_what_comes_once_make_up_the_step(name: str) -> None:
    plan = planned(name)
    step = plan.timeline()
    assert step.step_s == step.end_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    for one, other in pairwise(step.events):
        assert one.end_s == other.start_s
    uses = {"F": "compute", "B": "compute", "C": "communication", "R": "recompute"}
    uses |= {"reduce": "gradients", "update": "optimizer"}
    found = dict.fromkeys(plan.predicted.time_s, 0.0)
    for event in step.events:
        found[uses[event.kind]] += event.end_s - event.start_s
    assert found == pytest.approx(dict(plan.predicted.time_s), rel=1e-9, abs=1e-15)
    assert ("R" in {event.kind for event in step.events}) == (name == "recomputing")


def test_forward_runs_every_block_in_order_and_backward_in_reverse() -> None:
    plan = planned("whole")
    for kind, order in (("F", 1), ("B", -1)):
        numbers = [event.block for event in plan.timeline().events if event.kind == kind]
        assert numbers == sorted(numbers, reverse=order < 0) and len(numbers) == len({*numbers}) >= 6
    names = [event.name for event in plan.timeline().events]
    assert "forward of layers.*, 2 of 6" in names and names[-1] == "update"


def test_what_operators_take_is_not_shared_out_anew() -> None:
    """Without anything that is done again: each block takes what its operators do."""
    plan = planned("whole")
    (block,) = (block for block in plan.blocks if block.count == 6)
    detail = plan.account.blocks[plan.blocks.index(block)]
    of_ops = {
        "F": sum(op.forward_s for op in detail.ops.values()),
        "B": sum(op.backward_s for op in detail.ops.values()),
    }
    for event in plan.timeline().events:
        if event.block in block.at and event.kind in of_ops:
            assert event.end_s - event.start_s == pytest.approx(of_ops[event.kind], rel=1e-9)


def test_a_file_draws_the_same_step_and_its_trace_opens() -> None:
    plan = planned("recomputing")
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again.timeline().events == plan.timeline().events
    trace = again.timeline().trace()
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in events} == {0, 1} and {event["pid"] for event in events} == {0}
    assert {event["cat"] for event in events} >= {"forward", "backward", "recompute", "update"}
    assert events[-1]["ts"] + events[-1]["dur"] == pytest.approx(1e6 * plan.predicted.step_time_s)
    assert "all ranks" in str(gpt2().timeline()) and "all ranks" in gpt2().timeline().to_svg()


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PINS)
def test_no_stretch_holds_more_than_the_peak_and_one_holds_it(name: str) -> None:
    plan = planned(name)
    memory, step = plan.memory_over_step, plan.timeline()
    assert max(each.fullest.peak.bytes for each in memory) == plan.predicted.peak_bytes
    for each in memory:
        assert each.stretches[0].start_s == 0 and each.stretches[-1].end_s == pytest.approx(step.end_s)
        assert all(one.end_s == other.start_s for one, other in pairwise(each.stretches))
        for stretch in each.stretches:
            assert stretch.peak.bytes == sum(held.all_bytes for held in stretch.peak.alive)


@pytest.mark.parametrize("name", ["micro-batches", "1f1b", "interleaved", "zbv"])
def test_each_rank_of_a_pipeline_is_as_full_as_its_own_peak(name: str) -> None:
    plan = planned(name)
    staged = restage(plan, plan.assignment) if plan.assignment is not None else None
    assert staged is not None
    for each in plan.memory_over_step:
        assert each.fullest.peak.bytes == staged.rank_bytes[each.rank]
    assert {each.rank for each in plan.memory_over_step} >= {0, staged.pipeline.ranks - 1, staged.peak_rank}


def test_without_micro_batches_each_block_is_as_full_as_the_step_says() -> None:
    plan = planned("whole")
    assert plan.assignment is not None
    by_block = usage(plan.assignment).by_block
    (memory,) = plan.memory_over_step
    turn = max(number for number, event in enumerate(plan.timeline().events) if event.kind == "F")
    for number, (event, stretch) in enumerate(zip(plan.timeline().events, memory.stretches, strict=True)):
        if event.block is not None and event.block >= 0:
            assert stretch.peak.bytes == by_block["forward" if number <= turn else "backward", event.block]


def test_a_file_does_not_know_what_is_alive_when() -> None:
    with pytest.raises(PlanError, match="was read from a file"):
        _ = gpt2().memory_over_step
    assert "memory over the step: this plan was read from a file" in gpt2().to_html()
    assert "memory over the step:" not in mlp().to_html()


# ---- where model data moves ------------------------------------------------------------------------------------------


def test_what_moves_beside_computing_has_rows_of_its_own() -> None:
    plan = offload(residual_mlp(6, width=64, batch=64), gpu("2 MiB"))
    table, step = plan.transfer_schedule, plan.timeline()
    assert table is not None and step.rows == ("device", "fetch host", "evict host", "host")
    assert step.step_s == step.end_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    for row, name in enumerate(step.rows):
        events = sorted((event for event in step.events if event.rank == row), key=lambda event: event.start_s)
        assert events[0].start_s >= 0 and all(one.end_s <= other.start_s + 1e-12 for one, other in pairwise(events))
        took_s = sum(event.end_s - event.start_s for event in events)
        if name == "device":
            assert took_s == pytest.approx(step.step_s)  # it computes or waits
            assert {event.kind for event in events} == {"F", "B", "offload"}
        elif name != "host":
            way, _, tier = name.partition(" ")
            assert took_s == pytest.approx(table.link_s[tier, way])
    assert plan.memory_over_step[0].fullest.peak.bytes == plan.predicted.peak_bytes
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert (again.timeline().events, again.memory_over_step) == (step.events, plan.memory_over_step)
    drawn = [str(step), step.to_svg(), plan.to_html(), json.dumps(step.trace())]
    assert all("evict host" in each for each in drawn)
