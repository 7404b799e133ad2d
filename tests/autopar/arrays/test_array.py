"""Arrays of models beside their members, each trained by itself."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.arrays.model_array import ModelArray
from planner.base.errors import CheckpointError, InputError, PlanWarning

MEMBERS, STEPS = 3, 4
RATES = {"lr": [0.1, 0.03, 0.2], "weight_decay": [0.0, 0.1, 0.01]}


class Perceptron(nn.Module):
    """Two layers; returns its loss and a metric."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, hidden), nn.Linear(hidden, 4)
        self.second.bias.requires_grad_(False)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        scores = self.second(F.gelu(self.first(x)))
        return {"loss": F.cross_entropy(scores, target), "accuracy": (scores.argmax(-1) == target).double().mean()}


class Convolutional(nn.Module):
    """Convolutions and batch norms, whose running statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.second, self.last = nn.Conv1d(4, 4, 3, groups=2), nn.BatchNorm1d(4, momentum=0.3)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = F.max_pool1d(torch.relu(self.norm(self.first(x.view(-1, 2, 3)))), 1)
        return F.cross_entropy(self.out(self.last(self.second(h)).mean(-1)), target)


class Attending(nn.Module):
    """Embeddings tied to the output, attention, norms, and a table of positions that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(4, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 4, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("positions", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.norm(self.embed(target)[:, None] * x.sum(-1)[:, None, None] + self.positions)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return F.cross_entropy(self.out(h).flatten(0, 1), target)


def doubled(make: Callable[[], nn.Module]) -> list[nn.Module]:
    """Members that differ in every value."""
    torch.manual_seed(0)
    return [make().double() for _ in range(MEMBERS)]


def batch(own: bool) -> dict[str, Tensor]:
    rows = (MEMBERS, 5) if own else (5,)
    return {"x": torch.randn(*rows, 6, dtype=torch.float64), "target": torch.randint(4, rows)}


def of_member(given: dict[str, Tensor], number: int, own: bool) -> dict[str, Tensor]:
    return {name: value[number] if own else value for name, value in given.items()}


def loss_of(output: Any) -> Tensor:
    found = output["loss"] if isinstance(output, dict) else output
    assert isinstance(found, Tensor)
    return found


def check_equal(array: ModelArray, members: list[nn.Module]) -> None:
    for number, member in enumerate(members):
        found = array.member(number).state_dict()
        assert found.keys() == member.state_dict().keys()
        for name, value in member.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=f"{name} of {number}")


@pytest.mark.parametrize("own", [False, True], ids=["one batch", "own batches"])
@pytest.mark.parametrize("make", [Perceptron, Convolutional, Attending])
def test_members_train_as_they_would_alone(make: Callable[[], nn.Module], own: bool) -> None:
    """With a step rate, weight decay and momentum of their own; the last but one step without member 1."""
    members = doubled(make)
    array = autopar.array(members, vary=RATES, own_inputs=["x", "target"] if own else [])
    optimizer = array.optimizer(torch.optim.SGD, momentum=0.9)
    each = [
        torch.optim.SGD(
            [p for p in member.parameters() if p.requires_grad],
            momentum=0.9,
            **{name: values[number] for name, values in RATES.items()},
        )
        for number, member in enumerate(members)
    ]
    stopped = -1
    for step in range(STEPS):
        given = batch(own)
        if step == STEPS - 2:
            stopped = 1
            array.stop(stopped)
        out = array(**given)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for number, (member, alone) in enumerate(zip(members, each, strict=True)):
            if number == stopped:
                continue
            loss = loss_of(member(**of_member(given, number, own)))
            torch.testing.assert_close(loss_of(out.members)[number], loss, rtol=1e-10, atol=1e-12)
            loss.backward()
            alone.step()
            alone.zero_grad()
    check_equal(array, members)
    assert array.stopped == (1,)
    running = [loss for number, loss in enumerate(loss_of(out.members)) if number != stopped]
    torch.testing.assert_close(out.loss, sum(running))


OPTIMIZERS = {
    torch.optim.AdamW: {"lr": [1e-2, 3e-2, 1e-3], "betas": [(0.9, 0.99), (0.5, 0.9), (0.8, 0.999)], "eps": [1e-3] * 3},
    torch.optim.RMSprop: {"alpha": [0.9, 0.99, 0.5], "lr": [1e-2, 1e-3, 1e-1]},
    torch.optim.Adafactor: {"lr": [1e-2, 1e-1, 1e-3]},
}


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_every_optimizer_steps_members_as_their_own_would(make: Any) -> None:
    """Also one that goes by norms of whole parameters; and a schedule of each member's rate."""
    torch.manual_seed(0)
    start = Perceptron().double()
    array = autopar.array(start, MEMBERS, vary=OPTIMIZERS[make])
    options = [{name: values[number] for name, values in OPTIMIZERS[make].items()} for number in range(MEMBERS)]
    members = [copy.deepcopy(start) for _ in range(MEMBERS)]
    trained = [[p for p in member.parameters() if p.requires_grad] for member in members]
    each = [make(own, **option) for own, option in zip(trained, options, strict=True)]
    optimizer = array.optimizer(make)
    schedules: list[Callable[[int], float]] = [lambda step: 1.0, lambda step: 0.5**step, lambda step: 1 / (1 + step)]
    together = torch.optim.lr_scheduler.LambdaLR(optimizer, schedules)
    alone = [torch.optim.lr_scheduler.LambdaLR(one, own) for one, own in zip(each, schedules, strict=True)]
    for _ in range(STEPS):
        given = batch(own=False)

        def closure(given: dict[str, Any] = given) -> Tensor:
            optimizer.zero_grad()
            loss = array(**given).loss
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0
        together.step()
        for member, one, schedule in zip(members, each, alone, strict=True):
            member(**given)["loss"].backward()
            one.step()
            one.zero_grad()
            schedule.step()
    check_equal(array, members)


def test_a_hook_clips_every_member_by_its_own_norm() -> None:
    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.1)

    members, given = doubled(Perceptron), batch(own=False)
    array = autopar.array(members)
    optimizer = array.optimizer(torch.optim.SGD, lr=1.0)
    optimizer.register_step_pre_hook(clip)
    array(**given).loss.backward()
    optimizer.step()
    for member in members:
        trained = [p for p in member.parameters() if p.requires_grad]
        member(**given)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.1)
        torch.optim.SGD(trained, lr=1.0).step()
    check_equal(array, members)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.RMSprop])
