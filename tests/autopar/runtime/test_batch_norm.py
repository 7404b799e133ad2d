"""Batch norm in micro-batched steps, against the original run micro-batch by micro-batch on one device."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.driver.plan import plan_traced
from autopar.driver.trace import Traced, trace
from autopar.measure.local_processes import LocalProcesses
from autopar.runtime.spmd.mesh import groups_of
from autopar.verification.collective_counter import count_collectives, differences
from autopar.verification.float64 import exact
from planner.base.errors import PinError, PlanError
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.plan.plan import Plan
from tests.autopar import workers
from tests.autopar.models import Batch

ROWS, CHANNELS, CLASSES, STEPS = 16, 4, 5, 3


class Residual(nn.Module):
    """Two convolutions with batch norms beside a residual."""

    def __init__(self, second: nn.Module):
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(CHANNELS), second
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    """Every kind of batch norm: plain, frozen, without weights, without running statistics, synchronised.

    Args:
        synced: the class of the last; torch's own runs on accelerators alone.
    """

    def __init__(self, synced: type[nn.Module]):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, CHANNELS, 3, bias=False), nn.BatchNorm2d(CHANNELS, momentum=0.3)
        kinds = (
            nn.BatchNorm2d(CHANNELS, affine=False),
            nn.BatchNorm2d(CHANNELS, track_running_stats=False),
            synced(CHANNELS),
        )
        self.blocks = nn.ModuleList(map(Residual, kinds))
        self.frozen, self.head = nn.BatchNorm1d(CHANNELS), nn.Linear(CHANNELS, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.frozen(x.mean((2, 3))))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}

    def train(self, mode: bool = True) -> ResNet:
        super().train(mode)
        self.frozen.eval()
        return self


def made(synced: type[nn.Module] = nn.SyncBatchNorm) -> ResNet:
    torch.manual_seed(0)
    model = ResNet(synced)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data += 0.3 * torch.rand_like(tensor)
    return model.double().train()


def batch_of(step: int = 0) -> Batch:
    """Samples that differ more and more, so that the statistics of micro-batches do."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 3, 6, 6, generator=draw, dtype=torch.float64) + torch.arange(ROWS)[:, None, None, None] / 4
    return {"x": x, "y": torch.randint(0, CLASSES, (ROWS,), generator=draw)}


def cut(batch: Batch, micro_batches: int) -> list[Batch]:
    return [
        {name: value.chunk(micro_batches)[number] for name, value in batch.items()} for number in range(micro_batches)
    ]


@functools.cache
def traced() -> Traced:
    with exact():
        return trace(made(), None, batch_of())


def planned(pin: Mapping[str, Any]) -> Plan:
    ranks = pin.get("pipeline", 1) * pin.get("data", 1)
    return plan_traced(traced(), workers.cluster_of(ranks), Pins.parse(pin), Training(discards=()))


@exact()
def trains_by_micro_batch(document: Mapping[str, Any]) -> float:
    """On a rank: steps, running statistics after each, and evaluations between them; collectives as predicted."""
    plan, model = Plan.from_dict(document), made(nn.BatchNorm2d)
    micro_batches = plan.mesh.micro_batches
    pmodel = autopar.parallelize(made(), plan.cluster, plan=plan, example_kwargs=batch_of())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, pmodel)]
    for step in range(STEPS):
        batch = batch_of(step)
        parts = [model(**part) for part in cut(batch, micro_batches)]
        loss = torch.stack([part["loss"] for part in parts]).mean()
        loss.backward()
        with count_collectives(groups_of(pmodel.device_mesh)) as calls:
            returned = pmodel(**pmodel.shard(batch))
            returned["loss"].backward()
        check_calls(plan, pmodel, calls)
        workers.same("loss", returned["loss"], loss)
        if returned["logits"] is not None:
            workers.same("logits", returned["logits"], torch.cat([part["logits"] for part in parts]))
        own, expected = dict(pmodel.named_parameters()), dict(model.named_parameters())
        for name, parameter in own.items():
            workers.same(f"gradient of {name}", parameter.grad, expected[name].grad)  # type: ignore[arg-type]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():  # in training mode, and so running statistics go on
            for part in cut(batch_of(-1), micro_batches):
                model(**part)
            pmodel(**pmodel.shard(batch_of(-1)))
            model.eval()
            pmodel.eval()
            pmodel(**pmodel.shard(batch_of(-2)))
            same_evaluation(pmodel, model, micro_batches)
            model.train()
            pmodel.train()
        state, expected_state = pmodel.full_state_dict(), model.state_dict()
        assert state.keys() == expected_state.keys()
        for name, value in expected_state.items():
            workers.same(name, state[name].double(), value.double())
    assert expected_state["norm.num_batches_tracked"] == 2 * STEPS * micro_batches
    return float(loss)


