"""Operators that read or write parts of a tensor: slices, padding, gathers and scatters.

A dim that is read or written by position is whole; the others pass. Index tensors bring dims of their
own, which may be sharded: each rank looks up, or adds, its share of the indices. Classes are another
matter, of which a head may have millions: where one element of a dim is read or written for each of the others, as the
logit of a label is, that dim may be sharded (:mod:`autopar.runtime.layers.classes`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from planner.ir.graph import Node, TensorType
from planner.ops.sharding_rule import FactorWay, Rule
from planner.ops.signature import Labels, axis, is_floating, letters, rows, signature, static_ints
from planner.ops.table import Row, RuleOf

Operands = tuple[TensorType, ...]
Positions = Callable[[Node, int], Iterable[int]]


def local(positions: Positions, *linear: Collection[int]) -> RuleOf:
    """All tensors have the same dims; those at ``positions(node, rank)`` are whole."""

    def rule(node: Node, operands: Operands) -> Rule:
        names = letters(len(operands[0].shape))
        whole = [names[i] for i in positions(node, len(names))]
        ins = [names] * len(operands)
        return signature(node, operands, ins, [names] * len(node.results), whole=whole, linear=linear)

    return rule


def no_dims(node: Node, rank: int) -> Iterable[int]:
    """A dim that keeps its size was taken in full; one that does not is whole by itself."""
    return ()


def the_dim(node: Node, rank: int) -> Iterable[int]:
    """The argument ``dim``."""
    return [axis(node, rank)] if rank else ()


def dims_or_all(node: Node, rank: int) -> Iterable[int]:
    """The argument ``dims``; all dims if there are none."""
    return [dim % rank for dim in static_ints(node["dims"])] or range(rank)


def last_two_dims(node: Node, rank: int) -> Iterable[int]:
    """Rows and columns of matrices."""
    return (rank - 2, rank - 1)


def padded_dims(node: Node, rank: int) -> Iterable[int]:
    """Dims with something before or behind them; ``pad`` lists pairs from the last dim on."""
    pad = static_ints(node["pad"])
    return [rank - 1 - i for i, pair in enumerate(zip(pad[::2], pad[1::2], strict=True)) if any(pair)]


def pad(node: Node, operands: Operands) -> Rule:
    """Linear unless something but 0 is filled in."""
    constant = (node["mode"] or "constant") == "constant"
    return local(padded_dims, *([] if constant and node["value"] else [{0}]))(node, operands)


def select(node: Node, operands: Operands) -> Rule:
    """One index of a dim, which is whole."""
    names = letters(len(operands[0].shape))
    dim = axis(node, len(names))
    return signature(node, operands, [names], [names[:dim] + names[dim + 1 :]], whole=[names[dim]], linear=[{0}])


def select_scatter(node: Node, operands: Operands) -> Rule:
    """``src`` put at one index of a dim, which is whole."""
    names = letters(len(operands[0].shape))
    dim = axis(node, len(names))
    ins = [names, names[:dim] + names[dim + 1 :]]
    return signature(node, operands, ins, [names], whole=[names[dim]], linear=[{0, 1}])


def diagonal(node: Node, operands: Operands) -> Rule:
    """Two dims, which are whole, become one at the end."""
    rank = len(operands[0].shape)
    names = letters(rank)
    pair = {names[axis(node, rank, "dim1")], names[axis(node, rank, "dim2")]}
    outs = [*(name for name in names if name not in pair), "diagonal"]
    return signature(node, operands, [names], [outs], whole={*pair, "diagonal"}, linear=[{0}])


def unfold(node: Node, operands: Operands) -> Rule:
    """Windows of a dim, which are whole."""
    names = letters(len(operands[0].shape))
    dim = axis(node, len(names), "dimension")
    outs = [*names[:dim], "windows", *names[dim + 1 :], "window"]
    return signature(node, operands, [names], [outs], whole=[*names[dim : dim + 1], "windows", "window"], linear=[{0}])


def one_hot(node: Node, operands: Operands) -> Rule:
    """A last dim of classes."""
    names = letters(len(operands[0].shape))
    return _of_classes(signature(node, operands, [names], [[*names, "classes"]]))


def bucketize(node: Node, operands: Operands) -> Rule:
    """Elementwise, with all boundaries at hand."""
    names = letters(len(operands[0].shape))
    return signature(node, operands, [names, ["boundaries"]], [names], whole=["boundaries"])


def index_select(node: Node, operands: Operands) -> Rule:
    """Indices of a dim: every rank looks its share of them up in the whole dim."""
    names = letters(len(operands[0].shape))
    dim = axis(node, len(names)) if names else 0
    found = ["n" if i == dim else name for i, name in enumerate(names)]
    index = ["n"] * len(operands[1].shape)
    return signature(node, operands, [names, index], [found], whole=names[dim : dim + 1], linear=[{0}])


def take_along_dim(node: Node, operands: Operands) -> Rule:
    """``index`` has the dims of ``self``, with ``n`` lookups in ``dim``; dims that it reads in part are whole."""
    names = letters(len(operands[0].shape))
    if node["dim"] is None or len(operands[1].shape) != len(names):
        return everything_whole(node, operands)
    found, dim = _looked_up(node, names)
    return signature(node, operands, [names, found], [found], whole=dim, linear=[{0}])


def gather(node: Node, operands: Operands) -> Rule:
    """As :func:`take_along_dim`; where one number is read in ``dim`` and that is sharded, ranks leave zeros for what
    others hold: the result is partial.
    """
    if not (_is_one(node, operands) and is_floating(operands[0])):
        return take_along_dim(node, operands)
    names = _with_classes(node, operands)
    found, _ = _looked_up(node, names)
    return _of_classes(signature(node, operands, [names, found], [found], linear=[{0}]))


def scatter(*, adds: bool, one: bool = True, linear: Iterable[Collection[int]] = ()) -> RuleOf:
    """``n`` writes into ``dim`` of ``self``, at ``index``, of a number or of ``src`` (laid out like ``index``).

    Writes that add may be sharded: the sums are partial, ``self`` one of their terms. Where there is ``one``, ``dim``
    may be: each rank writes what falls into its part.
    """

    def rule(node: Node, operands: Operands) -> Rule:
        is_one = one and not adds and _is_one(node, operands, everywhere=True)
        names = _with_classes(node, operands) if is_one else letters(len(operands[0].shape))
        found, dim = _looked_up(node, names)
        ins = [names, *[found] * (len(operands) - 1)]
        whole = [] if is_one else dim if adds else [*dim, "n"]
        rule = signature(node, operands, ins, [names], whole=whole, linear=linear, addends={0} if adds else ())
        return _of_classes(rule) if is_one else rule

    return rule


def scatter_value(node: Node, operands: Operands) -> Rule:
    """A number written into ``dim``: linear in the rest if it is 0."""
    return scatter(adds=False, linear=[] if node["value"] else [{0}])(node, operands)


def _is_one(node: Node, operands: Operands, *, everywhere: bool = False) -> bool:
    """Whether one element of the dim is read or written for some, or for each (``everywhere``), of the others."""
    of, *indices = (tensor.shape for tensor in operands)
    if not of or len(indices[0]) != len(of) or indices[0][axis(node, len(of))] != 1:
        return False
    one = tuple(1 if i == axis(node, len(of)) else size for i, size in enumerate(of))
    return not everywhere or all(shape == one for shape in indices)


def _with_classes(node: Node, operands: Operands) -> list[str]:
    """Names of the dims of what is indexed; ``dim`` are the classes."""
    names = letters(len(operands[0].shape))
    names[axis(node, len(names))] = "classes"
    return names


def _of_classes(rule: Rule) -> Rule:
    """The rule with a local form where classes are sharded."""
    return replace(rule, ways={"classes": (FactorWay(),)} if "classes" in rule.sizes else {})


def _looked_up(node: Node, names: list[str]) -> tuple[list[str], list[str]]:
    """Labels of an index tensor of the rank of what it indexes along ``dim``; and the name of that dim."""
    dim = axis(node, len(names))
    return ["n" if i == dim else name for i, name in enumerate(names)], names[dim : dim + 1]


def index_add(*, adds: bool) -> RuleOf:
    """``source`` added, or copied, to the places that a vector of indices names; a number is whole."""

    def rule(node: Node, operands: Operands) -> Rule:
        if not operands[0].shape or not operands[2].shape:  # numbers, which have no dim to be sharded
            return everything_whole(node, operands)
        names = letters(len(operands[0].shape))
        found, dim = _looked_up(node, names)
        ins = [names, ["n"] * len(operands[1].shape), found]
        whole = dim if adds else [*dim, "n"]
        return signature(node, operands, ins, [names], whole=whole, linear=[{0, 2}], addends={0} if adds else ())

    return rule


def index(node: Node, operands: Operands) -> Rule:
    """Advanced indexing: indexed dims are whole, the dims of the index tensors may be sharded."""
    if _has_mask(operands[1:]):
        return everything_whole(node, operands)
    names, index_labels, found, indexed = _advanced(node, operands[0], operands[1:])
    ins = [names, *index_labels]
    return signature(node, operands, ins, [found], whole=indexed, broadcast=True, linear=[{0}])


def index_put(node: Node, operands: Operands) -> Rule:
    """Advanced indexing to write; writes that add may be sharded, as in :func:`scatter`."""
    ours, *indices, values = operands
    if _has_mask(indices):
        return everything_whole(node, operands)
    names, index_labels, found, indexed = _advanced(node, ours, indices)
    ins = [names, *index_labels, found[len(found) - len(values.shape) :]]
    adds = bool(node["accumulate"])
    whole = indexed if adds else {*indexed, *(name for labels in index_labels for name in labels)}
    return signature(
        node,
        operands,
        ins,
        [names],
        whole=whole,
        broadcast=True,
        linear=[{0, len(operands) - 1}],
        addends={0} if adds else (),
    )


def _has_mask(indices: Iterable[TensorType]) -> bool:
    return any(tensor.dtype in ("bool", "uint8") for tensor in indices)


def _advanced(
    node: Node, indexed: TensorType, indices: Collection[TensorType]
) -> tuple[list[str], list[Labels], list[str], set[str]]:
    """Labels of the indexed tensor, of the index tensors and of what they find; and the indexed dims.

    The dims of the index tensors, broadcast against each other, take the place of the indexed dims if
    those are adjacent, else they come first.
    """
    names = letters(len(indexed.shape))
    chosen = node["indices"]
    assert isinstance(chosen, tuple)
    at = [i for i, tensor in enumerate(chosen) if tensor is not None]
    rank = max(len(tensor.shape) for tensor in indices)
    lookups = [f"i{k}" for k in range(rank)]
    index_labels = [lookups[rank - len(tensor.shape) :] for tensor in indices]
    passed = [name for i, name in enumerate(names) if i not in at]
    place = at[0] if at[-1] - at[0] == len(at) - 1 else 0
    found = [*passed[:place], *lookups, *passed[place:]]
    return names, list(index_labels), found, {names[i] for i in at}


def everything_whole(node: Node, operands: Operands) -> Rule:
    """Where the rule would depend on data: replicated only."""
    ins = [[f"in{i}.{name}" for name in letters(len(x.shape))] for i, x in enumerate(operands)]
    outs = [[f"out{i}.{name}" for name in letters(len(y.shape))] for i, y in enumerate(node.results)]
    return signature(node, operands, ins, outs, whole=[name for row in (*ins, *outs) for name in row])


def _indices(node: Node, operands: Operands) -> tuple[str, ...]:
    return tuple(f"in{i}" for i in range(1, len(node.inputs)))


def _all_but_last(node: Node, operands: Operands) -> tuple[str, ...]:
    return tuple(f"in{i}" for i in range(1, len(node.inputs) - 1))


ROWS: dict[str, Row] = {
    **rows("slice.Tensor", Row(local(no_dims, {0}), view=True, resize="slice")),
    **rows("narrow", Row(local(no_dims, {0}), view=True)),
    **rows("slice_copy.Tensor narrow_copy", Row(local(no_dims, {0}))),
    **rows("slice_scatter", Row(local(the_dim, {0, 1}))),
    **rows("select.int", Row(select, view=True, resize="element")),
    **rows("select_copy.int", Row(select)),
    **rows("select_scatter", Row(select_scatter)),
    **rows("diagonal", Row(diagonal, view=True)),
    **rows("unfold", Row(unfold, view=True)),
    **rows("flip roll", Row(local(dims_or_all, {0}))),
    **rows("tril triu", Row(local(last_two_dims, {0}))),
    **rows("pad constant_pad_nd", Row(pad, kernel="copy", resize="pad")),
    **rows("one_hot", Row(one_hot)),
    **rows("bucketize.Tensor", Row(bucketize)),
    **rows("index_select", Row(index_select, saves=("in1",), kernel="embedding")),
    **rows("gather", Row(gather, saves=("in1",), kernel="embedding")),
    **rows("take_along_dim", Row(take_along_dim, saves=("in1",), kernel="embedding")),
    **rows("scatter.src", Row(scatter(adds=False, linear=[{0, 2}]), saves=("in1",))),
    **rows("scatter.value", Row(scatter_value, saves=("in1",))),
    **rows("scatter_add", Row(scatter(adds=True, linear=[{0, 2}]), saves=("in1",))),
    **rows(
        "scatter.reduce scatter_reduce.two", Row(scatter(adds=False, one=False), saves=("in0", "in1", "in2", "out0"))
    ),
    **rows("index_add", Row(index_add(adds=True), saves=("in1",))),
    **rows("index_copy", Row(index_add(adds=False), saves=("in1",))),
    **rows("index.Tensor _unsafe_index.Tensor", Row(index, saves=_indices, kernel="embedding", looks_up="dims")),
    **rows("index_put _unsafe_index_put", Row(index_put, saves=_all_but_last)),
}
