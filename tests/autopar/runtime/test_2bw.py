"""2BW: training with gradients that are one update old, against a serial simulation of the rule."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from autopar.driver.plan import assign, plan_traced, staged
from autopar.emit.build import build
from autopar.runtime.autograd.recompute import memory_of
from autopar.runtime.module import ParallelModule
from autopar.runtime.pipeline.executor import PipelineStep
from autopar.runtime.spmd.mesh import device_mesh
from autopar.verification.float64 import exact
from autopar.verification.reference import reference
from autopar.verification.simulator import fake_process_group
from autopar.verification.verify import simulate
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from tests.autopar import workers

STEPS, BATCH, WIDTH, WORDS = 20, 8, 8, 12
OVERFLOWS = 7
"""The number of the batch whose gradients are infinite, where one is."""


class Tied(nn.Module):
    """Blocks between an embedding and a head that share a weight; ``scale`` is there to make the loss overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor, target: Tensor, scale: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = x + block(x)
        each = nn.functional.cross_entropy(self.head(x), target, reduction="none")
        return (each * scale).mean()


Batch = dict[str, Tensor]
Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=0.01),
}


@functools.cache
def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied().double().train()


def batch_of(number: int, overflows: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(number)
    words, target = (torch.randint(0, WORDS, (BATCH,), generator=generator) for _ in range(2))
    scale = torch.rand(BATCH, generator=generator, dtype=torch.float64)
    if overflows:
        scale[3] = float("inf")
    return {"words": words, "target": target, "scale": scale}


@dataclass(frozen=True)
class Loop:
    """A training loop.

    Attributes:
        clip: the largest norm of the gradients; a norm that is not finite skips the update.
        every: calls for an update.
    """

    optimizer: Optimizer
    clip: float | None = None
    overflows: bool = False
    every: int = 1

    def batches(self) -> Iterator[Batch]:
        return (batch_of(number, self.overflows and number == OVERFLOWS) for number in range(STEPS))

    def after(self, number: int, norm: Callable[[float], Tensor], optimizer: torch.optim.Optimizer) -> None:
        """What comes after backward in call ``number``."""
        if (number + 1) % self.every:
            return
        if self.clip is None or torch.isfinite(norm(self.clip)):
            optimizer.step()
        optimizer.zero_grad()


def serially(loop: Loop) -> tuple[dict[str, Tensor], list[float]]:
    """The rule: what call t hands to the optimizer is the gradient of batch t - 1 at the weights of call t - 1."""
    model = copy.deepcopy(tied())
    parameters = list(model.parameters())
    optimizer, losses = loop.optimizer(parameters), []
    late: tuple[Tensor, ...] | None = None
    for number, batch in enumerate(loop.batches()):
        loss = model(**batch)
        losses.append(loss.item())
        found = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, late or (), strict=False):
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient
        late = found
        loop.after(number, functools.partial(nn.utils.clip_grad_norm_, parameters), optimizer)
    return {name: p.detach() for name, p in model.named_parameters()}, losses


@functools.cache
def planned(stages: int, pin: tuple[tuple[str, Any], ...] = ()) -> tuple[Any, ...]:
    ref = reference(tied(), None, batch_of(0))
    pins = {"schedule": "2bw", "pipeline": stages, "micro_batches": 4, **dict(pin)}
    plan = plan_traced(ref.traced, workers.cluster_of(stages * pins.get("data", 1)), Pins.parse(pins), Training())
    return ref, *staged(plan, assign(ref.traced, plan))


@contextlib.contextmanager
def built(stages: int) -> Iterator[ParallelModule]:
    """All stages in this process, each on one rank."""
    ref, assignment, micro_batched = planned(stages)
    full = {**dict(ref.model.named_parameters()), **ref.traced.captured.constants}
    with exact(), fake_process_group(1):
        mesh = device_mesh(assignment.space.mesh.micro_batched(1), "cpu")
        yield build(
            ref.model, ref.traced.captured, assignment, mesh, 0,
            lambda leaf: full[leaf.name].detach().clone(), 0, micro_batched,
        )  # fmt: skip


@pytest.mark.parametrize(
    "stages, loop",
    [
        (1, Loop(OPTIMIZERS["momentum"])),
        (2, Loop(OPTIMIZERS["momentum"])),
        (4, Loop(OPTIMIZERS["momentum"])),
        (2, Loop(OPTIMIZERS["adam"], clip=0.05)),
        (4, Loop(OPTIMIZERS["adam"], clip=0.05)),
        (4, Loop(OPTIMIZERS["momentum"], clip=0.05, overflows=True)),
        (2, Loop(OPTIMIZERS["adam"], every=2)),
    ],
)
def test_twenty_steps_follow_the_rule(stages: int, loop: Loop) -> None:
    expected, losses = serially(loop)
    with built(stages) as module:
        optimizer = loop.optimizer(module.parameters())
        for number, batch in enumerate(loop.batches()):
            loss = module(**batch)
            assert loss.item() == pytest.approx(losses[number], rel=1e-12)
            loss.backward()
            if number == 0:  # nothing is handed over yet
                assert all(p.grad is None for p in module.parameters())
            loop.after(number, functools.partial(nn.utils.clip_grad_norm_, list(module.parameters())), optimizer)
            if not number % 5:
                with torch.no_grad():  # between two steps of training
                    module(**batch_of(100))
        found = module.full_state_dict()
    for name, value in expected.items():
        assert torch.isfinite(value).all()
        assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize("stages", [1, 4])
def test_two_versions_of_the_weights_are_alive(stages: int) -> None:
    """At every moment from the second step on: that of the batch before and the newest."""
    known: dict[int, StorageWeakRef] = {}
    seen: set[int] = set()
    with built(stages) as module:
        program, weight = module.program, module.get_parameter("blocks.1.0.weight")
        assert isinstance(program, PipelineStep) and isinstance(weight, DTensor)

        def count(*_: object) -> None:
            local = weight._local_tensor
            known.setdefault(memory_of(local), StorageWeakRef(local.untyped_storage()))
            for memory in [memory for memory, each in known.items() if each.expired()]:
                del known[memory]
            seen.add(len(known))

        for stage in program.spec.stages.values():
            stage.program.register_forward_hook(count)
        optimizer = OPTIMIZERS["adam"](module.parameters())
        for number in range(6):
            loss = module(**batch_of(number))
            count()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            count()
            if number == 0:
                assert seen == {1, 2}
                seen.clear()
        assert seen == {2}
        assert Counter(stage for stage, _ in program.left.in_flight) == {1: {0: 1}, 4: {0: 3, 1: 2, 2: 2, 3: 1}}[stages]


def test_loaded_and_copied_modules_begin_anew() -> None:
    with built(2) as module:
        start = {name: value.clone() for name, value in module.full_state_dict().items()}
        module(**batch_of(0)).backward()
        copied = copy.deepcopy(module)
        module.load_state_dict(start)
        for each in (module, copied):
            each(**batch_of(1)).backward()
            assert all(p.grad is None for p in each.parameters())
            each(**batch_of(2)).backward()
            assert all(p.grad is not None for p in each.parameters())


def test_verify_holds_a_step_to_the_one_before() -> None:
    ref, assignment, micro_batched = planned(2, (("data", 2), ("zero", 3), ("recompute", "full")))
    found = simulate(ref, assignment, 0, micro_batched)
    assert found.worst[0] <= 1e-10 and not found.miscounted
    assert len(found.gradients) == len(ref.gradients)
