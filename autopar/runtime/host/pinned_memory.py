"""Page-locked host memory, which a GPU copies from and to while it computes.

Memory that torch pins is rounded up to a power of two and takes half a second per GiB to get. This is mapped as large
as is asked for, in pages of its own, and registered with the driver, which takes a third of that.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

from planner.base.errors import InfeasibleError
from planner.base.formatting import in_all_bytes


def pinned(size: int) -> Tensor:
    """So many bytes, all 0, that stay in the host's memory until nothing holds them.

    Raises:
        InfeasibleError: the host has no room for them.
    """
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = _Pinned(-1, size)
    except (OSError, ValueError, OverflowError) as error:
        raise InfeasibleError(_no_room(size, error), size) from error
    held = torch.frombuffer(memory, dtype=torch.uint8)
    memory.register(held)
    return held


class _Pinned(mmap.mmap):
    """Pages of memory, and where they were registered."""

    _address = 0

    def register(self, held: Tensor) -> None:
        """Let the driver keep the pages in place.

        Raises:
            InfeasibleError: it cannot.
        """
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):
                self.madvise(mmap.MADV_HUGEPAGE)
        held.zero_()  # by all cores, where the driver would have one page after another come
        try:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(held.data_ptr(), len(self), 0)))
        except torch.cuda.CudaError as error:
            raise InfeasibleError(_no_room(len(self), error), len(self)) from error
        self._address = held.data_ptr()

    def __del__(self) -> None:
        if self._address and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # copies may be under way
            torch.cuda.cudart().cudaHostUnregister(self._address)


def _no_room(size: int, error: Exception) -> str:
    return (
        f"the host does not pin {in_all_bytes(size)} for model data at home there ({error}): free memory "
        "of the host, or shard the model's data over more devices"
    )
