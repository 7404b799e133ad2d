"""Updates in backward: that nothing changes but when, what goes on beside what, and what is said where it cannot be."""

from __future__ import annotations

import copy
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.runtime.module import ParallelModule
from autopar.runtime.optim.early_update import Used, check_separate
from planner.base.errors import DiskError, InfeasibleError, InputError, PlanError
from planner.plan.plan import Plan
from planner.solve.transfers import TransferSchedule
from tests.autopar import on_disk
from tests.autopar.carried import same_gradients
from tests.autopar.updated import CLUSTER, EARLY, ON_DEVICE, Deep, batch, deep, same_values, steps_of, were_updated

WHERE = pytest.mark.parametrize("pin", [EARLY, ON_DEVICE], ids=["host", "device"])


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


NO_DECAY: list[dict[str, Any]] = [{"params": ["*.bias", "*norm*"], "weight_decay": 0.0, "lr": 3e-3}]


@pytest.mark.parametrize(
    "early, make, dtype, masters",
    [
        (EARLY, torch.optim.AdamW, torch.float32, None),
        (EARLY, torch.optim.RMSprop, torch.float64, None),
        (EARLY, torch.optim.AdamW, torch.bfloat16, torch.float32),
        (ON_DEVICE, torch.optim.AdamW, torch.float32, None),
        (ON_DEVICE, torch.optim.AdamW, torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_the_same_bits_as_an_update_after_backward(
    early: dict[str, Any], make: Any, dtype: torch.dtype, masters: torch.dtype | None
) -> None:
    """With groups, a schedule, momentum and masters; in the optimizer's state, too."""
    states = []
    for pin in (early, {**early, "update": "after"}):
        _, pmodel = deep(pin, dtype)
        optimizer = pmodel.optimizer(make, groups=NO_DECAY, master_dtype=masters, lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            steps_of(pmodel, optimizer, range(4), schedule)
        states.append((pmodel.full_state_dict(), optimizer.state_dict()))
        assert schedule.last_epoch == 4
    (used, mine), (kept, theirs) = states
    assert all(torch.equal(value, kept[key]) for key, value in used.items())
    assert mine["param_groups"] == theirs["param_groups"] and mine["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        for key, value in state.items():
            whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in
                     (mine["state"][number][key], value)]  # fmt: skip
            assert torch.equal(*whole)


def test_a_checkpoint_right_after_a_step_goes_on(tmp_path: Path) -> None:
    model, pmodel = deep()
    plain, mine = torch.optim.AdamW(model.parameters()), pmodel.optimizer(torch.optim.AdamW)
    steps_of(model, plain, range(4))
    steps_of(pmodel, mine, range(2))
    autopar.save_checkpoint(tmp_path, pmodel, mine)
    _, other = deep()
    again = other.optimizer(torch.optim.AdamW, lr=0.5)
    autopar.load_checkpoint(tmp_path, other, again)
    steps_of(other, again, range(2, 4))
    same_values(other, model)


def test_what_stays_is_updated_by_step() -> None:
    """Where there is room for some of the blocks, and a host that updates slowly."""
    torch.manual_seed(0)
    model = Deep().double()
    roomy = autopar.plan(model, CLUSTER, example_kwargs={"x": batch(0)}, pin=EARLY)
    room = max(roomy.transfer_schedule.trace.needed_bytes) + sum(
        item.bytes for item in roomy.transfer_schedule.trace.items
    )
    host = CLUSTER.host.model_copy(update={"memory_bandwidth_bytes_per_s": 1e6})  # type: ignore[union-attr]
    device = CLUSTER.device.model_copy(update={"memory_bytes": int(room / 0.9)})
    small = CLUSTER.model_copy(update={"device": device, "host": host})
    pmodel = autopar.parallelize(
        copy.deepcopy(model), small, example_kwargs={"x": batch(0)}, pin={**EARLY, "offload": "auto"}
    )
    assert pmodel.offload is not None and pmodel.offload.updates_in_backward
    moving = [pmodel.offload.holds(name) for name, _ in pmodel.named_parameters()]
    assert any(moving) and not all(moving)
    optimizer = pmodel.optimizer(torch.optim.AdamW)
    pmodel(x=batch(0)).backward()
    trained = [(name, p) for name, p in pmodel.named_parameters() if p.requires_grad]
    assert all(isinstance(p.grad, Used) == pmodel.offload.holds(name) for name, p in trained)
    optimizer.step()
    optimizer.zero_grad()
    steps_of(pmodel, optimizer, range(1, 4))
    steps_of(model, torch.optim.AdamW(model.parameters()), range(4))
    same_values(pmodel, model)


def test_trains_from_files(tmp_path: Path) -> None:
    """A disk that is full when state is made is an error of backward, which has updated all parameters."""
    model, pmodel = deep({"offload": "disk", "update": "backward"}, path=str(tmp_path))
    optimizer = pmodel.optimizer(torch.optim.AdamW, lr=1e-2)
    steps_of(pmodel, optimizer, range(3))
    steps_of(model, torch.optim.AdamW(model.parameters(), lr=1e-2), range(3))
    same_values(pmodel, model)
    mapped = Path("/proc/self/maps").read_text().count(str(tmp_path))
    steps_of(pmodel, optimizer, range(1))
    assert mapped == Path("/proc/self/maps").read_text().count(str(tmp_path)) > 0
    chunks = pmodel.offload.gradients.values()  # type: ignore[union-attr]
    assert all(len(chunk._homes) == (chunk._shared is None) for chunk in chunks)

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    model.load_state_dict(pmodel.full_state_dict())
    optimizer = pmodel.optimizer(torch.optim.AdamW, lr=1e-2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(InfeasibleError, match=r"no [\d,]+ bytes .*in .* for optimizer state .exp_avg."):
            pmodel(x=batch(0)).backward()
    optimizer.step()
    steps_of(pmodel, optimizer, range(1, 3))
    steps_of(model, torch.optim.AdamW(model.parameters(), lr=1e-2), range(3))
    same_values(pmodel, model)


def told(run: Callable[[], Any]) -> str:
    """What an error says, if there is one; the calls that it holds are let go."""
    try:
        run()
    except (DiskError, InputError) as error:
        return "\n".join((str(error), *getattr(error, "__notes__", ())))
    return ""


def test_the_advice_where_a_file_cannot_be_read_ends_the_step(tmp_path: Path) -> None:
    """Each file in turn: in forward, in backward before or after it has updated others, in an update of its thread."""
    model, pmodel = deep({"offload": "disk", "update": "backward"}, path=str(tmp_path))
    optimizer, plain = pmodel.optimizer(torch.optim.AdamW), torch.optim.AdamW(model.parameters())
    steps_of(model, plain, range(1))
    steps_of(pmodel, optimizer, range(1))
    seen = set()
    # The newest first: state, which is in use as it is until it is loaded anew.
    for file in sorted(on_disk.unnamed(str(tmp_path)), reverse=True):
        if file not in on_disk.unnamed(str(tmp_path)):  # of state that was loaded anew since
            continue
        kept = copy.deepcopy((pmodel.full_state_dict(), optimizer.state_dict()))
        held = os.pread(file, os.fstat(file).st_size, 0)
        os.ftruncate(file, 0)
        failed = told(lambda: pmodel(x=batch(1)).backward())
        assert os.pwrite(file, held, 0) == len(held)
        if failed:  # else it is a home of gradients, and others were free
            assert "do not repeat this step then, but call optimizer.step(), which ends it or says what" in failed
            note = failed.splitlines()[-1]
            if note.startswith("while backward updated parameters"):
                assert note.endswith(". Call optimizer.step(), which ends this step, before the model is called again")
                with pytest.raises(InputError, match=r"before optimizer.step\(\) has ended this step: call it first"):
                    pmodel(x=batch(1))
            says = told(optimizer.step)
            assert not says or "had already updated some parameters" in says
            seen.add((note.split(" ")[0], bool(says)))
        else:
            optimizer.step()
        pmodel.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        optimizer.zero_grad()
        steps_of(model, plain, range(2, 3))
        steps_of(pmodel, optimizer, range(2, 3))
        same_values(pmodel, model)
    assert seen == {("fetch", False), ("evict", True), ("evict", False), ("while", False)}


# ---- what goes on beside what ----------------------------------------------------------------------------------------


def test_backward_goes_on_while_a_block_is_updated() -> None:
    """Each update but the last waits until backward has entered the next block; with several threads, as the others."""
    went_on, seen = threading.Semaphore(0), []

    class Waiting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if threading.current_thread() is not threading.main_thread() and len(seen) < 4:
                seen.append((went_on.acquire(timeout=20), torch.get_num_threads()))
            return super().step(closure)

    model, pmodel = deep()
    optimizer = pmodel.optimizer(Waiting, lr=0.1)
    enter = pmodel.offload.enter

    def entering(number: int, is_backward: bool) -> None:
        enter(number, is_backward)
        if is_backward and number < 4:
            went_on.release()

    pmodel.offload.enter = entering  # type: ignore[method-assign]
    steps_of(pmodel, optimizer, range(1))
    assert seen == [(True, torch.get_num_threads())] * 4
    steps_of(model, torch.optim.SGD(model.parameters(), lr=0.1), range(1))
    same_values(pmodel, model)


def test_hooks_closures_and_counts_go_on_once_a_step() -> None:
    called: list[str] = []

    class Counting(torch.optim.Optimizer):
        def __init__(self, groups: Any, lr: float):
            super().__init__(groups, {"lr": lr})
            self.param_groups[0]["count"] = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = None if closure is None else closure()
            self.param_groups[0]["count"] += 1
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.sub_(group["lr"] * parameter.grad)
            return loss

    model, pmodel = deep()
    optimizer = pmodel.optimizer(Counting, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    steps_of(pmodel, optimizer, range(2), schedule)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = pmodel(x=batch(2))
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert called == ["before", "after"] * 3 and optimizer.param_groups[0]["count"] == 3
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    steps_of(model, plain, range(2), torch.optim.lr_scheduler.ExponentialLR(plain, 0.5))
    torch.testing.assert_close(loss, model(x=batch(2)), rtol=1e-12, atol=0)
    steps_of(model, plain, range(2, 3))
    same_values(pmodel, model)


# ---- what waits for all of backward ----------------------------------------------------------------------------------


@WHERE
def test_where_gradients_are_asked_for_they_are_there_and_the_update_waits(pin: dict[str, Any]) -> None:
    model, pmodel = deep(pin)
    optimizers = torch.optim.SGD(model.parameters(), lr=0.1), pmodel.optimizer(torch.optim.SGD, lr=0.1)

    def both(reason: str, run: Callable[[nn.Module], Any]) -> None:
        with pytest.warns(UserWarning, match=f"updates no parameters before it is over.*{reason}"):
            run(pmodel)
        run(model)
        assert not were_updated(pmodel)
        same_gradients(pmodel, model)
        for m, optimizer in zip((model, pmodel), optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            steps_of(m, optimizer, range(9, 10))
        same_values(pmodel, model)

    def hooked(m: nn.Module) -> None:
        handle = m.get_parameter("blocks.2.up.weight").register_hook(lambda grad: grad * 2)
        m(x=batch(0)).backward()
        handle.remove()

    def hooked_after(m: nn.Module) -> None:
        def doubled(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad *= 2

        handle = m.get_parameter("blocks.2.up.weight").register_post_accumulate_grad_hook(doubled)
        m(x=batch(0)).backward()
        handle.remove()

    def two_at_once(m: nn.Module) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="a step goes another way")
            (m(x=batch(0)) + 2 * m(x=batch(1))).backward()

    def adds_up(m: nn.Module) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            two_at_once(m)
        m(x=batch(2)).backward()

    def some(m: nn.Module) -> None:
        m(x=batch(0)).backward(inputs=[m.get_parameter("stem.weight"), m.get_parameter("blocks.0.up.bias")])

    both("hook waits for the gradient of blocks.2.up.weight", hooked)
    both("hook waits for the gradient of blocks.2.up.weight", hooked_after)
    both("another call of the model", two_at_once)
    both("has a gradient from before", adds_up)
    both("some gradients are asked for", some)
    names = ["blocks.3.down.weight", "blocks.0.up.weight"]
    with pytest.warns(UserWarning, match="some gradients are asked for"):
        found = torch.autograd.grad(pmodel(x=batch(0)), [pmodel.get_parameter(name) for name in names])
    expected = torch.autograd.grad(model(x=batch(0)), [model.get_parameter(name) for name in names])
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs)  # type: ignore[attr-defined]
    same_values(pmodel, model)
    kept = pmodel(x=batch(0))  # an older graph that is never undone, until it is let go
    with pytest.warns(UserWarning, match="another call of the model"):
        pmodel(x=batch(1)).backward()
    del kept
    optimizers[1].zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pmodel(x=batch(1)).backward()
    assert were_updated(pmodel)


def test_an_optimizer_made_otherwise_updates_after_backward() -> None:
    model, pmodel = deep()
    steps_of(pmodel, torch.optim.SGD(pmodel.parameters(), lr=0.1), range(2))
    optimizer = pmodel.optimizer(torch.optim.SGD, lr=0.1)
    pmodel(x=batch(2)).backward()
    assert were_updated(pmodel)
    del optimizer  # it lives no longer, and updates nothing
    pmodel(x=batch(2)).backward()
    assert not were_updated(pmodel)
    steps_of(model, torch.optim.SGD(model.parameters(), lr=0.1), range(3))
    model(x=batch(2)).backward()
    same_gradients(pmodel, model)
    same_values(pmodel, model)


# ---- what is refused -------------------------------------------------------------------------------------------------

NEEDS_ALL = "clipping by their norm or a GradScaler, cannot be had so: plan with pin 'update' 'after'"


@WHERE
def test_what_needs_gradients_before_the_update_is_refused(pin: dict[str, Any]) -> None:
    _, pmodel = deep(pin)
    optimizer = pmodel.optimizer(torch.optim.AdamW)
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0)  # type: ignore[attr-defined]
    scaler.scale(pmodel(x=batch(0))).backward()
    parameters = [*pmodel.parameters()]
    grad: Any = parameters[0].grad
    for use in (
        lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        lambda: nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False),
        lambda: nn.utils.clip_grad_value_(parameters, 1.0),
        lambda: nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]),
        lambda: scaler.unscale_(optimizer),
        lambda: scaler.step(optimizer),
        lambda: optimizer.zero_grad(set_to_none=False),
        lambda: torch.optim.SGD(parameters, lr=0.1).step(),
        lambda: torch.optim.AdamW(parameters, fused=True).step(),
        grad.norm,
        grad.to_local,
        grad.full_tensor,
        lambda: grad * 2,
    ):
        with pytest.raises(InputError, match=NEEDS_ALL):
            use()
    assert grad.shape == parameters[0].shape and "Used" in repr(grad)
    assert grad._local_tensor.untyped_storage().nbytes() == 8
    optimizer.step()
    assert all(parameter.grad is None for parameter in parameters)


def test_steps_that_go_another_way_are_refused() -> None:
    model, pmodel = deep()
    optimizer = pmodel.optimizer(torch.optim.SGD, lr=0.1)
    loss = pmodel(x=batch(0))
    loss.backward(retain_graph=True)
    for again in (lambda: pmodel(x=batch(1)), lambda: torch.no_grad()(pmodel)(x=batch(1))):
        with pytest.raises(InputError, match=r"model is called before optimizer.step\(\) has ended this step: call it"):
            again()
    with pytest.raises(InputError, match="a second backward in one step, whose first one has already updated"):
        loss.backward()
    optimizer.zero_grad()
    with pytest.raises(InputError, match=r"before optimizer.step\(\) has ended"):
        pmodel(x=batch(1))
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(
        InputError, match=r"param_groups\[0\]\['lr'\] was 0.1 in backward.* now 0.2: put it back for this step"
    ):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    with pytest.raises(InputError, match="changed in place between forward and backward"):
        loss.backward()
    steps_of(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
    steps_of(pmodel, optimizer, range(1, 2))
    same_values(pmodel, model)
    pmodel(x=batch(3)).backward()
    other = pmodel.optimizer(torch.optim.SGD, lr=0.1)
    assert all(parameter.grad is None for parameter in pmodel.parameters())
    with pytest.raises(InputError, match=r"another optimizer was made by pmodel.optimizer since"):
        optimizer.step()
    steps_of(pmodel, other, range(2))
    for seeds in (range(3, 4), range(2)):
        steps_of(model, torch.optim.SGD(model.parameters(), lr=0.1), seeds)
    same_values(pmodel, model)


class Clipping(torch.optim.SGD):
    """Scales all gradients by their common norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


class Own:
    """Made, but of no known kind."""

    defaults: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, groups: Any):
        self.param_groups = groups

    def step(self) -> None:
        pass


def test_optimizers_that_couple_parameters_are_refused() -> None:
    _, pmodel = deep()
    with pytest.raises(InputError, match="Clipping does not update each parameter by itself, and in backward"):
        pmodel.optimizer(Clipping, lr=0.1)
    for make in (torch.optim.LBFGS, Own):
        with pytest.raises(InputError, match=f"{make.__name__} does not step some of its parameters as torch.optim.Op"):
            pmodel.optimizer(make)
    check_separate(torch.optim.Adafactor, {})


def test_what_asks_for_all_gradients_of_a_device_is_refused() -> None:
    _, pmodel = deep(ON_DEVICE)
    with pytest.raises(InputError, match="only: backward updates parameters by one optimizer"):
        pmodel.optimizer(torch.optim.AdamW, only=lambda name, _: "norm" in name)
    with pytest.raises(InputError, match=r"added up in torch.float64, and backward uses each one by itself: plan with"):
        pmodel.accumulate_gradients_in(torch.float64)
    optimizer = pmodel.optimizer(torch.optim.AdamW)
    loss = pmodel(x=batch(0))
    loss.backward(retain_graph=True)
    assert were_updated(pmodel)
    with pytest.raises(
        InputError, match=r"called before optimizer.step\(\) has ended this step: call it first; to add up"
    ):
        pmodel(x=batch(1))
    with pytest.raises(InputError, match="a second backward in one step, whose first one has already updated"):
        loss.backward()
    optimizer.step()
    assert copy.deepcopy(pmodel)._early is not pmodel._early


# ---- what breaks off -------------------------------------------------------------------------------------------------


def breaks_off(pmodel: ParallelModule, at: int) -> None:
    """A backward that fails on entering a block."""
    enter = pmodel.offload.enter

    def failing(number: int, is_backward: bool) -> None:
        enter(number, is_backward)
        if is_backward and number == at:
            raise ValueError("this backward is not finished")

    pmodel.offload.enter = failing  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="not finished"):
        pmodel(x=batch(0)).backward()
    pmodel.offload.enter = enter  # type: ignore[method-assign]


def test_a_backward_that_breaks_off_says_what_was_updated() -> None:
    model, pmodel = deep()
    optimizer, start = pmodel.optimizer(torch.optim.SGD, lr=0.1), copy.deepcopy(model.state_dict())
    told = r"updated some parameters, which are a step ahead of others \(updated by: gradients 5 head, gradients 4 bl"
    breaks_off(pmodel, 3)
    with pytest.raises(InputError, match=told):
        optimizer.step()
    found = pmodel.full_state_dict()
    changed = {name.rsplit(".", 2)[0] for name, value in found.items() if not torch.equal(value, start[name])}
    assert changed == {"blocks.3", "head.bias"} or changed == {"blocks.3", "head"}
    breaks_off(pmodel, 3)
    pmodel.load_state_dict(start)
    with pytest.warns(UserWarning, match=told):
        pmodel(x=batch(0)).backward()
    assert were_updated(pmodel)
    optimizer.step()
    steps_of(model, torch.optim.SGD(model.parameters(), lr=0.1), range(1))
    same_values(pmodel, model)


def test_an_update_that_fails_is_raised_by_backward_and_others_go_on() -> None:
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if Failing.fails and any(p.shape == (16, 8) and p.grad is not None for p in self.param_groups[0]["params"]):
                Failing.fails = False
                raise ArithmeticError("this update fails")
            return super().step(closure)

    _, pmodel = deep()
    optimizer = pmodel.optimizer(Failing, lr=0.1)
    start = pmodel.full_state_dict()
    Failing.fails = True
    with pytest.raises(ArithmeticError, match="this update fails") as caught:
        pmodel(x=batch(0)).backward()
    (note,) = caught.value.__notes__
    assert note.startswith("while backward updated parameters; updated by: gradients 5")
    assert note.endswith(
        "; failed: gradients 4 blocks.3. Call optimizer.step(), which ends this step, before the model is called again"
    )
    found = pmodel.full_state_dict()
    same = {name for name, value in found.items() if torch.equal(value, start[name])}
    assert same == {name for name in start if name.startswith("blocks.3.")} | {"blocks.1.up.bias"}
    optimizer.step()
    steps_of(pmodel, optimizer, range(1))


def test_a_transfer_schedule_that_reads_what_was_updated_is_refused() -> None:
    torch.manual_seed(0)
    model = Deep().double()
    plan = autopar.plan(model, CLUSTER, example_kwargs={"x": batch(0)}, pin=EARLY)
    data = json.loads(json.dumps(plan.transfer_schedule.to_dict()))
    item = next(each for each in data["items"] if each["name"] == "parameters 4 blocks.3")
    (updated,) = (name for name in item["uses"] if name.startswith("update "))
    moments = {moment["name"]: moment for moment in data["moments"]}
    late = next(name for name in moments if name.startswith("backward 3"))
    item["uses"] = {**{name: how for name, how in item["uses"].items() if name != "update"}, late: "r", "update": "rw"}
    moments[late].setdefault("fetch", []).append(item["name"])
    moments[late].setdefault("fetched", []).append(item["name"])
    after = data["moments"][data["moments"].index(moments[late]) + 1]
    after.setdefault("drop", []).append(item["name"])
    table = TransferSchedule.from_dict(data)
    edited = Plan.from_dict({**plan.to_dict(), "transfer_schedule": table.to_dict()})
    with pytest.raises(PlanError, match=r"updates parameters 4 blocks.3 before its last use in the step"):
        autopar.parallelize(model, CLUSTER, plan=edited, example_kwargs={"x": batch(0)})
    assert updated == "update 4 blocks.3"
