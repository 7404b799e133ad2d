"""Report: a plan as a page of text, and as a page of HTML that needs nothing else.

A document turns into a sentence (``sentence``), a summary and a table of blocks (``text``, ``html``), into what one
operator or parameter does and why (``explain``), and into what another recipe would take (``why_not``). It reads
documents alone, so that a file prints without the model.
"""

from __future__ import annotations

from planner.plan.report.html import fragment, page
from planner.plan.report.sentence import sentence
from planner.plan.report.text import line, text

__all__ = ["fragment", "line", "page", "sentence", "text"]
