"""Optimizers of a parallel module: which parts they step, their groups, and all that torch does with them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

import autopar
from autopar.runtime.module import ParallelModule
from autopar.runtime.optim.gradients import Gradient, Holders
from autopar.runtime.optim.optimizer import FUSED, check_by_itself, is_elementwise, make_optimizer
from planner.base.errors import InputError
from planner.cost.cluster import ClusterSpec

CPU = torch.device("cpu")
ELEMENTWISE: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.0, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(1e-3)}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
]


class Lars(torch.optim.Optimizer):
    """A rate of each parameter by its norm; none at all where nothing decays."""

    def __init__(self, params: Any, lr: float, decay: float):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                trust = parameter.norm() / parameter.grad.norm() if group["decay"] else 1.0
                parameter -= group["lr"] * trust * parameter.grad


class Noisy(torch.optim.SGD):
    """Adds what it draws."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad += torch.randn_like(parameter)
        super().step()


class WantsClosure(torch.optim.SGD):
    """Says nothing of what it misses."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None
        super().step(closure)


@pytest.mark.parametrize("make, options", ELEMENTWISE, ids=lambda given: getattr(given, "__name__", ""))
def test_elementwise_optimizers_are_taken(make: Any, options: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    assert is_elementwise(make, options, CPU)
    assert torch.equal(torch.get_rng_state(), before)


BY_ITSELF: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adafactor, {"lr": 0.0}),
    (torch.optim.Muon, {}),
    (Lars, {"lr": 0.0, "decay": 0.1}),
    (autopar.Lars, {}),
    (autopar.Lamb, {}),
]


@pytest.mark.parametrize("make, options", BY_ITSELF, ids=lambda given: getattr(given, "__name__", ""))
def test_others_need_whole_parameters(make: Any, options: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    assert not is_elementwise(make, options, CPU)
    check_by_itself(make, options, CPU)
    assert torch.equal(torch.get_rng_state(), before)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (WantsClosure, {}, r"WantsClosure does not step from gradients alone \((AssertionError|assert )"),
    (torch.optim.LBFGS, {}, r"LBFGS does not step from gradients alone \(.*'closure'\)"),
    (torch.optim.SparseAdam, {}, r"SparseAdam does not step from gradients alone \(SparseAdam does not support dense"),
    (Noisy, {}, "Noisy is neither elementwise, nor does it update each parameter by itself: one of two matrices"),
]


@pytest.mark.parametrize("make, options, said", REFUSED, ids=lambda given: getattr(given, "__name__", ""))
def test_others_are_refused(make: Any, options: dict[str, Any], said: str) -> None:
    before, parameters, names = torch.get_rng_state(), {"a": nn.Parameter(torch.ones(4))}, {"a": "a"}
    with pytest.raises(InputError, match=rf"{said}.* take an optimizer that updates every element by itself \(AdamW"):
        make_optimizer(make, parameters, names, {}, True, (), options)
    assert torch.equal(torch.get_rng_state(), before)


def test_options_and_groups_decide_whether_parameters_are_stepped_whole() -> None:
    parameters, names = {"a": nn.Parameter(torch.ones(4))}, {"a": "a", "b": "b"}
    asked: list[str] = []

    def none_is_cut() -> tuple[()]:
        asked.append("owners")
        return ()

    def make(groups: Any, slabs: dict[str, str], options: dict[str, float], cls: Any = Lars) -> Any:
        return make_optimizer(
            cls, parameters, names, slabs, True, groups, options, owned=lambda: asked.append("") or ()
        )

    made = make((), {"c": "a"}, {"lr": 0.1, "decay": 0.0})
    assert made.param_groups[0]["params"] == [parameters["a"]] and not asked
    groups = [{"params": "b", "decay": 0.1}]  # on another stage of the pipeline
    assert make(groups, {}, {"lr": 0.1, "decay": 0.0}) and len(asked) == 1
    for cls, options in ((Lars, {"lr": 0.1, "decay": 0.1}), (autopar.Lamb, {"lr": 0.1})):
        with pytest.raises(
            InputError, match=r"goes by whole parameters, and embedding tables lie in slabs .* 'c' in 'a'"
        ):
            make((), {"c": "a"}, options, cls)


def steps(make: Any, weight: list[float], gradients: list[list[float]], **options: Any) -> list[float]:
    """A weight after steps with these gradients, in float64."""
    parameter = nn.Parameter(torch.tensor(weight, dtype=torch.float64))
    optimizer = make([parameter], **options)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    found: list[float] = parameter.tolist()
    return found


def test_lars_by_hand() -> None:
    """A rate of 0.1 * 5 / (1 + 0.1 * 5) of (0.9, 1.2); then 0.45 / 1.45 of (0.87, 1.16), and half of the first."""
    options = {"lr": 1.0, "momentum": 0.5, "weight_decay": 0.1, "trust_coefficient": 0.1, "eps": 0.0}
    assert steps(autopar.Lars, [3.0, 4.0], [[0.6, 0.8]], **options) == pytest.approx([2.7, 3.6])
    assert steps(autopar.Lars, [3.0, 4.0], [[0.6, 0.8]] * 2, **options) == pytest.approx([2.28, 3.04])
    plain = {**options, "adapt": False}
    assert steps(autopar.Lars, [3.0, 4.0], [[0.6, 0.8]], **plain) == pytest.approx([3 - 0.9, 4 - 1.2])
    assert steps(autopar.Lars, [0.0, 0.0], [[0.6, 0.8]], **options) == pytest.approx([-0.6, -0.8])


def test_lamb_by_hand() -> None:
    """Adam's first update is the sign; with decay of 1 that is (4, 3), as long as the weight."""
    options = {"lr": 0.2 * 2**0.5, "eps": 0.0, "weight_decay": 0.0}
    assert steps(autopar.Lamb, [3.0, 4.0], [[2.0, -7.0]], **options) == pytest.approx([2.0, 5.0])
    assert steps(autopar.Lamb, [3.0, 4.0], [[2.0, -7.0]], lr=0.5, eps=0.0, weight_decay=1.0) == pytest.approx(
        [1.0, 2.5]
    )
    assert steps(autopar.Lamb, [3.0, 4.0], [[2.0, -7.0]], lr=0.5, eps=0.0, adapt=False, weight_decay=0.0) == [2.5, 4.5]
    plain = steps(torch.optim.AdamW, [3.0, 4.0], [[2.0, -7.0], [1.0, 3.0]], lr=0.5, eps=1e-6, weight_decay=0.0)
    mine = steps(autopar.Lamb, [3.0, 4.0], [[2.0, -7.0], [1.0, 3.0]], lr=0.5, adapt=False, weight_decay=0.0)
    assert mine == pytest.approx(plain, rel=1e-12)


