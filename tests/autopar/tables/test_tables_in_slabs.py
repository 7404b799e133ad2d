"""Embedding tables of a plain model, placed in every dimension: the same model, in one process and in four."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.driver.tables import left_open
from autopar.driver.trace import trace
from autopar.measure.local_processes import LocalProcesses, RankError
from planner.base.errors import PinError, PlanError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.plan.plan import Plan
from tests.autopar.tables import dlrm

pytestmark = pytest.mark.usefixtures("capturing_once")

EACH = {"*.0": "table", "*.1": "column", "*.2": "table-row", "*.3": "table-column", "*.4": "none", "*.5": "table"}
CASES: dict[str, dict[str, Any]] = {
    "table": {"table": 4, "tables": "table"},
    "column": {"table": 4, "tables": "column"},
    "row": {"tensor": 4, "layers": {"tables.emb.*": {"tensor": "v"}}},
    "data": {"data": 4},
    "table-row": {"table": 2, "tensor": 2, "tables": "table-row", "layers": {"embedding_slabs": {"tensor": "r"}}},
    "table-column": {"table": 2, "tensor": 2, "tables": "table-column", "layers": {"embedding_slabs": {"tensor": "h"}}},
    "each in its own": {"table": 2, "tensor": 2, "tables": EACH},
}


@pytest.mark.processes
@pytest.mark.parametrize("pin", CASES.values(), ids=CASES)
def test_it_trains_as_the_original(pool: LocalProcesses, pin: dict[str, Any]) -> None:
    losses = pool.run(dlrm.trains_as_the_original, dlrm.planned(pin).to_dict(), ranks=4)
    assert len({*losses}) == 1


@pytest.mark.parametrize("kind", ["table", "column", "table-row", "table-column"])
def test_tables_lie_as_they_are_pinned(kind: str) -> None:
    plan = dlrm.planned({"table": 2, "tensor": 2, "tables": kind}).tables
    assert plan is not None and {table.kind for table in plan.tables.values()} == {kind}
    alone = dlrm.planned({"tensor": 4, "tables": "none"})
    assert alone.tables is None or not alone.tables.in_slabs


@pytest.mark.parametrize("pin", [
    {"table": 2, "data": 2, "tables": EACH},
    {"table": 4, "micro_batches": 2, "tables": "column"},
    {"table": 2, "pipeline": 2, "micro_batches": 2},
    {"data": 4, "zero": 3, "tables": "table-row"},
    {"table": 4, "offload": "host", "tables": ["table", "column"]},
], ids=str)  # fmt: skip
def test_it_is_verified(pin: dict[str, Any]) -> None:
    model = dlrm.model().float()
    batch = {name: value.float() if value.is_floating_point() else value for name, value in dlrm.batch().items()}
    found = autopar.verify(model, dlrm.nodes_of_two(), example_kwargs=batch, pin=pin)
    assert found.agreement is not None and found.agreement.agrees()
    assert {*found.agreement.gradients} == {name for name, _ in model.named_parameters()}


def test_plans_made_of_a_plan_say_where_its_tables_lie() -> None:
    plan = dlrm.planned(CASES["table"])
    evaluated = autopar.evaluate(dlrm.model(), Plan.from_dict(plan.to_dict()), example_kwargs=dlrm.batch())
    assert evaluated.tables == plan.tables and evaluated.to_dict()["parameters"] == plan.to_dict()["parameters"]
    for point in evaluated.pareto(2, time_limit_s=5).points:
        assert point.plan.tables is not None and point.plan.tables.tables == plan.tables.tables
        autopar.evaluate(dlrm.model(), Plan.from_dict(point.plan.to_dict()), example_kwargs=dlrm.batch())


def test_tables_of_two_dtypes_do_not_share_a_slab() -> None:
    model, batch = dlrm.model(), dlrm.batch()
    model.tables.emb[0].float()
    plan = autopar.plan(model, dlrm.nodes_of_two(), example_kwargs=batch, pin=CASES["table"])
    assert sum(name.startswith("embedding_slabs") for name in plan.parameters) == 2
    assert autopar.verify(model, plan, example_kwargs=batch).agreement.agrees()


def test_tables_that_other_pins_decide_are_left_out_of_slabs() -> None:
    pin = {"table": 2, "tensor": 2, "layers": {"tables.emb.0": {"tensor": "v"}}}
    plan = dlrm.planned(pin)
    assert plan.tables is not None and "tables.emb.0.weight" not in plan.tables.tables
    assert len(plan.tables.in_slabs) == len(dlrm.SIZES) - 1


def test_globs_of_layers_decide_the_tables_whose_look_ups_they_pin() -> None:
    traced = trace(dlrm.model(), None, dlrm.batch())
    for glob, count in (("tables.emb.0", 1), ("tables*", len(dlrm.SIZES)), ("tables", 0), ("**", 0)):
        pins = Pins.parse({"tensor": 2, "layers": {glob: {"tensor": "v"}}})
        assert len(left_open(traced, pins)) == len(dlrm.SIZES) - count, glob


@pytest.mark.processes
def test_tables_initialise_themselves_on_the_meta_device(pool: LocalProcesses) -> None:
    plans = [dlrm.planned(CASES[name]).to_dict() for name in ("each in its own", "data")]
    pool.run(dlrm.initialises_meta, plans, ranks=4)


@pytest.mark.processes
def test_checkpoints_are_of_tables_and_load_under_any_placement(pool: LocalProcesses, tmp_path: Path) -> None:
    plans = [dlrm.planned(CASES[name]).to_dict() for name in ("each in its own", "data", "column", "table-row")]
    pool.run(dlrm.goes_on_elsewhere, plans, str(tmp_path), ranks=4)


@pytest.mark.processes
@pytest.mark.parametrize("case, message", [
    ("table", r"looks up id 20 in table 'tables\.emb\.1\.weight', which has 20 rows"),
    ("row", r"id 20 is beyond the 20 rows of table 'tables\.emb\.1' \(0 to 19\)"),
    ("data", r"id 20 is beyond the 20 rows of table 'tables\.emb\.1' \(0 to 19\)"),
])  # fmt: skip
def test_an_id_beyond_its_table_is_an_error(pool: LocalProcesses, case: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        pool.run(dlrm.looks_up_what_is_not_there, dlrm.planned(CASES[case]).to_dict(), ranks=4)


CRITEO = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4, 976,
    14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip
"""Rows of the 26 tables of Criteo's terabyte, at most 40 million each, as MLPerf has them."""


