"""Which devices a job has: within one node where they are no more than a node's, else whole nodes.

Devices of a node are alike. Job sizes that divide one another fit into nodes whenever there are enough devices for
all, though some jobs may have to move to make room.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Name = TypeVar("Name")
Devices = tuple[int, ...]
"""Numbers of devices, as the cluster numbers its ranks."""


def place(wanted: Mapping[Name, int], placed: Mapping[Name, Devices], nodes: int, per_node: int) -> dict[Name, Devices]:
    """Devices of every job.

    Args:
        wanted: how many each has.
        placed: those that may stay where they are; of these the smallest move where others have no room.
    """
    kept = dict(placed)
    by_size = sorted(placed, key=lambda name: -wanted[name])
    while (found := _placed_beside(kept, wanted, nodes, per_node)) is None:
        assert by_size, f"{sorted(wanted.values())} devices do not fit {nodes} nodes of {per_node}"
        del kept[by_size.pop()]
    return found


def _placed_beside(
    kept: Mapping[Name, Devices], wanted: Mapping[Name, int], nodes: int, per_node: int
) -> dict[Name, Devices] | None:
    """All others beside those that are kept, the largest first, each where the least is left; ``None``: no room."""
    taken = {device for devices in kept.values() for device in devices}
    free = [
        [device for device in range(node * per_node, (node + 1) * per_node) if device not in taken]
        for node in range(nodes)
    ]
    found = dict(kept)
    for name in sorted((name for name in wanted if name not in kept), key=lambda name: -wanted[name]):
        count = wanted[name]
        each = min(count, per_node)
        fitting = sorted((node for node in range(nodes) if len(free[node]) >= each), key=lambda node: len(free[node]))
        some = sorted(fitting[: -(-count // per_node)])
        if len(some) * each < count:
            return None
        found[name] = tuple(device for node in some for device in free[node][:each])
        for node in some:
            free[node] = free[node][each:]
    return found
