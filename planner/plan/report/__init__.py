"""Report: a plan as a sentence, as a page of text, and as a page of HTML that needs nothing else."""

from __future__ import annotations

from planner.plan.report.html import fragment, page
from planner.plan.report.sentence import sentence
from planner.plan.report.text import line, text

__all__ = ["fragment", "line", "page", "sentence", "text"]
