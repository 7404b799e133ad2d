"""Master weights: float32 copies that an optimizer steps in place of parameters of low precision.

A parameter in bfloat16 keeps eight bits: an update that is small beside it is lost. So an optimizer of such parameters
steps *masters*, the same values in a wider dtype, by gradients cast to it and with its state in it, and each parameter
becomes the rounding of its own. Masters are state of the optimizer, under :data:`MASTER`; each lies as its parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from autopar.runtime.host.error_notes import first_line
from autopar.runtime.optim.optimizer_probe import FAILURES, SCALES, name_of
from autopar.runtime.optim.parts import evaluated, like, local
from autopar.runtime.optim.stand_ins import hooks_hidden, standing_in, step_of
from planner.base.errors import InputError

MASTER = "master"
PIECE_BYTES = {"cpu": 16 * 2**20, "cuda": 64 * 2**20}
"""So much of the gradients is cast at once, by kind of device, where an optimizer may step one parameter after another;
of a larger parameter, all. The host's caches hold that much, and a GPU is not told too little at once."""
SCALED = ("grad_scale", "found_inf")
"""What the step over masters has seen to, so that the class does not do it again with each piece."""


class Stepping(torch.optim.Optimizer):
    """What :func:`with_masters` puts before an optimizer's class.

    While the class steps, masters stand in the groups and in the state in place of their parameters. Otherwise nothing
    but :data:`MASTER` in the state tells that there are any.

    Attributes:
        dtype: of masters. A parameter of this dtype is its own.
        piece_bytes: how much of the gradients is cast at once; ``None``: all.
    """

    dtype: ClassVar[torch.dtype]
    piece_bytes: ClassVar[int | None]
    _step_supports_amp_scaling = True  # GradScaler leaves gradients to step(): in float16 it would not unscale them

    def __init__(self, params: Any, **options: Any):
        super().__init__(params, **options)
        if self.state:  # some begin with it, in the dtype of what they are given: of masters it is right
            given = [parameter for group in self.param_groups for parameter in group["params"]]
            masters = {parameter: self._master(parameter) for parameter in given if parameter.dtype != self.dtype}
            with standing_in(self, {**{parameter: parameter for parameter in given}, **masters}):
                begun = type(self).__bases__[1]([dict(group) for group in self.param_groups], **options)
            for parameter, master in masters.items():
                self.state[parameter] = {**begun.state[master], MASTER: master}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters of all parameters that have gradients, and round them into the parameters.

        ``torch.amp.GradScaler`` says by attributes whether gradients are scaled still, and whether they overflowed.
        """
        loss = evaluated(closure)
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return loss
        factor = None if scale is None else scale.double().reciprocal().item()
        given = [
            parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        masters = {parameter: self._master(parameter) for parameter in given if parameter.dtype != self.dtype}
        _begin_anew(masters, _outdated_on_gpu)
        most = None if self.piece_bytes is None else self.piece_bytes // self.dtype.itemsize
        begun, room = [dict(group) for group in self.param_groups], _Room()
        with hooks_hidden(self, SCALED):
            for piece in _pieces(given, most):
                for group, options in zip(self.param_groups, begun, strict=True):
                    group.clear()  # so that what a group counts goes on once a step
                    group.update(options)
                own = {parameter: masters[parameter] for parameter in piece if parameter in masters}
                _begin_anew(own, _outdated_on_host)  # here, while they are in caches
                _give_gradients(own, self.dtype, room)
                stepped = {**{parameter: parameter for parameter in piece}, **own}
                if factor is not None:
                    torch._foreach_mul_([local(each.grad) for each in stepped.values()], factor)
                self._step_piece(stepped, own)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which casts state to the dtype of its parameter: here to that of masters."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        stand_ins = {
            parameter: torch.empty(0, dtype=self.dtype, device=parameter.device)
            for parameter in parameters
            if parameter.dtype != self.dtype
        }
        with standing_in(self, {**{parameter: parameter for parameter in parameters}, **stand_ins}):
            super().load_state_dict(state_dict)
        for parameter, stand_in in stand_ins.items():
            if stand_in in self.state:
                self.state[parameter] = self.state.pop(stand_in)

    # ---- one step ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _master(self, parameter: Tensor) -> Tensor:
        known = self.state.get(parameter, {}).get(MASTER)
        if known is not None:
            return known
        return like(parameter, local(parameter).to(self.dtype, memory_format=torch.contiguous_format))

    def _step_piece(self, stepped: Mapping[Tensor, Tensor], masters: Mapping[Tensor, Tensor]) -> None:
        """Step some parameters, and no others.

        Args:
            stepped: what is stepped in place of each, be it itself.
            masters: those among them.
        """
        for parameter, master in masters.items():
            state = self.state.pop(parameter, {})
            state.pop(MASTER, None)
            if state:
                self.state[master] = state
        try:
            with standing_in(self, stepped):
                step_of(self, super().step)
        finally:
            for parameter, master in masters.items():
                master.grad = None
                self.state[parameter] = {**self.state.pop(master, {}), MASTER: master}
        if masters:
            torch._foreach_copy_([local(each) for each in masters], [local(each) for each in masters.values()])
            increment_version(masters)


def _pieces(tensors: Sequence[Tensor], most: int | None) -> list[list[Tensor]]:
    """Tensors some at a time: together of at most so many elements, unless one has more; ``None``: all at once."""
    if most is None:
        return [list(tensors)]
    found: list[list[Tensor]] = []
    left = 0
    for tensor in tensors:
        size = local(tensor).numel()
        if not found or size > left:
            found.append([])
            left = most
        found[-1].append(tensor)
        left -= size
    return found


class _Room:
    """Memory for what is needed of one piece after another."""

    def __init__(self) -> None:
        self._memory: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def take(self, device: torch.device, dtype: torch.dtype, size: int) -> Tensor:
        """So many elements; those that were taken before are gone."""
        memory = self._memory.get((device, dtype))
        if memory is None or memory.numel() < size:
            memory = self._memory[device, dtype] = torch.empty(size, dtype=dtype, device=device)
        return memory[:size]


def _cut(memory: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = memory.split([each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]


def _give_gradients(masters: Mapping[Tensor, Tensor], dtype: torch.dtype, room: _Room) -> None:
    """Give masters the gradients of their parameters."""
    for device in {master.device for master in masters.values()}:
        own = [parameter for parameter, master in masters.items() if master.device == device]
        narrow = [local(parameter.grad) for parameter in own]
        wide = _cut(room.take(device, dtype, sum(each.numel() for each in narrow)), narrow)
        torch._foreach_copy_(wide, narrow)
        for parameter, part in zip(own, wide, strict=True):
            masters[parameter].grad = like(parameter, part)


# ---- parameters that were changed ------------------------------------------------------------------------------------


Parts = Mapping[Tensor, Tensor]
"""Parts of parameters, by those of their masters."""


def _begin_anew(masters: Mapping[Tensor, Tensor], outdated: Callable[[Parts], list[Tensor]]) -> None:
    """Elements that are not the rounding of their master were changed since the last step (loaded, clamped ...): their
    masters begin anew.
    """
    parts = {local(master): local(parameter) for parameter, master in masters.items()}
    for master in outdated(parts):
        part = parts[master]
        torch.where(master.to(part.dtype) == part, master, part, out=master)


def _outdated_on_host(parts: Parts) -> list[Tensor]:
    """The masters in the host's memory of which an element was changed."""
    return [m for m, part in parts.items() if not m.is_cuda and not _are_equal(m.to(part.dtype), part)]


