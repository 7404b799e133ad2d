"""``autopar.verify``: what it says of right plans, what it catches, and how it compares."""

from __future__ import annotations

import itertools
import math
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.driver.trace import trace
from autopar.verification.collective_counter import differences
from autopar.verification.float64 import exact, twin, widen, widened
from autopar.verification.reference import reference, relative_error
from autopar.verification.rounding import RandomRounding, measured, size_of
from autopar.verification.verify import decide_on, verify
from planner.base.errors import InputError, PinError, VerificationError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.formulation.resharding import Collective
from planner.ir.layout import Mesh
from planner.ops import OPS
from planner.plan.plan import Plan
from tests.autopar.models import MLP, MODELS, OfFloat32, llama

QUICK = {"time_limit_s": 5.0}


# ---- right plans -----------------------------------------------------------------------------------------------------


def test_a_searched_plan_is_verified() -> None:
    model, batch = MODELS["mlp"].build()
    found = autopar.verify(model, ClusterSpec.local(2), example_kwargs=batch, **QUICK)
    assert found.agreement is not None and found.agreement.agrees()
    assert set(found.agreement.outputs) == {"loss", "out"}
    assert set(found.agreement.gradients) == {name for name, _ in model.named_parameters()}
    assert "MLP on mesh" in str(found) and "all as predicted" in str(found)


def test_dropout_is_off_and_said_to_be() -> None:
    model, batch = MODELS["shared-layers"].build()
    found = verify(model, ClusterSpec.local(4), example_kwargs=batch, pin={"data": 2, "tensor": 2}, **QUICK)
    assert "dropout was switched off for the comparison" in found.notes
    assert found.simulated == found.mesh == Mesh.of(data=2, tensor=2)


def test_a_saved_plan_is_verified_as_it_is(tmp_path: Path) -> None:
    model, batch = MODELS["functional-gpt"].build()
    plan = autopar.plan(model, ClusterSpec.local(2), example_kwargs=batch, pin={"tensor": 2})
    plan.save(tmp_path / "plan.json")
    found = verify(model, Plan.load(tmp_path / "plan.json"), example_kwargs=batch)
    assert len(found.notes) == 0
    assert {call.axis for call in found.agreement.calls} == {"tensor"}


def test_the_plan_of_a_large_mesh_is_compared_on_a_small_one() -> None:
    torch.manual_seed(0)
    model = llama(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8)
    ids = torch.randint(0, 64, (16, 8))
    found = verify(
        model,
        ClusterSpec.preset("dgx-h100", nodes=16),
        example_kwargs={"input_ids": ids, "labels": ids},
        pin={"data": 16, "tensor": 8},
    )
    assert found.mesh.size == found.types.ranks == 128
    assert found.simulated == Mesh.of(data=2, tensor=2)
    assert any("128 ranks are too many" in note for note in found.notes)
    first = str(found).splitlines()[0]
    assert first.endswith("on mesh data 16 x tensor 8: types verified; values verified on mesh data 2 x tensor 2")


class Squares(nn.Module):
    """Sizes that divide by few numbers."""

    def __init__(self, size: int):
        super().__init__()
        self.up, self.down = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


@pytest.mark.parametrize(("size", "simulated"), [(9, Mesh.of(data=3, tensor=3)), (25, None)])
def test_a_mesh_is_made_smaller_only_as_its_layouts_allow(size: int, simulated: Mesh | None) -> None:
    ranks = math.isqrt(size) * math.isqrt(size)
    pin = dict.fromkeys(("data", "tensor"), math.isqrt(size))
    found = verify(
        Squares(size), ClusterSpec.local(ranks), example_kwargs={"x": torch.randn(size, size)}, pin=pin, **QUICK
    )
    assert found.types.ranks == ranks
    assert found.simulated == simulated
    if simulated is None:
        assert found.verdict == "types verified, values not compared"
        assert any(re.search(r"WARNING: 25 ranks.*does not exist on data 2 x tensor 2", note) for note in found.notes)


def qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("gpt2", torch.float32),
        ("llama", torch.bfloat16),
        ("gpt2", torch.float16),
        *itertools.product(["qwen2", "bert"], [torch.bfloat16]),  # where casts and branches come to something
    ],
    ids=str,
)
def test_models_of_every_precision_are_verified_in_float64(name: str, dtype: torch.dtype) -> None:
    """In float64 casts come to nothing, and branches on the dtype go another way; the decisions must apply still."""
    model, batch = (qwen2(), MODELS["llama"].build()[1]) if name == "qwen2" else MODELS[name].build()
    found = verify(model.to(dtype), ClusterSpec.local(2), example_kwargs=batch, pin={"tensor": 2}, **QUICK)
    assert found.verdict == "verified"
    assert found.agreement is not None and found.agreement.agrees()
    assert set(found.agreement.gradients) == {name for name, p in model.named_parameters()}


