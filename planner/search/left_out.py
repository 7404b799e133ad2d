"""What of the space a search leaves out where no pin asks for it, and why: pipelines and micro-batches.

Where a pin asks for what cannot be, that is an error; where none does, plans without it are searched, and say so.
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.base.errors import PinError
from planner.formulation.constraints.pins import Pins
from planner.formulation.decisions import DecisionGraph
from planner.ir.graph import Graph
from planner.search.infeasibility import what_forbids
from planner.search.parallel_config import ParallelConfig
from planner.search.search_context import SearchContext


def is_whole(pins: Pins) -> bool:
    """Whether they leave only steps of one stage and one micro-batch."""
    return pins.stages == pins.micro_batches == 1 and not pins.micro_batched


def why_no_pipelines(graph: Graph, pins: Pins, folding: bool) -> str:
    """Neither pipelines nor micro-batches, and why; empty if they are searched, or if pins leave no choice."""
    if pins.micro_batched or is_whole(pins):
        return ""
    reason = ""
    if not folding:
        reason = "folding is off, and they are cut between folded blocks"
    elif pins.update == "backward":
        reason = (
            "pin 'update' is 'backward', and a micro-batched step has its gradients before the loss's backward says by "
            "how much they are scaled"
        )
    elif _gathers_both_ways(pins):
        reason = "pin 'zero' has parameters gathered once a step (1, 2) and others in each micro-batch (3)"
    elif graph.loss is None:
        reason = (
            "the model returns no loss, from which they run backward: give it what it computes one from, or a loss_fn; "
            "or pin them to run it forward only"
        )
    return reason and f"pipelines and micro-batches, since {reason}"


def _gathers_both_ways(pins: Pins) -> bool:
    """Whether they gather some parameters once a step and others in each micro-batch, which no step does."""
    try:
        return not pins.unshardings
    except PinError:
        return True


def check_update(pins: Pins) -> None:
    """Refuse updates in backward with micro-batches; raises :class:`PinError`."""
    if pins.micro_batched and pins.update == "backward":
        raise PinError(
            "pin 'update' is 'backward', but a micro-batched step has its gradients before the loss's backward says "
            "by how much they are scaled, so that none can be used earlier: pin 'update' 'after', or leave out "
            "'pipeline' and 'micro_batches'"
        )


def check_schedule(pins: Pins, left_out: str) -> None:
    """Refuse pins that say how a pipeline runs where there can be none; raises :class:`PinError`."""
    if (left_out or is_whole(pins)) and (pins.schedule or pins.virtual_stages):
        reason = f"left out are {left_out}" if left_out else "pins 'pipeline' and 'micro_batches' are 1"
        raise PinError(f"pins 'schedule' and 'virtual_stages' are a pipeline's, and {reason}")


def why_no_micro_batches(
    context: SearchContext, decision_graph: DecisionGraph, configs: Iterable[ParallelConfig]
) -> str:
    """Micro-batches, and why none can be cut, whatever memory there is; empty if some may be."""
    cut = [config for config in configs if config.mesh.micro_batches > 1]
    if not cut or context.pins.micro_batches is not None or context.pins.schedule == "2bw":
        return ""
    smallest = min(cut, key=lambda config: (config.mesh.size, config.mesh.micro_batches))
    reason = what_forbids(context.formulate(decision_graph, smallest))
    return reason and f"micro-batches, since {reason}"
