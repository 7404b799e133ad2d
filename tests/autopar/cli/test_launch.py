"""``autopar launch``: what starts a plan, written from its file."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from autopar.cli.main import app
from tests.planner.plans import cluster, plan_of, residual_mlp


def test_what_starts_a_plan_is_written(tmp_path: Path) -> None:
    plan, script = tmp_path / "plan.json", tmp_path / "job.sbatch"
    plan_of(residual_mlp(), cluster(4), {"data": 2, "tensor": 2}).save(plan)
    words = [
        "launch",
        str(plan),
        "--on",
        "slurm",
        "--name",
        "small",
        "--out",
        str(script),
        "--",
        "train.py",
        "--lr",
        "1",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and f"sbatch {script}" in result.output, result.output
    text = script.read_text()
    assert "#SBATCH --job-name=small\n" in text and "' launch train.py --lr 1\n" in text
    assert "# data 2: 2 apart, inside a" in text and "# tensor 2: neighbours, inside a" in text
    result = CliRunner().invoke(app, ["launch", str(plan), "--on", "kubernetes", "--", "train.py"])
    assert result.exit_code == 2 and "containers need an image: --image" in result.output
