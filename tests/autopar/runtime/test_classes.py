"""Sharded classes: one-hot rows, the logit of the label read and written, and losses with margins made of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.verification.verify import verify
from planner.cost.cluster import ClusterSpec
from tests.autopar.ops.test_rows_heavy import check_mechanical
from tests.autopar.runtime.test_layers import MESHES, check_layer, randn

aten = torch.ops.aten
CLASSES, TOKENS = 12, 8
SIZES = [(sizes, ["classes" if f == "a" else f for f in factors]) for sizes, factors in MESHES]
SIZES.append(((2, 2), ["d0", "classes"]))


def at(*shape: int) -> Tensor:
    return torch.randint(0, CLASSES, shape)


@pytest.mark.parametrize("sizes, factors", SIZES)
def test_one_element_of_a_sharded_dim(sizes: Any, factors: list[str]) -> None:
    torch.manual_seed(0)
    check_layer(aten.one_hot.default, (at(TOKENS), CLASSES), sizes, factors)
    check_layer(aten.one_hot.default, (at(TOKENS, 3), CLASSES), sizes, factors)
    check_layer(aten.gather.default, (randn(TOKENS, CLASSES), 1, at(TOKENS, 1)), sizes, factors)
    check_layer(aten.scatter.value, (randn(TOKENS, CLASSES), -1, at(TOKENS, 1), 3.0), sizes, factors)
    check_layer(aten.scatter.src, (randn(TOKENS, CLASSES), 1, at(TOKENS, 1), randn(TOKENS, 1)), sizes, factors)
    is_known, counts = randn(TOKENS, CLASSES) > 0, torch.randint(9, (TOKENS, CLASSES))
    for kept, number in ((is_known, 1), (~is_known, 0.0), (counts, 2.5), (counts, True)):
        check_layer(aten.scatter.value, (kept, 1, at(TOKENS, 1), number), sizes, factors)
    if "d0" not in factors:
        check_layer(aten.gather.default, (randn(CLASSES, TOKENS), 0, at(1, 3)), sizes, factors)


def test_the_other_dims_need_no_layer() -> None:
    assert check_mechanical(aten.one_hot.default, at(4, 2), CLASSES) == {"d0", "d1"}
    assert check_mechanical(aten.gather.default, randn(TOKENS, CLASSES), 1, at(TOKENS, 1)) == {"d0"}
    for source in (3.0, randn(TOKENS, 1)):
        op = aten.scatter.value if isinstance(source, float) else aten.scatter.src
        assert check_mechanical(op, randn(TOKENS, CLASSES), 1, at(TOKENS, 1), source) == {"d0"}
    smaller = randn(TOKENS, CLASSES), 1, at(TOKENS // 2, 1)
    assert not check_mechanical(aten.scatter.value, *smaller, 3.0), "it leaves out some of the others"


class Margin(nn.Module):
    """ArcFace (Deng et al. 2019) and CosFace (Wang et al. 2018), as they are commonly written."""

    def __init__(self, kind: str, classes: int = CLASSES, features: int = 8):
        super().__init__()
        self.kind, self.body = kind, nn.Linear(features, features)
        self.weight = nn.Parameter(torch.randn(classes, features))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(self.body(x)), F.normalize(self.weight))
        if self.kind == "by hand":
            return -(64 * cosine).log_softmax(1).gather(1, labels.unsqueeze(1)).mean()
        if self.kind == "cosface":
            logits = cosine - 0.35 * F.one_hot(labels, cosine.shape[1]).to(cosine.dtype)
        elif self.kind == "gathered":
            target = torch.cos(cosine.gather(1, labels.unsqueeze(1)).clamp(-0.99, 0.99).acos() + 0.5)
            logits = cosine.scatter(1, labels.unsqueeze(1), target)
        else:
            sine = (1 - cosine.square()).clamp(1e-6, 1).sqrt()
            phi = cosine * math.cos(0.5) - sine * math.sin(0.5)
            mark = torch.zeros_like(cosine).scatter_(1, labels.view(-1, 1), 1)
            logits = mark * torch.where(cosine > 0, phi, cosine) + (1 - mark) * cosine
        return F.cross_entropy(64 * logits, labels)


@pytest.mark.parametrize("kind", ["cosface", "gathered", "arcface"])
@pytest.mark.parametrize("pin", [{"tensor": 4}, {"data": 2, "tensor": 2}], ids=str)
def test_a_softmax_with_a_margin_is_verified_with_sharded_classes(kind: str, pin: dict[str, int]) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(TOKENS, 8), "labels": at(TOKENS)}
    found = verify(Margin(kind), ClusterSpec.local(4), example_kwargs=batch, pin=pin)
    assert found.agreement is not None and found.agreement.agrees()
    assert set(found.agreement.gradients) == {"weight", "body.weight", "body.bias"}


@pytest.mark.parametrize("kind", ["cosface", "gathered", "arcface", "by hand"])
def test_a_head_of_millions_of_classes_is_whole_nowhere(kind: str) -> None:
    """Neither the weight of the head nor the logits: each rank has its classes."""
    with torch.device("meta"):
        model, batch = Margin(kind, 4_000_000, 512), {"x": torch.empty(256, 512)}
        batch["labels"] = torch.empty(256, dtype=torch.long)
    plan = autopar.plan(
        model, ClusterSpec.preset("dgx-h100"), example_kwargs=batch, pin={"tensor": 8, "micro_batches": 1}
    )
    assert not plan.coverage and plan.parameters["weight"] == "S(0)"
    assert max(call.bytes_in for call, _ in plan.predicted.collectives) <= 256 * 512 * 4
    whole = 256 * 4_000_000 * 4
    assert plan.predicted.peak_bytes < 4 * 4_000_000 * 512 * 4 / 8 + 12 * whole / 8
