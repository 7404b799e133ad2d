"""Rows without arithmetic of their own structure, each run on every strategy that its rule allows.

A case is an application of an operator; :func:`check_row` is the proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

from planner.ir.layout import P
from planner.ops import OPS, elementwise, factory, indexing, reduction, reshape
from planner.ops.sharding_rule import AxisStrategy
from tests.autopar.sharding_oracle import Args, LocalForm, check_row, has_derivative

Case = tuple[str, tuple[object, ...], dict[str, object]]
SHAPES = [(4, 6), (8,), (3, 1, 4), ()]


def op_named(name: str) -> OpOverload[..., Any]:
    packet, overload = (name if "." in name else f"{name}.default").split(".")
    found = getattr(getattr(torch.ops.aten, packet), overload)
    assert isinstance(found, OpOverload)
    return found


def rand(*shape: int) -> Tensor:
    """Uniform in (0.1, 0.9): in the domain of nearly every function, and off its kinks."""
    return 0.1 + 0.8 * torch.rand(shape, dtype=torch.float64)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def ints(*shape: int, below: int = 8) -> Tensor:
    return torch.randint(below, shape)


def mask(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.5


def case(name: str, *args: object, **kwargs: object) -> Case:
    return name, args, kwargs


def elementwise_cases() -> Iterator[Case]:
    """One tensor and numbers, then two tensors, then three."""
    numbers: dict[str, tuple[object, ...]] = {
        "clamp": (0.3, 0.7), "clip": (0.3, 0.7), "clamp_min": (0.4,), "clamp_max": (0.4,), "threshold": (0.5, 0.1),
        "full_like": (2.0,), "fill.Scalar": (2.0,), "hardshrink": (0.5,), "softshrink": (0.5,),
    }  # fmt: skip
    on_ints = ("bitwise", "__", "floor_divide", "heaviside")
    linear = "neg negative real imag mul.Scalar div.Scalar multiply.Scalar divide.Scalar pow.Tensor_Scalar"
    linear += " where.Scalar relu clamp clip"
    unary = (
        elementwise.NEEDS_NOTHING,
        elementwise.NEEDS_INPUT,
        elementwise.NEEDS_OUTPUT,
        elementwise.ACTIVATIONS_NEEDING_INPUT,
        elementwise.ACTIVATIONS_NEEDING_OUTPUT,
        elementwise.ALIASES,
        linear,
    )
    for name in " ".join(unary).replace("empty_like", "").split():
        for shape in SHAPES:
            x = rand(*shape)
            if name in ("acosh", "arccosh"):
                x = 1 + x
            if name.startswith(on_ints):
                x = ints(*shape)
            if name in ("_conj", "conj", "imag"):
                x = torch.complex(x, rand(*shape))
            if name in numbers:
                yield case(name, x, *numbers[name])
            elif name == "polygamma":
                yield case(name, 1, x)
            elif name == "where.Scalar":
                yield case(name, mask(*shape), 1.0, 2.0)
            elif name in ("pow.Scalar", "xlogy.Scalar_Self"):
                yield case(name, 2.0, x)
            elif name == "div.Scalar_mode":
                yield case(name, x, 2, rounding_mode="floor")
            elif name == "round.decimals":
                yield case(name, x, decimals=1)
            elif name.endswith(("Scalar", "Scalar_Other")):
                yield case(name, x, 2)
            else:
                yield case(name, x)
    pairs = [
        ((4, 6), (4, 6)), ((4, 6), (6,)), ((4, 1), (1, 6)), ((2, 1, 3), (4, 1)), ((4,), ()), ((), (2, 4)), ((), ()),
    ]  # fmt: skip
    sums = "add.Tensor sub.Tensor rsub.Tensor subtract.Tensor complex"
    products = "mul.Tensor multiply.Tensor div.Tensor divide.Tensor true_divide.Tensor"
    binary = (elementwise.PAIRS_NEEDING_NOTHING, elementwise.PAIRS_NEEDING_BOTH, "pow.Tensor_Tensor", sums, products)
    for name in " ".join(binary).split():
        for left, right in pairs:
            x, y = rand(*left), rand(*right)
            if name.startswith(on_ints):
                x, y = ints(*left), 1 + ints(*right)
            if name.endswith(".Scalar"):
                yield case(name, x, 0.5)
            elif name == "div.Tensor_mode":
                yield case(name, x, y, rounding_mode="trunc")
            else:
                yield case(name, x, y)
    for name in f"{sums} {products}".split():
        x = rand(4, 6)
        yield case(name, x, x)
        if name not in ("complex", "rsub.Tensor"):
            yield case(name, x, 3.0)
    for name in ("add.Scalar", "sub.Scalar", "rsub.Scalar"):
        yield case(name, rand(4, 6), 2)
    for name in ("add.Tensor", "add.Scalar", "sub.Tensor"):
        yield case(name, rand(4, 6), 0)
    yield case("add.Tensor", rand(4, 6), rand(6), alpha=3)
    yield case("mul.Tensor", rand(4, 6), mask(6))
    yield case("mul.Tensor", ints(4, 6), rand(6))
    yield case("div.Tensor_mode", rand(4, 6), rand(6), rounding_mode=None)
    for name in ["clone", "contiguous", "lift_fresh_copy", "lift_fresh", "positive", "alias_copy"]:
        for shape in SHAPES:
            yield case(name, randn(*shape))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool):
        x = torch.randint(-16, 17, (4, 6)) / torch.tensor(8, dtype=torch.float64)  # exact in every dtype
        yield case("to.dtype", x, dtype)
        yield case("to.device", x, "cpu", dtype)
        yield case("to.dtype_layout", x, dtype=dtype, layout=torch.strided)
        yield case("_to_copy", x, dtype=dtype)
    yield case("to.dtype", mask(4, 6), torch.float64)
    for name in ("type_as", "to.other"):
        yield case(name, randn(4, 6), randn(4, 6).float())
        yield case(name, randn(4, 6), randn(8).float())
        yield case(name, ints(4, 6), randn())
    for shape in ((4, 6), (6,), (4, 1), ()):
        chosen, x, y, z = mask(*shape), randn(4, 6), randn(*shape), rand(*shape)
        yield case("where.self", chosen, x, y)
        yield case("where.self", mask(4, 6), y, x)
        for number in (0, -1e9):
            yield case("where.ScalarOther", chosen, x, number)
            yield case("where.ScalarSelf", chosen, number, x)
            yield case("masked_fill.Scalar", x, chosen, number)
        yield case("masked_fill.Tensor", x, chosen, randn())
        yield case("lerp.Scalar", x, y, 0.3)
        yield case("lerp.Tensor", x, y, z)
        yield case("addcmul", x, y, z, value=2)
        yield case("addcdiv", x, y, z)
        yield case("clamp.Tensor", x, y - 1, y + 1)
        yield case("clip.Tensor", x, None, y)
        yield case("copy", ints(4, 6), ints(*shape))  # has no derivative
        yield case("prelu", rand(2, 4, 3) - 0.5, rand(4))
    yield case("fill.Tensor", randn(4, 6), randn())
    yield case("prelu", rand(2, 4) - 0.5, rand(1))
    yield case("prelu", rand(4) - 0.5, rand(1))
    yield case("_prelu_kernel", rand(2, 4, 3) - 0.5, rand(1, 4, 1))
    yield case("glu", randn(4, 8), -1)
    yield case("glu", randn(8, 3), 0)
    yield case("glu", randn(2), 0)


VIEWED = [
    ((8, 3), (2, 12)), ((2, 12), (8, 3)), ((4, 6), (24,)), ((24,), (4, 6)), ((4, 6), (6, 4)), ((8, 3), (4, 6)),
    ((2, 4, 12), (8, 3, 4)), ((2, 8, 3, 4), (2, 8, 12)), ((2, 8, 12), (2, 8, 3, 4)), ((1, 4, 1, 3), (4, 3, 1)),
    ((4, 3), (4, 1, 3)), ((), (1, 1)), ((1,), ()), ((2, 4, 6), (8, 1, 6)), ((12, 5, 4), (3, 8, 10)), ((0, 3), (3, 0)),
]  # fmt: skip


def reshape_cases() -> Iterator[Case]:
    for before, after in VIEWED:
        for name in ("view", "reshape", "_unsafe_view", "view_copy", "_reshape_copy"):
            yield case(name, randn(*before), list(after))
        yield case("_reshape_alias", randn(*before), list(after), torch.empty(after).stride())
        yield case("view_as", randn(*before), randn(*after))
        yield case("reshape_as", randn(*before), randn(*after))
    yield case("view", randn(4, 6), [2, -1, 6])
    yield case("reshape", randn(4, 6).t(), [-1])
    yield case("ravel", randn(4, 6))
    yield case("flatten.using_ints", randn(2, 4, 3), 0, 1)
    yield case("flatten.using_ints", randn(2, 4, 3), 1)
    yield case("unflatten.int", randn(2, 12), -1, [4, 3])
    yield case("unflatten.int", randn(2, 12), 1, [-1, 4])
    for suffix in ("", "_copy"):
        yield case(f"squeeze{suffix}", randn(1, 4, 1, 2))
        yield case(f"squeeze{suffix}.dim", randn(4, 1, 2), 1)
        yield case(f"squeeze{suffix}.dim", randn(4, 1, 2), 0)
        yield case(f"squeeze{suffix}.dims", randn(4, 1, 1), [0, 1])
        yield case(f"unsqueeze{suffix}", randn(4, 2), -1)
        yield case(f"transpose{suffix}.int", randn(4, 3, 2), 0, -1)
        yield case(f"permute{suffix}", randn(4, 3, 2), [2, 0, -2])
        yield case(f"t{suffix}", randn(4, 3))
        yield case(f"t{suffix}", randn(4))
        yield case(f"expand{suffix}", randn(4, 1, 3), [2, -1, 8, 3])
        yield case(f"expand{suffix}", randn(), [4])
        yield case(f"unbind{suffix}.int", randn(4, 2), -1)
        yield case(f"split{suffix}.Tensor", randn(12, 2), 4)
        yield case(f"split{suffix}.Tensor", randn(4, 7), 3, 1)
        yield case(f"split_with_sizes{suffix}", randn(4, 8), [4, 4], -1)
        yield case(f"split_with_sizes{suffix}", randn(4, 8), [2, 6], -1)
    yield case("t", randn())
    for name in ("swapdims", "swapaxes"):
        yield case(name, randn(4, 3, 2), 1, 2)
    yield case("transpose.int", randn(), 0, -1)
    for name in ("mT", "mT.a", "adjoint"):
        yield case(name, randn(2, 4, 3))
    for name in ("matrix_H", "matrix_H.a"):
        yield case(name, randn(4, 3))
    yield case("numpy_T", randn(4, 3))
    yield case("numpy_T.a", randn(4, 3, 2))
    for name in ("movedim", "moveaxis"):
        yield case(f"{name}.int", randn(4, 3, 2), 0, -1)
        yield case(f"{name}.intlist", randn(4, 3, 2, 5), [0, 3], [2, 0])
    yield case("expand_as", randn(4, 1), randn(2, 4, 6))
    yield case("broadcast_to", randn(4, 1), [4, 6])
    yield case("broadcast_tensors", [randn(4, 1), randn(6)])
    for name in ("repeat", "tile"):
        yield case(name, randn(4, 3), [2, 4])
        yield case(name, randn(4, 1), [4, 1, 6])
    yield case("tile", randn(4, 3), [4])
    for dim in (0, -1, None):
        yield case("repeat_interleave.self_int", randn(4, 2), 4, dim)
    yield case("repeat_interleave.self_int", randn(4, 2), 4, 0, output_size=16)
    yield case("split.sizes", randn(4, 8), [4, 4], 1)
    yield case("split.Tensor", randn(4, 2), 1)
    yield case("split.Tensor", randn(4, 2), 9)
    yield case("unsafe_split.Tensor", randn(8, 2), 4)
    yield case("unsafe_split_with_sizes", randn(8, 2), [4, 4])
    for name in ("chunk", "unsafe_chunk"):
        yield case(name, randn(4, 12), 3, -1)
        yield case(name, randn(16), 5)
        yield case(name, randn(7), 3)
    yield case("tensor_split.sections", randn(4, 12), 3, -1)
    yield case("tensor_split.sections", randn(7), 3)
    yield case("tensor_split.indices", randn(12, 2), [4, 8])
    yield case("tensor_split.indices", randn(12, 2), [3, 8])
    for name in ("cat", "concat", "concatenate"):
        yield case(name, [randn(4, 2), randn(4, 2), randn(4, 2)])
        yield case(name, [randn(4, 2), randn(4, 6)], -1)
        yield case(name, [randn(4, 2), randn(0), randn(4, 2)], 1)
        yield case(name, [randn(4, 1), randn(4, 1)], 1)
    x = randn(4, 2)
    yield case("cat", [x, x, ints(4, 2)], 1)
    yield case("stack", [randn(4, 2), randn(4, 2)], -1)
    yield case("meshgrid", [randn(4), randn(8)])
    yield case("meshgrid.indexing", [randn(4), randn(8), randn()], indexing="xy")
    yield case("view_as_complex", randn(4, 2))
    yield case("view_as_real", torch.complex(randn(4), randn(4)))
    yield case("pixel_shuffle", randn(2, 12, 4, 3), 2)
    yield case("pixel_unshuffle", randn(2, 3, 8, 4), 2)


def reduction_cases() -> Iterator[Case]:
    whole = "sum mean amax amin max min median any all argmax argmin prod var std var_mean std_mean norm.Scalar"
    for name in whole.split():
        yield case(name, randn(4, 6))
        yield case(name, randn(8))
    dims = """
        sum.dim_IntList mean.dim amax amin var.dim var.correction std.dim std.correction var_mean.dim
        var_mean.correction std_mean.dim std_mean.correction nansum nanmean logsumexp special_logsumexp
        frobenius_norm.dim any.dims all.dims
    """
    for name in dims.split():
        yield case(name, randn(4, 3, 8), [1])
        yield case(name, randn(4, 3, 8), [0, -1])
        yield case(name, randn(4, 3, 8), [-1], keepdim=True)
    for name in ("sum.dim_IntList", "mean.dim"):
        yield case(name, randn(4, 8), None)
        yield case(name, randn(4, 8), [])
        yield case(name, randn(4, 8), [0], dtype=torch.float32)
    yield case("sum", mask(4, 6))
    yield case("sum", randn())
    yield case("nansum", randn(4, 6))
    yield case("nanmean", randn(4, 6))
    yield case("count_nonzero", ints(4, 6, below=2))
    yield case("count_nonzero", ints(4, 6, below=2), 1)
    yield case("count_nonzero.dim_IntList", ints(4, 6, below=2), [0, 1])
    for name in ["any.dim", "all.dim", "argmax", "argmin", "prod.dim_int", "max.dim", "min.dim", "median.dim", "mode"]:
        yield case(name, randn(4, 3, 8), 1)
        yield case(name, randn(4, 3, 8), -1, True)
    yield case("argmax", randn(4, 6), keepdim=True)
    yield case("histc", ints(4, 8).float(), 8, 0, 7)  # has no derivative
    yield case("histc", ints(4, 8).float(), 8)
    yield case("kthvalue", randn(4, 8), 2, 0)
    yield case("aminmax", randn(4, 8), dim=1)
    yield case("aminmax", randn(4, 8))
    yield case("norm.ScalarOpt_dim", randn(4, 8), 2, [1])
    yield case("norm.ScalarOpt_dim_dtype", randn(4, 8), 2, [1], True, dtype=torch.float64)
    yield case("norm.ScalarOpt_dtype", randn(4, 8), 2, dtype=torch.float64)
    yield case("linalg_vector_norm", randn(4, 8))
    yield case("linalg_vector_norm", randn(4, 8), 1, [-1], True)
    for name in f"{reduction.SOFTMAX} {reduction.WHOLE_SOFTMAX}".split():
        half_to_float = (False,) if name in ("_softmax", "_log_softmax") else ()
        yield case(name, randn(4, 3, 8), 1, *half_to_float)
        yield case(name, randn(4, 8), -1, *half_to_float)
    for name in ["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort"]:
        yield case(name, randn(4, 3, 8), 1)
        yield case(name, randn(8), -1)
    yield case("cumsum", mask(4, 8), -1)
    yield case("sort.stable", randn(4, 8), stable=True, dim=0)
    yield case("argsort.stable", randn(4, 8), stable=True, dim=0)
    yield case("topk", randn(4, 8), 4)
    yield case("topk", randn(4, 8), 2, 0)
    yield case("diff", randn(4, 8))
    yield case("diff", ints(4, 8), prepend=ints(4, 1), append=ints(4, 2))
    yield case("diff", randn(4, 8), 1, 0, append=randn(1, 8))


def indexing_cases() -> Iterator[Case]:
    for suffix in ("", "_copy"):
        yield case(f"slice{suffix}.Tensor", randn(4, 8), 1, 0, 9223372036854775807)
        yield case(f"slice{suffix}.Tensor", randn(4, 8), 1, None, 8)
        yield case(f"slice{suffix}.Tensor", randn(4, 8), -1, 2, 6)
        yield case(f"slice{suffix}.Tensor", randn(8, 4), 0, None, -1, 2)
        yield case(f"narrow{suffix}", randn(4, 8), 1, 0, 8)
        yield case(f"narrow{suffix}", randn(4, 8), 1, 2, 4)
        yield case(f"select{suffix}.int", randn(4, 3, 8), 1, -1)
        yield case(f"select{suffix}.int", randn(4), 0, 2)
    yield case("slice_scatter", randn(4, 8), randn(4, 4), 1, 2, 6)
    yield case("slice_scatter", randn(4, 8), randn(4, 8), 1)
    yield case("select_scatter", randn(4, 8), randn(4), 1, 2)
    yield case("diagonal", randn(4, 4, 2))
    yield case("diagonal", randn(8, 3, 4), 1, -1, 1)
    yield case("unfold", randn(4, 8), 1, 2, 2)
    yield case("unfold", randn(4, 8), 0, 4, 1)
    yield case("flip", randn(4, 8), [-1])
    yield case("roll", randn(4, 8, 2), [1, 2], [0, 1])
    yield case("roll", randn(4, 8), [3])
    for name in ("tril", "triu"):
        yield case(name, randn(4, 4, 8), 1)
    for name in ("pad", "constant_pad_nd"):
        yield case(name, randn(4, 8), [1, 0])
        yield case(name, randn(4, 8), [0, 0, 2, 2])
        yield case(name, randn(4, 8), [1, -1, 0, 0])
    yield case("pad", randn(4, 8), [1, 0], value=3.0)
    yield case("pad", randn(4, 2, 8), [1, 1], "reflect")
    yield case("constant_pad_nd", randn(4, 8), [1, 0], -1)
    yield case("one_hot", ints(4, 2), 8)
    yield case("bucketize.Tensor", rand(4, 8), torch.linspace(0, 1, 4, dtype=torch.float64))
    yield case("index_select", randn(4, 8, 2), 1, ints(4))
    yield case("index_select", randn(8), 0, ints())
    yield case("gather", randn(4, 8), 1, ints(4, 4))
    yield case("gather", randn(4, 8), 0, ints(8, 8, below=4))
    yield case("gather", randn(4, 8), 1, ints(2, 8))
    yield case("gather", randn(4, 8), 1, ints(1, 8))
    yield case("gather", randn(4), 0, ints(below=4))
    yield case("take_along_dim", randn(4, 8), ints(4, 4), 1)
    yield case("take_along_dim", randn(4, 8), ints(1, 4), 1)
    yield case("take_along_dim", randn(4, 8), ints(16))
    spread = torch.stack([torch.randperm(8)[:4] for _ in range(4)])
    for lookup in (spread, spread[:2]):
        x, src = randn(4, 8), randn(*lookup.shape)
        yield case("scatter.src", x, 1, lookup, src)
        yield case("scatter.value", x, 1, lookup, 0)
        yield case("scatter.value", x, 1, lookup, 2.0)
        yield case("scatter_add", x, 1, ints(*lookup.shape), src)
        yield case("scatter.reduce", ints(4, 8), 1, lookup, ints(*lookup.shape), reduce="add")
        yield case("scatter_reduce.two", x, 1, ints(*lookup.shape), src, "amax")
    yield case("scatter.src", ints(4, 8), 1, spread, ints(4, 6))
    yield case("scatter_add", ints(4, 8), 1, spread, ints(4, 6))
    yield case("index_add", randn(8, 4), 0, ints(4), randn(4, 4))
    yield case("index_add", randn(4, 8), -1, ints(4), randn(4, 4), alpha=2)
    yield case("index_add", randn(), 0, ints(1) * 0, randn())
    yield case("index_copy", randn(4), 0, ints(1) * 0, randn())
    yield case("index_copy", randn(8, 4), 0, torch.randperm(8)[:4], randn(4, 4))
    for name in ("index.Tensor", "_unsafe_index.Tensor"):
        yield case(name, randn(8, 4), [ints(4)])
        yield case(name, randn(4, 8, 2), [None, ints(4, 2)])
        yield case(name, randn(8, 8, 4), [ints(4, 1), ints(4)])
        yield case(name, randn(8, 4, 8), [ints(4), None, ints(4)])
        yield case(name, randn(4, 8, 8), [None, ints(4), ints()])
    yield case("index.Tensor", randn(4, 8), [mask(4, 8)])
    for name in ("index_put", "_unsafe_index_put"):
        for accumulate in (False, True):
            lookup = ints(4) if accumulate else torch.randperm(8)[:4]
            yield case(name, randn(8, 4), [lookup], randn(4, 4), accumulate)
            yield case(name, randn(8, 4), [lookup], randn(4), accumulate)
            yield case(name, randn(8, 4), [lookup], randn(4, 1), accumulate)
            yield case(name, randn(4, 8), [None, lookup], randn(), accumulate)
            yield case(name, randn(8, 4, 8), [lookup, None, lookup], randn(4, 4), accumulate)
    yield case("index_put", randn(4, 8), [mask(4, 8)], randn())


def factory_cases() -> Iterator[Case]:
    yield case("arange", 8)
    yield case("arange.start", 2, 10)
    yield case("arange.start_step", 0, 8, 2)
    yield case("eye", 4)
    yield case("eye.m", 4, 2)
    yield case("full", [4, 2], 3.0)
    yield case("linspace", 0, 1, 8)
    yield case("logspace", 0, 1, 8)
    yield case("ones", [4, 2])
    yield case("zeros", [])
    yield case("scalar_tensor", 2.0)
    yield case("tril_indices", 4, 4)
    yield case("triu_indices", 4, 4)
    yield case("hann_window", 8)
    yield case("hamming_window", 8)
    for shape in ((4, 8), (2, 4)):
        yield case("new_ones", randn(4, 8), list(shape))
        yield case("new_zeros", randn(4, 8), list(shape))
        yield case("new_full", randn(4, 8), list(shape), 2.0)


def global_mean(strategy: AxisStrategy, ranks: list[Args]) -> list[Any] | None:
    """The local form of a mean over a sharded dim: the sum of what is here, over the count of all."""
    mean = torch.ops.aten.mean.dim if "dim" in ranks[0] else torch.ops.aten.mean.default
    partial = strategy.factor and strategy.results == (P,)
    return [mean(**args) / len(ranks) for args in ranks] if partial else None


def own_classes(strategy: AxisStrategy, ranks: list[Args]) -> list[Any] | None:
    """The local form of one-hot rows: the columns of this rank's classes."""
    if strategy.factor != "classes":
        return None
    wholes = [torch.ops.aten.one_hot.default(**args) for args in ranks]
    return [whole.chunk(len(ranks), -1)[rank] for rank, whole in enumerate(wholes)]


