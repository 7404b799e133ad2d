"""Loaders of a plan: every rank loads what it computes with, and ranks that must hold the same data are compared."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from autopar.measure.local_processes import LocalProcesses
from autopar.runtime.data.agreement import CALLS, VARIABLE, calls_to_check, checksum
from autopar.runtime.data.batch_share import BatchShare
from autopar.runtime.data.loader import DistributedDataLoader
from autopar.runtime.data.sampler import DistributedBatchSampler
from autopar.runtime.spmd.interface import Interface, LeafSpec
from planner.base.errors import InputError
from planner.ir.layout import I, Layout, Mesh, R, Shard
from tests.autopar import loaded
from tests.autopar.loaded import Rows

MESH = Mesh.of(data=2, tensor=3)
SIZE, WIDTH = 12, 6
# Of x and y: cut alike, differently, along other dims, in strips as by micro-batches, and not at all.
LAYOUTS: list[tuple[Layout, Layout]] = [
    ((Shard(0), R), (Shard(0), I)),
    ((Shard(0), Shard(0)), (Shard(0), Shard(0))),
    ((Shard(0), Shard(0)), (Shard(0), R)),
    ((Shard(0), R), (R, Shard(0))),
    ((Shard(0), Shard(1)), (Shard(0), R)),
    ((Shard(0, 3), R), (Shard(0, 3), R)),
    ((Shard(0, 3), Shard(1, 2)), (Shard(0, 3), R)),
    ((R, Shard(1)), (R, R)),
]


def interface_of(layouts: tuple[Layout, Layout], by_name: bool = True) -> Interface:
    shapes = (SIZE, WIDTH), (SIZE,)
    leaves = [
        LeafSpec("input", name, shape, torch.int64, layout)
        for name, shape, layout in zip("xy", shapes, layouts, strict=True)
    ]
    _, spec = pytree.tree_flatten(((), {"x": 0, "y": 0}) if by_name else ((0, 0), {}))
    return Interface(tuple(leaves), ("x", "y"), spec, (), (), spec, (), True, (None, None))


def rows(count: int) -> Rows:
    return Rows([{"x": torch.arange(at * WIDTH, (at + 1) * WIDTH), "y": torch.tensor(at)} for at in range(count)])


def loader_of(
    dataset: Any, rank: int, layouts: tuple[Layout, Layout] = LAYOUTS[0], by_name: bool = True, **options: Any
) -> DistributedDataLoader:
    """What ``pmodel.dataloader`` makes of a plan with these layouts."""
    interface, device = interface_of(layouts, by_name), torch.device("cpu")
    share = BatchShare.of(interface.input_leaves, MESH, rank, options.pop("batch_size", None))
    given = {"shuffle": False, "seed": 0, "drop_last": True, "collate_fn": None, **options}
    shard = lambda batch: interface.shard(batch, MESH, rank, device)  # noqa: E731
    return DistributedDataLoader(dataset, share, interface, shard, device, **given)


def sampler_of(count: int, rank: int, **options: Any) -> DistributedBatchSampler:
    leaves = interface_of(LAYOUTS[0]).input_leaves
    return DistributedBatchSampler(range(count), BatchShare.of(leaves, MESH, rank, None), **options)


def joined(parts: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def numbers(loader: DistributedDataLoader) -> list[list[int]]:
    return [part["y"].tolist() for part in loader]


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
def test_a_loader_yields_what_shard_cuts_and_loads_no_more(layouts: tuple[Layout, Layout]) -> None:
    whole = DataLoader(rows(40), SIZE, sampler=DistributedSampler(rows(40), 1, 0, seed=3), drop_last=True)
    interface = interface_of(layouts)
    for rank in range(MESH.size):
        dataset = rows(40)
        loader = loader_of(dataset, rank, layouts, shuffle=True, seed=3)
        assert len(loader) == 3
        needed = []
        for part, batch in zip(loader, whole, strict=True):
            expected, order = interface.shard(batch, MESH, rank, torch.device("cpu")), batch["y"].tolist()
            for value in batch.values():
                value.zero_()  # as a caller does that fills one batch again and again
            assert all(torch.equal(part[name], expected[name]) for name in "xy")
            in_y, in_x = expected["y"].tolist(), (expected["x"][:, 0] // WIDTH).tolist()
            needed += sorted({*in_y, *in_x}, key=order.index)
        assert dataset.loaded == needed


def test_batches_may_be_tuples_and_padded_by_the_user() -> None:
    pairs = [(torch.arange(WIDTH - 2), torch.tensor(at)) for at in range(SIZE)]

    def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.stack([nn.functional.pad(x, (0, 2)) for x, _ in samples]), torch.stack([y for _, y in samples])

    (part,) = loader_of(pairs, 5, by_name=False, collate_fn=padded)
    assert isinstance(part, tuple) and part[0].shape == (6, WIDTH) and part[1].tolist() == [6, 7, 8, 9, 10, 11]
    with pytest.raises(InputError, match=r"input 'x' is of shape \(6, 4\) when the 6 samples .* shape \(6, 6\): let"):
        next(iter(loader_of(pairs, 5, by_name=False)))


def test_the_order_is_torchs_for_one_process_in_every_epoch() -> None:
    expected = DistributedSampler(range(100), 1, 0, shuffle=True, seed=7)
    samplers = [sampler_of(100, rank, shuffle=True, seed=7) for rank in (0, 5)]
    for epoch in range(3):
        expected.set_epoch(epoch)
        order = [*expected]
        batches = [joined(both) for both in zip(*samplers, strict=True)]
        assert batches == [order[at : at + SIZE] for at in range(0, 96, SIZE)]
    samplers[0].set_epoch(1)
    expected.set_epoch(1)
    assert next(iter(samplers[0])) == [*expected][:6]


@pytest.mark.parametrize("workers_used", [0, 2])
def test_a_run_goes_on_under_another_plan(workers_used: int) -> None:
    """Behind what was handed out: with workers, batches that were loaded ahead are loaded again."""
    options: dict[str, Any] = {"shuffle": True, "seed": 1}
    before = loader_of(rows(100), 0, LAYOUTS[0], num_workers=workers_used, **options)
    passes = [itertools.islice(before, count) for count in (8, 3)]
    for _ in itertools.chain(*passes):
        pass
    state = before.state_dict()
    assert state == {"epoch": 1, "position": 3 * SIZE, "length": 100, "shuffle": True, "seed": 1}

    whole = DistributedSampler(range(100), 1, 0, **options)
    whole.set_epoch(1)
    order = [*whole][: 8 * SIZE]
    after = loader_of(rows(100), 0, LAYOUTS[-1], **options)
    after.load_state_dict(state)
    after.set_epoch(1)  # as loops do; it is this one
    assert joined(numbers(after)) == order[3 * SIZE :]
    assert after.state_dict() == {**state, "epoch": 2, "position": 0}
    sampler = sampler_of(100, 0, **options)
    sampler.load_state_dict(state)
    assert next(iter(sampler)) == order[3 * SIZE : 3 * SIZE + 6]
    with pytest.raises(InputError, match=r"order of .*'seed': 1.*, and here .* that of .*'seed': 2.*: give the same"):
        sampler_of(100, 0, shuffle=True, seed=2).load_state_dict(state)


class Stream(IterableDataset[dict[str, Tensor]]):
    """Numbered samples in a new order each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from (rows(40)[(at + self.epoch) % 40] for at in range(40))


