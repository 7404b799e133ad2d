"""Recognises attention masks that say no more than ``is_causal=True``, and says that instead.

Libraries decide between the two while a model runs, and while it is exported they cannot know that a shortcut will
stay legal, so they write the mask out: ``[batch, 1, query, key]`` elements that take memory and time in every layer
and keep kernels from leaving out what is hidden. The shapes of a captured graph are fixed, so here it can be known.
A mask is discarded only if its value is known in full (:mod:`autopar.capture.constant_propagation`) and is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor, fx

from autopar.capture.constant_propagation import Constants, Limits, Unknown, argument, evaluate
from autopar.graph.program import Body, Program

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


class Meaning(Enum):
    """What a mask says."""

    NOTHING = "every query sees every key"
    CAUSAL = "query i sees keys 0..i"


@dataclass(frozen=True)
class _Question:
    """What does the mask of this name say to so many queries and keys?"""

    mask: str
    queries: int
    keys: int


def causal_masks(program: Program, limits: Limits | None = None) -> Program:
    """Replace causal masks by ``is_causal`` and drop masks that hide nothing; what made them is left as dead code.

    Calls of one body whose masks differ in what they say become calls of different bodies.

    Args:
        limits: how much work a mask is worth.
    """
    masked = {body: _masks(body) for body in dict.fromkeys(call.body for call in program.calls)}
    lengths = {node: _lengths(node) for found in masked.values() for node in found}
    asked = {
        (call, node): _Question(values[mask], *lengths[node])
        for call in program.calls
        if masked[call.body]
        for values in [call.values]
        for node, mask in masked[call.body].items()
    }
    says = _answers(program, list(dict.fromkeys(asked.values())), limits)
    changed: dict[object, tuple[Body, tuple[fx.Node, ...]]] = {}
    calls = []
    for call in program.calls:
        told = {node: found for node in masked[call.body] if (found := says[asked[call, node]]) is not None}
        if told:
            key = call.body, tuple(told.items())
            if key not in changed:
                changed[key] = _without_masks(call.body, told)
            body, sources = changed[key]
            values = call.values
            call = replace(call, body=body, operands=tuple([values[source] for source in sources]))
        calls.append(call)
    return replace(program, calls=tuple(calls))


def _masks(body: Body) -> dict[fx.Node, fx.Node]:
    """The attentions of a body that could do without their mask -> the mask."""
    return {node: mask for node in body.nodes if (mask := _mask(node)) is not None}


def _lengths(attention: fx.Node) -> tuple[int, int]:
    """How many queries and keys there are."""
    query, key = (argument(attention, name).meta["val"].shape for name in ("query", "key"))
    return query[-2], key[-2]


def _answers(program: Program, asked: Sequence[_Question], limits: Limits | None) -> dict[_Question, Meaning | None]:
    """What masks say; each that is computed differently is worked out once."""
    graph, made = _makers(program, {question.mask for question in asked})
    constants = evaluate(graph, [made[question.mask] for question in asked], program.constants, limits)
    known: dict[tuple[fx.Node, int, int], Meaning | None] = {}
    found = {}
    for question in asked:
        key = constants.first[made[question.mask]], question.queries, question.keys
        if key not in known:
            known[key] = meaning(constants, *key)
        found[question] = known[key]
    return found


def _makers(program: Program, names: Set[str]) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """What values are made of, written out as one graph, and its nodes by the names that the program has for them."""
    needed = set(names)
    for call in reversed(program.calls):
        if not needed.isdisjoint(call.names):
            values = call.values
            for node in reversed(call.body.nodes):
                if values[node] in needed:
                    needed.update(values[operand] for operand in node.all_input_nodes)
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    for leaf in program.leaves:
        if leaf.name in needed:
            made[leaf.name] = graph.placeholder(leaf.name)
            made[leaf.name].meta["val"] = leaf.value
    for call in program.calls:
        if not needed.isdisjoint(call.names):
            values = call.values
            for node in call.body.nodes:
                if values[node] in needed:
                    operands = {operand: made[values[operand]] for operand in node.all_input_nodes}
                    made[values[node]] = graph.node_copy(node, operands.__getitem__)
    return graph, made


def meaning(constants: Constants, mask: fx.Node, queries: int, keys: int) -> Meaning | None:
    """What a mask over ``queries`` and ``keys`` says; ``None``: something else, or it is not known."""
    if mask not in constants:
        return None
    seen, hidden = (True, False) if mask.meta["val"].dtype is torch.bool else (0.0, -torch.inf)
    says_nothing, causal = True, queries == keys
    try:
        for window, data in constants.parts(mask, queries, keys):
            says_nothing = says_nothing and bool((data == seen).all())
            causal = causal and _is_causal(data, *window.numbers(queries, keys), seen, hidden)
            if not says_nothing and not causal:
                return None
    except Unknown:
        return None
    return Meaning.NOTHING if says_nothing else Meaning.CAUSAL


def _is_causal(data: Tensor, rows: Tensor, columns: Tensor, seen: float, hidden: float) -> bool:
    """Whether a compressed part of a mask is causal; its rows ``[r, 1]`` and columns ``[1, c]`` have these numbers."""
    if data.shape[-2:] == (len(rows), columns.numel()):
        return bool((data == torch.where(rows >= columns, seen, hidden)).all())
    first, last = bool(rows[0, 0] >= columns[0, -1]), bool(rows[-1, 0] >= columns[0, 0])
    # Where the diagonal passes, a causal mask varies along every side that is longer than one.
    return first == last and bool((data == (seen if first else hidden)).all())


def _mask(node: fx.Node) -> fx.Node | None:
    """The mask of an attention whose result has the same shape without it."""
    if node.target is not ATTENTION or argument(node, "is_causal"):
        return None
    mask = argument(node, "attn_mask")
    if not isinstance(mask, fx.Node):
        return None
    shape, batch = mask.meta["val"].shape[:-2], argument(node, "query").meta["val"].shape[:-2]
    if len(shape) > len(batch) or any(a not in (1, b) for a, b in zip(shape[::-1], batch[::-1], strict=False)):
        return None
    return mask


def _without_masks(body: Body, told: Mapping[fx.Node, Meaning]) -> tuple[Body, tuple[fx.Node, ...]]:
    """The body in which attention is not ``told`` so by a mask, and the operands of the old one that it reads."""
    graph = fx.Graph()
    copies = {operand: graph.placeholder(operand.name) for operand in body.operands}
    sources = {copy: operand for operand, copy in copies.items()}
    for operand, copy in copies.items():
        copy.meta = operand.meta
    for node in body.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node in told:
            _drop_mask(copies[node], is_causal=told[node] is Meaning.CAUSAL)
    changed = Body(tuple(copies[node] for node in body.nodes))
    return changed, tuple(sources[operand] for operand in changed.operands)


def _drop_mask(node: fx.Node, is_causal: bool) -> None:
    query, key, value, rate = (argument(node, name) for name in ("query", "key", "value", "dropout_p"))
    node.kwargs = {name: value for name, value in node.kwargs.items() if name in ("scale", "enable_gqa")}
    node.args = (query, key, value, None, rate, is_causal)
