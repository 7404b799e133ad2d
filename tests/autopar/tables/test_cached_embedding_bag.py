"""Cached tables: the same bits as a plain embedding bag, and the rows moved that a simulation moves."""

from __future__ import annotations

import copy
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.tables.cached_embedding_bag import CachedEmbeddingBag
from autopar.tables.row_optimizers import ROW_OPTIMIZERS
from autopar.tables.table_home import standard_normal
from autopar.verification.simulator import fake_process_group
from planner.base.errors import DiskError, InputError
from planner.cost.cluster import ClusterSpec
from planner.tables.cached_rows import predict_cache
from planner.tables.embedding_table import EmbeddingTable

ROWS, FEATURES, POOLING, SAMPLES, CAPACITY, BATCHES = 2000, 8, 5, 32, 220, 200
ZIPF = 1 / np.arange(1, ROWS + 1) ** 1.1


def histogram() -> np.ndarray[Any, np.dtype[np.float64]]:
    """Zipf's, with hot rows all over the table."""
    return ZIPF[np.random.default_rng(0).permutation(ROWS)]


def table(*, counted: bool = False) -> EmbeddingTable:
    return EmbeddingTable("items", ROWS, FEATURES, POOLING, histogram=None if counted else histogram())


def batches(count: int = BATCHES, seed: int = 1) -> list[Tensor]:
    frequencies = histogram() / histogram().sum()
    drawn = np.random.default_rng(seed).choice(ROWS, (count, SAMPLES, POOLING), p=frequencies)
    return list(torch.from_numpy(drawn))


class RowwiseAdagrad:
    """The one that torch does not have, on all rows."""

    def __init__(self, weight: nn.Parameter, lr: float):
        self.weight, self.lr, self.total = weight, lr, torch.zeros(len(weight), 1)

    @torch.no_grad()
    def step(self) -> None:
        grad = self.weight.grad
        assert grad is not None
        self.total += grad.square().mean(1, keepdim=True)
        self.weight.addcdiv_(grad, self.total.sqrt() + 1e-10, value=-self.lr)


def plain(name: str, weight: Tensor, mode: str) -> tuple[nn.EmbeddingBag, Any]:
    """``nn.EmbeddingBag`` with torch's optimizer, Adam being that of sparse gradients.

    Torch rounds sparse gradients of means otherwise than dense ones: :func:`step` makes these sparse.
    """
    sparse = name == "adam" and mode == "sum"
    bags = nn.EmbeddingBag(ROWS, FEATURES, mode=mode, sparse=sparse, _weight=weight.clone())
    make = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowwiseAdagrad}.get(name)
    parameters: Any = bags.weight if name == "rowwise_adagrad" else [bags.weight]
    return bags, (make or torch.optim.SparseAdam)(parameters, lr=0.1)


def step(bags: nn.EmbeddingBag, optimizer: Any, ids: Tensor) -> None:
    grad = bags.weight.grad
    assert grad is not None
    if isinstance(optimizer, torch.optim.SparseAdam) and not grad.is_sparse:
        rows = ids.unique()
        bags.weight.grad = torch.sparse_coo_tensor(rows.unsqueeze(0), grad[rows], grad.shape, check_invariants=True)
    optimizer.step()


