"""Turn the shape of a model into the order in which its vertices are eliminated, and one table per step.

Eliminating a vertex replaces the tables that mention it by one table over its neighbours (bucket elimination:
Dechter, "Bucket elimination: a unifying framework for reasoning", 1999). Where that table would be too large the
bucket is split, and every part is minimised on its own (mini-buckets: Dechter and Rish, 2003).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.solve.choices.model import ChoiceModel
from planner.solve.problem import Floats

_MAX_AXES = 64  # of an array; many vertices of one choice each are few entries
Scope = tuple[int, ...]


@dataclass(frozen=True)
class Cluster:
    """One table over ``vertex`` and ``separator``: its single costs, ``pairs``, and the messages of ``children``.

    Minimising over ``vertex`` leaves a message over ``separator`` (ascending), which clusters further on take up.
    Of several clusters with the same vertex, the parts of a split bucket, the first takes the single costs.
    """

    vertex: int
    separator: Scope
    takes_single: bool
    pairs: tuple[tuple[int, int], ...]
    children: tuple[int, ...]


@dataclass(frozen=True)
class Summand:
    """What a cluster's table adds: a pair's costs, the message of a cluster, or else its vertex's single costs."""

    scope: Scope
    pair: tuple[int, int] | None = None
    cluster: int | None = None

    def of(
        self, singles: Sequence[Floats], pairs: Mapping[tuple[int, int], Floats], messages: Sequence[Floats]
    ) -> Floats:
        """Its costs, among those of all vertices, pairs and clusters."""
        if self.cluster is not None:
            return messages[self.cluster]
        return singles[self.scope[0]] if self.pair is None else pairs[self.pair]


@dataclass(frozen=True)
class Tree:
    """Clusters in elimination order; ``exact`` unless a bucket was split."""

    clusters: tuple[Cluster, ...]
    exact: bool

    @cached_property
    def by_vertex(self) -> tuple[tuple[int, ...], ...]:
        """The clusters of each vertex, the vertices in elimination order."""
        groups: dict[int, list[int]] = {}
        for number, cluster in enumerate(self.clusters):
            groups.setdefault(cluster.vertex, []).append(number)
        return tuple(map(tuple, groups.values()))

    @cached_property
    def summands(self) -> tuple[tuple[Summand, ...], ...]:
        """What each cluster's table adds up: what is over few vertices first, and over the same ones together, so that
        most is added to small tables.
        """
        return tuple(map(self._summands_of, self.clusters))

    def _summands_of(self, cluster: Cluster) -> tuple[Summand, ...]:
        found = [Summand((cluster.vertex,))] if cluster.takes_single else []
        found += [Summand(pair, pair=pair) for pair in cluster.pairs]
        found += [Summand(self.clusters[child].separator, cluster=child) for child in cluster.children]
        return tuple(sorted(found, key=lambda part: (len(part.scope), part.scope)))


def build_tree(model: ChoiceModel, max_entries: int) -> Tree:
    """That of a model, see :func:`build_tree_of`."""
    return build_tree_of(model.sizes, model.pairs, max_entries)


def build_tree_of(sizes: Sequence[int], pairs: Iterable[tuple[int, int]], max_entries: int) -> Tree:
    """Eliminate, again and again, the vertex whose table is smallest; no table exceeds ``max_entries``.

    A vertex without neighbours has no table but its single costs, however many.

    Args:
        sizes: how many choices each vertex has.
        pairs: of vertices that have pairwise costs.
    """
    log_size = [math.log(size) for size in sizes]
    waiting: list[list[Summand]] = [[] for _ in log_size]
    for pair in sorted(pairs):
        for v in pair:
            waiting[v].append(Summand(pair, pair=pair))

    def log_entries(scopes: list[Scope], v: int) -> float:
        return sum(log_size[u] for u in {v}.union(*scopes))

    def is_too_large(scopes: list[Scope], v: int) -> bool:
        return log_entries(scopes, v) > math.log(max_entries) or len({v}.union(*scopes)) > _MAX_AXES

    def weigh(v: int) -> float:
        return log_entries([part.scope for part in waiting[v]], v)

    weight = {v: weigh(v) for v in range(len(log_size))}
    lightest = [(weight[v], v) for v in weight]
    heapq.heapify(lightest)
    clusters: list[Cluster] = []
    groups: list[list[Summand]]
    exact = True
    while weight:
        known, v = heapq.heappop(lightest)
        if weight.get(v) != known:  # eliminated, or weighed again since
            continue
        del weight[v]
        groups = [waiting[v]]
        if waiting[v] and is_too_large([part.scope for part in waiting[v]], v):  # single costs alone are never split
            exact = False
            groups = []
            for part in sorted(waiting[v], key=lambda part: -len(part.scope)):
                for group in groups:
                    if not is_too_large([part.scope, *(other.scope for other in group)], v):
                        group.append(part)
                        break
                else:
                    groups.append([part])
        for u in {u for part in waiting[v] for u in part.scope} - {v}:
            waiting[u] = [part for part in waiting[u] if v not in part.scope]
        for group in groups:
            separator = tuple(sorted({u for part in group for u in part.scope} - {v}))
            for u in separator:
                waiting[u].append(Summand(separator, cluster=len(clusters)))
            pairs = tuple((part.scope[0], part.scope[1]) for part in group if part.cluster is None)
            children = tuple(part.cluster for part in group if part.cluster is not None)
            clusters.append(Cluster(v, separator, group is groups[0], pairs, children))
        for u in {u for cluster in clusters[-len(groups) :] for u in cluster.separator}:
            weight[u] = weigh(u)
            heapq.heappush(lightest, (weight[u], u))
    return Tree(tuple(clusters), exact)
