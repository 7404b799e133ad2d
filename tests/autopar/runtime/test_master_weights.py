"""Masters: that parameters of low precision train as their values in a wider dtype would."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime.module import ParallelModule
from autopar.runtime.optim.master_weights import MASTER, class_with_masters, with_masters
from autopar.runtime.optim.optimizer import expect_state
from autopar.verification.memory_meter import LiveBytes
from planner.base.errors import InfeasibleError, InputError, PlanError
from planner.cost.cluster import ClusterSpec
from planner.plan.plan import Plan
from tests.autopar.by_hand import LOW, ByHand, local
from tests.autopar.runtime.test_optimizer import NO_DECAY, Small

CPU = torch.device("cpu")
MAKES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1, "fused": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(3e-3), "amsgrad": True}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 1e-2}),
    (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.3}),
    (torch.optim.NAdam, {"lr": 1e-2}),
]


def leaves(dtype: torch.dtype = LOW) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((6, 5), (7,), (), (4, 3))]


def give(parameters: list[nn.Parameter], seed: int, but: int | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for number, parameter in enumerate(parameters):
        grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if number == but else grad


def same(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    assert mine.keys() == theirs.keys()
    for key, value in theirs.items():
        assert local(mine[key]).dtype == value.dtype and torch.equal(local(mine[key]), value), key


# ---- the step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece_bytes", [0, 90, None])
@pytest.mark.parametrize("make, options", MAKES, ids=lambda given: getattr(given, "__name__", ""))
def test_steps_as_written_out_by_hand(make: Any, options: dict[str, Any], piece_bytes: int | None) -> None:
    """Bit for bit, in pieces or not; a parameter without a gradient is left alone, one changed in place begins anew."""
    mine, theirs = leaves(), leaves()
    optimizer = with_masters(make, torch.float32, piece_bytes)([{"params": mine[:3]}, {"params": mine[3:]}], **options)
    by_hand = ByHand([{"params": theirs[:3]}, {"params": theirs[3:]}], make, **options)
    assert isinstance(optimizer, make)
    for step in range(6):
        for parameters in (mine, theirs):
            give(parameters, step, but=step % 4)
            if step == 3:
                parameters[0].data[1:4].clamp_(-0.5, 0.5)
        if step == 3:
            is_changed = theirs[0] != by_hand.masters[theirs[0]].to(LOW)
            assert 0 < is_changed.sum() < 15
            by_hand.masters[theirs[0]][is_changed] = theirs[0].detach().float()[is_changed]
        optimizer.step()
        by_hand.step()
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)
            if one in optimizer.state and MASTER in optimizer.state[one]:
                same(optimizer.state[one], by_hand.state(other))
    assert any((other.float() != by_hand.masters[other]).any() for other in theirs)
    assert [group["params"] for group in optimizer.param_groups] == [mine[:3], mine[3:]]
    assert optimizer.state.keys() == set(mine)


def test_small_updates_are_not_lost() -> None:
    """Which is what masters are for: a thousandth at a time, a 1 in bfloat16 stays 1."""
    plain, mine = (nn.Parameter(torch.ones(3, dtype=LOW)) for _ in range(2))
    optimizers = [torch.optim.SGD([plain], lr=1e-3), with_masters(torch.optim.SGD, torch.float32, 0)([mine], lr=1e-3)]
    for _ in range(100):
        plain.grad = mine.grad = torch.ones(3, dtype=LOW)
        for optimizer in optimizers:
            optimizer.step()
    assert plain[0].item() == 1 and mine[0].item() == pytest.approx(0.9, abs=2e-3)


class Counting(torch.optim.SGD):
    """Halves its rate in each step: it counts its own steps, so that one in pieces would be several."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        self.rates = [*getattr(self, "rates", []), self.param_groups[0]["lr"]]
        for group in self.param_groups:
            group["lr"] = 0.5 ** len(self.rates)


