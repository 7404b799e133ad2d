"""From a graph and a cluster to the best plan, with what is proved about it.

The cluster's parallel configurations are evaluated best first (:mod:`planner.search.branch_and_bound`), within a limit
to a sum of bytes; what is found is simulated, and the limit moved to what then fits
(:mod:`planner.search.memory_fitting`). Where the home of model data is not the device, there is more to choose
(:mod:`planner.search.offload_search`).

What does not depend on the mesh is found once (:mod:`planner.formulation.decisions`). Ctrl-C ends a search with
:class:`KeyboardInterrupt` and leaves nothing behind; to get the best plan so far instead, give a time limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from planner.base.errors import InfeasibleError, InputError, PinError
from planner.cost.cluster import ClusterSpec
from planner.cost.model import CostModel
from planner.formulation.constraints.mesh_candidates import MAX_AXES
from planner.formulation.constraints.pins import Pins
from planner.formulation.constraints.zero import pinned_apart, ways_of_kinds
from planner.formulation.decisions import DecisionGraph
from planner.formulation.remat.levels import Levels, named_by_kind
from planner.formulation.strategies import rules_of
from planner.formulation.training import Training
from planner.ir.folding import Folded, fold, fold_off
from planner.ir.graph import Graph
from planner.search.axis_names import named
from planner.search.block_splitting import finer
from planner.search.branch_and_bound import ParallelConfigs, Searched, branch_and_bound
from planner.search.candidate_bounds import Candidate, Progress, SearchContext
from planner.search.left_out import is_whole, why_no_micro_batches, why_no_pipelines
from planner.search.memory_fitting import memory_feasible, using_headroom
from planner.search.offload_search import check_offloads, search_offload
from planner.search.parallel_config import ParallelConfig, dividing, micro_batched, stages_wanted, without_micro_batches
from planner.search.remat_selection import keeping, with_levels_between

GAP = 0.001
"""Part of a step that a plan's proof leaves open where nobody asks for another: to close it takes most of the time."""
FIRST = 0.5
"""Part of the time after which proofs give way to a search for a plan that takes the room of the one found."""


def search(
    graph: Graph,
    cluster: ClusterSpec,
    pins: Pins,
    training: Training,
    *,
    folding: bool = True,
    max_axes: int = MAX_AXES,
    time_limit_s: float = 60.0,
    gap: float = 0.0,
    progress: Progress | None = None,
) -> Searched:
    """The fastest plan that fits the cluster's memory, over all stages, micro-batches and meshes that the pins allow;
    see :mod:`planner.search.parallel_config`, and :mod:`planner.search.left_out` for models that leave some out.

    A mesh that is not pinned has up to ``max_axes`` axes, at most three, along the levels of the cluster; what is
    proved is proved of these. With three an operator has up to a thousand ways to run, and to bound a mesh takes about
    ten times as long as with two.
    The same graph, cluster and pins give the same plan in every process, unless the time limit cuts the search short.

    Args:
        gap: what is bounded is not searched where no plan can be faster by more than this part of the best plan's time.

    Raises:
        InputError: the time limit is not positive, or the gap is no part.
        PinError: the pins do not fit the model or the cluster.
        ClusterError: the model cannot be divided among so many devices at all.
        InfeasibleError: nothing fits in memory; says by how much, and what would.
    """
    check_time_limit(time_limit_s)
    check_gap(gap)
    check_axes(max_axes)
    start = time.monotonic()
    training = replace(training, tier=pins.tier, update=pins.update, activations=pins.activations or 0)
    if training.tier != "device":
        check_offloads(cluster, pins)
    if not folding and pins.micro_batched:
        raise InputError(
            "folding is off, and pipelines and micro-batches are cut between folded blocks: plan without one"
        )
    left_out = why_no_pipelines(graph, pins, folding)
    if (left_out or is_whole(pins)) and (pins.schedule or pins.virtual_stages):
        reason = f"left out are {left_out}" if left_out else "pins 'pipeline' and 'micro_batches' are 1"
        raise PinError(f"pins 'schedule' and 'virtual_stages' are a pipeline's, and {reason}")
    folded = fold(graph) if folding else fold_off(graph)
    rules = rules_of(graph, folded)
    deadline, levels = start + time_limit_s, Levels(())
    context = SearchContext(CostModel(cluster), training, rules, pins, levels, deadline, progress, gap=gap)
    context.seconds.update(fold=time.monotonic() - start, build=0.0, solve=0.0)
    whole = without_micro_batches(cluster, pins, max_axes)
    if left_out or is_whole(pins):
        return _telling(left_out, partial(_Blocks.of(context, folded).searched, whole))
    cut = _Blocks.of(context, finer(folded, rules, stages_wanted(pins)))
    in_parts = micro_batched(cluster, pins, graph, len(cut.decision_graph.folded.instances), max_axes)
    whole = dividing(whole, graph) if in_parts else whole
    left_out = why_no_micro_batches(cut.context, cut.decision_graph, in_parts)
    if left_out:
        in_one = tuple(config for config in in_parts if config.mesh.micro_batches == 1)
        return _telling(left_out, partial(_in_whole_or_stages, context, folded, whole, cut, in_one))
    if whole and in_parts and training.tier == "device" and _fits_whole(graph, context):
        stages = tuple(config for config in in_parts if config.stages > 1)
        return _in_whole_then_in_stages(_Blocks.of(context, folded).searched(whole), cut, stages)
    return cut.searched(whole, in_parts)


