"""Damages plan and cluster files as people, programs and disks do, and does with what is read all that can be done.

What loads must print, explain itself, draw, save and come back as it was; what does not is refused in words. Whatever
else is raised is a fault, of which :func:`fault_of` gives the traceback.
"""

from __future__ import annotations

import json
import math
import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from planner.base.errors import AutoparError
from planner.cost.cluster import ClusterSpec
from planner.cost.model import CostModel
from planner.formulation.constraints.mesh_candidates import candidate_meshes
from planner.formulation.constraints.pins import Pins
from planner.formulation.pipeline_pace import pace_of
from planner.formulation.search_space import Space
from planner.formulation.strategies import rules_of
from planner.formulation.training import Training
from planner.ir.graph import Graph
from planner.plan.document.fingerprint import model_facts
from planner.plan.plan import Plan, refold, reprice, restore
from planner.plan.report.text import text
from tests.planner.plans import cluster, filtered, plan_of, residual_mlp
from tests.planner.search import test_offload

Outcome = Literal["refused", "used", "unfit"]
"""Whether loading refused a file, or all could be done, or all but pricing it for the model, which it does not fit."""

GRAPHS: dict[str, Callable[[], Graph]] = {
    "plain": lambda: residual_mlp(layers=2, width=32, batch=16),
    "micro-batched": lambda: residual_mlp(layers=2, width=32, batch=16),
    "pipeline": lambda: residual_mlp(layers=4, width=32, batch=16),
    "offload": lambda: test_offload.GRAPH,
}
PLANS: dict[str, Callable[[Graph], Plan]] = {
    "plain": lambda graph: plan_of(graph),
    "micro-batched": lambda graph: plan_of(graph, cluster(2), {"micro_batches": 4, "pipeline": 1, "data": 2}),
    "pipeline": lambda graph: plan_of(
        graph, cluster(4), {"pipeline": 2, "micro_batches": 2, "data": 2, "recompute": "full"}
    ),
    "offload": lambda _: test_offload.offload(),
}
CLUSTERS = ("dgx-h100", "workstation")
"""Presets of which the files are damaged."""
KINDS = (*PLANS, "cluster")


@dataclass(frozen=True)
class Damaged:
    """A file that was damaged: what it held, and its name, by whose end it is read."""

    kind: str
    name: str
    content: bytes


@cache
def graph_of(kind: str) -> Graph:
    """The model of a plan."""
    return GRAPHS[kind]()


@cache
def whole(kind: str) -> tuple[str, ...]:
    """The documents of a kind before any damage, as JSON."""
    if kind == "cluster":
        return tuple(json.dumps(ClusterSpec.preset(name, nodes=2).to_dict()) for name in CLUSTERS)
    return (json.dumps(PLANS[kind](graph_of(kind)).to_dict()),)


# ---- damage ----------------------------------------------------------------------------------------------------------

NUMBERS = (0, 1, 2, 3, 7, -1, -(2**31), 2**31, 2**62, 2**63, 10**30, 10**400)
REALS = (0.0, -0.0, 0.5, -1.5, 1e-320, 1e300, 1e308, -1e308, math.inf, -math.inf, math.nan)
WORDS = "0|-1|a|None|1e999|data|tensor|outer:n|data:n|S(0)|S(9)|I I|R R R|P|0-3|3-0|0-9999999999999|1,1|full|host"
TEXTS = (
    "",
    " ",
    "\N{SNOWMAN}",
    "\ud800",
    "\0",
    "\u202eabc",
    "a" * 5000,
    "<script>",
    "{0}",
    "%s",
    "\\N",
    "../x",
    "80 GiB",
)
CONTAINERS = ([], [[]], [1], ["x"], [None], {}, {"x": 1}, {"": {}}, {"data": 2}, {"\ud800": 1})
ODD: tuple[Any, ...] = (None, True, False, *NUMBERS, *REALS, *WORDS.split("|"), *TEXTS, *CONTAINERS)
"""Values that stand where they should not."""
DEEP = "[" * 3000 + "]" * 3000
BROKEN_JSON = ("NaN", "-Infinity", "9" * 5000, '"\\ud800"', "[" * 100_000, DEEP, ",", "}")
BROKEN_YAML = (
    *("\t", "&a [*a]", "*nothing", "!!python/object:os.system {}", "!!binary aGk=", "2020-01-01", "1:30", "~", "0o17"),
    *(
        "!!set {a, b}",
        "!!bool x",
        "!!timestamp x",
        "? [1, 2]\n: 3",
        "<<: {name: x}",
        "- - - -",
        "%YAML 9.9",
        "---\n---",
    ),
    *("{", "]", "'", '"', "|", ">", "\x07", "9" * 5000, "[" * 3000, DEEP),
)
"""What is no JSON or YAML, or other than it seems."""


