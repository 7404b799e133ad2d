"""Cluster descriptions: what people write becomes checked numbers, and what is wrong says the way out."""

import itertools
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.base.errors import ClusterError
from planner.cost.calibration import Calibration
from planner.cost.cluster import ClusterSpec, Device, Host, Level, PeakFlops
from planner.cost.software import Software
from tests.planner.plans import plan_of, residual_mlp

GPUS = ("dgx-a100", "dgx-a100-40gb", "dgx-h100", "dgx-v100", "hgx-b200", "hgx-h200", "workstation")
PRESETS = ("cpu", *GPUS)

WRITTEN = """
name: lab
device:
  kind: Some GPU
  memory_bytes: 80 GiB
  peak_flops_per_s: {float32: 19.5 TFLOP/s, bfloat16: 312 TFLOPS}
  memory_bandwidth_bytes_per_s: 2 TB/s
  launch_overhead_s: 5 us
levels:
  - {name: node, size: 4, latency_s: 500 ns, bandwidth_bytes_per_s: 1e11}
  - {name: rack, size: 2, latency_s: 0.01 ms, bandwidth_bytes_per_s: 200 Gb/s}
"""


HOST = {"memory_bytes": "256 GB", "link_bytes_per_s": "25 GB/s", "memory_bandwidth_bytes_per_s": "50 GB/s"}


def written() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(WRITTEN)
    return data


def test_quantities_are_read_as_people_write_them() -> None:
    spec = ClusterSpec.from_dict(written())
    assert spec.device.memory_bytes == 80 * 2**30
    assert spec.device.peak_flops_per_s == PeakFlops(float32=19.5e12, bfloat16=312e12)
    assert spec.device.memory_bandwidth_bytes_per_s == 2e12
    assert spec.device.launch_overhead_s == 5e-6
    assert [level.latency_s for level in spec.levels] == [5e-7, 1e-5]
    assert [level.bandwidth_bytes_per_s for level in spec.levels] == [1e11, 25e9]


@pytest.mark.parametrize(
    "text, memory_bytes",
    [("24 GB", 24 * 10**9), ("1.5GiB", 1536 * 2**20), ("512 MiB", 2**29), ("80e9", 80 * 10**9), ("64 B", 64)],
)
def test_sizes(text: str, memory_bytes: int) -> None:
    assert ClusterSpec.local(1, memory_bytes=text).device.memory_bytes == memory_bytes


def test_sizes_of_the_whole() -> None:
    spec = ClusterSpec.from_dict(written())
    assert spec.world_size == 8
    assert spec.spans == (4, 8)
    assert spec.device.usable_bytes == int(80 * 2**30 * 0.9)


def test_a_peak_that_is_not_stated_is_that_of_float32() -> None:
    device = ClusterSpec.from_dict(written()).device
    assert device.peak("bfloat16") == 312e12
    assert device.peak("float16") == device.peak("int64") == 19.5e12


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_plausible_numbers(name: str) -> None:
    spec = ClusterSpec.preset(name, nodes=2)
    assert spec.name == name
    assert spec.world_size == 2 * spec.levels[0].size
    assert 20e9 < spec.device.memory_bytes < 300e9
    assert spec.device.peak("float16") >= spec.device.peak("float32") >= spec.device.peak("float64")
    inner, outer = spec.levels
    assert inner.bandwidth_bytes_per_s > outer.bandwidth_bytes_per_s
    assert inner.latency_s < outer.latency_s


@pytest.mark.parametrize("name", GPUS)
def test_presets_of_gpus_know_their_host(name: str) -> None:
    """More room than the device has, behind a link that is slower than either memory."""
    spec = ClusterSpec.preset(name)
    host = spec.host_memory
    assert spec.device.memory_bytes < host.memory_bytes < 1e12
    assert 5e9 < host.link_bytes_per_s < host.memory_bandwidth_bytes_per_s * 2
    assert 10e9 < host.memory_bandwidth_bytes_per_s < spec.device.memory_bandwidth_bytes_per_s / 10


