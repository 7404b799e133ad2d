"""Seconds: the formula behind a number says at the planned sizes what the number says, whatever was computed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.base import symbolic_float as seconds_room
from planner.base.symbolic_float import Pick, Seconds, at_least_zero, formula_of, growing, largest, rest, smallest
from planner.base.symbolic_int import batch_of, sequence_of

BATCH, SEQUENCE = 6, 10
SIZES = (batch_of(BATCH), sequence_of(SEQUENCE), batch_of(BATCH) * sequence_of(SEQUENCE), 7)


def at(formula, batch, sequence):
    """A formula's value."""
    total = 0.0
    for atom, coefficient in formula.items():
        if isinstance(atom, Pick):
            values = [at(dict(option), batch, sequence) for option in atom.options]
            total += coefficient * (max(values) if atom.largest else min(values))
        else:
            total += float(coefficient) * batch ** atom[0] * sequence ** atom[1]
    return total


TIMES = st.recursive(
    st.builds(growing, st.floats(0, 1), st.floats(0, 1), st.sampled_from(SIZES)) | st.floats(0, 1),
    lambda inner: st.one_of(
        st.builds(lambda a, b: a + b, inner, inner),
        st.builds(lambda a, n: n * a, inner, st.integers(0, 5)),
        st.builds(lambda a, n: a / n, inner, st.integers(1, 5)),
        st.builds(lambda a, b: at_least_zero(a - b), inner, inner),
        st.builds(lambda *all_: largest(all_), inner, inner, inner),
        st.builds(lambda *all_: smallest(all_), inner, inner),
    ),
    max_leaves=8,
)


@given(TIMES)
def test_the_formula_is_the_number(seconds):
    assert at(formula_of(seconds), BATCH, SEQUENCE) == pytest.approx(float(seconds), rel=1e-9, abs=1e-12)


@given(TIMES, TIMES, st.integers(1, 50), st.integers(1, 50))
def test_the_largest_is_so_at_every_size(one, other, batch, sequence):
    both = [at(formula_of(each), batch, sequence) for each in (one, other)]
    most, least = largest((one, other)), smallest((one, other))
    assert at(formula_of(most), batch, sequence) == pytest.approx(max(both), rel=1e-9, abs=1e-12)
    assert at(formula_of(least), batch, sequence) == pytest.approx(min(both), rel=1e-9, abs=1e-12)


def test_plain_numbers_stay_plain():
    assert type(at_least_zero(2.0 - 3.0)) is float
    assert formula_of(0.0) == {} and formula_of(2.5) == {(0, 0, 0): 2.5}


def test_rounding_is_left_out():
    assert rest(0.3, 0.1 + 0.2) == 0.0 and rest(1.0, 0.25) == 0.75
    parts = [growing(0.1, 0.2, SIZES[0]), growing(0.3, 0.7, SIZES[0])]
    left = rest(parts[0] + parts[1] + 1e-17, parts[1] + parts[0])
    assert isinstance(left, Seconds) and left.formula == {}
    assert dict(formula_of(rest(parts[1], parts[0]))) == pytest.approx({(0, 0, 0): 0.2, (1, 0, 0): 0.5})


@pytest.mark.parametrize(
    "made",
    [lambda s: s**2, lambda s: s * s, lambda s: 1 / s, lambda s: s / s, round, lambda s: s % 2, lambda s: -s, abs],
)
def test_what_has_no_formula_is_an_error(made):
    with pytest.raises(TypeError):
        made(growing(1.0, 2.0, SIZES[0]))


def test_plain_sums_are_made_of_plain_numbers():
    """``math.fsum`` drops formulas and tells nobody."""
    found = []
    for path in Path(seconds_room.__file__).parents[1].rglob("*.py"):
        tree = ast.parse(path.read_text())
        if any(
            isinstance(node, ast.ImportFrom) and node.module == "planner.base.symbolic_float" for node in ast.walk(tree)
        ):
            calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
            found += [call.args[0] for call in calls if ast.unparse(call.func).endswith("fsum")]
    assert found
    assert all(isinstance(each, ast.GeneratorExp) and ast.unparse(each.elt).startswith("float(") for each in found)
