"""Materialize: where each rank's part of a parameter, buffer or constant comes from.

Real tensors come from rank 0. Models on the meta device are never whole on any rank: a checkpoint is
read slice by slice, or one module after another is initialised, cut, and dropped.
"""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.capture import Captured
from autopar.runtime.mesh import part_of
from autopar.runtime.module import LeafSpec
from planner.errors import InputError
from planner.layout import Mesh

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

    def make(leaf: LeafSpec) -> Tensor:
        if leaf.kind == "const":
            full = captured.constants[leaf.name]
        elif read is not None and (found := read(leaf.name, _aliases(model, leaf.name))) is not None:
            if tuple(found.shape) != leaf.shape:
                raise InputError(
                    f"{leaf.name} has shape {tuple(found.shape)} in the checkpoint, {leaf.shape} in the model"
                )
            full = found
        elif tensors[leaf.name].is_meta:
            full = initialised(leaf.name)
        else:
            full = tensors[leaf.name].detach().to(device).clone()
            if dist.get_world_size() > 1:
                dist.broadcast(full, src=0)
        return part_of(full.detach(), leaf.layout, mesh, rank).to(device, leaf.dtype)

    return make


def _aliases(model: nn.Module, name: str) -> list[str]:
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return [other for other, tensor in named.items() if tensor is named[name]]


def _reader(source: Source) -> Callable[[str, list[str]], Tensor | None]:
    """Reads a tensor under any of its names; ``None`` for buffers that checkpoints leave out."""
    if isinstance(source, Mapping):
        known = source

        def from_mapping(name: str, names: list[str]) -> Tensor | None:
            return next((known[n] for n in names if n in known), None)

        return from_mapping
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(os.fspath(source), framework="pt")
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read the checkpoint {os.fspath(source)!r}: {error}") from error
    keys = set(file.keys())

    def from_file(name: str, names: list[str]) -> Tensor | None:
        key = next((n for n in names if n in keys), None)
        return None if key is None else file.get_tensor(key)

    return from_file


class _Initialiser:
    """Initialises meta modules one at a time, the same on every rank, and forgets them."""

    def __init__(self, model: nn.Module, seed: int):
        self.model, self.seed = model, seed
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
        return {k: t for k, t in (*twin._parameters.items(), *twin._buffers.items()) if t is not None}


def _initialisation(model: nn.Module, module: nn.Module, path: str) -> Callable[[], Any] | None:
    """How a module initialises its own tensors: as Transformers models do, as torch's modules do, or its own way."""
    by_model: Any = getattr(model, "_init_weights", None)
    if by_model is not None:
        return lambda: by_model(module)
    own: Any = getattr(module, "reset_parameters", None) or (getattr(module, "init_weights", None) if path else None)
    return own
