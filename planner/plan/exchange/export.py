"""``plan.export``: a plan as a configuration of another tool, what that loses, and the price of it by our own model.

The price is what the best plan takes that is pinned to what the configuration says: the same search, the same memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from planner.base.errors import AutoparError, ConfigError
from planner.base.files import check_path, write_text
from planner.base.formatting import in_bytes, in_paragraph, in_percent, in_seconds
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.context import with_ulysses
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.interchange.format import Format
from planner.interchange.formats import format_of
from planner.interchange.parallelism import Loss, Parallelism
from planner.interchange.pins import in_words, pins_of, unpinned
from planner.ir.graph import Graph
from planner.plan.document.document import EVALUATE, Document
from planner.plan.exchange.described import described
from planner.search.branch_and_bound import Searched
from planner.search.search import check_time_limit, search

GAP = 0.02
"""Part of a step that a price need not be proved to."""


@dataclass(frozen=True)
class Price:
    """What a step takes as a configuration says it, on the busiest and the fullest device.

    Attributes:
        step_s, peak_bytes: of the best plan with its pins; 0 where there is none.
        why_not: why there is none; empty: there is.
        unpinned: what the configuration says that the plan was not held to, in words.
    """

    step_s: float = 0.0
    peak_bytes: int = 0
    why_not: str = ""
    unpinned: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Export:
    """A plan as a configuration; prints as the text and what it loses.

    Attributes:
        text: of the configuration.
        format: which, with its tool's version.
        description: what the text says, in our words.
        losses: what of the plan it does not say, and why.
        planned: what the plan takes.
        price: what the configuration takes; ``None``: the plan was read from a file, without its model.
    """

    text: str
    format: Format
    description: Parallelism
    losses: tuple[Loss, ...]
    planned: Price
    price: Price | None

    def __str__(self) -> str:
        return f"{self.text}\n{self.report}\n"

    __repr__ = __str__

    @property
    def report(self) -> str:
        """What it loses, the price of that, and how the text is used."""
        count = len(self.losses)
        lost = f"{count} thing{'s' * (count != 1)} said otherwise, or in code" if count else "nothing is lost"
        rows = [f"for {self.format.tool}: {lost}"]
        rows += [in_paragraph(f"  {loss}", "    ") for loss in self.losses]
        rows.append(in_paragraph(f"  price: {self._priced()}", "    "))
        rows.append(f"  use: {self.format.note}")
        return "\n".join(rows)

    def _priced(self) -> str:
        planned, price = self.planned, self.price
        told = f"{in_seconds(planned.step_s)} a step and {in_bytes(planned.peak_bytes)} as planned"
        if price is None:
            return f"{told}; what the configuration takes is known with the model: --model, or {EVALUATE}"
        if price.why_not:
            return f"{told}; the configuration has none: {price.why_not}"
        more = price.step_s / planned.step_s - 1 if planned.step_s else 0.0
        way = f"{in_percent(abs(more))} {'slower' if more > 0 else 'faster'}" if abs(more) >= 0.005 else "as fast"
        told += f", {in_seconds(price.step_s)} and {in_bytes(price.peak_bytes)} as configured: {way}"
        return f"{told}; {not_held_to(price.unpinned)}" if price.unpinned else told

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


def not_held_to(unpinned: tuple[str, ...]) -> str:
    """What a price is not of, in words."""
    return f"not priced as configured, but as the search or the model has it: {', '.join(unpinned)}"


def export(plan: Document, name: str, *, time_limit_s: float = 10.0) -> Export:
    """A plan as a configuration of another tool; see :meth:`planner.plan.plan.Plan.export`."""
    check_time_limit(time_limit_s)
    form = format_of(name)
    whole, beyond = described(plan)
    description, losses = form.round(whole)
    parts = description.batch_ranks * description.micro_batches
    if description.batch is not None and description.batch % parts:
        told = "; ".join(loss.what for loss in losses)
        raise ConfigError(
            f"{form.tool} cannot say this plan ({told}): a batch of {description.batch} does not divide by {parts} "
            "parts, one for each data-parallel rank and micro-batch. Export to a format that has pipelines, such as "
            "megatron, or plan a larger batch"
        )
    predicted = plan.predicted
    planned = Price(predicted.step_time_s, predicted.peak_bytes)
    as_stored, is_stored_so = replace(description, stored=whole.stored), description.stored == whole.stored
    price = planned if is_stored_so else replace(planned, unpinned=(in_words(description, "stored"),))
    return Export(
        form.write(description),
        form,
        description,
        (*beyond, *losses),
        planned,
        price if not beyond and as_stored == whole else _price(plan, description, whole.stored, time_limit_s),
    )


def _price(plan: Document, description: Parallelism, stored: str, time_limit_s: float) -> Price | None:
    """What a description takes for the model of a plan, if the plan carries it."""
    if plan.assignment is None:
        return None
    space = plan.assignment.space
    try:
        found = searched(space.graph, plan.cluster, description, space.training, time_limit_s)
    except AutoparError as error:
        return Price(why_not=str(error))
    predicted = found.planned_step[1]
    return Price(predicted.step_time_s, predicted.peak_bytes, unpinned=unpinned(description, stored))


def searched(
    graph: Graph, cluster: ClusterSpec, description: Parallelism, training: Training, time_limit_s: float
) -> Searched:
    """The best plan that is pinned to a description.

    Raises:
        ConfigError, PinError, InfeasibleError, ClusterError: there is none; says why.
    """
    modules = {node.path: None for node in graph.operators if node.path} if description.recompute_modules else {}
    pins = with_ulysses(Pins.parse(pins_of(description, modules.keys())), graph, cluster)
    training = replace(training, tier=pins.tier, activations=0, update=pins.update)
    return search(graph, cluster, pins, training, time_limit_s=time_limit_s, gap=GAP)
