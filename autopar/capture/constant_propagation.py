"""Folds what a captured graph computes from constants alone.

Models build position ids and masks from ``arange`` and ``full``, and repeat them over the batch. Here every
value is held *compressed*: a dim along which it does not vary has size 1. Broadcasting treats such a dim like any
other of size 1, so most operators run on compressed operands as they are, and a mask that a model repeats for
every sequence is worked out for one.

Values are exact or absent. The operators that are known here give the same bits on every device: they move,
compare or select elements, compute with integers, or add and multiply, which IEEE 754 rounds in one way only. What
comes from an input, a parameter or any other operator has no value.

What would be large even so (a mask over 8,192 positions) is worked out when it is asked for, in windows on its last
two dims: pointwise operators and triangles need no more than the same window of their operands. Away from the diagonal
of a causal mask all queries in a window come before, or all after, all keys, which the ends of their ranges show
(:func:`ordered`); only a window where they do not is divided. So the work grows with the length of the diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Limits:
    """How far to go.

    Attributes:
        small: elements of the largest tensor to hold; 32 MiB of integers.
        part: elements of a large value to compute at a time, few enough that torch starts no threads for them.
        effort: elements to compute for one large value in all; some ten seconds. A causal mask over a million positions
            takes half of that.
    """

    small: int = 2**22
    part: int = 2**15
    effort: int = 2**33


class Unknown(Exception):
    """A value cannot be worked out, or not within the limits."""


@dataclass(frozen=True)
class Window:
    """A part of the last two dims."""

    rows: slice
    columns: slice

    def cut(self, data: Tensor) -> Tensor:
        """That part of a compressed value."""
        if data.dim() >= 1 and data.shape[-1] > 1:
            data = data[..., self.columns]
        if data.dim() >= 2 and data.shape[-2] > 1:
            data = data[..., self.rows, :]
        return data

    def halves(self) -> tuple[Window, Window]:
        """This window, which has ends, cut across its longer side."""
        rows, columns = self.rows, self.columns
        if rows.stop - rows.start >= columns.stop - columns.start:
            middle = (rows.start + rows.stop) // 2
            return Window(slice(rows.start, middle), columns), Window(slice(middle, rows.stop), columns)
        middle = (columns.start + columns.stop) // 2
        return Window(rows, slice(columns.start, middle)), Window(rows, slice(middle, columns.stop))

    def numbers(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """The row numbers ``[r, 1]`` and column numbers ``[1, c]`` of that part of ``[.., rows, columns]``."""
        return _span(rows, self.rows).unsqueeze(1), _span(columns, self.columns).unsqueeze(0)


def _span(size: int, part: slice) -> Tensor:
    start, stop, _ = part.indices(size) if size > 1 else (0, size, 1)
    return torch.arange(start, stop, device=CPU)


EVERYTHING = Window(slice(None), slice(None))


def ordered(compare: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> Tensor:
    """``compare(left, right)`` for ``<``, ``<=``, ``>`` or ``>=``; one element where the ends of both ranges decide.

    A comparison is monotonic in both operands, so that between its results at (least, greatest) and (greatest,
    least) lie all others. Floats are compared one by one, for NaN has no place in a range.
    """
    if left.is_floating_point() or right.is_floating_point():
        return compare(left, right)
    (low, high), (least, greatest) = _range(left), _range(right)
    end = compare(low, greatest)
    return end if torch.equal(end, compare(high, least)) else compare(left, right)


def _range(data: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest element, with all dims kept."""
    dims = tuple(range(data.dim()))
    return data.amin(dims, keepdim=True), data.amax(dims, keepdim=True)


@dataclass(frozen=True)
class Constants:
    """The values of a graph's constants.

    Attributes:
        small: compressed values by node.
        large: nodes that are worked out in parts, in execution order, and how.
        first: node -> the first node that computes the same; only these are in ``small`` and ``large``.
        limits: how far to go.
    """

    small: Mapping[fx.Node, Tensor]
    large: Mapping[fx.Node, _Rule]
    first: Mapping[fx.Node, fx.Node]
    limits: Limits

    def __contains__(self, node: fx.Node) -> bool:
        return self.first[node] in self.small or self.first[node] in self.large

    def parts(self, node: fx.Node, rows: int, columns: int) -> Iterator[tuple[Window, Tensor]]:
        """The value of ``node``, as it broadcasts to ``[.., rows, columns]``, window by window and compressed.

        Raises:
            Unknown: the value takes more effort than the limits allow.
        """
        root, effort = self.first[node], 0
        needed = {self.first[n] for n in _needed([root])}
        chain = [(n, rule) for n, rule in self.large.items() if n in needed]
        pending = [Window(slice(0, rows), slice(0, columns))]
        while pending:
            window = pending.pop()
            made: dict[fx.Node, Tensor] = {}
            try:
                for n, rule in chain:
                    result = _Call(n, self, made, window, self.limits.part).run(rule)
                    effort += result.numel() + _OVERHEAD
                    made[n] = compressed(result)
            except Unknown:
                if window.rows.stop - window.rows.start == window.columns.stop - window.columns.start == 1:
                    raise
                pending.extend(window.halves())
                continue
            if effort > self.limits.effort:
                raise Unknown
            yield window, made[root] if root in made else window.cut(self.small[root])


