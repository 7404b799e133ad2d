"""The demo: a Transformer written for one device, trained on four processes under a plan that autopar found.

One straight list: plan, train on local processes, train the same steps in one process, compare. The
comparison is exact where it can be (collective calls and bytes) and honest where it cannot (memory, time).
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import autopar
from autopar.measure.local_processes import LocalProcesses
from autopar.runtime.module import ParallelModule
from autopar.runtime.spmd.mesh import groups_of
from autopar.verification.collective_counter import count_collectives
from autopar.verification.memory_meter import LiveBytes, held_tensors
from planner.base.errors import InputError
from planner.base.formatting import in_bytes, in_seconds
from planner.cost.cluster import ClusterSpec
from planner.formulation.resharding import Collective
from planner.plan.plan import Plan

PRELOAD = ("torch", "transformers.models.gpt2.modeling_gpt2", "autopar.cli.demo")
COMPARED_STEPS, LOSS_TOLERANCE = 20, 1e-4
# Llama's: with a usual, smaller eps Adam turns the rounding of gradients near zero into steps, and losses drift apart.
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-5}
WHOLE = {"pipeline": 1, "micro_batches": 1}
"""One forward and one backward, if no pin asks for others: the collectives of a step are compared by process, and in a
pipeline each has its own."""


@dataclass(frozen=True)
class Settings:
    """What to train, and on how many processes. Sizes are in tokens, layers and elements."""

    ranks: int = 4
    steps: int = 20
    layers: int = 4
    hidden: int = 128
    heads: int = 8
    batch: int = 8
    sequence: int = 128
    text: str | None = None
    pin: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One training step as a rank saw it: the loss of the global batch, and seconds."""

    index: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class Observed:
    """What a rank observed in one step: its collective calls, and the bytes of live tensors at the peak."""

    calls: Mapping[Collective, int]
    peak_bytes: int


# ---- the model and its text ------------------------------------------------------------------------------------------


def read_text(path: str | None) -> bytes:
    """English text, as bytes: a file of one's own, or the language reference that comes with Python."""
    if path is not None:
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise InputError(f"cannot read the text {path!r}: {error.strerror}") from error
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def make_model(settings: Settings) -> nn.Module:
    """A GPT-2 with byte tokens; Transformers' own, unmodified. Without dropout, so that losses can be compared."""
    from transformers import GPT2Config, GPT2LMHeadModel

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=settings.layers,
        n_embd=settings.hidden,
        n_head=settings.heads,
        n_positions=settings.sequence,
        vocab_size=256,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).train()


def batches(settings: Settings) -> Iterator[dict[str, Tensor]]:
    """Global batches of passages drawn from the text; the same on every rank."""
    text = torch.frombuffer(bytearray(read_text(settings.text)), dtype=torch.uint8).long()
    if len(text) <= settings.sequence:
        raise InputError(f"the text has {len(text)} bytes; give one longer than a sequence of {settings.sequence}")
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(0, len(text) - settings.sequence, (settings.batch,), generator=generator)
        tokens = torch.stack([text[start : start + settings.sequence] for start in starts.tolist()])
        yield {"input_ids": tokens, "labels": tokens.clone()}


# ---- what runs -------------------------------------------------------------------------------------------------------


def train_here(settings: Settings) -> Generator[Step, None, None]:
    """The original, in this process, on the whole batch."""
    model: Any = make_model(settings)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for index, batch in zip(range(settings.steps), batches(settings), strict=False):
        start = time.perf_counter()
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield Step(index, loss.item(), time.perf_counter() - start)


def train_rank(settings: Settings, document: Mapping[str, Any]) -> Generator[Step, None, Observed]:
    """One rank of the parallelized model: the same five lines, and in the second step two instruments."""
    quiet()
    plan = Plan.from_dict(document)
    stream = batches(settings)
    batch = next(stream)
    pmodel = autopar.parallelize(make_model(settings), plan.cluster, plan=plan, example_kwargs=batch)
    optimizer = torch.optim.AdamW(pmodel.parameters(), **ADAMW)
    calls: Counter[Collective] = Counter()
    peak_bytes = 0
    for index in range(settings.steps):
        dist.barrier()
        start = time.perf_counter()
        if index == min(1, settings.steps - 1):
            with (
                LiveBytes(held_tensors(pmodel, optimizer)) as live,
                count_collectives(groups_of(pmodel.device_mesh)) as calls,
            ):
                loss = _step(pmodel, optimizer, batch)
            peak_bytes = live.peak
        else:
            loss = _step(pmodel, optimizer, batch)
        yield Step(index, loss, time.perf_counter() - start)
        batch = next(stream)
    return Observed(dict(calls), peak_bytes)


