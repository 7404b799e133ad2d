"""Turn a model and one weight per cost column into a lower bound, an assignment, and a bound per choice.

With the columns weighted into one, the cheapest assignment is found by min-plus elimination along a tree. Where
the tree split a bucket, costs are first shifted between the parts so that they agree on the vertex (moment
matching: Ihler et al., "Join-graph based cost-shifting schemes", 2012): a lower bound still, no longer exact.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.solve.choices.model import ChoiceModel, Weights
from planner.solve.choices.tree import Cluster, Scope, Tree
from planner.solve.problem import Floats, Ints


@dataclass(frozen=True, eq=False)
class Elimination:
    """Weighted costs, and every cluster's message; ``bound`` is a lower bound on any assignment's weighted cost.

    ``shifts`` are the costs moved between the parts of a split bucket, per cluster; they sum to zero.
    """

    tree: Tree
    weights: Weights
    singles: tuple[Floats, ...]
    pairs: dict[tuple[int, int], Floats]
    messages: list[Floats]
    shifts: dict[int, Floats]
    bound: float


def eliminate(model: ChoiceModel, tree: Tree, weights: Weights) -> Elimination:
    """Minimise the weighted sum, less what the moments' rooms are worth."""
    singles = tuple(weights.singles(model))
    pairs = {pair: costs @ weights.columns for pair, costs in model.pairs.items()}
    done = Elimination(tree, weights, singles, pairs, messages=[], shifts={}, bound=0.0)
    for group in tree.by_vertex:
        if len(group) > 1:
            done.shifts.update(_match(done, group))
        done.messages.extend([np.asarray(_table(done, number).min(axis=0)) for number in group])
    roots = [float(message) for message in done.messages if message.ndim == 0]
    return replace(done, bound=math.fsum(roots) - float(weights.prices @ model.rooms))


def _match(done: Elimination, group: Sequence[int]) -> dict[int, Floats]:
    """Shifts after which the parts of a bucket agree on what each choice of its vertex costs at least."""
    minima = np.stack([table.reshape(len(table), -1).min(axis=1) for table in (_table(done, n) for n in group)])
    return dict(zip(group, agreeing(minima), strict=True))


def agreeing(minima: Floats) -> Floats:
    """What to add to the parts of a bucket, the first axis, so that all have the same minima."""
    minima = np.where(np.isinf(minima).any(axis=0), math.inf, minima)
    finite = np.where(np.isinf(minima), 0.0, minima)
    return np.where(np.isinf(minima), math.inf, finite.mean(axis=0) - finite)


def decode(done: Elimination) -> Ints:
    """The assignment that follows every table's minimum: a cheapest one where the tree is exact."""
    assignment = np.zeros(len(done.singles), dtype=np.int64)
    for group in reversed(done.tree.by_vertex):
        vertex = done.tree.clusters[group[0]].vertex
        costs = sum(
            table[tuple(slice(None) if u == vertex else assignment[u] for u in scope)]
            for number in group
            for scope, table in _parts(done, number)
        )
        assignment[vertex] = int(np.argmin(costs))
    return assignment


def choice_bounds(done: Elimination) -> list[Floats]:
    """Per vertex and choice, a lower bound on the weighted cost of every assignment with that choice."""
    bounds = [np.full(len(single), -math.inf) for single in done.singles]
    for cluster, whole in _whole_tables(done):
        least = whole.reshape(len(whole), -1).min(axis=1)
        bounds[cluster.vertex] = np.maximum(bounds[cluster.vertex], least)
    return bounds


def pair_bounds(done: Elimination) -> dict[tuple[int, int], Floats]:
    """Per pair of neighbours and their choices, a lower bound on the weighted cost of every assignment with both."""
    bounds: dict[tuple[int, int], Floats] = {}
    for cluster, whole in _whole_tables(done):
        for pair in cluster.pairs:
            bounds[pair] = _least(whole, (cluster.vertex, *cluster.separator), pair)
    return bounds


def _whole_tables(done: Elimination) -> Iterator[tuple[Cluster, Floats]]:
    """Per cluster and entry of its table, the cost of the best whole assignment with that entry."""
    clusters = done.tree.clusters
    # The same over a cluster's separator, filled in by its parent.
    through: dict[int, Floats] = {}
    for number in reversed(range(len(clusters))):
        cluster, message = clusters[number], done.messages[number]
        # What an entry costs beyond the best entry with the same separator.
        regret = _table(done, number) - np.where(np.isinf(message), 0.0, message)
        whole = regret + through.pop(number, np.asarray(done.bound))
        for child in cluster.children:
            through[child] = _least(whole, (cluster.vertex, *cluster.separator), clusters[child].separator)
        yield cluster, whole


def _least(table: Floats, scope: Scope, wanted: Scope) -> Floats:
    """The least entries over all but the ``wanted`` vertices, which are the axes of the result."""
    least = np.asarray(table.min(axis=tuple(i for i, u in enumerate(scope) if u not in wanted)))
    return aligned(least, tuple(u for u in scope if u in wanted), wanted)


def _parts(done: Elimination, number: int) -> list[tuple[Scope, Floats]]:
    """What a cluster adds up, small tables first."""
    found = [(each.scope, each.of(done.singles, done.pairs, done.messages)) for each in done.tree.summands[number]]
    shift = [((done.tree.clusters[number].vertex,), done.shifts[number])] if number in done.shifts else []
    return [*shift, *found]


def _table(done: Elimination, number: int) -> Floats:
    """A cluster's table, axes ``(vertex, *separator)``."""
    cluster = done.tree.clusters[number]
    scope = (cluster.vertex, *cluster.separator)
    return functools.reduce(operator.add, [aligned(table, part, scope) for part, table in _parts(done, number)])


def aligned(table: Floats, scope: Scope, target: Scope) -> Floats:
    """``table`` over ``scope`` with its axes moved to where ``target`` has them, and axes of length one elsewhere."""
    sizes = dict(zip(scope, table.shape, strict=True))
    order = [scope.index(u) for u in target if u in sizes]
    return table.transpose(order).reshape([sizes.get(u, 1) for u in target])
