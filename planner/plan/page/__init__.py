"""Page: a plan as an HTML page that needs nothing else: no font, no request, and without script all is there, too.

A document turns into cards, one module each (``head``, ``mesh``, ``figures``, ``over_time``, ``tree``, ``blocks``,
``collectives``, ``search``, ``curve``), which ``page`` puts together with ``style.css`` and, in a file of its own,
``page.js``: that moves a cursor over the step and a slider over the curve of step time against memory.
"""

from __future__ import annotations

from planner.plan.page.page import fragment, page

__all__ = ["fragment", "page"]
