"""Norms and clipping of gradients of which a rank holds some, as torch's own functions see all of them.

``torch.nn.utils.clip_grad_norm_`` and ``torch.amp.GradScaler`` go through the gradients that a rank has. Of a DTensor
they know that other ranks of its mesh have other parts of it, but nothing of other stages, and the scaler asks only
those ranks that hold other parts of the first one. So where that could differ, a gradient knows who else holds some: a
norm over several of them is one over those of all stages, and an overflow anywhere is found on all ranks.

Gradients that are at home in files know that, too: the system is asked for them before these functions, which are the
first to read them after backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from autopar.runtime.host.disk import OffloadFiles
from autopar.runtime.host.pages import READ
from planner.base.errors import InputError


@dataclass(frozen=True, eq=False)
class Holders:
    """The ranks that hold gradients of a model.

    Attributes:
        axes: the groups along the axes of the mesh of a stage; none where torch knows all holders by itself.
        stages: the ranks of the pipeline that hold any; ``None``: all stages are on the mesh.
        alike: whether all of these hold gradients of the same dtypes.
        disk: where gradients are at home, if in files.
    """

    axes: tuple[ProcessGroup, ...] = ()
    stages: ProcessGroup | None = None
    alike: bool = True
    disk: OffloadFiles | None = None


class _Shared(DTensor):
    """A DTensor of which other ranks may hold more: what is asked of it and concerns all is asked of all.

    Attributes:
        holders: who holds gradients of the same model.
        counts: whether this one counts here; not so where an earlier stage holds it too.
        special: what is done in place of some functions of torch, given the function and its arguments.
    """

    holders: Holders
    counts: bool
    special: ClassVar[Mapping[Any, Any]] = {}

    @classmethod
    def of(cls, value: DTensor, holders: Holders, counts: bool) -> _Shared:
        """The same tensor, which knows."""
        made = cls(value._local_tensor, value._spec, requires_grad=False)
        made.holders, made.counts = holders, counts
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        made = memo[id(self)] = self.of(
            DTensor(self._local_tensor.clone(), self._spec, requires_grad=False), self.holders, self.counts
        )
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        special = cls.special.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            return (func if special is None else partial(special, func))(*args, **(kwargs or {}))


class Gradient(_Shared):
    """A gradient."""


class InFile(Gradient):
    """A gradient that is at home in a file: the system is asked for it before its norm, or overflow, is found."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Raises :class:`planner.base.errors.DiskError`: the file cannot be read."""
        if func in _ASKED:
            for each in pytree.tree_leaves((args, kwargs)):
                if isinstance(each, InFile) and each.holders.disk is not None:
                    each.holders.disk.ask([each._local_tensor], READ, "gradients")
        return super().__torch_function__(func, types, args, kwargs)


class OwnInFile(InFile):
    """The same, of which torch knows all else."""

    special: ClassVar[Mapping[Any, Any]] = {}


class _Norm(_Shared):
    """The norm of a gradient."""


class _Norms(_Shared):
    """Norms of several gradients, behind one another."""


def _norm(func: Any, gradient: Gradient, *args: Any, **kwargs: Any) -> Any:
    found = func(gradient, *args, **kwargs)
    return (
        _Norm.of(found, gradient.holders, gradient.counts) if isinstance(found, DTensor) and not found.ndim else found
    )


