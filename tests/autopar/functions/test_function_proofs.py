"""What is proved of Functions holds: every factor, every linear set and every claim on backward, in numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from autopar.functions.carry import Carried
from autopar.functions.describe import Factor, Seat, describe
from autopar.functions.joint import Operand
from autopar.functions.static import Hole
from autopar.graph.aten import tensor_type

torch.manual_seed(0)
X, SQUARE, WEIGHT = torch.randn(4, 6, 8).double(), torch.randn(8, 8).double(), torch.randn(8, 10).double()

# Name -> operands, forward of operands, backward of operands and gradients, how many factors there are.
CASES: dict[str, tuple[Sequence[Tensor], Callable[..., Any], Callable[..., Any], int]] = {
    "flip": ([X], lambda x: x.flip(0), lambda s, g: g.flip(0), 2),
    "cumsum": ([X], lambda x: x.cumsum(1), lambda s, g: g.flip(1).cumsum(1).flip(1), 2),
    "softmax": ([X], lambda x: x.softmax(-1), lambda s, g: g * s[0].softmax(-1), 2),
    "of the batch": ([X], lambda x: x * 1, lambda s, g: g - g.mean(0, keepdim=True), 2),
    "to a number": ([X], lambda x: x.sum(), lambda s, g: g * s[0], 3),
    "to a row": ([X], lambda x: x.sum(0), lambda s, g: g.expand_as(s[0]) * 2, 3),
    "to a mean": ([X], lambda x: x.mean(), lambda s, g: g * s[0], 0),
    "transposed": ([X], lambda x: x.transpose(0, 1) * 3, lambda s, g: g.transpose(0, 1), 3),
    "normed gradient": ([X], lambda x: x * 1, lambda s, g: g / g.norm(), 0),
    "gradient normed by rows": ([X], lambda x: x * 1, lambda s, g: g / (g.norm(dim=-1, keepdim=True) + 1e-3), 2),
    "masked gradient": ([X], lambda x: x * 2, lambda s, g: g.masked_fill(s[0] < -1, 3.0), 3),
    "no gradient read": ([X], lambda x: torch.ones_like(x), lambda s, g: s[0] * 1, 3),
    "by a size": ([X], lambda x: x * x.shape[1], lambda s, g: g, 2),
    "by the place": ([X], lambda x: x * torch.arange(6)[:, None], lambda s, g: g, 2),
    "triangle": ([X], lambda x: x.tril(), lambda s, g: g.tril(), 1),
    "pairs": ([X], lambda x: x.unflatten(0, (-1, 2)).sum(1), lambda s, g: g.repeat_interleave(2, 0), 3),
    "of sizes that are written": ([X], lambda x: x.view(-1, 2, 6, 8).sum(1), lambda s, g: g.repeat_interleave(2, 0), 1),
    "halves": ([X], lambda x: x.unflatten(0, (2, -1)).flip(0).flatten(0, 1), lambda s, g: g, 3),
    "product": (
        [X, WEIGHT], lambda x, w: x @ w, lambda s, g: (g @ s[1].t(), s[0].flatten(0, 1).t() @ g.flatten(0, 1)), 4
    ),
    "product, clipped": (
        [X, WEIGHT],
        lambda x, w: x @ w,
        lambda s, g: (g @ s[1].t(), (s[0].flatten(0, 1).t() @ g.flatten(0, 1)).clamp(-1, 1)),
        2,
    ),
    "apart": ([X, SQUARE], lambda x, w: (x * 2, w * w), lambda s, g, h: (g * 3, h * s[1]), 5),
    "apart, clipped": ([X, SQUARE], lambda x, w: (x * 2, w * w), lambda s, g, h: (g * 3, (h * s[1]).clamp(-1, 1)), 2),
    "by a mean": (
        [X, SQUARE],
        lambda x, w: x * w.mean(),
        lambda s, g: (g * s[1].mean(), (g * s[0]).sum() * torch.ones_like(s[1])),
        3,
    ),
}  # fmt: skip


def made(forward: Callable[..., Any], backward: Callable[..., Any]) -> type[Function]:
    class Case(Function):
        @staticmethod
        def forward(ctx: Any, *operands: Tensor) -> Any:
            ctx.save_for_backward(*operands)
            return forward(*operands)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return backward(ctx.saved_tensors, *gradients)

    return Case


class Step:
    """Results of a Function, and the gradients of its operands."""

    def __init__(self, cls: type[Function], operands: Sequence[Tensor], given: Sequence[Tensor] | None = None):
        operands = [t.clone().requires_grad_() for t in operands]
        found = cls.apply(*operands)
        self.results = [t.detach() for t in (found if isinstance(found, tuple) else (found,))]
        self.given = [torch.randn_like(t) for t in self.results] if given is None else given
        torch.autograd.backward(found, list(self.given))
        self.gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in operands]


def part(tensor: Tensor, seat: Seat, rank: int, ranks: int) -> Tensor:
    """A rank's slice, or strips, of a tensor."""
    if seat is None:
        return tensor
    dim, strips = seat
    shape = tensor.shape
    cut = tensor.reshape(*shape[:dim], strips, ranks, -1, *shape[dim + 1 :]).select(dim + 1, rank)
    return cut.reshape(*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :])


