"""What a plan has on its way while blocks compute, beside what traces of its steps show."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.analysis.overlaps import ObservedFlight, Overlap, Phase
from planner.base.formatting import in_seconds


@dataclass(frozen=True)
class OverlapComparison:
    """One kind of collective in one direction of a step.

    Attributes:
        planned, observed: of how many a block computes beside, as planned and in the step that was observed last.
        of: so many there were.
        carried_s: seconds of a step in which they were carried, on average; which may be those in which they waited
            for other ranks.
        exposed_s: seconds in which this rank waited for them and computed nothing; ``None`` of both: the trace does not
            say.
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
        seconds = "how long they were carried is not known"
        if self.carried_s is not None and self.exposed_s is not None:
            seconds = (
                f"carried {in_seconds(self.carried_s)}, exposed {in_seconds(self.exposed_s)}: {self.hidden:.0%} hidden"
            )
        found = (
            f"{self.kind} {self.phase}: {self.observed} of {self.of} beside blocks, {self.planned} planned; "
            f"{seconds}{share}"
        )
        return "\n".join([found, *(f"  {each}" for each in self.differing)])


def compare_overlaps(
    planned: Sequence[Overlap],
    steps: Sequence[Sequence[ObservedFlight]],
    names: Mapping[int, str],
    reductions_hidden: float,
) -> tuple[OverlapComparison, ...]:
    """Each kind of collective that was on its way, in each direction.

    Args:
        planned: what a step has on its way, see :func:`planner.analysis.overlaps.overlaps`.
        steps: those that were observed.
        names: of blocks, by number of the instance.
        reductions_hidden: the share of gradients' reductions that the plan counts as hidden.
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
                None if kind == "all_gather" else reductions_hidden,
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
    """Blocks whose collectives were on their way beside others than planned."""

    def beside(several: Sequence[Overlap], block: int) -> Counter[tuple[int, ...]]:
        return Counter(each.beside for each in several if each.block == block and each.beside)

    def text(found: Counter[tuple[int, ...]]) -> str:
        blocks = ["+".join(names[number] for number in each) for each in found.elements()]
        return ", ".join(blocks) or "none"

    blocks = sorted({each.block for each in (*planned, *observed)})
    return [
        f"of {names[block]}: planned beside {text(expected)}, observed beside {text(found)}"
        for block in blocks
        if (expected := beside(planned, block)) != (found := beside(observed, block))
    ]
