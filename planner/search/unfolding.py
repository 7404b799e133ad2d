"""Lets equal blocks decide differently where that is better.

A chain of equal layers may want to alternate (column, row, column, ...), which one decision for all of them cannot
say. So the search also decides for every instance of a small model; instances that end up alike are one kind again.
"""

from __future__ import annotations

from planner.analysis.pipeline.staged import in_one_piece
from planner.formulation.assignment import Assignment, assignment_of
from planner.formulation.decisions import DecisionGraph
from planner.formulation.remat.levels import at_levels
from planner.formulation.search_space import Space
from planner.formulation.strategies import Choice
from planner.formulation.variables import Variable
from planner.ir.folding import Block, Folded, relabel
from planner.ir.graph import Ref
from planner.ir.layout import Layout
from planner.search.candidates import Incumbent
from planner.search.search_context import SearchContext

UNFOLDED_OPERATORS = 200
"""Up to so many operators a model is also decided node by node, without one decision for equal blocks."""


def may_differ(folded: Folded) -> bool:
    """Whether the instances of a block are also tried apart: where there are some, and the whole model is small."""
    operators = sum(len(instance.block.span) for instance in folded.instances)
    return len(folded.instances) > len(folded.kinds) and operators <= UNFOLDED_OPERATORS


def unfolded(decision_graph: DecisionGraph) -> DecisionGraph:
    """The same graph with every block a kind of its own."""
    folded = decision_graph.folded
    return DecisionGraph(relabel(folded, range(len(folded.instances))), decision_graph.rules, like=decision_graph)


def refolded(context: SearchContext, folded: Folded, best: Incumbent) -> Incumbent:
    """The same decisions with instances that decide alike folded into one kind."""
    space = best.space
    chosen = assignment_of(space, best.choices)
    labels = [
        (
            level,
            *(
                (
                    chosen.chosen[space.variable_of[name]],
                    *(chosen.consumer_layout(Ref(name, i)) for i in range(results)),
                )
                for name, results in _decided(instance.block, space)
            ),
        )
        for instance, level in zip(space.folded.instances, best.staged.levels, strict=True)
    ]
    decision_graph = DecisionGraph(relabel(folded, labels), context.rules, like=space.decision_graph)
    merged = context.formulate(decision_graph, best.config)
    picks = []
    for variable in merged.variables:
        decision = chosen.chosen.get(variable) if variable[0] == "output" else _decision(merged, variable, chosen)
        picks.append(list(merged.options[variable]).index(decision))
    recompute = at_levels(merged.folded, best.staged.levels)
    return Incumbent(merged, tuple(picks), in_one_piece(assignment_of(merged, tuple(picks), recompute)))


def _decided(block: Block, space: Space) -> list[tuple[str, int]]:
    """Nodes whose decisions belong to a block: its own, and the leaves that only it reads."""
    own = space.decision_graph.variables.own
    leaves = [ref.node for ref in block.inputs if space.variable_of[ref.node][0] == "leaf" and ref.node in own]
    return [(node.name, len(node.results)) for node in block.span] + [(name, 1) for name in leaves]


def _decision(space: Space, variable: Variable, chosen: Assignment) -> Choice | Layout:
    """What the unfolded decisions say for a variable of the folded space."""
    if variable[0] == "reshard_point":
        producer = variable[1]
        assert isinstance(producer, tuple)
        assert isinstance(variable[2], int)
        return chosen.consumer_layout(Ref(space.members[producer][0], variable[2]))
    name = space.members[variable][0]
    return chosen.chosen[chosen.space.variable_of[name]]
