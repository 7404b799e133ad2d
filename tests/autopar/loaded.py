"""What the ranks of ``test_data`` do: they train on what ``pmodel.dataloader`` loads, and on what it would not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from autopar.verification.float64 import exact
from planner.base.errors import InputError
from tests.autopar.workers import BATCH, Batch, batch_of, loss_of, model_of, parallel, same, same_state


class Rows(Dataset[Batch]):
    """Samples, and which of them were loaded."""

    def __init__(self, rows: list[Batch]):
        self.rows, self.loaded = rows, list[int]()

    @classmethod
    def of(cls, name: str, batches: int) -> Rows:
        whole = [batch_of(name, seed) for seed in range(batches)]
        return cls([{key: value[at] for key, value in batch.items()} for batch in whole for at in range(BATCH)])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        self.loaded.append(index)
        return self.rows[index]


@exact()
def trains_on_what_it_loads(name: str, document: Mapping[str, Any]) -> tuple[list[float], list[int]]:
    """As one process on the batches that torch's loader makes of the same seed; each part as ``shard`` would cut it.

    Returns:
        Losses, and the samples that were loaded of the first batch.
    """
    model, dataset = model_of(name), Rows.of(name, 3)
    pmodel = parallel(model, document, batch_of(name))
    whole = DataLoader(
        Rows.of(name, 3), BATCH, sampler=DistributedSampler(dataset, 1, 0, shuffle=True, seed=5), drop_last=True
    )
    loader = pmodel.dataloader(dataset, shuffle=True, seed=5)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-4) for m in (model, pmodel)]
    found, first = [], list[int]()
    for part, batch in zip(loader, whole, strict=True):
        first = first or list(dataset.loaded)
        expected = pmodel.shard(batch)
        assert part.keys() == expected.keys()
        for key, value in part.items():
            assert torch.equal(value, expected[key]) and value.is_contiguous(), key
        losses = loss_of(model, batch), pmodel(**part)
        same("loss", losses[1], losses[0])
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append(losses[1].item())
    same_state(pmodel, model)
    if name == "mlp":
        with pytest.raises(InputError, match=r"less than whole samples of 'x', .* use pmodel\.dataloader"):
            pmodel.sampler(dataset)
    else:
        assert next(iter(pmodel.sampler(dataset, shuffle=True, seed=5))) == first
    return found, first


def notices_other_data(name: str, document: Mapping[str, Any], message: str) -> None:
    """Every rank is told of ranks that do not hold what they must, in the first calls; ``message`` empty: none must."""
    pmodel = parallel(model_of(name), document, batch_of(name))
    pmodel(**pmodel.shard(batch_of(name)))
    drawn, other = batch_of(name, dist.get_rank()), "target" if name == "gpt2" else "x"
    own = {**batch_of(name), other: drawn[other]}
    if not message:
        pmodel(**pmodel.shard(own))
        return
    with pytest.raises(InputError, match=message):
        pmodel(**pmodel.shard(own))
    pmodel(**pmodel.shard(batch_of(name)))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():  # three calls were checked, and no more are
        patch.setattr(dist, "all_gather", None)
        pmodel(**pmodel.shard(batch_of(name)))
    assert pmodel.data_agreement is not None
    pmodel.data_agreement.calls = 1
    with pytest.raises(InputError, match=message):
        pmodel(**pmodel.shard(own))
