"""The face of the original model on modules that hold parameters in its place: what is read of it, what is refused.

Attributes and properties are the original's. Its methods are not run by themselves: they would compute with the
original's parameters, which are not those that are trained. Its modules do not run either, since the plan runs the
model as a whole; so whatever would wait for one of them, or change it, is refused rather than ignored.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from planner.base.errors import InputError, PlanWarning

FILLED = "pmodel.gather_module(), called on every rank, fills the original with the trained values and returns it"
_COMPUTED = (property, cached_property)


class Fronts(nn.Module):
    """A module that stands for one of the original model, and has its attributes."""

    _original: tuple[nn.Module]  # in a tuple: its modules are not parts of this one

    def apply(self, fn: Callable[[nn.Module], None]) -> NoReturn:
        """Refused: none of these modules is of the class that a function of modules looks for."""
        kind = type(self._original[0]).__name__
        raise InputError(
            f"the modules of a parallel {kind} only hold parameters and are of no other class, so that apply() would "
            "find no layer: apply it to the model before autopar.parallelize, or go through named_parameters()"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fronts:
        """What ``to``, ``cuda``, ``half`` and the like do: nothing, where all is there already; else refused.

        Even a tensor that is put in the place of an equal one would lose what it knows of the other ranks.
        """
        named = itertools.chain(self.named_parameters(), self.named_buffers())
        for name, tensor in named:
            made = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if (made.dtype, made.device) != (tensor.dtype, tensor.device):
                raise InputError(
                    f"{name} is of {tensor.dtype} on {tensor.device}, as planned, and would be of {made.dtype} on "
                    f"{made.device}: convert the model before autopar.parallelize, and leave where it runs to the plan"
                )
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "_original" not in self.__dict__:
                raise
        return _read(self, name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """As of any module, but not in the place of one of the original's."""
        if "_original" in self.__dict__:
            _check_settable(self, name, module)
        super().add_module(name, module)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_original" in self.__dict__ and not name.startswith("__"):
            _check_settable(self, name, value)
        super().__setattr__(name, value)


class ParameterHolder(Fronts):
    """Holds parameters and buffers where the original model's submodule held them, and has its attributes."""

    def __init__(self, original: nn.Module):
        super().__init__()
        self._original = (original,)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the plan runs the whole model."""
        self._refuse("does not run by itself: call the parallel module, whose plan is for the whole model")

    def train(self, mode: bool = True) -> NoReturn:
        """Refused: all of a plan's program is in one mode."""
        self._refuse(
            "has no mode of its own, since the plan runs the model as a whole: set modes of modules (a norm that is to "
            "stay in eval mode) before autopar.parallelize, and call pmodel.train() or pmodel.eval() afterwards"
        )

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse(
            "does not run by itself, so that a hook on it would never be called: return from the model's forward what "
            "it is to see, or register it on the parallel module"
        )

    register_forward_hook = register_forward_pre_hook = register_backward_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = _refuse_hook

    def _refuse(self, why: str) -> NoReturn:
        raise InputError(f"a {type(self._original[0]).__name__} of a parallel module {why}; {FILLED}")

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters())
        return f"ParameterHolder({type(self._original[0]).__name__}, {count:,} parameters)"


def _read(front: Fronts, name: str) -> Any:
    """An attribute of the original; what is computed from others is computed from those of ``front``.

    Raises:
        AttributeError: there is none; or it is a method, or a parameter that is not here.
    """
    original = front._original[0]
    kind = type(original).__name__
    on_class = inspect.getattr_static(type(original), name, None)
    if isinstance(on_class, _COMPUTED):
        return on_class.__get__(front, type(original))
    if name in original._parameters or name in original._buffers:
        raise AttributeError(
            f"{kind}.{name} is not on this rank: it is in another stage of the pipeline, or the model does not use it; "
            "pmodel.full_state_dict(), called on every rank, has the parameters and buffers of all stages"
        )
    try:
        value = getattr(original, name)
    except AttributeError:
        raise AttributeError(f"neither the parallel module nor its original {kind} has an attribute {name!r}") from None
    if isinstance(value, nn.Module):
        return ParameterHolder(value)
    if isinstance(getattr(value, "__self__", None), nn.Module):
        raise AttributeError(
            f"{kind}.{name} is a method, which would compute with the parameters of the original, not with those that "
            f"are trained: {FILLED}, for example pmodel.gather_module().{name}(...); where parameters do not matter, "
            f"call pmodel.module.{name}(...)"
        )
    return value


def _check_settable(front: Fronts, name: str, value: Any) -> None:
    """Refuse to set what only the original has, or to replace a module: the plan would go on without a word.

    Raises:
        InputError: names it, and the way out.
    """
    original, held = front._original[0], cast(Any, front._parameters.get(name))
    own = {**front.__dict__, **front._parameters, **front._buffers}
    is_own = name != "forward" and (name in own or hasattr(type(front), name))
    if name in front._modules or (hasattr(original, name) and (isinstance(value, nn.Module) or not is_own)):
        raise InputError(
            f"{type(original).__name__}.{name} cannot be set on the parallel module: its program was captured from the "
            "model as it was, and would not see the change. Set it on the model, then call autopar.parallelize again, "
            "with state_dict=pmodel.full_state_dict() to keep what was trained"
        )
    if isinstance(held, DTensor) and not isinstance(value, DTensor):
        raise InputError(
            f"{type(original).__name__}.{name} is a part of a parameter, a DTensor, and cannot become "
            f"{'a whole tensor' if isinstance(value, Tensor) else repr(value)}: pmodel.load_state_dict takes whole ones"
        )


def warn_of_module(kind: str) -> None:
    """Say that an original has not been trained; once, unless warnings are filtered otherwise."""
    warnings.warn(
        f"pmodel.module is the original {kind}, whose parameters are those that it had when autopar.parallelize was "
        f"called; {FILLED}",
        PlanWarning,
        stacklevel=3,
    )


@torch.no_grad()
def fill(original: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Give an original module these values, in place where it has memory.

    Args:
        tensors: whole parameters and buffers, by any of their names.
    """
    for name, value in tensors:
        path, _, last = name.rpartition(".")
        owner = original.get_submodule(path)
        held = owner._parameters if last in owner._parameters else owner._buffers
        tensor = held[last]
        assert tensor is not None
        if not tensor.is_meta:
            tensor.copy_(value)
            continue
        made: Any = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        for module in original.modules():
            for tied in (module._parameters, module._buffers):
                tied.update({key: made for key, other in tied.items() if other is tensor})
