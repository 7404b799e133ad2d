"""Checks that every rank was given the same model, plan and arguments, before collectives depend on it.

What ranks do differently would hang later, or go wrong without a word where rank 0's is taken for all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from autopar.capture.capture import LossFn
from autopar.driver.outputs import Outputs
from autopar.driver.trace import Traced, trace
from autopar.emit.initialization import Source
from autopar.runtime.data.agreement import VARIABLE
from planner.base.errors import PlanError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.ir.graph import Graph
from planner.plan.plan import Plan

Given = Mapping[str, str]
"""What a rank was given, in words: kind of thing -> which."""


def arguments(
    model: nn.Module,
    cluster: ClusterSpec,
    plan: Plan | None,
    pins: Pins,
    training: Training,
    outputs: Outputs | None,
    pipelines: bool,
    source: Source | None,
    seed: int,
) -> Given:
    """What is known before the model is captured.

    Of a cluster only what ranks act on: its figures may be measured, by every rank for itself.
    """
    levels = " x ".join(str(level.size) for level in cluster.levels)
    return {
        "cluster": f"{cluster.name!r} of {levels} devices of kind {cluster.device.kind!r} over {cluster.backend}",
        "plan": "none" if plan is None else plan.digest(),
        "pin": json.dumps(pins.to_dict()),  # of globs the first that matches counts
        "optimizer_bytes_per_element": str(training.optimizer_bytes_per_element),
        "outputs argument": "left out" if outputs is None else str(outputs),
        "pipelines flag": str(pipelines),
        "model": "one on the meta device" if any(p.is_meta for p in model.parameters()) else "one with weights",
        "state_dict": "none" if source is None else "one",
        "seed": str(seed),
        f"{VARIABLE} setting": os.environ.get(VARIABLE) or "none",
    }


def captured(graph: Graph, facts: Mapping[str, Any]) -> Given:
    """What is known then.

    Args:
        facts: as :func:`planner.plan.document.fingerprint.model_facts` has them.
    """
    inputs = [leaf for leaf in graph.leaves if leaf.op == "input"]
    forms = [f"{leaf.target} {leaf.results[0].dtype} {'x'.join(map(str, leaf.results[0].shape))}" for leaf in inputs]
    return {
        "example input": ", ".join(forms),
        "model": "{class} with {parameters} parameters in {mode} mode, fingerprint {fingerprint}".format(**facts),
    }


def check_alike(mine: Given) -> None:
    """Compare with what all other ranks were given, in one collective that all of them make.

    Raises:
        PlanError: it differs; on every rank.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for what in (what for what in mine if all(what in each for each in everyone)):
        found = [each[what] for each in everyone]
        others = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
        if others:
            walked = " (or, where the model's code calls its layers in the order of a set, walk sorted(...) of it)"
            raise PlanError(
                f"ranks were given different {what}s: rank 0 has {found[0]}, rank {others[0]} has {found[others[0]]}; "
                f"ranks {others} differ from rank 0: give every rank the same{walked if what == 'model' else ''}"
            )


def traced_alike(
    model: nn.Module,
    example_args: tuple[Any, ...] | None,
    example_kwargs: Mapping[str, Any] | None,
    loss_fn: LossFn | None,
) -> Traced:
    """Capture; an error where ranks do not all find the same."""
    try:
        traced = trace(model, example_args, example_kwargs, loss_fn)
    except Exception as error:
        check_alike({"model": f"one that cannot be captured ({type(error).__name__})"})
        raise
    check_alike(captured(traced.graph, traced.facts))
    return traced


def planned_on_rank_0(make: Callable[[], Plan]) -> Plan:
    """Plan once; an error is raised on every rank."""
    message: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            message = [make().to_dict()]
        except Exception as error:
            message = [error]
    dist.broadcast_object_list(message, src=0)
    if isinstance(message[0], Exception):
        raise message[0]
    return Plan.from_dict(message[0])
