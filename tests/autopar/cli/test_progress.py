"""Progress: what planning says while it is at it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import autopar
from planner.cost.cluster import ClusterSpec


def test_parallelize_tells_what_it_does() -> None:
    said: list[str] = []
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        batch = {"input": torch.randn(4, 8)}
        autopar.parallelize(nn.Linear(8, 8), ClusterSpec.local(1), example_kwargs=batch, progress=said.append)
    finally:
        dist.destroy_process_group()
    assert said[0] == "capturing Linear"
    assert any(line.startswith("planning") and "for 1 devices" in line for line in said)
    assert any(line.endswith("a step on all 1, the best so far") for line in said)
