"""Self-correction: blocks of models that were observed say in which interval those of another model lie.

Several small models train on local processes while their steps are observed. Each in turn is held out: the others'
observations become corrections, and what counts is how many of its blocks and collectives took seconds within the
interval that is predicted for them.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import autopar
from autopar.measure.local_processes import LocalProcesses
from benchmarks.gpt import GPT, Shape
from planner.cost.cluster import ClusterSpec
from planner.cost.correction import CONFIDENCE, corrections
from planner.plan.comparison import Comparison

PRELOAD = ("torch", "benchmarks.observed")
RANKS, STEPS = 2, 6
SMALL = Shape(layers=2, hidden=192, heads=6, vocab=2048, batch=4, sequence=128)
SHAPES = (
    SMALL,
    replace(SMALL, hidden=384),
    replace(SMALL, sequence=512, batch=2),
    replace(SMALL, vocab=16384),
    replace(SMALL, batch=16),
    replace(SMALL, hidden=512, heads=4, batch=2),
)
Pin = Mapping[str, int | str]
PINS: tuple[Pin, ...] = ({"data": RANKS, "zero": 3}, {"tensor": RANKS})
MICRO_BATCHED: tuple[Pin, ...] = (
    {"data": RANKS, "zero": 3, "micro_batches": 2, "recompute": "full"},
    {"pipeline": RANKS, "micro_batches": 4, "schedule": "1f1b"},
    {"pipeline": RANKS, "micro_batches": 4, "schedule": "zero_bubble", "virtual_stages": 1},
)
"""Of which none is held out: what they say of blocks and collectives is what others do."""


@dataclass(frozen=True)
class HeldOut:
    """A model and a plan that corrections know nothing of.

    Attributes:
        before, after: the median factor by which its rows are off, as they are and corrected by the others.
        inside, count: how many rows lie in the interval, of how many that have one.
    """

    shape: Shape
    pin: Pin
    before: float
    after: float
    inside: int
    count: int


def observe(
    cluster: ClusterSpec, shapes: Sequence[Shape] = SHAPES, steps: int = STEPS, pins: Sequence[Pin] = PINS
) -> list[list[list[Comparison]]]:
    """The observed steps of every rank, every shape, under every plan."""
    with LocalProcesses(cluster.world_size, PRELOAD) as processes:
        return processes.run(observed, cluster.to_dict(), shapes, steps, pins)


def observed(cluster: Any, shapes: Sequence[Shape], steps: int, pins: Sequence[Pin] = PINS) -> list[list[Comparison]]:
    """One rank: train every shape under every plan, observed from the second step on."""
    warnings.simplefilter("ignore")
    return [[_observed(ClusterSpec.from_dict(cluster), shape, pin, steps) for pin in pins] for shape in shapes]


def _observed(cluster: ClusterSpec, shape: Shape, pin: Pin, steps: int) -> Comparison:
    torch.manual_seed(0)
    ids = torch.randint(0, shape.vocab, (shape.batch, shape.sequence))
    batch = {"ids": ids, "labels": ids.roll(-1, 1)}
    whole = {"pipeline": 1, "micro_batches": 1, "recompute": "none"}
    pmodel = autopar.parallelize(GPT(shape).train(), cluster, example_kwargs=batch, pin={**whole, **pin})
    optimizer = torch.optim.AdamW(pmodel.parameters(), lr=1e-3, fused=True)
    part = pmodel.shard(batch)

    def step() -> None:
        pmodel(**part).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with pmodel.observe():
        for _ in range(steps):
            step()
    return pmodel.compare(optimizer)


def held_out(found: Sequence[Sequence[Comparison]], shapes: Sequence[Shape] = SHAPES) -> list[HeldOut]:
    """Every model, predicted by what the others came to."""
    rows = []
    for number, (shape, own) in enumerate(zip(shapes, found, strict=True)):
        others = [each for at, several in enumerate(found) if at != number for each in several]
        known = {each.work: each for each in corrections(pair for other in others for pair in other.pairs)}
        for pin, comparison in zip(PINS, own, strict=True):
            before, after, inside = [], [], []
            for pair in comparison.pairs:
                correction = known.get(pair.work)
                if correction is None or (factors := correction.factors) is None:
                    continue
                predicted_s = pair.predicted_s * correction.ratio
                before.append(_off(pair.predicted_s, pair.observed_s))
                after.append(_off(predicted_s, pair.observed_s))
                inside.append(factors[0] * predicted_s <= pair.observed_s <= factors[1] * predicted_s)
            if inside:
                figures = statistics.median(before), statistics.median(after)
                rows.append(HeldOut(shape, pin, *figures, sum(inside), len(inside)))
    return rows


def _off(predicted_s: float, observed_s: float) -> float:
    """By which factor the one is longer than the other."""
    return max(predicted_s / observed_s, observed_s / predicted_s)


def coverage(rows: Sequence[HeldOut]) -> float:
    """Which share of what was held out lies in its interval."""
    return sum(row.inside for row in rows) / sum(row.count for row in rows)


def table(rows: Sequence[HeldOut]) -> list[dict[str, str]]:
    """Rows for people."""
    return [
        {
            "held out": f"{row.shape.layers} x {row.shape.hidden}, {row.shape.batch} x {row.shape.sequence} tokens, "
            f"vocabulary {row.shape.vocab}",
            "plan": ", ".join(f"{name} {value}" for name, value in row.pin.items()),
            "off by": f"{row.before:.2f} x",
            "corrected": f"{row.after:.2f} x",
            "in the interval": f"{row.inside} of {row.count}",
        }
        for row in rows
    ]


def told(rows: Sequence[HeldOut]) -> str:
    """The coverage in words."""
    return f"{coverage(rows):.0%} of what was held out lies in its interval of {CONFIDENCE:.0%}"
