"""In flight: stages hold as many micro-batches as their schedule says, and never more; of what they sent, nothing."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.driver.plan import assign, plan_traced, staged
from autopar.driver.trace import Traced, trace
from autopar.emit.build import MicroBatched, build
from autopar.runtime.module import ParallelModule
from autopar.runtime.pipeline.executor import PipelineStep
from autopar.runtime.pipeline.p2p import InProcessLinks, Message
from autopar.runtime.spmd.mesh import device_mesh
from autopar.verification.simulator import fake_process_group
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.solve.pipeline.schedule import Schedule, schedule
from tests.autopar import workers
from tests.autopar.in_flight import InFlight

BATCH, LAYERS = 28, 8
VIRTUAL = {"gpipe": 1, "1f1b": 1, "zero_bubble": 1, "interleaved_1f1b": 2, "zbv": 2, "dualpipev": 2, "2bw": 1}


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


@functools.cache
def chain() -> tuple[nn.Module, Traced]:
    torch.manual_seed(0)
    model = Chain()
    return model, trace(model, (torch.randn(BATCH, 4),), None)


@functools.cache
def decided(micro_batches: int) -> tuple[Assignment, MicroBatched]:
    _, traced = chain()
    plan = plan_traced(
        traced, workers.cluster_of(2), Pins.parse({"pipeline": 2, "micro_batches": micro_batches}), Training()
    )
    assignment, micro_batched = staged(plan, assign(traced, plan))
    assert micro_batched is not None and len(assignment.space.folded.instances) >= LAYERS
    return assignment, micro_batched


@contextlib.contextmanager
def running(name: str, ranks: int, micro_batches: int) -> Iterator[tuple[ParallelModule, PipelineStep, Schedule]]:
    """The chain in stages of about as many blocks, all in this process, each on one rank."""
    model, traced = chain()
    assignment, micro_batched = decided(micro_batches)
    order, blocks = schedule(name, ranks, micro_batches, VIRTUAL[name]), len(assignment.space.folded.instances)
    bounds = tuple(blocks * stage // order.stages for stage in range(order.stages + 1))
    whole = dict(model.named_parameters())
    with fake_process_group(1):
        mesh = device_mesh(assignment.space.mesh.micro_batched(1), "cpu")
        found = replace(micro_batched, schedule=order, bounds=bounds)
        module = build(
            model, traced.captured, assignment, mesh, 0, lambda leaf: whole[leaf.name].detach().clone(), 0, found
        )
        assert isinstance(module.program, PipelineStep)
        yield module, module.program, order


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", VIRTUAL)
def test_as_many_as_the_schedule_says(name: str, ranks: int) -> None:
    for micro_batches in (1, 4, 7) if name != "2bw" else (4, 7):
        with running(name, ranks, micro_batches) as (module, step, order):
            watch = InFlight(step, order.rank_of)
            for _ in range(1 + order.overlaps):
                loss = module(torch.randn(BATCH, 4))
                assert watch.now == sum(action.micro_batch < 0 for action in order.actions)
                loss.backward()
        assert tuple(map(watch.fullest, range(ranks))) == order.held, micro_batches


class Copying(InProcessLinks):
    """Links whose receivers are elsewhere and get copies; notes at each message what is still there of earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[int] = []
        self._sent: list[weakref.ref[torch.UntypedStorage]] = []

    def put(self, message: Message, tensors: Sequence[Tensor]) -> None:
        self.kept.append(sum(ref() is not None for ref in self._sent))
        self._sent += [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
        super().put(message, [tensor.clone() for tensor in tensors])


@pytest.mark.parametrize("name", ["gpipe", "zero_bubble"])
def test_what_is_sent_is_not_kept(name: str) -> None:
    with running(name, 4, 7) as (module, step, _):
        links = Copying()
        step.spec = replace(step.spec, links=links)
        x = torch.randn(BATCH, 4)
        loss = module(x)
        loss.backward()
    assert len(links.kept) == 2 * 3 * 7
    assert set(links.kept) == {0}
    assert torch.allclose(loss, chain()[0](x))
