"""Operators that compute each element of the result from the elements at its place, with broadcasting.

One factor per dim of the result; an operand that is broadcast along a dim lacks the factor, so it is
replicated when the factor is sharded and its gradient is a partial sum.
"""

from __future__ import annotations

from collections.abc import Collection

from planner.ir.graph import Node, Ref, TensorType
from planner.ops.sharding_rule import Rule
from planner.ops.signature import Labels, axis, letters, rows, signature
from planner.ops.table import Row, RuleOf

Operands = tuple[TensorType, ...]


def broadcast_labels(shapes: Operands, rank: int) -> list[Labels]:
    """Labels of tensors that are broadcast against a result of ``rank`` dims: aligned at the last dim."""
    return [letters(rank)[rank - len(tensor.shape) :] for tensor in shapes]


def pointwise(node: Node, operands: Operands, *linear: Collection[int]) -> Rule:
    """Elementwise with broadcasting, linear in the given sets of operands."""
    rank = len(node.results[0].shape)
    outs = broadcast_labels(node.results, rank)
    return signature(node, operands, broadcast_labels(operands, rank), outs, broadcast=True, linear=linear)


def linear_in(*linear: Collection[int]) -> RuleOf:
    """Elementwise, and linear in these sets of operands."""
    return lambda node, operands: pointwise(node, operands, *linear)


def sum_of_tensors(node: Node, operands: Operands) -> Rule:
    """``x + y`` is linear in both together; ``x + 1`` is not linear, ``x + 0``, as Python's sum begins, is."""
    if len(operands) == 2:
        return pointwise(node, operands, {0, 1})
    return pointwise(node, operands, *([{0}] if 0 in (node["self"], node["other"]) else []))


def product(node: Node, operands: Operands) -> Rule:
    """``x * y`` is linear in each; also when one of them is a static number."""
    return pointwise(node, operands, *({i} for i in range(len(operands))))


def quotient(node: Node, operands: Operands) -> Rule:
    """``x / y`` is linear in ``x``, unless it is rounded."""
    linear = isinstance(node["self"], Ref) and node["rounding_mode"] is None
    return pointwise(node, operands, *([{0}] if linear else []))


def where_scalar(node: Node, operands: Operands) -> Rule:
    """``where`` of one tensor and one number: linear in the tensor if the number is 0."""
    zero = 0 in (node["self"], node["other"])
    return pointwise(node, operands, *([{1}] if zero and len(operands) == 2 else []))


def masked_fill_scalar(node: Node, operands: Operands) -> Rule:
    """Linear if 0 is filled in."""
    return pointwise(node, operands, *([{0}] if node["value"] == 0 else []))


def typed_like(node: Node, operands: Operands) -> Rule:
    """``self`` converted to the dtype of ``other``, which is laid out alike if it has the same shape."""
    ours, other = operands
    names = letters(len(ours.shape))
    if ours.shape == other.shape:
        return signature(node, operands, [names, names], [names], linear=[{0}])
    lent = [f"other{i}" for i in range(len(other.shape))]
    return signature(node, operands, [names, lent], [names], whole=lent, linear=[{0}])


def prelu(node: Node, operands: Operands) -> Rule:
    """A slope per channel (dim 1), or one slope."""
    names = letters(len(operands[0].shape))
    slope = [names[1] if len(names) > 1 else "slope"] * len(operands[1].shape)
    return signature(node, operands, [names, slope], [names], broadcast=True)


def glu(node: Node, operands: Operands) -> Rule:
    """``a * sigmoid(b)`` of the two halves of a dim: sharded in both halves alike."""
    names = letters(len(operands[0].shape))
    dim = axis(node, len(names))
    halves = [f"halves {name}" if i == dim else name for i, name in enumerate(names)]
    return signature(node, operands, [halves], [names], sizes={"halves": 2}, whole=["halves"])


def both_tensors(node: Node, operands: Operands) -> tuple[str, ...]:
    """Each of two tensors is needed for the other's gradient; a static number needs none."""
    return ("in0", "in1") if len(node.inputs) == 2 else ()


# Functions of one tensor (and numbers), by what their backward needs.
NEEDS_NOTHING = """
    ceil floor round round.decimals trunc frac sign sgn signbit isnan isinf isfinite isposinf isneginf isreal
    logical_not bitwise_not
    eq.Scalar ne.Scalar ge.Scalar gt.Scalar le.Scalar lt.Scalar
    bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar bitwise_left_shift.Tensor_Scalar
    bitwise_right_shift.Tensor_Scalar __and__.Scalar __or__.Scalar __xor__.Scalar __lshift__.Scalar __rshift__.Scalar
    floor_divide.Scalar fmod.Scalar remainder.Scalar div.Scalar_mode fill.Scalar
    zeros_like ones_like full_like empty_like
"""
NEEDS_INPUT = """
    abs absolute acos acosh arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh celu clamp_max
    clamp_min cosh digamma erfc erfinv exp2 float_power.Tensor_Scalar hardshrink hardsigmoid
    hardtanh leaky_relu lgamma log10 log1p log2 logit nan_to_num
    polygamma relu6 selu sinc sinh softshrink special_erf special_erfc
    special_erfinv special_expit special_logit special_log1p square tan threshold xlogy.Scalar_Other xlogy.Scalar_Self
"""
ACTIVATIONS_NEEDING_INPUT = "cos elu erf gelu hardswish log log_sigmoid mish silu sin softplus"
NEEDS_OUTPUT = "special_expm1 expm1 reciprocal rsqrt sqrt"
ACTIVATIONS_NEEDING_OUTPUT = "exp sigmoid tanh pow.Scalar"

