"""A sweep of small models: as arrays, one after another, and each in a process of its own; on paper on a V100."""

from __future__ import annotations

import contextlib
import copy
import itertools
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from planner.base.errors import InfeasibleError
from planner.cost.cluster import ClusterSpec

MEMBERS, STEPS, WARMUP, ROUNDS = 8, 40, 5, 3
COUNTS = (1, 8, 16, 32)
"""Members of arrays that are priced."""
HOST_S = 20e-6
"""Of the host for each kernel, where that is more than a launch on a busy stream: Python, dispatch and autograd."""
RATES = [1e-4 * 2**member for member in range(MEMBERS)]


class Perceptron(nn.Module):
    """Three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.third(F.relu(self.second(F.relu(self.first(x))))), target)


class Convolutional(nn.Module):
    """Two convolutions with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.last, self.out = nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.Linear(16, 10)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = F.relu(self.last(self.second(F.relu(self.norm(self.first(x))))))
        return F.cross_entropy(self.out(h.mean((2, 3))), target)


class Transformer(nn.Module):
    """Two layers of attention and feed-forward, between embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(64, 32), nn.Linear(32, 64)
        layer = nn.TransformerEncoderLayer(32, 2, 128, dropout=0.0, batch_first=True)
        self.layers = nn.ModuleList([layer, copy.deepcopy(layer)])

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.out(h).flatten(0, 1), target.flatten())


class Points(nn.Module):
    """Layers on each of many points, a maximum over all of them, and layers behind."""

    def __init__(self, *widths: int, out: int) -> None:
        super().__init__()
        self.points = nn.ModuleList([nn.Conv1d(a, b, 1) for a, b in itertools.pairwise(widths)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(width) for width in widths[1:]])
        behind = [nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()) for a, b in ((1024, 512), (512, 256))]
        self.head = nn.Sequential(*behind, nn.Linear(256, out))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.points, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return self.head(x.amax(-1))


class PointNet(nn.Module):
    """The classifier of Qi et al. (2017) with both of its transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.mix = Points(3, 64, 128, 1024, out=9), Points(64, 64, 128, 1024, out=64 * 64)
        self.first, self.norm, self.rest = nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), Points(64, 128, 1024, out=16)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.turn(x).view(-1, 3, 3) @ x
        x = F.relu(self.norm(self.first(x)))
        return F.cross_entropy(self.rest(self.mix(x).view(-1, 64, 64) @ x), target)


class Discriminator(nn.Module):
    """That of DCGAN (Radford et al. 2016), for images of 64 x 64."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 64, 128, 256, 512)
        self.layers = nn.ModuleList([nn.Conv2d(a, b, 4, 2, 1, bias=False) for a, b in itertools.pairwise(widths)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(width) for width in widths[2:]])
        self.out = nn.Conv2d(512, 1, 4, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = F.leaky_relu(self.layers[0](x), 0.2)
        for layer, norm in zip(list(self.layers)[1:], self.norms, strict=True):
            x = F.leaky_relu(norm(layer(x)), 0.2)
        return F.binary_cross_entropy_with_logits(self.out(x).flatten(), target)


def classes(shape: tuple[int, ...], count: int) -> dict[str, Tensor]:
    """Random inputs, and a class for each."""
    return {"x": torch.randn(shape), "target": torch.randint(count, shape[:1])}


BATCHES: dict[type[nn.Module], Callable[[], dict[str, Tensor]]] = {
    Perceptron: lambda: classes((16, 32), 10),
    Convolutional: lambda: classes((4, 3, 16, 16), 10),
    Transformer: lambda: {name: torch.randint(64, (4, 16)) for name in ("x", "target")},
    PointNet: lambda: classes((32, 3, 2500), 16),
    Discriminator: lambda: {"x": torch.randn(64, 3, 64, 64), "target": torch.rand(64)},
}
MEASURED = {kind.__name__: kind for kind in (Perceptron, Convolutional, Transformer)}


class Seconds(NamedTuple):
    """For one step of all members: of the processors, and by the clock."""

    processor: float
    clock: float


@dataclass(frozen=True)
class Sweep:
    """What a step of all members takes, each way, in each round."""

    model: str
    rounds: Mapping[str, tuple[Seconds, ...]]

    def median_s(self, way: str, clock: bool) -> float:
        """Of all rounds."""
        return median(each[clock] for each in self.rounds[way])

    def times(self, way: str, clock: bool) -> float:
        """How many times as long as in one array another way takes: the median of rounds, whose ways follow closely."""
        pairs = zip(self.rounds["array"], self.rounds[way], strict=True)
        return median(there[clock] / here[clock] for here, there in pairs)


@dataclass(frozen=True)
class OnPaper:
    """Predicted steps of arrays on one V100, those that fit: members, seconds, bytes at the peak.

    Attributes:
        host_bound: the same where the host takes :data:`HOST_S` for every kernel, and no kernel hides another's.
    """

    model: str
    steps: tuple[tuple[int, float, int], ...]
    host_bound: tuple[tuple[int, float, int], ...]

    def speedup(self, members: int, *, host_bound: bool = False) -> float | None:
        """Over one model after another; ``None``: so many do not fit."""
        seconds = {count: step_s for count, step_s, _ in (self.host_bound if host_bound else self.steps)}
        return members * seconds[1] / seconds[members] if members in seconds else None

    def loading_s(self, speedup: float) -> float:
        """How long a batch must take to load, for one model or for all, for the largest array to bring so much."""
        members, step_s, _ = self.steps[-1]
        return speedup * step_s / members


def measure() -> list[Sweep]:
    """Every model, each way in turn, round by round."""
    found = []
    for name in MEASURED:
        rounds = [{way: run(name) for way, run in WAYS.items()} for _ in range(ROUNDS)]
        found.append(Sweep(name, {way: tuple(each[way] for each in rounds) for way in WAYS}))
        print(found[-1], flush=True)
    return found


def fused(name: str, rates: Sequence[float] = RATES, barrier: Barrier | None = None) -> tuple[float, float, float]:
    """One array, on one thread."""
    kind = MEASURED[name]
    array, batch = autopar.array(kind, len(rates), vary={"lr": rates}), BATCHES[kind]()
    optimizer = array.optimizer(torch.optim.AdamW)

    def step() -> None:
        array(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, barrier)


def alone(name: str, rates: Sequence[float], barrier: Barrier | None = None) -> tuple[float, float, float]:
    """One model, with torch's fused optimizer."""
    kind = MEASURED[name]
    model, batch = kind(), BATCHES[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rates[0], fused=True)

    def step() -> None:
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, barrier)


