"""Runs any torch optimizer that steps each parameter by itself over the parameters of a parallel module.

A rank's optimizer sees this rank's parts of parameters. That is right if the update of a part is the part of the
update, which is not asked of the optimizer's name but of what it does (:func:`is_elementwise`). Others step parts by
norms of the whole, and say so (:mod:`autopar.runtime.optim.norms`); or whole parameters, at one of the ranks that hold
their parts (:mod:`autopar.runtime.optim.owners`).
"""

from __future__ import annotations

import contextlib
import difflib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.host.disk import OffloadFiles
from autopar.runtime.host.error_notes import first_line
from autopar.runtime.host.pages import READ
from autopar.runtime.optim.master_weights import class_with_masters
from autopar.runtime.optim.optimizer_probe import FAILURES, SCALES, at_a_rate, name_of
from autopar.runtime.optim.owners import Owned, with_owners
from autopar.runtime.optim.parts import local
from planner.base import host
from planner.base.errors import InfeasibleError, InputError
from planner.base.formatting import in_all_bytes

Groups = Sequence[Mapping[str, Any]]
"""Each has ``params``, a pattern of names or several (``*`` and ``?`` allowed), and options of its own."""

FUSED: tuple[Any, ...] = (torch.optim.Adam, torch.optim.AdamW)
"""Those whose fused kernels take DTensors, on CPUs and GPUs; torch has no sharding rule for the kernels of others."""
FUSED_ON = ("cpu", "cuda")
CHOSEN = frozenset({"fused", "foreach", "differentiable"})
"""Options that say how to step."""
SIZE = 256
"""Rows and columns of the matrix that is tried: some optimizers go by elements where it is smaller."""


def make_optimizer(
    make: Callable[..., Any],
    parameters: Mapping[str, nn.Parameter],
    names: Mapping[str, str],
    in_slabs: Mapping[str, str],
    is_apart: bool,
    groups: Groups,
    options: Mapping[str, Any],
    master_dtype: torch.dtype | None = None,
    owned: Callable[[], Sequence[Owned]] = tuple,
) -> Any:
    """An optimizer over a rank's parameters; see :meth:`autopar.runtime.module.ParallelModule.optimizer`.

    Args:
        parameters: those of this rank by their first names, parts in DTensors.
        names: every name of a parameter of the whole model -> its first name.
        in_slabs: of every table that lies in a slab with others -> the slab's first name.
        is_apart: whether ranks hold different parts of parameters, or different parameters.
        master_dtype: of masters, if it is they that are stepped.
        owned: the owners of parameters, for an optimizer that steps whole ones; it raises where it has none.
    """
    if not callable(make):
        raise InputError(
            f"the optimizer is of type {type(make).__name__}: give its class, and its options beside it, e.g. "
            "pmodel.optimizer(torch.optim.AdamW, lr=1e-3)"
        )
    device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
    firsts = {**names, **in_slabs}
    numbers = _numbers(firsts, groups)
    _check_slabs(in_slabs, numbers)
    place: dict[str, int] = {}
    for name, number in numbers.items():
        place.setdefault(firsts[name], number)
    own: list[dict[str, Any]] = [
        {},
        *({key: value for key, value in group.items() if key != "params"} for group in groups),
    ]
    every = [{**options, **each} for each in own]
    stepping: Any = make
    cut = _owned(make, every, device, owned, in_slabs) if is_apart else ()
    if master_dtype is not None:
        stepping = class_with_masters(make, master_dtype, parameters, every, device)
    if cut:
        stepping = with_owners(stepping, cut)
    grouped: list[dict[str, Any]] = [{**each, "params": []} for each in own]
    for name, parameter in parameters.items():
        grouped[place.get(name, 0)]["params"].append(parameter)
    takes_fused = device.type in FUSED_ON and not any(parameter.is_complex() for parameter in parameters.values())
    if make in FUSED and takes_fused and not any(CHOSEN & each.keys() for each in (options, *own)):
        options = {**options, "fused": True}
    made = stepping(grouped, **options)
    for option in {key for each in own for key in each} - made.defaults.keys():
        raise InputError(f"groups: {name_of(make)} has no option {option!r}; {_close(option, sorted(made.defaults))}")
    return made


def _owned(
    make: Callable[..., Any],
    options: Sequence[Mapping[str, Any]],
    device: torch.device,
    owned: Callable[[], Sequence[Owned]],
    in_slabs: Mapping[str, str],
) -> Sequence[Owned]:
    """The owners of parameters, if an optimizer is to step whole ones; else none.

    Args:
        options: of each group, with those of all.

    Raises:
        InputError: it does not step each parameter by itself; or it would step tables that lie in a slab as one.
    """
    by_norms = getattr(make, "takes_parts", False)
    if not by_norms and all(is_elementwise(make, each, device) for each in options):
        return ()
    if in_slabs:
        table, slab = next(iter(in_slabs.items()))
        raise InputError(
            f"{name_of(make)} goes by whole parameters, and embedding tables lie in slabs with others, such as "
            f"{table!r} in {slab!r}: plan with pin 'tables' 'none', or take an optimizer that updates every element by "
            "itself (AdamW, SGD ...)"
        )
    if by_norms:
        return ()
    for each in options:
        check_by_itself(make, each, device)
    cut = owned()
    if cut and not (isinstance(make, type) and issubclass(make, torch.optim.Optimizer)):
        raise InputError(
            f"{name_of(make)} is not elementwise, so that it must step whole parameters, which stand in the groups and "
            "the state of a torch.optim.Optimizer; it is no subclass: give one, and its options beside it"
        )
    return cut


