"""The README is true: its example runs, its plan is the golden one, and what it links to exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PLAN, APPLY = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.mark.slow
@pytest.mark.processes
def test_the_example_plans_and_trains(tmp_path: Path) -> None:
    (tmp_path / "plan.py").write_text(PLAN)
    said = run(tmp_path, "plan.py")
    assert "GPT2LMHeadModel" in said and "next best" in said
    assert (tmp_path / "plan.json").exists() and (tmp_path / "plan.html").exists()
    before_planning, _, _ = PLAN.partition("plan    =")
    (tmp_path / "train.py").write_text(before_planning + APPLY)
    run(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "train.py")


def test_the_plan_in_the_readme_is_the_golden_one() -> None:
    golden = (ROOT / "tests" / "planner" / "golden" / "gpt2.txt").read_text(encoding="utf-8")
    assert golden.rstrip() in README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    paths = re.findall(r"`((?:planner|autopar|tests|docs|notebooks|benchmarks)/[\w./]*)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert not missing
