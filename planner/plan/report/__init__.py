"""Report: a plan as a page of text.

A document turns into a sentence (``sentence``), a summary and a table of blocks (``text``), into what one operator or
parameter does and why (``explain``), and into what another recipe would take (``why_not``). It reads documents alone,
so that a file prints without the model. :mod:`planner.plan.page` is the same for browsers.
"""

from __future__ import annotations

from planner.plan.report.sentence import sentence
from planner.plan.report.text import line, text

__all__ = ["line", "sentence", "text"]
