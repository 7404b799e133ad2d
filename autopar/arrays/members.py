"""Models of one structure: compared, and their tensors stacked along a leading dim of members."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.arrays.settings import ABSENT, differences, parts
from planner.base.errors import InputError


def check_alike(members: Sequence[nn.Module]) -> None:
    """Refuse models that are not of one structure, or that hold one tensor together.

    Raises:
        InputError: names the member, the module or the tensor in which it differs from member 0, and both sides.
    """
    first = members[0]
    owners: dict[int, tuple[int, str]] = {}
    for number, member in enumerate(members):
        _check_modules(first, number, member)
        for kind, tensors in (("parameter", nn.Module.named_parameters), ("buffer", nn.Module.named_buffers)):
            _check_tensors(kind, number, dict(tensors(first, remove_duplicate=False)), member, tensors)
        for name, tensor in _tensors(member):
            owner, other = owners.setdefault(id(tensor), (number, name))
            if owner != number:
                raise InputError(
                    f"members {owner} and {number} hold one tensor together ({other}), and each member of an array "
                    "trains its own: give models of their own (copy.deepcopy), or one model and how many are wanted"
                )


_NAMED = {"._parameters", "._buffers", "._modules"}
"""Parts of modules that are compared by their names."""


def _tensors(member: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from member.named_parameters(remove_duplicate=False)
    yield from member.named_buffers(remove_duplicate=False)


def _check_modules(first: nn.Module, number: int, member: nn.Module) -> None:
    ours, theirs = (dict(each.named_modules(remove_duplicate=False)) for each in (first, member))
    if ours.keys() != theirs.keys():
        name = next(iter(sorted(ours.keys() ^ theirs.keys())))
        raise InputError(f"members 0 and {number} are not of one structure: one of them alone has a module {name!r}")
    met = {(id(each), id(theirs[name])) for name, each in ours.items()}
    tensors = dict(_tensors(member))
    met |= {(id(each), id(tensors.get(name))) for name, each in _tensors(first)}
    for name, module in ours.items():
        other, where = theirs[name], f"module {name or '(root)'} of member {number}"
        if type(module) is not type(other):
            raise InputError(f"{where} is a {type(other).__name__}, and that of member 0 a {type(module).__name__}")
        mine, others = parts(module), parts(other)
        for part in (each for each in {**mine, **others} if each not in _NAMED):
            for path, value, found in differences(part[1:], mine.get(part, ABSENT), others.get(part, ABSENT), met):
                has = f"no {path}" if found is ABSENT else f"{path} {found!r}"
                raise InputError(
                    f"{where} has {has}, and that of member 0 has {value!r}: all members run one program, and differ "
                    "in the values of parameters and buffers and in hyper-parameters of the optimizer (vary=)"
                )


def _check_tensors(
    kind: str, number: int, ours: Mapping[str, Tensor], member: nn.Module, tensors: Callable[..., Any]
) -> None:
    theirs = dict(tensors(member, remove_duplicate=False))
    if ours.keys() != theirs.keys():
        name = next(iter(sorted(ours.keys() ^ theirs.keys())))
        raise InputError(f"members 0 and {number} are not of one structure: one of them alone has a {kind} {name!r}")
    for name, tensor in ours.items():
        other = theirs[name]
        for what in ("shape", "dtype", "device", "requires_grad"):
            mine, found = getattr(tensor, what), getattr(other, what)
            if mine != found:
                shown = (tuple(found), tuple(mine)) if what == "shape" else (found, mine)
                raise InputError(
                    f"{kind} {name} of member {number} has {what} {shown[0]}, and that of member 0 has {shown[1]}: "
                    "members of an array are alike in all but values"
                )
    if _ties(ours) != _ties(theirs):
        raise InputError(f"members 0 and {number} tie different {kind}s to one another")


def _ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Every name -> the first name of the same tensor."""
    firsts: dict[int, str] = {}
    return {name: firsts.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def with_tensors(model: nn.Module, tensor: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A copy of a model with other tensors, each made of its name and the one in whose place it is; ties stay."""
    made: dict[int, Any] = {}
    for path, module in model.named_modules():
        for name, like in (*module._parameters.items(), *module._buffers.items()):
            if like is not None and id(like) not in made:
                value = tensor(f"{path}.{name}" if path else name, like)
                is_parameter = name in module._parameters
                made[id(like)] = nn.Parameter(value, like.requires_grad) if is_parameter else value
    return copy.deepcopy(model, made)


class MemberTensors(nn.Module):
    """Holds the stacked tensors of a module of every member, under the names that they have there."""

    def extra_repr(self) -> str:
        """Names and shapes."""
        tensors = {**self._parameters, **self._buffers}
        return ", ".join(f"{name} {[*each.shape]}" for name, each in tensors.items() if each is not None)


def stack(members: Sequence[nn.Module], root: nn.Module) -> frozenset[str]:
    """Put the members' tensors, stacked, into ``root``, under the names of the originals.

    Parameters, and buffers that may become different ones. Buffers that are the same in all members, such as tables of
    positions and masks, are held once: those that are not saved, and whole numbers of one dim or more.

    Returns:
        The names of buffers that are held once.
    """
    made: dict[int, Any] = {}
    shared: set[str] = set()
    _fill(members, root, "", made, shared)
    return frozenset(shared)


def _fill(members: Sequence[nn.Module], holder: nn.Module, path: str, made: dict[int, Any], shared: set[str]) -> None:
    first = members[0]
    holder.training = first.training
    for name, parameter in first._parameters.items():
        if parameter is not None and id(parameter) not in made:
            rows = torch.stack([_own(member._parameters[name]).detach() for member in members])
            made[id(parameter)] = nn.Parameter(rows, parameter.requires_grad)
        holder.register_parameter(name, None if parameter is None else made[id(parameter)])
    for name, buffer in first._buffers.items():
        saved = name not in first._non_persistent_buffers_set
        each = [_own(member._buffers[name]) for member in members] if buffer is not None else []
        once = buffer is not None and _held_once(each, saved)
        if once:
            shared.add(path + name)
        if buffer is not None and id(buffer) not in made:
            made[id(buffer)] = each[0].clone() if once else torch.stack(each)
        holder.register_buffer(name, None if buffer is None else made[id(buffer)], persistent=saved)
    for name, module in first._modules.items():
        if module is None:
            holder.register_module(name, None)
        elif id(module) in made:
            holder.register_module(name, made[id(module)])
        else:
            made[id(module)] = inside = MemberTensors()
            holder.register_module(name, inside)
            _fill([_own(member._modules[name]) for member in members], inside, f"{path}{name}.", made, shared)


def _held_once(each: Sequence[Tensor], saved: bool) -> bool:
    first = each[0]
    may_differ = saved and (first.is_floating_point() or first.is_complex() or not first.ndim)
    return not may_differ and (first.is_meta or all(torch.equal(first, other) for other in each[1:]))


def _own(value: Any) -> Any:
    assert value is not None
    return value
