"""Whole models on grids of two and three axes, and with streamed products, against the original in float64.

All ranks are in one process: outputs, every gradient, the types of the program and each collective are compared. The
same on real processes is in ``tests/autopar/driver/test_processes.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import nn

import autopar
from tests.autopar import models
from tests.autopar.captured_once import made
from tests.autopar.models import Batch, Model
from tests.autopar.workers import cluster_of

pytestmark = pytest.mark.usefixtures("capturing_once")

PANELS = {"layers": {"model.layers.*": {"column": "n.panels"}}, "recompute": "full"}
"""As Optimus has it: panels of activations go along columns for every product, again in backward."""
ADDED = {"layers": {"transformer.h.*": {"column": "n.panels"}}, "recompute": "full"}
"""Likewise, where layers are ``addmm``."""
RINGS = {
    **{f"*.{name}_proj": {"tensor": "n.ring"} for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}_proj": {"tensor": "k.ring"} for name in ("o", "down")},
}


def images() -> Batch:
    return models.images(16)


CASES: list[tuple[Callable[[], nn.Module], Callable[[], Batch], dict[str, Any]]] = [
    (models.gpt2, models.text, {"tensor": [2, 2], "data": 2, "zero": 3, **ADDED}),
    (models.llama, models.text, {"tensor": [2, 2], **PANELS}),
    (models.llama, models.text, {"tensor": 2, "data": 2, "zero": 3, "layers": RINGS}),
    (models.llama, models.text, {"tensor": [2, 2], "depth": 2}),
    (models.llama, models.text, {"tensor": [1, 2], "pipeline": 2, "micro_batches": 2}),
    (models.vit, images, {"tensor": [2, 2, 2]}),
]


@pytest.mark.parametrize(
    "model, batch, pin", CASES, ids=lambda each: each.__name__ if callable(each) else "-".join(map(str, each.values()))
)
def test_equals_the_original(model: Callable[[], nn.Module], batch: Callable[[], Batch], pin: dict[str, Any]) -> None:
    module, example = Model(model.__name__, model, batch).build()
    ranks = int(np.prod(pin["tensor"])) * math.prod(pin.get(name, 1) for name in ("data", "depth", "pipeline"))
    pin = {"pipeline": 1, "micro_batches": 1, **pin}
    made(module, model)
    plan = autopar.plan(module, cluster_of(ranks), example_kwargs=example, pin=pin)
    assert plan.pin == pin
    found = autopar.verify(module, plan, example_kwargs=example)
    assert found.verdict == "verified", str(found)
