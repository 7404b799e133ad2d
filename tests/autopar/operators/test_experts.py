"""A mixture of experts as one operator, beside a sum over tokens and their experts, written out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autopar
from autopar.operators.expert import ACTIVATIONS, Expert
from planner.base.errors import InputError

TOKENS, K, EXPERTS, WIDTH, HIDDEN = 9, 2, 5, 8, 6

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def operands(expert: Expert, bias: bool, dtype: torch.dtype = torch.float64, seed: int = 0) -> Operands:
    """Tokens that no two go alike; the last expert gets none."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()

    wide = expert.made * HIDDEN
    up, down = (EXPERTS, wide, WIDTH), (EXPERTS, WIDTH, HIDDEN)
    if expert.transposed:
        up, down = (EXPERTS, WIDTH, wide), (EXPERTS, HIDDEN, WIDTH)
    indices = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:K] for _ in range(TOKENS)])
    biases = (made(EXPERTS, wide), made(EXPERTS, WIDTH)) if bias else (None, None)
    return made(TOKENS, WIDTH), indices, made(TOKENS, K), made(*up), made(*down), *biases


def written_out(given: Operands, expert: Expert) -> Tensor:
    x, indices, weights, up, down, up_bias, down_bias = given
    rows = []
    for token, (chosen, weight) in enumerate(zip(indices.tolist(), weights, strict=True)):
        row = torch.zeros_like(x[0])
        for e, w in zip(chosen, weight, strict=True):
            first, second = (up[e], down[e]) if expert.transposed else (up[e].T, down[e].T)
            made = x[token] @ first + (0 if up_bias is None else up_bias[e])
            if expert.gate == "none":
                between = ACTIVATIONS[expert.activation](made)
            else:
                gate, ups = (made[:HIDDEN], made[HIDDEN:]) if expert.gate == "halves" else (made[::2], made[1::2])
                if expert.limit:
                    gate, ups = gate.clamp(max=expert.limit), ups.clamp(-expert.limit, expert.limit)
                swish = gate * torch.sigmoid(gate * expert.alpha)
                between = (swish if expert.activation == "swish" else ACTIVATIONS[expert.activation](gate)) * (
                    ups + expert.offset
                )
            row = row + w * (between @ second + (0 if down_bias is None else down_bias[e]))
        rows.append(row)
    return torch.stack(rows)


def run(given: Operands, expert: Expert) -> Tensor:
    return autopar.experts(
        *given,
        activation=expert.activation,
        gate=expert.gate,
        alpha=expert.alpha,
        limit=expert.limit,
        offset=expert.offset,
        transposed=expert.transposed,
    )


def gradients(result: Tensor, given: Operands) -> Sequence[Tensor]:
    trained = [t for t in given if t is not None and t.is_floating_point()]
    return torch.autograd.grad(result, trained, torch.linspace(-1, 2, result.numel()).view_as(result).to(result.dtype))


EVERY = [
    *(Expert(gate=gate, transposed=transposed) for gate in ("halves", "pairs", "none") for transposed in (False, True)),  # type: ignore[arg-type]
    *(Expert(name) for name in ACTIVATIONS),
    Expert("swish", "pairs", 1.702, 1.0, 1.0, True),
    Expert("silu", "halves", limit=0.5),
]


@pytest.mark.parametrize("expert", EVERY, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_every_form_forward_and_backward(expert: Expert, bias: bool) -> None:
    given = operands(expert, bias)
    found, wanted = run(given, expert), written_out(given, expert)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for got, want in zip(gradients(found, given), gradients(wanted, given), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-4), (torch.bfloat16, 0.2), (torch.float16, 2e-2)])
def test_dtypes(dtype: torch.dtype, error: float) -> None:
    """As near to the same in float64 as its rounding allows."""
    given = operands(Expert(), True, dtype)
    wide = tuple(None if t is None else t.detach().double() if t.is_floating_point() else t for t in given)
    found = run(given, Expert())
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), run(wide, Expert()), rtol=error, atol=error)  # type: ignore[arg-type]


