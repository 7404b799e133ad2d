"""The files of a checkpoint: their format, atomic replacement, checksums, reading.

::

    path/.metadata                    torch.distributed.checkpoint's: which box of which tensor is where
    path/save-5f3a91c2/__0_0.distcp   what rank 0 wrote
    path/save-5f3a91c2/index.pt       what is no tensor
    path/save-5f3a91c2/manifest.json  sizes and checksums of these files and of ``.metadata``
    path/.saving                      empty; locked by the process that saves

A save writes a new directory beside the files of the one before, and takes effect when ``.metadata`` is renamed into
place. So whenever a process is killed, ``.metadata`` names files that are complete. What it does not name is rubbish.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import math
import os
import pickle
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

import autopar
from autopar.checkpoint.parts import Box
from autopar.runtime.host.disk import check_there
from autopar.runtime.host.pages import READ, WRITE
from planner.base.errors import CheckpointError, DiskError
from planner.base.formatting import in_all_bytes

FORMAT = 1
"""Of the manifest and of the index; larger where an older autopar would misread it."""
_METADATA, _MANIFEST, _INDEX, _SAVE, _LOCK = ".metadata", "manifest.json", "index.pt", "save-", ".saving"
_BLOCK = 2**24
NOT_SAVED = (
    "The checkpoint that was there before is as it was: if the disk does not come back go on from that, with another "
    "offload_path"
)
HALF_LOADED = (
    "Module and optimizer are half loaded: load again when the disk comes back, or into a module with another "
    "offload_path"
)
_NOT_FOR_DIRECTORIES = (errno.EINVAL, errno.EBADF)
"""What file systems say that cannot write a directory through."""
_NAMED = frozenset(
    {("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    | {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    }
    | {
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    }
)
"""(module, name) of all that a table of contents may name."""


def place(path: Any) -> Path:
    """Where a checkpoint is or goes.

    Raises:
        CheckpointError: it is no path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError(f"path is of type {type(path).__name__}: give a checkpoint's directory")
    return Path(path)


# ---- writing ---------------------------------------------------------------------------------------------------------


