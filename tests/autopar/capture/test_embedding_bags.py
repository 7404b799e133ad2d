"""Embedding bags: one operator, verified along batch, ids, rows and features, in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.verification.verify import verify
from planner.cost.cluster import ClusterSpec

BAGS, SIZE, IDS = 8, 5, 40
PINS: dict[str, dict[str, Any]] = {
    "batch": {"data": 2},
    "rows": {"tensor": 2, "layers": {"bags": {"tensor": "v"}}},
    "features": {"tensor": 2, "layers": {"bags": {"tensor": "h"}}},
}
MODES = [("sum", None), ("sum", 3), ("mean", None), ("mean", -1), ("max", 3), ("max", None)]


class Bagged(nn.Module):
    def __init__(self, mode: str, padding: int | None, has_end: bool):
        super().__init__()
        self.bags = nn.EmbeddingBag(16, 8, mode=mode, padding_idx=padding, include_last_offset=has_end)
        self.out = nn.Linear(8, 4)

    def forward(self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        return self.out(self.bags(ids, offsets, per_sample_weights=weights)).square().mean()


@pytest.mark.parametrize("sharded", PINS)
@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("mode, padding", MODES)
def test_bags_are_verified(mode: str, padding: int | None, has_offsets: bool, sharded: str) -> None:
    """Also where a bag is empty, or all padding; of a sum samples are weighted."""
    torch.manual_seed(0)
    has_end = has_offsets and sharded != "batch"  # which a batch of offsets is not sharded with
    ids = torch.randint(0, 16, (IDS,))
    ids[10:15] = 3
    batch = {"ids": ids if has_offsets else ids.view(BAGS, SIZE)}
    if has_offsets:
        batch["offsets"] = torch.tensor([0, 3, 3, 10, 15, 20, 30, 36, *([IDS] if has_end else [])])
    if mode == "sum" and padding is None:
        batch["weights"] = torch.rand(batch["ids"].shape, requires_grad=True)
    found = verify(Bagged(mode, padding, has_end), ClusterSpec.local(2), example_kwargs=batch, pin=PINS[sharded])
    assert found.agreement is not None and found.agreement.agrees()
    assert set(found.agreement.gradients) == {"bags.weight", "out.weight", "out.bias"}


def test_bags_of_one_size_are_sharded_by_batch() -> None:
    batch = {"ids": torch.zeros(BAGS, SIZE, dtype=torch.long)}
    plan = autopar.plan(Bagged("mean", None, False), ClusterSpec.local(2), example_kwargs=batch, pin={"data": 2})
    assert plan.inputs["ids"] == "S(0)" and not plan.coverage
    assert [op.meaning for b in plan.account.blocks for op in b.ops.values() if "bags.weight" in op.parameters] == [
        ("batch",)
    ]
