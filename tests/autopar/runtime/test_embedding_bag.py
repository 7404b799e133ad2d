"""Embedding bags with sharded rows or ids, on simulated ranks, against the whole operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.operators.embedding_bag import embedding_bag
from planner.ops.embedding import MAX, MEAN, SUM
from tests.autopar.ops.test_rows_embedding_bag import BAGS, FEATURES, MODES, ROWS, SIZE, STARTS, scales
from tests.autopar.runtime.test_layers import check_layer, randn


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def table(mode: int) -> Tensor:
    """For maxima with equal elements in different rows, of which the first in a bag gets the gradient."""
    return torch.randint(-2, 3, (ROWS, FEATURES)).double() if mode == MAX else randn(ROWS, FEATURES)


@pytest.mark.parametrize("sizes, factors", [((2,), "v"), ((4,), "v"), ((2, 2), "vv"), ((2, 2), "vb"), ((2, 2), "hv")])
@pytest.mark.parametrize("mode, padding", MODES)
def test_rows_of_bags_of_one_size(sizes: Any, factors: str, mode: int, padding: int) -> None:
    ids = torch.randint(0, ROWS, (BAGS, SIZE))
    ids[1] = 3
    args = (table(mode), ids, None, scales(ids, mode), mode, padding, False)
    check_layer(embedding_bag, args, sizes, factors)


@pytest.mark.parametrize("sizes, factors", [((2,), "v"), ((4,), "n"), ((2, 2), "nn"), ((2, 2), "nv"), ((2, 2), "hn")])
@pytest.mark.parametrize("mode, padding", MODES)
def test_bags_one_behind_the_other(sizes: Any, factors: str, mode: int, padding: int) -> None:
    if mode == MAX and "n" in factors:
        return
    ids = torch.randint(0, ROWS, (32,))
    ids[3:10] = 3
    check_layer(embedding_bag, (table(mode), ids, STARTS, scales(ids, mode), mode, padding, False), sizes, factors)


@pytest.mark.parametrize("mode", [SUM, MEAN, MAX])
def test_an_infinite_row_is_in_the_bags_that_look_it_up_alone(mode: int) -> None:
    """Each of four ranks has one as its first row, which ids of other ranks may not be replaced by."""
    weight, ids = table(mode), torch.randint(0, ROWS, (BAGS, SIZE))
    weight[::3] = torch.inf
    ids += ids % 3 == 0
    if mode != SUM:  # scales have no finite gradient there
        ids[1, 2] = 0
    check_layer(embedding_bag, (weight, ids, None, scales(ids, mode), mode, -1, False), (4,), "v")
    check_layer(embedding_bag, (weight, ids.flatten(), STARTS, scales(ids.flatten(), mode), mode, -1, False), (4,), "v")
