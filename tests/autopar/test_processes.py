"""Real processes: the parallel module on gloo against the original model in one process, in float64.

The processes start once; what they do is in ``workers.py``. A case is a model, pins, and a number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from autopar.processes import LocalProcesses
from tests.autopar import workers

pytestmark = pytest.mark.processes

PRELOAD = (
    "torch",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "tests.autopar.workers",
)
CASES: list[tuple[str, dict[str, Any] | None, int]] = [
    ("mlp", None, 2),
    ("mlp", {"data": 4}, 4),
    ("mlp", {"data": 4, "zero": 3}, 4),
    ("mlp", {"data": 2, "tensor": 2}, 4),
    ("gpt2", None, 4),
    ("gpt2", {"data": 4}, 4),
    ("gpt2", {"data": 2, "zero": 3}, 2),
    ("gpt2", {"tensor": 4}, 4),
    ("gpt2", {"tensor": 2, "sequence_parallel": True}, 2),
    ("gpt2", {"context": 4}, 4),
    ("gpt2", {"data": 2, "tensor": 2}, 4),
    ("llama", None, 2),
    ("llama", {"tensor": 2}, 2),
    ("llama", {"data": 2, "context": 2}, 4),
    ("llama", {"data": 2, "tensor": 2, "sequence_parallel": True, "zero": 3}, 4),
]


def name_of(value: object) -> str:
    return "+".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalProcesses]:
    with LocalProcesses(4, PRELOAD, timeout_s=60) as processes:
        yield processes


@pytest.mark.parametrize("model, pin, ranks", CASES, ids=name_of)
def test_trains_as_the_original(pool: LocalProcesses, model: str, pin: dict[str, Any] | None, ranks: int) -> None:
    document = workers.plan_of(model, pin, ranks)
    losses = pool.run(workers.trains_alike, model, document, ranks=ranks)
    assert len(set(losses)) == 1
