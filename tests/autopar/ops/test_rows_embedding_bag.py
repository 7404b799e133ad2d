"""The row of embedding bags: every strategy that runs the operator on slices, by hand, against the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from autopar.operators.embedding_bag import embedding_bag
from planner.ir.layout import I, P, R, Shard
from planner.ops.embedding import MAX, MEAN, SUM
from planner.ops.sharding_rule import shard_factor
from tests.autopar.ops.test_rows_heavy import check_mechanical, facts, randn

ROWS, FEATURES, BAGS, SIZE = 12, 8, 8, 4
MODES = list(itertools.product((SUM, MEAN, MAX), (-1, 3)))
STARTS = torch.tensor([0, 3, 3, 10, 15, 20, 30, 32])
"""Bags one behind the other: one is empty, and so is the last."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def scales(ids: Tensor, mode: int) -> Tensor | None:
    return randn(*ids.shape) if mode == SUM else None


@pytest.mark.parametrize("mode, padding", MODES)
def test_bags_in_rows(mode: int, padding: int) -> None:
    ids = torch.randint(0, ROWS, (BAGS, SIZE))
    ids[1] = 3
    found = check_mechanical(embedding_bag, randn(ROWS, FEATURES), ids, None, scales(ids, mode), mode, padding, False)
    assert found == {"b", "h"} | ({"l"} if mode == SUM else set())


@pytest.mark.parametrize("mode, padding", MODES)
def test_bags_one_behind_the_other(mode: int, padding: int) -> None:
    ids = torch.randint(0, ROWS, (32,))
    assert check_mechanical(
        embedding_bag, randn(ROWS, FEATURES), ids, STARTS, scales(ids, mode), mode, padding, False
    ) == {"h"}


def test_counts_of_ids_keep_everything_whole() -> None:
    ids = torch.randint(0, ROWS, (BAGS, SIZE))
    assert not check_mechanical(embedding_bag, randn(ROWS, FEATURES), ids, None, None, SUM, -1, True)


def test_sharded_rows_give_terms_of_sums_and_whole_maxima() -> None:
    ids = torch.randint(0, ROWS, (BAGS, SIZE))
    for mode, result in ((SUM, P), (MEAN, P), (MAX, I)):
        _, _, rule = facts(embedding_bag, randn(ROWS, FEATURES), ids, None, None, mode, -1, False)
        by_row = shard_factor(rule, "v")
        assert by_row.operands == (Shard(0), R) and by_row.results == (result,)
        assert [(inner.kind, inner.item_bytes) for inner in by_row.inner] == [("all_reduce", 8)] * 2 * (mode == MAX)
