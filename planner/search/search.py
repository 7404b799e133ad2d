"""From a graph and a cluster to the best plan, with what is proved about it.

The cluster's parallel configurations are evaluated best first (:mod:`planner.search.branch_and_bound`). In which order,
and what of them a model leaves out, says :mod:`planner.search.micro_batch_search`. Where the home of model data is not
the device, there is more to choose (:mod:`planner.search.offload_search`); so it is where nothing fits on the device,
or a step is shorter so (:mod:`planner.search.home_search`).

What does not depend on the mesh is found once (:mod:`planner.formulation.decisions`). Ctrl-C ends a search with
:class:`KeyboardInterrupt` and leaves nothing behind; to get the best plan so far instead, give a time limit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from planner.base.errors import InputError
from planner.cost.cluster import ClusterSpec
from planner.cost.model import CostModel
from planner.formulation.block_facts import BlockFacts
from planner.formulation.constraints.context import with_ulysses
from planner.formulation.constraints.dtypes import check_float8, check_reduce_dtype
from planner.formulation.constraints.mesh_candidates import MAX_AXES
from planner.formulation.constraints.pins import Pins
from planner.formulation.remat.levels import Levels
from planner.formulation.strategies import rules_of
from planner.formulation.training import Training
from planner.ir.folding import fold, fold_off
from planner.ir.graph import Graph
from planner.search.branch_and_bound import Searched
from planner.search.home_search import search_homes
from planner.search.left_out import check_schedule, check_update, why_no_pipelines
from planner.search.micro_batch_search import ModelBlocks, search_micro_batches
from planner.search.offload_search import check_offloads
from planner.search.process_pool import ProcessPool
from planner.search.search_context import Progress, SearchContext

TIME_LIMIT_S = 20.0
"""Seconds of a search where nobody asks for others."""
GAP = 0.01
"""Part of a step that a plan's proof leaves open where nobody asks for another: to close it takes most of the time."""


def search(
    graph: Graph,
    cluster: ClusterSpec,
    pins: Pins,
    training: Training,
    *,
    folding: bool = True,
    max_axes: int = MAX_AXES,
    time_limit_s: float = TIME_LIMIT_S,
    gap: float = 0.0,
    progress: Progress | None = None,
) -> Searched:
    """The fastest plan that fits the cluster's memory, over all stages, micro-batches and meshes that the pins allow;
    see :mod:`planner.search.parallel_config`, and :mod:`planner.search.left_out` for models that leave some out.

    A mesh that is not pinned has up to ``max_axes`` axes, at most three, along the levels of the cluster; what is
    proved is proved of these. With three an operator has up to a thousand ways to run, and to bound a mesh takes about
    ten times as long as with two.
    The same graph, cluster and pins give the same plan in every process, unless the time limit cuts the search short or
    a gap is left: how long the best plan is refined then goes by time.

    Args:
        gap: what is bounded is not searched where no plan can be faster by more than this part of the best plan's time.

    Raises:
        InputError: the time limit is not positive, or the gap is no part.
        PinError: the pins do not fit the model or the cluster.
        InfeasibleError: nothing fits in memory; says by how much, and what would.
    """
    with begin_search(
        graph,
        cluster,
        pins,
        training,
        folding=folding,
        max_axes=max_axes,
        time_limit_s=time_limit_s,
        gap=gap,
        progress=progress,
    ) as begun:
        return search_homes(begun.context, graph, begun.plan)


@dataclass(frozen=True)
class SearchBegun:
    """A search before its first mesh: its ``context``, and ``plan``, which finds the fastest plan within one; it may be
    given one that fits as ``known``.
    """

    context: SearchContext
    plan: Callable[..., Searched]


@contextlib.contextmanager
def begin_search(
    graph: Graph,
    cluster: ClusterSpec,
    pins: Pins,
    training: Training,
    *,
    folding: bool = True,
    max_axes: int = MAX_AXES,
    time_limit_s: float = TIME_LIMIT_S,
    gap: float = 0.0,
    progress: Progress | None = None,
) -> Iterator[SearchBegun]:
    """Fold the graph, and say what is searched; arguments and errors are those of :func:`search`.

    Used as a context, at the end of which the processes that evaluate its candidates end.
    """
    check_time_limit(time_limit_s)
    check_gap(gap)
    check_axes(max_axes)
    start = time.monotonic()
    check_update(pins)
    check_reduce_dtype(pins, graph)
    if pins.tier != "device":
        check_offloads(cluster, pins)
    if not folding and pins.micro_batched:
        raise InputError(
            "folding is off, and pipelines and micro-batches are cut between folded blocks: plan without one"
        )
    left_out = why_no_pipelines(graph, pins, folding)
    check_schedule(pins, left_out)
    pins, folded = with_ulysses(pins, graph, cluster), fold(graph) if folding else fold_off(graph)
    training = replace(
        training,
        tier=pins.tier,
        update=pins.update,
        activations=pins.activations or 0,
        reduce_dtype=pins.reduce_dtype,
        float8=pins.float8,
    )
    deadline, levels = start + time_limit_s, Levels(())
    rules, plan = rules_of(graph, folded), partial(search_micro_batches, max_axes=max_axes, left_out=left_out)
    check_float8(pins, graph, BlockFacts(folded, rules), cluster)
    seconds = {"fold": time.monotonic() - start, "build": 0.0, "solve": 0.0}
    with ProcessPool() as pool:
        context = SearchContext(
            CostModel(cluster), training, rules, pins, levels, deadline, progress, seconds, gap=gap, pool=pool
        )
        yield SearchBegun(context, partial(plan, model=ModelBlocks(folded)))


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