_OVERHEAD = 2**14
"""Elements that are computed in the time that it takes to call an operator."""


def evaluate(
    graph: fx.Graph, roots: Iterable[fx.Node], tensors: Mapping[str, Tensor], limits: Limits | None = None
) -> Constants:
    """Work out ``roots``, and what they are made of, where it is constant.

    Args:
        graph: a flat functional ATen graph, whose nodes carry a tensor of their shape and dtype in ``meta["val"]``.
        tensors: values of placeholders that are constants of the model, by name.
        limits: how far to go.
    """
    needed = _needed(roots)
    small: dict[fx.Node, Tensor] = {}
    large: dict[fx.Node, _Rule] = {}
    first: dict[fx.Node, fx.Node] = {}
    by_text: dict[str, fx.Node] = {}
    found = Constants(small, large, first, limits or Limits())
    for node in graph.nodes:
        if node not in needed:
            continue
        shape = getattr(node.meta.get("val"), "shape", None)
        text = f"{node.op} {node.target} {map_arg((node.args, node.kwargs), first.get)} {shape}"
        first[node] = by_text.setdefault(text, node)
        if first[node] is not node:
            continue
        if node.op == "placeholder" and _has_values(tensors.get(node.name)):
            small[node] = compressed(tensors[node.name].detach().to(CPU))
        rule = _rule_of(node)
        if rule is None or not all(operand in found for operand in _operands(node)):
            continue
        try:
            small[node] = compressed(_Call(node, found, {}, EVERYTHING, found.limits.small).run(rule))
        except Unknown:
            if _goes_by_parts(node, rule):
                large[node] = rule
        except (RuntimeError, IndexError):
            continue  # the model itself would stop here: an index out of range, a division by zero
    return found


def compressed(data: Tensor) -> Tensor:
    """``data`` with size 1 for every dim along which it does not vary."""
    for dim, size in enumerate(data.shape):
        if size > 1:
            start = data.narrow(dim, 0, 1)
            if torch.equal(start, data.narrow(dim, 1, 1)) and torch.equal(start.expand_as(data), data):
                data = start.clone()
    return data


def _has_values(tensor: Tensor | None) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta  # type: ignore[union-attr]


def _needed(roots: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(_operands(node))
    return found


def _operands(node: fx.Node) -> list[fx.Node]:
    """The tensors whose values a node reads; one that fills a shape reads none."""
    return [] if _packet(node) in _FILLS else node.all_input_nodes


def _packet(node: fx.Node) -> str:
    """Name of the operator without its overload, ``""`` for what is not an ATen operator."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten":
        return target.overloadpacket.__name__
    return ""


def argument(node: fx.Node, name: str) -> Any:
    """An operator's argument by its name in the schema, or its default."""
    for position, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if declared.name == name:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, declared.default_value if declared.has_default_value() else None)
    raise KeyError(f"{node.target} has no argument {name!r}")


# --- operators on compressed operands ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """One operator on compressed operands.

    Attributes:
        constants: values that are known.
        made: values of large operands in this window.
        window: the part to work out.
        most: elements of the largest tensor to compute.
    """

    node: fx.Node
    constants: Constants
    made: Mapping[fx.Node, Tensor]
    window: Window
    most: int

    def run(self, rule: _Rule) -> Tensor:
        """The result by the rule of the node's operator, more or less compressed.

        Raises:
            Unknown: the result would be too large, or an operand is, which is worked out in parts only.
        """
        result, captured = rule(self), self.node.meta["val"]
        assert result.dtype == captured.dtype, f"{self.node.name} was captured as {captured.dtype}"
        assert result.dim() == captured.dim(), f"{self.node.name} was captured with {captured.dim()} dims"
        return result

    def __getitem__(self, name: str) -> Any:
        return argument(self.node, name)

    def data(self, node: fx.Node) -> Tensor:
        """The compressed value of an operand, in this window."""
        node = self.constants.first[node]
        if node in self.made:
            return self.made[node]
        if node not in self.constants.small:
            raise Unknown
        return self.window.cut(self.constants.small[node])

    def whole(self, node: fx.Node) -> Tensor:
        """The value of an operand, nothing left out."""
        return self.data(node).expand(self.fitting(node.meta["val"].shape))

    def fitting(self, shape: Iterable[int]) -> tuple[int, ...]:
        """``shape``, unless a tensor of it would be too large."""
        shape = tuple(shape)
        if math.prod(shape) > self.most:
            raise Unknown
        return shape

    def apply(self, data: Callable[[fx.Node], Tensor]) -> Tensor:
        """The operator itself, on the CPU and on ``data`` of its operands."""
        args, kwargs = map_aggregate(map_arg((self.node.args, self.node.kwargs), data), _on_cpu)
        schema = self.node.target._schema  # type: ignore[union-attr]
        if any(declared.name == "device" and declared.kwarg_only for declared in schema.arguments):
            kwargs = {**kwargs, "device": CPU}
        result: Tensor = self.node.target(*args, **kwargs)  # type: ignore[operator]
        return result


_Rule = Callable[[_Call], Tensor]


def _broadcast(*shapes: Iterable[int]) -> tuple[int, ...]:
    """The common shape of tensors that broadcast; torch's own takes longer than what it is asked about here."""
    columns = zip_longest(*(reversed(tuple(shape)) for shape in shapes), fillvalue=1)
    return tuple(map(max, columns))[::-1]