class Rescaled(nn.Module):
    """Holds a constant that no narrow float can hold, and casts so that the float64 twin has other operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if x.dtype == torch.bfloat16:
            y = y.abs().sqrt().to(torch.float32).square()
        else:
            y = y.abs()
        return (F.dropout(y, 0.5, self.training) * torch.tensor(0.1)).sum()


def test_constants_of_a_graph_in_another_precision_are_exact() -> None:
    batch = {"x": torch.randn(8, 16, dtype=torch.bfloat16)}
    found = verify(Rescaled().bfloat16(), ClusterSpec.local(2), example_kwargs=batch, pin={"data": 2})
    assert found.agreement is not None and found.agreement.agrees()


def test_operators_of_a_graph_are_exact_too() -> None:
    x = torch.randn(2, 4, 2, dtype=torch.float64)
    attention = torch.ops.aten.scaled_dot_product_attention.default
    with exact():
        assert torch.ops.aten._to_copy.default(x, dtype=torch.bfloat16).dtype == torch.float64
        assert torch.equal(torch.ops.aten.dropout.default(x, 0.5, True), x)
        assert torch.equal(attention(x, x, x, None, 0.9), attention(x, x, x, None, 0.0))


def test_a_narrow_model_s_first_diverging_module_is_named() -> None:
    model = Wrapped(nn.Sequential(Narrowed(), nn.Dropout(0.5), Noise())).bfloat16()
    batch = {"x": torch.randn(8, 16, dtype=torch.bfloat16)}
    with pytest.raises(VerificationError, match=r"culprit\.2: aten\.rand_like"):
        verify(model, ClusterSpec.local(2), example_kwargs=batch, pin={"data": 2})


class Narrowed(nn.Module):
    """Has fewer operators in float64."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu().to(x.dtype) if x.dtype == torch.float64 else x.float().relu().to(x.dtype)


def test_a_widened_graph_is_the_model_s_own() -> None:
    model, batch = MODELS["gpt2"].build()
    traced = trace(model.bfloat16(), None, batch)
    graph = widened(traced.graph)
    assert [(n.name, n.op, n.inputs) for n in graph.nodes] == [(n.name, n.op, n.inputs) for n in traced.graph.nodes]
    dtypes = {result.dtype for node in graph.nodes for result in node.results}
    assert "float64" in dtypes and not dtypes & {"float32", "bfloat16"}
    assert not any(value == "torch.bfloat16" for node in graph.nodes for _, value in node.args)
    assert not any(node["p"] or node["dropout_p"] for node in graph.nodes if "dropout" in node.op)


def test_a_model_without_values_has_its_types_checked() -> None:
    with torch.device("meta"):
        model = MLP()
    batch = {"x": torch.empty(8, 32, device="meta"), "y": torch.empty(8, 16, device="meta")}
    found = verify(model, ClusterSpec.local(4), example_kwargs=batch, pin={"tensor": 4})
    assert found.agreement is None
    assert "on the meta device" in str(found)


def test_a_loss_function_of_the_user() -> None:
    torch.manual_seed(0)
    batch = {"input": torch.randn(8, 16), "target": torch.randint(0, 4, (8,))}
    found = verify(
        nn.Linear(16, 4), ClusterSpec.local(2), example_kwargs=batch, pin={"data": 2},
        loss_fn=lambda out, given: F.cross_entropy(out, given["target"]),
    )  # fmt: skip
    assert set(found.agreement.gradients) == {"weight", "bias"}


def test_without_a_loss_outputs_are_compared() -> None:
    batch = {"input": torch.randn(8, 16)}
    found = verify(nn.Linear(16, 4), ClusterSpec.local(4), example_kwargs=batch, mesh={"outer": 2, "inner": 2})
    assert not found.agreement.gradients
    assert found.agreement.outputs
    assert any("no differentiable scalar" in note for note in found.notes)


def test_pins_that_do_not_apply_are_refused_as_in_planning() -> None:
    model, batch = MODELS["mlp"].build()
    with pytest.raises(PinError, match="scaled_dot_product_attention, and the model never calls it"):
        verify(model, ClusterSpec.local(2), example_kwargs=batch, pin={"context": 2})


