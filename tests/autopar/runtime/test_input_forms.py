"""One parallel module serves inputs of every form: other sizes, names and modes, in float64 against the original."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from autopar.measure.local_processes import LocalProcesses
from tests.autopar.other_forms import (
    Batch,
    batch_of,
    computes_with_what_was_planned,
    nesting,
    normalises,
    normed,
    plan_of,
    refuses_and_goes_on,
    refuses_where_model_data_moves,
    rows,
    scaled,
    squares,
    squares_of,
    takes_nested_and_positional_inputs,
    tiny,
    trains_and_evaluates,
    trains_what_was_planned_to_evaluate,
    warns_of_programs,
)
from tests.autopar.workers import cluster_of

pytestmark = pytest.mark.processes


UNEVEN, HALF, ONE = batch_of(3), batch_of(4), batch_of(1)
MASKED, OUTPUTS, SHORT = batch_of(6, 8, mask=True), batch_of(1, labels=False), batch_of(3, 10, labels=False)
CASES: list[tuple[dict[str, Any], int, list[Batch], list[Batch]]] = [
    ({"tensor": 2, "sequence_parallel": True}, 2, [UNEVEN], [OUTPUTS]),
    ({"data": 2, "zero": 3}, 2, [HALF, MASKED], [SHORT]),
    ({"context": 2}, 2, [UNEVEN, MASKED], []),
    ({"data": 2, "micro_batches": 2}, 2, [HALF, UNEVEN, MASKED], []),
    ({"pipeline": 2, "micro_batches": 4}, 2, [HALF, UNEVEN, ONE], [OUTPUTS, SHORT]),
]


@pytest.mark.parametrize("pin, ranks, trained, evaluated", CASES, ids=[str(pin) for pin, *_ in CASES])
def test_steps_of_all_forms_are_the_originals(
    pool: LocalProcesses, pin: dict[str, Any], ranks: int, trained: list[Batch], evaluated: list[Batch]
) -> None:
    pool.run(trains_and_evaluates, plan_of(pin, ranks), trained, evaluated, ranks=ranks)


def test_other_forms_are_refused_together(pool: LocalProcesses) -> None:
    pool.run(refuses_and_goes_on, plan_of({"data": 2}, 2), ranks=2)


def test_every_further_program_is_warned_of(pool: LocalProcesses) -> None:
    pool.run(warns_of_programs, plan_of({"data": 2}, 2), ranks=2)


def test_batch_norm_has_the_mode_that_it_is_in(pool: LocalProcesses) -> None:
    made = {"example_kwargs": rows(8), "loss_fn": squares, "pin": {"data": 2}}
    plan = autopar.plan(normed().train(), cluster_of(2), **made)
    pool.run(normalises, plan.to_dict(), ranks=2)


def test_constants_are_those_that_were_planned(pool: LocalProcesses) -> None:
    plan = autopar.plan(scaled(), cluster_of(2), example_kwargs={"x": rows(8)["x"]}, pin={"data": 2})
    pool.run(computes_with_what_was_planned, plan.to_dict(), ranks=2)


def test_what_was_captured_in_eval_mode_trains(pool: LocalProcesses) -> None:
    plan = autopar.plan(tiny().eval(), cluster_of(2), example_kwargs=batch_of(), pin={"data": 2, "zero": 3})
    pool.run(trains_what_was_planned_to_evaluate, plan.to_dict(), ranks=2)


def test_a_transfer_schedule_is_of_its_inputs(pool: LocalProcesses) -> None:
    pool.run(refuses_where_model_data_moves, plan_of({"offload": "host"}, 1), ranks=1)


def test_inputs_may_be_nested_and_positional(pool: LocalProcesses) -> None:
    given, made = rows(8), {"cluster": cluster_of(2), "pin": {"data": 2}}
    x, target = given["x"], given["target"]
    by_name = {"x": {"own": x}, "target": target}
    nested = autopar.plan(nesting(), example_kwargs=by_name, loss_fn=squares_of, **made)
    positional = autopar.plan(nesting(), example_args=(x, target), **made)
    pool.run(takes_nested_and_positional_inputs, nested.to_dict(), positional.to_dict(), ranks=2)
