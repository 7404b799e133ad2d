"""Probes what an optimizer does by trying it on small tensors, instead of asking its name.
What all trials share.

"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SCALES = (1e-3, 1.0, 1e3)
"""Of the gradients of each step: some optimizers clip them."""
FAILURES = (TypeError, RuntimeError, AssertionError)
"""What optimizers raise that do not step from gradients alone: they want a closure, or more."""


def at_a_rate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with a rate at which something is seen, which may be 0 to begin with."""
    return {**options, "lr": 1e-2} if "lr" in options else dict(options)


def name_of(make: object) -> str:
    """What an optimizer's class, or what else makes one, is called."""
    return getattr(make, "__name__", repr(make))
