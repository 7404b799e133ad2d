"""Functions with a backward of their own: operators that are sharded as declared, and run whole where nothing is."""

from __future__ import annotations

import copy
import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import autopar
from autopar.capture.capture import capture
from autopar.capture.lowering import lower
from autopar.driver.plan import plan_traced
from autopar.driver.trace import trace
from autopar.emit.rewrite import rewrite
from autopar.functions.declared import DECLARED, SHIPPED, read
from autopar.functions.observe import observe
from autopar.functions.register import check
from autopar.verification.reference import reference
from autopar.verification.typecheck import typecheck
from autopar.verification.verify import locate, simulate, verify
from benchmarks.memory import observed_peak
from planner.analysis.memory import usage
from planner.base.errors import CaptureError, InputError, PinError, VerificationError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.ir.graph import Graph, Node
from tests.autopar.matrix import Recipe, decide

BATCH, LENGTH, WIDTH, WIDE = 8, 6, 16, 32
CLUSTER = ClusterSpec.local(4)

# No backward here is the derivative of its forward.


class Straight(Function):
    """Passes gradients straight through."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Tensor:
        return gradient


class Round(Straight):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(4 * x) / 4


class Clip(Function):
    """The identity, whose gradient it clips: that of a sum is not the sum of those of its terms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-4, 1e-4)


class Scale(Function):
    """The identity, whose gradient it scales."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.by, None


class BoundedRoot(Function):
    """A root with a bounded gradient, none at negative numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sqrt(x.abs())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found = gradient / (4 * x.abs() + 0.1)
        found[x < 0] = 0
        return found


class Normed(Function):
    """A fused norm; keeps a number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        inner = gradient * weight
        along = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        return along / 2, 1.5 * (gradient * normed).flatten(0, -2).sum(0), None


class Mixed(Function):
    """Two results, one that is not differentiated, and an operand to which no gradient goes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(y)
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        return x * y, positive, x + y

    @staticmethod
    def backward(ctx: Any, product: Tensor, _: Tensor, sum_: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return 2 * (product * y + sum_), None


class SetUp(Function):
    """In the newer style, with a keyword, a result that is no tensor, and a question about who wants gradients."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, by: float = 2.0) -> tuple[Tensor, str]:
        return x * weight * by, "scaled"

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, ctx.by = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        return 3 * gradient * weight, (gradient * x).sum((0, 1)) if ctx.needs_input_grad[1] else None, None


class Flat(Function):
    """Puts rows behind one another; keeps a shape, which is another on each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return 2 * x.reshape(-1, x.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 5 * gradient.view(ctx.shape)


class Product(Function):
    """A product with weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight / 2, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class ByBatch(Function):
    """Divides by the batch, the global one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.count = x.shape[0]
        return x / ctx.count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient / ctx.count


class OnValues(Function):
    """Looks at values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient if bool((x > 100).any()) else gradient.clamp(-1e-4, 1e-4)


class Sets(Function):
    """Reads neither its second operand nor, in backward, the gradient of its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 3 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] / 7, None


rounded = Round.apply  # as many models hold it


def _mixed(x: Tensor, weight: Tensor) -> Tensor:
    product, positive, sum_ = Mixed.apply(x, weight)
    return torch.where(positive, product, sum_)


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "round": lambda x, weight: rounded(x),
    "clip": lambda x, weight: Clip.apply(x),
    "scale": lambda x, weight: Scale.apply(x, 0.3),
    "root": lambda x, weight: BoundedRoot.apply(x),
    "normed": lambda x, weight: Normed.apply(x, weight, 1e-6),
    "mixed": _mixed,
    "set-up": lambda x, weight: SetUp.apply(x, weight, by=0.5)[0],
    "flat": lambda x, weight: Flat.apply(x).view(x.shape),
    "by-batch": lambda x, weight: ByBatch.apply(x),
    "sets": lambda x, weight: Sets.apply(x, weight),
    "on-values": lambda x, weight: OnValues.apply(x),
}


