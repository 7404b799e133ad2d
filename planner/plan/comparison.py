"""What steps took beside what was predicted: block by block, collective by collective, and memory by use.

``Document, what was seen -> Comparison``; several of these become a calibration by which the next plan is priced.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner.base.errors import ClusterError, PlanError
from planner.base.files import write_text
from planner.base.formatting import in_bytes, in_seconds
from planner.cost.calibration import VERSION as CALIBRATION
from planner.cost.calibration import Calibration
from planner.cost.cluster import ClusterSpec
from planner.cost.correction import Pair, Work, corrections
from planner.cost.model import CostModel
from planner.plan.document.document import Document

FORMAT, VERSION = "autopar-run", 1
FORWARD_KINDS = ("C", "F")


@dataclass(frozen=True)
class Compared:
    """One kind of work in a step.

    Attributes:
        work: computing (a block with what it communicates), or a collective.
        name: of the distinct block, or of the collective.
        phase: ``forward``, ``backward``, or ``step`` of all calls of a collective.
        predicted_s: of one instance of the block; of all calls of the collective.
        observed_s: the mean over instances and steps.
        error_s: its standard error.
        count: how many were seen.
    """

    work: Work
    name: str
    phase: str
    predicted_s: float
    observed_s: float
    error_s: float
    count: int

    @property
    def off(self) -> float:
        """Observed over predicted, less 1."""
        return self.observed_s / self.predicted_s - 1 if self.predicted_s else math.inf


@dataclass(frozen=True, repr=False)
class Comparison:
    """Predicted and observed steps of one plan on one rank.

    Attributes:
        cluster: that the plan was priced for.
        rows: seconds, blocks first, in the order in which they run.
        memory: bytes by use, as predicted and as observed.
    """

    cluster: ClusterSpec
    rows: tuple[Compared, ...]
    memory: Mapping[str, tuple[int, int]]

    def __str__(self) -> str:
        width = max([24, *(len(row.name) for row in self.rows)])
        lines = [f"  {'':{width}}  {'':8}  {'predicted':>10}  {'observed':>20}  {'off':>6}"]
        for row in self.rows:
            seen = f"{in_seconds(row.observed_s)} +- {in_seconds(row.error_s)}"
            off = f"{row.off:+.0%}" if row.predicted_s else ""
            lines.append(
                f"  {row.name:{width}}  {row.phase:8}  {in_seconds(row.predicted_s):>10}  {seen:>20}  {off:>6}"
            )
        for use, (predicted, observed) in self.memory.items():
            off = f"{observed / predicted - 1:+.0%}" if predicted else ""
            lines.append(
                f"  {use:{width}}  {'memory':8}  {in_bytes(predicted):>10}  {in_bytes(observed):>20}  {off:>6}"
            )
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """What corrections are made of: every distinct block in each direction, and every collective."""
        return tuple(Pair(row.work, row.predicted_s, row.observed_s) for row in self.rows)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it for ``autopar profile --from``."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            "cluster": self.cluster.to_dict(),
            "rows": [asdict(row) for row in self.rows],
            "memory": {use: list(sizes) for use, sizes in self.memory.items()},
        }
        write_text(Path(path), json.dumps(data, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Comparison:
        """Read what :meth:`save` wrote; raises :class:`PlanError` for another file."""
        try:
            data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            if (data["format"], data["version"]) != (FORMAT, VERSION):
                raise KeyError("format")
            rows = tuple(Compared(**row) for row in data["rows"])
            memory = {use: (int(a), int(b)) for use, (a, b) in data["memory"].items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PlanError(
                f"{os.fspath(path)!r} is no record of steps ({error}): pmodel.compare().save({os.fspath(path)!r}) "
                "writes one after steps were observed"
            ) from None
        return cls(ClusterSpec.from_dict(data["cluster"]), rows, memory)


def compare(
    document: Document,
    blocks: Mapping[tuple[int, str], Sequence[float]],
    collectives: Mapping[str, Sequence[float]],
    memory: Mapping[str, int],
) -> Comparison:
    """Put what was seen beside what a plan predicts.

    Args:
        blocks: seconds of every step, by number of the instance and phase.
        collectives: of all calls of each kind.
        memory: bytes by use; ``peak`` is that of all.

    Raises:
        PlanError: the plan runs micro-batches, or was read from a file without details.
    """
    if document.pipeline is not None:
        raise PlanError("blocks of micro-batched steps are not compared: pmodel.timeline() shows such a step")
    predicted = _predicted_blocks(document)
    rows = []
    for block in document.blocks:
        for phase in ("forward", "backward"):
            seen = [each for number in block.at for each in blocks.get((number, phase), ())]
            expected = [predicted[number, phase] for number in block.at if blocks.get((number, phase))]
            if seen and sum(expected):
                rows.append(_row("compute", block.name or "(root)", phase, statistics.fmean(expected), seen))
    cost = CostModel(document.cluster)
    for kind, each in collectives.items():
        calls = [(call, count) for call, count in document.predicted.collectives if call.kind == kind]
        axes = {axis.name: axis for axis in document.mesh.axes}
        total = sum(count * cost.collective_s(kind, axes[call.axis], call.bytes_in) for call, count in calls)
        if each and total:
            rows.append(_row(kind, kind, "step", total, each))  # type: ignore[arg-type]
    held = {**document.predicted.memory_bytes, "peak": document.predicted.peak_bytes}
    return Comparison(document.cluster, tuple(rows), {use: (held[use], memory[use]) for use in held if use in memory})


def _predicted_blocks(document: Document) -> dict[tuple[int, str], float]:
    found = {}
    for block in document.block_seconds:
        found[block.number, "forward"] = sum(block.forward.values())
        found[block.number, "backward"] = sum(block.backward.values())
    return found


def _row(work: Work, name: str, phase: str, predicted_s: float, seen: Sequence[float]) -> Compared:
    error_s = statistics.stdev(seen) / math.sqrt(len(seen)) if len(seen) > 1 else 0.0
    return Compared(work, name, phase, predicted_s, statistics.fmean(seen), error_s, len(seen))


def recalibrated(found: Sequence[Comparison]) -> ClusterSpec:
    """The cluster of some comparisons with a calibration that holds what they correct.

    Raises:
        ClusterError: they are of plans that were priced otherwise.
    """
    first = found[0].cluster
    for other in found[1:]:
        if other.cluster != first:
            raise ClusterError(
                f"runs of {first.name!r} and {other.cluster.name!r} were priced by different clusters or calibrations: "
                "give those of one"
            )
    before = first.calibration
    if before is None:
        start_s = first.device.launch_overhead_s or 1e-6
        facts = {"format": "autopar-calibration", "version": CALIBRATION, "device": first.device.kind}
        before = Calibration.from_dict({**facts, "ranks": first.spans[0], "launch_s": start_s})
    made = corrections([pair for each in found for pair in each.pairs], before.corrections)
    return first.calibrated(before.model_copy(update={"corrections": made}))
