"""Arguments of the public functions: checked before anything is captured, with errors that name what to give."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from torch import nn

from planner.base.errors import ClusterError, InputError, PlanError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.plan.plan import Plan
from planner.search.search import check_axes, check_gap, check_time_limit

Progress = Callable[[str], None]
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
    if not isinstance(cluster, ClusterSpec):
        raise ClusterError(
            f"cluster is {_kind(cluster)}; give a ClusterSpec, e.g. ClusterSpec.local(4), "
            "ClusterSpec.preset('dgx-h100', nodes=4) or ClusterSpec.load('cluster.yaml')"
        )
    if example_args is not None and not isinstance(example_args, (tuple, list)):
        raise InputError(f"example_args is {_kind(example_args)}; give a tuple of positional inputs: example_args=(x,)")
    if example_kwargs is not None and not isinstance(example_kwargs, Mapping):
        raise InputError(f"example_kwargs is {_kind(example_kwargs)}; give a dict of inputs by name")
    Pins.parse(pin)


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


def say(progress: Progress | None, text: str) -> None:
    """Report progress, where somebody listens."""
    if progress is not None:
        progress(text)
