"""On a GPU: experts in bfloat16, where torch's grouped product runs, beside the same in float64."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.operators import grouped

pytestmark = pytest.mark.device


@pytest.mark.parametrize("transposed", [False, True])
def test_torchs_grouped_product_is_ours(transposed):
    """Experts without a token included, whose gradients it might leave as they were."""
    torch.manual_seed(0)
    tokens, k, count, width, hidden = 512, 2, 8, 128, 64
    shapes = (
        ((count, width, 2 * hidden), (count, hidden, width))
        if transposed
        else ((count, 2 * hidden, width), (count, width, hidden))
    )
    wide = [torch.randn(s, dtype=torch.float64, device="cuda") / 8 for s in ((tokens, width), (tokens, k), *shapes)]
    indices = torch.stack([torch.randperm(count - 2, device="cuda")[:k] + 1 for _ in range(tokens)])
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        x, weights, up, down = given = [t.to(dtype).requires_grad_() for t in wide]
        if dtype == torch.bfloat16:
            assert grouped._is_sound(x, up if transposed else up.mT)
        y = autopar.experts(x, indices, weights, up, down, transposed=transposed)
        found.append([y, *torch.autograd.grad(y, given, torch.ones_like(y))])
    for got, wanted in zip(*found, strict=True):
        error = (got.double() - wanted).norm() / wanted.norm()
        assert error < 0.02
    for gradient in found[0][3:]:
        assert not gradient[0].any() and not gradient[-1].any()