def test_local_processes_have_a_host_where_it_is_given_or_the_machine_s_own() -> None:
    assert ClusterSpec.local(2, "1 GiB", cores=2).host is None
    host = ClusterSpec.local(2, "1 GiB", cores=2, host_memory_bytes="4 GiB").host_memory
    assert (host.memory_bytes, host.link_bytes_per_s) == (4 * 2**30, 4e9)
    assert host.memory_bandwidth_bytes_per_s == 2 * host.link_bytes_per_s  # a copy reads and writes
    mine = ClusterSpec.local(2)
    assert mine.host is not None and mine.host.memory_bytes == mine.device.memory_bytes


def test_a_cluster_without_a_host_says_what_to_add() -> None:
    with pytest.raises(ClusterError, match=r"'lab' .* add 'host' with memory_bytes, link_bytes_per_s and memory_band"):
        _ = ClusterSpec.from_dict(written()).host_memory
    with pytest.raises(ClusterError, match=r"ClusterSpec.local takes host_memory_bytes"):
        _ = ClusterSpec.local(1, "1 GiB", cores=2).host_memory


def test_a_host_is_written_and_read_with_units() -> None:
    data = {**written(), "host": HOST}
    spec = ClusterSpec.from_dict(data)
    assert spec.host == Host(memory_bytes=256 * 10**9, link_bytes_per_s=25e9, memory_bandwidth_bytes_per_s=50e9)
    assert ClusterSpec.from_dict(spec.to_dict()) == spec
    assert "host memory 238.4 GiB per device, 25 GB/s there and back" in spec.describe()
    assert "host" not in ClusterSpec.from_dict(written()).to_dict()


def test_the_host_is_as_fast_as_it_was_measured() -> None:
    spec = ClusterSpec.local(1, "1 GiB", cores=2, host_memory_bytes="4 GiB")
    found = {"format": "autopar-calibration", "version": 2, "device": "cpu", "ranks": 1, "launch_s": 1e-5}
    tables: dict[str, Any] = {name: [] for name in ("products", "attention", "streams", "collectives")}
    updates = [{"dtype": "float32", "bytes_per_s": 5e9}, {"dtype": "bfloat16", "bytes_per_s": 4e9}]
    for link, rates, speeds in (
        (None, [], (8e9, 16e9, 16e9)),
        (3e9, updates[:1], (3e9, 5e9, 5e9)),
        (3e9, updates, (3e9, 5e9, 4e9)),
    ):
        measured = {"host_link_bytes_per_s": link, "host_updates": rates}
        calibrated = spec.calibrated(Calibration.from_dict({**found, **tables, **measured}))
        homes = [calibrated.home(False, dtype) for dtype in ("float32", "bfloat16")]
        assert calibrated.host_memory.link_bytes_per_s == speeds[0]
        assert tuple(home.read_bytes_per_s for home in homes) == speeds[1:]
        assert calibrated.host == spec.host


@pytest.mark.parametrize("name", GPUS)
def test_presets_of_gpus_know_their_multiprocessors(name: str) -> None:
    device = ClusterSpec.preset(name).device
    assert device.multiprocessors is not None and 80 <= device.multiprocessors <= 160
    # A tile of 256 x 128 in half precision comes out of the cache as fast as it is multiplied.
    cache = device.cache_bandwidth_bytes_per_s
    assert cache is not None
    assert 384 * 2 / cache <= 2 * 256 * 128 / (device.peak("float16") * device.matmul_efficiency)
    assert all(0.2 < share < device.matmul_efficiency + 0.01 for share in device.attention)


def test_attention_runs_at_the_rate_of_its_kernel() -> None:
    device = ClusterSpec.preset("dgx-h100").device
    assert device.attention == (0.37, 0.33)
    assert device.model_copy(update={"attention_kernel": "flash_3"}).attention == (0.65, 0.53)
    stated = {"attention_kernel": None, "attention_efficiency": (0.2, 0.1)}
    assert device.model_copy(update=stated).attention == (0.2, 0.1)
    fields = ClusterSpec.preset("dgx-v100").to_dict()
    fields["device"]["attention_kernel"] = "cudnn"
    with pytest.raises(ClusterError, match=r"kernel is .cudnn.; .* these are: efficient. Add it there"):
        ClusterSpec.from_dict(fields)


