"""While a model is captured, ``Function.apply`` calls a custom operator, so that the graph keeps it whole.

A graph holds the forward of what is traced; training would derive that. So every Function that is applied with
gradients is recorded as an operator (:mod:`autopar.functions.carry`), one for each choice of its arguments that are no
tensors.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from autopar.functions.carry import APPLIED, APPLY, Carried, apply
from autopar.functions.declared import DECLARED
from autopar.functions.outside import belonging
from autopar.functions.static import Hole, code
from autopar.graph.module_walk import ModuleWalk
from planner.base.errors import CaptureError

Applied = dict[tuple[object, ...], Carried]
"""The Functions that a model applies while it is captured, by what they are called with."""


class _Instead:
    def apply(cls, *args, **kwargs):  # type: ignore[no-untyped-def]
        __class__  # type: ignore[name-defined]  # noqa: B018  # of as many free variables as what it stands for
        from autopar.functions.applying import called

        return called(cls, args, kwargs)  # type: ignore[arg-type]


@contextlib.contextmanager
def carrying(model: nn.Module, walk: ModuleWalk, applied: Applied) -> Iterator[None]:
    """While inside, calls of Functions are recorded as operators; ``applied`` is given them, and owns them.

    Those that torch brings are its own concern, and what runs under ``no_grad`` needs no backward, unless it was
    declared. Without dropout, in eval mode, gradients are asked for as well.
    ``apply`` gets other code, since models hold on to it (``gelu = GeLU.apply``), where no assignment reaches.
    """
    token, before = APPLIED.set(applied), APPLY.__code__
    APPLY.__code__ = _Instead.__dict__["apply"].__code__
    try:
        with belonging(model, walk):
            yield
    finally:
        APPLY.__code__ = before
        APPLIED.reset(token)


def called(cls: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``cls.apply(*args, **kwargs)`` in a model that is captured."""
    tensors = [arg for arg in pytree.tree_leaves((args, kwargs)) if isinstance(arg, Tensor)]
    if cls is CheckpointFunction:
        return _checkpointed(*args)
    trains = torch.is_grad_enabled() and any(t.is_floating_point() for t in tensors)
    if cls.__module__.startswith(("torch.", "autopar.")) or not tensors or not (trains or cls in DECLARED):
        return apply(cls, *args, **kwargs)
    bound = list(args)
    if kwargs or cls.setup_context is not Function.setup_context:
        found = inspect.signature(cls.forward).bind(*args, **kwargs)
        found.apply_defaults()
        bound = list(found.args)
    if len(tensors) != sum(isinstance(arg, Tensor) for arg in bound):
        raise CaptureError(
            f"{cls.__module__}.{cls.__qualname__} is given tensors in a list or the like, to which autograd passes no "
            "gradient: pass each as an argument of its own"
        )
    places = itertools.count()
    template = [Hole(next(places)) if isinstance(arg, Tensor) else arg for arg in bound]
    applied = APPLIED.get()
    assert applied is not None, "a model is captured"
    key = (cls, *map(code, template))
    if key not in applied:
        applied[key] = Carried(cls, template)
    carried = applied[key]
    return carried.nested(carried.op(*(arg for arg in bound if isinstance(arg, Tensor))))


def _checkpointed(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """What reentrant ``torch.utils.checkpoint`` gives: the plan decides itself what to recompute.

    It runs its part under ``no_grad`` and again in backward, so a graph of it would have no gradients. Its own have
    them where one of its arguments has; otherwise, as in the original, its parameters are not trained.
    """
    trains = torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    with torch.set_grad_enabled(trains):
        return run(*args)
