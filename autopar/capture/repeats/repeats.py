"""Traces submodules that occur several times once, and replays the trace for their further calls.

Submodules of one structure (classes, names, shapes, ties) are *nominated* (:mod:`autopar.capture.repeats.candidates`);
whether two calls are the same is then found out, not guessed, by running the code of each
(:mod:`autopar.capture.repeats.replay`). So all that Python decides on (configuration, layer numbers, hooks, counters,
caches, masks) is decided in the order of the model.

Export, whose time grows with the number of parameters and modules, sees neither: it is given an opaque module that
calls the model. The model itself is left as it is: its code may look at all of its modules and parameters, and a
parameter enters the graph when a function first uses it (:mod:`autopar.capture.repeats.proxies`). What this cannot
follow (writes in place, tensors left on modules, a layer that sets autocast) raises
:class:`autopar.capture.repeats.markers.NotFoldable`, and the model is captured as a whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import _AttrProxy, get_proxy_mode
from torch.overrides import TorchFunctionMode

from autopar.capture.repeats.candidates import Submodule
from autopar.capture.repeats.markers import Copied, NotFoldable
from autopar.capture.repeats.proxies import Proxies
from autopar.capture.repeats.replay import Record, RepeatedCall
from autopar.graph.module_walk import ModuleWalk

_ROOT = "_export_root"
"""What export calls the module that it was given."""


@dataclass(frozen=True)
class Occurrence:
    """One call of a nominated submodule.

    Attributes:
        submodule: what was called.
        path: the module path of the nodes that it made, or would have made.
        like: number of the call whose nodes stand for this one's; its own if it was traced.
        copied: its inputs, by place, that are values of calls like earlier ones and have no nodes.
        follows: whether the mark of the call before is its mark as well.
    """

    submodule: Submodule
    path: str
    like: int
    copied: Mapping[int, Copied]
    follows: bool


class Repeats(TorchFunctionMode):
    """The nominated submodules of a model, and what became of their calls in its export.

    Args:
        groups: of nominated submodules of equal structure.

    Attributes:
        walk: over the model.
        occurrences: every call, by number.
    """

    def __init__(self, walk: ModuleWalk, groups: Sequence[Sequence[Submodule]]):
        super().__init__()
        self.walk = walk
        self._nominated = {id(s.modules[0]): (s, group) for group, found in enumerate(groups) for s in found}
        self._records: list[list[Record]] = [[] for _ in groups]
        self._proxies: Proxies | None = None
        self._call: RepeatedCall | None = None
        self.occurrences: list[Occurrence] = []

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters and buffers that were used, by the number in their mark."""
        return [] if self._proxies is None else self._proxies.tensors

    @property
    def names(self) -> list[str]:
        """Their names in the model."""
        name_of = {id(tensor): name for name, tensor in (*self.walk.parameters, *self.walk.buffers)}
        return [name_of[id(tensor)] for tensor in self.tensors]

    @property
    def copies(self) -> list[Tensor]:
        """What calls returned that were not traced."""
        return [] if self._proxies is None else self._proxies.copies

    @property
    def tensors_held(self) -> list[Tensor]:
        """Parameters and buffers of the model."""
        return [tensor for _, tensor in (*self.walk.parameters, *self.walk.buffers)]

    def opaque(self) -> nn.Module:
        """A module that calls the model, to be exported in its place, once."""
        return _Opaque(self.walk.model, functools.partial(self._run))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        mode = get_proxy_mode()
        assert mode is not None, "an opaque module is called only while it is exported"
        tracer: Any = mode.tracer
        with torch._C.DisableTorchFunction():
            proxies = self._proxies = Proxies(self.tensors_held, tracer)
            called = _show_modules(tracer, self.walk)
        tracer.call_module = functools.partial(self._module_called, tracer.call_module)
        with self:
            result = called(*args, **kwargs)
        return pytree.tree_map_only(Tensor, proxies.real, result)

    def _module_called(
        self,
        call_module: Callable[..., Any],
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        base: Any = module
        if isinstance(module, _AttrProxy):  # which code sees where a model holds a module twice
            base = base.get_base()
        if self._call is None:
            found = self._nominated.get(id(base))
            if found is not None:
                forward = functools.partial(self._submodule_called, *found, forward)
        elif self._call.following is not None and self._call.has_path(module):
            return self._call.module_called(module, forward, args, kwargs)
        return call_module(module, forward, args, kwargs)

    def _submodule_called(
        self, submodule: Submodule, group: int, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        assert self._proxies is not None
        number = len(self.occurrences)
        with torch._C.DisableTorchFunction():
            call = RepeatedCall(self._proxies, number, submodule, self._records[group], args, kwargs)
        self._call = call
        try:
            call.result = forward(*args, **kwargs)
        except Exception as error:
            raise NotFoldable(f"{call.path} raises {type(error).__name__}") from error
        finally:
            self._call = None
        with torch._C.DisableTorchFunction():
            result = call.finish()
        self.occurrences.append(Occurrence(submodule, call.path, call.like, call.copied, call.follows))
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert self._proxies is not None
        kwargs = kwargs or {}
        if self._proxies.through:
            return func(*args, **kwargs)
        if self._call is not None:
            return self._call.called(func, args, kwargs)
        return self._proxies.call(func, args, kwargs)


class _Opaque(nn.Module):
    """Calls a model whose parameters and modules are not its own."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]):
        super().__init__()
        self.training = model.training
        self.forward = functools.wraps(model.forward)(run)


def _show_modules(tracer: Any, walk: ModuleWalk) -> Any:
    """Tell the tracer the model's modules by name, as it would have found them; what to call in the model's place."""
    for name, module in walk.named_modules:
        path = f"{_ROOT}.{name}" if name else _ROOT
        if module in tracer.submodule_paths:
            tracer.enable_attr_proxy = True
        else:
            tracer.submodule_paths[module] = path
        tracer.module_id_cache[id(module)].append(path)
    return tracer.getattr(_ROOT, walk.model, {})
