"""Saves the state of a training run, at once or asynchronously beside the training that goes on."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.checkpoint import files
from autopar.checkpoint.contents import MODEL, Index, ModuleContents, OptimizerContents, joined, optimizers_of
from autopar.checkpoint.parts import Box, Part, pieces
from autopar.checkpoint.together import Ranks
from autopar.runtime.host.disk import check_there
from autopar.runtime.host.pages import READ
from autopar.runtime.module import ParallelModule
from planner.base.errors import AutoparError, CheckpointError

logger = logging.getLogger(__name__)


def save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Any = None,
    *,
    extra: Mapping[str, Any] | None = None,
    wait: bool = True,
) -> Saving:
    """Save a module, its optimizer and what else a run needs to go on; every rank must call it.

    What was saved at ``path`` before is replaced at one stroke when all of the new is on disk; until then, and
    whatever happens, it stays.

    Args:
        path: a directory, on a file system that all ranks share.
        module: what :func:`autopar.parallelize` returned, or any module that is the same on all ranks.
        optimizer: any torch optimizer of the module's parameters, or what has ``param_groups``, ``state_dict()`` and
            ``load_state_dict()`` as these have; or a list of them, of different parameters.
        extra: by name, objects with ``state_dict()`` (schedulers, scalers, data loaders), and plain data. Those of
            rank 0 are saved.
        wait: ``False`` returns as soon as the values are copied to the host, and writes them in the background.

    Returns:
        The save; a later one of the same module, and :func:`autopar.load_checkpoint`, wait for it.

    Raises:
        CheckpointError: it cannot be written, holds what cannot be saved, or another save to the path is under way.
            What goes wrong in the background is raised by ``wait()``, or by the next save.
        DiskError: of a plan with model data on disk, what is to be saved cannot be read. The same.
    """
    where, ranks = files.place(path).absolute(), idle(module)
    task = f"saving the checkpoint {str(where)!r}"
    share, name, claim = _begun(where, module, optimizer, ranks, extra, wait, task)

    def save() -> None:
        try:
            ranks.first(
                task,
                lambda: files.write(where, name, ranks.rank, share.todo, share.shapes),
                lambda written: files.commit(where, name, written, share.packed, share.aliases),
            )
        except BaseException:  # also Ctrl-C
            if claim is not None:
                files.discard(where, name)
            raise
        finally:
            if claim is not None:
                claim.end()

    saving = Saving(where, save)
    if wait:
        saving.run()
        saving.wait()
    else:
        _known[module] = ranks, saving
        saving.start()
    return saving


def _begun(
    where: Path,
    module: nn.Module,
    optimizer: Any,
    ranks: Ranks,
    extra: Mapping[str, Any] | None,
    wait: bool,
    task: str,
) -> tuple[_Share, str, files.Claim | None]:
    """What this rank writes, the name of the save, and, on rank 0, the claim to its path."""
    found: list[_Contents] = []
    settled: list[_Share] = []
    try:
        offers = ranks.each(task, lambda: _prepare(where, module, optimizer, ranks, extra, found))
        _check_one_path(offers)
        ranks.each(task, lambda: settled.append(_Share.of(found[0], offers, wait)))
    except BaseException:  # also Ctrl-C
        if found and found[0].claim is not None:
            files.discard(where, found[0].claim.name)
            found[0].claim.end()
        raise
    return settled[0], offers[0].name, found[0].claim


class Saving:
    """A save under way, or done."""

    def __init__(self, path: Path, save: Callable[[], None]):
        self.path = path
        self._save: Callable[[], None] | None = save
        self._error: AutoparError | None = None
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Save; what goes wrong is kept for :meth:`wait`."""
        assert self._save is not None
        try:
            self._save()
        except AutoparError as error:
            self._error = error
        except Exception as error:
            self._error = CheckpointError(
                f"the checkpoint {str(self.path)!r} was not saved: {error}; what is there, if anything, is whole: "
                "save again, or go on from it"
            )
            self._error.__cause__ = error
        finally:
            self._save = None  # and with it the copies
        if self._error is not None and self._thread is not None:
            logger.error("%s", self._error)

    def start(self) -> None:
        """Save in the background."""
        self._thread = threading.Thread(target=self.run, name=f"autopar saves {self.path}")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._save is None

    def wait(self) -> None:
        """Return when the checkpoint is on disk.

        Raises:
            CheckpointError, DiskError: it was not saved; the one before it is as it was.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


_known: weakref.WeakKeyDictionary[nn.Module, tuple[Ranks, Saving | None]] = weakref.WeakKeyDictionary()
"""Modules that were saved or loaded: the ranks that do so together, and the last save, which may be under way."""


def idle(module: nn.Module) -> Ranks:
    """The ranks that save and load a module together, once they do nothing else; every rank must call it.

    Raises:
        CheckpointError: the last save in the background failed, and nobody knows yet.
    """
    if not isinstance(module, nn.Module):
        raise CheckpointError(f"module is of type {type(module).__name__}: give what autopar.parallelize returned")
    ranks, saving = _known.get(module, (None, None))
    if saving is not None:
        saving.wait()
    if isinstance(module, ParallelModule) and module.offload is not None:
        module.offload.early.settle()
    if ranks is None or not ranks.are_all:
        ranks = Ranks.all()
    _known[module] = ranks, None
    return ranks


@dataclass(frozen=True)
class _Contents:
    """What this rank has.

    Attributes:
        claim: to the path; on rank 0.
        stage: the rank's place in the pipeline.
        extra: plain data; on rank 0.
    """

    claim: files.Claim | None
    parts: dict[str, Part]
    stage: int
    extra: dict[str, Any]


@dataclass(frozen=True)
class _Offer:
    """What the other ranks are told. Ranks of one stage have tensors of the same names, so one of them says which.

    Attributes:
        path: where this rank saves.
        name: of the save's directory, from rank 0.
        stage: that it speaks for; -1: for none.
        keys: names of tensors.
    """

    path: str
    name: str
    stage: int = -1
    keys: tuple[str, ...] = ()
    index: Index | None = None


@dataclass(frozen=True)
class _Share:
    """What this rank writes.

    Attributes:
        todo: name, box and values of every piece.
        shapes: name -> shape of the whole tensor.
        packed: what is no tensor; rank 0 writes it.
        aliases: other names, whole, of saved tensors.
    """

    todo: list[tuple[str, Box, Tensor]]
    shapes: dict[str, tuple[int, ...]]
    packed: bytes
    aliases: dict[str, str]

    @staticmethod
    def of(mine: _Contents, offers: list[_Offer], wait: bool) -> _Share:
        """Of what this rank has, once it is known what all have; copied to the host unless it is written at once."""
        earlier = {key for offer in offers if 0 <= offer.stage < mine.stage for key in offer.keys}
        parts = {key: part for key, part in mine.parts.items() if key not in earlier}
        todo = list(pieces(parts))
        index = Index.joined(offer.index for offer in offers if offer.index is not None)
        return _Share(
            todo if wait else _on_host(todo),
            {key: part.shape for key, part in parts.items()},
            files.packed({**vars(index), "extra": mine.extra}, "the optimizer"),
            {MODEL + alias: MODEL + first for alias, first in index.aliases.items()},
        )


def _prepare(
    path: Path, module: nn.Module, optimizer: Any, ranks: Ranks, extra: Mapping[str, Any] | None, found: list[_Contents]
) -> _Offer:
    parts, index = held_by_rank(module, optimizer, ranks)
    files.packed(vars(index), "the optimizer")
    states = states_of(extra) if ranks.rank == 0 else {}
    claim = files.Claim(path) if ranks.rank == 0 else None
    name = "" if claim is None else claim.name
    if not isinstance(module, ParallelModule):
        found.append(_Contents(claim, parts, 0, states))
        speaks = ranks.rank == 0
    else:
        found.append(_Contents(claim, parts, 0 if module.pipeline is None else module.pipeline.rank, states))
        speaks = module.rank == 0
    return _Offer(str(path), name, found[0].stage, tuple(parts), index) if speaks else _Offer(str(path), name)


def _check_one_path(offers: list[_Offer]) -> None:
    different = sorted({offer.path for offer in offers})
    if len(different) > 1:
        raise CheckpointError(f"ranks save to different paths, {', '.join(different)}: give all of them one")


def held_by_rank(module: nn.Module, optimizer: Any, ranks: Ranks) -> tuple[dict[str, Part], Index]:
    """What this rank holds of a module and its optimizer, by name in a checkpoint, and what there is beside tensors."""
    held = ModuleContents.of(module, ranks)
    parts = {MODEL + name: part for name, part in held.parts.items()}
    index = held.index()
    for each in optimizers_of(optimizer):
        state = OptimizerContents.of(each, held)
        more, own = state.saved()
        index.state = joined(index.state or {}, own)
        parts.update(more)
        index.groups += state.groups
    return parts, index


def states_of(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Plain data, with the states of objects that have one."""
    found = {}
    for name, value in (extra or {}).items():
        found[name] = value.state_dict() if hasattr(value, "state_dict") else value
        files.packed(found[name], f"extra[{name!r}]")
    return found


def _on_host(todo: list[tuple[str, Box, Tensor]]) -> list[tuple[str, Box, Tensor]]:
    """Copies, which training does not change; from a GPU all are under way at once."""
    copies = []
    for key, box, values in todo:
        check_there(values, READ, key, files.NOT_SAVED)
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        copies.append((key, box, copy.copy_(values, non_blocking=values.is_cuda)))
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copies