@pytest.mark.parametrize("workers_used", [0, 1])
def test_iterable_datasets_are_read_whole(workers_used: int) -> None:
    loader = loader_of(Stream(), 5, LAYOUTS[1], num_workers=workers_used)
    assert numbers(loader) == [[10, 11], [22, 23], [34, 35]]
    assert loader.state_dict() == {"epoch": 1, "position": 0}
    part = next(iter(loader))
    assert part["y"].tolist() == [11, 12]
    state = loader.state_dict()
    again = loader_of(Stream(), 5, LAYOUTS[1])
    again.load_state_dict(state)
    assert numbers(again) == [[23, 24], [35, 36]]
    again.load_state_dict({"epoch": 0, "position": 8})
    with pytest.raises(InputError, match=r"8 samples were handed out .* no whole number of batches of 12"):
        next(iter(again))


def test_a_smaller_last_batch_is_given_to_shard_whole() -> None:
    """Which makes a part of it, or says why there is none."""
    for dataset in (rows(16), Stream()):
        loader = loader_of(dataset, 2, LAYOUTS[1], drop_last=False)
        with pytest.raises(InputError, match=r"input 'x' has shape \(4, 6\), but the global batch was planned as \(12"):
            numbers(loader)
    assert [*sampler_of(16, 2, drop_last=False)] == [[0, 1, 2, 3, 4, 5], [12, 13, 14, 15]]
    assert len(sampler_of(16, 2, drop_last=False)) == 2


