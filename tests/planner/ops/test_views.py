"""The common factors of two shapes, checked against where the elements really are."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.ops.reshape import common_factors

Shape = tuple[int, ...]


@pytest.mark.parametrize(
    "before, after, factors",
    [
        ((8, 3), (2, 12), [2, 4, 3]),
        ((4, 6), (24,), [4, 6]),
        ((2, 1, 3), (2, 3, 1), [2, 3]),
        ((2, 197, 768), (2, 197, 12, 64), [2, 197, 12, 64]),
        ((2, 16, 3, 4, 8), (2, 16, 96), [2, 16, 3, 4, 8]),
        ((), (1, 1), []),
    ],
)
def test_shapes_with_common_factors(before: Shape, after: Shape, factors: list[int]) -> None:
    sizes, _, _, whole = common_factors(before, after)
    assert list(sizes.values()) == factors
    assert not whole


def test_tangled_elements_are_whole() -> None:
    sizes, before, after, whole = common_factors((4, 6, 5), (6, 4, 5))
    assert before == (("d0", "d1.in0"), ("d1.in1",), ("d2",))
    assert after == (("d0", "d1.out0"), ("d1.out1",), ("d2",))
    assert sizes == {"d0": 2, "d1.in0": 2, "d1.in1": 6, "d1.out0": 3, "d1.out1": 4, "d2": 5}
    assert whole == {"d1.in0", "d1.in1", "d1.out0", "d1.out1"}


@st.composite
def two_shapes(draw: st.DrawFn) -> tuple[Shape, Shape]:
    """Two shapes of equally many elements: the same primes, cut into dims in two ways."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5]), max_size=6))

    def shape(factors: list[int]) -> Shape:
        cuts = sorted(draw(st.lists(st.integers(0, len(factors)), max_size=4)))
        return tuple(math.prod(factors[a:b]) for a, b in zip([0, *cuts], [*cuts, len(factors)], strict=True))

    return shape(primes), shape(draw(st.permutations(primes)))


def index_of(coordinates: dict[str, int], dims: tuple[tuple[str, ...], ...], sizes: dict[str, int]) -> int:
    """Row-major position of the element at these factor coordinates."""
    position = 0
    for factor in (factor for dim in dims for factor in dim):
        position = position * sizes[factor] + coordinates[factor]
    return position


@given(two_shapes())
def test_shared_factors_mean_the_same_elements(shapes: tuple[Shape, Shape]) -> None:
    sizes, before, after, whole = common_factors(*shapes)
    for dims, shape in zip((before, after), shapes, strict=True):
        assert tuple(math.prod(sizes[factor] for factor in dim) for dim in dims) == shape
    assert 1 not in sizes.values()

    # A factor is shared if the elements at one of its indices are the same ones on both sides.
    shared = set(sizes) - whole
    for factor in shared:
        for index in range(sizes[factor]):
            kept = []
            for dims in (before, after):
                others = [f for dim in dims for f in dim]
                ranges = [[index] if f == factor else range(sizes[f]) for f in others]
                kept.append({index_of(dict(zip(others, at, strict=True)), dims, sizes) for at in product(*ranges)})
            assert kept[0] == kept[1]


@given(two_shapes())
def test_every_dim_that_nests_is_shared(shapes: tuple[Shape, Shape]) -> None:
    sizes, _, _, whole = common_factors(*shapes)
    ends = sorted({math.prod(shape[:i]) for shape in shapes for i in range(len(shape) + 1)})
    if all(b % a == 0 for a, b in pairwise(ends)):
        assert not whole
        assert list(sizes.values()) == [b // a for a, b in pairwise(ends)]


@given(two_shapes())
def test_the_same_shape_is_factored_by_its_dims(shapes: tuple[Shape, Shape]) -> None:
    shape = shapes[0]
    sizes, before, after, whole = common_factors(shape, shape)
    assert before == after
    assert list(sizes.values()) == [size for size in shape if size != 1]
    assert not whole


def test_an_empty_tensor_keeps_its_dims() -> None:
    sizes, before, after, whole = common_factors((0, 3), (3, 0))
    assert [[sizes[factor] for dim in dims for factor in dim] for dims in (before, after)] == [[0, 3], [3, 0]]
    assert whole == set(sizes)
