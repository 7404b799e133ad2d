"""A plan's decisions at another batch, sequence length and number of micro-batches.

Only sizes change: every value, factor and strip of the planned graph becomes what :mod:`planner.sizes.size_propagation`
says of it, the decisions keep their places, and the result is an assignment like any other, that is priced and followed
through memory exactly as the plan was. Static arguments that no price reads (the numbers of a view) are left as
captured. How many micro-batches there are is a size of the mesh.

A plan is asked for more than one size. :class:`OtherSizes` follows the batch, the sequence length, or both through the
graph once each (:mod:`planner.sizes.size_propagation`), and then every question costs a walk over the scaled step.

Sizes may also be given as :class:`planner.base.symbolic_int.Size`: then whatever is computed from the assignment knows
its formula.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from planner.analysis.memory import usage
from planner.analysis.pipeline.rank_memory import moments
from planner.analysis.pipeline.staged import Staged
from planner.analysis.prediction import Prediction, predict, predict_micro_batched
from planner.base.errors import PlanError
from planner.base.symbolic_int import (
    Size,
    at_sizes,
    batch_of,
    describe,
    micro_batches_of,
    quotient,
    sequence_of,
    terms_of,
)
from planner.formulation.assignment import Assignment
from planner.formulation.decisions import DecisionGraph
from planner.formulation.search_space import Space
from planner.formulation.strategies import Choice, Cuts
from planner.formulation.variables import Variable
from planner.ir.folding import Folded, refold
from planner.ir.graph import Graph, Node, Ref
from planner.ir.layout import MICRO, Layout, Shard
from planner.ops.sharding_rule import Rule
from planner.sizes.size_propagation import Followed, NotFollowed, Sizes, follow

Restage = Callable[[Assignment], Staged | None]


@dataclass(frozen=True)
class Divisibility:
    """``size`` must be a multiple of ``number``; ``by`` says what of, ``counted`` how many micro-batches are in it."""

    size: int
    number: int
    by: str
    counted: int = 1

    @staticmethod
    def of(size: int, number: int, by: str, counted: int = 1) -> Divisibility:
        """Half of something must also be whole: its double is a multiple of twice the number."""
        below = math.lcm(*(value.denominator for value in terms_of(size).values()))
        return Divisibility(size * below, number * below, by, counted)

    def number_in(self, micro_batches: int | None) -> int:
        """The number with so many micro-batches; ``None``: as planned."""
        if micro_batches is None or self.counted == 1:
            return self.number
        return self.number // self.counted * micro_batches


class Scale:
    """A plan's decisions, to be taken at other sizes.

    Args:
        assignment: as planned.
        batch, sequence: what is to change.
        restage: how decisions run micro-batched, if they do.

    Attributes:
        planned: the assignment that is scaled.
        restage: how decisions run micro-batched, if they do.
        followed: how its sizes move.
        divisors: sizes that must be multiples, for the decisions to hold.

    Raises:
        PlanError: the sizes cannot be followed; names the operator.
    """

    def __init__(self, assignment: Assignment, *, batch: bool, sequence: bool, restage: Restage):
        self.planned, self.restage, space = assignment, restage, assignment.space
        self.followed = follow(space.graph, space.rules, batch, sequence)
        _check_alike(space, self.followed)
        self._parts = {
            part: space.graph.by_name[ref.node].path or ref.node
            for ref, dims in self.followed.dims.items()
            for part in itertools.chain(*dims)
            if isinstance(part, Size)
        }
        self._chosen = {
            variable: _laid_out(decision, map(self._layout, self._values(variable), _layouts(decision)))
            for variable, decision in assignment.chosen.items()
        }
        self.divisors = tuple(dict.fromkeys(self._divisors()))

    # ---- what moves ----

    def _values(self, variable: Variable) -> tuple[Ref, ...]:
        """Those that a decision has layouts of: operands and results, a leaf, a reshard point, or an output."""
        space = self.planned.space
        if variable[0] == "output":
            position = variable[1]
            assert isinstance(position, int)
            return (space.leaving[position],)
        if variable[0] == "reshard_point":
            return (space.decision_graph.variables.reshard_points[variable],)
        node = space.graph.by_name[space.members[variable][0]]
        return (*node.inputs, *(Ref(node.name, i) for i in range(len(node.results))))

    def _layout(self, ref: Ref, layout: Layout) -> Layout:
        """A layout whose strips know how they move."""
        return tuple(
            Shard(kind.dim, self._within(self.followed.dims[ref][kind.dim], kind.outer, ref))
            if isinstance(kind, Shard) and kind.outer > 1
            else kind
            for kind in layout
        )

    def _strips(self, ref: Ref, dim: int, counts: Iterable[int], moved: Callable[[int], int]) -> frozenset[int]:
        """Strip counts of a value at other sizes; one that falls between two parts serves no decision."""
        found = (_strips_of(self.followed.dims[ref][dim], count) for count in counts)
        return frozenset(moved(count) for count in found if count is not None)

    def _within(self, parts: Sizes, count: int, where: object) -> int:
        found = _strips_of(parts, count)
        if found is None:
            raise NotFollowed(
                f"this plan's cost cannot be followed to other sizes: {where} is cut into {count} strips, which "
                f"fall between {' and '.join(map(describe, parts))}"
            )
        return found

    def _divisors(self) -> Iterator[Divisibility]:
        """Every moving size that some decision, or some operator, cuts evenly."""
        space = self.planned.space
        for part, where in self._parts.items():
            if any(value.denominator > 1 for value in part.terms.values()):
                yield Divisibility.of(part, 1, f"equal pieces, in {where}")
        for variable, decision in self._chosen.items():
            values = self._values(variable)
            node = space.graph.by_name[values[-1].node]
            for ref, layout in zip(values, _layouts(decision), strict=True):
                yield from self._cut_by(ref, layout, node.path or node.target or node.name)

    def _cut_by(self, ref: Ref, layout: Layout, where: str) -> Iterator[Divisibility]:
        """By the rule of :func:`planner.ir.layout.local_shape`."""
        axes = self.planned.space.mesh.axes
        for dim, parts in enumerate(self.followed.dims[ref]):
            ranks: dict[int, int] = {}
            names, micro_batches = [], {}
            for kind, axis in zip(layout, axes, strict=True):
                if isinstance(kind, Shard) and kind.dim == dim:
                    micro_batches.update({kind.outer: axis.size} if axis.name == MICRO else {})
                    ranks[kind.outer] = ranks.get(kind.outer, 1) * axis.size
                    names.append(axis.name)
            outers = sorted(ranks)
            if not outers:
                continue
            for outer, following in zip(outers, [*outers[1:], math.prod(parts)], strict=True):
                length = quotient(following, outer)
                if length is None:
                    raise NotFollowed(
                        f"this plan's cost cannot be followed to other sizes: in {where}, {describe(following)} is cut "
                        f"into {describe(outer)} strips"
                    )
                if (isinstance(length, Size) or outer in micro_batches) and ranks[outer] > 1:
                    of = f"ranks of the {' and '.join(name for name in names if name != MICRO)} axis"
                    sharing = of if MICRO not in names else f"parts (micro-batches x {of})"
                    sharing = "micro-batches" if names == [MICRO] else sharing
                    yield Divisibility.of(length, ranks[outer], f"{sharing}, in {where}", micro_batches.get(outer, 1))

    # ---- at other sizes ----

    def assignment(
        self, batch: int, sequence: int, kind: type[Space] = Space, micro_batches: int | None = None
    ) -> Assignment:
        """The decisions at these sizes, in a space of some kind.

        Args:
            micro_batches: how many; ``None``: as planned.

        Raises:
            PlanError: a size is not divided evenly, or there is nothing left of a tensor; names it.
        """
        self.check(batch, sequence, micro_batches)
        space = self.planned.space
        mesh = space.mesh if micro_batches is None else space.mesh.micro_batched(micro_batches)

        def moved(number: int) -> int:
            return at_sizes(number, batch, sequence)

        graph, rules = self._graph(moved)
        folded = refold(space.folded, graph)
        cuts = {
            ref: {dim: self._strips(ref, dim, counts, moved) for dim, counts in by_dim.items()}
            for ref, by_dim in space.decision_graph.cuts(tuple(map(int, mesh.sizes))).items()
        }
        decision_graph = _Twin(space.decision_graph, folded, rules, cuts)
        scaled = kind(folded, mesh, space.cost, space.training, rules, None, None, decision_graph, space.pace)
        chosen = {
            variable: _laid_out(decision, (_moved(layout, moved) for layout in _layouts(decision)))
            for variable, decision in self._chosen.items()
        }
        return replace(self.planned, space=scaled, chosen=chosen)

    def _graph(self, moved: Callable[[int], int]) -> tuple[Graph, dict[str, Rule]]:
        """The graph and its rules; members of a variable share both."""
        space, followed = self.planned.space, self.followed
        nodes: dict[str, Node] = {}
        rules: dict[str, Rule] = {}
        known: dict[object, Rule] = {}
        for names in space.members.values():
            first = space.graph.by_name[names[0]]
            shapes = [
                tuple(math.prod(map(moved, parts)) for parts in followed.dims[Ref(first.name, i)])
                for i in range(len(first.results))
            ]
            results = tuple(replace(old, shape=shape) for old, shape in zip(first.results, shapes, strict=True))
            for name in names:
                node = space.graph.by_name[name]
                nodes[name] = Node(name, node.op, node.args, results, node.path, node.target, node.shares)
            if not first.is_leaf:
                old, factors = space.rules[first.name], followed.factors[first.name]
                sizes = {name: math.prod(map(moved, factors[name])) for name in old.sizes}
                rule = known.setdefault((id(old), tuple(sizes.values())), replace(old, sizes=sizes))
                rules.update(dict.fromkeys(names, rule))
        graph = replace(space.graph, nodes=tuple(nodes[node.name] for node in space.graph.nodes))
        return graph, rules

    def check(self, batch: int, sequence: int, micro_batches: int | None = None) -> None:
        """Refuse sizes at which the decisions do not hold.

        Raises:
            PlanError: names the size, and the axis that does not divide it or what leaves nothing of it; or this is a
                step without micro-batches, or becomes one.
        """
        planned = self.planned.space.mesh.micro_batches
        if micro_batches is not None and micro_batches != planned and 1 in (micro_batches, planned):
            raise PlanError(
                f"the plan's step has {planned} micro-batch{'es' * (planned != 1)}, and of {micro_batches} it would be "
                f"another program, with other decisions: plan again with pin 'micro_batches' {micro_batches}"
            )
        why = self.refusal(batch, sequence, micro_batches)
        if why is not None:
            given = [
                (self.followed.batch, f"batch {batch}"),
                (self.followed.sequence, f"sequence length {sequence}"),
                (micro_batches is not None, f"{micro_batches} micro-batches"),
            ]
            raise PlanError(f"at {' and '.join(words for planned, words in given if planned)}, {why}")

    def refusal(self, batch: int, sequence: int, micro_batches: int | None = None) -> str | None:
        """Why the decisions do not hold at these sizes; ``None`` if they do."""
        for part, where in self._parts.items():
            if at_sizes(part, batch, sequence) < 1:
                return f"nothing is left of {describe(part)} in {where}: give a larger size"
        for each in self.divisors:
            size, number = at_sizes(each.size, batch, sequence), each.number_in(micro_batches)
            if size % number:
                what = f"{describe(each.size)} is {size}" if isinstance(each.size, Size) else f"a dim is {size}"
                return f"{what}, which {number} {each.by}, do not divide: give a multiple, or plan again for it"
        for size, bound, where in self.followed.bounds:
            if at_sizes(size, batch, sequence) > bound:
                return (
                    f"{where} takes {bound} at most, and would be given {at_sizes(size, batch, sequence)}: give a "
                    "smaller size, or plan a model that takes more"
                )
        return None

    def is_even(self, batch: int, sequence: int) -> bool:
        """Whether everything that is cut evenly can be."""
        return all(at_sizes(each.size, batch, sequence) % each.number == 0 for each in self.divisors)

    def symbolic(self, kind: type[Space] = Space, *, micro_batched: bool = False) -> Assignment:
        """The decisions as planned, at sizes that know how they move, in a space of some kind.

        Args:
            micro_batched: whether the number of micro-batches moves, too.
        """
        batch, sequence = self.followed.batch, self.followed.sequence
        micro_batches = micro_batches_of(self.planned.space.mesh.micro_batches) if micro_batched else None
        sizes = batch_of(batch) if batch else 0, sequence_of(sequence) if sequence else 0
        return self.assignment(*sizes, kind, micro_batches)

    @cached_property
    def moments(self) -> tuple[int, ...]:
        """Bytes of every moment of the planned step, as sizes: the largest is the peak."""
        assignment = self.symbolic()
        staged = self.restage(assignment)
        if staged is not None:
            return tuple(dict.fromkeys(moments(staged.alive, staged.alive.running)))
        return tuple(dict.fromkeys(total for _, total in usage(assignment).moments))

    def predict(self, batch: int, sequence: int, micro_batches: int | None = None) -> Prediction:
        """A step of the decisions at these sizes; raises as :meth:`assignment` does."""
        assignment = self.assignment(batch, sequence, micro_batches=micro_batches)
        staged = self.restage(assignment)
        if staged is not None:
            return predict_micro_batched(assignment, staged)
        found = predict(assignment, 0.0)
        return replace(found, step_time_s=sum(found.time_s.values()))

    def peak_bytes(self, batch: int, sequence: int) -> int:
        """The fullest moment at these sizes; raises as :meth:`assignment` does."""
        assignment = self.assignment(batch, sequence)
        staged = self.restage(assignment)
        return usage(assignment).peak_bytes if staged is None else staged.peak_bytes


class OtherSizes:
    """A plan's decisions, with the batch, the sequence length, or both to change.

    Args:
        assignment: the decisions.
        restage: how they run micro-batched at whatever sizes, if they do.
    """

    def __init__(self, assignment: Assignment, restage: Restage):
        self._assignment, self._restage = assignment, restage
        self._known: dict[tuple[bool, bool], Scale] = {}

    def scale(self, *, batch: bool, sequence: bool) -> Scale:
        """The decisions with these sizes to change; raises as :class:`Scale` does."""
        if (batch, sequence) not in self._known:
            self._known[batch, sequence] = Scale(
                self._assignment, batch=batch, sequence=sequence, restage=self._restage
            )
        return self._known[batch, sequence]

    def widest(self) -> tuple[Scale, str]:
        """The decisions with as much to change as can be followed, and why the rest cannot be.

        Raises:
            PlanError: neither size can be followed.
        """
        try:
            return self.scale(batch=True, sequence=True), ""
        except NotFollowed as error:
            why = error
        try:
            return self.scale(batch=True, sequence=False), str(why)
        except NotFollowed:
            return self.scale(batch=False, sequence=True), str(why)

    def at(self, batch: int | None, sequence: int | None, micro_batches: int | None = None) -> Prediction:
        """A step at other sizes; ``None``: as planned."""
        for name, size in (("batch", batch), ("sequence", sequence), ("micro_batches", micro_batches)):
            check_size(name, size)
        scale = self.scale(batch=batch is not None, sequence=sequence is not None)
        return scale.predict(batch or 0, sequence or 0, micro_batches)


def check_size(name: str, size: object) -> None:
    """Refuse what is no size, as users give it.

    Raises:
        PlanError: it is neither ``None`` nor a whole number from 1.
    """
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise PlanError(f"{name} is {size!r}: give a whole number from 1, or leave it out for the planned one")


class _Twin(DecisionGraph):
    """The decision graph of a graph that differs from another one in sizes alone, on which nothing found depends."""

    def __init__(self, planned: DecisionGraph, folded: Folded, rules: Mapping[str, Rule], cuts: Cuts):
        vars(self).update(vars(planned))
        self.folded, self.graph, self.rules = folded, folded.graph, rules
        self._at_sizes = cuts
        self.blocks = copy.copy(planned.blocks)
        self.blocks.folded, self.blocks.graph, self.blocks.rules = folded, folded.graph, rules
        self.blocks.ways = {}  # known by the rules of their operators, which are others at other sizes

    def cuts(self, sizes: tuple[int, ...]) -> Cuts:
        """The planned cuts, moved."""
        return self._at_sizes


def _check_alike(space: Space, followed: Followed) -> None:
    """Refuse blocks that are equal as planned and would not be at other sizes: they share their decisions."""
    for names in space.members.values():
        first = space.graph.by_name[names[0]]
        for name in names[1:]:
            same = all(
                followed.dims[Ref(name, i)] == followed.dims[Ref(first.name, i)] for i in range(len(first.results))
            )
            if not same or followed.factors.get(name) != followed.factors.get(first.name):
                raise NotFollowed(
                    f"this plan's cost cannot be followed to other sizes: {first.op} in {first.path!r} and in "
                    f"{space.graph.by_name[name].path!r} are equal only as planned: plan with a batch and a sequence "
                    "length that equal no other size of the model"
                )


def _strips_of(parts: Sizes, count: int) -> int | None:
    """A strip count as a size: the parts that it spans whole, times constant strips of the next one."""
    major = 1
    for part in parts:
        if int(major) * int(part) > count:
            break
        major = major * part
    return None if count % int(major) else major * (count // int(major))


def _moved(layout: Layout, moved: Callable[[int], int]) -> Layout:
    """A layout with its strips at other sizes."""
    return tuple(Shard(kind.dim, moved(kind.outer)) if isinstance(kind, Shard) else kind for kind in layout)


def _layouts(decision: Choice | Layout) -> tuple[Layout, ...]:
    """Of an operator's operands and results, or of the one value that is decided for."""
    return (*decision.operands, *decision.results) if isinstance(decision, Choice) else (decision,)


def _laid_out(decision: Choice | Layout, layouts: Iterable[Layout]) -> Choice | Layout:
    """A decision with other layouts; of a choice's strategies prices read factors and collectives alone."""
    found = tuple(layouts)
    if not isinstance(decision, Choice):
        return found[0]
    count = len(decision.operands)
    return replace(decision, operands=found[:count], results=found[count:])
