"""Plans that pages quote, and that tests of reports load, are those of today's planner.

With ``UPDATE_GOLDEN=1`` in the environment the golden plan and the pages are written anew. Do the same with
``tests/planner`` after that: the golden texts there are made of this plan.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar import ClusterSpec, Plan
from planner.base.errors import InfeasibleError
from planner.base.formatting import in_bytes
from planner.plan.document.encoding import dump
from tests.planner.plans import GOLDEN, check_golden

ROOT = Path(__file__).resolve().parents[3]
README, READING, OFFLOAD = ROOT / "README.md", *(ROOT / "docs" / f"{page}.md" for page in ("reading_a_plan", "offload"))
CONSTRAINTS = re.split(r"[\s;]+", (ROOT / "constraints.txt").read_text(encoding="utf-8"))

pytestmark = pytest.mark.skipif(
    any(f"{name}=={version(name).partition('+')[0]}" not in CONSTRAINTS for name in ("torch", "transformers")),
    reason="another torch or Transformers writes the model with other operators, which the plan lists",
)


def block(page: Path, opening: str) -> str:
    """The first block of a page that begins so."""
    (found, *_) = re.findall(rf"```\n({re.escape(opening)}.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return str(found)


def check_block(page: Path, opening: str, text: str) -> None:
    """Compare a block of a page with a text, or write it there."""
    shown = block(page, opening)
    if os.environ.get("UPDATE_GOLDEN"):
        page.write_text(page.read_text(encoding="utf-8").replace(shown, text), encoding="utf-8")
    assert block(page, opening) == text, (
        f"{page} shows another plan; if the change is wanted, run this test with UPDATE_GOLDEN=1, then tests/planner"
    )


def example(page: Path) -> dict[str, Any]:
    """What the first program of a page that plans defines before it does."""
    programs = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    program = next(each for each in programs if "\ncluster" in each)
    names: dict[str, Any] = {"torch": torch, "ClusterSpec": ClusterSpec}
    names |= {"GPT2Config": GPT2Config, "GPT2LMHeadModel": GPT2LMHeadModel}
    exec(program.partition("\ncluster")[0], names)
    return names


def test_the_golden_plan_and_the_page_on_reading_one_are_todays() -> None:
    names = example(README)
    cluster = ClusterSpec.local(4, memory_bytes="1 GiB", cores=2)
    pin = {"data": 2, "tensor": 2, "sequence_parallel": True}
    plan = autopar.plan(names["model"], cluster, example_kwargs=names["batch"], pin=pin)
    kept = Plan.load(GOLDEN / "gpt2.plan.json").search.seconds  # they differ from run to run
    plan = replace(plan, search=replace(plan.search, seconds=kept), decided=plan.assignment)
    check_block(READING, "GPT2LMHeadModel", str(plan))
    check_golden("gpt2.plan.json", dump(plan.to_dict()))


def excerpt(shown: str, transfer_schedule: str) -> str:
    """What a page shows of a transfer schedule, as it is today: ``...`` stands for lines, or for the rest of one."""
    today = {_head(line): line for line in transfer_schedule.splitlines()}
    cut = {"...", *(f"{head}: ..." for head in today)}
    return "".join((line if line in cut else today[_head(line)]) + "\n" for line in shown.splitlines())


def _head(line: str) -> str:
    """Which line of a transfer schedule it is: that of a moment, or the first."""
    return "budget" if line.startswith("budget ") else line.partition(":")[0]


@pytest.fixture(scope="module")
def offloaded() -> Callable[..., Plan]:
    """Plan the example of the page on offload with a pin; the same once."""
    names = example(OFFLOAD)
    exec(re.findall(r"^cluster = .*$", OFFLOAD.read_text(encoding="utf-8"), flags=re.MULTILINE)[0], names)
    return cache(lambda **pin: autopar.plan(names["model"], names["cluster"], example_kwargs=names["batch"], pin=pin))


def test_the_page_on_offload_shows_todays_plan(offloaded: Callable[..., Plan]) -> None:
    plan = offloaded(offload="host", micro_batches=1)
    head = re.search(r"^  offload .*?(?=^  search )", str(plan), flags=re.DOTALL | re.MULTILINE)
    check_block(OFFLOAD, "  offload ", head[0])
    check_block(OFFLOAD, "budget ", excerpt(block(OFFLOAD, "budget "), plan.transfer_schedule.text()))
    text = OFFLOAD.read_text(encoding="utf-8")
    assert f"({len(plan.transfer_schedule.trace.moments)} moments; what is left out" in text


def test_the_page_on_offload_shows_todays_updates_in_backward(offloaded: Callable[..., Plan]) -> None:
    plan = offloaded(offload="host", update="backward")
    check_block(OFFLOAD, "backward 7 ", excerpt(block(OFFLOAD, "backward 7 "), plan.transfer_schedule.text()))


def test_the_figures_on_the_page_on_offload_are_todays(offloaded: Callable[..., Plan]) -> None:
    with pytest.raises(InfeasibleError) as caught:
        offloaded(offload="none")
    leanest = re.search(r"the minimum-memory plan found \(.*?\) needs [\d,]+ bytes \(([\d.]+) MiB\)", str(caught.value))
    plan = offloaded(offload="host", micro_batches=1)
    once = 4 * int(plan.model["parameters"])
    fetched = sum(size for (_, way), size in plan.transfer_schedule.bytes_moved.items() if way == "fetch")
    text = " ".join(OFFLOAD.read_text(encoding="utf-8").split())
    assert (
        f'This model\'s data alone are {4 * once / 2**20:.0f} MiB; with `{{"offload": "none"}}` the error '
        f"says that the minimum-memory plan found needs {float(leanest[1]):.0f} MiB."
    ) in text
    assert f"in the example {in_bytes(fetched)} come instead of {once / 2**20:.1f}." in text