def _step(pmodel: ParallelModule, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> float:
    loss: Tensor = pmodel(**pmodel.shard(batch)).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def quiet() -> None:
    """Keep notices that libraries write about each other out of the picture."""
    warnings.simplefilter("ignore")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)


# ---- the demo --------------------------------------------------------------------------------------------------------


def run(settings: Settings, console: Console, directory: Path) -> bool:
    """Plan, train, compare, print; writes ``plan.json`` and ``plan.html``. True if everything agrees."""
    quiet()
    began = time.monotonic()
    first = next(batches(settings))
    with LocalProcesses(settings.ranks, PRELOAD) as processes:
        model = make_model(settings)
        _introduce(console, settings, model)
        cluster = ClusterSpec.local(settings.ranks)
        with console.status("planning ...") as status:
            start = time.monotonic()
            plan = autopar.plan(
                model,
                cluster,
                example_kwargs=first,
                pin={**WHOLE, **settings.pin},
                progress=lambda text: status.update(f"{text} ..."),
            )
            planned_s = time.monotonic() - start
        console.print(f"[bold]Plan[/bold], found in {in_seconds(planned_s)}\n", highlight=False)
        _print_plan(console, plan)
        plan.save(directory / "plan.json")
        plan.save_html(directory / "plan.html")
        with _progress(console) as progress:
            parallel, observed = _train_parallel(processes, settings, plan, progress)
            alone = _train_alone(settings, progress)
    agree = [
        _compare_losses(console, parallel, alone, settings),
        _compare_collectives(console, plan, observed),
    ]
    _compare_costs(console, settings, plan, observed, parallel, alone)
    took = in_seconds(time.monotonic() - began)
    console.print(
        f"all this took {took}; written to {directory.resolve()}: plan.html, to look at, and plan.json", highlight=False
    )
    return all(agree)


def _introduce(console: Console, settings: Settings, model: nn.Module) -> None:
    count = sum(p.numel() for p in model.parameters())
    source = settings.text or "Python's language reference (pydoc_data.topics)"
    console.rule("[bold]autopar demo")
    console.print(
        f"model   Transformers GPT-2, {settings.layers} layers, hidden size {settings.hidden}, {count:,} parameters\n"
        f"batch   {settings.batch} passages of {settings.sequence} bytes of {source}\n"
        f"devices {settings.ranks} processes on this machine, talking over gloo\n",
        highlight=False,
    )


def _print_plan(console: Console, plan: Plan) -> None:
    """Whole into a file; on a terminal, as wide as that is."""
    from planner.plan.report import text

    console.print(
        text(plan, console.width if console.is_terminal else None), highlight=False, markup=False, soft_wrap=True
    )


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
    )


def _train_parallel(
    processes: LocalProcesses, settings: Settings, plan: Plan, progress: Progress
) -> tuple[list[list[Step]], list[Observed]]:
    """Steps by rank, and what each rank observed."""
    steps: list[list[Step]] = [[] for _ in range(settings.ranks)]
    task = progress.add_task(f"training on {settings.ranks} processes", total=settings.steps, note="applying the plan")

    def on_event(rank: int, step: Step) -> None:
        steps[rank].append(step)
        if rank == 0:
            progress.update(task, advance=1, note=f"loss {step.loss:.3f}")

    return steps, processes.run(train_rank, settings, plan.to_dict(), on_event=on_event)


def _train_alone(settings: Settings, progress: Progress) -> list[Step]:
    task = progress.add_task("training in one process", total=settings.steps, note="")
    steps = []
    for step in train_here(settings):
        steps.append(step)
        progress.update(task, advance=1, note=f"loss {step.loss:.3f}")
    return steps


