"""Timeline: a step as it is predicted or was observed, as a picture, as text and as a trace.

Start and end of every action, or without micro-batches of every block, turn into events of ranks (``drawn``,
``whole_step``, ``step``), which ``svg``, ``text`` and ``trace``
draw. What was predicted and what was observed are the same events, so that they can be laid beside one another.
"""

from __future__ import annotations

from planner.plan.timeline.drawn import StepTimeline, predicted
from planner.plan.timeline.step import Event, bubble_of
from planner.plan.timeline.whole_step import whole_step

__all__ = ["Event", "StepTimeline", "bubble_of", "predicted", "whole_step"]
