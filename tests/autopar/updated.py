"""What ``test_updating.py`` does in one process, and ``test_offload.py`` in several: train with updates in backward."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.runtime.module import ParallelModule
from autopar.runtime.optim.early_update import EarlyUpdates, Used
from autopar.runtime.spmd import parameters
from planner.base.errors import InputError
from planner.cost.cluster import ClusterSpec
from planner.plan.plan import Plan
from tests.autopar.carried import adamw_of_both, another, loss_of, model_of, parallel, same_values

EARLY: dict[str, Any] = {"offload": "host", "update": "backward"}
ON_DEVICE: dict[str, Any] = {"recompute": "none", "update": "backward"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.as_tensor(self.down(torch.tanh(self.norm(self.up(x)))))


class Deep(nn.Module):
    """Equal blocks, what is frozen, and a weight that the first and the last block read."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 8)
        self.head.weight = self.stem.weight
        self.blocks[1].up.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(x)).square().mean()


def batch(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


CLUSTER = ClusterSpec.local(1, memory_bytes="1 GiB", cores=2, host_memory_bytes="1 GiB", disk_bytes="1 GB")


def deep(
    pin: dict[str, Any] | None = None, dtype: torch.dtype = torch.float64, path: str | None = None
) -> tuple[Deep, ParallelModule]:
    """The model, and the same with model data at home beside the device."""
    torch.manual_seed(0)
    model = Deep().to(dtype)
    return model, autopar.parallelize(
        copy.deepcopy(model),
        CLUSTER,
        example_kwargs={"x": batch(0, dtype)},
        pin=EARLY if pin is None else pin,
        optimizer_bytes_per_element=12,  # of masters, too
        offload_path=path,
    )


def steps_of(module: nn.Module, optimizer: Any, seeds: range, schedule: Any = None) -> None:
    for seed in seeds:
        module(x=batch(seed, next(module.parameters()).dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()


def were_updated(pmodel: ParallelModule) -> bool:
    """Whether backward has updated parameters: then all that are trained."""
    found = {isinstance(parameter.grad, Used) for parameter in pmodel.parameters() if parameter.requires_grad}
    assert len(found) == 1
    return found.pop()


def trains_as_planned(name: str, document: dict[str, Any]) -> None:
    """Ten steps of AdamW: what moves is as planned, never over the budget, in the host's memory that was planned."""
    model, batch = model_of(name)
    pmodel, offload = parallel(copy.deepcopy(model), Plan.from_dict(document), batch)
    table = offload.transfers.table
    planned = {way: size for (_, way), size in table.bytes_moved.items() if size}
    optimizers = adamw_of_both(model, pmodel)
    for step in range(10):
        losses = [loss_of(m, another(name, step)) for m in (model, pmodel)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0)
        for loss, m, optimizer in zip(losses, (model, pmodel), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            if m is pmodel:
                assert {type(p.grad) for p in pmodel.parameters() if p.requires_grad} == {Used}
            optimizer.step()
        assert all(p.grad is None for p in pmodel.parameters())
        assert {way: size for way, size in offload.transfers.bytes_moved.items() if size} == planned
    assert table.budget_bytes >= offload.transfers.arena.high_water_bytes == table.high_water_bytes
    early = [each for each in offload.gradients.values() if each._shared is not None]
    assert early and all(len(each._homes) == (each not in early) for each in offload.gradients.values())
    at_home = sum(memory.numel() for memory in offload._shared._made.values())
    assert at_home <= sum(sorted(each.bytes for each in early)[-3:])
    same_values(pmodel, model)


def trains_on_devices(pins: list[dict[str, Any]]) -> None:
    """Four steps of AdamW under each: all gradients are used in backward, and parameters are those of one device.

    Where blocks reduce theirs, a block's are used once those of the block before it are on their way.
    """
    for pin in pins:
        torch.manual_seed(0)
        model = Deep().double()
        cluster = ClusterSpec.local(dist.get_world_size())
        pmodel = autopar.parallelize(
            copy.deepcopy(model), cluster, example_kwargs={"x": batch(0)}, pin={**pin, "update": "backward"}
        )
        optimizers = adamw_of_both(model, pmodel)
        with recorded() as events:
            for seed in range(4):
                events.clear()
                for m, optimizer in zip((model, pmodel), optimizers, strict=True):
                    loss_of(m, {"x": batch(seed)}).backward()
                    assert m is model or were_updated(pmodel)
                    optimizer.step()
                    optimizer.zero_grad()
        same_values(pmodel, model)
        used = [each for each in events if each != "reduce"]
        assert used == [*(f"block {n} ({path})" for n, path in BLOCKS), "what several blocks read"], used
        if "data" in pin:
            assert all(events[: events.index(name)].count("reduce") > n for n, name in enumerate(used[:-1], 1)), events


BLOCKS = [(5, "head"), *((n, f"blocks.{n - 1}") for n in (4, 3, 2, 1)), (0, "stem")]
"""As backward is over with them."""


@contextmanager
def recorded() -> Iterator[list[str]]:
    """What is reduced, and which blocks' gradients are used, in order."""
    events: list[str] = []
    use, scatter, reduce = EarlyUpdates.use, parameters.reduce_scatter, dist.all_reduce

    def using(self: EarlyUpdates, name: str, *args: Any) -> None:
        events.append(name)
        use(self, name, *args)

    def told(function: Any) -> Any:
        return lambda *args, **kwargs: (events.append("reduce"), function(*args, **kwargs))[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EarlyUpdates, "use", using)
        patch.setattr(parameters, "reduce_scatter", told(scatter))
        patch.setattr(dist, "all_reduce", told(reduce))
        yield events


def refuses_clipping_on_all_ranks(name: str, document: dict[str, Any]) -> None:
    """Gradients that know of those of other ranks, and those that are used, in one norm."""
    model, batch = model_of(name)
    pmodel, _ = parallel(model, Plan.from_dict(document), batch)
    optimizer = pmodel.optimizer(torch.optim.SGD, lr=0.1)
    loss_of(pmodel, another(name, 0)).backward()
    with pytest.raises(InputError, match="clipping by their norm or a GradScaler, cannot be had so: plan with pin 'up"):
        nn.utils.clip_grad_norm_(pmodel.parameters(), 1.0)
    optimizer.step()
