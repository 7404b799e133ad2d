"""One optimizer for all members: a parameter group for each, of rows of the stacked parameters."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.arrays.member_rows import MemberRows, members_of
from autopar.arrays.member_state import MemberState
from autopar.runtime.module import ParallelModule
from autopar.runtime.optim.optimizer import CHOSEN, is_elementwise
from autopar.runtime.optim.parts import evaluated, local
from planner.base.errors import InputError
from planner.formulation.constraints.labels import RUNNING_MODELS


def member_optimizer(
    make: type[torch.optim.Optimizer],
    array: nn.Module,
    members: int,
    vary: Mapping[str, Sequence[Any]],
    options: Mapping[str, Any],
    parallel: ParallelModule | None,
) -> torch.optim.Optimizer:
    """See :meth:`autopar.arrays.model_array.ModelArray.optimizer`."""
    if not (isinstance(make, type) and issubclass(make, torch.optim.Optimizer)):
        raise InputError(f"an array's optimizer is made of a class, such as torch.optim.AdamW, not of {make!r}")
    own = _options(make, members, vary, options)
    module = array if parallel is None else parallel
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if parallel is not None:
        _check_parallel(make, parallel, own)
    rows = {name: MemberRows(each, members_of(parallel, name, members)) for name, each in trained.items()}
    of_members = {m: [each.of[m] for each in rows.values() if m in each.of] for m in range(members)}
    groups = {member: {**own[member], "params": held} for member, held in of_members.items() if held}
    takes_fused = "fused" in inspect.signature(make).parameters and not CHOSEN & options.keys()

    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        for each in rows.values():
            each.stacked.grad = None
        make.zero_grad(self, set_to_none)

    asked_by_scaler = property(_refuse_scaler, lambda self, value: None)
    own_parts = {"zero_grad": zero_grad, "_step_supports_amp_scaling": asked_by_scaler, "__doc__": make.__doc__}
    kind = type(make.__name__, (make,), own_parts)
    made = kind([*groups.values()], **{**own[0], **({"fused": True} if takes_fused else {})})

    def follow(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else options.get("closure")
        loss = evaluated(closure)  # which makes the gradients
        runs = array.get_buffer(RUNNING_MODELS).tolist()
        for each in rows.values():
            each.follow(runs)
        return None if closure is None else ((optimizer, lambda: loss), {})

    made.register_step_pre_hook(follow)
    made.as_saved = MemberState(made, array, parallel, rows, [*groups])
    return made


def _refuse_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """What a GradScaler asks for before it steps; it would look for gradients of rows, which get them in the step."""
    raise InputError(
        "an array's optimizer does not step under a GradScaler, whose one scale would skip steps of all members where "
        "one overflows: train in bfloat16, which needs no scaler, and call optimizer.step()"
    )


def _options(
    make: type[torch.optim.Optimizer], members: int, vary: Mapping[str, Sequence[Any]], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Hyper-parameters of every member; raises :class:`InputError` where the class does not take them."""
    name_of = make.__name__
    known = [name for name in inspect.signature(make).parameters if name != "params"]
    for name in (*vary, *options):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            raise InputError(
                f"{'vary: ' if name in vary else ''}{name_of} has no hyper-parameter {name!r}; "
                f"{'close' if near else 'there'} are: {', '.join(near or known)}"
            )
    twice = sorted(vary.keys() & options.keys())
    if twice:
        raise InputError(
            f"vary has a {twice[0]!r} for each member, and {twice[0]}={options[twice[0]]!r} is given for all: leave "
            "one out"
        )
    found = [{**options, **{name: values[member] for name, values in vary.items()}} for member in range(members)]
    for member, own in enumerate(found):
        try:
            make([torch.zeros(1, requires_grad=True)], **own)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{name_of} does not take the hyper-parameters of member {member}, {own}: {error}"
            ) from error
    try:
        make([{"params": [torch.zeros(1, requires_grad=True)]} for _ in range(2)], **found[0])
    except ValueError as error:
        raise InputError(
            f"{name_of} steps all parameters as one and takes no groups of them ({error}), and members need one each: "
            "take an optimizer with groups (AdamW, SGD ...), or train members one after another"
        ) from error
    return found


def _check_parallel(
    make: type[torch.optim.Optimizer], parallel: ParallelModule, own: Sequence[Mapping[str, Any]]
) -> None:
    if parallel.offload is not None:
        raise InputError(
            "the plan moves parameters between tiers, and rows of them are stepped where they lie: plan the array with "
            "pin={'offload': 'none'}"
        )
    cut = [name for name in parallel.stored if _is_cut_inside(parallel, name)]
    if cut and not all(is_elementwise(make, each, parallel.get_parameter(cut[0]).device) for each in own):
        raise InputError(
            f"{make.__name__} does not update every element by itself, and ranks hold parts of each member's "
            f"{cut[0]!r}: take an optimizer that does (AdamW, SGD ...), or a plan that shards members alone "
            "(pin={'model': ...})"
        )


def _is_cut_inside(parallel: ParallelModule, name: str) -> bool:
    """Whether ranks hold parts of a member's tensor."""
    leaf = parallel.stored[name]
    return leaf.kind == "param" and local(parallel.get_parameter(name)).shape[1:] != leaf.shape[1:]
