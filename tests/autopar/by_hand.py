"""Masters written out by hand, and what the ranks of ``test_processes`` compare with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime.module import ParallelModule
from autopar.runtime.optim.master_weights import MASTER, with_masters
from autopar.runtime.spmd.mesh import as_dtensor, part_of
from tests.autopar.workers import batch_of, loss_of, model_of, parallel

LOW = torch.bfloat16
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}


class ByHand:
    """Float32 copies of parameters, with an optimizer of their own; parameters are their roundings."""

    def __init__(self, groups: list[dict[str, Any]], make: Any, **options: Any):
        self.masters = {parameter: parameter.detach().float() for group in groups for parameter in group["params"]}
        wide = [{**group, "params": [self.masters[each] for each in group["params"]]} for group in groups]
        self.optimizer = make(wide, **options)

    def step(self, factor: float = 1.0) -> None:
        for parameter, master in self.masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float() * factor
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in self.masters.items():
                parameter.copy_(master)

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        master = self.masters[parameter]
        return {**self.optimizer.state[master], MASTER: master}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, and all else, which does not decay."""
    found: list[list[nn.Parameter]] = [[], []]
    for parameter in model.parameters():
        found[parameter.ndim < 2].append(parameter)
    return [{"params": found[0]}, {"params": found[1], "weight_decay": 0.0}]


def local(value: Any) -> Tensor:
    found: Tensor = value.to_local() if isinstance(value, DTensor) else value
    return found.detach()


def gradient_of(name: str, shape: torch.Size, step: int) -> Tensor:
    """Of a parameter, whole; the same on every rank."""
    seed = sum(map(ord, name)) * 1000 + step
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(LOW)


def make(module: nn.Module) -> Any:
    if not isinstance(module, ParallelModule):
        return with_masters(torch.optim.AdamW, torch.float32, 0)(groups_of(module), **OPTIONS)
    groups = [{"params": ["*.bias", "*ln_*"], "weight_decay": 0.0}]
    return module.optimizer(torch.optim.AdamW, groups, master_dtype=torch.float32, **OPTIONS)


def step_by(module: nn.Module, optimizer: Any, steps: range) -> None:
    """Steps by given gradients, of which each rank has its parts."""
    for step in steps:
        for name, parameter in module.named_parameters():
            grad: Tensor = gradient_of(name, parameter.shape, step).to(parameter.grad_dtype)
            if isinstance(module, ParallelModule):
                assert isinstance(parameter, DTensor)
                part = part_of(grad, module.stored[name].layout, module.mesh, module.rank)
                grad = as_dtensor(
                    part, parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
                )
            parameter.grad = grad
        optimizer.step()


def same_as_by_hand(module: nn.Module, optimizer: Any, by_hand: ByHand, model: nn.Module) -> None:
    """Parameters, masters and moments, bit for bit: the update of a part is the part of the update."""
    theirs = dict(model.named_parameters())
    for name, parameter in module.named_parameters():
        state = optimizer.state[parameter]
        for key, value in {"": theirs[name].detach(), **by_hand.state(theirs[name])}.items():
            expected, mine = value, local(state[key] if key else parameter)
            if isinstance(module, ParallelModule) and value.shape == parameter.shape:
                expected = part_of(value, module.stored[name].layout, module.mesh, module.rank)
            assert mine.dtype == expected.dtype and torch.equal(mine, expected), f"{name} {key}"


def begins(name: str, document: Mapping[str, Any], path: str) -> None:
    """Three steps, a checkpoint, two more."""
    model, pmodel = model_of(name, dtype=LOW), parallel(model_of(name, dtype=LOW), document, batch_of(name, dtype=LOW))
    by_hand, optimizer = ByHand(groups_of(model), torch.optim.AdamW, **OPTIONS), make(pmodel)
    for steps in (range(3), range(3, 5)):
        step_by(model, by_hand, steps)
        step_by(pmodel, optimizer, steps)
        same_as_by_hand(pmodel, optimizer, by_hand, model)
        if not steps.start:
            autopar.save_checkpoint(path, pmodel, optimizer)


def goes_on(name: str, document: Mapping[str, Any] | None, path: str) -> None:
    """The last two steps, from the checkpoint, after one of the model's own; without a plan in the original model."""
    model, module = model_of(name, dtype=LOW), model_of(name, dtype=LOW)
    if document is not None:
        module = parallel(module, document, batch_of(name, dtype=LOW))
    by_hand, optimizer = ByHand(groups_of(model), torch.optim.AdamW, **OPTIONS), make(module)
    before = {key: local(parameter).clone() for key, parameter in module.named_parameters()}
    loss_of(module, batch_of(name, dtype=LOW)).backward()
    assert nn.utils.clip_grad_norm_(module.parameters(), 0.5).isfinite()
    optimizer.step()
    for key, parameter in module.named_parameters():
        assert torch.equal(local(optimizer.state[parameter][MASTER]).to(LOW), local(parameter)), key
    assert any(not torch.equal(local(parameter), before[key]) for key, parameter in module.named_parameters())
    autopar.load_checkpoint(path, module, optimizer)
    step_by(model, by_hand, range(5))
    step_by(module, optimizer, range(3, 5))
    same_as_by_hand(module, optimizer, by_hand, model)
