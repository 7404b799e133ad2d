"""A collective on its way: torch's profiler shows when it was sent, and how long somebody waited for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from typing import Any

from torch._C._profiler import _RecordFunctionFast as shown_as

SENT, WAITED = "sent", "waited for"
LABEL = re.compile(rf"flight (\d+), (\w+), ({SENT}|{WAITED})$")
"""What the profiler shows of a flight."""
_numbers = count()


class Flight:
    """A collective on its way, with a number of its own in this process.

    Args:
        kind: of collective.
        send: sends it; returns what is waited for.
    """

    def __init__(self, kind: str, send: Callable[[], Any]):
        self._label = f"flight {next(_numbers)}, {kind}"
        with shown_as(f"{self._label}, {SENT}"):
            self._work = send()

    def wait(self) -> None:
        """Until it has arrived; on a GPU its stream waits."""
        with shown_as(f"{self._label}, {WAITED}"):
            self._work.wait()