def _norm_of_each(func: Any, gradients: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
    return [
        _Norm.of(norm, gradient.holders, gradient.counts) if isinstance(gradient, Gradient) else norm
        for norm, gradient in zip(func(gradients, *args, **kwargs), gradients, strict=True)
    ]


def _moved(func: Any, value: _Shared, *args: Any, **kwargs: Any) -> Any:
    return type(value).of(func(value, *args, **kwargs), value.holders, value.counts)


def _stacked(func: Any, norms: list[Any], *args: Any, **kwargs: Any) -> Any:
    if not all(isinstance(norm, _Norm) for norm in norms):
        raise InputError(
            "a norm over gradients of which some are no longer those that backward gave: other ranks wait for all of "
            "them, so change gradients in place (p.grad.mul_(...)) instead of replacing them"
        )
    found = func([norm if norm.counts else torch.zeros_like(norm) for norm in norms], *args, **kwargs)
    return _Norms.of(found, norms[0].holders, True)


def _norm_of_all(func: Any, norms: _Norms, *args: Any, **kwargs: Any) -> Any:
    found = func(norms, *args, **kwargs)
    order = args[0] if args else kwargs.get("ord", kwargs.get("p", 2.0))
    order = 2.0 if order in (None, "fro") else order
    if not order > 0:
        raise InputError(
            f"a norm of order {order} is not taken over gradients that several ranks hold: take one above 0"
        )
    if norms.holders.stages is None or not isinstance(found, DTensor) or found.ndim:
        return found
    total = found.full_tensor().double()
    if math.isinf(order):
        dist.all_reduce(total, dist.ReduceOp.MAX, group=norms.holders.stages)
    else:
        total = total**order
        dist.all_reduce(total, group=norms.holders.stages)
        total = total ** (1 / order)
    mesh = found.device_mesh
    return DTensor.from_local(total.to(found.dtype), mesh, run_check=False)


def _unscale(func: Any, gradients: list[Any], found_inf: Tensor, inv_scale: Tensor) -> None:
    holders = next(g.holders for g in gradients if isinstance(g, Gradient))
    if not holders.alike:
        raise InputError(
            "torch.amp.GradScaler asks for overflow once for each dtype of gradients, and the stages of this pipeline "
            "train parameters of different dtypes: give all trained parameters one dtype, or scale the loss by hand"
        )
    func([g.to_local() if isinstance(g, DTensor) else g for g in gradients], found_inf, inv_scale)
    for group in (*holders.axes, *([] if holders.stages is None else [holders.stages])):
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)


def _on_parts(func: Any, *values: list[Tensor], **options: Any) -> None:
    """Update what this rank holds, element by element, where all of it is laid out alike; to find that out anew takes
    DTensor longer than to update what is small.
    """
    specs = ([each._spec for each in one if isinstance(each, DTensor)] for one in zip(*values[:4], strict=True))
    if all(len(one) in (0, 4) and all(spec is one[0] or spec == one[0] for spec in one) for one in specs):
        values = tuple([each._local_tensor if isinstance(each, DTensor) else each for each in one] for one in values)
    func(*values, **options)


_NORMS = (torch.linalg.vector_norm, torch.norm, Tensor.norm)
_ASKED = {
    **dict.fromkeys(_NORMS, _norm),
    torch._foreach_norm: _norm_of_each,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
}
"""What is asked of all holders."""

Gradient.special = {**_ASKED, torch._fused_adam_: _on_parts, torch._fused_adamw_: _on_parts}
_Norm.special = {Tensor.to: _moved, torch.stack: _stacked}
_Norms.special = {**dict.fromkeys(_NORMS, _norm_of_all), Tensor.to: _moved}


def know_each_other(parameters: Iterable[nn.Parameter], held_before: Iterable[Tensor], holders: Holders) -> None:
    """Let gradients of these parameters know who holds others.

    Args:
        parameters: those of a module, with DTensors.
        held_before: those among them that an earlier rank of the pipeline holds too.
    """
    repeated = {id(parameter) for parameter in held_before}
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                partial(_know, holders=holders, counts=id(parameter) not in repeated)
            )


def is_hooked(parameter: Tensor) -> bool:
    """Whether anything but :func:`know_each_other` waits for a parameter's gradient."""
    after = (parameter._post_accumulate_grad_hooks or {}).values()
    return bool(parameter._backward_hooks) or any(getattr(hook, "func", None) is not _know for hook in after)


def _know(parameter: Tensor, holders: Holders, counts: bool) -> None:
    """Autograd hands over a plain DTensor, and adds to what is there in place."""
    if type(parameter.grad) is DTensor:
        in_file = InFile if holders.axes or holders.stages is not None else OwnInFile
        parameter.grad = (Gradient if holders.disk is None else in_file).of(parameter.grad, holders, counts)
