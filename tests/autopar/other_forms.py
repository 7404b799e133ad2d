"""What the ranks of ``test_signatures`` do: one parallel module is called with inputs of many forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.module import ParallelModule
from planner.plan.plan import Plan
from tests.autopar.workers import cluster_of, same, same_gradients, same_own_gradients, same_state

BATCH, SEQ, VOCAB, WIDTH = 8, 12, 24, 16
Batch = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(torch.relu(self.up(x)))


class Tiny(nn.Module):
    """A decoder that returns its loss given labels, and its logits always; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> dict[str, Tensor]:
        x, kept = self.embed(ids), None
        if mask is not None:
            kept = mask[:, None, None, :].bool()
        for block in self.blocks:
            x = block(x, kept)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return Tiny().double().train()


def batch_of(rows: int = BATCH, length: int = SEQ, seed: int = 1, *, labels: bool = True, mask: bool = False) -> Batch:
    """Labels that are ignored, and masks, are other ones in every row."""
    generator = torch.Generator().manual_seed(100 * rows + length + seed)
    ids, target = (torch.randint(0, VOCAB, (rows, length), generator=generator) for _ in range(2))
    for row in range(rows):
        target[row, length - row % 5 :] = -100
    found = {"ids": ids, "labels": target}
    if mask:
        found["mask"] = (torch.arange(length)[None] < length - torch.arange(rows)[:, None] % 4).long()
    return {name: value for name, value in found.items() if labels or name != "labels"}


def plan_of(pin: Mapping[str, Any] | None, ranks: int) -> dict[str, Any]:
    return autopar.plan(tiny(), cluster_of(ranks), example_kwargs=batch_of(), pin=pin).to_dict()


def parallel(model: nn.Module, document: Mapping[str, Any], batch: Batch, **options: Any) -> ParallelModule:
    plan = Plan.from_dict(document)
    return autopar.parallelize(model, plan.cluster, plan=plan, example_kwargs=batch, **options)


TRAINED: list[Batch] = [
    batch_of(),
    batch_of(4),
    batch_of(3),
    batch_of(1, seed=2),
    batch_of(6, 8, mask=True),
]
"""Forms in which a step trains: as planned, smaller, not divided by 2 or 4, one sample, shorter and with a mask."""
EVALUATED: list[Batch] = [batch_of(labels=False), batch_of(1, labels=False), batch_of(3, 10, labels=False)]


def trains_and_evaluates(document: Mapping[str, Any]) -> None:
    """Gradients of steps of all forms add up to the original's, and after them parameters are the same."""
    model = tiny()
    pmodel = parallel(model, document, batch_of())
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-4) for m in (model, pmodel)]
    stored = [p.data_ptr() for p in map(_local, pmodel.parameters())]
    for number in range(2):
        for batch in TRAINED:
            loss = model(**batch)["loss"]
            ploss = pmodel(**pmodel.shard(batch))["loss"]
            same(f"loss of {_form(batch)}", ploss, loss)
            loss.backward()
            ploss.backward()
        if pmodel.pipeline is None:
            same_gradients(pmodel, model)
        else:
            same_own_gradients(pmodel, model)
        assert len(pmodel._programs._made) == len(TRAINED), "programs are made once"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert [p.data_ptr() for p in map(_local, pmodel.parameters())] == stored, number
    same_state(pmodel, model)
    for batch in EVALUATED:
        with torch.no_grad():
            logits = pmodel.eval()(**pmodel.shard(batch))["logits"]
            if logits is not None:  # of a pipeline the last stage has it
                same(f"logits of {_form(batch)}", logits, model.eval()(**batch)["logits"])
    model.train()
    pmodel.train()
    batch = TRAINED[2]
    same("loss in train mode again", pmodel(**pmodel.shard(batch))["loss"], model(**batch)["loss"])


def _local(parameter: Any) -> Tensor:
    return parameter.to_local()


def _form(batch: Batch) -> str:
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.items())