def _on_cpu(value: Any) -> Any:
    return CPU if isinstance(value, torch.device) else value


def _filled(call: _Call) -> Tensor:
    """Operators whose result is one number in some shape."""
    result, packet = call.node.meta["val"], _packet(call.node)
    number: Any = _FILLS[packet]
    if isinstance(number, str):
        number = call[number]
    if isinstance(number, fx.Node):
        raise Unknown
    return torch.full((1,) * result.dim(), number, dtype=result.dtype, device=CPU)


def _pointwise(call: _Call) -> Tensor:
    call.fitting(_broadcast(*(call.data(n).shape for n in call.node.all_input_nodes)))
    return call.apply(call.data)


def _compared(call: _Call) -> Tensor:
    """``<``, ``<=``, ``>``, ``>=``."""
    if not isinstance(call["other"], fx.Node):
        return _pointwise(call)

    def compare(left: Tensor, right: Tensor) -> Tensor:
        call.fitting(_broadcast(left.shape, right.shape))
        result: Tensor = call.node.target(left, right)  # type: ignore[operator]
        return result

    return ordered(compare, call.data(call["self"]), call.data(call["other"]))


def _triangle(call: _Call) -> Tensor:
    """``tril`` and ``triu``: what lies beyond the diagonal becomes zero."""
    data, compare = call.data(call["self"]), torch.le if _packet(call.node) == "tril" else torch.ge
    rows, columns = call.window.numbers(*call.node.meta["val"].shape[-2:])

    def kept(left: Tensor, right: Tensor) -> Tensor:
        call.fitting(_broadcast(left.shape, right.shape, data.shape))
        return compare(left, right)

    return torch.where(ordered(kept, columns, rows + call["diagonal"]), data, torch.zeros_like(data[..., :1, :1]))


def _reordered(call: _Call) -> Tensor:
    """Operators that reorder dims."""
    return call.apply(call.data)


def _same(call: _Call) -> Tensor:
    return call.data(call["self"])


def _expanded(call: _Call) -> Tensor:
    data = call.data(call["self"])
    return data.reshape((1,) * (call.node.meta["val"].dim() - data.dim()) + data.shape)


def _reshaped(call: _Call) -> Tensor:
    """The same elements in the same order: dims of size 1 come and go, others need the whole value."""
    source, result = call["self"], call.node.meta["val"]
    if _sizes(source) != _sizes(call.node):
        return call.whole(source).reshape(result.shape)
    data = call.data(source)
    kept = (data.shape[dim] for dim, size in enumerate(source.meta["val"].shape) if size != 1)
    return data.reshape([1 if size == 1 else next(kept) for size in result.shape])


def _sizes(node: fx.Node) -> list[int]:
    return [size for size in node.meta["val"].shape if size != 1]


def _along(name: str) -> _Rule:
    """Operators along the dims that argument ``name`` gives; along others, operands stay compressed."""

    def rule(call: _Call) -> Tensor:
        operands = call.node.all_input_nodes
        rank = operands[0].meta["val"].dim()
        dims = {dim % rank for dim in (call[name] if isinstance(call[name], (list, tuple)) else [call[name]])}
        shapes = [[1 if dim in dims else size for dim, size in enumerate(call.data(n).shape)] for n in operands]
        common = _broadcast(*shapes)

        def opened(node: fx.Node) -> Tensor:
            shape = [node.meta["val"].shape[dim] if dim in dims else size for dim, size in enumerate(common)]
            return call.data(node).expand(call.fitting(shape))

        return call.apply(opened)

    return rule


