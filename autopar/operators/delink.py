"""Makes layers that share parameters independent, to go on training a model of many layers from one of few parameters.

A model whose layers share their parameters trains with the memory of one layer; delinked, each layer has its own, and
begins where the shared ones were (Lin et al. 2021, M6-10T: from pseudo to real).
"""

from __future__ import annotations

import copy

from torch import nn

from planner.base.errors import InputError


def delink(model: nn.Module) -> nn.Module:
    """Give every layer of ``model`` parameters of its own, in place: equal to those that it shared until now.

    What the model computes stays the same, and gradients of the copies add up to that of the shared parameter. Layers
    are modules that are registered in several places, and modules of one class that hold one parameter. Embeddings are
    no layers: those that are tied, to each other or to the output layer, stay tied.

    Returns:
        ``model``, without gradients: those of shared parameters are of no copy. Make its optimizer anew.

    Raises:
        InputError: nothing is shared; a layer that is registered once and called several times cannot be told apart.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"autopar.delink takes a model (torch.nn.Module), not {type(model).__name__}")
    copied = _separate_modules(model, {}) + _separate_parameters(model)
    if not copied:
        raise InputError(
            f"{type(model).__name__} has no layers that share parameters: no module is registered in two places. One "
            "that is called several times has to be registered as often: nn.ModuleList([layer] * 4), called in turn"
        )
    model.zero_grad(set_to_none=True)
    return model


def _separate_modules(module: nn.Module, seen: dict[nn.Module, None]) -> int:
    """Copy modules that were seen elsewhere; returns how many."""
    copied = 0
    for name, child in module._modules.items():
        if child is None or isinstance(child, nn.Embedding):
            continue
        if child in seen and any(True for _ in child.parameters()):
            module._modules[name] = copy.deepcopy(child)
            copied += 1
        elif child not in seen:
            seen[child] = None
            copied += _separate_modules(child, seen)
    return copied


def _separate_parameters(model: nn.Module) -> int:
    """Copy parameters that modules of one class hold together; returns how many."""
    holders: dict[tuple[int, type], nn.Parameter] = {}
    copied = 0
    for module in (each for each in model.modules() if not isinstance(each, nn.Embedding)):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            key = id(parameter), type(module)
            if key in holders:
                module._parameters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                copied += 1
            else:
                holders[key] = parameter
    return copied
