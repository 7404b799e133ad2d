"""Names: several as one pattern, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.formulation.decision_names import filled, fillings, pattern

PART = st.sampled_from(["0", "1", "2", "10", "a", "b_1"])


@pytest.mark.parametrize(
    "names, text",
    [
        (["head.weight"], ""),
        (["head.weight", "head.weight"], ""),
        (["layers.0.up", "layers.1.up", "layers.2.up"], "0-2"),
        (["layers.5.up", "layers.0.up", "layers.1.up"], "0-1, 5"),
        (["h0.up", "h1.up"], "h0, h1"),
        (["layers.0.experts.1", "layers.2.experts.0"], "0.1, 2.0"),
        (["up", "layers.0"], "up, layers.0"),
    ],
)
def test_what_stands_in_the_place_of_stars_is_written_short(names: list[str], text: str) -> None:
    assert fillings(names) == text


@given(st.integers(1, 3).flatmap(lambda n: st.lists(st.lists(PART, min_size=n, max_size=n), min_size=1, max_size=6)))
def test_names_come_back_from_their_pattern(parts: list[list[str]]) -> None:
    names = [".".join(each) for each in parts]
    assert set(filled(pattern(names), fillings(names))) == set(names)
