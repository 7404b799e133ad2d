"""Grids: tensor parallelism over two or three axes, pinned by the ranks along each.

====================  ==================================================================================================
``[row, column]``     2-D (Optimus: Xu et al. 2021): rows share the batch, columns the hidden dim, both each parameter
``depth`` beside it   2.5-D (Tesseract: Wang et al. 2022): so many grids share the batch, and each has all parameters
``[input, output,     3-D (Bian et al. 2021): weights are gathered along the last axis, which shares the batch; of each
weight]``             product one of the others shares the output features, and the other the input features
====================  ==================================================================================================

What is whole in one product and sharded in the next is gathered or scattered by the conversions that any layout has: no
operator knows of a grid. SUMMA's panels (van de Geijn and Watts 1997) are the parts of these gathers.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.base.errors import PinError
from planner.formulation.constraints.labels import Labels, normalizes
from planner.formulation.constraints.roles import ROLES
from planner.ir.graph import Graph
from planner.ir.layout import Mesh
from planner.ops.sharding_rule import Rule

GRIDS = {2: ("row", "column"), 3: ("input", "output", "weight")}
"""The axes of a grid of two, and of three."""


def read_tensor(value: object, depth: bool) -> dict[str, int]:
    """Sizes by axis of what a user pins ``tensor`` to, if it is a list.

    Args:
        depth: whether ``depth`` is pinned, too.

    Raises:
        PinError: of another length, or with something else than numbers of ranks.
    """
    ranks = [*value] if isinstance(value, list | tuple) else []
    is_grid = len(ranks) in GRIDS and all(type(each) is int and each > 0 for each in ranks)
    if not is_grid and value is not None and (type(value) is not int or value < 1):
        raise PinError(
            f"pin 'tensor' is {value!r}; it is a number of ranks, or the ranks along each axis of a grid: two, [row, "
            "column], or three, [input, output, weight], whole numbers from 1"
        )
    if depth and len(ranks) != 2:
        raise PinError(
            "pin 'depth' is how many 2-D grids share the batch, and pin 'tensor' is "
            f"{'not given' if value is None else repr(value)}: pin 'tensor' to [row, column] too, or 'replicate' or "
            "'data' in place of 'depth'"
        )
    return dict(zip(GRIDS[len(ranks)], ranks, strict=True)) if is_grid else {}


def in_pins(sizes: Mapping[str, int]) -> dict[str, object]:
    """Sizes by axis as a user pins them: those of a grid in one list."""
    found: dict[str, object] = {}
    grid = next((axes for axes in GRIDS.values() if not sizes.keys().isdisjoint(axes)), ())
    for name, size in sizes.items():
        if name not in grid:
            found[name] = size
        elif "tensor" not in found:
            found["tensor"] = [sizes.get(axis, 1) for axis in grid]
    return found


def check_features(mesh: Mesh, rules: Mapping[str, Rule], graph: Graph, features: Labels) -> None:
    """Refuse axes that divide no hidden dim that norms run over.

    Raises:
        PinError: names the axis and the sizes.
    """
    norms = [node for node in graph.operators if normalizes(node)]
    sizes = sorted({rules[n.name].sizes[f] // outer for n in norms for f, outer in features.parts(n, rules[n.name])})
    for axis in mesh.axes:
        shares = axis.name in ROLES and ROLES[axis.name].activations[:1] == ("features",)
        if shares and sizes and all(size % axis.size for size in sizes):
            raise PinError(
                f"pin 'tensor': axis {axis.name!r} is {axis.size}, and shares the hidden dim that norms run over, of "
                f"which it divides none: {', '.join(map(str, sizes))}; pin another size"
            )
