"""A DLRM (Naumov et al. 2019) with plain torch tables of every form that is placed; and what each rank does with it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from planner.base.errors import InputError
from planner.cost.cluster import ClusterSpec
from planner.plan.plan import Plan
from tests.autopar.captured_once import captured_once, made

BATCH, DENSE, FEATURES = 16, 4, 8
SIZES = ((8, 1, "one"), (20, 3, "sum"), (4, 1, "one"), (12, 2, "mean"), (32, 2, "each"), (16, 1, "sum"))
"""Rows, ids of a sample, and what is made of them."""


class Tables(nn.Module):
    """``ids[b, c]``, those of all tables side by side -> vectors ``[b, n, features]``."""

    def __init__(self, sizes: Sequence[tuple[int, int, str]], features: int = FEATURES):
        super().__init__()
        self.sizes = tuple(sizes)
        self.emb = nn.ModuleList(
            nn.EmbeddingBag(rows, features, mode=form) if form in ("sum", "mean") else nn.Embedding(rows, features)
            for rows, _, form in sizes
        )

    @property
    def count(self) -> int:
        """How many vectors there are of a sample."""
        return sum(ids if form == "each" else 1 for _, ids, form in self.sizes)

    def forward(self, ids: Tensor) -> Tensor:
        bags, first = [], 0
        for table, (_, count, form) in zip(self.emb, self.sizes, strict=True):  # ids are cut when they are looked up
            bags.append(table(ids[:, first] if form == "one" else ids[:, first : first + count]))
            first += count
        return torch.cat([bag if bag.dim() == 3 else bag.unsqueeze(1) for bag in bags], 1)


class Dlrm(nn.Module):
    """Dense features through an MLP, look-ups, dot products of each pair, and an MLP on top."""

    def __init__(self, tables: Tables, features: int = FEATURES, dense: int = DENSE, hidden: int = 16):
        super().__init__()
        self.tables = tables
        self.bottom = nn.Sequential(nn.Linear(dense, hidden), nn.ReLU(), nn.Linear(hidden, features), nn.ReLU())
        self.vectors = tables.count + 1
        pairs = self.vectors * tables.count // 2
        self.register_buffer("pairs", torch.empty(pairs, dtype=torch.int64), persistent=False)
        self.top = nn.Sequential(nn.Linear(features + pairs, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        first, second = torch.tril_indices(self.vectors, self.vectors, -1)
        self.pairs.copy_(first * self.vectors + second)

    def forward(self, dense: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        each = torch.cat([bottom.unsqueeze(1), self.tables(ids)], 1)
        dots = (each @ each.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([bottom, dots], 1)).squeeze(1), labels)


def nodes_of_two() -> ClusterSpec:
    """Four processes, which the cluster says are two nodes."""
    described = ClusterSpec.local(4).to_dict()
    (level,) = described["levels"]
    described["levels"] = [{**level, "size": 2}, {**level, "name": "cluster", "size": 2}]
    return ClusterSpec.from_dict(described)


def model() -> Dlrm:
    torch.manual_seed(0)
    found = Dlrm(Tables(SIZES)).double()
    made(found, "dlrm")
    return found


def batch(seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, rows, (BATCH, count), generator=generator) for rows, count, _ in SIZES]
    return {
        "dense": torch.randn(BATCH, DENSE, generator=generator, dtype=torch.float64),
        "ids": torch.cat(ids, 1),
        "labels": torch.randint(0, 2, (BATCH,), generator=generator).double(),
    }


def planned(pin: Mapping[str, Any]) -> Plan:
    with captured_once():
        return autopar.plan(model(), nodes_of_two(), example_kwargs=batch(), pin=pin)


def parallel(model: nn.Module, plan: Plan) -> Any:
    with captured_once():
        return autopar.parallelize(model, plan.cluster, plan=plan, example_kwargs=batch())


def same(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: {text}")


def gradients(pmodel: Any) -> dict[str, Tensor]:
    """Those of the original's parameters, whole."""
    found = {name: p.grad.full_tensor() for name, p in pmodel.named_parameters()}
    for slabs in pmodel.slabs:
        found |= slabs.apart(found.pop(slabs.name))
    return found


