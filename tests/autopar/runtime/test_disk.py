"""Model data on disk: that nothing changes but where it is, and what is said where it cannot be there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from autopar.runtime.host.disk import OffloadFiles
from autopar.runtime.host.pages import READ
from planner.base.errors import ClusterError, DiskError, InfeasibleError, InputError
from tests.autopar import on_disk
from tests.autopar.carried import model_of


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    found = tmp_path / "offload"
    found.mkdir()
    return str(found)


def test_trains_as_the_original(alone: None, folder: str) -> None:
    on_disk.trains(on_disk.plan_of(1).to_dict(), folder)


def test_state_is_made_one_parameter_after_another(alone: None, folder: str) -> None:
    on_disk.begins_one_by_one(on_disk.plan_of(1), folder)


def test_says_what_cannot_be_a_home(alone: None, folder: str) -> None:
    on_disk.refuses(on_disk.plan_of(1), folder)
    with pytest.raises(InputError, match=r"but the plan keeps no model data on disk: leave it out"):
        on_disk.parallel(model_of("mlp")[0], on_disk.plan_of(1, offload="host"), folder)


@pytest.mark.parametrize("ranks, way_out", [(1, "repeat this step, else load"), (2, "end all of them, and load")])
def test_a_file_that_cannot_be_read_says_what_to_do(folder: str, ranks: int, way_out: str) -> None:
    """One rank alone must not repeat a step in whose middle others wait."""
    disk = OffloadFiles(Path(folder), ranks)
    memory = disk.memory(1 << 16, "a test")
    disk.ask([memory], READ)
    (file,) = on_disk.unnamed(folder)
    os.ftruncate(file, 0)
    with pytest.raises(DiskError, match=way_out):
        disk.ask([memory], READ)
    os.ftruncate(file, 1 << 16)
    disk.ask([memory], READ)


def test_a_cluster_must_describe_its_disk_and_the_disk_must_do() -> None:
    with pytest.raises(
        ClusterError, match=r"does not say what disk its devices have.*ClusterSpec.local takes disk_byt"
    ):
        on_disk.plan_of(1, disk=None)
    with pytest.raises(InfeasibleError, match=r"the disk has 1,000 bytes for each device, .* or take larger disks"):
        on_disk.plan_of(1, disk="1 kB")


def test_a_slower_home_makes_a_slower_step() -> None:
    """Fetching takes the disk's reading, evicting its writing, where these are slower than the way to the host."""
    found, host = on_disk.plan_of(1), on_disk.plan_of(1, offload="host")
    assert found.transfer_schedule.bytes_moved == host.transfer_schedule.bytes_moved
    fetched, evicted = (found.transfer_schedule.bytes_moved["host", way] for way in ("fetch", "evict"))
    assert found.predicted.time_s["offload"] == pytest.approx(fetched / 2e9 + evicted / 1e9)
    parameters = [*model_of("mlp")[0].parameters()]
    held, starts_s = (
        sum(each.numel() for each in parameters) * 8,
        len(parameters) * found.cluster.device.launch_overhead_s,
    )
    read, written = 3 * held, 2 * held  # as much state as float64 parameters: two moments in float32
    assert found.predicted.time_s["optimizer"] == pytest.approx(starts_s + read / 2e9 + written / 1e9)
    assert "with their home on disk" in str(found) and "with their home on the host" in str(host)
