"""Matrix products and convolutions: a batched product, or groups of channels, one for each member."""

from __future__ import annotations

import string
from typing import Any

import torch

from autopar.arrays.rules.calls import Data, Emitted, MemberValue, OperatorCall, StackingRule
from autopar.arrays.rules.folds import channels_folded, channels_unfolded

aten = torch.ops.aten


def linear(call: OperatorCall) -> Emitted:
    """``baddbmm``; where members read the same input, one product whose output features are those of all members."""
    x, weight, bias = call.tensor("input"), call.tensor("weight"), call["bias"]
    if weight.rank != 2 or x.rank < 1 or (bias is not None and bias.stacked != weight.stacked):
        return NotImplemented
    if not weight.stacked:
        return call.run()
    out, into = weight.shape
    if not x.stacked:
        rows = None if bias is None else bias.data.reshape(call.members * out)
        every = torch.nn.functional.linear(x.data, weight.data.reshape(call.members * out, into), rows)
        return every.reshape(*x.shape[:-1], call.members, out).movedim(-2, 0)
    rows, columns = x.data.reshape(call.members, -1, into), weight.data.transpose(1, 2)
    product = torch.bmm(rows, columns) if bias is None else torch.baddbmm(bias.data.unsqueeze(1), rows, columns)
    return product if x.rank == 2 else product.reshape(call.members, *call.results[0].shape)


def matmul(first: str, second: str) -> StackingRule:
    """A product of two arguments; dims of batches are broadcast."""
    return lambda call: _product(call, call.tensor(first), call.tensor(second))


def _product(call: OperatorCall, a: MemberValue, b: MemberValue) -> Data:
    rank = max(a.rank, b.rank, 2)
    left = _matrix(call, a, rank, -2) if a.rank == 1 else call.aligned(a, rank)
    right = _matrix(call, b, rank, -1) if b.rank == 1 else call.aligned(b, rank)
    found = torch.matmul(left, right)
    found = found.squeeze(-1) if b.rank == 1 else found
    return found.squeeze(-2 if b.rank > 1 else -1) if a.rank == 1 else found


def _matrix(call: OperatorCall, vector: MemberValue, rank: int, dim: int) -> Data:
    """A vector as a matrix of one row or column, broadcast against ``rank`` dims."""
    matrix = vector.data.unsqueeze(dim)
    shape = (1, *vector.shape) if dim == -2 else (*vector.shape, 1)
    return matrix.reshape(call.members, *[1] * (rank - 2), *shape) if vector.stacked else matrix


def added_product(first: str, second: str) -> StackingRule:
    """``beta self + alpha first second``."""

    def rule(call: OperatorCall) -> Emitted:
        product = _product(call, call.tensor(first), call.tensor(second))
        product = product if call["alpha"] == 1 else product * call["alpha"]
        added = call.aligned(call.tensor("self"), len(call.results[0].shape))
        return product + (added if call["beta"] == 1 else added * call["beta"])

    return rule


def einsum(call: OperatorCall) -> Emitted:
    """The equation with one letter more."""
    inputs, arrow, output = str(call["equation"]).replace(" ", "").partition("->")
    letter = next((each for each in string.ascii_letters if each not in inputs), None)
    if not arrow or letter is None:
        return NotImplemented
    values = call["tensors"]
    terms = [letter * value.stacked + term for term, value in zip(inputs.split(","), values, strict=True)]
    return torch.einsum(f"{','.join(terms)}->{letter}{output}", *[value.data for value in values])


def convolution(call: OperatorCall) -> Emitted:
    """Members are groups of channels, which stay side by side in memory until something needs them apart.

    Where members read the same input, theirs is one convolution with more output channels.
    """
    x, weight, bias = call.tensor("input"), call.tensor("weight"), call["bias"]
    transposed = call.args.get("transposed", "transpose" in str(call.operator))
    if not call.is_stacked("weight", "bias"):
        return NotImplemented
    groups: dict[str, Any] = {"groups": call["groups"] * call.members}
    if x.stacked or transposed or call["groups"] != 1:
        given = channels_folded(call, x, weight.rank - 2)
    else:
        given, groups = x.data, {}
    first, *others = weight.shape
    weights = call.front(weight).reshape(call.members * first, *others)
    biases = None if bias is None else call.front(bias).reshape(-1)
    return channels_unfolded(call, call.run(input=given, weight=weights, bias=biases, **groups), weight.rank - 2)
