"""Whole-parameter updates: each parameter is gathered on one of the ranks that hold its parts, which steps it whole.

Muon orthogonalises a matrix, Adafactor takes the means of its rows and columns: what such an optimizer makes of a part
is not the part of what it makes of the whole. So every parameter that is cut has an *owner*. A step sends parts of
parameters and gradients to their owners, in one all-to-all for all that is cut over the same ranks, has the optimizer's
own class step whole tensors there, and sends parts back in another. State stays with the owner, whole.

``state_dict()`` lays state out as parameters, so that checkpoints know nothing of owners.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from autopar.runtime.optim.parts import evaluated, holders_of, is_cut, like, local
from autopar.runtime.optim.stand_ins import hooks_hidden, standing_in, step_of
from autopar.runtime.spmd.mesh import as_dtensor, contiguous_strides, coordinates, part_of, put_part, whole_of
from planner.analysis.whole_parameters import owners, shard_axes
from planner.base.errors import InputError
from planner.ir.layout import Layout, Mesh


@dataclass(frozen=True, eq=False)
class Owned:
    """A parameter that is cut, and who steps it.

    Attributes:
        holders: the ranks that together hold it; ``members``: these in the mesh, in the group's order.
        owner, place: of these ranks, the one that steps it, and this one.
    """

    parameter: DTensor
    layout: Layout
    mesh: Mesh
    holders: ProcessGroup
    members: tuple[int, ...]
    owner: int
    place: int

    @property
    def is_mine(self) -> bool:
        """Whether this rank steps it."""
        return self.owner == self.place

    @property
    def device(self) -> torch.device:
        """Where its holders send from."""
        return torch.device(self.parameter.device_mesh.device_type)

    def part_of(self, whole: Tensor, place: int) -> Tensor:
        """What the rank at a place holds of a tensor that lies as the parameter."""
        return part_of(whole, self.layout, self.mesh, self.members[place])

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """A tensor from its parts, in the order of places."""
        whole = parts[0].new_empty(self.parameter.shape)
        for member, part in zip(self.members, parts, strict=True):
            put_part(whole, part, self.layout, self.mesh, member)
        return whole


def owned(parameters: Sequence[DTensor], layouts: Sequence[Layout], mesh: Mesh, rank: int) -> list[Owned]:
    """Those parameters that are cut, with their owners, which all ranks of a stage find alike.

    Args:
        layouts: of each parameter.
        mesh: of the ranks of the stage; ``rank`` is this one.
    """
    places = owners([(each.numel(), layout) for each, layout in zip(parameters, layouts, strict=True)], mesh)
    found = []
    here = coordinates(mesh, rank)
    for parameter, layout, owner in zip(parameters, layouts, places, strict=True):
        if not is_cut(parameter):
            continue
        whole = [axis for axis in range(len(layout)) if axis not in shard_axes(layout)]
        members = tuple(
            other for other in range(mesh.size) if all(coordinates(mesh, other)[axis] == here[axis] for axis in whole)
        )
        found.append(Owned(parameter, layout, mesh, holders_of(parameter), members, owner, members.index(rank)))
    return found


class Owning(torch.optim.Optimizer):
    """What :func:`with_owners` puts before an optimizer's class.

    Attributes:
        cut: the parameters that have owners. What all ranks hold whole, all of them step.
    """

    cut: ClassVar[Sequence[Owned]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Have owners step whole parameters; every rank of a stage must call it."""
        loss = evaluated(closure)
        given = {p for group in self.param_groups for p in group["params"] if p.grad is not None}
        cut = [each for each in self.cut if each.parameter in given]
        self._leave_state_to_owners()
        stand_ins = {p: _alias(p) for p in given.difference(each.parameter for each in cut)}
        stand_ins.update(_gathered(cut))
        for parameter, stand_in in stand_ins.items():
            if parameter in self.state:
                self.state[stand_in] = self.state.pop(parameter)
        try:
            with hooks_hidden(self), standing_in(self, stand_ins):
                step_of(self, super().step)
        finally:
            for parameter, stand_in in stand_ins.items():
                if stand_in in self.state:
                    self.state[parameter] = self.state.pop(stand_in)
        _sent_back(cut, stand_ins)
        increment_version(given)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with state in the layout of its parameter; every rank of a stage must call it.

        State of another shape than its parameter's is on every rank whole.
        """
        with self._laid_out():
            found: dict[str, Any] = super().state_dict()
            return found

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, of parameters that the optimizer was made for.

        Raises:
            InputError: ranks hold parts of one that has no owner.
        """
        super().add_param_group(param_group)
        known = {each.parameter for each in self.cut}
        for parameter in self.param_groups[-1]["params"]:
            if is_cut(parameter) and parameter not in known:
                raise InputError(
                    f"a parameter of shape {tuple(parameter.shape)} is added to an optimizer that steps whole "
                    "parameters and was made without it, so that no rank owns it: make another one for all"
                )

    @contextmanager
    def _laid_out(self) -> Iterator[None]:
        before = dict(self.state)
        try:
            self._leave_state_to_owners()
            for each in self.cut:
                state = _laid_out(each, self.state.get(each.parameter, {}))
                if state:
                    self.state[each.parameter] = state
            yield
        finally:
            self.state.clear()
            self.state.update(before)

    def _leave_state_to_owners(self) -> None:
        """Put together what was loaded as parts, or begun with them; only owners keep it."""
        for each in self.cut:
            state = self.state.pop(each.parameter, {})
            whole = {key: whole_of(value) if isinstance(value, DTensor) else value for key, value in state.items()}
            if whole and each.is_mine:
                self.state[each.parameter] = whole


