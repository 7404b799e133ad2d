"""Pages: whole, without anything from elsewhere, and with every figure in them whether or not a script runs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.base.formatting import in_bytes, in_seconds
from planner.ir.layout import Mesh
from planner.plan.document.document import BlockPlan
from planner.plan.page.mesh import ranks as drawn_ranks
from tests.planner.plan.shown import Page, bare, gpt2, mlp
from tests.planner.plans import cluster, plan_of, residual_mlp


@pytest.mark.parametrize(
    "plan", [mlp, gpt2, bare, lambda: mlp(strange=True), lambda: plan_of(residual_mlp(), cluster(1))]
)
def test_the_page_is_whole_and_needs_nothing_else(plan: Any) -> None:
    document = plan()
    html = document.to_html()
    page = Page(html)
    assert not {"src", "href", "onclick"} & {name for name, _ in page.attributes}
    assert not any(each in html for each in ("http", "url(", "@import", "fetch(", "import("))
    text = " ".join(page.words)
    for block in document.blocks:
        assert block.name in text
    for axis in document.mesh.axes:
        assert f"{axis.name} {axis.size}" in text
    assert in_seconds(document.predicted.step_time_s) in text
    assert in_bytes(document.predicted.peak_bytes) in text


def test_every_operator_is_on_the_page() -> None:
    text = " ".join(" ".join(Page(gpt2().to_html()).words).split())
    for block in gpt2().blocks:
        for name in block.ops:
            path, _, op = name.rpartition(": ")
            assert f"{path} {op}".strip() in text


def test_a_notebook_shows_the_same_without_a_page_around_it() -> None:
    fragment = gpt2()._repr_html_()
    Page(fragment)
    assert fragment.startswith('<div class="autopar">')
    assert "<body" not in fragment and "<script" not in fragment
    head, below = fragment.split("Step over time")
    whole = gpt2().to_html()
    assert head in whole and below[below.index("<h2>Model") :] in whole


def test_unknown_operators_are_pointed_out() -> None:
    assert mlp(strange=True).coverage == {"house.strange.default": 1}
    assert "1 × <code>house.strange.default</code>" in mlp(strange=True).to_html()


def test_names_cannot_break_the_page() -> None:
    nasty = "<script>alert('x')</script>"
    block = BlockPlan(nasty, 1, {nasty: "tensor_a:n tensor_b:n"}, {}, (0,))
    plan = replace(bare(), model={**mlp().model, "class": nasty}, blocks=(block,))
    page = Page(plan.to_html())
    assert page.scripts == 1
    assert any(nasty in word for word in page.words)


@pytest.mark.parametrize(
    "mesh, ranks",
    [
        (Mesh.of(all=1), 1),
        (Mesh.of(all=8), 8),
        (Mesh.of(all=64), 64),
        (Mesh.of(all=100), 100),
        (Mesh.of(outer=4, inner=8), 32),
        (Mesh.of(outer=2, inner=128), 256),
        (Mesh.of(outer=128, inner=2), 256),
        (Mesh.of(outer=3, inner=37), 111),
        (Mesh.of(pipeline=2, data=2, tensor=4), 16),
        (Mesh.of(replicate=16, data=8, tensor=2), 256),
        (Mesh.of(data=32, tensor=32), 0),
        (Mesh.of(replicate=16, data=128, tensor=8), 0),
    ],
    ids=str,
)
def test_every_rank_is_drawn_once_and_the_mesh_stays_small(mesh: Mesh, ranks: int) -> None:
    drawing = drawn_ranks(mesh, 8)
    Page(drawing)
    assert sorted(map(int, re.findall(r'class="rank"[^>]*>(\d+)<', drawing))) == list(range(ranks))
    cells = re.findall(r'<rect x="(\d+)" y="(\d+)" width="(\d+)"', drawing)
    assert len({(x, y) for x, y, _ in cells}) == ranks
    if ranks:
        width, height = (int(size) for size in re.findall(r'(?:width|height)="(\d+)"', drawing)[:2])
        assert all(int(x) + int(cell) <= width and int(y) + int(cell) <= height for x, y, cell in cells)
        assert width <= 620 and height <= 800
    else:
        assert f"{mesh.size:,} devices in nodes of 8" in drawing


def test_the_page_is_saved_whole(tmp_path: Path) -> None:
    gpt2().save_html(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == gpt2().to_html()
    assert len(list(tmp_path.iterdir())) == 1
