"""Makes a float64 twin of a model without dropout, so that errors stand out from rounding.

Usually the twin is captured like any model. Where the dtype decides what a model does (bfloat16 models cast to float32
and back, which is nothing in float64), the twin has other operators than the model; then the model's own graph is run
with its dtypes widened (:func:`widened`).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.functions.carry import around, carried_by
from autopar.operators.attention import attention
from planner.base.errors import VerificationError
from planner.ir.graph import Graph, Node
from planner.ops import drops

_WIDE = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    torch.complex64: torch.complex128,
}
_WIDE_NAMES = {str(narrow).removeprefix("torch."): str(wide).removeprefix("torch.") for narrow, wide in _WIDE.items()}
_CASTS = {
    torch.Tensor.float: torch.Tensor.double,
    torch.Tensor.half: torch.Tensor.double,
    torch.Tensor.bfloat16: torch.Tensor.double,
}
_RATES = {
    torch.nn.functional.scaled_dot_product_attention: (4, "dropout_p"),
    torch.ops.aten.scaled_dot_product_attention.default: (4, "dropout_p"),
    attention: (4, "dropout_p"),
    # The mode is off inside functions that it is told of, so the outermost one must be stopped.
    torch.nn.functional.multi_head_attention_forward: (
        list(inspect.signature(torch.nn.functional.multi_head_attention_forward).parameters).index("dropout_p"),
        "dropout_p",
    ),
}
"""Where functions that drop values, other than those called ``..dropout..``, take the rate."""


def twin(model: nn.Module) -> nn.Module:
    """A copy of ``model`` with float64 parameters, buffers, and tensors in attributes of modules and objects."""
    copies: dict[int, Any] = {}
    found = copied(model, copies)._apply(widen)
    copies.pop(id(copies), None)  # what was copied
    for each in copies.values():
        for name, value in list(getattr(each, "__dict__", {}).items()):
            if is_narrow(value):
                each.__dict__[name] = widen(value)
    return found


def copied(model: nn.Module, copies: dict[int, Any] | None = None) -> nn.Module:
    """A copy of ``model`` to be run beside it.

    Raises:
        VerificationError: it holds what cannot be copied.
    """
    try:
        return copy.deepcopy(model, copies)
    except Exception as error:
        raise VerificationError(
            f"values are compared on copies of the model, and {type(model).__name__} cannot be copied "
            f"({type(error).__name__}: {error}): keep locks, files and handles out of modules, or let what holds them "
            "have a __deepcopy__"
        ) from error


def is_narrow(tree: Any) -> bool:
    """Whether a tensor in ``tree`` is of a narrower float type than float64, or of complex numbers of these."""
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype in _WIDE for leaf in pytree.tree_leaves(tree))


def widen(tree: Any) -> Any:
    """``tree`` with every tensor of a narrower float type in float64."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(_WIDE.get(t.dtype, t.dtype)), tree)


def widened(graph: Graph) -> Graph:
    """``graph`` with every narrower float type in float64, casts to them included, and rates of dropping 0."""
    return replace(graph, nodes=tuple(map(_widened, graph.nodes)))


def _widened(node: Node) -> Node:
    args = {name: f"torch.{_wide_name(value)}" if _is_dtype(value) else value for name, value in node.args}
    args |= {rate: 0.0} if (rate := drops(node)) else {}
    results = tuple(replace(result, dtype=_wide_name(result.dtype)) for result in node.results)
    return replace(node, args=tuple(args.items()), results=results)


def _is_dtype(value: object) -> bool:
    return isinstance(value, str) and value.startswith("torch.")


def _wide_name(dtype: object) -> str:
    name = str(dtype).removeprefix("torch.")
    return _WIDE_NAMES.get(name, name)


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Inside, casts to narrower floats go to float64, tensors are made in float64, and dropout drops nothing.

    Models often compute a norm or a softmax ``in float32``, which would round a float64 model; random
    masks could not be compared at all. Meant around both capturing and running the twin.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Exact():
            yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def dropping_nothing() -> Iterator[None]:
    """Inside, dropout drops nothing; types are as they are. For models that do not run in float64."""
    with _Exact(widens=False):
        yield


class _Exact(TorchFunctionMode):
    def __init__(self, widens: bool = True):
        super().__init__()
        self._widens = widens

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if carried_by(func) is not None:
            with around(self):
                return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if self._widens:
            func = _CASTS.get(func, func)
            args = tuple(_wide(a) for a in args)
            kwargs = {name: _wide(value) for name, value in kwargs.items()}
        rate = _RATES.get(func, (1, "p") if "dropout" in getattr(func, "__name__", "") else None)
        if rate is not None:
            position, name = rate
            args = (*args[:position], 0.0, *args[position + 1 :]) if len(args) > position else args
            kwargs = {**kwargs, name: 0.0} if name in kwargs else kwargs
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value
