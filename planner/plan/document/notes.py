"""What a plan's reader may not expect of it, in sentences that begin its report and are warned of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from planner.analysis.prediction import Prediction
from planner.base.formatting import in_count, in_percent
from planner.formulation.assignment import Assignment
from planner.formulation.search_space import Space
from planner.ir.graph import Graph
from planner.ops import OPS
from planner.ops.function import is_unregistered


def notes(
    assignment: Assignment, model: Mapping[str, Any], coverage: Mapping[str, int], predicted: Prediction, stages: int
) -> tuple[str, ...]:
    """What of a plan may not have been meant, each with the way out.

    Args:
        model: facts of it, see :func:`planner.plan.document.fingerprint.model_facts`, as far as a file has them.
        coverage: operators that run whole on every rank, see :func:`planner.plan.document.fingerprint.coverage`.
        stages: pipeline ranks.
    """
    space = assignment.space
    return (*_of_training(space.graph, model), *_of_ranks(assignment, coverage, predicted, stages))


def _of_training(graph: Graph, model: Mapping[str, Any]) -> Iterator[str]:
    name, parameters = model.get("class", "the model"), graph.applying("param").firsts
    trains = any(leaf.results[0].grad for leaf in parameters)
    if model.get("mode") == "eval":
        if trains and graph.roots:
            yield (
                f"{name} is in eval mode, and the plan is for that: dropout is off, and the parallel module cannot "
                "train. To train, call model.train() first, also after from_pretrained"
            )
    elif parameters and not trains:
        count = in_count(sum(leaf.results[0].numel for leaf in parameters))
        yield (
            f"{name} trains nothing: none of its {count} parameters has requires_grad, so that "
            "the plan is for forward alone. Set requires_grad on what is to be trained, or call model.eval()"
        )
    elif trains and graph.loss is None:
        returned = "backward is planned from all of what it returns" if graph.roots else "there is no backward"
        yield (
            f"{name} returns no loss, one number that depends on trained parameters: {returned}. Give its inputs what "
            "it computes the loss from (labels, for Transformers), or give loss_fn"
        )


def _of_ranks(assignment: Assignment, coverage: Mapping[str, int], predicted: Prediction, stages: int) -> Iterator[str]:
    space = assignment.space
    ranks = space.mesh.micro_batched(1).size
    if ranks == 1:
        return
    every = f"All {ranks} ranks{' of a stage' if stages > 1 else ''}"
    if coverage:
        share = unknown_share(assignment, predicted, stages)
        listed = [f"{times} x {op}" for op, times in coverage.items()]
        more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
        yield (
            f"{every} compute the same of {', '.join(listed[:3])}{more}, {in_percent(share)} of the step: "
            "the op table does not know how they are sharded. Add them to it, or register the Function "
            "(docs/adding_an_op.md)"
        )
    if not any(_shards(assignment, space)):
        yield (
            f"{every} compute the whole step: nothing is sharded, as that would take longer, or no size "
            f"divides by {ranks}. Take fewer devices, a larger batch, or pin what is to be sharded"
        )


def unknown_share(assignment: Assignment, predicted: Prediction, stages: int) -> float:
    """The share of a step that operators take of which the op table does not know how they are sharded."""
    if assignment.space.mesh.micro_batched(1).size == 1:
        return 0.0
    return _unknown_s(assignment) / stages / (predicted.step_time_s or 1.0)


def _unknown_s(assignment: Assignment) -> float:
    """Seconds of the operators of a step, on the ranks of all stages, that run whole since no table knows them."""
    space = assignment.space
    found = 0.0
    for members in space.members.values():
        node = space.graph.by_name[members[0]]
        if not node.is_leaf and (node.op not in OPS or is_unregistered(node)):
            work = space.work(node, assignment.choice(node))
            found += len(members) * (work.forward_s + work.backward_s)
    return found * space.mesh.micro_batches


def _shards(assignment: Assignment, space: Space) -> Iterator[bool]:
    """Of each decision about an operator, whether ranks do different parts of it."""
    sizes = space.mesh.micro_batched(1)
    names = {axis.name for axis in sizes.axes if axis.size > 1}
    for members in space.members.values():
        node = space.graph.by_name[members[0]]
        if not node.is_leaf:
            strategies = zip(space.mesh.names, assignment.choice(node).axes, strict=True)
            yield any(name in names and bool(strategy.factor) for name, strategy in strategies)
