"""Step time against memory per device as a table of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.base.formatting import in_bytes, in_paragraph, in_seconds
from planner.ir.layout import PIPELINE
from planner.plan.document.document import Document
from planner.plan.document.pareto_point import GIB, ParetoPoint, memory_unit, seconds_per_gib
from planner.plan.report.sentence import SCHEDULES
from planner.search.parallel_config import mesh_text

Points = Sequence[ParetoPoint[Document]]


def table(document: Document, points: Points, stopped: str) -> str:
    """A row for each point, the leanest first."""
    unit, _ = memory_unit(points[-1].memory_bytes)
    rows = [("memory", "step", "at least", f"a {unit} less", "plan")]
    rows += [
        (
            in_bytes(point.memory_bytes),
            in_seconds(point.step_s),
            in_seconds(point.bound_s),
            price(points, point),
            decisions(point.plan),
        )
        for point in points
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  " + "  ".join([*map(str.rjust, row[:-1], widths), row[-1]]).rstrip() for row in rows]
    title = f"step time against memory per device: {document.model['class']} on {document.cluster.name}"
    return "\n".join([title, *lines, in_paragraph(f"  {counted(points)}; {stopped}", "  ")]) + "\n"


def price(points: Points, point: ParetoPoint[Document]) -> str:
    """Seconds more for each GiB less, or MiB; of the leanest nothing."""
    seconds = seconds_per_gib(points, point) * memory_unit(points[-1].memory_bytes)[1] / GIB
    return f"+{in_seconds(seconds)}" if math.isfinite(seconds) else ""


def counted(points: Points) -> str:
    """``3 plans``."""
    return f"{len(points)} plan{'s' * (len(points) != 1)}"


def decisions(document: Document) -> str:
    """The mesh, the schedule, and how many blocks recompute: ``"pipeline 2 x data 4, 1F1B, recomputes 3 of 8"``."""
    pipeline, parts = document.pipeline, [mesh_text(document.sizes)]
    if pipeline is not None and PIPELINE in document.sizes:
        parts.append(SCHEDULES.get(pipeline.schedule, pipeline.schedule))
    if pipeline is not None and not pipeline.unsharding.once_per_step:
        parts.append("gathers in each micro-batch")
    if pipeline is None:
        again = sum(sum(block.recompute.values()) for block in document.blocks)
    else:
        again = sum(map(len, pipeline.recompute.values()))
    if again:
        parts.append(f"recomputes or gathers again {again} of {sum(block.count for block in document.blocks)}")
    return ", ".join(parts)
