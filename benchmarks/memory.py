"""Predicted against observed memory: one rank's emitted program, followed by torch's ``MemTracker``.

Every model of the zoo under several plans: one rank of a fake process group (it moves no data, so one process is
enough) takes a step of fused AdamW, then forward and backward again while ``MemTracker`` counts storages. Observed is
its peak; predicted is what the plan says. ``python -m benchmarks memory`` runs this.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from autopar.driver.plan import plan_traced
from autopar.driver.trace import Traced, trace
from autopar.emit.build import build
from autopar.runtime.module import ParallelModule
from autopar.runtime.spmd.interface import LeafSpec
from autopar.runtime.spmd.mesh import device_mesh
from autopar.verification.simulator import fake_process_group
from planner.base.errors import PinError
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.ir.layout import local_shape
from tests.autopar.models import MODELS

PLANS: tuple[tuple[int, Mapping[str, object]], ...] = (
    (2, {"data": 2}),
    (2, {"tensor": 2}),
    (2, {"data": 2, "zero": 3}),
    (2, {"tensor": 2, "sequence_parallel": True}),
    (4, {"data": 2, "tensor": 2}),
    (4, {"data": 2, "tensor": 2, "zero": 3}),
)
LEVELS = ("none", "selective", "full")


@dataclass(frozen=True)
class Compared:
    """Peak bytes of one model under one plan."""

    model: str
    plan: str
    predicted: int
    observed: int

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.observed - 1


def compare() -> list[Compared]:
    """Every model under every plan that applies to it."""
    found = []
    for name, model, traced in zoo():
        for (ranks, pins), level in itertools.product(PLANS, LEVELS):
            try:
                plan = plan_traced(
                    traced, ClusterSpec.local(ranks), Pins.parse({**pins, "recompute": level}), Training()
                )
            except PinError:
                continue
            assert plan.assignment is not None
            if level != "none" and not plan.assignment.recompute:
                continue  # no block repeats
            seen = observed_peak(model, traced, plan.assignment)
            text = ", ".join(f"{key} {value}" for key, value in pins.items())
            text += f", recompute {level}" if level != "none" else ""
            found.append(Compared(name, text, plan.predicted.peak_bytes, seen))
            print(f"{name}, {text}: {found[-1].error:+.1%}", flush=True)
    return found


def zoo() -> Iterator[tuple[str, torch.nn.Module, Traced]]:
    """Every model, captured."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for name in MODELS:
        model, batch = MODELS[name].build()
        yield name, model, trace(model, None, batch)


def observed_peak(
    model: torch.nn.Module, traced: Traced, assignment: Assignment, master_dtype: torch.dtype | None = None
) -> int:
    """Peak bytes of forward and backward of rank 0, parameters and optimizer state included.

    Args:
        master_dtype: of masters, see :meth:`autopar.runtime.module.ParallelModule.optimizer`.
    """
    mesh = assignment.space.mesh

    def part(leaf: LeafSpec) -> Tensor:
        shape = local_shape(leaf.shape, leaf.layout, mesh.sizes)
        assert shape is not None
        return torch.zeros(shape, dtype=leaf.dtype)

    with fake_process_group(mesh.size):
        pmodel = build(model, traced.captured, assignment, device_mesh(mesh, "cpu"), 0, part)
        optimizer = pmodel.optimizer(torch.optim.AdamW, master_dtype=master_dtype)
        leaves = {leaf.name: part(leaf) for leaf in pmodel.interface.leaves if leaf.kind == "input"}
        backward(pmodel, leaves)
        optimizer.step()
        optimizer.zero_grad()
        tracker = MemTracker()
        tracker.track_external(pmodel, optimizer, *leaves.values(), *pmodel.buckets.tensors)
        with tracker:
            backward(pmodel, leaves)
            snapshots = tracker.get_tracker_snapshot("peak")
    return sum(snapshot["Total"] for snapshot in snapshots.values())


def backward(pmodel: ParallelModule, leaves: Mapping[str, Tensor]) -> None:
    """Forward and backward of the loss, of parts of inputs by name."""
    interface = pmodel.interface
    flat = [
        static if name is None else leaves[name]
        for name, static in zip(interface.input_names, interface.static_inputs, strict=True)
    ]
    args, kwargs = pytree.tree_unflatten(flat, interface.in_spec)
    _loss(pmodel(*args, **kwargs)).backward()


def _loss(outputs: object) -> Tensor:
    return next(t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and not t.shape)


def summary(found: list[Compared]) -> str:
    """One line about everything."""
    errors = [abs(each.error) for each in found]
    return (
        f"{len(found)} plans of {len({each.model for each in found})} models: "
        f"mean error {statistics.mean(errors):.1%}, worst {max(errors):.1%}; "
        f"from {min(each.error for each in found):+.1%} to {max(each.error for each in found):+.1%}"
    )
