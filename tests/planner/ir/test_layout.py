"""Layouts: local shapes, strips, and their text form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.base.errors import PlanError
from planner.ir.layout import I, Mesh, P, R, Shard, format_layout, local_outer, local_shape, parse_layout

local_types = st.one_of(st.sampled_from([R, I, P]), st.builds(Shard, st.integers(0, 5), st.sampled_from([1, 2, 3, 12])))


@given(st.lists(local_types, min_size=1, max_size=3).map(tuple))
def test_text_round_trip(layout):
    assert parse_layout(format_layout(layout), len(layout)) == layout


@pytest.mark.parametrize("text", ["S", "S(-1)", "Q", "S(0", "s(0)", "R R"])
def test_wrong_text_is_refused(text):
    with pytest.raises(PlanError, match="layout"):
        parse_layout(text, 1)


@pytest.mark.parametrize(
    ("shape", "layout", "sizes", "expected"),
    [
        ((8, 6), (Shard(0),), (4,), (2, 6)),
        ((8, 6), (Shard(0), Shard(0)), (2, 4), (1, 6)),
        ((8, 6), (Shard(0), Shard(1)), (2, 3), (4, 2)),
        ((8, 6), (R, P), (2, 3), (8, 6)),
        ((6,), (Shard(0, 3),), (2,), (3,)),
        ((12,), (Shard(0), Shard(0, 3)), (3, 2), (2,)),
        ((12,), (Shard(0, 3), Shard(0)), (2, 3), (2,)),
    ],
)
def test_local_shape(shape, layout, sizes, expected):
    assert local_shape(shape, layout, sizes) == expected


@pytest.mark.parametrize(
    ("shape", "layout", "sizes"),
    [
        ((6,), (Shard(0),), (4,)),
        ((6,), (Shard(0, 4),), (2,)),
        ((6,), (Shard(0, 3),), (4,)),
        ((12,), (Shard(0), Shard(0, 3)), (2, 2)),
        ((6,), (Shard(1),), (2,)),
    ],
)
def test_uneven_layouts_have_no_local_shape(shape, layout, sizes):
    assert local_shape(shape, layout, sizes) is None


def test_other_axes_cut_strips_away():
    assert local_outer((Shard(0), Shard(0, 8)), 1, (4, 2)) == 2
    assert local_outer((Shard(0), Shard(0, 8)), 0, (4, 2)) == 1
    assert local_outer((Shard(1), Shard(0, 8)), 1, (4, 2)) == 8


def test_the_last_axis_is_contiguous():
    mesh = Mesh.of(data=2, tensor=4)
    assert [(axis.name, axis.size, axis.stride) for axis in mesh.axes] == [("data", 2, 4), ("tensor", 4, 1)]
    assert mesh.size == 8
