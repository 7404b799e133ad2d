"""Kept: what operators keep for backward besides their operands and results.

``(Node, bytes of its tensors) -> bytes``. A mask that dropout drew, the statistics of a norm, a log-softmax, what a
``torch.autograd.Function`` saves of its own. What of it an operator keeps stands in its row, see
:mod:`planner.ops.table`.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.graph import Node, TensorType
from planner.ops.function import kept
from planner.ops.table import OWN


def is_own(word: str, node: Node) -> bool:
    """Whether a word of what an operator saves stands for something besides operands and results."""
    return word in OWN or kept(word, node) is not None


def own_bytes(word: str, node: Node, types: Sequence[TensorType], sizes: Sequence[int], backend: str) -> int:
    """Bytes of what an operator keeps by a word of what it saves, see :func:`is_own`.

    Args:
        types: of its operands.
        sizes: bytes of its tensors on one rank: operands, then results.
        backend: of the cluster; over gloo operators run on CPUs.
    """
    on_cpu = backend == "gloo"
    like = kept(word, node)
    if like is not None:
        place, each = like
        return round(sizes[place] // (*types, *node.results)[place].item_bytes * each)
    item = types[0].item_bytes
    if word == "own":
        return sizes[0]
    if word == "mask":  # a byte for each element on GPUs, a tensor like the operand on CPUs
        return sizes[0] if on_cpu else sizes[0] // item
    rows = sizes[0] // item // types[0].shape[-1]
    if word == "rows":
        return max(4, item) * rows  # in float32 at the least
    return 3 * item * rows * types[1].shape[-2] if on_cpu else 0  # softmax, mask, and their product
