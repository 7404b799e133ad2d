"""Exported configurations that can run here give the original's loss and gradients, on processes over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import ClusterSpec
from autopar.measure.local_processes import LocalProcesses
from planner.interchange.accelerate import SIZES
from planner.plan.plan import Plan
from tests.autopar.exported import GRADIENTS, batch, decoder, run_fsdp2, run_hf

pytestmark = pytest.mark.processes
EXPORTED = Path(__file__).parents[2] / "planner" / "golden" / "export"
PINS: dict[str, dict[str, Any]] = {
    "copies and shards, recomputing": {"replicate": 2, "data": 2, "zero": 3, "recompute": "full", "micro_batches": 2},
    "tensor, recomputing": {"data": 2, "tensor": 2, "zero": 1, "recompute": "selective", "micro_batches": 2},
    "interleaved, sharded": {"pipeline": 2, "data": 2, "zero": 1, "micro_batches": 4, "virtual_stages": 2},
}


@pytest.fixture(scope="module")
def processes() -> Iterator[LocalProcesses]:
    with LocalProcesses(4, ("torch", "tests.autopar.exported"), timeout_s=60) as pool:
        yield pool


@pytest.mark.parametrize("pin", PINS.values(), ids=PINS)
def test_fsdp2_code_gives_the_loss_and_the_gradients_of_the_original(
    processes: LocalProcesses, pin: dict[str, Any]
) -> None:
    plan = autopar.plan(decoder(), ClusterSpec.local(4), example_kwargs=batch(), pin=pin, time_limit_s=10)
    exported = plan.export("fsdp2", time_limit_s=1)
    assert sum(processes.run(run_fsdp2, exported.text)) * pin.get("pipeline", 1) == 4 * GRADIENTS


def test_transformers_makes_of_its_configuration_a_model_with_the_original_s_loss_and_gradients(
    processes: LocalProcesses, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="Transformers loads sharded models with it")
    pin = {"data": 2, "tensor": 2, "zero": 3, "micro_batches": 1}
    plan = autopar.plan(decoder(), ClusterSpec.local(4), example_kwargs=batch(), pin=pin)
    exported = plan.export("hf", time_limit_s=1)
    model: Any = decoder()
    model.save_pretrained(tmp_path)
    assert min(processes.run(run_hf, exported.text, str(tmp_path))) == GRADIENTS


@pytest.mark.parametrize("name", ["dense", "pipelined", "sequence", "sparse"])
def test_accelerate_reads_what_is_written_for_it(tmp_path: Path, name: str) -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    exported = Plan.load(EXPORTED / f"{name}.json").export("accelerate")
    exported.save(tmp_path / "config.yaml")
    words = ["--config_file", str(tmp_path / "config.yaml"), "train.py"]
    args, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    assert args.use_fsdp and int(args.fsdp_version) == 2 and int(args.num_processes) == 8
    said = {ours: int(getattr(args, f"parallelism_config_{name}")) for name, ours in SIZES.items()}
    assert said == {ours: getattr(exported.description, ours) for ours in SIZES.values()}
    assert (str(args.fsdp_reshard_after_forward).lower() == "true") == (exported.description.zero == 3)