def damaged(kind: str, rng: random.Random) -> Damaged:
    """A file of a kind, with something wrong in one to three places."""
    data = json.loads(rng.choice(whole(kind)))
    for _ in range(rng.choice((1, 1, 2, 3))):
        data = _changed(data, rng)
    is_yaml = kind == "cluster" and rng.random() < 0.6
    content = yaml.dump(data, sort_keys=False, allow_unicode=True) if is_yaml else json.dumps(data)
    if rng.random() < 0.15:
        content = _broken(content, is_yaml, rng)
    raw = content.encode("utf-8", "surrogatepass")
    if rng.random() < 0.01:
        raw = _flipped(raw, rng)
    return Damaged(kind, "file.yaml" if is_yaml else "file.json", raw)


def _changed(data: Any, rng: random.Random) -> Any:
    """A document with one value changed, gone or in another place."""
    inner, step = _place(data, rng)
    if step is None:
        return rng.choice(ODD)
    value = inner[step]
    change = rng.choice((_odd, _odd, _near, _near, _moved, _nested, _grown, _shrunk, "drop", "rename"))
    if change == "drop":
        del inner[step]
    elif change == "rename":
        if isinstance(inner, dict):
            inner[rng.choice((f"{step}x", "", "layers.9", "\ud800", *inner))] = inner.pop(step)
        else:
            inner.insert(rng.randrange(len(inner) + 1), value)
    else:
        assert not isinstance(change, str)
        inner[step] = change(value, data, rng)
    return data


def _place(data: Any, rng: random.Random) -> tuple[Any, Any]:
    """A container and where in it: every section alike often, and in it more often at a depth than below."""
    inner, step = None, None
    while isinstance(data, dict | list) and data and (inner is None or rng.random() < 0.75):
        inner = data
        step = rng.choice(list(data)) if isinstance(data, dict) else rng.randrange(len(data))
        data = data[step]
    return inner, step


def _odd(value: Any, data: Any, rng: random.Random) -> Any:
    return rng.choice(ODD)


