"""Draws ``rooms.svg`` and fills the tables of rooms in ``README.md``: ``python docs/rooms.py``.

Which rooms there are is read from ``tests/planner/test_rooms.py``, and what each is for from the first sentence of its
``__init__``. Where a room stands in the picture, and the way of the data, are placed by hand below.
"""

from __future__ import annotations

import ast
import re
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PICTURE, PAGE = DOCS / "rooms.svg", DOCS / "README.md"
BEGIN, END = "<!-- rooms: written by docs/rooms.py -->\n", "<!-- end of rooms -->\n"

# Room: left, top, width, height, and what it does in a few words, a line each.
PLACES: dict[str, tuple[int, int, int, int, tuple[str, ...]]] = {
    "autopar.driver": (32, 106, 264, 48, ("plan, parallelize: the two recipes",)),
    "autopar.capture": (32, 178, 126, 48, ("export, then passes",)),
    "autopar.tables": (170, 178, 126, 48, ("embedding tables",)),
    "autopar.graph": (32, 238, 80, 48, ("programs",)),
    "autopar.functions": (120, 238, 84, 48, ("backwards",)),
    "autopar.operators": (212, 238, 84, 48, ("experts",)),
    "autopar.arrays": (32, 320, 126, 48, ("members stacked",)),
    "autopar.emit": (170, 320, 126, 48, ("local programs",)),
    "autopar.runtime": (32, 404, 264, 124, ("obeys the plan, decides nothing",)),
    "autopar.verification": (32, 546, 126, 48, ("plan against model",)),
    "autopar.checkpoint": (170, 546, 126, 48, ("files for any plan",)),
    "autopar.measure": (32, 606, 80, 48, ("profiles",)),
    "autopar.integrations": (118, 606, 102, 48, ("others' loops",)),
    "autopar.cli": (226, 606, 70, 48, ("commands",)),
    "autopar.runtime.host": (44, 454, 54, 26, ()),
    "autopar.runtime.spmd": (104, 454, 54, 26, ()),
    "autopar.runtime.data": (164, 454, 54, 26, ()),
    "autopar.runtime.layers": (224, 454, 60, 26, ()),
    "autopar.runtime.autograd": (44, 488, 62, 26, ()),
    "autopar.runtime.optim": (112, 488, 46, 26, ()),
    "autopar.runtime.offload": (164, 488, 54, 26, ()),
    "autopar.runtime.pipeline": (224, 488, 60, 26, ()),
    "planner.ir": (416, 106, 276, 48, ("typed tensors, equal blocks folded",)),
    "planner.search": (416, 194, 432, 222, ("branch and bound over parallel configurations",)),
    "planner.formulation": (
        *(432, 248, 132, 152),
        ("decision variables,", "strategies, costs,", "resharding, remat,", "pins and meshes;", "answers read back"),
    ),
    "planner.solve": (692, 248, 140, 68, ("pure optimisation,", "with a proven bound")),
    "planner.analysis": (692, 332, 140, 68, ("simulated step:", "seconds and bytes")),
    "planner.plan": (416, 456, 172, 66, ("the document: JSON, report,", "timeline, why and why not")),
    "planner.tables": (598, 456, 126, 66, ("embedding tables:", "which rank has which")),
    "planner.sizes": (734, 456, 114, 66, ("the same plan", "at other sizes")),
    "planner.interchange": (416, 532, 180, 46, ("other tools' files",)),
    "planner.fleet": (606, 532, 134, 46, ("many jobs at once",)),
    "planner.launch": (750, 532, 98, 46, ("job scripts",)),
    "planner.ops": (416, 588, 132, 66, ("the op table:", "a row per operator")),
    "planner.cost": (566, 588, 132, 66, ("kernels, links,", "calibration")),
    "planner.base": (716, 588, 132, 66, ("errors, units,", "text")),
}
# Path of an arrow, its label, and where the middle of the label stands.
ARROWS = [
    ("M224 44 V106", "", 0, 0),
    ("M770 44 V194", "", 0, 0),
    ("M95 154 V178", "", 0, 0),
    ("M296 202 H356 V130 H416", "Graph", 356, 222),
    ("M554 154 V194", "Folded", 582, 179),
    ("M564 272 H692", "Problem", 628, 266),
    ("M692 296 H564", "Answer", 628, 312),
    ("M564 366 H692", "Assignment", 628, 360),
    ("M554 416 V456", "Assignment", 594, 441),
    ("M416 490 H356 V344 H296", "Plan", 356, 510),
    ("M224 368 V404", "ParallelModule", 170, 391),
]
PILLS = [(36, 14, 256, "nn.Module, example inputs"), (692, 14, 156, "cluster, pins")]

