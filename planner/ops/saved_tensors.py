"""What operators save for backward besides their operands and results (masks, statistics).

``(Node, bytes of its tensors) -> bytes``. A mask that dropout drew, the statistics of a norm, a log-softmax, what a
``torch.autograd.Function`` saves of its own. What of it an operator keeps stands in its row, see
:mod:`planner.ops.table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.ir.graph import Node, TensorType
from planner.ops import OPS
from planner.ops.function import kept
from planner.ops.table import OWN

FLASH = ("out0", "rows")
"""What a flash kernel keeps of attention, and one that keeps scores does not."""
COPIES = {"in0": "copy0", "in1": "copy1", "in2": "copy2"}
"""What one that keeps scores has in place of operands."""
EXACT = ("own", "mask", *COPIES.values())
"""What operators keep besides operands and results and whose bytes are known to the last one."""


def saved_words(node: Node, types: tuple[TensorType, ...], backend: str) -> tuple[str, ...]:
    """What backward of an operator needs, in the words of its row; of one without a row all operands.

    Args:
        types: of its operands.
        backend: of the cluster; over gloo operators run on CPUs, where attention keeps scores that drops some, or whose
            mask is trained.
    """
    row = OPS.get(node.op)
    if row is None:
        return tuple(f"in{i}" for i in range(len(types)))
    words = row.saved(node, types)
    if "scores" not in words or backend != "gloo":
        return words
    words = tuple(word for word in words if word not in FLASH)
    return words if node["dropout_p"] else tuple(COPIES.get(word, word) for word in words)


def is_own(word: str, node: Node) -> bool:
    """Whether a word of what an operator saves stands for something besides operands and results."""
    return word in OWN or word in COPIES.values() or kept(word, node) is not None


def is_exact(word: str, node: Node) -> bool:
    """Whether the bytes that such a word stands for are known to the last one, storage by storage."""
    return word in EXACT or (word == "scores" and not node["dropout_p"])


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
    if word == "rows":
        return max(4, item) * (sizes[0] // item // types[0].shape[-1])  # in float32 at the least
    wide = _wide(types) // item
    if word.startswith("copy"):
        return wide * sizes[int(word.removeprefix("copy"))]
    if not on_cpu:
        return 0
    scores = _scores_bytes(types, sizes)
    if not node["dropout_p"]:
        return scores
    return 3 * scores + (wide - 1) * sum(sizes[:3])  # softmax, mask, their product; operands stand for their copies


@dataclass(frozen=True)
class ScratchBytes:
    """Bytes that an operator needs while it runs, besides operands, results, their gradients and what it keeps."""

    forward: int = 0
    backward: int = 0


def beside(node: Node, types: Sequence[TensorType], sizes: Sequence[int], backend: str) -> ScratchBytes:
    """What attention that keeps scores needs while it runs; its operands are taken to be heads that lie side by side.

    It scales query and key, copies both and the value for products of batches, and holds the scaled query to the end.
    A softmax is beside the scores, and in backward the gradients of both are.

    Args:
        types, sizes, backend: as in :func:`own_bytes`.
    """
    row = OPS.get(node.op)
    if row is None or backend != "gloo" or "scores" not in row.saved(node, tuple(types)):
        return ScratchBytes()
    drops, scores, wide = bool(node["dropout_p"]), _scores_bytes(types, sizes), _wide(types) // types[0].item_bytes
    query, key, value, result = (wide * sizes[at] for at in (0, 1, 2, len(types)))
    words = (word for word in saved_words(node, tuple(types), backend) if is_own(word, node))
    counted = sum(own_bytes(word, node, types, sizes, backend) for word in words) + result // wide
    at_end = 2 * query + key + value + (3 if drops else 1) * scores + result
    at_softmax = 2 * query + key + 2 * scores + scores // _wide(types)
    gradients = sum(size for size, tensor in zip(sizes, types, strict=False) if tensor.grad)
    undone = value + scores, 0 if drops else 2 * scores - result // wide
    return ScratchBytes(max(at_end, at_softmax) - counted, max(0, max(undone) - gradients))


def _wide(types: Sequence[TensorType]) -> int:
    """Bytes of an element of scores."""
    return max(4, types[0].item_bytes)


def _scores_bytes(types: Sequence[TensorType], sizes: Sequence[int]) -> int:
    """Of one for each query and key."""
    return _wide(types) * (sizes[0] // types[0].item_bytes // types[0].shape[-1]) * types[1].shape[-2]
