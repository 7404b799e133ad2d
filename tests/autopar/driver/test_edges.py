"""What a review found at the edges: each of these once computed something else than the model, or hung."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import autopar
from autopar.driver.plan import assign
from autopar.driver.trace import trace
from autopar.verification.simulator import Simulation
from planner.base.errors import CaptureError, ClusterError, InputError, PinError, PlanError, PlanWarning

X = torch.randn(8, 16)
CLUSTER = autopar.ClusterSpec.local(2, memory_bytes=2**30, cores=2)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.a.weight.requires_grad_(False)

    def forward(self, x):
        return self.b(self.a(x).relu()).square().mean()


class Unreached(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.pooler = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        y = self.a(x)
        return y.square().mean(), self.pooler(y)


class Clamps(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return (x @ self.weight).sum()


class Strides(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(16, 16)

    def forward(self, x):
        return self.l(x).as_strided((4, 4), (16, 1)).sum()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(16, 16)

    def forward(self, x, scale=1.0):
        return (self.l(x) * scale).square().mean()


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(256, 256), nn.ReLU())])

    def forward(self, x):
        return self.layers(x).square().mean()


def simulated(model, kwargs, pin):
    plan = autopar.plan(model, CLUSTER, example_kwargs=kwargs, pin=pin)
    traced = trace(model, None, kwargs)
    return Simulation(model, traced.captured, assign(traced, plan))


@pytest.mark.parametrize("pin", [{"data": 2}, {"tensor": 2}])
def test_frozen_parameters_stay_frozen(pin):
    with simulated(Frozen(), {"x": X}, pin) as simulation:
        module = simulation.module
        module(**simulation.inputs((), {"x": X})[1]).backward()
        parameters = dict(module.named_parameters())
        assert not parameters["a.weight"].requires_grad
        assert parameters["a.weight"].grad is None
        assert parameters["a.bias"].grad is not None
    autopar.verify(Frozen(), CLUSTER, example_kwargs={"x": X}, pin=pin)


def test_parameters_that_do_not_reach_the_loss_have_no_gradient():
    with simulated(Unreached(), {"x": X}, {"data": 2}) as simulation:
        loss, _ = simulation.module(**simulation.inputs((), {"x": X})[1])
        loss.backward()
        graded = {name for name, p in simulation.module.named_parameters() if p.grad is not None}
        assert graded == {"a.weight", "a.bias"}


@pytest.mark.parametrize(("model", "what"), [(Clamps(), "writes into 'weight' in place"), (Strides(), "as_strided")])
def test_what_a_plan_cannot_carry_is_refused(model, what):
    with pytest.raises(CaptureError, match=what):
        autopar.plan(model, CLUSTER, example_kwargs={"x": X})


def test_static_inputs_and_input_gradients_are_checked_at_the_call():
    with simulated(Scaled(), {"x": X, "scale": 2.0}, {"tensor": 2}) as simulation:
        with pytest.raises(InputError, match=r"100\.0.*planned with 2\.0"):
            simulation.inputs((), {"x": X, "scale": 100.0})
        given = simulation.inputs((), {"x": X, "scale": 2.0})[1]
        given["x"].requires_grad_()
        with pytest.raises(InputError, match="'x' requires a gradient"):
            simulation.module(**given)


def test_a_model_captured_in_eval_mode_cannot_train():
    with simulated(Scaled().eval(), {"x": X}, {"data": 2}) as simulation:
        assert not simulation.module.training
        with pytest.raises(PlanError, match=r"model\.train\(\)"):
            simulation.module.train()


@pytest.mark.parametrize("fold", ["graph", "off"])
def test_verify_runs_the_plan_that_it_was_given(fold):
    """Also where equal blocks are decided apart, or nothing is folded."""
    batch = {"x": torch.randn(64, 256)}
    plan = autopar.plan(Chain(), CLUSTER, example_kwargs=batch, pin={"tensor": 2}, fold=fold)
    assert len({text for block in plan.blocks for key, text in block.ops.items() if "linear" in key}) > 1
    verified = autopar.verify(Chain(), plan, example_kwargs=batch)
    assert verified.simulated == plan.mesh and verified.verdict == "verified"


def test_a_loss_function_needs_a_model_that_names_its_inputs():
    class Anything(nn.Module):
        def forward(self, **kwargs):
            return kwargs["x"].sum()

    with pytest.raises(InputError, match="names none of its inputs"):
        autopar.plan(Anything(), CLUSTER, example_kwargs={"x": X}, loss_fn=lambda out, batch: out)


def test_more_positions_than_a_table_has():
    """GPT-2's own way to count them, with an offset; a sequence that fits is planned."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(8, 4)

        def forward(self, x):
            return (x + self.table(torch.arange(0, x.shape[1]).unsqueeze(0) + 2)).sum()

    def planned(length):
        return autopar.plan(Positions(), CLUSTER, example_kwargs={"x": torch.randn(2, length, 4)})

    assert planned(6).predicted.step_time_s > 0
    with pytest.raises(InputError, match=r"looks up position 8 in table\.weight, which has 8 rows \(0 to 7\).*shorter"):
        planned(7)


