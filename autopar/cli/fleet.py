"""Step times of the models that a jobs file names, by planning each for every part of the cluster that it may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from autopar.cli import arguments, model_loading
from autopar.driver.trace import trace
from planner.base.errors import AutoparError, FleetError, InfeasibleError
from planner.cost.cluster import ClusterSpec
from planner.fleet.curves import planned_steps
from planner.fleet.job import Allocation
from planner.fleet.jobs_file import FleetFile, StatedJob
from planner.ir.graph import Graph

SEQUENCE = 512


def planned(
    file: FleetFile, cluster: ClusterSpec, time_limit_s: float, say: Callable[[str], object]
) -> dict[str, tuple[list[Allocation], int]]:
    """Step times and bytes of state of every job that names a model.

    Args:
        time_limit_s: of each search; there is one for each number of devices.

    Raises:
        FleetError: a model cannot be loaded or captured; says which.
        InfeasibleError: one fits on no part of the cluster.
    """
    found = {}
    for job in (job for job in file.jobs if job.model is not None):
        say(f"planning {job.name}")
        try:
            model, inputs = _loaded(job)
            steps = [*planned_steps(job, cluster, partial(_captured, model, inputs), time_limit_s)]
        except InfeasibleError:
            raise
        except AutoparError as error:
            raise FleetError(f"job {job.name!r}: {error}") from error
        state = sum(each.numel() * (each.element_size() + job.optimizer_bytes) for each in model.parameters())
        found[job.name] = steps, state
    return found


def _loaded(job: StatedJob) -> tuple[nn.Module, Mapping[str, Any]]:
    """A job's model and inputs of some batch."""
    assert job.model is not None
    dtype = None if job.dtype is None else arguments.read_dtype(job.dtype, "dtype")
    sizes = job.limits[1], job.sequence or SEQUENCE
    loaded = model_loading.load(arguments.read_model(job.model, dtype), None, None, {}, sizes, dtype=dtype)
    if not any(isinstance(each, Tensor) and each.dim() for each in pytree.tree_leaves(loaded.inputs)):
        raise FleetError(f"{job.model!r} gives no example inputs: return (model, {{input name: tensor}}) from it")
    return loaded.model, loaded.inputs or {}


def _captured(model: nn.Module, inputs: Mapping[str, Any], batch: int) -> tuple[Graph, Mapping[str, Any]]:
    """The model's graph where dim 0 of every input is of so many samples."""
    tensors = [each for each in pytree.tree_leaves(inputs) if isinstance(each, Tensor) and each.dim()]
    given = tensors[0].shape[0]
    resized = pytree.tree_map_only(
        Tensor, lambda t: t[:1].expand(batch, *t.shape[1:]) if t.dim() and t.shape[0] == given else t, dict(inputs)
    )
    traced = trace(model, example_kwargs=resized)
    return traced.graph, traced.facts
