"""Reports: the text of a plan as golden files, and an HTML page that is whole and needs nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from planner.base.formatting import WIDTH, in_all_bytes, in_bytes, in_count, in_paragraph, in_percent, in_seconds
from planner.cost.cluster import ClusterSpec
from planner.ir.layout import Mesh
from planner.plan.document.detail import Account
from planner.plan.document.document import BlockPlan
from planner.plan.plan import Plan
from planner.plan.report import text
from planner.plan.report.html import _drawing
from planner.plan.report.summary import blocks, op_calls, shared, standing, traffic
from tests.planner.plans import GOLDEN, check_golden, cluster, plan_of, residual_mlp


@cache
def mlp(strange: bool = False) -> Plan:
    return plan_of(residual_mlp(strange=strange))


@cache
def gpt2() -> Plan:
    """Transformers' GPT-2 (4 layers of 128) on 4 CPU processes, pinned data 2, tensor 2, sequence parallel, as
    ``tests/autopar/cli/test_quoted.py`` plans it.
    """
    return Plan.load(GOLDEN / "gpt2.plan.json")


def bare() -> Plan:
    """A plan that holds no details, as one written by hand may."""
    return replace(mlp(), recorded=Account())


# ---- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, plan",
    [("residual_mlp.txt", mlp), ("gpt2.txt", gpt2), ("strange.txt", lambda: mlp(strange=True)), ("bare.txt", bare)],
)
def test_the_text_is_as_expected(name: str, plan: Any) -> None:
    check_golden(name, str(plan()))


def test_on_a_narrow_terminal_the_last_columns_come_below() -> None:
    whole, narrow = text(gpt2()), text(gpt2(), 80)
    table = narrow[narrow.index("\nblock") :].partition("\n\n")[0].splitlines()
    assert "communicates" in whole.partition("\nblock")[2].splitlines()[0] and max(map(len, table)) <= 80
    cells = {
        cell for row in whole.splitlines() for cell in row.split("  ") if "weight S(0)" in cell or "all_gather" in cell
    }
    assert len(cells) > 3 and all(cell.strip() in " ".join(narrow.split()) for cell in cells)
    assert text(gpt2(), 1000) == whole


def test_a_plan_with_a_gap_says_how_far_from_the_best_it_may_be() -> None:
    plan = replace(mlp(), search=replace(mlp().search, status="feasible", gap=0.034, time_limit_s=20))
    assert "feasible, at most 3.4 % from the best" in str(plan)
    assert re.search(r"solve 0\.\d+; limit 20 s\)", str(plan))
    assert "at most 3.4 % from the best" in plan.to_html()


def test_what_was_asked_for_is_said_before_how_it_was_found() -> None:
    pin = {"pipeline": 2, "micro_batches": 4, "recompute": {"keep": ["layers.*.up", "layers.*.down", "layers.*"]}}
    text = str(plan_of(residual_mlp(layers=6), cluster(2), pin))
    labels = [
        line[2:10].strip()
        for line in text.partition("\n  mesh ")[2].splitlines()
        if line[:2] == "  " and line[2:3].strip()
    ]
    assert labels[:8] == ["pinned", "batches", "stages", "dtypes", "step", "memory", "search", "proof"]


def test_no_line_of_the_head_is_much_longer_than_a_screen() -> None:
    plan = replace(mlp(), pin={"recompute": {"keep": [f"layers.{i}.up" for i in range(20)]}})
    assert all(len(line) <= 10 + WIDTH for line in str(plan).partition("\nblock ")[0].splitlines())


def test_a_paragraph_keeps_numbers_with_what_they_count() -> None:
    text = "word " * 18 + "at most 12 % of 30 blocks in " + "x" * 120
    assert in_paragraph(text, "  ").splitlines() == [
        "word " * 18 + "at most",
        "  12 % of 30 blocks in",
        "  " + "x" * 120,
    ]


def test_a_mesh_that_does_not_fit_is_marked() -> None:
    big = {**mlp().search.candidates[0], "peak_bytes": 2**40, "status": "infeasible", "bound_s": None}
    plan = replace(mlp(), search=replace(mlp().search, candidates=(*mlp().search.candidates, big)))
    assert re.search(r"does not fit .* 1\.0 TiB", str(plan))
    assert "does not fit" in plan.to_html()


def test_one_device_needs_no_collective() -> None:
    text = str(plan_of(residual_mlp(), cluster(1)))
    assert "mesh    all 1" in text
    assert "collectives per step: none" in text


def test_a_plan_is_one_line_where_a_value_is_shown() -> None:
    step, memory = re.findall(r"^  (?:step|memory) +(\S+ \S+)", str(gpt2()), flags=re.MULTILINE)
    assert repr(gpt2()) == (
        f"<Plan of GPT2LMHeadModel on local: mesh data 2 x tensor 2, step {step}, peak {memory}, optimal>"
    )


def test_a_prediction_alone_reads_as_in_its_plan() -> None:
    plan = mlp()
    shown = f"{plan.predicted}".splitlines()
    assert shown[0] == "  step    105.9 ms"
    within = str(plan).splitlines()
    of, where = " of 921.6 MiB usable (1 %)", within.index(shown[0])
    assert [line.replace(of, "") for line in within[where : where + len(shown)]] == shown
    assert repr(plan.predicted) == "\n".join(shown)


# ---- summary ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [mlp, gpt2])
def test_blocks_and_optimizer_make_up_the_step(plan: Any) -> None:
    document = plan()
    leaves = sum(leaf.share for leaf in shared(document))
    optimizer = document.predicted.time_s["optimizer"] / document.predicted.step_time_s
    assert sum(block.share for block in blocks(document)) + optimizer + leaves == pytest.approx(1, abs=1e-9)


def test_traffic_keeps_every_call_and_byte() -> None:
    calls = gpt2().predicted.collectives
    rows = traffic(calls)
    assert sum(row.calls for row in rows) == sum(count for _, count in calls)
    assert sum(row.bytes_in for row in rows) == sum(call.bytes_in * count for call, count in calls)
    assert len({(row.phase, row.kind, row.axis) for row in rows}) == len(rows)


@pytest.mark.parametrize("plan", [mlp, gpt2])
def test_operators_and_what_several_read_pass_in_all_that_a_step_does(plan: Any) -> None:
    document = plan()
    ops = [(op, block.plan.count) for block in blocks(document) for op in block.detail.ops.values()]
    calls = [call for op, count in ops for call in op_calls(op, count)]
    calls += [call for leaf in shared(document) for call in leaf.calls]

    def passed(rows: Any) -> dict[tuple[str, str, str], int]:
        return {(row.phase, row.kind, row.axis): row.bytes_in for row in traffic(rows)}

    assert passed(calls) == passed(document.predicted.collectives)


def test_a_tied_parameter_says_what_it_communicates() -> None:
    (leaf,) = shared(gpt2())
    assert leaf.name == "transformer.wte.weight" and leaf.share > 0
    text, page = str(gpt2()), " ".join(" ".join(Page(gpt2().to_html()).words).split())
    assert re.search(r"read by several .*\n    transformer.wte.weight .*  back: all_reduce data 128.0 KiB\n", text)
    assert "read by several leaf as stored collectives of the step transformer.wte.weight" in page
    for module in ("transformer.wte", "lm_head"):
        assert re.search(r"shared    transformer.wte.weight .*all_reduce data 128.0 KiB", str(gpt2().explain(module)))


@pytest.mark.parametrize(
    "shown, expected",
    [
        (in_bytes(0), "0 B"),
        (in_bytes(1023), "1023 B"),
        (in_bytes(1536), "1.5 KiB"),
        (in_bytes(80 * 2**30), "80.0 GiB"),
        (in_all_bytes(1023), "1,023 bytes"),
        (in_all_bytes(1024), "1,024 bytes (1.0 KiB)"),
        (in_all_bytes(-(2**31)), "-2,147,483,648 bytes"),
        (in_all_bytes(68719476736), "68,719,476,736 bytes (64.0 GiB)"),
        (in_seconds(0), "0 s"),
        (in_seconds(2.5e-7), "0.25 us"),
        (in_seconds(1.5e-5), "15.0 us"),
        (in_seconds(0.0123), "12.3 ms"),
        (in_seconds(61), "61.00 s"),
        (in_percent(0.001), "< 1 %"),
        (in_percent(0), "0 %"),
        (in_percent(0.856), "86 %"),
        (in_count(999), "999"),
        (in_count(8_030_261_248), "8.03 B"),
    ],
)
def test_numbers_are_written_for_people(shown: str, expected: str) -> None:
    assert shown == expected


# ---- HTML ------------------------------------------------------------------------------------------------------------

VOID = {"meta", "br", "rect"}


class Page(HTMLParser):
    """Reads a page, checks that its elements nest, and keeps its words and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)
        self.close()
        assert not self.open, f"unclosed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)