@pytest.mark.parametrize(
    ("arguments", "error", "what"),
    [
        ({"cluster": "local:2"}, ClusterError, "ClusterSpec.local"),
        ({"model": torch.sum}, InputError, "torch.nn.Module"),
        ({"example_kwargs": [X]}, InputError, "a dict of inputs by name"),
        ({"example_kwargs": None, "example_args": X}, InputError, "a tuple"),
        ({"pin": ["data"]}, PinError, "a dict of decisions"),
        ({"pin": "data=2"}, PinError, "a dict of decisions"),
        ({"fold": "of"}, InputError, "'graph'"),
        ({"loss_fn": "mse"}, InputError, "loss_fn is 'mse'; give a function"),
        ({"loss_fn": lambda outputs, batch: batch["target"]}, InputError, r"^loss_fn fails.*\n.*\n.*'target'"),
        ({"time_limit_s": float("nan")}, InputError, "more than 0"),
        ({"time_limit_s": -1}, InputError, "more than 0"),
        ({"max_axes": 4}, InputError, "max_axes is 4; give how many axes"),
        ({"time_limit_s": "60"}, InputError, "time_limit_s is '60'; give seconds"),
        ({"time_limit_s": None}, InputError, "time_limit_s is None; give seconds"),
        ({"gap": "0.1 %"}, InputError, "gap is '0.1 %'; give the part"),
        ({"gap": 1.0}, InputError, "below 1"),
        ({"optimizer_bytes_per_element": -8}, InputError, "at least 0"),
        ({"progress": 3}, InputError, "progress is 3; give a function"),
        ({"model": nn.DataParallel(Scaled())}, InputError, r"wrapped in DataParallel.*give model\.module"),
        ({"model": torch.compile(Scaled())}, InputError, r"wrapped in OptimizedModule.*give model\._orig_mod"),
        ({"example_kwargs": {"x": X[:0]}}, InputError, r"input \['x'\] has shape \(0, 16\), a batch of 0"),
        ({"example_kwargs": {"x": X.to_sparse()}}, InputError, r"is a sparse tensor.*to_dense"),
        ({"example_kwargs": {"x": X[:1]}, "pin": {"data": 2}}, PinError, "'data' is 2, but the batch is 1 in 'x'"),
        ({"pin": {"tp": 2}}, PinError, "no decision called 'tp'; known: .*; for 'tp' pin 'tensor'"),
        ({"pin": {"DDP": 2}}, PinError, "for 'DDP' pin 'data'"),
        ({"pin": {"fsdp": True}}, PinError, "for 'fsdp' pin 'data' with 'zero': 3"),
        *(({"pin": {name: 2}}, PinError, f"for '{name}' pin 'expert'$") for name in ("ep", "moe", "experts")),
        ({"pin": {"gradient-accumulation-steps": 4}}, PinError, "pin 'micro_batches'"),
        ({"pin": {"tensr": 2}}, PinError, "did you mean 'tensor'"),
        ({"pin": {3: 2}}, PinError, "no decision called 3; known"),
        ({"pin": {"layers": {3: {"tensor": "n"}}}}, PinError, "names of modules and axes, and strategies, are text"),
    ],
)
def test_arguments_of_the_wrong_kind(arguments, error, what):
    given = {"model": Scaled(), "cluster": CLUSTER, "example_kwargs": {"x": X}} | arguments
    with pytest.raises(error, match=what):
        autopar.plan(given.pop("model"), given.pop("cluster"), **given)


PLAN = autopar.plan(Scaled(), CLUSTER, example_kwargs={"x": X})
PARALLELIZE = partial(autopar.parallelize, Scaled(), CLUSTER, example_kwargs={"x": X})
VERIFY = partial(autopar.verify, Scaled(), CLUSTER, example_kwargs={"x": X})