def test_a_scaler_is_refused_whether_or_not_kernels_are_fused(make: Any) -> None:
    scaler, optimizer = torch.amp.GradScaler("cpu"), autopar.array(Perceptron, 2).optimizer(make)
    scaler.scale(torch.ones(()))
    with pytest.raises(InputError, match=r"does not step under a GradScaler.*bfloat16"):
        scaler.step(optimizer)


def test_rows_have_their_gradients_after_backward() -> None:
    """For whom looks at them before the step: what clips them, or divides them by a scale."""
    array, given = autopar.array(Perceptron, 2).double(), batch(own=False)
    optimizer, scaler = array.optimizer(torch.optim.SGD), torch.amp.GradScaler("cpu", init_scale=4.0)
    array(**given).loss.backward()
    once = [parameter.grad.clone() for parameter in array.parameters() if parameter.requires_grad]
    optimizer.zero_grad()
    scaler.scale(array(**given).loss).backward()
    scaler.unscale_(optimizer)
    for one, parameter in zip(once, filter(lambda each: each.requires_grad, array.parameters()), strict=True):
        torch.testing.assert_close(parameter.grad, one)


def test_metrics_have_a_dim_of_members() -> None:
    members = doubled(Perceptron)
    given = batch(own=False)
    found = autopar.array(members)(**given).members["accuracy"]
    torch.testing.assert_close(found, torch.stack([member(**given)["accuracy"] for member in members]))