DECLARATIONS: dict[type[Function], tuple[str, dict[str, Any]]] = {
    Round: ("... -> ...", {"linear_backward": True}),
    Clip: ("... -> ...", {}),
    Scale: ("... -> ...", {"linear_backward": True}),
    BoundedRoot: ("... -> ...", {"linear_backward": True}),
    Normed: ("... h, h -> ... h", {"whole": "h", "linear_backward": True}),
    Mixed: ("b s h, h -> b s h, b s h, b s h", {"dtypes": [None, torch.bool, None], "linear_backward": True}),
    Product: ("b s i, o i -> b s o", {"linear_backward": True}),
    Sets: ("... h, h -> ... h", {}),
}
"""What is declared here; other Functions are not."""


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    """Declares them, and forgets what a test declares."""
    before = dict(DECLARED)
    DECLARED.update({cls: read(cls.__name__, text, **more) for cls, (text, more) in DECLARATIONS.items()})
    yield
    DECLARED.clear()
    DECLARED.update(before)


class Block(nn.Module):
    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.weight = nn.Parameter(torch.rand(WIDE) + 0.5)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.use(self.up(x), self.weight))


class Net(nn.Module):
    def __init__(self, *uses: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.layers = nn.ModuleList(map(Block, uses))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def net(use: str | Callable[[Tensor, Tensor], Tensor], layers: int = 2) -> tuple[Net, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Net(*[USES[use] if isinstance(use, str) else use] * layers), {"x": torch.randn(BATCH, LENGTH, WIDTH)}


def functions(model: nn.Module, batch: dict[str, Tensor], fold: bool = True) -> list[Node]:
    """The Functions of a model's graph."""
    return nodes_of(lower(capture(model, None, batch, fold=fold)))


def nodes_of(graph: Graph) -> list[Node]:
    """The Functions of a graph."""
    return [node for node in graph.nodes if node.op.startswith("function.")]


# ---- what it computes ------------------------------------------------------------------------------------------------


def test_gradients_are_the_functions_own() -> None:
    """A layer for each of them, under decisions of all kinds, in float64."""
    torch.manual_seed(0)
    original = reference(Net(*USES.values()), None, net("round")[1])
    mesh, cut = {"all": 2}, set()
    pinned = Recipe("data x tensor", {"data": 2, "tensor": 2})
    for recipe in (pinned, *(Recipe("random", mesh, seed=seed) for seed in (1, 2, 7))):
        assignment = decide(original, recipe)
        typecheck(original.traced.captured, assignment)
        agreement = simulate(original, assignment)
        assert agreement.agrees(), f"{recipe}: {locate(original, assignment)}"
        for node in nodes_of(assignment.space.graph):
            cut |= {(node.op, strategy.factor or strategy.kind) for strategy in assignment.choice(node).axes}
    named = {(n.op, name) for n in nodes_of(original.traced.graph) for dims in n["dims"] for name in dims if name}  # type: ignore[attr-defined]
    assert len(named) == 20
    assert len(named & cut) >= 19
    assert {("function.Sets", "invariant"), ("function.Mixed", "replicate"), ("function.OnValues", "invariant")} <= cut


@pytest.mark.parametrize(
    "use, pin",
    [
        ("root", {"data": 2, "recompute": "full"}),
        ("root", {"pipeline": 2, "micro_batches": 2}),
        ("by-batch", {"data": 2, "recompute": "full"}),
    ],
    ids=str,
)
def test_it_is_run_again_and_micro_batched(use: str, pin: dict[str, object]) -> None:
    model, batch = net(use)
    verify(model, ClusterSpec.local(2), example_kwargs=batch, pin=pin)


class Products(nn.Module):
    """Two products with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDE, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(Clip.apply(Product.apply(self.first(x), self.weight)), self.weight.t()).square().mean()


def test_a_fused_product_is_cut_by_columns_and_by_rows() -> None:
    """Terms of a sum over ranks come out of the second, and the clipped gradient in between is a slice."""
    _, batch = net("round")
    model = Products()
    first, clip, second = functions(model, batch)
    assert first["dims"] == second["dims"] == (("b", "s", "i"), ("o", "i"), ("b", "s", "o"))
    assert (first["flops"], clip["terms"]) == (2 * WIDTH, False)
    verify(model, ClusterSpec.local(2), example_kwargs=batch, pin={"tensor": 2})
    verify(model, ClusterSpec.local(2), example_kwargs=batch, pin={"data": 2})


# ---- along which dims it is cut --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use, dims, terms",
    [
        ("clip", (("...0", "...1", "...2"),) * 2, False),
        ("normed", (("...0", "...1", ""), ("",), ("...0", "...1", "")), True),
        ("on-values", (("", "", ""),) * 2, False),
    ],
)
def test_dims_are_those_that_were_declared(use: str, dims: object, terms: bool) -> None:
    node, *_ = functions(*net(use))
    assert (node["dims"], node["terms"], node["registered"]) == (dims, terms, use != "on-values")


def test_what_nobody_registered_is_reported_and_exact() -> None:
    model, batch = net("on-values")
    plan = autopar.plan(model, CLUSTER, example_kwargs=batch, pin={"data": 4})
    assert plan.coverage == {"OnValues (not registered)": 2}
    assert "not in the op table" in str(plan) and "2 x OnValues (not registered)" in str(plan)
    assert "OnValues" in "".join(plan.blocks[0].ops)
    assert autopar.verify(model, plan, example_kwargs=batch)


def test_one_that_runs_on_all_samples_forbids_micro_batches_by_name() -> None:
    model, batch = net("on-values")
    message = r"OnValues in layers.0.* is not registered, .* all samples at once: .* autopar.register .* or pin 'micro"
    with pytest.raises(PinError, match=message):
        autopar.plan(model, CLUSTER, example_kwargs=batch, pin={"micro_batches": 2})


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_known_of_libraries_holds(name: str) -> None:
    module, _, title = name.rpartition(".")
    check(getattr(importlib.import_module(module), title), SHIPPED[name], (torch.rand(4, 3, 6),))


# ---- how it is captured ----------------------------------------------------------------------------------------------


def test_equal_layers_are_traced_once() -> None:
    model, batch = net("normed", layers=6)
    captured = capture(model, None, batch, fold=True)
    assert len({call.body for call in captured.program.calls}) < len(captured.program.calls)
    assert lower(captured) == lower(capture(model, None, batch))


def test_functions_of_one_name_are_told_apart() -> None:
    """Made in one place with other numbers, and one Function with other numbers."""

    def scaled(by: float) -> type[Function]:
        class Scaled(Scale):
            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
                return gradient * by, None

        return Scaled

    made, others = [scaled(number) for number in (2.0, 3.0)], (0.5, 0.5, 0.25)
    uses = [lambda x, weight, cls=cls: cls.apply(x, 1.0) for cls in made]
    uses += [lambda x, weight, by=by: Scale.apply(x, by) for by in others]
    torch.manual_seed(0)
    model, (_, batch) = Net(*uses), net("round")
    nodes = functions(model, batch)
    assert [node.op for node in nodes] == ["function.Scaled", "function.Scaled#2", *["function.Scale"] * 3]
    assert [node["static"] for node in nodes[2:]] == ["(_, 0.5)", "(_, 0.5)", "(_, 0.25)"]
    verify(model, ClusterSpec.local(2), example_kwargs=batch, pin={"data": 2})


class Held(nn.Module):
    """What a Function is given beside tensors."""

    by = 3.0


class Takes(Function):
    """Takes an object; decides on values where that says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Held) -> Tensor:
        ctx.held = held
        return x * held.by

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.held.by > 3:
            return gradient if bool((gradient > 100).any()) else 2 * gradient, None
        return gradient * ctx.held.by, None


def test_what_is_known_of_a_function_belongs_to_the_program() -> None:
    """What was given to it goes with the last program that calls it, and no other model finds what was found out."""
    held = Held()
    gone = weakref.ref(held)
    model, batch = net(lambda x, weight, held=held: Takes.apply(x, held), layers=1)
    traced = trace(model, None, batch)
    (node,) = nodes_of(traced.graph)
    held.by = 4.0
    (later,) = functions(model, batch)
    assert (node["moves"], later["moves"]) == ((1.0, 1.0), (1.0, 2.0))
    plan = plan_traced(traced, ClusterSpec.local(1), Pins.parse({}), Training())
    program = copy.deepcopy(rewrite(traced.captured, plan.assignment, {}, torch.device("cpu")).module)
    expected = model(**batch).detach()
    parameters = {**dict(model.named_parameters()), **batch}
    inputs = [parameters[leaf.target if leaf.kind == "param" else leaf.name] for leaf in traced.captured.program.leaves]
    del held, model, traced, plan, node, later
    gc.collect()
    assert torch.equal(program(*inputs)[0].detach(), expected)
    assert gone() is not None
    del program
    gc.collect()
    assert gone() is None


def test_what_it_keeps_is_counted() -> None:
    model, batch = net("normed", layers=3)
    traced = trace(model, None, batch)
    plan = plan_traced(traced, ClusterSpec.local(2), Pins.parse({"data": 2}), Training())
    assert plan.predicted.peak_bytes == pytest.approx(observed_peak(model, traced, plan.assignment), rel=0.05)


# ---- what it keeps ----


def _keeping(saves: bool, holds: bool, asks: bool, on_values: bool) -> type[Function]:
    """A Function that lets autograd save its result, and holds its operand itself."""

    class Keeping(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            result = x.tanh()
            if saves:
                ctx.save_for_backward(result)
            if holds:
                ctx.x = x
            return result

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            found = gradient * ctx.saved_tensors[0] if asks else 2 * gradient
            found = found * ctx.x if holds else found
            return found if on_values and bool((gradient > 100).any()) else found / 2

    return Keeping


class Shift(nn.Module):
    """Parameters that nothing but the Function asks for again."""

    def __init__(self, use: Callable[[Tensor], Tensor]):
        super().__init__()
        self.shift, self.use = nn.Parameter(torch.randn(WIDTH)), use

    def forward(self, x: Tensor) -> Tensor:
        return x + self.use(x + self.shift)


def _shifts(use: Callable[[Tensor], Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(*(Shift(use) for _ in range(5)), Mean()), {"input": torch.randn(BATCH, LENGTH, WIDTH)}


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


@pytest.mark.parametrize(
    "saves, holds, asks, on_values",
    [
        (False, False, False, True),
        (True, False, True, True),
        (False, True, False, True),
        (False, True, False, False),
        (True, True, True, False),
        (True, False, False, False),
    ],
)
def test_what_backward_asks_for_is_made_again_and_nothing_else(
    saves: bool, holds: bool, asks: bool, on_values: bool
) -> None:
    cls = _keeping(saves, holds, asks, on_values)
    model, batch = _shifts(cls.apply)
    (node, *_) = functions(model, batch)
    assert node["saves"] == (("out0",) if asks else ())
    assert node["holds"] == (*(saves and not asks) * ("out0",), *holds * ("in0",))
    verify(model, ClusterSpec.local(2), example_kwargs=batch, pin={"data": 2, "zero": 3, "recompute": "full"})


def test_what_its_context_holds_does_not_leave_the_device() -> None:
    pins, saved = Pins.parse({"data": 1, "offload": "host", "activations": "all"}), []
    for holds in (False, True):
        model, batch = _shifts(_keeping(not holds, holds, not holds, False).apply)
        plan = plan_traced(trace(model, None, batch), ClusterSpec.local(1), pins, Training())
        saved.append([each.sizes for each in usage(plan.assignment).saved])
    size = 4 * BATCH * LENGTH * WIDTH
    assert saved == [[(size,)] * 6, [(size,)]], "five results and what the loss is the mean of; that alone"


def test_what_a_kernel_keeps_is_seen_in_its_example() -> None:
    model, batch = _shifts(lambda x: Blind.apply(x))
    pin = {"data": 2, "zero": 3, "recompute": "full"}
    autopar.register(Blind, "b s h -> b s h")
    with pytest.raises(VerificationError, match=r"predicted 4, observed 0\n  of .*Blind it is not known .* example="):
        verify(model, ClusterSpec.local(2), example_kwargs=batch, pin=pin)
    autopar.register(Blind, "b s h -> b s h", example=(torch.randn(2, 3, 4),))
    verify(model, ClusterSpec.local(2), example_kwargs=batch, pin=pin)


class Blind(Function):
    """A kernel that keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _with_data(3 * x, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _with_data(2 * gradient, gradient)


# ---- what is declared ------------------------------------------------------------------------------------------------


class Kernel(Function):
    """Runs where torch cannot look, as fused kernels do; its last dim is summed over in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _with_data(x * by + weight, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, _ = ctx.saved_tensors
        inner = gradient - gradient.mean(-1, keepdim=True)
        return _with_data(inner * x, x), _with_data((gradient * x).sum((0, 1)) * 2, x), None


class Gains(Kernel):
    """Clips gradients."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient.clamp(-0.1, 0.1), gradient.sum((0, 1)), None


def _with_data(result: Tensor, *tensors: Tensor) -> Tensor:
    assert all(t.data_ptr() for t in tensors)
    return result


def test_a_declared_kernel_is_sharded() -> None:
    model, batch = net(lambda x, weight: Kernel.apply(x, weight, 0.5))
    with pytest.raises(CaptureError, match=r"Kernel.forward does not run on tensors without data.*autopar.register"):
        capture(model, None, batch)
    example = torch.randn(4, 3, 6), torch.randn(6), 0.5
    autopar.register(Kernel, "b s h, h -> b s h", whole="h", example=example)
    node, *_ = functions(model, batch)
    assert node["dims"] == (("b", "s", ""), ("",), ("b", "s", ""))
    verify(model, CLUSTER, example_kwargs=batch, pin={"data": 2, "tensor": 2})
    assert functions(model.eval(), batch)


@pytest.mark.parametrize("function", DECLARATIONS)
def test_declarations_that_hold_are_taken(function: type[Function]) -> None:
    text, more = DECLARATIONS[function]
    second = torch.randn(10, 8) if function is Product else torch.randn(8)
    example = {Scale: [0.3], Normed: [second, 1e-6]}.get(function, [second] if "," in text else [])
    autopar.register(function, text, **more, example=(torch.randn(4, 6, 8), *example))
    assert DECLARED[function].observed is not None


@pytest.mark.parametrize(
    "function, signature, more, message",
    [
        (nn.Linear, "b -> b", {}, "takes a class derived from torch.autograd.Function, not <class .*Linear"),
        (Kernel, "b s h, h", {}, "'b s h, h' is no signature: write .* with one arrow"),
        (Kernel, "b s s, h -> b s h", {}, "names two dims of one tensor alike"),
        (Kernel, "b s h, h -> b s k", {}, "no operand has the dims 'k' of a result"),
        (Kernel, "b s h, h -> b s h", {"whole": ["d"]}, r"whole=\['d'\] are no names"),
        (Kernel, "b s h, h -> b s h", {"dtypes": [None] * 2}, "2 dtypes for the 1 results"),
        (Kernel, "b s h -> b s h", {"example": 3}, r"called on tensors of shapes \(4, 3, 6\), \(6,\): name every dim"),
        (Kernel, "b s h, s -> b s h", {"example": 3}, "'s' is both 3 and 6 long"),
        (Kernel, "b s h, h -> b s", {"example": 3}, r"results have shapes \(4, 3\), but they have \(4, 3, 6\)"),
        (
            Kernel,
            "b s h, h -> b s h",
            {"example": 3},
            "the gradient of operand 0 of slices along 'h', put together, differs .* Add 'h' to whole=",
        ),
        (
            Kernel,
            "... h, h, h -> ... h",
            {"example": 3},
            r"called on tensors of shapes \(4, 3, 6\), \(6,\): name every",
        ),
        (
            Gains,
            "... h, h -> ... h",
            {"linear_backward": True, "example": 3},
            "backward of Gains is not linear .* operand 0 differs, from terms of a sum, by .* Leave out linear",
        ),
    ],
)
def test_a_declaration_that_does_not_hold_is_refused(
    function: Any, signature: str, more: dict[str, Any], message: str
) -> None:
    if "example" in more:
        more = {**more, "example": (torch.randn(4, 3, 6), torch.randn(6), 0.5)}
    with pytest.raises(InputError, match=message):
        autopar.register(function, signature, **more)
    assert function not in DECLARED


def test_a_declaration_of_other_shapes_is_refused_where_it_is_called() -> None:
    autopar.register(Flat, "b s h -> b s h")
    with pytest.raises(CaptureError, match=r"Flat was registered as 'b s h -> b s h', so its results have shapes"):
        functions(*net("flat"))


# ---- what cannot be carried ------------------------------------------------------------------------------------------


class Drops(Straight):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) > 0.5)


class InPlace(Straight):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Listed(Straight):
    @staticmethod
    def forward(ctx: Any, several: list[Tensor]) -> Tensor:
        return several[0] + several[1]


class Boxed(Straight):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x * 2, object()


class Outside(Straight):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)


class Finds(Straight):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: nn.Linear) -> Tensor:
        return x * by.weight[:, 0]


ELSEWHERE = nn.Linear(1, WIDE)


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize(
    "use, message",
    [
        (lambda x, weight: Drops.apply(x), r"Drops draws random numbers \(aten.rand_like.default\).* as an argument"),
        (lambda x, weight: InPlace.apply(x + 0), r"InPlace writes into its argument in place .* work on a clone"),
        (
            lambda x, weight: Listed.apply([x, weight]) + x,
            r"Listed is given tensors in a list or the like, .* its own",
        ),
        (lambda x, weight: Boxed.apply(x)[0], r"Boxed returns a object: a plan carries tensors, numbers and text"),
        (
            lambda x, weight: Finds.apply(x, ELSEWHERE),
            r"Finds reads a parameter of shape \(32, 1\) that .* pass it",
        ),
        (lambda x, weight: Outside.apply(x), r"Outside.forward does not run .*: autopar.register\(Outside, 'b s h"),
    ],
)
def test_what_cannot_be_carried_is_refused(use: Callable[[Tensor, Tensor], Tensor], message: str, fold: bool) -> None:
    model, batch = net(use)
    with pytest.raises(CaptureError, match=message):
        capture(model, None, batch, fold=fold)


class Ramp(Function):
    """Makes a tensor for the device that is the default, as much code does that runs on one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.arange(x.shape[-1], dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.arange(gradient.shape[0], dtype=gradient.dtype)[:, None, None]


@pytest.mark.parametrize("pin", [{"data": 2}, {"tensor": 2}], ids=str)
def test_a_function_may_make_tensors_on_the_default_device(pin: dict[str, object]) -> None:
    model, batch = net(lambda x, weight: Ramp.apply(x) / WIDE, layers=1)
    verify(model, ClusterSpec.local(2), example_kwargs=batch, pin=pin)


# ---- what it finds by itself -----------------------------------------------------------------------------------------


def _finding(forward: Callable[[Tensor, Any], Tensor], backward: Callable[[Tensor, Any], Tensor]) -> type[Function]:
    """A Function that is given no tensor but the first, and finds others in what else it is given."""

    class Finding(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, found: Any) -> Tensor:
            ctx.found = found
            return forward(x, found)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return backward(gradient, ctx.found), None

    return Finding


def _written(x: Tensor, found: nn.Module) -> Tensor:
    found.get_buffer("most").fill_(3.0)
    return x * 2


def _same(tensor: Tensor, _: Any) -> Tensor:
    return tensor * 2


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize(
    "forward, backward, message",
    [
        (lambda x, found: x * found.most, _same, r"reads a buffer \(most\) of shape \(1,\) .* pass it to apply"),
        (lambda x, found: x * found.view, _same, r"Finding reads a buffer \(most\) of shape \(\)"),
        (_written, _same, r"Finding writes into a buffer \(most\) of shape \(1,\)"),
        (_same, lambda g, found: g * found.most, r"Finding reads a buffer \(most\) of shape \(1,\)"),
        (_same, lambda g, found: g * found.layers[0].weight.detach(), r"reads a parameter \(layers.0.weight\)"),
        (_same, _written, r"Finding writes into a buffer \(most\) of shape \(1,\)"),
    ],
)
def test_what_is_the_models_must_be_an_argument(
    forward: Callable[..., Tensor], backward: Callable[..., Tensor], message: str, fold: bool
) -> None:
    """The parallel module has its own: the original's would be read for ever."""
    cls = _finding(forward, backward)
    model, batch = net(lambda x, weight: cls.apply(x, model))
    model.register_buffer("most", torch.ones(1))
    model.view = model.get_buffer("most")[0]
    with pytest.raises(CaptureError, match=message):
        capture(model, None, batch, fold=fold)


def _decided(gradient: Tensor, found: Any) -> Tensor:
    return gradient * found.most if bool((gradient > 100).any()) else gradient


def _named(gradient: Tensor, _: Any) -> Tensor:
    return gradient * MODELS[0].most if bool((gradient > 100).any()) else gradient


def _asked(gradient: Tensor, _: Any) -> Tensor:
    return gradient.clamp(-1, 1) if bool((gradient > 100).any()) else gradient


MODELS: list[nn.Module] = []


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize(
    "backward, given, message",
    [
        (_decided, True, r"decides on the values .* it is given something that holds a (parameter|buffer) \("),
        (_asked, True, r"it is given something that holds a (parameter|buffer) .* Pass to apply\(\) the tensors"),
        (_named, False, r"its code names something that holds a (parameter|buffer) \("),
        (lambda g, found: g * ELSEWHERE.weight.sum() if bool(g.any()) else g, False, r"names .* parameter of shape"),
        (lambda g, found: g * found.zero * found.most, True, r"Finding reads a buffer \(most\) of shape \(1,\)"),
        (_asked, False, ""),
    ],
)
def test_what_cannot_be_watched_must_not_reach_the_models(
    backward: Callable[..., Tensor], given: bool, message: str, fold: bool
) -> None:
    """Where backward decides on values, what comes after is not seen."""
    cls = _finding(_same, backward)
    model, batch = net(lambda x, weight: cls.apply(x, model if given else None))
    model.register_buffer("most", torch.ones(1))
    model.zero = torch.tensor(0.0)
    MODELS[:] = [model]
    if not message:
        assert functions(model, batch, fold)
        return
    with pytest.raises(CaptureError, match=message):
        capture(model, None, batch, fold=fold)
    MODELS.clear()


def test_gradients_are_its_own_in_eval_mode() -> None:
    """Dropout is off, which says nothing about gradients; under no_grad nothing has a backward."""
    model, batch = net("scale")
    assert functions(model.eval(), batch)
    verify(model, ClusterSpec.local(2), example_kwargs=batch, pin={"data": 2})
    with torch.no_grad():
        assert not functions(*net("by-batch")), "which nobody declared"


@pytest.mark.parametrize("rows", [4, 256])
def test_what_backward_works_with_is_told_for_any_size(rows: int) -> None:
    """Three tensors beside the gradient that it gives, whatever the size of the example."""

    class Working(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            parts = [grad * number for number in range(1, 4)]
            return parts[0] + parts[1] - parts[2] * 0

    seen = observe(lambda tensors: [Working.apply(*tensors)], [torch.randn(rows, 8, requires_grad=True)])
    assert 3 <= seen.works <= 5
