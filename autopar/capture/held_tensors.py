"""Tensors that a model's modules hold beside parameters and buffers: captured, they are constants of the program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.graph.tensors import storage_of

REGISTERED = ("_parameters", "_buffers", "_modules")


def held_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Those that have values: in attributes, and lists, tuples and dicts there, by path (``a.scale``, ``tables.0``)."""
    found = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in REGISTERED:
                for keys, each in pytree.tree_flatten_with_path(value)[0]:
                    if isinstance(each, Tensor) and _has_memory(each):
                        within = (str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)
                        found[".".join(filter(None, (path, name, *within)))] = each
    return found


def held_among(constants: Iterable[Any], model: nn.Module) -> Mapping[str, Tensor]:
    """The tensors that a model holds in whose memory one of these constants lies, by path."""
    strided = [value for value in constants if isinstance(value, Tensor) and _has_memory(value)]
    memory = {storage_of(value) for value in strided}
    if not memory:
        return {}
    return {name: value for name, value in held_tensors(model).items() if storage_of(value) in memory}


def _has_memory(value: Tensor) -> bool:
    return value.layout == torch.strided and not value.is_meta
