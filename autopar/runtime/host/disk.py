"""Memory-mapped files for model data whose home tier is the disk.

A file is allocated whole before it is mapped: a disk that is full is an error then, and nothing can fail for want of
room where memory is written. What fails later, the disk or who shortens a file, is an error where the file is used
(:func:`check_there`). The files have no names: nobody's are reused or removed, and however a process ends, the
system takes its files back.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.host.pages import READ, cannot_bring
from planner.base.errors import DiskError, InfeasibleError, InputError
from planner.base.formatting import in_all_bytes


@dataclass(frozen=True)
class OffloadFiles:
    """A directory for files.

    Attributes:
        ranks: how many processes train together.
        updates_in_backward: whether backward has updated some parameters when it comes to others.
    """

    folder: Path
    ranks: int = 1
    updates_in_backward: bool = False

    def memory(self, size: int, what: str) -> Tensor:
        """New bytes in a file, all 0; the file goes when nothing holds them any more.

        Args:
            what: they are for, if there is no room.

        Raises:
            InfeasibleError: there is no room for them, or they cannot be allocated.
        """
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        except OSError as error:
            free = _free_bytes(self.folder)
            raise InfeasibleError(
                f"no {in_all_bytes(size)} in {str(self.folder)!r} for {what} ({error.strerror}; "
                f"{in_all_bytes(free)} are free): make room there and go on, since nothing is lost, or take another "
                "offload_path",
                max(0, size - free),
            ) from error

    def ask(self, memory: Iterable[Tensor], way: int, what: str = "model data") -> None:
        """Have the system bring memory of files before a step uses it.

        Args:
            way: :data:`autopar.runtime.host.pages.READ` or ``WRITE``: what it is used for.
            what: it is, if it cannot.

        Raises:
            DiskError: it cannot, and would end the process.
        """
        for each in memory:
            check_there(each, way, f"{what} under {str(self.folder)!r}", self._way_out)

    @property
    def _way_out(self) -> str:
        """What to do when a file cannot be used in a step."""
        if self.ranks > 1:
            return (
                "Other ranks wait for this one in the middle of the step, or have stepped without it: do not repeat it "
                "here, but end all of them, and load the last checkpoint, if need be with another offload_path"
            )
        if self.updates_in_backward:
            return (
                "Where backward fails it may have updated some parameters before (pin 'update' is 'backward'): do not "
                "repeat this step then, but call optimizer.step(), which ends it or says what was updated, and load "
                "the last checkpoint, if need be with another offload_path"
            )
        return (
            "What is in other files is as it was: if the disk comes back repeat this step, else load the last "
            "checkpoint with another offload_path"
        )


def check_there(memory: Tensor, way: int, what: str, way_out: str) -> None:
    """Have the system bring memory before it is used, which may be that of a file; of a device it is there.

    Args:
        way: :data:`autopar.runtime.host.pages.READ` or ``WRITE``: what it is used for.
        what: it is, and what to do, if it cannot.

    Raises:
        DiskError: it cannot, and would end the process.
    """
    why = cannot_bring(memory, way) if memory.device.type == "cpu" else None
    if why is not None:
        raise DiskError(
            f"the system cannot {'read' if way == READ else 'write'} {in_all_bytes(memory.nbytes)} of {what}, in a "
            f"file ({why}): the disk fails, or somebody made the file shorter. {way_out}"
        )


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


# ---- opening ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FoundFolder:
    """What a rank finds of its directory: why it is none, or the file system, what is free there and what is needed."""

    wrong: str | None
    folder: str
    place: tuple[str, int] = ("", 0)
    free_bytes: int = 0
    needed_bytes: int = 0


def check_given(path: object, on_disk: bool) -> None:
    """Raise :class:`InputError` unless ``offload_path`` is given if, and only if, a plan keeps model data on disk."""
    if on_disk and not isinstance(path, (str, os.PathLike)):
        raise InputError(
            f"the plan keeps model data on disk ('offload': 'disk'), and offload_path is {path!r}: give "
            "autopar.parallelize the path of a directory on a fast local disk"
        )
    if not on_disk and path is not None:
        raise InputError(
            f"offload_path is {path!r}, but the plan keeps no model data on disk: leave it out, or plan with "
            "pin={'offload': 'disk'}"
        )


def open_disk(path: str | os.PathLike[str], needed_bytes: int, updates_in_backward: bool) -> OffloadFiles:
    """A directory with room for what all ranks keep there; each rank gives its own, and all must call it.

    Args:
        needed_bytes: by this rank.
        updates_in_backward: see :class:`OffloadFiles`.

    Raises:
        InputError: it is no directory, or not writable.
        InfeasibleError: ranks together need more of a file system than is free.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, _look(Path(path), needed_bytes))
    _check(found)
    return OffloadFiles(Path(path), dist.get_world_size(), updates_in_backward)


def _look(folder: Path, needed_bytes: int) -> _FoundFolder:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
        place = socket.gethostname(), os.stat(folder).st_dev
        return _FoundFolder(None, str(folder), place, _free_bytes(folder), needed_bytes)
    except OSError as error:
        return _FoundFolder(error.strerror or str(error), str(folder))


def _check(found: Sequence[_FoundFolder]) -> None:
    for rank, each in enumerate(found):
        if each.wrong is not None:
            raise InputError(
                f"offload_path {each.folder!r} of rank {rank} cannot hold files ({each.wrong}): give the path of a "
                "directory that exists and is writable"
            )
    for each in found:
        needed = sum(other.needed_bytes for other in found if other.place == each.place)
        if needed > each.free_bytes:
            raise InfeasibleError(
                f"offload_path {each.folder!r}: parameters, gradients and optimizer state of this machine's ranks take "
                f"{in_all_bytes(needed)}, and {in_all_bytes(each.free_bytes)} are free there: make room, or give a "
                "directory on a larger disk",
                needed - each.free_bytes,
            )
