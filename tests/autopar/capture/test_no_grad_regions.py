"""No-grad regions: a model that writes in place has its gradients where they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture.capture import capture
from autopar.capture.lowering import lower
from autopar.verification.verify import verify
from planner.base.errors import CaptureError
from planner.cost.cluster import ClusterSpec

X = torch.randn(4, 8)


class WritesBeside(nn.Module):
    """Targets without gradients in a model that writes in place: torch's own pass forgets where gradients were off."""

    def __init__(self, how: str):
        super().__init__()
        self.up, self.how = nn.Linear(8, 8), how
        self.register_buffer("kept", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        kept = torch.zeros_like(x)
        with torch.no_grad():
            target = x * 2 + 1
            if self.how == "copied":
                kept.copy_(x)
            elif self.how == "in part":
                kept[:, :3] = x[:, :3]
            elif self.how == "in the region":
                target.mul_(3)
            elif self.how == "a buffer":
                self.kept.mul_(0.9).add_(x.mean(0))
            elif self.how == "what has a gradient":
                x.view(-1).mul_(2)
        if self.how == "elsewhere":
            kept[:, :3] = x[:, :3]
        return ((target + kept + self.kept) * x).square().mean()


@pytest.mark.parametrize("how", ["copied", "in part", "in the region", "elsewhere"])
def test_writes_in_place_leave_gradients_where_they_were(how):
    torch.manual_seed(0)
    found = verify(WritesBeside(how), ClusterSpec.local(2), example_kwargs={"x": torch.randn(4, 8)}, pin={"data": 2})
    assert found.agreement is not None and found.agreement.agrees()


def test_what_is_written_without_gradients_has_none():
    graph = lower(capture(WritesBeside("a buffer"), (X,)))
    ((_, update),) = graph.updates
    assert not graph.type_of(update).grad and graph.type_of(graph.outputs[0]).grad
    with pytest.raises(CaptureError, match=r"writes under torch.no_grad\(\) into linear, which has a gradient"):
        capture(WritesBeside("what has a gradient"), (X,))
