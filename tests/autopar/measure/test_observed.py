"""Observed steps of real blocks: what is compared, and that what is held out lies in the interval of its prediction."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from autopar.cli.main import app
from benchmarks import observed
from planner.cost.cluster import ClusterSpec
from planner.plan.comparison import Comparison

SHAPES = observed.SHAPES[:3]


@pytest.fixture(scope="module")
def found() -> list[list[Comparison]]:
    return observed.observe(ClusterSpec.local(observed.RANKS), SHAPES, steps=4)[0]


@pytest.fixture(scope="module")
def micro_batched() -> list[list[Comparison]]:
    """Of every rank, under every plan."""
    pins = observed.MICRO_BATCHED
    return [each[0] for each in observed.observe(ClusterSpec.local(observed.RANKS), SHAPES[:1], steps=2, pins=pins)]


@pytest.mark.processes
def test_blocks_collectives_and_memory_are_compared(found: list[list[Comparison]]) -> None:
    sharded, tensor = found[0]
    for each in (sharded, tensor):
        blocks = {(row.name, row.phase): row for row in each.rows if row.work == "compute"}
        layers = blocks["layers.*", "forward"], blocks["layers.*", "backward"]
        assert all(row.predicted_s > 0 and row.observed_s > 0 and row.error_s > 0 for row in layers)
        assert [row.count for row in layers] == [4, 4]  # two layers in the two of four steps that time blocks
        predicted, seen = each.memory["parameters"]
        assert seen == pytest.approx(predicted, rel=0.01)
        assert each.memory["optimizer"][1] == pytest.approx(each.memory["optimizer"][0], rel=0.01)
    # Gloo reduces and scatters by an all-reduce: it is not one of the plan's.
    assert {"all_gather", "reduce_scatter"} <= {row.work for row in sharded.rows}
    kinds = {("all_gather", "forward"): 3, ("all_gather", "backward"): 2, ("reduce_scatter", "backward"): 3}
    assert {(row.kind, row.phase): row.planned for row in sharded.overlapped} == kinds
    assert all(row.observed == row.planned and not row.differing for row in sharded.overlapped)
    assert all(row.carried_s > 0 and row.exposed_s > 0 for row in sharded.overlapped)
    assert not tensor.overlapped
    assert "all_reduce" in {row.work for row in tensor.rows}


@pytest.mark.processes
def test_micro_batches_and_stages_are_compared(micro_batched: list[list[Comparison]]) -> None:
    for rank, (gathered, *pipelines) in enumerate(micro_batched):
        for each in (gathered, *pipelines):
            assert not [line for row in each.overlapped for line in row.differing]
            assert each.memory["parameters"][1] == pytest.approx(each.memory["parameters"][0], rel=0.01)
            assert each.memory["optimizer"][1] == pytest.approx(each.memory["optimizer"][0], rel=0.01)
        assert {(row.kind, row.phase): (row.planned, row.of) for row in gathered.overlapped} == {
            ("all_gather", "forward"): (6, 8),
            ("all_gather", "backward"): (4, 6),
            ("reduce_scatter", "backward"): (0, 8),
        }
        assert all(row.carried_s > 0 and row.exposed_s > 0 for row in gathered.overlapped)
        for each in pipelines:
            rows = {(row.kind, row.phase): row for row in each.overlapped}
            assert all(row.planned == row.observed and row.carried_s is None for row in rows.values())
            assert all(row.exposed_s > 0 for row in rows.values())
            assert rows.keys() >= ({("send", "forward"), ("receive", "backward")} if rank == 0 else
                                   {("receive", "forward"), ("send", "backward")})  # fmt: skip
            kinds = {row.phase for row in each.rows if row.work == "action"}
            assert kinds == ({"forward", "inputs", "weights"} if each is pipelines[-1] else {"forward", "backward"})
            assert all(row.predicted_s > 0 and row.observed_s > 0 for row in each.rows if row.work == "action")
        blocks = {(row.name, row.phase): row.count for row in pipelines[0].rows if row.work == "compute"}
        assert blocks["layers.*", "forward"] == blocks["layers.*", "backward"] == 4  # of 4 micro-batches in one step
        assert [bool(each.left_out) for each in pipelines] == [False, True]


@pytest.mark.processes
def test_what_is_held_out_lies_in_its_interval(found: list[list[Comparison]]) -> None:
    """Nine of ten are meant to, of 40 or so; that fewer than seven of ten do has a chance of one in 10,000."""
    rows = observed.held_out(found, SHAPES)
    assert sum(row.count for row in rows) >= 30
    assert observed.coverage(rows) >= 0.7


@pytest.mark.processes
def test_the_command_line_makes_a_calibration_of_them(
    found: list[list[Comparison]], micro_batched: list[list[Comparison]], tmp_path: Path
) -> None:
    records_of = [*(each[0] for each in found), *micro_batched[0], *micro_batched[1]]
    for number, each in enumerate(records_of):
        each.save(tmp_path / f"{number}.json")
        assert Comparison.load(tmp_path / f"{number}.json") == each
    records = [word for number in range(len(records_of)) for word in ("--from", str(tmp_path / f"{number}.json"))]
    out, cluster = tmp_path / "calibration.yaml", tmp_path / "cluster.yaml"
    result = CliRunner().invoke(app, ["profile", *records, "--out", str(out), "--cluster", str(cluster)])
    assert result.exit_code == 0, result.output
    assert "compute: " in result.output and "times as long as was predicted" in result.output
    measured = ClusterSpec.load(cluster).calibration
    assert measured is not None and measured.ratio("compute") != 1.0 and not measured.products