def test_what_does_not_go_apart_goes_at_once() -> None:
    named = dict(enumerate(leaves()))
    parameters = {str(name): parameter for name, parameter in named.items()}
    assert class_with_masters(torch.optim.SGD, torch.float32, parameters, [{"lr": 0.1}], CPU).piece_bytes
    made = class_with_masters(Counting, torch.float32, parameters, [{"lr": 0.1}], CPU)
    assert made.piece_bytes is None
    optimizer = made(parameters.values(), lr=0.1)
    for seed in range(3):
        give([*parameters.values()], seed)
        optimizer.step()
    assert optimizer.rates == [0.1, 0.5, 0.25] and optimizer.param_groups[0]["count"] == 3


class Numbered(torch.optim.SGD):
    """Its groups number their steps, from a number that they may have."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["number"] = group.get("number", 0) + 1
        return super().step(closure)


def test_what_groups_count_goes_on_once_a_step() -> None:
    parameters = leaves()
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "number": 5}]
    optimizer = with_masters(Numbered, torch.float32, 0)(groups, lr=0.1)
    for seed in range(3):
        give(parameters, seed)
        optimizer.step()
    assert [group["number"] for group in optimizer.param_groups] == [3, 8]


def test_hooks_are_called_once_a_step_and_closures_are() -> None:
    """The class itself was made before, and then torch calls the hooks from its step too."""
    torch.optim.SGD(leaves())
    parameters = leaves()
    optimizer = with_masters(torch.optim.SGD, torch.float32, 0)(parameters, lr=0.1)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda made, *_: seen.append(f"before {MASTER in made.state[parameters[0]]}"))
    optimizer.register_step_post_hook(lambda made, *_: seen.append(f"after {MASTER in made.state[parameters[0]]}"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((parameter.float() ** 2).sum() for parameter in parameters)
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(2)]
    assert losses[1] < losses[0]
    assert seen == ["before False", "after True", "before True", "after True"]


def test_parts_step_as_parts_of_the_whole() -> None:
    """Three steps of the rows of a matrix, each third by itself, as ranks that shard it."""
    whole = nn.Parameter(torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(LOW))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().chunk(3)]
    made = with_masters(torch.optim.AdamW, torch.float32, 0)
    optimizers = [made([each], lr=1e-2, fused=True) for each in (whole, *parts)]
    for seed in range(3):
        give([whole], seed)
        for part, grad in zip(parts, whole.grad.chunk(3), strict=True):
            part.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.cat(parts), whole)
    masters = [optimizer.state[each][MASTER] for optimizer, each in zip(optimizers, (whole, *parts), strict=True)]
    assert torch.equal(torch.cat(masters[1:]), masters[0])


def test_gradients_are_never_all_in_float32() -> None:
    parameters = [nn.Parameter(torch.randn(64, 64).to(LOW)) for _ in range(16)]
    one = 64 * 64 * 4
    for piece_bytes, most in ((2 * one, 2 * one), (None, 16 * one)):
        optimizer = with_masters(torch.optim.AdamW, torch.float32, piece_bytes)(parameters, fused=True)
        give(parameters, 0)
        optimizer.step()
        state = [value for each in optimizer.state.values() for value in each.values()]
        with LiveBytes([*parameters, *(parameter.grad for parameter in parameters), *state]) as meter:
            before = meter.now
            optimizer.step()
        assert most <= meter.peak - before <= most + one, piece_bytes


def test_an_error_leaves_parameters_in_their_place() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if self.param_groups[0]["lr"] < 0:
                raise RuntimeError("out of memory")
            return super().step()

    parameters = leaves()
    optimizer = with_masters(Failing, torch.float32, 0)(parameters, lr=0.1)
    give(parameters, 0)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert optimizer.param_groups[0]["params"] == parameters and optimizer.state.keys() == set(parameters)
    for number, state in optimizer.state_dict()["state"].items():
        same(state, before["state"][number])


# ---- the optimizer's own state dict ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make, options", MAKES, ids=lambda given: getattr(given, "__name__", ""))
def test_state_dicts_come_back_in_float32(make: Any, options: dict[str, Any]) -> None:
    """Torch casts what it loads to the dtype of parameters, of which nothing is left here."""
    made = with_masters(make, torch.float32, 90)
    parameters = leaves()
    optimizer = made(parameters, **options)
    for seed in range(2):
        give(parameters, seed)
        optimizer.step()
    others = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    again = made(others, **options)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other in zip(parameters, others, strict=True):
        same(again.state[other], optimizer.state[one])
    for seed in range(2, 4):
        for each in (parameters, others):
            give(each, seed)
        optimizer.step()
        again.step()
    for one, other in zip(parameters, others, strict=True):
        assert torch.equal(one, other)
        same(again.state[other], optimizer.state[one])
    copied = copy.deepcopy(optimizer)
    assert [type(copied), copied.dtype] == [made, torch.float32]


def test_state_without_masters_is_taken() -> None:
    """Of a run in bfloat16: masters begin as the parameters, moments go on in float32."""
    plain, mine = leaves(), leaves()
    optimizer = torch.optim.AdamW(plain, fused=True)
    give(plain, 0)
    optimizer.step()
    for one, other in zip(plain, mine, strict=True):
        other.data.copy_(one.data)
    again = with_masters(torch.optim.AdamW, torch.float32, 0)(mine, fused=True)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {state["exp_avg"].dtype for state in again.state.values()} == {torch.float32}
    assert not any(MASTER in state for state in again.state.values())
    begun = [parameter.detach().clone() for parameter in mine]
    again.param_groups[0]["lr"] = 0.0
    again.param_groups[0]["weight_decay"] = 0.0
    give(mine, 1)
    again.step()
    for parameter, value in zip(mine, begun, strict=True):
        assert torch.equal(parameter, value) and torch.equal(again.state[parameter][MASTER], value.float())


# ---- scalers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("dtype", [torch.float16, LOW], ids=str)
def test_scaled_gradients(dtype: torch.dtype, make: Any, unscales: bool) -> None:
    """Unscaled in float32 by the step, or before by the scaler, which refuses float16; an overflow skips the step."""
    mine, theirs = leaves(dtype), leaves(dtype)
    optimizer = with_masters(make, torch.float32, 90)(mine, lr=1e-2)
    by_hand = ByHand([{"params": theirs}], make, lr=1e-2)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=8.0)  # type: ignore[attr-defined]
    for step in range(4):
        for parameters in (mine, theirs):
            give(parameters, step, but=1)
        scale = scaler.scale(torch.ones(())).item()
        if step == 2:
            mine[0].grad[0, 0] = torch.inf  # type: ignore[index]
            before = copy.deepcopy(optimizer.state_dict())
        if unscales and dtype == torch.float16:
            with pytest.raises(ValueError, match="Attempting to unscale FP16"):
                scaler.unscale_(optimizer)
            return
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            assert scaler.get_scale() == scale / 2
            for number, state in optimizer.state_dict()["state"].items():
                same(state, before["state"][number])
        else:
            by_hand.step(1 / scale)
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)
    assert not hasattr(optimizer, "found_inf")


# ---- over a module ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def batch(seed: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(LOW)


def both(pin: dict[str, Any] | None, folder: Path | None = None, planned: int = 12) -> tuple[Small, ParallelModule]:
    torch.manual_seed(0)
    model = Small().to(LOW)
    cluster = ClusterSpec.local(
        1, memory_bytes="1 GiB", cores=2, host_memory_bytes="1 GiB", disk_bytes="1 GB" if folder else None
    )
    pmodel = autopar.parallelize(
        copy.deepcopy(model),
        cluster,
        example_kwargs={"x": batch(0)},
        pin=pin,
        optimizer_bytes_per_element=planned,
        offload_path=folder,
    )
    return model, pmodel


def train(module: nn.Module, optimizer: Any, scheduler: Any, seeds: range) -> None:
    for seed in seeds:
        module.zero_grad()
        module(x=batch(seed)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("tier", ["device", "host", "auto", "disk"])
def test_trains_as_written_out_by_hand(alone: None, tmp_path: Path, tier: str) -> None:
    """Bit for bit, wherever model data are at home; with groups, a schedule, clipping, and after a restart."""
    pin = None if tier == "device" else {"offload": tier}
    folder = tmp_path / "offload" if tier == "disk" else None
    if folder is not None:
        folder.mkdir()
    model, pmodel = both(pin, folder)
    bare = {name for name, _ in model.named_parameters() if name.endswith("bias") or "norm" in name}
    by_hand = ByHand(
        [
            {"params": [p for name, p in model.named_parameters() if name not in bare]},
            {"params": [p for name, p in model.named_parameters() if name in bare], "weight_decay": 0.0},
        ],
        torch.optim.AdamW,
        lr=1e-2,
        weight_decay=0.1,
        fused=True,
    )
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(by_hand.optimizer, 10)

    def made(module: ParallelModule) -> tuple[Any, Any]:
        groups = [{"params": NO_DECAY, "weight_decay": 0.0}]
        found = module.optimizer(torch.optim.AdamW, groups, master_dtype=torch.float32, lr=1e-2, weight_decay=0.1)
        assert found.param_groups[0]["fused"] and type(found).__name__ == "AdamWWithMasters"
        return found, torch.optim.lr_scheduler.CosineAnnealingLR(found, 10)

    mine = made(pmodel)
    train(model, by_hand, theirs, range(3))
    train(pmodel, *mine, range(2))
    versions = [parameter._version for parameter in pmodel.parameters()]
    train(pmodel, *mine, range(2, 3))
    now = [parameter._version for parameter in pmodel.parameters()]
    assert all(one > other for one, other in zip(now, versions, strict=True))  # a backward would know that they changed
    autopar.save_checkpoint(tmp_path / "saved", pmodel, mine[0], extra={"schedule": mine[1]})
    _, other = both(pin, folder)
    restarted = made(other)
    train(other, *restarted, range(7, 8))
    autopar.load_checkpoint(tmp_path / "saved", other, restarted[0], extra={"schedule": restarted[1]})
    train(model, by_hand, theirs, range(3, 5))
    train(other, *restarted, range(3, 5))
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in other.full_state_dict().items())
    named = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        state = restarted[0].state[named[name]]
        assert isinstance(state[MASTER], DTensor) and state[MASTER].dtype == torch.float32
        same(state, by_hand.state(parameter))
    with torch.no_grad():
        loss = other(x=batch(0))
        other.load_state_dict(pmodel.state_dict())
        restarted[0].param_groups[0]["lr"] = restarted[0].param_groups[1]["lr"] = 0.0
        for parameter in other.parameters():
            parameter.grad.zero_()
    restarted[0].step()
    for name, value in pmodel.full_state_dict().items():
        assert torch.equal(other.full_state_dict()[name], value), name  # what was loaded, not what masters had
    assert not torch.equal(other(x=batch(0)), loss)


def test_a_checkpoint_without_masters_begins_them(alone: None, tmp_path: Path) -> None:
    """Masters then begin as the parameters; and float32 parameters of a mixed model are their own."""
    _, pmodel = both(None)
    plain = pmodel.optimizer(torch.optim.AdamW)
    pmodel(x=batch(0)).backward()
    plain.step()
    autopar.save_checkpoint(tmp_path, pmodel, plain)
    _, other = both(None)
    optimizer = other.optimizer(torch.optim.AdamW, master_dtype=torch.float32)
    other(x=batch(0)).backward()
    optimizer.step()
    autopar.load_checkpoint(tmp_path, other, optimizer)
    assert not any(MASTER in state for state in optimizer.state.values())
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    optimizer.step()
    for parameter, saved in zip(other.parameters(), pmodel.parameters(), strict=True):
        assert torch.equal(local(parameter), local(saved))
        assert torch.equal(local(optimizer.state[parameter][MASTER]), local(saved).float())


def test_wide_parameters_are_their_own_masters() -> None:
    mixed = [*leaves()[:2], *leaves(torch.float32)[2:]]
    optimizer = with_masters(torch.optim.SGD, torch.float32, 0)(mixed, lr=0.5, momentum=0.9)
    give(mixed, 0)
    before = mixed[3].detach().clone()
    optimizer.step()
    assert [MASTER in optimizer.state[parameter] for parameter in mixed] == [True, True, False, False]
    assert torch.equal(mixed[3], before - 0.5 * mixed[3].grad)  # type: ignore[operator]


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (
        torch.optim.AdamW,
        {"master_dtype": torch.float16},
        r"is torch.float16, and up.weight is in torch.bfloat16, whose",
    ),
    (torch.optim.AdamW, {"master_dtype": torch.int64}, "master_dtype is torch.int64: give a floating-point dtype"),
    (torch.optim.AdamW, {"master_dtype": "float32"}, "master_dtype is 'float32': give a floating-point dtype"),
    (torch.optim.AdamW, {"master_dtype": True}, "master_dtype is True: give a floating-point dtype"),
    (
        torch.optim.SGD([torch.zeros(1)]),
        {"master_dtype": torch.float32},
        "the optimizer is of type SGD: give its class",
    ),
    (lambda p: torch.optim.SGD(p), {"master_dtype": torch.float32}, "lambda.* is no subclass of torch.optim.Optimizer"),
    (torch.optim.LBFGS, {"master_dtype": torch.float32}, r"LBFGS does not step from gradients alone \(.*'closure'"),
    (torch.optim.SparseAdam, {"master_dtype": torch.float32}, "SparseAdam does not step from gradients alone"),
]


@pytest.mark.parametrize("make, options, said", WRONG)
def test_wrong_input_is_refused(alone: None, make: Any, options: dict[str, Any], said: str) -> None:
    _, pmodel = both(None)
    with pytest.raises(InputError, match=said):
        pmodel.optimizer(make, **options)


def test_masters_of_wider_parameters_are_refused(alone: None) -> None:
    with pytest.raises(InputError, match=r"is torch.float32, and a is in torch.float64, .* convert the model before"):
        class_with_masters(torch.optim.SGD, torch.float32, {"a": torch.ones(1, dtype=torch.float64)}, [{}], CPU)


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_plans_count_masters_and_their_files_say_so() -> None:
    """The update of each parameter starts once, reads it, its gradient, moments and master, and writes all but the
    gradient.
    """
    model = Small().to(LOW)
    elements = sum(parameter.numel() for parameter in model.parameters())
    cluster = ClusterSpec.local(1, "1 GiB", cores=2, host_memory_bytes="1 GiB", disk_bytes="1 GB")
    found = [
        autopar.plan(model, cluster, example_kwargs={"x": batch(0)}, pin=pin, optimizer_bytes_per_element=12)
        for pin in (None, {"offload": "disk"})
    ]
    assert found[0].predicted.memory_bytes["optimizer"] == 12 * elements
    read, written = (2 + 2 + 12) * elements, (2 + 12) * elements
    starts_s = sum(1 for _ in model.parameters()) * cluster.device.launch_overhead_s
    assert found[1].predicted.time_s["optimizer"] == pytest.approx(starts_s + read / 2e9 + written / 1e9)
    for plan in found:
        loaded = Plan.from_dict(plan.to_dict())
        assert loaded == plan and loaded.optimizer_bytes_per_element == 12
        assert autopar.evaluate(model, loaded, example_kwargs={"x": batch(0)}).predicted == plan.predicted
    data = found[0].to_dict()
    with pytest.raises(PlanError, match="field 'optimizer_bytes_per_element' is wrong: it is -1, which is no number"):
        Plan.from_dict({**data, "optimizer_bytes_per_element": -1})
    del data["optimizer_bytes_per_element"]
    with pytest.raises(PlanError, match="lacks the field 'optimizer_bytes_per_element'"):
        Plan.from_dict(data)


def test_a_plan_that_counts_too_little_state_is_warned_of_once(alone: None) -> None:
    _, pmodel = both(None, planned=8)
    elements = sum(parameter.numel() for parameter in pmodel.parameters())
    optimizer = pmodel.optimizer(torch.optim.AdamW, master_dtype=torch.float32)
    optimizer.step()  # without gradients there is no state yet
    pmodel(x=batch(0)).backward()
    told = f"12 bytes per element of the parameters, and the plan counts 8: {4 * elements:,} bytes .*more .*_element=12"
    with pytest.warns(UserWarning, match=told):
        optimizer.step()
    optimizer.step()
    enough = pmodel.optimizer(torch.optim.SGD, master_dtype=torch.float32, lr=0.1, momentum=0.9)  # 8 bytes
    enough.step()


def test_state_of_wholes_is_counted_beside_parts() -> None:
    """4 elements, of which momentum takes 16 bytes, and an owner 256 more."""
    part = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([part], lr=0.1, momentum=0.9)
    expect_state(optimizer, planned=8)
    part.grad, optimizer.state[part]["whole"] = torch.ones(4), torch.zeros(64)
    with pytest.warns(UserWarning, match="68 bytes per element of the parameters, and the plan counts 8: 240 bytes"):
        optimizer.step()


def test_parallelize_plans_with_them(alone: None) -> None:
    """Where moments have room on the device, and masters beside them have not."""
    model, peak = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).to(LOW), []
    given: dict[str, Any] = {
        "example_kwargs": {"input": torch.randn(2, 64).to(LOW)},
        "loss_fn": lambda out, _: out.sum(),
        "pin": {"pipeline": 1, "micro_batches": 1, "offload": "none"},
    }
    for each in (8, 12):
        plan = autopar.plan(model, ClusterSpec.local(1), optimizer_bytes_per_element=each, **given)
        peak.append(plan.predicted.peak_bytes)
    small = ClusterSpec.local(1, memory_bytes=int(sum(peak) / 2 / 0.9))
    autopar.parallelize(model, small, optimizer_bytes_per_element=8, **given)
    with pytest.raises(InfeasibleError, match="12 bytes more per"):
        autopar.parallelize(model, small, optimizer_bytes_per_element=12, **given)
    with pytest.raises(InputError, match=r"optimizer_bytes_per_element is 1\.5; give bytes, at least 0"):
        autopar.parallelize(model, small, optimizer_bytes_per_element=1.5, **given)


# ---- gradients of many micro-batches ---------------------------------------------------------------------------------


class Narrow(nn.Module):
    """Weights and biases, each used once, so that terms of a micro-batch are not summed in either order."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


