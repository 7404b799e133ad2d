"""What a checkpoint holds of a module and its optimizer, under the names of the original model.

Tensors are named ``model.<name>`` and ``optim.<name>.<key>``; all else (groups of parameters, numbers in an optimizer's
state, the position in the stream of random numbers) is in an :class:`Index`. Only ``state_dict()``,
``load_state_dict()`` and ``param_groups`` are asked of an optimizer, so where it keeps its state is its own affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.checkpoint.parts import Part
from autopar.checkpoint.together import Ranks
from autopar.runtime.module import ParallelModule
from autopar.runtime.spmd.mesh import as_dtensor
from planner.base.errors import CheckpointError

MODEL, OPTIM = "model.", "optim."
LIKE, WHOLE, VALUE = "like", "whole", "value"
"""State that lies as its parameter; a tensor that all ranks have alike; what is no tensor, ``(VALUE, value)``."""
SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""What torch's optimizers keep as a plain scalar also of a parameter that is one itself."""


@dataclass
class Index:
    """What a stage, or a whole model, has beside its tensors; plain data.

    Attributes:
        aliases: other name of a tensor -> the name that it is saved under.
        state: parameter -> key of its optimizer state -> :data:`LIKE` and its like; ``None``: without an optimizer.
        groups: the optimizer's groups: options, and names of parameters.
        random: seed and calls of the module's :class:`autopar.runtime.spmd.random_state.RandomState`.
    """

    aliases: dict[str, str] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] | None = None
    groups: list[tuple[dict[str, Any], list[str]]] = field(default_factory=list)
    random: tuple[int, int] | None = None

    def first(self, name: str) -> str:
        """The name that a tensor is saved under, by any of its names."""
        return self.aliases.get(name, name)

    @staticmethod
    def joined(stages: Iterable[Index]) -> Index:
        """That of all stages together. Groups that agree in place and options become one."""
        whole, *others = stages
        for stage in others:
            whole.aliases.update(stage.aliases)
            if stage.state is not None:
                whole.state = {**(whole.state or {}), **stage.state}
            for place, (options, names) in enumerate(stage.groups):
                if place < len(whole.groups) and same(whole.groups[place][0], options):
                    known = whole.groups[place][1]
                    known.extend(name for name in names if name not in known)
                else:
                    whole.groups.append((options, names))
        return whole


def same(one: Any, other: Any) -> bool:
    """Whether plain data that may hold tensors is equal."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@dataclass(frozen=True)
class ModuleContents:
    """What this rank holds of a module.

    Attributes:
        parts: of parameters and buffers that its state dict has, by first name.
        aliases: other names of them.
        parameters: id of a parameter -> its first name.
        slabs: name of a parameter -> the tables in it, whose names it is saved under.
    """

    module: nn.Module
    parts: dict[str, Part]
    aliases: dict[str, str]
    parameters: dict[int, str]
    slabs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def saved_as(self, name: str) -> tuple[str, ...]:
        """The names that a parameter is saved under."""
        return self.slabs.get(name, (name,))

    @staticmethod
    def of(module: nn.Module, ranks: Ranks) -> ModuleContents:
        """Of any module; one that is not parallel is the same on all ranks.

        Raises:
            CheckpointError: its state dict has what is no tensor, or a DTensor that is not autopar's.
        """
        parameters = {id(parameter): name for name, parameter in module.named_parameters()}
        own = module.state_dict(keep_vars=True)
        if isinstance(module, ParallelModule):
            parts = {
                name: Part.stored(_local(own[name]), leaf.shape, leaf.layout, module.mesh, module.rank)
                for name, leaf in module.stored.items()
                if name in own
            }
            for slabs in module.slabs:
                if slabs.name in parts:
                    parts |= parts.pop(slabs.name).tables(slabs)
            slabs_of = {slabs.name: tuple(slabs.tables) for slabs in module.slabs}
            aliases = {name: first for name, first in module.names.items() if name != first and first in parts}
            aliases = {name: first for name, first in aliases.items() if name in own}
            return ModuleContents(module, parts, aliases, parameters, slabs_of)
        parts, aliases = {}, {}
        names: dict[int, str] = {}
        for name, tensor in own.items():
            if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
                raise CheckpointError(
                    f"{name!r} of the module's state dict is of type {type(tensor).__name__}: a checkpoint takes plain "
                    "tensors of ordinary modules, and modules that autopar.parallelize made"
                )
            if tensor.is_meta:
                raise CheckpointError(f"{name} is on the meta device and has no memory: module.to_empty(device=...)")
            first = names.setdefault(id(tensor), name)
            if first == name:
                parts[name] = Part.whole(tensor.detach(), ranks.rank, ranks.size)
            else:
                aliases[name] = first
        return ModuleContents(module, parts, aliases, parameters)

    def index(self) -> Index:
        """What there is beside tensors, without an optimizer."""
        random = None
        if isinstance(self.module, ParallelModule):
            random = (self.module.state.random.seed, self.module.state.random.calls)
        return Index(dict(self.aliases), random=random)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


# ---- optimizers ------------------------------------------------------------------------------------------------------


def optimizers_of(given: Any) -> list[Any]:
    """Those that are saved with a module: one, or a list or tuple of them, of different parameters.

    What an optimizer has as ``as_saved`` stands for it: that of an array, whose parameters are rows of the module's.
    """
    if given is None:
        return []
    every = given if isinstance(given, (list, tuple)) else [given]
    return [getattr(each, "as_saved", each) for each in every]


def joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What two optimizers have by name of a parameter.

    Raises:
        CheckpointError: both have the same parameter.
    """
    twice = sorted(one.keys() & other.keys())
    if twice:
        raise CheckpointError(
            f"two optimizers have {len(twice)} parameters of the module in common, {twice[0]!r} the first: give "
            "optimizers of different parameters, e.g. by pmodel.optimizer(..., only=...)"
        )
    return {**one, **other}