STYLE = """
  text { font-family: -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; fill: #1f2328; }
  .sheet { fill: #ffffff; }
  .name { font-weight: 600; font-size: 15px; }
  .small { font-size: 12px; font-weight: 500; }
  .says { font-size: 12px; fill: #59636e; }
  .title { font-size: 18px; font-weight: 700; }
  .label { font-size: 12px; font-weight: 600; font-style: italic; fill: #59636e; }
  .pill { fill: #eaeef2; stroke: #afb8c1; }
  .autopar.panel { fill: #fff5ee; stroke: #f5c6a8; }
  .planner.panel { fill: #eef6ff; stroke: #abd0f5; }
  .autopar.room { fill: #ffffff; stroke: #e58b57; }
  .planner.room { fill: #ffffff; stroke: #5b9fe0; }
  .autopar.inner { fill: #ffe7d8; stroke: none; }
  .planner.frame { fill: #dcecfd; stroke: #5b9fe0; }
  .autopar.title { fill: #b34a12; }
  .planner.title { fill: #0a5cad; }
  .arrow { fill: none; stroke: #59636e; stroke-width: 1.6; }
  .head { fill: #59636e; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .sheet { fill: #0d1117; }
    .says, .label { fill: #9da7b1; }
    .pill { fill: #21262d; stroke: #484f58; }
    .autopar.panel { fill: #21160f; stroke: #5c3a26; }
    .planner.panel { fill: #0f1a29; stroke: #274a73; }
    .autopar.room { fill: #2d1e15; stroke: #b0683c; }
    .planner.room { fill: #14263c; stroke: #3f7fc0; }
    .autopar.inner { fill: #4a2f1f; }
    .planner.frame { fill: #18304d; stroke: #3f7fc0; }
    .autopar.title { fill: #ffa26b; }
    .planner.title { fill: #79b8ff; }
    .arrow { stroke: #9da7b1; }
    .head { fill: #9da7b1; }
  }
"""


def rooms() -> dict[str, list[str]]:
    """The rooms of each package, bottom up, as the test of their imports has them."""
    tree = ast.parse((ROOT / "tests" / "planner" / "test_rooms.py").read_text(encoding="utf-8"))
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "ROOMS"
    )
    found: dict[str, list[str]] = ast.literal_eval(table)
    return found


def purpose(room: str) -> str:
    """The first sentence of a room's docstring."""
    source = ROOT.joinpath(*room.split("."), "__init__.py").read_text(encoding="utf-8")
    first = " ".join((ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0].split())
    return re.sub(r"`+([^`]+)`+", r"`\1`", re.split(r"(?<=\.) (?=[A-Z])", first)[0])


def picture() -> str:
    """The rooms and the way of the data, as SVG.

    Raises:
        ValueError: a room of the table has no place, or a place has no room.
    """
    known = {f"{package}.{room}" for package, inside in rooms().items() for room in inside}
    if known != {*PLACES}:
        raise ValueError(f"PLACES and the table of rooms differ by {', '.join(sorted(known ^ {*PLACES}))}")
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 680" role="img" '
        'aria-label="The rooms of autopar and planner, and the way of the data through them">',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto"><path class="head" d="M0 0 L10 5 L0 10 z"/></marker></defs>',
        '<rect class="sheet" width="880" height="680" rx="12"/>',
        *_panel("autopar", "with torch", 16, 296),
        *_panel("planner", "without torch", 400, 464),
    ]
    for left, top, width, text in PILLS:
        parts.append(f'<rect class="pill" x="{left}" y="{top}" width="{width}" height="30" rx="15"/>')
        parts.append(_text(left + width / 2, top + 20, text, "small", "middle"))
    for room, place in PLACES.items():
        parts += _room(room, *place)
    for path, label, x, y in ARROWS:
        parts.append(f'<path class="arrow" d="{path}" marker-end="url(#head)"/>')
        if label:
            parts.append(_text(x, y, label, "label", "middle"))
    return "\n".join([*parts, "</svg>", ""])


def _panel(package: str, says: str, left: int, width: int) -> list[str]:
    return [
        f'<rect class="{package} panel" x="{left}" y="62" width="{width}" height="606" rx="10"/>',
        _text(left + 16, 90, f"{package}/", f"{package} title"),
        _text(left + 92, 90, says, "says"),
    ]


def _room(room: str, left: int, top: int, width: int, height: int, says: tuple[str, ...]) -> list[str]:
    package, *inside = room.split(".")
    kind = "inner" if len(inside) > 1 else "frame" if room == "planner.search" else "room"
    box = f'<rect class="{package} {kind}" x="{left}" y="{top}" width="{width}" height="{height}" rx="6"/>'
    if kind == "inner":
        return [box, _text(left + width / 2, top + 17, inside[-1], "small", "middle")]
    lines = (_text(left + 12, top + 39 + 16 * number, line, "says") for number, line in enumerate(says))
    return [box, _text(left + 12, top + 21, inside[0], "name"), *lines]


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def tables() -> str:
    """One table for each package, in markdown, bottom up."""
    found = []
    for package, inside in rooms().items():
        path = package.replace(".", "/")
        rows = [f"| [`{room}`](../{path}/{room}) | {purpose(f'{package}.{room}')} |" for room in inside]
        found.append("\n".join([f"| `{path}/` | what it is for |", "|---|---|", *rows, ""]))
    return "\n".join(found)


def page(text: str) -> str:
    """A page with today's tables between its marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
