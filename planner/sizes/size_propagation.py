"""Propagates the batch and the sequence length through a graph: which sizes scale with them, and how.

Every dim of every value is a product of *parts*, major first: a constant, a :class:`planner.base.symbolic_int.Size`, or
something *open*, a number that an argument brings along (``arange(128)``) and that may be any of these. Dim 0 of every
input is the batch, dim 1 the sequence; parameters and constants stay as they are. Operators pass parts on as their
factor rules say: one factor has one size, whichever tensors it is read from. So what is open is known as soon as it
meets something that is known, and what cannot be (a batch that meets a parameter's dim) is an error that names the
operator.

What one capture cannot tell is refused, not guessed: an open number that meets nothing and equals a moving size; a
moving dim that is split into numbers of which any could move; a dim that is taken apart piece by piece (a loop over
positions); an operator that makes a size of its own out of a moving one (a convolution along the sequence, a slice or a
padding by more than one). Taken as they stand are shifts by one (``x[:, 1:]``) and other numbers that no moving size
equals (a number of heads).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.base.errors import PlanError
from planner.base.symbolic_int import Size, batch_of, describe, quotient, sequence_of
from planner.formulation.strategies import tensors_of
from planner.ir.graph import Graph, Node, Ref
from planner.ops import OPS
from planner.ops.sharding_rule import Rule
from planner.ops.table import Resize

Sizes = tuple[int, ...]
"""The parts of a dim or of a factor, major first; none is open any more."""

COUNTED = frozenset({"stack", "parts", "pieces", "halves", "r1", "r2"})
"""Factors that count tensors, or that the operator's meaning fixes."""

ENDLESS = 2**31
"""An end of a slice from here on means the end of the dim."""


class NotFollowed(PlanError):
    """A size that cannot be followed."""


class _Open:
    """A number that may be a constant or move; ``parts`` once it is known.

    ``strict``: it is made out of moving sizes, so it must become known.
    """

    __slots__ = ("node", "number", "parts", "strict")

    def __init__(self, number: int, node: Node, strict: bool = False):
        self.number, self.node, self.strict = number, node, strict
        self.parts: _Parts | None = None


_Part = int | _Open
_Parts = tuple[_Part, ...]


@dataclass(frozen=True)
class Followed:
    """How a graph's sizes move.

    Attributes:
        batch, sequence: their numbers as planned; 0 for one that is not followed.
        factors: node -> factor of its rule -> parts.
        dims: value -> parts of each of its dims.
        bounds: (a size, what it must not exceed, whose slice or table ends there).
    """

    batch: int
    sequence: int
    factors: Mapping[str, Mapping[str, Sizes]]
    dims: Mapping[Ref, tuple[Sizes, ...]]
    bounds: tuple[tuple[int, int, str], ...]


def follow(graph: Graph, rules: Mapping[str, Rule], batch: bool, sequence: bool) -> Followed:
    """Follow the batch, the sequence length, or both.

    Raises:
        PlanError: there is no such dim, or it cannot be followed; names the operator.
    """
    return _Walk(graph, rules, batch, sequence).done()