@pytest.mark.parametrize(
    ("call", "error", "what"),
    [
        (partial(PARALLELIZE, seed="a"), InputError, "seed is 'a'; give a whole number"),
        (partial(PARALLELIZE, state_dict=5), InputError, "state_dict is 5; give the original's"),
        (partial(PARALLELIZE, gap="x"), InputError, "gap is 'x'"),
        (partial(PARALLELIZE, max_axes=9), InputError, "max_axes is 9"),
        (partial(VERIFY, mesh="data"), InputError, "mesh is 'data'; give how many ranks"),
        (partial(VERIFY, mesh={"data": -2}), InputError, "give how many ranks each axis has"),
        (partial(VERIFY, rtol="a"), InputError, "rtol is 'a'; give the largest relative error"),
        (partial(autopar.Plan.load, None), PlanError, "the plan is None: give the path"),
        (partial(PLAN.save, None), PlanError, "is None: give the path"),
        (partial(PLAN.why_not, None), PinError, "was given None: give pins"),
        (partial(PLAN.why_not, {"pp": 2}), PinError, "for 'pp' pin 'pipeline'"),
        (partial(autopar.ClusterSpec.load, None), ClusterError, "is None: give the path"),
        (partial(autopar.ClusterSpec.load, "h100:8"), ClusterError, "preset:NAME:NODES.*did you mean 'dgx-h100'"),
        (partial(autopar.ClusterSpec.preset, ["a"]), ClusterError, r"there is no preset \['a'\]; there are: cpu"),
        (partial(autopar.ClusterSpec.local, 2, memory_bytes=-1), ClusterError, "is -1: must be greater than 0"),
        (partial(setattr, CLUSTER, "name", "b"), ClusterError, "cannot be changed.*model_copy"),
    ],
)
def test_every_door_says_what_to_give(call: Callable[[], object], error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        call()


class Outputs(Scaled):
    def forward(self, x, scale=1.0):
        return self.l(x) * scale


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (Outputs(), "Outputs returns no loss.*labels, for Transformers.*loss_fn"),
        (Scaled().requires_grad_(False), "Scaled trains nothing: none of its 272 parameters"),
        (Scaled().eval(), r"Scaled is in eval mode.*call model\.train\(\)"),
        (Scaled(), "All 2 ranks compute the whole step: nothing is sharded"),
    ],
)
def test_what_may_not_be_meant_begins_the_report_and_is_warned_of(model: nn.Module, what: str) -> None:
    with pytest.warns(PlanWarning, match=what):
        plan = autopar.plan(model, CLUSTER, example_kwargs={"x": X})
    again = autopar.Plan.from_dict(plan.to_dict())
    for text in (str(plan), str(again)):
        said = " ".join(line for line in text.splitlines()[1:8] if line.startswith(("! ", "  ")))
        assert re.search(what, re.sub(r"\s+", " ", said))
    assert any(re.search(what, note) for note in again.notes)


def test_a_plan_that_is_as_it_was_meant_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not autopar.plan(Chain(), CLUSTER, example_kwargs={"x": torch.randn(64, 256)}, pin={"data": 2}).notes


def test_hooks_are_captured_with_a_warning_or_refused() -> None:
    """What a forward hook computes is in the plan, to the last gradient; what waits for gradients cannot be."""

    def doubles(module, args, output):
        return output * 2

    model = Chain()
    model.layers[2].register_forward_hook(doubles)
    batch = {"x": torch.randn(64, 256)}
    with pytest.warns(PlanWarning, match=r"doubles is a forward hook on 'layers\.2'"):
        plan = autopar.plan(model, CLUSTER, example_kwargs=batch, pin={"tensor": 2})
    autopar.verify(model, plan, example_kwargs=batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        trace(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), (torch.ones(2, 4),))

    for register, what in [
        (lambda m: m.l.register_full_backward_hook(lambda *_: None), "is a backward hook on 'l'"),
        (lambda m: m.l.register_full_backward_pre_hook(lambda *_: None), "is a backward hook on 'l'"),
        (lambda m: m.l.weight.register_hook(lambda g: g * 3), r"on the gradient of 'l\.weight'.*pmodel\.get_parameter"),
        (lambda m: m.l.weight.register_post_accumulate_grad_hook(lambda p: None), r"on the gradient of 'l\.weight'"),
    ]:
        hooked = Scaled()
        register(hooked)
        with pytest.raises(InputError, match=what):
            autopar.plan(hooked, CLUSTER, example_kwargs={"x": X})


