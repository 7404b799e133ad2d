"""Reads pages of mapped files ahead, and reports where the system cannot.

A process that touches a page of a file which cannot be read, or not be written, is ended by the system (SIGBUS), with
whatever it was doing. Asked for the page, the system says so instead, and what it brings is there for the next touch.
Where all pages are in memory already nothing can fail, and seeing that takes a hundredth of the time of a copy.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

from torch import Tensor

READ, WRITE = 22, 23
"""What pages are for: ``MADV_POPULATE_READ`` and ``MADV_POPULATE_WRITE``. Linux knows them from 5.14 on."""
FAILED = (errno.EFAULT, errno.EIO, getattr(errno, "EHWPOISON", 133))
"""What a system that was asked says of pages that it cannot bring; any other error is of the asking."""


def cannot_bring(tensor: Tensor, way: int) -> str | None:
    """Why the system cannot bring the pages of a tensor's memory; ``None``: they are there, or it cannot be asked."""
    if not tensor.numel() or _system is None:
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = tensor.data_ptr() + (last + 1) * tensor.element_size() - start
    place = ctypes.c_void_p(start), ctypes.c_size_t(length)
    there = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    if not _system.mincore(*place, there) and bytes(there).count(1) == len(there):
        return None
    if not _system.madvise(*place, way):
        return None
    return os.strerror(ctypes.get_errno()) if ctypes.get_errno() in FAILED else None


_system = ctypes.CDLL(None, use_errno=True) if os.uname().sysname == "Linux" else None
