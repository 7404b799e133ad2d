"""What one node of a traced graph is to the planner: its arguments, the types and memory of its results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from autopar.graph.program import module_path
from planner.base.errors import CaptureError
from planner.ir.graph import TensorType

_STATIC = (int, float, bool, str, complex, type(None))

DROPOUT = "aten.dropout.default"
EACH_ITS_OWN = {"aten.broadcast_tensors.default", "aten.meshgrid.default", "aten.meshgrid.indexing"}
"""Operators of which each result comes from one operand alone, and with it its gradient."""

SHAPE_ONLY = re.compile(r"aten\.(detach|(zeros|ones|full|empty|rand|randn|randint)_like|new_\w+)\.")
"""Operators that take from their operand its shape alone, or whose result has no gradient by definition."""


def storages_of(node: torch.fx.Node) -> list[int]:
    """Which memory each result lies in, as traced."""
    return [int(value.untyped_storage()._cdata) for value in values_of(node, node.meta["val"])]


def shares_of(inputs: list[int], results: list[int]) -> tuple[int, ...]:
    """For each result the operand whose memory it lies in, -1 for none: so views that had to copy are known."""
    return tuple(inputs.index(storage) if storage in inputs else -1 for storage in results)


def drops_nothing(dropout: Mapping[str, object]) -> bool:
    """Whether dropout with these arguments gives its operand back, which traced it copies."""
    return dropout["p"] == 0 or not dropout["train"]


def is_differentiable(op: str, value: torch.Tensor) -> bool:
    """Whether a result may have a gradient, if an operand has."""
    return (value.is_floating_point() or value.is_complex()) and not SHAPE_ONLY.match(op)


def values_of(node: torch.fx.Node, value: Any) -> list[torch.Tensor]:
    """What a node gives, as a list of tensors."""
    found = list(value) if isinstance(value, (tuple, list)) else [value]
    if not all(isinstance(v, torch.Tensor) for v in found):
        raise CaptureError(
            f"{node.target} in module {module_path(node) or '(root)'} returns a value that is not a tensor"
        )
    return found


def tensor_type(name: str, value: torch.Tensor, grad: bool) -> TensorType:
    """A tensor as the planner knows it."""
    if not all(isinstance(size, int) for size in value.shape):
        raise CaptureError(f"{name} has the symbolic shape {tuple(value.shape)}; export with static shapes")
    return TensorType(tuple(value.shape), str(value.dtype).removeprefix("torch."), grad)


def arguments(node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> tuple[tuple[str, object], ...]:
    """Arguments by schema name, defaults filled in; ``values`` stand for the tensors."""
    module = module_path(node) or "(root)"
    if not isinstance(node.target, torch._ops.OpOverload):
        raise CaptureError(f"{node.target} in module {module} is not an operator")
    if "as_strided" in str(node.target):
        raise CaptureError(
            f"{node.target} in module {module} reads memory by strides, which no layout keeps: use view, unfold or "
            "indexing instead"
        )
    found: list[tuple[str, object]] = []
    for position, argument in enumerate(node.target._schema.arguments):
        if position < len(node.args):
            value = node.args[position]
        elif argument.name in node.kwargs:
            value = node.kwargs[argument.name]
        else:
            value = argument.default_value if argument.has_default_value() else None
        found.append((argument.name, _static(value, values)))
    return tuple(found)


def _static(value: Any, values: Mapping[torch.fx.Node, Any]) -> object:
    if isinstance(value, torch.fx.Node):
        return values[value]
    if isinstance(value, (list, tuple)):
        return tuple(_static(v, values) for v in value)
    if isinstance(value, torch.device):
        return "device"
    return value if isinstance(value, _STATIC) else str(value)