def timed(step: Callable[[], Any], barrier: Barrier | None) -> tuple[float, float, float]:
    """Seconds of the processor for a step, on one thread, and when the steps began and ended by the clock."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(WARMUP):
            step()
        if barrier is not None:
            barrier.wait()
        begin, used = time.monotonic(), time.process_time()
        for _ in range(STEPS):
            step()
        return (time.process_time() - used) / STEPS, begin, time.monotonic()
    finally:
        torch.set_num_threads(before)


def in_turn(runs: Sequence[tuple[float, float, float]]) -> Seconds:
    """What runs take one after another."""
    return Seconds(sum(cpu for cpu, _, _ in runs), sum(end - begin for _, begin, end in runs) / STEPS)


def together(run: Callable[..., Any], name: str, rates: Sequence[Sequence[float]]) -> Seconds:
    """What runs take at once, each in a process of its own, which begin together; what starts them is left out."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.array"])
    barrier = context.Barrier(len(rates))
    with ProcessPoolExecutor(len(rates), context, _share, (barrier,)) as pool:
        runs = [each.result() for each in [pool.submit(_apart, run, name, own) for own in rates]]
    took_s = max(end for _, _, end in runs) - min(begin for _, begin, _ in runs)
    return Seconds(sum(cpu for cpu, _, _ in runs), took_s / STEPS)


_barriers: list[Barrier] = []


def _share(barrier: Barrier) -> None:
    _barriers.append(barrier)


def _apart(run: Callable[..., Any], name: str, rates: Sequence[float]) -> tuple[float, float, float]:
    found: tuple[float, float, float] = run(name, rates, _barriers[0])
    return found


WAYS: dict[str, Callable[[str], Seconds]] = {
    "array": lambda name: in_turn([fused(name)]),
    "one after another": lambda name: in_turn([alone(name, [rate]) for rate in RATES]),
    "8 processes": lambda name: together(alone, name, [[rate] for rate in RATES]),
    "2 arrays, 2 processes": lambda name: together(fused, name, [RATES[::2], RATES[1::2]]),
}


def on_paper() -> list[OnPaper]:
    """What the cost model says of arrays on one V100, in half precision, with Adam's state."""
    cluster, found = ClusterSpec.preset("dgx-v100", devices=1), []
    device = cluster.device.model_copy(update={"launch_overhead_s": HOST_S})
    for kind, given in BATCHES.items():
        batch = {name: value.to("meta") for name, value in given().items()}
        batch = {name: value.half() if value.is_floating_point() else value for name, value in batch.items()}
        steps, host_bound = list[tuple[int, float, int]](), list[tuple[int, float, int]]()
        for members in COUNTS:
            with torch.device("meta"):
                array = autopar.array(kind, members).half()
            for there, into in ((cluster, steps), (cluster.model_copy(update={"device": device}), host_bound)):
                pin = {"micro_batches": 1, "recompute": "none"}
                with contextlib.suppress(InfeasibleError):
                    plan = autopar.plan(array, there, example_kwargs=batch, pin=pin)
                    into.append((members, plan.predicted.step_time_s, plan.predicted.peak_bytes))
        found.append(OnPaper(kind.__name__, tuple(steps), tuple(host_bound)))
        print(found[-1], flush=True)
    return found
