"""Loads a checkpoint into a module and an optimizer under any plan; all files are checked first."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from autopar.checkpoint.contents import MODEL, OPTIM, Index, ModuleContents, OptimizerContents, optimizers_of, same
from autopar.checkpoint.files import Stored
from autopar.checkpoint.parts import Box, Part
from autopar.checkpoint.save import idle
from autopar.checkpoint.together import Ranks
from autopar.runtime.module import ParallelModule
from autopar.runtime.pipeline.executor import PipelineStep
from planner.base.errors import CheckpointError


def load_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Any = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Go on from a checkpoint, under any plan, on any number of ranks, or in one process; every rank must call it.

    Each rank reads its part. Floating-point values are cast to the module's dtypes, as by torch's
    ``load_state_dict()``, which rounds where these are narrower.

    Names, shapes, groups, ``extra`` and the checksums of all files are checked first; what is wrong with these is an
    error on all ranks, and changes nothing. After that values are overwritten: where a file is lost while it is read,
    or a ``load_state_dict()`` refuses what it gets, all ranks raise, and module and optimizer are left half loaded:
    load again before they are used.

    Args:
        path: what :func:`autopar.save_checkpoint` wrote.
        module: what :func:`autopar.parallelize` returned, or the original model.
        optimizer: as it was when saved, over the same parameters in groups with the same members; of several, a list
            in the same order.
        extra: objects with ``load_state_dict()``, by the names that they were saved under; not plain data, which
            cannot be set from here and is in what is returned.

    Returns:
        The ``extra`` that was saved, with states for what had them.

    Raises:
        CheckpointError: there is none, it is damaged, it is of another model or optimizer, or something in ``extra``
            was not saved or takes no state.
        DiskError: of a plan with model data on disk, a file cannot be written; all are left half loaded.
    """
    ranks = idle(module)
    return take(lambda: Stored.open(path), ranks, f"loading the checkpoint {str(path)!r}", module, optimizer, extra)


class SavedState(Protocol):
    """What a module and an optimizer are filled from: a checkpoint, or what ranks hold."""

    @property
    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        """Shape and dtype of every tensor, by its name in a checkpoint."""
        ...

    @property
    def contents(self) -> Any:
        """What was saved that is no tensor."""
        ...

    def names(self, kind: str) -> list[str]:
        """The tensors whose names begin so, without that: ``model.`` or ``optim.``."""
        ...

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Raise :class:`CheckpointError` where this share of it is damaged."""
        ...

    def read(self, wanted: Mapping[str, tuple[list[Box], Tensor]]) -> None:
        """Fill boxes of parts of tensors; all ranks call it."""
        ...


def take(
    open_state: Callable[[], SavedState],
    ranks: Ranks,
    task: str,
    module: nn.Module,
    optimizer: Any,
    extra: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Fill a module and an optimizer, see :func:`load_checkpoint`; every rank must call it."""
    found: list[_Load] = []

    def check() -> tuple[set[str], set[str]]:
        load = _Load.of(open_state(), ModuleContents.of(module, ranks), optimizer)
        _check_extra(load.extra, extra or {})
        found.append(load)
        return load.names

    theirs = ranks.each(task, check)
    load = found[0]
    load.check_all_taken(theirs)
    ranks.each(task, lambda: load.stored.verify(ranks.rank, ranks.size))
    ranks.each(task, load.read)
    ranks.each(task, lambda: load.finish(extra or {}))
    return load.extra


@dataclass(frozen=True)
class _Load:
    """What this rank takes from a checkpoint.

    Attributes:
        wanted: name in the checkpoint -> where it goes.
        states: what the rank holds of each optimizer, and its new state dict.
    """

    stored: SavedState
    held: ModuleContents
    index: Index
    extra: dict[str, Any]
    wanted: dict[str, Part]
    states: list[tuple[OptimizerContents, dict[str, Any]]]

    @staticmethod
    def of(stored: SavedState, held: ModuleContents, optimizer: Any) -> _Load:
        """Everything that this rank takes; raises :class:`CheckpointError` where it does not fit."""
        contents = dict(stored.contents)
        extra = contents.pop("extra")
        index = Index(**contents)
        wanted = {MODEL + name: part for name, part in held.parts.items()}
        _check(stored, wanted)
        load = _Load(stored, held, index, extra, wanted, [])
        if index.state is None and optimizer is not None:
            raise CheckpointError(
                f"{stored} was saved without an optimizer: load it without one, or save "
                "with save_checkpoint(path, module, optimizer)"
            )
        place = itertools.count()
        for each in optimizers_of(optimizer):
            state = OptimizerContents.of(each, held)
            values, parts = _state(stored, index, state)
            groups = [_group(next(place), group, index, state) for group in state.state["param_groups"]]
            wanted.update(parts)
            load.states.append((state, {**state.state, "state": values, "param_groups": groups}))
        return load

    @property
    def names(self) -> tuple[set[str], set[str]]:
        """What this rank takes of the module, by all names, and the parameters of its optimizer."""
        if isinstance(self.held.module, ParallelModule) and self.held.module.rank:
            return set(), set()  # those of rank 0 of its stage
        names = {name.removeprefix(MODEL) for name in self.wanted if name.startswith(MODEL)} | self.held.aliases.keys()
        own = (name for state, _ in self.states for name, _ in state.named.values())
        saved = (each for name in own for each in self.held.saved_as(name))
        return names, set(map(self.index.first, saved))

    def check_all_taken(self, theirs: list[tuple[set[str], set[str]]]) -> None:
        """Raises :class:`CheckpointError` where the checkpoint has more than all ranks take."""
        names = set().union(*(of_rank for of_rank, _ in theirs))
        taken = set(map(self.index.first, names))
        spare = [name for name in self.stored.names(MODEL) if self.index.first(name) not in taken]
        if spare:
            raise CheckpointError(
                f"the checkpoint has {len(spare)} tensors that the module lacks, {spare[0]!r} the first; is it of "
                "another model?"
            )
        optimized = set().union(*(of_rank for _, of_rank in theirs))
        forgotten = [name for _, group in self.index.groups for name in group if name not in optimized]
        if forgotten and optimized:
            raise CheckpointError(
                f"the checkpoint has optimizer state for {len(forgotten)} parameters that the optimizer lacks, "
                f"{forgotten[0]!r} the first: make the optimizer over the parameters that it had"
            )

    def read(self) -> None:
        """Fill the parameters, the buffers, and the new state of the optimizer."""
        self.stored.read({name: (part.boxes, part.local) for name, part in self.wanted.items()})

    def finish(self, extra: Mapping[str, Any]) -> None:
        """Take over all that is no tensor."""
        for state, renewed in self.states:
            state.optimizer.load_state_dict(renewed)
        module = self.held.module
        if isinstance(module, ParallelModule):
            if self.index.random is not None:
                module.state.random.seed, module.state.random.calls = self.index.random
            if isinstance(module.program, PipelineStep):
                module.program.left = None  # gradients of other weights
        for name, value in extra.items():
            value.load_state_dict(self.extra[name])