# Functions of two tensors, which may be a tensor and a number.
PAIRS_NEEDING_NOTHING = """
    bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor
    __and__.Tensor __or__.Tensor __xor__.Tensor __lshift__.Tensor __rshift__.Tensor
    logical_and logical_or logical_xor
    eq.Tensor ne.Tensor ge.Tensor gt.Tensor le.Tensor lt.Tensor
    greater.Tensor greater_equal.Tensor less.Tensor less_equal.Tensor not_equal.Tensor isclose
    greater.Scalar greater_equal.Scalar less.Scalar less_equal.Scalar not_equal.Scalar
    floor_divide heaviside div.Tensor_mode nextafter
"""
PAIRS_NEEDING_BOTH = """
    atan2 arctan2 copysign.Tensor fmax fmin fmod.Tensor hypot logaddexp logaddexp2 max.other maximum min.other minimum
    float_power.Tensor_Tensor remainder.Tensor xlogy.Tensor clamp_max.Tensor clamp_min.Tensor polar
"""

# Copies and conversions of dtype.
COPIES = """
    clone contiguous lift_fresh_copy lift_fresh positive to.device to.dtype to.dtype_layout
    _to_copy alias_copy
"""
ALIASES = "alias detach _conj conj resolve_conj resolve_neg"


ROWS: dict[str, Row] = {
    **rows(NEEDS_NOTHING, Row(pointwise)),
    **rows("where.Scalar", Row(pointwise, kernel="add")),
    **rows(NEEDS_INPUT, Row(pointwise, saves=("in0",))),
    **rows("clamp clip clamp.Tensor clip.Tensor", Row(pointwise, saves=("in0",), kernel="add")),
    **rows(ACTIVATIONS_NEEDING_INPUT, Row(pointwise, saves=("in0",), kernel="activation")),
    **rows("pow.Tensor_Scalar", Row(pointwise, saves=("in0",), works=2, kernel="activation")),
    **rows(NEEDS_OUTPUT, Row(pointwise, saves=("out0",))),
    **rows("relu", Row(pointwise, saves=("out0",), kernel="add")),
    **rows(ACTIVATIONS_NEEDING_OUTPUT, Row(pointwise, saves=("out0",), kernel="activation")),
    **rows(PAIRS_NEEDING_NOTHING, Row(pointwise)),
    **rows(PAIRS_NEEDING_BOTH, Row(pointwise, saves=both_tensors)),
    **rows("pow.Tensor_Tensor", Row(pointwise, saves=both_tensors, kernel="activation")),
    **rows(COPIES, Row(linear_in({0}), passes=(0,), kernel="copy", numbers="kept")),
    **rows(ALIASES, Row(linear_in({0}), view=True, passes=(0,))),
    **rows("neg negative", Row(linear_in({0}), kernel="add")),
    **rows("real imag mul.Scalar div.Scalar multiply.Scalar divide.Scalar", Row(linear_in({0}))),
    **rows("add.Tensor", Row(sum_of_tensors, passes=(0, 1), kernel="add", numbers="added")),
    **rows("sub.Tensor subtract.Tensor", Row(sum_of_tensors, passes=(0,), kernel="add")),
    **rows("rsub.Tensor complex add.Scalar sub.Scalar rsub.Scalar", Row(sum_of_tensors, kernel="add")),
    **rows("mul.Tensor multiply.Tensor", Row(product, saves=both_tensors, mutual=True)),
    **rows("div.Tensor divide.Tensor true_divide.Tensor", Row(quotient, saves=both_tensors, mutual=True)),
    **rows("where.self", Row(linear_in({1, 2}), saves=("in0",), kernel="add")),
    **rows("where.ScalarOther where.ScalarSelf", Row(where_scalar, saves=("in0",), kernel="add")),
    **rows("masked_fill.Scalar", Row(masked_fill_scalar, saves=("in1",), kernel="add")),
    **rows("masked_fill.Tensor", Row(linear_in({0, 2}), saves=("in1",), kernel="add")),
    **rows("lerp.Scalar", Row(linear_in({0, 1}))),
    **rows("lerp.Tensor", Row(linear_in({0, 1}), saves=("in0", "in1", "in2"))),
    **rows("addcmul", Row(linear_in({0, 1}, {0, 2}), saves=("in1", "in2"))),
    **rows("addcdiv", Row(linear_in({0, 1}), saves=("in1", "in2"))),
    **rows("copy fill.Tensor", Row(linear_in({1}), kernel="copy")),  # of the first tensor they take only the shape
    **rows("type_as to.other", Row(typed_like, kernel="copy")),
    **rows("prelu _prelu_kernel", Row(prelu, saves=("in0", "in1"))),
    **rows("glu", Row(glu, saves=("in0",))),
}
