"""Outputs that nobody asks for are not kept by micro-batched steps: values on processes, memory, and errors."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from autopar.driver.plan import plan_traced
from autopar.driver.trace import trace
from autopar.measure.local_processes import LocalProcesses
from benchmarks.memory_micro_batched import observed_peak
from planner.base.errors import InputError, PlanError
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.plan.plan import Plan
from tests.autopar.outputs import NAMES, batch, speaker, trains
from tests.autopar.workers import cluster_of

pytestmark = pytest.mark.usefixtures("capturing_once")

PIPELINE: dict[str, Any] = {"pipeline": 2, "micro_batches": 4, "schedule": "1f1b"}
CASES: list[tuple[dict[str, Any], int, Any, tuple[str, ...]]] = [
    (PIPELINE, 2, None, ()),
    (PIPELINE, 2, ("loss", "hidden_states.1", "logits"), ("hidden_states.1", "logits")),
    ({"data": 2, "micro_batches": 2, "zero": 3}, 2, ("hidden_states",), NAMES[1:]),
    ({"data": 2, "micro_batches": 2, "zero": 3}, 2, "all", NAMES),
    ({"data": 2}, 2, None, NAMES),
    ({"data": 2}, 2, ("loss",), ()),
]


@pytest.mark.processes
@pytest.mark.parametrize("pin, ranks, outputs, kept", CASES, ids=str)
def test_a_step_is_the_original_s_and_returns_what_was_asked_for(
    pin: dict[str, Any], ranks: int, outputs: Any, kept: tuple[str, ...], pool: LocalProcesses
) -> None:
    found = pool.run(trains, ranks, {"pin": pin, "outputs": outputs}, kept, ranks=ranks)
    assert set().union(*found) == set(kept)


@pytest.mark.processes
def test_a_saved_plan_keeps_the_same(pool: LocalProcesses, tmp_path: Any) -> None:
    plan = autopar.plan(speaker(), cluster_of(2), example_kwargs=batch(), pin=PIPELINE, outputs=["loss", "logits"])
    plan.save(tmp_path / "plan.json")
    found = pool.run(trains, 2, {"plan": Plan.load(tmp_path / "plan.json").to_dict()}, ("logits",), ranks=2)
    assert found == [set(), {"logits"}]


@pytest.mark.parametrize("pin", [{"micro_batches": 4}, PIPELINE], ids=str)
def test_memory_is_less_by_what_is_not_kept(pin: dict[str, Any]) -> None:
    """Predicted, and alive on the ranks of a step."""
    model, given = speaker(), batch()
    traced, found = trace(model, None, given), []
    for discards in ((), None):
        plan = plan_traced(traced, cluster_of(pin.get("pipeline", 1)), Pins.parse(pin), Training(discards=discards))
        peaks = [observed_peak(model, traced, plan, rank) for rank in range(pin.get("pipeline", 1))]
        found.append((plan, peaks))
    (whole, kept), (less, dropped) = found
    assert less.discards == NAMES and whole.discards == ()
    logits, hidden = 8 * 16 * 64 * 8, 8 * 16 * 32 * 8
    expected = [logits + 3 * hidden] if len(kept) == 1 else [2 * hidden, logits + hidden]
    assert [a - b for a, b in zip(kept, dropped, strict=True)] == expected
    assert whole.predicted.peak_bytes - less.predicted.peak_bytes in expected


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "outputs, message",
    [
        (("loss", "logit"), "has 'logit', which .* does not return on these inputs: it returns loss, logits, hidden"),
        (("hidden_states.7",), r"has 'hidden_states\.7', which"),
        ("logits", r"outputs is 'logits'; give a tuple of names .* such as \('loss', 'logits'\), or 'all'"),
        (7, "outputs is 7; give a tuple"),
    ],
)
def test_unknown_names_are_refused(outputs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        autopar.plan(speaker(), cluster_of(2), example_kwargs=batch(), outputs=outputs)


def test_a_plan_says_what_is_kept_and_may_be_edited() -> None:
    model, given = speaker(), {"example_kwargs": batch()}
    plan = autopar.plan(model, cluster_of(2), pin=PIPELINE, **given)
    assert plan.discards == NAMES
    with pytest.raises(InputError, match=r"give plan or outputs, not both\. Plan again with outputs=\('logits',\), or"):
        autopar.parallelize(model, cluster_of(2), plan=plan, outputs=("logits",), **given)
    document = plan.to_dict()
    kept = autopar.evaluate(model, Plan.from_dict({**document, "discards": ["logits"]}), **given)
    assert kept.discards == NAMES[:1] and kept.predicted.peak_bytes > plan.predicted.peak_bytes
    for name, why in (("loss", "that is always kept"), ("logit", "does not return it; possible: logits, hidden")):
        with pytest.raises(PlanError, match=rf"\"discards\" has output '{name}', but .*{why}"):
            autopar.evaluate(model, Plan.from_dict({**document, "discards": [name]}), **given)
    verified = autopar.verify(model, plan, **given)
    assert verified.agreement is not None and verified.agreement.outputs.keys() == {"loss"}
    assert len(verified.agreement.gradients) == len(list(model.parameters()))
