"""The description of a cluster that people write, turned into checked numbers in base units.

A :class:`ClusterSpec` is a file (YAML or JSON): one kind of device, and the levels of the network,
innermost first. Ranks are numbered level by level, so the devices of a node are consecutive. Every
bandwidth is per device and direction; quantities may be written as people write them
(:mod:`planner.base.units`). ``calibration:`` names a file of measurements next to it, or holds them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import yaml
from pydantic import BeforeValidator, Field, model_validator

from planner.base import host as machine
from planner.base.errors import ClusterError
from planner.base.files import check_path, read_yaml, write_text
from planner.base.units import (
    FROZEN,
    Bytes,
    BytesPerS,
    Described,
    FlopsPerS,
    Fraction,
    Seconds,
    check_data,
    nearest,
)
from planner.cost.calibration import Calibration
from planner.cost.software import OWN, Software

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


WHISKER = 2.7
"""Standard deviations of a normal beyond which a box plot shows outliers (Tukey, 1977): one in 144."""
MOST_DEVICES = 2**20
"""Of a cluster: meshes of more would take longer to list than to search."""


class PeakFlops(Described):
    """Dense peak of matrix products by dtype, in operations per second (a multiply-add is two)."""

    float32: FlopsPerS = Field(gt=0, examples=["67 TFLOP/s"])
    tfloat32: FlopsPerS | None = Field(default=None, gt=0, examples=["494 TFLOP/s"])
    float64: FlopsPerS | None = Field(default=None, gt=0, examples=["67 TFLOP/s"])
    float16: FlopsPerS | None = Field(default=None, gt=0, examples=["989 TFLOP/s"])
    bfloat16: FlopsPerS | None = Field(default=None, gt=0, examples=["989 TFLOP/s"])
    float8_e4m3fn: FlopsPerS | None = Field(default=None, gt=0, examples=["1979 TFLOP/s"])
    float8_e5m2: FlopsPerS | None = Field(default=None, gt=0, examples=["1979 TFLOP/s"])


Efficiency = Annotated[tuple[Fraction, Fraction], FROZEN]
"""Share of the peak, forward and backward."""
AttentionKernel = Literal["efficient", "flash_2", "flash_3", "cudnn"]


class AttentionKernels(Described):
    """What share of the peak kernels of attention reach on a device, forward and backward."""

    efficient: Efficiency | None = Field(default=None, examples=["[0.3, 0.25]"])
    flash_2: Efficiency | None = Field(default=None, examples=["[0.37, 0.33]"])
    flash_3: Efficiency | None = Field(default=None, examples=["[0.65, 0.53]"])
    cudnn: Efficiency | None = Field(default=None, examples=["[0.6, 0.5]"])


class Device(Described):
    """One accelerator, or one process on a CPU.

    Attributes:
        launch_overhead_s: the fixed price of starting one operator or collective; a few microseconds on a GPU.
        matmul_efficiency: share of the peak that a large product of fitting shape sustains: the clock under the
            power limit over the boost clock that the peak is stated for, and the issue slots that are not products.
        attention_efficiency: share of the peak that flash attention reaches, forward and backward, where no kernel is
            named.
        attention_kernels: that share of several kernels.
        attention_kernel: which of them runs.
        clock_spread: what programs on the slowest and the fastest device of this kind that is no outlier differ by,
            over the median, taken for their clocks under the power limit; a step waits for the slowest. Left out: they
            are alike.
        memory_efficiency: share of the bandwidth that large operators reach.
        multiprocessors: how many there are, each computing a tile at a time; without, products are priced by flops.
        cache_bandwidth_bytes_per_s: from the shared cache to all multiprocessors.
        float32_products: how products of float32 are computed: torch's default, or what
            ``torch.set_float32_matmul_precision("high")`` chooses.
        reserve_fraction: of the memory, left to the allocator, the driver and communication buffers.
    """

    kind: str = Field(min_length=1, examples=["NVIDIA H100 SXM 80GB"])
    memory_bytes: Bytes = Field(gt=0, examples=["80 GiB"])
    peak_flops_per_s: PeakFlops = Field(examples=["{float32: 67 TFLOP/s, bfloat16: 989 TFLOP/s}"])
    memory_bandwidth_bytes_per_s: BytesPerS = Field(gt=0, examples=["3.35 TB/s"])
    launch_overhead_s: Seconds = Field(default=0.0, ge=0, examples=["3 us"])
    matmul_efficiency: Fraction = 0.75
    attention_efficiency: Efficiency = Field(default=(0.5, 0.4), examples=["[0.5, 0.4]"])
    attention_kernels: AttentionKernels | None = Field(default=None, examples=["{flash_2: [0.37, 0.33]}"])
    attention_kernel: AttentionKernel | None = Field(default=None, examples=["flash_2"])
    clock_spread: float | None = Field(default=None, ge=0, le=0.5, examples=["0.08"])
    memory_efficiency: Fraction = 0.85
    multiprocessors: int | None = Field(default=None, ge=1, examples=["132"])
    cache_bandwidth_bytes_per_s: BytesPerS | None = Field(default=None, gt=0, examples=["5.5 TB/s"])
    float32_products: Literal["float32", "tfloat32"] = Field(default="float32", examples=["float32"])
    reserve_fraction: float = Field(default=0.1, ge=0, lt=1, examples=["0.1"])

    @model_validator(mode="after")
    def _with_the_kernel_that_runs(self) -> Device:
        _ = self.attention
        return self

    @property
    def attention(self) -> tuple[float, float]:
        """Share of the peak that attention reaches, forward and backward."""
        if self.attention_kernel is None:
            return self.attention_efficiency
        found: tuple[float, float] | None = getattr(self.attention_kernels, self.attention_kernel, None)
        if found is None:
            stated = self.attention_kernels or AttentionKernels()
            known = ", ".join(name for name, rate in stated if rate is not None) or "none"
            raise ClusterError(
                f"attention_kernel is {self.attention_kernel!r}; attention_kernels says how fast these are: {known}. "
                f"Add it there, as shares of the peak forward and backward, such as {self.attention_kernel}: [0.6, 0.5]"
            )
        return found

    def at_clock(self, share: float) -> Device:
        """This device at a share of its sustained clock, at which it computes; memory has a clock of its own."""
        forward, backward = self.attention
        return self.model_copy(
            update={
                "matmul_efficiency": self.matmul_efficiency * share,
                "attention_kernel": None,
                "attention_efficiency": (forward * share, backward * share),
            }
        )

    @property
    def usable_bytes(self) -> int:
        """Memory that a plan may fill, in bytes."""
        return int(self.memory_bytes * (1 - self.reserve_fraction))

    def peak(self, dtype: str) -> float:
        """Peak of ``dtype`` in operations per second; that of float32 where none is given."""
        name = self.float32_products if dtype == "float32" else dtype
        stated: float | None = getattr(self.peak_flops_per_s, name, None)
        return self.peak_flops_per_s.float32 if stated is None else stated


class Level(Described):
    """A level of the network: ``size`` units of the level below, and a device's link to the others of them.

    ``in_switch_bytes_per_s`` is how fast switches that add up themselves reduce a tensor for all devices of a unit,
    in bytes of that tensor: the all-reduce's "algorithm bandwidth".
    """

    name: str = Field(min_length=1, examples=["node"])
    size: int = Field(ge=1, examples=["8"])
    latency_s: Seconds = Field(ge=0, examples=["2 us"])
    bandwidth_bytes_per_s: BytesPerS = Field(gt=0, examples=["400 Gb/s"])
    in_switch_bytes_per_s: BytesPerS | None = Field(default=None, gt=0, examples=["270 GB/s"])


Levels = Annotated[tuple[Level, ...], FROZEN]


class Host(Described):
    """The memory of the machine that a device is in: its share of it, and the way there.

    Attributes:
        link_bytes_per_s: between a device and this memory, in each direction.
        memory_bandwidth_bytes_per_s: a device's share of what the host's cores pass over.
    """

    memory_bytes: Bytes = Field(gt=0, examples=["256 GB"])
    link_bytes_per_s: BytesPerS = Field(gt=0, examples=["25 GB/s"])
    memory_bandwidth_bytes_per_s: BytesPerS = Field(gt=0, examples=["50 GB/s"])


class Disk(Described):
    """Storage in the machine that a device is in, or over a network: a device's share of it, and of its speed."""

    memory_bytes: Bytes = Field(gt=0, examples=["3.84 TB"])
    read_bytes_per_s: BytesPerS = Field(gt=0, examples=["6.5 GB/s"])
    write_bytes_per_s: BytesPerS = Field(gt=0, examples=["3.5 GB/s"])