@pytest.mark.parametrize(("devices", "deviations"), [(1, 0.0), (2, 0.5642), (8, 1.4236), (96, 2.4925), (1000, 2.7)])
def test_a_step_waits_for_the_slowest_device(devices: int, deviations: float) -> None:
    """Expected largest of so many normal numbers, as Harter (1961) tabulates it, as long as it is no outlier."""
    spec = ClusterSpec.preset("dgx-h100", devices=devices)
    share = 1 - deviations / 2.7 * 0.08 / 2
    slowest = spec.slowest
    assert slowest.matmul_efficiency == pytest.approx(0.73 * share, abs=3e-4 if devices > 1 else 1e-15)
    assert slowest.attention == pytest.approx((0.37 * share, 0.33 * share), abs=2e-4 if devices > 1 else 1e-15)
    assert slowest.memory_bandwidth_bytes_per_s == spec.device.memory_bandwidth_bytes_per_s


def test_processes_on_a_host_are_equally_fast() -> None:
    spec = ClusterSpec.local(4, "1 GiB", cores=2)
    assert spec.slowest.matmul_efficiency == spec.device.matmul_efficiency
    assert spec.slowest.attention == spec.device.attention


def test_products_of_float32_run_as_they_are_told_to() -> None:
    device = ClusterSpec.preset("dgx-a100").device
    assert device.peak("float32") == 19.5e12
    faster = device.model_copy(update={"float32_products": "tfloat32"})
    assert faster.peak("float32") == faster.peak("tfloat32") == 156e12


@pytest.mark.parametrize("name", PRESETS)
def test_every_number_of_a_preset_has_a_source(name: str) -> None:
    """A comment on its line, on the line above, or on that of the peaks for all of them."""
    lines = resources.files("planner").joinpath(f"cost/presets/{name}.yaml").read_text().splitlines()
    for above, line in itertools.pairwise(lines):
        key, _, value = line.partition("#")[0].strip(" -").partition(":")
        is_peak = line.startswith("    ") and key.startswith(("float", "tfloat", "bfloat"))
        if any(c.isdigit() for c in value) and key not in ("name", "kind", "size") and not is_peak:
            assert "#" in line or above.strip().startswith("#"), line
    assert any("peak_flops_per_s:  #" in line for line in lines)


@pytest.mark.parametrize(
    "counts, sizes",
    [
        ({}, (8, 1)),
        ({"nodes": 4}, (8, 4)),
        ({"devices": 2}, (2, 1)),
        ({"devices": 16}, (8, 2)),
        ({"devices": 12, "nodes": 3}, (4, 3)),
    ],
)
def test_presets_come_in_any_size(counts: dict[str, int], sizes: tuple[int, int]) -> None:
    assert tuple(level.size for level in ClusterSpec.preset("dgx-h100", **counts).levels) == sizes


def test_counts_that_a_preset_proposes_would_do() -> None:
    assert tuple(ClusterSpec.preset("dgx-h100", devices=count).world_size for count in (8, 16)) == (8, 16)
    for nodes, counts in ((2, (12, 16, 2, 4)), (5, (10, 15))):
        assert tuple(ClusterSpec.preset("dgx-h100", nodes, count).world_size for count in counts) == counts


@pytest.mark.parametrize("name", ["cluster.yaml", "cluster.json"])
@pytest.mark.parametrize("spec", [ClusterSpec.preset("dgx-h100", nodes=4), ClusterSpec.local(3, "1 GiB", cores=2)])
def test_a_file_reads_back_as_it_was_saved(tmp_path: Path, spec: ClusterSpec, name: str) -> None:
    path = tmp_path / name
    spec.save(path)
    assert ClusterSpec.load(path) == spec
    assert list(tmp_path.iterdir()) == [path]
    if name.endswith("json"):
        assert json.loads(path.read_text()) == spec.to_dict()


