"""Linear layers in float8: within what rounding each operand to it may do, forward and backward, and at its price."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.driver.plan import assign, plan_traced, staged
from autopar.driver.trace import trace
from autopar.runtime.layers.float8_linear import float8_linear
from autopar.verification.simulator import Simulation
from benchmarks.memory import observed_peak
from planner.base.errors import ClusterError, PinError
from planner.cost.cluster import ClusterSpec
from planner.cost.kernels import Scaling
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.plan.plan import Plan

WIDTH, TOKENS, RANKS = 64, 128, 4
BFLOAT16, FLOAT32 = torch.finfo(torch.bfloat16).eps / 2, torch.finfo(torch.float32).eps / 2
ROUNDING, SUBNORMAL = 2.0**-4, 2.0**-10 / 224
"""Of ``float8_e4m3fn``, whose mantissa has three bits: the relative error of rounding once; and the absolute one of
what is smaller than its normal numbers, 2^-10 where the largest magnitude is scaled to more than 224, as a share of
that.
"""


def error(matrix: Tensor) -> Tensor:
    """What rounding to float8 does to each element at most; scales of rows, or of a rank's part, do less."""
    return torch.maximum(ROUNDING * matrix.abs(), SUBNORMAL * matrix.abs().max())


def most(left: Tensor, right: Tensor, terms: int = 1) -> Tensor:
    """How far ``left @ right`` in float8 may be from exact.

    ``|ab - (a + ea)(b + eb)| <= |a| eb + |b| ea + ea eb``, summed; float32 sums ``k`` of them with ``k`` roundings; and
    ``terms`` of a sum over ranks are rounded to bfloat16, and their sums.
    """
    e_left, e_right = error(left), error(right)
    rounded = left.abs() @ e_right + e_left @ right.abs() + e_left @ e_right
    size = left.abs() @ right.abs() + rounded
    return rounded + (left.shape[1] * FLOAT32 + 1.01 * (2 * terms - 1) * BFLOAT16) * size


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_each_product_is_within_the_rounding_of_its_operands(scaling: Scaling) -> None:
    """And is none in bfloat16, which is far nearer. A row of large numbers costs others where there is one scale."""
    torch.manual_seed(0)
    x, w, dy = (torch.randn(size, dtype=torch.bfloat16) for size in ((2, 64, 48), (32, 48), (2, 64, 32)))
    bias = torch.randn(32, dtype=torch.bfloat16)
    x[0, 0] *= 64
    for each in (x, w, bias):
        each.requires_grad_()
    y = float8_linear(x, w, bias, scaling=scaling)
    y.backward(dy)
    (rows, weight), grad = ((t.detach().double().flatten(0, -2)) for t in (x, w)), dy.double().flatten(0, -2)
    added = (2 * BFLOAT16) * bias.detach().double().abs()
    assert x.grad is not None and w.grad is not None and bias.grad is not None
    for found, left, right, more in (
        (y - bias, rows, weight.t(), added + 2 * BFLOAT16 * y.detach().double().flatten(0, -2).abs()),
        (x.grad, grad, weight, 0.0),
        (w.grad, grad.t(), rows, 0.0),
    ):
        off = (found.detach().double().flatten(0, -2) - left @ right).abs()
        assert (off <= most(left, right) + more).all()
        assert (off > 4 * BFLOAT16 * (left.abs() @ right.abs()) + more).any()
    assert torch.equal(bias.grad, dy.flatten(0, -2).sum(0))


def test_a_row_of_large_numbers_costs_others_only_where_there_is_one_scale() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(32, 48, dtype=torch.bfloat16), torch.randn(32, 48, dtype=torch.bfloat16)
    x[0] *= 2.0**14
    found = {scaling: float8_linear(x, w, scaling=scaling)[1:] for scaling in ("tensorwise", "rowwise")}
    exact = (x.double() @ w.double().t())[1:]
    off = {scaling: (each.double() - exact).norm() / exact.norm() for scaling, each in found.items()}
    assert off["rowwise"] < ROUNDING < off["tensorwise"]


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return y + self.up(x)


