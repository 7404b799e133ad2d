"""``autopar.array``: from a model, or several of one structure, to one module that trains all of them at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.arrays.members import check_alike
from autopar.arrays.model_array import ModelArray
from autopar.capture.capture import LossFn, accepted_names
from planner.base.errors import InputError
from planner.formulation.constraints.labels import RUNNING_MODELS


def array(
    models: nn.Module | Sequence[nn.Module] | Callable[[], nn.Module],
    n: int | None = None,
    *,
    vary: Mapping[str, Sequence[Any]] | None = None,
    loss_fn: LossFn | None = None,
    own_inputs: Iterable[str] = (),
    seed: int = 0,
) -> ModelArray:
    """Train ``n`` models of one structure as one: their parameters are stacked, and one program computes all of them.

    Each member is trained as it would be by itself, to rounding. Dropout draws other masks for each.

    Args:
        models: a model, from whose values all members start; a list of models; or a function that makes one, called for
            each member with torch's random numbers seeded with ``seed``, ``seed + 1`` and so on.
        n: how many members; of a list, as many as it has, and may be left out.
        vary: hyper-parameters of the optimizer with a value for each member, e.g. ``{"lr": [1e-3, 1e-4]}``.
        loss_fn: ``loss_fn(outputs, batch)`` of one member, where models do not return their loss; the array is then
            called with keywords, the names of the batch, and members return their losses.
        own_inputs: names of inputs of which each member has its own, in a leading dim of members. Of all others all
            members see the same.
        seed: of a function's first member.

    Raises:
        InputError: members are not of one structure, or hold tensors together; ``n``, a list of ``vary`` or a name of
            ``own_inputs`` does not fit.
    """
    varied = dict(vary or {})
    members = _members(models, n, varied, seed)
    check_alike(members)
    _check_vary(varied, len(members))
    own = frozenset([own_inputs] if isinstance(own_inputs, str) else own_inputs)
    unknown = own - accepted_names(members[0])
    if unknown and loss_fn is None:
        raise InputError(
            f"own_inputs: {type(members[0]).__name__}.forward has no input {min(unknown)!r}; it has "
            f"{', '.join(sorted(accepted_names(members[0])))}"
        )
    if hasattr(members[0], RUNNING_MODELS):
        raise InputError(f"{type(members[0]).__name__} has a {RUNNING_MODELS!r}, and so has an array: rename it")
    return ModelArray(members, varied, loss_fn, own)


def _members(models: Any, n: int | None, vary: Mapping[str, Sequence[Any]], seed: int) -> list[nn.Module]:
    if isinstance(models, Sequence):
        wrong = next((each for each in models if not isinstance(each, nn.Module)), None)
        if not models or wrong is not None:
            raise InputError(f"a list of models holds torch.nn.Modules, at least one, not {wrong!r}")
        if n is not None and n != len(models):
            raise InputError(f"the list has {len(models)} models, and n is {n}: leave n out, or give as many")
        return list(models)
    if n is None and vary:
        n = len(next(iter(vary.values())))
    if not isinstance(n, int) or n < 1:
        raise InputError(f"n is {n!r}: give how many members the array has, at least 1")
    if isinstance(models, nn.Module):
        return [models, *(copy.deepcopy(models) for _ in range(n - 1))]
    if not callable(models):
        raise InputError(f"autopar.array takes a model, a list of models or a function that makes one, not {models!r}")
    members = []
    with torch.random.fork_rng():
        for member in range(n):
            torch.manual_seed(seed + member)
            made = models()
            if not isinstance(made, nn.Module):
                raise InputError(f"models makes {made!r}, which is no torch.nn.Module: return the model of one member")
            members.append(made)
    return members


def _check_vary(vary: Mapping[str, Sequence[Any]], members: int) -> None:
    for name, values in vary.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise InputError(f"vary[{name!r}] is {values!r}: give a list of {members} values, one a member")
        if len(values) != members:
            raise InputError(
                f"vary[{name!r}] has {len(values)} values, and the array has {members} members: give one for each"
            )