def test_a_failed_save_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.mkdir()
    with pytest.raises(ClusterError, match="cannot be written"):
        ClusterSpec.local(1).save(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_description_is_a_value() -> None:
    first, second = ClusterSpec.preset("dgx-a100", nodes=2), ClusterSpec.preset("dgx-a100", devices=16)
    assert first == second and hash(first) == hash(second)
    assert ClusterSpec.from_dict(first.to_dict()) == first


def test_local_processes_share_the_machine() -> None:
    one, four = ClusterSpec.local(1, cores=8), ClusterSpec.local(4, cores=8)
    assert (four.world_size, four.backend) == (4, "gloo")
    assert four.device.memory_bytes == one.device.memory_bytes // 4
    assert four.device.peak("float32") == one.device.peak("float32") / 4
    assert ClusterSpec.local(4, memory_bytes=1000).device.memory_bytes == 1000


@pytest.mark.parametrize(
    "found, name, devices",
    [
        (["NVIDIA H100 80GB HBM3"] * 8, "NVIDIA H100 SXM 80GB", 8),
        (["NVIDIA A100-SXM4-40GB"] * 4, "NVIDIA A100 SXM4 40GB", 4),
        (["NVIDIA GeForce RTX 4090"], "NVIDIA GeForce RTX 4090", 1),
        (["Tesla V100-SXM2-32GB"] * 8, "NVIDIA V100 SXM2 32GB", 8),
        ([], "cpu", 3),
    ],
)
def test_detects_the_machine(monkeypatch: pytest.MonkeyPatch, found: list[str], name: str, devices: int) -> None:
    monkeypatch.setattr("planner.base.host.gpus", lambda: found)
    monkeypatch.setattr("planner.base.host.cores", lambda: 3)
    monkeypatch.setattr("planner.base.host.memory_bytes", lambda: 2**40)
    spec = ClusterSpec.detect()
    assert (spec.device.kind, spec.world_size) == (name, devices)
    assert spec.host_memory.memory_bytes == 2**40 // devices


@pytest.mark.parametrize("found", [["NVIDIA H100 PCIe"], ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]])
def test_gpus_that_no_preset_describes(monkeypatch: pytest.MonkeyPatch, found: list[str]) -> None:
    monkeypatch.setattr("planner.base.host.gpus", lambda: found)
    with pytest.raises(ClusterError, match="no preset describes the GPUs") as caught:
        ClusterSpec.detect()
    assert found[0] in str(caught.value) and "autopar profile" in str(caught.value)


def test_describe() -> None:
    assert ClusterSpec.from_dict(written()).describe().splitlines() == [
        "lab: 8 x Some GPU, nccl",
        "  memory 80 GiB (72 usable) at 2000 GB/s",
        "  peak float32 19.5 TFLOP/s, bfloat16 312 TFLOP/s",
        "  4 devices per node: 100 GB/s per device, 0.5 us",
        "  2 nodes per rack: 25 GB/s per device, 10 us",
    ]


def edited(*path: str | int, value: object) -> dict[str, Any]:
    """What is written above, with one place replaced."""
    data = written()
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return data