@pytest.mark.parametrize(
    "plan", [mlp, gpt2, bare, lambda: mlp(strange=True), lambda: plan_of(residual_mlp(), cluster(1))]
)
def test_the_page_is_whole_and_needs_nothing_else(plan: Any) -> None:
    document = plan()
    html = document.to_html()
    page = Page(html)
    assert "script" not in page.tags
    assert not {"src", "href", "onclick"} & {name for name, _ in page.attributes}
    assert "http" not in html and "url(" not in html and "@import" not in html
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
    assert "<body" not in fragment
    assert fragment in gpt2().to_html()


def test_unknown_operators_are_pointed_out() -> None:
    assert mlp(strange=True).coverage == {"house.strange.default": 1}
    assert "1 × <code>house.strange.default</code>" in mlp(strange=True).to_html()


def test_names_cannot_break_the_page() -> None:
    nasty = "<script>alert('x')</script>"
    block = BlockPlan(nasty, 1, {nasty: "tensor_a:n tensor_b:n"}, {}, (0,))
    plan = replace(bare(), model={**mlp().model, "class": nasty}, blocks=(block,))
    page = Page(plan.to_html())
    assert "script" not in page.tags
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
    drawing = _drawing(mesh, 8)
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


@pytest.mark.parametrize("devices", [4, 64, 16384])
def test_time_and_memory_stand_beside_the_mesh_at_any_width(devices: int) -> None:
    """They come before it in a row that runs from the right and wraps: beside it where there is room for both, above it
    where there is not; and nothing in the row is wider than the row.
    """
    nodes = ClusterSpec.preset("dgx-h100", devices=devices)
    plan = plan_of(residual_mlp(layers=1, width=64, batch=2 * devices), nodes, {"data": devices})
    html = plan.to_html()
    head, top, rest = re.split(r'<div class="top">|<div class="card"><h2>Distinct blocks', html)
    assert plan.sentence.replace("<", "&lt;") in head
    step, memory, mesh = (
        top.index(each) for each in (in_seconds(plan.predicted.step_time_s), "predicted peak", "<h2>Mesh")
    )
    assert step < memory < mesh and rest
    style = re.sub(r"\s+", " ", html)
    assert re.search(r"\.autopar \.top \{ display: flex; flex-flow: row-reverse wrap; align-items: flex-start;", style)
    assert re.search(r"\.autopar \.bars \{ flex: 3 1 400px; [^}]*min-width: 0; \}", style)
    assert re.search(r"\.autopar \.mesh \{ flex: 1 1 300px; min-width: 0; \}", style)
    assert ".autopar .mesh svg { max-width: 100%; height: auto; }" in style


