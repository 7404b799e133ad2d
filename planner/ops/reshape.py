"""Operators that move elements without computing: views, permutations, copies along new dims, splits and joins.

All are linear. A sharded factor survives being merged behind another one, or split off from behind it, as
``S(dim, outer)``: that is what makes every factor of a view shardable, not only the leading one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from planner.ir.graph import Node, TensorType
from planner.ops.elementwise import broadcast_labels, linear_in, pointwise
from planner.ops.sharding_rule import Dim, Dims, Rule
from planner.ops.signature import Labels, axis, letters, linear_sets, rows, signature, static_int, static_ints
from planner.ops.table import Row, RuleOf

Operands = tuple[TensorType, ...]
Shape = tuple[int, ...]
Pieces = list[tuple[int, int]]  # (size, dim) of consecutive factors


def common_factors(before: Shape, after: Shape) -> tuple[dict[str, int], Dims, Dims, frozenset[str]]:
    """Factor two shapes of equally many elements, in row-major order, into the same factors.

    ``[8, 3] -> [2, 12]`` has the factors 2, 4 and 3. Elements may be tangled in between: after the common
    2 of ``[4, 6] -> [6, 4]``, neither 2 and 6 nor 3 and 4 can be told from the other side. There each side
    has factors of its own, which are whole.

    Returns:
        Sizes of the factors, the dims of both shapes, and the factors that are whole.
    """
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    dims: tuple[list[Dim], list[Dim]] = ([()] * len(before), [()] * len(after))
    for step, sides in enumerate(_steps(before, after)):
        shared = all(len(pieces) == 1 for pieces in sides)
        for side, pieces, own in zip(("in", "out"), sides, dims, strict=True):
            for position, (size, dim) in enumerate(pieces):
                name = f"d{step}" if shared else f"d{step}.{side}{position}"
                own[dim] += (name,)
                sizes[name] = size
                if not shared:
                    whole.add(name)
    return sizes, tuple(dims[0]), tuple(dims[1]), frozenset(whole)


def _steps(before: Shape, after: Shape) -> Iterator[tuple[Pieces, Pieces]]:
    """The shortest stretches of both shapes that span the same elements, major first.

    Both shapes are walked together. Each step takes the greatest common divisor of what is left of the two
    current dims; if there is none, whole dims up to the next place where dims of both shapes end.
    """
    left, right = ([(size, dim) for dim, size in enumerate(shape) if size != 1] for shape in (before, after))
    if 0 in before:
        yield left, right
        return
    while left:
        (a, i), (b, j) = left.pop(0), right.pop(0)
        common = math.gcd(a, b)
        if common > 1:
            yield [(common, i)], [(common, j)]
            left[:0] = [(a // common, i)] if a > common else []
            right[:0] = [(b // common, j)] if b > common else []
            continue
        ins, outs = [(a, i)], [(b, j)]
        while a != b:
            if a < b:
                ins.append(left.pop(0))
                a *= ins[-1][0]
            else:
                outs.append(right.pop(0))
                b *= outs[-1][0]
        yield ins, outs


def view(node: Node, operands: Operands) -> Rule:
    """The same elements in row-major order under another shape (as the result says; sizes may be -1)."""
    sizes, before, after, whole = common_factors(operands[0].shape, node.results[0].shape)
    others = (after,) * (len(operands) - 1)  # view_as(other): other has the result's shape
    linear = linear_sets(node, operands, [{0}])
    return Rule(sizes, (before, *others), (after,), whole=whole, linear=linear)


def permuted(order: Callable[[Node, int], Sequence[int]]) -> RuleOf:
    """Dims in another order: ``order(node, rank)`` says which operand dim each result dim is."""

    def rule(node: Node, operands: Operands) -> Rule:
        names = letters(len(operands[0].shape))
        return signature(node, operands, [names], [[names[i] for i in order(node, len(names))]], linear=[{0}])

    return rule


def swapped(first: str, second: str) -> Callable[[Node, int], Sequence[int]]:
    """The order that exchanges the dims in two arguments."""

    def order(node: Node, rank: int) -> Sequence[int]:
        a, b = axis(node, rank, first), axis(node, rank, second)
        exchanged = list(range(rank))
        if rank:
            exchanged[a], exchanged[b] = b, a
        return exchanged

    return order


def last_two_swapped(node: Node, rank: int) -> Sequence[int]:
    """Matrices transposed."""
    return [*range(rank - 2), rank - 1, rank - 2]


def reversed_order(node: Node, rank: int) -> Sequence[int]:
    """The last dim first."""
    return range(rank)[::-1]


def permute_order(node: Node, rank: int) -> Sequence[int]:
    """As said."""
    return [dim % rank for dim in static_ints(node["dims"])]


def movedim_order(node: Node, rank: int) -> Sequence[int]:
    """Some dims moved to new places, the others in order around them."""
    moves = zip(static_ints(node["destination"]), static_ints(node["source"]), strict=True)
    moved = {to % rank: where % rank for to, where in moves}
    others = iter([dim for dim in range(rank) if dim not in moved.values()])
    return [moved[dim] if dim in moved else next(others) for dim in range(rank)]


def broadcast_tensors(node: Node, operands: Operands) -> Rule:
    """Every operand expanded to one shape."""
    return pointwise(node, operands, range(len(operands)))


def repeat(argument: str) -> RuleOf:
    """Each dim ``(r, d)``: ``r`` copies, a factor that the operand lacks, major to the dim itself."""

    def rule(node: Node, operands: Operands) -> Rule:
        rank = len(node.results[0].shape)
        copies = static_ints(node[argument])
        copies = (1,) * (rank - len(copies)) + copies
        outs = [f"copies{i} d{i}" for i in range(rank)]
        sizes = {f"copies{i}": count for i, count in enumerate(copies)}
        return signature(node, operands, broadcast_labels(operands, rank), [outs], sizes=sizes, linear=[{0}])

    return rule


def repeat_interleave(node: Node, operands: Operands) -> Rule:
    """Each element repeated: the dim is ``(d, r)``, with ``r`` minor. Without ``dim`` all dims are flattened."""
    names = letters(len(operands[0].shape))
    sizes = {"copies": static_int(node["repeats"])}
    if node["dim"] is None:
        sizes |= dict(zip(names, operands[0].shape, strict=True))
        outs = [" ".join([*names, "copies"])]
    else:
        outs = [f"{name} copies" if i == axis(node, len(names)) else name for i, name in enumerate(names)]
    return signature(node, operands, [names], [outs], sizes=sizes, linear=[{0}])


def split(node: Node, operands: Operands) -> Rule:
    """Pieces of a dim. Equal ones: the dim is ``(pieces, n)``, and ``n`` is sharded in each piece alike."""
    names = letters(len(operands[0].shape))
    dim = axis(node, len(names))
    pieces = {piece.shape[dim] for piece in node.results}
    count = len(node.results)
    outs = [names] * count
    if len(pieces) > 1:
        return signature(node, operands, [names], outs, linear=[{0}])
    whole = [f"pieces {name}" if i == dim else name for i, name in enumerate(names)]
    return signature(node, operands, [whole], outs, sizes={"pieces": count}, whole=["pieces"], linear=[{0}])


def unbind(node: Node, operands: Operands) -> Rule:
    """One result per index of a dim, which is whole."""
    names = letters(len(operands[0].shape))
    dim = axis(node, len(names))
    outs = [names[:dim] + names[dim + 1 :]] * len(node.results)
    return signature(node, operands, [names], outs, whole=[names[dim]], linear=[{0}])


def cat(node: Node, operands: Operands) -> Rule:
    """The inverse of :func:`split`. An operand of shape ``(0,)`` is nothing, whatever the others are."""
    rank = len(node.results[0].shape)
    names = letters(rank)
    dim = axis(node, rank)
    ins: list[Labels] = [names if len(x.shape) == rank else ["nothing"] for x in operands]
    together = [range(len(operands))]
    if len({x.shape for x in operands}) > 1:
        return signature(node, operands, ins, [names], whole=["nothing"], linear=together)
    outs = [f"parts {name}" if i == dim else name for i, name in enumerate(names)]
    sizes = {"parts": len(operands)}
    return signature(node, operands, ins, [outs], sizes=sizes, whole=["parts"], linear=together)


def stack(node: Node, operands: Operands) -> Rule:
    """``cat`` along a new dim, which is whole."""
    names = letters(len(operands[0].shape))
    dim = axis(node, len(names) + 1)
    outs = [*names[:dim], "stack", *names[dim:]]
    together = [range(len(operands))]
    return signature(node, operands, [names] * len(operands), [outs], whole=["stack"], linear=together)


def meshgrid(node: Node, operands: Operands) -> Rule:
    """One dim per vector; every result has all dims, the first two exchanged for ``xy``."""
    names = letters(len(operands))
    ins = [[name] if x.shape else [] for name, x in zip(names, operands, strict=True)]
    outs = [names[1], names[0], *names[2:]] if node["indexing"] == "xy" and len(names) > 1 else names
    return signature(node, operands, ins, [outs] * len(node.results), linear=[range(len(operands))])


def view_as_complex(node: Node, operands: Operands) -> Rule:
    """The last dim, of real and imaginary part, goes."""
    names = letters(len(node.results[0].shape))
    return signature(node, operands, [[*names, "parts"]], [names], whole=["parts"], linear=[{0}])


def view_as_real(node: Node, operands: Operands) -> Rule:
    """A last dim, of real and imaginary part, comes."""
    names = letters(len(operands[0].shape))
    return signature(node, operands, [names], [[*names, "parts"]], whole=["parts"], linear=[{0}])


def pixel_shuffle(node: Node, operands: Operands) -> Rule:
    """``[.., c r1 r2, h, w] -> [.., c, h r1, w r2]``."""
    r = static_int(node["upscale_factor"])
    batch = letters(len(operands[0].shape) - 3)
    ins, outs = [*batch, "c r1 r2", "h", "w"], [*batch, "c", "h r1", "w r2"]
    return signature(node, operands, [ins], [outs], sizes={"r1": r, "r2": r}, whole=["r1", "r2"], linear=[{0}])


def pixel_unshuffle(node: Node, operands: Operands) -> Rule:
    """``[.., c, h r1, w r2] -> [.., c r1 r2, h, w]``."""
    r = static_int(node["downscale_factor"])
    batch = letters(len(operands[0].shape) - 3)
    ins, outs = [*batch, "c", "h r1", "w r2"], [*batch, "c r1 r2", "h", "w"]
    return signature(node, operands, [ins], [outs], sizes={"r1": r, "r2": r}, whole=["r1", "r2"], linear=[{0}])


# The same elements in order, under another shape. ``reshape`` and ``flatten`` copy where strides forbid a view.
VIEWS = """
    view view_as _unsafe_view reshape reshape_as _reshape_alias flatten.using_ints unflatten.int ravel
    squeeze squeeze.dim squeeze.dims unsqueeze