@pytest.mark.parametrize("indices", [
    torch.full((TOKENS, 1), 3),                        # all tokens to one expert
    torch.arange(EXPERTS).expand(TOKENS, EXPERTS),     # every token to every expert
    torch.zeros(0, 2, dtype=torch.int64),              # no token
], ids=["one expert", "all experts", "no tokens"])  # fmt: skip
def test_uneven_choices(indices: Tensor) -> None:
    x, _, _, *others = operands(Expert(), True)
    weights = torch.rand(indices.shape, dtype=torch.float64, requires_grad=True)
    given: Operands = (x[: len(indices)], indices, weights, *others)  # type: ignore[assignment]
    found = run(given, Expert())
    if not len(indices):
        assert found.shape == (0, WIDTH) and not any(g.any() for g in gradients(found, given))
        return
    wanted = written_out(given, Expert())
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for got, want in zip(gradients(found, given), gradients(wanted, given), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_leading_dims_and_a_router_in_float32() -> None:
    x, indices, weights, *others = operands(Expert(), False)
    flat = run((x, indices, weights.float(), *others), Expert())  # type: ignore[arg-type]
    shaped = run((x.view(3, 3, -1), indices.view(3, 3, -1), weights.float().view(3, 3, -1), *others), Expert())  # type: ignore[arg-type]
    assert flat.dtype == torch.float64 and torch.equal(shaped.view_as(flat), flat)


def test_autocast_computes_products_as_linear_does() -> None:
    x, indices, weights, up, down, *_ = operands(Expert(), False, torch.float32)
    indices, weights = indices[:, :1], weights[:, :1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run((x, indices, weights, up, down, None, None), Expert())
        rows = []
        for row, expert in zip(x, indices[:, 0], strict=True):
            gate, ups = F.linear(row.unsqueeze(0), up[expert]).chunk(2, dim=-1)
            rows.append(F.linear(F.silu(gate) * ups, down[expert]))
        wanted = torch.cat(rows) * weights
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)
    assert (found - run((x, indices, weights, up, down, None, None), Expert())).abs().max() > 1e-3, "in float32"


def test_prototypes_are_groups_with_a_choice_of_their_own() -> None:
    """As many layers of experts, each with one choice of its own group."""
    generator = torch.Generator().manual_seed(0)
    x, up = (torch.randn(s, dtype=torch.float64, generator=generator) for s in ((TOKENS, WIDTH), (6, 12, WIDTH)))
    down, weights = (torch.randn(s, dtype=torch.float64, generator=generator) for s in ((6, WIDTH, 6), (TOKENS, 2)))
    indices = torch.randint(0, 3, (TOKENS, 2), generator=generator)
    found = autopar.experts(x, indices, weights, up, down, prototypes=2)
    groups = (slice(0, 3), slice(3, 6))
    each = [autopar.experts(x, indices[:, [j]], weights[:, [j]], up[g], down[g]) for j, g in enumerate(groups)]
    torch.testing.assert_close(found, each[0] + each[1], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("index", [3, -1])
def test_an_index_is_of_the_group_of_its_prototype(index: int) -> None:
    """The first expert of the next group, or the last of the one before, is not what it means."""
    x, weights, up, down = (torch.randn(shape) for shape in ((4, WIDTH), (4, 2), (6, 12, WIDTH), (6, WIDTH, 6)))
    for place in range(2):
        indices = torch.zeros(4, 2, dtype=torch.int64)
        indices[2, place] = index
        with pytest.raises(InputError, match=r"goes to expert -1; there are 6, .* an index is not within its group"):
            autopar.experts(x, indices, weights, up, down, prototypes=2)


@pytest.mark.parametrize("change, message", [
    ({"prototypes": 2}, "prototypes is 2, with 5 experts and 2 chosen"),
    ({"indices": torch.zeros(TOKENS, 6, dtype=torch.int64)}, "they are .* with the same tokens"),
    ({"indices": torch.zeros(TOKENS, 6).long(), "weights": torch.rand(TOKENS, 6)}, "goes to 6 experts, and"),
    ({"indices": torch.zeros(TOKENS, K)}, "whole numbers"),
    ({"indices": torch.full((TOKENS, K), 5)}, "goes to expert 5; there are 5"),
    ({"indices": torch.full((TOKENS, K), -1)}, "goes to expert -1; there are 5"),
    ({"up": torch.rand(EXPERTS, WIDTH, 12)}, r"it is \(5, 12, 8\)"),
    ({"down": torch.rand(4, WIDTH, HIDDEN)}, r"down has shape \(4, 8, 6\)"),
    ({"up": torch.rand(12, WIDTH)}, "the matrices of all experts"),
    ({"up_bias": torch.rand(EXPERTS, HIDDEN)}, r"up_bias has shape \(5, 6\); it is \(5, 12\)"),
    ({"activation": "swiglu"}, "no activation 'swiglu'; known: silu"),
    ({"gate": "left"}, "gate is 'left'"),
    ({"alpha": 1.7}, "alpha is of 'swish' alone"),
    ({"alpha": float("nan"), "activation": "swish"}, "alpha is nan"),
    ({"limit": -1.0}, "limit is -1.0; it is a finite number, not below 0"),
    ({"limit": "7"}, "limit is '7'"),
    ({"offset": 1.0, "gate": "none", "up": torch.rand(EXPERTS, HIDDEN, WIDTH)}, "added to ups beside gates"),
    ({"weights": torch.ones(TOKENS, K, dtype=torch.int64)}, "weights are of dtype torch.int64"),
    ({"up": [torch.rand(12, WIDTH)] * EXPERTS}, "up is a list, and it is a tensor"),
])  # fmt: skip
def test_bad_input(change: dict[str, object], message: str) -> None:
    names = ("x", "indices", "weights", "up", "down", "up_bias", "down_bias")
    given = dict(zip(names, operands(Expert(), False, torch.float32), strict=True))
    with pytest.raises(InputError, match=message):
        autopar.experts(**{**given, **change})  # type: ignore[arg-type]