# ---- what is compared ------------------------------------------------------------------------------------------------


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_style="bold", title_justify="left", header_style="dim", box=box.SIMPLE_HEAD)
    table.show_edge = table.pad_edge = False  # so that seven columns fit into 80 characters
    table.collapse_padding = True
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right")
    return table


def _compare_losses(console: Console, parallel: list[list[Step]], alone: list[Step], settings: Settings) -> bool:
    """Losses side by side; they must agree over the first steps (later ones drift apart by rounding alone)."""
    table = _table("Loss", "step", f"{settings.ranks} processes", "one process", "difference", left=0)
    worst = 0.0
    shown = {round(i * (len(alone) - 1) / 9) for i in range(10)}
    for step in alone:
        losses = [steps[step.index].loss for steps in parallel]
        difference = max(abs(loss - step.loss) for loss in losses)
        if step.index < COMPARED_STEPS:
            worst = max(worst, difference)
        if step.index in shown:
            table.add_row(str(step.index + 1), f"{losses[0]:.6f}", f"{step.loss:.6f}", f"{difference:.1e}")
    console.print(table)
    good = worst <= LOSS_TOLERANCE
    compared = min(COMPARED_STEPS, len(alone))
    console.print(
        _verdict(good, f"the largest difference over {compared} steps is {worst:.1e}, of {LOSS_TOLERANCE:.0e} allowed"),
        highlight=False,
    )
    return good


def _compare_collectives(console: Console, plan: Plan, observed: list[Observed]) -> bool:
    """Calls and bytes of one step, predicted and observed; they must be equal on every rank, call by call."""
    predicted = dict(plan.predicted.collectives)
    table = _table(
        "Collectives of one step, on each process",
        "pass",
        "axis",
        "collective",
        "calls\npredicted",
        "\nobserved",
        "bytes\npredicted",
        "\nobserved",
        left=3,
    )
    rows: dict[tuple[str, str, str], list[int]] = {}
    for column, calls in ((0, predicted), (1, observed[0].calls)):
        for call, count in calls.items():
            row = rows.setdefault((call.phase, call.axis, call.kind), [0, 0, 0, 0])
            row[column] += count
            row[2 + column] += count * call.bytes_in
    for key in sorted(rows, key=lambda k: (k[0] != "forward", k)):
        table.add_row(*key, *(f"{number:,}" for number in rows[key]))
    console.print(table)
    wrong = [rank for rank, seen in enumerate(observed) if dict(seen.calls) != predicted]
    text = f"different on processes {wrong}" if wrong else "equal on every process, call by call"
    console.print(_verdict(not wrong, text), highlight=False)
    return not wrong


def _compare_costs(
    console: Console,
    settings: Settings,
    plan: Plan,
    observed: list[Observed],
    parallel: list[list[Step]],
    alone: list[Step],
) -> None:
    """Memory and time: predictions are estimates, so both numbers are shown and none is required."""
    table = _table("One step, on the fullest and the slowest process", "", "predicted", "observed", "")
    peaks = [seen.peak_bytes for seen in observed]
    everything = "weights, gradients, optimizer state, activations"
    table.add_row("live tensors", in_bytes(plan.predicted.peak_bytes), in_bytes(max(peaks)), everything)
    steady = [max(steps[i].seconds for steps in parallel) for i in range(2, len(alone))]
    if steady:
        median = in_seconds(statistics.median(steady))
        table.add_row("time", in_seconds(plan.predicted.step_time_s), median, f"median of {len(steady)} steps")
        median = in_seconds(statistics.median(step.seconds for step in alone[2:]))
        table.add_row("time in one process", "", median, "with all cores to itself")
    console.print(table)
    console.print(
        f"\nThe {settings.ranks} processes share the cores of this machine, so they may well be slower than one: the "
        "demo shows that they compute the same, not that they are faster.\n",
        highlight=False,
    )


def _verdict(good: bool, text: str) -> str:
    return f"[green]✓[/green] {text}\n" if good else f"[bold red]✗ {text}[/bold red]\n"
