"""Layouts as colours on the mesh: a small picture of the mesh in which devices of one shade hold the same.

The last axis runs to the right and all others run downwards, the outer ones in larger steps. An axis that shards a
tensor shades it in steps along its direction, in its own colour; one that holds partial sums is hatched; what is
replicated changes nothing. Style sheets draw it, so that a picture is one element.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from planner.ir.layout import MICRO
from planner.plan.document.document import Document
from planner.plan.page.parts import axis_chip

STEPS = 4
"""An axis is drawn with so many steps at most."""


@dataclass(frozen=True)
class _DrawnAxis:
    """An axis as it is drawn.

    Attributes:
        place: of its local type in a layout.
        steps: so many of them; ``repeats``: so often, as axes outside of it have steps in the same direction.
    """

    place: int
    name: str
    is_across: bool
    steps: int
    repeats: int


@dataclass
class MeshColours:
    """The pictures of one mesh; those that are asked for are in :meth:`style`."""

    axes: tuple[_DrawnAxis, ...]
    _numbers: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(document: Document) -> MeshColours:
        """Those of a document's mesh."""
        drawn = [(at, axis) for at, axis in enumerate(document.mesh.axes) if axis.name != MICRO and axis.size > 1]
        axes, repeats = [], 1
        for at, axis in drawn:
            is_last, steps = axis is drawn[-1][1], min(axis.size, STEPS)
            axes.append(_DrawnAxis(at, axis.name, is_last, steps, 1 if is_last else repeats))
            repeats *= steps
        return MeshColours(tuple(axes))

    def swatch(self, layout: str) -> str:
        """The picture of a layout."""
        if not self.axes:
            return ""
        number = self._numbers.setdefault(layout, len(self._numbers))
        return f'<i class="swatch w{number}" role="img" aria-label="{escape(layout)}" title="{escape(layout)}"></i>'

    def style(self) -> str:
        """The style of all pictures that were asked for."""
        return "".join(self._rule(layout, number) for layout, number in self._numbers.items())

    def _rule(self, layout: str, number: int) -> str:
        types = layout.split()
        layers = [
            (_steps(axis) if types[axis.place].startswith("S") else _hatched(axis), _size(axis))
            for axis in self.axes
            if axis.place < len(types) and types[axis.place][0] in "SP"
        ]
        if not layers:
            return ""
        images, sizes = zip(*layers, strict=True)
        return f".autopar .w{number}{{background-image:{','.join(images)};background-size:{','.join(sizes)}}}"

    def key(self) -> str:
        """What the pictures say, in words."""
        if not self.axes:
            return ""
        across = [axis_chip(axis.name, axis.place) for axis in self.axes if axis.is_across]
        down = [axis_chip(axis.name, axis.place) for axis in self.axes if not axis.is_across]
        where = " and ".join(
            f"{' '.join(names)} {way}" for names, way in ((across, "to the right"), (down, "downwards")) if names
        )
        return (
            f'<p class="key">Each picture is the mesh, {where}, an axis in {STEPS} steps at most: devices of one '
            "shade hold the same part of a tensor, hatched ones a term of a sum. Bytes are of one, where there are "
            "several.</p>"
        )


def _steps(axis: _DrawnAxis) -> str:
    """Shades from one step to the next, in the axis' colour."""
    way, colour = ("to right" if axis.is_across else "to bottom"), f"var(--a{axis.place % 3})"
    stops = []
    for step in range(axis.steps):
        strength = 15 + 75 * step / max(1, axis.steps - 1)
        ends = f"{100 * step / axis.steps:g}% {100 * (step + 1) / axis.steps:g}%"
        stops.append(f"color-mix(in srgb,{colour} {strength:.0f}%,transparent) {ends}")
    return f"linear-gradient({way},{','.join(stops)})"


def _hatched(axis: _DrawnAxis) -> str:
    colour = f"var(--a{axis.place % 3})"
    return f"repeating-linear-gradient(45deg,{colour} 0 1px,transparent 1px 5px)"


def _size(axis: _DrawnAxis) -> str:
    return f"100% {100 / axis.repeats:g}%"
