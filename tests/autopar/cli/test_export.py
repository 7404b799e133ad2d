"""``autopar export``: from a plan's file to a configuration of another tool, with and without the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from autopar.cli.main import app
from tests.autopar.cli.test_cli import LLAMA

RUN = CliRunner()
PIN = "pipeline=2,data=2,micro_batches=2,zero=1"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


@pytest.fixture(scope="module")
def plan_file(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    words = ["plan", str(config), "--cluster", "local:4", "--seq", "16", "--pin", PIN, "--out", str(path)]
    assert RUN.invoke(app, words).exit_code == 0
    return path


def test_a_plan_is_exported_and_what_is_lost_is_priced(config: Path, plan_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "accelerate.yaml"
    words = ["export", str(plan_file), "--to", "accelerate", "--model", str(config), "--out", str(out)]
    result = RUN.invoke(app, words)
    assert result.exit_code == 0, result.stderr
    assert "pipeline parallel 2 -> 1" in result.stdout
    assert "as configured" in result.stdout
    assert yaml.safe_load(out.read_text())["parallelism_config"]["parallelism_config_dp_shard_size"] == 4


def test_without_the_model_the_text_alone_goes_to_stdout(plan_file: Path) -> None:
    result = RUN.invoke(app, ["export", str(plan_file), "--to", "deepspeed"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["zero_optimization"] == {"stage": 1}
    assert "--model" in result.stderr


def test_an_unknown_format_is_refused_before_the_plan_is_read(tmp_path: Path) -> None:
    result = RUN.invoke(app, ["export", str(tmp_path / "none.json"), "--to", "megatrn"])
    assert result.exit_code == 2
    assert "there is no format 'megatrn'; did you mean 'megatron'?" in result.stderr


# ---- lint ------------------------------------------------------------------------------------------------------------

GOOD = '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 3}}'


def linted(config: Path, text: str, folder: Path, *words: str) -> Result:
    path = folder / "other.cfg"
    path.write_text(text)
    return RUN.invoke(app, ["lint", str(path), "--model", str(config), "--cluster", "local:4", "--seq", "16", *words])


def test_a_configuration_that_runs_is_priced_beside_the_best_and_a_change(config: Path, tmp_path: Path) -> None:
    result = linted(config, GOOD, tmp_path, "--time-limit", "4")
    assert result.exit_code == 0, result.output
    assert "for DeepSpeed 0.19.8: runs" in result.stdout
    for word in ("fits: ", "takes: ", "best: ", "change: "):
        assert word in result.stdout


def test_what_does_not_run_exits_with_1_and_says_what_to_change(config: Path, tmp_path: Path) -> None:
    result = linted(config, '{"tp_size": 4, "fsdp_size": 1}', tmp_path, "--time-limit", "0")
    assert result.exit_code == 1
    assert "does not run, for 1 reason" in result.stdout
    assert "attention has 2 heads of keys and values, which 4 ranks do not divide: set tp_size to 2" in result.stdout


def test_a_configuration_that_is_not_there_is_one_message(config: Path) -> None:
    result = RUN.invoke(app, ["lint", "none.json", "--model", str(config), "--cluster", "local:4"])
    assert result.exit_code == 2
    assert "cannot read the configuration 'none.json'" in result.stderr