def loss_of(bags: Tensor, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return (bags * torch.randn(bags.shape, generator=generator)).sin().sum()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("prefetches", [False, True], ids=["", "prefetched"])
@pytest.mark.parametrize("name", ROW_OPTIMIZERS)
def test_every_bit_is_that_of_a_plain_embedding_bag(name: Any, prefetches: bool, mode: str) -> None:
    """200 Zipf batches through a cache of a ninth of the table; the optimizer's state has moved with the rows.

    The plain one begins with all rows of a table of the same seed, the cached one draws its rows as it comes upon them.
    """
    torch.manual_seed(0)
    weight = CachedEmbeddingBag(table(), 1).weight
    torch.manual_seed(0)
    ours = CachedEmbeddingBag(table(), CAPACITY, optimizer=name, mode=mode, lr=0.1)
    theirs, optimizer = plain(name, weight, mode)
    drawn = batches()
    for number, ids in enumerate(drawn):
        found, wanted = ours(ids), theirs(ids)
        assert torch.equal(found, wanted), f"batch {number}"
        if prefetches and number + 1 < BATCHES:
            ours.prefetch(drawn[number + 1])
        theirs.weight.grad = None
        for bags in (found, wanted):
            loss_of(bags, number).backward()
        ours.step()
        step(theirs, optimizer, ids)
    assert ours.moved.written_back > 1000, "nothing left the cache"
    assert torch.equal(ours.weight, theirs.weight)


def simulated(drawn: list[Tensor], frequency: np.ndarray[Any, Any], *, counted: bool) -> tuple[int, int, int]:
    """Rows looked up, fetched and written back by the rule as it is told: sets of rows, one batch after another."""
    hot = sorted(range(ROWS), key=lambda row: (-frequency[row], row))[:CAPACITY]
    cached, dirty = set() if counted else set(hot), set()
    looked_up = fetched = written = 0
    for ids in drawn:
        rows = set(ids.flatten().tolist())
        if counted:
            for row in ids.flatten().tolist():
                frequency[row] += 1
        missing = rows - cached
        leaving = max(0, len(cached) + len(missing) - CAPACITY)
        for row in sorted(cached - rows, key=lambda row: (frequency[row], -row))[:leaving]:
            cached.remove(row)
            written += row in dirty
            dirty.discard(row)
        cached |= missing
        dirty |= rows
        looked_up += len(rows)
        fetched += len(missing)
    return looked_up, fetched, written


@pytest.mark.parametrize("counted", [False, True], ids=["histogram", "counted"])
def test_the_rows_moved_are_those_of_a_simulation(counted: bool) -> None:
    ours, drawn = CachedEmbeddingBag(table(counted=counted), CAPACITY, lr=0.1), batches()
    for number, ids in enumerate(drawn):
        loss_of(ours(ids), number).backward()
        ours.step()
    frequency = np.zeros(ROWS) if counted else histogram()
    expected = simulated(drawn, frequency, counted=counted)
    assert (ours.moved.looked_up, ours.moved.fetched, ours.moved.written_back) == expected


@pytest.mark.parametrize("capacity", [150, CAPACITY, 600])
def test_the_hit_rate_is_predicted(capacity: int) -> None:
    ours = CachedEmbeddingBag(table(), capacity)
    with torch.no_grad():
        for ids in batches():
            ours(ids)
    predicted = ours.predict(SAMPLES)
    assert predicted.hit_rate == pytest.approx(ours.moved.hit_rate, abs=0.02)
    assert predicted.unique_rows == pytest.approx(ours.moved.looked_up / BATCHES, rel=0.02)
    assert predicted.moved_bytes == pytest.approx(ours.moved.fetched / BATCHES * FEATURES * 4 * 2, rel=0.1)


def test_hot_rows_are_hit_more_often_than_recent_ones() -> None:
    """As often as with a cache of the rows that were used last, at the least."""
    ours, recent, fetched = CachedEmbeddingBag(table(), CAPACITY), dict[int, None](), 0
    with torch.no_grad():
        for ids in batches():
            ours(ids)
            for row in set(ids.flatten().tolist()):
                fetched += row not in recent
                recent.pop(row, None)
                recent[row] = None
            while len(recent) > CAPACITY:
                recent.pop(next(iter(recent)))
    assert ours.moved.fetched < fetched


def test_look_ups_of_one_step_add_up_their_gradients() -> None:
    """Two micro-batches, which look up some rows both; and one whose bags nobody uses."""
    ours = CachedEmbeddingBag(table(), CAPACITY, optimizer="adagrad", lr=0.1)
    theirs, optimizer = plain("adagrad", ours.weight, "sum")
    first, second, unused = batches(3)
    for bags in (ours, theirs):
        for number, ids in enumerate((first[:16], second[:16])):
            loss_of(bags(ids), number).backward()
        bags(unused[:4])
    ours.step()
    optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=1e-6)
    before = ours.weight.clone()
    ours.step()
    assert torch.equal(ours.weight, before), "a step without look-ups changes nothing"


