"""Exports a checkpoint's model as safetensors, piece by piece."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from autopar.checkpoint.contents import MODEL
from autopar.checkpoint.files import Stored
from autopar.checkpoint.parts import PIECE_BYTES, Box
from planner.base.errors import CheckpointError

INDEX = "model.safetensors.index.json"

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def export_safetensors(
    path: str | os.PathLike[str], out: str | os.PathLike[str], *, file_bytes: int = 5 * 10**9
) -> list[Path]:
    """Write a checkpoint's model as safetensors; one process, and no more of a tensor in memory than a piece.

    A tensor of several names is written once, as Transformers does. Files get their names when all are on disk, the
    index last.

    Args:
        path: what :func:`autopar.save_checkpoint` wrote.
        out: a file (``....safetensors``), or a directory, which gets ``model.safetensors``, or several files and
            ``model.safetensors.index.json`` where one would be larger than ``file_bytes``.

    Returns:
        The files.

    Raises:
        CheckpointError: the checkpoint is damaged, there is a model at ``out`` already, or it cannot be written.
    """
    stored, target = Stored.open(path), Path(out)
    stored.verify()
    aliases = stored.contents["aliases"]
    sizes = {name: stored.bytes_of(MODEL + name) for name in stored.names(MODEL) if name not in aliases}
    single = target.suffix == ".safetensors"
    shares = [list(sizes)] if single else _shares(sizes, file_bytes)
    files = [target] if single else [target / name for name in _file_names(len(shares))]
    _check_free(target, single)
    if len(shares) > 1:
        files.append(target / INDEX)
    drafts = [file.with_name(f".{file.name}.{os.getpid()}.tmp") for file in files]
    try:
        files[0].parent.mkdir(parents=True, exist_ok=True)
        for draft, names in zip(drafts[: len(shares)], shares, strict=True):
            _write(draft, stored, names, sizes)
        if len(shares) > 1:
            _write_index(drafts[-1], files, shares, sizes)
        for draft, file in zip(drafts, files, strict=True):
            draft.replace(file)
    except OSError as error:
        raise CheckpointError(f"cannot write {str(error.filename or target)!r}: {error.strerror or error}") from error
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)
    return files


def _shares(sizes: dict[str, int], file_bytes: int) -> list[list[str]]:
    """Names for each file, in order; a file is larger only if one tensor is."""
    shares: list[list[str]] = [[]]
    room = file_bytes
    for name, size in sizes.items():
        if size > room and shares[-1]:
            shares.append([])
            room = file_bytes
        shares[-1].append(name)
        room -= size
    return shares


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _check_free(target: Path, single: bool) -> None:
    if not single and target.exists() and not target.is_dir():
        raise CheckpointError(f"{str(target)!r} is a file: give a directory, or a file that ends in .safetensors")
    there = [target] if single else [*target.glob("model*.safetensors"), target / INDEX]
    found = next((path for path in there if path.exists()), None)
    if found is not None:
        raise CheckpointError(f"{str(found)!r} exists already: remove it, or export to another place")


def _write(path: Path, stored: Stored, names: Sequence[str], sizes: dict[str, int]) -> None:
    """One file: the length of the header, the header padded to 8 bytes, the tensors behind one another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in names:
        found = stored.tensors[MODEL + name]
        if found.properties.dtype not in _DTYPES:
            raise CheckpointError(f"{name} is of {found.properties.dtype}, which safetensors does not know")
        header[name] = {
            "dtype": _DTYPES[found.properties.dtype],
            "shape": list(found.size),
            "data_offsets": [start, start + sizes[name]],
        }
        start += sizes[name]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            found = stored.tensors[MODEL + name]
            none = (0,) * len(found.size)
            for box in Box(none, tuple(found.size), none).cut(max(1, PIECE_BYTES // found.properties.dtype.itemsize)):
                piece = torch.empty(box.sizes, dtype=found.properties.dtype)
                stored.read({MODEL + name: ([Box(box.offsets, box.sizes, none)], piece)})
                file.write(piece.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _write_index(path: Path, files: Sequence[Path], shares: Sequence[Sequence[str]], sizes: dict[str, int]) -> None:
    """Which file has which tensor, for the files of these shares."""
    weight_map = {name: file.name for file, names in zip(files[: len(shares)], shares, strict=True) for name in names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    with path.open("w") as file:
        file.write(json.dumps(index, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
