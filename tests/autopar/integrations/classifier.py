"""A model whose loss is computed beside it, the same that computes it by itself, and their samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.down(torch.relu(self.norm(self.up(x))))
        return scores


class ScoresAndLoss(Scores):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        scores = super().forward(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores}


def loss_of(scores: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(scores, batch["labels"])


def rows() -> list[dict[str, Tensor]]:
    given = torch.randn(16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [{"x": x, "labels": torch.tensor(number % 4)} for number, x in enumerate(given)]


class Samples(IterableDataset[dict[str, Any]]):
    """Samples that come in their own order."""

    def __init__(self, samples: list[dict[str, Any]]):
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.samples)
