"""Plans that are shown, as text and as a page, and a reader of pages."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

from planner.plan.document.detail import Account
from planner.plan.plan import Plan
from tests.planner.plans import GOLDEN, plan_of, residual_mlp


@cache
def mlp(strange: bool = False) -> Plan:
    return plan_of(residual_mlp(strange=strange))


@cache
def gpt2() -> Plan:
    """Transformers' GPT-2 (4 layers of 128) on 4 CPU processes, pinned data 2, tensor 2, sequence parallel, as
    ``tests/autopar/cli/test_quoted.py`` plans it.
    """
    return Plan.load(GOLDEN / "gpt2.plan.json")


def bare() -> Plan:
    """A plan that holds no details, as one written by hand may."""
    return replace(mlp(), recorded=Account())


VOID = {"meta", "br", "rect", "input"}


class Page(HTMLParser):
    """Reads a page, checks that its elements nest, and keeps its words and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.scripts = 0
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(html)
        self.close()
        assert not self.open, f"unclosed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.scripts += tag == "script"
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)