@pytest.mark.parametrize(
    "data, parts",
    [
        (edited("device", "memory_byts", value=1), ["device.memory_byts", "did you mean 'memory_bytes'?"]),
        (edited("nam", value="x"), ["nam:", "did you mean 'name'?"]),
        (edited("levels", 1, "latency", value=1), ["levels[1].latency", "did you mean 'latency_s'?"]),
        (edited("device", "peak_flops_per_s", "bf16", value=1), ["device.peak_flops_per_s.bf16", "bfloat16"]),
        (edited("device", "memory_bytes", value=0), ["device.memory_bytes is 0", "greater than 0", "80 GiB"]),
        (edited("device", "memory_bytes", value=-8), ["device.memory_bytes is -8", "greater than 0", "80 GiB"]),
        (edited("device", "memory_bytes", value="80"), ["device.memory_bytes is '80'", "unit", "80 GiB"]),
        (edited("device", "memory_bytes", value="80 GB/s"), ["device.memory_bytes is '80 GB/s'", "80 GiB"]),
        (edited("device", "memory_bytes", value=True), ["device.memory_bytes is True", "80 GiB"]),
        (edited("device", "memory_bytes", value=float("nan")), ["device.memory_bytes is nan", "80 GiB"]),
        (edited("device", "memory_bandwidth_bytes_per_s", value="2 TB"), ["'2 TB'", "3.35 TB/s"]),
        (edited("levels", 0, "bandwidth_bytes_per_s", value=0), ["levels[0].bandwidth_bytes_per_s is 0", "Gb/s"]),
        (edited("levels", 0, "latency_s", value=float("nan")), ["levels[0].latency_s is nan", "finite", "2 us"]),
        (edited("levels", 0, "latency_s", value=float("inf")), ["levels[0].latency_s is inf", "finite", "2 us"]),
        (edited("levels", 0, "size", value=0), ["levels[0].size is 0", "size: 8"]),
        (edited("levels", 0, "size", value="8"), ["levels[0].size is '8'", "whole number", "size: 8"]),
        (edited("levels", value=[]), ["levels is ()", "at least 1", "{name: node, size: 8"]),
        (edited("levels", 1, "name", value="node"), ["levels[0] and levels[1] are both called 'node'", "its own"]),
        (edited("device", value="gpu"), ["device is 'gpu'", "memory_bytes: 80 GiB"]),
        (
            edited("device", "peak_flops_per_s", value={"bfloat16": 1e12}),
            ["device.peak_flops_per_s.float32 is missing"],
        ),
        (edited("device", "peak_flops_per_s", "float16", value=0), ["float16 is 0", "989 TFLOP/s"]),
        (
            edited("device", "matmul_efficiency", value=1.5),
            ["device.matmul_efficiency is 1.5", "less than or equal to 1"],
        ),
        (edited("device", "reserve_fraction", value=1.0), ["device.reserve_fraction is 1.0", "less than 1"]),
        (edited("device", 3, value=1), ["3 cannot be the name of a field"]),
        (edited("host", value="much"), ["host is 'much'", "memory_bytes: 256 GB"]),
        (edited("host", value={**HOST, "memory_bytes": 0}), ["host.memory_bytes is 0", "greater than 0", "256 GB"]),
        (edited("host", value={**HOST, "link_bytes_per_s": "25 GB"}), ["host.link_bytes_per_s is '25 GB'", "25 GB/s"]),
        (edited("host", value={"memory_bytes": 1}), ["host.link_bytes_per_s is missing", "host.memory_bandwidth"]),
        (edited("host", value={**HOST, "size": 1}), ["host.size: there is no such field"]),
        (edited("backend", value="mpi"), ["backend is 'mpi'", "'nccl' or 'gloo'"]),
        (edited("self", value=1), ["self: there is no such field"]),
        ({}, ["name is missing", "device is missing", "levels is missing"]),
        (None, ["name, device, levels, host, disk, backend", "None"]),
    ],
)
def test_what_is_wrong_names_the_field_the_value_and_the_way_out(data: object, parts: list[str]) -> None:
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.from_dict(data)
    for part in parts:
        assert part in str(caught.value)


def test_missing_memory_says_what_to_write() -> None:
    data = written()
    del data["device"]["memory_bytes"]
    with pytest.raises(ClusterError, match="memory_bytes is missing; write for example memory_bytes: 80 GiB"):
        ClusterSpec.from_dict(data)


def test_all_that_is_wrong_is_said_at_once() -> None:
    data = edited("levels", 0, "size", value=0) | {"backend": "mpi"}
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.from_dict(data)
    assert [line.split(" is ")[0] for line in str(caught.value).splitlines()] == ["levels[0].size", "backend"]


def test_what_follows_from_a_wrong_part_is_not_said() -> None:
    """Without its only level a cluster would also have too few."""
    data = edited("levels", value=[{"name": "node", "size": "four", "latency_s": "5 us", "bandwidth_bytes_per_s": 1}])
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.from_dict(data)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("levels[0].size is 'four'")


def test_launch_overhead_may_be_left_out() -> None:
    data = written()
    del data["device"]["launch_overhead_s"]
    assert ClusterSpec.from_dict(data).device.launch_overhead_s == 0


def test_parts_made_in_code_are_checked_alike() -> None:
    with pytest.raises(ClusterError, match="size is 0"):
        Level(name="node", size=0, latency_s=0, bandwidth_bytes_per_s=1)
    with pytest.raises(ClusterError, match="kind is ''"):
        Device(
            kind="",
            memory_bytes=1,
            peak_flops_per_s=PeakFlops(float32=1),
            memory_bandwidth_bytes_per_s=1,
            launch_overhead_s=0,
        )


