"""Timeline: a micro-batched step as it is predicted or was observed, as a picture, as text and as a trace."""

from __future__ import annotations

from planner.plan.timeline.drawn import StepTimeline, predicted
from planner.plan.timeline.step import Event, bubble_of

__all__ = ["Event", "StepTimeline", "bubble_of", "predicted"]
