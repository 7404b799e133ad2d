"""Makes a custom operator, forward and backward, of one call of a ``torch.autograd.Function``.

A captured graph calls the operator where the model applies the Function (:mod:`autopar.functions.applying`), and the
emitted program calls the same one on local tensors. It applies the Function: its own forward, context and backward.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Function
from torch.utils._python_dispatch import _disable_current_modes

from autopar.functions.declared import Declared, declared_of
from autopar.functions.outside import Watching
from autopar.functions.static import Hole, text
from autopar.graph.tensor_metadata import PLAIN
from planner.base.errors import CaptureError, InputError

NAMESPACE = "autopar_function"

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_NUMBERS = itertools.count()
APPLY = Function.__dict__["apply"].__func__
"""The function behind every ``cls.apply``."""
apply: Callable[..., Any] = types.FunctionType(
    APPLY.__code__, APPLY.__globals__, "apply", APPLY.__defaults__, APPLY.__closure__
)
"""``apply(cls, *args)`` is ``cls.apply(*args)``, whatever ``APPLY`` does by now."""
APPLIED: ContextVar[dict[tuple[object, ...], Carried] | None] = ContextVar("APPLIED", default=None)
"""While a model is captured, the Functions that it applies (:mod:`autopar.functions.applying`)."""


class _Nothing(Function):
    """What a Function gives for tensors without data, with gradients of the right shapes."""

    @staticmethod
    def forward(ctx: Any, carried: Carried, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        results, trained = carried.shapes(tensors)
        ctx.mark_non_differentiable(*(r for r, is_trained in zip(results, trained, strict=True) if not is_trained))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.empty_like(t) if t.is_floating_point() else None for t in ctx.saved_tensors)


class Carried:
    """A Function with its arguments but for the tensors.

    It lives as long as something holds it: the captured model, or a program that calls its operator. The operator
    stays known to torch, and is not to be called any more.

    Attributes:
        cls: the Function.
        args: of a call, with a :class:`Hole` for every tensor.
        title: its name, without what it was defined in.
        tensors: how many it takes.
        op: the operator ``(tensors...) -> tensors``, which applies it; its name ends in a number of this process.
        spec: how what it returns is nested, and what of that is no tensor; known once it ran.
        described: what is known of it, by operands (:mod:`autopar.functions.describe`).
    """

    def __init__(self, cls: type[Function], args: Sequence[Any]):
        self.cls, self.args = cls, tuple(args)
        self.tensors = sum(isinstance(arg, Hole) for arg in args)
        self.spec: tuple[tuple[Any, ...], bool] | None = None
        self.described: dict[object, Any] = {}
        self._devices: list[torch.device] = []
        self.title = re.sub(r"\W", "_", cls.__qualname__.rpartition("<locals>.")[2])
        name = f"{self.title}__{next(_NUMBERS)}"
        _LIBRARY.define(f"{name}({', '.join(f'Tensor t{place}' for place in range(self.tensors))}) -> Tensor[]")
        _LIBRARY.impl(name, _weakly(self._with_gradients), "Autograd")
        _LIBRARY.impl(name, _weakly(self.run), "CompositeExplicitAutograd")
        _LIBRARY.impl(name, _weakly(self.run), "Meta")
        self.op: torch._ops.OpOverload[..., Any] = getattr(getattr(torch.ops, NAMESPACE), name).default
        _BY_OP[self.op] = self

    @property
    def declared(self) -> Declared | None:
        """What its dims mean, if anybody said."""
        return declared_of(self.cls)

    @property
    def name(self) -> str:
        """The Function's, for messages."""
        return f"{self.cls.__module__}.{self.cls.__qualname__}"

    def static(self, numbers: dict[int, int]) -> str:
        """Its arguments as text, the same in every process; ``numbers`` counts objects without a text of their own."""
        return f"({', '.join(text(arg, numbers) for arg in self.args)})"

    def apply(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the Function gives: its tensors in order."""
        args = [tensors[arg.place] if isinstance(arg, Hole) else arg for arg in self.args]
        with _AROUND.get() or contextlib.nullcontext():
            returned = apply(self.cls, *args)
        leaves = returned if isinstance(returned, tuple) else (returned,)
        for leaf in leaves:
            if not isinstance(leaf, Tensor) and type(leaf) not in PLAIN:
                raise CaptureError(
                    f"{self.name} returns a {type(leaf).__name__}: a plan carries tensors, numbers and text"
                )
        results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        places = itertools.count()
        self.spec = (
            tuple(Hole(next(places)) if isinstance(leaf, Tensor) else leaf for leaf in leaves),
            isinstance(returned, tuple),
        )
        return results

    def nested(self, results: Sequence[Tensor]) -> Any:
        """What the Function returned, for its tensors."""
        assert self.spec is not None, "it ran before it was called"
        leaves, several = self.spec
        found = tuple(results[leaf.place] if isinstance(leaf, Hole) else leaf for leaf in leaves)
        return found if several else found[0]

    def run(self, *tensors: Tensor) -> list[Tensor]:
        """The operator."""
        if any(t.is_meta or isinstance(t, FakeTensor) for t in tensors):
            return list(_Nothing.apply(self, *tensors))
        if any(hasattr(t, "_local_tensors") for t in tensors):
            from autopar.functions.ranks import EachRank  # simulations alone need it

            return list(EachRank.apply(self.apply, *tensors))
        return self.apply(tensors)

    def shapes(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[bool]]:
        """What it gives for tensors without data, and which of it has gradients.

        Raises:
            CaptureError: its forward does not run without data, writes into an argument, or has no result.
        """
        versions = [t._version for t in tensors]
        if self.declared is not None:
            results = self.declared.empty(self.name, tensors)
            if self.spec is None:
                self.spec = tuple(map(Hole, range(len(results)))), len(results) > 1
            return results, [r.is_floating_point() for r in results]
        # Code that makes tensors of its own makes them for the devices that it was captured for.
        if any(isinstance(t, FakeTensor) for t in tensors):
            self._devices = [t.device for t in tensors]
        elif any(device.type != "meta" for device in self._devices):
            with torch._C.DisableTorchFunction(), _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True):
                placed = zip(tensors, self._devices, strict=True)
                found, trained = self.shapes([torch.empty(t.shape, dtype=t.dtype, device=at) for t, at in placed])
            return [tensors[0].new_empty(t.shape, dtype=t.dtype) for t in found], trained
        try:
            alone = [t.detach() for t in tensors]
            with torch.no_grad(), Watching(self.name, tensors):
                found = self.apply(alone)
            if [t._version for t in tensors] == versions:
                with torch.enable_grad():
                    given = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
                    trained = [t.requires_grad for t in self.apply(given)]
        except (CaptureError, InputError):
            raise
        except Exception as error:
            raise CaptureError(
                f"{self.name}.forward does not run on tensors without data, so its results' shapes are unknown "
                f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]}). Say what they are: "
                f"autopar.register({self.cls.__qualname__}, 'b s h -> b s h') names the dims of its operands and "
                "results (docs/adding_an_op.md)"
            ) from error
        if [t._version for t in tensors] != versions:
            raise CaptureError(
                f"{self.name} writes into its argument in place (mark_dirty), which a plan cannot carry: let its "
                "forward work on a clone and return that"
            )
        if not found:
            raise CaptureError(f"{self.name} returns no tensor, so that nothing can be made of it")
        return [t.detach() for t in found], trained

    def __deepcopy__(self, _: object) -> Carried:
        """Itself: what calls its operator, and is copied, calls the same."""
        return self

    def _with_gradients(self, *tensors: Tensor) -> list[Tensor]:
        if is_recorded():
            with torch._C._AutoDispatchBelowAutograd():
                return self.op(*tensors)
        return self.run(*tensors)


def _weakly(method: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """A method that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def run(*tensors: Tensor) -> list[Tensor]:
        found = reference()
        assert found is not None, "whatever calls an operator holds its Function"
        return found(*tensors)

    return run


_BY_OP: weakref.WeakValueDictionary[Any, Carried] = weakref.WeakValueDictionary()
_AROUND: ContextVar[contextlib.AbstractContextManager[Any] | None] = ContextVar("_AROUND", default=None)


def carried_by(op: object) -> Carried | None:
    """The Function that an operator applies; ``None`` for other operators."""
    return _BY_OP.get(op)


def carried_in(graph: fx.Graph) -> tuple[Carried, ...]:
    """The Functions whose operators a graph calls."""
    found = (carried_by(node.target) for node in graph.nodes if node.op == "call_function")
    return tuple(dict.fromkeys(carried for carried in found if carried is not None))


@contextlib.contextmanager
def around(mode: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Inside, Functions run in ``mode``, a torch function mode, as they would if they were not operators."""
    token = _AROUND.set(mode)
    try:
        yield
    finally:
        _AROUND.reset(token)


def is_recorded() -> bool:
    """Whether a mode below autograd looks at operators."""
    return any(
        torch._C._get_dispatch_mode(key) is not None
        for key in (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL)
    )
