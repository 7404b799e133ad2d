"""Arguments of the public functions: checked before anything is captured, with errors that name what to give."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.tensor import DTensor

from planner.base.errors import ClusterError, InputError, PlanError, PlanWarning
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.plan.plan import Plan
from planner.search.search import check_axes, check_gap, check_time_limit
from planner.search.search_context import Progress

PARALLEL = "ParallelModule"
_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",  # of torch.compile
}
"""Classes that stand around a model, and the attribute that has it; by name, so that none need be imported, nor what
:data:`PARALLEL` runs with.
"""

Fold = Literal["capture", "graph", "off"]


def check_arguments(
    model: object,
    cluster: object,
    example_args: object = None,
    example_kwargs: object = None,
    pin: Mapping[str, Any] | None = None,
) -> None:
    """Refuse arguments of the wrong kind before anything is captured.

    Raises:
        InputError, ClusterError, PinError: names the argument and what it should be.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {_kind(model)}; give a torch.nn.Module")
    _check_unwrapped(model)
    check_cluster(cluster)
    if example_args is not None and not isinstance(example_args, (tuple, list)):
        raise InputError(f"example_args is {_kind(example_args)}; give a tuple of positional inputs: example_args=(x,)")
    if example_kwargs is not None and not isinstance(example_kwargs, Mapping):
        raise InputError(f"example_kwargs is {_kind(example_kwargs)}; give a dict of inputs by name")
    for path, value in pytree.tree_flatten_with_path((example_args or (), dict(example_kwargs or {})))[0]:
        if isinstance(value, torch.Tensor) and not value.is_nested and value.shape[:1] == (0,):
            raise InputError(
                f"input {pytree.keystr(path[1:])} has shape {tuple(value.shape)}, a batch of 0: give one global batch"
            )
    Pins.parse(pin)


def check_cluster(cluster: object) -> None:
    """Raises :class:`ClusterError` unless it is one."""
    if not isinstance(cluster, ClusterSpec):
        raise ClusterError(
            f"cluster is {_kind(cluster)}; give a ClusterSpec, e.g. ClusterSpec.local(4), "
            "ClusterSpec.preset('dgx-h100', nodes=4) or ClusterSpec.load('cluster.yaml')"
        )


def _check_unwrapped(model: nn.Module) -> None:
    """Refuse a model that is parallelized or compiled already; raises :class:`InputError` that says what to give."""
    kind = type(model).__name__
    if kind == PARALLEL:
        raise InputError("model is a parallel module already: give the original, pmodel.module")
    for wrapper, inside in _WRAPPERS.items():
        if kind == wrapper:
            raise InputError(f"model is wrapped in {kind}, and autopar does what that is for: give model.{inside}")
    sharded = next((name for name, tensor in model.named_parameters() if isinstance(tensor, DTensor)), None)
    if sharded is not None:
        raise InputError(
            f"parameter {sharded!r} of {kind} is a DTensor, so that the model is sharded already (fully_shard, "
            "parallelize_module, device_map, tp_plan): give it as it is on one device, or on the meta device"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(f"model is a {kind} of torch.jit, whose code cannot be captured: give the module it is of")


def check_search(fold: str, time_limit_s: float, gap: float, max_axes: int) -> None:
    """Refuse settings of a search that it does not know or cannot obey; raises :class:`InputError`."""
    if fold not in get_args(Fold):
        raise InputError(
            f"fold is {fold!r}; it is 'capture' (trace and decide once per distinct block), 'graph' (trace the whole "
            "model, decide once per distinct block) or 'off' (decide for every operator)"
        )
    check_time_limit(time_limit_s)
    check_gap(gap)
    check_axes(max_axes)


def check_progress(progress: object) -> None:
    """Refuse what is no function to call with a line of text; raises :class:`InputError`."""
    if progress is not None and not callable(progress):
        raise InputError(f"progress is {_kind(progress)}; give a function that takes a line of text, such as print")


def check_source(state_dict: object, seed: object) -> None:
    """Refuse what is no state dict nor a path, and no seed; raises :class:`InputError`."""
    if state_dict is not None and not isinstance(state_dict, (Mapping, str, os.PathLike)):
        raise InputError(
            f"state_dict is {_kind(state_dict)}; give the original's, model.state_dict(), or the path of a file of it"
        )
    if type(seed) is not int:
        raise InputError(f"seed is {seed!r}; give a whole number, the same on every rank")


def check_comparison(mesh: object, rtol: object) -> None:
    """Refuse what is no mesh, and no relative error to allow; raises :class:`InputError`."""
    sizes = mesh.items() if isinstance(mesh, Mapping) else [("", mesh)]
    if mesh is not None and not all(isinstance(n, str) and type(size) is int and size > 0 for n, size in sizes):
        raise InputError(f"mesh is {mesh!r}; give how many ranks each axis has, e.g. {{'data': 2, 'tensor': 2}}")
    if isinstance(rtol, bool) or not isinstance(rtol, (int, float)) or not rtol >= 0:
        raise InputError(f"rtol is {rtol!r}; give the largest relative error to allow, such as 1e-10")


def training_of(optimizer_bytes_per_element: object) -> Training:
    """What training keeps per parameter element; raises :class:`InputError` unless these are bytes, at least 0."""
    given = optimizer_bytes_per_element
    if not isinstance(given, int) or given < 0:
        raise InputError(f"optimizer_bytes_per_element is {given!r}; give bytes, at least 0")
    return Training(given)


def given_plan(plan: object, name: str = "plan", taken: str = "a Plan,") -> Plan:
    """A plan that was given as one, or as the path of its file.

    Args:
        name, taken: of the argument, and what it takes beside a path, in words.

    Raises:
        PlanError: it is neither, or the file holds none.
    """
    if isinstance(plan, (str, os.PathLike)):
        return Plan.load(plan)
    if not isinstance(plan, Plan):
        decoded = " (of what plan.to_dict() gave: Plan.from_dict)" if isinstance(plan, dict) else ""
        raise PlanError(f"{name} is {_kind(plan)}; give {taken} or the path of a file that plan.save wrote{decoded}")
    return plan


def _kind(value: object) -> str:
    return f"{value!r}" if isinstance(value, (str, int, float)) else f"of type {type(value).__name__}"


def warn(notes: Iterable[str]) -> None:
    """Warn of what may not have been meant, on one rank; all from this line, so that Python shows each once."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        for note in notes:
            warnings.warn(note, PlanWarning, stacklevel=1)


def say(progress: Progress | None, text: str) -> None:
    """Report progress, where somebody listens."""
    if progress is not None:
        progress(text)
