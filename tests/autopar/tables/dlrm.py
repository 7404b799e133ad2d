"""A DLRM (Naumov et al. 2019) with its tables in one module, plain or placed; and what each rank does with it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.tables.embedding_tables import EmbeddingTables, PlacedEmbeddingTables
from planner.cost.cluster import ClusterSpec
from planner.plan.plan import Plan
from planner.tables.embedding_table import EmbeddingTable
from planner.tables.place_tables import place
from planner.tables.placement import Placement
from planner.tables.sharding_options import Kind, TableStep, sharding_options

BATCH, DENSE, FEATURES = 16, 4, 8
SIZES = ((7, 1), (20, 3), (5, 1), (12, 2), (30, 1), (3, 1))
"""Rows and pooling."""


class Dlrm(nn.Module):
    """Dense features through an MLP, look-ups, dot products of each pair, and an MLP on top."""

    def __init__(self, tables: nn.Module, count: int, features: int = FEATURES, dense: int = DENSE, hidden: int = 16):
        super().__init__()
        self.tables = tables
        self.bottom = nn.Sequential(nn.Linear(dense, hidden), nn.ReLU(), nn.Linear(hidden, features), nn.ReLU())
        self.vectors = count + 1
        pairs = self.vectors * count // 2
        self.register_buffer("pairs", torch.empty(pairs, dtype=torch.int64), persistent=False)
        self.top = nn.Sequential(nn.Linear(features + pairs, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        first, second = torch.tril_indices(self.vectors, self.vectors, -1)
        self.pairs.copy_(first * self.vectors + second)

    def forward(self, dense: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        each = torch.stack([bottom, *self.tables(ids)], 1)
        dots = (each @ each.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([bottom, dots], 1)).squeeze(1), labels)


def tables() -> list[EmbeddingTable]:
    return [EmbeddingTable(f"t{number}", rows, FEATURES, pooling) for number, (rows, pooling) in enumerate(SIZES)]


def nodes_of_two() -> ClusterSpec:
    """Four processes, which the cluster says are two nodes."""
    described = ClusterSpec.local(4).to_dict()
    (level,) = described["levels"]
    described["levels"] = [{**level, "size": 2}, {**level, "name": "cluster", "size": 2}]
    return ClusterSpec.from_dict(described)


def placement(kinds: tuple[Kind, ...]) -> Placement:
    """All tables in one dimension, or each in the next of several."""
    cluster, step = nodes_of_two(), TableStep(BATCH)
    each = zip(tables(), cycle(kinds), strict=False)
    return place({table.name: sharding_options(table, cluster, step, (kind,)) for table, kind in each}, 4, 2**30)


def model(mode: Any = "sum") -> Dlrm:
    torch.manual_seed(0)
    return Dlrm(EmbeddingTables(tables(), mode), len(SIZES)).double()


def placed(original: Dlrm, kinds: tuple[Kind, ...]) -> Dlrm:
    """A copy of the model whose tables are placed."""
    found = copy.deepcopy(original)
    assert isinstance(original.tables, EmbeddingTables)
    found.tables = original.tables.placed(placement(kinds))
    return found


def batch(seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, rows, (BATCH, pooling), generator=generator) for rows, pooling in SIZES]
    return {
        "dense": torch.randn(BATCH, DENSE, generator=generator, dtype=torch.float64),
        "ids": torch.cat(ids, 1),
        "labels": torch.randint(0, 2, (BATCH,), generator=generator).double(),
    }


def same(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: {text}")


def same_tables(module: PlacedEmbeddingTables, state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    found = module.table_weights({name.removeprefix("tables."): v for name, v in state.items() if "tables." in name})
    assert found.keys() == expected.keys()
    for name, value in found.items():
        same(value, expected[name], name)


def trains_as_the_original(document: Mapping[str, Any], kinds: tuple[Kind, ...], mode: str) -> float:
    """Three steps of Adam; losses, gradients and weights are those of the model before it was placed."""
    original = model(mode)
    plan = Plan.from_dict(document)
    pmodel = autopar.parallelize(placed(original, kinds), nodes_of_two(), plan=plan, example_kwargs=batch())
    ours, theirs = (torch.optim.Adam(each.parameters(), lr=0.1) for each in (pmodel, original))
    tables_ = placed(original, kinds).tables
    assert isinstance(tables_, PlacedEmbeddingTables) and isinstance(original.tables, EmbeddingTables)
    for step in range(3):
        loss, expected = pmodel(**pmodel.shard(batch(step))), original(**batch(step))
        same(loss.detach(), expected.detach(), f"loss {step}")
        for each in (loss, expected):
            each.backward()
        gradients = {name: p.grad.full_tensor() for name, p in pmodel.named_parameters()}
        same_tables(tables_, gradients, {name: bag.weight.grad for name, bag in original.tables.bags.items()})
        for name, parameter in original.named_parameters():
            if not name.startswith("tables."):
                same(gradients[name], parameter.grad, f"gradient of {name} in step {step}")
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    same_tables(tables_, pmodel.full_state_dict(), original.tables.table_weights())
    return expected.item()


def planned(module: Dlrm) -> Plan:
    return autopar.plan(module, nodes_of_two(), example_kwargs=batch(), pin={"table": 4})


def looks_up_what_is_not_there() -> None:
    module = placed(model(), ("table",))
    pmodel = autopar.parallelize(module, nodes_of_two(), plan=planned(module), example_kwargs=batch())
    wrong = batch()
    wrong["ids"][:, 2] = 20
    pmodel(**pmodel.shard(wrong))


def initialises_meta() -> None:
    """Tables on the meta device are normally distributed, look up their own rows, and train."""
    with torch.device("meta"):
        module = placed(Dlrm(EmbeddingTables(tables()), len(SIZES)).double(), ("table", "column"))
    with torch.device("cpu"):
        whole = placed(model(), ("table", "column"))
    pmodel = autopar.parallelize(module, nodes_of_two(), plan=planned(module), example_kwargs=batch())
    whole.load_state_dict(pmodel.full_state_dict())
    same(pmodel(**pmodel.shard(batch())).detach(), whole(**batch()).detach(), "loss")
    assert isinstance(whole.tables, PlacedEmbeddingTables)
    for name, weight in whole.tables.table_weights().items():
        assert 0.3 < weight.std() < 2, name
