"""What this machine is said to have is what a container may use of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.base import host


def in_container(monkeypatch: pytest.MonkeyPatch, folder: Path, **limits: str) -> None:
    monkeypatch.setattr(host, "CONTROL_GROUP", folder)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name, limit in limits.items():
        folder.joinpath(name.replace("_", ".")).write_text(f"{limit}\n")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("200000 100000", 2), ("150000 100000", 2), ("20000 100000", 1), ("max 100000", 8), ("1600000 100000", 8)],
)
def test_cores_are_those_that_a_container_has_time_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, expected: int
) -> None:
    in_container(monkeypatch, tmp_path, cpu_max=limit)
    assert host.cores() == expected


def test_memory_is_that_of_the_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = host.memory_bytes()
    in_container(monkeypatch, tmp_path, memory_max=str(2**20))
    assert host.memory_bytes() == 2**20
    in_container(monkeypatch, tmp_path, memory_max="max")
    assert host.memory_bytes() >= installed


def test_without_a_container_all_cores_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_container(monkeypatch, tmp_path)
    assert host.cores() == 8
