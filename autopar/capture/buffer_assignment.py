"""Turns assignments to buffers (``self.mean = ...``) into writes in place.

Export follows tensors that are written in place. One that takes the place of a buffer is dropped, without a word where
an inner module does it, and the model would run on with the old value for ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from autopar.graph.module_walk import ModuleWalk
from planner.base.errors import CaptureError

Place = tuple[str, nn.Module, str]
"""The module's name, the module, and the name of one of its buffers."""


def buffers(walk: ModuleWalk) -> dict[Place, Tensor]:
    """Every buffer that a model holds."""
    return {
        (path, module, name): buffer
        for path, module in walk.modules
        if module._buffers
        for name, buffer in module._buffers.items()
        if buffer is not None
    }


def assigned(before: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
    """Those of :func:`buffers` that another object has replaced since."""
    return {place: old for place, old in before.items() if _now(place) is not old}


@contextlib.contextmanager
def written_in_place(model: nn.Module) -> Iterator[None]:
    """While inside, a call of ``model`` ends with every buffer in place, holding what was assigned to it.

    Raises:
        CaptureError: at the end of the call: a buffer cannot hold what was assigned; names it.
    """
    before: dict[Place, Tensor] = {}

    def remember(*_: Any) -> None:
        before.update(buffers(ModuleWalk(model)))

    def write(*_: Any) -> None:
        changed = assigned(before)
        others = {id(old): place for place, old in before.items() if place not in changed}
        values = {place: _value(place, old, others.get(id(old))) for place, old in changed.items()}
        for (_path, module, name), old in changed.items():
            module._buffers[name] = old
            old.copy_(values[_path, module, name])

    hooks = [model.register_forward_pre_hook(remember), model.register_forward_hook(write)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _now(place: Place) -> Any:
    _, module, name = place
    return module._buffers.get(name, vars(module).get(name))


def _value(place: Place, old: Tensor, other: Place | None) -> Tensor:
    """A copy of what was assigned in the place of ``old``, which ``other`` holds as well."""
    path, module, name = place
    new = _now(place)
    fits = isinstance(new, Tensor) and (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device)
    if fits and other is None:
        return new.detach().clone()
    if other is not None:
        why = f"buffer {_full(other)!r}, the same tensor, keeps its old value"
    else:
        given = f"{_kind(new)}" if isinstance(new, Tensor) else f"a {type(new).__name__}"
        why = f"it is {_kind(old)}, and would become {given}"
    raise CaptureError(
        f"the forward of module {path or '(root)'} ({type(module).__name__}) assigns to its buffer {name!r}, and "
        f"{why}. A plan needs a buffer to stay what it is: write to it in place (self.{name}.copy_(...)), or make it "
        "as large as it is going to be before planning"
    )


def _full(place: Place) -> str:
    path, _, name = place
    return f"{path}.{name}" if path else name


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
