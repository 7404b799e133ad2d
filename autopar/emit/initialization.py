"""Initialises each rank's part of parameters, buffers and constants.

Real tensors come from rank 0. Models on the meta device are never whole on any rank: files are read slice by slice, or
one module after another is initialised, cut, and dropped.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.capture.capture import Captured
from autopar.checkpoint.contents import MODEL
from autopar.checkpoint.files import Stored, is_checkpoint
from autopar.checkpoint.together import Ranks
from autopar.graph.rows import Rows, take
from autopar.graph.slabs import Cut
from autopar.runtime.spmd.interface import LeafSpec
from autopar.runtime.spmd.mesh import rows_of
from planner.base.errors import InputError
from planner.ir.layout import Mesh

Source = Mapping[str, Tensor] | str | os.PathLike[str]


def part_maker(
    model: nn.Module,
    captured: Captured,
    mesh: Mesh,
    rank: int,
    device: torch.device,
    state_dict: Source | None,
    seed: int,
) -> Callable[[LeafSpec], Tensor]:
    """A function that makes this rank's part of a leaf; all ranks must call it for the same leaves in one order.

    Raises:
        InputError: ``state_dict`` lacks a tensor or has one of another shape, or a module on the meta
            device has no way to initialise itself.
    """
    read = _reader(state_dict) if state_dict is not None else None
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    initialised = _Initialiser(model, seed)

    slabs = {each.name: each for each in captured.slabs}

    def make(leaf: LeafSpec) -> Tensor:
        if leaf.kind == "const":
            return own_part(captured.constants[leaf.name], leaf, mesh, rank, device)
        rows = rows_of(leaf.shape, leaf.layout, mesh, rank)
        if leaf.name in slabs:
            return slabs[leaf.name].local(rows, partial(source, is_parameter=True)).to(device, leaf.dtype)
        return source(leaf.name, leaf.kind == "param")(rows).to(device, leaf.dtype)

    def source(name: str, is_parameter: bool) -> Cut:
        """What cuts parts of a tensor of the model, in memory of their own."""
        like = tensors[name]
        if read is not None and (found := read(_aliases(model, name))) is not None:
            shape = tuple(found.get_shape())
            if shape != tuple(like.shape):
                raise InputError(f"{name} has shape {shape} in the checkpoint, {tuple(like.shape)} in the model")
            stored = found
            return lambda rows: _cut(stored, rows).to(device, like.dtype, copy=True).contiguous()
        if read is not None and is_parameter:
            raise InputError(f"the checkpoint has no tensor {name!r}; is it of another model?")
        if like.is_meta:
            full = initialised(name)
        else:
            full = like.detach().to(device).clone()
            if dist.get_world_size() > 1:
                dist.broadcast(full, src=0)
        return lambda rows: take(full, rows).to(device, copy=True).contiguous()

    return make


def own_part(full: Tensor, leaf: LeafSpec, mesh: Mesh, rank: int, device: torch.device) -> Tensor:
    """A rank's part of a whole tensor, in memory of its own."""
    part = take(full.detach(), rows_of(leaf.shape, leaf.layout, mesh, rank))
    return part.clone(memory_format=torch.contiguous_format).to(device, leaf.dtype)


def _aliases(model: nn.Module, name: str) -> list[str]:
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return [other for other, tensor in named.items() if tensor is named[name]]


class _Stored(Protocol):
    """A tensor in a checkpoint, of which a part can be read; what safetensors calls a slice."""

    def get_shape(self) -> Sequence[int]: ...
    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


@dataclass(frozen=True)
class _InMemory:
    tensor: Tensor

    def get_shape(self) -> Sequence[int]:
        return self.tensor.shape

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return self.tensor.detach()[index]


def _cut(stored: _Stored, rows: Rows) -> Tensor:
    """Read slices as slices; what is strided is read whole in that dim, then cut."""
    read = stored[tuple(r if isinstance(r, slice) else slice(None) for r in rows)]
    return take(read, tuple(slice(0, read.shape[d]) if isinstance(r, slice) else r for d, r in enumerate(rows)))


def _reader(source: Source) -> Callable[[list[str]], _Stored | None]:
    """Finds a tensor under any of its names: in a state dict, in safetensors files, or in a checkpoint of ours."""
    if not isinstance(source, Mapping) and zipfile.is_zipfile(source):
        source = _mapped(Path(source))
    if isinstance(source, Mapping):
        known = source

        def from_mapping(names: list[str]) -> _Stored | None:
            return next((_InMemory(known[n]) for n in names if n in known), None)

        return from_mapping
    if is_checkpoint(Path(source)):
        return _from_checkpoint(Path(source))
    files = _safetensors(Path(source))

    def from_files(names: list[str]) -> _Stored | None:
        name = next((n for n in names if n in files), None)
        if name is None:
            return None
        file = files[name]
        return file.get_slice(name) if file.get_slice(name).get_shape() else _InMemory(file.get_tensor(name))

    return from_files


