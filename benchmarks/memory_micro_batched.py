"""Predicted against observed memory of micro-batched steps, stage by stage.

Every model of the zoo that is trained with micro-batches, under several plans: each rank of the pipeline in turn takes
two steps of AdamW and then another while what is alive is counted, in a process group that moves no data. Observed is
the fullest rank's peak; predicted is what the plan says. ``python -m benchmarks memory`` runs this too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.driver.plan import assign, plan_traced, staged
from autopar.driver.trace import Traced
from autopar.emit.build import build
from autopar.runtime.spmd.interface import LeafSpec
from autopar.runtime.spmd.mesh import pipeline_mesh
from autopar.verification.memory_meter import LiveBytes, held_tensors
from autopar.verification.simulator import fake_process_group
from benchmarks.memory import Compared, backward, zoo
from planner.base.errors import AutoparError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.ir.layout import local_shape
from planner.plan.plan import Plan

PLANS: tuple[tuple[int, Mapping[str, Any]], ...] = (
    *(
        (2, {"data": 2, "micro_batches": 4, "zero": zero, "recompute": level})
        for zero, level in itertools.product((0, 2, 3), ("none", "full"))
    ),
    *(
        (2, {"pipeline": 2, "micro_batches": 4, "schedule": schedule, "recompute": level})
        for schedule, level in itertools.product(("gpipe", "1f1b", "zero_bubble"), ("none", "full"))
    ),
    *((2, {"pipeline": 2, "micro_batches": 4, "schedule": schedule}) for schedule in ("zbv", "2bw")),
    (4, {"pipeline": 2, "data": 2, "micro_batches": 4, "schedule": "gpipe", "zero": 2}),
    (4, {"pipeline": 2, "data": 2, "micro_batches": 4, "schedule": "1f1b", "zero": 3}),
    (4, {"pipeline": 2, "tensor": 2, "micro_batches": 4, "schedule": "1f1b"}),
)


def compare() -> list[Compared]:
    """Every model under every plan that applies to it."""
    found = []
    for name, model, traced in zoo():
        for ranks, pins in PLANS:
            try:
                plan = plan_traced(traced, ClusterSpec.local(ranks), Pins.parse(pins), Training())
            except AutoparError:
                continue  # no micro-batched step, or no block that recomputes
            seen = max(observed_peak(model, traced, plan, rank) for rank in range(pins.get("pipeline", 1)))
            text = ", ".join(f"{key} {value}" for key, value in pins.items())
            found.append(Compared(name, text, plan.predicted.peak_bytes, seen))
            print(f"{name}, {text}: {found[-1].error:+.1%}", flush=True)
    return found


def observed_peak(model: torch.nn.Module, traced: Traced, plan: Plan, rank: int = 0) -> int:
    """Peak bytes of a step of a micro-batched plan on one rank of its pipeline, the first of its stage."""
    assignment, micro_batched = staged(plan, assign(traced, plan))
    assert micro_batched is not None
    mesh, stages = assignment.space.mesh.micro_batched(1), micro_batched.schedule.ranks

    def part(leaf: LeafSpec) -> Tensor:
        shape = local_shape(leaf.shape, leaf.layout, mesh.sizes)
        assert shape is not None
        return torch.zeros(shape, dtype=leaf.dtype)

    with fake_process_group(mesh.size * stages, rank * mesh.size):
        made, pipeline = pipeline_mesh(mesh, "cpu", stages)
        micro_batched = replace(micro_batched, pipeline=pipeline)
        pmodel = build(model, traced.captured, assignment, made, 0, part, 0, micro_batched)
        optimizer = pmodel.optimizer(torch.optim.AdamW)
        leaves = {leaf.name: part(leaf) for leaf in pmodel.interface.leaves if leaf.kind == "input"}
        with LiveBytes([*held_tensors(pmodel, optimizer), *leaves.values()]) as live:
            for _ in range(2):  # 2bw hands gradients over a step late
                backward(pmodel, leaves)
                optimizer.step()
                optimizer.zero_grad()
            live.peak = live.now  # with what one step leaves to the next
            backward(pmodel, leaves)
    return live.peak
