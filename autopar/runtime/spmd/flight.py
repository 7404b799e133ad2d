"""A collective or message on its way: torch's profiler shows when it began, and how long somebody waited for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from typing import Any

from torch._C._profiler import _RecordFunctionFast as shown_as

SENT, WAITED = "sent", "waited for"
LABEL = re.compile(rf"flight (\d+), (\w+)(?: (\d+[FB]-?\d+))?, ({SENT}|{WAITED})$")
"""What the profiler shows of a flight: its number, its kind, the action that a message is for, and what happens."""
_numbers = count()


class Flight:
    """A collective or message on its way, with a number of its own in this process.

    Args:
        kind: of collective, or ``send`` or ``receive``.
        send: sends it, or begins to receive; returns what is waited for.
        message: the action that waits for a message, as ``1F0``.
    """

    def __init__(self, kind: str, send: Callable[[], Any], message: str = ""):
        self._label = f"flight {next(_numbers)}, {kind}{message and ' '}{message}"
        with shown_as(f"{self._label}, {SENT}"):
            self._work = send()

    @property
    def is_over(self) -> bool:
        """Whether it is known to have arrived; gloo never says so of messages."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Until it has arrived; on a GPU its stream waits."""
        with shown_as(f"{self._label}, {WAITED}"):
            self._work.wait()
