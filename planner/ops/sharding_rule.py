"""Factor rules: the einsum-like signature of an operator, from which its sharding strategies follow.

A rule names the *factors* of an operator: independent loop indices. Each dim of each tensor is a
tuple of factors, major first (``()`` for a dim of size 1 that no factor spans). To shard factor ``f``
on a mesh axis: tensors that have ``f`` become ``S``, operands that lack it ``R`` (``P`` if they are
added to the result), results that lack it ``P``. That is the whole strategy generator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.ir.layout import I, LocalType, P, R, Shard

Dim = tuple[str, ...]
Dims = tuple[Dim, ...]


@dataclass(frozen=True)
class Inner:
    """A collective that an operator's local form performs itself when a factor is sharded.

    It moves ``count`` elements for every index of ``factors`` (rank-local), of ``item_bytes`` each; ranks that share
    factors of ``shared`` share these elements, and one of so many ``parts`` of them is moved. What goes ``around`` the
    ranks is called once for each of the others; where a rank meets only so many indices of the last factor before its
    own (``reach``), as often as it takes to bring these, with those that are left. What only ``needs`` some operands,
    by place, is on its way while others are computed (:mod:`planner.formulation.overlap`).
    """

    kind: str
    factors: tuple[str, ...]
    item_bytes: int
    count: int = 1
    phase: str = "forward"
    shared: tuple[str, ...] = ()
    around: bool = False
    reach: int | None = None
    parts: int = 1
    needs: tuple[int, ...] = ()


@dataclass(frozen=True)
class FactorWay:
    """A way to shard a factor: most need only what follows from where it lies in the tensors (:data:`MECHANICAL`).

    Attributes:
        name: tells it from other ways to shard the same factor.
        operands, results: local types where they differ from those that follow, by position.
        inner: collectives of the operator's local form.
        strided: the local form also holds when each rank has several strips of the factor.
        by_micro_batch: a micro-batch may do without what the others share, where a pin asks for that: it is another
            computation then (batch norm).
        uneven: how much each rank has to do is known in the step alone.
        alone: factors that no other axis shards.
        in_turn: the operator's kernel runs once for each rank of the axis, on what that rank has.
        streamed: panels of a tensor go around that conversions would gather or scatter for the first way.
        multiple: of so many indices of the factor a rank has a multiple: 2, if it halves them.
    """

    name: str = ""
    operands: Mapping[int, LocalType] = field(default_factory=dict, hash=False)
    results: Mapping[int, LocalType] = field(default_factory=dict, hash=False)
    inner: tuple[Inner, ...] = ()
    strided: bool = False
    by_micro_batch: bool = False
    uneven: bool = False
    alone: tuple[str, ...] = ()
    in_turn: bool = False
    streamed: bool = False
    multiple: int = 1

    def named(self, factor: str) -> str:
        """A factor that is sharded in this way: ``t``, ``t.dispatch``."""
        return f"{factor}.{self.name}" if self.name else factor


MECHANICAL = FactorWay(strided=True)
"""How a factor is sharded that needs nothing of its own."""


@dataclass(frozen=True)
class Rule:
    """The factors of one operator application.

    Attributes:
        sizes: global size of each factor.
        operands, results: per tensor, per dim, the factors that make it up, major first.
        whole: factors that must not be sharded (softmax dim, normalised dims, windows).
        addends: operands that are added to the result; under a contracted factor they must be ``P``.
        linear: sets of operands in which the result is jointly linear while the others stay fixed, so
            that ``P`` on all operands of a set (``R`` on the rest) gives ``P``.
        ways: factors whose sharding needs types or collectives of its own, with every way to shard them.
        terms: backward is linear in the gradients of the results, as every derivative is: it may be given terms of a
            sum. Where it is not, it needs them complete.
    """

    sizes: Mapping[str, int]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    whole: frozenset[str] = frozenset()
    addends: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    ways: Mapping[str, tuple[FactorWay, ...]] = field(default_factory=dict)
    terms: bool = True

    def ways_of(self, factor: str) -> tuple[FactorWay, ...]:
        """The ways to shard a factor."""
        return self.ways.get(factor, (MECHANICAL,))

    def may_stride(self, factor: str) -> bool:
        """Whether ``factor`` may be sharded strip by strip."""
        return factor not in self.whole and any(way.strided for way in self.ways_of(factor))

    def check(self, operand_shapes: tuple[tuple[int, ...], ...], result_shapes: tuple[tuple[int, ...], ...]) -> None:
        """Assert that every dim's factors multiply to its size."""
        for dims, shape in zip((*self.operands, *self.results), (*operand_shapes, *result_shapes), strict=True):
            assert len(dims) == len(shape), f"rule has {len(dims)} dims for shape {shape}"
            for dim, size in zip(dims, shape, strict=True):
                assert math.prod(self.sizes[f] for f in dim) == size, f"factors {dim} do not make up size {size}"


