"""Timeline: a step as it is predicted or was observed, as a picture, as text and as a trace.

Start and end of every action, or without micro-batches of every block, turn into events of ranks (``drawn``,
``whole_step``, ``transfer_step``, ``step``), which ``svg``, ``text`` and ``trace`` draw, and ``shapes`` for whoever
draws them into a page. What was predicted and what was observed are the same events, so that they can be laid beside
one another. What ranks hold meanwhile (``rank_memory``) is found out for plans with all model data on the device
(``memory``), and for those of which some moves (``transfer_memory``).
"""

from __future__ import annotations

from planner.plan.timeline.drawn import StepTimeline, predicted
from planner.plan.timeline.step import Event, bubble_of
from planner.plan.timeline.whole_step import whole_step

__all__ = ["Event", "StepTimeline", "bubble_of", "predicted", "whole_step"]
