"""A sweep of small models: as one array, one after another, and each in a process of its own; on paper on a V100."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from planner.cost.cluster import ClusterSpec

MEMBERS, STEPS, WARMUP, ROUNDS = 8, 20, 5, 2
COUNTS = (1, 8, 32)
"""Members of arrays that are priced."""
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


class PointNet(nn.Module):
    """The classifier of Qi et al. (2017) without its transforms: layers on each point, a maximum, layers behind."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 64, 64, 64, 128, 1024)
        self.points = nn.ModuleList([nn.Conv1d(a, b, 1) for a, b in itertools.pairwise(widths)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(width) for width in widths[1:]])
        self.head = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 16))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer, norm in zip(self.points, self.norms, strict=True):
            x = F.relu(norm(layer(x)))
        return F.cross_entropy(self.head(x.amax(-1)), target)


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


@dataclass(frozen=True)
class Sweep:
    """Seconds of the processor for one step of all members, in each round."""

    model: str
    fused_s: tuple[float, ...]
    one_by_one_s: tuple[float, ...]
    processes_s: tuple[float, ...]

    def times(self, other: Sequence[float]) -> float:
        """How many times as long another way takes."""
        return median(there / here for here, there in zip(self.fused_s, other, strict=True))


@dataclass(frozen=True)
class OnPaper:
    """Predicted steps of arrays on one V100: members, seconds, bytes at the peak."""

    model: str
    steps: tuple[tuple[int, float, int], ...]

    def speedup(self, members: int) -> float:
        """Over one model after another."""
        seconds = {count: step_s for count, step_s, _ in self.steps}
        return members * seconds[1] / seconds[members]


def measure() -> list[Sweep]:
    """Every model, each way in turn, round by round."""
    found = []
    for name in MEASURED:
        rounds = [(fused(name), one_by_one(name), in_processes(name)) for _ in range(ROUNDS)]
        found.append(Sweep(name, *(tuple(each) for each in zip(*rounds, strict=True))))
        print(name, rounds, flush=True)
    return found


def fused(name: str) -> float:
    """One array, on one thread."""
    kind = MEASURED[name]
    array, batch = autopar.array(kind, MEMBERS, vary={"lr": RATES}), BATCHES[kind]()
    optimizer = array.optimizer(torch.optim.AdamW)

    def step() -> None:
        array(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return seconds(step)


def one_by_one(name: str) -> float:
    """Each model by itself, one after another, with torch's fused optimizer."""
    return sum(alone(name, rate) for rate in RATES)


def alone(name: str, rate: float) -> float:
    """One model."""
    kind = MEASURED[name]
    model, batch = kind(), BATCHES[kind]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)

    def step() -> None:
        model(**batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return seconds(step)


def in_processes(name: str) -> float:
    """A process for each, all at once; what it takes to start them is left out."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.array"])
    with context.Pool(MEMBERS) as pool:
        return sum(pool.starmap(alone, [(name, rate) for rate in RATES], chunksize=1))


def seconds(step: Callable[[], Any]) -> float:
    """Of the processor for a step: the median, on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(WARMUP):
            step()
        taken = []
        for _ in range(STEPS):
            begin = time.process_time()
            step()
            taken.append(time.process_time() - begin)
    finally:
        torch.set_num_threads(before)
    return median(taken)


def on_paper() -> list[OnPaper]:
    """What the cost model says of arrays on one V100, in half precision, with Adam's state."""
    cluster, found = ClusterSpec.preset("dgx-v100", devices=1), []
    for kind, given in BATCHES.items():
        batch = {name: value.to("meta") for name, value in given().items()}
        batch = {name: value.half() if value.is_floating_point() else value for name, value in batch.items()}
        steps = []
        for members in COUNTS:
            with torch.device("meta"):
                array = autopar.array(kind, members).half()
            plan = autopar.plan(array, cluster, example_kwargs=batch, pin={"micro_batches": 1, "recompute": "none"})
            steps.append((members, plan.predicted.step_time_s, plan.predicted.peak_bytes))
        found.append(OnPaper(kind.__name__, tuple(steps)))
        print(found[-1], flush=True)
    return found
