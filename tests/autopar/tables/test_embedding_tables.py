"""Embedding tables, placed in every dimension: the same model, in one process and in four."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import autopar
from autopar.measure.local_processes import LocalProcesses, RankError
from autopar.tables.embedding_tables import EmbeddingTables, PlacedEmbeddingTables
from autopar.verification.verify import verify
from planner.base.errors import InputError, PinError
from planner.cost.cluster import ClusterSpec
from planner.tables.embedding_table import EmbeddingTable
from planner.tables.place_tables import place_tables
from planner.tables.sharding_options import KINDS, Kind
from tests.autopar.tables import dlrm

CASES: list[tuple[tuple[Kind, ...], dict[str, Any] | None]] = [
    (("table",), {"table": 4}),
    (("column",), {"table": 4}),
    (("row",), {"tensor": 4, "layers": {"tables.*": {"tensor": "v"}}}),
    (("data",), {"data": 4}),
    (("table-row",), {"table": 2, "tensor": 2, "layers": {"tables.*": {"tensor": "r"}}}),
    (("table-column",), {"table": 2, "tensor": 2, "layers": {"tables.*": {"tensor": "h"}}}),
    (KINDS, {"table": 2, "tensor": 2}),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalProcesses]:
    with LocalProcesses(4, ("torch", "tests.autopar.tables.dlrm"), timeout_s=60) as processes:
        yield processes


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("kinds", [(kind,) for kind in KINDS] + [KINDS], ids=lambda kinds: "+".join(kinds))
def test_placed_tables_are_the_same_model(kinds: tuple[Kind, ...], mode: str) -> None:
    original = dlrm.model(mode)
    placed, batch = dlrm.placed(original, kinds), dlrm.batch()
    assert isinstance(placed.tables, PlacedEmbeddingTables) and isinstance(original.tables, EmbeddingTables)
    losses = [each(**batch) for each in (placed, original)]
    for loss in losses:
        loss.backward()
    dlrm.same(losses[0], losses[1], "loss")
    gradients = {name: p.grad for name, p in placed.named_parameters() if p.grad is not None}
    dlrm.same_tables(placed.tables, gradients, {name: bag.weight.grad for name, bag in original.tables.bags.items()})
    dlrm.same_tables(placed.tables, placed.state_dict(), original.tables.table_weights())


@pytest.mark.processes
@pytest.mark.parametrize("kinds, pin", CASES, ids=lambda value: "+".join(value) if isinstance(value, tuple) else "")
def test_it_trains_as_the_original(pool: LocalProcesses, kinds: tuple[Kind, ...], pin: dict[str, Any] | None) -> None:
    model = dlrm.placed(dlrm.model("mean"), kinds)
    plan = autopar.plan(model, dlrm.nodes_of_two(), example_kwargs=dlrm.batch(), pin=pin)
    losses = pool.run(dlrm.trains_as_the_original, plan.to_dict(), kinds, "mean", ranks=4)
    assert len(set(losses)) == 1


@pytest.mark.parametrize("kinds, pin", [
    (KINDS, {"table": 2, "data": 2}),
    (("column",), {"table": 4, "micro_batches": 2}),
    (("table",), {"table": 2, "pipeline": 2, "micro_batches": 2}),
    (("table-row", "data"), {"data": 4, "zero": 3}),
    (("table", "column"), {"table": 4, "offload": "host", "recompute": "full"}),
], ids=lambda value: "+".join(value))  # fmt: skip
def test_it_is_verified(kinds: tuple[Kind, ...], pin: dict[str, Any]) -> None:
    model = dlrm.placed(dlrm.model(), kinds).float()
    batch = {name: value.float() if value.is_floating_point() else value for name, value in dlrm.batch().items()}
    found = verify(model, dlrm.nodes_of_two(), example_kwargs=batch, pin=pin)
    assert found.agreement is not None and found.agreement.agrees()
    assert {*found.agreement.gradients} == {name for name, _ in model.named_parameters()}


@pytest.mark.processes
def test_tables_initialise_themselves_on_the_meta_device(pool: LocalProcesses) -> None:
    pool.run(dlrm.initialises_meta, ranks=4)


CRITEO = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4, 976,
    14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip
"""Rows of the 26 tables of Criteo's terabyte, at most 40 million each, as MLPerf has them."""


