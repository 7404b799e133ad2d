"""The name of a decision in a plan: module path and operator, never an internal id.

``Space -> {variable: (section, name)}``. Plan files, reports and explanations all speak these names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from planner.formulation.search_space import Space
from planner.formulation.variables import Variable
from planner.ir.folding import Folded
from planner.ir.graph import Node

MOST = 2**20
"""So many numbers are in runs at most: no model has as many blocks."""

Section = str | tuple[str, int]


def variable_names(space: Space) -> dict[Variable, tuple[Section, str]]:
    """Where each variable stands in the document: (section, name).

    A section is ``inputs``, ``parameters``, ``buffers``, ``values`` (of leaves), ``outputs``, or
    ``("ops" | "values", block number)``. Names are unique in their section: a second one is ``"add #2"``.
    """
    found: dict[Variable, tuple[Section, str]] = {}
    taken: set[tuple[Section, str]] = set()
    op_names: dict[Variable, str] = {}
    targets = space.graph.columns.targets
    for variable in space.variables:
        if variable[0] == "op":
            node = space.graph.by_name[space.members[variable][0]]
            section: Section = ("ops", int(str(variable[1])))
            name = _op_name(node, space.folded.names[int(str(variable[1]))])
        elif variable[0] == "leaf":
            names = space.members[variable]
            op, places = space.graph.by_name[names[0]].op, map(space.graph.position.__getitem__, names)
            section = {"param": "parameters", "input": "inputs"}.get(op, "buffers")
            name = pattern([targets[place] or name for place, name in zip(places, names, strict=True)])
        elif variable[0] == "reshard_point":
            producer = variable[1]
            assert isinstance(producer, tuple)
            suffix = f" result {variable[2]}" if variable[2] else ""
            if producer[0] == "op":
                section, name = ("values", int(str(producer[1]))), op_names[producer] + suffix
            else:
                section, name = "values", found[producer][1] + suffix
        else:
            section, name = "outputs", str(variable[1])
        unique, times = name, 1
        while (section, unique) in taken:
            times += 1
            unique = f"{name} #{times}"
        taken.add((section, unique))
        found[variable] = (section, unique)
        if variable[0] == "op":
            op_names[variable] = unique
    return found


def operator_names(folded: Folded) -> tuple[tuple[str, ...], ...]:
    """Of every kind of block the names of its operators, by position; as of :func:`variable_names`."""
    found = []
    for (first, *_), block in zip(folded.kinds, folded.names, strict=True):
        times = Counter[str]()
        names = []
        for node in first.block.span:
            name = _op_name(node, block)
            times[name] += 1
            names.append(name if times[name] == 1 else f"{name} #{times[name]}")
        found.append(tuple(names))
    return tuple(found)


def short_op(op: str) -> str:
    """``aten.add.Tensor`` as ``add.Tensor``, ``aten.linear.default`` as ``linear``, ``function.Bend`` as ``Bend``."""
    return op.removeprefix("aten.").removeprefix("autopar.").removeprefix("function.").removesuffix(".default")


def called(node: Node) -> str:
    """A value by what makes it: a leaf's own name, or the module's path and the operator."""
    if node.is_leaf:
        return node.target or node.name
    return f"{node.path}: {short_op(node.op)}" if node.path else short_op(node.op)


def state_of(leaf: Node) -> str:
    """What the optimizer keeps of a parameter."""
    return f"state of {called(leaf)}"


def pattern(names: list[str]) -> str:
    """One name for several that differ in places: ``layers.*.weight``."""
    split = [name.split(".") for name in names]
    if len({len(parts) for parts in split}) != 1:
        return names[0]
    return ".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*split, strict=True))


def fillings(names: list[str]) -> str:
    """What ``*`` stands for in the :func:`pattern` of names: ``"0-3, 7"``, or ``"0.1, 2.1"`` for two of them.

    Whole names where they have no pattern; empty where there is but one.
    """
    distinct = list(dict.fromkeys(names))
    if len(distinct) == 1:
        return ""
    stars = [at for at, part in enumerate(pattern(distinct).split(".")) if part == "*"]
    parts = [".".join(name.split(".")[at] for at in stars) or name for name in distinct]
    if all(part.isdecimal() and part == str(int(part)) for part in parts):
        return runs(sorted(map(int, parts)))
    return ", ".join(parts)


def filled(name: str, stands_for: str) -> tuple[str, ...]:
    """The names that a pattern and its :func:`fillings` stand for; raises ``ValueError`` where these do not fill it."""
    if not stands_for:
        return (name,)
    if "*" not in name.split("."):
        return tuple(stands_for.split(", "))
    numbered = re.fullmatch(r"[\d, -]+", stands_for)
    found = []
    pieces = name.split(".")
    for part in map(str, parse_runs(stands_for)) if numbered else stands_for.split(", "):
        values = part.split(".")
        if len(values) < pieces.count("*"):
            raise ValueError(f"{part!r} does not fill {name!r}")
        following = iter(values)
        found.append(".".join(next(following) if piece == "*" else piece for piece in pieces))
    return tuple(found)


def runs(numbers: Sequence[int]) -> str:
    """``"0-2, 5"`` for 0, 1, 2, 5."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in found)


def parse_runs(text: str) -> tuple[int, ...]:
    """The inverse of :func:`runs`; raises ``ValueError`` on what is no number, or more than :data:`MOST` of them."""
    found: list[int] = []
    for run in text.split(",") if text else ():
        first, _, last = run.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if len(found) + len(numbers) > MOST:
            raise ValueError(f"{run} are more numbers than {MOST:,}")
        found += numbers
    return tuple(found)


def _op_name(node: Node, block: str) -> str:
    """``"mlp.down_proj: linear"``: the path below the block, and the operator."""
    parts = node.path.split(".") if node.path else []
    for own in block.split("#")[0].split("."):
        if parts and (own == "*" or parts[0] == own):
            parts = parts[1:]
        else:
            break
    return f"{'.'.join(parts)}: {short_op(node.op)}" if parts else short_op(node.op)
