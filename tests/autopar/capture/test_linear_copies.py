"""Linear copies: linear layers copy nothing that the graph does not show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.capture import capture
from autopar.capture.passes.linear_copies import CONTIGUOUS, LINEAR
from autopar.verification.verify import verify
from planner.cost.cluster import ClusterSpec

Changes = Callable[[Tensor], Tensor]

READ: dict[str, tuple[Changes, bool]] = {
    "as it is": (lambda x: x, False),
    "rows of a wider one": (lambda x: F.pad(x, (0, 4))[..., :6], False),
    "rows apart": (lambda x: x.repeat(1, 2, 1)[:, ::2], False),
    "batch second": (lambda x: x.transpose(0, 1), True),
    "columns": (lambda x: x.repeat(1, 1, 2).transpose(1, 2)[:, :6, :6], True),
    "put in order": (lambda x: x.transpose(0, 1).contiguous(), True),
    "a matrix": (lambda x: x[0].T[:, :6], False),
}


class Reads(nn.Module):
    def __init__(self, changes: Changes):
        super().__init__()
        self.before, self.changes, self.inner = nn.Linear(6, 6), changes, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.changes(self.before(x))).square().mean()


@pytest.mark.parametrize("how", READ)
def test_what_a_linear_layer_copies_is_in_the_graph(how: str) -> None:
    changes, is_copied = READ[how]
    model, batch = Reads(changes).double(), {"x": torch.randn(4, 6, 6, dtype=torch.float64)}
    nodes = [*capture(model, None, batch).graph.nodes]
    last = [node for node in nodes if node.target is LINEAR][-1]
    assert (last.args[0].target is CONTIGUOUS) == is_copied
    assert sum(node.target is CONTIGUOUS for node in nodes) == is_copied
    kept: set[int] = set()

    def keep(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    operand = changes(model.before(batch["x"])).detach()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        F.linear(operand, model.inner.weight, model.inner.bias)
    if how != "put in order":
        assert (operand.untyped_storage().data_ptr() in kept) != is_copied
    assert verify(model, ClusterSpec.local(2), example_kwargs=batch)
