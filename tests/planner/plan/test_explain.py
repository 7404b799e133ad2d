"""Explanations: what they find by name, what they say, and that the next best is the next best."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import pytest

from planner.base.errors import PlanError
from planner.ir.graph import Graph
from planner.plan.document.detail import Account
from planner.plan.document.document import Document
from planner.plan.plan import Plan
from planner.plan.report.explain import Alternative, Explanation
from planner.solve.problem import evaluate
from tests.planner.plans import GOLDEN, check_golden, cluster, plan_of, residual_mlp


@cache
def mlp() -> Plan:
    return plan_of(residual_mlp())


@cache
def tensor() -> Plan:
    return plan_of(residual_mlp(), pin={"tensor": 4})


@cache
def gpt2() -> Plan:
    return Plan.load(GOLDEN / "gpt2.plan.json")


def found(explanation: Explanation) -> list[str]:
    return [op.name for op in explanation.ops] + [leaf.name for leaf in explanation.leaves]


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, expected",
    [
        ("layers.1.up", ["up: linear"]),
        ("layers.*.up", ["up: linear"]),
        ("*.down", ["down: linear"]),
        ("layers.0", ["up: linear", "relu", "down: linear", "add.Tensor"]),
        ("layers", ["up: linear", "relu", "down: linear", "add.Tensor"]),
        ("relu", ["relu"]),
        ("layers.* / relu", ["relu"]),
        ("layers.2.up.weight", ["layers.*.up.weight"]),
        ("layers.*.up.weight", ["layers.*.up.weight"]),
        ("head.*", ["head.weight", "head.bias"]),
        ("head", ["linear"]),
        ("x", ["x"]),
    ],
)
@pytest.mark.parametrize("loaded", [False, True], ids=["planned", "loaded"])
def test_names_are_found(name: str, expected: list[str], loaded: bool) -> None:
    plan = Plan.from_dict(tensor().to_dict()) if loaded else tensor()
    assert found(plan.explain(name)) == expected


@pytest.mark.parametrize(
    "name, close",
    [
        ("layers.0.upp", "'layers.*.up'"),
        ("layers.7.down", "'layers.*.down' (* is 0-2)"),
        ("layers.foo.down", "'layers.*.down'"),
        ("layers.7.down.weight", "'layers.*.down.weight' (* is 0-2)"),
        ("head.wieght", "'head.weight'"),
    ],
)
@pytest.mark.parametrize("loaded", [False, True], ids=["planned", "loaded"])
def test_an_unknown_name_is_refused_with_what_is_close(name: str, close: str, loaded: bool) -> None:
    plan = Plan.from_dict(tensor().to_dict()) if loaded else tensor()
    with pytest.raises(PlanError, match=f"no module, operator or parameter called '{name}'; close are: ") as error:
        plan.explain(name)
    assert close in str(error.value)


@pytest.mark.parametrize(
    "name, message", [("", "'' names nothing"), (3, "3 names nothing"), ("§", "print.plan. names")]
)
def test_a_name_like_no_other_is_told_where_to_look(name: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        tensor().explain(name)


# ---- what is said ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["layers.0", "head.weight"])
def test_the_text_is_as_expected(name: str) -> None:
    check_golden(f"explain_{name.replace('.', '_')}.txt", str(tensor().explain(name)))


@pytest.mark.parametrize("name", ["transformer.h.0.mlp", "transformer.wte.weight", "cross_entropy_loss"])
def test_the_text_of_a_file_is_as_expected(name: str) -> None:
    check_golden(f"explain_gpt2_{name.split('.')[-1]}.txt", str(gpt2().explain(name)))


def test_a_plan_from_a_file_says_how_to_get_the_rest() -> None:
    explanation = gpt2().explain("transformer.h.2.attn.c_attn")
    assert all(op.next_best is None for op in explanation.ops)
    assert "read from a file" in str(explanation) and "autopar.evaluate" in str(explanation)


def test_a_plan_without_details_still_shows_its_decisions() -> None:
    data = tensor().to_dict()
    data["details"], data["leaves"] = [], {}
    plan = Plan.from_dict(data)
    assert plan.account == Account()
    assert "strategy  tensor:n" in str(plan.explain("up: linear"))
    assert "stored    S(0)" in str(plan.explain("layers.*.up.weight"))


# ---- the next best ---------------------------------------------------------------------------------------------------


def small(memory: int | str = "1 GiB") -> tuple[Graph, Plan]:
    graph = residual_mlp(layers=0, width=64, batch=64)
    return graph, plan_of(graph, cluster(2, memory), {"tensor": 2})


def cheapest_otherwise(plan: Document, path: str) -> float:
    """By enumeration: the least step time in which the operators of a module shard something else."""
    space = plan.assignment.space
    variable = next(r for r, names in space.members.items() if space.graph.by_name[names[0]].path == path)
    problem, number = space.problem(plan.cluster.device.usable_bytes), space.variables.order.index(variable)
    now = str(plan.assignment.choice(space.graph.by_name[space.members[variable][0]]).axes[0])
    whole = {"invariant", "replicate"}
    best = math.inf
    for choices in itertools.product(*(range(vertex.choices) for vertex in problem.vertices)):
        word = str(space.options[variable][choices[number]].axes[0])  # type: ignore[union-attr]
        if word != now and not {word, now} <= whole:
            cost = evaluate(problem, choices)
            best = min(best, cost.time_s if cost.feasible else math.inf)
    return best


@pytest.mark.parametrize("path", ["stem", "head"])
def test_the_next_best_is_the_cheapest_of_all_others(path: str) -> None:
    _, plan = small()
    (op,) = plan.explain(path).ops
    assert op.next_best is not None and op.next_best.proven
    now = plan.predicted.step_time_s
    assert op.next_best.extra_s == pytest.approx(cheapest_otherwise(plan, path) - now, rel=1e-6, abs=1e-12)
    assert op.next_best.extra_share == pytest.approx(op.next_best.extra_s / now)


@pytest.mark.parametrize("name", ["layers.0.up", "layers.*.up.weight", "loss"])
def test_no_other_plan_is_faster_than_an_optimal_one(name: str) -> None:
    explanation = mlp().explain("mean" if name == "loss" else name)
    best = [each.next_best for each in (*explanation.ops, *explanation.leaves)]
    assert best and all(each is not None and each.extra_s >= 0 for each in best)


def test_the_mirror_image_of_a_plan_is_no_other_plan() -> None:
    plan = plan_of(residual_mlp(), pin={"data": 2, "tensor": 2})
    data = Plan.from_dict(plan.to_dict())
    assert data.mesh.sizes == (2, 2)
    (op,) = mlp().explain("layers.1.up").ops
    assert op.detail is not None and op.next_best is not None and mlp().mesh.sizes == (2, 2)
    words = [word.split()[-1] for word in op.next_best.decision.split(", ")]
    assert sorted(words) != sorted(op.detail.meaning)


def test_one_device_leaves_nothing_else() -> None:
    plan = plan_of(residual_mlp(layers=1), cluster(1))
    (leaf,) = plan.explain("head.weight").leaves
    assert leaf.next_best is not None
    assert str(leaf.next_best) == "none: nothing else is possible here"


@pytest.mark.parametrize(
    "alternative, text",
    [
        (Alternative("rows", math.inf, math.inf, True, 3 * 2**30), "none fits in memory; the least is 3.0 GiB"),
        (Alternative("all rows", 1e-3, 0.0512), "+5.12 % step time (1.0 ms): all rows"),
        (Alternative("all rows", 1e-3, 0.0512, False, 0, 1), "+5.12 % step time (1.0 ms): all rows, with 1 other "
         "decision changed (the best found in the time)"),
        (Alternative("all rows"), "no slower: all rows"),
    ],
)  # fmt: skip
def test_an_alternative_says_what_it_costs(alternative: Alternative, text: str) -> None:
    assert str(alternative) == text
