"""``autopar fleet``: jobs of models and of tables of step times, planned, scheduled and drawn."""

from pathlib import Path

from typer.testing import CliRunner

from autopar.cli.main import app

RUN = CliRunner()
MODEL = """
import torch
from torch import nn

class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x):
        return self.layers(x).square().mean()

def model():
    return Loss(), {"x": torch.zeros(16, 64)}
"""


def fleet(folder: Path, jobs: str, *words: str) -> tuple[int, str]:
    (folder / "fleet_model.py").write_text(MODEL)
    (folder / "jobs.yaml").write_text(f"jobs:\n{jobs}")
    result = RUN.invoke(app, ["fleet", str(folder / "jobs.yaml"), "--cluster", "local:2", *words])
    return result.exit_code, result.output


def test_models_are_planned_on_every_part_and_scheduled(tmp_path: Path) -> None:
    jobs = (
        f"  - {{name: planned, samples: 1e6, batch: [16, 64], model: '{tmp_path}/fleet_model.py:model'}}\n"
        "  - {name: stated, samples: 1e3, restart_s: 0, steps: [{devices: 1, batch: 8, step_s: 100 ms}]}\n"
    )
    code, text = fleet(tmp_path, jobs, "--time-limit", "5", "--svg", str(tmp_path / "fleet.svg"))
    assert code == 0, text
    assert "2 jobs on local, 2 x cpu" in text and "none is shorter" in text
    assert "batch 64" in text and "stated: ends 12.50 s after its arrival" in text
    assert (tmp_path / "fleet.svg").read_text().startswith("<svg")


def test_a_model_that_cannot_be_loaded_is_named_with_its_job(tmp_path: Path) -> None:
    job = "  - {{name: a, samples: 1, batch: [1, 8], model: '{}'}}\n"
    code, text = fleet(tmp_path, job.format(f"{tmp_path}/fleet_model.py:other"))
    assert code == 2 and "job 'a': module 'fleet_model' has no function 'other'" in text
    code, text = fleet(tmp_path, job.format("nowhere.json"))
    assert code == 2 and "job 'a': cannot read 'nowhere.json'" in text
