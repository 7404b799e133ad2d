"""The machine that this process runs on: its cores, its memory, its GPUs. Nothing here needs torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from planner.base.errors import ClusterError


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Memory of this machine, or of this container where that is less."""
    try:
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        raise ClusterError("the memory of this machine is not known; give memory_bytes, for example '8 GiB'") from None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return installed
    return min(installed, int(limit)) if limit.isdecimal() else installed


def gpus() -> list[str]:
    """Names of the NVIDIA GPUs, as the driver's own tool lists them; none where there is no such tool."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.stdout.splitlines() if line.strip()]
