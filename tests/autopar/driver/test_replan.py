"""Replanning real models: from a plan's file, with what is wrong said in numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autopar
from autopar.checkpoint.parts import boxes
from autopar.runtime.spmd.mesh import rows_of
from planner.base.errors import InfeasibleError, InputError, PlanError
from planner.ir.elements import elements_of
from planner.ir.layout import Mesh, parse_layout
from tests.autopar.driver.test_plans import Model, cluster

BATCH = {"x": torch.randn(24, 64)}


def test_a_run_is_replanned_from_its_plans_file(tmp_path: Path) -> None:
    model = Model(3)
    plan = autopar.plan(model, cluster(), example_kwargs=BATCH, pin={"data": 4, "zero": 3})
    plan.save(tmp_path / "plan.json")
    found = autopar.replan(tmp_path / "plan.json", model, cluster(3), was=(0, 1, 3), example_kwargs=BATCH)
    assert found.kept is not None and not found.notes
    assert found.kept.plan.digest() == plan.rebind(model, cluster(3), example_kwargs=BATCH).digest()
    assert found.best.plan.predicted.step_time_s <= found.kept.plan.predicted.step_time_s
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert found.best.bill.state_bytes == parameters * (4 + 8)
    assert [rank.was for rank in found.best.bill.ranks] == [0, 1, 3]
    assert found.best.bill.lost_bytes == found.kept.bill.lost_bytes > 0, "the quarter of rank 2"
    again = autopar.replan(plan, model, cluster(3), was=(0, 1, 3), example_kwargs=BATCH)
    assert again.kept is not None and again.best.plan.digest() == found.best.plan.digest()
    assert (again.best.bill, again.kept.bill, again.notes) == (found.best.bill, found.kept.bill, found.notes)

    with pytest.raises(PlanError, match=r"another model|another batch|input x: plan 24x64, model 48x64"):
        autopar.replan(plan, model, cluster(3), example_kwargs={"x": torch.randn(48, 64)})
    with pytest.raises(PlanError, match=r"block: plan 3 x .*, model 2 x"):
        autopar.replan(plan, Model(2), cluster(3), example_kwargs=BATCH)
    with pytest.raises(InputError, match="was has 2 entries, and there are 3 ranks now"):
        autopar.replan(plan, model, cluster(3), was=(0, 1), example_kwargs=BATCH)
    small = cluster(3).model_copy(update={"device": cluster().device.model_copy(update={"memory_bytes": 100_000})})
    with pytest.raises(InfeasibleError, match=r"90,?000 bytes|87\.9 KiB"):
        autopar.replan(plan, model, small, example_kwargs=BATCH)


@pytest.mark.parametrize("text", ["S(0) S(1)", "S(1,3) R", "S(0) S(0,6)", "S(1) S(0)"])
def test_a_bill_and_a_checkpoint_cut_tensors_alike(text: str) -> None:
    mesh, layout = Mesh.of(a=2, b=3), parse_layout(text, 2)
    for rank in range(6):
        found = boxes(rows_of((36, 36), layout, mesh, rank))
        runs = [
            tuple(sorted({(box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for box in found})) for dim in (0, 1)
        ]
        assert elements_of((36, 36), layout, mesh, rank) == tuple(runs)
