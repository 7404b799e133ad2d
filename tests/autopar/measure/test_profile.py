"""Profiling: the file has every table, its figures behave, and a cluster that refers to it can be planned for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml
from typer.testing import CliRunner

from autopar.cli.main import app
from autopar.measure import profile as profiling
from autopar.measure.timing import Pace
from planner.base.errors import ClusterError
from planner.cost.calibration import Calibration
from planner.cost.cluster import ClusterSpec
from planner.cost.kernels import Product
from planner.cost.model import KINDS, CostModel
from planner.ir.layout import Axis
from planner.ops.table import Family

SMALL = dataclasses.replace(
    profiling.QUICK,
    rows=(4, 256),
    columns=(8, 256),
    inner=(8, 256),
    keys=(16, 128),
    depths=(8, 32),
    moved=(2**14, 2**20),
    passed=(2**8, 2**22),
    pace=Pace(stretch_s=0.0005, calls=1, between_s=0.0005),
    rounds=1,
)


@pytest.fixture(scope="module")
def measured() -> Calibration:
    return profiling.profile(2, SMALL)


pytestmark = pytest.mark.processes


def test_every_table_is_there(measured: Calibration) -> None:
    assert (measured.device, measured.ranks) == ("cpu", 2)
    assert [table.dtype for table in measured.products] == ["float32"]
    assert [(table.dtype, table.backward) for table in measured.attention] == [("float32", False), ("float32", True)]
    families = {(curve.family, curve.backward) for curve in measured.streams}
    expected = {(family, backward) for family in get_args(Family) for backward in (False, True)}
    assert families == expected - {("optimizer", True)}
    found = {(curve.kind, curve.size) for curve in measured.collectives if not curve.beside}
    assert found == {(kind, 2) for kind in KINDS}
    beside = {(curve.kind, curve.size) for curve in measured.collectives if curve.beside}
    assert beside == {(kind, 2) for kind in profiling.BROUGHT}


def test_prices_are_the_measured_ones(measured: Calibration) -> None:
    """How long something took is the machine's affair; that it was measured, and is what is charged, is ours."""
    costs = CostModel(ClusterSpec.local(2, "1 GiB", cores=2).calibrated(measured))
    for size in (8, 256):
        seconds = measured.product_s(Product(size, size, size), "float32")
        assert seconds is not None
        assert 0 < seconds < 10
    for curve in measured.collectives:
        assert list(curve.bytes) == sorted(curve.bytes)
        assert min(curve.seconds) > 0
        found = costs.collective_s(curve.kind, Axis("a", 2, 1), curve.bytes[-1], beside=curve.beside)
        assert found == pytest.approx(max(curve.seconds))


def test_an_unknown_gpu_is_described_by_its_best_rates(measured: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 16 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())
    monkeypatch.setattr("planner.base.host.gpus", lambda: ["NVIDIA Tomorrow"] * 2)
    unknown = measured.model_copy(update={"device": "NVIDIA Tomorrow"})
    spec = profiling.measured_cluster(unknown)
    assert (spec.device.kind, spec.world_size, spec.device.memory_bytes) == ("NVIDIA Tomorrow", 2, 16 * 2**30)
    assert spec.calibration == unknown
    best_s = measured.product_s(Product(256, 256, 256), "float32")
    assert best_s is not None and spec.device.peak("float32") >= 2 * 256**3 / best_s * 0.99


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ClusterError, match="4 ranks need 4 GPUs, and there are 2: give --ranks 2"):
        profiling.profile(4)


def test_group_sizes_are_the_divisors() -> None:
    assert profiling.group_sizes(1) == []
    assert profiling.group_sizes(12) == [2, 3, 4, 6, 12]


def test_streamed_operands_have_the_size_that_is_written_down() -> None:
    """The bytes of a curve are those that the planner counts: operands with their results."""
    for family, (make, row) in profiling.STREAMS.items():
        applied = make(32, torch.device("cpu"), torch.float32)
        result = applied.act()
        elements = sum(leaf.numel() for leaf in applied.leaves) + result.numel()
        assert abs(elements - 32 * row) <= 2 * profiling.WIDTH, family


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "QUICK", SMALL)


@pytest.mark.usefixtures("quick")
def test_the_command_writes_a_calibration_and_a_cluster_that_refers_to_it(tmp_path: Path) -> None:
    out, cluster = tmp_path / "calibration.yaml", tmp_path / "cluster.yaml"
    result = CliRunner().invoke(app, ["profile", "--ranks", "2", "--out", str(out), "--cluster", str(cluster)])
    assert result.exit_code == 0, result.output
    assert "2 x cpu" in result.stdout
    assert yaml.safe_load(cluster.read_text())["calibration"] == "calibration.yaml"
    spec = ClusterSpec.load(cluster)
    assert spec.calibration == Calibration.load(out) and spec.world_size == 2


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["--out", "{folder}"], "is a directory"),
        (["--out", "{folder}/missing/calibration.yaml"], "there is no directory"),
        (["--cluster", "{folder}/missing/cluster.yaml"], "there is no directory"),
        (["--ranks", "0"], "Invalid value for '--ranks'"),
    ],
)
def test_wrong_arguments_are_refused_before_measuring(tmp_path: Path, arguments: list[str], part: str) -> None:
    result = CliRunner().invoke(app, ["profile", *(a.format(folder=tmp_path) for a in arguments)])
    assert result.exit_code == 2
    assert part in " ".join(result.output.split())
    assert list(tmp_path.iterdir()) == []
