"""Repeated heads of keys and values are shared instead, where no way to divide heads is lost."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import autopar
from autopar.capture.capture import capture
from tests.autopar.models import labels, llama, tokens
from tests.autopar.workers import cluster_of

SHARED, REPEATED = True, False


class Repeats(nn.Module):
    """Attention whose heads of keys and values are repeated, side by side or one after the other."""

    def __init__(self, heads: int, kv: int, dtype: torch.dtype, in_turn: bool = False):
        super().__init__()
        self.q, self.kv = nn.Linear(64, heads * 4, dtype=dtype), nn.Linear(64, kv * 8, dtype=dtype)
        self.heads, self.times, self.in_turn = heads, heads // kv, in_turn

    def forward(self, x: Tensor, hides: bool = False) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (self._repeated(t.unflatten(-1, (-1, 4)).transpose(1, 2)) for t in self.kv(x).chunk(2, -1))
        mask = torch.zeros(x.shape[1], x.shape[1], dtype=q.dtype) if hides else None
        mask = mask if mask is None else mask + x[0, :, :1]
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None).square().mean()

    def _repeated(self, t: Tensor) -> Tensor:
        b, h, n, d = t.shape
        at = 1 if self.in_turn else 2
        size = (b, self.times, h, n, d) if self.in_turn else (b, h, self.times, n, d)
        return t.unsqueeze(at).expand(size).reshape(b, h * self.times, n, d)


def attention(graph: fx.Graph) -> list[bool]:
    """Whether each attention shares heads."""
    target = torch.ops.aten.scaled_dot_product_attention.default
    return [node.kwargs.get("enable_gqa", False) for node in graph.nodes if node.target is target]


@pytest.mark.parametrize("heads, kv, dtype, in_turn, hides, found", [
    (16, 8, torch.bfloat16, False, False, SHARED), (8, 1, torch.bfloat16, False, False, SHARED),
    (4, 2, torch.bfloat16, False, False, REPEATED), (12, 2, torch.float16, False, False, REPEATED),
    (16, 8, torch.float32, False, False, REPEATED), (16, 8, torch.bfloat16, True, False, REPEATED),
    (16, 8, torch.bfloat16, False, True, REPEATED),
])  # fmt: skip
def test_heads_are_shared_where_nothing_is_lost(
    heads: int, kv: int, dtype: torch.dtype, in_turn: bool, hides: bool, found: bool
) -> None:
    graph = capture(Repeats(heads, kv, dtype, in_turn), (torch.randn(2, 6, 64, dtype=dtype), hides)).graph
    assert attention(graph) == [found]
    assert found == (not [node for node in graph.nodes if "expand" in str(node.target)])


def test_a_model_of_transformers_shares_heads_and_computes_the_same() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 8}
    model, batch = llama(**sizes).bfloat16(), {"input_ids": tokens(length=16), "labels": labels(length=16)}
    assert attention(capture(model, None, batch).graph) == [SHARED] * 2
    pin = {"context": 2, "tensor": 2, "context_kind": "zigzag", "pipeline": 1, "micro_batches": 1}
    found = autopar.verify(model, cluster_of(4), example_kwargs=batch, pin=pin)
    assert found.verdict == "verified", str(found)
