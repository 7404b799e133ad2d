"""Plans as files: they come back as they were, edits apply, and what is wrong is said."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.analysis.prediction import collectives
from planner.base.errors import PlanError
from planner.cost.model import CostModel
from planner.formulation.assignment import Assignment, assignment_of
from planner.formulation.constraints.pins import Pins
from planner.formulation.decision_names import parse_runs, runs
from planner.formulation.search_space import Space
from planner.formulation.strategies import rules_of
from planner.formulation.training import Training
from planner.ir.folding import fold, relabel
from planner.ir.graph import Graph
from planner.plan.document.encoding import dump
from planner.plan.document.fingerprint import model_facts
from planner.plan.plan import Plan, refold, reprice, restore
from planner.solve.choices import solve
from planner.solve.problem import evaluate
from tests.planner.plans import GOLDEN, check_golden, cluster, filtered, plan_of, residual_mlp, written

PINS: list[dict[str, Any]] = [
    {},
    {"data": 4},
    {"data": 4, "zero": 3},
    {"tensor": 4},
    {"data": 2, "tensor": 2},
]


GRAPH = residual_mlp()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return GRAPH


@cache
def pinned(**pin: Any) -> Plan:
    """The plan of the model under a recipe; made once."""
    return plan_of(GRAPH, pin=pin)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return pinned()


def assign(plan: Plan, graph: Graph) -> Assignment:
    """The decisions of a plan for a graph, as :func:`autopar.driver.plan.assign` reads them."""
    facts = model_facts(graph, "ResidualMLP")
    folded, rules = refold(plan, graph, facts), rules_of(graph)
    kept = filtered(Pins.parse(plan.pin), graph, rules, plan.mesh)
    return restore(plan, Space(folded, plan.mesh, CostModel(plan.cluster), Training(), rules, *kept), facts)


def document(plan: Plan) -> dict[str, Any]:
    return json.loads(dump(plan.to_dict()))  # type: ignore[no-any-return]


# ---- round trip ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pin", PINS, ids=str)
def test_a_plan_comes_back_from_its_file_as_it_was(pin: dict[str, Any], graph: Graph, tmp_path: Path) -> None:
    plan = pinned(**pin)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.account == plan.account
    assert loaded.digest() == plan.digest()
    assert assign(loaded, graph).chosen == plan.assignment.chosen
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


@pytest.mark.parametrize("pin", PINS, ids=str)
def test_seconds_and_bytes_by_use_add_up_to_the_prediction(pin: dict[str, Any], graph: Graph) -> None:
    predicted = pinned(**pin).predicted
    assert sum(predicted.time_s.values()) == pytest.approx(predicted.step_time_s, rel=1e-9)
    assert sum(predicted.memory_bytes.values()) == predicted.peak_bytes


@pytest.mark.parametrize("pin", PINS, ids=str)
def test_the_calls_of_the_blocks_are_the_calls_of_the_step(pin: dict[str, Any], graph: Graph) -> None:
    plan = pinned(**pin)
    total = collectives(plan.assignment)
    assert dict(plan.predicted.collectives) == total
    for block in plan.account.blocks:
        for call, count in block.collectives:
            assert count <= total[call]


@pytest.mark.parametrize("some", [(1,), (1, 2)], ids=str)
def test_blocks_that_are_decided_apart_come_back_apart(some: tuple[int, ...]) -> None:
    graph = residual_mlp(layers=4)
    apart = relabel(fold(graph), [str(i in some) for i in range(len(fold(graph).instances))])
    assert len(apart.kinds) == len(fold(graph).kinds) + 1
    space = Space(apart, pinned(tensor=4).mesh, CostModel(cluster()), Training(), rules_of(graph))
    problem = space.problem(None)
    answer = solve(problem)
    cost = evaluate(problem, answer.choices)
    plan = written(assignment_of(space, answer.choices), cost.time_s)
    read = [name for block in plan.account.blocks for op in block.ops.values() for name in op.parameters]
    assert sorted(read) == sorted(plan.parameters)  # each in the layout that its own block has it stored in
    loaded = Plan.from_dict(document(plan))
    assert [block.at for block in loaded.blocks] == [block.at for block in plan.blocks]
    assert assign(loaded, graph).chosen == assignment_of(space, answer.choices).chosen


def test_the_file_is_as_expected(plan: Plan) -> None:
    check_golden("residual_mlp.json", dump(plan.to_dict()))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(json_values)
def test_what_is_dumped_for_people_is_json(value: Any) -> None:
    assert json.loads(dump(value)) == value


@given(st.sets(st.integers(0, 200)))
def test_numbers_are_written_as_runs(numbers: set[int]) -> None:
    assert parse_runs(runs(sorted(numbers))) == tuple(sorted(numbers))


def test_runs_are_short() -> None:
    assert runs([0, 1, 2, 5]) == "0-2, 5"


# ---- edits -----------------------------------------------------------------------------------------------------------


def test_an_edited_strategy_is_applied(graph: Graph) -> None:
    edited = document(pinned(tensor=4))
    edited["pin"] = {}
    layer = next(block for block in edited["blocks"] if block["count"] == 3)
    assert layer["ops"]["up: linear"] == "tensor:n"
    layer["ops"]["up: linear"] = "tensor:k"
    assignment = assign(Plan.from_dict(edited), graph)
    assert [assignment.choice(graph.by_name[f"up{i}"]).label for i in range(3)] == ["tensor:k"] * 3
    assert collectives(assignment)


def test_an_edited_layout_of_a_parameter_is_applied(graph: Graph) -> None:
    edited = document(pinned(data=4))
    edited["parameters"]["layers.*.up.weight"] = "S(1)"
    assignment = assign(Plan.from_dict(edited), graph)
    assert {str(assignment.produced(graph.by_name["up0"].inputs[1])[0])} == {"S(1)"}


def test_a_plan_can_be_priced_again(graph: Graph) -> None:
    plan = pinned(tensor=4)
    same = reprice(Plan.from_dict(document(plan)), assign(plan, graph))
    assert same == plan
    assert same.explain("head").ops[0].next_best is not None


def test_an_edited_plan_says_what_it_costs_now(graph: Graph) -> None:
    plan = pinned(tensor=4)
    edited = document(plan)
    edited["pin"] = {}
    block_of(edited)["ops"]["up: linear"] = "tensor:k"
    loaded = Plan.from_dict(edited)
    priced = reprice(loaded, assign(loaded, graph))
    assert priced.search.status == "edited"
    assert priced.predicted.step_time_s > plan.predicted.step_time_s == loaded.predicted.step_time_s
    assert priced.search.gap == pytest.approx(1 - plan.predicted.step_time_s / priced.predicted.step_time_s, abs=1e-6)


def block_of(data: dict[str, Any]) -> dict[str, Any]:
    return next(block for block in data["blocks"] if block["count"] == 3)


def edit_strategy(data: dict[str, Any]) -> None:
    block_of(data)["ops"]["up: linear"] = "outer:rows inner:rows"


def edit_axis(data: dict[str, Any]) -> None:
    data["parameters"]["head.weight"] = "I"


def edit_name(data: dict[str, Any]) -> None:
    block_of(data)["ops"]["upp: linear"] = block_of(data)["ops"].pop("up: linear")


def edit_extra(data: dict[str, Any]) -> None:
    data["parameters"]["head.wieght"] = "I I"


def edit_block(data: dict[str, Any]) -> None:
    data["blocks"][0]["ops"]["up: linear"] = block_of(data)["ops"]["up: linear"]


def edit_strange(data: dict[str, Any]) -> None:
    data["blocks"][0]["ops"]["nothing"] = "outer:replicate inner:replicate"


def edit_mode(data: dict[str, Any]) -> None:
    data["model"].update(mode="eval", fingerprint="0" * 16)


def edit_outputs(data: dict[str, Any]) -> None:
    data["outputs"] = []


def edit_numbers(data: dict[str, Any]) -> None:
    block_of(data).update(at="0-1", count=2)


@pytest.mark.parametrize(
    "edit, message",
    [
        (
            edit_strategy,
            r"'outer:rows inner:rows' for block 'layers\.\*', ops, 'up: linear'.*possible: .*'outer:\w+ inne",
        ),
        (edit_axis, r"'parameters', 'head\.weight': layout 'I' has 1 local types for 2 mesh axes; give one"),
        (edit_name, r"no entry for block 'layers\.\*', ops, 'up: linear'; it has one for 'upp: linear', .*: rename it"),
        (edit_extra, r"'head\.wieght' in parameters, which the model does not have there; did you mean 'head\.weight'"),
        (edit_block, r"'up: linear' in block 'stem', ops, which belongs in block 'layers\.\*', ops: move it there"),
        (edit_strange, r"'nothing' in block 'stem', ops, which the model does not have there: remove it"),
        (edit_mode, r"in eval mode, and the model is in train mode, .*: call model\.eval\(\) first, or plan again"),
        (edit_outputs, r"no entry for outputs\[0\]"),
        (edit_numbers, r"numbers \d blocks .*the model has \d"),
    ],
)
def test_an_edit_that_cannot_be_is_refused(edit: Callable[[dict[str, Any]], None], message: str, graph: Graph) -> None:
    data = document(pinned(data=2, tensor=2))
    text = json.dumps(data).replace('"data"', '"outer"').replace('"tensor"', '"inner"')
    data = json.loads(text.replace("data:", "outer:").replace("tensor:", "inner:"))
    data["pin"] = {}
    assign(Plan.from_dict(data), graph)
    edit(data)
    with pytest.raises(PlanError, match=message):
        assign(Plan.from_dict(data), graph)


def test_a_refusal_names_the_pin_that_stands_in_the_way(graph: Graph) -> None:
    data = document(pinned(data=4))
    block_of(data)["ops"]["up: linear"] = "data:n"
    with pytest.raises(PlanError, match=r'under its pin {"data": 4}; possible: .*\'data:m0\''):
        assign(Plan.from_dict(data), graph)


# ---- what does not fit -----------------------------------------------------------------------------------------------


def doubled(graph: Graph) -> Graph:
    """What is added to a residual counts twice."""
    args = {"aten.add.Tensor": {"alpha": 2}}
    nodes = (replace(node, args=tuple({**dict(node.args), **args.get(node.op, {})}.items())) for node in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


def without_loss(graph: Graph) -> Graph:
    """What the loss is made of in its place."""
    (loss,) = graph.outputs
    return replace(
        graph,
        nodes=tuple(node for node in graph.nodes if node.name != loss.node),
        outputs=graph.by_name[loss.node].inputs[:1],
    )


def test_a_loss_that_the_plan_does_not_have_is_told(plan: Plan, graph: Graph) -> None:
    bare = plan_of(without_loss(graph))
    with pytest.raises(PlanError, match=r"\(operators: plan 14, model 15\): this returns a loss, .* leave it out"):
        assign(Plan.from_dict(document(bare)), graph)
    more = replace(bare, inputs={**bare.inputs, "target": "R R"})
    with pytest.raises(PlanError, match="input target: only in the plan"):
        assign(more, graph)


@pytest.mark.parametrize(
    "other, message",
    [
        (
            residual_mlp(layers=2),
            r"parameters: plan 1\d+, model 1\d+; block: plan 3 x layers\.\*, model 2 x layers\.\*",
        ),
        (residual_mlp(batch=256), r"\(input x: plan 512x256, model 256x256\)"),
        (
            doubled(residual_mlp()),
            "the same structure, but other shapes, arguments, input sizes or loss_fn.: give the batch and the loss_fn",
        ),
        (without_loss(residual_mlp()), r"\(operators: plan 15, model 14\): this returns no loss, .* with a loss_fn"),
    ],
    ids=["fewer layers", "smaller batch", "other arguments", "no loss"],
)
def test_a_plan_of_another_model_says_what_differs(other: Graph, message: str, plan: Plan) -> None:
    with pytest.raises(PlanError, match=message):
        assign(Plan.from_dict(document(plan)), other)


def test_a_plan_of_another_class_says_so(plan: Plan, graph: Graph) -> None:
    loaded = replace(Plan.from_dict(document(plan)), model={**plan.model, "class": "Other", "fingerprint": "0"})
    with pytest.raises(PlanError, match="class: plan Other, model ResidualMLP"):
        assign(loaded, graph)


# ---- damaged files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_refused(share: float, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    text = dump(plan.to_dict())
    path.write_text(text[: int(len(text.rstrip()) * share)])
    with pytest.raises(PlanError, match=r"plan\.json'.* not a whole plan: JSON ends or breaks at line \d+, column \d+"):
        Plan.load(path)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"[]", "no autopar plan"),
        (b"{}", "no autopar plan"),
        (b"\xff\xfe\x00", "not text"),
        (b'{"format": "autopar-plan", "version": 99}', "version 99, this autopar reads versions 2 and 3"),
        (b'{"format": "autopar-plan"}', "version None"),
    ],
)
def test_what_is_no_plan_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError, match=message):
        Plan.load(tmp_path / "plan.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read the plan '.*nowhere\.json': No such file"):
        Plan.load(tmp_path / "nowhere.json")


FIELDS = [
    "model", "cluster", "mesh", "pin", "inputs", "blocks", "parameters", "buffers", "values", "outputs", "coverage",
    "search", "predicted", "details", "leaves", "optimizer_bytes_per_element",
]  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_named(field: str, plan: Plan) -> None:
    data = document(plan)
    del data[field]
    with pytest.raises(PlanError, match=f"lacks the field '{field}'"):
        Plan.from_dict(data)


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ({"data": 4}, "the mesh is data 2 x tensor 2, but what is pinned makes it data 4"),
        ({"data": 2}, r"pinned data 2, but .* has 4 devices"),
        ({"tensor": 2, "pipeline": 2}, "pin 'pipeline' is 2, but it is 1"),
        ({"tensor": 2, "micro_batches": 4}, "pin 'micro_batches' is 4, but it is 1"),
        ({"tensor": 2, "schedule": "2bw"}, "pin 'schedule' is '2bw', but it is None"),
        ({"tenser": 2}, "no decision called 'tenser'"),
    ],
    ids=str,
)
def test_a_pin_that_the_plan_does_not_respect_is_refused(pin: dict[str, Any], message: str) -> None:
    plan = pinned(data=2, tensor=2)
    data = document(plan)
    assert Plan.from_dict(data | {"pin": {"tensor": 2}}) == replace(plan, pin={"tensor": 2})
    for change in (lambda: Plan.from_dict(data | {"pin": pin}), lambda: replace(plan, pin=pin)):
        with pytest.raises(PlanError, match=f"does not respect its pin .*{message}.*: restore it, or plan again"):
            change()


def test_a_field_that_there_is_not_is_refused(plan: Plan) -> None:
    with pytest.raises(PlanError, match=r"no field 'bufers': remove it; did you mean 'buffers'\?"):
        Plan.from_dict(document(plan) | {"bufers": {}})


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("wrong", [-3, None, "text"], ids=str)
def test_a_field_of_another_kind_is_refused(field: str, wrong: object, plan: Plan) -> None:
    data = document(plan)
    data[field] = wrong
    with pytest.raises(PlanError, match=f"the plan's (field '{field}' (is wrong|lacks)|cluster)"):
        Plan.from_dict(data)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"recompute": "full"}, r"'recompute' is 'full', and takes a mapping; restore it"),
        (
            {"recompte": {"full": 1}},
            r"has 'recompte', which there is not: remove it; did you mean 'recompute'\? there are: name, count, ",
        ),
        ({"count": 99}, r'has "count" 99, and "at" \'[\d-]+\' numbers 3'),
        ({"ops": {"up: linear": 3}}, r"'ops', 'up: linear' is 3, and takes text"),
        ({"at": "0-x"}, r"'at' is '0-x', and takes numbers of blocks"),
        ({"name": None}, r"1, 'name' is None, and takes text"),
    ],
)
def test_a_wrong_block_is_named(change: dict[str, Any], message: str, plan: Plan) -> None:
    data = document(plan)
    block_of(data).update(change)
    with pytest.raises(PlanError, match=r"the plan's field 'blocks' is wrong: (block 'layers\.\*': .*)?" + message):
        Plan.from_dict(data)


def test_the_file_names_every_field(plan: Plan) -> None:
    assert set(document(plan)) == {"format", "version", "optimizer_bytes_per_element", *FIELDS}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_file_with_a_number_that_is_none_is_refused(number: str, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    text = dump(plan.to_dict()).replace(f'"step_time_s": {plan.predicted.step_time_s}', f'"step_time_s": {number}')
    path.write_text(text)
    with pytest.raises(PlanError, match=f"holds {number}, which is not a number"):
        Plan.load(path)


def test_a_wrong_cluster_is_named(plan: Plan) -> None:
    data = document(plan)
    data["cluster"]["device"]["memory_bytes"] = -1
    with pytest.raises(PlanError, match=r"the plan's cluster: device\.memory_bytes is -1"):
        Plan.from_dict(data)


def test_a_mesh_of_another_world_size_is_refused(plan: Plan) -> None:
    data = document(plan)
    data["cluster"]["levels"][0]["size"] = 8
    with pytest.raises(PlanError, match="mesh has 4 ranks and no pipeline, but its cluster has 8 devices"):
        Plan.from_dict(data)


# ---- writing ---------------------------------------------------------------------------------------------------------


def test_nothing_is_written_when_a_number_is_nan(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    before = path.read_bytes()
    with pytest.raises(PlanError, match="NaN or infinite"):
        replace(plan, predicted=replace(plan.predicted, step_time_s=math.nan)).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_named(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot write '.*nowhere/plan\.json': No such file"):
        plan.save(tmp_path / "nowhere" / "plan.json")


def test_a_candidate_without_a_bound_can_be_written(plan: Plan) -> None:
    candidate = {**plan.search.candidates[0], "status": "infeasible", "bound_s": None}
    data = document(replace(plan, search=replace(plan.search, candidates=(candidate,))))
    assert Plan.from_dict(data).search.candidates[0]["bound_s"] is None
    data["search"]["candidates"][0]["status"] = "optimal"
    with pytest.raises(PlanError, match=r"'candidates', 0, 'bound_s' is None, and takes .* the status is 'optimal'"):
        Plan.from_dict(data)


def test_the_digest_tells_decisions_apart_and_nothing_else(plan: Plan) -> None:
    data = document(plan)
    other = copy.deepcopy(data)
    other["search"]["seconds"] = {}
    assert Plan.from_dict(other).digest() == plan.digest()
    other["parameters"]["head.weight"] = "S(0) S(0)" if data["parameters"]["head.weight"] != "S(0) S(0)" else "I I"
    assert Plan.from_dict(other).digest() != plan.digest()


@pytest.mark.parametrize("name", ["offload", "pipeline"])
def test_a_file_of_version_2_says_the_same_in_the_words_of_version_3(name: str) -> None:
    written_then = (GOLDEN / f"version_2_{name}.json").read_text()
    plan = Plan.from_dict(json.loads(written_then))
    now = json.dumps(plan.to_dict(), indent=1) + "\n"
    renamed = {'"version": 2': '"version": 3', '"timetable"': '"transfer_schedule"', '"turns"': '"micro_batch_times"'}
    for old, new in renamed.items():
        written_then = written_then.replace(old, new)
    if name == "offload":  # what was proved then was of the search's own cost, not of the predicted step
        proved_then = '"status": "optimal",\n  "gap": 0.0,\n  "seconds"'
        assert written_then.count(proved_then) == 1
        written_then = written_then.replace(proved_then, '"status": "feasible",\n  "gap": 1.0,\n  "seconds"')
        assert plan.search.gap == 1.0 and "within 100 % of the best" in plan.sentence
    assert now == written_then.replace("bounded away", "pruned")
    assert str(plan) and plan.explain("layers.0")
