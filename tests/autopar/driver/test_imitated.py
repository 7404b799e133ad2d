"""Published runs of torchtitan, imitated: steps and peaks as published, by what is stated of the stack."""

from __future__ import annotations

import pytest

from benchmarks import imitated


def test_steps_and_peaks_are_as_published() -> None:
    """Eager and compiled Llama 3 8B: what eager layers cache, and what inductor rotates by itself, tell them apart."""
    eager, compiled = imitated.runs(imitated.RUNS[:2])
    for run in (eager, compiled):
        assert run.published_gib is not None
        assert abs(run.error_besides) < 0.06
        assert abs(run.reserved_gib / run.published_gib - 1) < 0.05
    assert compiled.held == {"root": eager.held["root"]}
    assert eager.held["cached"] == 32 * 2 * 8192 * 4096 * 2  # of each layer the last product of two texts
    assert compiled.seconds["compute"] < eager.seconds["compute"]
    assert {*compiled.besides} - {*eager.besides} == {"rotated"}
    assert compiled.seconds["recompute"] > 0.1  # three products of seven, which are the smaller ones


def test_tensor_parallelism_is_put_in_order_unless_it_is_asynchronous() -> None:
    plain, asynchronous = imitated.HELD_OUT[4:6]
    found = imitated.runs([plain, asynchronous])
    assert [run.besides.get("put in order", 0.0) > 0.1 for run in found] == [True, False]
    assert found[0].held["logits"] == pytest.approx(4 * 12 * 8192 * 128256 / 8)