def expect_state(optimizer: torch.optim.Optimizer, planned: int) -> None:
    """Warn after the first step if the state takes more bytes per element of the parameters than were planned, owners'
    of whole parameters included; with it count the bytes by which a gradient in a wider dtype exceeds its parameter.
    """
    looked = False

    def look(stepped: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal looked
        if looked:
            return
        elements = found = 0
        for parameter in (each for group in stepped.param_groups for each in group["params"] if each.grad is not None):
            values = [local(value) for value in stepped.state[parameter].values() if isinstance(value, Tensor)]
            elements += local(parameter).numel()
            found += sum(value.nbytes for value in values if value.numel() > 1)
            found += local(parameter.grad).nbytes - local(parameter).nbytes
        looked = elements > 0
        if found > planned * elements:
            needed = math.ceil(found / elements)
            warnings.warn(
                f"the optimizer's state takes {needed} bytes per element of the parameters, and the plan counts "
                f"{planned}: {in_all_bytes(found - planned * elements)} more on this rank than planned. Plan with "
                f"optimizer_bytes_per_element={needed}",
                stacklevel=2,
            )

    optimizer.register_step_post_hook(look)


def _numbers(names: Iterable[str], groups: Groups) -> dict[str, int]:
    """The number of the first group, from 1, that takes each name of a parameter, if one does; lowest numbers first.

    Raises:
        InputError: a group without patterns, or a pattern without parameters.
    """
    found: dict[str, int] = {}
    for number, group in enumerate(groups, 1):
        given = group.get("params")
        patterns = [given] if isinstance(given, str) else given
        if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
            raise InputError(
                f"groups[{number - 1}] has params of type {type(given).__name__}: give patterns of parameters' names, "
                "e.g. {'params': ['*.bias', '*norm*'], 'weight_decay': 0.0}; groups of parameters themselves go to "
                "the optimizer's class"
            )
        for pattern in patterns:
            taken = [name for name in names if fnmatchcase(name, pattern)]
            if not taken:
                raise InputError(f"groups[{number - 1}]: no parameter matches {pattern!r}; {_close(pattern, [*names])}")
            for name in taken:
                found.setdefault(name, number)
    return found


def _check_slabs(in_slabs: Mapping[str, str], numbers: Mapping[str, int]) -> None:
    """Refuse groups that part tables of one slab, which is one parameter."""
    known: dict[str, tuple[int, str]] = {}
    for name, slab in in_slabs.items():
        own = numbers.get(name, 0)
        number, other = known.setdefault(slab, (own, name))
        if number != own:
            where = (f"groups[{each - 1}]" if each else "none" for each in (number, own))
            raise InputError(
                f"groups part embedding tables that lie in one slab ({slab}): {other!r} is in {next(where)}, and "
                f"{name!r} in {next(where)}: put all of them into one, or plan with pin 'tables' 'none' for some"
            )


def _close(given: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(given, names, n=3, cutoff=0.4)
    return f"{'close' if near else 'there'} are: {', '.join(map(repr, near or names[:3]))}"


def is_elementwise(make: Callable[..., Any], options: Mapping[str, Any], device: torch.device) -> bool:
    """Whether an optimizer updates the parts of a matrix as it updates the matrix.

    Tried in three steps in float64 on a matrix and its halves, by rows and by columns, each with an optimizer of its
    own, as ranks have.

    Args:
        options: what the optimizer is made with; with a rate of 0 nothing would be seen, so another one is taken.
        device: where the parameters are.

    Raises:
        InputError: it does not step from gradients alone.
    """
    values, *gradients = _drawn((SIZE, SIZE), device)
    [whole] = _stepped(make, options, [values], [[each] for each in gradients])
    for dim in (0, 1):
        parts = zip(*(each.chunk(2, dim) for each in (values, *gradients)), strict=True)
        joined = torch.cat([_stepped(make, options, [part], [[g] for g in own])[0] for part, *own in parts], dim)
        if not _agree(joined, whole):
            return False
    return True


def check_by_itself(make: Callable[..., Any], options: Mapping[str, Any], device: torch.device) -> None:
    """Raise :class:`InputError` unless an optimizer updates each of two matrices as if there were no other.

    Arguments as of :func:`is_elementwise`.
    """
    tensors = [*zip(*(_drawn(shape, device) for shape in ((SIZE, SIZE // 2), (SIZE // 4, SIZE))), strict=True)]
    together = _stepped(make, options, tensors[0], tensors[1:])
    for number, at_once in enumerate(together):
        [alone] = _stepped(make, options, [tensors[0][number]], [[each[number]] for each in tensors[1:]])
        if not _agree(alone, at_once):
            raise InputError(
                f"{name_of(make)} is neither elementwise, nor does it update each parameter by itself: one of two "
                f"matrices becomes another one alone than beside the other (by up to "
                f"{(alone - at_once).abs().max().item():.1g}). {WAY_OUT}"
            )


def _drawn(shape: tuple[int, int], device: torch.device) -> list[Tensor]:
    """A parameter, and its gradients in some steps."""
    generator = torch.Generator().manual_seed(shape[0])
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(device) * scale for scale in (1.0, *SCALES)]


def _agree(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def _stepped(
    make: Callable[..., Any],
    options: Mapping[str, Any],
    values: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    """Parameters after steps with these gradients, from one state of the random numbers."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    device = values[0].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        optimizer = make(parameters, **at_a_rate(options))
        for of_step in gradients:
            for parameter, gradient in zip(parameters, of_step, strict=True):
                parameter.grad = gradient.clone()
            try:
                optimizer.step()
            except FAILURES as error:
                raise InputError(
                    f"{name_of(make)} does not step from gradients alone ({first_line(error)}). {WAY_OUT}"
                ) from error
    return [parameter.detach() for parameter in parameters]


WAY_OUT = (
    "Ranks of this plan hold different parameters, or parts of them: take an optimizer that updates every element by "
    "itself (AdamW, SGD, RMSprop, Adagrad ...) or every parameter (Muon, Adafactor, autopar.Lamb ...), or a plan that "
    "shards no parameter (pin={'zero': 0})"
)


# ---- state on disk ---------------------------------------------------------------------------------------------------


class StateKeeper:
    """Moves an optimizer's state that lies as its parameter to files, after each step that made some.

    An optimizer makes its state in its first step, in memory of the host. So that step is made for one parameter after
    another, which is the same where each is updated by itself; what groups of parameters keep goes on once.
    """

    def __init__(self, disk: OffloadFiles):
        self._disk = disk
        self._kept: dict[tuple[Tensor, str], Tensor] = {}
        self._begun: set[Tensor] = set()
        self._done: dict[Tensor, Tensor | None] = {}

    def watch(self, optimizer: Any) -> None:
        """Move the state after each step.

        Raises:
            InputError: it does not say when it has stepped.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(
                f"the plan keeps optimizer state on disk, and {type(optimizer).__name__} is no torch.optim.Optimizer, "
                "which say when they have stepped: take one, or a plan with pin={'offload': 'host'}"
            )
        optimizer.register_step_pre_hook(self._ask)
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._stepped)

    def _ask(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before a step: have the system bring all that it uses, where the host's memory has room for that.

        Raises:
            DiskError: it cannot; nothing is updated yet.
        """
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        read = [
            local(each)
            for p in stepped
            for each in (p, p.grad, *optimizer.state.get(p, {}).values())
            if isinstance(each, Tensor)
        ]
        if sum(each.nbytes for each in read) <= host.memory_bytes() // 2:
            self._disk.ask(read, READ)

    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Before the first step of parameters: make it for all without state but one, which is left to it."""
        if len(args) > 1 or kwargs:  # a closure makes gradients of its own
            return
        grads = {p: p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        new = [parameter for parameter in grads if parameter not in self._begun]
        self._begun.update(new)
        first = [parameter for parameter in new if not optimizer.state.get(parameter)][1:]
        if not first:
            return
        for parameter in grads:
            parameter.grad = None
        try:
            for parameter in first:
                options = [dict(group) for group in optimizer.param_groups]
                parameter.grad = grads[parameter]
                with contextlib.suppress(InfeasibleError):  # what has no room is moved, or refused, after the last one
                    optimizer.step()
                parameter.grad = None
                for group, before in zip(optimizer.param_groups, options, strict=True):
                    group.update(before)
        finally:
            for parameter, grad in grads.items():
                parameter.grad = grad
        for parameter in first:
            self._done[parameter], parameter.grad = parameter.grad, None

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter, grad in self._done.items():
            parameter.grad = grad
        self._done = {}
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, DTensor) and self._kept.get((parameter, key)) is not value._local_tensor:
                    kept = self._moved(parameter, key, value._local_tensor)
                    optimizer.state[parameter][key] = DTensor(kept, value._spec, requires_grad=False)

    def _moved(self, parameter: Tensor, key: str, value: Tensor) -> Tensor:
        kept = self._disk.memory(value.nbytes, f"optimizer state {key!r}").view(value.dtype).view(value.shape)
        self._kept[parameter, key] = kept.copy_(value)
        return kept
