"""The model as a tree of modules that unfolds down to parameters, with each layout as colours on the mesh.

A module says how many parameters it has, what part of the step's computing, and which axes shard something in it.
Modules that occur several times, as decided alike, stand once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from planner.base.formatting import in_bytes, in_count, in_percent
from planner.plan.document.detail import LeafDetail
from planner.plan.document.document import Document
from planner.plan.page.mesh_colours import MeshColours
from planner.plan.page.parts import axis_chip, card, layout_chips

TITLES = (
    '<div class="leaf titles"><span class="name">module</span><span class="on">sharded over, stored as</span>'
    '<span class="n">parameters</span><span class="mini">of computing</span></div>'
)
SHOWN = 24
"""The tree is unfolded, level by level, as long as so many rows are seen."""


@dataclass(frozen=True)
class TreeLeaf:
    """A parameter, buffer or input, below its module."""

    kind: str
    name: str
    layout: str
    detail: LeafDetail | None


@dataclass
class TreeModule:
    """A module with what is below it.

    Attributes:
        path: its name, in full.
        count: of how many like it, together, what it says is.
        compute_s: of its own operators, over all instances, per micro-batch.
    """

    name: str
    path: str
    count: int = 1
    modules: dict[str, TreeModule] = field(default_factory=dict)
    leaves: list[TreeLeaf] = field(default_factory=list)
    compute_s: float = 0.0

    def below(self, name: str) -> TreeModule:
        """The module of that name in this one, which is made if there is none."""
        path = f"{self.path}.{name}" if self.path else name
        return self.modules.setdefault(name, TreeModule(name, path))

    def at(self, path: str) -> TreeModule:
        """The module at a path from here."""
        found = self
        for name in filter(None, path.split(".")):
            found = found.below(name)
        return found

    def all_leaves(self) -> Iterator[TreeLeaf]:
        """Those of all modules below, too."""
        yield from self.leaves
        for module in self.modules.values():
            yield from module.all_leaves()

    @property
    def all_compute_s(self) -> float:
        """With that of all modules below."""
        return self.compute_s + sum(module.all_compute_s for module in self.modules.values())


def tree_card(document: Document) -> str:
    """The tree, and what its colours are."""
    root = tree(document)
    colours = MeshColours.of(document)
    total = root.all_compute_s
    is_open = _unfolded(root)
    rows = "".join(_module(document, each, colours, total, is_open) for each in root.modules.values())
    rows += _leaves(root, colours)
    if not rows:
        return ""
    body = f'{colours.key()}<div class="tree">{TITLES}{rows}</div><style>{colours.style()}</style>'
    return card("Model", body, "model")


def tree(document: Document) -> TreeModule:
    """The modules of a document, from the names of its leaves and operators."""
    root = TreeModule("", "")
    leaves = document.account.leaves
    sections = {"parameter": document.parameters, "buffer": document.buffers, "input": document.inputs}
    for kind, entries in sections.items():
        for name, layout in entries.items():
            path, _, own = name.rpartition(".")
            root.at(path).leaves.append(TreeLeaf(kind, own, layout, leaves.get(name)))
    for block, detail in zip(document.blocks, document.account.blocks, strict=False):
        for op in detail.ops.values():
            root.at(op.path).compute_s += (op.forward_s + op.backward_s) * block.count
    _merge_stars(root)
    return root


def _merge_stars(module: TreeModule) -> None:
    """Let what is the same in all its instances stand beside its parent's name: ``layers.*``."""
    for name, each in [*module.modules.items()]:
        _merge_stars(each)
        star = each.modules.get("*")
        if star is not None and len(each.modules) == 1 and not each.leaves and not each.compute_s:
            star.name = f"{name}.*"
            star.count = max((leaf.detail.count for leaf in star.all_leaves() if leaf.detail is not None), default=1)
            module.modules[name] = star


def _unfolded(root: TreeModule) -> set[str]:
    """The paths of modules that are open: whole levels, as long as a screen holds their rows."""
    found: set[str] = set()
    level, seen = [*root.modules.values()], len(root.modules)
    while level:
        seen += sum(len(module.modules) + len(module.leaves) for module in level)
        if seen > SHOWN:
            break
        found.update(module.path for module in level)
        level = [below for module in level for below in module.modules.values()]
    return found


def _module(document: Document, module: TreeModule, colours: MeshColours, total_s: float, is_open: set[str]) -> str:
    """A module that unfolds."""
    parameters = [leaf for leaf in module.all_leaves() if leaf.kind == "parameter"]
    number = sum(math.prod(leaf.detail.shape) * leaf.detail.count for leaf in parameters if leaf.detail is not None)
    share = module.all_compute_s / total_s if total_s else 0.0
    axes = "".join(axis_chip(name, at) for at, name in _sharding(document.mesh.names, parameters))
    times = f' <span class="times">× {module.count}</span>' if module.count > 1 else ""
    facts = (
        f'<span class="n soft">{in_count(number) if number else ""}</span>'
        f'<span class="mini"><span class="bar"><i class="u0" style="width:{100 * share:.1f}%"></i></span>'
        f"{in_percent(share) if share else ''}</span>"
    )
    head = f'<span class="name"><code>{escape(module.name)}</code>{times}</span><span class="on">{axes}</span>{facts}'
    inner = "".join(_module(document, each, colours, total_s, is_open) for each in module.modules.values())
    inner += _leaves(module, colours)
    if not inner:
        return f'<div class="leaf">{head}</div>'
    opened = " open" if module.path in is_open else ""
    return f"<details{opened}><summary>{head}</summary>{inner}</details>"


def _sharding(names: tuple[str, ...], leaves: list[TreeLeaf]) -> list[tuple[int, str]]:
    """The axes that shard a parameter, by number."""
    layouts = [leaf.layout.split() for leaf in leaves]
    return [
        (at, name)
        for at, name in enumerate(names)
        if any(at < len(layout) and layout[at].startswith("S") for layout in layouts)
    ]


def _leaves(module: TreeModule, colours: MeshColours) -> str:
    return "".join(_leaf(leaf, colours) for leaf in module.leaves)


def _leaf(leaf: TreeLeaf, colours: MeshColours) -> str:
    """A parameter, buffer or input: its layout in words and as colours, its shape, and what a device holds of it."""
    kind = "" if leaf.kind == "parameter" else f' <span class="dim">{leaf.kind}</span>'
    found = leaf.detail
    shape = "" if found is None else f"{'×'.join(map(str, found.shape)) or 'scalar'} {escape(found.dtype)}"
    size = "" if found is None else f"{in_bytes(found.local_bytes)} a device"
    return (
        f'<div class="leaf"><span class="name"><code>{escape(leaf.name)}</code>{kind} '
        f'<span class="dim">{shape}</span></span>'
        f'<span class="on">{colours.swatch(leaf.layout)}{layout_chips(leaf.layout)}</span>'
        f'<span class="n soft size">{size}</span></div>'
    )
