"""Finds the tensors that a Function reads or writes although they are not among its arguments.

The parallel module has parameters and buffers of its own. A Function that finds those of the original by itself would
read them for ever, whatever training makes of them, so it is refused wherever it is seen to.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import CellType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.graph.module_walk import ModuleWalk
from planner.base.errors import CaptureError

_Tensors = Mapping[str, Sequence[tuple[str, Tensor]]]
"""What a model has, by kind, each by name; held, since what is made later would lie in its memory otherwise."""

_CAPTURED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_BEFORE: ContextVar[_Tensors | None] = ContextVar("_BEFORE", default=None)


@contextlib.contextmanager
def belonging(model: nn.Module, walk: ModuleWalk) -> Iterator[None]:
    """Know what belongs to a model: from now on what it has, and inside what it has now, for which others stand in.

    Args:
        walk: over the model, or what stands in its place.
    """
    _CAPTURED.add(model)
    token = _BEFORE.set(_tensors(walk))
    try:
        yield
    finally:
        _BEFORE.reset(token)


class Watching(TorchDispatchMode):
    """Refuses what a Function may not do while it runs: draw random numbers, or find parameters and a model's buffers.

    Args:
        name: the Function's.
        tensors: its arguments.

    Raises:
        CaptureError: it does.
    """

    def __init__(self, name: str, tensors: Sequence[Tensor]):
        super().__init__()
        self.name = name
        given = {*map(storage_of, tensors)}
        self._memory = {at: found for at, found in belongings().items() if at not in given}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in found:
            belongs, _ = self._memory.get(storage_of(tensor), ("", None))
            if belongs or isinstance(tensor, nn.Parameter):
                raise CaptureError(
                    f"{self.name} {'writes into' if func._schema.is_mutable else 'reads'} a "
                    f"{belongs or 'parameter'} of shape {tuple(tensor.shape)} that is not among its arguments: pass it "
                    "to apply() as an argument, and write to it outside, since a plan would go on with the original's "
                    "values, and autograd gives it no gradient"
                )
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CaptureError(
                f"{self.name} draws random numbers ({func}), which a plan can make neither alike on ranks that "
                "hold the same nor different on others: draw them before it, and pass them to it as an argument"
            )
        return func(*args, **(kwargs or {}))


def refuse_reach(name: str, function: type[Function], args: Sequence[Any]) -> None:
    """Refuse a Function that cannot be watched to its end, if it is given a model's tensors, or its code names them.

    Raises:
        CaptureError: among its arguments, globals or what it closes over is a module, or a tensor of a model.
    """
    models = belongings()
    named: list[Any] = [function.forward, function.setup_context, function.backward]
    for value in named:  # which grows by what functions of the same module name
        if inspect.isfunction(value) and value.__module__ == function.__module__:
            named += [each for each in _named(inspect.unwrap(value)) if not any(each is other for other in named)]
    for where, values in (("it is given", args), ("its code names", named)):
        for value in pytree.tree_leaves(list(values)):
            for tensor in [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else [value]:
                if isinstance(tensor, Tensor) and (storage_of(tensor) in models or isinstance(tensor, nn.Parameter)):
                    what, _ = models.get(storage_of(tensor), ("parameter", None))
                    raise CaptureError(
                        f"{name} decides on the values of tensors, or runs on tensors with data only, so that what it "
                        f"reads cannot be watched, and {where} something that holds a {what} of shape "
                        f"{tuple(tensor.shape)}: a plan would go on with the original's values. Pass to apply() the "
                        "tensors that it reads, and nothing that holds others"
                    )


def _named(function: Any) -> list[Any]:
    """What a function closes over, and the globals that it names."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return cells + [function.__globals__[each] for each in function.__code__.co_names if each in function.__globals__]


def belongings() -> dict[int, tuple[str, Tensor]]:
    """What lies where of the models that were captured and are still there."""
    held = [_BEFORE.get() or {}, *(_tensors(ModuleWalk(model)) for model in list(_CAPTURED))]
    named = ((f"{kind} ({name})", t) for found in held for kind, each in found.items() for name, t in each)
    return {storage_of(t): (what, t) for what, t in named if t.layout == torch.strided}


def _tensors(walk: ModuleWalk) -> _Tensors:
    return {"buffer": walk.buffers, "parameter": walk.parameters}


def storage_of(tensor: Tensor) -> int:
    """Names the memory; 0 for tensors that have none."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0