"""
VIEW_COPIES = "view_copy _reshape_copy squeeze_copy squeeze_copy.dim squeeze_copy.dims unsqueeze_copy"

# The same dims in another order.
ORDERS: dict[str, Callable[[Node, int], Sequence[int]]] = {
    "t numpy_T numpy_T.a": reversed_order,
    "mT mT.a adjoint matrix_H matrix_H.a": last_two_swapped,
    "transpose.int swapdims": swapped("dim0", "dim1"),
    "swapaxes": swapped("axis0", "axis1"),
    "permute": permute_order,
    "movedim.int movedim.intlist moveaxis.int moveaxis.intlist": movedim_order,
}
ORDER_COPIES: dict[str, Callable[[Node, int], Sequence[int]]] = {
    "t_copy": reversed_order,
    "transpose_copy.int": swapped("dim0", "dim1"),
    "permute_copy": permute_order,
}

# Halves and thirds stay as many at other sizes; pieces of a given size do not.
SPLITS = "split.Tensor split.sizes split_with_sizes tensor_split.indices"
SPLIT_COPIES = "split_copy.Tensor split_with_sizes_copy unsafe_split.Tensor unsafe_split_with_sizes"

ROWS: dict[str, Row] = {
    **rows(VIEWS, Row(view, view=True, passes=(0,), kernel="copy", numbers="kept")),
    **rows(VIEW_COPIES, Row(view)),
    **{
        op: row
        for names, order in ORDERS.items()
        for op, row in rows(names, Row(permuted(order), view=True, passes=(0,))).items()
    },
    **{op: row for names, order in ORDER_COPIES.items() for op, row in rows(names, Row(permuted(order))).items()},
    **rows("expand broadcast_to", Row(linear_in({0}), view=True, numbers="kept", resize="given")),
    **rows("expand_as", Row(linear_in({0}), view=True)),
    **rows("expand_copy", Row(linear_in({0}), resize="given")),
    **rows("broadcast_tensors", Row(broadcast_tensors, view=True)),
    **rows("repeat", Row(repeat("repeats"), kernel="copy", resize="given")),
    **rows("tile", Row(repeat("dims"), kernel="copy", resize="given")),
    **rows("repeat_interleave.self_int", Row(repeat_interleave, resize="given")),
    **rows(SPLITS, Row(split, view=True, resize="pieces")),
    **rows(SPLIT_COPIES, Row(split, resize="pieces")),
    **rows("chunk tensor_split.sections", Row(split, view=True)),
    **rows("unsafe_chunk", Row(split)),
    **rows("unbind.int", Row(unbind, view=True, resize="pieces")),
    **rows("unbind_copy.int", Row(unbind, resize="pieces")),
    **rows("cat concat concatenate", Row(cat, kernel="copy", resize="join")),
    **rows("stack", Row(stack, kernel="copy")),
    **rows("meshgrid meshgrid.indexing", Row(meshgrid, view=True)),
    **rows("view_as_complex", Row(view_as_complex, view=True, passes=(0,))),
    **rows("view_as_real", Row(view_as_real, view=True, passes=(0,))),
    **rows("pixel_shuffle", Row(pixel_shuffle)),
    **rows("pixel_unshuffle", Row(pixel_unshuffle)),
}
