"""Pinned: what is said where the host has no room; that copies are beside computing needs a GPU."""

from __future__ import annotations

import pytest

from autopar.runtime.host.pinned_memory import pinned
from planner.base.errors import InfeasibleError


@pytest.mark.parametrize("size", [2**62, 2**70])
def test_more_than_the_host_has(size: int) -> None:
    with pytest.raises(
        InfeasibleError, match=f"the host does not pin {size:,} bytes .*: free memory of the host"
    ) as caught:
        pinned(size)
    assert caught.value.excess_bytes == size


def test_nothing_needs_no_driver() -> None:
    assert pinned(0).shape == (0,)
