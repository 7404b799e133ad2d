"""Eager attention with soft caps becomes one operator where that computes the same, and stays where it does not."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import autopar
from autopar.capture.capture import capture
from autopar.capture.hooks import check_hooks
from autopar.operators.attention import attention
from tests.autopar.models import labels, tokens
from tests.autopar.verification.test_context import gemma2, text
from tests.autopar.workers import cluster_of

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


def test_weights_are_returned_to_who_asks_for_them() -> None:
    batch = {**text(), "use_cache": False, "output_attentions": True}
    found = autopar.verify(
        gemma2(), cluster_of(2), example_kwargs=batch, pin={"tensor": 2, "pipeline": 1, "micro_batches": 1}
    )
    assert found.verdict == "verified" and found.agreement is not None
    assert found.agreement.outputs.keys() == {"loss", "logits", "attentions.0", "attentions.1"}
    asked, hooked = gemma2(), gemma2()
    asked.config.output_attentions = True
    hooked.model.layers[0].self_attn.register_forward_hook(lambda *_: None)  # type: ignore[index, union-attr]
    assert (len(caps(asked)), len(caps(hooked))) == (0, 1)


def test_a_model_that_was_asked_for_weights_before_is_captured_as_one_that_was_not() -> None:
    model = gemma2()
    model(**text(), output_attentions=True)
    assert model.model.layers[0].self_attn._forward_hooks  # type: ignore[index, union-attr]
    assert caps(model) == [(1.0, 6), (1.0, None)]
    assert not check_hooks(model)
