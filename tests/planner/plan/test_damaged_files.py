"""Damaged plans: every field of a saved plan in turn is null, of another type, or gone; loading says which it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from planner.base.errors import PlanError
from planner.plan.plan import Plan
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
Path = tuple[str | int, ...]


@cache
def saved(name: str) -> str:
    return json.dumps(PLANS[name]().to_dict())


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where every value in a document is; of a list its first and its last."""
    if path:
        yield path
    steps = (
        value if isinstance(value, dict) else sorted({0, len(value) - 1}) if isinstance(value, list) and value else ()
    )
    for step in steps:
        yield from places(value[step], (*path, step))


def changed(text: str, path: Path, change: Callable[[Any], Any] | None) -> Any:
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


def loaded(text: str, path: Path, change: Callable[[Any], Any] | None) -> Plan | None:
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
