"""``plan.pareto()``: every point is a plan for the same cluster, which is saved and applied like any other."""

from __future__ import annotations

import base64
import json
import math
import re
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from planner.analysis.memory import usage
from planner.base.errors import InputError, PlanError
from planner.plan.pareto import ParetoCurve
from planner.plan.plan import Plan
from tests.planner.plans import WHOLE, cluster, plan_of, residual_mlp

GAP = 0.01


@cache
def plan() -> Plan:
    return plan_of(residual_mlp(layers=4, width=64, batch=2048), cluster(2), WHOLE)


@cache
def curve() -> ParetoCurve[Plan]:
    return plan().pareto(4, gap=GAP)


def test_points_are_plans_of_the_same_model_and_cluster_that_fit() -> None:
    points = curve().points
    assert 2 < len(points) <= 4 and points[-1].plan is plan()
    for point in points:
        found = point.plan
        assert (found.cluster, found.model, found.pin) == (plan().cluster, plan().model, plan().pin)
        assert point.memory_bytes == found.predicted.peak_bytes == usage(found.assignment).peak_bytes
        assert found.predicted.step_time_s == pytest.approx(point.step_s)
    for lean, fast in pairwise(points):
        assert lean.memory_bytes < fast.memory_bytes and lean.step_s > fast.step_s


def test_a_point_is_saved_and_says_within_which_memory_it_is_the_best(tmp_path: Path) -> None:
    least = curve().points[0]
    least.plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == least.plan and again.search.limit_bytes == least.memory_bytes
    assert "a device" in again.limited and again.limited in again.sentence and again.limited in str(again)
    assert again.limited in again.to_html()
    assert not plan().limited


def test_the_proof_of_a_point_is_that_of_its_plan() -> None:
    for point in curve().points:
        assert point.bound_s == pytest.approx(point.plan.predicted.step_time_s * (1 - point.plan.search.gap))
        assert (point.plan.search.status == "optimal") == (point.gap < 1e-6)


def test_the_price_of_memory_is_the_slope_of_the_hull() -> None:
    points = curve().points
    assert math.isinf(curve().seconds_per_gib(points[0]))
    for point in points[1:]:
        price = curve().seconds_per_gib(point) / 2**30
        assert price > 0
        lower = [each for each in points if each.memory_bytes < point.memory_bytes]
        assert all(
            each.step_s >= point.step_s + price * (point.memory_bytes - each.memory_bytes) - 1e-12 for each in lower
        )


def test_it_is_asked_for_the_plan_within_some_memory() -> None:
    least, second = curve().points[:2]
    assert curve().within(second.memory_bytes - 1) is least and curve().within(2**40) is curve().points[-1]
    with pytest.raises(InputError, match="the leanest plan on the curve needs"):
        curve().within(least.memory_bytes - 1)


def test_what_cannot_be_asked_is_said(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"autopar\.evaluate"):
        Plan.from_dict(plan().to_dict()).pareto()
    with pytest.raises(InputError, match="points is 1"):
        plan().pareto(1)
    with pytest.raises(InputError, match="time_limit_s is 0"):
        plan().pareto(time_limit_s=0)
    with pytest.raises(PlanError, match="cannot write"):
        curve().save_html(tmp_path / "no" / "folder.html")


def test_no_time_leaves_the_plan_itself() -> None:
    found = plan().pareto(time_limit_s=1e-9)
    assert found.stopped == "time" and [point.plan for point in found.points] == [plan()]


def test_it_prints_a_row_for_each_point() -> None:
    rows = str(curve()).splitlines()
    assert rows[0] == "step time against memory per device: ResidualMLP on local"
    assert len(rows) == 2 + len(curve().points) + 1 and "recomputes" in rows[2]


class Page(HTMLParser):
    """What of a page can be chosen, what says which is shown, and the files in it."""

    def __init__(self, html: str):
        super().__init__()
        self.radios: list[dict[str, str | None]] = []
        self.labels: list[str | None] = []
        self.files: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "input" and found["type"] == "radio":
            self.radios.append(found)
        if tag == "label" and "for" in found:
            self.labels.append(found["for"])
        if "download" in found:
            self.files.append(found["href"] or "")


def test_points_are_chosen_by_keyboard_or_pointer_and_their_plans_are_in_the_page() -> None:
    html, count = curve().to_html(), len(curve().points)
    page = Page(html)
    assert [radio["id"] for radio in page.radios] == page.labels and len(page.labels) == count
    assert {radio["type"] for radio in page.radios} == {"radio"} and len({radio["name"] for radio in page.radios}) == 1
    assert [number for number, radio in enumerate(page.radios) if "checked" in radio] == [count - 1]
    for number, (radio, point, file) in enumerate(zip(page.radios, curve().points, page.files, strict=True)):
        assert f"#{radio['id']}:checked~.panels>:nth-child({number + 1}){{display:block}}" in html
        assert f"#{radio['id']}:focus-visible" in html
        saved = json.loads(base64.b64decode(file.removeprefix("data:application/json;base64,")))
        assert Plan.from_dict(saved) == point.plan
    assert not Page(curve()._repr_html_()).files  # a notebook has the curve itself


def test_the_curve_stays_in_its_picture() -> None:
    for each in re.findall(r'<label [^>]*style="left:([\d.]+)%;top:([\d.]+)%', curve().to_html()):
        assert all(0 <= float(part) <= 100 for part in each)
