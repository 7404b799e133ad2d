"""What a pipeline rank holds through a micro-batched step, block by block of every action of its schedule.

``(Staged, rank) -> BlockWork`` of every block that runs, in the order of time, with its fullest moment;
:class:`planner.analysis.pipeline.peak_report.RankReport` says of any of them what is alive then.
"""

from __future__ import annotations

from typing import NamedTuple

from planner.analysis.pipeline.chain import Link
from planner.analysis.pipeline.rank_memory import Peak
from planner.analysis.pipeline.stage_memory import At, part_of
from planner.analysis.pipeline.staged import Staged
from planner.solve.pipeline.running import every_action
from planner.solve.pipeline.schedule import Action, schedule


class BlockWork(NamedTuple):
    """A block that runs in an action.

    Attributes:
        name: of the block.
        share: of the action's seconds.
        peak: its fullest moment.
    """

    action: Action
    name: str
    share: float
    peak: Peak


def block_works(staged: Staged, rank: int) -> list[BlockWork]:
    """The blocks of every action of a rank, in the order of time."""
    p, alive = staged.pipeline, staged.alive
    order = schedule(p.schedule, p.ranks, p.micro_batches, p.virtual_stages)
    parts: dict[tuple[int, str], list[tuple[str, float, At]]] = {}
    found = []
    for action, beside in zip(order.rows[rank], every_action(order, rank), strict=True):
        part = part_of(beside.kind, beside.is_first)
        if (beside.stage, part) not in parts:
            parts[beside.stage, part] = _blocks(staged, beside.stage, beside.kind, part)
        held = alive.held[rank] + alive.beside(rank, beside)
        for name, share, at in parts[beside.stage, part]:
            found.append(BlockWork(action, name, share, Peak(held + at.bytes, at, beside)))
    return found


def _blocks(staged: Staged, stage: int, kind: str, part: str) -> list[tuple[str, float, At]]:
    """Every block of a stage in one part of it, in the order of time: its share of the seconds, its fullest moment."""
    fullest: dict[int, At] = {}
    for at in staged.alive.stages[stage].parts[part]:
        if at.number not in fullest or at.bytes > fullest[at.number].bytes:
            fullest[at.number] = at
    seconds = {
        number: _seconds(staged.links[number], staged.cut.savings[number], kind) if number >= 0 else 0.0
        for number in fullest
    }
    total = sum(seconds.values())
    return [
        (
            staged.links[number].block.name if number >= 0 else at.what,
            seconds[number] / total if total else 1 / len(fullest),
            at,
        )
        for number, at in fullest.items()
    ]


def _seconds(link: Link, way: int, kind: str) -> float:
    """What a block takes of an action."""
    block = link.block
    again_s = block.savings[way].recompute_s
    return float(
        {
            "F": block.forward_s,
            "I": block.input_s + again_s,
            "W": block.weight_s,
            "B": block.input_s + block.weight_s + again_s,
        }[kind]
    )