def test_dropout_draws_other_masks_for_each_member() -> None:
    """Of the same rate, from inputs and from what members computed; none in eval mode."""
    model = nn.Sequential(nn.Dropout(0.25), nn.Linear(64, 64, bias=False), nn.Dropout(0.5))
    array = autopar.array(model, 2, loss_fn=lambda outputs, batch: outputs.square().sum())
    dropped = autopar.array(model[0], 2)(torch.ones(100, 100)).members
    assert not torch.equal(dropped[0] == 0, dropped[1] == 0)
    for mask in (dropped == 0).double():
        assert abs(mask.mean() - 0.25) < 0.02
    behind = autopar.array(model, 2)(torch.ones(200, 64)).members
    assert not torch.equal(behind[0] == 0, behind[1] == 0)
    assert abs((behind == 0).double().mean() - 0.5) < 0.02
    first, second = (array.eval()(input=torch.ones(4, 64)).members for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first[0], first[1])


def test_modules_have_modes_of_their_own() -> None:
    members = doubled(Convolutional)
    array = autopar.array(members)
    for each in (array, *members):
        each.get_submodule("norm").eval()
    given = batch(own=False)
    found = array(**given).members
    torch.testing.assert_close(found, torch.stack([member(**given) for member in members]))
    check_equal(array, members)


def test_a_function_makes_members_from_seeds() -> None:
    array = autopar.array(Perceptron, 2, seed=5)
    torch.manual_seed(6)
    torch.testing.assert_close(array.member(1).state_dict(), Perceptron().state_dict(), rtol=0, atol=0)
    assert not torch.equal(array.first.weight[0], array.first.weight[1])


def test_a_member_is_a_model_of_its_class_and_what_is_stacked_loads_again() -> None:
    members = doubled(Attending)
    array = autopar.array(members)
    again = autopar.array(doubled(Attending)[0], MEMBERS)
    array.stop(1)
    again.load_state_dict(array.state_dict())
    check_equal(again, members)
    assert again.stopped == (1,), "who is stopped is saved"
    found = array.member(2)
    assert type(found) is Attending
    assert found.out.weight is found.embed.weight, "what is tied stays tied"
    Attending().double().load_state_dict(found.state_dict())
    with torch.no_grad():
        found.norm.weight.zero_()
    check_equal(array, members)


def test_a_checkpoint_has_what_members_have(tmp_path: Path) -> None:
    """Of one that stopped before it began, too; rates are those that a schedule has come to."""
    given = batch(own=False)

    def begun(seed: int) -> tuple[ModelArray, Any, Any]:
        made = autopar.array(lambda: Perceptron().double(), MEMBERS, vary=RATES, seed=seed)
        optimizer = made.optimizer(torch.optim.AdamW)
        return made, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def steps(made: ModelArray, optimizer: Any, schedule: Any) -> None:
        for _ in range(2):
            made(**given).loss.backward()
            optimizer.step(), schedule.step(), optimizer.zero_grad()

    run, other = begun(0), begun(7)
    run[0].stop(1)
    steps(*run)
    autopar.save_checkpoint(tmp_path, run[0], run[1], extra={"schedule": run[2]})
    steps(*run)
    autopar.load_checkpoint(tmp_path, other[0], other[1], extra={"schedule": other[2]})
    assert other[0].stopped == (1,)
    steps(*other)
    for name, value in run[0].state_dict().items():
        assert torch.equal(other[0].state_dict()[name], value), name
    for one, another in zip(run[1].param_groups, other[1].param_groups, strict=True):
        assert one["lr"] == another["lr"]
    assert [len(run[1].state[p]) for p in run[1].param_groups[1]["params"]] == [0, 0, 0]
    assert [len(other[1].state[p]) for p in other[1].param_groups[1]["params"]] == [0, 0, 0]
    with pytest.raises(CheckpointError, match=r"no option 'alpha', which this one \(RMSprop\) has"):
        autopar.load_checkpoint(tmp_path, other[0], other[0].optimizer(torch.optim.RMSprop))


