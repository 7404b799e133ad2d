"""Asked: whether backward asks an instance of a block for anything that it gave up.

A block that the loss reaches in part may have given up only what the rest of it would need; then nothing of it runs
again, and it gathers nothing again.
"""

from __future__ import annotations

from planner.fold import Instance
from planner.formulate import Assignment
from planner.graph import Node, Ref
from planner.ops import saved_places
from planner.recompute import Level


def is_asked(assignment: Assignment, instance: Instance, level: Level) -> bool:
    """Whether an operator that backward passes needs something that is made again at a level."""
    space, nodes = assignment.space, instance.block.nodes
    if level == "none":
        return False
    again, at_of = space.skeleton.again(instance.kind, level), {node.name: at for at, node in enumerate(nodes)}
    for at, node in enumerate(nodes):
        results = [Ref(node.name, index) for index in range(len(node.results))]
        if space.graph.differentiated.isdisjoint(results):
            continue
        tensors = (*node.inputs, *results)
        places = saved_places(node, space.graph.input_types(node))
        made = ((at_of[tensors[p].node], tensors[p].index) for p in places if tensors[p].node in at_of)
        converted = (p for p in places if p in again.taken[at])
        if at in again.drawing or not again.values.isdisjoint(made):
            return True
        if any(_is_converted(assignment, node, place) for place in converted):
            return True
    return False


def brought_again(assignment: Assignment, instance: Instance, level: Level) -> set[Ref]:
    """The parameters that an instance brings again in backward, with all others of their chunk."""
    return assignment.brought_again(instance, level) if is_asked(assignment, instance, level) else set()


def _is_converted(assignment: Assignment, node: Node, position: int) -> bool:
    """Whether an operand is other memory in the layout in which an operator takes it."""
    is_param = assignment.space.graph.by_name[node.inputs[position].node].op == "param"
    if is_param and assignment.space.brings_once:
        return False
    return any(step.rule != "I>R" for step in assignment.operand_route(node, position))
