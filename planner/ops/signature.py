"""Signatures: how most rules are written, in the manner of einsum and einops.

A signature labels every dim of every tensor with factor names, major first: ``"d0"`` is one factor,
``"pieces n"`` is a dim that is made of two. Equal names are the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from planner.ir.graph import Node, TensorType
from planner.ops.sharding_rule import Dims, Rule
from planner.ops.table import Row

Labels = Sequence[str]


def signature(
    node: Node,
    operands: Sequence[TensorType],
    ins: Sequence[Labels],
    outs: Sequence[Labels],
    *,
    sizes: Mapping[str, int] | None = None,
    whole: Iterable[str] = (),
    broadcast: bool = False,
    linear: Iterable[Collection[int]] = (),
    addends: Collection[int] = (),
) -> Rule:
    """The rule that labels on operands and results describe.

    A name that stands for different sizes in different tensors cannot be one factor (a slice and what it
    was cut from): each such dim gets a whole factor of its own. Dims of size 1 have no factor.

    Args:
        ins, outs: per operand and per result, a label per dim.
        sizes: sizes of names in labels of several names; one name per label may be left to follow.
        whole: names that must not be sharded.
        broadcast: a dim of size 1 goes with any size, and is no reason to keep the others whole.
        linear: as in :class:`Rule`; sets that do not apply here are dropped (:func:`linear_sets`).
        addends: as in :class:`Rule`.
    """
    tensors = [
        (f"{kind}{position}", _split_dims(shape.shape, labels, sizes or {}))
        for kind, types, rows in (("in", operands, ins), ("out", node.results, outs))
        for position, (shape, labels) in enumerate(zip(types, rows, strict=True))
    ]
    seen: dict[str, set[int]] = {}
    for _, dims in tensors:
        for dim in dims:
            for name, size in dim:
                if size != 1 or not broadcast:
                    seen.setdefault(name, set()).add(size)
    factors: dict[str, int] = {}
    kept = set(whole)
    named: list[Dims] = []
    for tensor, dims in tensors:
        named_dims = []
        for dim in dims:
            names = []
            for name, size in dim:
                if size == 1:
                    continue
                if len(seen[name]) > 1:
                    name = f"{name}.{tensor}"
                    kept.add(name)
                factors[name] = size
                names.append(name)
            named_dims.append(tuple(names))
        named.append(tuple(named_dims))
    return Rule(
        sizes=factors,
        operands=tuple(named[: len(operands)]),
        results=tuple(named[len(operands) :]),
        whole=frozenset(kept & factors.keys()),
        addends=frozenset(addends),
        linear=linear_sets(node, operands, linear),
    )


def _split_dims(shape: tuple[int, ...], labels: Labels, sizes: Mapping[str, int]) -> list[list[tuple[str, int]]]:
    """Each dim as (name, size) pairs; the name without a given size has what the others leave of the dim."""
    assert len(shape) == len(labels), f"{len(labels)} labels for shape {shape}"
    found = []
    for size, label in zip(shape, labels, strict=True):
        names = label.split()
        given = math.prod(sizes.get(name, 1) for name in names)
        found.append([(name, sizes.get(name, size // given)) for name in names])
    return found


def letters(rank: int) -> list[str]:
    """``d0``, ``d1``, ...: a name for each dim."""
    return [f"d{i}" for i in range(rank)]


def linear_sets(
    node: Node, operands: Sequence[TensorType], sets: Iterable[Collection[int]]
) -> tuple[frozenset[int], ...]:
    """The sets of operands in which the operator really is linear.

    Sums of integers and booleans do not survive reshardings, so results and operands must be floating
    point; and a tensor that is also read outside the set (``x * x``) does not stay fixed.
    """
    if not all(map(is_floating, node.results)):
        return ()
    refs = node.inputs
    return tuple(
        frozenset(chosen)
        for chosen in sets
        if chosen
        and all(is_floating(operands[i]) for i in chosen)
        and {refs[i] for i in chosen}.isdisjoint(ref for i, ref in enumerate(refs) if i not in chosen)
    )


def is_floating(tensor: TensorType) -> bool:
    """Real or complex floating point."""
    return tensor.dtype.startswith(("float", "bfloat", "complex"))


def static_int(value: object) -> int:
    """A static integer argument."""
    assert isinstance(value, int), f"{value!r} is not a static integer"
    return value


def static_ints(value: object) -> tuple[int, ...]:
    """A static list of integers; ``None`` is the empty list and a single integer a list of one."""
    if value is None:
        return ()
    if isinstance(value, tuple):
        return tuple(map(static_int, value))
    return (static_int(value),)


def axis(node: Node, rank: int, name: str = "dim") -> int:
    """The argument ``name`` as a dim from 0."""
    return static_int(node[name]) % max(rank, 1)


def axes(node: Node, rank: int) -> set[int]:
    """The argument ``dim`` as a set of dims from 0; none given means all."""
    return {dim % max(rank, 1) for dim in static_ints(node["dim"])} or set(range(rank))


def rows(names: str, row: Row) -> dict[str, Row]:
    """The same row for several operators, named without ``aten.`` (and ``.default``), separated by blanks."""
    return {f"aten.{name}" if "." in name else f"aten.{name}.default": row for name in names.split()}