def _indexed(call: _Call) -> Tensor:
    """Along a dim that is compressed, every index finds the same."""
    data, indices = call.data(call["self"]), call["indices"]
    if any(i is not None and not _is_integer(i.meta["val"].dtype) for i in indices):
        return _whole(call)
    found: list[Tensor | None] = []
    for size, index in zip(data.shape, indices, strict=False):
        if index is not None and size == 1:
            found.append(torch.zeros((1,) * index.meta["val"].dim(), dtype=torch.int64, device=CPU))
        else:
            found.append(None if index is None else call.data(index))
    picked = _broadcast(*(index.shape for index in found if index is not None))
    rest = (size for dim, size in enumerate(data.shape) if dim >= len(found) or found[dim] is None)
    call.fitting((*picked, *rest))
    result: Tensor = torch.ops.aten.index.Tensor(data, found)
    return result


def _whole(call: _Call) -> Tensor:
    """Any operator, where everything fits."""
    call.fitting(call.node.meta["val"].shape)
    return call.apply(call.whole)


_FILLS: dict[str, float | str] = {
    "ones": 1, "ones_like": 1, "new_ones": 1, "zeros": 0, "zeros_like": 0, "new_zeros": 0,
    "full": "fill_value", "full_like": "fill_value", "new_full": "fill_value", "scalar_tensor": "s",
}  # fmt: skip
"""Operators that read no values -> what they fill with: a number, or the argument that says it."""

_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_FILLS, _filled),
    **dict.fromkeys(("to", "_to_copy", "clone", "alias", "detach", "lift_fresh_copy", "contiguous"), _pointwise),
    **dict.fromkeys(("where", "masked_fill", "__and__", "__or__"), _pointwise),
    **dict.fromkeys(("lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal"), _compared),
    **dict.fromkeys(("tril", "triu"), _triangle),
    **dict.fromkeys(("transpose", "permute", "t", "mT"), _reordered),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshaped),
    **dict.fromkeys(("cumsum", "diff", "slice", "narrow", "select", "cat"), _along("dim")),
    **dict.fromkeys(("arange", "eye", "repeat", "stack", "roll", "any", "all", "sum"), _whole),
    "flip": _along("dims"),
    "expand": _expanded,
    "index": _indexed,
}
"""Rules by name of the operator; pointwise operators beyond these are known by torch's tag."""

_ROUNDS = {"arange", "cumsum", "diff", "sum"}
"""Operators above whose result in floats may depend on the device."""

_ROUNDS_ALIKE = {"add", "sub", "rsub", "mul", "neg", "eq", "ne", "logical_not", "logical_and", "logical_or"}
"""Pointwise operators whose result in floats does not."""


def _rule_of(node: fx.Node) -> _Rule | None:
    """How to work out a node; ``None`` if its value is not a matter of its operands' values, or not exactly."""
    packet, captured = _packet(node), node.meta.get("val")
    if not packet or not isinstance(captured, Tensor):
        return None
    if not all(isinstance(size, int) and size for size in captured.shape):  # nothing, or as much as values say
        return None
    read = [operand.meta.get("val") for operand in _operands(node)]
    operands = [operand for operand in read if isinstance(operand, Tensor)]
    if len(operands) < len(read) or not _is_exact(node, operands):
        return None
    tags = node.target.tags  # type: ignore[union-attr]
    by_tag = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    rule = _RULES.get(packet, _pointwise if by_tag else None)
    if rule is _reshaped and operands[0].dtype != captured.dtype:
        return None  # view.dtype, which reads the same bits as something else
    return _same if packet == "slice" and operands[0].shape == captured.shape else rule


def _is_exact(node: fx.Node, operands: list[Tensor]) -> bool:
    """Whether every device gives the same bits."""
    packet, result = _packet(node), node.meta["val"].dtype
    if packet in _FILLS or all(_is_integer(dtype, or_bool=True) for dtype in (result, *(o.dtype for o in operands))):
        return True
    if _is_integer(result):
        return False  # floats that are no integers, such as infinity, become anything
    if packet in ("add", "sub", "rsub") and argument(node, "alpha") != 1:
        return False  # rounded once or twice
    return packet in _ROUNDS_ALIKE or (packet in _RULES and packet not in _ROUNDS)


def _is_integer(dtype: torch.dtype, or_bool: bool = False) -> bool:
    return or_bool if dtype is torch.bool else not (dtype.is_floating_point or dtype.is_complex)


def _goes_by_parts(node: fx.Node, rule: _Rule) -> bool:
    """Whether a window of the result needs only the same window of each operand."""
    if rule in (_expanded, _reshaped, _same):
        source = argument(node, "self")
        same_parts: bool = source.meta["val"].shape[-2:] == node.meta["val"].shape[-2:]
        return same_parts and (rule is not _reshaped or _sizes(source) == _sizes(node))
    return rule in (_pointwise, _compared, _triangle)
