"""Comparisons of observed steps with predicted ones: rows by hand, files, and the next plan's prices and interval."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from planner.analysis.prediction import collectives_of_rank
from planner.base.errors import ClusterError, PlanError
from planner.base.formatting import in_seconds
from planner.cost.calibration import Calibration
from planner.cost.cluster import ClusterSpec
from planner.cost.model import CostModel
from planner.formulation.resharding import Collective
from planner.ir.layout import PIPELINE, Axis
from planner.plan.comparison import Comparison, compare, recalibrated
from planner.plan.document.fingerprint import model_facts
from planner.plan.overlap_comparison import OverlapComparison
from planner.plan.plan import Plan
from planner.plan.rebinding.rebind import rebind
from planner.solve.pipeline.schedule import schedule
from tests.planner.plans import WHOLE, plan_of, residual_mlp
from tests.planner.search.test_offload import offload, tied


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(residual_mlp(6), pin={**WHOLE, "data": 4, "zero": 3, "recompute": "none"})


def slowed(plan: Plan, factor: float) -> Comparison:
    """Blocks that take so many times as long as they are predicted to, and a fifth more or less by turns."""
    blocks = {}
    for number, each in enumerate(plan.block_seconds):
        off = factor * (1.2 if number % 2 else 0.8)
        blocks[each.number, "forward"] = [off * sum(each.forward.values())] * 2
        blocks[each.number, "backward"] = [off * sum(each.backward.values())] * 2
    gathered_s = called_s(plan, "all_gather")
    return compare(plan, blocks, {"all_gather": [2 * gathered_s, 4 * gathered_s]}, {"parameters": 10})


def called_s(plan: Plan, kind: str) -> float:
    """Seconds of all calls of a collective in a step."""
    axes, cost = {axis.name: axis for axis in plan.mesh.axes}, CostModel(plan.cluster)
    calls = [(call, count) for call, count in plan.predicted.collectives if call.kind == kind]
    return sum(count * cost.collective_s(kind, axes[call.axis], call.bytes_in) for call, count in calls)


def test_rows_by_hand(plan: Plan) -> None:
    found = slowed(plan, 3.0)
    gathers = found.rows[-1]
    assert (gathers.work, gathers.phase, gathers.count) == ("all_gather", "step", 2)
    assert gathers.off == pytest.approx(2.0)  # three times as long in the mean
    assert gathers.error_s == pytest.approx(gathers.predicted_s)  # of two and four times: half of what they differ by
    blocks = found.rows[:-1]
    assert {row.phase for row in blocks} == {"forward", "backward"} and all(row.work == "compute" for row in blocks)
    assert all(2.4 <= row.off + 1 <= 3.6 for row in blocks)
    assert found.memory == {"parameters": (plan.predicted.memory_bytes["parameters"], 10)}
    assert "all_gather" in str(found) and "+200%" in str(found) and "+-" in str(found)


def test_a_record_is_read_as_it_was_written(plan: Plan, tmp_path: Path) -> None:
    gathers = OverlapComparison("all_gather", "forward", 5, 4, 6, 0.1, 0.025, differing=("of layers.3 (3): ...",))
    assert str(gathers).startswith("all_gather forward: 4 of 6 beside blocks, 5 planned") and gathers.hidden == 0.75
    found = replace(slowed(plan, 2.0), overlapped=(gathers,))
    assert all(text in str(found) for text in str(gathers).splitlines())
    found.save(tmp_path / "run.json")
    assert Comparison.load(tmp_path / "run.json") == found
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(PlanError, match=r"is no record of steps .* pmodel.compare\(\).save"):
        Comparison.load(tmp_path / "plan.json")


def test_the_next_plan_is_priced_by_what_was_observed(plan: Plan) -> None:
    """Its blocks take three times as long, its step has an interval around that, and it says so."""
    runs = [slowed(plan, 3.0)] * 3
    spec = recalibrated(runs)
    again = plan_of(residual_mlp(6), spec, {**WHOLE, "data": 4, "zero": 3, "recompute": "none"})
    ratio = spec.calibration.ratio("compute") if spec.calibration is not None else 0.0
    assert 2.4 <= ratio <= 3.6
    assert again.predicted.time_s["compute"] == pytest.approx(ratio * plan.predicted.time_s["compute"])
    assert plan.interval_s is None and again.interval_s is not None
    low, high = again.interval_s
    assert low < again.predicted.step_time_s < high
    assert f"({in_seconds(low)} to {in_seconds(high)})" in str(again)


@pytest.mark.parametrize(
    "pin",
    [
        {"tensor": 4},
        {"tensor": 4, "sequence_parallel": True},
        {"data": 4, "zero": 3},
        {"data": 2, "tensor": 2, "zero": 3},
    ],
    ids=str,
)
def test_a_slow_network_is_counted_once(pin: Mapping[str, Any]) -> None:
    """Where collectives alone take four times as long, computing is not corrected; backward gathers no biases."""
    graph = residual_mlp(6)
    plan = plan_of(graph, pin={**WHOLE, **pin, "recompute": "none"})
    kinds = {call.kind for call, _ in plan.predicted.collectives}
    four = [{"work": kind, "ratio": 4.0, "spread": 0.0, "count": 1} for kind in kinds]
    facts = {"format": "autopar-calibration", "version": 2, "device": plan.cluster.device.kind}
    true = Calibration.from_dict({**facts, "ranks": 1, "launch_s": 1e-6, "corrections": four})
    slow = rebind(plan, graph, model_facts(graph, "ResidualMLP"), plan.cluster.calibrated(true))
    assert all(slow.parameters[name] == layout for name, layout in plan.parameters.items())
    blocks = {}
    for each in slow.block_seconds:
        blocks[each.number, "forward"] = [sum(each.forward.values())]
        blocks[each.number, "backward"] = [sum(each.backward.values())]
    found = recalibrated([compare(plan, blocks, {kind: [called_s(slow, kind)] for kind in kinds}, {})]).calibration
    assert found is not None and all(found.ratio(kind) == pytest.approx(4.0) for kind in kinds)
    assert found.ratio("compute") == pytest.approx(1.0)


def test_a_block_that_mostly_communicates_says_nothing_of_computing(plan: Plan) -> None:
    """Ranks that wait in one for each other would else be taken for slow computing."""
    rows = compare(plan, {(each.number, "forward"): [1.0] for each in plan.block_seconds}, {}, {}).rows
    row = next(each for each in rows if each.pair.predicted_s > 0)
    communicating = replace(row, observed_communication_s=4.04 * row.pair.predicted_s)
    computing = replace(row, observed_communication_s=3.96 * row.pair.predicted_s)
    assert Comparison(plan.cluster, (communicating, computing), {}).pairs == (computing.pair,)


def test_a_block_that_takes_less_than_it_communicates_says_nothing_of_computing(plan: Plan) -> None:
    fast = compare(plan, {(each.number, "forward"): [1e-9] for each in plan.block_seconds}, {}, {})
    assert fast.rows and fast.pairs == ()


def test_runs_that_were_priced_otherwise_are_not_mixed(plan: Plan) -> None:
    first = slowed(plan, 2.0)
    with pytest.raises(ClusterError, match="priced by different clusters or calibrations"):
        recalibrated([first, Comparison(recalibrated([first]), first.rows, first.memory)])


@pytest.mark.parametrize("pin", [
    {"pipeline": 2, "micro_batches": 2, "recompute": "full"},
    {"pipeline": 1, "data": 4, "zero": 3, "micro_batches": 2, "recompute": "none"},
], ids=str)  # fmt: skip
def test_blocks_of_a_micro_batch_take_together_what_their_stages_do(pin: dict[str, object]) -> None:
    plan = plan_of(residual_mlp(6), pin=pin)
    assert plan.pipeline is not None and plan.times is not None
    blocks = {each.number: each for each in plan.block_seconds}
    for stage, (low, high) in enumerate(pairwise(plan.pipeline.bounds)):
        backward_s = sum(sum(blocks[number].backward.values()) for number in range(low, high))
        assert backward_s == pytest.approx(plan.times.input_s[stage] + plan.times.weight_s[stage], rel=1e-9)
    forward_s = sum(sum(each.forward.values()) for each in blocks.values())  # each the mean of its kind
    assert forward_s == pytest.approx(sum(plan.times.forward_s), rel=1e-9)
    seen = {(number, "forward"): [2 * sum(each.forward.values())] for number, each in blocks.items()}
    comparison = compare(plan, seen, {}, {}, actions={(0, "F"): [2 * plan.times.forward_s[0]]})
    assert all(row.off == pytest.approx(1.0) for row in comparison.rows)
    assert {row.work for row in comparison.rows} == {"compute", "action"}
    assert {pair.work for pair in comparison.pairs} == {"compute"}


def test_gradients_that_a_micro_batch_waits_for_are_no_computing() -> None:
    """The first block keeps what it gathers for forward, so that its backward reduces alone."""
    plan = plan_of(residual_mlp(6), pin={"data": 4, "zero": 3, "pipeline": 1, "micro_batches": 2, "recompute": "none"})
    first = next(each for each in plan.block_seconds if each.name == "stem")
    seen = {(first.number, "backward"): [3 * sum(first.backward.values())]}
    (row,) = compare(plan, seen, {}, {}).rows
    cost, data = CostModel(plan.cluster), next(axis for axis in plan.mesh.axes if axis.name == "data")
    weight, bias = (4 * size for size in (256 * 256, 256))  # of float32
    by_hand_s = sum(cost.collective_s("reduce_scatter", data, size) for size in (weight, bias))
    assert row.predicted_communication_s == pytest.approx(by_hand_s)


def test_micro_batches_beside_which_model_data_moves_are_refused() -> None:
    spec = ClusterSpec.local(1, "64 MiB", cores=2, host_memory_bytes="1 GiB")
    plan = offload(residual_mlp(2, width=64, batch=64), spec, micro_batches=2)
    assert plan.transfer_schedules
    refused = r"2 micro-batches and moves model data to and from the host .* pmodel.timeline\(\) .*'offload': 'none'"
    with pytest.raises(PlanError, match=refused):
        compare(plan, {(0, "forward"): [1.0]}, {}, {})


def test_collectives_of_ranks_of_a_pipeline_are_what_all_call() -> None:
    """The last rank alone reduces the loss, and both sum the gradient of what the first and the last block read."""
    plan = plan_of(tied(6), pin={"pipeline": 2, "schedule": "1f1b", "data": 2, "micro_batches": 2, "zero": 0})
    assert plan.pipeline is not None and plan.assignment is not None
    order, bounds = schedule("1f1b", 2, 2, 1), plan.pipeline.bounds
    first, last = (collectives_of_rank(plan.assignment, order, bounds, rank) for rank in range(2))
    (shared,) = (call for call in first if call.axis == PIPELINE)
    assert shared == Collective("all_reduce", PIPELINE, 4 * 64 * 64, "backward") and first[shared] == last[shared] == 1
    loss = Collective("all_reduce", "data", 4, "forward")
    assert first[loss] == 0 and last[loss] > 0
    assert first + last == Counter(dict(plan.predicted.collectives)) + Counter({shared: 2})
    cost, data = CostModel(plan.cluster), next(axis for axis in plan.mesh.axes if axis.name == "data")
    seconds = [count * cost.collective_s("all_reduce", data, call.bytes_in) for call, count in last.items()
               if call.kind == "all_reduce" and call != shared]  # fmt: skip
    seconds.append(cost.collective_s("all_reduce", Axis(PIPELINE, 2, 2), 4 * 64 * 64))
    (row,) = compare(plan, {}, {"all_reduce": [1.0]}, {}, calls=last).rows
    assert row.predicted_s == pytest.approx(sum(seconds))
