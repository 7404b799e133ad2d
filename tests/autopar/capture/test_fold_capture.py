"""Fold before capture: what is traced once, what must not be, and that nothing downstream can tell."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.capture.capture import Captured, capture
from autopar.capture.lowering import lower
from autopar.capture.repeats.candidates import nominate
from autopar.driver.trace import trace
from autopar.graph.module_walk import ModuleWalk
from autopar.verification.reference import reference
from autopar.verification.verify import RTOL, simulate, space_on
from planner.base.errors import CaptureError, InputError
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import assignment_of
from planner.formulation.constraints.pins import Pins
from planner.ir.graph import Graph
from planner.ir.layout import Mesh
from planner.solve.choices import solve
from tests.autopar.models import MODELS, WIDTH, llama, text

CLUSTER = ClusterSpec.local(2)
X = torch.randn(4, 6, WIDTH)


def unnumbered(graph: torch.fx.Graph) -> str:
    """The graph as text; the operator of a Function has another number in every capture."""
    return re.sub(r"(\bautopar_function\.\w+?__)\d+\b", r"\1", str(graph))


def both(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> tuple[Captured, Graph]:
    """Capture folded and whole, with equal global state; the graphs must be equal, names and all."""
    torch.manual_seed(0)
    reset()
    folded = capture(model, args or None, kwargs or None, fold=True)
    reset()
    whole = capture(model, args or None, kwargs or None, fold=False)
    graph = lower(folded)
    assert graph == lower(whole)
    assert len(whole.program.calls) == 1
    assert unnumbered(folded.graph) == unnumbered(whole.graph)
    return folded, graph


def traced(captured: Captured) -> int:
    """How many of the calls of a block were traced, if any block was found to repeat."""
    return len({call.body for call in captured.program.calls if call.path or call.traced})


def copies(captured: Captured) -> int:
    """How many calls stand for copies."""
    return sum(1 for call in captured.program.calls if call.traced)


# ---- the zoo ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_the_same_on_every_model_of_the_zoo(name: str) -> None:
    model, batch = MODELS[name].build()
    both(model, **batch)


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_costs_the_same_on_every_model_of_the_zoo(name: str) -> None:
    model, batch = MODELS[name].build()

    def planned(fold: str) -> autopar.Plan:
        return autopar.plan(model, CLUSTER, example_kwargs=batch, pin={"data": 2}, fold=fold)  # type: ignore[arg-type]

    plan, unfolded = planned("capture"), planned("off")
    assert unfolded.model["fingerprint"] == plan.model["fingerprint"]
    # Decided node by node, equally fast plans may differ in what they hold.
    assert unfolded.predicted.step_time_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    if name in ("gpt2", "resnet"):  # of the others the graphs are equal, as the test above says
        again = planned("graph")
        assert again.model["fingerprint"] == plan.model["fingerprint"]
        assert again.digest() == plan.digest()
        assert again.predicted == plan.predicted


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_transformers_layers_are_traced_once(name: str) -> None:
    model, batch = MODELS[name].build()
    assert copies(capture(model, None, batch, fold=True)) == 1


def test_depth_changes_nothing_but_counts() -> None:
    shallow, deep = (capture(llama(num_hidden_layers=n), None, text(), fold=True) for n in (3, 7))
    assert (copies(shallow), copies(deep)) == (2, 6)
    assert len({c.body for c in shallow.program.calls}) == len({c.body for c in deep.program.calls})
    both(llama(num_hidden_layers=5), **text())


def test_what_is_folded_computes_what_the_model_computes() -> None:
    """Numerically, on every rank of a mesh, with the program that was captured in copies."""
    for model, batch in ((llama(num_hidden_layers=3), text()), (Stack([Block() for _ in range(3)]), {"x": X})):
        ref = reference(model, None, batch)
        assert copies(ref.traced.captured) == 2
        pins = Pins.parse({"data": 2, "tensor": 2})
        space = space_on(ref.traced, Mesh.of(data=2, tensor=2), ClusterSpec.local(4), pins)
        agreement = simulate(ref, assignment_of(space, solve(space.problem(None), time_limit_s=5.0).choices))
        assert agreement.worst[0] <= RTOL
        assert not agreement.miscounted


def test_a_plan_made_with_one_fold_applies_with_another() -> None:
    model, batch = llama(num_hidden_layers=3), text()
    made = autopar.plan(model, CLUSTER, example_kwargs=batch, fold="graph")
    from autopar.driver.plan import assign

    for fold in ("capture", "graph"):
        assignment = assign(trace(model, None, batch, fold=fold), autopar.Plan.from_dict(made.to_dict()))  # type: ignore[arg-type]
        assert len(assignment.space.folded.kinds) == len(made.blocks)


def test_another_fold_is_refused() -> None:
    with pytest.raises(InputError, match=r"fold is 'layers'; it is 'capture' .* 'graph' .* 'off'"):
        autopar.plan(Block(), CLUSTER, example_args=(X,), fold="layers")  # type: ignore[arg-type]


# ---- models made to fool it ------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm attention with a window, dropout and a number that it does not read."""

    def __init__(self, index: int = 0, window: int | None = None, dropout: float = 0.0):
        super().__init__()
        self.index, self.window, self.dropout = index, window, dropout
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        scores = query @ key.transpose(-2, -1) / WIDTH**0.5
        if self.window is not None:
            near = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril(self.window)
            scores = scores.masked_fill(~near, -1e9)
        if mask is not None:
            scores = scores + mask
        return x + self.out(F.dropout(scores.softmax(-1), self.dropout, self.training) @ value)