@pytest.mark.parametrize(
    "tables, state, mode",
    [
        ([EmbeddingTable(f"c{number}", rows, 128) for number, rows in enumerate(CRITEO)], 1, "table"),
        ([EmbeddingTable(f"t{number}", 20_000_000, 128, 20) for number in range(8)], 2, "table"),
    ],
    ids=["Criteo, Adagrad", "8 x 20M x 128, Adam"],
)
def test_terabytes_of_tables_are_planned_for_eight_gpus(tables: list[EmbeddingTable], state: int, mode: Kind) -> None:
    """Whole tables on ranks, and their bags in an all-to-all each way beside the dense tower."""
    cluster, samples = ClusterSpec.preset("dgx-h100"), 65536
    placement = place_tables(tables, cluster, batch=samples, optimizer_state=state, kinds=(mode,))
    assert placement.status == "optimal"
    with torch.device("meta"):
        model = dlrm.Dlrm(EmbeddingTables(tables), len(tables), features=128, dense=13, hidden=512)
        assert isinstance(model.tables, EmbeddingTables)
        model.tables = model.tables.placed(placement)
        batch = {
            "dense": torch.empty(samples, 13),
            "ids": torch.empty(samples, sum(table.pooling for table in tables), dtype=torch.int64),
            "labels": torch.empty(samples),
        }
    plan = autopar.plan(
        model, cluster, example_kwargs=batch, pin={"table": 8}, optimizer_bytes_per_element=4 * state, gap=0.01
    )
    assert plan.sentence.startswith("Shards embedding tables over all 8 GPUs, copies the model over all 8 GPUs")
    assert {plan.parameters[name] for name in plan.parameters if "slabs" in name} == {"S(0)"} and not plan.coverage
    bags = samples // 8 * sum(table.features for table in tables) * 4
    large = [c for c, _ in plan.predicted.collectives if c.kind == "all_to_all" and c.bytes_in >= bags]
    assert {call.phase for call in large} == {"forward", "backward"}
    assert plan.at(batch=2 * samples).step_time_s > plan.predicted.step_time_s
    held = max(placement.bytes)
    assert held * 0.9 < plan.predicted.peak_bytes < held * 1.1 < cluster.device.usable_bytes


def test_what_tables_refuse() -> None:
    tables = EmbeddingTables(dlrm.tables())
    ids = dlrm.batch()["ids"]
    ids[3, 2] = 20
    with pytest.raises(InputError, match=r"sample 3 looks up id 20 in table 't1', which has 20 rows \(0 to 19\)"):
        tables(ids)
    with pytest.raises(InputError, match=r"take ids \[batch, 9\], .* of all 6 tables"):
        tables(ids[:, 1:])
    with pytest.raises(InputError, match="names of their own"):
        EmbeddingTables([EmbeddingTable("a", 3, 4), EmbeddingTable("a", 3, 4)])
    with pytest.raises(InputError, match=r"for maxima use nn\.EmbeddingBag"):
        EmbeddingTables(dlrm.tables(), "max")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="a placement is of other tables"):
        EmbeddingTables(dlrm.tables()[1:]).placed(dlrm.placement(("table",)))
    with pytest.raises(PinError, match=r"pin 'table' shards the slabs of autopar\.EmbeddingTables"):
        autopar.plan(dlrm.model(), ClusterSpec.local(4), example_kwargs=dlrm.batch(), pin={"table": 4})


def test_an_id_beyond_its_table_is_an_error_under_a_plan_too(pool: LocalProcesses) -> None:
    with pytest.raises(RankError, match=r"looks up id 20 in table 't1', which has 20 rows \(0 to 19\)"):
        pool.run(dlrm.looks_up_what_is_not_there, ranks=4)