def whole(parts: Sequence[Tensor], seat: Seat) -> Tensor:
    """What slices are of, or what terms add up to."""
    if seat is None:
        return torch.stack(list(parts)).sum(0)
    dim, strips = seat
    shape = parts[0].shape
    cut = [each.reshape(*shape[:dim], strips, -1, *shape[dim + 1 :]) for each in parts]
    return torch.stack(cut, dim + 1).reshape(*shape[:dim], shape[dim] * len(parts), *shape[dim + 1 :])


def terms(tensor: Tensor, count: int) -> list[Tensor]:
    """Terms of a sum."""
    found = [torch.randn_like(tensor) for _ in range(count - 1)]
    return [*found, tensor - sum(found)]


@pytest.mark.parametrize("name", CASES)
def test_what_is_proved_holds_in_numbers(name: str) -> None:
    operands, forward, backward, count = CASES[name]
    cls = made(forward, backward)
    step = Step(cls, operands)
    carried = Carried(cls, [Hole(place) for place in range(len(operands))])
    kinds = [Operand(tuple(t.shape), t.dtype, t.device, True) for t in operands]
    found = describe(carried, kinds, [tensor_type("result", t, True) for t in step.results])
    assert len(found.factors) == count
    for factor in found.factors:
        tensors = zip([*operands, *step.results], factor.seats, strict=True)
        parts = [t.shape[seat[0]] // seat[1] for t, seat in tensors if seat]
        for ranks in (n for n in range(2, min(parts) + 1) if min(parts) % n == 0):
            assert not found.difference([(factor.seats, ranks)])
            check_factor(cls, operands, step, factor, ranks)
    said = dict(found.arguments)
    if said["terms"]:
        steps = [Step(cls, operands, given) for given in zip(*(terms(g, 3) for g in step.given), strict=True)]
        agree([sum(each) for each in zip(*(s.gradients for s in steps), strict=True)], step.gradients)
    for places in said["linear"]:  # type: ignore[attr-defined]
        split = [terms(t, 3) if place in places else [t] * 3 for place, t in enumerate(operands)]
        steps = [Step(cls, given, step.given) for given in zip(*split, strict=True)]
        agree([sum(each) for each in zip(*(s.results for s in steps), strict=True)], step.results)
        for place, gradients in enumerate(zip(*(s.gradients for s in steps), strict=True)):
            agree([gradients[0] if place in places else sum(gradients)], [step.gradients[place]])


def check_factor(cls: type[Function], operands: Sequence[Tensor], step: Step, factor: Factor, ranks: int) -> None:
    """Compare slices along a factor with the whole."""
    seats, results = factor.seats[: len(operands)], factor.seats[len(operands) :]
    alike = {place: terms(step.given[place], ranks) for place in factor.same}
    steps = []
    for rank in range(ranks):
        cut = [part(t, seat, rank, ranks) for t, seat in zip(operands, seats, strict=True)]
        given = [part(g, seat, rank, ranks) for g, seat in zip(step.given, results, strict=True)]
        steps.append(Step(cls, cut, [alike[at][rank] if at in alike else g for at, g in enumerate(given)]))
    for place, seat in enumerate(results):
        each = [s.results[place] for s in steps]
        agree([each[0] if place in alike else whole(each, seat)], [step.results[place]])
    agree([whole([s.gradients[at] for s in steps], seat) for at, seat in enumerate(seats)], step.gradients)


def agree(found: Sequence[Any], expected: Sequence[Tensor]) -> None:
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