# ---- over a module ---------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Biases, a norm, and one weight by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.again = nn.Linear(8, 16)
        self.again.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.again(self.down(self.norm(torch.relu(self.up(x)))))).square().mean()


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def both(pin: dict[str, Any] | None = None) -> tuple[Small, ParallelModule]:
    torch.manual_seed(0)
    model = Small().double()
    cluster = ClusterSpec.local(1, memory_bytes="1 GiB", cores=2, host_memory_bytes="1 GiB")
    return model, autopar.parallelize(copy.deepcopy(model), cluster, example_kwargs={"x": batch(0)}, pin=pin)


def batch(seed: int) -> Tensor:
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


NO_DECAY = ["*.bias", "*norm*"]


def pairs(model: nn.Module, pmodel: ParallelModule, make: Any, **options: Any) -> list[tuple[nn.Module, Any]]:
    """Each with its optimizer, in two groups: the original's by hand."""
    bare = {name for name, _ in model.named_parameters() if name.endswith("bias") or "norm" in name}
    by_hand = [
        {"params": [p for name, p in model.named_parameters() if name not in bare]},
        {"params": [p for name, p in model.named_parameters() if name in bare], "weight_decay": 0.0},
    ]
    mine = pmodel.optimizer(make, groups=[{"params": NO_DECAY, "weight_decay": 0.0}], **options)
    return [(model, make(by_hand, **options)), (pmodel, mine)]


def train(module: nn.Module, optimizer: Any, scheduler: Any, scaler: Any, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        scaler.scale(module(x=batch(seed))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()


def same(pmodel: ParallelModule, model: nn.Module) -> None:
    for name, value in pmodel.full_state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pin", [None, {"offload": "host"}], ids=str)
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop])
def test_steps_as_the_plain_optimizer(mesh: DeviceMesh, tmp_path: Path, make: Any, pin: dict[str, Any] | None) -> None:
    """With groups, a schedule, a scaler, clipping; after a restart from its state dict, and from a checkpoint."""
    model, pmodel = both(pin)
    pairs_ = pairs(model, pmodel, make, lr=1e-2, weight_decay=0.1)
    scalers: list[Any] = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in pairs_]  # type: ignore[attr-defined]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10) for _, optimizer in pairs_]
    runs = [(*pair, *more) for *more, pair in zip(schedules, scalers, pairs_, strict=True)]
    for run in runs:
        train(*run, range(3))
    same(pmodel, model)
    optimizer = pairs_[1][1]
    assert bool(optimizer.param_groups[0].get("fused")) == (make in FUSED)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 5]
    again = pairs(model, pmodel, make, lr=0.5, weight_decay=0.5)[1][1]
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    autopar.save_checkpoint(tmp_path, pmodel, again, extra={"schedule": schedules[1]})
    _, other = both(pin)
    restarted = pairs(model, other, make, lr=0.5, weight_decay=0.5)[1][1]
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(restarted, 10)
    autopar.load_checkpoint(tmp_path, other, restarted, extra={"schedule": schedule})
    train(*runs[0], range(3, 5))
    train(other, restarted, schedule, scalers[1], range(3, 5))
    same(other, model)


