"""Published runs of torchtitan, imitated: steps and peaks as published, by what is stated of the stack."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import imitated


def test_steps_and_peaks_are_as_published() -> None:
    """Eager and compiled Llama 3 8B: what eager layers cache, and what inductor rotates by itself, tell them apart."""
    eager, compiled = imitated.runs(imitated.RUNS[:2])
    for run in (eager, compiled):
        assert run.published_gib is not None
        assert abs(run.error_besides) < 0.03
        assert abs(run.reserved_gib / run.published_gib - 1) < 0.05
    assert compiled.held == {"root": eager.held["root"]}
    assert eager.held["cached"] == 32 * 2 * 8192 * 4096 * 2  # of each layer the last product of two texts
    assert compiled.seconds["compute"] < eager.seconds["compute"]
    assert {*compiled.besides} - {*eager.besides} == {"rotated"}
    assert compiled.seconds["recompute"] > 0.1  # three products of seven, which are the smaller ones


def test_tensor_parallelism_is_put_in_order_or_fused_with_products() -> None:
    """Asynchronous: two scatters of a layer are fused forward and one again, whose pieces are added up; two of backward
    and that of the head are waited for. In float8 half of the bytes are gathered.
    """
    plain, asynchronous = imitated.HELD_OUT[4:6]
    found = imitated.runs([plain, asynchronous, replace(plain, software=plain.software | imitated.FLOAT8)])
    assert [run.besides["put in order"] > 0.1 for run in found] == [True, False, False]
    whole, memory_bytes_per_s, wire_bytes_per_s = 12 * 8192 * 4096 * 2, 2.4e12, 370e9
    assert found[1].besides["sums"] == pytest.approx(32 * 3 * whole * 9 / 8 / (0.33 * memory_bytes_per_s))
    waited_s = (32 * 2 + 1) * 7 / 8 * whole * 7 / 8 / wire_bytes_per_s
    assert found[1].besides["waited for"] == pytest.approx(waited_s, rel=0.02)
    assert {"sums", "waited for", "in float8"}.isdisjoint(found[0].besides)
    assert found[2].besides["in float8"] < -waited_s / 2
    assert found[0].held["logits"] == pytest.approx(4 * 12 * 8192 * 128256 / 8)
    assert all(abs(run.error_besides) < 0.05 for run in found[:2])


def test_layers_of_qwen_gather_their_queries() -> None:
    """Forward and again: 64 heads of queries and 8 of keys go over the wire, are put in order, and rotated whole."""
    (run,) = imitated.runs(imitated.RUNS[6:7])
    size = 64 * 16 * 4096 * (64 + 8) * 128 * 2
    moved = 2 * size + 10 * size * 7 / 8
    assert run.besides["whole queries"] == pytest.approx(2 * (size * 7 / 8 / 370e9 + moved / (0.85 * 2.4e12)), rel=0.02)
    assert abs(run.error_besides) < 0.06