# ---- type checking at the real size ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes,extra",
    [
        ({"all": 8}, {}),
        ({"data": 4, "tensor": 2}, {}),
        ({"data": 2, "tensor": 8}, {"sequence_parallel": True}),
        ({"context": 4, "tensor": 8}, {}),
        ({"data": 16, "tensor": 8}, {}),
        ({"data": 16, "tensor": 8}, {"sequence_parallel": True, "zero": 3}),
        ({"data": 16, "context": 8}, {}),
        ({"outer": 16, "inner": 8}, {}),
    ],
    ids=str,
)
def test_the_llama_plan_type_checks_at_every_size(sizes: dict[str, int], extra: dict[str, object]) -> None:
    with torch.device("meta"):
        model = llama(
            hidden_size=128, intermediate_size=256, num_attention_heads=16, num_key_value_heads=8, vocab_size=256
        )
        batch = {"input_ids": torch.zeros(32, 32, dtype=torch.long), "labels": torch.zeros(32, 32, dtype=torch.long)}
    pin = {name: size for name, size in sizes.items() if name in ("data", "context", "tensor")}
    cluster = ClusterSpec.preset("dgx-h100", nodes=16)
    if pin:
        cluster = ClusterSpec.local(Mesh.of(**sizes).size)
    found = verify(model, cluster, example_kwargs=batch, pin=pin | extra, mesh=sizes, **QUICK)
    assert found.types.ranks == Mesh.of(**sizes).size
    assert found.types.operators > 100


# ---- wrong programs --------------------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """Puts a module where its name can be read from an error."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.First, self.culprit = nn.Linear(16, 16), inner  # fx would have it in lower case

    def forward(self, x: Tensor) -> Tensor:
        return self.culprit(self.First(x)).square().mean()


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Bend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.autopar_zoo.bend(x, 0.3)


def test_the_first_diverging_module_is_named() -> None:
    with pytest.raises(VerificationError, match="culprit") as caught:
        verify(Wrapped(Noise()), ClusterSpec.local(2), example_kwargs={"x": torch.randn(8, 16)}, pin={"data": 2})
    assert "rand_like" in str(caught.value)


def test_a_wrong_row_of_the_op_table_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    # bend averages over its last dim; this says that it treats every element by itself.
    monkeypatch.setitem(OPS, "autopar_zoo.bend.default", OPS["aten.tanh.default"])
    with pytest.raises(VerificationError, match=r"culprit: autopar_zoo\.bend"):
        verify(
            Wrapped(Bend()),
            ClusterSpec.local(2),
            example_kwargs={"x": torch.randn(8, 16)},
            pin={"tensor": 2, "layers": {"First": {"tensor": "n"}}},
        )


def test_a_collective_that_was_not_predicted_is_a_line() -> None:
    gather = Collective("all_gather", "tensor", 1024, "forward")
    reduce = Collective("all_reduce", "data", 8, "backward")
    assert differences({gather: 2, reduce: 1}, {gather: 2, reduce: 1}) == []
    assert differences({gather: 2}, {gather: 1, reduce: 1}) == [
        "backward all_reduce of 8 bytes on axis 'data': predicted 0, observed 1",
        "forward all_gather of 1,024 bytes on axis 'tensor': predicted 2, observed 1",
    ]


