"""Masks: those that say what ``is_causal`` says, or nothing, are discarded; no other is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.capture.capture import Captured, capture
from autopar.capture.constant_propagation import Limits, argument, evaluate
from autopar.capture.passes.causal_masks import ATTENTION, meaning
from autopar.operators.attention import attention as windowed
from planner.ops.attention import Sight
from tests.autopar.models import gpt2, labels, llama, tokens

INF = float("inf")
SIZE = 6


class Attends(nn.Module):
    """Attention of ``x`` to itself under a mask."""

    def __init__(self, mask: Callable[[Tensor], Tensor], heads: int = 2):
        super().__init__()
        self.mask, self.heads = mask, heads
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        q = (x * self.scale).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=self.mask(x))


def numbers(x: Tensor) -> tuple[Tensor, Tensor]:
    positions = torch.arange(x.shape[1], device=x.device)
    return positions[:, None], positions[None, :]


def band(x: Tensor, low: int, high: int) -> Tensor:
    """True where ``low <= query - key <= high``."""
    rows, columns = numbers(x)
    return (rows - columns >= low) & (rows - columns <= high)


def square(x: Tensor, value: Any, **kwargs: Any) -> Tensor:
    return torch.full((x.shape[1], x.shape[1]), value, device=x.device, **kwargs)


CAUSAL = {
    "tril": lambda x: square(x, True).tril(),
    "compared": lambda x: numbers(x)[0] >= numbers(x)[1],
    "inverted": lambda x: ~square(x, True).triu(1),
    "expanded": lambda x: (numbers(x)[0] >= numbers(x)[1]).expand(x.shape[0], 1, -1, -1),
    "float": lambda x: square(x, -INF).triu(1),
    "filled": lambda x: square(x, 0.0).masked_fill(numbers(x)[0] < numbers(x)[1], -INF),
    "torch's": lambda x: nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device),
    "least number": lambda x: square(x, torch.finfo(torch.float32).min).triu(1),
    "window that holds all": lambda x: band(x, 0, SIZE - 1),
    "with ones like the input": lambda x: (
        torch.ones_like(x[:, 0, 0], dtype=torch.bool).view(-1, 1, 1, 1) & square(x, True).tril()
    ),
}

NOTHING = {
    "ones": lambda x: square(x, True),
    "zeros": lambda x: square(x, 0.0),
    "a row": lambda x: torch.ones(1, x.shape[1], dtype=torch.bool, device=x.device),
    "wide window": lambda x: band(x, -SIZE, SIZE),
}

WINDOWS = {
    "one": (1, lambda x: band(x, 0, 0)),
    "two": (2, lambda x: band(x, 0, 1)),
    "all but one": (SIZE - 1, lambda x: band(x, 0, SIZE - 2)),
    "float": (3, lambda x: square(x, 0.0).masked_fill(~band(x, 0, 2), -INF)),
    "expanded": (3, lambda x: band(x, 0, 2).expand(x.shape[0], 1, -1, -1)),
    "both halves": (3, lambda x: square(x, True).tril() & square(x, True).triu(-2)),
}

OTHER = {
    "diagonal left out": lambda x: square(x, -INF).triu(1).masked_fill(numbers(x)[0] == numbers(x)[1], -1.0),
    "strict": lambda x: square(x, True).tril(-1),
    "one ahead": lambda x: square(x, True).tril(1),
    "anticausal": lambda x: square(x, True).triu(),
    "one element": lambda x: square(x, True).tril() & ~((numbers(x)[0] == SIZE - 1) & (numbers(x)[1] == 1)),
    "one ahead in one row": lambda x: square(x, True).tril() | ((numbers(x)[0] == 2) & (numbers(x)[1] == 3)),
    "a bias": lambda x: square(x, 1.0).triu(1),
    "finite": lambda x: square(x, -1e30).triu(1),
    "finite of narrow numbers": lambda x: square(x, torch.finfo(torch.half).min, dtype=torch.half).triu(1).float(),
    "window that begins late": lambda x: band(x, 1, 3),
    "window on both sides": lambda x: band(x, -2, 2),
    "two windows": lambda x: torch.where(numbers(x)[0] < 3, band(x, 0, 1), band(x, 0, 2)),
    "sign": lambda x: square(x, INF).triu(1),
    "one sequence": lambda x: square(x, True).tril() | (torch.arange(len(x), device=x.device) == 1).view(-1, 1, 1, 1),
    "of the input": lambda x: square(x, True).tril() & (x[:, :, 0] > -INF).view(len(x), 1, 1, -1),
    "random": lambda x: square(x, True).tril() & (torch.rand_like(x[0, :, :SIZE]) > -1),
}


class Run(fx.Interpreter):
    """Runs a captured graph, whose views no longer mind how memory is ordered."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)