def _mapped(path: Path) -> Mapping[str, Tensor]:
    """A state dict that torch.save wrote, of which only what is read comes into memory."""
    try:
        found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise InputError(f"cannot read the state dict {str(path)!r}: {str(error).splitlines()[0]}") from error
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise InputError(
            f"{str(path)!r} holds no state dict, which maps names to tensors, but {type(found).__name__}: give a file "
            "that torch.save(model.state_dict(), path) wrote"
        )
    return found


def _from_checkpoint(path: Path) -> Callable[[list[str]], _Stored | None]:
    ranks, opened = Ranks(dist.group.WORLD), []

    def check() -> None:
        opened.append(Stored.open(path))
        opened[0].verify(ranks.rank, ranks.size)

    ranks.each(f"reading the checkpoint {str(path)!r}", check)
    stored = opened[0]

    def from_checkpoint(names: list[str]) -> _Stored | None:
        return next((stored.tensor(MODEL + n) for n in names if MODEL + n in stored.tensors), None)

    return from_checkpoint


def _safetensors(path: Path) -> dict[str, Any]:
    """Name of every tensor -> the open file that holds it."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.is_dir():
            index = path / "model.safetensors.index.json"
            parts = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else ()
            paths = [path / part for part in sorted(parts)] or [path / "model.safetensors"]
        else:
            paths = [path]
        files = [safe_open(str(p), framework="pt") for p in paths]
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise InputError(
            f"cannot read the checkpoint {str(path)!r}: {error}; give a safetensors file, a directory that holds "
            "model.safetensors or model.safetensors.index.json, a state dict that torch.save wrote, or what "
            "autopar.save_checkpoint wrote"
        ) from error
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118


class _Initialiser:
    """Initialises meta modules one at a time, the same on every rank, and forgets them."""

    def __init__(self, model: nn.Module, seed: int):
        self.model: Any = model
        self.seed = seed
        self._owner = {
            (f"{path}." if path else "") + name: (path, module)
            for path, module in model.named_modules()
            for name in (*module._parameters, *module._buffers)
        }
        self._last: tuple[str, dict[str, Tensor]] = ("", {})

    def __call__(self, name: str) -> Tensor:
        path, module = self._owner[name]
        if self._last[0] != path or not self._last[1]:
            self._last = (path, self._initialise(path, module))
        return self._last[1][name.rsplit(".", 1)[-1]]

    def _initialise(self, path: str, module: nn.Module) -> dict[str, Tensor]:
        twin = copy.copy(module)
        twin._modules = {}
        twin._parameters = {
            k: None if p is None else nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad)
            for k, p in module._parameters.items()
        }
        twin._buffers = {
            k: None if b is None else torch.full_like(b, 0, device="cpu") for k, b in module._buffers.items()
        }
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(self.seed * 1_000_003 + zlib.crc32(path.encode()))
            initialise = _initialisation(self.model, twin, path)
            if initialise is None:
                raise InputError(
                    f"module {path or '(root)'!r} ({type(module).__name__}) is on the meta device and cannot "
                    "initialise itself: give it a reset_parameters() method, or pass state_dict= with the full weights"
                )
            initialise()
            if hasattr(self.model, "_init_weights"):
                self._let_parents_adjust(path, twin)
        return {k: t for k, t in (*twin._parameters.items(), *twin._buffers.items()) if t is not None}

    def _let_parents_adjust(self, path: str, twin: nn.Module) -> None:
        """Transformers models also initialise a module's weights through its parents, whose other parts stay meta."""
        while path:
            path, _, name = path.rpartition(".")
            parent = self.model.get_submodule(path)
            above = copy.copy(parent)
            above._modules = {**parent._modules, name: twin}
            self.model._init_weights(above)
            twin = above


def _initialisation(model: nn.Module, module: nn.Module, path: str) -> Callable[[], Any] | None:
    """How a module initialises its own tensors: as Transformers models do, as torch's modules do, or its own way."""
    by_model: Any = getattr(model, "_init_weights", None)
    if by_model is not None:
        return lambda: by_model(module)
    own: Any = getattr(module, "reset_parameters", None) or (getattr(module, "init_weights", None) if path else None)
    return own
