"""Lets equal blocks decide differently where that is better.

A chain of equal layers may want to alternate (column, row, column, ...), which one decision for all of them cannot
say. So the search also decides for every instance of a small model; instances that end up alike are one kind again.
"""

from __future__ import annotations

from planner.formulation.assignment import Assignment, assignment_of
from planner.formulation.decisions import Role, Skeleton
from planner.formulation.remat.levels import together
from planner.formulation.search_space import Space
from planner.formulation.strategies import Choice
from planner.ir.folding import Block, Folded, relabel
from planner.ir.graph import Ref
from planner.ir.layout import Layout
from planner.search.candidate_bounds import Incumbent, SearchContext
from planner.solve.problem import evaluate

UNFOLDED_OPERATORS = 200
"""Up to so many operators a model is also decided node by node, without one decision for equal blocks."""


def may_differ(folded: Folded) -> bool:
    """Whether the instances of a block are also tried apart: where there are some, and the whole model is small."""
    operators = sum(len(instance.block.span) for instance in folded.instances)
    return len(folded.instances) > len(folded.kinds) and operators <= UNFOLDED_OPERATORS


def unfolded(skeleton: Skeleton) -> Skeleton:
    """The same graph with every block a kind of its own."""
    folded = skeleton.folded
    return Skeleton(relabel(folded, range(len(folded.instances))), skeleton.rules, like=skeleton)


def refolded(context: SearchContext, folded: Folded, best: Incumbent) -> Incumbent:
    """The same decisions with instances that decide alike folded into one kind."""
    space = best.space
    chosen = assignment_of(space, best.choices)
    levels = [best.recompute.level(kind, 0) for kind in range(len(space.folded.kinds))]
    labels = [
        (
            levels[instance.kind],
            *(
                (chosen.chosen[space.role_of[name]], *(chosen.delivered(Ref(name, i)) for i in range(results)))
                for name, results in _decided(instance.block, space)
            ),
        )
        for instance in space.folded.instances
    ]
    skeleton = Skeleton(relabel(folded, labels), context.rules, like=space.skeleton)
    merged = context.formulate(skeleton, best.config)
    picks = []
    for role in merged.roles:
        decision = chosen.chosen.get(role) if role[0] == "output" else _decision(merged, role, chosen)
        picks.append(list(merged.options[role]).index(decision))
    recompute = together(best.recompute, [kind for kind, _ in merged.skeleton.numbers])
    problem = merged.problem(context.limit_bytes, recompute)
    return Incumbent(merged, tuple(picks), recompute, evaluate(problem, tuple(picks)))


def _decided(block: Block, space: Space) -> list[tuple[str, int]]:
    """Nodes whose decisions belong to a block: its own, and the leaves that only it reads."""
    own = space.skeleton.own
    leaves = [ref.node for ref in block.inputs if space.role_of[ref.node][0] == "leaf" and ref.node in own]
    return [(node.name, len(node.results)) for node in block.span] + [(name, 1) for name in leaves]


def _decision(space: Space, role: Role, chosen: Assignment) -> Choice | Layout:
    """What the unfolded decisions say for a role of the folded space."""
    if role[0] == "relay":
        producer = role[1]
        assert isinstance(producer, tuple)
        assert isinstance(role[2], int)
        return chosen.delivered(Ref(space.members[producer][0], role[2]))
    name = space.members[role][0]
    return chosen.chosen[chosen.space.role_of[name]]
