"""What steps took beside what was predicted: block by block, collective by collective, and memory by use; and what of
their collectives was on its way while blocks computed.

``Document, what was seen -> Comparison``; several of these become a calibration by which the next plan is priced.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from planner.analysis.overlaps import ObservedFlight, Overlap
from planner.base.errors import ClusterError, PlanError
from planner.base.files import write_text
from planner.base.formatting import in_bytes, in_seconds
from planner.cost.calibration import VERSION as CALIBRATION
from planner.cost.calibration import Calibration
from planner.cost.cluster import ClusterSpec
from planner.cost.correction import Pair, Work, corrections
from planner.cost.model import CostModel
from planner.formulation.resharding import PHASES, Collective
from planner.ir.layout import PIPELINE, Axis
from planner.plan.document.detail import BlockDetail
from planner.plan.document.document import BlockPlan, Document
from planner.plan.overlap_comparison import OverlapComparison, compare_overlaps
from planner.solve.pipeline.schedule import versions

FORMAT, VERSION = "autopar-run", 2
SHORT = {"F": "forward", "B": "backward", "I": "inputs", "W": "weights"}
"""Kinds of actions, as rows have them."""
TELLING = 0.2
"""Share of its seconds that a block is expected to compute at least, where it says something of computing."""


@dataclass(frozen=True)
class Compared:
    """One kind of work in a step.

    Attributes:
        work: computing (a block with what it communicates), a collective, or an action of a pipeline's schedule.
        name: of the distinct block, of the collective, or of the stage.
        phase: ``forward``, ``backward``, or ``step`` of all calls of a collective; of a stage the kind of action.
        predicted_s: of one instance of the block; of all calls of the collective; of one action.
        observed_s: the mean over instances, micro-batches and steps.
        error_s: its standard error.
        count: how many were seen.
        predicted_communication_s: of a block's predicted seconds, what it communicates.
        observed_communication_s: that, as much longer as its collectives were seen to take.
    """

    work: Work | Literal["action"]
    name: str
    phase: str
    predicted_s: float
    observed_s: float
    error_s: float
    count: int
    predicted_communication_s: float = 0.0
    observed_communication_s: float = 0.0

    @property
    def pair(self) -> Pair:
        """What is corrected by it: of a block what it computes, since collectives have corrections of their own; by an
        action nothing, since its blocks say it.
        """
        assert self.work != "action"
        computed_s = self.observed_s - self.observed_communication_s
        return Pair(self.work, self.predicted_s - self.predicted_communication_s, computed_s)

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
        overlapped: collectives and messages that were on their way while the rank computed.
        left_out: what was not observed, and why.
    """

    cluster: ClusterSpec
    rows: tuple[Compared, ...]
    memory: Mapping[str, tuple[int, int]]
    overlapped: tuple[OverlapComparison, ...] = ()
    left_out: tuple[str, ...] = ()

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
        lines += [f"  {line}" for each in self.overlapped for line in str(each).splitlines()]
        lines += [f"  not observed: {each}" for each in self.left_out]
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """What corrections are made of: computing of every distinct block in each direction, and every collective.

        A block that does little but communicate says nothing of computing: what is left of it once communication is
        taken off is how long ranks wait for one another.
        """
        pairs = (
            row.pair
            for row in self.rows
            if row.work != "action"
            and row.pair.predicted_s >= TELLING * (row.pair.predicted_s + row.observed_communication_s)
        )
        return tuple(pair for pair in pairs if pair.predicted_s > 0 and pair.observed_s > 0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it for ``autopar profile --from``."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            "cluster": self.cluster.to_dict(),
            "rows": [asdict(row) for row in self.rows],
            "memory": {use: list(sizes) for use, sizes in self.memory.items()},
            "overlapped": [asdict(each) for each in self.overlapped],
            "left_out": list(self.left_out),
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
            overlapped = tuple(
                OverlapComparison(**{**row, "differing": tuple(row["differing"])}) for row in data.get("overlapped", ())
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PlanError(
                f"{os.fspath(path)!r} is no record of steps ({error}): pmodel.compare().save({os.fspath(path)!r}) "
                "writes one after steps were observed"
            ) from None
        left_out = tuple(data.get("left_out", ()))
        return cls(ClusterSpec.from_dict(data["cluster"]), rows, memory, overlapped, left_out)


def compare(
    document: Document,
    blocks: Mapping[tuple[int, str], Sequence[float]],
    collectives: Mapping[str, Sequence[float]],
    memory: Mapping[str, int],
    planned: Sequence[Overlap] = (),
    observed: Sequence[Sequence[ObservedFlight]] = (),
    actions: Mapping[tuple[int, str], Sequence[float]] = MappingProxyType({}),
    held: Mapping[str, int] | None = None,
    calls: Mapping[Collective, int] | None = None,
) -> Comparison:
    """Put what was seen beside what a plan predicts.

    Args:
        blocks: seconds of every step and micro-batch, by number of the instance and phase.
        collectives: of all calls of each kind.
        memory: bytes by use; ``peak`` is that of all.
        planned, observed: what is on its way while the rank computes, as planned and in every step that was traced.
        actions: of a micro-batched step, seconds by stage and kind of action.
        held: bytes by use that are predicted of this rank; ``None``: those of any.
        calls: the collectives that are predicted of this rank; ``None``: those of any.

    Raises:
        PlanError: the plan runs micro-batches while model data moves, or was read from a file without details.
    """
    if document.pipeline is not None and document.transfer_schedules:
        raise PlanError(
            f"the plan runs {document.mesh.micro_batches} micro-batches and moves model data to and from the "
            f"{document.offload} meanwhile: what blocks wait for it, and what a rank holds, is not predicted block by "
            "block. pmodel.timeline() shows such a step beside its bubble; to compare blocks, plan with "
            "pin={'offload': 'none'} or pin={'pipeline': 1, 'micro_batches': 1}"
        )
    cost, axes = CostModel(document.cluster), {axis.name: axis for axis in document.mesh.axes}
    if document.pipeline is not None:
        stages, size = document.pipeline.ranks, document.mesh.micro_batched(1).size
        axes[PIPELINE] = Axis(PIPELINE, 2, max(1, stages * size // 2))  # over which shared parameters are summed

    def price(call: Collective) -> float:
        return cost.collective_s(call.kind, axes[call.axis], call.bytes_in)

    waited, calls = [], dict(document.predicted.collectives) if calls is None else calls
    for kind, each in collectives.items():
        total = sum(count * price(call) for call, count in calls.items() if call.kind == kind)
        if each and total:
            waited.append(_row(kind, kind, "step", total, each))  # type: ignore[arg-type]
    slower = {row.name: row.observed_s / row.predicted_s for row in waited}
    predicted, rows = _predicted_blocks(document), []
    for block, detail in zip(document.blocks, document.account.blocks, strict=True):
        for phase in PHASES:
            seen = [each for number in block.at for each in blocks.get((number, phase), ())]
            expected = [predicted[number, phase] for number in block.at if blocks.get((number, phase))]
            if seen and sum(total for total, _ in expected):
                total_s, communication_s = map(statistics.fmean, zip(*expected, strict=True))
                own = [(call, price(call) * n) for call, n in _calls(document, block, detail, phase)]
                # What is copied around calls is computing, and what is hidden takes no seconds of the block.
                called_s = sum(seconds for _, seconds in own)
                left = min(1.0, communication_s / called_s) if called_s else 0.0
                was_s = sum(slower.get(call.kind, 1.0) * seconds for call, seconds in own)
                row = _row("compute", block.name or "(root)", phase, total_s, seen)
                rows.append(
                    replace(row, predicted_communication_s=left * called_s, observed_communication_s=left * was_s)
                )
    rows += [*_stages(document, actions), *waited]
    held = {**document.predicted.memory_bytes, "peak": document.predicted.peak_bytes} if held is None else held
    sizes = {use: (held[use], memory[use]) for use in held if use in memory}
    left_out = tuple(_left_out(document, actions))
    if not observed:
        return Comparison(document.cluster, tuple(rows), sizes, left_out=left_out)
    names = {number: f"{block.name or '(root)'} ({number})" for block in document.blocks for number in block.at}
    hidden = 1 - document.exposed_share if document.pipeline is None else None
    overlapped = compare_overlaps(planned, observed, names, hidden)
    return Comparison(document.cluster, tuple(rows), sizes, overlapped, left_out)


def _stages(document: Document, actions: Mapping[tuple[int, str], Sequence[float]]) -> Iterator[Compared]:
    """Actions of a pipeline's schedule, without what they wait for."""
    times = document.times
    for (stage, kind), seen in sorted(actions.items(), key=lambda each: (each[0][0], "FBIW".index(each[0][1]))):
        if times is not None:
            of = {"F": times.forward_s[stage], "I": times.input_s[stage], "W": times.weight_s[stage]}
            yield _row("action", f"stage {stage}", SHORT[kind], of.get(kind, of["I"] + of["W"]), seen)


def _left_out(document: Document, actions: Collection[tuple[int, str]]) -> Iterator[str]:
    """What of a step is not compared, and why."""
    if any(kind == "I" for _, kind in actions):
        yield (
            "backward of blocks, and what is gathered and reduced in it, where the schedule has it in two parts, in "
            "neither of which a block runs as a whole: its stages are compared"
        )
    if document.pipeline is not None and versions(document.pipeline.schedule) > 1:
        yield "the weights that the step before left, which are in the predicted bytes of parameters"


def _predicted_blocks(document: Document) -> dict[tuple[int, str], tuple[float, float]]:
    """Seconds of every instance in each direction, and those of them in which it communicates."""
    found: dict[tuple[int, str], tuple[float, float]] = {}
    for block in document.block_seconds:
        for phase, seconds in zip(PHASES, (block.forward, block.backward), strict=True):
            found[block.number, phase] = sum(seconds.values()), seconds["C"]
    return found


def _calls(document: Document, block: BlockPlan, detail: BlockDetail, phase: str) -> Iterator[tuple[Collective, float]]:
    """The collectives in the seconds of a block, and how often an instance makes them on average.

    Backward gathers parameters again where it recomputes, if it needs them; their gradients are reduced beside it.
    """
    instances, again, how = len(block.at), sum(block.recompute.values()), document.unsharding
    is_whole = document.pipeline is None
    for op in detail.ops.values():
        yield from ((call, 1.0) for call in op.inner if call.phase == phase)
        for move in (*op.before, *op.after):
            is_gathered = move.value in document.parameters
            made_in = "forward" if is_gathered else phase
            if is_gathered and not is_whole and how.once_per_step:
                continue
            share = 1.0  # of the instances do it in this phase
            if is_gathered and phase == "backward":
                share = again / instances * document.account.is_needed_in_backward(op, move.value)
            phases = {made_in} if is_whole else {made_in, phase}  # whose gradients are waited for
            for call in (call for call in move.calls if call.phase in phases):
                yield call, (share if call.phase == made_in else 1.0) * move.times / instances


def _row(work: Work | Literal["action"], name: str, phase: str, predicted_s: float, seen: Sequence[float]) -> Compared:
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