def planned_for_eight_gpus(sizes: list[tuple[int, int, str]], state: int, pin: dict[str, Any] | None = None) -> Plan:
    with torch.device("meta"):
        model = dlrm.Dlrm(dlrm.Tables(sizes, 128), features=128, dense=13, hidden=512)
        ids = torch.empty(65536, sum(count for _, count, _ in sizes), dtype=torch.int64)
        batch = {"dense": torch.empty(65536, 13), "ids": ids, "labels": torch.empty(65536)}
    cluster = ClusterSpec.preset("dgx-h100")
    return autopar.plan(model, cluster, example_kwargs=batch, optimizer_bytes_per_element=4 * state, pin=pin)


def test_placements_of_criteos_tables_compete_with_plans_that_decide_each_by_itself() -> None:
    pin = {"pipeline": 1, "micro_batches": 1, "offload": "none"}
    plan = planned_for_eight_gpus([(rows, 1, "one") for rows in CRITEO], 1, pin)
    tables = plan.tables
    assert tables is not None and tables.status == "optimal" and len(tables.tables) == 26
    assert tables.other_s is not None
    assert 0.9 * tables.other_s < plan.predicted.step_time_s < tables.other_s
    assert plan.predicted.peak_bytes < plan.cluster.device.usable_bytes and not plan.coverage
    slabs = [name for name in plan.parameters if name.startswith("embedding_slabs")]
    assert len(slabs) == 1 and plan.parameters[slabs[0]] == "S(0)"
    calls = [call for call, _ in plan.predicted.collectives if call.kind == "all_to_all" and call.bytes_in > 2**25]
    assert sorted(call.phase for call in calls) == ["backward", "forward"]
    small = [name for name, table in tables.tables.items() if table.kind == "data"]
    assert small and all(plan.parameters[name] == "I" for name in small)
    assert f"{len(tables.in_slabs)} in slabs" in str(plan) and "without slabs" in str(plan)
    told = str(plan.explain("tables.emb.0"))
    assert "placed    column, slabs" in told and "all ranks together: table " in told and ", data " in told
    assert Plan.from_dict(plan.to_dict()).tables == tables


