"""What the ranks of ``test_data`` do: they train on what ``pmodel.dataloader`` loads, and draw data of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import autopar
from autopar.runtime.module import ParallelModule
from planner.base.errors import InputError
from planner.cost.cluster import ClusterSpec
from planner.ir.layout import R
from planner.plan.plan import Plan
from tests.autopar.captured_once import captured_once, made
from tests.autopar.models import BATCH, Batch, FunctionalGPT, text
from tests.autopar.workers import same, same_state


class Rows(Dataset[Batch]):
    """Samples, and which of them were loaded."""

    def __init__(self, rows: list[Batch]):
        self.rows, self.loaded = rows, list[int]()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        self.loaded.append(index)
        return self.rows[index]


def model() -> nn.Module:
    torch.manual_seed(0)
    return made(FunctionalGPT().double(), FunctionalGPT)


def batch_of(seed: int) -> Batch:
    torch.manual_seed(seed)
    batch = text()
    return {"ids": batch["input_ids"], "labels": batch["labels"]}


def samples() -> Rows:
    """Those of three batches and a half."""
    batches = [batch_of(seed) for seed in range(4)]
    rows = [{name: value[at] for name, value in batch.items()} for batch in batches for at in range(BATCH)]
    return Rows(rows[: -BATCH // 2])


def plan_of(pin: Mapping[str, Any]) -> dict[str, Any]:
    cluster = ClusterSpec.local(4, memory_bytes="4 GiB", cores=4)
    with captured_once():
        return autopar.plan(model(), cluster, example_kwargs=batch_of(0), pin=pin).to_dict()


def trains_on_what_it_loads(document: Mapping[str, Any], message: str) -> tuple[list[float], list[int]]:
    """As one process on the batches that torch's loader makes of the same seed, the smaller last one too; each part as
    ``shard`` would cut it. Then of batches of another size, and then each rank draws labels of its own.

    Args:
        message: what every rank is told of that; empty: no two ranks must hold the same.

    Returns:
        Losses, and the samples that were loaded of the first batch.
    """
    plan, original, dataset = Plan.from_dict(document), model(), samples()
    with captured_once():
        pmodel = autopar.parallelize(original, plan.cluster, plan=plan, example_kwargs=batch_of(0))
    order = DistributedSampler(dataset, 1, 0, shuffle=True, seed=5)
    whole = DataLoader(samples(), BATCH, sampler=order, drop_last=False)
    loader = pmodel.dataloader(dataset, shuffle=True, seed=5, drop_last=False)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-4) for m in (original, pmodel)]
    found, first = [], list[int]()
    for part, batch in zip(loader, whole, strict=True):
        first = first or list(dataset.loaded)
        expected = pmodel.shard(batch)
        assert part.keys() == expected.keys()
        for name, value in part.items():
            assert torch.equal(value, expected[name]) and value.is_contiguous(), name
        losses = original(**batch)[0], pmodel(**part)[0]
        same("loss", losses[1], losses[0])
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append(losses[1].item())
    same_state(pmodel, original)
    whole = DataLoader(dataset, BATCH + BATCH // 4, drop_last=True)
    with torch.no_grad():
        for part, batch in zip(pmodel.dataloader(dataset, BATCH + BATCH // 4), whole, strict=True):
            same("loss of another size", pmodel(**part)[0], original(**batch)[0])
    assert next(iter(pmodel.sampler(dataset, shuffle=True, seed=5))) == first
    _notices_other_data(pmodel, message)
    _needs_a_loader_where_inputs_differ(pmodel, dataset)
    return found, first


def _notices_other_data(pmodel: ParallelModule, message: str) -> None:
    """In the calls that are checked, which were the three of training."""
    drawn = {**batch_of(0), "labels": batch_of(dist.get_rank())["labels"]}
    assert pmodel.data_agreement is not None and pmodel.data_agreement.calls == 0
    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        patched.setattr(dist, "all_gather", None)
        pmodel(**pmodel.shard(batch_of(0)))
        pmodel.data_agreement.calls = 1
        if message:  # a rank is lost
            patched.setattr(dist, "all_gather", Mock(side_effect=RuntimeError("connection reset")))
            with pytest.raises(RuntimeError) as caught:
                pmodel(**pmodel.shard(batch_of(0)))
            assert "another rank has ended, or does not call it" in caught.value.__notes__[0]
    pmodel.data_agreement.calls = 1
    if message:
        with pytest.raises(InputError, match=message):
            pmodel(**pmodel.shard(drawn))
    else:
        pmodel(**pmodel.shard(drawn))


def _needs_a_loader_where_inputs_differ(pmodel: ParallelModule, dataset: Rows) -> None:
    """One input is cut along the batch, another is not: the samples alone do not make a rank's part."""
    leaves = pmodel.interface.input_leaves
    uncut = [replace(leaf, layout=(R,) * len(leaf.layout)) if leaf.name == "labels" else leaf for leaf in leaves]
    with (
        patch.object(pmodel._programs, "inputs_of", return_value=uncut),
        pytest.raises(InputError, match=r"all samples that it loads of 'ids', .* use pmodel\.dataloader"),
    ):
        pmodel.sampler(dataset)
