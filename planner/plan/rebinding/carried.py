"""Decides for another model as a plan decides, and leaves the rest to the solver.

Of all that can be chosen for a decision that is kept which does the same on every axis that the meshes share: the same
factor, or the same dim. Sizes count for nothing: strips of a dim may be others. Where nothing of an axis is kept, all
is; where decisions that were carried leave no way between them, both are open, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from planner.base.errors import PinError
from planner.formulation.assignment import Assignment
from planner.formulation.choices import choices_of
from planner.formulation.node_options import AllowLeaf, NodeOptions
from planner.formulation.remat.levels import Recompute
from planner.formulation.search_space import Space
from planner.formulation.strategies import Allow, Choice, Ways, axis_ways
from planner.formulation.variables import Variable
from planner.ir.graph import Node, Ref
from planner.ir.layout import MICRO, Layout, Mesh, format_layout
from planner.ops.sharding_rule import AxisStrategy, Rule
from planner.plan.document.rebinding import Change
from planner.plan.rebinding.matching import Matching, PlannedDecision
from planner.solve.choices import solve
from planner.solve.problem import Edge, Problem, Vertex

SOLVE_S = 10.0
"""How long what is open may be decided."""
ALIKE = ({"invariant", "replicate"}, {"I", "R"})
"""What differs in the gradient alone, which may be another's."""


