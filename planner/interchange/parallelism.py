"""How a step runs in parallel, in words that every format shares: degrees, ZeRO, schedule, recomputation, offload."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any, Literal

from planner.base.errors import ConfigError

Recomputation = Literal["none", "resharded", "selective", "full"]
TOOL_DIVIDES = "as the tool divides them"
NORMS = "layernorm"
"""Norms, among modules that recompute."""
REST = 0
"""A number that is not stated: data-parallel ranks are those that the other degrees leave, micro-batches those that the
batch takes."""
STANDARD = {
    "column": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    "gathered column": ("lm_head",),
    "row": ("o_proj", "down_proj"),
    "vocabulary": ("embed_tokens",),
}
"""How the layers of a Transformer are sharded where a tool decides that by itself, by the last part of their names."""
MOST = 10**9
"""No number of ranks, samples or tokens is larger."""
DEGREES = ("replicate", "data", "context", "tensor", "pipeline")
"""Fields whose product is the number of devices."""
WORDS = {
    "replicate": "copies of the data-parallel group",
    "data": "data parallel",
    "zero": "ZeRO",
    "tensor": "tensor parallel",
    "sequence_parallel": "sequence parallel",
    "context": "context parallel",
    "context_kind": "attention across ranks",
    "expert": "expert parallel",
    "expert_tensor": "expert tensor parallel",
    "pipeline": "pipeline parallel",
    "schedule": "schedule",
    "virtual_stages": "stages of a rank",
    "stage_layers": "layers of each stage",
    "micro_batches": "micro-batches",
    "recompute": "recomputation",
    "recompute_layers": "layers that recompute",
    "recompute_modules": "modules that recompute",
    "dtype": "dtype",
    "stored": "dtype of parameters",
    "offload": "offload",
    "products": "sharded layers",
}
"""What is compared between two descriptions, and how it is called."""


@dataclass(frozen=True)
class Parallelism:
    """How a step of a model runs on ``replicate * data * context * tensor * pipeline`` devices.

    Attributes:
        replicate: copies of the group that shares parameters (HSDP).
        data: ranks of that group, which share the batch, too; :data:`REST`: all that are left.
        zero: stage of ZeRO over ``data`` and ``context``: 0 to 3, as pin ``zero`` has it.
        tensor: ranks that share weights; ``sequence_parallel``: and, outside products, the sequence.
        context: ranks that share every sequence, and attend as ``context_kind`` says; empty: in any way.
        expert: ranks that share experts, whole ones each; taken of ``data * context * tensor``.
        expert_tensor: ranks that share each expert's weights; 0: as many as share other weights.
        pipeline, schedule, virtual_stages: ranks of the pipeline, their schedule by our name, and stages of each.
        stage_layers: how many layers each stage has, in order; empty: as the tool divides them.
        micro_batches: of one step; :data:`REST`: as many as the batch takes.
        recompute: what layers recompute in backward, of ``recompute_layers`` layers; ``None``: of all.
        recompute_modules: what of a layer recomputes where it is ``selective``; empty: all but products and attention.
        dtype: in which products are computed.
        stored: dtype of the parameters that the optimizer steps; empty: the model's own.
        offload: where parameters, gradients and optimizer state are at home.
        products: module, with ``*`` for the number of a layer -> how ranks of ``tensor`` share its weight: by
            ``column`` or ``row``; as a ``gathered column``, whose result is whole again, or a ``split row``, which
            takes parts of what comes whole; by ``vocabulary`` or ``features`` of a look-up; or ``along 2``: not at all,
            but what it is used with, along that dim. Empty: as the tool decides.
        along_sequence: where ``sequence_parallel`` leaves each rank some tokens: module with a weight that is used with
            these alone, such as a norm -> ``along 1``, the dim of tokens, or ``gathered along 1``, where what it makes
            is handed on with all tokens. Empty: as the tool decides.
        batch, sequence: samples of a global step, and tokens of each.
        micro_batch: samples of a rank in a micro-batch, where they are stated.
        devices: how many processes the configuration itself states.
        layers: of the model; ``layer_path`` is what they are called: ``model.layers.*``.
    """

    replicate: int = 1
    data: int = 1
    zero: int = 0
    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    context_kind: str = ""
    expert: int = 1
    expert_tensor: int = 0
    pipeline: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] = ()
    micro_batches: int = 1
    recompute: Recomputation = "none"
    recompute_layers: int | None = None
    recompute_modules: tuple[str, ...] = ()
    dtype: str = "float32"
    stored: str = "float32"
    offload: str = "none"
    products: Mapping[str, str] = field(default_factory=dict)
    along_sequence: Mapping[str, str] = field(default_factory=dict)
    batch: int | None = None
    sequence: int | None = None
    micro_batch: int | None = None
    devices: int | None = None
    layers: int | None = None
    layer_path: str = ""

    @property
    def size(self) -> int:
        """The devices that it takes; where data parallelism takes the rest, those that the other degrees take."""
        return math.prod(getattr(self, name) or 1 for name in DEGREES)

    @property
    def batch_ranks(self) -> int:
        """Ranks that share the batch."""
        return self.replicate * self.data

    @property
    def deviating(self) -> dict[str, str]:
        """Layers that are sharded otherwise than tools shard those of a Transformer by themselves."""
        return {path: kind for path, kind in self.products.items() if standard(path) != kind and not is_along(kind)}


@dataclass(frozen=True)
class Lost:
    """Something of a plan that a format does not say as it is.

    Attributes:
        what: the properties, with their values in the plan and in the format: ``"ZeRO 1 -> 2"``; of what is only said
            elsewhere its value.
        why: what stands in the way, or where to say it instead.
    """

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


def is_along(kind: str) -> bool:
    """Whether a module is whole, and shares its input along a dim; so its gradient is a sum over ranks."""
    return kind.startswith("along ")


def standard(path: str) -> str:
    """How tools shard a layer by themselves, by its name; empty where they leave it whole."""
    last = path.rpartition(".")[2]
    return next((kind for kind, names in STANDARD.items() if last in names), "")


def changed(one: Parallelism, other: Parallelism) -> Iterator[str]:
    """What differs between two descriptions: ``"ZeRO 1 -> 2"``."""
    for name, word in WORDS.items():
        before, after = getattr(one, name), getattr(other, name)
        if name == "products":
            lost = {path: kind for path, kind in before.items() if after.get(path) != kind}
            before, after = lost, {path: after[path] for path in lost if path in after}
        if before != after:
            yield f"{word} {told(name, before)} -> {told(name, after)}"


def told(name: str, value: Any) -> str:
    """A field's value in words."""
    if name == "products":
        return ", ".join(f"{path} by {kind}" for path, kind in value.items()) or "as the tool decides"
    if name == "stage_layers":
        runs = [(layers, len([*run])) for layers, run in groupby(value)]
        return (
            "+".join(f"{count}x{n}" if count > 2 else "+".join([str(n)] * count) for n, count in runs) or TOOL_DIVIDES
        )
    if name == "stored":
        return value or "the model's own"
    if name == "recompute_modules":
        return ", ".join(value) or "all but products and attention"
    if value is True or value is False:
        return "on" if value else "off"
    if name in ("recompute_layers", "context_kind", "expert_tensor") and not value:
        return {"recompute_layers": "all", "context_kind": "any way", "expert_tensor": "as tensor parallel"}[name]
    return str(value)


