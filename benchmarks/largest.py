"""Largest: of how many layers a GPT may be that trains on one GPU whose process may take so many bytes of it, with the
memory that its host has; ours beside FSDP2's offload.

A search in tries, each written down as soon as it is over, so that it goes on where it was broken off: what the planner
says fits, by itself; then a few steps in a process of their own, of ours and of FSDP2's. Last both take steps of the
largest model of FSDP2's. A host that runs full would end whatever runs on it, so each process is watched and ended
before.

On a cluster of backend ``gloo`` the same is done in small without a GPU: ours has an arena, and FSDP2, whose memory a
CPU does not tell apart, all of it at once, device and host, by torch's ``MemTracker``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.measure.profile import measured_cluster
from benchmarks import record
from benchmarks.gpt import GPT, Shape
from benchmarks.one_gpu import Step, calibration, error_in, fully_sharded, stepping
from planner.base import host
from planner.base.errors import InfeasibleError
from planner.cost.cluster import ClusterSpec

NAME = "gpu_largest"
NOTES = (
    "GPTs of ever more layers on one GPU whose process may take so many GiB of it, in bfloat16, 8 bytes a parameter, "
    "with the memory of its host. *Planned*: what the planner says fits, with pin {'offload': 'auto', 'update': "
    "'backward'}, where gradients leave the host as they are used. *Ours*, "
    "*fsdp2*: what took steps, FSDP2 being `fully_shard` of every layer with `CPUOffloadPolicy` and fused AdamW, with "
    "every layer recomputed, *keeping* without. Steps and peaks of the largest, and of ours as large as FSDP2's "
    "largest. *Host*: the most of the host's memory that was taken. *Short of*: why it does not train. Each try in a "
    "process of its own."
)
WIDE = Shape(hidden=8192, heads=64, vocab=32768, batch=4, sequence=1024)
"""Of powers of two, to which torch rounds what it pins."""
LIMITS_GIB = (16, 40)
"""And all of the device."""
PIN = {"offload": "auto", "update": "backward"}
STEPS, WARMUP = 2, 1
STATE_BYTES = 4
"""Two moments of bfloat16 for each parameter."""
DATA_BYTES = 4 + STATE_BYTES
"""Of each parameter: itself, its gradient and its state."""
SPARE_BYTES = 8 * 2**30
"""Of the host, for processes and what an update makes."""
FLOOR_BYTES = 2**31
"""A process that leaves less of the host to others is ended."""
SHORT_OF = {
    "ALLOC_FAILED": "device",
    "out of memory": "host",
    "not enough memory": "host",
    "allocate memory": "host",
    "host has no room": "host",
}
"""By what is in an error, where torch does not say that it is the device's."""
TRY_S = 240.0
"""A try that takes longer does not count as one that trains."""
LEAST_S = 60.0
"""None is begun with less time."""


