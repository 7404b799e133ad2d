"""What a subclass of an optimizer's class needs that has it step other tensors in place of its parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@contextmanager
def standing_in(optimizer: torch.optim.Optimizer, stand_ins: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Groups have these in place of their parameters, and none of the others."""
    before = [group["params"] for group in optimizer.param_groups]
    for group, parameters in zip(optimizer.param_groups, before, strict=True):
        group["params"] = [stand_ins[each] for each in parameters if each in stand_ins]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"] = parameters


@contextmanager
def hooks_hidden(optimizer: Any, others: tuple[str, ...] = ()) -> Iterator[None]:
    """The class sees no hooks of steps, which have run, nor other attributes of the optimizer."""
    own = {name: optimizer.__dict__.pop(name) for name in (*HOOKS, *others) if name in optimizer.__dict__}
    for name in HOOKS:
        setattr(optimizer, name, OrderedDict())
    try:
        yield
    finally:
        optimizer.__dict__.update(own)


def step_of(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
    """The step of a class above, without what torch puts around it where that class itself was made too."""
    of_class: Any = step
    if getattr(of_class, "hooked", False):
        of_class.__wrapped__(optimizer)
    else:
        of_class()