def test_gradients_of_micro_batches_add_up_in_a_wider_dtype(alone: None) -> None:
    """Of 16 micro-batches: rounded once, to the bit, where the narrow sum is rounded 15 times; and over two calls."""
    torch.manual_seed(0)
    model, x = Narrow().to(LOW), torch.randn(64, 8).to(LOW)
    cluster = ClusterSpec.local(1, memory_bytes="1 GiB", cores=2, host_memory_bytes="1 GiB")
    pin = {"pipeline": 1, "micro_batches": 16}
    pmodel = autopar.parallelize(
        copy.deepcopy(model), cluster, example_kwargs={"x": x}, pin=pin, optimizer_bytes_per_element=12
    )
    each = [torch.autograd.grad(model(part) / 16, [*model.parameters()]) for part in x.chunk(16)]
    narrow = [sum(terms[1:], terms[0]) for terms in zip(*each, strict=True)]
    wide = [sum(term.float() for term in terms) for terms in zip(*each, strict=True)]
    assert any(not torch.equal(one, other.to(LOW)) for one, other in zip(narrow, wide, strict=True))  # type: ignore[union-attr]
    pmodel(x=x).backward()
    for parameter, expected in zip(pmodel.parameters(), narrow, strict=True):
        assert parameter.grad is not None and torch.equal(local(parameter.grad), expected)
    with pytest.raises(InputError, match=r"up.weight has one in torch.bfloat16: call this before the first backward"):
        pmodel.accumulate_gradients_in(torch.float32)
    pmodel.zero_grad()
    pmodel.accumulate_gradients_in(torch.float32)
    for count in (1.0, 2.0):
        pmodel(x=x).backward()
        for parameter, total in zip(pmodel.parameters(), wide, strict=True):
            assert parameter.grad is not None and parameter.grad.dtype == torch.float32
            assert torch.equal(local(parameter.grad), total.to(LOW).float() * count)
    optimizer = pmodel.optimizer(torch.optim.AdamW, master_dtype=torch.float32)
    assert nn.utils.clip_grad_norm_(pmodel.parameters(), 1.0).dtype == torch.float32
    with pytest.warns(UserWarning, match=r"takes 14 bytes per element .* counts 12: .*optimizer_bytes_per_element=14"):
        optimizer.step()
    with pytest.raises(
        InputError, match=r"added up in torch.float16, which does not hold those of up.weight in torch.b"
    ):
        pmodel.accumulate_gradients_in(torch.float16)
