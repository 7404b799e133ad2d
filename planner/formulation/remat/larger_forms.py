"""Which reshardings run again in backward since they make larger what a block keeps.

What products and attention save may have been made in a smaller form, such as a shard of the sequence that was gathered
for them. Backward then keeps that, and reshards it again. Which reshardings make something larger follows from what is
decided: so the slice of :mod:`planner.formulation.remat.backward_slice` is completed here for one assignment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from planner.formulation.remat.backward_slice import Again, Backward
from planner.ir.graph import Ref

Effect = Literal["same", "copy", "larger"]
"""What a resharding makes: nothing of its own, a copy that is no larger, or a larger one."""
Memory = tuple[int, int, bool]
"""A copy: that of an operator's operand, or (True) that of an operator's result for all its readers."""


def with_larger_forms(
    again: Again, backward: Backward, operand: Callable[[int, int], Effect], shared: Callable[[Ref], Effect]
) -> Again:
    """The same with the reshardings that run again for what is kept as it was made.

    Args:
        operand: what the resharding of an operator's operand makes, by the positions of both.
        shared: what the resharding of a value for all its readers makes.
    """
    nodes, at_of = backward.nodes, backward.at_of
    taken = [{*each} for each in again.taken]
    values, delivered = {*again.values} - again.as_made, {*again.delivered}

    def of_operand(at: int, place: int) -> Memory | None:
        """Where an operand lies if it is resharded again, itself or what it is a view of; else it is kept."""
        effect = operand(at, place)
        before = None if effect == "copy" else of_value(nodes[at].inputs[place])
        if effect == "larger":
            taken[at].add(place)
        return (at, place, False) if effect == "larger" else before

    def of_value(ref: Ref) -> Memory | None:
        """The same of a value, as all its readers find it."""
        made = at_of.get(ref.node, -1), ref.index
        if made not in again.as_made:
            return None
        effect = shared(ref)
        before = None if effect == "copy" else of_made(*made)
        if effect == "larger":
            delivered.add(made)
        return (*made, True) if effect == "larger" else before

    def of_made(at: int, index: int) -> Memory | None:
        """The same of a value as it is made."""
        if at in again.lasting:
            return None
        found = of_operand(at, backward.viewed(at, index))
        if found is not None:
            values.add((at, index))
        return found

    counted: set[Memory] = set()
    dropped = []
    views = {at for at, _ in again.as_made} - again.lasting  # these run again for those that read them
    for at, places in enumerate(again.needed_as_made):
        more = {*again.dropped[at]}
        for place in sorted(places if at not in views else ()):
            memory = of_operand(at, place) if place in again.taken_if_larger[at] else None
            if memory is not None and memory not in counted and place in backward.saved[at]:
                counted.add(memory)
                more.add(place)
        dropped.append(tuple(sorted(more)))
    return replace(
        again,
        values=frozenset(values),
        taken=tuple(map(frozenset, taken)),
        dropped=tuple(dropped),
        delivered=frozenset(delivered),
    )
