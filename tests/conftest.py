"""What every test runs under. Nothing here imports torch: the planner's tests run without it."""

import gc
import os
import signal
import sys
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

from planner.search import process_pool

# Before torch or transformers is first imported, and inherited by the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What is imported is compiled once and kept, even where the shell says not to: a third of the time that each of the
# processes which tests start spends on its imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell's background job ignores interrupts, and so would the tests of them and the processes that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Cyclic garbage is looked for a hundred times less often: torch, transformers and captured models are a million objects
# that live as long as the tests, and walking over them took a seventh of the time. Before they are imported.
gc.set_threshold(100_000)

# Searches start no processes beside them: every core has a worker of its own, and three interpreters start for longer
# than a small model is searched. They would find the same, as test_evaluations says, which starts them.
process_pool.WORTHWHILE_S = 1e6

# The same examples every time, and no deadlines: the machine may be busy.
settings.register_profile(
    "autopar", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("autopar")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, then those of many tests, so that workers end together."""
    counts = Counter(item.path for item in items)
    long = {item.path for item in items for mark in ("slow", "processes") if item.get_closest_marker(mark)}
    items.sort(key=lambda item: (item.path not in long, -counts[item.path], item.path))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked ``device`` where there is no accelerator."""
    if item.get_closest_marker("device"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
