"""Published runs: the constants of the presets, in textbook formulas, give the step times that were measured."""

from __future__ import annotations

import pytest

from benchmarks import published

pytestmark = pytest.mark.skipif(not published.ROWS.exists(), reason="the published figures are not in this checkout")


def test_step_times_are_as_published(capsys: pytest.CaptureFixture[str]) -> None:
    """At most 6 % off in the mean and 12 % in the worst row, as the table that is printed shows."""
    published.main()
    found = published.estimates()
    assert capsys.readouterr().out.count(" %") == sum(len(each) for each in found.values()) == 14
    for each in found.values():
        mean, worst = published.errors(each)
        assert mean <= 0.06 and worst <= 0.12
