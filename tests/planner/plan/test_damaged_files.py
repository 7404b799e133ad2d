"""Damaged files: every field of a saved plan in turn is null, of another type, or gone, and loading says which it is;
and thousands of plan and cluster files with anything wrong are refused in words, or all can be done with them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.base.errors import PlanError
from planner.plan.plan import Plan
from tests.planner.plan.damage import KINDS, Damaged, damaged, fault_of, whole
from tests.planner.plans import cluster, plan_of, residual_mlp
from tests.planner.search.test_offload import offload

PLANS: dict[str, Callable[[], Plan]] = {
    "one micro-batch": lambda: plan_of(residual_mlp(), pin={"data": 2, "tensor": 2}),
    "searched": lambda: plan_of(residual_mlp()),
    "pipeline": lambda: plan_of(
        residual_mlp(layers=4), cluster(4), {"pipeline": 2, "micro_batches": 2, "data": 2, "recompute": "full"}
    ),
    "offload": lambda: offload(),
}
MAY_BE_NULL = {"step_time_s", "bound_s", "time_limit_s", "micro_batch_times", "boundary"}
JARGON = re.compile(r"NoneType|object|argument|unsupported|subscript|iterable|attribute|operand type|unpack|<class|__")
Place = tuple[str | int, ...]


@cache
def saved(name: str) -> str:
    return json.dumps(PLANS[name]().to_dict())


def places(value: Any, path: Place = ()) -> Iterator[Place]:
    """Where every value in a document is; of a list its first and its last."""
    if path:
        yield path
    steps = (
        value if isinstance(value, dict) else sorted({0, len(value) - 1}) if isinstance(value, list) and value else ()
    )
    for step in steps:
        yield from places(value[step], (*path, step))


def changed(text: str, path: Place, change: Callable[[Any], Any] | None) -> Any:
    """The document with the value at a place changed, or gone."""
    data = json.loads(text)
    inner = data
    for step in path[:-1]:
        inner = inner[step]
    if change is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = change(inner[path[-1]])
    return data


def of_another_type(value: Any) -> Any:
    return 3 if isinstance(value, str | dict | list) else [value]


def loaded(text: str, path: Place, change: Callable[[Any], Any] | None) -> Plan | None:
    """The changed plan; ``None`` where it is refused in words that say what is wrong."""
    try:
        plan = Plan.from_dict(changed(text, path, change))
    except PlanError as error:
        said = str(error)
        assert str(path[0]) in said or path == ("format",), (path, said)
        assert not JARGON.search(said), (path, said)
        return None
    return plan


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("change", [lambda _: None, of_another_type], ids=["null", "another type"])
def test_a_wrong_field_is_named(name: str, change: Callable[[Any], Any]) -> None:
    """What pins and clusters take is for ``test_pins`` and ``test_cluster``: some take null, or a list."""
    text = saved(name)
    for path in places(json.loads(text)):
        plan = loaded(text, path, change)
        if plan is not None:
            assert path[0] in ("cluster", "pin") or (path[-1] in MAY_BE_NULL and change(1) is None), path
            check_shown(plan)


@pytest.mark.parametrize("name", PLANS)
def test_a_number_beyond_all_sizes_is_named(name: str) -> None:
    text = saved(name)
    document = json.loads(text)
    for path in places(document):
        value = document
        for step in path:
            value = value[step]
        if type(value) in (int, float) and path[0] not in ("cluster", "pin"):
            assert loaded(text, path, lambda _: 10**400) is None, path


@pytest.mark.parametrize("name", PLANS)
def test_a_field_that_is_gone_is_named_or_has_a_default(name: str) -> None:
    text = saved(name)
    for path in places(json.loads(text)):
        if isinstance(path[-1], str):
            plan = loaded(text, path, None)
            if plan is not None:
                assert len(path) > 1, path
                check_shown(plan)


def check_shown(plan: Plan) -> None:
    """What was taken can also be shown, and saved."""
    assert str(plan) and plan.to_html() and Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


# ---- anything wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_refused_in_words_or_can_be_used(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What ``python -m benchmarks fuzz`` does with many more; a seed makes the same file there."""
    folder, outcomes = tmp_path_factory.mktemp("damaged"), set[str | None]()

    @given(seed=st.integers(0, 2**32))
    @settings(max_examples=150)
    def check(seed: int) -> None:
        outcome, fault = fault_of(damaged(kind, random.Random(seed)), folder, priced=seed % 10 == 0)
        assert not fault, fault
        outcomes.add(outcome)

    check()
    assert {"refused", "used"} <= outcomes


