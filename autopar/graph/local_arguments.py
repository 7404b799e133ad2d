"""Operators whose arguments name sizes, and what these are on one rank.

A row turns an operator's arguments into those of its local call, from the rank-local shapes of its
tensor operands and results. Views become ``reshape``: a resharding may leave other strides than the
whole tensor had, and of a rank's sizes more may be 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch._ops import OpOverload

Args = Mapping[str, Any]
Shapes = Sequence[tuple[int, ...]]
Local = tuple[OpOverload[..., Any], dict[str, Any]]
Adapt = Callable[[Args, Shapes, Shapes], Mapping[str, Any]]


def local_call(op: OpOverload[..., Any], args: Args, operands: Shapes, results: Shapes) -> Local:
    """The operator and arguments to call on one rank.

    Args:
        op: the operator.
        args: its arguments by schema name; tensors may be anything, they are passed through.
        operands, results: rank-local shapes of its tensor operands and results.
    """
    name = str(op).removeprefix("aten.")
    if name in RESHAPES or name.startswith("squeeze"):
        return torch.ops.aten.reshape.default, {"self": args["self"], "shape": list(results[0])}
    adapt = LOCAL_SIZES.get(name)
    return op, {**args, **(adapt(args, operands, results) if adapt else {})}


def _result_shape(name: str) -> Adapt:
    return lambda args, operands, results: {name: list(results[0])}


def _result_size(name: str) -> Adapt:
    return lambda args, operands, results: {name: results[0][args["dim"]]}


def _result_sizes(name: str) -> Adapt:
    return lambda args, operands, results: {name: [shape[args["dim"]] for shape in results]}


def _strided(args: Args, operands: Shapes, results: Shapes) -> Mapping[str, Any]:
    shape = results[0]
    return {"size": list(shape), "stride": [math.prod(shape[i + 1 :]) for i in range(len(shape))]}


def _ends(args: Args, operands: Shapes, results: Shapes) -> Mapping[str, Any]:
    return {"indices": list(accumulate(shape[args["dim"]] for shape in results[:-1]))}


def _repeat(name: str) -> Adapt:
    def adapt(args: Args, operands: Shapes, results: Shapes) -> Mapping[str, Any]:
        padded = (1,) * (len(results[0]) - len(operands[0])) + tuple(operands[0])
        return {name: [there // here for there, here in zip(results[0], padded, strict=True)]}

    return adapt


def _repeat_interleave(args: Args, operands: Shapes, results: Shapes) -> Mapping[str, Any]:
    return {"repeats": math.prod(results[0]) // math.prod(operands[0]), "output_size": None}


RESHAPES = frozenset(
    {
        "view.default", "_unsafe_view.default", "reshape.default", "unflatten.int", "flatten.using_ints",
        "view_copy.default", "_reshape_copy.default", "_reshape_alias.default",
    }
)  # fmt: skip

LOCAL_SIZES: Mapping[str, Adapt] = {
    "expand.default": _result_shape("size"),
    "expand_copy.default": _result_shape("size"),
    "broadcast_to.default": _result_shape("size"),
    "new_empty.default": _result_shape("size"),
    "new_empty_strided.default": _strided,
    "new_full.default": _result_shape("size"),
    "new_ones.default": _result_shape("size"),
    "new_zeros.default": _result_shape("size"),
    "repeat.default": _repeat("repeats"),
    "tile.default": _repeat("dims"),
    "repeat_interleave.self_int": _repeat_interleave,
    "split.Tensor": _result_size("split_size"),
    "split_copy.Tensor": _result_size("split_size"),
    "unsafe_split.Tensor": _result_size("split_size"),
    "split.sizes": _result_sizes("split_size"),
    "split_with_sizes.default": _result_sizes("split_sizes"),
    "split_with_sizes_copy.default": _result_sizes("split_sizes"),
    "unsafe_split_with_sizes.default": _result_sizes("split_sizes"),
    "tensor_split.indices": _ends,
    "narrow.default": _result_size("length"),
    "narrow_copy.default": _result_size("length"),
}
