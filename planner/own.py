"""Own: what operators keep for backward of their own, besides their operands and results.

``(Node, bytes of its tensors) -> bytes``. A mask that dropout drew, the statistics of a norm, a log-softmax, what a
``torch.autograd.Function`` saves of its own. What of it an operator keeps stands in its row, see
:mod:`planner.ops.table`.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.graph import Node, TensorType
from planner.ops import OPS
from planner.ops.function import kept
from planner.ops.table import OWN

FLASH = ("out0", "rows")
"""What a flash kernel keeps of attention, and one that keeps scores does not."""


def saved_words(node: Node, types: tuple[TensorType, ...], backend: str) -> tuple[str, ...]:
    """What backward of an operator needs, in the words of its row; of one without a row all operands.

    Args:
        types: of its operands.
        backend: of the cluster; over gloo operators run on CPUs, where attention that drops some keeps scores.
    """
    row = OPS.get(node.op)
    if row is None:
        return tuple(f"in{i}" for i in range(len(types)))
    words = row.saved(node, types)
    return tuple(word for word in words if word not in FLASH) if "scores" in words and backend == "gloo" else words


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
    wide = max(4, item)  # softmax, mask, their product, and copies of the operands are in float32 at the least
    return 3 * wide * rows * types[1].shape[-2] + (wide // item - 1) * sum(sizes[:3]) if on_cpu else 0
