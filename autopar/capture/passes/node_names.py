"""Node names: operators are numbered by kind in execution order, so that no name tells how the model was captured."""

from __future__ import annotations

import builtins
import itertools
import keyword
import re
from collections.abc import Iterator, Set
from typing import Any

import torch

from autopar.graph.program import Body, Program, renamed


def node_names(program: Program) -> Program:
    """Name every operator after what it does, with a number from the second of its kind on."""
    taken = frozenset([leaf.name for leaf in program.leaves])
    numbered: dict[str, Iterator[str]] = {}
    of_body: dict[Body, list[Iterator[str]]] = {}
    for body in dict.fromkeys([call.body for call in program.calls]):
        stems = [_stem(node.target) for node in body.nodes]
        of_body[body] = [numbered.setdefault(stem, _numbered(stem, taken)) for stem in stems]
    names: dict[str, str] = {}
    for call in program.calls:
        names.update(zip(call.names, map(next, of_body[call.body]), strict=True))
    return renamed(program, names)


def _numbered(stem: str, taken: Set[str]) -> Iterator[str]:
    """A name, then the same with numbers, but for those that are taken or mean something to Python."""
    if stem not in taken and not (keyword.iskeyword(stem) or hasattr(builtins, stem)):
        yield stem
    for number in itertools.count(1):
        name = f"{stem}_{number}"
        if name not in taken:
            yield name


def _stem(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return _snake(re.sub(r"__\d+$", "", target.overloadpacket.__name__))  # Functions are numbered
    return _snake(getattr(target, "__name__", "node"))


def _snake(name: str) -> str:
    """A Python identifier that does not end in a number of its own."""
    return re.sub(r"_(\d+)$", r"\1", re.sub(r"\W", "_", name)).lower() or "node"
