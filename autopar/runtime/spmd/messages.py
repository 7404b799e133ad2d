"""Messages between the ranks of a group, all of one size: around a ring, or between mirror images.

Each is an all-to-all in which a rank sends all to one other, and gets as much from one. It is on its way until
:func:`wait`. Tensors may be those of all ranks at once, where one process simulates them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from autopar.runtime.spmd.rank_index import cut
from autopar.runtime.spmd.row_exchange import splits


def shift(tensor: Tensor, ring: ProcessGroup, by: int = 1) -> Tensor:
    """``tensor[n]`` of the rank before in a ring, which sends it while this one sends its own to the next; or to one
    that is ``by`` ranks further.

    Returns:
        What arrives, to be waited for (:func:`wait`); ``tensor`` must stay as it is until then.
    """
    return _sent(tensor, ring, lambda here: ((here + by) % ring.size(), (here - by) % ring.size()))


def mirror(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """``tensor[n]`` of the rank that is as far from the last as this one is from the first, which has this one's; as
    :func:`shift`.
    """
    return _sent(tensor, group, lambda here: (group.size() - 1 - here,) * 2)


def _sent(tensor: Tensor, group: ProcessGroup, ends: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    """One message: ``ends`` gives of this rank where it goes, and whence one comes."""
    with torch.device("cpu"), spmd.no_typecheck():
        ranks = torch.arange(group.size())
        sent, received = (len(tensor) * (ranks == end) for end in ends(cut(ranks, (group,))))
    there: Any = [*splits(sent, group)]
    here: Any = [*splits(received, group)]
    return torch.ops._c10d_functional.all_to_all_single.default(tensor, here, there, group.group_name)


def wait(tensor: Tensor) -> Tensor:
    """What a collective gives, once it is there."""
    return torch.ops._c10d_functional.wait_tensor.default(tensor)
