"""Gradients that are reduced in a wider dtype than they are stored in: rounded once, and counted at their size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.driver.plan import assign, plan_traced, staged
from autopar.driver.trace import trace
from autopar.runtime.spmd.mesh import groups_of
from autopar.verification.collective_counter import count_collectives
from autopar.verification.simulator import Simulation
from benchmarks.memory import observed_peak
from planner.analysis.prediction import collectives, conversions
from planner.base.errors import PinError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.plan.plan import Plan

WIDTH = 16
NARROW, WIDE = torch.finfo(torch.bfloat16).eps / 2, torch.finfo(torch.float32).eps / 2
"""Relative errors of rounding once."""


class Tied(nn.Module):
    """Blocks of their own parameters, and a weight that two blocks read, so that it is gathered by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tied(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.tied(x).square().sum()


def ranks_of(pin: Mapping[str, Any]) -> int:
    ranks: int = pin.get("data", 2) * pin.get("replicate", 1)
    return ranks


def planned(model: nn.Module, x: Tensor, pin: Mapping[str, Any]) -> Plan:
    pins = Pins.parse({"recompute": "none", **pin})
    return plan_traced(trace(model, (x,)), ClusterSpec.local(ranks_of(pin)), pins, Training())


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Tied().bfloat16(), torch.randn(16, WIDTH, dtype=torch.bfloat16)


def gradients(pin: Mapping[str, Any]) -> dict[str, Tensor]:
    """Of a step that all ranks make, whose collectives are those of the plan."""
    model, x = made()
    plan, traced = planned(model, x, pin), trace(model, (x,))
    assignment, micro_batched = staged(plan, assign(traced, plan))
    with Simulation(model, traced.captured, assignment, 0, micro_batched) as simulation:
        (inputs,) = simulation.inputs((x,), {})[0]
        with count_collectives(groups_of(simulation.module.device_mesh)) as calls:
            simulation.module(inputs).backward()
        assert calls == collectives(assignment, simulation.bounds, simulation.late)
        leaves = {leaf.name: leaf for leaf in simulation.module.interface.leaves}
        return {
            name: simulation.whole(parameter.grad, leaves[name].layout, tuple(leaves[name].shape))
            for name, parameter in simulation.module.named_parameters()
        }


def of_ranks(ranks: int, micro_batches: int) -> dict[str, Tensor]:
    """The gradient of each rank's part of the batch by itself, added up in bfloat16 over micro-batches, stacked."""
    model, x = made()
    found: dict[str, list[Tensor]] = {}
    for rank in range(ranks):
        model.zero_grad()
        for micro_batch in x.chunk(micro_batches):
            model(micro_batch.chunk(ranks)[rank]).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            found.setdefault(name, []).append(parameter.grad)
    return {name: torch.stack(each).double() for name, each in found.items()}


def beyond(found: Mapping[str, Tensor], pin: Mapping[str, Any]) -> int:
    """Elements that are farther from the sum of the ranks' gradients than sums in float32, each rounded to bfloat16
    once, may be: the sums of each of the groups that reduce first, and those of these.

    ``n`` terms take ``n - 1`` additions, each of which rounds a partial sum, no larger than the sum of all magnitudes.
    """
    count, ranks, groups = 0, ranks_of(pin), pin.get("replicate", 1)
    for name, terms in of_ranks(ranks, pin.get("micro_batches", 1)).items():
        if name.startswith("tied") and "micro_batches" in pin:  # each of its uses adds up by itself
            continue
        exact, most = terms.sum(0), terms.abs().sum(0)
        first = terms.unflatten(0, (groups, -1)).sum(1).abs().sum(0) if groups > 1 else 0.0
        allowed = NARROW * (exact.abs() + first) + 1.1 * (ranks - 1) * WIDE * most
        count += int(((found[name].double() - exact).abs() > allowed).sum())
    return count


@pytest.mark.parametrize("pin", [
    {"data": 4, "zero": 0},
    {"data": 4, "zero": 3},
    {"data": 4, "replicate": 2, "zero": 3},  # rounded along each axis
    {"data": 4, "zero": 2, "micro_batches": 2},
], ids=str)  # fmt: skip
def test_a_gradient_is_summed_in_float32_and_rounded_once(pin: Mapping[str, Any]) -> None:
    assert beyond(gradients({**pin, "reduce_dtype": "float32"}), pin) == 0
    assert beyond(gradients(pin), pin) > 0


@pytest.mark.parametrize("zero", [0, 3])
def test_what_reduces_takes_twice_the_bytes(zero: int) -> None:
    """On the wire, in seconds, and of memory while it does; what is gathered does not."""
    model, x = made()
    pin = {"data": 4, "zero": zero}
    narrow, wide = (planned(model, x, {**pin, **more}) for more in ({}, {"reduce_dtype": "float32"}))

    def bytes_of(plan: Plan, phase: str) -> int:
        calls = [(call, count) for call, count in plan.predicted.collectives if call.bytes_in > 8]
        return sum(call.bytes_in * count for call, count in calls if (call.kind in REDUCES) == (phase == "reduce"))

    assert bytes_of(wide, "reduce") == 2 * bytes_of(narrow, "reduce") > 0
    assert bytes_of(wide, "gather") == bytes_of(narrow, "gather")
    assert gradients_s(wide) > gradients_s(narrow)
    assert Plan.from_dict(wide.to_dict()).pins.reduce_dtype == "float32"


REDUCES = ("all_reduce", "reduce_scatter")


def gradients_s(plan: Plan) -> float:
    """Seconds of reductions, whatever hides them."""
    assert plan.assignment is not None
    space = plan.assignment.space
    return sum(
        space.conversion_s(each.ref, each.source, each.target)[1] * times
        for each, times in conversions(plan.assignment)
    )


@pytest.mark.parametrize("zero", [0, 3])
def test_a_block_has_its_wide_gradients_while_they_are_reduced(zero: int) -> None:
    """What the peak takes more is predicted to a byte, with few tokens, so that gradients are most of it."""
    model = Layers().bfloat16()
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    traced, found = trace(model, (x,)), []
    for more in ({}, {"reduce_dtype": "float32"}):
        plan = planned(model, x, {"data": 2, "zero": zero, **more})
        found.append((plan.predicted.peak_bytes, observed_peak(model, traced, plan.assignment)))
    (predicted, observed), (predicted_wide, observed_wide) = found
    assert predicted_wide - predicted == observed_wide - observed > 0


class Layers(nn.Module):
    """Blocks alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().sum()


def test_where_it_means_nothing_it_is_refused() -> None:
    model, x = made()
    with pytest.raises(PinError, match=r"'reduce_dtype' is 'bfloat16'; gradients .* in 'float32' or 'float64'"):
        planned(model, x, {"reduce_dtype": "bfloat16"})
    with pytest.raises(PinError, match=r"'float32', in which the gradients of all parameters are"):
        planned(model.float(), x.float(), {"reduce_dtype": "float32"})
    with pytest.raises(PinError, match=r"does not hold the gradient of layers.0.weight in float64"):
        planned(model.double(), x.double(), {"reduce_dtype": "float32"})
