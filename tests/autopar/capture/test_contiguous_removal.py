"""Contiguous removal: what follows ``contiguous`` lies as it is seen to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.capture.capture import capture
from autopar.capture.lowering import lower


class Views(nn.Module):
    """What follows ``contiguous``: a view of it, a part of it, and what computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        ordered = x.transpose(0, 1).contiguous()
        flat, part, third = ordered.view(-1), ordered[1], ordered.mul(self.scale)
        return flat.sum() + part.sum() + third.view(-1).sum()


def test_what_follows_contiguous_is_seen_again() -> None:
    for device in ("cpu", "meta"):
        graph = lower(capture(Views().to(device), None, {"x": torch.ones(3, 4, device=device)}))
        shares = {node.op.split(".")[1]: node.shares for node in graph.nodes if "." in node.op}
        views = [node.shares for node in graph.nodes if node.op.startswith("aten.view")]
        assert shares["transpose"] == (0,) and shares["select"] == (0,) and shares["mul"] == (-1,)
        assert views == [(-1,), (-1,)]  # of what is transposed, as its product is