@dataclass(frozen=True)
class OptimizerContents:
    """What this rank holds of an optimizer's state.

    Attributes:
        state: as ``state_dict()`` gives it.
        named: number of a parameter in it -> (name, parameter).
    """

    optimizer: Any
    state: dict[str, Any]
    named: dict[int, tuple[str, Tensor]]
    held: ModuleContents

    @staticmethod
    def of(optimizer: Any, held: ModuleContents) -> OptimizerContents:
        """Of any optimizer over parameters of the module.

        Raises:
            CheckpointError: it is none, or has parameters that are not the module's.
        """
        lacks = [name for name in ("param_groups", "state_dict", "load_state_dict") if not hasattr(optimizer, name)]
        if lacks:
            raise CheckpointError(
                f"optimizer is of type {type(optimizer).__name__}, which has no {lacks[0]}: give one of torch.optim, "
                "or what has param_groups, state_dict() and load_state_dict() as these do; other state goes into extra"
            )
        state = optimizer.state_dict()
        named = {}
        for numbers, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
            for number, parameter in zip(numbers["params"], group["params"], strict=True):
                name = held.parameters.get(id(parameter))
                if name is None:
                    raise CheckpointError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not the module's: "
                        "make it from the parameters of the module that is given with it"
                    )
                named[number] = name, parameter
        return OptimizerContents(optimizer, state, named, held)

    @property
    def groups(self) -> list[tuple[dict[str, Any], list[str]]]:
        """Options and names of every group."""
        return [
            (
                {key: value for key, value in group.items() if key not in ("params", "param_names")},
                [each for number in group["params"] for each in self.held.saved_as(self.named[number][0])],
            )
            for group in self.state["param_groups"]
        ]

    def saved(self) -> tuple[dict[str, Part], dict[str, dict[str, Any]]]:
        """Tensors by name in the checkpoint, and how they lie; see :class:`Index`.

        Raises:
            CheckpointError: a DTensor that does not lie as its parameter.
        """
        parts: dict[str, Part] = {}
        index: dict[str, dict[str, Any]] = {}
        saved = ((number, each) for number, (name, _) in self.named.items() for each in self.held.saved_as(name))
        for number, name in saved:
            index[name] = {}
            for key, value in self.state["state"].get(number, {}).items():
                if isinstance(value, Tensor):
                    parts[f"{OPTIM}{name}.{key}"], index[name][key] = self._part(number, name, key, value)
                else:
                    index[name][key] = VALUE, value
        return parts, index

    def _part(self, number: int, name: str, key: str, value: Tensor) -> tuple[Part, str]:
        of_parameter, local = self.held.parts[name], _local(value)
        if isinstance(value, DTensor) and value.shape != self.named[number][1].shape:
            if not all(placement.is_replicate() for placement in value.placements):
                raise CheckpointError(
                    f"the optimizer keeps {key!r} of {name} as a DTensor of shape {tuple(value.shape)}, not as the "
                    f"parameter of shape {of_parameter.shape}, and ranks hold parts of it: a checkpoint takes state "
                    "that lies as its parameter, and tensors that are the same on all ranks"
                )
        elif local.shape == of_parameter.local.shape and not (local.ndim == 0 and key in SCALARS):
            return replace(of_parameter, local=local), LIKE
        module = self.held.module
        if isinstance(module, ParallelModule):
            return Part.whole(local, module.rank, module.mesh.size), WHOLE
        return Part.whole(local, of_parameter.copy, of_parameter.copies), WHOLE

    def part(self, name: str, how: str, value: Tensor) -> Part:
        """Where a tensor that :meth:`destination` made lies."""
        local = _local(value)
        return replace(self.held.parts[name], local=local) if how == LIKE else Part.whole(local)

    def destination(self, number: int, key: str, how: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Where a saved tensor of a parameter's state goes: what the optimizer has there, or new memory like it."""
        name, parameter = self.named[number]
        of_parameter = self.held.parts[self.held.saved_as(name)[0]]
        shape = tuple(of_parameter.local.shape) if how == LIKE else size
        there = self.state["state"].get(number, {}).get(key)
        if isinstance(there, Tensor) and tuple(_local(there).shape) == shape and there.dtype == dtype:
            return there
        device = of_parameter.local.device if how == LIKE else torch.device("cpu")
        made = torch.zeros(shape, dtype=dtype, device=device)  # of slabs some rows are no table's
        if how == LIKE and isinstance(parameter, DTensor):
            mesh, placed = parameter.device_mesh, parameter.placements
            return as_dtensor(made, mesh, placed, parameter.shape, parameter.stride())
        return made
