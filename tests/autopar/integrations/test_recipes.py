"""Each recipe of docs/integrations.md, as it stands, trains as the framework's own class does in one process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

for _name in ("accelerate", "lightning", "peft", "trl"):
    pytest.importorskip(_name)

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## (.*?)\n\n```python\n(.*?)```", PAGE, flags=re.MULTILINE | re.DOTALL))

pytestmark = [pytest.mark.processes, pytest.mark.slow]


REFUSED = {
    "parts": r"this rank's part .* give prepare\(\) a torch.utils.data.DataLoader of whole batches",
    "modules": r"one parallel module with one optimizer, and here are 2",
    "original": r"the model is a LlamaForCausalLM: give what autopar.parallelize",
    "loss": r"compute_loss_func is decided by the plan .* loss_fn",
    "recomputed": r"activation_checkpointing is decided by the plan .* pin 'recompute'",
    "compiled": r"torch_compile is decided by the plan .* autopar.parallelize\(\.\.\., compile=True\)",
    "optimizer": r"SGD is made with optimizer_dict of a whole model",
    "whole state": r"delete its optimizer.pt to go on from the weights alone",
    "adapters": r"peft_config .* before autopar.parallelize",
    "another loss": r"loss_type='dft': the loss is a part of the plan",
    "recomputed by default": r"SFTConfig\(\.\.\., activation_checkpointing=False\), and pin 'recompute'",
    "dispatched": r"dispatch_batches .* every process of a plan loads whole batches",
    "parameters": r"layer.weight of LightningModule is no parameter of its parallel module",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every run of every recipe logged and wrote, on every rank."""
    place = str(tmp_path_factory.mktemp("home"))
    environment = {**os.environ, "HF_HOME": place, "TMPDIR": place, "TRL_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "tests.autopar.integrations.recipes"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("run, like", [("four", "own"), ("two, going on", "own, going on")])
@pytest.mark.parametrize("title", RECIPES)
def test_every_process_sees_what_one_process_of_the_framework_sees(
    runs: dict[str, Any], title: str, run: str, like: str
) -> None:
    """Losses, norms, rates, metrics and the weights in the end; and where another plan goes on."""
    expected, got = runs[title][like], runs[title][run]
    assert isinstance(expected, list), expected
    assert isinstance(got, list), got
    (alone,) = expected
    assert len(alone["logged"]) >= 3 and len(alone["weights"]) > 20
    # TRL computes log-probabilities in float32, whatever the model's dtype.
    tolerance = {"rel": 1e-5, "abs": 1e-7} if title.startswith("TRL") else {"rel": 1e-9, "abs": 1e-12}
    for rank in got:
        assert flat(rank) == pytest.approx(flat(alone), **tolerance), title


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Numbers in nested lists and dicts, by where they are."""
    if isinstance(tree, dict):
        return {name: value for key, each in tree.items() for name, value in flat(each, f"{path}.{key}").items()}
    if isinstance(tree, list):
        return {name: value for at, each in enumerate(tree) for name, value in flat(each, f"{path}.{at}").items()}
    return {} if tree is None else {path: tree}


@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_is_short(title: str) -> None:
    assert len([line for line in RECIPES[title].splitlines() if line]) < 15


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_said(runs: dict[str, Any], case: str) -> None:
    assert re.search(REFUSED[case], runs["refused"][case])


def test_a_trainer_evaluates_predicts_and_takes_what_it_is_given_as_in_one_process(runs: dict[str, Any]) -> None:
    (alone,), ranks = runs["around"]
    losses, last, restored, _, step = alone["best"]
    assert step < 3 and last != restored and restored in losses  # or no other model would be loaded
    for rank in ranks:
        assert flat(rank) == pytest.approx(flat(alone), rel=1e-9, abs=1e-12)


def test_mixed_precision_is_that_of_the_accelerator(runs: dict[str, Any]) -> None:
    mixed, mixed_as_well, plain, autocast = runs["autocast"]
    assert mixed == mixed_as_well == autocast != plain


def test_values_of_the_global_batch_are_neither_added_up_nor_shared_out(runs: dict[str, Any]) -> None:
    whole = {"reduced": [3.0, 3.0, 3.0], "gathered": [{"text": "a"}], "share": [1, 2, 3]}
    assert runs["without a share"] == [whole | {"triggered": [True, False]}] * 2  # which one of two did


def test_lightning_needs_no_other_framework() -> None:
    source = (ROOT / "autopar/integrations/lightning.py").read_text(encoding="utf-8")
    assert not re.search(r"^(from|import) [\w.]*(accelerate|transformers|trl|peft)\b", source, flags=re.MULTILINE)