# ---- in the model's own dtypes ---------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A grouped product, which takes bfloat16 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.experts = nn.Linear(16, 16), nn.Parameter(torch.randn(4, 16, 32) / 4)
        self.register_buffer("ends", torch.tensor([4, 8, 12, 16], dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        return torch._grouped_mm(self.up(x), self.experts, offs=self.ends).float().square().mean()


def test_what_does_not_run_in_float64_is_verified_as_it_is() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 16, dtype=torch.bfloat16)
    found = verify(Experts().bfloat16(), ClusterSpec.local(2), example_kwargs={"x": x}, pin={"data": 2})
    assert found.verdict == "verified" and found.agreement is not None and found.tolerance is not None
    assert set(found.agreement.gradients) == {"up.weight", "up.bias", "experts"}
    assert 0 < found.agreement.worst[0] <= found.tolerance.widest < 0.1
    assert re.search(
        r"compared +in bfloat16, relative errors up to .* allowed, by value: 2 times what random", str(found)
    )
    assert re.search(r"largest relative error [\d.e-]+ of [\d.e-]+ \(", str(found))
    assert "in float64 the model does not run: RuntimeError: Expected inputs of BF16 type" in str(found)


class Unprepared(nn.Linear):
    """Fails in float64 for want of something else."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("there is no table of that length")
        return super().forward(x).square().mean()


def test_only_an_error_of_dtypes_says_that_a_model_does_not_run_in_float64() -> None:
    batch = {"x": torch.randn(4, 8)}
    found = verify(OfFloat32(8, 8), ClusterSpec.local(2), example_kwargs=batch, **QUICK)
    assert "the model does not run: AssertionError: assert x.dtype == torch.float32" in str(found)
    with pytest.raises(InputError, match=r"x float64 4x8(.|\n)*RuntimeError: there is no table"):
        verify(Unprepared(8, 8), ClusterSpec.local(2), example_kwargs=batch, **QUICK)


def test_a_tolerance_is_that_of_rounding() -> None:
    """Of a sum of n products, each rounded, and of a product that is ill-conditioned."""
    x = torch.linspace(1, 2, 64, dtype=torch.bfloat16)

    def values() -> dict[str, Tensor]:
        difference = (x * x).sum() - (x * x).sum() * 0.99
        return {"mean": (x * x).mean(), "difference": difference, "place": x.argmax(), "count": (x > 1.5).sum() * 1.0}

    def step(mode: RandomRounding) -> dict[str, Tensor]:
        with mode:
            found = values()
        return {**found, "count": found["count"].int()}

    found = measured(
        {**values(), "count": values()["count"].int()},
        step,
        lambda _, got, expected: relative_error(got, expected),
        ranks=2,
    )
    size = size_of(torch.bfloat16, 2)
    assert size == 2**-8 * 2
    assert 2 * size <= found["mean"] < 6 * size  # about one error, whatever the number of terms
    assert found["difference"] > 20 * size  # a hundredth of what is rounded
    assert found["place"] == 0
    assert found["count"] == 0, "a float that is a whole number counts, and is exact"


class Steep(Experts):
    """A loss that is finite as long as the same product gives the same twice."""

    def forward(self, x: Tensor) -> Tensor:
        one, two = (torch._grouped_mm(self.up(x), self.experts, offs=self.ends).float() for _ in range(2))
        return (1 - 1e9 * (one - two).abs().max()).log()


def test_a_loss_that_rounding_makes_nan_is_not_called_so_itself() -> None:
    x = torch.randn(16, 16, dtype=torch.bfloat16)
    with pytest.raises(VerificationError, match=r"loss is nan where every operator's .* though it is finite as it is"):
        verify(Steep().bfloat16(), ClusterSpec.local(2), example_kwargs={"x": x}, pin={"data": 2})


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise KeyError("not in backward")


class Explodes(nn.Module):
    def __init__(self, factor: float = 1.0):
        super().__init__()
        self.up, self.factor = nn.Linear(8, 8), factor

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).square().mean() * self.factor
        return Fails.apply(y) if math.isfinite(self.factor) else y


class Locked(Explodes):
    def __init__(self) -> None:
        super().__init__(-math.inf)
        self.lock = threading.Lock()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.argmax(-1)).square().mean()


@pytest.mark.parametrize(
    "model, message, way_out",
    [
        (Explodes(), "KeyError: 'not in backward'", "give example inputs"),
        (Explodes(math.inf), "Explodes's loss is inf on this batch", "give example inputs"),
        (Locked(), "Locked cannot be copied (TypeError: cannot pickle '_thread.lock' object)", "__deepcopy__"),
        (Sparse(), "the gradient of the table in table is sparse", "sparse=False"),
    ],
    ids=["backward fails", "infinite loss", "no copy", "sparse gradient"],
)
def test_whatever_goes_wrong_is_an_error_for_users(model: nn.Module, message: str, way_out: str) -> None:
    with pytest.raises(autopar.AutoparError) as raised:
        verify(model, ClusterSpec.local(2), example_kwargs={"x": torch.randn(4, 8)}, **QUICK)
    assert message in str(raised.value)
    assert way_out in str(raised.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_inputs_that_are_not_dense_are_refused() -> None:
    rows = [torch.randn(2, 8), torch.randn(3, 8)]
    for x, kind in ((torch.eye(8).to_sparse(), "sparse"), (torch.nested.nested_tensor(rows), "nested")):
        with pytest.raises(InputError, match=f"input .*x.* is a {kind} tensor, and a plan shards dense ones"):
            verify(nn.Linear(8, 8), ClusterSpec.local(2), example_kwargs={"x": x})


# ---- what is checkpointed --------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Checkpoints a part that gets no gradients from its input, and parts that do."""

    def __init__(self, is_reentrant: bool):
        super().__init__()
        self.first, self.blocks, self.is_reentrant = nn.Linear(8, 8), nn.ModuleList(map(_block, range(2))), is_reentrant
        self.embed = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(checkpoint(self.first, x, use_reentrant=self.is_reentrant))
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.is_reentrant)
        return x.square().mean()


