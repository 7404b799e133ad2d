"""A lower bound on the memory that a block's backward needs beyond the activations that forward saved.

While an operator runs its backward, gradients of what it delivers and of what it read are there. What operators behind
it saved may be gone by then, at most, each in a copy of its own; what others saved is not. That is so whatever the
block recomputes: what is made again is there in addition, until the operator that needs it has run.
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.formulation.search_space import Space
from planner.formulation.variables import Variable
from planner.solve.problem import Ints


def least_working_bytes(space: Space, kind: int, kept: Mapping[Variable, Ints]) -> int:
    """Bytes beside what is saved that backward of a block of a kind has at its fullest moment, at least.

    Args:
        kept: the numbers of the choices of each operator that count.
    """
    backward, most, gone = space.decision_graph.blocks.backward(kind), 0, 0
    for at, node in reversed([*enumerate(backward.nodes)]):
        variable = space.variable_of[node.name]
        options, numbers = space.options[variable], kept[variable]
        working = space.decision_graph.blocks.working(node)
        gradients = [place for place in working.backward if place not in working.parameters]
        sizes = space.sizes_of(node, options)[:, numbers]
        needed = sizes[gradients].sum(axis=0)
        if working.works:
            needed = needed + working.works * sizes[list(working.like)].max(axis=0)
        most = max(most, int(needed.min()) - gone)
        gathered = () if space.unsharding.once_per_step else working.parameters
        gone += sum(int(sizes[place].max()) for place in {*backward.saved[at], *backward.own_places(at), *gathered})
    return max(0, most)