def checked(description: Parallelism) -> Parallelism:
    """A description whose degrees are whole numbers from 1.

    Raises:
        ConfigError: names the first that is not.
    """
    for each in fields(description):
        value = getattr(description, each.name)
        lowest = REST if each.name in ("data", "micro_batches", "zero", "expert_tensor") else 1
        if isinstance(value, int) and not isinstance(value, bool) and not lowest <= value <= MOST:
            told = f"a whole number from {lowest} to {MOST:,}"
            raise ConfigError(f"{WORDS.get(each.name, each.name)} is {value}; it is {told}")
    if description.zero > 3:
        raise ConfigError(f"ZeRO is {description.zero}; there are stages 0 to 3")
    return description


def resolved(d: Parallelism, devices: int, batch: int | None) -> Parallelism:
    """A description that states its data-parallel ranks, micro-batches and batch.

    Args:
        devices: of the cluster.
        batch: of the model's example, where the configuration states none.

    Raises:
        ConfigError: sizes do not divide one another; says which.
    """
    if d.data == REST:
        others = replace(d, data=1).size
        data, rest = divmod(devices, others)
        if rest or not data:
            sizes = " x ".join(f"{getattr(d, name)} {WORDS[name]}" for name in DEGREES if getattr(d, name) > 1)
            raise ConfigError(f"{devices} devices do not divide by {others} ({sizes}): take sizes whose product does")
        d = replace(d, data=data)
        if data * d.context == 1 < d.replicate:  # each copy is whole on its rank
            d = replace(d, data=d.replicate, replicate=1, zero=0)
    if d.batch is None and d.micro_batch is not None:
        d = replace(d, batch=d.micro_batch * d.batch_ranks * (d.micro_batches or 1))
    d = replace(d, batch=batch if d.batch is None else d.batch)
    if d.micro_batches == REST and d.size != devices:
        return replace(d, micro_batches=1)
    if d.micro_batches == REST:
        each = d.batch_ranks * (d.micro_batch or 1)
        count, rest = divmod(d.batch or each, each)
        if rest or not count:
            raise ConfigError(
                f"a batch of {d.batch} does not divide by {d.batch_ranks} data-parallel ranks x {d.micro_batch} "
                f"samples of a micro-batch: give a multiple of {each}"
            )
        d = replace(d, micro_batches=count)
    return d
