"""Cheapest assignments of pairwise choices under many weights at once.

A relaxation asks the same problem again and again with other weights: of every stage of a pipeline, with every level of
recomputation. Their tables differ by numbers alone, so they are eliminated together, as one array with an axis more;
with tables of a few thousand entries that takes about as long as a few of them would take one by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.solve.choices.eliminate import aligned
from planner.solve.choices.tree import Scope, Tree, build_tree_of
from planner.solve.problem import Floats, Ints

ENTRIES = 200_000
"""Entries of a table at most; a larger one is split, which leaves a lower bound."""


@dataclass(frozen=True, eq=False)
class LeastOfEach:
    """No assignment costs less than ``bounds[k]`` under the weights ``k``; ``assignment(k)`` comes near it.

    Attributes:
        bounds: infinite where everything is forbidden.
    """

    bounds: Floats
    tree: Tree
    tables: list[Floats]
    sizes: Sequence[int]

    def assignment(self, k: int) -> Ints:
        """The choices that follow every table's minimum: a cheapest assignment where no table was split."""
        found = np.zeros(len(self.sizes), dtype=np.int64)
        for group in reversed(self.tree.by_vertex()):
            vertex = self.tree.clusters[group[0]].vertex
            costs = sum(
                self.tables[number][(slice(None), *(found[u] for u in self.tree.clusters[number].separator), k)]
                for number in group
            )
            found[vertex] = int(np.argmin(costs))
        return found


def least_of_each(
    singles: Sequence[Floats], pairs: Mapping[tuple[int, int], Floats], tree: Tree | None = None
) -> LeastOfEach:
    """Minimise the sum of single and pairwise costs under each of several weights.

    Args:
        singles: of every vertex ``(choices, weights)``; infinite where a choice is forbidden.
        pairs: of pairs of vertices, the smaller number first, ``(choices, choices, weights)``.
        tree: that of a problem of the same shape.
    """
    sizes = [len(single) for single in singles]
    tree = tree or build_tree_of(sizes, pairs, ENTRIES)
    weights = singles[0].shape[-1]
    tables: list[Floats] = []
    messages: list[Floats] = []
    for group in tree.by_vertex():
        found = [_table(tree, number, singles, pairs, messages) for number in group]
        if len(group) > 1:
            _agree(found)
        tables += found
        messages += [table.min(axis=0) for table in found]
    roots = [message for message in messages if message.ndim == 1]
    return LeastOfEach(sum(roots, np.zeros(weights)), tree, tables, sizes)


def _table(
    tree: Tree,
    number: int,
    singles: Sequence[Floats],
    pairs: Mapping[tuple[int, int], Floats],
    messages: Sequence[Floats],
) -> Floats:
    """A cluster's table, axes ``(vertex, *separator, weights)``."""
    cluster = tree.clusters[number]
    scope = (cluster.vertex, *cluster.separator)
    parts: list[tuple[Scope, Floats]] = [(pair, pairs[pair]) for pair in cluster.pairs]
    parts += [(tree.clusters[child].separator, messages[child]) for child in cluster.children]
    if cluster.takes_single:
        parts.append(((cluster.vertex,), singles[cluster.vertex]))
    parts.sort(key=lambda part: len(part[0]))
    found = aligned(parts[0][1], parts[0][0], scope)
    for part, table in parts[1:]:
        found = found + aligned(table, part, scope)
    shape = (*(len(singles[u]) for u in scope), found.shape[-1])
    return found if found.shape == shape else np.broadcast_to(found, shape)


def _agree(tables: list[Floats]) -> None:
    """Shift costs between the parts of a split bucket so that they agree on what each choice costs at least."""
    minima = np.stack([table.reshape(len(table), -1, table.shape[-1]).min(axis=1) for table in tables])
    minima[:, np.isinf(minima).any(axis=0)] = math.inf
    finite = np.where(np.isinf(minima), 0.0, minima)
    shifts = np.where(np.isinf(minima), math.inf, finite.mean(axis=0) - finite)
    for at, table in enumerate(tables):
        shift = shifts[at].reshape(len(table), *(1,) * (table.ndim - 2), table.shape[-1])
        tables[at] = table + shift
