"""Turn a model and one weight per cost column into a lower bound, an assignment, and a bound per choice.

With the columns weighted into one, the cheapest assignment is found by min-plus elimination along a tree. Where
the tree split a bucket, costs are first shifted between the parts so that they agree on the vertex (moment
matching: Ihler et al., "Join-graph based cost-shifting schemes", 2012): a lower bound still, no longer exact.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass

import numpy as np

from planner.problem import Floats, Ints
from planner.solve.model import Model
from planner.solve.tree import Scope, Tree


@dataclass(frozen=True, eq=False)
class Elimination:
    """Every cluster's message for one weighting; ``bound`` is a lower bound on any assignment's weighted cost.

    ``shifts`` are the costs moved between the parts of a split bucket, per cluster; they sum to zero.
    """

    model: Model
    tree: Tree
    weights: Floats
    messages: tuple[Floats, ...]
    shifts: dict[int, Floats]
    bound: float


def eliminate(model: Model, tree: Tree, weights: Floats) -> Elimination:
    """Minimise ``sum(costs @ weights)``; the weight of the wall column must be one."""
    messages: list[Floats] = []
    shifts: dict[int, Floats] = {}
    bound = 0.0
    for group in tree.by_vertex():
        tables = [_table(model, tree, weights, messages, number) for number in group]
        if len(group) > 1:
            minima = np.stack([table.reshape(len(table), -1).min(axis=1) for table in tables])
            dead = np.isinf(minima).any(axis=0)
            minima[:, dead] = math.inf
            with np.errstate(invalid="ignore"):
                moved = np.where(dead, math.inf, minima.mean(axis=0) - minima)
            shifts.update(zip(group, moved, strict=True))
            tables = [_shift(table, shift) for table, shift in zip(tables, moved, strict=True)]
        for table in tables:
            message = np.asarray(table.min(axis=0))
            messages.append(message)
            bound += float(message) if message.ndim == 0 else 0.0
    return Elimination(model, tree, weights, tuple(messages), shifts, bound)


def decode(elimination: Elimination) -> Ints:
    """The assignment that follows every table's minimum: a cheapest one where the tree is exact."""
    model, tree = elimination.model, elimination.tree
    assignment = np.zeros(len(model.singles), dtype=np.int64)
    for group in reversed(tree.by_vertex()):
        vertex = tree.clusters[group[0]].vertex
        costs = np.zeros(len(model.singles[vertex]))
        for number in group:
            cluster = tree.clusters[number]
            if cluster.takes_single:
                costs = costs + model.singles[vertex] @ elimination.weights
            for tail, head in cluster.pairs:
                table = model.pairs[tail, head]
                row = table[:, assignment[head]] if tail == vertex else table[assignment[tail]]
                costs = costs + row @ elimination.weights
            for child in cluster.children:
                scope = tree.clusters[child].separator
                at = tuple(slice(None) if u == vertex else assignment[u] for u in scope)
                costs = costs + elimination.messages[child][at]
        assignment[vertex] = int(np.argmin(costs))
    return assignment


def choice_bounds(elimination: Elimination) -> list[Floats]:
    """Per vertex and choice, a lower bound on the weighted cost of every assignment with that choice."""
    model, tree = elimination.model, elimination.tree
    bounds = [np.full(size, -math.inf) for size in model.sizes]
    # Cost of the best whole assignment for each entry of the separator, filled in by the parent cluster.
    through: dict[int, Floats] = {}
    for number in range(len(tree.clusters) - 1, -1, -1):
        cluster = tree.clusters[number]
        table = _table(model, tree, elimination.weights, elimination.messages, number)
        if number in elimination.shifts:
            table = _shift(table, elimination.shifts[number])
        message = elimination.messages[number]
        # What an entry costs beyond the best entry with the same separator.
        regret = table - np.where(np.isinf(message), 0.0, message)
        whole = regret + through.pop(number, np.asarray(elimination.bound))
        scope = (cluster.vertex, *cluster.separator)
        mine = whole.reshape(len(whole), -1).min(axis=1)
        bounds[cluster.vertex] = np.maximum(bounds[cluster.vertex], mine)
        for child in cluster.children:
            wanted = tree.clusters[child].separator
            least = whole.min(axis=tuple(i for i, u in enumerate(scope) if u not in wanted))
            through[child] = least.transpose(_positions([u for u in scope if u in wanted], wanted))
    return bounds


def _table(model: Model, tree: Tree, weights: Floats, messages: list[Floats] | tuple[Floats, ...], n: int) -> Floats:
    """The cluster's table, axes ``(vertex, *separator)``: the sum of all it takes up, small tables first."""
    cluster = tree.clusters[n]
    scope = (cluster.vertex, *cluster.separator)
    parts: list[tuple[Scope, Floats]] = []
    if cluster.takes_single:
        parts.append(((cluster.vertex,), model.singles[cluster.vertex] @ weights))
    parts += [(pair, model.pairs[pair] @ weights) for pair in cluster.pairs]
    parts += [(tree.clusters[child].separator, messages[child]) for child in cluster.children]
    parts.sort(key=lambda part: len(part[0]))
    return functools.reduce(operator.add, (_aligned(table, part, scope) for part, table in parts))


def _aligned(table: Floats, scope: Scope, target: Scope) -> Floats:
    """``table`` over ``scope`` with its axes moved to where ``target`` has them, ones elsewhere."""
    sizes = dict(zip(scope, table.shape, strict=True))
    order = _positions(scope, [u for u in target if u in sizes])
    return table.transpose(order).reshape([sizes.get(u, 1) for u in target])


def _positions(scope: Scope | list[int], wanted: Scope | list[int]) -> list[int]:
    return [scope.index(u) for u in wanted]


def _shift(table: Floats, shift: Floats) -> Floats:
    return table + shift.reshape(-1, *[1] * (table.ndim - 1))
