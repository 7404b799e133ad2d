"""What modules hold beside parameters and buffers, which makes one program or another: compared, part by part."""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_VALUES = (
    *(int, float, complex, str, bytes, type(None), enum.Enum, range, slice, set, frozenset),
    *(type, CodeType, BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types whose values are compared as they are."""

_OF_TORCH = vars(nn.Module()).keys() - {"training", "_parameters", "_buffers", "_modules"}
"""Attributes of every module, of hooks; those of the forward are compared without the numbers that torch gives them."""


class Absent:
    """Stands for what one side lacks."""

    def __repr__(self) -> str:
        return "none"


ABSENT = Absent()


class Difference(NamedTuple):
    """Where two things differ, and what stands there."""

    path: str
    ours: Any
    theirs: Any


def differences(path: str, ours: Any, theirs: Any, met: set[tuple[int, int]]) -> Iterator[Difference]:
    """Where two things differ that were held under the same name.

    Objects of which neither a value nor parts are known, such as random generators, do not count.

    Args:
        met: pairs of objects, by ``id``, that were compared already; it grows.
    """
    if ours is theirs or (id(ours), id(theirs)) in met:
        return
    if type(ours) is not type(theirs) or not _has_equal_values(ours, theirs):
        yield Difference(path, ours, theirs)
        return
    if isinstance(ours, (*_VALUES, Tensor)):
        return
    met.add((id(ours), id(theirs)))
    mine, others = parts(ours), parts(theirs)
    for name in {**mine, **others}:
        yield from differences(path + name, mine.get(name, ABSENT), others.get(name, ABSENT), met)


def _has_equal_values(ours: Any, theirs: Any) -> bool:
    """Whether two things of one type are equal, as far as that is not said by their parts."""
    if isinstance(ours, _VALUES):
        return bool(ours == theirs)
    if isinstance(ours, FunctionType):
        return ours.__code__ == theirs.__code__
    if isinstance(ours, Tensor):
        alike = (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
        return alike and (ours.is_meta or torch.equal(ours, theirs))
    return True


def parts(value: Any) -> Mapping[str, Any]:
    """What something is made of, by how it is written behind its name."""
    if isinstance(value, dict):
        return {f"[{key!r}]": each for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return {f"[{place}]": each for place, each in enumerate(value)}
    if isinstance(value, MethodType):
        return {".__func__": value.__func__, ".__self__": value.__self__}
    if isinstance(value, functools.partial):
        return {".func": value.func, ".args": value.args, ".keywords": value.keywords}
    if isinstance(value, FunctionType):
        return {".__defaults__": value.__defaults__, ".__kwdefaults__": value.__kwdefaults__, **_free(value)}
    held = vars(value) if hasattr(value, "__dict__") else {}
    if isinstance(value, nn.Module):
        hooks = {name: [*held[name].values()] for name in ("_forward_hooks", "_forward_pre_hooks")}
        held = {name: each for name, each in held.items() if name not in _OF_TORCH} | hooks
    return {f".{name}": each for name, each in held.items()}


def _free(function: FunctionType) -> Mapping[str, Any]:
    """Variables from around a function, those that have a value."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[f".{name}"] = cell.cell_contents
    return found