def trains_as_the_original(document: Mapping[str, Any]) -> float:
    """Three steps of Adam: losses, gradients and weights; a state dict goes out and in; a smaller batch comes."""
    original, plan = model(), Plan.from_dict(document)
    before = copy.deepcopy(original.state_dict())
    pmodel = parallel(original, plan)
    ours = pmodel.optimizer(torch.optim.Adam, lr=0.1, groups=[{"params": ["tables.emb.*"], "lr": 0.2}])
    if any(len(slabs.tables) > 1 and "tables.emb.0.weight" in slabs.tables for slabs in pmodel.slabs):
        with pytest.raises(InputError, match="groups part embedding tables that lie in one slab"):
            pmodel.optimizer(torch.optim.Adam, lr=0.1, groups=[{"params": ["tables.emb.0*"], "lr": 0.2}])
    tables, others = (
        [p for name, p in original.named_parameters() if name.startswith("tables.") == inside]
        for inside in (True, False)
    )
    theirs = torch.optim.Adam([{"params": others}, {"params": tables, "lr": 0.2}], lr=0.1)
    for step in range(3):
        loss, expected = pmodel(**pmodel.shard(batch(step))), original(**batch(step))
        same(loss.detach(), expected.detach(), f"loss {step}")
        for each in (loss, expected):
            each.backward()
        found = gradients(pmodel)
        assert found.keys() == dict(original.named_parameters()).keys()
        for name, parameter in original.named_parameters():
            assert parameter.grad is not None
            same(found[name], parameter.grad, f"gradient of {name} in step {step}")
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    state = pmodel.full_state_dict()
    assert state.keys() == before.keys()
    for name, value in original.state_dict().items():
        same(state[name], value, name)
    pmodel.load_state_dict(before)
    original.load_state_dict(before)
    name = "tables.emb.0.weight"
    if any(len(slabs.tables) > 1 and name in slabs.tables for slabs in pmodel.slabs):
        with pytest.raises(InputError, match=rf"missing, in slabs with {name}: .* strict=False"):
            pmodel.load_state_dict({name: state[name]})
    others = {each: value for each, value in state.items() if "tables" not in each}
    if pmodel.slabs:
        with pytest.raises(InputError, match=r"tables.emb.\d.weight .*missing: give all"):
            pmodel.load_state_dict(others)
    found = pmodel.load_state_dict({name: state[name]}, strict=False)
    assert {*found.missing_keys} == before.keys() - {name} and not found.unexpected_keys
    for each, value in pmodel.full_state_dict().items():
        same(value, (state if each == name else before)[each], f"{each}, of which {name} alone was loaded")
    pmodel.load_state_dict(before)
    small = {name: value[:8] for name, value in batch(7).items()}
    same(pmodel(**pmodel.shard(small)).detach(), original(**small).detach(), "loss of a smaller batch")
    return expected.item()


def goes_on_elsewhere(documents: Sequence[Mapping[str, Any]], folder: str) -> None:
    """A step of Adam under each plan, from the checkpoint of the one before, is as many steps of the original."""
    original, cluster, example = model(), nodes_of_two(), batch()
    theirs = torch.optim.Adam(original.parameters(), lr=0.1)
    for step, document in enumerate(documents):
        pmodel = autopar.parallelize(model(), cluster, plan=Plan.from_dict(document), example_kwargs=example)
        ours = pmodel.optimizer(torch.optim.Adam, lr=0.1)
        if step:
            autopar.load_checkpoint(f"{folder}/{step - 1}", pmodel, ours)
        for module, optimizer in ((pmodel, ours), (original, theirs)):
            each = pmodel.shard(batch(step)) if module is pmodel else batch(step)
            module(**each).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, value in pmodel.full_state_dict().items():
            same(value, original.state_dict()[name], f"{name} after step {step}")
        autopar.save_checkpoint(f"{folder}/{step}", pmodel, ours)


def looks_up_what_is_not_there(document: Mapping[str, Any]) -> None:
    pmodel = parallel(model(), Plan.from_dict(document))
    ids = batch()
    ids["ids"][3, 2] = 20
    pmodel(**pmodel.shard(ids))


def initialises_meta(documents: Sequence[Mapping[str, Any]]) -> None:
    """Tables on the meta device initialise themselves in slabs as they do by themselves."""
    with torch.device("meta"):
        meta = Dlrm(Tables(SIZES)).double()
    plans = map(Plan.from_dict, documents)
    states = [
        autopar.parallelize(meta, nodes_of_two(), plan=each, example_kwargs=batch(), seed=3).full_state_dict()
        for each in plans
    ]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
        assert 0.3 < value.std() < 2 or "tables" not in name, name
