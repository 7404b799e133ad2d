"""What a plan says of how it came from another one: the plan it was, and what of it had to change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """One decision of a plan that could not be taken over.

    Attributes:
        what: the decision, as reports name it: ``"mesh axis 'data'"``, ``"up: linear of block 'layers.*'"``.
        old: what the plan said; empty: it said nothing of it.
        new: what the rebound plan says; empty: there is no such decision any more.
        why: the reason, with its numbers.
    """

    what: str
    old: str
    new: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.old or 'nothing'} -> {self.new or 'nothing'} ({self.why})"


@dataclass(frozen=True)
class Rebinding:
    """Where a rebound plan comes from, and what its price is compared with.

    Attributes:
        source: the plan that it was made of, in words.
        changes: what of that did not hold.
        bound_by: how it was found that no plan is faster than the bound which the plan's gap is from: ``arithmetic``,
            or ``search``, a fresh one.
        fresh_step_s: seconds of a step of the plan that the fresh search found; ``None``: there was none, or it found
            none.
    """

    source: str
    changes: tuple[Change, ...] = ()
    bound_by: str = "arithmetic"
    fresh_step_s: float | None = None