def test_whole_files_are_used(tmp_path: Place) -> None:
    """The oracle asks for more than a file that loads: of whole ones it can do everything."""
    for kind in KINDS:
        for content in whole(kind):
            file = Damaged(kind, "file.json", content.encode())
            assert fault_of(file, tmp_path) == ("used", "")


def at(data: Any, path: Place, change: Callable[[Any], Any]) -> Any:
    """The value at a place changed."""
    inner = data
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = change(inner[path[-1]])
    return data


FIRST_OP = ("details", 0, "ops", "linear")
WRONG: dict[str, tuple[str, Place, Callable[[Any], Any], str]] = {
    "no axis": ("searched", ("mesh",), lambda _: [], "'mesh' is empty"),
    "axes of one name": ("searched", ("mesh", 1, "name"), lambda _: "tensor_a", "'mesh' is 'tensor_a' of 2 2 apart, "),
    "sizes below 1": ("searched", ("mesh",), lambda m: [{**a, "size": -2} for a in m], "sizes from 1"),
    "a blank": ("searched", ("mesh", 0, "name"), lambda _: "a b", "an axis called 'a b'"),
    "strides": ("searched", ("mesh", 0, "stride"), lambda _: 4, "these sizes it is 'tensor_a' of 2 2 apart"),
    "micro-batches alone": (
        "searched", ("mesh",), lambda m: [{"name": "micro", "size": 4, "stride": 4}, *m], "lacks the field 'pipeline'",
    ),
    "too many types": ("searched", ("parameters", "head.weight"), lambda t: t + " R", "3 local types for 2 mesh axes"),
    "another layout": ("searched", ("outputs", 0), lambda _: "Q R", "field 'outputs': layout 'Q R': 'Q' is not"),
    "another axis": (
        "searched", ("blocks", 1, "ops", "up: linear"), lambda t: t.replace("tensor_a", "outer"),
        r"block 'layers\.\*', 'ops', 'up: linear' is 'outer:n tensor_b:n', and takes .* 'tensor_a:\.\.\. tensor_b:",
    ),
    "too few blocks": ("searched", ("details",), lambda d: d[:-1], "'details' has 2 entries, one for each of 3 blocks"),
    "too few words": ("searched", (*FIRST_OP, "meaning"), lambda m: m[:1], "'linear', 'meaning' has 1 words for 2"),
    "a result": ("searched", (*FIRST_OP, "results", 0), lambda _: "S(1)", "'linear': layout 'S\\(1\\)' has 1 local"),
    "no time": ("searched", ("predicted", "step_time_s"), lambda _: 0.0, "'step_time_s' is 0, and it consists of more"),
    "negative time": ("searched", ("predicted", "time_s", "compute"), lambda s: -s, "are not below 0"),
    "a phase": ("searched", ("predicted", "collectives", 0, "phase"), lambda _: "sideways", "'sideways', and takes 'f"),
    "a schedule": ("pipeline", ("pipeline", "schedule"), lambda _: "2f2b", "there is no schedule '2f2b'; there are"),
    "ranks": ("pipeline", ("pipeline", "virtual_stages"), lambda _: 4, "has 4 'stages', and 2 ranks of 4 are 8"),
    "times": (
        "pipeline", ("predicted", "micro_batch_times", "input_s"), lambda s: s[1:], r"of \[4, 3, 4\] stages",
    ),
    "blocks without end": ("pipeline", ("blocks", 0, "at"), lambda _: "0-99999999999", "takes numbers of blocks"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_go_together_is_refused_by_name(case: str) -> None:
    name, path, change, said = WRONG[case]
    with pytest.raises(PlanError, match=said) as caught:
        Plan.from_dict(at(json.loads(saved(name)), path, change))
    assert re.search("restore it|plan again", str(caught.value))


@pytest.mark.parametrize(
    "text, said",
    [
        ('{"format": ' + "[" * 100_000, "lists lie within one another without end"),
        ('{"format": ' + "9" * 5000 + "}", "holds a number that is too long"),
        ('{"format": "\\ud800"}', r"the plan holds \\ud800, half a character"),
        ('{"format": "\\ud83d\\ude00"}', "this is no autopar plan"),
    ],
)  # fmt: skip
def test_text_that_json_allows_and_a_plan_cannot_hold(text: str, said: str, tmp_path: Place) -> None:
    (tmp_path / "plan.json").write_text(text, encoding="utf-8")
    with pytest.raises(PlanError, match=said):
        Plan.load(tmp_path / "plan.json")
