"""What CPython does beside our work is avoided."""

import gc
import resource
from collections.abc import Callable

import pytest

from planner.base.cpython import no_garbage, on_one_stack

CALLS = 1000


def _nested(depth: int) -> None:
    if depth:
        _nested(depth - 1)


def _calls_deeply() -> None:
    for _ in range(CALLS):
        _nested(20)


def _most_faults(function: Callable[[], None]) -> int:
    """Of pages, while a function is called from each of many depths."""

    def called(deeper: int) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        function()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        if deeper:
            called(deeper - 1)

    faults: list[int] = []
    called(200)
    return max(faults)


def test_a_loop_maps_no_pages_however_deep_its_caller_is() -> None:
    assert _most_faults(on_one_stack(_calls_deeply)) < CALLS // 10


def test_what_is_called_on_one_stack_is_what_was_decorated() -> None:
    @on_one_stack
    def divided(number: float, /, *, by: float) -> float:
        """Divide."""
        return number / by

    assert divided(6.0, by=3.0) == 2.0
    assert divided.__name__ == "divided" and divided.__doc__ == "Divide."
    with pytest.raises(ZeroDivisionError):
        divided(1.0, by=0.0)


def test_garbage_is_looked_for_again_after_an_error() -> None:
    @no_garbage()
    def failing() -> None:
        assert not gc.isenabled()
        raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert gc.isenabled()
