"""Holds a configuration of another tool against a model and a cluster: whether it runs and fits, its cost, the best.

What is wrong with sizes and what the program refuses needs no planning (:mod:`planner.interchange.checks`). The rest is
our own model's word: the best plan pinned to what the configuration says, the best of all, and each of the changes next
to it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from planner.base.errors import AutoparError, InfeasibleError
from planner.base.formatting import in_bytes, in_paragraph, in_percent, in_seconds, sizes_text
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.interchange.checks import Mistake, check, mistakes
from planner.interchange.format import Format
from planner.interchange.formats import format_of, guess
from planner.interchange.model_sizes import ModelSizes, model_sizes
from planner.interchange.parallelism import WORDS, Parallelism, changed
from planner.interchange.pins import unpinned
from planner.interchange.pricing import Cost, cost_of, not_held_to, searched
from planner.ir.graph import Graph
from planner.ir.layout import MICRO
from planner.ops.dtypes import dtypes
from planner.search.branch_and_bound import Searched
from planner.search.search import search
from planner.search.search_context import Progress

HELPS = 0.01
"""A change helps from this part of a step on."""
HALF = ("bfloat16", "float16")
EACH_S = 2.0
"""So long is looked for what a changed configuration takes, at most."""


@dataclass(frozen=True)
class Improvement:
    """A change of a configuration: which, in words, the fields it is made in, and what a step takes then."""

    what: str
    fields: tuple[str, ...]
    cost: Cost


@dataclass(frozen=True, repr=False)
class Lint:
    """What there is to say of a configuration; prints as text.

    Attributes:
        format: it is of.
        description: what it says; ``None``: it cannot be read.
        mistakes: why it does not run; empty: it runs.
        cost: what it takes; ``None``: it does not run, or fit.
        misfit: why it does not fit, or cannot be planned; empty: it does.
        usable_bytes: of a device.
        best: the fastest plan's cost, and ``mesh`` its axes; ``None``: not looked for, or none was found.
        change: the one that helps most of those that change one thing.
        unpinned: what the configuration says that its cost is not of, in words.
        note: what to take the figures with; empty: nothing.
    """

    format: Format
    description: Parallelism | None
    mistakes: tuple[Mistake, ...]
    cost: Cost | None = None
    misfit: str = ""
    usable_bytes: int = 0
    best: Cost | None = None
    mesh: str = ""
    change: Improvement | None = None
    unpinned: tuple[str, ...] = ()
    note: str = ""

    @property
    def runs(self) -> bool:
        """Whether nothing is wrong with it, and it fits."""
        return not self.mistakes and not self.misfit

    def __str__(self) -> str:
        return "\n".join(in_paragraph(line, "    ") for line in self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        count = len(self.mistakes)
        if count:
            yield f"for {self.format.tool}: does not run, for {count} reason{'s' * (count > 1)}"
            yield from (f"  {mistake}" for mistake in self.mistakes)
        elif self.misfit:
            yield f"for {self.format.tool}: runs, and does not fit"
            yield f"  {self.misfit}"
        else:
            yield f"for {self.format.tool}: runs"
        if self.cost is not None:
            yield f"  fits: {self._memory(self.cost)}"
            yield f"  takes: {in_seconds(self.cost.step_s)} a step"
            if self.unpinned:
                yield f"  {not_held_to(self.unpinned)}"
        if self.best is not None and self.cost is not None and self.best.step_s >= self.cost.step_s:
            yield "  best: nothing faster was found in the time"
        elif self.best is not None:
            less = 1 - self.best.step_s / self.cost.step_s if self.cost is not None else 0.0
            yield f"  best: {in_seconds(self.best.step_s)} a step{self._less(less)}, {self.mesh}"
        if self.change is not None:
            cost, less = self.change.cost, 1 - self.change.cost.step_s / self.cost.step_s if self.cost else 0.0
            yield (
                f"  change: {self.change.what} ({', '.join(self.change.fields)}): {in_seconds(cost.step_s)} a step"
                f"{self._less(less)}, {in_bytes(cost.peak_bytes)}"
            )
        elif self.best is not None and self.cost is not None:
            yield "  change: none of one thing makes it faster"
        if self.note:
            yield f"  note: {self.note}"

    def _memory(self, cost: Cost) -> str:
        if len(cost.rank_bytes) == 1:
            return f"{in_bytes(cost.peak_bytes)} of {in_bytes(self.usable_bytes)} on every device"
        each = ", ".join(map(in_bytes, cost.rank_bytes))
        return f"{each} of {in_bytes(self.usable_bytes)} on a device of each pipeline rank"

    @staticmethod
    def _less(share: float) -> str:
        return f" ({in_percent(share)} less)" if share >= HELPS else ""


def lint(
    text: str,
    format_name: str | None,
    graph: Graph,
    cluster: ClusterSpec,
    training: Training,
    *,
    time_limit_s: float = 20.0,
    progress: Progress | None = None,
) -> Lint:
    """What there is to say of a configuration.

    Args:
        text: of the configuration.
        format_name: of its format; ``None``: found out.
        graph: of the model, with an example of the global batch.
        time_limit_s: for the searches together; 0: nothing is planned, only what needs none is checked.

    Raises:
        ConfigError: there is no such format, or it cannot be found out.
    """
    form = guess(text) if format_name is None else format_of(format_name)
    sizes = model_sizes(graph)
    d, wrong = check(text, form, sizes, cluster.world_size)
    found = Lint(
        form,
        d,
        tuple(wrong),
        usable_bytes=cluster.device.usable_bytes,
        unpinned=() if d is None else unpinned(d, dtypes(graph).get("parameters", "").partition(",")[0]),
        note=_note(d, graph),
    )
    if not time_limit_s:
        return found

    def cost(d: Parallelism, limit_s: float) -> Cost:
        return cost_of(searched(graph, cluster, d, training, limit_s))

    until, say = time.monotonic() + time_limit_s, progress or (lambda text: None)
    say("looking for the best plan")
    with contextlib.suppress(AutoparError):  # where nothing fits, what the configuration says does not, and says so
        best = search(graph, cluster, Pins(), training, time_limit_s=time_limit_s / 3, gap=HELPS, progress=progress)
        found = replace(found, best=cost_of(best), mesh=_told(best))
    if d is None or found.mistakes:
        return found
    say("planning what the configuration says")
    try:
        found = replace(found, cost=cost(d, time_limit_s / 3))
    except InfeasibleError as error:
        found = replace(found, misfit=str(error))
    except AutoparError as error:
        return replace(found, note=f"what it takes is not known, since our planner has no such plan: {error}")
    say("trying changes")
    tried = (each for each in neighbours(d, sizes) if _may(each, form, sizes, cluster))
    return replace(found, change=_change(d, form, found.cost, tried, cost, until))


def _note(d: Parallelism | None, graph: Graph) -> str:
    """Whether the model is in another dtype than the configuration computes in."""
    dtype = dtypes(graph)["compute"].partition(",")[0]
    if d is None or d.dtype not in HALF or dtype in HALF:
        return ""
    return f"it computes in {d.dtype}, and figures are of the model as it is given, in {dtype}: give it in {d.dtype}"


def _told(found: Searched) -> str:
    """The axes of a plan, and its micro-batches."""
    sizes = {name: size for name, size in found.best.config.sizes.items() if name != MICRO}
    count = found.best.config.mesh.micro_batches
    return sizes_text(sizes) + (f", {count} micro-batches" if count > 1 else "")


def neighbours(d: Parallelism, sizes: ModelSizes) -> Iterator[Parallelism]:
    """Descriptions that differ in one thing, the cheapest to change first."""
    everywhere = replace(d, recompute_layers=None, recompute_modules=())
    yield from (replace(everywhere, recompute=level) for level in ("none", "full", "selective"))
    if d.data * d.context > 1:
        yield from (replace(d, zero=stage) for stage in (0, 1, 2, 3))
    if d.tensor > 1:
        yield replace(d, sequence_parallel=not d.sequence_parallel)
    yield replace(d, micro_batches=d.micro_batches * 2)
    if d.micro_batches % 2 == 0:
        yield replace(d, micro_batches=d.micro_batches // 2)
    names = ("data", "tensor", "pipeline", "context", "replicate")
    for less in names:
        for more in names:
            if less != more and getattr(d, less) % 2 == 0:
                moved = {less: getattr(d, less) // 2, more: getattr(d, more) * 2}
                schedule = {
                    "pipeline": {
                        "stage_layers": (),
                        "micro_batches": max(d.micro_batches, 2 * moved.get("pipeline", 1)),
                    }
                }
                yield replace(d, **moved, products={}, **schedule.get(more, {}))
    if d.pipeline > 1 and d.virtual_stages == 1:
        yield replace(d, schedule="interleaved_1f1b", virtual_stages=2, stage_layers=())
    if sizes.experts:
        yield replace(d, expert=d.expert * 2)
    if d.offload == "none":
        yield replace(d, offload="host")


def _may(d: Parallelism, form: Format, sizes: ModelSizes, cluster: ClusterSpec) -> bool:
    """Whether the format can say it, and nothing is wrong with it."""
    d = replace(d, devices=None)
    return d.zero <= 3 and form.round(d)[0] == d and not mistakes(d, form, sizes, cluster.world_size)


def _change(
    d: Parallelism,
    form: Format,
    now: Cost | None,
    tried: Iterator[Parallelism],
    cost: Callable[[Parallelism, float], Cost],
    until: float,
) -> Improvement | None:
    """The change that helps most, as time permits; where nothing fits, the first that does."""
    found: Improvement | None = None
    least_s = now.step_s * (1 - HELPS) if now is not None else float("inf")
    for each in tried:
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        if each == d:
            continue
        try:
            taken = cost(each, min(EACH_S, left_s))
        except AutoparError:
            continue
        if taken.step_s < least_s:
            least_s = taken.step_s
            names = tuple(
                form.fields[name] for name in WORDS if name in form.fields and getattr(d, name) != getattr(each, name)
            )
            found = Improvement("; ".join(changed(d, each)), names, taken)
    return found
