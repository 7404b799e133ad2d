"""Arguments: what the words of the command line mean — models, their inputs, clusters, pins."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planner.cluster import ClusterSpec
from planner.errors import AutoparError, InputError, PinError
from planner.plan import Plan

REAL_ELEMENTS = 50_000_000
"""A configured model of at most so many parameters can be built for real, to compare values."""

CONFIGURED = (
    "write module:function (a function that returns a model, or a model and its example inputs), or the path of a "
    "Transformers config.json"
)


@dataclass(frozen=True)
class Named:
    """A model, and its example inputs if any were given with it or asked for."""

    model: nn.Module
    inputs: dict[str, Any] | None


def read_cluster(text: str) -> ClusterSpec:
    """``local:4``, ``preset:dgx-h100:4`` (nodes), ``detect`` (this machine), or a file.

    Raises:
        ClusterError, InputError: naming what is wrong.
    """
    kind, _, rest = text.partition(":")
    if kind == "local":
        return ClusterSpec.local(_count(rest, text, "local:4"))
    if kind == "preset":
        name, _, nodes = rest.partition(":")
        return ClusterSpec.preset(name, nodes=_count(nodes, text, "preset:dgx-h100:4") if nodes else None)
    return ClusterSpec.detect() if text == "detect" else ClusterSpec.load(text)


def check_cluster(plan: Plan, text: str) -> None:
    """Refuse a cluster that is named beside a plan for another number of devices.

    Raises:
        InputError, ClusterError: the plan already says what it is for.
    """
    named = read_cluster(text)
    if named.world_size != plan.cluster.world_size:
        raise InputError(
            f"--plan is already for a cluster, {plan.cluster.name!r} with {plan.cluster.world_size} devices, and "
            f"--cluster {text} has {named.world_size}: leave out --cluster to check the plan, or --plan to plan for it"
        )


def _count(text: str, whole: str, example: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"--cluster {whole!r}: {text!r} is not a number from 1; write for example {example}")
    return int(text)


def read_pins(texts: Sequence[str]) -> dict[str, Any]:
    """``["data=2", "sequence_parallel=true"]`` or ``["data=2,tensor=4"]``; values are JSON, or plain words.

    Raises:
        PinError: no ``=``, or a name twice.
    """
    pins: dict[str, Any] = {}
    several = re.compile(r"\w+=\w+(,\w+=\w+)+")
    split = [part for text in texts for part in (text.split(",") if several.fullmatch(text) else [text])]
    for text in split:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise PinError(f"--pin {text!r} is not name=value; write for example --pin data=2 --pin tensor=4")
        if name in pins:
            raise PinError(f"--pin {name} is given twice: {pins[name]!r} and {value!r}")
        try:
            pins[name] = json.loads(value.lower() if value in ("True", "False") else value)
        except json.JSONDecodeError:
            pins[name] = value
    return pins


def read_inputs(texts: Sequence[str]) -> dict[str, Tensor]:
    """``["input_ids=8x128:int64"]`` as zeros of that shape; the dtype is float32 where none is given.

    Raises:
        InputError: naming the text and how to write it.
    """
    inputs = {}
    for text in texts:
        name, _, form = text.partition("=")
        shape, _, dtype_name = form.partition(":")
        dtype = getattr(torch, dtype_name or "float32", None)
        sizes = shape.split("x")
        if not name or not all(size.isdigit() for size in sizes) or not isinstance(dtype, torch.dtype):
            raise InputError(
                f"--input {text!r} is not NAME=SIZESxBYxX:DTYPE; write for example --input input_ids=8x128:int64"
            )
        inputs[name] = torch.zeros([int(size) for size in sizes], dtype=dtype)
    return inputs


def read_model(
    text: str, batch: int, sequence: int, inputs: Sequence[str], real: bool = False, planned: Plan | None = None
) -> Named:
    """The model that ``text`` names, and its example inputs.

    Args:
        text: ``module:function``, or the path of a Transformers ``config.json``.
        batch, sequence: sizes of the global batch, for Transformers models whose inputs are not given.
        inputs: as for :func:`read_inputs`; they win over all others.
        planned: a plan of the model; its inputs take the place of ``batch`` and ``sequence``.
        real: build a configured model on the CPU if it is small, rather than on the meta device.

    Raises:
        InputError: no such file, module or function, or what it returns is no model.
    """
    given = read_inputs(inputs) or None

    def like_planned(model: nn.Module) -> dict[str, Tensor]:
        return (planned_inputs(planned) if planned else {}) or transformers_inputs(model, batch, sequence)

    if text.endswith(".json") or os.path.isfile(text):
        with _quiet():
            model = _configured(text, real)
        return Named(model, given or like_planned(model))
    model, own = _returned(text)
    if given is None and own is None and hasattr(model, "config"):
        own = like_planned(model)
    return Named(model, given or own)


def _returned(text: str) -> tuple[nn.Module, dict[str, Any] | None]:
    module_name, colon, function_name = text.partition(":")
    if not colon or not module_name or not function_name:
        raise InputError(f"{text!r} names no model: {CONFIGURED}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise InputError(f"cannot import {module_name!r}: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(f"module {module_name!r} has no function {function_name!r}")
    try:
        result = function()
    except AutoparError:
        raise
    except Exception as error:
        raise InputError(f"{text} raised {type(error).__name__}: {error}") from error
    model, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module) or not (inputs is None or isinstance(inputs, dict)):
        raise InputError(
            f"{text} returned {_kind(result)}; it must return a torch.nn.Module, or (module, {{input name: tensor}})"
        )
    return model, inputs


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_kind, value))})"
    return type(value).__name__


def _configured(path: str, real: bool) -> nn.Module:
    try:
        config_dict = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path!r}: {error.strerror}; {CONFIGURED}") from error
    except ValueError as error:
        raise InputError(f"{path!r} is not JSON: {error}") from error
    try:
        import transformers
    except ImportError as error:
        raise InputError(f"{path!r} needs Transformers: pip install 'autopar[hf]'") from error
    names = config_dict.get("architectures") if isinstance(config_dict, dict) else None
    model_type = config_dict.get("model_type") if isinstance(config_dict, dict) else None
    name = str(names[0]) if names else ""
    architecture = getattr(transformers, name, None) if name else None
    if architecture is None or model_type is None:
        raise InputError(
            f'{path!r} names no model: it needs "model_type" and "architectures", for example '
            f'"llama" and ["LlamaForCausalLM"]; it has {model_type!r} and {names!r}'
        )
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        config.use_cache = False
        with torch.device("meta"):
            model = architecture(config)
        if real and sum(p.numel() for p in model.parameters()) <= REAL_ELEMENTS:
            torch.manual_seed(0)
            model = architecture(config)
    except Exception as error:
        raise InputError(f"{name} cannot be built from {path!r}: {type(error).__name__}: {error}") from error
    return model.train()


def planned_inputs(plan: Plan) -> dict[str, Tensor]:
    """The global batch that a plan was made for, as zeros; as far as the plan tells."""
    leaves = {name: plan.account.leaves[name] for name in plan.inputs if name in plan.account.leaves}
    return {name: torch.zeros(leaf.shape, dtype=getattr(torch, leaf.dtype)) for name, leaf in leaves.items()}


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
