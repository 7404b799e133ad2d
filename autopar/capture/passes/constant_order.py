"""Constant order: constants are numbered in order of first use; those that nothing uses are left out."""

from __future__ import annotations

import itertools
from dataclasses import replace

from autopar.graph.program import Program, renamed


def constant_order(program: Program) -> Program:
    """Order leaves: parameters and buffers, then constants by first use, then inputs."""
    leaf = {leaf.name: leaf for leaf in program.leaves}
    constants = program.constants.keys()
    read = itertools.chain(*(call.operands for call in program.calls), program.leaving)
    used = dict.fromkeys(name for name in read if name in constants)
    taken = (leaf.keys() - constants).union(*(call.names for call in program.calls))
    fresh = (name for name in map("c_{}".format, itertools.count()) if name not in taken)
    names = dict(zip(used, fresh, strict=False))
    stored = [each for each in program.leaves if each.kind in ("param", "buffer")]
    inputs = [each for each in program.leaves if each.kind == "input"]
    kept = [leaf[old]._replace(target=new) for old, new in names.items()]
    return renamed(replace(program, leaves=(*stored, *kept, *inputs)), names)