def _block(_: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("is_reentrant", [True, False])
def test_checkpointed_parts_have_the_gradients_of_the_original(is_reentrant: bool) -> None:
    model = Checkpointed(is_reentrant)
    found = verify(model, ClusterSpec.local(2), example_kwargs={"x": torch.randn(4, 8)}, pin={"tensor": 2})
    names = {name for name, _ in model.named_parameters() if not (is_reentrant and name.startswith("first"))}
    assert found.agreement is not None and set(found.agreement.gradients) == names


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_checkpointed_transformer_is_verified(is_reentrant: bool) -> None:
    model, batch = MODELS["llama"].build()
    model.train().gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    found = verify(model, ClusterSpec.local(2), example_kwargs=batch, pin={"tensor": 2})
    assert found.agreement is not None and found.agreement.agrees()
    assert set(found.agreement.gradients) == {name for name, _ in model.named_parameters()}


# ---- the exact twin --------------------------------------------------------------------------------------------------


class Narrowing(nn.Module):
    """Casts and drops in every way that models do."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (
            x.float(),
            x.to(torch.float32),
            x.to(dtype=torch.bfloat16),
            F.softmax(x, dim=-1, dtype=torch.float32),
            torch.zeros(2) + x,
            F.dropout(x, 0.5, True),
            nn.Dropout(0.9)(x),
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.9),
        )


def test_the_twin_computes_in_float64_and_drops_nothing() -> None:
    x = torch.randn(2, 4, 2, dtype=torch.float64)
    before = torch.get_default_dtype()
    with exact():
        *rest, dropped, layer, attended = Narrowing()(x)
    assert torch.get_default_dtype() == before
    assert all(value.dtype == torch.float64 for value in rest)
    assert torch.equal(rest[0], x) and torch.equal(dropped, x) and torch.equal(layer, x)
    assert torch.equal(attended, F.scaled_dot_product_attention(x, x, x))


class Unregistered(nn.Module):
    """Tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.weight = torch.randn(8, 8)
        self.scales = {"all": [torch.rand(8), torch.tensor(3)]}
        self.own = SimpleNamespace(rotation=SimpleNamespace(by=torch.randn(8, 8)))

    def forward(self, x: Tensor) -> Tensor:
        scale, power = self.scales["all"]
        return (F.linear(self.up(x) @ self.own.rotation.by, self.weight) * scale**power).square().mean()


def test_tensors_in_attributes_are_verified_in_float64_too() -> None:
    model, x = Unregistered(), torch.randn(4, 8)
    found = verify(model, ClusterSpec.local(2), example_kwargs={"x": x}, **QUICK)
    assert found.agreement is not None and found.agreement.agrees()
    assert model.weight.dtype == model.scales["all"][0].dtype == model.own.rotation.by.dtype == torch.float32


ROTATION = torch.randn(8, 8)


def scaled_outside() -> Any:
    scales = [torch.rand(8)]

    class Outside(nn.Module):
        """Reads tensors that are not its own."""

        rotation = torch.randn(8, 8)

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return (self.up(x) @ ROTATION @ self.rotation * scales[0]).square().mean()

    return Outside()


def test_a_model_with_tensors_outside_of_it_is_verified_as_it_is_and_they_are_named() -> None:
    found = verify(scaled_outside(), ClusterSpec.local(2), example_kwargs={"x": torch.randn(4, 8)}, **QUICK)
    assert found.verdict == "verified" and found.tolerance is not None and found.tolerance.dtypes == "float32"
    assert found.tolerance.widest < 1e-4
    places = (
        "global 'ROTATION' of module '",
        "variable 'scales' around scaled_outside.",
        "attribute 'rotation' of class ",
    )
    assert all(any(place in note for note in found.notes) for place in places), found.notes


def test_a_twin_is_another_module() -> None:
    model = nn.BatchNorm1d(4)
    other = twin(model)
    assert other.weight.dtype == torch.float64 and model.weight.dtype == torch.float32
    assert other.num_batches_tracked.dtype == torch.int64
    given = widen({"x": torch.ones(2, dtype=torch.bfloat16), "ids": torch.ones(2, dtype=torch.int32), "flag": True})
    assert given["x"].dtype == torch.float64 and given["ids"].dtype == torch.int32


def test_a_decision_can_be_made_on_any_mesh() -> None:
    model, batch = MODELS["mlp"].build()
    ref = reference(model, None, batch)
    assignment = decide_on(ref.traced, Mesh.of(data=2, tensor=2), ClusterSpec.local(4), Pins.parse({"data": 2}))
    assert assignment.space.mesh.sizes == (2, 2)
