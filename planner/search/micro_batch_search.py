"""Searches plans that take the batch whole, in micro-batches, and through pipelines: which of these a model has, and in
which order they are searched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from planner.base.errors import InfeasibleError
from planner.formulation.constraints.zero import pinned_apart, ways_of_kinds
from planner.formulation.decisions import DecisionGraph
from planner.formulation.remat.levels import Levels, named_by_kind
from planner.ir.folding import Folded
from planner.ir.graph import Graph
from planner.search.axis_names import named
from planner.search.block_splitting import finer
from planner.search.branch_and_bound import ParallelConfigs, Searched, branch_and_bound, standing
from planner.search.candidates import Incumbent
from planner.search.fastest_plan import fastest
from planner.search.left_out import is_whole, why_no_micro_batches
from planner.search.offload_search import search_offload
from planner.search.parallel_config import ParallelConfig, dividing, micro_batched, stages_wanted, without_micro_batches
from planner.search.remat_selection import keeping, with_levels_between
from planner.search.search_context import SearchContext


def search_micro_batches(
    context: SearchContext, model: ModelBlocks, max_axes: int, left_out: str, known: Incumbent | None = None
) -> Searched:
    """The fastest plan that fits with model data at one home, over all stages, micro-batches and meshes.

    Args:
        known: one that fits; it is the answer if none is faster.
        left_out: why neither pipelines nor micro-batches are searched, if they are not.

    Raises:
        InfeasibleError: nothing fits.
    """
    cluster, pins, graph = context.cost.cluster, context.pins, model.folded.graph
    whole = without_micro_batches(cluster, pins, max_axes)
    if left_out or is_whole(pins):
        return _telling(left_out, partial(model.whole(context).searched, whole, known=known))
    cut = model.cut(context)
    in_parts = micro_batched(cluster, pins, graph, len(cut.decision_graph.folded.instances), max_axes)
    whole = dividing(whole, graph) if in_parts else whole
    left_out = why_no_micro_batches(cut.context, cut.decision_graph, in_parts)
    if left_out:
        in_one = tuple(config for config in in_parts if config.mesh.micro_batches == 1)
        return _telling(left_out, partial(_in_whole_or_stages, model.whole(context), whole, cut, in_one, known))
    if whole and in_parts and context.training.tier == "device" and fits_whole(graph, context):
        in_whole = model.whole(context).searched(whole, known=known)
        stages = tuple(config for config in in_parts if config.stages > 1)
        return _in_whole_then_in_stages(in_whole, cut, stages)
    return cut.searched(whole, in_parts, known)


class ModelBlocks:
    """A model in blocks, as it folds and in pieces that stages may have, and what is known of both whatever the mesh,
    the memory and the home of model data: found once.
    """

    def __init__(self, folded: Folded):
        self.folded = folded
        self._pieces: Folded | None = None
        self._decided: dict[int, tuple[DecisionGraph, Levels]] = {}

    def whole(self, context: SearchContext) -> _Blocks:
        """As the model folds."""
        return self._of(context, self.folded)

    def cut(self, context: SearchContext) -> _Blocks:
        """In pieces."""
        if self._pieces is None:
            self._pieces = finer(self.folded, context.rules, stages_wanted(context.pins))
        return self._of(context, self._pieces)

    def _of(self, context: SearchContext, folded: Folded) -> _Blocks:
        if id(folded) not in self._decided:
            self._decided[id(folded)] = _decided(context, folded)
        decision_graph, levels = self._decided[id(folded)]
        return _Blocks(replace(context, levels=levels), decision_graph)


def _decided(context: SearchContext, folded: Folded) -> tuple[DecisionGraph, Levels]:
    """What does not depend on the mesh: decisions, and levels of recomputation."""
    pins = context.pins
    folded = pinned_apart(folded, pins.zero)
    decision_graph = DecisionGraph(folded, context.rules)
    decision_graph.survey()
    levels = named_by_kind(folded, map(pins.levels, ways_of_kinds(folded, pins.zero)))
    if pins.recompute is None:
        levels = with_levels_between(levels, decision_graph, context.cost)
    elif pins.keep:
        levels = keeping(levels, decision_graph, pins.keep)
    return decision_graph, levels


@dataclass(frozen=True)
class _Blocks:
    """A model in blocks, and what a search of plans for them shares."""

    context: SearchContext
    decision_graph: DecisionGraph

    def searched(
        self,
        whole: tuple[ParallelConfig, ...],
        in_parts: tuple[ParallelConfig, ...] = (),
        known: Incumbent | None = None,
    ) -> Searched:
        """The fastest plan that fits, of these configurations without and with micro-batches, or the one known."""
        context, configs = self.context, ParallelConfigs(whole, in_parts)
        if context.training.tier != "device":
            return named(context, search_offload(context, self.decision_graph, configs, known))
        return named(context, fastest(context, self.decision_graph, configs, known))


def _telling(left_out: str, plan: Callable[[], Searched]) -> Searched:
    """The plan, and what was left out and why; the latter also where there is none."""
    try:
        return replace(plan(), left_out=left_out)
    except InfeasibleError as error:
        if not left_out:
            raise
        raise InfeasibleError(f"{error} Not looked at: {left_out}.", error.excess_bytes) from error


def _in_whole_or_stages(
    blocks: _Blocks,
    whole: tuple[ParallelConfig, ...],
    cut: _Blocks,
    stages: tuple[ParallelConfig, ...],
    known: Incumbent | None,
) -> Searched:
    """The fastest plan of those without micro-batches; where none fits, or is allowed, of pipelines that the whole
    batch passes at once.
    """
    if not whole:
        return cut.searched((), stages, known)
    try:
        return blocks.searched(whole, known=None if known is None or known.config.stages > 1 else known)
    except InfeasibleError:
        if not stages:
            raise
        return cut.searched((), stages, known)


def _in_whole_then_in_stages(known: Searched, cut: _Blocks, stages: tuple[ParallelConfig, ...]) -> Searched:
    """The fastest plan of configurations without micro-batches, which is known, and of pipelines.

    Where memory decides nothing that order is quick: the former are few, and their best plan bounds the others.
    Micro-batches without stages would only save memory: every operator starts so many times as often on as many times
    less, what communicates does too, and gradients are hidden behind one backward of many.
    """
    if not stages:
        return known
    found = branch_and_bound(cut.context, cut.decision_graph, ParallelConfigs((), stages), known.best)
    assert isinstance(found, Searched)
    is_known = found.best is known.best
    best = known if is_known else named(cut.context, found)
    rows = sorted((*known.candidates, *found.candidates), key=partial(standing, best.evaluation.time_s))
    return replace(best, candidates=tuple(rows)).above(min(known.bound_s, found.bound_s))


def fits_whole(graph: Graph, context: SearchContext) -> bool:
    """Whether a device has room for all that a step reads and makes, with all gradients, and for optimizer state: then
    every plan fits.
    """
    size_bytes = sum((2 if tensor.grad else 1) * tensor.size_bytes for node in graph.nodes for tensor in node.results)
    trained = sum(leaf.results[0].numel for leaf in graph.leaves if leaf.op == "param" and leaf.results[0].grad)
    return size_bytes + context.training.optimizer_bytes_per_element * trained <= context.limit_bytes