def test_a_table_on_disk_trains_alike_and_is_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    on_host = CachedEmbeddingBag(table(), CAPACITY, optimizer="adam")
    on_disk = CachedEmbeddingBag(table(), CAPACITY, optimizer="adam", path=tmp_path / "items")
    on_disk.load_state_dict(on_host.state_dict())
    for number, ids in enumerate(batches(20)):
        for each in (on_host, on_disk):
            loss_of(each(ids), number).backward()
            each.step()
    assert torch.equal(on_host.weight, on_disk.weight)
    assert (tmp_path / "items").stat().st_size == ROWS * 3 * FEATURES * 4
    resumed = CachedEmbeddingBag(table(), CAPACITY, optimizer="adam")
    resumed.load_state_dict(on_disk.state_dict())
    for each in (resumed, on_disk):
        loss_of(each(batches(1)[0]), 0).backward()
        each.step()
    assert torch.equal(resumed.weight, on_disk.weight)


def test_only_rows_that_were_trained_take_space_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 38 MB, of which 2,000 rows are hot, and others are looked up without being trained."""
    rows, path = 400_000, tmp_path / "items"
    large = EmbeddingTable("items", rows, FEATURES, POOLING)
    torch.manual_seed(0)
    ours = CachedEmbeddingBag(large, CAPACITY, optimizer="adam", lr=0.1, path=path)
    torch.manual_seed(0)
    theirs = nn.EmbeddingBag(rows, FEATURES, mode="sum", sparse=True, _weight=CachedEmbeddingBag(large, 1).weight)
    optimizer = torch.optim.SparseAdam(theirs.parameters(), lr=0.1)
    for number, ids in enumerate(batches(20)):
        ids = ids * (rows // ROWS)
        with torch.no_grad():
            assert torch.equal(ours(ids[:8] + 1), theirs(ids[:8] + 1))
        for bags in (ours, theirs):
            theirs.weight.grad = None
            loss_of(bags(ids), number).backward()
        ours.step()
        optimizer.step()
    ours.write_back()
    assert path.stat().st_size == rows * 3 * FEATURES * 4
    assert path.stat().st_blocks * 512 < path.stat().st_size / 4
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2**20))
        with pytest.raises(DiskError, match=r"write 39\d,\d{3} rows more .* of 400,000, may take .* has 1.0 MiB left"):
            _ = ours.weight
    assert torch.equal(ours.weight, theirs.weight)


def test_initial_rows_are_standard_normal_and_do_not_depend_on_one_another() -> None:
    rows = torch.arange(50_000)
    drawn = standard_normal(3, rows, 7)
    some = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:1001]]
    assert torch.equal(standard_normal(3, some, 7), drawn[some])
    in_order = drawn.flatten().sort().values
    expected = (torch.arange(len(in_order), dtype=torch.float64) + 0.5) / len(in_order)
    assert (torch.special.ndtr(in_order) - expected).abs().max() < 1.63 / len(in_order) ** 0.5  # Kolmogorov, at 1 %
    columns_and_next_rows = torch.cat([drawn[:-1], drawn[1:], standard_normal(4, rows[1:], 7)], 1)
    assert (columns_and_next_rows.T.corrcoef() - torch.eye(21)).abs().max() < 4 / len(rows) ** 0.5


class HeldHome:
    """A home whose rows are written when they are let go."""

    def __init__(self, home: Tensor):
        self.home, self.goes, self.written = home, threading.Event(), 0

    def __getitem__(self, rows: Any) -> Tensor:
        return self.home[rows]

    def __setitem__(self, rows: Tensor, values: Tensor) -> None:
        assert self.goes.wait(60)
        self.home[rows] = values
        self.written += len(rows)


def test_a_look_up_does_not_wait_for_rows_that_leave() -> None:
    """They are written while the device computes, and read only after; copies are made of what has settled."""
    ours, drawn = CachedEmbeddingBag(table(), CAPACITY, optimizer="sgd", lr=0.1), batches(20)
    theirs, optimizer = plain("sgd", ours.weight, "sum")
    home = HeldHome(ours._home)
    ours._home = home  # type: ignore[assignment]
    for number, ids in enumerate(drawn):
        found = ours(ids)
        if ours.moved.written_back and not home.goes.is_set():
            assert home.written == 0
            home.goes.set()
        theirs.weight.grad = None
        for bags in (found, theirs(ids)):
            loss_of(bags, number).backward()
        ours.step()
        optimizer.step()
    assert home.goes.is_set()
    ours.prefetch(drawn[0])
    ours._home = home.home
    copied = copy.deepcopy(ours)
    assert home.written == ours.moved.written_back and torch.equal(copied.weight, theirs.weight)


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.out = CachedEmbeddingBag(table(), CAPACITY), nn.Linear(FEATURES, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.bags(ids)).mean()


def test_what_a_cache_refuses() -> None:
    ours, ids = CachedEmbeddingBag(table(), 40), batches(2)
    distinct = len(ids[0].unique())
    with pytest.raises(InputError, match=rf"{distinct} distinct rows of table 'items', and its cache holds 40: give"):
        ours(ids[0])
    ours(ids[0][:6])
    with pytest.raises(InputError, match=r"for rows of look-ups that wait for step\(\)"):
        ours(ids[1][:7])
    with pytest.raises(InputError, match=r"a batch of 32 samples looks up \d+ distinct rows .* its cache holds 40"):
        ours.predict(SAMPLES)
    wrong = ids[0][:4].clone()
    for value in (-1, ROWS):
        wrong[3, 1] = value
        with pytest.raises(InputError, match=rf"sample 3 looks up id {value} in table 'items', which has 2000 rows"):
            ours(wrong)
    for shaped in (ids[0][:, :3], ids[0].float()):
        with pytest.raises(InputError, match=r"takes ids \[batch, 5\]"):
            ours(shaped)
    for weight in (ours.weight.double(), ours.weight[0], ours.weight[:3]):
        with pytest.raises(InputError, match=r"'items' takes weights of shape \[2000, 8\] in torch.float32, not"):
            ours.load_weight(weight)
    other = CachedEmbeddingBag(table(), 40, optimizer="adam").state_dict()
    with pytest.raises(InputError, match=r"takes weights with the optimizer's state of shape \[2000, 16\]"):
        ours.load_state_dict(other)
    with pytest.raises(InputError, match="no optimizer 'lamb' of rows; there are: sgd, adagrad, rowwise_adagrad, adam"):
        CachedEmbeddingBag(table(), 40, optimizer="lamb")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="sgd has no option 'betas'; it has: lr"):
        CachedEmbeddingBag(table(), 40, optimizer="sgd", betas=(0, 0))
    with pytest.raises(InputError, match="lr of table 'items' is -1; give a number from 0"):
        CachedEmbeddingBag(table(), 40, lr=-1)
    with pytest.raises(InputError, match="device of table 'items' is 'gpu', and holds no tensors here"):
        CachedEmbeddingBag(table(), 40, device="gpu")
    with pytest.raises(InputError, match="there is no folder '/no' for the file of table 'items'"):
        CachedEmbeddingBag(table(), 40, path="/no/items")
    with pytest.raises(InputError, match="batch is 0; give a whole number from 1"):
        predict_cache(table(), 40, 0)
    assert "'items', 40 of 2,000 rows cached on cpu, features=8, mode='sum', optimizer='adagrad'" in str(ours)
    with pytest.raises(InputError, match="of which a device holds 1 to 2000, not 2001"):
        CachedEmbeddingBag(table(), 2001)
    with pytest.raises(InputError, match="mode is 'sum', 'mean' or 'max', not 'maxx'"):
        CachedEmbeddingBag(table(), 40, mode="maxx")  # type: ignore[arg-type]
    with pytest.raises(autopar.AutoparError, match="look up outside of the model"):
        autopar.plan(Looking(), ClusterSpec.local(2), example_kwargs={"ids": ids[0]})


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "items"
    path.write_bytes(b"kept")
    with pytest.raises(InputError, match=r"there is a file '.*items', .* table 'items' would write over"):
        CachedEmbeddingBag(table(), CAPACITY, path=path)
    assert path.read_bytes() == b"kept"


def test_it_does_not_train_on_several_ranks() -> None:
    """Neither where these are there before it, nor where they come later."""
    ours, (ids,) = CachedEmbeddingBag(table(), CAPACITY), batches(1)
    refused = pytest.raises(InputError, match=r"table 'items' is cached, .* one process, and this one is one of 2")
    with fake_process_group(1):
        loss_of(CachedEmbeddingBag(table(), CAPACITY)(ids), 0).backward()
    loss_of(ours(ids), 0).backward()
    with fake_process_group(2):
        with refused:
            CachedEmbeddingBag(table(), CAPACITY)
        with refused:
            ours.step()
    ours.step()


def test_a_cache_that_holds_all_rows_misses_none() -> None:
    predicted = predict_cache(table(), ROWS, SAMPLES)
    assert predicted.staying == ROWS and predicted.missing_rows == 0 and predicted.hit_rate == 1
