"""Timelines: the simulated step as a trace, as a picture and in characters."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from planner.base.errors import InputError
from planner.plan.timeline import StepTimeline, bubble_of, predicted
from planner.solve.pipeline.schedule import NAMES, VIRTUAL_STAGES, schedule
from planner.solve.pipeline.simulate import SimulatedSchedule, Times, simulate

SVG = "{http://www.w3.org/2000/svg}"


def simulated(name: str, ranks: int, count: int, virtual: int = 1) -> SimulatedSchedule:
    stages = ranks * virtual
    work = 1e-3 * (1 + 0.2 * np.random.default_rng(0).random((3, stages)))
    return simulate(schedule(name, ranks, count, virtual), Times(*work, np.full(stages - 1, 1e-4)))


def drawn(name: str, ranks: int, count: int, virtual: int = 1) -> StepTimeline:
    """Gathering, reducing and updating take longest on the last rank."""
    once = [[each * (1 + rank) for rank in range(ranks)] for each in (0.1e-3, 0.5e-3, 0.3e-3)]
    return predicted(simulated(name, ranks, count, virtual), *once)


def threads(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The complete events of every thread in the order of time."""
    found = defaultdict(list)
    for event in sorted((e for e in trace["traceEvents"] if e["ph"] == "X"), key=lambda e: float(e["ts"])):
        found[event["pid"], event["tid"]].append(event)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_trace_is_what_perfetto_reads_and_shows_every_action_on_its_rank(name: str) -> None:
    virtual = VIRTUAL_STAGES[name][0]
    found, step = simulated(name, 3, 5, virtual), drawn(name, 3, 5, virtual)
    loaded = json.loads(json.dumps(step.trace(), allow_nan=False))
    names = {(e["pid"], e["tid"], e["name"], e["args"].get("name")) for e in loaded["traceEvents"] if e["ph"] == "M"}
    for rank in range(3):
        assert (rank, 0, "process_name", f"pipeline rank {rank}") in names
        assert (rank, 0, "thread_name", "compute") in names
        assert (rank, 1, "thread_name", "communication") in names
    rows = found.schedule.rows
    ended = {}
    for (rank, thread), events in threads(loaded).items():
        assert all({"name", "cat", "ts", "dur", "args"} <= event.keys() and event["dur"] >= 0 for event in events)
        for one, other in pairwise(events):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-6
        if thread == 0:
            assert [event["name"] for event in events] == [*map(str, rows[rank]), "update"]
            assert [(e["args"]["stage"], e["args"]["micro_batch"]) for e in events[:-1]] == [
                (action.stage, action.micro_batch) for action in rows[rank]
            ]
        else:
            assert [event["name"] for event in events[-2:]] == ["gather", "reduce"]
        ended[rank, thread] = events[-1]["ts"] + events[-1]["dur"]
    assert max(ended.values()) == pytest.approx(step.step_s * 1e6)
    assert step.step_s == pytest.approx(found.step_s + 3 * 0.9e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_works_or_waits_and_the_bubble_is_what_is_seen_of_it(name: str) -> None:
    step = drawn(name, 4, 6, VIRTUAL_STAGES[name][0])
    assert step.bubble == pytest.approx(bubble_of(step.events, 4), rel=1e-9)
    last = max(event.end_s for event in step.events if event.action is not None)
    for rank in range(4):
        row = [event for event in step.events if event.rank == rank]
        assert row[0].start_s == 0
        for one, other in pairwise(row):
            if other.kind == "gather":
                assert one.end_s <= other.start_s == last
            else:
                assert one.end_s == pytest.approx(other.start_s, rel=1e-6)
            assert one.kind != "wait" or one.action == other.action


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_few_actions_are_boxes_that_say_what_they_are() -> None:
    step = drawn("zbv", 4, 8, 2)
    svg = step._repr_html_()
    root = ElementTree.fromstring(svg)
    told = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert sorted(text.partition(":")[0] for text in told if "stage" in text) == sorted(
        str(action) for row in schedule("zbv", 4, 8, 2).rows for action in row
    )
    assert sum(text.startswith("reduce") for text in told) == 4
    words = [text.text or "" for text in root.iter(f"{SVG}text")]
    for word in ("rank 0", "rank 3", "forward", "backward of inputs", "backward of weights", "update", "idle"):
        assert word in words
    assert any(step.title[1:] in word for word in words)
    high = float(root.attrib["viewBox"].split()[3])
    for box in root.iter(f"{SVG}rect"):
        x, wide = float(box.attrib["x"]), float(box.attrib["width"])
        assert x >= 0 and x + wide <= 1160 and float(box.attrib["y"]) + float(box.attrib["height"]) <= high


@pytest.mark.parametrize(
    "size, is_divided",
    [(("zero_bubble", 16, 64, 2), False), (("interleaved_1f1b", 16, 256, 4), True), (("1f1b", 64, 256, 1), True)],
)
def test_many_actions_stay_a_small_picture(size: tuple[str, int, int, int], is_divided: bool) -> None:
    svg = drawn(*size).to_svg()
    assert len(svg) < 300_000
    root = ElementTree.fromstring(svg)
    assert ("shares of the time" in svg) == is_divided
    kinds = {path.attrib["class"].rstrip("0123456789") for path in root.iter(f"{SVG}path")}
    assert {"F", "gather", "reduce", "update"} < kinds


def test_a_row_of_characters_has_what_takes_most() -> None:
    found = simulate(schedule("gpipe", 2, 2), Times(np.ones(2), np.ones(2), np.ones(2), np.zeros(1)))
    rows = str(predicted(found, [0, 0], [1, 1], [2, 2])).splitlines()
    assert rows[0] == "predicted step 12.00 s, bubble 33.3 %: gpipe, 2 ranks, 2 micro-batches"
    assert rows[1] == "rank 0 " + 16 * "█" + 24 * "·" + 32 * "▒" + 8 * "r" + 16 * "u"
    assert rows[2] == "rank 1 " + 8 * "·" + 16 * "█" + 32 * "▒" + 16 * "·" + 8 * "r" + 16 * "u"
    assert rows[4].split("   ")[2:] == [" █ forward", "▒ backward", "· idle", "r reduce", "u update"]


def test_of_very_many_actions_each_kind_has_its_share_of_a_row() -> None:
    found = simulate(schedule("1f1b", 2, 500), Times(np.ones(2), np.ones(2), np.ones(2), np.zeros(1)))
    row = str(predicted(found, [0, 0], [0, 0], [0, 0])).splitlines()[1].removeprefix("rank 0 ")
    assert abs(row.count("█") - 32) <= 1 and abs(row.count("▒") - 64) <= 1


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_trace_that_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = drawn("1f1b", 2, 4)
    with pytest.raises(InputError, match=r"cannot write the trace .*nowhere.*No such file"):
        step.save_trace(tmp_path / "nowhere" / "step.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="Is a directory"):
        step.save_trace(tmp_path / "folder")
    step.save_trace(tmp_path / "step.json")
    kept = (tmp_path / "step.json").read_text()

    def full(self: Path, *args: Any, **kwargs: Any) -> int:
        os.close(os.open(self, os.O_CREAT | os.O_WRONLY))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InputError, match="No space left on device"):
        drawn("1f1b", 2, 8).save_trace(tmp_path / "step.json")
    assert (tmp_path / "step.json").read_text() == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "step.json"]
