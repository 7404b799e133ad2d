"""Forwards that could tell a model that is traced once per kind of layer from one that is traced whole.

Each is captured both ways: the graphs must be equal, names, wiring, modules and constants; a number says how many of
its layers are copies all the same, and the model must be left as it was.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.capture import Captured, capture
from autopar.capture.lowering import lower

X = torch.randn(2, 4, 8)
IDS = torch.arange(16).view(2, 8)


class Layer(nn.Module):
    """``x + relu(linear(x))``; what other layers are made of."""

    def __init__(self, index: int = 0):
        super().__init__()
        self.index = index
        self.linear = nn.Linear(8, 8)
        self.act, self.other = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(x))


class Stack(nn.Module):
    """Layers, one after another, and a head."""

    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(8, 8)
        self.held: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


Make = Callable[[], nn.Module]
Forward = Callable[..., Any]


def layers(forward: Forward, n: int = 5) -> Make:
    """A stack of layers with a forward of their own."""
    kind = type("Own", (Layer,), {"forward": forward})
    return lambda: Stack([kind(i) for i in range(n)])


def stack(forward: Forward, layer: type[nn.Module] = Layer, n: int = 4) -> Make:
    """A stack with a forward of its own."""
    kind = type("Own", (Stack,), {"forward": forward})
    return lambda: kind([layer(i) for i in range(n)])


def both(
    make: Make, inputs: dict[str, Tensor] | None = None, afterwards: Callable[[Any], None] = lambda model: None
) -> Captured:
    """What is captured in copies, after comparing it with what is captured whole.

    Args:
        inputs: by name; left out, ``X`` alone.
        afterwards: looks at each model once it was captured.
    """
    captured = []
    for fold in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        model = make()
        before = state(model)
        captured.append(capture(model, None if inputs else (X,), inputs, fold=fold))
        assert state(model) == before
        afterwards(model)
    whole, folded = captured
    assert lower(folded) == lower(whole)
    assert str(folded.graph) == str(whole.graph)
    assert folded.static_outputs == whole.static_outputs
    for name, value in whole.constants.items():
        assert torch.equal(value, folded.constants[name])
    return folded


def state(model: nn.Module) -> object:
    """What every module holds, by name, and who it is."""
    return {
        name: {key: id(value) if isinstance(value, (Tensor, nn.Module)) else repr(value) for key, value in held.items()}
        for name, module in model.named_modules()
        for held in [{**vars(module), **module._parameters, **module._buffers, **module._modules}]
    }


def copies(captured: Captured) -> int:
    return sum(1 for call in captured.program.calls if call.traced)


# ---- a model that looks at its layers other than by calling them -----------------------------------------------------


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = Stack.forward(model, x).mean()  # type: ignore[arg-type]
    return loss + sum(p.square().sum() for p in model.parameters())


def orthogonal(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = Stack.forward(model, x).mean()  # type: ignore[arg-type]
    for _, p in model.named_parameters():
        loss = loss + (p @ p.t() - torch.eye(8)).square().mean() if p.ndim == 2 else loss
    return loss


def scaled(number: Callable[[Any], float]) -> Forward:
    return lambda self, x: Stack.forward(self, x) * number(self)


def reached(model: Stack, x: Tensor) -> Tensor:
    """Inner modules and weights, by ways of their own."""
    x = model.layers[1].linear(Stack.forward(model, x))  # type: ignore[operator, union-attr]
    return F.linear(x, model.held[0].weight) * model.held[1].sum()


def with_held(make: Make, held: Callable[[Any], list[Any]]) -> Make:
    def made() -> nn.Module:
        model: Any = make()
        model.held = held(model)
        return model

    return made


def first_parameters(model: Stack, x: Tensor) -> Tensor:
    given = dict(model.layers[0].named_parameters())
    for layer in model.layers:
        x = torch.func.functional_call(layer, given, (x,))
    return x


def evaluates(model: Stack, x: Tensor) -> Tensor:
    model.layers[2].train(False)
    return Stack.forward(model, x)


def asks_the_forward(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x) * (2 if "forward" in vars(layer) or layer.forward.__self__ is not layer else 3)  # type: ignore[union-attr]
    return x


class Drops(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.linear(x), 0.1, self.training)


LOOKS: dict[str, tuple[Make, int]] = {
    "a penalty on all parameters": (stack(penalty), 2),
    "a penalty on some parameters": (stack(orthogonal), 2),
    "the number of modules": (stack(scaled(lambda m: len(list(m.modules())))), 2),
    "children and parameters": (stack(scaled(lambda m: len([*m.layers[0].children(), *m.layers[0].parameters()]))), 2),
    "the state dict": (stack(scaled(lambda m: len(m.state_dict()))), 2),
    "elements": (stack(scaled(lambda m: sum(p.numel() for p in m.parameters()) ** -0.5)), 2),
    "inner modules": (with_held(stack(reached), lambda m: [m.layers[2].linear, m.layers[3].linear.weight]), 2),
    "a closure over a module": (
        with_held(
            stack(lambda m, x: Stack.forward(m, x) + m.held[0](x)), lambda m: [lambda x: m.layers[0].linear(x) * 2]
        ),
        2,
    ),
    "parameters in place of others": (stack(first_parameters), 2),
    "evaluation of one layer": (stack(evaluates, Drops), 1),
    "the forward of a layer": (stack(asks_the_forward), 2),
}


@pytest.mark.parametrize("case", LOOKS)
def test_a_model_may_look_at_its_layers(case: str) -> None:
    make, folded = LOOKS[case]
    assert copies(both(make)) == folded


# ---- layers that could tell a token from a tensor, or one inner module from another ----------------------------------


def is_itself(layer: Layer, x: Tensor) -> Tensor:
    y = layer.linear(x)
    z = y if layer.index % 2 else y.to(torch.float32)
    return x + (z * 2 if z is y else z * 3)


def own_weight_is_itself(layer: Layer, x: Tensor) -> Tensor:
    weight = layer.linear.weight.to(torch.float32)
    factor = 1.0 + layer.index // 3  # the last two depart after the weight was asked for
    return x * factor + F.linear(x, weight) * (2 if weight is layer.linear.weight else 3)


def marks_inside(layer: Layer, x: Tensor) -> Tensor:
    y: Any = layer.linear(x)
    y = y * 1 if getattr(y, "seen", 0) else y
    y.seen = 1
    return x + y


def marks_outside(layer: Layer, x: Tensor) -> Tensor:
    y: Any = x + layer.linear(x)
    y.scale = float(layer.index + 2)
    return y


def reads_marks(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
        x = x * getattr(x, "scale", 1.0)
    return x


def asks_for_history(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
        x = x * (7 if x.is_leaf else 1) * (3 if x.grad_fn is None else 1) * (2 if x._is_view() else 1)
    return x


def asks_for_gradients(model: Stack, x: Tensor) -> Tensor:
    y = x * 1.0
    for layer in model.layers:
        y = layer(y)
    return torch.autograd.grad(y.sum(), model.head.weight, allow_unused=True)[0] or y


WORKSPACE = np.zeros(8, dtype="float32")


def fills_a_workspace(layer: Layer, x: Tensor) -> Tensor:
    WORKSPACE[:] = layer.index
    return x + layer.linear(x) * torch.as_tensor(WORKSPACE.copy())


def other_outputs(layer: Layer, x: Tensor) -> Tensor:
    y = F.dropout(layer.linear(x), 0.5, True)
    return x if layer.index == 2 else y


def catches(layer: Layer, x: Tensor) -> Tensor:
    y = layer.linear(x)
    try:
        y = y.view(3, 3) if layer.index % 2 else y.view(2, 4, 8)
    except RuntimeError:
        y = y * 3
    return x + y


def asks_for_its_type(layer: Layer, x: Tensor) -> Tensor:
    y = layer.linear(x)
    z = y.relu() if layer.index % 2 else y
    return x + (z if type(z) is type(x) and isinstance(layer.linear.weight, nn.Parameter) else z * 2)


def no_op(layer: Layer, x: Tensor) -> Tensor:
    return x + layer.linear(x.to(torch.float32) * 2)


def hidden_states(model: Stack, x: Tensor) -> Any:
    states = []
    for layer in model.layers:
        states.append(x)
        x = layer(x)
    return x, states


def residual(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        y = layer(x)
        x = y * x
    return x


def early_results(model: Stack, x: Tensor) -> Any:
    states = [x]
    for at, layer in enumerate(model.layers):
        with torch.set_grad_enabled(at != 3):
            states.append(layer(states[-1] + 1 if at == 5 else states[-1]))
    return states[7] * states[2], states[1], states[7], states[3]


def functions_off(model: Stack, x: Tensor) -> Tensor:
    for at, layer in enumerate(model.layers):
        x = layer(x)
        if at == 2:
            with torch._C.DisableTorchFunction():
                x = x * 2
    return x


def shows_a_result(model: Stack, x: Tensor) -> Tensor:
    for at, layer in enumerate(model.layers):
        x = layer(x, model.held)
        if at == 1:
            model.held.append(x)
    model.held.clear()
    return x


def reads_a_result(layer: Layer, x: Tensor, held: list[Tensor]) -> Tensor:
    y = layer.linear(x)
    return x + (y * held[0] if held else y)


def reads_it_unseen(layer: Layer, x: Tensor, held: list[Tensor]) -> Tensor:
    return reads_a_result(layer, x, layer.shared)


def shows_it_unseen(model: Stack, x: Tensor) -> Tensor:
    shared: list[Tensor] = []
    for layer in model.layers:
        layer.shared = shared
    for at, layer in enumerate(model.layers):
        x = layer(x, [])
        if at == 1:
            shared.append(x)
    for layer in model.layers:
        del layer.shared
    return x


def numbers(model: Stack, x: Tensor) -> Tensor:
    for number, layer in enumerate(model.layers):
        x = layer(x, 1.0 + number // 5)
    return x


def marks_an_input(model: Stack, x: Any) -> Tensor:
    for number, layer in enumerate(model.layers):
        if number == 5:
            x.scale = 3.0
        x = layer(x)
    return x


def gives_a_view(model: Stack, x: Tensor) -> Tensor:
    x = model.head(x)
    for number, layer in enumerate(model.layers):
        x = layer(x, x.view(x.shape) if number == 5 else x * 2)
    return x


def gives_one_twice(model: Stack, x: Tensor) -> Tensor:
    x = model.head(x)
    for number, layer in enumerate(model.layers):
        x = layer(x, x if number == 5 else x * 2)
    return x


def with_other(layer: Layer, x: Tensor, other: Tensor) -> Tensor:
    a, b = torch.broadcast_tensors(x, other)
    out: Tensor = layer.linear(a + b) * (2 if x is other else 1)
    return out


def masked(model: Stack, x: Tensor) -> Tensor:
    """Masks of their own, none, by name, one for several, and of another shape."""
    a, b = model.head(x), model.head(x * 2)
    given = [((a,), {}), ((b,), {}), ((), {}), ((), {"mask": a}), ((), {"mask": a + b}), ((a[:1],), {}), ((None,), {})]
    for layer, (args, kwargs) in zip(model.layers, given, strict=True):
        x = layer(x, *args, **kwargs)
    return x


def takes_a_mask(layer: Layer, x: Tensor, mask: Tensor | None = None) -> Tensor:
    return layer.linear(x) if mask is None else layer.linear(x) + mask


def collects(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        out = layer(x)
        assert out["y"] is out["again"] and out["x"] is x and out["none"] is None
        x = out["y"] * out["index"] + torch.cat(out["parts"][::-1], -1)
    return x


def returns_much(layer: Layer, x: Tensor) -> dict[str, Any]:
    y = layer.linear(x)
    return {"y": y, "again": y, "x": x, "index": layer.index, "none": None, "parts": y.chunk(2, -1)}


def gives_keys(model: Stack, x: Tensor) -> Tensor:
    for number, layer in enumerate(model.layers):
        x = layer({(True if number == 3 else 1): x})
    return x


def tells_keys_apart(layer: Layer, given: dict[Any, Tensor]) -> Tensor:
    ((key, x),) = given.items()
    return layer.linear(x) * (2 if key is True else 3)


def longer(layer: Layer, x: Tensor, is_longer: bool, where: str) -> Tensor:
    y = layer.linear(x.sigmoid() if is_longer and where == "begin" else x)
    return y.tanh() if is_longer and where == "end" else y


FIRST: list[Tensor] = []


def gives_the_first(model: Stack, x: Tensor) -> Tensor:
    x = model.head(x)
    FIRST[:] = [x]
    for number, layer in enumerate(model.layers):
        x = layer(FIRST[0] if number == 5 else x)
    return x


def knows_the_first(layer: Layer, x: Tensor) -> Tensor:
    return layer.linear(x) * (5 if x is FIRST[0] else 1)


def own_layers(forward: Forward, layer: Forward, n: int = 5) -> Make:
    return stack(forward, type("Own", (Layer,), {"forward": layer}), n)


LAYERS: dict[str, tuple[Make, int]] = {
    "inner modules alternately": (layers(lambda s, x: x + (s.act if s.index % 2 else s.other)(s.linear(x))), 2),
    "identity of activations": (layers(is_itself, 7), 4),
    "identity of weights": (layers(own_weight_is_itself), 2),
    "types": (layers(asks_for_its_type), 2),
    "attributes on activations": (layers(marks_inside), 0),
    "attributes on outputs": (own_layers(reads_marks, marks_outside), 0),
    "history of outputs": (own_layers(asks_for_history, Layer.forward), 0),
    "an array that is written to": (layers(fills_a_workspace), 0),
    "an output that is an input": (layers(other_outputs), 2),
    "errors that are caught": (layers(catches, 7), 2),
    "casts to the same dtype, kept": (own_layers(hidden_states, no_op), 3),
    "casts to the same dtype, in a residual": (own_layers(residual, no_op), 3),
    "results that are read later, or by nobody": (own_layers(early_results, Layer.forward, 8), 4),
    "results that are read with torch functions off": (own_layers(functions_off, Layer.forward), 0),
    "a result that is given to later layers": (own_layers(shows_a_result, reads_a_result, 7), 3),
    "a result that later layers find": (own_layers(shows_it_unseen, reads_it_unseen, 7), 3),
    "a number that it is given": (own_layers(numbers, lambda s, x, n: x + s.linear(x) * n, 7), 4),
    "a mark on an input": (own_layers(marks_an_input, lambda s, x: s.linear(x) * getattr(x, "scale", 1.0), 7), 4),
    "an input that is a view of another": (own_layers(gives_a_view, with_other, 7), 5),
    "one tensor given twice": (own_layers(gives_one_twice, with_other, 7), 5),
    "a tensor that all know": (own_layers(gives_the_first, knows_the_first, 7), 2),
    "numbers of every type": (layers(lambda s, x: x * [1, 1.0, True, 1 + 0j, 1][s.index] + s.linear(x)), 0),
    "windows in turn": (layers(lambda s, x: x + s.linear(x).tril(s.index % 2), 6), 3),
    "a window of its own": (layers(lambda s, x: x + s.linear(x).tril(s.index)), 0),
    "dropout": (layers(lambda s, x: x + F.dropout(s.linear(x), 0.1 * (s.index // 3), s.training), 6), 3),
    "begins longer": (layers(lambda s, x: longer(s, x, s.index % 2 == 1, "begin")), 2),
    "begins shorter": (layers(lambda s, x: longer(s, x, s.index % 2 == 0, "begin")), 2),
    "ends later": (layers(lambda s, x: longer(s, x, s.index % 2 == 1, "end")), 2),
    "ends earlier": (layers(lambda s, x: longer(s, x, s.index % 2 == 0, "end")), 2),
    "masks": (own_layers(masked, takes_a_mask, 7), 1),
    "a dict with values twice, inputs, numbers and parts": (own_layers(collects, returns_much), 3),
    "equal keys of other types": (own_layers(gives_keys, tells_keys_apart), 2),
    "zeros of both signs": (layers(lambda s, x: x * [0.0, -0.0, 0.0, -0.0, 0.0][s.index] + s.linear(x)), 2),
}


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_cannot_tell_that_it_is_not_traced(case: str) -> None:
    make, folded = LAYERS[case]
    assert copies(both(make)) == folded


def test_conjugates_are_another_kind() -> None:
    class Conjugate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, z: Tensor) -> Tensor:
            return self.linear(z.real) * (3 if z.is_conj() else 1)

    def forward(model: Stack, x: Tensor) -> Any:
        z = torch.complex(x, x * 2)
        return sum(layer(z.conj() if at == 1 else z) for at, layer in enumerate(model.layers))

    both(lambda: type("Own", (Stack,), {"forward": forward})([Conjugate() for _ in range(4)]))


# ---- what a model may change between its layers ----------------------------------------------------------------------


class Scales(Layer):
    shared = SimpleNamespace(factor=1.0)

    def __init__(self, index: int):
        super().__init__(index)
        self.last = nn.Linear(8, 8)
        self.first, self.second = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.act(self.linear(x))) * self.first + self.second
        return x + F.dropout(y, 0.1, self.training) * self.shared.factor


def swaps_modules(layers: Any) -> None:
    layers[5].linear, layers[5].last = layers[5].last, layers[5].linear


def swaps_parameters(layers: Any) -> None:
    held = layers[5]._parameters
    held.update(first=held["second"], second=held["first"])


BETWEEN: dict[str, tuple[Callable[[Any], object], int]] = {
    "a module": (lambda layers: setattr(layers[5], "linear", layers[0].linear), 4),
    "two modules": (swaps_modules, 4),
    "a parameter": (lambda layers: setattr(layers[5].linear, "weight", layers[0].linear.weight), 0),
    "two parameters": (swaps_parameters, 4),
    "a forward": (lambda layers: setattr(layers[5], "forward", lambda x: x * 3), 4),
    "a mode": (lambda layers: layers[5].eval(), 4),
    "a hook": (lambda layers: layers[5].act.register_forward_hook(lambda module, args, output: output * 2), 4),
    "an object that all share": (lambda layers: setattr(Scales.shared, "factor", 3.0), 4),
}


@pytest.mark.parametrize("case", BETWEEN)
def test_a_model_may_change_a_layer_before_it_calls_it(case: str) -> None:
    change, folded = BETWEEN[case]

    def forward(model: Stack, x: Tensor) -> Tensor:
        for number, layer in enumerate(model.layers):
            if number == 5:
                change(model.layers)
            x = layer(x)
        return x

    assert copies(both(stack(forward, Scales, 7))) == folded
    assert Scales.shared.factor == 1.0


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_inputs_that_are_views_of_each_other() -> None:
    class Adds(Layer):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
            a, b = torch.broadcast_tensors(a, b)
            return self.linear(a + b)

    def forward(model: Stack, x: Tensor) -> Tensor:
        a, b, c = x * 1, x * 2, x * 3
        first, second, third, fourth = model.layers
        return first(a, a.view(a.shape)) + second(a, b) + third(a, c) + fourth(c, c.view(c.shape))

    assert copies(both(stack(forward, Adds))) == 2


def test_outputs_that_are_views_of_inputs_or_of_each_other() -> None:
    class Views(Layer):
        def forward(self, x: Tensor) -> Any:
            y = self.linear(x)
            return x.view(x.shape), y, y.view(y.shape)

    def forward(model: Stack, x: Tensor) -> Tensor:
        x = model.head(x)
        found = [x, *(value for layer in model.layers for value in layer(x))]
        return sum(torch.broadcast_tensors(*found))  # type: ignore[return-value]

    assert copies(both(stack(forward, Views))) == 3


# ---- state around layers ---------------------------------------------------------------------------------------------


def default_dtype(layer: Layer, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64 if layer.index == 2 else torch.float32)
    try:
        ones = torch.ones(8)
    finally:
        torch.set_default_dtype(torch.float32)
    return x + layer.linear(x) + ones.to(torch.float32)


def autocast_flag(layer: Layer, x: Tensor) -> Tensor:
    torch.set_autocast_enabled("cpu", layer.index == 2)
    try:
        return x + layer.linear(x)
    finally:
        torch.set_autocast_enabled("cpu", False)


def inference(layer: Layer, x: Tensor) -> Tensor:
    with torch.inference_mode(layer.index % 2 == 1):
        y = layer.linear(x)
    return x + y


def without_gradients(layer: Layer, x: Tensor) -> Tensor:
    y = layer.linear(x)
    with torch.no_grad() if layer.index % 2 else torch.enable_grad():
        y = y * 2
    return x + y


def full_precision(layer: Layer, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return x + layer.linear(x)


@pytest.mark.parametrize(
    ("forward", "folded"),
    [(default_dtype, 0), (autocast_flag, 0), (inference, 0), (without_gradients, 2), (full_precision, 0)],
)
def test_state_that_a_layer_sets(forward: Forward, folded: int) -> None:
    assert copies(both(layers(forward))) == folded


# ---- state of the model, and running its code again ------------------------------------------------------------------


def writes(y: Tensor) -> Tensor:
    """What makes the model be captured whole after all."""
    y += 1
    return y


def counts(layer: Any, x: Tensor) -> Tensor:
    layer.calls = getattr(layer, "calls", 0) + 1
    layer.box[0] += 1
    return x * layer.calls * layer.box[0] + writes(layer.linear(x))


class Counts(Layer):
    def __init__(self, index: int):
        super().__init__(index)
        self.box = [0]

    forward = counts


CALLS = {"made": 0}
calls = 0


def counts_outside(layer: Any, x: Tensor) -> Tensor:
    global calls
    calls += 1
    CALLS["made"] += 1
    type(layer).made = getattr(type(layer), "made", 0) + 1
    return x * calls * CALLS["made"] * type(layer).made + writes(layer.linear(x))


class CountsOutside(Layer):
    made = 0
    forward = counts_outside


def counted(x: Tensor) -> Tensor:
    global calls
    calls += 1
    return x * calls


class ListsFunctions(Layer):
    def __init__(self, index: int):
        super().__init__(index)
        self.steps = [counted, writes]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(self.linear(x))
        return x


def drops_layers(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x) if random.random() < 0.5 else x
    return x


def walks(model: Stack, x: Tensor) -> Tensor:
    x = Stack.forward(model, x)
    return x * sum(layer.calls for layer in model.layers)  # type: ignore[misc]


class Lazy(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "extra"):
            self.extra = nn.ReLU()
            self.register_buffer("none", None)
            self.register_forward_hook(lambda module, args, output: None)
        return x + self.extra(self.linear(x))


def counts_and_decides(layer: Layer, x: Tensor) -> Tensor:
    CALLS["made"] += 1
    y = x + layer.linear(x)
    return y * CALLS["made"] if CALLS["made"] > 3 else y


KEPT: list[Tensor] = []


def keeps_the_first(layer: Layer, x: Tensor) -> Tensor:
    y = x + layer.linear(x)
    if not KEPT:
        KEPT.append(y * 2)
    return y + KEPT[0]


def passes_on(layer: Layer, x: Tensor) -> Tensor:
    y = layer.linear(x)
    if KEPT:
        y = y + KEPT.pop()
    KEPT.append(x.exp())
    return y


class Buffered(Layer):
    def __init__(self, index: int):
        super().__init__(index)
        self.register_buffer("scale", torch.full((8,), float(index)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * self.scale


class WritesBuffer(Buffered):
    def forward(self, x: Tensor) -> Tensor:
        self.scale.add_(1)
        return self.linear(x)


class Normed(Layer):
    def __init__(self, index: int):
        super().__init__(index)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


STATE: dict[str, tuple[Make, int]] = {
    "a counter that decides": (layers(counts_and_decides), 1),
    "what the first keeps": (layers(keeps_the_first), 3),
    "what each leaves for the next": (layers(passes_on), 0),
    "buffers": (lambda: Stack([Buffered(i) for i in range(4)]), 2),
    "buffers that are written to": (lambda: Stack([WritesBuffer(i) for i in range(4)]), 0),
    "running statistics": (lambda: Stack([Normed(i) for i in range(4)]), 0),
    "counters": (lambda: Stack([Counts(i) for i in range(4)]), 0),
    "counters, read by the model": (stack(walks, Counts), 0),
    "counters outside": (lambda: Stack([CountsOutside(i) for i in range(4)]), 0),
    "counters of functions in lists": (lambda: Stack([ListsFunctions(i) for i in range(4)]), 0),
    "random layers": (own_layers(drops_layers, Layer.forward, 8), 2),
    "random layers, captured whole": (own_layers(drops_layers, lambda s, x: x + writes(s.linear(x)), 8), 0),
    "modules and hooks made while running": (lambda: Stack([Lazy(i) for i in range(4)]), 2),
}


@pytest.mark.parametrize("case", STATE)
def test_code_runs_as_if_for_the_first_time_and_leaves_the_model_alone(case: str) -> None:
    make, folded = STATE[case]
    assert copies(both(make)) == folded
    assert (calls, CALLS["made"], CountsOutside.made, KEPT) == (0, 0, 0, [])


@functools.lru_cache
def mask(n: int) -> Tensor:
    return torch.ones(n, n).tril()


def masks(layer: Layer, x: Tensor) -> Tensor:
    return x + mask(4) @ layer.linear(x)


def masks_and_writes(layer: Layer, x: Tensor) -> Tensor:
    y = masks(layer, x)
    return writes(y) if layer.index == 4 else y


@pytest.mark.parametrize(("forward", "folded"), [(masks, 3), (masks_and_writes, 0)])
def test_a_cache_that_all_layers_share(forward: Forward, folded: int) -> None:
    assert copies(both(layers(forward))) == folded
    assert mask.cache_info().currsize == 0, "no fake tensors stay"


class Keeps(Layer):
    kept: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.linear(x).mean()
        return x + self.kept


class KeepsInPlace(Keeps):
    def __init__(self, index: int):
        super().__init__(index)
        self.kept = None


class Assigns(Layer):
    def __init__(self, index: int):
        super().__init__(index)
        self.register_buffer("kept", torch.zeros(()))

    forward = Keeps.forward  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Keeps, KeepsInPlace, Assigns])
def test_tensors_that_layers_keep_on_themselves(kind: type[Layer]) -> None:
    assert copies(both(lambda: Stack([kind(i) for i in range(3)]))) == 0


# ---- modules under several names -------------------------------------------------------------------------------------


def shared_layer() -> nn.Module:
    layer = Layer()
    return Stack([layer, layer, Layer(), layer, Layer()])


def inner_module_as_head() -> nn.Module:
    model = Stack([Layer(i) for i in range(4)])
    model.head = model.layers[2].linear  # type: ignore[assignment, union-attr]
    return model


def inner_module_in_all() -> nn.Module:
    model = Stack([Layer(i) for i in range(5)])
    for layer in list(model.layers)[1:]:
        layer.linear = model.layers[0].linear  # type: ignore[union-attr]
    return model


def inner_module_unregistered() -> nn.Module:
    forward = layers(lambda s, x: x + s.linear(x) + s.first(x))
    model: Any = forward()
    for layer in model.layers:
        object.__setattr__(layer, "first", model.layers[0].linear)
    return model  # type: ignore[no-any-return]


class Calls(Layer):
    """Calls a layer of another stack."""

    def __init__(self, index: int, others: list[nn.Module]):
        super().__init__(index)
        self.others = others

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.others[self.index](x))


def layers_that_call_layers() -> nn.Module:
    others: list[nn.Module] = [Layer(i) for i in range(3)]
    return Stack([*others, *(Calls(i, list(others)) for i in range(3))])


def changed(change: Callable[[Any], object], forward: Forward = Layer.forward) -> Make:
    """A stack whose layers are changed before capture."""

    def made() -> nn.Module:
        model: Any = layers(forward)()
        change(model.layers)
        return model  # type: ignore[no-any-return]

    return made


def hooks(pre: bool) -> Callable[[Any], object]:
    """On a layer, and on a module inside of another one."""

    def change(layers: Any) -> None:
        for module in (layers[1], layers[3].linear):
            if pre:
                module.register_forward_pre_hook(lambda module, args: (args[0].sigmoid(),))
            else:
                module.register_forward_hook(lambda module, args, output: output.sigmoid())

    return change


MODULES: dict[str, tuple[Make, int]] = {
    "a layer twice": (shared_layer, 1),
    "an inner module as head": (inner_module_as_head, 2),
    "an inner module in all": (inner_module_in_all, 3),
    "an inner module, unregistered": (inner_module_unregistered, 3),
    "layers that call layers": (layers_that_call_layers, 0),
    "a frozen layer": (changed(lambda layers: layers[2].requires_grad_(False)), 2),
    "weights tied across layers": (
        changed(lambda layers: setattr(layers[3].linear, "weight", layers[1].linear.weight)),
        3,
    ),
    "weights tied within a layer": (lambda: Stack([Tied(i % 2 == 1) for i in range(5)]), 2),
    "hooks before": (changed(hooks(pre=True)), 1),
    "hooks after": (changed(hooks(pre=False)), 1),
}


class Tied(Layer):
    def __init__(self, is_tied: bool):
        super().__init__()
        self.down = nn.Linear(8, 8)
        if is_tied:
            self.down.weight = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.linear(x).relu())


@pytest.mark.parametrize("case", MODULES)
def test_modules_that_are_shared_tied_or_changed(case: str) -> None:
    make, folded = MODULES[case]
    assert copies(both(make)) == folded


class Constants(Layer):
    """A tensor that no module owns, one that all share, made in the first call, and a literal of every call."""

    def __init__(self, index: int):
        super().__init__(index)
        self.own = torch.full((8,), float(index))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * self.own * half() + torch.tensor(0.25)


@functools.lru_cache
def half() -> Tensor:
    return torch.tensor(0.5)


def test_constants_are_as_many_as_when_traced_whole() -> None:
    def forward(model: Stack, x: Tensor) -> Tensor:
        for at in (0, 1, 2, 2, 1, 1, 2):
            x = model.layers[at](x)
        return x

    half.cache_clear()
    captured = both(stack(forward, Constants))
    assert copies(captured) >= 2
    assert len(captured.constants) == 3 + 1 + 7


# ---- libraries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["output_attentions", "output_hidden_states", ""])
def test_what_transformers_collects_with_hooks(asked: str) -> None:
    """Hooks keep outputs of layers: these are traced, and the model collects the same afterwards."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_implementation="eager",
        **({asked: True} if asked else {}),  # type: ignore[arg-type]
    )

    def collects(model: nn.Module) -> None:
        outputs = model(input_ids=IDS, output_attentions=True, output_hidden_states=True)
        assert len(outputs.attentions) == 3
        assert len(outputs.hidden_states) == 4

    captured = both(lambda: LlamaForCausalLM(config).train(), {"input_ids": IDS, "labels": IDS}, collects)
    assert copies(captured) == (0 if asked else 2)


def test_a_mixture_of_experts_is_captured_whole_and_runs_afterwards() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    if "torch.bincount(" in inspect.getsource(load_balancing_loss_func):
        pytest.skip("this transformers counts the tokens of experts by a result that is as large as their values say")
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
        output_router_logits=True,
    )
    inputs = {"input_ids": IDS, "labels": IDS}

    def runs(model: nn.Module) -> None:
        assert model(**inputs).aux_loss.isfinite()

    assert copies(both(lambda: MixtralForCausalLM(config).train(), inputs, runs)) == 0
