"""Buffers that a forward assigns keep their new values, as those do that it writes in place."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import ClusterSpec
from autopar.capture.capture import capture
from planner.base.errors import CaptureError

X = torch.randn(4, 8)
Assign = Callable[[Any, Tensor], None]


class Layer(nn.Module):
    def __init__(self, assign: Assign):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("earlier", torch.ones(8))
        self.register_buffer("cache", None)
        self.assign = assign

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.assign(self, y)
        return y + self.mean


class Model(nn.Module):
    def __init__(self, assign: Assign):
        super().__init__()
        self.layers = nn.ModuleList([Layer(assign) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def average(layer: Any, y: Tensor) -> None:
    layer.mean = 0.9 * layer.mean + 0.1 * y.mean(0)


def average_twice(layer: Any, y: Tensor) -> None:
    average(layer, y)
    layer.mean.add_(y.detach().mean(0))


def registered_anew(layer: Any, y: Tensor) -> None:
    layer.register_buffer("mean", layer.mean + y.detach().mean(0))


def shifted(layer: Any, y: Tensor) -> None:
    layer.earlier, layer.mean = layer.mean, y.detach().mean(0)


def exchanged(layer: Any, y: Tensor) -> None:
    layer.earlier, layer.mean = layer.mean, layer.earlier


CHANGES: list[tuple[Assign, int]] = [
    (average, 3),
    (average_twice, 3),
    (registered_anew, 3),
    (shifted, 6),
    (exchanged, 6),
]


@pytest.mark.parametrize(("assign", "changed"), CHANGES)
@pytest.mark.parametrize("fold", [False, True])
def test_what_inner_modules_assign_is_an_update(assign: Assign, changed: int, fold: bool) -> None:
    model = Model(assign)
    before = dict(model.named_buffers())
    assert len(capture(model, (X,), fold=fold).updates) == changed
    assert all(buffer is before[name] for name, buffer in model.named_buffers())


@pytest.mark.parametrize("assign", [average, exchanged])
def test_buffers_hold_what_was_assigned_after_a_step(assign: Assign) -> None:
    found = autopar.verify(Model(assign), ClusterSpec.local(2), pin={"data": 2}, example_kwargs={"x": X})
    assert found.agreement is not None and found.agreement.agrees()
    assert {"layers.0.mean", "layers.2.mean"} <= found.agreement.buffers.keys()


def test_a_buffer_that_was_empty_is_the_models_own_affair() -> None:
    def fills(layer: Any, y: Tensor) -> None:
        layer.cache = torch.arange(8.0)
        layer.mean.add_(layer.cache)

    assert [name for name, _ in capture(Model(fills), (X,)).updates] == [f"layers.{i}.mean" for i in range(3)]


def grows(layer: Any, y: Tensor) -> None:
    layer.earlier = torch.cat([layer.earlier, y.detach().mean(0)])[:9]


def empties(layer: Any, y: Tensor) -> None:
    layer.earlier = None


def casts(layer: Any, y: Tensor) -> None:
    layer.earlier = layer.earlier.bool()


@pytest.mark.parametrize(
    ("assign", "why"),
    [
        (grows, "buffer 'earlier', and it is float32 (8,), and would become float32 (9,)"),
        (empties, "buffer 'earlier', and it is float32 (8,), and would become a NoneType"),
        (casts, "buffer 'earlier', and it is float32 (8,), and would become bool (8,)"),
    ],
)
@pytest.mark.parametrize("fold", [False, True])
def test_what_a_buffer_cannot_hold_is_refused(assign: Assign, why: str, fold: bool) -> None:
    with pytest.raises(CaptureError, match=re.escape(f"module layers.0 (Layer) assigns to its {why}")) as error:
        capture(Model(assign), (X,), fold=fold)
    assert "copy_" in str(error.value)


def test_a_buffer_that_others_share_is_refused() -> None:
    model = Model(lambda layer, y: average(layer, y) if layer is first else None)
    first: Any = model.layers[0]
    model.layers[1].mean = first.mean
    with pytest.raises(
        CaptureError, match=r"module layers\.0 .*buffer 'layers\.1\.mean', the same tensor, keeps its old"
    ):
        capture(model, (X,))
