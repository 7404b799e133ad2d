"""The processes that tests share."""

from collections.abc import Iterator

import pytest

from autopar.measure.local_processes import LocalProcesses
from tests.autopar.captured_once import captured_once

PRELOAD = (
    "tests.conftest",
    "torch",
    "torch.export._trace",
    "torch._functorch.aot_autograd",
    "networkx",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "autopar.driver.parallelize",
    "tests.autopar.workers",
)
"""What most of them need, under what tests run under: imported once for all."""


@pytest.fixture(scope="session")
def pool() -> Iterator[LocalProcesses]:
    """Four, of which a call takes as many as it needs. They start once, and keep what they captured for other tests."""
    with LocalProcesses(4, PRELOAD, timeout_s=60) as processes:
        yield processes


@pytest.fixture
def capturing_once() -> Iterator[None]:
    """What a test plans and verifies several times, and says that it made, is captured once."""
    with captured_once():
        yield
