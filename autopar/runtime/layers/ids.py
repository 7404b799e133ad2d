"""Ids of the elements of a dim, as of the rows of a table, of which each rank may hold a slice."""

from __future__ import annotations

import torch
from torch import Tensor

from planner.base.errors import InputError


def check_ids(ids: Tensor, count: int, named: str) -> None:
    """Refuse ids of what is not there, as the whole operator does; on a GPU without waiting for it.

    Args:
        ids: global.
        count: how many there are on all ranks.
        named: what these are.

    Raises:
        InputError: names the id, and how many there are.
    """
    if type(ids) is not Tensor or ids.device.type == "meta":  # simulated ranks, and shapes
        return
    beyond = (ids < 0) | (ids >= count)
    if ids.device.type != "cpu":
        torch._assert_async(~beyond.any(), f"an id is beyond the {count} {named}")
    elif beyond.any():
        raise InputError(
            f"id {ids[beyond][0].item()} is beyond the {count} {named} (0 to {count - 1}): give ids of what is there"
        )


def rows_of_table(path: str) -> str:
    """What the ids of a module's table are of, for errors."""
    return f"rows of table {path!r}" if path else "rows of a table"