def test_whole_tables_are_given_to_ranks_with_room_for_them() -> None:
    plan = planned_for_eight_gpus([(20_000_000, 20, "sum")] * 8, 2, {"table": 8, "tables": "table"})
    assert plan.tables is not None and sorted(plan.tables.tables[name].slabs for name in plan.tables.tables) == [
        (rank,) for rank in range(8)
    ]
    one = 20_000_000 * 128 * 4 * 4
    assert one < plan.predicted.peak_bytes < 1.02 * one
    assert plan.at(batch=2 * 65536).step_time_s > plan.predicted.step_time_s


def test_tables_pinned_to_no_slab_are_sharded_where_no_device_holds_them_whole() -> None:
    pin = {"tables": "none", "pipeline": 1, "micro_batches": 1, "offload": "none"}
    plan = planned_for_eight_gpus([(40_000_000, 1, "one")] * 3, 1, pin)
    assert plan.tables is None and not any(name.startswith("embedding_slabs") for name in plan.parameters)
    assert 3 * 40_000_000 * 128 * 4 * 3 > plan.cluster.device.usable_bytes > 2 * plan.predicted.peak_bytes


def test_what_is_refused() -> None:
    model, cluster, batch = dlrm.model(), dlrm.nodes_of_two(), dlrm.batch()
    with pytest.raises(PinError, match=r"pin 'tables' is of embedding tables .*, and 'top' is none: there are tables"):
        dlrm.planned({"tables": {"top": "table"}})
    with pytest.raises(PinError, match=r"pin 'tables' has 'rows' for '\*'; it says how embedding tables may lie"):
        dlrm.planned({"tables": "rows"})
    with pytest.raises(PinError, match=r"leaves 'tables.emb.0.weight' 'table-row', .* it may be table, column, none"):
        autopar.plan(model, ClusterSpec.local(4), example_kwargs=batch, pin={"tables": "table-row"})
    with pytest.raises(PinError, match=r"pins 'table' and 'tables' put embedding tables into slabs, .*: plan with"):
        dlrm.planned({"data": 4}).why_not({"table": 4})
    with pytest.raises(PinError, match=r"pin 'table' is of embedding tables .* there are none"):
        autopar.plan(model.bottom, cluster, example_args=(batch["dense"],), pin={"table": 2})
    document = dlrm.planned({"table": 4, "tables": "table"}).to_dict()
    document["tables"]["tables"]["tables.emb.0.weight"]["slabs"] = [4]
    with pytest.raises(PlanError, match=r"8 features of table 'tables.emb.0.weight' in slabs \[4\] of 4"):
        autopar.evaluate(model, Plan.from_dict(document), example_kwargs=batch)
    other = autopar.plan(model, cluster, example_kwargs=batch, pin={"table": 4, "tables": "table"})
    with pytest.raises(PlanError, match="6 embedding tables in slabs of its ranks"):
        other.rebind(cluster=ClusterSpec.local(2))
