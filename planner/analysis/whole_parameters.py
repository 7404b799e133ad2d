"""Which rank steps which whole parameter, where an optimizer goes by whole parameters of which ranks hold parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.ir.layout import Layout, Mesh, Shard


def shard_axes(layout: Layout) -> tuple[int, ...]:
    """The axes along which ranks hold different parts."""
    return tuple(axis for axis, local_type in enumerate(layout) if isinstance(local_type, Shard))


def owners(parameters: Sequence[tuple[int, Layout]], mesh: Mesh) -> list[int]:
    """The owner of each parameter among the ranks that hold parts of it, so that no rank owns much more than others.

    The largest come first, each to who owns least so far (Graham 1969: at most 4/3 of the best division). What ranks
    hold copies of, each group of them steps for itself.

    Args:
        parameters: elements, and stored layout, of each.
        mesh: of the ranks that hold them.

    Returns:
        Places in the order of ranks along the axes that cut the parameter; 0 where none does.
    """
    owned = np.zeros(mesh.sizes, dtype=np.int64)
    places = [0] * len(parameters)
    for number in sorted(range(len(parameters)), key=lambda each: -parameters[each][0]):
        elements, layout = parameters[number]
        cut = shard_axes(layout)
        whole = tuple(axis for axis in range(len(mesh.axes)) if axis not in cut)
        fullest = owned.max(axis=whole)
        places[number] = int(fullest.argmin())
        place = iter(np.unravel_index(places[number], fullest.shape))
        owned[tuple(next(place) if axis in cut else slice(None) for axis in range(len(mesh.axes)))] += elements
    return places
