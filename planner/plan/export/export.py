"""``plan.export``: a plan as a configuration of another tool, what that loses, and the price of it by our own model."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from planner.base.errors import AutoparError, ConfigError
from planner.base.files import check_path, write_text
from planner.base.formatting import in_bytes, in_paragraph, in_percent, in_seconds
from planner.interchange.format import Format
from planner.interchange.formats import format_of
from planner.interchange.parallelism import Lost, Parallelism
from planner.interchange.pins import in_words, unpinned
from planner.interchange.pricing import Cost, cost_of, not_held_to, searched
from planner.plan.document.document import EVALUATE, Document
from planner.plan.export.described import described
from planner.search.search import check_time_limit


@dataclass(frozen=True, repr=False)
class Export:
    """A plan as a configuration; prints as the text and what it loses.

    Attributes:
        text: of the configuration.
        format: which, with its tool's version.
        description: what the text says, in our words.
        lost: what of the plan it does not say, and why.
        planned: what the plan takes.
        price: what the configuration takes; ``None``: nothing fits, or the plan was read from a file without its model.
        why_not: why nothing fits; empty: something does.
        unpinned: what the configuration says that its price is not of, in words.
    """

    text: str
    format: Format
    description: Parallelism
    lost: tuple[Lost, ...]
    planned: Cost
    price: Cost | None
    why_not: str = ""
    unpinned: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.text}\n{self.report}\n"

    __repr__ = __str__

    @property
    def report(self) -> str:
        """What it loses, the price of that, and how the text is used."""
        count = len(self.lost)
        told = f"{count} thing{'s' * (count != 1)} said otherwise, or in code" if count else "nothing is lost"
        rows = [f"for {self.format.tool}: {told}"]
        rows += [in_paragraph(f"  {each}", "    ") for each in self.lost]
        rows.append(in_paragraph(f"  price: {self._priced()}", "    "))
        rows.append(f"  use: {self.format.note}")
        return "\n".join(rows)

    def _priced(self) -> str:
        planned, price = self.planned, self.price
        told = f"{in_seconds(planned.step_s)} a step and {in_bytes(planned.peak_bytes)} as planned"
        if self.why_not:
            return f"{told}; the configuration has none: {self.why_not}"
        if price is None:
            return f"{told}; what the configuration takes is known with the model: --model, or {EVALUATE}"
        more = price.step_s / planned.step_s - 1 if planned.step_s else 0.0
        way = f"{in_percent(abs(more))} {'slower' if more > 0 else 'faster'}" if abs(more) >= 0.005 else "as fast"
        told += f", {in_seconds(price.step_s)} and {in_bytes(price.peak_bytes)} as configured: {way}"
        return f"{told}; {not_held_to(self.unpinned)}" if self.unpinned else told

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the text, atomically.

        Raises:
            ConfigError: the file cannot be written.
        """
        check_path(path, "file to save the configuration in", ConfigError)
        try:
            write_text(Path(path), self.text)
        except OSError as error:
            raise ConfigError(f"cannot write {os.fspath(path)!r}: {error.strerror}") from error


def export(plan: Document, name: str, *, time_limit_s: float = 10.0) -> Export:
    """A plan as a configuration of another tool; see :meth:`planner.plan.plan.Plan.export`."""
    check_time_limit(time_limit_s)
    form = format_of(name)
    whole, beyond = described(plan)
    description, lost = form.round(whole)
    parts = description.batch_ranks * description.micro_batches
    if description.batch is not None and description.batch % parts:
        told = "; ".join(each.what for each in lost)
        raise ConfigError(
            f"{form.tool} cannot say this plan ({told}): a batch of {description.batch} does not divide by {parts} "
            "parts, one for each data-parallel rank and micro-batch. Export to a format that has pipelines, such as "
            "megatron, or plan a larger batch"
        )
    predicted = plan.predicted
    planned = Cost(predicted.step_time_s, (predicted.peak_bytes,))
    exported = Export(form.write(description), form, description, (*beyond, *lost), planned, price=None)
    if beyond or replace(description, stored=whole.stored) != whole:
        return _priced(exported, plan, whole.stored, time_limit_s)
    is_stored_so = description.stored == whole.stored
    return replace(exported, price=planned, unpinned=() if is_stored_so else (in_words(description, "stored"),))


def _priced(exported: Export, plan: Document, stored: str, time_limit_s: float) -> Export:
    """The same with what its description takes for the model of a plan, if the plan carries that."""
    if plan.assignment is None:
        return exported
    space, description = plan.assignment.space, exported.description
    try:
        found = searched(space.graph, plan.cluster, description, space.training, time_limit_s)
    except AutoparError as error:
        return replace(exported, why_not=str(error))
    return replace(exported, price=cost_of(found), unpinned=unpinned(description, stored))
