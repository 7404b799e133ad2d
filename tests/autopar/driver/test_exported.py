"""Exported configurations that can run here give the original's loss and gradients, on processes over gloo."""

from __future__ import annotations

import pytest

from autopar.measure.local_processes import LocalProcesses
from planner.plan.plan import Plan
from tests.autopar.exported import EXPORTED, GRADIENTS, PINS, READERS, gradients_alike

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("name", PINS["fsdp2"])
def test_fsdp2_code_gives_the_loss_and_the_gradients_of_the_original(pool: LocalProcesses, name: str) -> None:
    assert gradients_alike(pool, "fsdp2", name) == GRADIENTS


@pytest.mark.parametrize("name", PINS["hf"])
def test_transformers_makes_of_its_configuration_a_model_with_the_original_s_loss_and_gradients(
    pool: LocalProcesses, name: str
) -> None:
    pytest.importorskip("accelerate", reason="Transformers loads sharded models with it")
    assert gradients_alike(pool, "hf", name) == GRADIENTS


@pytest.mark.parametrize("to, name", [(to, name) for to, reader in READERS.items() for name in reader.plans])
def test_a_tool_reads_what_is_written_for_it(to: str, name: str) -> None:
    reader = READERS[to]
    pytest.importorskip(reader.module)
    reader.check(Plan.load(EXPORTED / f"{name}.json").export(to))
