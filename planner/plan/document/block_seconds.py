"""What each block takes of a step without micro-batches: the seconds of a prediction, shared out among blocks.

``Account, seconds by use -> BlockSeconds`` of every block in execution order. What operators compute and communicate is
known of each of them. What is done again in backward is known as a whole: it is shared out among the blocks that do so,
what they recompute by what their forward takes, and what they gather again by what that takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from planner.base.formatting import GATHERED_AGAIN
from planner.plan.document.detail import Account, BlockDetail, OpDetail
from planner.plan.timeline.whole_step import BlockSeconds


@dataclass(frozen=True)
class BlockOccurrence:
    """One distinct block in a step.

    Attributes:
        at: the numbers of its instances in execution order.
        recompute: how many of them, the first ones, are at which level.
        keeps: by level, the operators whose results are kept.
    """

    name: str
    at: Sequence[int]
    recompute: Mapping[str, int] = field(default_factory=dict)
    keeps: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def levels(self) -> list[str]:
        """That of each instance; empty: it keeps everything."""
        found = [level for level, count in self.recompute.items() for _ in range(count)]
        return found + [""] * (len(self.at) - len(found))


@dataclass
class _Parts:
    """Seconds of an instance, by direction and use."""

    number: int
    name: str
    forward: dict[str, float]
    backward: dict[str, float]


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
    kinds = {"communication": "C", "recompute": "R", "compute": "B"}
    return [
        BlockSeconds(
            each.number,
            each.name,
            {"C": each.forward.get("communication", 0.0), "F": each.forward.get("compute", 0.0)},
            {kind: each.backward.get(use, 0.0) for use, kind in kinds.items()},
        )
        for each in found
    ]


def _of_leaves(account: Account, parameters: frozenset[str]) -> _Parts:
    """What is converted before the first block, for several readers."""
    moves = [(name, move) for name, leaf in account.leaves.items() for move in leaf.after]
    there = sum(move.forward_s * move.times for _, move in moves)
    back = sum(move.backward_s * move.times for name, move in moves if name not in parameters)
    return _Parts(-1, "before the first block", {"communication": there}, {"communication": back})


def _instances(
    occurrence: BlockOccurrence, detail: BlockDetail, parameters: frozenset[str], account: Account
) -> list[_Parts]:
    """What the instances of a block take, with weights for what is done again."""
    count = len(occurrence.at)
    if not count:
        return []
    ops = detail.ops.values()
    moves = [move for op in ops for move in (*op.before, *op.after) if move.value not in parameters]
    gathers = [(op, move) for op in ops for move in (*op.before, *op.after) if move.value in parameters]
    gathered_s = sum(move.forward_s * move.times for _, move in gathers) / count
    needed = [move for op, move in gathers if account.is_needed_in_backward(op, move.value)]
    gathered_again_s = sum(move.forward_s * move.times for move in needed) / count
    there_s = sum(move.forward_s * move.times for move in moves) / count
    back_s = sum(move.backward_s * move.times for move in moves) / count
    inner_there_s, inner_back_s = (sum(_inner_s(op, phase) for op in ops) for phase in ("forward", "backward"))
    found = []
    for nth, (number, level) in enumerate(zip(occurrence.at, occurrence.levels(), strict=True)):
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
