"""On a GPU: the kernels of attention in pieces, whose results are merged, beside the same in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from autopar.runtime.layers.partial_attention import Places, attend

pytestmark = pytest.mark.device


@pytest.mark.parametrize("dtype, error", [(torch.bfloat16, 2e-2), (torch.float32, 2e-3), (torch.float64, 1e-10)])
@pytest.mark.parametrize("hides", ["nothing", "later", "padding"])
def test_kernels_of_gpus(dtype, error, hides):
    """The second half of a sequence, with grouped queries and values of another size, meets all keys."""
    torch.manual_seed(0)
    shapes = (2, 4, 96, 40), (2, 2, 96, 40), (2, 2, 96, 24), (2, 4, 96, 24)
    whole = [torch.randn(shape, dtype=torch.float64, device="cuda") for shape in shapes]
    mask = (torch.arange(96, device="cuda") < 50).view(1, 1, 1, 96) if hides == "padding" else None
    wide = [t.clone().requires_grad_() for t in whole[:3]]
    half = whole[3].clone()
    half[:, :, :48] = 0
    expected = scaled_dot_product_attention(*wide, mask, is_causal=hides == "later", enable_gqa=True)
    gradients = torch.autograd.grad(expected, wide, half)

    given = [(t[:, :, 48:] if at in (0, 3) else t).to(dtype) for at, t in enumerate(whole)]
    leaves = [t.requires_grad_() for t in given[:3]]
    places = Places(torch.tensor([48]), 48, torch.tensor(0), None)
    out = attend(*leaves, mask, hides == "later", 40**-0.5, places)
    found = torch.autograd.grad(out, leaves, given[3])
    rights = (expected[:, :, 48:], gradients[0][:, :, 48:], *gradients[1:])
    for each, right in zip((out, *found), rights, strict=True):
        assert (each.double() - right).norm() < error * right.norm()
