"""Gives every process group the timeout that the user gave the default one."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _set_pg_timeout


def patience(device: torch.device) -> timedelta | None:
    """The timeout of the group of all processes; torch gives its default to every other group."""
    assert dist.group.WORLD is not None
    options = getattr(dist.group.WORLD._get_backend(device), "options", None)
    return None if options is None else options._timeout


def be_patient(groups: Iterable[ProcessGroup], device: torch.device) -> None:
    """Let members of these groups wait for one another as long as all processes do."""
    timeout = patience(device)
    if timeout is not None:
        for group in groups:
            _set_pg_timeout(timeout, group)
