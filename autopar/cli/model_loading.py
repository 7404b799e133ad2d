"""Loads the models that the command line names, and makes their inputs."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autopar.cli.arguments import Configured, Form, Made
from planner.base.errors import AutoparError, InputError
from planner.plan.plan import Plan

REAL_ELEMENTS = 50_000_000
"""A configured model of at most so many parameters can be built for real, to compare values."""


@dataclass(frozen=True)
class Named:
    """A model, and its example inputs if any were given with it or asked for."""

    model: nn.Module
    inputs: dict[str, Any] | None


def load(
    named: Made | Configured,
    batch: int | None,
    sequence: int | None,
    forms: Mapping[str, Form],
    default: tuple[int, int],
    real: bool = False,
    planned: Plan | None = None,
    dtype: str | None = None,
) -> Named:
    """A model, and its example inputs.

    Args:
        batch, sequence: sizes of the global batch, for Transformers models whose inputs are not given.
        forms: of the inputs that are; they win over all others.
        default: what ``batch`` and ``sequence`` are where they are left out.
        planned: a plan of the model; its inputs take the place of ``batch`` and ``sequence``.
        dtype: of the parameters, and of what floats of inputs whose dtype nobody says; ``None``: as the model is made.
        real: build a configured model on the CPU if it is small, rather than on the meta device.

    Raises:
        InputError: no such module, function or class, what it returns is no model, or sizes are given of inputs that
            are given as well.
    """
    sizes = (batch or default[0], sequence or default[1])
    given = {name: zeros(form.shape, form.dtype) for name, form in forms.items()} or None

    def like_planned(model: nn.Module) -> dict[str, Tensor]:
        return (planned_inputs(planned) if planned else {}) or _cast(transformers_inputs(model, *sizes), dtype)

    if isinstance(named, Configured):
        dtype = named.dtype
        with _quiet():
            model = _configured(named, real)
        _check_sizes(batch, sequence, "--input", given)
        return Named(model, given or like_planned(model))
    model, own = _returned(named)
    model, own = model if dtype is None else model.to(getattr(torch, dtype)), own and _cast(own, dtype)
    _check_sizes(batch, sequence, f"{named} or --input", given or own)
    if given is None and own is None and hasattr(model, "config"):
        own = like_planned(model)
    return Named(model, given or own)


def _check_sizes(batch: int | None, sequence: int | None, where: str, inputs: Mapping[str, Any] | None) -> None:
    """Refuse sizes that would have no effect."""
    options = [name for name, size in (("--batch", batch), ("--seq", sequence)) if size is not None]
    if options and inputs:
        has = ", ".join(f"{name} {'x'.join(map(str, t.shape))}" for name, t in inputs.items() if isinstance(t, Tensor))
        raise InputError(
            f"{' and '.join(options)} would have no effect, since {where} gives the inputs ({has}): leave it out, or "
            "change them there"
        )


def _cast(inputs: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Inputs with what floats in ``dtype``."""
    if dtype is None:
        return inputs
    to = getattr(torch, dtype)
    return pytree.tree_map_only(Tensor, lambda t: t.to(to) if t.is_floating_point() else t, inputs)


def _returned(named: Made) -> tuple[nn.Module, dict[str, Any] | None]:
    try:
        module = importlib.import_module(named.module)
    except Exception as error:
        raise InputError(f"cannot import {named.module!r}: {type(error).__name__}: {error}") from error
    function = getattr(module, named.function, None)
    if not callable(function):
        raise InputError(f"module {named.module!r} has no function {named.function!r}")
    try:
        result = function()
    except AutoparError:
        raise
    except Exception as error:
        raise InputError(f"{named} raised {type(error).__name__}: {error}") from error
    model, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module) or not (inputs is None or isinstance(inputs, dict)):
        raise InputError(
            f"{named} returned {_kind(result)}; it must return a torch.nn.Module, or (module, {{input name: tensor}})"
        )
    return model, inputs


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_kind, value))})"
    return type(value).__name__


def _configured(named: Configured, real: bool) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise InputError(f"{named.path!r} needs Transformers: pip install 'autopar[hf]'") from error
    architecture = getattr(transformers, named.architecture, None)
    if architecture is None:
        raise InputError(
            f"{named.path!r} is of {named.architecture!r}, which Transformers {transformers.__version__} does not have"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(named.path)
        config.use_cache = False
        with _default_dtype(named.dtype):
            with torch.device("meta"):
                model = architecture(config)
            if real and sum(p.numel() for p in model.parameters()) <= REAL_ELEMENTS:
                torch.manual_seed(0)
                model = architecture(config)
    except Exception as error:
        raise InputError(
            f"{named.architecture} cannot be built from {named.path!r}: {type(error).__name__}: {error}"
        ) from error
    return model.train()


@contextlib.contextmanager
def _default_dtype(name: str | None) -> Iterator[None]:
    """Inside, parameters are made in this dtype, as Transformers does; what asks for float32 has it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(before if name is None else getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def zeros(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Zeros, their dtype by torch's name."""
    return torch.zeros(shape, dtype=getattr(torch, dtype))


def planned_inputs(plan: Plan) -> dict[str, Tensor]:
    """The global batch that a plan was made for, as zeros; as far as the plan tells."""
    leaves = {name: plan.account.leaves[name] for name in plan.inputs if name in plan.account.leaves}
    return {name: zeros(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}


def planned_sizes(plan: Plan) -> tuple[int, int]:
    """Global batch and sequence length that a plan was made for, as far as the plan tells."""
    shapes = [leaf.shape for name in plan.inputs if (leaf := plan.account.leaves.get(name)) is not None]
    longest = next((shape for shape in shapes if len(shape) == 2), ())
    return (longest[0], longest[1]) if longest else (8, 512)


def transformers_inputs(model: nn.Module, batch: int, sequence: int) -> dict[str, Tensor]:
    """One global batch for a Transformers model, with labels where it computes a loss."""
    accepted = inspect.signature(model.forward).parameters
    config: Any = model.config
    inputs: dict[str, Tensor] = {}
    if "input_ids" in accepted:
        inputs["input_ids"] = torch.zeros(batch, sequence, dtype=torch.long)
    elif "pixel_values" in accepted:
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        inputs["pixel_values"] = torch.zeros(batch, getattr(config, "num_channels", 3), height, width)
    else:
        raise InputError(
            f"the inputs of {type(model).__name__} are unknown: give them with --input, e.g. --input x=8x128:float32"
        )
    if "labels" in accepted:
        per_token = "input_ids" in inputs and "Sequence" not in type(model).__name__
        inputs["labels"] = torch.zeros((batch, sequence) if per_token else (batch,), dtype=torch.long)
    elif "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = torch.zeros(batch, sequence, dtype=torch.long)
    return inputs


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the notices that Transformers writes about configurations."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.setLevel(level)
