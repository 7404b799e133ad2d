"""Which linear layers multiply in float8 where a plan is pinned to it."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.kernels import Product, Scaling, Shape, kernel_of
from planner.formulation.block_facts import BlockFacts
from planner.formulation.training import Training
from planner.ir.graph import Node
from planner.ops import OPS

DTYPE, MULTIPLE = "bfloat16", 16
"""The dtype of what is scaled, and of what all sizes of a product are multiples, as scaled products want them."""


def may_scale(training: Training, blocks: BlockFacts, node: Node) -> Scaling | None:
    """How an operator is scaled to float8 where its sizes on a rank allow it; ``None``: in none.

    Of blocks that repeat alone: embeddings, heads and losses stay as they are, as other recipes leave them.
    """
    row = OPS.get(node.op)
    is_linear = row is not None and row.kernel == "linear" and node.results[0].dtype == DTYPE
    return training.float8 if is_linear and training.float8 is not None and blocks.repeats(node) else None


def is_scalable(node: Node, shapes: Sequence[Shape]) -> bool:
    """Whether the sizes of a linear layer on operands of these shapes allow it."""
    found = kernel_of(node.op, shapes)
    return isinstance(found, Product) and not any(size % MULTIPLE for size in (found.m, found.n, found.k))
