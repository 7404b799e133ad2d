"""Arrays under plans: the search shards models by itself, and pins say so; checked in one process."""

from __future__ import annotations

import torch

import autopar
from autopar.arrays.model_array import ModelArray
from tests.autopar.stacked import MEMBERS, Member, batch


def array() -> ModelArray:
    torch.manual_seed(0)
    return autopar.array([Member() for _ in range(MEMBERS)])


class Wide(torch.nn.Module):
    """Large enough to be worth four processes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = torch.nn.Embedding(64, 96), torch.nn.Linear(96, 384), torch.nn.Linear(384, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.down(self.up(self.embed(ids)).relu()), ids)


def test_the_search_gives_every_rank_some_models_which_exchange_nothing_but_losses() -> None:
    ids = {"ids": torch.randint(64, (128,))}
    models = autopar.array(Wide, MEMBERS)
    plan = autopar.plan(models, autopar.ClusterSpec.local(4), example_kwargs=ids, max_axes=1)
    assert plan.mesh.names == ("model",)
    assert {*plan.parameters.values()} == {"S(0)"}
    assert all(call.bytes_in <= 8 * MEMBERS for call, _ in plan.predicted.collectives), "losses, and no gradient"
    assert plan.sentence.startswith("Shares the models of the array over all 4 processes")
    autopar.verify(models, plan, example_kwargs=ids)


def test_models_are_sharded_beside_the_batch() -> None:
    given = {name: value.float() if value.is_floating_point() else value for name, value in batch(0).items()}
    pin = {"model": 2, "data": 2, "zero": 0}
    plan = autopar.plan(array(), autopar.ClusterSpec.local(4), example_kwargs=given, pin=pin)
    autopar.verify(array(), plan, example_kwargs=given)
