"""Exported configurations that can run here give the original's loss and gradients, on processes over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import ClusterSpec
from autopar.measure.local_processes import LocalProcesses
from tests.autopar.exported import batch, llama, run_fsdp2, run_hf

pytestmark = pytest.mark.processes
PINS: dict[str, dict[str, Any]] = {
    "data": {"data": 4, "zero": 3, "micro_batches": 2, "pipeline": 1},
    "copies and shards, recomputing": {"replicate": 2, "data": 2, "zero": 2, "recompute": "full", "micro_batches": 1},
    "tensor, recomputing": {"data": 2, "tensor": 2, "zero": 3, "recompute": "selective", "micro_batches": 1},
    "pipeline": {"pipeline": 2, "data": 2, "zero": 1, "micro_batches": 2, "schedule": "1f1b"},
    "interleaved": {"pipeline": 2, "data": 2, "zero": 0, "micro_batches": 4, "virtual_stages": 2},
}


@pytest.fixture(scope="module")
def processes() -> Iterator[LocalProcesses]:
    with LocalProcesses(4, ("torch", "tests.autopar.exported"), timeout_s=60) as pool:
        yield pool


@pytest.mark.parametrize("pin", PINS.values(), ids=PINS)
def test_fsdp2_code_gives_the_loss_and_the_gradients_of_the_original(
    processes: LocalProcesses, pin: dict[str, Any]
) -> None:
    plan = autopar.plan(llama(), ClusterSpec.local(4), example_kwargs=batch(), pin=pin, time_limit_s=10)
    exported = plan.export("fsdp2", time_limit_s=1)
    assert sum({*processes.run(run_fsdp2, exported.text)}) >= 39


@pytest.mark.parametrize("name", ["data", "tensor"])
def test_transformers_makes_of_its_configuration_a_model_with_the_original_s_loss_and_gradients(
    processes: LocalProcesses, tmp_path: Path, name: str
) -> None:
    pytest.importorskip("accelerate", reason="Transformers loads sharded models with it")
    pin = {"data": {"data": 4, "zero": 3}, "tensor": {"data": 2, "tensor": 2, "zero": 3}}[name]
    plan = autopar.plan(llama(), ClusterSpec.local(4), example_kwargs=batch(), pin={**pin, "micro_batches": 1})
    exported = plan.export("hf", time_limit_s=1)
    model: Any = llama()
    model.save_pretrained(tmp_path)
    assert min(processes.run(run_hf, exported.text, str(tmp_path))) == 39
