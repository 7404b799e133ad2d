"""The cluster: what people write about their machines, turned into checked numbers in base units.

A :class:`ClusterSpec` is a file (YAML or JSON): one kind of device, and the levels of the network,
innermost first. Ranks are numbered level by level, so the devices of a node are consecutive. Every
bandwidth is per device and direction; quantities may be written as people write them (``"80 GiB"``,
``"25 GB/s"``, ``"200 Gb/s"``, ``"312 TFLOP/s"``, ``"5 us"``) and are held in bytes, bytes per second,
operations per second and seconds.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from planner.errors import ClusterError
from planner.files import write_text

_SMALL = {"": "1", "m": "1e-3", "u": "1e-6", "µ": "1e-6", "μ": "1e-6", "n": "1e-9"}
_LARGE = {"": "1", "k": "1e3", "K": "1e3", "M": "1e6", "G": "1e9", "T": "1e12", "P": "1e15", "E": "1e18"} | {
    f"{letter}i": str(1024**power) for power, letter in enumerate("KMGTP", start=1)
}
_PER_S = {"B/s": "1", "Bps": "1", "b/s": "0.125", "bps": "0.125", "bit/s": "0.125"}
_FLOPS = dict.fromkeys(("FLOP/s", "FLOPs/s", "FLOPS", "FLOPs"), "1")


def _quantity(value: object, units: Mapping[str, str], prefixes: Mapping[str, str]) -> object:
    """A number in base units from text such as ``"25 GB/s"``; anything that is not text passes unchanged."""
    if not isinstance(value, str):
        return value
    text = value.replace(" ", "").replace("_", "")
    for unit, scale in units.items():
        for prefix, factor in prefixes.items():
            number = text.removesuffix(prefix + unit)
            if number != text and (parsed := _decimal(number)) is not None:
                return float(parsed * Decimal(scale) * Decimal(factor))
    # YAML reads 1e9 (no dot) as text: a bare number in exponent form is in base units.
    if "e" in text.lower() and (parsed := _decimal(text)) is not None:
        return float(parsed)
    raise ValueError("not a number with a unit that is known here")


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


def _whole(value: object) -> object:
    """A float that counts bytes, as an int."""
    return round(value) if isinstance(value, float) and math.isfinite(value) else value


Bytes = Annotated[
    int, BeforeValidator(_whole), BeforeValidator(lambda v: _quantity(v, {"B": "1", "bytes": "1"}, _LARGE))
]
BytesPerS = Annotated[float, BeforeValidator(lambda v: _quantity(v, _PER_S, _LARGE))]
FlopsPerS = Annotated[float, BeforeValidator(lambda v: _quantity(v, _FLOPS, _LARGE))]
Seconds = Annotated[float, BeforeValidator(lambda v: _quantity(v, {"s": "1"}, _SMALL))]
Fraction = Annotated[float, Field(gt=0, le=1, examples=["0.8"])]


class _Described(BaseModel):
    """A frozen, strict part of a cluster description whose errors are :class:`ClusterError`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ClusterError("\n".join(_complaints(type(self), error))) from None


def _complaints(model: type[BaseModel], error: ValidationError) -> Iterable[str]:
    """One line per wrong field: its name, its value, the way out."""
    for problem in error.errors():
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in problem["loc"]).lstrip(".")
        name = str(problem["loc"][0])
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ClusterError):  # a nested part has already explained itself
            yield from (f"{path}.{line}" for line in str(cause).split("\n"))
        elif problem["type"] == "extra_forbidden":
            yield f"{path}: there is no such field; {_nearest(name, model.model_fields)}"
        else:
            examples = model.model_fields[name].examples
            way_out = f"; write for example {name}: {examples[0]}" if examples else ""
            if problem["type"] == "missing":
                yield f"{path} is missing{way_out}"
            else:
                yield f"{path} is {problem['input']!r}: {problem['msg'].removeprefix('Value error, ')}{way_out}"


