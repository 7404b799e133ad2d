"""What processes of ``test_offload.py`` do: train with model data on the host, and look at what moves."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.module import ParallelModule
from autopar.runtime.offload.executor import OffloadExecutor
from autopar.runtime.spmd.mesh import whole_of
from planner.base.errors import DiskError, InfeasibleError, InputError, PlanError
from planner.cost.cluster import ClusterSpec
from planner.plan.plan import Plan
from planner.solve.transfers import TransferSchedule, fewest_bytes, shortest_step
from tests.autopar.allocated import changes_during, most_bytes
from tests.autopar.captured_once import captured_once, made
from tests.autopar.models import MODELS, Batch

TRANSFER_SCHEDULES: tuple[Callable[..., TransferSchedule], ...] = (fewest_bytes, shortest_step)


def model_of(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Batch]:
    """A model of the zoo without dropout, and a batch."""
    model, batch = MODELS[name].build()
    for module in model.modules():
        for key, value in vars(module).items():
            if isinstance(value, float) and ("drop" in key or (isinstance(module, nn.Dropout) and key == "p")):
                setattr(module, key, 0.0)
    return made(model.to(dtype), name), cast(batch, dtype)


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}


def another(name: str, seed: int, dtype: torch.dtype = torch.float64) -> Batch:
    torch.manual_seed(seed)
    return cast(MODELS[name].batch(), dtype)


def plan_of(
    name: str,
    pin: dict[str, Any],
    ranks: int,
    memory_bytes: int | str = "1 GiB",
    updates_at: float | None = None,
    outputs: str | None = None,
) -> Plan:
    """A plan with model data on the host.

    Args:
        updates_at: bytes per second of the host's memory, where it is not the device's.
        outputs: which are kept, as for :func:`autopar.plan`.
    """
    model, batch = model_of(name)
    cluster = ClusterSpec.local(ranks, memory_bytes=memory_bytes, cores=2, host_memory_bytes="1 GiB")
    if updates_at is not None and cluster.host is not None:
        slower = cluster.host.model_copy(update={"memory_bandwidth_bytes_per_s": updates_at})
        cluster = cluster.model_copy(update={"host": slower})
    with captured_once():
        return autopar.plan(model, cluster, example_kwargs=batch, pin={"offload": "host", **pin}, outputs=outputs)


def parallel(model: nn.Module, plan: Plan, batch: Batch) -> tuple[ParallelModule, OffloadExecutor]:
    with captured_once():
        pmodel = autopar.parallelize(model, plan.cluster, plan=plan, example_kwargs=batch)
    assert pmodel.offload is not None
    return pmodel, pmodel.offload


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return loss_of_part(model, model.shard(batch) if isinstance(model, ParallelModule) else batch)


def loss_of_part(model: nn.Module, part: Batch) -> Tensor:
    found = model(**part)
    loss: Tensor = found["loss"] if isinstance(found, dict) else found[0] if isinstance(found, tuple) else found
    return loss


def same_gradients(pmodel: nn.Module, model: nn.Module) -> None:
    every, held = dict(model.named_parameters(remove_duplicate=False)), dict(pmodel.named_parameters())
    assert len(held) == len([*model.parameters()]) or pmodel.pipeline is not None
    for (name, mine), theirs in ((each, every[each[0]]) for each in held.items()):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None and theirs.grad is not None:
            whole = whole_of(mine.grad)
            torch.testing.assert_close(whole, theirs.grad, rtol=1e-9, atol=1e-12, msg=name)


def adamw_of_both(model: nn.Module, pmodel: ParallelModule) -> list[torch.optim.Optimizer]:
    options = {"lr": 1e-2, "eps": 1e-4}
    return [torch.optim.AdamW(model.parameters(), **options), pmodel.optimizer(torch.optim.AdamW, **options)]


def same_values(pmodel: ParallelModule, model: nn.Module, **within: float) -> None:
    expected = model.state_dict()
    for key, value in pmodel.full_state_dict().items():
        torch.testing.assert_close(value, expected[key], msg=key, **(within or {"rtol": 1e-10, "atol": 1e-12}))


def trains_under_any_transfer_schedule(
    name: str, document: dict[str, Any], shares: list[float], trains: Callable[[str, dict[str, Any]], None]
) -> None:
    """Train with budgets that leave room for such shares of what there is."""
    plan = Plan.from_dict(document)
    for number, share in enumerate(shares):
        tables = []
        for table in plan.transfer_schedules:
            least, all_bytes = max(table.trace.needed_bytes), sum(item.bytes for item in table.trace.items)
            tables.append(TRANSFER_SCHEDULES[number % 2](table.trace, least + int(share * all_bytes)))
        trains(name, replace(plan, transfer_schedules=tuple(tables)).to_dict())


def trains_as_planned(name: str, document: dict[str, Any]) -> None:
    """Three steps of AdamW with clipping: what moves is what was planned, and never over the budget."""
    model, batch = model_of(name)
    plan = Plan.from_dict(document)
    pmodel, offload = parallel(copy.deepcopy(model), plan, batch)
    table = offload.transfers.table
    optimizers = adamw_of_both(model, pmodel)
    for step in range(3):
        losses = [loss_of(m, another(name, step)) for m in (model, pmodel)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0)
        for loss, m, optimizer in zip(losses, (model, pmodel), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            optimizer.step()
        same_gradients(pmodel, model)
        planned = {way: size for (_, way), size in table.bytes_moved.items() if size}
        assert {way: size for way, size in offload.transfers.bytes_moved.items() if size} == planned
    assert table.budget_bytes >= offload.transfers.arena.high_water_bytes == table.high_water_bytes
    same_values(pmodel, model, rtol=1e-9, atol=1e-12)


def trains_in_an_eighth() -> None:
    """A model with eight times the device's memory of parameters, gradients and optimizer state."""
    torch.manual_seed(0)
    widths = [(48, 96), (96, 48)] * 8
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(*width), nn.Tanh()) for width in widths]
    model = nn.Sequential(*layers).double()
    data_bytes = (8 + 8 + 8) * sum(p.numel() for p in model.parameters())
    cluster = ClusterSpec.local(1, memory_bytes=data_bytes // 8, cores=2, host_memory_bytes="1 GiB")
    pmodel = autopar.parallelize(
        copy.deepcopy(model),
        cluster,
        example_kwargs={"input": torch.zeros(4, 48, dtype=torch.float64)},
        loss_fn=lambda out, _: out.square().mean(),
        pin={"offload": "host"},
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (model, pmodel)]
    for step in range(3):
        torch.manual_seed(step)
        batch = torch.randn(4, 48, dtype=torch.float64)
        for m, optimizer in zip((model, pmodel), optimizers, strict=True):
            optimizer.zero_grad()
            loss = pmodel(input=batch) if m is pmodel else model(batch).square().mean()
            loss.backward()
            optimizer.step()
        same_gradients(pmodel, model)
    assert pmodel.offload.transfers.arena.high_water_bytes <= cluster.device.usable_bytes < data_bytes / 8


def is_bit_equal(name: str, document: dict[str, Any]) -> None:
    """On one rank nothing is summed in another order: ten steps of AdamW."""
    model, batch = model_of(name, torch.float32)
    plan = Plan.from_dict(document)
    pmodel = autopar.parallelize(copy.deepcopy(model), plan.cluster, plan=plan, example_kwargs=batch)
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        pmodel.optimizer(torch.optim.AdamW, lr=1e-2),
    ]
    for step in range(10):
        for m, optimizer in zip((model, pmodel), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(m, another(name, step, torch.float32)).backward()
            optimizer.step()
    expected = model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in pmodel.full_state_dict().items())