def with_owners(make: type[Any], cut: Sequence[Owned]) -> type[Any]:
    """An optimizer's class that steps whole parameters at their owners; it is a subclass."""
    return type(f"{make.__name__}WithOwners", (Owning, make), {"cut": tuple(cut)})


# ---- what is sent ----------------------------------------------------------------------------------------------------


def _alias(parameter: Tensor) -> Tensor:
    """What this rank holds, which is all of it, with its gradient."""
    alias, gradient = local(parameter).detach(), local(parameter.grad)
    alias.grad_dtype, alias.grad = gradient.dtype, gradient
    return alias


def _gathered(cut: Sequence[Owned]) -> dict[Tensor, Tensor]:
    """The parameters that this rank owns, whole, with their gradients."""
    found: dict[Tensor, Tensor] = {}
    for alike in _sent_together(cut):
        values = {each: local(each.parameter) for each in alike}
        gradients = {each: local(each.parameter.grad) for each in alike}
        first = alike[0]
        at_once = values[first].dtype == gradients[first].dtype
        sent = [[values, gradients]] if at_once else [[values], [gradients]]
        wholes, of_gradients = itertools.chain.from_iterable(_at_owners(alike, tensors) for tensors in sent)
        for each, whole in wholes.items():
            found[each.parameter] = whole
            whole.grad_dtype, whole.grad = gradients[each].dtype, of_gradients[each]
    return found


def _at_owners(alike: Sequence[Owned], tensors: Sequence[Mapping[Owned, Tensor]]) -> list[dict[Owned, Tensor]]:
    """Tensors that lie as parameters, whole, of what this rank owns; they are of one dtype, and sent at once."""
    places = range(len(alike[0].members))
    sent = [[of[each] for each in alike if each.owner == place for of in tensors] for place in places]
    received = _exchanged(alike[0].holders, sent, [sent[alike[0].place]] * len(places))
    parts = zip(*received, strict=True)
    found: list[dict[Owned, Tensor]] = [{} for _ in tensors]
    for each in (each for each in alike if each.is_mine):
        for whole in found:
            whole[each] = each.joined(next(parts))
    return found


def _sent_back(cut: Sequence[Owned], wholes: Mapping[Tensor, Tensor]) -> None:
    """Give all ranks their parts of what owners have."""
    for alike in _sent_together(cut):
        places = range(len(alike[0].members))
        mine = [each for each in alike if each.is_mine]
        theirs = [[local(each.parameter) for each in alike if each.owner == place] for place in places]
        received = _exchanged(
            alike[0].holders,
            [[each.part_of(wholes[each.parameter], place) for each in mine] for place in places],
            theirs,
        )
        for parts, values in zip(theirs, received, strict=True):
            for part, value in zip(parts, values, strict=True):
                part.copy_(value)


def _sent_together(cut: Sequence[Owned]) -> list[list[Owned]]:
    """Parameters that the same ranks hold, of one dtype, and of one dtype of gradients."""
    found: dict[object, list[Owned]] = {}
    for each in cut:
        found.setdefault((each.members, each.parameter.dtype, local(each.parameter.grad).dtype), []).append(each)
    return [*found.values()]


def _exchanged(
    group: ProcessGroup, sent: Sequence[Sequence[Tensor]], like: Sequence[Sequence[Tensor]]
) -> list[list[Tensor]]:
    """What each rank of a group has for this one, given what this one has for each, in one all-to-all.

    Args:
        like: tensors of the shapes of what each rank sends.
    """
    some = next(itertools.chain(*sent, *like))
    into = torch.cat([*(tensor.reshape(-1) for tensors in sent for tensor in tensors), some.new_empty(0)])
    lengths = [[sum(tensor.numel() for tensor in tensors) for tensors in way] for way in (sent, like)]
    out = some.new_empty(sum(lengths[1]))
    dist.all_to_all_single(out, into, lengths[1], lengths[0], group=group)
    return [
        [flat.view(tensor.shape) for flat, tensor in zip(one.split([t.numel() for t in form]), form, strict=True)]
        for one, form in zip(out.split(lengths[1]), like, strict=True)
    ]


@dataclass(frozen=True)
class _StateForm:
    """What is known of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def _laid_out(each: Owned, state: Mapping[str, Any]) -> dict[str, Any]:
    """State of a parameter, which its owner has, on all ranks that hold the parameter."""
    source = dist.get_global_rank(each.holders, each.owner)
    sent: list[Any] = [
        {
            key: _StateForm(tuple(value.shape), value.dtype, value.device.type) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }
    ]
    dist.broadcast_object_list(sent, source, each.holders, each.device)
    found: dict[str, Any] = {}
    for key, form in sent[0].items():
        if not isinstance(form, _StateForm):
            found[key] = form
            continue
        whole = torch.empty(form.shape, dtype=form.dtype, device=each.device)
        if each.is_mine:
            whole.copy_(state[key])
        dist.broadcast(whole, source, each.holders)
        if form.shape == each.parameter.shape:
            found[key] = like(each.parameter, each.part_of(whole, each.place).to(form.device))
        else:
            mesh = each.parameter.device_mesh
            everywhere, strides = [Replicate()] * mesh.ndim, contiguous_strides(form.shape)
            found[key] = as_dtensor(whole.to(form.device), mesh, everywhere, form.shape, strides)
    return found