def _nearest(name: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` and what there is."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return (f"did you mean {close[0]!r}? " if close else "") + f"there are: {', '.join(names)}"


class PeakFlops(_Described):
    """Dense peak of matrix products by dtype, in operations per second (a multiply-add is two)."""

    float32: FlopsPerS = Field(gt=0, examples=["67 TFLOP/s"])
    float64: FlopsPerS | None = Field(default=None, gt=0, examples=["67 TFLOP/s"])
    float16: FlopsPerS | None = Field(default=None, gt=0, examples=["989 TFLOP/s"])
    bfloat16: FlopsPerS | None = Field(default=None, gt=0, examples=["989 TFLOP/s"])
    float8_e4m3fn: FlopsPerS | None = Field(default=None, gt=0, examples=["1979 TFLOP/s"])
    float8_e5m2: FlopsPerS | None = Field(default=None, gt=0, examples=["1979 TFLOP/s"])


class Device(_Described):
    """One accelerator, or one process on a CPU.

    ``matmul_efficiency`` and ``memory_efficiency`` are the shares of the peaks that large operators
    reach; ``launch_overhead_s`` is the fixed price of starting one operator or collective;
    ``reserve_fraction`` of the memory is left to the allocator, the driver and communication buffers.
    """

    kind: str = Field(min_length=1, examples=["NVIDIA H100 SXM 80GB"])
    memory_bytes: Bytes = Field(gt=0, examples=["80 GiB"])
    peak_flops_per_s: PeakFlops = Field(examples=["{float32: 67 TFLOP/s, bfloat16: 989 TFLOP/s}"])
    memory_bandwidth_bytes_per_s: BytesPerS = Field(gt=0, examples=["3.35 TB/s"])
    launch_overhead_s: Seconds = Field(ge=0, examples=["3 us"])
    matmul_efficiency: Fraction = 0.75
    memory_efficiency: Fraction = 0.85
    reserve_fraction: float = Field(default=0.1, ge=0, lt=1, examples=["0.1"])

    @property
    def usable_bytes(self) -> int:
        """Memory that a plan may fill, in bytes."""
        return int(self.memory_bytes * (1 - self.reserve_fraction))

    def peak(self, dtype: str) -> float:
        """Peak of ``dtype`` in operations per second; that of float32 where none is given."""
        stated: float | None = getattr(self.peak_flops_per_s, dtype, None)
        return self.peak_flops_per_s.float32 if stated is None else stated


class Level(_Described):
    """A level of the network: ``size`` units of the level below, and a device's link to the others of them."""

    name: str = Field(min_length=1, examples=["node"])
    size: int = Field(ge=1, examples=["8"])
    latency_s: Seconds = Field(ge=0, examples=["2 us"])
    bandwidth_bytes_per_s: BytesPerS = Field(gt=0, examples=["400 Gb/s"])


Levels = Annotated[tuple[Level, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]


class ClusterSpec(_Described):
    """A homogeneous cluster: equal devices under nested network levels, innermost first."""

    name: str = Field(min_length=1, examples=["my-cluster"])
    device: Device = Field(examples=["{kind: ..., memory_bytes: 80 GiB, ...}"])
    levels: Levels = Field(min_length=1, examples=["[{name: node, size: 8, ...}, {name: cluster, size: 4, ...}]"])
    backend: Literal["nccl", "gloo"] = Field(default="nccl", examples=["nccl"])

    @property
    def world_size(self) -> int:
        """How many devices, and so ranks, there are."""
        return math.prod(level.size for level in self.levels)

    @property
    def spans(self) -> tuple[int, ...]:
        """Devices in one unit of each level, innermost first: ``(8, 32)`` for four nodes of eight."""
        sizes = [level.size for level in self.levels]
        return tuple(math.prod(sizes[: i + 1]) for i in range(len(sizes)))

    @classmethod
    def preset(cls, name: str, nodes: int | None = None, devices: int | None = None) -> ClusterSpec:
        """A well-known machine; ``nodes`` of them, or as many as hold ``devices``.

        Fewer ``devices`` than a node has are one smaller node. Raises :class:`ClusterError` for an unknown
        name or a count that the machine cannot have.
        """
        files = {Path(f.name).stem: f for f in resources.files("planner").joinpath("presets").iterdir()}
        known = sorted(preset for preset, file in files.items() if file.name.endswith(".yaml"))
        if name not in known:
            raise ClusterError(f"there is no preset {name!r}; {_nearest(name, known)}")
        for what, count in (("nodes", nodes), ("devices", devices)):
            if count is not None:
                _check_count(f"preset {name!r}", what, count)
        spec = cls.from_dict(yaml.safe_load(files[name].read_text(encoding="utf-8")))
        node, network = spec.levels
        nodes = nodes or max(1, (devices or 1) // node.size)
        per_node, rest = divmod(devices or nodes * node.size, nodes)
        if rest or not 1 <= per_node <= node.size:
            raise ClusterError(
                f"preset {name!r}: {devices} devices do not fill {nodes} equal nodes of up to {node.size}; "
                f"give devices as a multiple of {node.size}, or with nodes that divide them"
            )
        levels = (node.model_copy(update={"size": per_node}), network.model_copy(update={"size": nodes}))
        return spec.model_copy(update={"levels": levels})

    @classmethod
    def local(cls, devices: int, memory_bytes: int | str | None = None, cores: int | None = None) -> ClusterSpec:
        """``devices`` CPU processes on this machine, talking over gloo on the loopback interface.

        Each process gets its share of the cores and, unless ``memory_bytes`` is given, of the memory.
        Give ``memory_bytes`` and ``cores`` for a description that does not depend on the machine.
        """
        _check_count("local cluster", "devices", devices)
        if cores is not None:
            _check_count("local cluster", "cores", cores)
        share = (cores or _host_cores()) / devices
        device = {
            "kind": "cpu",
            "memory_bytes": _host_memory_bytes() // devices if memory_bytes is None else memory_bytes,
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
        return cls.from_dict({"name": "local", "device": device, "levels": [level], "backend": "gloo"})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ClusterSpec:
        """Read a description from a YAML or JSON file; raises :class:`ClusterError` naming what is wrong."""
        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))  # JSON is YAML
        except OSError as error:
            raise ClusterError(f"cluster file {os.fspath(path)!r} cannot be read: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ClusterError(f"cluster file {os.fspath(path)!r} is neither YAML nor JSON: {error}") from error
        try:
            return cls.from_dict(data)
        except ClusterError as error:
            raise ClusterError(f"cluster file {os.fspath(path)!r}:\n{error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write YAML, or JSON where the name ends in ``.json``; a reader sees the old file or the new one, whole."""
        target = Path(path)
        data = self.to_dict()
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
        _check_keys(data)
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """Plain values in base units, ready for YAML or JSON."""
        return self.model_dump(mode="json", exclude_none=True)

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


def _check_count(owner: str, what: str, count: object) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ClusterError(f"{owner}: {what} is {count!r}; give a whole number of at least 1")


def _check_keys(data: object) -> None:
    """Refuse a key that is not text, anywhere: it cannot be the name of a field."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            if not isinstance(key, str):
                raise ClusterError(f"{key!r} cannot be the name of a field; field names are text")
            _check_keys(value)
    elif isinstance(data, list | tuple):
        for value in data:
            _check_keys(value)


def _host_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _host_memory_bytes() -> int:
    """Memory of this machine, or of this container where that is less."""
    try:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        raise ClusterError("the memory of this machine is not known; give memory_bytes, for example '8 GiB'") from None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return memory_bytes
    return min(memory_bytes, int(limit)) if limit.isdecimal() else memory_bytes
