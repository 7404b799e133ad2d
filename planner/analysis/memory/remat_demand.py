"""Whether the backward of a block needs any activation that the block discarded, and so recomputes.

A block that the loss reaches in part may have discarded only what the rest of it would need; then nothing of it runs
again, and it gathers nothing again.
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.formulation.assignment import Assignment
from planner.formulation.remat.levels import Level
from planner.formulation.search_space import Space
from planner.ir.folding import Instance
from planner.ir.graph import Node, Ref
from planner.ops import saved_places


def is_asked(assignment: Assignment, instance: Instance, level: Level, of_weights: bool = False) -> bool:
    """Whether an operator that backward passes needs something that is recomputed at a level.

    Args:
        of_weights: count those operators alone that give gradients of parameters.
    """
    space, nodes = assignment.space, instance.block.nodes
    if level == "none":
        return False
    again, at_of = assignment.again(instance.kind, level), {node.name: at for at, node in enumerate(nodes)}
    reads_weights = _reading_weights(space, nodes) if of_weights else at_of.keys()
    for at, node in enumerate(nodes):
        results = [Ref(node.name, index) for index in range(len(node.results))]
        if space.graph.differentiated.isdisjoint(results) or node.name not in reads_weights:
            continue
        tensors = (*node.inputs, *results)
        places = saved_places(node, space.graph.input_types(node))
        made = ((at_of[tensors[p].node], tensors[p].index) for p in places if tensors[p].node in at_of)
        converted = (p for p in places if p in again.taken[at])
        if at in again.drawing or not (again.values | again.delivered).isdisjoint(made):
            return True
        if any(_is_converted(assignment, node, place) for place in converted):
            return True
    return False


def _reading_weights(space: Space, nodes: Iterable[Node]) -> set[str]:
    """The operators of a block that read trained parameters, or what is made of these alone, by name."""
    found, made = set[str](), set[str]()
    for node in nodes:
        trained = [ref.node for ref in node.inputs if space.graph.type_of(ref).grad]
        of_weights = [name in made or space.graph.by_name[name].op == "param" for name in trained]
        if any(of_weights):
            found.add(node.name)
        if trained and all(of_weights):
            made.add(node.name)
    return found


def gathered_again(assignment: Assignment, instance: Instance, level: Level, of_weights: bool = False) -> set[Ref]:
    """The parameters that an instance gathers again in backward, with all others of their bucket.

    Args:
        of_weights: in its second part, where it is in two.
    """
    return assignment.gathered_again(instance, level) if is_asked(assignment, instance, level, of_weights) else set()


def _is_converted(assignment: Assignment, node: Node, position: int) -> bool:
    """Whether an operand is other memory in the layout in which an operator takes it."""
    is_param = assignment.space.graph.by_name[node.inputs[position].node].op == "param"
    if is_param and assignment.space.unsharding.once_per_step:
        return False
    return any(step.rule != "I>R" for step in assignment.operand_route(node, position))
