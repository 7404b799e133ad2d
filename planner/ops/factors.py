"""Helpers that rules of several families are made of: operand positions, spans of factors, broadcasting."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace

from planner.graph import Node, Ref, TensorType
from planner.ops.table import RuleOf
from planner.rules import Dims, Rule, Special


def positions(node: Node) -> dict[str, int]:
    """Operand position of every tensor argument that is present, by schema name."""
    present = [name for name, value in node.args if isinstance(value, Ref)]
    return {name: position for position, name in enumerate(present)}


def spanned(name: str, shape: tuple[int, ...]) -> tuple[dict[str, int], Dims]:
    """A factor for every dim of ``shape``, ``name`` followed by its number: their sizes, and the dims."""
    factors = [f"{name}{i}" for i in range(len(shape))]
    return dict(zip(factors, shape, strict=True)), tuple((factor,) for factor in factors)


def aligned(shape: tuple[int, ...], dims: Dims, sizes: Mapping[str, int]) -> Dims:
    """Dims of a tensor of ``shape`` that broadcasts, aligned from the right, against ``dims``."""
    own = dims[len(dims) - len(shape) :]
    return tuple(
        () if size == 1 and math.prod(sizes[f] for f in dim) > 1 else dim for size, dim in zip(shape, own, strict=True)
    )


def without_ones(rule_of: RuleOf) -> RuleOf:
    """The same rule without factors of size 1: dims that only they make up are ``()``."""

    @functools.wraps(rule_of)
    def wrapped(node: Node, operands: tuple[TensorType, ...]) -> Rule:
        rule = rule_of(node, operands)
        sizes = {factor: size for factor, size in rule.sizes.items() if size != 1}

        def kept(tensors: tuple[Dims, ...]) -> tuple[Dims, ...]:
            return tuple(tuple(tuple(f for f in dim if f in sizes) for dim in dims) for dims in tensors)

        def narrowed(special: Special) -> Special:
            inner = (replace(i, factors=tuple(f for f in i.factors if f in sizes)) for i in special.inner)
            return replace(special, inner=tuple(inner))

        return replace(
            rule,
            sizes=sizes,
            operands=kept(rule.operands),
            results=kept(rule.results),
            whole=rule.whole & sizes.keys(),
            special={factor: narrowed(special) for factor, special in rule.special.items() if factor in sizes},
        )

    return wrapped