def adds_up_as_without(name: str, document: dict[str, Any], plain: dict[str, Any]) -> None:
    """Gradients with micro-batches are those of the same micro-batches without offload, to the bit; a tied parameter's
    to rounding.
    """
    model, batch = model_of(name, torch.float32)
    plan = Plan.from_dict(document)
    offloaded, _ = parallel(copy.deepcopy(model), plan, batch)
    held = autopar.parallelize(copy.deepcopy(model), plan.cluster, plan=Plan.from_dict(plain), example_kwargs=batch)
    for m in (offloaded, held):
        loss_of(m, another(name, 0, torch.float32)).backward()
    tied = {item.name.removeprefix("parameters ") for table in plan.transfer_schedules for item in table.trace.items}
    grads = {key: whole_of(parameter.grad) for key, parameter in held.named_parameters() if parameter.grad is not None}
    found = {
        key: whole_of(parameter.grad) for key, parameter in offloaded.named_parameters() if parameter.grad is not None
    }
    assert grads.keys() == found.keys()
    differ = {key for key, grad in grads.items() if not torch.equal(grad, found[key])}
    assert differ <= tied
    for key, grad in grads.items():
        torch.testing.assert_close(found[key], grad, rtol=1e-5, atol=1e-6)


def compare(model: nn.Module, pmodel: nn.Module, run: Callable[[nn.Module], Any]) -> None:
    """Gradients of a run on both."""
    for m in (model, pmodel):
        m.zero_grad()
        run(m)
    same_gradients(pmodel, model)


