"""What ranks of ``test_processes`` do with optimizers that go by whole parameters, of which they hold parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime.module import ParallelModule
from autopar.runtime.optim.master_weights import with_masters
from autopar.runtime.optim.owners import Owning
from autopar.verification.float64 import exact
from tests.autopar.by_hand import LOW, step_by
from tests.autopar.workers import batch_of, loss_of, model_of, parallel, same_state, whole

NORMS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "Lamb": (autopar.Lamb, {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}, {"weight_decay": 0.0, "adapt": False}),
    "Lars": (autopar.Lars, {"lr": 1.0, "weight_decay": 0.1}, {"weight_decay": 0.0}),
}
WHOLE: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "Adafactor": (
        torch.optim.Adafactor,
        {"lr": 1e-2, "eps": (1e-4, 1e-3), "weight_decay": 0.1},
        {"weight_decay": 0.0},
    ),
    "Muon": (torch.optim.Muon, {"lr": 1e-2, "weight_decay": 0.1}, {"weight_decay": 0.0}),
}
"""Class, options, and those of what does not decay."""


def is_bare(name: str) -> bool:
    """Whether a parameter does not decay."""
    return any(part in name for part in (".bias", "ln_", "norm"))


def is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2


def is_other(name: str, parameter: Tensor) -> bool:
    return parameter.ndim != 2


def optimizers_of(module: nn.Module, name: str) -> list[Any]:
    """One for all; beside Muon, which takes matrices, another one."""
    make, options, bare = (NORMS | WHOLE)[name]
    only = is_matrix if name == "Muon" else None
    found = [_made(module, make, options, bare, only)]
    if name == "Muon":
        found.append(_made(module, torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-4}, {}, is_other))
    return found


def _made(
    module: nn.Module,
    make: Any,
    options: dict[str, Any],
    bare: dict[str, Any],
    only: Callable[[str, Tensor], bool] | None,
) -> Any:
    if isinstance(module, ParallelModule):
        names = [name for name, _ in module._original[0].named_parameters() if is_bare(name)]
        groups = [{"params": names, **bare}]
        return module.optimizer(make, groups, only=only, **options)
    found: list[list[nn.Parameter]] = [[], []]
    for name, parameter in module.named_parameters():
        if only is None or only(name, parameter):
            found[is_bare(name)].append(parameter)
    return make([{"params": found[0]}, {"params": found[1], **bare}], **options)


def steps_of(module: nn.Module, optimizers: list[Any], name: str, steps: range) -> None:
    for step in steps:
        module.zero_grad()
        loss_of(module, batch_of(name, step)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        for optimizer in optimizers:
            optimizer.step()


@exact()
def steps_alike(name: str, document: Mapping[str, Any], labels: list[str]) -> None:
    """Three steps by each, with decay and clipping, as on one device."""
    pmodel = parallel(model_of(name), document, batch_of(name))
    begun = {key: value.clone() for key, value in model_of(name).state_dict().items()}
    for label in labels:
        model = model_of(name)
        pmodel.load_state_dict(begun)
        pairs = [(m, optimizers_of(m, label)) for m in (model, pmodel)]
        for m, optimizers in pairs:
            steps_of(m, optimizers, name, range(3))
        try:
            same_state(pmodel, model)
        except AssertionError as error:
            raise AssertionError(f"{label}: {error}") from error


# ---- state -----------------------------------------------------------------------------------------------------------


def losses_of(module: nn.Module, optimizers: list[Any], name: str, steps: range) -> list[float]:
    found = []
    for step in steps:
        steps_of(module, optimizers, name, range(step, step + 1))
        found.append(loss_of(module, batch_of(name, step)).item())
    return found


@exact()
def begins(name: str, document: Mapping[str, Any], path: str, labels: list[str]) -> list[list[float]]:
    """With each: two steps, a checkpoint, the losses after two more; owners have state, and others none."""
    found = []
    for label in labels:
        pmodel = parallel(model_of(name), document, batch_of(name))
        optimizers = optimizers_of(pmodel, label)
        steps_of(pmodel, optimizers, name, range(2))
        first = optimizers[0]
        assert isinstance(first, Owning) and first.cut
        for each in first.cut:
            kept = [value for value in first.state.get(each.parameter, {}).values() if isinstance(value, Tensor)]
            assert bool(kept) == each.is_mine and not any(isinstance(value, DTensor) for value in kept)
            laid_out = first.state_dict()["state"].values()
            assert any(isinstance(value, DTensor) for state in laid_out for value in state.values())
        autopar.save_checkpoint(f"{path}/{label}", pmodel, optimizers)
        found.append(losses_of(pmodel, optimizers, name, range(2, 4)))
    return found


@exact()
def goes_on(name: str, document: Mapping[str, Any] | None, path: str, labels: list[str]) -> list[list[float]]:
    """The same losses from the checkpoint, after a step of its own; without a plan in the original model."""
    found = []
    for label in labels:
        module = model_of(name)
        if document is not None:
            module = parallel(module, document, batch_of(name))
        optimizers = optimizers_of(module, label)
        steps_of(module, optimizers, name, range(7, 8))
        autopar.load_checkpoint(f"{path}/{label}", module, optimizers)
        found.append(losses_of(module, optimizers, name, range(2, 4)))
    return found


def masters_step_whole(name: str, document: Mapping[str, Any]) -> None:
    """Masters of bfloat16 parameters, stepped whole: bit for bit those of one device, also after a round trip, and by
    gradients in float32.
    """
    model, low = model_of(name, dtype=LOW), model_of(name, dtype=LOW)
    pmodel = parallel(low, document, batch_of(name, dtype=LOW))
    plain = with_masters(torch.optim.Adafactor, torch.float32, None)(model.parameters(), lr=1e-2)
    optimizer = pmodel.optimizer(torch.optim.Adafactor, lr=1e-2, master_dtype=torch.float32)
    for steps in (range(2), range(2, 4)):
        step_by(model, plain, steps)
        step_by(pmodel, optimizer, steps)
        optimizer.load_state_dict(optimizer.state_dict())
        pmodel.zero_grad()
        pmodel.accumulate_gradients_in(torch.float32)
    assert any(each.is_mine for each in optimizer.cut)
    step_by(model, plain, range(4, 5))
    step_by(pmodel, optimizer, range(4, 5))
    theirs = dict(model.named_parameters())
    for key, parameter in pmodel.named_parameters():
        assert torch.equal(whole(parameter), theirs[key]), key
        state = optimizer.state.get(parameter, {})
        assert all(torch.equal(value, plain.state[theirs[key]][k]) for k, value in state.items()), key