@dataclass(frozen=True)
class Home:
    """What a plan needs to know of where its model data is at home, if not on the device.

    Attributes:
        memory_bytes: a device's share.
        fetch_bytes_per_s: from there to the device.
        evict_bytes_per_s: from the device to there.
        read_bytes_per_s: as the host's cores read it, who update.
        write_bytes_per_s: as they write it.
    """

    memory_bytes: int
    fetch_bytes_per_s: float
    evict_bytes_per_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float


AtLeastOne = Annotated[float, Field(ge=1)]
ONE_OR_MORE = BeforeValidator(lambda value: (value,) if isinstance(value, int | float) else value)


class ClusterSpec(Described):
    """A homogeneous cluster: equal devices under nested network levels, innermost first.

    ``host`` is what plans that keep model data beside the device need to know (``pin={"offload": "host"}``),
    ``disk`` besides what those need that keep it in files (``pin={"offload": "disk"}``).
    ``expert_imbalance`` is how many rows the busiest rank has over the average, where ranks share experts: one number,
    or those of 2, 4, 8 ranks and so on, as ``pmodel.load().imbalances`` has them; left out: as many as the others.
    ``software`` says what the stack that runs steps fuses and overlaps, where that is not autopar's runtime.
    ``overlap`` is the share of backward's computing beside which gradients can be reduced: 0 where reducing starts when
    backward is over. Left out, it is what the backend allows.
    """

    name: str = Field(min_length=1, examples=["my-cluster"])
    device: Device = Field(examples=["{kind: ..., memory_bytes: 80 GiB, ...}"])
    levels: Levels = Field(min_length=1, examples=["[{name: node, size: 8, ...}, {name: cluster, size: 4, ...}]"])
    host: Host | None = Field(default=None, examples=["{memory_bytes: 256 GB, link_bytes_per_s: 25 GB/s, ...}"])
    disk: Disk | None = Field(default=None, examples=["{memory_bytes: 3.84 TB, read_bytes_per_s: 6.5 GB/s, ...}"])
    backend: Literal["nccl", "gloo"] = Field(default="nccl", examples=["nccl"])
    software: Software = Field(default=OWN, examples=["{compile: layers, overlaps: [gathers]}"])
    overlap: float | None = Field(default=None, ge=0, le=1, examples=["0.9"])
    expert_imbalance: Annotated[tuple[AtLeastOne, ...], FROZEN, ONE_OR_MORE] | None = Field(
        default=None, min_length=1, examples=["1.2, or [1.1, 1.2, 1.4] of 2, 4 and 8 ranks"]
    )
    calibration: Calibration | None = Field(default=None, examples=["calibration.yaml, in a cluster file"])

    @model_validator(mode="after")
    def _with_names_of_their_own(self) -> ClusterSpec:
        first: dict[str, int] = {}
        for number, level in enumerate(self.levels):
            if first.setdefault(level.name, number) != number:
                raise ClusterError(
                    f"levels[{first[level.name]}] and levels[{number}] are both called {level.name!r}; give each level "
                    "of the network a name of its own, such as 'node' and 'cluster'"
                )
        return self

    @model_validator(mode="after")
    def _of_a_size_that_is_planned_for(self) -> ClusterSpec:
        if self.world_size > MOST_DEVICES:
            sizes = " x ".join(str(level.size) if level.size <= MOST_DEVICES else "..." for level in self.levels)
            raise ClusterError(
                f"levels: the sizes make {sizes} devices, and more than {MOST_DEVICES:,} are not planned for; give "
                "smaller sizes"
            )
        return self

    @model_validator(mode="after")
    def _in_float8_where_that_has_a_price(self) -> ClusterSpec:
        if not self.software.float8:
            return self
        if self.device.peak_flops_per_s.float8_e4m3fn is None:
            raise ClusterError(
                f"software says float8, but {self.device.kind!r} states no peak for it: add "
                "device.peak_flops_per_s.float8_e4m3fn, such as 1979 TFLOP/s, or leave float8 out"
            )
        if self.calibration is not None and self.calibration.products:
            raise ClusterError(
                "software says float8, but the calibration has products as they were measured, none of them in float8: "
                "leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _calibrated_for_this(self) -> ClusterSpec:
        found = self.calibration
        if found is None:
            return self
        way_out = f"measure here: autopar profile --ranks {self.spans[0]}"
        if found.device != self.device.kind:
            raise ClusterError(f"calibration is of {found.device!r}, but the device is {self.device.kind!r}; {way_out}")
        if found.ranks not in (1, *self.spans):
            units = ", ".join(map(str, self.spans))
            raise ClusterError(f"calibration is of {found.ranks} ranks, but a level has {units} devices; {way_out}")
        return self

    @property
    def world_size(self) -> int:
        """How many devices, and so ranks, there are."""
        return math.prod(level.size for level in self.levels)

    @property
    def slowest(self) -> Device:
        """The device that a step waits for: the slowest that so many are expected to have, outliers being replaced.

        Clocks are taken to be normal. How far the last of ``n`` is from the mean: Blom (1958), to 1 % from eight on.
        """
        n = self.world_size
        deviations = min(WHISKER, NormalDist().inv_cdf((n - 0.375) / (n + 0.25)))
        return self.device.at_clock(1 - (self.device.clock_spread or 0.0) / 2 * deviations / WHISKER)

    @property
    def on_cpu(self) -> bool:
        """Whether ranks compute on CPUs: there is no flash attention, and moving takes the cores that compute."""
        return self.backend == "gloo"

    @property
    def spans(self) -> tuple[int, ...]:
        """Devices in one unit of each level, innermost first: ``(8, 32)`` for four nodes of eight."""
        sizes = [level.size for level in self.levels]
        return tuple(math.prod(sizes[: i + 1]) for i in range(len(sizes)))

    @property
    def host_memory(self) -> Host:
        """The host's memory as plans that offload to it see it, with the link as measured where it was.

        Raises :class:`ClusterError` if this cluster does not say what its host has.
        """
        if self.host is None:
            fields = "memory_bytes, link_bytes_per_s and memory_bandwidth_bytes_per_s"
            way_out = "ClusterSpec.local takes host_memory_bytes" if self.on_cpu else "all of one device's share"
            raise ClusterError(
                f"cluster {self.name!r} does not say what memory its devices have beside them, which a plan that "
                f"offloads must know: add 'host' with {fields} ({way_out})"
            )
        measured = None if self.calibration is None else self.calibration.host_link_bytes_per_s
        return self.host if measured is None else self.host.model_copy(update={"link_bytes_per_s": measured})

    def home(self, on_disk: bool, dtype: str = "float32") -> Home:
        """Where plans that offload keep model data; what is on disk comes to the device through the host.

        Args:
            dtype: of the optimizer's state there, on which the host's speed depends where it was measured.

        Raises :class:`ClusterError` if this cluster does not describe it.
        """
        host = self.host_memory
        if not on_disk:
            measured = None if self.calibration is None else self.calibration.host_update_bytes_per_s(dtype)
            link, passed = host.link_bytes_per_s, measured or host.memory_bandwidth_bytes_per_s
            return Home(host.memory_bytes, link, link, passed, passed)
        if self.disk is None:
            way_out = "ClusterSpec.local takes disk_bytes" if self.on_cpu else "all of one device's share"
            raise ClusterError(
                f"cluster {self.name!r} does not say what disk its devices have, which a plan that offloads to disk "
                f"must know: add 'disk' with memory_bytes, read_bytes_per_s and write_bytes_per_s ({way_out})"
            )
        read, write = self.disk.read_bytes_per_s, self.disk.write_bytes_per_s
        link = host.link_bytes_per_s
        return Home(self.disk.memory_bytes, min(read, link), min(write, link), read, write)

    @classmethod
    def preset(cls, name: str, nodes: int | None = None, devices: int | None = None) -> ClusterSpec:
        """A well-known machine; ``nodes`` of them, or as many as hold ``devices``.

        Fewer ``devices`` than a node has are one smaller node. Raises :class:`ClusterError` for an unknown
        name or a count that the machine cannot have.
        """
        files = _presets()
        if not isinstance(name, str) or name not in files:
            raise ClusterError(f"there is no preset {name!r}; {nearest(str(name), sorted(files))}")
        for what, count in (("nodes", nodes), ("devices", devices)):
            if count is not None:
                _check_count(f"preset {name!r}", what, count)
        spec = cls.from_dict(yaml.safe_load(files[name].read_text(encoding="utf-8")))
        node, network = spec.levels
        count = nodes or max(1, (devices or 1) // node.size)
        per_node, rest = divmod(devices or count * node.size, count)
        if rest or not 1 <= per_node <= node.size:
            assert devices is not None, "whole nodes are equal ones"
            raise ClusterError(f"preset {name!r}: {_unequal(devices, nodes, node.size)}")
        levels = (node.model_copy(update={"size": per_node}), network.model_copy(update={"size": count}))
        return spec.model_copy(update={"levels": levels})

    @classmethod
    def local(
        cls,
        devices: int,
        memory_bytes: int | str | None = None,
        cores: int | None = None,
        host_memory_bytes: int | str | None = None,
        disk_bytes: int | str | None = None,
    ) -> ClusterSpec:
        """``devices`` CPU processes on this machine, talking over gloo on the loopback interface.

        Each process gets its share of the cores and, unless ``memory_bytes`` is given, of the memory.
        Give ``memory_bytes`` and ``cores`` for a description that does not depend on the machine.

        For plans that offload, ``memory_bytes`` is the device's budget and ``host_memory_bytes`` is beside it: left
        out, a share of the machine's memory, or none if ``cores`` are given. ``disk_bytes`` is a process's share of a
        disk.
        """
        _check_count("local cluster", "devices", devices)
        if cores is not None:
            _check_count("local cluster", "cores", cores)
        share = (cores or machine.cores()) / devices
        device = {
            "kind": "cpu",
            "memory_bytes": machine.memory_bytes() // devices if memory_bytes is None else memory_bytes,
            # Per core: AVX2 does two fused multiply-adds of 8 floats a cycle, 32 FLOP, at a cautious 1.5 GHz.
            # Without AMX, half precision is computed in float32.
            "peak_flops_per_s": {"float32": 48e9 * share, "float64": 24e9 * share},
            "memory_bandwidth_bytes_per_s": 8e9 * share,
            "launch_overhead_s": 10e-6,
        }
        # Measured with torch 2.13 on two busy cores: 0.57 GB/s in a ring of two or four, 0.2 to 1 ms a step.
        level = {
            "name": "host",
            "size": devices,
            "latency_s": 200e-6,
            "bandwidth_bytes_per_s": 0.6e9 * min(1.0, share),
        }
        spec = {"name": "local", "device": device, "levels": [level], "backend": "gloo"}
        if host_memory_bytes is None and cores is None:
            host_memory_bytes = machine.memory_bytes() // devices
        if host_memory_bytes is not None:
            passed = 8e9 * share
            spec["host"] = {
                "memory_bytes": host_memory_bytes,
                "link_bytes_per_s": passed / 2,  # a copy reads and writes
                "memory_bandwidth_bytes_per_s": passed,
            }
        if disk_bytes is not None:  # an estimate: one NVMe drive that the processes share, through the page cache
            spec["disk"] = {
                "memory_bytes": disk_bytes,
                "read_bytes_per_s": 2e9 / devices,
                "write_bytes_per_s": 1e9 / devices,
            }
        return cls.from_dict(spec)

    @classmethod
    def detect(cls) -> ClusterSpec:
        """This machine: its GPUs, if they are of a known kind, or else one CPU process per core, up to eight.

        GPUs share the memory that the machine has.

        Raises :class:`ClusterError` for GPUs that no preset describes.
        """
        names = machine.gpus()
        if not names:
            return cls.local(min(8, machine.cores()))
        preset = next((preset for pattern, preset in _PRESETS if re.search(pattern, names[0])), None)
        if preset is None or len(set(names)) > 1:
            raise ClusterError(
                f"no preset describes the GPUs of this machine ({', '.join(sorted(set(names)))}): describe them in a "
                "cluster file, or measure them with autopar profile --cluster cluster.yaml"
            )
        spec = cls.preset(preset)
        node = spec.levels[0].model_copy(update={"size": len(names)})
        assert spec.host is not None
        host = spec.host.model_copy(update={"memory_bytes": machine.memory_bytes() // len(names)})
        return spec.model_copy(update={"name": "detected", "host": host, "levels": (node, *spec.levels[1:])})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ClusterSpec:
        """Read a description from a YAML or JSON file, and the calibration file that it names, from its folder.

        Raises :class:`ClusterError` naming what is wrong.
        """
        check_path(path, "cluster file", ClusterError)
        name = os.fspath(path)
        if name in _presets() and not Path(path).exists():
            raise ClusterError(
                f"cluster file {name!r} cannot be read: there is no such file, but a preset of that name: write "
                f"preset:{name} on the command line, ClusterSpec.preset({name!r}) in Python"
            )
        if not Path(path).exists():
            raise ClusterError(
                f"cluster file {name!r} cannot be read: No such file or directory; give a file's path, or a preset: "
                "preset:NAME:NODES on the command line (or local:4, or detect), ClusterSpec.preset(NAME, nodes=NODES) "
                f"in Python; {nearest(name.partition(':')[0], sorted(_presets()))}"
            )
        data = read_yaml(path, "cluster file")
        if isinstance(data, dict) and {"cluster", "mesh", "blocks"} <= data.keys():
            raise ClusterError(
                f"cluster file {name!r} is a plan: Plan.load({name!r}).cluster.save('cluster.yaml') writes the cluster "
                "that it is for into a file of its own"
            )
        if isinstance(data, dict) and isinstance(data.get("calibration"), str):
            data["calibration"] = Calibration.load(Path(path).parent / data["calibration"])
        try:
            return cls.from_dict(data)
        except ClusterError as error:
            raise ClusterError(f"cluster file {os.fspath(path)!r}:\n{error}") from None

    def save(self, path: str | os.PathLike[str], calibration: str | os.PathLike[str] | None = None) -> None:
        """Write YAML, or JSON where the name ends in ``.json``; a reader sees the old file or the new one, whole.

        A calibration is written along, or referred to if ``calibration`` names the file that holds it.
        """
        target = Path(path)
        data = self.to_dict()
        if calibration is not None:
            data["calibration"] = os.path.relpath(calibration, target.parent)
        text = json.dumps(data, indent=2) + "\n" if target.suffix == ".json" else yaml.safe_dump(data, sort_keys=False)
        try:
            write_text(target, text)
        except OSError as error:
            raise ClusterError(f"cluster file {os.fspath(path)!r} cannot be written: {error.strerror}") from error

    @classmethod
    def from_dict(cls, data: object) -> ClusterSpec:
        """The inverse of :meth:`to_dict`; quantities may be text with units."""
        if not isinstance(data, Mapping):
            raise ClusterError(f"a cluster is a mapping with the fields {', '.join(cls.model_fields)}; got {data!r}")
        check_data(data)
        if isinstance(data.get("calibration"), Mapping):
            data = {**data, "calibration": Calibration.from_dict(data["calibration"])}
        return cls(**data)

    def imbalance(self, ranks: int) -> float:
        """How many rows the busiest of ``ranks`` that share experts has over the average; of numbers between those that
        are stated it is that of the next, of more ranks that of the last.
        """
        stated = np.atleast_1d(self.expert_imbalance or 1.0)
        return float(stated[min(len(stated), (ranks - 1).bit_length()) - 1]) if ranks > 1 else 1.0

    def calibrated(self, calibration: Calibration) -> ClusterSpec:
        """This cluster with what was measured on it; raises :class:`ClusterError` if it was measured on another."""
        return ClusterSpec(**{**dict(self), "calibration": calibration})

    def to_dict(self) -> dict[str, Any]:
        """Plain values in base units, ready for YAML or JSON."""
        own = {"software"} if self.software == OWN else None
        return self.model_dump(mode="json", exclude_none=True, exclude=own)

    def describe(self) -> str:
        """A few lines for people: how many of what, and the links between them."""
        device = self.device
        lines = [
            f"{self.name}: {self.world_size} x {device.kind}, {self.backend}",
            f"  memory {device.memory_bytes / 2**30:.4g} GiB ({device.usable_bytes / 2**30:.4g} usable) "
            f"at {device.memory_bandwidth_bytes_per_s / 1e9:.4g} GB/s",
            "  peak "
            + ", ".join(f"{dtype} {peak / 1e12:.4g} TFLOP/s" for dtype, peak in device.peak_flops_per_s if peak),
        ]
        if self.host is not None:
            lines.append(
                f"  host memory {self.host.memory_bytes / 2**30:.4g} GiB per device, "
                f"{self.host.link_bytes_per_s / 1e9:.4g} GB/s there and back"
            )
        if self.disk is not None:
            lines.append(
                f"  disk {self.disk.memory_bytes / 1e12:.4g} TB per device, read at "
                f"{self.disk.read_bytes_per_s / 1e9:.4g} GB/s, written at {self.disk.write_bytes_per_s / 1e9:.4g} GB/s"
            )
        if self.software != OWN:
            stated = self.software.model_dump(mode="json", exclude_defaults=True)
            lines.append("  software " + ", ".join(f"{name} {_told(value)}" for name, value in stated.items()))
        unit = "devices"
        for level in self.levels:
            if level.size == 1:
                continue
            lines.append(
                f"  {level.size} {unit} per {level.name}: {level.bandwidth_bytes_per_s / 1e9:.4g} GB/s per device, "
                f"{level.latency_s * 1e6:.3g} us"
            )
            unit = f"{level.name}s"
        return "\n".join(lines)


def _told(value: object) -> str:
    return " and ".join(map(str, value)) if isinstance(value, list) else str(value).lower()


def _presets() -> dict[str, Traversable]:
    """The files of the presets, by name."""
    files = resources.files("planner.cost").joinpath("presets").iterdir()
    return {Path(file.name).stem: file for file in files if file.name.endswith(".yaml")}


_PRESETS = (
    (r"V100-SXM", "dgx-v100"),
    (r"A100-SXM4-40GB", "dgx-a100-40gb"),
    (r"A100-SXM4-80GB", "dgx-a100"),
    (r"H100 80GB HBM3", "dgx-h100"),
    (r"H200$", "hgx-h200"),
    (r"B200$", "hgx-b200"),
    (r"RTX 4090$", "workstation"),
)
"""What the driver calls a GPU, as a pattern, and the preset that holds its numbers."""


def _unequal(devices: int, nodes: int | None, size: int) -> str:
    """That so many devices are no equal nodes of up to ``size``, and which counts near them would do."""
    if nodes is None:
        below, least = (
            devices // size * size,
            next(n for n in range(-(-devices // size), devices + 1) if not devices % n),
        )
        return (
            f"{devices} devices are more than one node of {size} has, and no whole number of such nodes; give 1 to "
            f"{size} devices, a multiple of {size} such as {below} or {below + size}, or nodes={least} too, which has "
            f"{devices // least} in each"
        )
    below = max(1, min(devices // nodes, size)) * nodes
    near = " or ".join(str(count) for count in (below, below + nodes) if count <= nodes * size)
    return (
        f"devices={devices} with nodes={nodes} is not the same number of 1 to {size} in each node; give "
        f"devices={near}, or another number of nodes"
    )


def _check_count(owner: str, what: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ClusterError(f"{owner}: {what} is {count!r}; give a whole number of at least 1")
