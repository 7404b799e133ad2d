"""Late experts: a mixture of experts comes after what its layer computes without it, such as shared experts.

Tokens that are dispatched travel while that is computed (:mod:`planner.formulation.overlap`). So what experts need
comes first, then what neither makes that nor reads what they make of it, then they.
"""

from __future__ import annotations

import itertools

from torch import fx
from torch.export import ExportedProgram

from autopar.capture.repeats.markers import AGAIN, ENTER, LEAVE
from autopar.graph.program import module_path

EXPERTS = "autopar.experts.default"
INDICES = 1
"""Place of the operand that a router makes."""


def late_experts(exported: ExportedProgram) -> ExportedProgram:
    """Put experts, and views of their results, where these are first read together with something else."""
    for node in list(exported.graph.nodes):
        if str(node.target) == EXPERTS:
            for idle in _idle_before(node):
                node.prepend(idle)
            _move_behind(node)
    return exported


def _idle_before(node: fx.Node) -> list[fx.Node]:
    """What the module that routes tokens computes before experts and they do not need, in order."""
    around = _common(module_path(node), module_path(node.all_input_nodes[INDICES]))
    needed, idle, before = {*node.all_input_nodes}, list[fx.Node](), node.prev
    while around and not _ends(before) and f"{module_path(before)}.".startswith(f"{around}."):
        if before in needed:
            needed.update(before.all_input_nodes)
        else:
            idle.append(before)
        before = before.prev
    return idle[::-1]


def _common(one: str, other: str) -> str:
    """The innermost module that holds both."""
    words = zip(one.split("."), other.split("."), strict=False)
    return ".".join(word for word, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], words))


def _move_behind(node: fx.Node) -> None:
    """Move experts behind what does not read them, with what reads nothing else."""
    moved, others, following = {node: None}, list[fx.Node](), node.next
    while not _ends(following):
        read = {*following.all_input_nodes}
        if read and read <= moved.keys():
            moved[following] = None
        elif read.isdisjoint(moved):
            others.append(following)
        else:
            break
        following = following.next
    for each in others:
        node.prepend(each)


def _ends(node: fx.Node) -> bool:
    """Whether nothing passes a node: where the graph begins or ends, marks of repeated calls, random numbers."""
    return node.op != "call_function" or node.target in (ENTER, LEAVE, AGAIN) or node.is_impure()