def goes_other_ways(name: str, document: dict[str, Any]) -> None:
    """Steps that are not forward, backward, update; each computes what the original computes."""
    model, batch = model_of(name)
    pmodel, offload = parallel(copy.deepcopy(model), Plan.from_dict(document), batch)
    batches = [another(name, seed) for seed in range(3)]

    both = functools.partial(compare, model, pmodel)

    def accumulates(m: nn.Module) -> None:
        for each in batches:
            loss_of(m, each).backward()

    def fills_zeros(m: nn.Module) -> None:
        loss_of(m, batches[0]).backward()
        m.zero_grad(set_to_none=False)
        loss_of(m, batches[1]).backward()

    def evaluates_between(m: nn.Module) -> None:
        with torch.no_grad():
            loss_of(m, batches[1])
        loss = loss_of(m, batches[0])
        loss.backward()

    def gives_up_a_step(m: nn.Module) -> None:
        loss_of(m, batches[1])
        loss_of(m, batches[0]).backward()

    def twice(m: nn.Module) -> None:
        loss = loss_of(m, batches[0])
        loss.backward(retain_graph=True)
        loss.backward()

    def two_at_once(m: nn.Module) -> None:
        (loss_of(m, batches[0]) + 2 * loss_of(m, batches[1])).backward()

    def breaks_off(m: nn.Module, at: int) -> None:
        loss = loss_of(m, batches[0])
        if m is pmodel:
            start, left = offload.engine.start, iter(range(at))

            def fails(way: str, copies: Any) -> Any:
                if way == "evict" and next(left, None) is None:
                    raise DiskError("full")
                return start(way, copies)

            with pytest.MonkeyPatch.context() as failing:
                failing.setattr(offload.engine, "start", fails)
                with pytest.raises(DiskError):
                    loss.backward(retain_graph=True)
            assert all(parameter.grad is None for parameter in m.parameters())
        loss.backward()

    for run in (accumulates, fills_zeros, evaluates_between, gives_up_a_step):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            both(run)
    leave = sum(name.startswith("gradients") for entry in offload.transfers.table.entries for name in entry.evict)
    for run in (twice, two_at_once, *(functools.partial(breaks_off, at=at) for at in {0, leave - 1})):
        with pytest.warns(UserWarning, match="another way than its transfer schedule"):
            both(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        both(accumulates)
    held = [parameter.grad for parameter in pmodel.parameters()]
    before = [None if grad is None else whole_of(grad).clone() for grad in held]
    pmodel.zero_grad()
    loss_of(pmodel, batches[2]).backward()
    for grad, value in zip(held, before, strict=True):  # what the user still holds is left alone
        assert grad is not None and value is not None
        assert torch.equal(whole_of(grad), value)
    assert offload.transfers.arena.high_water_bytes <= offload.transfers.arena.budget_bytes

    for m in (model, pmodel):
        with torch.no_grad():
            next(m.parameters()).mul_(1.5)
    both(lambda m: loss_of(m, batches[0]).backward())
    pmodel.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
    model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
    both(lambda m: loss_of(m, batches[1]).backward())
    for m in (model, pmodel):
        next(m.parameters()).requires_grad_(False)
    both(lambda m: loss_of(m, batches[2]).backward())

    loss, optimizer = loss_of(pmodel, batches[0]), torch.optim.SGD(pmodel.parameters(), lr=0.1)
    loss_of(pmodel, batches[1]).backward()
    optimizer.step()
    with pytest.raises(InputError, match=r"changed in place between forward and backward.* before optimizer\.step"):
        loss.backward()
    model.load_state_dict(pmodel.full_state_dict())
    both(lambda m: loss_of(m, batches[1]).backward())

    with pytest.raises(InputError, match="LBFGS does not step from gradients alone"):
        pmodel.optimizer(torch.optim.LBFGS)
    kept = copy.deepcopy(pmodel.state_dict())
    both(lambda m: loss_of(m, batches[0]).backward())
    pmodel.load_state_dict(kept)
    assert all(torch.equal(whole_of(value), whole_of(kept[key])) for key, value in pmodel.state_dict().items())

    with pytest.raises(InputError, match="cannot be copied"):
        copy.deepcopy(pmodel)
    pmodel.load_state_dict(pmodel.full_state_dict(), assign=True)
    with pytest.raises(InputError, match="no longer where the plan keeps it: change parameters in place"):
        loss_of(pmodel, batches[0])


def runs_in_eval(name: str, document: dict[str, Any]) -> None:
    model, batch = model_of(name)
    pmodel, offload = parallel(copy.deepcopy(model).eval(), Plan.from_dict(document), batch)
    for seed in range(2):
        with torch.no_grad():
            torch.testing.assert_close(loss_of(pmodel, another(name, seed)), loss_of(model, another(name, seed)))
    assert offload.transfers.arena.high_water_bytes <= offload.transfers.arena.budget_bytes


def goes_on_micro_batched(document: dict[str, Any]) -> None:
    """What may come between and beside micro-batched steps; each computes what the original computes."""
    model, batch = model_of("mlp")
    pmodel, offload = parallel(copy.deepcopy(model), Plan.from_dict(document), batch)
    batches = [another("mlp", seed) for seed in range(3)]

    both = functools.partial(compare, model, pmodel)

    def evaluates_between(m: nn.Module) -> None:
        with torch.no_grad():
            m.evaluated = float(loss_of(m, batches[1]))  # type: ignore[assignment]
        loss_of(m, batches[0]).backward()

    def accumulates(m: nn.Module) -> None:
        for each in batches:
            loss_of(m, each).backward()

    def is_never_undone(m: nn.Module) -> None:
        loss_of(m, batches[1])
        loss_of(m, batches[2]).backward()

    for run in (evaluates_between, accumulates, is_never_undone, lambda m: (8 * loss_of(m, batches[0])).backward()):
        both(run)
    assert pmodel.evaluated == pytest.approx(model.evaluated, rel=1e-12)

    held = [parameter.grad for parameter in pmodel.parameters()]
    before = [None if grad is None else whole_of(grad).clone() for grad in held]
    both(lambda m: loss_of(m, batches[2]).backward())
    for grad, value in zip(held, before, strict=True):  # what the user still holds is left alone
        assert grad is not None and value is not None
        assert torch.equal(whole_of(grad), value)

    stage, calls = pmodel.program.spec.stages[0].program, []
    forward = stage.forward

    def breaks_off(*values: Any) -> Any:
        calls.append(offload.transfers.micro_batch)
        if offload.transfers.micro_batch == 2:
            raise RuntimeError("broken off")
        return forward(*values)

    stage.forward = breaks_off
    with pytest.raises(RuntimeError, match="broken off"):
        loss_of(pmodel, batches[0])
    stage.forward = forward
    assert calls == [0, 1, 2]
    both(lambda m: loss_of(m, batches[1]).backward())
    for m in (model, pmodel):
        next(m.parameters()).requires_grad_(False)
    both(lambda m: loss_of(m, batches[2]).backward())
    assert offload.transfers.arena.high_water_bytes <= offload.transfers.arena.budget_bytes


def goes_by_itself(cluster: dict[str, Any]) -> None:
    """Nothing says that model data should be offloaded to the host."""
    model, batch = model_of("mlp")
    pmodel = autopar.parallelize(copy.deepcopy(model), ClusterSpec.from_dict(cluster), example_kwargs=batch)
    assert pmodel.offload is not None
    for each in (model, pmodel):
        loss_of(each, batch).backward()
    same_gradients(pmodel, model)


def refuses_what_does_not_fit(document: dict[str, Any]) -> None:
    model, batch = model_of("mlp")
    plan = Plan.from_dict(document)
    data = plan.transfer_schedule.to_dict()
    data["items"][0]["bytes"] += 64
    with pytest.raises(PlanError, match="transfer schedule is of other chunks or blocks"):
        parallel(model, replace(plan, transfer_schedules=(TransferSchedule.from_dict(data),)), batch)
    small = ClusterSpec.local(1, memory_bytes="64 KiB", cores=2, host_memory_bytes="1 GiB")
    with pytest.raises(PlanError, match=r"can use 58,982 bytes .*: plan again for this cluster"):
        autopar.parallelize(model, small, plan=plan, example_kwargs=batch)
    with pytest.raises(InfeasibleError):
        autopar.parallelize(model, small, example_kwargs=batch, pin={"offload": "host"})


def holds_no_more_than_planned(name: str, document: dict[str, Any]) -> tuple[int, int]:
    """Bytes at the peak of a step on this rank, observed and planned.

    All that is at home has its memory since the steps before.
    """
    model, batch = model_of(name)
    plan = Plan.from_dict(document)
    pmodel, offload = parallel(model, plan, batch)
    part = pmodel.shard(batch)
    for _ in range(2):
        loss_of_part(pmodel, part).backward()
        pmodel.zero_grad()
    there = sum(value.nbytes for value in part.values())
    there += sum(each.bytes for each in offload.parameters.values() if each.state != "home")
    seen = there + most_bytes(changes_during(lambda: loss_of_part(pmodel, part).backward()))
    assert plan.predicted.peak_bytes == max(table.high_water_bytes for table in plan.transfer_schedules)
    return seen, offload.transfers.table.high_water_bytes


class Odd(nn.Module):
    """A frozen table of which a view goes from block to block, a frozen layer, a layer whose result is detached, and a
    parameter that is returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, 8), requires_grad=False)
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4))
        self.still = nn.Linear(8, 8)
        self.still.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.table[: x.shape[0]]
        for number, layer in enumerate(self.inner):
            x = x + (layer(x).detach() if number == 2 else layer(x)) + rows
        return (self.still(x) * self.scale).square().mean(), self.scale


def step(m: nn.Module, x: Tensor, scale: Tensor) -> Tensor:
    m.zero_grad()
    loss, returned = m(x=x)
    whole = returned.full_tensor() if hasattr(returned, "full_tensor") else returned
    torch.testing.assert_close(whole, scale, rtol=1e-12, atol=0)
    loss /= 2  # in place, as losses of several batches are averaged
    loss.backward()
    found: Tensor = loss.detach()
    return found


def handles_odd_models() -> None:
    """Views of parameters beyond their block, what is frozen and changes, what is returned, and what goes wrong."""
    torch.manual_seed(0)
    model = Odd().double()
    example = {"x": torch.randn(4, 8, dtype=torch.float64)}
    least = ClusterSpec.local(1, memory_bytes="1 GiB", cores=2, host_memory_bytes="1 GiB")
    trace = autopar.plan(model, least, example_kwargs=example, pin={"offload": "host"}).transfer_schedule
    tight = int(1.2 * max(trace.trace.needed_bytes) / 0.9)
    for memory in (tight, "1 GiB"):
        cluster = ClusterSpec.local(1, memory_bytes=memory, cores=2, host_memory_bytes="1 GiB")
        original = copy.deepcopy(model)
        pmodel = autopar.parallelize(
            copy.deepcopy(model), cluster, example_kwargs=example, pin={"offload": "host", "recompute": "none"}
        )
        assert pmodel.offload.transfers.arena.held_bytes == 0
        assert all(each.here is None for each in pmodel.offload.parameters.values())

        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randn(4, 8, dtype=torch.float64)
            losses = [step(m, x, original.scale) for m in (pmodel, original)]
            torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
            same_gradients(pmodel, original)
            with torch.no_grad():  # what is not trained may have stayed on the device
                for m in (pmodel, original):
                    for name, parameter in m.named_parameters():
                        if "still" in name:
                            parameter.mul_(1.5) if seed else parameter.data.mul_(1.5)
            pmodel.load_state_dict({k: v * 0.9 for k, v in original.state_dict().items()})
            original.load_state_dict({k: v * 0.9 for k, v in original.state_dict().items()})

        def fails(_: Tensor) -> None:
            raise ValueError("this backward is not finished")

        for m in (pmodel, original):
            table = m.get_parameter("inner.1.0.weight")
            hook = table.register_hook(fails)
            with pytest.raises(ValueError, match="not finished"):
                m(x=x * 3)[0].backward()
            hook.remove()
            m.zero_grad()
        losses = [step(m, x, original.scale) for m in (pmodel, original)]
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
        same_gradients(pmodel, original)
        pmodel.get_parameter("still.weight").requires_grad_(True)
        with pytest.raises(InputError, match=r"still.weight requires a gradient, but the plan makes none"):
            pmodel(x=x)


def writes_to_what_is_saved(activations: str) -> None:
    """One rank: a result that backward reads is written to in place, which autograd refuses without offload too."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Sigmoid())
    batch = {"input": torch.randn(8, 16)}
    cluster = ClusterSpec.local(1, "1 GiB", cores=2, host_memory_bytes="1 GiB")
    pin = {"recompute": "none", "offload": "host", "activations": activations}
    pmodel = autopar.parallelize(model, cluster, example_kwargs=batch, pin=pin)
    for _ in range(2):
        result = pmodel(**batch)
        with torch.no_grad():
            result.mul_(2)
        with pytest.raises(RuntimeError, match=r"in ?place"):
            result.sum().backward()
