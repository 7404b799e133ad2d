"""Recognises attention masks that say no more than ``is_causal=True``, or a sliding window, and says that instead.

Libraries decide between the two while a model runs, and while it is exported they cannot know that a shortcut will
stay legal, so they write the mask out: ``[batch, 1, query, key]`` elements that take memory and time in every layer
and keep kernels from leaving out what is hidden. The shapes of a captured graph are fixed, so here it can be known.
A mask is discarded only if its value is known in full (:mod:`autopar.capture.constant_propagation`) and is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from autopar.capture.constant_propagation import Constants, Limits, Unknown, argument, evaluate
from autopar.graph.program import Body, Program, RewrittenBody
from autopar.operators.attention import attention
from planner.ops.attention import Sight

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class _Question:
    """What does the mask of this name say to so many queries and keys?"""

    mask: str
    queries: int
    keys: int


def causal_masks(program: Program, limits: Limits | None = None) -> Program:
    """Replace causal masks by ``is_causal``, those of sliding windows by the operator that has them, and drop masks
    that hide nothing; what made them is left as dead code.

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
    changed: dict[object, RewrittenBody] = {}
    calls = []
    for call in program.calls:
        told = {node: found for node in masked[call.body] if (found := says[asked[call, node]]) is not None}
        if told:
            key = call.body, tuple(told.items())
            if key not in changed:
                changed[key] = _without_masks(call.body, told)
            call = call.running(changed[key])
        calls.append(call)
    return replace(program, calls=tuple(calls))


def _masks(body: Body) -> dict[fx.Node, fx.Node]:
    """The attentions of a body that could do without their mask -> the mask."""
    return {node: mask for node in body.nodes if (mask := _mask(node)) is not None}


def _lengths(attention: fx.Node) -> tuple[int, int]:
    """How many queries and keys there are."""
    query, key = (argument(attention, name).meta["val"].shape for name in ("query", "key"))
    return query[-2], key[-2]


def _answers(program: Program, asked: Sequence[_Question], limits: Limits | None) -> dict[_Question, Sight | None]:
    """What masks say; each that is computed differently is worked out once."""
    graph, made = _makers(program, {question.mask for question in asked})
    constants = evaluate(graph, [made[question.mask] for question in asked], program.constants, limits)
    known: dict[tuple[fx.Node, int, int], Sight | None] = {}
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


def meaning(constants: Constants, mask: fx.Node, queries: int, keys: int) -> Sight | None:
    """What a mask over ``queries`` and ``keys`` says; ``None``: something else, or it is not known.

    As a query sees its own key, a number that hides is as good as ``-inf`` where no score is near it.
    """
    if mask not in constants:
        return None
    least, most, hides = 0, queries, False
    try:
        for part, data in constants.parts(mask, queries, keys):
            shown, hidden = data == (True if data.dtype == torch.bool else 0.0), _hides(data)
            hides = hides or bool(hidden.any())
            if not bool((shown | hidden).all()):
                return None
            least, most = _narrowed(least, most, torch.atleast_2d(shown), *part.numbers(queries, keys))
            if hides and (queries != keys or least > most):
                return None
    except Unknown:
        return None
    if not hides:
        return Sight(causal=False)
    return Sight(causal=True, window=None if least == queries else least) if least == most else None


def _hides(data: Tensor) -> Tensor:
    """Which elements of a mask hide a key."""
    if data.dtype == torch.bool:
        return ~data
    is_far = data.dtype != torch.float16  # whose scores may be as large
    return (data == -torch.inf) | (data == torch.finfo(data.dtype).min) & is_far


def _narrowed(least: int, most: int, shown: Tensor, rows: Tensor, columns: Tensor) -> tuple[int, int]:
    """How many keys a causal window holds, at least and at most, as a further part says; none where it says otherwise.

    Args:
        shown: ``[.., r, c]``, compressed; its rows ``[r, 1]`` and columns ``[1, c]`` have these numbers.
    """
    rows_ends = (rows, rows) if shown.shape[-2] == len(rows) else (rows[:1], rows[-1:])
    columns_ends = (columns, columns) if shown.shape[-1] == columns.shape[-1] else (columns[:, :1], columns[:, -1:])
    near = (rows_ends[0] - columns_ends[1]).expand(shown.shape)  # how far back keys are, at least
    far = (rows_ends[1] - columns_ends[0]).expand(shown.shape)
    if bool(shown.any()):
        if int(near[shown].min()) < 0:
            return 1, 0
        least = max(least, int(far[shown].max()) + 1)
    before = ~shown & (far >= 0)
    return least, min(most, max(0, int(near[before].min()))) if bool(before.any()) else most


def _mask(node: fx.Node) -> fx.Node | None:
    """The mask of an attention whose result has the same shape without it."""
    if node.target not in (ATTENTION, attention) or argument(node, "is_causal"):
        return None
    mask = argument(node, "attn_mask")
    if not isinstance(mask, fx.Node):
        return None
    shape, batch = mask.meta["val"].shape[:-2], argument(node, "query").meta["val"].shape[:-2]
    if len(shape) > len(batch) or any(a not in (1, b) for a, b in zip(shape[::-1], batch[::-1], strict=False)):
        return None
    return mask


def _without_masks(body: Body, told: Mapping[fx.Node, Sight]) -> RewrittenBody:
    """The body in which attention is not ``told`` so by a mask."""

    def drop(node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> None:
        if node in told:
            _drop_mask(copies[node], told[node])

    return body.rewritten(drop)


def _drop_mask(node: fx.Node, seen: Sight) -> None:
    query, key, value, rate = (argument(node, name) for name in ("query", "key", "value", "dropout_p"))
    node.kwargs = {name: value for name, value in node.kwargs.items() if name in ("scale", "enable_gqa", "softcap")}
    node.args = (query, key, value, None, rate, seen.causal)
    if seen.window is not None:
        node.target = attention
        node.kwargs = {**node.kwargs, "window": seen.window}