def same_evaluation(pmodel: nn.Module, model: nn.Module, micro_batches: int) -> None:
    """What keeps no running statistics normalises by the micro-batch in evaluation, too."""
    batch = batch_of(-2)
    expected = torch.stack([model(**part)["loss"] for part in cut(batch, micro_batches)]).mean()
    workers.same("loss in evaluation", pmodel(**pmodel.shard(batch))["loss"], expected)  # type: ignore[operator]


def check_calls(plan: Plan, pmodel: Any, calls: Counter[Any]) -> None:
    stages: list[Any] = [calls]
    if pmodel.pipeline is not None:
        stages = [None] * pmodel.pipeline.size
        dist.all_gather_object(stages, calls, group=pmodel.pipeline.ranks)
    observed: Counter[Any] = Counter()
    for each in stages:
        observed.update({call: count for call, count in each.items() if call.axis in pmodel.mesh.names})
    assert not differences(dict(plan.predicted.collectives), observed)


CASES: list[dict[str, Any]] = [
    {"micro_batches": 2},
    {"micro_batches": 4, "pipeline": 2, "schedule": "zero_bubble", "recompute": "full"},
    {"micro_batches": 2, "pipeline": 2, "data": 2, "zero": 3},
    {"micro_batches": 1, "pipeline": 2, "data": 2},
]


@pytest.mark.processes
@pytest.mark.parametrize("pin", CASES, ids=lambda pin: "+".join(f"{key}{value}" for key, value in pin.items()))
def test_trains_as_the_original_micro_batch_by_micro_batch(pool: LocalProcesses, pin: dict[str, Any]) -> None:
    apart = pin["micro_batches"] > 1
    plan = planned({**pin, "batch_norm": "micro_batch"} if apart else pin)
    assert ("batch norms normalise each micro-batch by its own" in " ".join(str(plan).split())) == apart
    assert len(set(pool.run(trains_by_micro_batch, plan.to_dict(), ranks=plan.cluster.world_size))) == 1


def test_verifies_against_batch_norms_of_micro_batches() -> None:
    """Where the mean over tokens is the global batch's, though micro-batches count different numbers of them."""
    pin = {"micro_batches": 2, "data": 2, "batch_norm": "micro_batch"}
    batch = batch_of()
    batch["y"][:5] = -100
    found = autopar.verify(made(), workers.cluster_of(2), example_kwargs=batch, pin=pin)
    assert found.verdict == "verified" and found.agreement is not None
    assert found.agreement.buffers.keys() >= {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert "by its own statistics, as pin 'batch_norm' says" in str(found)


# ---- what is refused -------------------------------------------------------------------------------------------------


class Matching(nn.Module):
    """A batch norm whose statistics the loss reads, or the model returns."""

    def __init__(self, returns: bool):
        super().__init__()
        self.linear, self.norm, self.returns = nn.Linear(8, 8), nn.BatchNorm1d(8), returns

    def forward(self, x: Tensor) -> Any:
        loss = self.norm(self.linear(x)).square().mean()
        mean: Any = self.norm.running_mean
        return {"loss": loss, "mean": mean} if self.returns else loss + mean.square().sum()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


class Twice(nn.Module):
    """One batch norm before and after two layers, wherever these are cut, so that the second time goes on from the
    running statistics of the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.first(self.norm(x)).tanh())).tanh().square().mean()


BY_MICRO_BATCH = {"micro_batches": 2, "batch_norm": "micro_batch"}


@pytest.mark.parametrize(
    "make, pin, message",
    [
        (lambda: Matching(False), {"micro_batches": 2}, r"in norm normalises by .* pin 'batch_norm' 'micro_batch'"),
        (lambda: Matching(False), BY_MICRO_BATCH, r"reads the statistics of norm, which are others in every"),
        (lambda: Matching(True), BY_MICRO_BATCH, r"the model returns the statistics of norm, .* after the step"),
        (Plain, BY_MICRO_BATCH, r"and the model has none that does so: leave it out"),
        (Plain, {"batch_norm": "global"}, r"pin 'batch_norm' is 'global'; it is 'micro_batch' \(each"),
    ],
)
def test_what_cannot_be_normalised_so_is_refused(make: Any, pin: dict[str, Any], message: str) -> None:
    with pytest.raises(PinError, match=message):
        autopar.plan(make(), workers.cluster_of(1), example_args=(torch.randn(8, 8),), pin=pin)


def test_one_batch_norm_in_two_stages_is_refused_and_in_one_goes_on() -> None:
    model, batch = Twice(), (torch.randn(8, 8),)
    assert autopar.verify(model, workers.cluster_of(1), example_args=batch, pin=BY_MICRO_BATCH).verdict == "verified"
    with pytest.raises(PlanError, match=r"changes its buffer 'norm.running_mean' in stage 1 and reads it in stage 0"):
        autopar.verify(model, workers.cluster_of(2), example_args=batch, pin={**BY_MICRO_BATCH, "pipeline": 2})
