"""What each block takes of a step, or of a micro-batch: the seconds of a prediction, shared out among blocks.

``Account, seconds by use -> BlockSeconds`` of every block in execution order. What operators compute and communicate is
known of each of them. What is done again in backward is known as a whole: it is shared out among the blocks that do so,
what they recompute by what their forward takes, and what they gather again by what that takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from planner.analysis.pipeline.staged import MicroBatchTimes
from planner.base.formatting import GATHERED_AGAIN
from planner.formulation.unsharding import PER_MICRO_BATCH, Unsharding
from planner.plan.document.detail import Account, BlockDetail, OpDetail
from planner.plan.timeline.whole_step import BlockSeconds

WHOLE = PER_MICRO_BATCH.of_step(micro_batched=False, on_device=True)


@dataclass(frozen=True)
class BlockOccurrence:
    """One distinct block in a step.

    Attributes:
        at: the numbers of its instances in execution order.
        levels: of recomputation of each; empty: it keeps everything.
        keeps: by level, the operators whose results are kept.
    """

    name: str
    at: Sequence[int]
    levels: Sequence[str]
    keeps: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass
class _Parts:
    """Seconds of an instance, by direction and use."""

    number: int
    name: str
    forward: dict[str, float]
    backward: dict[str, float]

    @property
    def seconds(self) -> BlockSeconds:
        """By kind of event."""
        kinds = {"communication": "C", "recompute": "R", "compute": "B"}
        return BlockSeconds(
            self.number,
            self.name,
            {"C": self.forward.get("communication", 0.0), "F": self.forward.get("compute", 0.0)},
            {kind: self.backward.get(use, 0.0) for use, kind in kinds.items()},
        )


def block_seconds(
    occurrences: Sequence[BlockOccurrence], account: Account, parameters: Iterable[str], time_s: Mapping[str, float]
) -> list[BlockSeconds]:
    """What every instance takes, forward and backward; with all else that ``time_s`` has, the step's seconds.

    Args:
        parameters: their names, as values of moves have them.
    """
    names = frozenset(parameters)
    found = [_of_leaves(account, names)]
    for occurrence, detail in zip(occurrences, account.blocks, strict=True):
        found += _instances(occurrence, detail, names, account)
    found.sort(key=lambda each: each.number)
    for use in ("compute", "communication", "recompute"):
        _settle(found, use, time_s.get(use, 0.0))
    return [each.seconds for each in found]


def micro_batch_seconds(
    occurrences: Iterable[BlockOccurrence],
    account: Account,
    parameters: Iterable[str],
    times: MicroBatchTimes,
    bounds: Sequence[int],
    unsharding: Unsharding,
) -> list[BlockSeconds]:
    """What every instance takes of a micro-batch, where backward is in one part.

    Args:
        parameters: as in :func:`block_seconds`.
        times: of stages; stage ``s`` has the blocks from ``bounds[s]`` up to, not including, ``bounds[s + 1]``.
    """
    names, found = frozenset(parameters), list[_Parts]()
    for occurrence, detail in zip(occurrences, account.blocks, strict=True):
        found += _instances(occurrence, detail, names, account, unsharding)
    found.sort(key=lambda each: each.number)
    for stage, (low, high) in enumerate(pairwise(bounds)):
        own, seconds = [each.backward for each in found[low:high]], times.input_s[stage] + times.weight_s[stage]
        # What is done again, or else what backward computes, to which adding up gradients of micro-batches belongs.
        use = "recompute" if any(each["recompute"] for each in own) else "compute"
        others = sum(its_s for each in own for other, its_s in each.items() if other != use)
        total = sum(each[use] for each in own)
        for each in own if total else ():
            each[use] *= max(0.0, seconds - others) / total
    return [each.seconds for each in found]


def _of_leaves(account: Account, parameters: frozenset[str]) -> _Parts:
    """What is converted before the first block, for several readers."""
    moves = [(name, move) for name, leaf in account.leaves.items() for move in leaf.after]
    there = sum(move.forward_s * move.times for _, move in moves)
    back = sum(move.backward_s * move.times for name, move in moves if name not in parameters)
    return _Parts(-1, "before the first block", {"communication": there}, {"communication": back})


def _instances(
    occurrence: BlockOccurrence,
    detail: BlockDetail,
    parameters: frozenset[str],
    account: Account,
    unsharding: Unsharding = WHOLE,
) -> list[_Parts]:
    """What the instances of a block take, with weights for what is done again; what is done once a step is apart, and
    what is reduced beside backward.
    """
    count = len(occurrence.at)
    if not count:
        return []
    ops = detail.ops.values()
    moves = [move for op in ops for move in (*op.before, *op.after) if move.value not in parameters]
    gathers = [(op, move) for op in ops for move in (*op.before, *op.after) if move.value in parameters]
    gathers = [] if unsharding.once_per_step else gathers
    gathered_s = sum(move.forward_s * move.times for _, move in gathers) / count
    needed = [move for op, move in gathers if account.is_needed_in_backward(op, move.value)]
    gathered_again_s = sum(move.forward_s * move.times for move in needed) / count
    there_s = sum(move.forward_s * move.times for move in moves) / count
    waited = () if unsharding.overlaps_reduce else (move for _, move in gathers)
    back_s = sum(move.backward_s * move.times for move in (*moves, *waited)) / count
    inner_there_s, inner_back_s = (sum(_inner_s(op, phase) for op in ops) for phase in ("forward", "backward"))
    found = []
    for nth, (number, level) in enumerate(zip(occurrence.at, occurrence.levels, strict=True)):
        kept = occurrence.keeps.get(level, ())
        again_s = sum(op.forward_s for name, op in detail.ops.items() if name not in kept) + there_s + inner_there_s
        forward = {
            "communication": gathered_s + there_s + inner_there_s,
            "compute": sum(op.forward_s for op in ops),
        }
        backward = {
            "communication": back_s + inner_back_s + (gathered_again_s if level else 0.0),
            "recompute": again_s if level and level not in GATHERED_AGAIN else 0.0,
            "compute": sum(op.backward_s for op in ops),
        }
        name = occurrence.name if count == 1 else f"{occurrence.name}, {nth + 1} of {count}"
        found.append(_Parts(number, name, forward, backward))
    return found


def _inner_s(op: OpDetail, phase: str) -> float:
    """What of an operator's own collectives is in one direction, by the bytes that these pass in."""
    total = sum(call.bytes_in for call in op.inner)
    return op.inner_s * sum(call.bytes_in for call in op.inner if call.phase == phase) / total if total else 0.0


def _settle(found: Iterable[_Parts], use: str, seconds: float) -> None:
    """Let all that is of one use take so many seconds together."""
    parts = [each for instance in found for each in (instance.forward, instance.backward) if each.get(use)]
    total = sum(each[use] for each in parts)
    for each in parts:
        each[use] *= seconds / total
