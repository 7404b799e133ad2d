"""What a plan has on its way while a step computes, beside what traces of its steps show."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.analysis.overlaps import BlockOrAction, ObservedFlight, Overlap, Phase
from planner.base.formatting import in_seconds

BESIDE = {"send": "actions", "receive": "actions"}
"""What computes beside a kind of flight, where that is no block."""


@dataclass(frozen=True)
class OverlapComparison:
    """One kind of collective, or of message, in one direction of a step.

    Attributes:
        planned, observed: of how many a block, or an action of the schedule, computes beside, as planned and in the
            step that was observed last.
        of: so many there were.
        carried_s: seconds of a step in which they were carried, on average; which may be those in which they waited
            for other ranks.
        exposed_s: seconds in which this rank waited for them and computed nothing; ``None`` of either: the trace does
            not say.
        predicted_hidden: the share that the plan counts as hidden; ``None``: it counts none as such.
        differing: what was not as planned, in words.
    """

    kind: str
    phase: Phase
    planned: int
    observed: int
    of: int
    carried_s: float | None
    exposed_s: float | None
    predicted_hidden: float | None = None
    differing: tuple[str, ...] = ()

    @property
    def hidden(self) -> float | None:
        """The share of the seconds that computing hid; ``None``: it is not known."""
        if self.carried_s is None or self.exposed_s is None:
            return None
        return max(0.0, 1 - self.exposed_s / self.carried_s) if self.carried_s else 0.0

    def __str__(self) -> str:
        share = "" if self.predicted_hidden is None else f", {self.predicted_hidden:.0%} predicted"
        exposed = "" if self.exposed_s is None else f"exposed {in_seconds(self.exposed_s)}"
        seconds = ", ".join(filter(None, ("how long they were carried is not observed", exposed)))
        if self.carried_s is not None and self.exposed_s is not None:
            seconds = f"carried {in_seconds(self.carried_s)}, {exposed}: {self.hidden:.0%} hidden"
        found = (
            f"{self.kind} {self.phase}: {self.observed} of {self.of} beside {BESIDE.get(self.kind, 'blocks')}, "
            f"{self.planned} planned; {seconds}{share}"
        )
        return "\n".join([found, *(f"  {each}" for each in self.differing)])


def compare_overlaps(
    planned: Sequence[Overlap],
    steps: Sequence[Sequence[ObservedFlight]],
    names: Mapping[int, str],
    reductions_hidden: float | None,
) -> tuple[OverlapComparison, ...]:
    """Each kind of collective that was on its way, in each direction.

    Args:
        planned: what a step has on its way, see :mod:`planner.analysis.overlaps`.
        steps: those that were observed.
        names: of blocks, by number of the instance.
        reductions_hidden: the share of gradients' reductions that the plan counts as hidden, if it says one.
    """
    found = []
    observed = [each.overlap for each in steps[-1]]
    for kind, phase in dict.fromkeys((each.kind, each.phase) for each in (*observed, *planned)):
        own = [[each for each in step if (each.overlap.kind, each.overlap.phase) == (kind, phase)] for step in steps]
        expected = [each for each in planned if (each.kind, each.phase) == (kind, phase)]
        last = [each for each in observed if (each.kind, each.phase) == (kind, phase)]
        found.append(
            OverlapComparison(
                kind,
                phase,
                sum(bool(each.beside) for each in expected),
                sum(bool(each.beside) for each in last),
                len(last),
                _mean_s([[each.carried_s for each in step] for step in own]),
                _mean_s([[each.exposed_s for each in step] for step in own]),
                reductions_hidden if kind in ("all_reduce", "reduce_scatter") else None,
                tuple(_differing(expected, last, names)),
            )
        )
    return tuple(found)


def _mean_s(steps: Sequence[Sequence[float | None]]) -> float | None:
    """Seconds of a step on average, if they are known of all."""
    known = [[each for each in step if each is not None] for step in steps]
    is_known = all(len(found) == len(step) for found, step in zip(known, steps, strict=True))
    return statistics.fmean(map(sum, known)) if is_known else None


def _differing(planned: Sequence[Overlap], observed: Sequence[Overlap], names: Mapping[int, str]) -> list[str]:
    """Blocks whose collectives, and messages that, were on their way beside others than planned."""

    def beside(several: Sequence[Overlap], of: BlockOrAction | None) -> Counter[tuple[BlockOrAction, ...]]:
        return Counter(each.beside for each in several if each.of == of and each.beside)

    def name(work: BlockOrAction | None) -> str:
        return "what is done once" if work is None else names[work] if isinstance(work, int) else str(work)

    def text(found: Counter[tuple[BlockOrAction, ...]]) -> str:
        several = [
            "+".join(map(name, each)) + (f" ({count} times)" if count > 1 else "") for each, count in found.items()
        ]
        return ", ".join(several) or "none"

    every = sorted({each.of for each in (*planned, *observed)}, key=lambda each: (each is not None, each or 0))
    return [
        f"of {name(of)}: planned beside {text(expected)}, observed beside {text(found)}"
        for of in every
        if (expected := beside(planned, of)) != (found := beside(observed, of))
    ]