class CarriedDecisions:
    """The decisions of a plan for another model on one mesh.

    Args:
        matching: what the plan says of which decision.
        planned: the mesh of the plan.
        space: every decision to take for the model, under the pins.
    """

    def __init__(self, matching: Matching, planned: Mesh, space: Space):
        self.matching, self.space = matching, space
        self.mesh, self.axes = space.mesh, planned.names
        self._plain = NodeOptions(space.decision_graph, space.mesh, space.allow, space.allow_leaf, {})
        self._why: dict[Variable, str] = {}

    def decided(self, recompute: Recompute, limit_bytes: int) -> Assignment:
        """The fastest decisions that agree with the plan's as far as these hold; within the limit if some are.

        Args:
            recompute: how much is recomputed.

        Raises:
            PinError: nothing at all is possible on this mesh.
        """
        free = set[Variable]()
        while True:
            space = self._narrowed(free)
            kept = [self._kept(space, variable, free) for variable in space.variables]
            problem = _restricted(space.problem(None, recompute), kept)
            choices = _solved(problem, limit_bytes)
            if choices is not None:
                chosen = {
                    variable: space.options[variable][options[choice]]
                    for variable, options, choice in zip(space.variables, kept, choices, strict=True)
                }
                return Assignment(self.space, chosen, recompute)
            order = space.variables.order
            stuck = {order[at] for at in _stuck(problem)} - free or {*order} - free
            if not stuck:
                raise PinError(f"nothing runs the model on mesh {self.mesh.sizes}: relax a pin, or plan again")
            free.update(stuck)
            self._why.update(dict.fromkeys(stuck, "no resharding leads from or to what is around it"))

    # ---- what agrees with the plan ----

    def _narrowed(self, free: set[Variable]) -> Space:
        """The space in which operators and leaves may run as the plan says, where that holds."""
        ops, leaves = dict[str, list[frozenset[str]]](), dict[str, frozenset[Layout]]()
        for variable, entry in self.matching.planned.items():
            node = self._node(variable)
            if node is None or variable in free:
                continue
            if node.is_leaf:
                leaves[node.name] = frozenset(self._layouts(node, entry))
            else:
                ops[node.name] = [frozenset(str(s) for s, _ in ways) for ways in self._ways(variable, node, entry)]
        allowed, allowed_leaf = self.space.allow, self.space.allow_leaf

        def allow(node: Node, axis: int, strategy: AxisStrategy) -> bool:
            if node.name in ops:
                return str(strategy) in ops[node.name][axis]
            return allowed is None or allowed(node, axis, strategy)

        def allow_leaf(node: Node, layout: Layout) -> bool:
            if node.name in leaves:
                return layout in leaves[node.name]
            return allowed_leaf is None or allowed_leaf(node, layout)

        def found_in(point: Variable, layouts: list[Layout]) -> list[Layout]:
            return self._found_in(point, layouts) if point not in free else layouts

        return _Narrowed(self.space, allow, allow_leaf, found_in)

    def _node(self, variable: Variable) -> Node | None:
        """The first of the nodes that a decision is about."""
        members = self.space.members.get(variable)
        return None if members is None else self.space.graph.by_name[members[0]]

    def _ways(self, variable: Variable, node: Node, entry: PlannedDecision) -> list[Ways]:
        """On each axis the ways to run an operator that agree with the plan's, or all."""
        wanted, rule, graph = _strategies(entry.text), self.space.rules[node.name], self.space.graph
        values = (*node.inputs, *(Ref(node.name, index) for index in range(len(node.results))))
        strips, known = tuple(map(self._plain.strips, values)), self.space.decision_graph.blocks.ways
        every = [_distinct(e) for e in axis_ways(graph, node, rule, self.mesh, strips, self.space.allow, known)]
        is_resized = node.results[0].shape != entry.shape if node.results else False
        kept = [list(ways) for ways in every]
        for at, axis in enumerate(self.mesh.axes):
            if axis.name in wanted:
                kept[at] = _agreeing(every[at], wanted[axis.name], is_resized) or kept[at]
        if choices_of(graph, node, self.mesh, kept):
            return kept
        ranks = [at for at, axis in enumerate(self.mesh.axes) if axis.name != MICRO]
        for count in range(1, len(ranks) + 1):
            for opened in itertools.combinations(ranks, count):
                tried = [every[at] if at in opened else ways for at, ways in enumerate(kept)]
                if choices_of(graph, node, self.mesh, tried):
                    return tried
        return every

    def _layouts(self, node: Node, entry: PlannedDecision) -> list[Layout]:
        """The layouts in which a leaf may be stored that agree most with the plan's."""
        layouts, may = self._plain.leaf_layouts_of(node), self.space.allow_leaf
        pinned = [each for each in layouts if may is None or may(node, each)] or layouts[:1]
        return [pinned[at] for at in self._closest(pinned, entry, node.results[0].shape != entry.shape)]

    def _closest(self, layouts: Sequence[Layout], entry: PlannedDecision, is_resized: bool) -> list[int]:
        """The layouts that agree with the plan's on most axes, by number."""
        wanted = dict(zip(self.axes, entry.text.split(), strict=True))
        shared = [(at, wanted[axis.name]) for at, axis in enumerate(self.mesh.axes) if axis.name in wanted]
        agree = [sum(_agree(text, str(layout[at])) for at, text in shared) for layout in layouts]
        most = [number for number, count in enumerate(agree) if count == max(agree)]
        same = [number for number in most if all(text == str(layouts[number][at]) for at, text in shared)]
        return most if is_resized or not same else same

    def _found_in(self, point: Variable, layouts: list[Layout]) -> list[Layout]:
        """The layouts in which readers may find a value: the plan's, if that is possible, be it that none asks for it.

        Args:
            layouts: those that its maker gives or a reader asks for as they run.
        """
        entry = self.matching.planned.get(point)
        if entry is None:
            return layouts
        same = [each for each in layouts if self._is_planned(each, entry, exactly=True)]
        every = () if same else self.space.reshard_layouts(point, self.space.variables.reshard_points[point])
        return same or [each for each in every if self._is_planned(each, entry)] or layouts

    def _is_planned(self, layout: Layout, entry: PlannedDecision, exactly: bool = False) -> bool:
        """Whether a layout is the plan's on the axes that the meshes share."""
        wanted = dict(zip(self.axes, entry.text.split(), strict=True))
        pairs = zip(self.mesh.names, map(str, layout), strict=True)
        return all(wanted.get(axis, own) == own or (not exactly and _agree(wanted[axis], own)) for axis, own in pairs)

    def _kept(self, space: Space, variable: Variable, free: set[Variable]) -> list[int]:
        """What a decision may be, by number: outputs leave as the plan has it, if that is possible."""
        options, entry = space.options[variable], self.matching.planned.get(variable)
        every = [*range(len(options))]
        if entry is None or variable in free or variable[0] != "output":
            return every
        return [at for at in every if self._is_planned(cast(Layout, options[at]), entry)] or every

    # ---- what does not ----

    def changes(self, assignment: Assignment) -> Iterator[Change]:
        """The decisions that are not the plan's, with the reason."""
        for variable in self.space.variables:
            decision, entry = assignment.chosen[variable], self.matching.planned.get(variable)
            new = decision.label if isinstance(decision, Choice) else format_layout(decision)
            if entry is None:
                if variable[0] in ("op", "leaf"):
                    yield Change(self._called(variable), "", new, "the plan has nothing like it")
                continue
            old, now = self._by_axis(entry.text), self._by_axis(new, self.mesh.names)
            apart = [axis for axis in old if axis in now and not _agree(old[axis], now[axis])]
            if apart:
                yield Change(self._called(variable), entry.text, new, self._reason(variable, apart[0], old[apart[0]]))

    def _by_axis(self, text: str, names: Sequence[str] | None = None) -> dict[str, str]:
        """What a strategy or a layout says of each axis."""
        return _strategies(text) if ":" in text else dict(zip(names or self.axes, text.split(), strict=True))

    def _called(self, variable: Variable) -> str:
        section, name = self.matching.names[variable]
        if isinstance(section, tuple):
            what = {"ops": "", "values": "result of "}[section[0]]
            return f"{what}{name} of block {self.space.folded.names[section[1]]!r}"
        words = {"inputs": "input", "parameters": "parameter", "buffers": "buffer", "values": "value of"}
        return f"{words.get(section, 'output')} {name!r}"

    def _reason(self, variable: Variable, axis: str, wanted: str) -> str:
        node, size = self._node(variable), self.mesh.axes[self.mesh.names.index(axis)].size
        if variable in self._why:
            return self._why[variable]
        if node is None:
            return "as those who make and read it run"
        if node.is_leaf:
            shape = "x".join(map(str, node.results[0].shape))
            return f"{size} ranks of {axis} do not divide {shape} so"
        return _undivided(self.space.rules[node.name], wanted, axis, size)


