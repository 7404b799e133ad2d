"""Eager attention with soft caps becomes one operator where that computes the same, and stays where it does not."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from autopar.capture.capture import capture
from autopar.operators.attention import attention
from tests.autopar.models import labels, tokens
from tests.autopar.verification.test_context import gemma2

BATCH = {"input_ids": tokens(length=8), "labels": labels(length=8)}


def caps(model: nn.Module) -> list[tuple[Any, Any]]:
    """The soft cap and the window of each attention that is the operator."""
    nodes = [node for node in capture(model, None, BATCH).graph.nodes if node.target is attention]
    return [(node.kwargs["softcap"], node.kwargs.get("window")) for node in nodes]


def test_soft_caps_and_windows_are_told() -> None:
    model = gemma2()
    assert caps(model) == [(1.0, 6), (1.0, None)]
    model.config.attn_logit_softcapping = None
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.attn_logit_softcapping = None
    assert not caps(model)


def test_a_function_that_does_something_else_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gemma2 import modeling_gemma2

    eager = modeling_gemma2.eager_attention_forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out, weights = eager(*args, **kwargs)
        return 2 * out, weights

    monkeypatch.setattr(modeling_gemma2, "eager_attention_forward", doubled)
    assert not caps(gemma2())
