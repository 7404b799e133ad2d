"""Complex writes: spectral convolutions with complex weights, which fill a spectrum in place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.verification.verify import verify
from planner.cost.cluster import ClusterSpec

MODES = 4


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv2d(4, 4, 1)
        low, high = (torch.randn(4, 4, MODES, MODES, dtype=torch.cfloat) / 8 for _ in range(2))
        self.low, self.high = nn.Parameter(low), nn.Parameter(high)
        self.mean = nn.Parameter(torch.randn(4, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        spectrum = torch.fft.rfft2(x)
        kept = torch.zeros_like(spectrum)
        for rows, weight in ((slice(MODES), self.low), (slice(-MODES, None), self.high)):
            kept[:, :, rows, :MODES] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, rows, :MODES], weight)
        kept[..., 0, 0] = kept[..., 0, 0] + self.mean
        return (torch.fft.irfft2(kept, s=x.shape[-2:]) + x).square().mean()


def test_a_spectral_convolution_is_verified_in_float64() -> None:
    torch.manual_seed(0)
    model = Spectral()
    batch = {"x": torch.randn(4, 4, 12, 12)}
    found = verify(model, ClusterSpec.local(2), example_kwargs=batch, pin={"data": 2, "zero": 3})
    assert found.agreement is not None and found.agreement.agrees()
    assert found.tolerance is not None and found.tolerance.dtypes == "float64"
    assert set(found.agreement.gradients) == {name for name, _ in model.named_parameters()}
