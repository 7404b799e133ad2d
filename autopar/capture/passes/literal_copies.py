"""Literal copies: ``torch.tensor(0.5)`` is a constant, not a copy of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from autopar.capture.repeats.markers import ENTER, LEAVE

LITERAL = "literal"
"""In the ``meta`` of a constant that was written in the code: the traced call in which it was, ``None`` outside."""


def literal_copies(exported: ExportedProgram) -> ExportedProgram:
    """Replace copies of constants, which torch makes so that they may be written to; nothing here is."""
    aten = torch.ops.aten
    call: Any = None
    for node in list(exported.graph.nodes):
        if node.target in (ENTER, LEAVE):
            call = node.args[0] if node.target is ENTER else None
        literal = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(literal, fx.Node) or literal.op != "placeholder":
            continue
        if node.target in (aten.lift_fresh_copy.default, aten.detach_.default):
            node.replace_all_uses_with(literal)
            exported.graph.erase_node(node)
            literal.meta.setdefault(LITERAL, call)
    return exported