def test_the_page_is_saved_whole(tmp_path: Path) -> None:
    gpt2().save_html(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == gpt2().to_html()
    assert len(list(tmp_path.iterdir())) == 1


def test_what_became_of_pipelines_is_said() -> None:
    plan = plan_of(residual_mlp(), cluster(4), {"data": 4})
    sizes = [{"pipeline": 2, "micro": micro, "all": 2} for micro in (2, 4, 8)]
    looked_at = [
        {"status": s, "step_time_s": None, "bound_s": 9.0, "peak_bytes": 0} for s in ("none found", "not tried")
    ]
    rows = [{**row, "mesh": mesh} for row, mesh in zip((*looked_at, looked_at[0]), sizes, strict=True)]
    search = replace(plan.search, candidates=(*plan.search.candidates, *rows))
    assert "no faster pipeline found (2 looked at or pruned)" in standing(replace(plan, search=search))
    assert "pipeline" not in standing(plan)


def test_operators_that_weigh_and_that_no_table_knows_qualify_what_is_optimal() -> None:
    known, light, heavy = mlp(), mlp(strange=True), replace(mlp(strange=True), unknown_share=0.02)
    assert known.unknown_share == 0 < light.unknown_share < 0.02
    told = "but for operators that no table knows"
    assert heavy.sentence.endswith(f"proven the best {told}.")
    assert f"search  optimal {told}, " in str(heavy) and f"optimal {told}" in heavy.to_html()
    assert f"optimal {told}" in repr(heavy)
    assert Plan.from_dict(heavy.to_dict()).unknown_share == 0.02
    for plan in (known, replace(light, unknown_share=0.009)):
        assert told not in str(plan) + plan.sentence + plan.to_html()