class Claim:
    """The right to save to a path, which one process has at a time; it ends with :meth:`end`, or with the process.

    It is a lock on ``.saving`` (``flock``). On a file system without locks every process has the right.

    Attributes:
        name: of the directory of the new save.
    """

    def __init__(self, path: Path):
        """Take the right, remove what killed saves left unfinished, and make the directory of the new one.

        Raises:
            CheckpointError: the path cannot be written to, or another save to it is under way.
        """
        self.name = f"{_SAVE}{secrets.token_hex(4)}"
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._file = _locked(path)
            try:
                for left in path.glob(f"{_SAVE}*"):
                    if not (left / _MANIFEST).exists():
                        shutil.rmtree(left, ignore_errors=True)
                (path / self.name).mkdir()
                _sync_directory(path)
            except BaseException:  # also Ctrl-C, after which the process may save again
                self.end()
                raise
        except OSError as error:
            raise CheckpointError(f"cannot write a checkpoint to {str(path)!r}: {error.strerror or error}") from error

    def end(self) -> None:
        """Let others save to the path."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
        self._file.close()


def _locked(path: Path) -> IO[bytes]:
    file = (path / _LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise CheckpointError(
            f"another save to {str(path)!r} is under way, of another module or in another process: save to another "
            "path, or once it has ended"
        ) from error
    except OSError:  # no locks here
        pass
    return file


@dataclass(frozen=True)
class Written:
    """What a rank wrote.

    Attributes:
        files: name -> bytes and CRC-32.
    """

    plan: SavePlan
    results: list[WriteResult]
    files: dict[str, tuple[int, int]]


def write(
    path: Path, name: str, rank: int, pieces: Iterable[tuple[str, Box, Tensor]], shapes: Mapping[str, Any]
) -> Written:
    """Write this rank's file of a save.

    Args:
        pieces: name, box and values.
        shapes: name -> shape of the whole tensor.

    Raises:
        CheckpointError: the disk is full, or the like.
        DiskError: values are in a file that cannot be read.
    """
    planner = _Pieces(pieces, shapes)
    writer = FileSystemWriter(path / name, per_thread_copy_ahead=0)
    writer.fs = files = _Summing()
    writer.set_up_storage_writer(False, rank=rank, use_collectives=False)
    plan = planner.create_local_plan()
    if not plan.items:
        return Written(plan, [], {})
    try:
        found = writer.write_data(planner.finish_plan(writer.prepare_local_plan(plan)), planner)
    except DiskError:
        raise
    except Exception as error:
        reason = files.failure or error
        text = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
        raise CheckpointError(
            f"rank {rank} could not write its part of the checkpoint {str(path)!r}: {text}; "
            "the checkpoint that was there before is as it was"
        ) from error
    return Written(plan, found.wait(), files.sums)


def commit(path: Path, name: str, written: list[Written], index: bytes, aliases: Mapping[str, str]) -> None:
    """Put a save in the place of the one before, once all ranks have written; for one rank.

    Args:
        index: what is no tensor, as :func:`packed` made it.
        aliases: other names, whole, of saved tensors; they read the same files.

    Raises:
        CheckpointError: not all is there, or the disk is full; the save before stays in place.
    """
    home = path / name
    files = {file: sums for each in written for file, sums in each.files.items()}
    for file, (size, _) in files.items():
        there = (home / file).stat().st_size if (home / file).exists() else None
        if there != size:
            raise CheckpointError(
                f"{in_all_bytes(size)} were written to {str(home / file)!r}, but rank 0 sees "
                f"{in_all_bytes(there or 0)}: save to a file system that all ranks share"
            )
    metadata = _metadata(path, name, written, aliases)
    pickled = pickle.dumps(metadata)
    files[_INDEX] = len(index), zlib.crc32(index)
    manifest = {
        "format": FORMAT,
        "autopar": autopar.__version__,
        "torch": str(torch.__version__),
        _METADATA: {"bytes": len(pickled), "crc32": zlib.crc32(pickled)},
        "files": {file: {"bytes": size, "crc32": crc} for file, (size, crc) in sorted(files.items())},
    }
    try:
        draft = home / _METADATA
        _write_synced(home / _INDEX, index)
        _write_synced(draft, pickled)
        _write_synced(home / _MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync_directory(home)
        os.replace(draft, path / _METADATA)
        _sync_directory(path)
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint {str(path)!r}: {error.strerror or error}") from error
    for other in path.glob(f"{_SAVE}*"):
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)


def discard(path: Path, name: str) -> None:
    """Remove a save that failed, unless it had already taken the place of the one before."""
    home = path / name
    committed = (home / _MANIFEST).exists() and not (home / _METADATA).exists()
    if not committed:
        shutil.rmtree(home, ignore_errors=True)


def packed(value: Any, what: str) -> bytes:
    """Plain data as bytes.

    Raises:
        CheckpointError: it holds what could not be read again without running code from the file.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        torch.load(stream, weights_only=True)
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if "Unsupported" in line), str(error)[:200])
        raise CheckpointError(
            f"{what} holds what a checkpoint does not take ({reason}): numbers, strings, tensors, and dicts, lists and "
            "tuples of these; convert the rest, or give an object with state_dict() and load_state_dict()"
        ) from error
    return stream.getvalue()


class _Pieces(DefaultSavePlanner):
    """Says which pieces this rank writes, and hands them over."""

    def __init__(self, pieces: Iterable[tuple[str, Box, Tensor]], shapes: Mapping[str, Any]):
        super().__init__()
        self._values: dict[MetadataIndex, Tensor] = {}
        items = []
        for name, box, values in pieces:
            index = MetadataIndex(name, box.offsets)
            self._values[index] = values
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            data = TensorWriteData(chunk, TensorProperties(values.dtype), torch.Size(shapes[name]))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        # model.a.b is {"model": {"a.b": ...}} to those who ask for a nested state dict.
        nested = {item.index.fqn: tuple(item.index.fqn.split(".", 1)) for item in items}
        self.plan = SavePlan(items, planner_data=nested)

    def create_local_plan(self) -> SavePlan:
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        values = self._values[write_item.index]
        check_there(values, READ, write_item.index.fqn, NOT_SAVED)
        return values


class _Summed(io.BufferedWriter):
    """A file whose bytes are summed up while they are written in order."""

    crc = size = 0
    failure: OSError | None = None

    def write(self, data: Any) -> int:
        self.crc, self.size = zlib.crc32(data, self.crc), self.size + len(data)
        try:
            return super().write(data)
        except OSError as error:  # which torch.save hides behind one of its own
            self.failure = error
            raise