def _check_extra(saved: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if name not in saved:
            raise CheckpointError(f"the checkpoint has no extra {name!r}; it has {sorted(saved) or 'none'}")
        if not callable(getattr(value, "load_state_dict", None)):
            raise CheckpointError(
                f"extra[{name!r}] is of type {type(value).__name__}, which has no load_state_dict() to take what was "
                f"saved: leave it out, and take load_checkpoint(...)[{name!r}]"
            )


def _check(stored: SavedState, wanted: Mapping[str, Part]) -> None:
    tensors = stored.tensors
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise CheckpointError(
            f"{stored} lacks {len(missing)} tensors of the module, "
            f"{missing[0].removeprefix(MODEL)!r} the first; is it of another model?"
        )
    for name, part in wanted.items():
        shape = tuple(tensors[name].size)
        if shape != part.shape:
            raise CheckpointError(
                f"{name.removeprefix(MODEL)} has shape {shape} in the checkpoint, {part.shape} in the module"
            )
        saved, own = tensors[name].properties.dtype, part.local.dtype
        if saved != own and not (saved.is_floating_point and own.is_floating_point):
            raise CheckpointError(
                f"{name.removeprefix(MODEL)} is of {saved} in the checkpoint, of {own} in the module: only "
                "floating-point values are cast; is it of another model?"
            )


def _state(
    stored: SavedState, index: Index, state: OptimizerContents
) -> tuple[dict[int, dict[str, Any]], dict[str, Part]]:
    """The new state of this rank's parameters, still to be read, and what is to be read into it."""
    assert index.state is not None
    values: dict[int, dict[str, Any]] = {}
    wanted: dict[str, Part] = {}
    tensors = stored.tensors
    every = ((number, each) for number, (own, _) in state.named.items() for each in state.held.saved_as(own))
    for number, name in every:
        saved = index.first(name)
        if saved not in index.state:
            raise CheckpointError(
                f"the checkpoint's optimizer had no parameter {name!r}: make this one over the parameters that it had"
            )
        for key, how in index.state[saved].items():
            if isinstance(how, tuple):
                values.setdefault(number, {})[key] = how[1]
                continue
            place = f"{OPTIM}{saved}.{key}"
            value = values.setdefault(number, {}).get(key)  # of tables that lie in slabs it is one for all of them
            if value is None:
                size, dtype = tuple(tensors[place].size), tensors[place].properties.dtype
                value = values[number][key] = state.destination(number, key, how, size, dtype)
            wanted[place] = state.part(name, how, value)
    return values, wanted


def _group(number: int, group: Mapping[str, Any], index: Index, state: OptimizerContents) -> dict[str, Any]:
    """A group of the optimizer with the options that its parameters were saved with."""
    names = {index.first(each) for n in group["params"] for each in state.held.saved_as(state.named[n][0])}
    saved = [options for options, members in index.groups if names & set(members)]
    if not names and number < len(index.groups):
        saved = [index.groups[number][0]]
    options = saved[0] if saved else {}
    if not all(same(options, other) for other in saved):
        raise CheckpointError(
            f"group {number} of the optimizer has parameters of {len(saved)} groups with different options in the "
            "checkpoint: make the groups as they were when it was saved"
        )
    # A scheduler adds options, such as initial_lr; of another kind of optimizer some are missing, too.
    unknown = [key for key in options if key not in group]
    if unknown and not options.keys() >= state.optimizer.defaults.keys():
        raise CheckpointError(
            f"the checkpoint's optimizer has the option {unknown[0]!r}, which this one "
            f"({type(state.optimizer).__name__}) lacks: give an optimizer of the kind that was saved"
        )
    return {**group, **options}
