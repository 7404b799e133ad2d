"""Recipes of docs/integrations.md run on processes, beside the framework's own class in one.

What they do is in ``tests/autopar/integrations/recipes.py``; the test runs the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from benchmarks.record import RESULTS

PACKAGES = ("accelerate", "lightning", "trl", "peft", "datasets")


@dataclass(frozen=True)
class Executed:
    """A recipe on some processes.

    Attributes:
        pin: of the plan.
        goes_on: whether it goes on from what a run of four processes, under another plan, saved in its middle.
        values: how many losses, norms, rates, metrics and weights were compared, on each process.
        error: the largest relative difference of any from the framework's in one process.
    """

    recipe: str
    processes: int
    pin: dict[str, Any]
    goes_on: bool
    values: int
    error: float


def executed() -> list[Executed]:
    """Run all of them."""
    from tests.autopar.integrations.recipes import OTHERS, PLANS

    command = [sys.executable, "-m", "tests.autopar.integrations.recipes"]
    done = subprocess.run(command, cwd=RESULTS.parents[1], stdout=subprocess.PIPE, text=True, check=True)
    runs = json.loads(done.stdout.splitlines()[-1])
    ways = (("four", "own", PLANS), ("two, going on", "own, going on", OTHERS))
    return [
        _compared(title, runs[title][name], runs[title][like][0], pins[title])
        for title in PLANS
        for name, like, pins in ways
    ]


def versions() -> dict[str, str]:
    """Of the frameworks."""
    return {name: version(name) for name in PACKAGES}


def _compared(title: str, ranks: list[Any], alone: Any, pin: dict[str, Any]) -> Executed:
    expected = list(_numbers(alone))
    found = [list(_numbers(rank)) for rank in ranks]
    assert all(len(each) == len(expected) for each in found)
    pairs = ((a, b) for each in found for a, b in zip(each, expected, strict=True))
    error = max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)
    return Executed(title, len(ranks), pin, len(ranks) == 2, len(expected), error)


def _numbers(tree: Any) -> Iterator[float]:
    if isinstance(tree, dict):
        tree = [tree[key] for key in sorted(tree)]
    if isinstance(tree, list):
        for each in tree:
            yield from _numbers(each)
    elif tree is not None:
        yield float(tree)
