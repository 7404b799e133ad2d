"""The machine that this process runs on: its cores, its memory, its GPUs. Nothing here needs torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from planner.base.errors import ClusterError

CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Where Linux says what a container may use (control groups, version 2)."""


def cores() -> int:
    """Cores that this process may use; of a container as many as its share of time is worth, at least one."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota_us, _, period_us = _limit_of_container("cpu.max").partition(" ")
    return max(1, min(usable, round(int(quota_us) / int(period_us)))) if quota_us.isdecimal() else usable


def memory_bytes() -> int:
    """Memory of this machine, or of this container where that is less."""
    try:
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        raise ClusterError("the memory of this machine is not known; give memory_bytes, for example '8 GiB'") from None
    limit = _limit_of_container("memory.max")
    return min(installed, int(limit)) if limit.isdecimal() else installed


def _limit_of_container(name: str) -> str:
    """What Linux says of this container's control group; empty where it says nothing."""
    try:
        return (CONTROL_GROUP / name).read_text(encoding="ascii").strip()
    except OSError:
        return ""


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