@dataclass(frozen=True)
class AxisStrategy:
    """One way to run an operator on one mesh axis: the local type of every operand and result.

    ``factor`` is the factor that is sharded, in one of its ways; ``""`` when none is (then ``kind`` says how).
    """

    kind: str
    factor: str
    outer: int
    operands: tuple[LocalType, ...]
    results: tuple[LocalType, ...]
    way: FactorWay = MECHANICAL

    @property
    def inner(self) -> tuple[Inner, ...]:
        """Collectives of the operator's local form."""
        return self.way.inner

    @property
    def sharded(self) -> str:
        """The factor and, where it is sharded in a way that has a name, that name: ``t``, ``t.dispatch``."""
        return self.way.named(self.factor)

    def __str__(self) -> str:
        if self.kind == "partial" and {*self.operands} != {P}:  # there may be several: says of which operands
            return "partial/" + "+".join(str(i) for i, local_type in enumerate(self.operands) if local_type == P)
        if not self.factor:
            return self.kind
        return self.sharded if self.outer == 1 else f"{self.sharded}/{self.outer}"


def find(dims: Dims, factor: str, sizes: Mapping[str, int]) -> tuple[int, int] | None:
    """Where ``factor`` lies in a tensor: (dim, product of the factors major to it in that dim)."""
    for position, dim in enumerate(dims):
        if factor in dim:
            return position, math.prod(sizes[f] for f in dim[: dim.index(factor)])
    return None


def shard_factor(rule: Rule, factor: str, outer: int = 1, way: FactorWay | None = None) -> AxisStrategy:
    """The strategy that shards ``factor`` (each of its ``outer`` strips) on an axis, in a way of it, or the first."""
    way = way or rule.ways_of(factor)[0]

    def place(dims: Dims, absent: LocalType) -> LocalType:
        found = find(dims, factor, rule.sizes)
        return Shard(found[0], found[1] * outer) if found else absent

    contracted = any(find(dims, factor, rule.sizes) is None for dims in rule.results)
    operands = tuple(
        way.operands.get(i, place(dims, P if contracted and i in rule.addends else R))
        for i, dims in enumerate(rule.operands)
    )
    results = tuple(way.results.get(i, place(dims, P)) for i, dims in enumerate(rule.results))
    return AxisStrategy("shard", factor, outer, operands, results, way)


def axis_strategies(rule: Rule, size: int, outers: Mapping[str, frozenset[int]] | None = None) -> list[AxisStrategy]:
    """Every way to run an operator on one axis of ``size`` ranks.

    Args:
        rule: the operator's factor rule.
        size: ranks on the axis.
        outers: strip counts worth trying per factor (default: 1 only).
    """
    found = replicated(rule)
    for factor, length in rule.sizes.items():
        if factor in rule.whole or length < size or size == 1:
            continue
        for outer in sorted((outers or {}).get(factor, frozenset()) | {1}):
            if length % outer == 0 and (length // outer) % size == 0:
                ways = (way for way in rule.ways_of(factor) if outer == 1 or way.strided)
                fit = (way for way in ways if length % (size * way.multiple) == 0)
                found += [shard_factor(rule, factor, outer, way) for way in fit]
    for operands in rule.linear:
        types = tuple(P if i in operands else R for i in range(len(rule.operands)))
        found.append(AxisStrategy("partial", "", 1, types, (P,) * len(rule.results)))
    return found


def replicated(rule: Rule) -> list[AxisStrategy]:
    """The ways to run an operator in full on every rank: gradients complete (I) or, where they may be, partial (R)."""
    operands, results = len(rule.operands), len(rule.results)
    found = [AxisStrategy("invariant", "", 1, (I,) * operands, (I,) * results)]
    if rule.terms:
        found.append(AxisStrategy("replicate", "", 1, (R,) * operands, (R,) * results))
    return found