def _outdated_on_gpu(parts: Parts) -> list[Tensor]:
    """The masters on a GPU of which an element was changed, and some beside them; the host waits once."""
    found: list[Tensor] = []
    on_gpu = [master for master in parts if master.is_cuda]
    for form in {(master.device, parts[master].dtype) for master in on_gpu}:
        alike = [master for master in on_gpu if (master.device, parts[master].dtype) == form]
        pieces, room = _pieces(alike, PIECE_BYTES["cuda"] // form[1].itemsize), _Room()
        differ = []
        for piece in pieces:
            memory = room.take(*form, sum(master.numel() for master in piece))
            rounded = _cut(memory, piece)
            torch._foreach_copy_(rounded, piece)
            torch._foreach_sub_(rounded, [parts[master] for master in piece])
            differ.append(memory.any())
        answers = torch.stack(differ).tolist()
        found += [master for piece, differs in zip(pieces, answers, strict=True) if differs for master in piece]
    return found


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Of tensors on the host, where low precision is slow: eight bytes at a time, if they can be taken so."""
    if all(each.is_contiguous() and not (each.nbytes | each.data_ptr()) % 8 for each in (one, other)):
        return torch.equal(*(each.view(-1).view(torch.int64) for each in (one, other)))
    return torch.equal(one, other)


# ---- making one ------------------------------------------------------------------------------------------------------


def with_masters(make: type[Any], dtype: torch.dtype, piece_bytes: int | None) -> type[Any]:
    """An optimizer's class that steps masters; it is a subclass.

    Args:
        dtype: of masters.
        piece_bytes: how much of the gradients is cast at once; ``None``: all, of an optimizer that cannot step some
            parameters before others.
    """
    return type(f"{make.__name__}WithMasters", (Stepping, make), {"dtype": dtype, "piece_bytes": piece_bytes})


def class_with_masters(
    make: object,
    dtype: object,
    parameters: Mapping[str, Tensor],
    options: Sequence[Mapping[str, Any]],
    device: torch.device,
) -> type[Any]:
    """:func:`with_masters` for these parameters, in pieces if that makes no difference.

    Args:
        options: of each group, with those of all.
        device: where the parameters are.

    Raises:
        InputError: masters of the dtype do not hold every value of the parameters; or the optimizer is of another
            form than torch's, or does not step from gradients alone.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise InputError(f"master_dtype is {dtype!r}: give a floating-point dtype, e.g. torch.float32")
    for name, parameter in parameters.items():
        if torch.promote_types(parameter.dtype, dtype) != dtype:
            raise InputError(
                f"master_dtype is {dtype}, and {name} is in {parameter.dtype}, whose values it does not hold: give a "
                "wider one, or convert the model before it is planned (model.bfloat16())"
            )
    if not (isinstance(make, type) and issubclass(make, torch.optim.Optimizer)):
        raise InputError(
            f"master_dtype is given, and {name_of(make)} is no subclass of "
            "torch.optim.Optimizer, in whose groups and state masters stand: give one, and its options beside it"
        )
    apart = all(_goes_apart(make, each) for each in options)
    return with_masters(make, dtype, PIECE_BYTES.get(device.type, PIECE_BYTES["cpu"]) if apart else None)


def _goes_apart(make: type[Any], options: Mapping[str, Any]) -> bool:
    """Whether an optimizer steps parameters, one after another, as it steps them at once: tried on two."""
    try:
        return all(map(torch.equal, *(_tried(with_masters(make, torch.float64, size), options) for size in (0, None))))
    except FAILURES as error:
        raise InputError(
            f"{name_of(make)} does not step from gradients alone ({first_line(error)}), and masters have "
            "nothing else: take another optimizer, or leave master_dtype out"
        ) from error


def _tried(make: type[Any], options: Mapping[str, Any]) -> list[Tensor]:
    """The masters of two parameters after three steps."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 6), (3, 5))]
    optimizer = make(parameters, **options)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        for scale in SCALES:
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
            optimizer.step()
    return [optimizer.state[parameter][MASTER] for parameter in parameters]
