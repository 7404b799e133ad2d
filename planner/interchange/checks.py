"""What is wrong with a description before anything is planned: sizes that do not divide, and what programs refuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.base.errors import ConfigError, ScheduleError
from planner.interchange.format import Format
from planner.interchange.model_sizes import ModelSizes
from planner.interchange.parallelism import DEGREES, Parallelism, changed, resolved
from planner.solve.pipeline.schedule import check_fits

ROUNDS = ("interleaved_1f1b",)
"""Schedules that take micro-batches in rounds of as many as there are ranks."""


@dataclass(frozen=True)
class Mistake:
    """Why a configuration does not run.

    Attributes:
        what: is wrong, with the numbers.
        change: the smallest one that helps, in the format's words.
    """

    what: str
    change: str

    def __str__(self) -> str:
        return f"{self.what}: {self.change}"


def check(text: str, form: Format, sizes: ModelSizes, devices: int) -> tuple[Parallelism | None, list[Mistake]]:
    """What a text says, if it can be read and its sizes resolved, and everything that is wrong with it."""
    try:
        d = resolved(form.read(text), devices, sizes.batch or None)
    except ConfigError as error:
        return None, [Mistake("it contradicts itself, or cannot be read", str(error))]
    return d, mistakes(d, form, sizes, devices)


def mistakes(d: Parallelism, form: Format, sizes: ModelSizes, devices: int) -> list[Mistake]:
    """Everything that is wrong with a resolved description."""
    return [*_devices(d, form, devices), *_sizes(d, form, sizes), *_stages(d, form, sizes), *_refused(d, form)]


def _devices(d: Parallelism, form: Format, devices: int) -> Iterator[Mistake]:
    if d.devices is not None and d.devices != d.size:
        yield Mistake(
            f"{form.fields['devices']} is {d.devices}, and {_product(d)} = {d.size}",
            f"set it to {d.size}, or the degrees",
        )
    if d.size != devices != d.devices:
        rest, left = divmod(devices, d.size // d.data)
        data = form.fields.get("data", "data")
        way = f"set {data} to {rest}" if not left and rest else "take degrees whose product that is"
        yield Mistake(f"it takes {_product(d)} = {d.size} devices, and the cluster has {devices}", way)


def _product(d: Parallelism) -> str:
    return " x ".join(f"{getattr(d, name)} {name}" for name in DEGREES if getattr(d, name) > 1) or "1"


def _sizes(d: Parallelism, form: Format, sizes: ModelSizes) -> Iterator[Mistake]:
    zigzags = 2 * d.context if "zigzag" in d.context_kind and d.context > 1 else d.context
    shares = d.context * d.tensor if d.sequence_parallel else zigzags
    rows = (
        ("heads", sizes.heads, "tensor", d.tensor, "attention has {} heads"),
        ("key-value heads", sizes.key_value_heads, "tensor", d.tensor, "attention has {} heads of keys and values"),
        ("heads", sizes.heads, "context", d.context if d.context_kind == "ulysses" else 1, "attention has {} heads"),
        ("tokens", sizes.sequence, "context", zigzags, "a sequence has {} tokens"),
        ("tokens", sizes.sequence, "sequence_parallel", shares, "a sequence has {} tokens"),
        ("experts", sizes.experts, "expert", d.expert, "a mixture has {} experts"),
    )
    told = set()
    for what, size, name, ranks, sentence in rows:
        if size and size % ranks and (what, ranks) not in told:
            told.add((what, ranks))
            fits = max(n for n in range(1, min(ranks, size + 1)) if size % n == 0)
            if name == "sequence_parallel":
                change = f"turn {_field(form, name)} off, or take a sequence that does"
            elif name == "context" and zigzags != d.context:
                change = f"take a sequence of a multiple of {zigzags}"
            else:
                change = f"set {_field(form, name)} to {fits}"
            yield Mistake(f"{sentence.format(size)}, which {ranks} ranks do not divide", change)
    if d.expert > 1 and not sizes.experts:
        yield Mistake(f"{d.expert} ranks share experts, and the model has none", f"set {_field(form, 'expert')} to 1")
    inner = d.data * d.context * d.tensor
    if (
        d.expert > 1
        and sizes.experts
        and sizes.experts % d.expert == 0
        and inner % (d.expert * max(d.expert_tensor, 1))
    ):
        fits = max(n for n in range(1, min(d.expert, sizes.experts + 1)) if inner % n == 0)
        yield Mistake(
            f"{d.expert} ranks that share experts do not divide the {inner} of data, context and tensor parallelism "
            "that they are to be among",
            f"set {_field(form, 'expert')} to {fits}",
        )
    if sizes.batch and d.batch is not None and d.batch != sizes.batch:
        yield Mistake(
            f"it is for a batch of {d.batch}, and the example has {sizes.batch} samples",
            f"give an example of {d.batch}",
        )
    each = d.batch_ranks * d.micro_batches
    if d.batch is not None and d.batch % each:
        fewer = max(
            (n for n in range(1, min(d.micro_batches, d.batch + 1)) if d.batch % (d.batch_ranks * n) == 0), default=0
        )
        way = f"set {_field(form, 'micro_batches')} to {fewer}" if fewer else f"take a batch of a multiple of {each}"
        yield Mistake(
            f"a batch of {d.batch} does not divide by {d.batch_ranks} data-parallel ranks x {d.micro_batches} "
            "micro-batches",
            way,
        )


def _stages(d: Parallelism, form: Format, sizes: ModelSizes) -> Iterator[Mistake]:
    layers, stages = sizes.layers or d.layers or 0, d.pipeline * d.virtual_stages
    if d.layers and sizes.layers and d.layers != sizes.layers:
        where = "layers" if "layers" in form.fields else "stage_layers"
        yield Mistake(f"it is for {d.layers} layers, and the model has {sizes.layers}", f"mend {_field(form, where)}")
        return
    if d.stage_layers and layers and sum(d.stage_layers) != layers:
        told = "+".join(map(str, d.stage_layers))
        yield Mistake(
            f"its stages have {told} = {sum(d.stage_layers)} layers, and the model has {layers}",
            f"mend {_field(form, 'stage_layers')}",
        )
    elif layers and stages > layers and d.pipeline > 1:
        fits = max((n for n in range(1, min(d.pipeline, layers) + 1) if n * d.virtual_stages <= layers), default=1)
        yield Mistake(f"{layers} layers are fewer than {stages} stages", f"set {_field(form, 'pipeline')} to {fits}")
    elif form.even_stages and not d.stage_layers and layers and d.pipeline > 1 and layers % stages:
        fits = max(n for n in range(1, min(d.pipeline, layers) + 1) if layers % (n * d.virtual_stages) == 0 or n == 1)
        yield Mistake(
            f"{layers} layers do not divide by {stages} stages",
            f"set {_field(form, 'pipeline')} to {fits}, or give {_field(form, 'stage_layers')}",
        )
    if d.pipeline == 1:
        return
    try:
        check_fits(d.schedule, d.pipeline, d.micro_batches, d.virtual_stages)
    except ScheduleError as error:
        yield Mistake(str(error), f"change {_field(form, 'schedule')}")
    if d.schedule in ROUNDS and d.micro_batches % d.pipeline:
        more = -(-d.micro_batches // d.pipeline) * d.pipeline
        yield Mistake(
            f"the interleaved schedule takes micro-batches in rounds of {d.pipeline}, and there are {d.micro_batches}",
            f"set {_field(form, 'micro_batches')} to {more}",
        )


def _refused(d: Parallelism, form: Format) -> Iterator[Mistake]:
    """What the program refuses, each by itself."""
    for limit in form.limits:
        if limit.refused and limit.applies(d):
            yield Mistake(limit.why, "; ".join(changed(d, limit.rounds(replace(d)))))


def _field(form: Format, name: str) -> str:
    return form.fields.get(name, name)
