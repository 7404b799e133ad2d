"""Lets attention share heads of keys and values among heads of queries where a model repeats them first.

Transformers repeats them wherever attention has a mask, since on GPUs kernels take either, and while it is exported a
causal mask still is one. Repeated they take as many times the memory, and the messages of a ring.

They stay repeated where attention has a mask to the end; in float32, for which GPUs have no kernel that shares heads;
and where ranks could divide all heads, but neither those of keys nor the heads of queries to each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from autopar.capture.constant_propagation import argument
from autopar.graph.program import Body, Program, RewrittenBody
from autopar.operators.attention import attention

aten = torch.ops.aten
ATTENTION = (aten.scaled_dot_product_attention.default, attention)
RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
HEADS = -3
"""The dim of heads."""
RANKS = 8
"""As many as are looked at: those of a node."""


def grouped_heads(program: Program) -> Program:
    """Give attention without a mask the keys and values that are repeated; what repeats them is left as dead code."""
    changed = {body: _grouped(body) for body in dict.fromkeys(call.body for call in program.calls)}
    calls = (call if (found := changed[call.body]) is None else call.running(found) for call in program.calls)
    return replace(program, calls=tuple(calls))


def _grouped(body: Body) -> RewrittenBody | None:
    """The body in which attention shares heads; ``None``: it has none that could."""
    whole = {node: found for node in body.nodes if (found := _before_repeating(node)) is not None}

    def share(node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> None:
        if node in whole:
            copy = copies[node]
            copy.args = (copy.args[0], *map(copies.__getitem__, whole[node]), *copy.args[3:])
            copy.kwargs = {**copy.kwargs, "enable_gqa": True}

    return body.rewritten(share) if whole else None


def _before_repeating(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The keys and values of an attention before they are repeated as often, head by head."""
    if node.target not in ATTENTION or len(node.args) < 3 or argument(node, "enable_gqa"):
        return None
    query = node.args[0]
    assert isinstance(query, fx.Node)
    if argument(node, "attn_mask") is not None or query.meta["val"].dtype not in (torch.float16, torch.bfloat16):
        return None
    key, value = (_repeated(argument(node, name)) for name in ("key", "value"))
    if key is None or value is None or _heads(key) != _heads(value):
        return None
    groups = _heads(query) // _heads(key)
    shared = [ranks for ranks in range(2, RANKS + 1) if _heads(query) % ranks == 0]
    return (key, value) if all(_heads(key) % ranks == 0 or groups % ranks == 0 for ranks in shared) else None


def _repeated(node: fx.Node) -> fx.Node | None:
    """What is repeated for several heads each: ``[.., h, n, d] -> [.., h, 1, n, d] -> [.., h, g, n, d] -> [.., h g, n,
    d]``.
    """
    if node.target not in RESHAPES:
        return None
    expanded = node.args[0]
    if not isinstance(expanded, fx.Node) or expanded.target is not aten.expand.default:
        return None
    narrow = expanded.args[0]
    if not isinstance(narrow, fx.Node) or narrow.target is not aten.unsqueeze.default:
        return None
    whole = narrow.args[0]
    assert isinstance(whole, fx.Node)
    size, wide = whole.meta["val"].shape, expanded.meta["val"].shape
    groups = wide[HEADS]
    as_repeated = (*size[:HEADS], size[HEADS], groups, *size[HEADS + 1 :])
    together = (*size[:HEADS], size[HEADS] * groups, *size[HEADS + 1 :])
    narrowed = (*size[: HEADS + 1], 1, *size[HEADS + 1 :])
    is_so = tuple(wide) == as_repeated and tuple(node.meta["val"].shape) == together
    return whole if is_so and groups > 1 and tuple(narrow.meta["val"].shape) == narrowed else None


def _heads(node: fx.Node) -> int:
    return int(node.meta["val"].shape[HEADS])
