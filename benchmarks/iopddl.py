"""The public problems of the contest on intra-operator parallelism, as ``python -m planner.solve`` solves them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "iopddl"
SHARE = 0.8  # of the contest's time limit that we take


@dataclass(frozen=True)
class Case:
    """An instance, the contest's time limit, the best cost found there, and the best bound known before."""

    name: str
    what: str
    limit_s: float
    best: int
    known_bound: int


CASES = (
    Case("G", "transformer, inference", 120, 217039, 216931),
    Case("A", "graph network", 60, 6548641531, 6513812172),
    Case("M", "Gemma 2B", 180, 49928460991, 49407421919),
    Case("S", "U-Net", 240, 1534613444, 1511240135),
)


@dataclass(frozen=True)
class Result:
    """What one run printed, without the assignment; ``seconds`` include reading the file."""

    case: Case
    cost: float | None
    bound: float | None
    status: str
    seconds: float

    @property
    def ratio(self) -> float:
        """Cost over the contest's best."""
        return float("inf") if self.cost is None else self.cost / self.case.best

    @property
    def gap(self) -> float:
        """(cost - bound) / cost."""
        return 1.0 if self.cost is None or self.bound is None else (self.cost - self.bound) / self.cost


def measure(case: Case) -> Result:
    """Solve one instance in a process of its own."""
    path = FOLDER / f"asplos-2025-iopddl-{case.name}.json.gz"
    command = [sys.executable, "-m", "planner.solve", str(path), "--time-limit", str(SHARE * case.limit_s)]
    printed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return Result(case, printed["cost"], printed["bound"], printed["status"], printed["seconds"])
