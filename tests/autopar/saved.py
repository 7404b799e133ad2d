"""What processes of ``test_activations.py`` do beside what those of ``test_offload.py`` do."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.runtime.host.gradient_buckets import is_held_elsewhere
from autopar.runtime.spmd.mesh import whole_of
from planner.analysis.offload.chunks import SAVED
from planner.analysis.offload.step_timing import saved_homes
from planner.base.errors import PlanError
from planner.plan.plan import Plan
from planner.solve.transfers import ItemUse, fewest_bytes
from tests.autopar.carried import loss_of, model_of, parallel
from tests.autopar.models import MODELS


def draws_as_without(name: str, document: dict[str, Any], plain: dict[str, Any], autocast: bool) -> None:
    """With dropout gradients are those without offload, to the bit, also in bfloat16 under autocast; with micro-batches
    a tied parameter's to rounding.
    """
    model, batch = MODELS[name].build()
    plan = Plan.from_dict(document)
    every = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    tied = {key for key, each in model.named_parameters() if every.count(id(each)) > 1 and plan.pipeline is not None}
    moving, offload = parallel(copy.deepcopy(model), plan, batch)
    held = autopar.parallelize(copy.deepcopy(model), plan.cluster, plan=Plan.from_dict(plain), example_kwargs=batch)
    for _ in range(2):
        for m in (moving, held):
            m.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = loss_of(m, batch)
            loss.backward()
        found = dict(moving.named_parameters())
        for key, parameter in held.named_parameters():
            mine, theirs = found[key].grad, parameter.grad
            assert mine is not None and theirs is not None
            tolerance = {"rtol": 1e-5, "atol": 1e-6} if key in tied else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(whole_of(mine), whole_of(theirs), **tolerance, msg=key)
    planned = {way: size for (_, way), size in offload.transfers.table.bytes_moved.items()}
    if autocast:  # what is saved is smaller than planned
        data = sum(chunk.bytes for chunk in offload.gradients.values())
        assert data + (planned["evict"] - data) // 3 < offload.transfers.bytes_moved["evict"] < planned["evict"]
    else:
        assert offload.transfers.bytes_moved == planned


def refuses_what_comes_too_late(name: str, document: dict[str, Any]) -> None:
    """A transfer schedule in which an item is back for another block than the one that saved it."""
    model, batch = MODELS[name].build()
    plan = Plan.from_dict(document)
    trace = plan.transfer_schedule.trace
    item = next(item for item in trace.items if item.name.startswith(SAVED))
    made, back = item.uses
    late = replace(item, uses=(made, ItemUse(trace.moments[trace.place[back.moment] + 1].name)))
    items = tuple(late if each is item else each for each in trace.items)
    table = fewest_bytes(replace(trace, items=items), plan.transfer_schedule.budget_bytes)
    with pytest.raises(PlanError, match="of other chunks or blocks than its layouts make"):
        parallel(model, replace(plan, transfer_schedules=(table,)), batch)


def takes_no_more_of_the_host(document: dict[str, Any]) -> None:
    """Memory at home is made before the first step, as much as was planned, and none after it."""
    model, batch = model_of("mlp")
    pmodel, offload = parallel(model, Plan.from_dict(document), batch)
    homes = next(iter(offload.saved._chunks.values()))._homes
    assert sorted(each.numel() for each in homes._made.values()) == sorted(saved_homes(offload.transfers.table))
    home, made = offload.engine.home, list[str]()

    def counted(size: int, what: str) -> torch.Tensor:
        made.append(what)
        return home(size, what)

    offload.engine.home = counted  # type: ignore[method-assign]
    for _ in range(2):
        with torch.no_grad():
            loss_of(pmodel, batch)
        loss_of(pmodel, batch).backward()
        assert not any(is_held_elsewhere(each) for each in homes._made.values())
        pmodel.zero_grad()
    assert not [what for what in made if "gradients" not in what]
