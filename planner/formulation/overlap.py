"""What is computed while an operator's own collective is on its way: shared experts, while tokens go to the others.

Such a collective begins once there are the operands that it needs (:attr:`planner.ops.sharding_rule.Inner.needs`), and
is waited for where the operator runs. What the graph has between the two neither makes the one nor reads the other.
The emitted program does the same in backward, where what goes the way back is waited for behind the gradients of what
is between.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.ir.graph import Node
from planner.ops import OPS
from planner.ops.sharding_rule import Inner


def needs_of(inner: Sequence[Inner]) -> tuple[int, ...]:
    """The operands, by place, with which the first of an operator's collectives that others may hide begins."""
    return next((call.needs for call in inner if call.needs), ())


def overlapped(nodes: Sequence[Node], node: Node, needs: Sequence[int]) -> Sequence[Node]:
    """What a collective of ``node`` overlaps: the operators between it and the last that makes one of the operands
    ``needs``, if a product is among them.

    Args:
        nodes: of the block, in order, as no program goes beyond one; ``node`` is one of them.
    """
    made = {node.inputs[place].node for place in needs}
    end = begin = next(at for at, each in enumerate(nodes) if each.name == node.name)
    while begin and not nodes[begin - 1].is_leaf and nodes[begin - 1].name not in made:
        begin -= 1
    found = nodes[begin:end]
    return found if any((row := OPS.get(each.op)) is not None and row.contracts for each in found) else ()
