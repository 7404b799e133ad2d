"""A model that returns more than its loss, some of which is trained by nothing; run in processes by test_offload."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from planner.base.errors import InputError
from planner.cost.cluster import ClusterSpec
from tests.autopar.carried import Batch, same_gradients


class Several(nn.Module):
    """The loss is not the first number, and ``head`` is no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        powers = []
        for layer in self.layers:
            made = layer(x)
            powers.append(made.pow(2).mean())
            x = x + made
        return {"power": sum(powers), "loss": x.square().mean() + 0.1 * sum(powers), "logits": self.head(x)}


class Tables(nn.Module):
    """Two tables that are added up, and read by blocks at both ends: autograd finds one gradient for both."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.kinds = (nn.Parameter(torch.randn(16)) for _ in range(2))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for number, layer in enumerate(self.layers):
            x = x + layer(x)
            if number == 0:
                x = x + (self.places + self.kinds)
        return {"loss": x.square().mean(), "size": (x.detach() * self.places * self.kinds).mean().detach()}


def adds_up_apart() -> None:
    """Gradients of micro-batches, where those of two parameters came in one memory."""
    torch.manual_seed(0)
    original = Tables().double()
    pmodel = autopar.parallelize(
        copy.deepcopy(original),
        ClusterSpec.local(1, cores=2, host_memory_bytes="1 GiB"),
        example_kwargs=batch(0),
        pin={"micro_batches": 4, "offload": "host"},
    )
    for module in (pmodel, original):
        module(**batch(1))["loss"].backward()
    same_gradients(pmodel, original)


def batch(seed: int) -> Batch:
    return {"x": torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))}


def trains(pin: dict[str, Any]) -> None:
    """Backward goes from the loss; from what is beside it, the error says so, and the next step is right."""
    torch.manual_seed(0)
    original = Several().double()
    cluster = ClusterSpec.local(dist.get_world_size(), cores=2, host_memory_bytes="1 GiB")
    pmodel = autopar.parallelize(
        copy.deepcopy(original), cluster, example_kwargs=batch(0), pin={**pin, "offload": "host"}
    )
    for seed in range(2):
        if "micro_batches" not in pin:
            with pytest.raises(InputError, match=r"came to a result of block \d .* the output called 'loss', or else"):
                pmodel(**pmodel.shard(batch(seed)))["logits"].sum().backward()
        for module, given in ((pmodel, pmodel.shard(batch(seed))), (original, batch(seed))):
            module.zero_grad()
            module(**given)["loss"].backward()
        same_gradients(pmodel, original)
        with torch.no_grad():
            for each in (pmodel, original):
                for parameter in each.parameters():
                    parameter.mul_(0.9)
