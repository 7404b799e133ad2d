"""Checks that machines and GPUs have the memory that a plan takes of them, before anything is allocated."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from planner.base import host
from planner.base.errors import InfeasibleError
from planner.base.formatting import in_all_bytes


@dataclass(frozen=True)
class Room:
    """What a rank wants of its machine and its device, and what these have.

    Attributes:
        device_bytes: what it wants of the device.
        device_has: what the device has for it; ``None``: the device is the host.
        device_taken: what tensors of this process take of it already, such as the model, if it was given there.
        host_bytes: what it wants of the host's memory.
        host_has: what the host has for all its ranks.
    """

    machine: str
    device: str
    device_bytes: int
    device_has: int | None
    device_taken: int
    host_bytes: int
    host_has: int


def check_room(device: torch.device, device_bytes: int, host_bytes: int) -> None:
    """Refuse devices, and machines, that have less than a plan takes of them; each rank gives its own, and all must
    call it.

    Raises:
        InfeasibleError: of any rank's; the message has the bytes.
    """
    has, taken = _left(device)
    own = Room(socket.gethostname(), str(device), device_bytes, has, taken, host_bytes, host.memory_bytes())
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    check(found)


def _left(device: torch.device) -> tuple[int | None, int]:
    """Bytes that a GPU has for this process, and those of it that tensors take, which stay: the model is kept."""
    if device.type != "cuda":
        return None, 0
    taken = torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device) - taken, taken


def check(found: Sequence[Room]) -> None:
    """Refuse what ranks found; see :func:`check_room`."""
    for rank, each in enumerate(found):
        if each.device_has is not None and each.device_bytes > each.device_has:
            raise InfeasibleError(
                f"the plan takes {in_all_bytes(each.device_bytes)} of a device, and {each.device} of rank {rank} has "
                f"{in_all_bytes(each.device_has)} left for it, beside {in_all_bytes(each.device_taken)} of tensors "
                "that are there: if the model is, give it on the CPU (model.cpu()) or the meta device; end what else "
                "uses the device, or plan again for a cluster whose devices have that much (device.memory_bytes)",
                each.device_bytes - each.device_has,
            )
        together = [other.host_bytes for other in found if other.machine == each.machine]
        if sum(together) > each.host_has:
            raise InfeasibleError(
                f"model data with their home on the host, and what goes with it, take {in_all_bytes(sum(together))} "
                f"of the memory of {each.machine!r} for its {len(together)} rank{'s' * (len(together) > 1)}, which has "
                f"{in_all_bytes(each.host_has)}, less than the cluster says: plan for what is there "
                "(ClusterSpec.detect()), with more machines and pin 'zero' 3, or with pin 'offload' 'disk'",
                sum(together) - each.host_has,
            )