def _undivided(rule: Rule, wanted: str, axis: str, size: int) -> str:
    """Why an operator cannot be run so on an axis."""
    factor = wanted.partition("/")[0]
    if factor not in rule.sizes:
        return f"it has no {factor} to shard" if factor not in ("invariant", "replicate", "partial") else "it cannot"
    if rule.sizes[factor] % size:
        return f"{factor} is {rule.sizes[factor]}, which {size} ranks of {axis} do not divide"
    return f"{size} ranks of {axis} do not divide {factor} of {rule.sizes[factor]} beside the other axes"


def _strategies(text: str) -> dict[str, str]:
    """``{"data": "m", "tensor": "n/3"}`` of ``"data:m tensor:n/3"``."""
    return {axis: strategy for axis, _, strategy in (part.partition(":") for part in text.split())}


def _agree(one: str, other: str) -> bool:
    """Whether two strategies, or local types, do the same on an axis, whatever the sizes and gradients."""
    return one == other or _sizeless(one) == _sizeless(other) or any({one, other} == each for each in ALIKE)


def _sizeless(text: str) -> str:
    """``"n/"`` of ``"n/3"``, ``"S(0,"`` of ``"S(0,8)"``: without the number of strips."""
    if text.startswith("S("):
        return text.partition(",")[0]
    factor, slash, strips = text.partition("/")
    return f"{factor}{slash}" if strips.isdecimal() and factor != "partial" else text


def _agreeing(ways: Ways, wanted: str, is_resized: bool) -> Ways:
    """The ways that agree with a strategy; the same one alone, unless its strips may be others."""
    same = [way for way in ways if str(way[0]) == wanted]
    if same and not (is_resized and _sizeless(wanted) != wanted):
        return same
    return [way for way in ways if _agree(str(way[0]), wanted)]


def _distinct(ways: Ways) -> Ways:
    """The first of each that lays tensors out alike, as :func:`planner.formulation.choices.choices_of` has them."""
    found: dict[object, tuple[AxisStrategy, tuple]] = {}  # type: ignore[type-arg]
    for strategy, types in ways:
        found.setdefault((types, strategy.inner), (strategy, types))
    return [*found.values()]


class _Narrowed(Space):
    """A space in which operators, leaves and values may be less, as a plan has it.

    Args:
        space: the same with all that may be.
        found_in: of a value's layouts those in which its readers may find it.
    """

    def __init__(
        self,
        space: Space,
        allow: Allow,
        allow_leaf: AllowLeaf,
        found_in: Callable[[Variable, list[Layout]], list[Layout]],
    ):
        super().__init__(
            space.folded,
            space.mesh,
            space.cost,
            space.training,
            space.rules,
            allow,
            allow_leaf,
            space.decision_graph,
            space.pace,
            space,
        )
        self._found_in = found_in

    def reshard_layouts(self, point: Variable, ref: Ref) -> list[Layout]:
        return self._found_in(point, super().reshard_layouts(point, ref))


# ---- the problem that is left ----------------------------------------------------------------------------------------


def _restricted(problem: Problem, kept: Sequence[Sequence[int]]) -> Problem:
    """The problem in which decisions have some of their choices alone."""
    vertices = (_only(vertex, each) for vertex, each in zip(problem.vertices, kept, strict=True))
    edges = (
        replace(
            edge,
            **{
                name: getattr(edge, name)[np.ix_(kept[edge.tail], kept[edge.head])]
                for name in ("time_s", "background_s", "held_bytes")
            },
        )
        for edge in problem.edges
    )
    return Problem(tuple(vertices), tuple(edges), problem.limit_bytes)


def _only(vertex: Vertex, kept: Sequence[int]) -> Vertex:
    names = ("time_s", "background_s", "cover_s", "held_bytes", "transient_bytes")
    return replace(vertex, **{name: getattr(vertex, name)[list(kept)] for name in names})


def _solved(problem: Problem, limit_bytes: int) -> tuple[int, ...] | None:
    """The fastest choices, within the limit if any are; ``None``: all are forbidden."""
    if all(vertex.choices == 1 for vertex in problem.vertices):
        limits: Iterable[int | None] = (None,)
    else:
        limits = (limit_bytes, None)
    for limit in limits:
        answer = solve(replace(problem, limit_bytes=limit), time_limit_s=SOLVE_S, least_memory=False)
        if answer.choices and math.isfinite(answer.objective_s):
            return answer.choices
    return None


def _stuck(problem: Problem) -> list[int]:
    """The decisions between which there is no way."""

    def forbids(edge: Edge) -> bool:
        return not np.isfinite(edge.time_s).any()

    found = [at for edge in problem.edges if forbids(edge) for at in (edge.tail, edge.head)]
    found += [at for at, vertex in enumerate(problem.vertices) if not np.isfinite(vertex.time_s).any()]
    return list(dict.fromkeys(found))
