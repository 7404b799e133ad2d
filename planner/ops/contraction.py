"""Rows of matrix products: linear layers, matmul in all its forms, einsum."""

from __future__ import annotations

import math

from planner.graph import Node, TensorType
from planner.ops.factors import aligned, spanned, without_ones
from planner.ops.table import Row, contraction_flops
from planner.rules import Dims, Rule


@without_ones
def _linear(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``x[..., k], w[n, k] or w[k], bias[n] -> y[..., n]``."""
    x, w, *bias = operands
    sizes, leading = spanned("m", x.shape[:-1])
    sizes["k"] = x.shape[-1]
    out: Dims = (("n",),) if len(w.shape) == 2 else ()
    if out:
        sizes["n"] = w.shape[0]
    operand_dims = ((*leading, ("k",)), (*out, ("k",)), *(aligned(b.shape, out, sizes) for b in bias))
    addends = frozenset(range(2, len(operands)))
    return Rule(
        sizes=sizes,
        operands=operand_dims,
        results=((*leading, *out),),
        addends=addends,
        linear=(frozenset({0}) | addends, frozenset({1}) | addends),
    )


def _matmul_factors(
    a: tuple[int, ...], b: tuple[int, ...], batch: tuple[int, ...]
) -> tuple[dict[str, int], Dims, Dims, Dims]:
    """Factor sizes and dims of ``a @ b`` (torch.matmul's rules), with broadcast ``batch`` dims."""
    sizes, batch_dims = spanned("b", batch)
    sizes["k"] = a[-1]
    rows: Dims = (("m",),) if len(a) > 1 else ()
    columns: Dims = (("n",),) if len(b) > 1 else ()
    if rows:
        sizes["m"] = a[-2]
    if columns:
        sizes["n"] = b[-1]
    left = (*aligned(a[:-2], batch_dims, sizes), *rows, ("k",))
    right = (*aligned(b[:-2], batch_dims, sizes), ("k",), *columns)
    return sizes, left, right, (*batch_dims, *rows, *columns)


@without_ones
def _matmul(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``a[..., m, k], b[..., k, n] -> y[..., m, n]``; either may be a vector."""
    a, b = operands
    kept = (len(a.shape) > 1) + (len(b.shape) > 1)
    shape = node.results[0].shape
    sizes, left, right, out = _matmul_factors(a.shape, b.shape, shape[: len(shape) - kept])
    return Rule(sizes=sizes, operands=(left, right), results=(out,), linear=(frozenset({0}), frozenset({1})))


@without_ones
def _added_matmul(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``c, a[..., m, k], b[..., k, n] -> beta c + alpha a b``; ``c`` broadcasts."""
    c, a, b = operands
    shape = node.results[0].shape
    kept = (len(a.shape) > 1) + (len(b.shape) > 1)
    sizes, left, right, out = _matmul_factors(a.shape, b.shape, shape[: len(shape) - kept])
    return Rule(
        sizes=sizes,
        operands=(aligned(c.shape, out, sizes), left, right),
        results=(out,),
        addends=frozenset({0}),
        linear=(frozenset({0, 1}), frozenset({0, 2})),
    )


@without_ones
def _outer(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """``a[m], b[n] -> y[m, n]``."""
    a, b = operands
    return Rule(
        sizes={"m": a.shape[0], "n": b.shape[0]},
        operands=((("m",),), (("n",),)),
        results=((("m",), ("n",)),),
        linear=(frozenset({0}), frozenset({1})),
    )


@without_ones
def _einsum(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """The equation itself; an ellipsis or a repeated label in one operand keeps every factor whole."""
    equation = str(node["equation"]).replace(" ", "")
    inputs, _, output = equation.partition("->")
    terms = inputs.split(",")
    if "..." in equation or "->" not in equation or any(len(set(term)) < len(term) for term in terms):
        return _whole(node, operands)
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        for label, size in zip(term, operand.shape, strict=True):
            sizes[label] = max(sizes.get(label, 1), size)
    labels: tuple[Dims, ...] = tuple(tuple((label,) for label in term) for term in terms)
    return Rule(
        sizes=sizes,
        operands=tuple(aligned(o.shape, dims, sizes) for o, dims in zip(operands, labels, strict=True)),
        results=(tuple((label,) for label in output),),
        linear=tuple(frozenset({i}) for i in range(len(operands))),
    )


def _einsum_flops(node: Node, operands: tuple[TensorType, ...], rule: Rule) -> int:
    """Operands are contracted pairwise, left to right: a multiply and an add per point of each pair's space.

    Equations that the rule does not read count as one pass over the operands and the result.
    """
    equation = str(node["equation"]).replace(" ", "")
    inputs, _, output = equation.partition("->")
    if rule.whole or len(operands) == 1:
        return 2 * sum(t.numel for t in (*operands, *node.results))
    terms = inputs.split(",")
    flops, held = 0, set(terms[0])
    for i, term in enumerate(terms[1:], start=1):
        space = held | set(term)
        flops += 2 * math.prod(rule.sizes.get(label, 1) for label in space)
        held = space & (set(output) | set("".join(terms[i + 1 :])))
    return flops


@without_ones
def _whole(node: Node, operands: tuple[TensorType, ...]) -> Rule:
    """Every dim a factor of its own, none to be sharded."""
    tensors = (*operands, *node.results)
    sizes = {f"{t}.{d}": size for t, tensor in enumerate(tensors) for d, size in enumerate(tensor.shape)}
    dims: list[Dims] = [tuple((f"{t}.{d}",) for d in range(len(tensor.shape))) for t, tensor in enumerate(tensors)]
    count = len(operands)
    return Rule(sizes, tuple(dims[:count]), tuple(dims[count:]), whole=frozenset(sizes))


_BOTH = ("in0", "in1")

ROWS: dict[str, Row] = {
    "aten.linear.default": Row(_linear, contraction_flops, saves=_BOTH),
    "aten.matmul.default": Row(_matmul, contraction_flops, saves=_BOTH),
    "aten.mm.default": Row(_matmul, contraction_flops, saves=_BOTH),
    "aten.bmm.default": Row(_matmul, contraction_flops, saves=_BOTH),
    "aten.mv.default": Row(_matmul, contraction_flops, saves=_BOTH),
    "aten.dot.default": Row(_matmul, contraction_flops, saves=_BOTH),
    "aten.outer.default": Row(_outer, contraction_flops, saves=_BOTH),
    "aten.addmm.default": Row(_added_matmul, contraction_flops, saves=("in1", "in2")),
    "aten.addmv.default": Row(_added_matmul, contraction_flops, saves=("in1", "in2")),
    "aten.baddbmm.default": Row(_added_matmul, contraction_flops, saves=("in1", "in2")),
    "aten.einsum.default": Row(
        _einsum, _einsum_flops, saves=lambda node: tuple(f"in{i}" for i in range(len(node.inputs)))
    ),
}