@dataclass(frozen=True)
class _Blocks:
    """A model in blocks, and what a search of plans for them shares."""

    context: SearchContext
    decision_graph: DecisionGraph

    @staticmethod
    def of(context: SearchContext, folded: Folded) -> _Blocks:
        """What does not depend on the mesh."""
        pins = context.pins
        folded = pinned_apart(folded, pins.zero)
        decision_graph = DecisionGraph(folded, context.rules)
        decision_graph.survey()
        levels = named_by_kind(folded, map(pins.levels, ways_of_kinds(folded, pins.zero)))
        if pins.recompute is None:
            levels = with_levels_between(levels, decision_graph, context.cost)
        elif pins.keep:
            levels = keeping(levels, decision_graph, pins.keep)
        return _Blocks(replace(context, levels=levels), decision_graph)

    def searched(self, whole: tuple[ParallelConfig, ...], in_parts: tuple[ParallelConfig, ...] = ()) -> Searched:
        """The fastest plan that fits, of these configurations without and with micro-batches."""
        context, configs = self.context, ParallelConfigs(whole, in_parts)
        if context.training.tier != "device":
            return named(context, search_offload(context, self.decision_graph, configs))
        first = context
        if not in_parts and context.pins.recompute is None:
            now = time.monotonic()
            first = replace(first, deadline=now + FIRST * (context.deadline - now))
        found = memory_feasible(first, self.decision_graph, configs)
        return named(context, using_headroom(context, self.decision_graph, configs, found))


def _telling(left_out: str, plan: Callable[[], Searched]) -> Searched:
    """The plan, and what was left out and why; the latter also where there is none."""
    try:
        return replace(plan(), left_out=left_out)
    except InfeasibleError as error:
        if not left_out:
            raise
        raise InfeasibleError(f"{error} Not looked at: {left_out}.", error.excess_bytes) from error


def _in_whole_or_stages(
    context: SearchContext,
    folded: Folded,
    whole: tuple[ParallelConfig, ...],
    cut: _Blocks,
    stages: tuple[ParallelConfig, ...],
) -> Searched:
    """The fastest plan of those without micro-batches; where none fits, or is allowed, of pipelines that the whole
    batch passes at once.
    """
    if not whole:
        return cut.searched((), stages)
    try:
        return _Blocks.of(context, folded).searched(whole)
    except InfeasibleError:
        if not stages:
            raise
        return cut.searched((), stages)


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
    found = found if found.staged is None else named(cut.context, found)
    best = known if found.staged is None else found
    rows = sorted((*known.candidates, *found.candidates), key=partial(_standing, best.evaluation.time_s))
    return replace(best, candidates=tuple(rows)).above(min(known.bound_s, found.bound_s))


def _standing(time_s: float, row: Candidate) -> tuple[bool, float, float]:
    """Sorts candidates: those that may have the fastest plan first; see
    :func:`planner.search.branch_and_bound.completed`.
    """
    return row.status == "infeasible", min(row.objective_s, max(row.bound_s, time_s)), row.objective_s


def _fits_whole(graph: Graph, context: SearchContext) -> bool:
    """Whether a device has room for all that a step reads and makes, with all gradients, and for optimizer state."""
    size_bytes = sum((2 if tensor.grad else 1) * tensor.size_bytes for node in graph.nodes for tensor in node.results)
    trained = sum(leaf.results[0].numel for leaf in graph.leaves if leaf.op == "param" and leaf.results[0].grad)
    return size_bytes + context.training.optimizer_bytes_per_element * trained <= context.limit_bytes


def check_time_limit(seconds: float) -> None:
    """Raises :class:`InputError` unless ``seconds`` is a number above 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise InputError(f"time_limit_s is {seconds!r}; give seconds, more than 0")


def check_gap(gap: float) -> None:
    """Raises :class:`InputError` unless ``gap`` is a number from 0 to below 1."""
    if isinstance(gap, bool) or not isinstance(gap, (int, float)) or not 0 <= gap < 1:
        raise InputError(f"gap is {gap!r}; give the part of a step that need not be proved, at least 0 and below 1")


def check_axes(count: int) -> None:
    """Raises :class:`InputError` unless ``count`` is a number of axes that a mesh may have."""
    if type(count) is not int or count not in (1, 2, 3):
        raise InputError(f"max_axes is {count!r}; give how many axes a mesh may have at most: 1, 2 or 3")
