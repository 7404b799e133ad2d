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
    return observed.observe(ClusterSpec.local(observed.RANKS), SHAPES, steps=4)


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
def test_what_is_held_out_lies_in_its_interval(found: list[list[Comparison]]) -> None:
    """Nine of ten are meant to, of 40 or so; that fewer than seven of ten do has a chance of one in 10,000."""
    rows = observed.held_out(found, SHAPES)
    assert sum(row.count for row in rows) >= 30
    assert observed.coverage(rows) >= 0.7


@pytest.mark.processes
def test_the_command_line_makes_a_calibration_of_them(found: list[list[Comparison]], tmp_path: Path) -> None:
    for number, several in enumerate(found):
        several[0].save(tmp_path / f"{number}.json")
    records = [word for number in range(len(found)) for word in ("--from", str(tmp_path / f"{number}.json"))]
    out, cluster = tmp_path / "calibration.yaml", tmp_path / "cluster.yaml"
    result = CliRunner().invoke(app, ["profile", *records, "--out", str(out), "--cluster", str(cluster)])
    assert result.exit_code == 0, result.output
    assert "compute: " in result.output and "times as long as was predicted" in result.output
    measured = ClusterSpec.load(cluster).calibration
    assert measured is not None and measured.ratio("compute") != 1.0 and not measured.products
