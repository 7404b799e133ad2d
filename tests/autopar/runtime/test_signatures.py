"""One parallel module serves inputs of every form: other sizes, names and modes, in float64 against the original."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from autopar.measure.local_processes import LocalProcesses
from tests.autopar import other_forms

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalProcesses]:
    with LocalProcesses(4, ("torch", "tests.autopar.other_forms")) as processes:
        yield processes


@pytest.mark.parametrize(
    "pin",
    [
        {"data": 2, "tensor": 2},
        {"data": 4, "zero": 3},
        {"data": 2, "tensor": 2, "sequence_parallel": True, "zero": 3},
        {"data": 2, "context": 2},
        {"data": 2, "micro_batches": 2},
        {"data": 2, "pipeline": 2, "micro_batches": 2},
    ],
    ids=str,
)
def test_steps_of_all_forms_are_the_originals(pool: LocalProcesses, pin: dict[str, Any]) -> None:
    ranks = 2 if "micro_batches" in pin and "pipeline" not in pin else 4
    pool.run(other_forms.trains_and_evaluates, other_forms.plan_of(pin, ranks), ranks=ranks)