class Stack(nn.Module):
    """Blocks, one after another."""

    def __init__(self, blocks: list[nn.Module]):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def stack(n: int = 4, **changes: object) -> Stack:
    return Stack([Block(i, **changes) for i in range(n)])  # type: ignore[arg-type]


def test_a_number_that_is_not_read_does_not_split() -> None:
    folded, _ = both(stack(), X)
    assert copies(folded) == 3


def test_windows_and_dropout_split_into_kinds() -> None:
    folded, graph = both(Stack([Block(i, window=i % 2) for i in range(6)]), X)
    assert copies(folded) == 4
    assert [node["diagonal"] for node in graph.nodes if node.op == "aten.tril.default"] == [0, 1, 0, 1, 0, 1]
    folded, graph = both(Stack([Block(i, dropout=0.1 * (i // 2)) for i in range(4)]), X)
    assert copies(folded) == 2
    assert sorted({node["p"] for node in graph.nodes if node.op == "aten.dropout.default"}) == [0.0, 0.1]  # type: ignore[type-var]


def test_every_window_another_is_traced_apart() -> None:
    folded, _ = both(Stack([Block(i, window=i) for i in range(4)]), X)
    assert copies(folded) == 0


def test_the_training_flag_of_one_layer_splits() -> None:
    model = stack(dropout=0.2)
    model.blocks[2].eval()
    folded, graph = both(model, X)
    assert [node["train"] for node in graph.nodes if node.op == "aten.dropout.default"] == [True, True, False, True]
    assert copies(folded) == 2


class ReadsIndex(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask) * (1 + self.index)


class Special(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, mask)
        return y.relu() if self.index == 2 else y


def test_a_layer_that_reads_its_number() -> None:
    folded, graph = both(Stack([ReadsIndex(i) for i in range(4)]), X)
    assert copies(folded) == 0
    assert [n["other"] for n in graph.nodes if n.op == "aten.mul.Tensor"] == [1, 2, 3, 4]
    folded, graph = both(Stack([Special(i) for i in range(5)]), X)
    assert copies(folded) == 3
    assert [n.path for n in graph.nodes if n.op == "aten.relu.default"] == ["blocks.2"]


class Extra(nn.Module):
    """Appends an operator after the block has done all that the others do, and before."""

    def __init__(self, block: Block, where: str):
        super().__init__()
        self.block, self.where = block, where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "before":
            x = x.sigmoid()
        x = self.block(x)
        return x.tanh() if self.where == "after" else x


@pytest.mark.parametrize("where", ["before", "after"])
def test_more_or_fewer_operators_at_the_ends(where: str) -> None:
    for plan in ("no", "yes"), ("yes", "no"):
        kinds = [where if plan[i % 2] == "yes" else "" for i in range(4)]
        folded, _ = both(Stack([Extra(Block(i), kind) for i, kind in enumerate(kinds)]), X)
        assert copies(folded) == 2


@pytest.mark.parametrize("pre", [False, True])
def test_hooks_run(pre: bool) -> None:
    model = stack()
    if pre:
        model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0].sigmoid(),))
        model.blocks[3].out.register_forward_pre_hook(lambda module, args: (args[0].sigmoid(),))
    else:
        model.blocks[1].register_forward_hook(lambda module, args, output: output.sigmoid())
        model.blocks[3].norm.register_forward_hook(lambda module, args, output: output.sigmoid())
    folded, graph = both(model, X)
    assert sum(node.op == "aten.sigmoid.default" for node in graph.nodes) == 2
    assert copies(folded) == 1  # what hooks of a block do is part of its call


def test_a_forward_of_one_instance_alone() -> None:
    model = stack()
    model.blocks[2].forward = lambda x, mask=None: x * 3
    both(model, X)
    assert model.blocks[2].forward(torch.ones(1)).item() == 3
    assert "forward" not in vars(model.blocks[1])


STATE = {"calls": 0, "kept": []}


def reset() -> None:
    STATE["calls"], STATE["kept"] = 0, []


class Counts(Block):
    """Python state that all layers share decides what the third, fourth, ... call does."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        STATE["calls"] += 1  # type: ignore[operator]
        y = super().forward(x, mask)
        return y * STATE["calls"] if STATE["calls"] > 2 else y  # type: ignore[operator]


def test_a_counter_that_all_layers_share() -> None:
    model = Stack([Counts(i) for i in range(5)])
    folded, graph = both(model, X)
    assert [n["other"] for n in graph.nodes if n.op == "aten.mul.Tensor"] == [3, 4, 5]
    assert copies(folded) == 1


class KeepsFirst(Block):
    """The first call keeps a tensor that all others read."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, mask)
        if not STATE["kept"]:
            STATE["kept"].append(y * 2)  # type: ignore[attr-defined]
        return y + STATE["kept"][0]  # type: ignore[index]


class KeepsAll(Block):
    """Every call leaves a tensor behind, by a way of its own."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, mask)
        STATE["kept"].append(y.mean())  # type: ignore[attr-defined]
        return y


class Passes(Block):
    """Every call reads what the one before left behind."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, mask)
        if STATE["kept"]:
            y = y + STATE["kept"].pop()  # type: ignore[attr-defined]
        STATE["kept"].append(x.exp())  # type: ignore[attr-defined]
        return y


class Fresh(Stack):
    """Begins every forward with no tensors kept."""

    def forward(self, x: Tensor) -> Tensor:
        STATE["kept"].clear()  # type: ignore[attr-defined]
        return super().forward(x)


class WithKept(Fresh):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.stack(STATE["kept"]).sum()  # type: ignore[arg-type]


def test_a_tensor_that_the_first_layer_leaves_for_the_others() -> None:
    folded, _ = both(Stack([KeepsFirst(i) for i in range(5)]), X)
    assert copies(folded) == 3


def test_tensors_that_layers_leave_for_the_model_or_each_other() -> None:
    folded, graph = both(WithKept([KeepsAll(i) for i in range(4)]), X)
    assert copies(folded) == 0
    (gathered,) = (node for node in graph.nodes if node.op == "aten.stack.default")
    assert len(set(gathered.inputs)) == 4
    assert copies(both(Fresh([Passes(i) for i in range(5)]), X)[0]) == 0


class Masks(nn.Module):
    """Layers called with masks of their own, with none, by name, or with one mask for several."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(i) for i in range(7)])

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        x = self.blocks[0](x, a)
        x = self.blocks[1](x, b)
        x = self.blocks[2](x)
        x = self.blocks[3](x, mask=a)
        x = self.blocks[4](x, mask=a + b)
        x = self.blocks[5](x, a[:1])
        return self.blocks[6](x, None).square().mean()


def test_masks_are_inputs_of_their_own() -> None:
    folded, _ = both(Masks(), X, torch.randn(4, 6, 6), torch.randn(4, 6, 6))
    assert copies(folded) == 1  # called by name with one tensor after another; the others each differ in kind


def test_a_frozen_layer_is_another_kind() -> None:
    model = stack(5)
    model.blocks[2].requires_grad_(False)
    folded, graph = both(model, X)
    assert copies(folded) == 3
    frozen = {leaf.target for leaf in graph.leaves if leaf.op == "param" and not leaf.results[0].grad}
    assert frozen == {f"blocks.2.{name}" for name, _ in model.blocks[2].named_parameters()}


def test_gradients_through_copies_are_their_own() -> None:
    """The first block gets no gradient through its input, the others do."""
    model = stack(4)
    model.first = nn.Identity()  # type: ignore[assignment]
    folded, _ = both(model, X)
    assert copies(folded) == 2


def test_weights_tied_across_and_within_layers() -> None:
    model = stack(4)
    model.blocks[3].out.weight = model.blocks[1].out.weight
    model.blocks[2].norm.weight = model.blocks[0].norm.weight
    folded, graph = both(model, X)
    assert copies(folded) == 3
    assert len([leaf for leaf in graph.leaves if leaf.op == "param"]) == 2 + 4 * 5 - 2
    twice = [TwoLinears(tied=i == 1) for i in range(4)]
    folded, _ = both(Stack(list(twice)), X)
    assert copies(folded) == 2


class TwoLinears(nn.Module):
    def __init__(self, tied: bool):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if tied:
            self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Twice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        return super().forward(second(first(first(x))))


def test_a_layer_called_twice() -> None:
    folded, _ = both(Twice([Block(0), Block(1)]), X)
    assert copies(folded) >= 1


class Returns(nn.Module):
    """Returns a dict with a tensor twice, its input, a number of its own, and nothing."""

    def __init__(self, index: int):
        super().__init__()
        self.index, self.linear = index, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, object]:
        y = self.linear(x)
        return {"y": y, "again": y, "x": x, "index": self.index, "none": None, "parts": y.chunk(2, -1)}


class Collects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Returns(i) for i in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(x)
            assert out["y"] is out["again"] and out["x"] is x and out["none"] is None
            x = out["y"] * out["index"] + torch.cat(out["parts"][::-1], -1)
        return x.sum()


def test_whatever_a_layer_returns() -> None:
    folded, graph = both(Collects(), X)
    assert copies(folded) == 2
    assert [n["other"] for n in graph.nodes if n.op == "aten.mul.Tensor"] == [0, 1, 2, 3]


class Buffers(nn.Module):
    """A buffer and a constant of its own per layer, and a literal."""

    def __init__(self, index: int):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), float(index)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + torch.tensor([0.5]).to(x.device)


def test_buffers_and_literals_are_one_for_each_layer() -> None:
    folded, graph = both(Stack([Buffers(i) for i in range(3)]), X)
    assert copies(folded) == 2
    assert [leaf.target for leaf in graph.leaves if leaf.op == "buffer"] == [f"blocks.{i}.scale" for i in range(3)]
    assert len([leaf for leaf in graph.leaves if leaf.op == "const"]) == 3
    assert all(value.item() == 0.5 for value in folded.constants.values())


class PlainTensor(Buffers):
    def __init__(self, index: int):
        super().__init__(index)
        self.shift = torch.full((WIDTH,), float(index))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


def test_tensors_that_no_module_owns_keep_their_values() -> None:
    folded, _ = both(Stack([PlainTensor(i) for i in range(3)]), X)
    values = [value for value in folded.constants.values() if value.numel() == WIDTH]
    assert [value[0].item() for value in values] == [0.0, 1.0, 2.0]


class NoGradInside(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            scale = self.out.weight.norm()
            if self.index == 2:
                scale = scale + 1
        return super().forward(x, mask) / scale


class NoGradAround(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[1](self.blocks[0](x))
        return super().forward(x)


def test_regions_without_gradients() -> None:
    folded, graph = both(Stack([NoGradInside(i) for i in range(5)]), X)
    assert copies(folded) == 3
    assert not any(n.results[0].grad for n in graph.nodes if "norm" in n.op and "layer_norm" not in n.op)
    both(NoGradAround([Block(i) for i in range(4)]), X)


class WritesBuffer(nn.Module):
    def __init__(self, index: int):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return self.linear(x)


class WritesInside(nn.Module):
    def __init__(self, index: int):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y += x
        return y


class Norms(nn.Module):
    def __init__(self, index: int):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


@pytest.mark.parametrize("kind", [WritesBuffer, WritesInside, Norms])
def test_writes_in_place_are_captured_whole(kind: type[nn.Module]) -> None:
    model = Stack([kind(i) for i in range(3)])
    folded, graph = both(model, X)
    assert copies(folded) == 0
    assert len(graph.updates) == sum(buffer.numel() > 0 for buffer in model.buffers())


class Precise(Block):
    """A region that keeps full precision, as many models have around a softmax."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x, mask)


class Mixed(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, mask)


def test_autocast_off_inside_a_layer_changes_nothing() -> None:
    _, graph = both(Stack([Precise(i) for i in range(3)]), X)
    assert [n.op for n in graph.nodes] == [n.op for n in both(stack(3), X)[1].nodes]


def test_autocast_inside_a_layer_names_module_and_line() -> None:
    with pytest.raises(CaptureError, match=r"module blocks\.0 \(Mixed, .*test_fold_capture\.py:\d+\).*enabled=False"):
        capture(Stack([Mixed(i) for i in range(2)]), (X,), fold=True)


class Peeks(Stack):
    """Reads into its layers from outside."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.blocks[1].qkv.weight.dtype) + self.blocks[0].norm.bias
        return super().forward(self.blocks[2].out(x))


def test_a_model_that_reaches_into_its_layers() -> None:
    folded, graph = both(Peeks([Block(i) for i in range(3)]), X)
    assert copies(folded) == 2
    assert graph.nodes[-1].results[0].grad


class Calls(Block):
    """Calls a layer of another stack."""

    def __init__(self, index: int, other: list[nn.Module]):
        super().__init__(index)
        self.other = other

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(self.other[self.index](x), mask)


def test_layers_that_call_each_other() -> None:
    others = [Block(i) for i in range(3)]
    both(Stack([*others, *(Calls(i, list(others)) for i in range(3))]), X)


def test_branches_on_values_are_refused_with_the_models_own_line() -> None:
    class Branches(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return x if x.sum() > 0 else super().forward(x, mask)

    with pytest.raises(CaptureError, match=r"(?s)test_fold_capture\.py.*return x if x\.sum\(\) > 0"):
        capture(Stack([Branches(i) for i in range(3)]), (X,), fold=True)


# ---- nominating ------------------------------------------------------------------------------------------------------


def test_only_equal_and_outermost_submodules_are_nominated() -> None:
    towers = nn.ModuleList([Stack([Block(), Block()]), Stack([Block(), Block(), Block()])])
    (group,) = nominate(ModuleWalk(towers))
    assert [s.path for s in group] == ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1", "1.blocks.2"]
    assert not nominate(ModuleWalk(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))
    assert not nominate(ModuleWalk(Stack([Block(), TwoLinears(False), TwoLinears(True)])))
    pair = nn.ModuleList([Stack([Block(), Block()]), Stack([Block(), Block()])])
    assert [[s.path for s in group] for group in nominate(ModuleWalk(pair))] == [["0", "1"]]


def test_modules_are_as_they_were_after_capture() -> None:
    model = stack(3)
    before = {name: (dict(vars(m)), set(m._parameters)) for name, m in model.named_modules()}
    capture(model, (X,), fold=True)
    after = {name: (dict(vars(m)), set(m._parameters)) for name, m in model.named_modules()}
    assert before.keys() == after.keys()
    assert all(before[name][0].keys() == after[name][0].keys() for name in before)
    assert all(type(m._parameters) is dict for m in model.modules())
    assert torch.isfinite(model(X))


def test_keys_that_are_equal_but_not_the_same():
    """``True == 1``, and a layer may ask which it is."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, given):
            ((key, x),) = given.items()
            return self.linear(x) * (2 if key is True else 3)

    class Keyed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x):
            for number, layer in enumerate(self.layers):
                x = layer({(True if number == 3 else 1): x})
            return x.sum()

    model, x = Keyed(), torch.randn(2, 8)
    assert lower(capture(model, (x,), fold=True)) == lower(capture(model, (x,), fold=False))
