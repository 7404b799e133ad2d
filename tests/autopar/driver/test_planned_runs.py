"""Published configurations, pinned: steps as published, by the plan alone and with what it leaves out, and peaks."""

from __future__ import annotations

import math

import pytest

from benchmarks import planned_runs

pytestmark = pytest.mark.skipif(not planned_runs.ROWS.exists(), reason="the published figures are not in this checkout")


def test_steps_and_peaks_are_as_published(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Plans are at most 6 % off in the mean and 12 % in the worst row, by themselves and with what they leave out."""
    monkeypatch.setattr(planned_runs, "FREE", ())
    found = planned_runs.runs(["1.7B", "18B", "76B", "310B", "8 GPUs", "128 GPUs"])
    with capsys.disabled():
        print("", *(" | ".join(row.values()) for row in planned_runs.table(found)), sep="\n")
    assert len(found) == 8 and all(run.seconds for run in found)
    alone, with_it = [abs(run.error) for run in found], [abs(run.error_besides) for run in found]
    for errors in (alone, with_it):
        assert math.fsum(errors) / len(errors) <= 0.06 and max(errors) <= 0.12
    peaks = [run.gib / run.published_gib for run in found if run.published_gib and run.pin["recompute"] == "selective"]
    assert len(peaks) == 2 and all(0.9 <= ratio <= 1.1 for ratio in peaks)
