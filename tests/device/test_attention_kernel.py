"""On a GPU: the kernels of attention in pieces, whose results are merged, beside the same in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from autopar.operators.attention import attention
from autopar.runtime.layers.partial_attention import Places, attend
from planner.ops.attention import Sight

pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current"),
]


@pytest.mark.parametrize("dtype, error", [(torch.bfloat16, 2e-2), (torch.float32, 2e-3), (torch.float64, 1e-10)])
@pytest.mark.parametrize("hides", ["nothing", "later", "padding", "window"])
def test_kernels_of_gpus(dtype, error, hides):
    """The second half of a sequence, with grouped queries and values of another size, meets all keys."""
    torch.manual_seed(0)
    shapes = (2, 4, 96, 40), (2, 2, 96, 40), (2, 2, 96, 24), (2, 4, 96, 24)
    whole = [torch.randn(shape, dtype=torch.float64, device="cuda") for shape in shapes]
    mask = (torch.arange(96, device="cuda") < 50).view(1, 1, 1, 96) if hides == "padding" else None
    wide = [t.clone().requires_grad_() for t in whole[:3]]
    half = whole[3].clone()
    half[:, :, :48] = 0
    seen = Sight(hides in ("later", "window"), 20 if hides == "window" else None)
    if hides == "window":
        expected = attention(*wide, is_causal=True, enable_gqa=True, window=20)
    else:
        expected = scaled_dot_product_attention(*wide, mask, is_causal=hides == "later", enable_gqa=True)
    gradients = torch.autograd.grad(expected, wide, half)

    given = [(t[:, :, 48:] if at in (0, 3) else t).to(dtype) for at, t in enumerate(whole)]
    leaves = [t.requires_grad_() for t in given[:3]]
    places = Places(torch.tensor([48]), 48, torch.tensor(0), None)
    out = attend(*leaves, mask, 0.0, seen, 40**-0.5, places)
    found = torch.autograd.grad(out, leaves, given[3])
    rights = (expected[:, :, 48:], gradients[0][:, :, 48:], *gradients[1:])
    for each, right in zip((out, *found), rights, strict=True):
        assert (each.double() - right).norm() < error * right.norm()


@pytest.mark.parametrize("dtype, error", [(torch.bfloat16, 2e-2), (torch.float32, 2e-3), (torch.float64, 1e-10)])
@pytest.mark.parametrize("causal", [True, False])
def test_weights_are_dropped_alike_in_backward(dtype, error, causal):
    """Values that are the identity tell which; what is drawn with the same seed is the same."""
    torch.manual_seed(0)
    query, key, value, cotangent = (torch.randn(2, 4, 96, 32, dtype=torch.float64, device="cuda") for _ in range(4))
    half = torch.zeros(96, device="cuda", dtype=torch.float64)
    half[48:] = 1
    places, identity = (
        Places(torch.tensor([48]), 48, torch.tensor(0), None),
        torch.eye(96, device="cuda").expand(2, 4, 96, 96),
    )

    def attended(values):
        torch.manual_seed(1)
        leaves = [t.to(dtype).requires_grad_() for t in (query[:, :, 48:], key, values)]
        return attend(*leaves, None, 0.3, Sight(causal), 32**-0.5, places), leaves

    kept = torch.nn.functional.pad(attended(identity)[0] != 0, (0, 0, 48, 0))
    wide = [t.clone().requires_grad_() for t in (query, key, value)]
    scores = wide[0] @ wide[1].mT * 32**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(96, 96, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    expected = (scores.softmax(-1) * kept / 0.7) @ wide[2]
    gradients = torch.autograd.grad(expected, wide, cotangent * half.unsqueeze(-1))
    out, leaves = attended(value)
    found = torch.autograd.grad(out, leaves, cotangent[:, :, 48:].to(dtype))
    rights = (expected[:, :, 48:], gradients[0][:, :, 48:], *gradients[1:])
    for each, right in zip((out, *found), rights, strict=True):
        assert (each.double() - right).norm() < error * right.norm()
