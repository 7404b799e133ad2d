"""The decisions that a plan names, section by section, and those that decide nothing."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

from planner.base.errors import PlanError
from planner.plan.document.document import Document


def stray(plan: Document, known: Iterable[tuple[object, str]], section: object, name: str) -> str:
    """The entry of that section that the model does not have and that is closest to a missing one, in words."""
    wanted = set(known)
    sections = [entries for each, entries in _sections(plan) if each == section]
    strays = [each for entries in sections for each in entries if (section, each) not in wanted]
    near = difflib.get_close_matches(name, strays, n=1, cutoff=0.6)
    return f"; it has one for {near[0]!r}, which the model does not have there: rename it" if near else ""


def _sections(plan: Document) -> list[tuple[object, Mapping[str, str]]]:
    """The entries of a plan by name, section by section."""
    found: list[tuple[object, Mapping[str, str]]] = [
        (name, getattr(plan, name)) for name in ("inputs", "parameters", "buffers", "values")
    ]
    return found + [((kind, i), getattr(b, kind)) for i, b in enumerate(plan.blocks) for kind in ("ops", "values")]


def check_entries(plan: Document, known: Iterable[tuple[object, str]]) -> None:
    """Refuse entries that decide nothing: a misspelt name would otherwise pass silently."""
    wanted = set(known)
    for section, entries in _sections(plan):
        for name in entries:
            if (section, name) not in wanted:
                raise PlanError(
                    f"the plan has an entry {name!r} in {_called(plan, section)}, {_hint(plan, wanted, section, name)}"
                )


def _hint(plan: Document, wanted: Collection[tuple[object, str]], section: object, name: str) -> str:
    """Where an entry belongs, or what it may have been meant to be."""
    elsewhere = [_called(plan, s) for s, n in wanted if n == name]
    if elsewhere:
        return f"which belongs in {' or '.join(sorted(elsewhere))}: move it there"
    near = difflib.get_close_matches(name, [n for s, n in wanted if s == section], n=1, cutoff=0.6)
    return "which the model does not have there" + (f"; did you mean {near[0]!r}?" if near else ": remove it")


def _called(plan: Document, section: object) -> str:
    """A section of the plan in words: ``inputs``, or ``block 'layers.*', ops``."""
    return f"block {plan.blocks[section[1]].name!r}, {section[0]}" if isinstance(section, tuple) else str(section)