class Named(nn.Module):
    """Its attributes are called as those of a parallel module are."""

    def __init__(self):
        super().__init__()
        self.state, self.drop, self.classes = nn.Linear(16, 16), nn.Dropout(0.0), 3
        self.register_buffer("mesh", torch.full((16,), 2.0))

    @property
    def rate(self):
        return self.drop.p + 1

    def forward(self, x):
        return (self.drop(self.state(x)) * self.mesh).square().mean()

    def norm(self):
        return self.state.weight.norm()


def test_what_is_read_of_the_original_and_what_is_refused() -> None:
    model = Named()
    with simulated(model, {"x": X}, {"tensor": 2}) as simulation:
        pmodel = simulation.module
        expected = model(X)
        assert torch.allclose(simulation.whole(pmodel(**simulation.inputs((), {"x": X})[1]), (), ()), expected)
        assert pmodel.classes == 3 and pmodel.rate == 1.0 and pmodel.drop.p == 0.0
        assert set(pmodel.state_dict()) == set(model.state_dict())
        assert not hasattr(pmodel, "norm") and not hasattr(pmodel, "save_pretrained")
        for call, error, what in [
            (lambda: pmodel.norm, AttributeError, r"Named\.norm is a method.*gather_module\(\)\.norm"),
            (lambda: pmodel.missing, AttributeError, "neither the parallel module nor its original Named"),
            (lambda: pmodel.drop(X), InputError, "a Dropout of a parallel module does not run by itself"),
            (lambda: pmodel.drop.register_forward_hook(print), InputError, "a hook on it would never be called"),
            (lambda: pmodel.apply(print), InputError, "would find no layer"),
            (lambda: pmodel.half(), InputError, "would be of torch.float16"),
            (lambda: setattr(pmodel, "classes", 4), InputError, "would not see the change"),
            (lambda: setattr(pmodel.drop, "p", 0.5), InputError, "would not see the change"),
            (lambda: setattr(pmodel, "state", nn.Linear(16, 16)), InputError, "would not see the change"),
            (lambda: autopar.plan(pmodel, CLUSTER, example_kwargs={"x": X}), InputError, "parallel module already"),
        ]:
            with pytest.raises(error, match=what):
                call()
        pmodel.note = "mine"  # nothing of the original's
        assert pmodel.note == "mine"


def test_verify_takes_a_plan_or_pins():
    plan = autopar.plan(Scaled(), CLUSTER, example_kwargs={"x": X})
    with pytest.raises(PinError, match="already decided"):
        autopar.verify(Scaled(), plan, example_kwargs={"x": X}, pin={"data": 2})


@pytest.mark.parametrize("given", [str, lambda path: path], ids=["str", "Path"])
def test_a_plan_may_be_given_as_the_path_of_its_file(tmp_path, given):
    batch, path = {"x": X}, tmp_path / "plan.json"
    plan = autopar.plan(Scaled(), CLUSTER, example_kwargs=batch)
    plan.save(path)
    again = autopar.evaluate(Scaled(), given(path), example_kwargs=batch)
    assert again.predicted.step_time_s == pytest.approx(plan.predicted.step_time_s)
    assert autopar.verify(Scaled(), given(path), example_kwargs=batch).mesh == plan.mesh
    with pytest.raises(PlanError, match="torchrun"):  # read, and found to fit the cluster
        autopar.parallelize(Scaled(), CLUSTER, plan=given(path), example_kwargs=batch)


def test_a_decoded_plan_is_named_where_a_plan_or_a_cluster_is_taken() -> None:
    with pytest.raises(PlanError, match=r"cluster_or_plan is .*dict; give a ClusterSpec, a Plan, .* Plan\.from_dict"):
        autopar.verify(Scaled(), {"format": "autopar-plan"}, example_kwargs={"x": X})


@pytest.mark.parametrize(
    ("plan", "what"), [("nowhere.json", "cannot read the plan 'nowhere.json'"), (5, "plan is 5; give a Plan, or the")]
)
def test_what_is_no_plan_is_refused(plan, what):
    with pytest.raises(PlanError, match=what):
        autopar.evaluate(Scaled(), plan, example_kwargs={"x": X})
    with pytest.raises(PlanError, match=what):
        autopar.parallelize(Scaled(), CLUSTER, plan=plan, example_kwargs={"x": X})
