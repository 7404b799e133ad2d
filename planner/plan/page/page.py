"""The whole page, or an element to put into one, with its style and script."""

from __future__ import annotations

from functools import cache
from html import escape
from importlib import resources

from planner.plan.document.document import Document
from planner.plan.page.blocks import blocks_card
from planner.plan.page.collectives import collectives_card
from planner.plan.page.figures import memory_card, step_card
from planner.plan.page.head import head, notes
from planner.plan.page.mesh import mesh_card
from planner.plan.page.over_time import over_time_card, timeline_card
from planner.plan.page.search import search_card
from planner.plan.page.tree import tree_card

DARK = """
  --ink: #e6e9ef; --soft: #a3adbd; --faint: #8391a5; --line: #2c333f; --card: #1b2029; --page: #14181f; --well: #262d38;
  --a0: #7fb0ff; --a1: #f3a95c; --a2: #5fd3b0; --a0-bg: #1d2f4d; --a1-bg: #44301a; --a2-bg: #17392f;
  --u0: #5b8fe8; --u1: #e39a4c; --u2: #d8705f; --u3: #45b596; --u4: #a587da; --u5: #78828f;
  --warn: #f0c560; --warn-bg: #3a2f12; --good: #63d3a0; --good-bg: #15392a; --bad: #f0867a;
"""


def page(document: Document, beside: str = "") -> str:
    """A whole page, with memory over the step and a script.

    Args:
        beside: HTML that stands below the head.
    """
    title = escape(f"{document.model['class']} on {document.cluster.name}")
    body = "margin:0;padding:24px 12px;background:#f6f7fa"
    dark = "@media (prefers-color-scheme: dark) { body { background: #14181f !important; } }"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<style>{dark}</style></head>\n<body style="{body}">\n{_element(document, over_time_card(document), beside)}\n'
        f"<script>{_file('page.js')}</script>\n</body></html>\n"
    )


def fragment(document: Document) -> str:
    """An element to put into a page: what is quick to find out, without a script."""
    return _element(document, timeline_card(document), "")


def _element(document: Document, over_time: str, beside: str) -> str:
    parts = [
        head(document),
        notes(document),
        beside,
        f'<div class="top"><div class="bars">{step_card(document)}{memory_card(document)}</div>'
        f"{mesh_card(document)}</div>",
        over_time,
        tree_card(document),
        blocks_card(document),
        f'<div class="two">{collectives_card(document)}{search_card(document)}</div>',
    ]
    return styled("\n".join(filter(None, parts)))


def styled(html: str) -> str:
    """An element with the page's style."""
    return f'<div class="autopar"><style>{_style()}</style>\n{html}</div>'


@cache
def _style() -> str:
    """The style sheet, with the dark theme wherever a dark theme announces itself."""
    themes = 'body[data-jp-theme-light="false"] .autopar, body.vscode-dark .autopar'
    light = 'body[data-jp-theme-light="true"] .autopar, body.vscode-light .autopar'
    media = f"@media (prefers-color-scheme: dark) {{ .autopar:not(:is({light})) {{ {DARK} }} }}"
    return _file("style.css").replace("/*DARK*/", f"{media}\n{themes} {{ {DARK} }}")


@cache
def _file(name: str) -> str:
    """A file beside this module."""
    return resources.files("planner.plan.page").joinpath(name).read_text(encoding="utf-8")
