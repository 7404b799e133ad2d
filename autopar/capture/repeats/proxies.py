"""Proxies that stand for tensors and modules while a repeated submodule is traced.

The code holds the model's own parameters and buffers, and tokens for values that need not be computed; the functions
that it calls are given fake tensors that the tracer knows, and what they give is translated back, so that code cannot
tell one from the other.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from autopar.capture.repeats.markers import LEAF, VALUE, Copied, NotFoldable, mark, node_of, track
from autopar.graph.tensor_metadata import FACTS, HISTORY
from autopar.graph.tensors import storage_of

_SET_GRAD = torch._C._set_grad_enabled
_BLANK = torch.empty(0, device="meta")


def translated(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A value with its tensors replaced, in tuples, lists, dicts and slices."""
    if isinstance(value, Tensor):
        return function(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(translated(v, function) for v in value)
    if kind is dict:
        return {name: translated(v, function) for name, v in value.items()}
    if kind is slice:
        return slice(*(translated(v, function) for v in (value.start, value.stop, value.step)))
    if isinstance(value, tuple) and kind.__module__ == "torch.return_types":
        return kind([translated(v, function) for v in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(translated(v, function) for v in value))
    return value


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and any(map(_has_tensor, value)))


class Proxies:
    """Both sides of every tensor that has two, while a model is traced by ``tracer``, which has ``held``.

    Attributes:
        tensors: parameters and buffers of the model that were used, by the number in their mark.
        memory: what these, as traced, lie in.
        copies: tensors without a history that stand for results of a call.
        again: the last mark of calls like earlier ones.
        through: whether functions are called as they are.
    """

    def __init__(self, held: Iterable[Tensor], tracer: Any):
        self.tracer = tracer
        self.tensors: list[Tensor] = []
        self.memory: set[int] = set()
        self.copies: list[Tensor] = []
        self.again: fx.Node | None = None
        self.through = False
        context = TracingContext.try_get()
        assert context is not None and context.fake_mode is not None, "models are traced on fake tensors"
        self._fake_mode = context.fake_mode
        self._held = {id(tensor): tensor for tensor in held}
        self._real: dict[int, Tensor] = {}
        self._shown: dict[int, Tensor] = {}
        self._unread: dict[int, Copied] = {}
        self._size = 0
        self._nodes: dict[int, tuple[Tensor, fx.Node | None]] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a function gives, for the model's code.

        Raises:
            NotFoldable: it may tell a result of a call from what stands for it.
        """
        result = func(*translated(args, self.real), **translated(kwargs, self.real))
        if self.copies and func is not _SET_GRAD and (func in HISTORY or not (func in FACTS or _has_tensor(result))):
            raise NotFoldable(f"{getattr(func, '__qualname__', func)} may ask where a tensor comes from")
        return translated(result, self.shown)

    def real(self, tensor: Tensor) -> Tensor:
        """What is traced for a tensor that the code holds; from now on a node computes it."""
        if id(tensor) in self._real:
            return self._real[id(tensor)]
        if id(tensor) in self._held:
            return self._lift(tensor)
        if id(tensor) in self._unread:
            copied = self._unread.pop(id(tensor))
            track(self.tracer, tensor, mark(self.tracer, VALUE, (copied.call, copied.value), tensor))
        return tensor

    def shown(self, tensor: Tensor) -> Tensor:
        """What the code holds of a tensor that is traced."""
        return self._shown.get(id(tensor), tensor)

    def traced(self, tensor: Tensor) -> tuple[Tensor, fx.Node | Copied | None]:
        """What is traced for a tensor that the code holds, and what computes it, if that is known."""
        real = self.unread(tensor)
        return real, self._unread.get(id(tensor)) or self._node_of(real)

    def _node_of(self, real: Tensor) -> fx.Node | None:
        """The node that computes a tensor, looked up once for as long as the graph does not grow."""
        size = len(self.tracer.graph.nodes)
        if size != self._size:
            self._size, self._nodes = size, {}
        if id(real) not in self._nodes:
            self._nodes[id(real)] = real, node_of(self.tracer, real)
        return self._nodes[id(real)][1]

    def unread(self, tensor: Tensor) -> Tensor:
        """What is traced for a tensor that the code holds; nothing reads it yet."""
        return tensor if id(tensor) in self._unread else self.real(tensor)

    def copy(self, tensor: Tensor, copied: Copied) -> None:
        """``tensor`` stands for a result of a call; no node computes it before something traced reads it."""
        self.copies.append(tensor)
        self._unread[id(tensor)] = copied

    def is_rebound(self, tensor: Tensor) -> bool:
        """Whether another node than its own stands for a parameter by now: ``w.to(w.dtype)`` is ``w`` itself."""
        real = self._real.get(id(tensor))
        return real is not None and getattr(node_of(self.tracer, real), "target", None) is not LEAF

    def is_token(self, tensor: Tensor) -> bool:
        """Whether a tensor is a token that stands for a real one."""
        return id(tensor) in self._real and id(tensor) not in self._held

    def token(self, device: torch.device) -> Tensor:
        """Stands for a value that is not computed: a fake tensor as others, of which only the device may be asked."""
        token: Any = torch.Tensor._make_subclass(FakeTensor, _BLANK)
        token.fake_mode, token.fake_device = self._fake_mode, device
        return token

    def is_marked(self, token: Tensor) -> bool:
        """Whether code has put an attribute on a token."""
        return len(vars(token)) > 2

    def pair(self, token: Tensor, real: Tensor) -> None:
        """From now on ``token`` stands for ``real``."""
        if self.shown(real) is not real and self.shown(real) is not token:
            raise NotFoldable("one tensor came out where two did before")
        self._real[id(token)], self._shown[id(real)] = real, token

    def release(self, tokens: list[Tensor]) -> list[Tensor]:
        """For each token that ``tokens`` alone holds the real tensor, which needs none from now on; else itself."""
        found = []
        for at in range(len(tokens)):
            real = self._real.pop(id(tokens[at]))
            del self._shown[id(real)]
            held = sys.getrefcount(tokens[at]) > 2 or self.is_marked(tokens[at])
            if held:
                self.pair(tokens[at], real)
            found.append(tokens[at] if held else real)
        return found

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Call functions as they are, but traced, inside ``DisableTorchFunction``."""
        self.through = True
        try:
            with torch._C._EnableTorchFunction():
                yield
        finally:
            self.through = False

    def _lift(self, tensor: Tensor) -> Tensor:
        """A parameter or buffer as export has them: fake, and known to the tracer."""
        with torch._C.DisableTorchFunction(), disable_proxy_modes_tracing():
            fake = self._fake_mode.from_tensor(tensor, static_shapes=True)
            self.memory.add(storage_of(fake))
        node = mark(self.tracer, LEAF, (len(self.tensors),), fake)
        track(self.tracer, fake, node)
        self.tensors.append(tensor)
        self._real[id(tensor)], self._shown[id(fake)] = fake, tensor
        return fake
