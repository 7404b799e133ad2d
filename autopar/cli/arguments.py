"""Parses what the command line names: clusters, pins, models and their inputs.

Nothing here needs torch, so that wrong words are refused at once; :mod:`autopar.cli.model_loading` loads the
models.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.base.errors import InputError, PinError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.mesh_candidates import pinned_mesh
from planner.formulation.constraints.pins import Pins
from planner.ir.graph import ITEM_BYTES
from planner.plan.plan import Plan

CONFIGURED = (
    "write module:function or file.py:function (a function that returns a model, or a model and its example inputs), "
    "or the path of a Transformers config.json"
)
TORCHS = {
    **{"float": "float32", "double": "float64", "half": "float16"},
    **{"long": "int64", "int": "int32", "short": "int16", "cfloat": "complex64", "cdouble": "complex128"},
}
"""Torch's other names for dtypes."""
TRAINED = ("float32", "bfloat16", "float16", "float64")
"""The dtypes in which a model can be made."""


@dataclass(frozen=True)
class Made:
    """A model that ``function`` of ``module`` returns."""

    module: str
    function: str

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"


@dataclass(frozen=True)
class Configured:
    """A Transformers model, by its configuration's ``path``, the name of its class, and its dtype if that is said."""

    path: str
    architecture: str
    dtype: str | None = None


@dataclass(frozen=True)
class Form:
    """Shape and dtype of an input; the dtype by torch's name."""

    shape: tuple[int, ...]
    dtype: str


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
    """``["data=2", "sequence_parallel=true"]`` or ``["tensor=[2,2],depth=2"]``; values are JSON, or plain words.

    Raises:
        PinError: no ``=``, a name twice, or what starts like JSON and is not.
    """
    pins: dict[str, Any] = {}
    each = r"\w+=(\w+|\[[\w,\s]*\])"
    several = re.compile(f"{each}(,{each})+")
    split = [part for text in texts for part in (re.split(r",(?=\w+=)", text) if several.fullmatch(text) else [text])]
    for text in split:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise PinError(f"--pin {text!r} is not name=value; write for example --pin data=2 --pin tensor=4")
        if name in pins:
            raise PinError(f"--pin {name} is given twice: {pins[name]!r} and {value!r}")
        try:
            pins[name] = json.loads(value.lower() if value in ("True", "False") else value)
        except json.JSONDecodeError as error:
            if value[0] in "{[\"'":
                raise PinError(
                    f"--pin {text!r} is not JSON from character {error.pos + 1} of its value on: {error.msg}; write "
                    "strings and keys in double quotes, and each pin with a --pin of its own, for example "
                    "--pin data=2 --pin 'zero={\"embed*\": 0}'"
                ) from error
            pins[name] = value
    return pins


def check_pins(pin: Mapping[str, Any], cluster: ClusterSpec) -> None:
    """Refuse pins that this cluster's devices cannot respect, whatever the model.

    Raises:
        PinError: names the pin.
    """
    pins = Pins.parse(pin)
    if pins.sizes and cluster.world_size % (pins.stages or 1) == 0:
        pinned_mesh(cluster, pins.sizes, pins.stages or 1)


def read_inputs(texts: Sequence[str]) -> dict[str, Form]:
    """``["input_ids=8x128:int64"]`` as forms by name; the dtype is float32 where none is given.

    Raises:
        InputError: naming the text and how to write it.
    """
    inputs = {}
    for text in texts:
        name, _, form = text.partition("=")
        shape, _, dtype = form.partition(":")
        dtype = TORCHS.get(dtype, dtype or "float32")
        sizes = shape.split("x")
        if not name or not all(size.isdigit() for size in sizes) or dtype not in ITEM_BYTES:
            raise InputError(
                f"--input {text!r} is not NAME=SIZESxBYxX:DTYPE; write for example --input input_ids=8x128:int64"
            )
        inputs[name] = Form(tuple(map(int, sizes)), dtype)
    return inputs


def read_dtype(text: str, said_by: str = "--dtype") -> str:
    """A dtype that a model can be made in, by torch's name: ``bfloat16``, ``torch.bfloat16``, ``half``.

    Args:
        said_by: who says so, for messages.

    Raises:
        InputError: it is none of these.
    """
    name = text.removeprefix("torch.")
    name = TORCHS.get(name, name)
    if name not in TRAINED:
        raise InputError(f"{said_by} {text!r} is no dtype to train a model in: give --dtype {', '.join(TRAINED)}")
    return name


def read_model(text: str, dtype: str | None = None) -> Made | Configured:
    """Which model ``module:function``, ``file.py:function``, or the path of a Transformers ``config.json``, names.

    Args:
        dtype: what takes the place of the dtype that a configuration says.

    Raises:
        InputError: neither; no such file or module; or a file that is no configuration of a model.
    """
    module, colon, function = text.rpartition(":") if ":" in text else (text, "", "")
    is_file = module.endswith(".py")
    if not is_file and (text.endswith(".json") or os.path.isfile(text)):
        return _configured(text, dtype)
    if not colon or not module or not function:
        raise InputError(f"{text!r} names no model: {CONFIGURED}")
    folder = os.getcwd()
    if is_file:
        if not os.path.isfile(module):
            raise InputError(f"cannot read {module!r}: there is no such file; {CONFIGURED}")
        folder, module = os.path.dirname(os.path.abspath(module)), Path(module).stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    package = module.partition(".")[0]
    if package not in sys.modules and (not package or importlib.util.find_spec(package) is None):
        raise InputError(f"cannot import {module!r}: there is no module {package!r} here, nor is it installed")
    return Made(module, function)


def _configured(path: str, dtype: str | None) -> Configured:
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path!r}: {error.strerror}; {CONFIGURED}") from error
    except ValueError as error:
        raise InputError(f"{path!r} is not JSON: {error}") from error
    names = config.get("architectures") if isinstance(config, dict) else None
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not names or model_type is None:
        raise InputError(
            f'{path!r} names no model: it needs "model_type" and "architectures", for example '
            f'"llama" and ["LlamaForCausalLM"]; it has {model_type!r} and {names!r}'
        )
    # Transformers renamed it.
    key = next((key for key in ("dtype", "torch_dtype") if config.get(key) is not None), None)
    if dtype is None and key is not None:
        dtype = read_dtype(str(config[key]), f'{path!r} with "{key}"')
    return Configured(path, str(names[0]), dtype)
