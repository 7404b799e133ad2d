"""What ``test_offload.py`` does with models drawn at random: train them under random pins, budgets and timetables."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.runtime.spmd.mesh import whole_of
from planner.cost.cluster import ClusterSpec
from planner.plan.plan import Plan
from tests.autopar.carried import TRANSFER_SCHEDULES, adamw_of_both, same_gradients

BATCH = 4


class Drawn(nn.Module):
    """Layers of odd widths one after another: some several times, some frozen, some whose weight is another's too."""

    def __init__(self, draw: random.Random):
        super().__init__()
        self.width = draw.randint(3, 17)
        self.layers = nn.ModuleList(self._layer(draw) for _ in range(draw.randint(2, 5)))
        self.order = [*range(len(self.layers)), *(draw.randrange(len(self.layers)) for _ in range(draw.randint(0, 2)))]
        draw.shuffle(self.order)
        self.table = nn.Parameter(torch.randn(self.width, self.width))
        self.is_tied = draw.random() < 0.5
        for layer in self.layers[1:]:
            layer.requires_grad_(draw.random() < 0.8)

    def _layer(self, draw: random.Random) -> nn.Sequential:
        inner = draw.randint(1, 40)
        norm = nn.LayerNorm(self.width) if draw.random() < 0.5 else nn.Identity()
        activation = draw.choice([nn.Tanh, nn.GELU, nn.SiLU])
        return nn.Sequential(
            norm,
            nn.Linear(self.width, inner, bias=draw.random() < 0.5),
            activation(),
            nn.Linear(inner, self.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.table
        for number in self.order:
            x = x + self.layers[number](x)
        return F.linear(x, self.table).square().mean() if self.is_tied else x.square().mean()


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Drawn(random.Random(seed)).double()


def batch_of(model: nn.Module, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {"x": torch.randn(BATCH, model.width, dtype=torch.float64)}  # type: ignore[arg-type]


def plan_of(seed: int, ranks: int) -> Plan:
    """A random plan of a random model, with a random budget and transfer schedule."""
    draw, model = random.Random(-seed - 1), model_of(seed)
    pin: dict[str, Any] = {"offload": "host", "recompute": draw.choice(["none", "selective", "full"])}
    pin |= {"activations": draw.choice(["none", "all", "all"])}
    if draw.random() < 0.5:
        pin |= {"update": draw.choice(["after", "backward"])}
        pin |= {"data": 2, "zero": draw.choice([0, 2, 3])} if ranks > 1 else {}
    else:
        pin |= {"micro_batches": 2}
        pipeline = {"pipeline": 2, "schedule": draw.choice(["gpipe", "1f1b"])}
        pin |= draw.choice([pipeline, {"data": 2, "zero": draw.choice([0, 3])}]) if ranks > 1 else {}
    cluster = ClusterSpec.local(ranks, "1 GiB", cores=2, host_memory_bytes="1 GiB")
    plan = autopar.plan(model, cluster, example_kwargs=batch_of(model, 0), pin=pin)
    share, solve, tables = draw.choice([0.0, draw.random() / 3]), draw.choice(TRANSFER_SCHEDULES), []
    for table in plan.transfer_schedules:
        least, every = max(table.trace.needed_bytes), sum(item.bytes for item in table.trace.items)
        tables.append(solve(table.trace, least + int(share * every)))
    return replace(plan, transfer_schedules=tuple(tables))


def trains(seed: int, document: dict[str, Any]) -> None:
    """Gradients and parameters are the model's, what moves is what was planned, and never over the budget."""
    plan, model = Plan.from_dict(document), model_of(seed)
    pmodel = autopar.parallelize(copy.deepcopy(model), plan.cluster, plan=plan, example_kwargs=batch_of(model, 0))
    offload, is_early = pmodel.offload, plan.pin.get("update") == "backward"
    optimizers = adamw_of_both(model, pmodel)
    for step in range(3):
        batch = batch_of(model, step)
        for m, optimizer in zip((model, pmodel), optimizers, strict=True):
            optimizer.zero_grad()
            (m(**pmodel.shard(batch)) if m is pmodel else m(**batch)).backward()
            if m is pmodel and not is_early:
                same_gradients(pmodel, model)
            optimizer.step()
        planned = {way: size for (_, way), size in offload.transfers.table.bytes_moved.items() if size}
        assert {way: size for way, size in offload.transfers.bytes_moved.items() if size} == planned
    assert (
        offload.transfers.table.budget_bytes
        >= offload.transfers.arena.high_water_bytes
        == offload.transfers.table.high_water_bytes
    )
    expected = model.state_dict()
    for name, value in pmodel.state_dict().items():
        torch.testing.assert_close(whole_of(value), expected[name], rtol=1e-9, atol=1e-12)
