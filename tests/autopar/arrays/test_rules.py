"""Every rule against the operator run once for each member: values, and gradients of parameters and inputs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.arrays.rules.table import STACKING

MEMBERS = 3
Results = dict[str, Tensor]


class Operators(nn.Module):
    """Some operators on a parameter ``w`` of ``[4, 6]``, which differs by member, and on inputs."""

    def __init__(self, compute: Callable[..., Results]):
        super().__init__()
        self.w = nn.Parameter(0.2 + torch.rand(4, 6, dtype=torch.float64))
        self.compute = (compute,)

    def forward(self, x: Tensor, own: Tensor, ids: Tensor) -> Results:
        (compute,) = self.compute
        return compute(self.w, x, own, ids)


def pointwise(w: Tensor, x: Tensor, own: Tensor, ids: Tensor) -> Results:
    row, number = w[0], w.sum()
    return {
        "broadcast": w * x[0] + row - own,
        "rows": row[:, None] * w.new_ones(6, 2) + x[0, 0],
        "number": number * x + number,
        "narrow": (x.detach().float() * number.detach()).double(),
        "two": torch.where(w > 0.7, w, x) + torch.maximum(w, own) / (1 + own.abs()),
        "masked": w.masked_fill(x > 0.5, 0.0).tanh() + torch.lerp(w, own, 0.25),
        "counted": w * ((w > 0.7) / (1 + (w > 0.7).sum())),
        "narrow choice": torch.where(w.detach() > 0.7, w.detach().float(), number.detach()).double(),
        "cast": (w > own).to(torch.float64) * w,
        "like": torch.zeros_like(w) + w.new_full((4, 6), 2.0) * w,
        "clamped": w.clamp(0.3, 0.9) ** 2,
    }


def shapes(w: Tensor, x: Tensor, own: Tensor, ids: Tensor) -> Results:
    a, b = w.chunk(2, dim=-1)
    first, *_ = w.unbind(0)
    values, places = w.sort(dim=1)
    return {
        "view": w.view(2, 2, -1).permute(2, 0, 1),
        "flat": w.t().reshape(-1)[:5] * x[:, 1:].contiguous().view(-1)[:5],
        "expand": w[0].expand(2, 6) * w[:2].unsqueeze(0).expand(3, -1, -1)[0],
        "repeat": w.repeat(2, 1, 3)[1],
        "parts": a + b + own.split(3, 1)[0],
        "unbound": first,
        "joined": torch.cat([w, x], 1) + torch.cat([own, w], dim=-1),
        "stacked": torch.stack([w, x], -1).squeeze(0).movedim(-1, 0),
        "rolled flat": torch.roll(w, 2),
        "rolled": torch.roll(w, 1, 0).flip(-1).transpose(-1, 0),
        "sorted": values + places,
        "top": w.topk(2, 0).values,
        "gathered": w.gather(1, ids) + own.gather(1, ids),
        "indexed": w[:, torch.tensor([0, 2, 2])] + w[torch.tensor([1, 1, 3, 0])][:, :3],
        "selected": w.index_select(1, torch.tensor([5, 0])),
        "added": w.index_add(1, torch.tensor([5, 0, 5]), own[:, :3]) + x.index_add(-2, torch.tensor([1]), w[:1]),
        "stacked numbers": torch.stack([w.sum(), x.sum(), own.sum()], -1),
        "padded": F.pad(w, (1, 2, 0, 1), value=0.5),
        "unfolded": w.unfold(1, 2, 2).unflatten(0, (2, 2)),
        "triangle": w.tril(),
    }


def reductions(w: Tensor, x: Tensor, own: Tensor, ids: Tensor) -> Results:
    mean = w.mean()
    return {
        "sum": (w * x).sum(),
        "sum of a number": mean.sum() + mean.mean(),
        "sums": w.sum(0) + w.mean(-2, keepdim=True)[0],
        "extrema": w.max() + w.min() + w.amax(1).sum(),
        "max of rows": w.max(dim=1).values,
        "variance": w.var(1) + w.std() + w.var(),
        "softmax": w.softmax(-1) + own.log_softmax(0),
        "sums of exponentials": w.logsumexp(1),
        "scan": w.cumsum(0),
        "norm": torch.linalg.vector_norm(w, dim=1),
        "truth": (w > 0.5).any() * w.sum() + (w > 0.1).all(1) * w[:, 0],
        "gated": F.glu(w),
    }


def products(w: Tensor, x: Tensor, own: Tensor, ids: Tensor) -> Results:
    square, vector = w @ w.t(), w[0]
    cube = w.view(2, 2, 6)
    return {
        "shared input": F.linear(x, w) + F.linear(x.view(2, 2, 6), w, w[:, 0]).view(4, 4),
        "own input": F.linear(own, w, w[:, 1]),
        "own input, shared weight": F.linear(own, x),
        "vectors": w @ vector + w.t() @ w[:, 0] @ vector + x @ vector,
        "batches": cube @ w.t() + torch.bmm(cube, cube.transpose(1, 2)) @ x[:2, :4],
        "added": torch.addmm(w[:, 0], w, own.t(), beta=0.5, alpha=2),
        "added batches": torch.baddbmm(square[:2, :2], cube, cube.transpose(1, 2)),
        "einsum": torch.einsum("ij,kj->ik", w, x) + torch.einsum("ij,kj,k->ik", w, own, w[:, 0]),
        "matrix and vector": torch.mv(w, vector) + torch.addmv(w[:, 0], w, vector),
    }


def convolutions(w: Tensor, x: Tensor, own: Tensor, ids: Tensor) -> Results:
    kernel = torch.cat([w, w * 2], 1).view(4, 2, 6)[:, :, :3]
    signal, images = x.view(2, 2, 6), own.view(2, 2, 6)
    plane = torch.cat([w, own], 0).view(2, 4, 2, 3)
    window = w[:, :4].reshape(2, 2, 2, 2)
    return {
        "shared input": F.conv1d(signal, kernel, w[:, 0]),
        "own input": F.conv1d(images, kernel, padding=1),
        "groups": F.conv1d(torch.cat([images, images * x[0, 0]], 1), kernel, w[:, 1], groups=2),
        "groups of a shared input": F.conv1d(torch.cat([signal, signal], 1), kernel, groups=2),
        "no batch": F.conv1d(images[0], kernel, w[:, 0], stride=2),
        "same": F.conv1d(images, kernel, padding="same"),
        "transposed": F.conv_transpose1d(images, kernel[:2], w[:2, 0], stride=2),
        "transposed, shared input": F.conv_transpose1d(signal, kernel[:2], stride=2),
        "shared kernel": F.conv1d(images, x[:, :2].reshape(4, 2, 1)),
        "planes": F.conv2d(plane, torch.cat([window, window], 1), w[:2, 0]),
        "pooled": F.max_pool1d(w.view(2, 2, 6), 2) + F.avg_pool1d(images, 2) + F.max_pool1d(w, 2).view(2, 2, 3),
        "adaptive": F.adaptive_avg_pool2d(plane, 1),
        "resized": F.interpolate(w.view(2, 2, 6), scale_factor=2, mode="linear"),
        "shuffled": F.pixel_shuffle(plane, 2),
    }


def norms(w: Tensor, x: Tensor, own: Tensor, ids: Tensor) -> Results:
    images, scale = own.view(2, 2, 6), w[:2, 0]
    return {
        "layer": F.layer_norm(x, (6,), w[0], w[1]) + F.layer_norm(own, (6,)) + F.layer_norm(w, (4, 6), x, own),
        "root mean square": F.rms_norm(own, (6,), w[2]),
        "group": F.group_norm(own.view(2, 4, 3), 2, w[:, 0], w[:, 1]) + F.group_norm(x.view(2, 4, 3), 2, w[:, 0]),
        "instance": F.instance_norm(images, weight=scale, bias=w[2:, 0]),
        "batch": F.batch_norm(images, None, None, scale, w[2:, 1], training=True),
        "batch, evaluated": F.batch_norm(x.view(2, 2, 6), w[:2, 2].detach(), w[2:, 2].detach(), scale),
    }


def attention(w: Tensor, x: Tensor, own: Tensor, ids: Tensor) -> Results:
    q, k, v = w.view(1, 2, 4, 3), own.view(1, 2, 4, 3), x.view(1, 2, 4, 3)
    mask = x[:, :4] > 0.4
    mask = mask | torch.eye(4, dtype=torch.bool)
    return {
        "causal": F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "masked": F.scaled_dot_product_attention(k, q, q, attn_mask=mask),
        "weighed": F.scaled_dot_product_attention(v, v, q, attn_mask=w[:, :4] + x[:, :4]),
    }


def losses(w: Tensor, x: Tensor, own: Tensor, ids: Tensor) -> Results:
    target = torch.tensor([1, -100, 5, 0])
    apart = ids[:, 0].masked_fill(own[:, 0] > 0.6, -100)
    classes = x[0].detach()
    deep = torch.stack([w, own], -1)
    return {
        "cross entropy": F.cross_entropy(w, target) + F.cross_entropy(own * w, apart, reduction="sum"),
        "own targets": F.cross_entropy(w, apart),
        "classes weigh": F.cross_entropy(w, apart, classes, label_smoothing=0.1),
        "smoothed": F.cross_entropy(w, target, label_smoothing=0.2),
        "probabilities": F.cross_entropy(w, x.softmax(-1)) + F.cross_entropy(x, w.softmax(-1)),
        "one sample": F.cross_entropy(w[0], torch.tensor(3)),
        "deep": F.cross_entropy(deep, torch.stack([ids[:, 0], ids[:, 1]], 1)),
        "each": F.cross_entropy(w, target, reduction="none"),
        "likelihood": F.nll_loss(w.log_softmax(-1), target),
        "squares": F.mse_loss(w, x) + F.mse_loss(w, own, reduction="sum") + F.smooth_l1_loss(x, w),
        "logits": F.binary_cross_entropy_with_logits(w, x) + F.binary_cross_entropy(w.sigmoid(), own.sigmoid()),
        "divergence": F.kl_div(w.log_softmax(-1), x.softmax(-1), reduction="batchmean"),
        "each square": F.mse_loss(w, x, reduction="none"),
    }


def lookups(w: Tensor, x: Tensor, own: Tensor, ids: Tensor) -> Results:
    rows = ids % 4
    return {
        "own ids": F.embedding(rows, w),
        "shared ids": F.embedding(torch.tensor([[0, 3], [3, 1]]), w),
        "shared table": F.embedding(rows, x) * w[0],
        "padding": F.embedding(torch.tensor([1, 2, 1]), w, padding_idx=1) + F.embedding(rows, w, padding_idx=2).sum(),
    }


FAMILIES = [pointwise, shapes, reductions, products, convolutions, norms, attention, losses, lookups]


def inputs() -> dict[str, Tensor]:
    """``x`` is the same for all members, ``own`` and ``ids`` are their own."""
    x, own = torch.rand(4, 6, dtype=torch.float64), torch.rand(MEMBERS, 4, 6, dtype=torch.float64)
    return {"x": x.requires_grad_(), "own": own.requires_grad_(), "ids": torch.randint(6, (MEMBERS, 4, 3))}


def gradient_weights(found: Results) -> Results:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.rand(value.shape, dtype=torch.float64, generator=generator) for name, value in found.items()}


def without_rules(w: Tensor, x: Tensor, own: Tensor, ids: Tensor) -> Results:
    """Operators that name a dim of a number, or whose indices are each member's own."""
    number = (w * x).sum()
    return {
        "scan": number.cumsum(-1) + number.cumprod(0),
        "softmax": number.softmax(-1) * number.log_softmax(0),
        "sorted": number.sort(-1).values,
        "selected": number.index_select(-1, torch.tensor([0])),
        "gathered": w[0].gather(0, ids[0, 0]),
        "added": w.index_add(1, ids[0], own[:, :3]),
    }