@dataclass(frozen=True)
class Search:
    """What is searched: ``shape`` with more layers or fewer, on a device of each of ``limits`` bytes."""

    cluster: ClusterSpec
    shape: Shape
    limits: tuple[int, ...]

    @property
    def is_simulated(self) -> bool:
        """Whether there is no GPU."""
        return self.cluster.backend == "gloo"

    @property
    def device(self) -> str:
        """The type of that which computes."""
        return "cpu" if self.is_simulated else "cuda"

    def limited(self, limit_bytes: int) -> ClusterSpec:
        """The cluster with devices of so many bytes."""
        device = self.cluster.device.model_copy(update={"memory_bytes": limit_bytes})
        return self.cluster.model_copy(update={"device": device})

    def filling(self) -> int:
        """The layers whose data fills the host."""
        one, two = (_parameters(replace(self.shape, layers=layers)) for layers in (1, 2))
        rest = self.cluster.host_memory.memory_bytes / DATA_BYTES - (2 * one - two)
        return max(1, int(rest // (two - one)))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"cluster": self.cluster.to_dict(), "shape": asdict(self.shape), "limits": [*self.limits]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Search:
        """The inverse of :meth:`to_dict`."""
        return cls(ClusterSpec.from_dict(data["cluster"]), Shape(**data["shape"]), tuple(data["limits"]))


@dataclass(frozen=True)
class Job:
    """A try: ``side`` is ``planned``, ``ours``, ``fsdp2`` (layers recomputed) or ``fsdp2, keeping`` (not)."""

    limit_bytes: int
    side: str
    layers: int


@dataclass(frozen=True)
class Try:
    """What became of one.

    Attributes:
        short_of: what it has too little of: ``plan`` (no plan fits), ``device``, ``host``, ``time``; ``""``: it trains;
            ``error``: it says nothing.
        said: the beginning of an error.
        seconds: of steps, measured.
        peak_bytes: of the device, or predicted.
        host_bytes: the most of the host's memory that it took.
        predicted_s: seconds of a step.
    """

    job: Job
    short_of: str
    said: str = ""
    parameters: int = 0
    seconds: tuple[float, ...] = ()
    peak_bytes: int = 0
    host_bytes: int = 0
    predicted_s: float = 0.0
    predicted_bytes: int = 0
    loss: float | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Try:
        """The inverse of ``asdict``."""
        return cls(**{**data, "job": Job(**data["job"]), "seconds": tuple(data["seconds"])})


@dataclass
class Record:
    """The tries of a search, all of them always written down."""

    search: Search
    tries: list[Try] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=record.circumstances)

    @classmethod
    def open(cls, search: Callable[[], Search]) -> Record:
        """The record there is, or the beginning of one; ``search`` is asked for only then."""
        path = record.RESULTS / f"{NAME}.json"
        if not path.exists():
            return cls(search())
        found = json.loads(path.read_text(encoding="utf-8"))["results"]
        return cls(Search.from_dict(found["search"]), [Try.from_dict(each) for each in found["tries"]])

    def add(self, found: Try) -> None:
        """Another try, in place of one of the same job."""
        self.tries = [*(each for each in self.tries if each.job != found.job), found]
        self.write()

    def write(self) -> str:
        """Write the record, and give its table."""
        raw = {"search": self.search.to_dict(), "tries": [asdict(each) for each in self.tries]}
        title = "The largest GPT that trains on one GPU"
        return record.write(NAME, title, NOTES, table(self), raw, self.facts)


# ---- what is tried next ----------------------------------------------------------------------------------------------


def next_layers(known: Mapping[int, bool], first: int) -> int | None:
    """The number of layers to try next, or ``None``: the largest that fits is known.

    Args:
        known: whether so many layers fit; of the more, the fewer do.
        first: to try when nothing is known.
    """
    fits = max((layers for layers, does in known.items() if does), default=0)
    over = min((layers for layers, does in known.items() if not does and layers > fits), default=None)
    if over is None:
        return max(1, first) if fits < first else fits + max(_eighth(fits), 2 * (fits - first))
    if over - fits <= 1:
        return None
    if fits:
        return (fits + over) // 2
    return over - _eighth(over) if over >= first else over // 2


def _eighth(layers: int) -> int:
    return max(1, layers // 8)


def known_of(tries: Sequence[Try], limit_bytes: int, side: str) -> dict[int, bool]:
    """Whether so many layers fit, by this limit's tries and by what those of others say.

    What fits a device fits a larger one. FSDP2 has all data on the host, so that a host that is too small for it is so
    beside any device.
    """
    found = {}
    for each in tries:
        job, fits = each.job, not each.short_of
        if job.side == "planned" and job.limit_bytes == limit_bytes and side == "ours" and not fits:
            found[job.layers] = False
        if job.side != side or each.short_of == "error":
            continue
        is_host = side == "fsdp2" and each.short_of == "host"
        if is_host or (job.limit_bytes <= limit_bytes if fits else job.limit_bytes >= limit_bytes):
            found[job.layers] = fits
    return found


def largest(tries: Sequence[Try], limit_bytes: int, side: str) -> int:
    """The most layers that are known to fit; 0: none."""
    return max((layers for layers, fits in known_of(tries, limit_bytes, side).items() if fits), default=0)


def next_job(search: Search, tries: Sequence[Try], stuck: Sequence[tuple[int, str]] = ()) -> Job | None:
    """What to try next; ``None``: all is known.

    Args:
        stuck: limits and sides that are not to be tried.
    """
    for side in ("planned", "ours", "fsdp2"):
        for limit in sorted(search.limits):
            first = largest(tries, limit, "planned") if side == "ours" else search.filling()
            layers = next_layers(known_of(tries, limit, side), first)
            if layers is not None and (limit, side) not in stuck:
                return Job(limit, side, layers)
    done = {each.job for each in tries if each.short_of != "error"}
    for limit in sorted(search.limits):
        ours, theirs = (largest(tries, limit, side) for side in ("ours", "fsdp2"))
        for side, layers in (("ours", ours), ("fsdp2", theirs), ("ours", theirs), ("fsdp2, keeping", theirs)):
            job = Job(limit, side, layers)
            if layers and job not in done and (limit, side) not in stuck:
                return job
    return None


# ---- trying ----------------------------------------------------------------------------------------------------------

Trial = Callable[[Search, Job, float], Try]
"""Carries out a job within so many seconds."""


def go_on(told: Record, until: float, trial: Trial | None = None) -> Iterator[Try]:
    """Try what is not recorded, until nothing is left or ``time.monotonic()`` is about to pass ``until``."""
    trial = trial or in_its_own_process
    stuck: list[tuple[int, str]] = []
    while (job := next_job(told.search, told.tries, stuck)) is not None:
        left_s = until - time.monotonic()
        if left_s < LEAST_S:
            return
        found = planned(told.search, job) if job.side == "planned" else trial(told.search, job, min(left_s, TRY_S))
        if found.short_of == "time" and left_s < TRY_S:
            return
        if found.short_of == "error":
            stuck.append((job.limit_bytes, job.side))
        told.add(found)
        yield found


def planned(search: Search, job: Job) -> Try:
    """What the planner says of a model."""
    shape = replace(search.shape, layers=job.layers)
    try:
        plan = _plan(search.limited(job.limit_bytes), _model(shape), _batch(shape, "cpu"))
    except InfeasibleError as error:
        return Try(job, "plan", str(error)[:300], _parameters(shape))
    predicted = plan.predicted
    return Try(
        job,
        "",
        parameters=_parameters(shape),
        predicted_s=predicted.step_time_s,
        predicted_bytes=predicted.peak_bytes,
    )


def in_its_own_process(search: Search, job: Job, limit_s: float) -> Try:
    """A few steps, in a process that is ended where it takes too long or leaves the host too little memory."""
    parameters = _parameters(replace(search.shape, layers=job.layers))
    before = least = available_bytes()
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/said", "w+", encoding="utf-8") as said:
        told = json.dumps({"search": search.to_dict(), "job": asdict(job), "to": f"{folder}/try.json"})
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.largest", told], stdout=said, stderr=said)
        until, ended = time.monotonic() + limit_s, ""
        while process.poll() is None:
            least = min(least, available_bytes())
            if least < FLOOR_BYTES or time.monotonic() > until:
                ended = "host" if least < FLOOR_BYTES else "time"
                process.kill()
                process.wait()
            time.sleep(0.1)
        if ended or process.returncode == -9:
            return Try(job, ended or "host", "ended", parameters, host_bytes=before - least)
        if process.returncode:
            said.seek(0)
            return Try(job, "error", error_in(said.read()), parameters)
        found = Try.from_dict(json.loads(Path(f"{folder}/try.json").read_text(encoding="utf-8")))
    return replace(found, host_bytes=before - least)


def available_bytes() -> int:
    """Memory of this machine, or of this container, that a process could take without anything being swapped out."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    try:
        limit, taken = ((group / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
    except OSError:
        return free
    cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    return min(free, int(limit) - int(taken) + cached) if limit.isdecimal() else free


# ---- one try, in its process -----------------------------------------------------------------------------------------


def tried(search: Search, job: Job) -> Try:
    """Take a few steps; what memory it is short of, if it is."""
    warnings.simplefilter("ignore")
    shape = replace(search.shape, layers=job.layers)
    found = Try(job, "", parameters=_parameters(shape))
    if not search.is_simulated:
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.limit_bytes / total_bytes))
    try:
        return (_ours if job.side == "ours" else _theirs)(search, job, shape, found)
    except torch.cuda.OutOfMemoryError as error:
        return replace(found, short_of="device", said=str(error)[:300])
    except (InfeasibleError, RuntimeError, MemoryError) as error:
        short_of = next((memory for words, memory in SHORT_OF.items() if words in str(error)), "")
        if not short_of:
            raise
        return replace(found, short_of=short_of, said=str(error)[:300])


def _ours(search: Search, job: Job, shape: Shape, found: Try) -> Try:
    cluster, model = search.limited(job.limit_bytes), _model(shape)
    batch = _batch(shape, search.device)
    try:
        plan = _plan(cluster, model, batch)
    except InfeasibleError as error:
        return replace(found, short_of="plan", said=str(error)[:300])
    pmodel = autopar.parallelize(
        model, cluster, plan=plan, example_kwargs=batch, state_dict=_Drawn(model, batch["ids"].device)
    )
    step = stepping(pmodel, pmodel.shard(batch), pmodel.optimizer(torch.optim.AdamW, lr=1e-5))
    found = replace(found, predicted_s=plan.predicted.step_time_s, predicted_bytes=plan.predicted.peak_bytes)
    found = _timed(step, found, not search.is_simulated)
    if search.is_simulated:
        assert pmodel.offload is not None
        found = replace(found, peak_bytes=pmodel.offload.transfers.arena.high_water_bytes)
    return found


def _theirs(search: Search, job: Job, shape: Shape, found: Try) -> Try:
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    model, batch = _model(shape), _batch(shape, search.device)
    policy = OffloadPolicy() if search.is_simulated else CPUOffloadPolicy(pin_memory=True)
    fully_sharded(model, job.side == "fsdp2", policy, search.device)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.to_local().copy_(_drawn(name, parameter, batch["ids"].device))  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    step = stepping(model, batch, optimizer)
    if not search.is_simulated:
        return _timed(step, found, not search.is_simulated)
    found, tracker = _timed(step, found, not search.is_simulated), MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
    peak_bytes = int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    has = job.limit_bytes + search.cluster.host_memory.memory_bytes
    return replace(found, peak_bytes=peak_bytes, short_of="" if peak_bytes <= has else "device")


def _timed(step: Step, found: Try, on_gpu: bool) -> Try:
    loss, seconds = 0.0, []
    for number in range(WARMUP + STEPS):
        if on_gpu and number == WARMUP:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak_bytes = torch.cuda.max_memory_allocated() if on_gpu else 0
    return replace(found, seconds=tuple(seconds[WARMUP:]), peak_bytes=peak_bytes, loss=loss)


def _plan(cluster: ClusterSpec, model: nn.Module, batch: dict[str, Tensor]) -> autopar.Plan:
    return autopar.plan(model, cluster, example_kwargs=batch, pin=PIN, optimizer_bytes_per_element=STATE_BYTES)


def _model(shape: Shape) -> nn.Module:
    with torch.device("meta"):
        return GPT(shape).to(torch.bfloat16)


def _parameters(shape: Shape) -> int:
    return sum(parameter.numel() for parameter in _model(shape).parameters())


def _batch(shape: Shape, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape.vocab, (shape.batch, shape.sequence), generator=generator).to(device)
    return {"ids": ids, "labels": ids.roll(-1, 1)}


class _Drawn(Mapping[str, Tensor]):
    """Parameters of a model, each drawn when it is asked for, so that the host never has them twice."""

    def __init__(self, model: nn.Module, device: torch.device):
        self._like, self._device = dict(model.named_parameters()), device

    def __getitem__(self, name: str) -> Tensor:
        return _drawn(name, self._like[name], self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)


def _drawn(name: str, like: Tensor, device: torch.device) -> Tensor:
    scale, shift = (0.0, 1.0) if "norm" in name and name.endswith("weight") else (0.02, 0.0)
    return torch.randn(like.shape, dtype=like.dtype, device=device) * scale + shift


# ---- the whole -------------------------------------------------------------------------------------------------------


def search_here() -> Search:
    """On this machine's GPU, as it was measured."""
    cluster = measured_cluster(calibration())
    assert cluster.host is not None
    beside = cluster.host.model_copy(update={"memory_bytes": host.memory_bytes() - SPARE_BYTES})
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    limits = (*(limit * 2**30 for limit in LIMITS_GIB), total_bytes)
    return Search(cluster.model_copy(update={"host": beside}), WIDE, limits)


def table(told: Record) -> list[dict[str, str]]:
    """A row for each limit and side, and for the steps of FSDP2's largest model."""
    rows, tries = [], {each.job: each for each in told.tries}
    for limit in sorted(told.search.limits):
        theirs = largest(told.tries, limit, "fsdp2")
        for side in ("planned", "ours", "fsdp2"):
            layers = largest(told.tries, limit, side)
            is_known = next_layers(known_of(told.tries, limit, side), 1) is None
            rows.append(_row_of(tries, Job(limit, side, layers), "largest" if is_known else "largest so far"))
        for side in ("ours", "fsdp2, keeping"):
            if Job(limit, side, theirs) in tries and (side, theirs) != ("ours", largest(told.tries, limit, "ours")):
                rows.append(_row_of(tries, Job(limit, side, theirs), "as large as FSDP2's"))
    return rows


def _row_of(tries: Mapping[Job, Try], job: Job, what: str) -> dict[str, str]:
    gib, found = 2**30, tries.get(job)
    row = {"GiB": f"{job.limit_bytes / gib:.4g}", "side": job.side, "model": what, "layers": str(job.layers)}
    if found is None:  # it fits a smaller device
        return {
            **row,
            **dict.fromkeys(("parameters", "step ms", "predicted ms", "peak GiB", "host GiB", "short of"), ""),
        }
    predicted_s, predicted_bytes = found.predicted_s, found.predicted_bytes
    return {
        **row,
        "parameters": f"{found.parameters / 1e9:.4g}e9",
        "step ms": f"{median(found.seconds) * 1e3:.0f}" if found.seconds else "",
        "predicted ms": f"{predicted_s * 1e3:.0f}" if predicted_s else "",
        "peak GiB": f"{(found.peak_bytes or predicted_bytes) / gib:.4g}",
        "host GiB": f"{found.host_bytes / gib:.4g}" if found.host_bytes else "",
        "short of": found.short_of,
    }


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29557")
    result = tried(Search.from_dict(told["search"]), Job(**told["job"]))
    Path(told["to"]).write_text(json.dumps(asdict(result)), encoding="utf-8")