def over_ranks(name: str) -> LocalForm:
    """The local form of a softmax: this rank's part of that of all."""

    def form(strategy: AxisStrategy, ranks: list[Args]) -> list[Any] | None:
        if strategy.factor != "classes":
            return None
        whole = torch.cat([args["self"] for args in ranks], ranks[0]["dim"])
        return [*op_named(name)(**{**ranks[0], "self": whole}).chunk(len(ranks), ranks[0]["dim"])]

    return form


LOCAL_FORMS: dict[str, LocalForm] = {
    "mean": global_mean,
    "mean.dim": global_mean,
    "one_hot": own_classes,
    **{name: over_ranks(name) for name in reduction.SOFTMAX.split()},
}

# What these hold is whatever was there.
UNINITIALISED = {
    "empty_like", "new_empty", "new_empty_strided", "empty.memory_format", "empty_permuted", "empty_strided",
}  # fmt: skip

FAMILIES = (
    (elementwise, elementwise_cases),
    (reshape, reshape_cases),
    (reduction, reduction_cases),
    (indexing, indexing_cases),
    (factory, factory_cases),
)


def cases_by_name() -> dict[str, list[Case]]:
    torch.manual_seed(0)
    found: dict[str, list[Case]] = {}
    for _, cases in FAMILIES:
        for one in cases():
            found.setdefault(one[0], []).append(one)
    return found


CASES = cases_by_name()


@pytest.mark.parametrize("name", CASES)
def test_every_strategy_computes_what_the_operator_computes(name: str) -> None:
    torch.manual_seed(0)
    for _, args, kwargs in CASES[name]:
        check_row(op_named(name), args, kwargs, local_form=LOCAL_FORMS.get(name))
    if not all(has_derivative(op_named(name), args, kwargs) for _, args, kwargs in CASES[name]):
        pytest.skip("results are right; this torch has no gradients of the operator")


def test_every_row_has_a_case() -> None:
    rows = {op.removeprefix("aten.").removesuffix(".default") for family, _ in FAMILIES for op in family.ROWS}
    assert rows - UNINITIALISED == CASES.keys()


@pytest.mark.parametrize("name", sorted(UNINITIALISED))
def test_uninitialised_tensors_have_a_row(name: str) -> None:
    assert str(op_named(name)) in OPS
