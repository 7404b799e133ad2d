"""What operators save for backward besides their operands and results (masks, statistics).

``(Node, bytes of its tensors) -> bytes``. A mask that dropout drew, the statistics of a norm, a log-softmax, what a
``torch.autograd.Function`` saves of its own. What of it an operator keeps stands in its row, see
:mod:`planner.ops.table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.ir.graph import Node, TensorType
from planner.ops import OPS, attends
from planner.ops.attention import has_scores
from planner.ops.attention_pieces import QueryShards, scratch_bytes
from planner.ops.function import kept
from planner.ops.table import Saved, Share

FLASH = (Saved("in", 3), Saved("out"), Saved("rows"))
"""What a flash kernel keeps of attention, a mask that is trained too, and one that keeps scores does not."""
SCORES = Saved("scores")


def saved_tensors(node: Node, types: tuple[TensorType, ...], on_cpu: bool, share: Share) -> tuple[Saved, ...]:
    """What backward of an operator needs; of one without a row all operands.

    Args:
        types: of its operands.
        on_cpu: whether it runs on a CPU, where attention keeps scores that drops some, or whose mask is trained; with
            nothing dropped it then has copies in place of operands. In pieces it keeps no scores.
        share: how much of it the rank has.
    """
    row = OPS.get(node.op)
    if row is None:
        return tuple(Saved("in", i) for i in range(len(types)))
    found = row.saved(node, types)
    if SCORES not in found or not on_cpu:
        return found
    if _is_in_pieces(node, share):
        return tuple(saved for saved in found if saved != SCORES)
    found = tuple(saved for saved in found if saved not in FLASH)
    return found if node["dropout_p"] else tuple(Saved("copy", s.place) if s.kind == "in" else s for s in found)


def is_own(saved: Saved) -> bool:
    """Whether what an operator saves is something besides its operands and results."""
    return saved.kind not in ("in", "out")


def is_exact(saved: Saved, node: Node) -> bool:
    """Whether the bytes of what an operator keeps so are known to the last one, storage by storage."""
    return saved.kind in ("own", "mask", "copy") or (saved == SCORES and not node["dropout_p"])


def own_bytes(
    saved: Saved,
    node: Node,
    types: Sequence[TensorType],
    sizes: Sequence[int],
    on_cpu: bool,
    share: Share,
) -> int:
    """Bytes of what an operator keeps besides its operands and results, see :func:`is_own`.

    Args:
        types: of its operands.
        sizes: bytes of its tensors on one rank: operands, then results.
        on_cpu: whether it runs on a CPU.
        share: how much of it the rank has.
    """
    row = OPS.get(node.op)
    if saved.kind in ("between", "rows") and row is not None and row.between is not None:
        return row.between(node, types, sizes, share).kept
    like = kept(saved, node)
    if like is not None:
        place, each = like
        return round(sizes[place] // (*types, *node.results)[place].item_bytes * each)
    item = types[0].item_bytes
    if saved.kind == "own":
        return sizes[0]
    if saved.kind == "mask":  # a byte for each element on GPUs, a tensor like the operand on CPUs
        return sizes[0] if on_cpu else sizes[0] // item
    if saved.kind == "rows":
        return max(4, item) * (sizes[0] // item // types[0].shape[-1])  # in float32 at the least
    wide = _wide(types) // item
    if saved.kind == "copy":
        return wide * sizes[saved.place]
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


def beside(
    node: Node,
    types: Sequence[TensorType],
    sizes: Sequence[int],
    on_cpu: bool,
    share: Share,
) -> ScratchBytes:
    """What operators that are made of several, attention in pieces, and one that keeps scores need while they run.

    Operands of attention are taken to be heads that lie side by side. It scales query and key, copies both and the
    value for products of batches, and holds the scaled query to the end. A softmax is beside the scores, and in
    backward the gradients of both are.

    Args:
        types, sizes, on_cpu, share: as in :func:`own_bytes`.
    """
    row = OPS.get(node.op)
    if row is not None and row.between is not None:
        found = row.between(node, types, sizes, share)
        return ScratchBytes(found.forward, found.backward)
    if _is_in_pieces(node, share):
        shards = QueryShards.of(share.parts)
        return ScratchBytes(*scratch_bytes(node, types, sizes, shards, has_scores(node, types, on_cpu)))
    if row is None or not on_cpu or SCORES not in row.saved(node, tuple(types)):
        return ScratchBytes()
    drops, scores, wide = bool(node["dropout_p"]), _scores_bytes(types, sizes), _wide(types) // types[0].item_bytes
    query, key, value, result = (wide * sizes[at] for at in (0, 1, 2, len(types)))
    kept_ = (saved for saved in saved_tensors(node, tuple(types), on_cpu, share) if is_own(saved))
    counted = sum(own_bytes(saved, node, types, sizes, on_cpu, share) for saved in kept_) + result // wide
    at_end = 2 * query + key + value + (3 if drops else 1) * scores + result
    at_softmax = 2 * query + key + 2 * scores + scores // _wide(types)
    gradients = sum(size for size, tensor in zip(sizes, types, strict=False) if tensor.grad)
    working = value + scores, 0 if drops else 2 * scores - result // wide
    return ScratchBytes(max(at_end, at_softmax) - counted, max(0, max(working) - gradients))


def _is_in_pieces(node: Node, share: Share) -> bool:
    """Whether it is attention that a rank runs piece by piece."""
    return attends(node.op) and QueryShards.of(share.parts).is_in_pieces(node)


def _wide(types: Sequence[TensorType]) -> int:
    """Bytes of an element of scores."""
    return max(4, types[0].item_bytes)


def _scores_bytes(types: Sequence[TensorType], sizes: Sequence[int]) -> int:
    """Of one for each query and key."""
    return _wide(types) * (sizes[0] // types[0].item_bytes // types[0].shape[-1]) * types[1].shape[-2]
