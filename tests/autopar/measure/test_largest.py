"""The largest model, searched for in small: the search and its record, with real steps of both sides."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import largest, record
from benchmarks.gpt import Shape
from benchmarks.largest import Job, Record, Search, Try
from planner.cost.cluster import ClusterSpec

MIB = 2**20
SMALL = Search(
    ClusterSpec.local(1, cores=1, host_memory_bytes="1 MiB"),
    Shape(hidden=64, heads=2, vocab=64, batch=1, sequence=16),
    (3 * MIB // 8,),
)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where records go."""
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one process."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("first", [1, 3, 20, 64])
def test_the_largest_that_fits_is_found_in_few_tries(first: int) -> None:
    for answer in range(70):
        known: dict[int, bool] = {}
        while (layers := largest.next_layers(known, first)) is not None:
            assert layers >= 1 and layers not in known
            known[layers] = layers <= answer
        assert max((n for n, fits in known.items() if fits), default=0) == answer and not known[answer + 1]
        assert len(known) <= (5 if first - answer in (0, 1) else 12)


def test_tries_say_something_of_other_devices_too() -> None:
    tries = [
        Try(Job(16, "ours", 10), ""),
        Try(Job(40, "ours", 15), "device"),
        Try(Job(16, "fsdp2", 12), "host"),
        Try(Job(16, "fsdp2", 9), "device"),
        Try(Job(40, "planned", 14), "plan"),
        Try(Job(40, "ours", 13), "error"),
    ]
    assert largest.known_of(tries, 40, "ours") == {10: True, 15: False, 14: False}
    assert largest.known_of(tries, 16, "ours") == {10: True, 15: False}
    assert largest.known_of(tries, 40, "fsdp2") == {12: False}
    assert largest.known_of(tries, 16, "fsdp2") == {12: False, 9: False}


@pytest.mark.filterwarnings("ignore")
def test_the_search_goes_on_where_it_was_broken_off(results: Path, alone: None) -> None:
    """Both sides take real steps; what fits is as planned, and nothing recorded is tried again."""
    carried_out: list[Job] = []

    def trial(search: Search, job: Job, limit_s: float) -> Try:
        carried_out.append(job)
        return largest.tried(search, job)

    def some(count: int) -> list[Try]:
        told = Record.open(lambda: SMALL)
        return [*islice(largest.go_on(told, time.monotonic() + 999, trial), count)]

    assert [*largest.go_on(Record.open(lambda: SMALL), time.monotonic() + 1, trial)] == []  # no time for any
    first, rest, nothing = some(3), some(999), some(1)
    assert first and rest and not nothing and len(carried_out) == len({*carried_out})
    told = Record.open(lambda: replace(SMALL, limits=()))
    assert told.search == SMALL and told.tries == sorted([*first, *rest], key=told.tries.index)
    (limit,) = SMALL.limits
    most = {side: largest.largest(told.tries, limit, side) for side in ("planned", "ours", "fsdp2")}
    assert most["ours"] == most["planned"] > 1 and most["fsdp2"] > 1
    found = {each.job: each for each in told.tries}
    ours, theirs = (found[Job(limit, side, most[side])] for side in ("ours", "fsdp2"))
    assert (
        ours.peak_bytes == ours.predicted_bytes <= limit
        and ours.predicted_s == found[Job(limit, "planned", most["ours"])].predicted_s
    )
    assert found[Job(limit, "planned", most["ours"] + 1)].short_of == "plan"
    beyond = found[Job(limit, "fsdp2", most["fsdp2"] + 1)]
    assert theirs.peak_bytes <= limit + MIB < beyond.peak_bytes and beyond.short_of == "device"
    for each in (ours, theirs, found[Job(limit, "fsdp2, keeping", most["fsdp2"])]):
        assert len(each.seconds) == largest.STEPS and min(each.seconds) > 0
        assert each.loss == pytest.approx(math.log(SMALL.shape.vocab), rel=0.2)
    text = (results / "gpu_largest.md").read_text(encoding="utf-8")
    assert text.count("| largest |") == 3 and "largest so far" not in text


def test_a_process_that_takes_too_much_or_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(SMALL.limits[0], "ours", 1)
    found = largest.in_its_own_process(SMALL, job, 0.0)
    assert (found.job, found.short_of) == (job, "time") and found.parameters > 0
    monkeypatch.setattr(largest, "FLOOR_BYTES", 2**60)
    assert largest.in_its_own_process(SMALL, job, 100.0).short_of == "host"


def test_a_try_without_time_and_one_that_fails_decide_nothing(results: Path) -> None:
    """The first is not recorded; the second is, but not as a model that does not fit, and the side rests."""
    told = Record(SMALL, [Try(Job(SMALL.limits[0], "planned", n), "" if n < 3 else "plan") for n in (2, 3)])
    ends = iter(("error", "time"))
    tried = largest.go_on(told, time.monotonic() + 99, lambda search, job, limit_s: Try(job, next(ends)))
    assert [(each.job.side, each.short_of) for each in tried] == [("ours", "error")]
    assert largest.next_job(told.search, told.tries) == Job(SMALL.limits[0], "ours", 2)
