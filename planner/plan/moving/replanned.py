"""The best plan on another cluster beside the old one's shape there, each with the bill of moving to it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.base.errors import PlanError
from planner.base.files import write_text
from planner.base.formatting import in_bytes, in_paragraph, in_percent
from planner.cost.cluster import ClusterSpec
from planner.ir.graph import Graph
from planner.plan.moving.bill import MovingBill
from planner.plan.plan import Plan
from planner.search.parallel_config import batch_of


@dataclass(frozen=True)
class MovedPlan:
    """A plan, and the bill of moving to it."""

    plan: Plan
    bill: MovingBill

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"step_s": self.plan.predicted.step_time_s, "bill": self.bill.to_dict(), "plan": self.plan.to_dict()}


@dataclass(frozen=True)
class Replanned:
    """How to go on when the cluster changes.

    Attributes:
        old: the plan up to now.
        best: the best plan on the new cluster.
        kept: the old plan's decisions carried there, as :meth:`planner.plan.plan.Plan.rebind` does; ``None``: they do
            not run there.
        why_not: the reason for that; empty: they do.
        notes: what of it may not have been meant.
    """

    old: Plan
    best: MovedPlan
    kept: MovedPlan | None
    why_not: str = ""
    notes: tuple[str, ...] = ()

    @property
    def saved_s(self) -> float:
        """By how much a step of the best plan is shorter than one of the old plan's shape."""
        if self.kept is None:
            return math.inf
        return self.kept.plan.predicted.step_time_s - self.best.plan.predicted.step_time_s

    @property
    def pays_after(self) -> int | None:
        """After so many steps the best plan has paid for what moving to it takes more; ``None``: never, or it is not
        known.
        """
        if self.kept is None:
            return 0
        best_s, kept_s = self.best.bill.seconds, self.kept.bill.seconds
        if best_s is None or kept_s is None:
            return None
        more_s = best_s - kept_s
        if more_s <= 0:
            return 0
        return math.ceil(more_s / self.saved_s) if self.saved_s > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """As plain data: both plans as their files have them, both bills, and what is worked out of them."""
        return {
            "old": self.old.digest(),
            "best": self.best.to_dict(),
            "kept": None if self.kept is None else self.kept.to_dict(),
            "why_not": self.why_not,
            "saved_s": None if self.kept is None else self.saved_s,
            "pays_after": self.pays_after,
            "notes": list(self.notes),
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_dict` as JSON, atomically; raises :class:`PlanError` where it cannot be written."""
        try:
            write_text(Path(path), json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise PlanError(f"cannot write {str(Path(path).absolute())!r}: {error.strerror}") from error

    def __repr__(self) -> str:
        """One line; ``print()`` shows the whole."""
        return f"<Replanned from {_devices(self.old)} to {_devices(self.best.plan)}>"

    def __str__(self) -> str:
        """Both plans, and both bills."""
        size, kept = in_bytes(self.best.bill.state_bytes), f"  the old shape does not run there: {self.why_not}"
        found = [f"From {_devices(self.old)} to {_devices(self.best.plan)}, with {size} of model data and its state"]
        found += _told("the best plan", self.best)
        found += [in_paragraph(kept, "      ")] if self.kept is None else _told("the old shape", self.kept)
        found += [f"  {self._verdict()}", *(in_paragraph(f"  note: {note}", "      ") for note in self.notes)]
        return "\n".join(found)

    def _verdict(self) -> str:
        if self.kept is None:
            return "the best plan is the only one"
        if self.saved_s <= 0:
            return "the old shape is no slower"
        share = in_percent(self.saved_s / self.kept.plan.predicted.step_time_s)
        paid = {None: "", 0: ", and moving to it takes no longer"}
        after = paid.get(self.pays_after, f", and has paid for moving after {_steps(self.pays_after)}")
        return f"the best plan's steps are {share} shorter{after}"


def _steps(count: int | None) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _devices(plan: Plan) -> str:
    return f"{plan.cluster.world_size} x {plan.cluster.device.kind}"


def _told(what: str, move: MovedPlan) -> list[str]:
    head, *ranks = str(move.bill).splitlines()
    lines = (f"  {what}: {move.plan.sentence}", f"    moving: {head}", *(f"    {line}" for line in ranks))
    return [in_paragraph(line, "      ") for line in lines]


def undivided(graph: Graph, cluster: ClusterSpec) -> tuple[str, ...]:
    """A note on a global batch that the devices do not divide; empty: they do."""
    batch, devices = batch_of(graph), cluster.world_size
    if not batch or batch % devices == 0:
        return ()
    fitting = max(number for number in range(1, devices + 1) if batch % number == 0)
    return (
        f"{devices} devices do not divide the global batch of {batch}, so no plan has each of them take a part of it: "
        f"go on with {fitting}, or begin with a batch that {devices} divide, such as {-(-batch // devices) * devices}",
    )
