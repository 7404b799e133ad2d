"""What a step takes as a description says it: the best plan that is pinned to it, by the same search and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.context import with_ulysses
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.interchange.parallelism import Parallelism
from planner.interchange.pins import pins_of
from planner.ir.graph import Graph
from planner.search.branch_and_bound import Searched
from planner.search.search import search

GAP = 0.02
"""Part of a step that a price need not be proved to."""


@dataclass(frozen=True)
class Cost:
    """What a step takes: seconds, and bytes of every pipeline rank at its fullest."""

    step_s: float
    rank_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Of the fullest."""
        return max(self.rank_bytes)


def cost_of(found: Searched) -> Cost:
    """What the best plan of a search takes."""
    predicted, staged = found.planned_step[1], found.staged
    of_ranks = (predicted.peak_bytes,) if staged is None or staged.pipeline.ranks == 1 else staged.rank_bytes
    return Cost(predicted.step_time_s, of_ranks)


def searched(
    graph: Graph, cluster: ClusterSpec, description: Parallelism, training: Training, time_limit_s: float
) -> Searched:
    """The best plan that is pinned to a description.

    Raises:
        ConfigError, PinError, InfeasibleError, ClusterError: there is none; says why.
    """
    modules = {node.path: None for node in graph.operators if node.path} if description.recompute_modules else {}
    pins = with_ulysses(Pins.parse(pins_of(description, modules.keys())), graph, cluster)
    training = replace(training, tier=pins.tier, activations=0, update=pins.update)
    return search(graph, cluster, pins, training, time_limit_s=time_limit_s, gap=GAP)


def not_held_to(unpinned: tuple[str, ...]) -> str:
    """What a price is not of, in words."""
    return f"not priced as configured, but as the search or the model has it: {', '.join(unpinned)}"
