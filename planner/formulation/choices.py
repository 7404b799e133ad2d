"""Choices: all ways to run an operator on a whole mesh, as numbers.

Each is a strategy on every axis, and with it a layout of every operand and result. There are many, and few layouts
among them; so what choices cost is worked out of layouts, and then taken for each choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, overload

import numpy as np

from planner.formulation.strategies import Choice, Ways
from planner.ir.graph import Graph, Node, TensorType
from planner.ir.layout import Layout, LocalType, Mesh, local_shape
from planner.ops.sharding_rule import AxisStrategy
from planner.solve.problem import Ints

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Laid:
    """One tensor's layouts with each of several choices: those that occur, and the number of each choice's."""

    layouts: tuple[Layout, ...]
    numbers: Ints

    def each(self, of_layouts: Sequence[T]) -> list[T]:
        """What is known of the layouts, for every choice."""
        return [of_layouts[number] for number in self.numbers.tolist()]


class Choices(Sequence[Choice]):
    """Ways to run an operator on a whole mesh; each becomes a :class:`Choice` when it is asked for.

    Attributes:
        strategies: on each axis, those that occur.
        taken: by axis and choice, the number of its strategy.
        operands, results: how each is laid out.
    """

    def __init__(
        self,
        axes: tuple[str, ...],
        strategies: tuple[tuple[AxisStrategy, ...], ...],
        taken: Ints,
        operands: tuple[Laid, ...],
        results: tuple[Laid, ...],
    ):
        self._axes, self.strategies, self.taken, self.operands, self.results = (
            axes,
            strategies,
            taken,
            operands,
            results,
        )
        self._made: dict[int, Choice] = {}

    @classmethod
    def only(cls, choice: Choice) -> Choices:
        """One way alone."""
        first = np.zeros(1, np.int64)
        operands, results = (tuple(Laid((each,), first) for each in t) for t in (choice.operands, choice.results))
        taken = np.zeros((len(choice.axes), 1), np.int64)
        found = cls((), tuple((strategy,) for strategy in choice.axes), taken, operands, results)
        found._made[0] = choice
        return found

    def __len__(self) -> int:
        return len(self.taken[0])

    @overload
    def __getitem__(self, at: int) -> Choice: ...
    @overload
    def __getitem__(self, at: slice) -> list[Choice]: ...
    def __getitem__(self, at: int | slice) -> Choice | list[Choice]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        number = range(len(self))[at]
        if number not in self._made:
            self._made[number] = self._choice(number)
        return self._made[number]

    def _choice(self, number: int) -> Choice:
        taken = self.taken[:, number].tolist()
        axes = tuple(each[at] for each, at in zip(self.strategies, taken, strict=True))
        operands, results = (
            tuple(laid.layouts[laid.numbers[number]] for laid in side) for side in (self.operands, self.results)
        )
        label = " ".join(f"{name}:{strategy}" for name, strategy in zip(self._axes, axes, strict=True))
        return Choice(axes, operands, results, label)


Options = Choices | list[Layout]
"""What a variable may be: ways to run an operator, or layouts of a value."""


def laid_at_tail(options: Options, index: int) -> Laid:
    """The layouts in which choices give a result."""
    return options.results[index] if isinstance(options, Choices) else _laid(options)


def laid_at_head(options: Options, position: int) -> Laid:
    """The layouts in which choices want an operand."""
    return options.operands[position] if isinstance(options, Choices) else _laid(options)


def _laid(layouts: list[Layout]) -> Laid:
    return Laid(tuple(layouts), np.arange(len(layouts)))


def choices_of(graph: Graph, node: Node, mesh: Mesh, ways: list[Ways]) -> Choices:
    """Every combination of ways to run ``node``, one for each axis, whose local shapes are even, without repeats; at
    most one passes anything around its ranks, and none shards what another shards alone.
    """
    tensors, operands = (*graph.input_types(node), *node.results), len(node.inputs)
    strategies, types = [], []
    for each in ways:
        different: dict[object, tuple[AxisStrategy, tuple[LocalType, ...]]] = {}
        for strategy, placed in each:
            different.setdefault((placed, strategy.inner), (strategy, placed))
        strategies.append(tuple(strategy for strategy, _ in different.values()))
        types.append([placed for _, placed in different.values()])
    grids: dict[object, _Grid] = {}
    places = []
    for place, tensor in enumerate(tensors):
        on_axes = tuple(tuple(placed[place] for placed in each) for each in types)
        if (key := (tensor.shape, on_axes)) not in grids:
            grids[key] = _Grid(tensor, on_axes, mesh)
        places.append(grids[key])
    shape = tuple(map(len, strategies))
    is_even = np.logical_and.reduce([grid.is_even for grid in places], axis=0) if places else np.ones(shape, bool)
    is_even &= _how_many(strategies, lambda each: any(call.around for call in each.inner)) <= 1
    for factor in {factor for several in strategies for each in several for factor in each.way.alone}:
        sharing = _how_many(strategies, partial(_shards, factor))
        is_even &= (sharing <= 1) | (_how_many(strategies, partial(_shards_alone, factor)) == 0)
    taken = np.stack(np.nonzero(is_even))
    found = {id(grid): grid.laid(is_even) for grid in grids.values()}
    laid = tuple(found[id(grid)] for grid in places)
    return Choices(mesh.names, tuple(strategies), taken, laid[:operands], laid[operands:])


def _how_many(strategies: Sequence[Sequence[AxisStrategy]], is_meant: Callable[[AxisStrategy], bool]) -> np.ndarray:
    """For every combination of ways, one for each axis, how many of them are meant."""
    meant = [np.array([is_meant(each) for each in several], int) for several in strategies]
    return sum(np.ix_(*meant), np.zeros(tuple(map(len, strategies)), int))


def _shards(factor: str, strategy: AxisStrategy) -> bool:
    return strategy.factor == factor or factor in strategy.way.alone


def _shards_alone(factor: str, strategy: AxisStrategy) -> bool:
    return factor in strategy.way.alone


class _Grid:
    """One tensor's layouts, for every combination of its types on each axis.

    Args:
        on_axes: by axis, its type with each way to run the operator there.
    """

    def __init__(self, tensor: TensorType, on_axes: tuple[tuple[LocalType, ...], ...], mesh: Mesh):
        types = [tuple(dict.fromkeys(each)) for each in on_axes]
        shape = tuple(map(len, types))
        self._layouts = list(itertools.product(*types))
        is_even = np.array([local_shape(tensor.shape, layout, mesh.sizes) is not None for layout in self._layouts])
        at = np.ix_(*([own.index(t) for t in each] for own, each in zip(types, on_axes, strict=True)))
        self._numbers = np.arange(len(self._layouts)).reshape(shape)[at]
        self.is_even = is_even.reshape(shape)[at]
        """For every combination of ways, whether ranks have equal parts."""

    def laid(self, kept: np.ndarray) -> Laid:
        """The layouts of the combinations that are kept."""
        numbers = self._numbers[kept]
        occurs = np.zeros(len(self._layouts), bool)
        occurs[numbers] = True
        renumbered = np.cumsum(occurs) - 1
        return Laid(tuple(itertools.compress(self._layouts, occurs.tolist())), renumbered[numbers])