class Beside(nn.Module):
    """Blocks that all read what comes in, so that each gradient is a product of that and the same ``c``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Added() for _ in range(3))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        y = c
        for layer in self.layers:
            y = layer(x, y)
        return (y * c).sum()


def cluster() -> ClusterSpec:
    """Of local processes, which multiply in float8 as fast as in float32."""
    spec = ClusterSpec.local(RANKS).to_dict()
    peaks = spec["device"]["peak_flops_per_s"]
    return ClusterSpec.from_dict(
        {**spec, "device": {**spec["device"], "peak_flops_per_s": {**peaks, "float8_e4m3fn": peaks["float32"]}}}
    )


def made() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Beside().bfloat16(), (torch.randn(TOKENS, WIDTH).bfloat16(), torch.randn(TOKENS, WIDTH).bfloat16())


def planned(pin: Mapping[str, Any], spec: ClusterSpec | None = None) -> Plan:
    model, args = made()
    pins = Pins.parse({"pipeline": 1, "micro_batches": 1, **pin})
    return plan_traced(trace(model, args), spec or cluster(), pins, Training())


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("pin", [
    {"data": 2, "tensor": 2, "zero": 3, "recompute": "full"}, {"data": 4, "zero": 0},
    {"data": 2, "replicate": 2, "zero": 2, "micro_batches": 2},
], ids=str)  # fmt: skip
def test_gradients_of_a_plan_are_within_the_rounding(pin: Mapping[str, Any], scaling: Scaling) -> None:
    model, args = made()
    plan, traced = planned({**pin, "float8": scaling}), trace(model, args)
    assignment, micro_batched = staged(plan, assign(traced, plan))
    with Simulation(model, traced.captured, assignment, 0, micro_batched) as simulation:
        simulation.module(*simulation.inputs(args, {})[0]).backward()
        leaves = {leaf.name: leaf for leaf in simulation.module.interface.leaves}
        found = {
            name: simulation.whole(parameter.grad, leaves[name].layout, tuple(leaves[name].shape))
            for name, parameter in simulation.module.named_parameters()
        }
    assert "float8_linear" in simulation.module.code()
    left, right = args[1].double().t(), args[0].double()
    allowed = most(left, right, 2 * RANKS)
    for name, grad in found.items():
        assert ((grad.double() - left @ right).abs() <= allowed).all(), name
    dequantized = left @ right
    assert all((grad.double() - dequantized).norm() > 2 * BFLOAT16 * dequantized.norm() for grad in found.values())


def test_it_is_priced_and_saved_with_the_plan() -> None:
    """At a high peak for its arithmetic, which casts and the kernels that they start take back."""
    fast = cluster().to_dict()
    fast["device"]["peak_flops_per_s"]["float8_e4m3fn"] = 1e30
    fast["device"] |= {"memory_bandwidth_bytes_per_s": 1e30, "launch_overhead_s": 0.0}
    spec = ClusterSpec.from_dict(fast)
    plain, scaled = planned({"data": 4}, spec), planned({"data": 4, "float8": "rowwise"}, spec)
    assert scaled.predicted.time_s["compute"] < 0.01 * plain.predicted.time_s["compute"]
    assert Plan.from_dict(scaled.to_dict()).pins.float8 == "rowwise" and scaled.certificate.holds
    assert "float8  3 of 3 linear layers in blocks that repeat multiply in float8, scaled rowwise" in str(scaled)
    slow = ClusterSpec.from_dict({**fast, "device": {**fast["device"], "memory_bandwidth_bytes_per_s": 1e6}})
    by_row, by_tensor, none = (
        planned({"data": 4, **({"float8": scaling} if scaling else {})}, slow).predicted.time_s["compute"]
        for scaling in ("rowwise", "tensorwise", None)
    )
    assert by_row > by_tensor > none


def test_memory_holds_operands_in_float8_beside_a_product() -> None:
    model, args = made()
    traced = trace(model, args)
    found = []
    for more in ({}, {"float8": "tensorwise"}):
        plan = planned({"data": 4, "zero": 0, "recompute": "none", **more})
        found.append((plan.predicted.peak_bytes, observed_peak(model, traced, plan.assignment)))
    (predicted, observed), (predicted_scaled, observed_scaled) = found
    scales = 64  # bytes, which plans do not count
    assert 0 <= (observed_scaled - observed) - (predicted_scaled - predicted) <= scales < predicted_scaled - predicted


def test_where_it_cannot_be_it_is_refused() -> None:
    with pytest.raises(PinError, match=r"'float8' is True; linear layers multiply in float8 'tensorwise', .*'rowwise'"):
        planned({"float8": True})
    with pytest.raises(ClusterError, match=r"states no peak for it: add device.peak_flops_per_s.float8_e4m3fn"):
        planned({"float8": "rowwise"}, ClusterSpec.local(RANKS))
    model, args = made()
    for changed, inputs in ((model.float(), [each.float() for each in args]),):
        with pytest.raises(PinError, match=r"there are 0 linear layers in bfloat16 in blocks that repeat"):
            plan_traced(trace(changed, tuple(inputs)), cluster(), Pins.parse({"float8": "rowwise"}), Training())