def test_an_overflow_leaves_all_as_it_was(mesh: DeviceMesh) -> None:
    """Fused kernels are told of it, and skip the step themselves."""
    _, pmodel = both()
    optimizer = pmodel.optimizer(torch.optim.AdamW)
    before = pmodel.full_state_dict()
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=4.0)  # type: ignore[attr-defined]
    scaler.scale(pmodel(x=batch(0))).backward()
    grad = next(pmodel.parameters()).grad
    assert isinstance(grad, DTensor)
    grad.to_local()[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(value, before[name]) for name, value in pmodel.full_state_dict().items())


@pytest.mark.parametrize("make", FUSED)
def test_fused_kernels_take_dtensors(mesh: DeviceMesh, make: Any) -> None:
    """Of different layouts at once, strips and scalars among them; and parts of what knows its holders."""
    ways: list[Any] = [Replicate(), _StridedShard(0, split_factor=3), Replicate()]
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 4), (6, 4), ())]
    plain = [nn.Parameter(value.clone()) for value in values]
    stored = [
        nn.Parameter(DTensor.from_local(value.clone(), mesh, [way], run_check=False, shape=value.shape, stride=strides))
        for value, way, strides in zip(values, ways, ((4, 1), (4, 1), ()), strict=True)
    ]
    optimizers = [make(plain, fused=False), make(stored, fused=True)]
    for number in range(3):
        for one, other in zip(plain, stored, strict=True):
            one.grad = torch.randn(one.shape, generator=generator, dtype=torch.float64)
            given = DTensor(one.grad.clone(), other._spec, requires_grad=False)  # type: ignore[attr-defined]
            other.grad = Gradient.of(given, Holders(), True) if number else given
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(plain, stored, strict=True):
        torch.testing.assert_close(other.data.to_local(), one.data, rtol=1e-12, atol=1e-12)  # type: ignore[attr-defined]


def test_groups_by_names(mesh: DeviceMesh) -> None:
    _, pmodel = both()
    named = {id(parameter): name for name, parameter in pmodel.named_parameters()}
    groups = [{"params": "again.*", "lr": 0.1}, {"params": ("*.weight", "norm.*")}]
    made = pmodel.optimizer(torch.optim.SGD, groups=groups, lr=0.2)
    found = [{named[id(parameter)] for parameter in group["params"]} for group in made.param_groups]
    assert found == [{"up.bias", "down.bias"}, {"up.weight", "again.bias"}, {"norm.weight", "norm.bias", "down.weight"}]
    assert [group["lr"] for group in made.param_groups] == [0.2, 0.1, 0.2]
    assert pmodel.optimizer(torch.optim.LBFGS)  # nothing is sharded
    for options in ({"fused": False}, {"foreach": True}, {"differentiable": True}):
        assert not pmodel.optimizer(torch.optim.AdamW, **options).defaults["fused"]
    weight = {"weight": nn.Parameter(torch.zeros(2, dtype=torch.cfloat))}  # fused kernels take no complex numbers
    assert not make_optimizer(torch.optim.AdamW, weight, {"weight": "weight"}, {}, False, (), {}).defaults["fused"]


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (torch.optim.SGD([torch.zeros(1)]), {}, "the optimizer is of type SGD: give its class, and its options beside it"),
    (
        torch.optim.SGD,
        {"groups": [{"params": "*.biass"}]},
        r"groups\[0\]: no parameter matches '\*.biass'; close are: '",
    ),
    (torch.optim.SGD, {"groups": [{"params": [torch.ones(1)]}]}, r"groups\[0\] has params of type list: give patterns"),
    (torch.optim.SGD, {"groups": [{"lr": 0.1}]}, r"groups\[0\] has params of type NoneType"),
    (
        torch.optim.SGD,
        {"groups": [{"params": "*", "weight_deacy": 0.1}]},
        "SGD has no option 'weight_deacy'; close are: ",
    ),
]


@pytest.mark.parametrize("make, options, said", WRONG)
def test_wrong_input_is_refused(mesh: DeviceMesh, make: Any, options: dict[str, Any], said: str) -> None:
    _, pmodel = both()
    with pytest.raises(InputError, match=said):
        pmodel.optimizer(make, **options)