class _Summing(FileSystem):
    """Files of one directory, each with its size and CRC-32 once it is closed."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[int, int]] = {}
        self.failure: OSError | None = None

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        stream = _Summed(io.FileIO(path, mode))
        try:
            yield stream
            stream.close()
        except OSError as error:
            self.failure = error
            raise
        finally:
            self.failure = self.failure or stream.failure
            with contextlib.suppress(OSError):
                stream.close()
        self.sums[Path(path).name] = stream.size, stream.crc


def _metadata(path: Path, name: str, written: list[Written], aliases: Mapping[str, str]) -> Metadata:
    """Torch's table of contents of all ranks' files."""
    _, metadata = DefaultSavePlanner().create_global_plan([each.plan for each in written])
    storage = {
        result.index: replace(result.storage_data, relative_path=f"{name}/{result.storage_data.relative_path}")
        for each in written
        for result in each.results
    }
    for alias, first in aliases.items():
        tensor = metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[first]
        assert isinstance(tensor, TensorStorageMetadata)
        for chunk in tensor.chunks:
            storage[MetadataIndex(alias, chunk.offsets)] = storage[MetadataIndex(first, chunk.offsets)]
        metadata.planner_data[alias] = tuple(alias.split(".", 1))
    metadata.storage_data, metadata.version = storage, CURRENT_DCP_VERSION
    metadata.storage_meta = StorageMeta(checkpoint_id=str(path), save_id=name)
    return metadata


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    """Let renames and new names reach the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in _NOT_FOR_DIRECTORIES:
            raise
    finally:
        os.close(opened)


# ---- reading ---------------------------------------------------------------------------------------------------------


def is_saved(path: Path) -> bool:
    """Whether a save to this path came to its end."""
    return (path / _METADATA).exists()


def is_checkpoint(path: Path) -> bool:
    """Whether there is something at this path that :meth:`Stored.open` is for."""
    return path.is_dir() and ((path / _METADATA).exists() or any(path.glob(f"{_SAVE}*")))