class _Walk:
    def __init__(self, graph: Graph, rules: Mapping[str, Rule], batch: bool, sequence: bool):
        self.graph, self.rules = graph, rules
        self.batch = _common(graph, 0, "batch") if batch else 0
        self.sequence = _common(graph, 1, "sequence length") if sequence else 0
        self.dims: dict[Ref, tuple[_Parts, ...]] = {}
        self.factors: dict[str, dict[str, _Parts]] = {}
        self.opened: list[_Open] = []
        self.counts: dict[Ref, _Parts] = {}
        self.picked: dict[tuple[Ref, int], set[int]] = {}
        self.bounds: list[tuple[_Parts, int, str]] = []
        self.node = graph.nodes[0]

    def done(self) -> Followed:
        for node in self.graph.nodes:
            self.node = node
            if node.is_leaf:
                self.dims[Ref(node.name)] = self._leaf(node)
            else:
                self._operator(node)
        self._close()
        closed: dict[_Parts, Sizes] = {}

        def close(parts: _Parts) -> Sizes:
            if parts not in closed:
                closed[parts] = tuple(part for part in _merged(parts) if not isinstance(part, _Open))
            return closed[parts]

        bounds = [(math.prod(close(parts)), bound, where) for parts, bound, where in self.bounds]
        return Followed(
            self.batch,
            self.sequence,
            {name: {f: close(parts) for f, parts in factors.items()} for name, factors in self.factors.items()},
            {ref: tuple(map(close, dims)) for ref, dims in self.dims.items()},
            tuple(dict.fromkeys((size, bound, where) for size, bound, where in bounds if isinstance(size, Size))),
        )

    # ---- leaves and operators ----

    def _leaf(self, node: Node) -> tuple[_Parts, ...]:
        dims: list[_Parts] = [(size,) if size != 1 else () for size in node.results[0].shape]
        if node.op == "input":
            if dims and dims[0] and self.batch:
                dims[0] = (batch_of(self.batch),)
            if len(dims) > 1 and dims[1] and self.sequence:
                dims[1] = (sequence_of(self.sequence),)
        return tuple(dims)

    def _operator(self, node: Node) -> None:
        rule = self.rules[node.name]
        factors = self.factors[node.name] = {}
        tensors = tensors_of(node, rule)
        read = [
            (self.dims[ref][position], names)
            for ref, dims in tensors[: len(node.inputs)]
            for position, names in enumerate(dims)
            if names
        ]
        # Dims of one factor first: they say what the factors of merged dims are.
        for parts, names in sorted(read, key=lambda each: len(each[1]) > 1):
            self._read(parts, names, rule, factors)
        row = OPS.get(node.op)
        resize = row.resize if row is not None else ""
        if resize in ("pieces", "element", "slice"):
            self._taken_apart(node, resize)
        self._look_up(node, row is not None and row.looks_up != "")
        for ref, dims in tensors[len(node.inputs) :]:
            for position, names in enumerate(dims):
                for name in names:
                    if name not in factors:
                        factors[name] = self._made(node, resize, position, name, factors)
            self.dims[ref] = tuple(tuple(p for name in names for p in factors[name]) for names in dims)
        if row is not None and row.numbers == "counted" and self.dims[Ref(node.name)]:
            self.counts[Ref(node.name)] = self.dims[Ref(node.name)][0]

    def _read(self, parts: _Parts, names: Sequence[str], rule: Rule, factors: dict[str, _Parts]) -> None:
        """Cut a dim of an operand into its factors; what is known of them already must agree."""
        left = _merged(parts)
        for number, name in enumerate(names):
            last = number == len(names) - 1
            known = factors.get(name)
            if known is None and name in COUNTED:
                known = (rule.sizes[name],)
            taken = left if last else self._take(left, rule.sizes[name], known)
            if known is not None:
                self._agree(taken, known)
            factors[name] = known or tuple(taken)

    def _take(self, left: list[_Part], size: int, known: _Parts | None) -> list[_Part]:
        """Take parts of ``size`` together off the front; what lies across the cut is cut."""
        taken: list[_Part] = []
        wanted = size
        while wanted > 1:
            part = left.pop(0)
            number = _number(part)
            if wanted % number == 0:
                taken.append(part)
                wanted //= int(number)
                continue
            by = known[-1] if known and _number(known[-1]) == wanted else None
            front, rest = self._cut(part, wanted, by)
            taken.append(front)
            left.insert(0, rest)
            wanted = 1
        return taken

    def _cut(self, part: _Part, size: int, by: _Part | None) -> tuple[_Part, _Part]:
        """A part as ``size`` times the rest; ``by`` is what the first of the two is known to be."""
        number = _number(part)
        if number % size:
            raise self._error(f"{_words(part)} cannot be cut into {size} and a rest")
        if isinstance(part, _Open):
            front: _Part = self._open(size, part.strict)
            rest: _Part = self._open(number // size, part.strict)
            part.parts = (front, rest)
            return front, rest
        if not isinstance(part, Size):
            return size, int(part) // size
        divided = None if by is None or isinstance(by, _Open) else quotient(part, by)
        if divided is None:
            raise self._error(
                f"the {describe(part)}, {number} as planned, is split into {size} and {number // size}, and which of "
                "the two moves cannot be told"
            )
        assert isinstance(by, int)
        return by, divided

    # ---- equality ----

    def _agree(self, one: Iterable[_Part], other: Iterable[_Part]) -> None:
        """Both are the same size, part by part."""
        left, right = _merged(one), _merged(other)
        if all(type(part) is int for part in (*left, *right)):
            return
        while left and right:
            a, b = left.pop(0), right.pop(0)
            m, n = _number(a), _number(b)
            if m > n:
                a, rest = self._cut(a, n, b)
                left.insert(0, rest)
            elif n > m:
                b, rest = self._cut(b, m, a)
                right.insert(0, rest)
            self._same(a, b)

    def _same(self, a: _Part, b: _Part) -> None:
        if a is b:
            return
        if isinstance(a, _Open):
            a.parts = (b,)
        elif isinstance(b, _Open):
            b.parts = (a,)
        elif a != b:
            raise self._error(
                f"the {_words(a)} meets the {_words(b)} (the batch is dim 0 of every input and the sequence dim 1: "
                "leave out the one that this model has elsewhere, or not at all)"
            )

    # ---- what operators make ----

    def _made(self, node: Node, resize: Resize, position: int, name: str, factors: Mapping[str, _Parts]) -> _Parts:
        """The parts of a factor that no operand has."""
        rule = self.rules[node.name]
        size = rule.sizes[name]
        if name in COUNTED:
            return (size,)
        if resize == "given":
            return (self._open(size),)
        within = {factor for dims in rule.results for dim in dims for factor in dim}
        spent = [parts for factor, parts in factors.items() if factor not in within]
        if resize == "slice":
            return (self._sliced(node, size, position),)
        if all(type(part) is int for parts in spent for part in _flat(parts)):
            return (size,)
        if resize == "pad" and node["mode"] in (None, "constant"):
            pad = node["pad"]
            assert isinstance(pad, tuple)
            at = 2 * (len(node.results[0].shape) - 1 - position)
            length = self._length(self.dims[node.inputs[0]][position])
            if length is not None:
                self._check_shift(pad[at])
                self._check_shift(pad[at + 1])
                return (length + pad[at] + pad[at + 1],)
        if resize == "join":
            lengths = [self._length(self.dims[ref][position]) for ref in node.inputs]
            if None not in lengths:
                return (sum(length for length in lengths if length is not None),)
        return (self._open(size, strict=True),)

    def _sliced(self, node: Node, size: int, position: int) -> _Part:
        """What a slice leaves of a dim, where that is not all of it."""
        start, end, step = node["start"] or 0, node["end"], node["step"]
        assert isinstance(start, int) and isinstance(end, int | None)
        length = self._length(self.dims[node.inputs[0]][position])
        if length is None or step not in (None, 1):
            return self._open(size, strict=type(length) is not int)
        moves = isinstance(length, Size)
        if end is not None and 0 <= end < length:
            taken = self._open(size, strict=moves)
            if not moves:
                self.bounds.append(((taken,), length - start, self._place()))
            return taken
        if moves:
            self._check_shift(start)
            self._check_shift(end if end is not None and end < 0 else 0)
        first = start if start >= 0 else length + start
        last = length + end if end is not None and end < 0 else length
        return last - first

    def _check_shift(self, count: int) -> None:
        """Refuse a count at an end of a moving dim that may itself move: half of it, or the rest to a multiple."""
        if abs(count) > 1:
            raise self._error(
                f"{abs(count)} may be a constant or come from the size that it is counted off or added to"
            )

    def _taken_apart(self, node: Node, resize: Resize) -> None:
        """Refuse what takes a moving dim apart, piece by piece: elsewhere there would be more operators.

        Also note where a slice that takes all of it as planned would end.
        """
        source, dim = node.inputs[0], node["dim"] or 0
        assert isinstance(dim, int)
        dim %= len(self.dims[source])
        length = self._length(self.dims[source][dim])
        if not isinstance(length, Size):
            return
        first, end = node["index" if resize == "element" else "start"] or 0, node["end"]
        assert isinstance(first, int) and isinstance(end, int | None)
        if end is not None and length < end < ENDLESS:
            self.bounds.append(((length,), end, self._place()))
        one = resize == "element" or (resize == "slice" and node.results[0].shape[dim] == 1)
        picked = self.picked.setdefault((source, dim), set())
        if one:
            picked.add(first % int(length))
        if resize == "pieces" or not picked <= {0, int(length) - 1} or len(picked) == int(length):
            raise self._error(
                f"the {describe(length)} is taken apart, and into how many pieces elsewhere cannot be told"
            )

    def _look_up(self, node: Node, in_table: bool) -> None:
        """Note where positions that were counted up to a size are looked up in a table; follow them that far."""
        if len(node.inputs) == 1 and node.inputs[0] in self.counts:
            self.counts[Ref(node.name)] = self.counts[node.inputs[0]]
        indices = node["indices"] if in_table else ()
        looked_up = indices if isinstance(indices, tuple) and not isinstance(indices, Ref) else (indices,)
        for dim, index in enumerate(looked_up):
            if isinstance(index, Ref) and index in self.counts:
                rows = self._length(self.dims[node.inputs[0]][dim])
                if type(rows) is int:
                    self.bounds.append((self.counts[index], rows, self._place()))

    def _length(self, parts: _Parts) -> int | None:
        """A dim as one number; ``None`` while a part is open."""
        found = list(_flat(parts))
        if any(isinstance(part, _Open) for part in found):
            return None
        return math.prod(part for part in found if not isinstance(part, _Open))

    def _open(self, number: int, strict: bool = False) -> _Open:
        self.opened.append(_Open(int(number), self.node, strict))
        return self.opened[-1]

    def _close(self) -> None:
        """What is still open is a constant, unless it may as well move."""
        moving = {self.batch: "batch", self.sequence: "sequence length", self.batch * self.sequence: "both together"}
        for each in self.opened:
            if each.parts is not None:
                continue
            self.node = each.node
            if each.strict:
                raise self._error(f"it makes a size of its own ({each.number} as planned) out of one that moves")
            if each.number in moving and each.number > 1:
                raise self._error(
                    f"its argument {each.number} may be the {moving[each.number]} or a constant, and nothing it meets "
                    "tells which: plan with a batch and a sequence length that equal no other size of the model"
                )
            each.parts = (each.number,)

    def _place(self) -> str:
        return f"{self.node.op} in {self.node.path or '(root)'}" if not self.node.is_leaf else self.node.target

    def _error(self, why: str) -> NotFollowed:
        what = " and ".join(w for w, n in (("batch", self.batch), ("sequence length", self.sequence)) if n)
        return NotFollowed(f"this plan's cost cannot be followed to another {what}: at {self._place()}, {why}")


def _common(graph: Graph, dim: int, what: str) -> int:
    """The size of a dim that all inputs have in common."""
    found: dict[int, str] = {}
    for leaf in graph.leaves:
        shape = leaf.results[0].shape
        if leaf.op == "input" and len(shape) > dim and shape[dim] != 1:
            found.setdefault(shape[dim], leaf.target or leaf.name)
    if len(found) == 1:
        return next(iter(found))
    if not found:
        raise NotFollowed(
            f"this plan's cost cannot be followed to another {what}: no input has a dim {dim} of more than one element "
            f"(a {what} of 1 is not a size that can grow: plan with 2 or more)"
        )
    shown = ", ".join(f"{size} in {name!r}" for size, name in found.items())
    raise NotFollowed(
        f"this plan's cost cannot be followed to another {what}: dim {dim} of the inputs has several sizes ({shown})"
    )


def _flat(parts: Iterable[_Part]) -> Iterator[_Part]:
    """Parts with what is known of open ones in their place."""
    for part in parts:
        if isinstance(part, _Open) and part.parts is not None:
            yield from _flat(part.parts)
        else:
            yield part


def _merged(parts: Iterable[_Part]) -> list[_Part]:
    """Parts with what is known in its place, and constants next to each other as one."""
    found: list[_Part] = []
    for part in _flat(parts):
        if found and type(part) is int and type(found[-1]) is int:
            found[-1] *= part
        else:
            found.append(part)
    return [part for part in found if isinstance(part, _Open | Size) or part != 1]


def _number(part: _Part) -> int:
    return part.number if isinstance(part, _Open) else int(part)


def _words(part: _Part) -> str:
    if isinstance(part, _Open):
        return f"number {part.number}"
    return f"{describe(part)} ({int(part)} as planned)" if isinstance(part, Size) else f"fixed size {part}"