def _near(value: Any, data: Any, rng: random.Random) -> Any:
    """Almost the same: another number of a kind, or text with a part gone, doubled or of another document."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int) and abs(value) > 2**64:
        return value + 1
    if isinstance(value, int | float):
        return rng.choice((value + 1, value - 1, -value, value * 2, value * 10**6, value / 2, value / 3, str(value), 0))
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        words = value.split(" ")
        parts = value[:at], value[at:], value[:at] + value[at + 1 :], value * 2, value + "x", value + " R", value + ":"
        orders = " ".join(words[:-1]), " ".join(words * 2), " ".join(reversed(words)), value.replace(":", "")
        return rng.choice((*parts, *orders, value.upper()))
    return rng.choice((list(value), [value], {"x": value}))


def _moved(value: Any, data: Any, rng: random.Random) -> Any:
    """What stands elsewhere in the document."""
    inner, step = _place(data, rng)
    return json.loads(json.dumps(inner[step])) if inner is not None else value


def _nested(value: Any, data: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice((1, 2, 5, 50))):
        value = [value] if rng.random() < 0.5 else {"x": value}
    return value


def _grown(value: Any, data: Any, rng: random.Random) -> Any:
    """One entry more, or the same twice."""
    if isinstance(value, list):
        return rng.choice((value + value, [*value, rng.choice(ODD)], [*value, *value[-1:]], value + [None] * 100))
    if isinstance(value, dict):
        return {**value, rng.choice(("x", "layers.9", "data", "", *value)): rng.choice((*ODD, *value.values()))}
    return _near(value, data, rng)


def _shrunk(value: Any, data: Any, rng: random.Random) -> Any:
    """An entry less, or in another order."""
    if isinstance(value, list):
        return rng.choice((value[1:], value[:-1], value[::-1], [], value[: len(value) // 2]))
    if isinstance(value, dict):
        kept = rng.sample(list(value), max(0, len(value) - 1))
        return {key: value[key] for key in kept}
    return _near(value, data, rng)


def _broken(content: str, is_yaml: bool, rng: random.Random) -> str:
    """Text that breaks off, has a part twice, or something foreign in it."""
    at, until = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    foreign = rng.choice(BROKEN_YAML if is_yaml else BROKEN_JSON)
    return rng.choice((
        *(content[:at], content[:at] + content[until:], content[:until] + content[at:], content[at:]),
        *(content[:at] + foreign + content[at:], content + foreign, content.replace(":", ": " + foreign, 1)),
    ))  # fmt: skip


def _flipped(raw: bytes, rng: random.Random) -> bytes:
    found = bytearray(raw or b"x")
    for _ in range(rng.randrange(1, 4)):
        found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found)


# ---- use -------------------------------------------------------------------------------------------------------------


def used(file: Damaged, folder: Path, *, priced: bool = True) -> Outcome:
    """Read a damaged file, and do all with it that can be done, if loading does not refuse it.

    Args:
        folder: for the file, and what is saved.
        priced: whether a plan is also priced for its model, which takes longer.
    """
    path = folder / file.name
    path.write_bytes(file.content)
    try:
        found = ClusterSpec.load(path) if file.kind == "cluster" else Plan.load(path)
    except AutoparError as error:
        return _said(error, "refused")
    if isinstance(found, ClusterSpec):
        return _cluster_used(found, path)
    return _plan_used(found, path, graph_of(file.kind) if priced else None)


def _said(error: AutoparError, outcome: Outcome) -> Outcome:
    """Refusals are text that can be shown, and more than a word."""
    assert len(str(error).encode()) > 20
    return outcome


def _cluster_used(spec: ClusterSpec, path: Path) -> Outcome:
    assert spec.describe().encode()
    assert spec.device.usable_bytes >= 0 and spec.device.peak("bfloat16") > 0
    spec.save(path)
    assert ClusterSpec.load(path) == spec
    CostModel(spec)
    assert candidate_meshes(spec)
    return "used"


def _plan_used(plan: Plan, path: Path, graph: Graph | None) -> Outcome:
    for shown in (text(plan), repr(plan), plan.sentence, plan.to_html(), str(plan.predicted)):
        assert shown.encode()
    plan.save(path)
    assert Plan.load(path) == plan
    for name in _names(plan):
        assert str(plan.explain(name)).encode()
    if plan.times is not None if plan.pipeline is not None else plan.account.blocks:
        timeline = plan.timeline()
        assert str(timeline).encode() and timeline.to_svg().encode()
        timeline.save_trace(path)
    for table in plan.transfer_schedules:
        assert table.text().encode()
    if graph is None:
        return "used"
    try:
        again = reprice(plan, assigned(plan, graph))
    except AutoparError as error:
        return _said(error, "unfit")
    assert text(again).encode()
    return "used"


def _names(plan: Plan) -> Sequence[str]:
    """Of everything that can be explained, a name of each kind."""
    ops = [name for block in plan.blocks[:2] for name in list(block.ops)[:2]]
    sections: tuple[Mapping[str, str], ...] = (plan.parameters, plan.inputs)
    return [name for name in dict.fromkeys([*ops, *(name for each in sections for name in list(each)[:1])]) if name]


def assigned(plan: Plan, graph: Graph) -> Any:
    """The decisions of a plan for its graph, as :func:`autopar.driver.plan.assign` reads them."""
    facts, pins = model_facts(graph, "ResidualMLP"), Pins.parse(plan.pin)
    folded, rules = refold(plan, graph, facts), rules_of(graph)
    stages = 1 if plan.pipeline is None else plan.pipeline.ranks
    training = Training(
        plan.optimizer_bytes_per_element, pins.tier, pins.update, plan.activations, plan.unsharding, plan.discards
    )
    kept, pace = filtered(pins, graph, rules, plan.mesh), pace_of(stages, plan.mesh.micro_batches, pins.schedule)
    return restore(plan, Space(folded, plan.mesh, CostModel(plan.cluster), training, rules, *kept, pace=pace), facts)


def fault_of(file: Damaged, folder: Path, *, priced: bool = True) -> tuple[Outcome | None, str]:
    """What became of a file, and, where that is a fault, ``None`` and the traceback."""
    try:
        return used(file, folder, priced=priced), ""
    except Exception:
        return None, traceback.format_exc()
