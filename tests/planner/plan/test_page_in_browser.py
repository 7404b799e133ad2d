"""Pages in a real browser: what is seen at every width, light and dark, with the keyboard alone, and without script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from planner.base.formatting import in_bytes, in_seconds
from planner.cost.cluster import ClusterSpec
from planner.ir.graph import Graph
from planner.plan.plan import Plan
from tests.planner.plan.browser import CHROMIUM, DRIVER, WITHOUT, Browser
from tests.planner.plan.test_pareto import curve
from tests.planner.plans import WHOLE, Build, cluster, plan_of, residual_mlp

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=WITHOUT)]

LOOK = Path(__file__).with_name("look.js").read_text()
SHOTS = Path(__file__).parents[3] / "build" / "screenshots"
WIDTHS = (360, 768, 1280, 2560)
DEVICES = (4, 64, 16384)
TITLES = ["Mesh", "Step over time", "Model", "Distinct blocks", "Collectives by size", "Search"]
NASTY = "</script><img src=x onerror=broken=1>"


@cache
def planned(devices: int) -> Plan:
    """One block after the other on 4 devices; on 16,384 as many blocks and actions as a model of 405B parameters has on
    them: 126 layers, 16 pipeline ranks of 8 stages, 16 micro-batches.
    """
    if devices == 4:
        return plan_of(residual_mlp(), cluster(4), {**WHOLE, "data": 2, "tensor": 2})
    spec = ClusterSpec.preset("dgx-h100", devices=devices)
    if devices == 64:
        graph, pin = residual_mlp(layers=14, batch=4096), {"pipeline": 4, "micro_batches": 8, "data": 16}
        return plan_of(graph, spec, {**pin, "recompute": "full"})
    pin = {"pipeline": 16, "virtual_stages": 8, "schedule": "interleaved_1f1b", "micro_batches": 16}
    return plan_of(residual_mlp(layers=126, width=512, batch=16384), spec, {**pin, "data": 128, "tensor": 8})


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = Browser()
    yield found
    found.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pages")
    for devices in DEVICES:
        planned(devices).save_html(found / f"{devices}.html")
    curve().save_html(found / "curve.html")
    return found


def looked_at(browser: Browser) -> dict[str, Any]:
    found: dict[str, Any] = browser.run(LOOK)
    return found


# ---- what is seen ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_looks_right(browser: Browser, folder: Path, devices: int, width: int) -> None:
    plan = planned(devices)
    backs = []
    for scheme in ("light", "dark"):
        browser.open(folder / f"{devices}.html", width, scheme)
        if scheme == "light" or width == 1280:
            browser.screenshot(SHOTS / f"{devices}_devices_{width}_{scheme}.png")
        seen = looked_at(browser)
        assert seen["titles"] == TITLES
        assert seen["page"] <= width and not seen["outside"] and not seen["overlapping"]
        assert seen["drawings"] == 2 and not seen["unaligned"] and seen["areas"] >= 4
        assert not seen["fainter"]
        assert seen["when"].startswith(in_bytes(plan.predicted.peak_bytes))
        assert not seen["requests"] and not browser.problems()
        backs.append(seen["back"])
    assert backs[0] > 0.8 and backs[1] < 0.05


@pytest.mark.parametrize("width", [360, 1280])
def test_time_and_memory_stand_beside_the_mesh_where_there_is_room_and_above_it_where_not(
    browser: Browser, folder: Path, width: int
) -> None:
    browser.open(folder / "16384.html", width)
    boxes = browser.run(
        "return ['.bars', '.mesh'].map(each => document.querySelector(each).getBoundingClientRect())"
        ".map(box => [box.left, box.top, box.right, box.bottom])"
    )
    (left, top, _, bottom), (_, mesh_top, mesh_right, _) = boxes
    assert (mesh_top == top and mesh_right < left) if width == 1280 else mesh_top > bottom


def test_the_page_of_a_large_plan_is_small(browser: Browser, folder: Path) -> None:
    """So that a picture is there at once: what a browser takes grows with what it reads and lays out."""
    path = folder / "16384.html"
    browser.open(path, 1280)
    assert path.stat().st_size < 500_000 and looked_at(browser)["elements"] < 4000
    assert in_seconds(planned(16384).predicted.step_time_s) in browser.run("return document.body.innerText")


def test_names_cannot_run(browser: Browser, tmp_path: Path) -> None:
    plan = plan_of(nasty(), cluster(2), {**WHOLE, "data": 2})
    assert any(NASTY in stretch.what for stretch in plan.memory_over_step[0].stretches)
    plan.save_html(tmp_path / "nasty.html")
    browser.open(tmp_path / "nasty.html", 1280)
    assert browser.run("return typeof broken") == "undefined" and browser.run("return document.images.length") == 0
    assert NASTY in browser.run("return document.body.innerText") and not browser.problems()


def nasty() -> Graph:
    b = Build()
    value = b.leaf("x", 64, 64)
    return b.mean(b.linear("up", value, 64, f"layer{NASTY}"))


# ---- by keyboard -----------------------------------------------------------------------------------------------------


def tab_to(browser: Browser, selector: str) -> None:
    """Press the tabulator until an element is focused."""
    for _ in range(40):
        browser.press("Tab")
        if browser.run("return document.activeElement.matches(arguments[0])", selector):
            return
    raise AssertionError(f"the keyboard does not reach {selector}")


@pytest.mark.parametrize("devices", [4, 64])
def test_arrow_keys_move_the_cursor_and_say_what_is_alive_there(browser: Browser, folder: Path, devices: int) -> None:
    memory = planned(devices).memory_over_step
    shown = max(memory, key=lambda each: each.fullest.peak.bytes)
    browser.open(folder / f"{devices}.html", 1280)
    tab_to(browser, ".cursor")
    before = place = int(browser.run("return document.activeElement.value"))
    for keys in (["Left"] * 90, ["Right"] * 40):
        browser.press(*keys)
        place = int(browser.run("return document.activeElement.value"))
        now = (place + 0.5) / 1000 * shown.stretches[-1].end_s
        (stretch,) = (each for each in shown.stretches if each.start_s <= now < each.end_s)
        said = browser.run("return document.querySelector('.when').textContent")
        assert said == (
            f"{in_bytes(stretch.peak.bytes)} at {in_seconds(stretch.start_s)} on {shown.title}: {stretch.what}"
        )
        line, plot = browser.run(
            "return ['.line', '.over-time'].map(each => document.querySelector(each).getBoundingClientRect().left)"
        )
        wide = browser.run("return document.querySelector('.over-time').getBoundingClientRect().width")
        assert line - plot == pytest.approx(wide * place / 1000, abs=1)
        largest = browser.run("return document.querySelector('.alive tbody td').textContent")
        assert largest == stretch.peak.largest[0][0]
    assert place == before - 50


def test_keys_choose_a_rank_and_unfold_modules(browser: Browser, folder: Path) -> None:
    browser.open(folder / "64.html", 1280)
    drawn = "return document.querySelector('.memory:not([hidden])').dataset.rank"
    tab_to(browser, ".choose select")
    first = browser.run(drawn)
    browser.press("Up" if int(first) else "Down")
    assert browser.run(drawn) != first
    title = browser.run("return document.querySelector('.choose select').selectedOptions[0].textContent")
    assert title in browser.run("return document.querySelector('.when').textContent")
    tab_to(browser, ".tree summary")
    is_open = "return document.querySelector('.tree details').open"
    before = browser.run(is_open)
    browser.press("Enter")
    assert browser.run(is_open) is not before


def test_a_slider_goes_along_the_curve(browser: Browser, folder: Path) -> None:
    points = curve().points
    browser.open(folder / "curve.html", 768)
    browser.screenshot(SHOTS / "curve_768_light.png")
    tab_to(browser, ".slide")
    for number in (len(points) - 2, len(points) - 3):
        browser.press("Left")
        panel = browser.run(
            "return [...document.querySelectorAll('.panels > div')].map(each => each.checkVisibility())"
        )
        assert panel == [at == number for at in range(len(points))]
        shown = browser.run(f"return document.querySelectorAll('.panels > div')[{number}].innerText")
        assert in_seconds(points[number].step_s) in shown and in_bytes(points[number].memory_bytes) in shown


# ---- without script --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["16384", "curve"])
def test_without_script_all_is_said(browser: Browser, folder: Path, tmp_path: Path, name: str) -> None:
    html = (folder / f"{name}.html").read_text()
    silent, removed = re.subn(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert removed == 1
    (tmp_path / "silent.html").write_text(silent)
    plan = planned(16384) if name == "16384" else curve().plan
    browser.open(tmp_path / "silent.html", 360)
    seen = looked_at(browser)
    assert [title for title in seen["titles"] if title in TITLES] == TITLES and not seen["outside"]
    assert seen["when"].startswith(in_bytes(plan.predicted.peak_bytes)) and seen["areas"] >= 4
    waiting = browser.run(
        "return [...document.querySelectorAll('.line, .cursor, .choose, .slider')].map(each => each.checkVisibility())"
    )
    assert waiting and not any(waiting)
