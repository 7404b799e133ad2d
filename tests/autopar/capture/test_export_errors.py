"""What a user reads when a model cannot be captured: whose fault, which module and line, the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.capture.capture import capture
from autopar.driver.trace import trace
from planner.base.errors import AutoparError, CaptureError, InputError

X = torch.randn(8, 8)


class Layer(nn.Module):
    def __init__(self, compute: Callable[[nn.Module, Tensor], Any]):
        super().__init__()
        self.linear, self.compute = nn.Linear(8, 8), compute

    def forward(self, x):
        return self.compute(self.linear, x)


class Stack(nn.Module):
    def __init__(self, compute: Callable[[nn.Module, Tensor], Any]):
        super().__init__()
        self.layers = nn.ModuleList(Layer(compute) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(16, 8), nn.Parameter(torch.zeros(4, 8))

    def forward(self, ids, mask=None):
        return (self.tokens(ids) + self.positions[: ids.shape[1]]).sum()


def takes_float_ids() -> bool:
    """Whether an embedding takes what are no ids while a model is traced."""
    with FakeTensorMode():
        try:
            nn.functional.embedding(torch.zeros(2, 4), torch.zeros(16, 8))
        except RuntimeError:
            return False
    return True


def branches(linear, x):
    return linear(x) if x.sum() > 0 else x


def reads(linear, x):
    return linear(x) * x.max().item()


def loops(linear, x):
    for _ in range(int(x.max())):
        x = linear(x)
    return x


def selects(linear, x):
    rows = linear(x[x.sum(1) > 0])
    return x + rows.mean()


def uses_numpy(linear, x):
    return linear(torch.from_numpy(x.detach().numpy()))


def loss_that_reads(outputs, batch):
    return outputs * batch["x"].max().item()


def message(model: nn.Module, args: Any = None, kwargs: Any = None, loss_fn: Any = None) -> tuple[AutoparError, str]:
    with pytest.raises(AutoparError) as caught:
        capture(model, args, kwargs, loss_fn)
    return caught.value, str(caught.value)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compute, line, parts",
    [
        (branches, "return linear(x) if x.sum() > 0 else x", ["decides on the values of tensors", "torch.where"]),
        (loops, "for _ in range(int(x.max())):", ["decides on the values of tensors", "data-dependent loops"]),
        (reads, "return linear(x) * x.max().item()", ["aten.item", "into Python", "keep it a tensor"]),
        (selects, "rows = linear(x[x.sum(1) > 0])", ["aten.index", "depends on the values", "torch.where(mask, x, 0)"]),
        (uses_numpy, "x.detach().numpy()", ["numpy() is not supported", "torch.library.custom_op"]),
    ],
)
@pytest.mark.parametrize("with_loss", [False, True])
def test_code_that_needs_values_is_named_with_its_module_and_the_way_out(
    compute: Any, line: str, parts: list[str], with_loss: bool, capfd: Any, caplog: Any
) -> None:
    inputs = (None, {"x": X}, lambda outputs, batch: outputs) if with_loss else ((X,),)
    error, text = message(Stack(compute), *inputs)
    assert isinstance(error, CaptureError)
    for part in ["Stack cannot be captured", "test_export_errors.py:", line, "module layers.0 (Layer)", *parts]:
        assert part in text
    assert "_WithLoss" not in text and "module.layers" not in text
    assert not caplog.records and capfd.readouterr() == ("", "")


def test_a_loss_that_needs_values_is_named_with_its_line() -> None:
    _, text = message(Stack(lambda linear, x: linear(x)), None, {"x": X}, loss_that_reads)
    assert 'in loss_that_reads: return outputs * batch["x"].max().item()' in text and "aten.item" in text


# ---- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs, parts",
    [
        (
            {"ids": torch.zeros(2, 8, dtype=torch.long)},
            ["ids int64 2x8", "self.positions[", "RuntimeError", "length 4"],
        ),
        pytest.param(
            {"ids": torch.zeros(2, 4)},
            ["ids float32 2x4", "self.tokens(ids)", "RuntimeError", "torch.float32"],
            marks=pytest.mark.skipif(takes_float_ids(), reason="this torch finds the mistake only when the model runs"),
        ),
        (
            {"input_ids": X},
            ["input_ids float32 8x8", "Positions.forward(ids, mask=None)", "TypeError", "'input_ids'", "needs loss_fn"],
        ),
    ],
    ids=["too long", "float ids", "wrong name"],
)
def test_a_model_that_fails_on_its_inputs_fails_in_its_own_words(
    kwargs: dict[str, Tensor], parts: list[str], capfd: Any, caplog: Any
) -> None:
    error, text = message(Positions(), None, kwargs)
    assert isinstance(error, InputError)
    for part in ["Positions fails when it is called with these inputs", "fix the example inputs", *parts]:
        assert part in text
    assert "torch.where" not in text
    assert not caplog.records and capfd.readouterr() == ("", "")


def test_a_loss_that_misses_an_entry_of_the_batch_is_shown_with_its_line() -> None:
    error, text = message(nn.Linear(8, 8), None, {"input": X}, lambda outputs, batch: (outputs - batch["target"]).sum())
    assert isinstance(error, InputError)
    for part in ["loss_fn fails", "KeyError: 'target'", "test_export_errors.py:", 'batch["target"]']:
        assert part in text


def test_what_is_no_tensor_is_named() -> None:
    error, text = message(nn.Linear(8, 8), None, {"input": X.numpy()})
    assert isinstance(error, InputError)
    assert "input ['input'] is of type ndarray; give tensors (torch.as_tensor)" in text


def test_what_the_model_prints_is_kept(capfd: Any) -> None:
    import sys

    def talks(linear, x):
        print("hello", file=sys.stderr)
        return linear(x)

    capture(Layer(talks), (X,))
    assert capfd.readouterr().err == "hello\n"


# ---- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss_fn, what",
    [
        (lambda outputs, batch: None, "loss_fn returned a NoneType; it must return the loss"),
        (lambda outputs, batch: {"loss": outputs.sum()}, "loss_fn returned a dict; "),
        (lambda outputs, batch: outputs.sum(1), r"a tensor of shape \(8,\), torch.float32; "),
        (lambda outputs, batch: outputs.argmax(), r"a tensor of shape \(\), torch.int64; "),
        (lambda outputs, batch: batch["input"].sum(), "depends on no parameter that is trained"),
        (lambda outputs, batch: outputs.detach().sum(), "depends on no parameter that is trained"),
    ],
)
def test_a_loss_that_is_none_is_refused(loss_fn: Any, what: str) -> None:
    with pytest.raises(InputError, match=what):
        trace(nn.Linear(8, 8), None, {"input": X}, loss_fn)


@pytest.mark.parametrize("model", [nn.Linear(8, 8).requires_grad_(False), nn.ReLU()], ids=["frozen", "none"])
def test_a_model_with_a_loss_function_and_nothing_to_train_only_has_its_loss_computed(model: nn.Module) -> None:
    def loss_fn(outputs: Any, batch: Any) -> Tensor:
        return outputs.sum()

    with pytest.raises(InputError, match=rf"{type(model).__name__} is in train mode, and none .* or call model\.eval"):
        trace(model.train(), None, {"input": X}, loss_fn)
    traced = trace(model.eval(), None, {"input": X}, loss_fn)
    (found,) = traced.graph.outputs
    assert traced.graph.by_name[found.node].results[0].shape == () and not traced.graph.roots
    assert not trace(model.train(), None, {"input": X}).graph.roots, "a part of a model may have nothing to train"


def test_with_a_loss_function_names_are_the_users_own() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    paths = []
    for fold in ("capture", "graph"):
        graph = trace(model, None, {"input": X}, lambda outputs, batch: outputs.mean(), fold).graph
        paths.append([node.path for node in graph.nodes if not node.is_leaf])
    assert paths[0] == paths[1] == ["0", "1.0", "1.1", ""]
    assert list(dict(model.named_parameters())) == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]


class Looped(nn.Module):
    """Experts that are looped over, each with the tokens that chose it."""

    def __init__(self, branch: bool):
        super().__init__()
        self.branch, self.router = branch, nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        weights, indices = self.router(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if self.branch and not (indices == number).any():
                continue
            token, place = torch.where(indices == number)
            y.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return y.sum()


@pytest.mark.parametrize("branch", [False, True])
def test_looped_experts_are_told_what_to_write(branch: bool) -> None:
    with pytest.raises(
        CaptureError, match=r"one operator(.|\n)*torch.stack(.|\n)*autopar.experts\(x, indices, weights"
    ) as told:
        capture(Looped(branch), example_kwargs={"x": X})
    assert "indices == number" in str(told.value)


def test_what_has_no_experts_is_told_of_none() -> None:
    with pytest.raises(CaptureError) as told:
        capture(Stack(branches), example_kwargs={"x": X})
    assert "autopar.experts" not in str(told.value)
