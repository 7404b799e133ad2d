"""Turns as a program sees them: what stands for the axis of micro-batches where another axis has a process group."""

from __future__ import annotations


class Turns:
    """The micro-batches of a step.

    Attributes:
        now: the number of the one that is being computed.
    """

    def __init__(self, count: int):
        self.count = count
        self.now = 0

    def size(self) -> int:
        """How many there are; a process group's word for it."""
        return self.count