def test_what_no_rule_stacks_runs_for_each_member_and_is_told() -> None:
    class Orthogonal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.linalg.matrix_exp(self.weight).cumsum(0)

    members = [Orthogonal() for _ in range(2)]
    array, x = autopar.array(members), torch.randn(3, 4, dtype=torch.float64)
    with pytest.warns(PlanWarning, match=r"run once for each of the 2 members: 1 x aten.linalg_matrix_exp.default"):
        found = array(x).members
    torch.testing.assert_close(found, torch.stack([member(x) for member in members]))
    assert array.one_by_one == {"aten.linalg_matrix_exp.default": 1}


class Holding(nn.Module):
    """Has settings, of any kind."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls = [self.linear.forward, lambda x: self.linear(x)]
        self.__dict__.update(held)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum()


def raised(power: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x**power


SETTINGS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"k": None}, {"k": 2}, "k 2, and that of member 0 has None"),
    ({"k": 2}, {"k": 2.0}, "k 2.0, and that of member 0 has 2:"),
    ({"k": 2}, {}, "no k, and that of member 0 has 2"),
    ({}, {"k": 2}, "k 2, and that of member 0 has none"),
    ({"k": [1, {"a": 2}]}, {"k": [1, {"a": 3}]}, r"k\[1\]\['a'\] 3, and that of member 0 has 2"),
    ({"k": F.relu}, {"k": F.silu}, "k <function silu"),
    ({"k": raised(2)}, {"k": raised(3)}, "k.power 3"),
    ({"k": functools.partial(F.softmax, dim=0)}, {"k": functools.partial(F.softmax, dim=1)}, r"k.keywords\['dim'\] 1"),
    ({"k": (nn.Flatten(0),)}, {"k": (nn.Flatten(1),)}, r"k\[0\].start_dim 1"),
    ({"k": torch.ones(2)}, {"k": torch.zeros(2)}, r"k tensor\(\[0., 0.\]\), and that of member 0 has tensor"),
    ({"k": torch.float32}, {"k": torch.float64}, "k torch.float64"),
]


def test_settings_that_are_alike_are_no_difference() -> None:
    """Equal, made anew for each: functions around values, tensors, what refers to itself or to the member."""

    def held() -> dict[str, Any]:
        loop: list[Any] = [float("inf"), raised(2), torch.ones(2), functools.partial(raised(3))]
        loop.append(loop)
        return {"k": loop, "generator": torch.Generator(), "d": nn.ReLU()}

    members = [Holding(**held()) for _ in range(2)]
    for member in members:
        member.register_forward_hook(lambda module, args, output: None)
        member.k.append(member.linear.weight)
    assert autopar.array(members).size == autopar.array(members[0], 2).size == 2
    members[1].register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(InputError, match=r"member 1 has _forward_hooks\[1\] <function"):
        autopar.array(members)


WIDER = Perceptron(hidden=9)
DROPPING = nn.Sequential(nn.Dropout(0.1))
FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "shapes": (
        lambda: autopar.array([Perceptron(), Perceptron(), WIDER]),
        r"module first of member 2 has out_features 9, and that of member 0 has 8",
    ),
    "shapes of parameters alone": (
        lambda: autopar.array([nn.ParameterList([torch.ones(2, 3)]), nn.ParameterList([torch.ones(2, 4)])]),
        r"parameter 0 of member 1 has shape \(2, 4\), and that of member 0 has \(2, 3\)",
    ),
    "settings": (
        lambda: autopar.array([nn.Sequential(nn.Dropout(0.2)), DROPPING]),
        r"module 0 of member 1 has p 0.1, and that of member 0 has 0.2",
    ),
    **{
        f"a setting: {said}": (
            lambda one=one, other=other: autopar.array([Holding(**one), Holding(**one), Holding(**other)]),
            rf"module \(root\) of member 2 has {said}",
        )
        for one, other, said in SETTINGS
    },
    "classes": (
        lambda: autopar.array([nn.Sequential(nn.ReLU()), nn.Sequential(nn.GELU())]),
        "module 0 of member 1 is a GELU, and that of member 0 a ReLU",
    ),
    "modules": (
        lambda: autopar.array([nn.Sequential(nn.ReLU()), nn.Sequential()]),
        "one of them alone has a module '0'",
    ),
    "one model twice": (lambda: autopar.array([WIDER, WIDER]), r"members 0 and 1 hold one tensor together \(first"),
    "too few values": (
        lambda: autopar.array(WIDER, 3, vary={"lr": [0.1, 0.2]}),
        r"vary\['lr'\] has 2 values, and the array has 3 members",
    ),
    "a number": (lambda: autopar.array(WIDER, 3, vary={"lr": 0.1}), "give a list of 3 values"),
    "unknown": (
        lambda: autopar.array(WIDER, 2, vary={"weight_dekay": [0, 1]}).optimizer(torch.optim.AdamW),
        "AdamW has no hyper-parameter 'weight_dekay'; close are: weight_decay",
    ),
    "no class": (lambda: autopar.array(WIDER, 2).optimizer("adam"), "is made of a class"),  # type: ignore[arg-type]
    "no number": (lambda: autopar.array(WIDER), "n is None"),
    "no members": (lambda: autopar.array([]), "at least one"),
    "another number": (lambda: autopar.array([WIDER], 2), "the list has 1 models, and n is 2"),
    "own inputs": (lambda: autopar.array(WIDER, 2, own_inputs=["y"]), "no input 'y'; it has target, x"),
    "own inputs of the loss": (
        lambda: autopar.array(
            nn.Linear(2, 2), 2, loss_fn=lambda out, given: (out - given["y"]).sum(), own_inputs=["yy"]
        )(input=torch.ones(5, 2), y=torch.ones(5, 2)),
        "neither Linear.forward nor the batch has an input 'yy'; the batch has input, y",
    ),
    "no dim of members": (
        lambda: autopar.array(WIDER, 2, own_inputs=["x"])(torch.ones(5, 6), torch.ones(5, dtype=torch.long)),
        r"input 'x' is one of own_inputs, and has shape \(5, 6\): its first dim must be that of the 2 members",
    ),
    "a function that makes no model": (lambda: autopar.array(lambda: 3, 2), "models makes 3, which is no torch.nn.Mod"),
    "a loss, and inputs by place": (
        lambda: autopar.array(nn.Linear(3, 3), 2, loss_fn=lambda out, batch: out.sum())(torch.ones(3)),
        r"an array with a loss_fn is called with the batch by name: array\(x=\.\.\., target=\.\.\.\)",
    ),
    "an optimizer without groups": (
        lambda: autopar.array(WIDER, 2).optimizer(torch.optim.LBFGS),
        "LBFGS steps all parameters as one and takes no groups .* or train members one after another",
    ),
    "a value for all beside one for each": (
        lambda: autopar.array(WIDER, vary={"lr": [0.1, 0.2]}).optimizer(torch.optim.Adam, lr=1.0),
        "vary has a 'lr' for each member, and lr=1.0 is given for all",
    ),
    "an option that there is not": (
        lambda: autopar.array(WIDER, 2).optimizer(torch.optim.Adam, betta=1.0),
        "Adam has no hyper-parameter 'betta'; close are: betas",
    ),
    "a value that the optimizer does not take": (
        lambda: autopar.array(WIDER, vary={"lr": [0.1, -0.2]}).optimizer(torch.optim.Adam),
        "Adam does not take the hyper-parameters of member 1, {'lr': -0.2}: Invalid learning rate: -0.2",
    ),
    "the state of more members": (
        lambda: autopar.array(WIDER, 2).load_state_dict(autopar.array(WIDER, 3).state_dict()),
        "the state is of an array of 3 members, and this one has 2",
    ),
    "no such member": (lambda: autopar.array(WIDER, 2).member(2), "there is no member 2"),
    "what no program holds": (lambda: autopar.array(Branching(), 2)(torch.ones(3)), "Branching"),
}


class Branching(nn.Module):
    """Reads values of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if (x * self.scale).sum() > 0 else x


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_named(fault: str) -> None:
    call, says = FAULTS[fault]
    with pytest.raises((InputError, autopar.CaptureError), match=says):
        call()
