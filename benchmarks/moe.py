"""A mixture of experts with its router, and the same with experts dispatched by hand in plain torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

EXPERTS, K = 8, 2


class Mixture(nn.Module):
    """Gated experts, twice as wide as the tokens, and a mean squared error."""

    def __init__(self, width: int):
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, 4 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, width, 2 * width) / width**0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights, indices = self.router(x).softmax(-1).topk(K)
        return F.mse_loss(x + autopar.experts(x, indices, weights, self.up, self.down), y)


class ByHand(nn.Module):
    """The experts of this rank; tokens are sorted, sent with ``all_to_all_single``, and run expert by expert."""

    def __init__(self, model: Mixture):
        super().__init__()
        self.ranks = dist.get_world_size()
        self.router = model.router
        own = (matrices.detach().chunk(self.ranks)[dist.get_rank()].clone() for matrices in (model.up, model.down))
        self.up, self.down = map(nn.Parameter, own)
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self._reduce)

    def _reduce(self, parameter: Tensor) -> None:
        """Losses are means of as many tokens on every rank; experts have the gradients of all of them already."""
        assert parameter.grad is not None
        if parameter is self.router.weight:
            dist.all_reduce(parameter.grad)
        parameter.grad /= self.ranks

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights, indices = self.router(x).softmax(-1).topk(K)
        chosen = indices.flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        arriving = arriving.view(self.ranks, -1)
        sent, received = counts.view(self.ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()
        rows = _AllToAll.apply(x[order // K], sent, received)
        here = torch.arange(len(self.up)).repeat(self.ranks).repeat_interleave(arriving.flatten())
        by_expert = here.argsort(stable=True)
        made = []
        parts = rows[by_expert].split(arriving.sum(0).tolist())
        for part, up, down in zip(parts, self.up, self.down, strict=True):
            gate, ups = F.linear(part, up).chunk(2, dim=-1)
            made.append(F.linear(F.silu(gate) * ups, down))
        back = torch.empty_like(rows).index_copy(0, by_expert, torch.cat(made))
        returned = _AllToAll.apply(back, received, sent)
        weighted = returned * weights.flatten()[order].unsqueeze(-1)
        return F.mse_loss(x + torch.zeros_like(x).index_add(0, order // K, weighted), y)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sent, ctx.received = sent, received
        found = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(found, rows.contiguous(), received, sent)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(gradient, ctx.received, ctx.sent), None, None
