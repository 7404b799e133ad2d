"""Turn a :class:`Problem` into an :class:`Answer` that says what is proved about it."""

from __future__ import annotations

from planner.solve.choices.bound import Bounds, almost_lightest, corners, lightest, lower_bound_between, lower_bounds
from planner.solve.choices.front import solve

__all__ = ["Bounds", "almost_lightest", "corners", "lightest", "lower_bound_between", "lower_bounds", "solve"]
