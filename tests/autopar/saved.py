"""What processes of ``test_activations.py`` do beside what those of ``test_offload.py`` do."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.runtime.mesh import whole_of
from planner.chunks import SAVED
from planner.errors import PlanError
from planner.plan import Plan
from planner.timetable import Use, fewest_bytes
from tests.autopar.carried import loss_of, parallel
from tests.autopar.models import MODELS


def draws_as_without(name: str, document: dict[str, Any], plain: dict[str, Any], autocast: bool) -> None:
    """With dropout gradients are those without offload, to the bit, also in bfloat16 under autocast."""
    model, batch = MODELS[name].build()
    plan = Plan.from_dict(document)
    moving, carrier = parallel(copy.deepcopy(model), plan, batch)
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
            assert torch.equal(whole_of(mine), whole_of(theirs)), key
    planned = {way: size for (_, way), size in carrier.table.bytes_moved.items()}
    if autocast:  # what is saved is smaller than planned
        data = sum(chunk.bytes for chunk in carrier._gradients.values())
        assert data + (planned["evict"] - data) // 3 < carrier.bytes_moved["evict"] < planned["evict"]
    else:
        assert carrier.bytes_moved == planned


def refuses_what_comes_too_late(name: str, document: dict[str, Any]) -> None:
    """A timetable in which an item is back for another block than the one that saved it."""
    model, batch = MODELS[name].build()
    plan = Plan.from_dict(document)
    assert plan.timetable is not None
    trace = plan.timetable.trace
    item = next(item for item in trace.items if item.name.startswith(SAVED))
    made, back = item.uses
    late = replace(item, uses=(made, Use(trace.moments[trace.place[back.moment] + 1].name)))
    items = tuple(late if each is item else each for each in trace.items)
    table = fewest_bytes(replace(trace, items=items), plan.timetable.budget_bytes)
    with pytest.raises(PlanError, match="of other chunks or blocks than its layouts make"):
        parallel(model, replace(plan, timetables=(table,)), batch)