def run(model: nn.Module, found: Captured, **inputs: Tensor) -> Tensor:
    """The first output of a captured graph, with the model's parameters."""
    stored = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    of = {"input": lambda name, target: inputs[target], "const": lambda name, target: found.constants[name]}
    values = [of.get(kind, lambda _, t: stored[t])(name, target) for name, (kind, target) in found.leaves.items()]
    result: Tensor = Run(fx.GraphModule({}, found.graph)).run(*values)[0]
    return result


def attention(graph: fx.Graph) -> list[tuple[bool, bool]]:
    """(whether it has a mask, whether it is causal) of each attention."""
    nodes = [node for node in graph.nodes if node.target in (ATTENTION, windowed)]
    assert nodes
    return [(argument(node, "attn_mask") is not None, argument(node, "is_causal")) for node in nodes]


def windows(graph: fx.Graph) -> list[int | None]:
    """The windows of attentions; ``None`` of those that see as far as there are keys."""
    targets = {node: node.target for node in graph.nodes if node.target in (ATTENTION, windowed)}
    return [node.kwargs["window"] if target is windowed else None for node, target in targets.items()]


def captured(mask: Callable[[Tensor], Tensor], device: str = "cpu") -> fx.Graph:
    return capture(Attends(mask), (torch.randn(2, SIZE, 8, device=device),)).graph


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_causal_masks_become_is_causal(name: str, device: str):
    with torch.device(device):
        graph = captured(CAUSAL[name], device)
    assert attention(graph) == [(False, True)]
    assert not [node for node in graph.nodes if "arange" in node.name or "full" in node.name], "dead code is left"


@pytest.mark.parametrize("name", NOTHING)
def test_masks_that_hide_nothing_are_dropped(name: str):
    assert attention(captured(NOTHING[name])) == [(False, False)]


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_told(name: str):
    window, mask = WINDOWS[name]
    graph = captured(mask)
    assert attention(graph) == [(False, True)] and windows(graph) == [window]


@pytest.mark.parametrize("name", OTHER)
def test_other_masks_stay(name: str):
    assert attention(captured(OTHER[name])) == [(True, False)]


@pytest.mark.parametrize("name", [*CAUSAL, *OTHER, *WINDOWS])
def test_the_result_is_the_same(name: str):
    masks = CAUSAL | OTHER | {name: mask for name, (_, mask) in WINDOWS.items()}
    model, x = Attends(masks[name]).double(), torch.randn(2, SIZE, 8, dtype=torch.float64)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    found = run(model, capture(model, (x,)), x=x)
    torch.testing.assert_close(found, expected, equal_nan=True)


class Crosses(nn.Module):
    """More keys than queries, under a lower triangle."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)


def test_a_triangle_over_more_keys_than_queries_stays():
    graph = capture(Crosses(), (torch.randn(2, 2, 4, 8), torch.randn(2, 2, 6, 8))).graph
    assert attention(graph) == [(True, False)]


def test_a_mask_that_gives_the_result_its_batch_stays():
    def mask(x: Tensor) -> Tensor:
        return torch.ones(3, 1, SIZE, SIZE, dtype=torch.bool).tril()

    graph = capture(Attends(mask), (torch.randn(1, SIZE, 8),)).graph
    assert attention(graph) == [(True, False)]


class Holds(nn.Module):
    """A mask that the model holds as a plain attribute, which a plan keeps as it was captured."""

    def __init__(self) -> None:
        super().__init__()
        self.held = torch.ones(16, 16, dtype=torch.bool).tril()

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=self.held[: x.shape[1], : x.shape[1]])


def test_a_mask_that_the_model_holds_is_known():
    assert attention(capture(Holds(), (torch.randn(2, SIZE, 8),)).graph) == [(False, True)]


class HoldsBuffer(Holds):
    def __init__(self) -> None:
        super().__init__()
        held = self.held
        del self.held
        self.register_buffer("held", held)


def test_a_buffer_may_change_and_is_not_known():
    assert attention(capture(HoldsBuffer(), (torch.randn(2, SIZE, 8),)).graph) == [(True, False)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.inner(x)
        return x + F.scaled_dot_product_attention(y, y, y, attn_mask=mask)


class Layers(nn.Module):
    """Windows of one length in every second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        masks = [square(x, True).tril(), band(x, 0, 2)]
        for i, layer in enumerate(self.layers):
            x = layer(x, masks[i % 2])
        return x


