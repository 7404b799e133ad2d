"""What other software overlaps and fuses is priced so: hidden as far as products last, and in no other place."""

from __future__ import annotations

from typing import Any

import pytest

from planner.base.errors import ClusterError
from planner.cost.cluster import ClusterSpec
from planner.plan.plan import Plan
from tests.planner.plans import WHOLE, Build, plan_of, residual_mlp

SHARDED = {**WHOLE, "data": 8, "zero": 3, "recompute": "none"}
TENSOR = {**WHOLE, "tensor": 8, "sequence_parallel": True, "recompute": "none"}

COMPILED: tuple[dict[str, object], ...] = ({}, {"compile": "layers"}, {"compile": "all"})


def planned(pin: dict[str, Any], batch: int = 4096, **software: object) -> Plan:
    spec = ClusterSpec.preset("dgx-h100").to_dict()
    return plan_of(residual_mlp(4, 1024, batch), ClusterSpec.from_dict({**spec, "software": software}), pin)


def test_gathers_hide_behind_products_as_far_as_these_last() -> None:
    """With many rows nothing of them is left, with few some is; what is reduced and computed stays."""
    for batch in (512, 65536):
        plain, overlapped = planned(SHARDED, batch), planned(SHARDED, batch, overlaps=["gathers"])
        before, after = plain.predicted.time_s, overlapped.predicted.time_s
        assert after["compute"] == before["compute"] and after["gradients"] == before["gradients"]
        assert after["communication"] < before["communication"]
        assert overlapped.predicted.step_time_s == pytest.approx(sum(after.values()))
        assert overlapped.certificate.holds
        if batch == 512:
            assert after["communication"] > 0.5 * before["communication"]
        else:
            # Of biases alone, which no product hides.
            assert after["communication"] < 0.4 * before["communication"]


def test_tensor_parallelism_waits_for_one_piece_of_each_rank() -> None:
    plain, overlapped = planned(TENSOR, 65536), planned(TENSOR, 65536, overlaps=["tensor"])
    before, after = (plan.predicted.time_s["communication"] for plan in (plain, overlapped))
    assert before / 8 <= after < before / 2
    assert overlapped.certificate.holds


BOTH = {"data": 2, "tensor": 4, "zero": 3, "sequence_parallel": True}


@pytest.mark.parametrize("overlaps", [["gathers"], ["tensor"], ["gathers", "tensor"]], ids=str)
@pytest.mark.parametrize("pin", [BOTH, {**BOTH, "data": 4, "tensor": 2}, {**BOTH, "micro_batches": 4}], ids=str)
def test_a_product_hides_no_more_than_it_lasts(pin: dict[str, Any], overlaps: list[str]) -> None:
    """Weight, bias, operand and result share it; the cluster's network is slow, so that all of it is taken."""
    pin, spec = {**WHOLE, **pin, "recompute": "none"}, ClusterSpec.preset("dgx-h100").to_dict()
    spec["levels"][0] |= {"bandwidth_bytes_per_s": 1e10, "in_switch_bytes_per_s": None}
    spec["device"] |= {"memory_bytes": 2**40, "memory_bandwidth_bytes_per_s": 1e18}
    plans = [
        plan_of(residual_mlp(1, 1024, 65536), ClusterSpec.from_dict({**spec, "software": software}), pin)
        for software in ({}, {"overlaps": overlaps})
    ]
    plain, overlapped = (plan.predicted.time_s for plan in plans)
    forward_s = plain["compute"] / 3  # backward is two products for one, and hides as much
    hidden_s = plain["communication"] + plain["gradients"] - overlapped["communication"] - overlapped["gradients"]
    assert 0 < hidden_s <= 2 * 0.9 * forward_s * (1 + 1e-3)


@pytest.mark.parametrize(
    "changed, told",
    [
        ({"float8_e4m3fn": None}, r"states no peak for it: add device.peak_flops_per_s.float8_e4m3fn"),
        ({}, "the calibration has products as they were measured"),
    ],
)
def test_float8_is_refused_where_it_has_no_price(changed: dict[str, object], told: str) -> None:
    spec = ClusterSpec.preset("dgx-h100").to_dict() | {"software": {"float8": True}}
    spec["device"]["peak_flops_per_s"] |= changed
    if not changed:
        product = {"dtype": "bfloat16", **{size: [64, 128] for size in "mnk"}, "seconds": [1e-5] * 8}
        facts = {"format": "autopar-calibration", "version": 2, "device": spec["device"]["kind"], "ranks": 8}
        spec["calibration"] = {**facts, "launch_s": 1e-6, "products": [product]}
    with pytest.raises(ClusterError, match=told):
        ClusterSpec.from_dict(spec)


def test_compiled_blocks_move_less_and_start_less() -> None:
    """Of each layer's two sums and two activations, three results stay in registers."""
    b = Build()
    value = b.linear("stem", b.leaf("x", 4096, 1024), 1024, "stem")
    for i in range(4):
        path = f"layers.{i}"
        bent = b.relu(f"bent{i}", b.add(f"sum{i}", b.linear(f"up{i}", value, 1024, path), value, path), path)
        value = b.relu(f"after{i}", b.add(f"again{i}", bent, value, path), path)
    graph, spec = b.mean(b.linear("head", value, 64, "head")), ClusterSpec.preset("dgx-h100").to_dict()
    plans = [plan_of(graph, ClusterSpec.from_dict({**spec, "software": software}), SHARDED) for software in COMPILED]
    plain, layers, every = (plan.predicted.time_s["compute"] for plan in plans)
    assert every <= layers < plain
    assert all(plan.certificate.holds for plan in plans)


def test_an_optimizer_without_a_fused_kernel_passes_more_often() -> None:
    """20 passes of float32 in 8 kernels, where there were 7 in one."""
    fused = planned({**SHARDED, "zero": 0}).predicted.time_s["optimizer"]
    foreach = planned({**SHARDED, "zero": 0}, optimizer="foreach").predicted.time_s["optimizer"]
    assert 2 < foreach / fused < 8.1
