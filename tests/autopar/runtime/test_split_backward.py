"""Backward in two parts: inputs first, weights later, together what one backward finds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from autopar.runtime.autograd.split_backward import backward_of_inputs

Model = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
MODELS: dict[str, Model] = {
    "a chain": lambda x, a, b, c: (torch.tanh(torch.tanh(x @ a) @ b) @ c,),
    "a weight twice": lambda x, a, b, c: (torch.tanh(torch.tanh(x @ a) @ a) @ b + x * c.sum(),),
    "a value of weights alone, read here and sent on": lambda x, a, b, c: (torch.tanh(x @ a + b @ c), b @ c),
    "an output that is an input": lambda x, a, b, c: (x, torch.tanh(x @ a) @ b),
    "views": lambda x, a, b, c: ((x @ a).t(), (x @ b).view(-1)),
    "a weight that nothing reads": lambda x, a, b, c: (x @ a,),
    "a weight that joins the ways of two others": lambda x, a, b, c: (torch.tanh(x @ (a + c)) @ (b + c),),
    "no way to the input": lambda x, a, b, c: (a @ b,),
    "products of what weights make": lambda x, a, b, c: ((x @ (a @ b)) @ (a * c),),
    "what weights make, and what is made of that": lambda x, a, b, c: ((x @ (a @ b)) @ ((a @ b) * c) @ c,),
    "weights that come together": lambda x, a, b, c: (together(x, torch.stack([a, b, c])),),
}


def together(x: Tensor, weights: Tensor) -> Tensor:
    a, b, c = weights.unbind()
    return torch.tanh(torch.tanh(x @ a) @ b) @ c


def leaves() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(4)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("by_edge", [False, True], ids=["tensors", "edges"])
def test_both_parts_are_one_backward(name: str, by_edge: bool) -> None:
    whole, parts = leaves(), leaves()
    outputs, expected = MODELS[name](*parts), MODELS[name](*whole)
    gradients = [torch.randn_like(t) for t in outputs]
    torch.autograd.backward(expected, gradients)
    starts = [get_gradient_edge(t) if by_edge else t for t in outputs]
    del outputs
    found, later = backward_of_inputs(tuple(zip(starts, gradients, strict=True)), parts[:1], parts[1:])
    assert all(weight.grad is None for weight in parts[1:])
    later.run()
    for mine, theirs in zip((found[0], *(weight.grad for weight in parts[1:])), whole, strict=True):
        assert (mine is None) == (theirs.grad is None)
        assert mine is None or (theirs.grad is not None and torch.allclose(mine, theirs.grad, rtol=1e-12, atol=1e-14))


def test_weights_add_up_over_micro_batches() -> None:
    x, a, b, c = leaves()
    kept = []
    for micro_batch in range(3):
        outputs = MODELS["a weight twice"](x * (micro_batch + 1), a, b, c)
        start = tuple((t, torch.ones_like(t)) for t in outputs)
        kept.append(backward_of_inputs(start, [x], [a, b, c])[1])
    for later in reversed(kept):
        later.run()
    whole = leaves()
    sum(
        MODELS["a weight twice"](whole[0] * (micro_batch + 1), *whole[1:])[0].sum() for micro_batch in range(3)
    ).backward()  # type: ignore[union-attr]
    for mine, theirs in zip((a, b, c), whole[1:], strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-12)


def test_what_weights_come_from_together_is_undone_once() -> None:
    x, *weights = leaves()
    stacked, came = torch.stack(weights), list[Tensor]()
    stacked.register_hook(came.append)  # type: ignore[no-untyped-call]
    output = together(x, stacked)
    _, later = backward_of_inputs(((output, torch.ones_like(output)),), [x], weights)
    assert not came
    later.run()
    assert len(came) == 1 and all(weight.grad is not None for weight in weights)
