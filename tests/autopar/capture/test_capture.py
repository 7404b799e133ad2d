"""Capture and lower: what comes in, what is refused and how, and what the planner's graph holds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture.capture import capture
from autopar.capture.lowering import lower
from autopar.graph.module_walk import ModuleWalk, modules, tensors
from planner.base.errors import CaptureError, InputError
from planner.ir.graph import Ref

X = torch.randn(4, 8)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return {"logits": self.head(self.embed(ids)), "extra": (ids, 3)}


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)
        if y.sum() > 0:
            y = y + 1
        return y


def test_nested_outputs_and_static_values_are_remembered():
    captured = capture(Tied(), None, {"ids": torch.zeros(4, 6, dtype=torch.long)})
    assert len(captured.outputs) == 3
    assert captured.outputs[2] is None
    assert captured.static_outputs[2] == 3


def test_a_branch_on_values_names_the_line_and_the_way_out():
    with pytest.raises(CaptureError) as caught:
        capture(Branches(), (X,))
    message = str(caught.value)
    assert "Branches cannot be captured" in message
    assert "test_capture.py" in message
    assert "if y.sum() > 0" in message
    assert "torch.where" in message


def test_without_inputs_it_says_what_to_pass():
    with pytest.raises(InputError, match="example_kwargs"):
        capture(nn.Linear(2, 2))


def test_dummy_inputs_are_used():
    model = nn.Linear(8, 8)
    model.dummy_inputs = {"input": X}
    assert lower(capture(model)).leaves[-1].results[0].shape == (4, 8)


def test_a_loss_function_sees_what_the_model_does_not_take():
    def loss(outputs, batch):
        return nn.functional.mse_loss(outputs, batch["target"])

    graph = lower(capture(nn.Linear(8, 8), None, {"input": X, "target": X}, loss_fn=loss))
    assert [leaf.target for leaf in graph.leaves if leaf.op == "param"] == ["weight", "bias"]
    assert {leaf.target for leaf in graph.leaves if leaf.op == "input"} == {"input", "target"}
    assert graph.type_of(graph.outputs[0]).shape == ()


def test_a_loss_function_needs_names():
    with pytest.raises(InputError, match="example_kwargs"):
        capture(nn.Linear(8, 8), (X,), loss_fn=lambda outputs, batch: outputs.sum())


def test_the_meta_device_costs_no_memory():
    with torch.device("meta"):
        model = nn.Linear(2**16, 2**16)
    graph = lower(capture(model, None, {"input": torch.empty(2, 2**16, device="meta")}))
    assert sum(leaf.results[0].numel for leaf in graph.leaves if leaf.op == "param") == 2**32 + 2**16


def test_arguments_have_schema_names_and_defaults():
    graph = lower(capture(nn.Linear(8, 8, bias=False), (X,)))
    (node,) = (node for node in graph.nodes if not node.is_leaf)
    assert dict(node.args).keys() == {"input", "weight", "bias"}
    assert node["bias"] is None
    assert [graph.by_name[ref.node].op for ref in node.inputs] == ["input", "param"]


class TwoInputs(nn.Module):
    def forward(self, a, b):
        return (a * 2 + b).sum()


def test_one_tensor_passed_twice_is_two_inputs():
    """``model(input_ids=ids, labels=ids)`` plans for a model whose inputs will differ."""
    graph = lower(capture(TwoInputs(), None, {"a": X, "b": X}))
    assert [leaf.target for leaf in graph.leaves] == ["a", "b"]
    assert all(graph.users.get(Ref(leaf.name)) for leaf in graph.leaves)


class Halves(torch.autograd.Function):
    """The identity, whose gradient it halves."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


class Halved(nn.Module):
    def __init__(self, is_watched: bool = True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.is_watched = is_watched

    def forward(self, x):
        for layer in self.layers:
            with torch.set_grad_enabled(self.is_watched):
                y = Halves.apply(layer(x))
            x = x + y
        return x.mean()


@pytest.mark.parametrize("fold", [False, True])
def test_a_function_with_a_backward_of_its_own_is_an_operator_where_it_has_gradients(fold):
    before = Halves.apply.__func__.__code__

    def ops(model):
        return {node.op for node in lower(capture(model, (X,), fold=fold)).nodes}

    assert "function.Halves" in ops(Halved()) & ops(Halved().eval())
    assert "function.Halves" not in ops(Halved(is_watched=False))
    assert Halves.apply.__func__.__code__ is before


def test_walks_find_what_torchs_own_find() -> None:
    model = nn.Sequential(Tied(), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False))
    model.append(model[1])  # one module of two names
    model.register_module("missing", None)
    model.again = model[0].embed.weight
    model[2].register_buffer("mean", model[1].running_mean)  # one buffer of two names
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    walk = ModuleWalk(model)
    assert len(every) > len(walk.parameters) + len(walk.buffers)
    assert walk.modules == [*model.named_modules()]
    assert modules(model, once=False) == [*model.named_modules(remove_duplicate=False)]
    assert _places(walk.parameters) == _places(model.named_parameters())
    assert _places(walk.buffers) == _places(model.named_buffers())
    assert _places(tensors(model)) == _places(every)


def _places(named):
    return [(name, id(tensor)) for name, tensor in named]
