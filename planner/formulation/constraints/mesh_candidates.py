"""Enumerates how the ranks of a cluster can be laid out as mesh axes, or takes the pinned ones.

An axis respects the cluster's levels when its ranks divide a unit of a level evenly or are whole units
of it. Only such meshes are proposed; a recipe may pin any that multiplies to the number of devices.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterator, Mapping

from planner.base.errors import PinError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.roles import REST, ROLES, pinnable
from planner.ir.layout import Mesh

MAX_AXES = 2
"""Axes of a mesh at most, where nobody says how many: with three, to bound a mesh takes about ten times as long."""
_NAMES = {1: ("all",), 2: ("outer", "inner"), 3: ("outer", "middle", "inner")}


def candidate_meshes(
    cluster: ClusterSpec, max_axes: int = MAX_AXES, devices: int | None = None, *, crossing: bool = False
) -> tuple[Mesh, ...]:
    """Every mesh of up to ``max_axes`` axes (at most three), fewest axes first, that respects the cluster's levels.

    Axes within one level are interchangeable, so only their ascending order is kept. A single device is
    one axis ``all`` of size 1. With ``devices`` the meshes are of that many consecutive ranks, as in one
    stage of a pipeline, and may be none if these do not respect the levels themselves: all then, where ``crossing``.
    """
    total = cluster.world_size if devices is None else devices
    spans = cluster.spans
    if crossing and not _respects((total,), spans):
        spans = ()
    return tuple(
        Mesh.of(**dict(zip(_NAMES[count], sizes, strict=True)))
        for count in range(1, max_axes + 1)
        for sizes in _factorizations(total, count)
        if _respects(sizes, spans) and _is_canonical(sizes, spans)
    )


def pinned_mesh(cluster: ClusterSpec, sizes: Mapping[str, int], stages: int = 1) -> Mesh:
    """The mesh of a recipe such as ``{"data": 2, "tensor": 8}``, axes in the order of its roles.

    With several ``stages`` of a pipeline it is that of one. A missing ``data`` takes the devices that are left. Axes of
    size 1 shard nothing and are dropped; if none remains, the mesh is one axis ``all`` of size 1. Raises
    :class:`PinError` if a name is unknown, a size is not a positive number, or the sizes do not multiply to the number
    of devices.
    """
    for name, size in sizes.items():
        if name not in ROLES:
            close = difflib.get_close_matches(name, pinnable(), n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise PinError(f"pin {name!r}: there is no such axis; {hint}there are: {', '.join(pinnable())}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise PinError(f"pin {name}={size!r}: give a whole number of ranks, at least 1")
    world, pinned = cluster.world_size, stages * math.prod(sizes.values())
    shown = {**({"pipeline": stages} if stages > 1 else {}), **{name: sizes[name] for name in ROLES if name in sizes}}
    product = " x ".join(f"{name} {size}" for name, size in shown.items()) or "nothing"
    product += f" = {pinned}" if len(shown) > 1 else ""
    if REST not in sizes and world % pinned:
        raise PinError(
            f"pinned {product} does not divide the {world} devices of {cluster.name!r}; "
            f"pin {'sizes whose product' if len(shown) > 1 else 'a size that'} divides {world}"
        )
    if REST in sizes and pinned != world:
        others = f"change a size, or leave out {REST} to have it inferred"
        more = ", ".join(name for name in reversed(pinnable()) if ROLES[name].shards != ROLES[REST].shards)
        alone = f"every device is on some axis: pin what {REST} leaves, too ({more}), or leave {REST} out"
        raise PinError(
            f"pinned {product}, but {cluster.name!r} has {world} devices; {others if len(shown) > 1 else alone}"
        )
    complete = {REST: world // pinned, **sizes}
    return Mesh.of(**({name: complete[name] for name in ROLES if complete.get(name, 1) > 1} or {"all": 1}))


def _factorizations(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ordered tuples of ``count`` factors of ``total``, each above 1 unless there is only one."""
    if count == 1:
        yield (total,)
        return
    for first in range(2, total // 2 + 1):
        if total % first == 0:
            for rest in _factorizations(total // first, count - 1):
                yield (first, *rest)


def _boundaries(sizes: tuple[int, ...]) -> list[int]:
    """Ranks below and including each axis, major first: where axes end in rank order."""
    return list(itertools.accumulate(reversed(sizes), lambda a, b: a * b))[::-1]


def _respects(sizes: tuple[int, ...], spans: tuple[int, ...]) -> bool:
    return all(span % end == 0 or end % span == 0 for end in _boundaries(sizes) for span in spans)


def _is_canonical(sizes: tuple[int, ...], spans: tuple[int, ...]) -> bool:
    """Whether neighbouring axes that lie within one and the same level stand in ascending order."""
    levels = [_level_of(end // size, end, spans) for size, end in zip(sizes, _boundaries(sizes), strict=True)]
    return all(
        level is None or level != following or size <= size_following
        for (level, size), (following, size_following) in itertools.pairwise(zip(levels, sizes, strict=True))
    )


def _level_of(start: int, end: int, spans: tuple[int, ...]) -> int | None:
    """The level that holds a whole axis of ranks ``start`` apart reaching ``end``; ``None`` if it spans several."""
    for level, (below, span) in enumerate(itertools.pairwise((1, *spans))):
        if below <= start and end <= span:
            return level
    return None
