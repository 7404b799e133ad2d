"""Lower: from the captured fx graph to the planner's graph, the only place where the two meet.

Node names are kept, so that the rewrite finds each planner node's operator again.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch

from autopar.capture import Captured
from planner.errors import CaptureError
from planner.graph import Graph, Node, Ref, TensorType

_STATIC = (int, float, bool, str, complex, type(None))


def lower(captured: Captured) -> Graph:
    """The planner's graph of a captured model.

    Raises:
        CaptureError: an operator returns something that is not a tensor, or a size is symbolic.
    """
    nodes: list[Node] = []
    refs: dict[str, Ref] = {}
    grads: dict[Ref, bool] = {}
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            if node.name not in captured.leaves:
                continue
            kind, target = captured.leaves[node.name]
            value = node.meta["val"]
            tensor = _tensor_type(node, value, kind == "param" and value.requires_grad)
            nodes.append(Node(node.name, kind, (), (tensor,), target=target))
            refs[node.name] = Ref(node.name)
            grads[refs[node.name]] = tensor.grad
        elif node.target is operator.getitem:
            source = refs[node.args[0].name]
            refs[node.name] = Ref(source.node, node.args[1])
        elif node.op == "call_function":
            if "as_strided" in str(node.target):
                raise CaptureError(
                    f"{node.target} in module {_module_path(node) or '(root)'} reads memory by strides, which no "
                    "layout keeps: use view, unfold or indexing instead"
                )
            args = _arguments(node, refs)
            lowered = Node(node.name, str(node.target), args, (), path=_module_path(node))
            grad = any(grads[ref] for ref in lowered.inputs) and not node.meta.get("no_grad", False)
            results = tuple(
                _tensor_type(node, v, grad and _differentiable(node, v) and _of_own(lowered, i, grads))
                for i, v in enumerate(_values(node, node.meta["val"]))
            )
            lowered = Node(node.name, lowered.op, args, results, path=lowered.path)
            nodes.append(lowered)
            refs[node.name] = Ref(node.name)
            grads.update({Ref(node.name, i): t.grad for i, t in enumerate(results)})
        elif node.op != "output":
            raise CaptureError(f"graph node {node.name} ({node.op} {node.target}) has no planner form")
    graph = Graph(
        tuple(nodes),
        tuple(refs[name] for name in captured.outputs if name is not None),
        tuple((buffer, refs[name]) for buffer, name in captured.updates),
    )
    graph.check()
    return graph


_EACH_ITS_OWN = {"aten.broadcast_tensors.default", "aten.meshgrid.default", "aten.meshgrid.indexing"}


def _of_own(node: Node, index: int, grads: dict[Ref, bool]) -> bool:
    """Whether a gradient flows back from result ``index``, where each result comes from one operand alone."""
    return node.op not in _EACH_ITS_OWN or grads[node.inputs[index]]


_SHAPE_ONLY = re.compile(r"aten\.(detach|(zeros|ones|full|empty|rand|randn|randint)_like|new_\w+)\.")
"""Operators that take from their operand its shape alone, or whose result has no gradient by definition."""


def _differentiable(node: torch.fx.Node, value: torch.Tensor) -> bool:
    return (value.is_floating_point() or value.is_complex()) and not _SHAPE_ONLY.match(str(node.target))


def _values(node: torch.fx.Node, value: Any) -> list[torch.Tensor]:
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    if not all(isinstance(v, torch.Tensor) for v in values):
        raise CaptureError(f"{node.target} in {_module_path(node)} returns a value that is not a tensor")
    return values


def _tensor_type(node: torch.fx.Node, value: torch.Tensor, grad: bool) -> TensorType:
    if not all(isinstance(size, int) for size in value.shape):
        raise CaptureError(f"{node.name} has the symbolic shape {tuple(value.shape)}; export with static shapes")
    return TensorType(tuple(value.shape), str(value.dtype).removeprefix("torch."), grad)


def _module_path(node: torch.fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return next(reversed(stack.values()))[0] if stack else ""


def _arguments(node: torch.fx.Node, refs: dict[str, Ref]) -> tuple[tuple[str, object], ...]:
    """Arguments by schema name, defaults filled in."""
    if not isinstance(node.target, torch._ops.OpOverload):
        raise CaptureError(f"{node.target} in module {_module_path(node) or '(root)'} is not an operator")
    found: list[tuple[str, object]] = []
    for position, argument in enumerate(node.target._schema.arguments):
        if position < len(node.args):
            value = node.args[position]
        elif argument.name in node.kwargs:
            value = node.kwargs[argument.name]
        else:
            value = argument.default_value if argument.has_default_value() else None
        found.append((argument.name, _static(value, refs)))
    return tuple(found)


def _static(value: Any, refs: dict[str, Ref]) -> object:
    if isinstance(value, torch.fx.Node):
        return refs[value.name]
    if isinstance(value, (list, tuple)):
        return tuple(_static(v, refs) for v in value)
    if isinstance(value, torch.device):
        return "device"
    return value if isinstance(value, _STATIC) else str(value)