@dataclass(frozen=True)
class Stored:
    """A checkpoint whose table of contents was read and found whole."""

    path: Path
    name: str
    manifest: Mapping[str, Any]
    metadata: Metadata

    @staticmethod
    def open(path: str | os.PathLike[str]) -> Stored:
        """Read the table of contents.

        Raises:
            CheckpointError: there is none, it is damaged, or a newer autopar wrote it.
        """
        where = place(path)
        pickled = _table_of_contents(where)
        manifests = {home.name: _manifest(home / _MANIFEST) for home in sorted(where.glob(f"{_SAVE}*"))}
        sums = {"bytes": len(pickled), "crc32": zlib.crc32(pickled)}
        name = next((n for n, found in manifests.items() if found is not None and found.get(_METADATA) == sums), None)
        if name is None and not manifests:
            raise CheckpointError(
                f"{str(where)!r} was not written by autopar.save_checkpoint, or its save-... directory was left behind "
                "when it was copied: copy a checkpoint as one directory"
            )
        if name is None:
            raise CheckpointError(
                f"{str(where / _METADATA)!r} is damaged: its {in_all_bytes(len(pickled))} are not those that a "
                "manifest.json beside it was written for; restore both from a copy, or take another checkpoint"
            )
        manifest = manifests[name]
        assert manifest is not None
        if manifest["format"] > FORMAT:
            raise CheckpointError(
                f"the checkpoint {str(where)!r} has format {manifest['format']} and was written by autopar "
                f"{manifest['autopar']}; this is autopar {autopar.__version__}, which reads format {FORMAT}: update it"
            )
        return Stored(where, name, manifest, _Unpickler(io.BytesIO(pickled)).load())

    def __str__(self) -> str:
        """As errors call it."""
        return f"the checkpoint {str(self.path)!r}"

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shape, dtype and boxes of every tensor, by its name in the checkpoint."""
        known = self.metadata.state_dict_metadata
        return {name: found for name, found in known.items() if isinstance(found, TensorStorageMetadata)}

    def names(self, kind: str) -> list[str]:
        """The tensors whose names begin so, without that: ``model.`` or ``optim.``."""
        return sorted(name.removeprefix(kind) for name in self.tensors if name.startswith(kind))

    def bytes_of(self, name: str) -> int:
        """Of a tensor, by its name in the checkpoint."""
        found = self.tensors[name]
        return math.prod(found.size) * found.properties.dtype.itemsize

    @cached_property
    def contents(self) -> Any:
        """What was saved that is no tensor.

        Raises:
            CheckpointError: it is damaged.
        """
        self._verify(_INDEX)
        return torch.load(self.path / self.name / _INDEX, weights_only=True)

    def verify(self, share: int = 0, shares: int = 1) -> None:
        """Read files through and compare their checksums, or this share of them where ranks divide them up.

        Raises:
            CheckpointError: a file is missing, cut off, or holds other bytes than were written.
        """
        for file in list(self.manifest["files"])[share::shares]:
            self._verify(file)

    def _verify(self, file: str) -> None:
        path, sums = self.path / self.name / file, self.manifest["files"][file]
        try:
            size = path.stat().st_size
            if size != sums["bytes"]:
                raise CheckpointError(
                    f"{str(path)!r} has {in_all_bytes(size)} instead of {in_all_bytes(sums['bytes'])}: it was cut off "
                    "or overwritten; restore it from a copy, or take another checkpoint"
                )
            crc = 0
            with path.open("rb") as opened:
                while block := opened.read(_BLOCK):
                    crc = zlib.crc32(block, crc)
        except OSError as error:
            raise _unreadable(path, error) from error
        if crc != sums["crc32"]:
            raise CheckpointError(
                f"{str(path)!r} is damaged: its checksum is {crc:08x} instead of {sums['crc32']:08x}; restore it "
                "from a copy, or take another checkpoint"
            )

    def read(self, wanted: Mapping[str, tuple[list[Box], Tensor]]) -> None:
        """Read boxes of tensors into memory that holds them.

        Args:
            wanted: name -> boxes, and the part of the tensor that they make up.
        """
        items = []
        for name, (boxes, _) in wanted.items():
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
            items += create_read_items_for_chunk_list(name, self.tensors[name], chunks)
        destinations = {
            MetadataIndex(name, box.offsets): box.of(local) for name, (boxes, local) in wanted.items() for box in boxes
        }
        reader = FileSystemReader(self.path)
        reader.set_up_storage_reader(self.metadata, False, rank=0, use_collectives=False)
        try:
            reader.read_data(LoadPlan(items), _Destinations(destinations)).wait()
        except OSError as error:
            raise _unreadable(self.path, error) from error

    def tensor(self, name: str) -> StoredTensor:
        """A tensor of which parts can be read."""
        return StoredTensor(self, name)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint, by its name there."""

    stored: Stored
    name: str

    def get_shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return tuple(self.stored.tensors[self.name].size)

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """A part; only files that hold some of it are read."""
        runs = [each.indices(size) for each, size in zip(index, self.get_shape(), strict=True)]
        sizes = tuple(stop - start for start, stop, _ in runs)
        part = torch.empty(sizes, dtype=self.stored.tensors[self.name].properties.dtype)
        box = Box(tuple(start for start, _, _ in runs), sizes, (0,) * len(sizes))
        self.stored.read({self.name: ([box], part)})
        return part


class _Destinations(DefaultLoadPlanner):
    """Says where what is read goes."""

    def __init__(self, tensors: Mapping[MetadataIndex, Tensor]):
        super().__init__()
        self._tensors = tensors

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self._tensors[index]
        check_there(found, WRITE, index.fqn, HALF_LOADED)
        return found


def _table_of_contents(path: Path) -> bytes:
    try:
        return (path / _METADATA).read_bytes()
    except FileNotFoundError as error:
        if not path.exists():
            reason = "it does not exist"
        elif any(path.glob(f"{_SAVE}*")):
            reason = "its first save did not finish"
        else:
            reason = "it is not a directory that autopar.save_checkpoint wrote"
        raise CheckpointError(f"there is no checkpoint at {str(path)!r}: {reason}") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot read {str(path)!r}: {error.strerror or error}")


def _manifest(path: Path) -> dict[str, Any] | None:
    """What a manifest says, if it is there and whole."""
    try:
        found = dict(json.loads(path.read_bytes()))
        sums = [found[_METADATA], found["files"][_INDEX], *found["files"].values()]
        whole = isinstance(found["format"], int) and all(each.keys() == {"bytes", "crc32"} for each in sums)
        return found if whole and {"autopar", "torch"} <= found.keys() else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


class _Unpickler(pickle.Unpickler):
    """Makes the objects of a table of contents; what else it names is not even imported."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMED:
            raise CheckpointError(f"the table of contents names {module}.{name}, which is no part of one")
        return super().find_class(module, name)