@pytest.mark.parametrize("family", [*FAMILIES, without_rules])
def test_all_members_at_once_compute_what_each_computes(family: Callable[..., Results]) -> None:
    torch.manual_seed(0)
    members, batch = [Operators(family) for _ in range(MEMBERS)], inputs()
    array = autopar.array(members, own_inputs=["own", "ids"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if family is without_rules else "error")
        together = array(**batch).members
    weights = gradient_weights(together)
    torch.stack([(together[name] * weights[name]).sum() for name in together]).sum().backward()
    read = {name: value.grad for name, value in batch.items()}
    for name in ("x", "own"):
        batch[name].grad = None
    for number, member in enumerate(members):
        alone = member(batch["x"], batch["own"][number], batch["ids"][number])
        assert alone.keys() == together.keys()
        for name, value in alone.items():
            torch.testing.assert_close(together[name][number], value, rtol=1e-11, atol=1e-13, msg=name)
        torch.stack([(alone[name] * weights[name][number]).sum() for name in alone]).sum().backward()
        torch.testing.assert_close(array.w.grad[number], member.w.grad, rtol=1e-10, atol=1e-12)
    for name in ("x", "own"):
        torch.testing.assert_close(read[name], batch[name].grad, rtol=1e-10, atol=1e-12)
    assert bool(array.one_by_one) == (family is without_rules), "all others have a rule"


def test_every_operator_with_a_rule_has_the_arguments_that_the_rule_names() -> None:
    """Rules ask for arguments by name: those of closures stand in their cells."""
    for name, rule in STACKING.items():
        package, packet, overload = name.split(".")
        operator = getattr(getattr(getattr(torch.ops, package), packet), overload, None)
        assert operator is not None, f"torch has no {name}"
        given = inspect.getclosurevars(rule).nonlocals.get("names", ())
        assert {*given} <= {argument.name for argument in operator._schema.arguments}, name