def test_layers_of_one_body_are_told_apart_by_their_masks():
    model, x = Layers(), torch.randn(2, SIZE, 8)
    folded, whole = (capture(model, (x,), fold=fold) for fold in (True, False))
    assert attention(folded.graph) == [(False, True)] * 6 and windows(folded.graph) == [None, 3] * 3
    assert str(folded.graph) == str(whole.graph)
    blocks = [call.body for call in folded.program.calls if call.traced or call.body.operands]
    assert len(set(blocks)) < len(blocks), "layers with equal masks should share a body"


def judged(mask: Callable[[Tensor], Tensor], length: int, limits: Limits) -> Sight | None:
    """What a mask over ``length`` positions says, within limits."""
    with torch.device("meta"):
        graph = torch.export.export(Attends(mask), (torch.randn(2, length, 8),)).graph_module.graph
    (node,) = (argument(node, "attn_mask") for node in graph.nodes if node.target is ATTENTION)
    return meaning(evaluate(graph, [node], {}, limits), node, length, length)


@pytest.mark.parametrize("length", [5, 64, 67])
@pytest.mark.parametrize(
    "mask", [CAUSAL["tril"], CAUSAL["float"], OTHER["one element"], OTHER["strict"], WINDOWS["two"][1]]
)
def test_parts_decide_alike(mask: Callable[[Tensor], Tensor], length: int):
    by_parts = judged(mask, length, Limits(small=300, part=50))
    assert by_parts == judged(mask, length, Limits())
    if mask is WINDOWS["two"][1]:
        assert by_parts == Sight(True, 2)
        return
    causal = mask in CAUSAL.values() or (mask is OTHER["one element"] and length < SIZE)
    assert by_parts == (Sight(True) if causal else None)


def test_a_mask_beyond_the_limits_stays():
    assert judged(CAUSAL["compared"], 64, Limits(small=300, part=50)) == Sight(True)
    assert judged(CAUSAL["compared"], 64, Limits(small=300, part=50, effort=1000)) is None


def mistral(window: int) -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=window,
    )  # fmt: skip
    return MistralForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "window"),
    [(llama, None), (gpt2, None), (lambda: mistral(8), None), (lambda: mistral(7), 7), (lambda: mistral(4), 4)],
    ids=["llama", "gpt2", "mistral, window 8", "mistral, window 7", "mistral, window 4"],
)
def test_transformers_masks(make: Callable[[], nn.Module], window: int | None):
    batch = {"input_ids": tokens(length=8), "labels": labels(length=8)}
    graph = capture(make(), None, batch).graph
    assert attention(graph) == [(False, True)] * 2 and windows(graph) == [window] * 2
    sizes = {tuple(node.meta["val"].shape) for node in graph.nodes if isinstance(node.meta.get("val"), Tensor)}
    assert (8, 1, 8, 8) not in sizes


@pytest.mark.parametrize("make", [llama, gpt2])
def test_loss_and_gradients_are_those_of_the_model(make: Callable[[], nn.Module]):
    torch.manual_seed(0)
    model = make().double().eval()
    batch = {"input_ids": tokens(), "labels": labels()}
    expected = model(**batch).loss
    expected.backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    found = capture(model, None, batch)
    assert all(told == (False, True) for told in attention(found.graph))
    loss = run(model, found, **batch)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-9, atol=1e-12, msg=name)


class Translates(nn.Module):
    """``nn.Transformer``, which asks a mask for its values unless it is told whether it is causal."""

    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.mask = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True), mask

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(x, y, tgt_mask=self.mask(y))


@pytest.mark.parametrize("fold", [True, False], ids=["folded", "whole"])
@pytest.mark.parametrize(
    "mask, causal", [(CAUSAL["torch's"], True), (lambda y: square(y, -INF).triu(2), False)], ids=["causal", "wider"]
)
def test_torchs_transformer_takes_a_mask_without_reading_it(mask: Callable[[Tensor], Tensor], causal: bool, fold: bool):
    model = Translates(lambda y: mask(y).to(y.dtype)).double()
    batch = {"x": torch.randn(2, 5, 8, dtype=torch.float64), "y": torch.randn(2, SIZE, 8, dtype=torch.float64)}
    before = nn.modules.transformer._detect_is_causal_mask
    found = capture(model, None, batch, fold=fold)
    assert nn.modules.transformer._detect_is_causal_mask is before
    assert attention(found.graph) == [(False, False)] * 2 + [(not causal, causal), (False, False)] * 2
    torch.testing.assert_close(run(model, found, **batch), model(**batch))