class Augmented(Rows):
    """Samples to which random numbers are added, in workers."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = torch.randint(10**6, (WIDTH,)) + random.randrange(10**6)
        return {"x": self.rows[index]["x"] + noise, "y": self.rows[index]["y"]}


def test_workers_augment_alike_where_ranks_hold_the_same_samples() -> None:
    parts = [[*loader_of(Augmented(rows(24).rows), rank, num_workers=1)] for rank in (0, 1, 3)]
    assert all(torch.equal(one["x"], other["x"]) for one, other in zip(parts[0], parts[1], strict=True))
    noise = [part[0]["x"] - part[0]["y"][:, None] * WIDTH for part in (parts[0], parts[2])]
    assert not torch.equal(*noise)


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: loader_of(rows(40), 0, batch_size=6),
            r"batch_size is 6, but .* 'x' of 12, 'y' of 12\. batch_size c",
        ),
        (lambda: loader_of(rows(5), 0), "has 5 samples, and a global batch takes 12"),
        (lambda: loader_of(iter(()), 0), "has no length"),
        (lambda: loader_of(Stream(), 0, shuffle=True), "Stream, is iterable and comes in its own order"),
        (lambda: loader_of(rows(40), 0, sampler=range(40)), "sampler is the plan's to choose"),
        (
            lambda: next(iter(loader_of([1] * 12, 0))),
            r"collate_fn makes .* by position \(1\), but the model was planned with inputs",
        ),
    ],
)
def test_what_does_not_fit_the_plan_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_the_batch_must_be_known() -> None:
    leaves = [LeafSpec("input", name, (size,), torch.int64, (R, R)) for name, size in (("x", 12), ("positions", 6))]
    with pytest.raises(InputError, match=r"'x' of 12, 'positions' of 6\. Say which is the batch: batch_size=\.\.\."):
        BatchShare.of(leaves, MESH, 0, None)
    assert BatchShare.of(leaves, MESH, 0, 12).cuts["positions"].loaded == (6,)


DTYPES = [torch.bool, torch.uint8, torch.bfloat16, torch.int64, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checksum_depends_on_every_element_and_its_place(dtype: torch.dtype) -> None:
    value = (torch.arange(60) % 7 == 0 if dtype == torch.bool else torch.arange(60)).to(dtype).reshape(12, 5)
    seen = {checksum(value, at_once=16).item()}
    assert checksum(value.t().contiguous().t()).item() in seen
    for at in range(60):
        other = value.clone().flatten()
        other[at] = ~other[at] if dtype == torch.bool else other[at] + 1
        seen.add(checksum(other.reshape(12, 5), at_once=16).item())
    seen.add(checksum(value.flip(0)).item())
    assert len(seen) == 62


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_checksum_tells_every_order_of_two_values(dtype: torch.dtype) -> None:
    one, two = torch.tensor([1, 0 if dtype == torch.bool else 2]).to(dtype)
    orders = [torch.stack(order) for order in itertools.product((one, two), repeat=10)]
    assert len({checksum(order).item() for order in orders}) == 2**10


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("distance", [1, 2048, 65536])
def test_a_checksum_sees_two_values_swapped(dtype: torch.dtype, distance: int) -> None:
    value = torch.zeros(distance + 16).to(dtype)
    value[:8] = torch.tensor([1, 2, 0, 1, -1 % 256, 3, 2, 1]).to(dtype)
    value[distance + 8 :] = value[:8].flip(0)
    seen, swaps = {checksum(value).item()}, 0
    for at in range(16):
        there = at + distance
        if there < len(value) and value[at] != value[there]:
            other = value.clone()
            other[at], other[there] = value[there], value[at]
            seen.add(checksum(other).item())
            swaps += 1
    assert swaps >= 2 and len(seen) == swaps + 1


def test_a_checksum_sees_rows_of_one_hot_permuted_and_samples_mirrored() -> None:
    rows = torch.eye(5)
    assert len({checksum(rows[list(order)]).item() for order in itertools.permutations(range(5))}) == 120
    assert checksum(torch.tensor([5, 3, 3, 5])).item() != checksum(torch.tensor([3, 5, 5, 3])).item()


def test_a_checksum_is_of_the_values_that_a_conjugate_view_shows() -> None:
    value = torch.complex(torch.arange(6.0), torch.arange(6.0) - 2)
    conjugate = value.conj()
    assert checksum(conjugate).item() == checksum(conjugate.resolve_conj()).item() != checksum(value).item()
    assert checksum(conjugate.imag).item() == checksum(conjugate.imag.resolve_neg()).item()


@pytest.mark.parametrize("setting, calls", [("", CALLS), ("0", 0), ("1", math.inf)])
def test_the_environment_says_how_many_calls_are_checked(
    monkeypatch: pytest.MonkeyPatch, setting: str, calls: float
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert calls_to_check() == CALLS
    monkeypatch.setenv(VARIABLE, setting)
    assert calls_to_check() == calls
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(InputError, match="AUTOPAR_CHECK_DATA=yes: give 1 to check all calls, 0"):
        calls_to_check()


# ---- ranks that are processes ----------------------------------------------------------------------------------------

PLANS: list[tuple[dict[str, Any], int, str]] = [
    (
        {"data": 2, "tensor": 2},
        4,
        r"input 'labels' differs .*: ranks 0, 1 must .*, but rank 1 .* than rank 0, and 1 more",
    ),
    ({"replicate": 2, "data": 2, "zero": 3}, 2, ""),
    ({"data": 2, "context": 2}, 4, "ranks 0, 1 must"),
    ({"pipeline": 2, "micro_batches": 2, "data": 2}, 4, "ranks 0, 2 must"),
]
"""Pin, how many samples of 8 a rank loads, and what it is told if each rank draws its own."""


@pytest.mark.processes
@pytest.mark.parametrize("pin, own, message", PLANS, ids=str)
def test_ranks_train_as_one_process_in_the_same_order(
    pool: LocalProcesses, pin: dict[str, Any], own: int, message: str
) -> None:
    found = pool.run(loaded.trains_on_what_it_loads, loaded.plan_of(pin), message)
    assert len({tuple(losses) for losses, _ in found}) == 1
    assert [len(first) for _, first in found] == [own] * 4
