"""Which blocks read a parameter, and whose memory a value is in."""

from __future__ import annotations

from planner.formulation.assignment import Assignment
from planner.ir.graph import Node, Ref
from planner.ops.aliasing import shares


def readers_of(assignment: Assignment) -> dict[str, tuple[int, ...]]:
    """The numbers of the blocks that may read each parameter, by its name; without those that none reads.

    Where a block hands on a view of a parameter, all later ones may.
    """
    space = assignment.space
    found: dict[str, set[int]] = {}
    for number, instance in enumerate(space.folded.instances):
        views = {ref: ref.node for ref in instance.block.inputs if space.graph.by_name[ref.node].op == "param"}
        for name in views.values():
            found.setdefault(name, set()).add(number)
        for node in instance.block.nodes:
            for index, shared in enumerate(shares_of(node)):
                if shared >= 0 and node.inputs[shared] in views:
                    views[Ref(node.name, index)] = views[node.inputs[shared]]
        for name in (views[ref] for ref in instance.block.outputs if ref in views):
            found[name].update(range(number, len(space.folded.instances)))
    return {name: tuple(sorted(numbers)) for name, numbers in found.items()}


def read_alone(assignment: Assignment) -> dict[int, tuple[Ref, ...]]:
    """The parameters with gradients that one block alone reads, by its number: when backward is over with the block,
    their gradients are complete.
    """
    graph, found = assignment.space.graph, dict[int, tuple[Ref, ...]]()
    leaving = {ref.node for ref in assignment.space.leaving}
    for name, numbers in readers_of(assignment).items():
        is_trained = graph.by_name[name].results[0].grad
        if is_trained and name not in leaving and not enters_before(assignment, name, numbers):
            found[numbers[0]] = (*found.get(numbers[0], ()), Ref(name))
    return found


def shares_of(node: Node) -> tuple[int, ...]:
    """For each result of an operator: the operand in whose memory it is, or -1."""
    return shares(node) or (-1,) * len(node.results)


def enters_before(assignment: Assignment, name: str, readers: tuple[int, ...]) -> bool:
    """Whether a parameter enters the program before the first block, since several read it or it is converted there."""
    return len(readers) > 1 or bool(assignment.shared_route(Ref(name)))
