"""Marks the calls of repeated submodules in the graph that ``torch.export`` traces.

:mod:`autopar.capture.repeats.repeats` leaves them while the model runs, and
:mod:`autopar.capture.passes.call_splitting` takes them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import _ProxyTensor, get_proxy_slot, set_proxy_slot

_LIBRARY = torch.library.Library("autopar_capture", "DEF")
_LIBRARY.define("enter(int call, Tensor[] inputs) -> ()")
_LIBRARY.define("leave(int call, int[] values, Tensor[] outputs) -> ()")
_LIBRARY.define("again(int call, int[] places, Tensor[] inputs) -> ()")
_LIBRARY.define("value(int call, int value) -> Tensor")
_LIBRARY.define("leaf(int tensor) -> Tensor")
_OPS: Any = torch.ops.autopar_capture
ENTER, LEAVE, AGAIN = _OPS.enter.default, _OPS.leave.default, _OPS.again.default
"""A traced call begins and ends; a call like an earlier one, maybe the first of several, and the inputs, by place, for
which it has other nodes."""
VALUE, LEAF = _OPS.value.default, _OPS.leaf.default
"""A value of a call like an earlier one, where something traced reads it; a parameter or buffer of the model."""


@dataclass(frozen=True)
class Copied:
    """A value of a call like an earlier one: number of the call, and of the value in it."""

    call: int
    value: int


class NotFoldable(BaseException):
    """The model does something that only capturing it whole gets right. No ``except Exception`` may swallow it."""


def mark(tracer: Any, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
    """A node of our own in the graph that is being traced, in the module that is being called."""
    node: fx.Node = tracer.graph.create_node("call_function", target, args, {})
    stack = tracer.module_stack.items()
    kinds = {key: (path, f"{kind.__module__}.{kind.__qualname__}") for key, (path, kind) in stack}
    node.meta.update(val=value, nn_module_stack=kinds)
    return node


def track(tracer: Any, tensor: Tensor, node: fx.Node) -> None:
    """Tell the tracer that a node computes a tensor."""
    set_proxy_slot(tensor, tracer, _ProxyTensor(tracer.proxy(node), None))


def node_of(tracer: Any, tensor: Tensor) -> fx.Node | None:
    """The node that computes a tensor, if the tracer knows it."""
    found = get_proxy_slot(tensor, tracer, None)
    return None if found is None else found.proxy.node


def writes_in_place(node: fx.Node) -> bool:
    """Whether a node writes to a tensor (running statistics, ``x += y``, ``x[i] = y``).

    Literals (``torch.tensor(0.5)``) are copied and detached in place, which nobody can tell.
    """
    target = node.target
    if target is torch.ops.aten.detach_.default:
        return getattr(node.args[0], "target", None) is not torch.ops.aten.lift_fresh_copy.default
    return isinstance(target, torch._ops.OpOverload) and (
        target._schema.is_mutable or target is torch.ops.aten.batch_norm.default
    )
