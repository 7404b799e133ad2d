"""Owners of whole parameters."""

from __future__ import annotations

from planner.analysis.whole_parameters import owners
from planner.ir.layout import Mesh, parse_layout

MESH = Mesh.of(data=2, tensor=3)


def test_the_largest_come_first_each_to_who_owns_least() -> None:
    """Over three ranks: 9, 6, 5 apart, then 4 to the last, of 5, and 2 to the middle one, of 6."""
    layout = parse_layout("R S(0)", 2)
    found = owners([(elements, layout) for elements in (5, 9, 2, 6, 4)], MESH)
    assert found == [2, 0, 1, 1, 2]


def test_ranks_of_all_axes_are_counted_together() -> None:
    """One rank owns 6 of what both axes cut, so what one axis cuts goes to others, and their copies own it, too."""
    both, data, neither = (parse_layout(text, 2) for text in ("S(0) S(1)", "S(0) R", "R R"))
    assert owners([(6, both), (4, data), (3, data), (100, neither)], MESH) == [0, 1, 1, 0]