@pytest.mark.parametrize(
    "name, counts, parts",
    [
        ("dgx-h10", {}, ["did you mean 'dgx-h100'?", *PRESETS]),
        ("toaster", {}, PRESETS),
        ("dgx-h100", {"nodes": 0}, ["nodes is 0", "at least 1"]),
        ("dgx-h100", {"nodes": 1.5}, ["nodes is 1.5"]),
        ("dgx-h100", {"devices": -1}, ["devices is -1", "at least 1"]),
        ("dgx-h100", {"devices": 12}, ["12 devices", "one node of 8", "1 to 8", "such as 8 or 16", "nodes=2", "6 in"]),
        ("dgx-h100", {"devices": 32, "nodes": 2}, ["devices=32 with nodes=2", "1 to 8 in each", "give devices=16,"]),
        ("dgx-h100", {"devices": 12, "nodes": 5}, ["devices=12 with nodes=5", "give devices=10 or 15,"]),
        ("dgx-h100", {"devices": 1, "nodes": 2}, ["devices=1 with nodes=2", "give devices=2 or 4,"]),
    ],
)
def test_wrong_presets(name: str, counts: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.preset(name, **counts)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("arguments", [{"devices": 0}, {"devices": True}, {"devices": 2, "cores": 0}])
def test_wrong_local_counts(arguments: dict[str, int]) -> None:
    with pytest.raises(ClusterError, match="at least 1"):
        ClusterSpec.local(**arguments)


@pytest.mark.parametrize(
    "content, part",
    [(None, "cannot be read"), (b"name: [", "neither YAML nor JSON"), (b"\xff\xfe\xfa", "neither YAML nor JSON"),
     (b"", "mapping"), (b"name: lab", "device is missing")],
)  # fmt: skip
def test_wrong_files(tmp_path: Path, content: bytes | None, part: str) -> None:
    path = tmp_path / "cluster.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ClusterError, match=part) as caught:
        ClusterSpec.load(path)
    assert str(path) in str(caught.value)


def test_a_cluster_may_say_that_gradients_are_reduced_after_backward() -> None:
    """Then all of the reduction is in the step, and a plan's steps are longer by what was hidden."""
    for overlap in (-0.1, 1.5):
        with pytest.raises(ClusterError, match="overlap"):
            ClusterSpec.from_dict({**written(), "overlap": overlap})
    graph, seconds = residual_mlp(layers=3), []
    for overlap in (None, 0.9, 0.0):
        spec = ClusterSpec.preset("dgx-a100", devices=8).model_copy(update={"overlap": overlap})
        assert ClusterSpec.from_dict(spec.to_dict()) == spec
        seconds.append(plan_of(graph, spec, {"data": 8, "zero": 0}).predicted.time_s["gradients"])
    assert seconds[0] == seconds[1] < seconds[2]


def test_a_preset_in_the_place_of_a_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ClusterError, match=r"'dgx-h100' cannot be read: .* write preset:dgx-h100 on the command line"):
        ClusterSpec.load("dgx-h100")
    spec = ClusterSpec.local(3)
    spec.save("dgx-h100")
    assert ClusterSpec.load("dgx-h100") == spec


def test_a_plan_is_no_cluster_and_has_one(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_of(residual_mlp()).save(path)
    with pytest.raises(ClusterError, match=r"plan.json' is a plan: Plan.load\(.*\).cluster.save\('cluster.yaml'\)"):
        ClusterSpec.load(path)


def test_software_is_stated_by_name() -> None:
    """What is left out is autopar's own, and a cluster without it is written as before."""
    plain = ClusterSpec.from_dict(written())
    assert plain.software == Software() and "software" not in plain.to_dict()
    spec = ClusterSpec.from_dict({**written(), "software": {"compile": "layers", "overlaps": ["gathers", "tensor"]}})
    assert ClusterSpec.from_dict(spec.to_dict()) == spec
    assert "software compile layers, overlaps gathers and tensor" in spec.describe()
    with pytest.raises(ClusterError, match=r"software.overlaps.*'gathers' or 'tensor'"):
        ClusterSpec.from_dict({**written(), "software": {"overlaps": ["everything"]}})
