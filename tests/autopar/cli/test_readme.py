"""The README, guide and reference are true: examples run, every pin is listed. ``test_quoted`` sees to the plan."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import pytest
import torch
import yaml

import autopar
from autopar.measure.local_processes import LocalProcesses
from planner.base.errors import PinError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE, REFERENCE = ((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("guide.md", "reference.md"))
TRAIN, PLAN, APPLY = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run(folder: str, program: str, seed: int | None = None) -> str:
    """What a program prints that is run in a folder, by one of some processes, each of which draws other numbers unless
    a seed is given.
    """
    before, printed = os.getcwd(), io.StringIO()
    os.chdir(folder)
    torch.manual_seed(torch.distributed.get_rank() if seed is None else seed)
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
    return printed.getvalue()


@pytest.mark.slow
@pytest.mark.processes
def test_the_example_plans_and_trains(pool: LocalProcesses, tmp_path: Path) -> None:
    """In processes that imported torch once; that torchrun starts such programs is for ``test_processes`` to say."""
    before_planning, _, _ = PLAN.partition("plan    =")
    losses = pool.run(run, str(tmp_path), TRAIN, ranks=2)
    assert len(losses[0].splitlines()) == 8 and not losses[1]
    (said,) = pool.run(run, str(tmp_path), PLAN, ranks=1)
    assert "GPT2LMHeadModel" in said and "next best" in said
    assert (tmp_path / "plan.json").exists() and (tmp_path / "plan.html").exists()
    pool.run(run, str(tmp_path), before_planning + APPLY, 0)  # with "the same global batch on every rank"


def test_the_cluster_file_that_is_shown_is_one() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", REFERENCE, flags=re.DOTALL)
    assert ClusterSpec.from_dict(yaml.safe_load(text)).world_size == 32


def test_every_pin_and_preset_is_listed_and_no_other() -> None:
    table = re.search(r"\| pin \|.*?\n\n", REFERENCE, flags=re.DOTALL)
    listed = {name for row in table[0].strip().splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    with pytest.raises(PinError) as caught:
        Pins.parse({"": 1})
    assert listed == set(str(caught.value).partition("known: ")[2].split(", "))
    presets = re.search(r"The presets are (.*?)\.", REFERENCE, flags=re.DOTALL)
    assert set(re.findall(r"`([\w-]+)`", presets[1])) == {
        p.stem for p in (ROOT / "planner" / "cost" / "presets").glob("*.yaml")
    }


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(x)
        return logits


def test_the_example_with_a_loss_function_plans() -> None:
    (whole,) = re.findall(r"```python\n(def loss_fn.*?)```", GUIDE, flags=re.DOTALL)
    example, _, _ = whole.partition("pmodel =")
    x, target = torch.randn(8, 16), torch.zeros(8, dtype=torch.long)
    names = {"torch": torch, "autopar": autopar, "model": Classifier(), "x": x, "target": target}
    exec(example, names | {"cluster": ClusterSpec.local(2)}, found := {})  # type: ignore[var-annotated]
    assert set(found["plan"].inputs) == {"x", "target"}
