"""Slabs of embedding tables: against plain look-ups, and on simulated ranks against the whole operator."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.graph.slabs import SlabPart, Slabs
from autopar.operators.embedding_slabs import checked_ids, embedding_slabs
from planner.base.errors import InputError
from tests.autopar.ops.test_rows_heavy import check_mechanical
from tests.autopar.runtime.test_layers import check_layer, randn

SAMPLES, SLABS, ROWS, FEATURES = 4, 4, 8, 8
STARTS = torch.tensor([[0, 2, 3], [0, 1, 5], [0, 5, 5], [0, 0, 0]])
"""Of five ids; the last bags of the third slab, and the first ones of the fourth, are empty."""


def slabs() -> tuple[Tensor, Tensor, Tensor]:
    """With ids of the last row, which stands for nothing."""
    torch.manual_seed(0)
    ids = torch.randint(0, ROWS - 1, (SAMPLES, SLABS, 5))
    ids[:, 0, -1] = ids[0, 1] = ROWS - 1
    return randn(SLABS, ROWS, FEATURES), ids, STARTS


def test_it_adds_up_rows_by_bag() -> None:
    tables, ids, starts = slabs()
    found = embedding_slabs(tables, ids, starts)
    for sample in range(SAMPLES):
        for slab in range(SLABS):
            ends = [*starts[slab, 1:].tolist(), 5]
            for bag, (start, end) in enumerate(zip(starts[slab].tolist(), ends, strict=True)):
                rows = [row for row in ids[sample, slab, start:end].tolist() if row != ROWS - 1]
                wanted = tables[slab, rows].sum(0)
                torch.testing.assert_close(found[sample, slab, bag], wanted, rtol=1e-12, atol=1e-12)


def test_rows_of_the_op_table() -> None:
    assert check_mechanical(embedding_slabs, *slabs()) == {"b", "slab", "h"}
    ids = torch.randint(0, 3, (SAMPLES, 2))
    assert check_mechanical(checked_ids, ids, ["a", "b"], [3, 4], [1, 1]) == {"b"}


@pytest.mark.parametrize("sizes, factors", [((2,), ["r"]), ((4,), ["r"]), ((2, 2), ["r", "r"]), ((2, 2), ["slab", "r"]),
                                            ((2, 2), ["b", "r"]), ((2, 2), ["r", "h"])])  # fmt: skip
def test_sharded_rows(sizes: Any, factors: list[str]) -> None:
    check_layer(embedding_slabs, slabs(), sizes, factors)


def test_an_infinite_row_is_in_the_bags_that_look_it_up_alone() -> None:
    """Each of four ranks has one as its first row, which ids of other ranks may not be replaced by."""
    tables, ids, starts = slabs()
    tables[:, ::2] = torch.inf
    ids += ids % 2 == 0
    ids[2, 1, 3] = 0
    check_layer(embedding_slabs, (tables, ids, starts), (4,), ["r"])


@pytest.mark.parametrize("value", [-1, 3])
def test_an_id_beyond_its_table_is_named(value: int) -> None:
    ids = torch.zeros(4, 2, dtype=torch.long)
    ids[2, 1] = value
    with pytest.raises(InputError, match=rf"sample 2 looks up id {value} in table 'item', which has 3 rows \(0 to 2\)"):
        checked_ids(ids, ["user", "item"], [9, 3], [1, 1])


def test_a_table_is_made_once_for_all_of_its_columns() -> None:
    """And dropped before the next: it may be as large as what a rank holds of all."""
    held: list[weakref.ref[Tensor]] = []

    def of_table(name: str) -> Any:
        assert not any(each() is not None for each in held)
        table = torch.arange(12.0).view(3, 4) + 100 * int(name)
        held.append(weakref.ref(table))
        return lambda rows: table[rows].clone()

    parts = [SlabPart(str(table), slab, 3 * table, 3, 2 * slab) for slab in (0, 1) for table in (0, 1)]
    slabs = Slabs("slabs", (2, 7, 2), torch.float32, tuple(parts))
    rows = tuple(slice(0, size) for size in slabs.shape)
    found = slabs.apart(slabs.local(rows, of_table))
    assert len(held) == 2 and [*found] == ["0", "1"]
    assert all(torch.equal(found[name], torch.arange(12.0).view(3, 4) + 100 * int(name)) for name in found)
