"""Reports: the text of a plan as golden files, and what text and page both say."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from planner.base.formatting import WIDTH, in_all_bytes, in_bytes, in_count, in_paragraph, in_percent, in_seconds
from planner.plan.plan import Plan
from planner.plan.report import text
from planner.plan.report.summary import blocks, op_calls, shared, standing, traffic
from tests.planner.plan.shown import Page, bare, gpt2, mlp
from tests.planner.plans import check_golden, cluster, plan_of, residual_mlp

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


def test_compiled_blocks_are_said() -> None:
    eager, compiled = (plan_of(residual_mlp(2), cluster(2), {"data": 2, **more}) for more in ({}, {"compile": True}))
    assert "compile what each distinct block computes" in str(compiled) and "compile" not in str(eager)
    assert compiled.blocks == eager.blocks and Plan.from_dict(compiled.to_dict()).pins.compile


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
