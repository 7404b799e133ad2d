"""The zoo: every model under every plan, on all ranks in one process, against the original in float64.

``python -m benchmarks.zoo [MODEL ...]`` prints progress and writes ``results/zoo.md`` and ``results/zoo.json``. Where
models are named, rows of the others stay as they were recorded.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from benchmarks import record
from benchmarks.beside import summary

PROCESSES = max(1, min(2, os.cpu_count() or 1))
SLOWEST_FIRST = ("t5", "llama", "gpt2", "resnet", "bert", "shared-layers", "encoder", "functional-gpt", "vit")


def main(models: Sequence[str]) -> int:
    """Run the matrix; returns how many cells failed."""
    from tests.autopar.matrix import RECIPES
    from tests.autopar.models import MODELS

    order = [*SLOWEST_FIRST, *(name for name in MODELS if name not in SLOWEST_FIRST)]
    chosen = [name for name in order if not models or name in models]
    meshes = list(dict.fromkeys(recipe.sizes for recipe in RECIPES))
    facts, start, rows = record.circumstances(), time.monotonic(), []
    total = len(chosen) * len(RECIPES)
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn"), initializer=quiet) as pool:
        waiting = [pool.submit(run, name, sizes) for name in chosen for sizes in reversed(meshes)]
        for done in as_completed(waiting):
            rows += done.result()
            elapsed = time.monotonic() - start
            failed = [row for row in rows if row["status"] == "FAILED"]
            print(f"[{elapsed:5.0f} s] {len(rows)}/{total}, {len(failed)} failed", flush=True)
            for row in done.result():
                if row["status"] == "FAILED":
                    print(f"  FAILED {row['model']} {row['mesh']} {row['plan']}: {row['why']}", flush=True)
    rows = [row | {"commit": facts["commit"]} for row in rows]
    print(told(rows))
    write([*(row for row in recorded() if row["model"] not in chosen), *rows], facts)
    return sum(row["status"] == "FAILED" for row in rows)


def quiet() -> None:
    """One thread a process, and no chatter of third parties."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def run(model: str, sizes: str) -> list[dict[str, object]]:
    """All recipes of one mesh for one model."""
    from tests.autopar.matrix import RECIPES, Cell, check

    rows: list[dict[str, object]] = []
    for recipe in RECIPES:
        if recipe.sizes != sizes:
            continue
        try:
            cell = check(model, recipe)
        except Exception:
            cell = Cell(model, recipe, "FAILED", traceback.format_exc(limit=-4))
        row: dict[str, object] = {
            "model": model, "mesh": sizes, "plan": recipe.name, "status": cell.status, "why": cell.why,
            "seconds": round(cell.seconds, 2),
        }  # fmt: skip
        if cell.agreement is not None:
            a = cell.agreement
            row |= {
                "outputs": max(a.outputs.values(), default=0.0),
                "gradients": max(a.gradients.values(), default=0.0),
                "buffers": max(a.buffers.values(), default=0.0),
                "calls": sum(a.calls.values()),
                "miscounted": list(a.miscounted),
            }
        rows.append(row)
    return rows


def told(rows: Sequence[dict[str, Any]]) -> str:
    """One line about everything."""
    seconds = sum(row["seconds"] for row in rows)
    errors = (max(row["outputs"], row["gradients"], row["buffers"]) for row in rows if "outputs" in row)
    return f"{summary(rows, errors)}; {seconds / 60:.0f} minutes of one process"


def recorded() -> list[dict[str, Any]]:
    """The rows of earlier runs."""
    path = record.RESULTS / "zoo.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def write(rows: Sequence[dict[str, Any]], facts: dict[str, Any]) -> None:
    """Write the table, the machine and versions of the last run, and the commit that each model ran at."""
    record.RESULTS.mkdir(exist_ok=True)
    by_commit: dict[str, list[str]] = {}
    for model, commit in sorted({(row["model"], row["commit"]) for row in rows}):
        by_commit.setdefault(commit, []).append(model)
    ordered = sorted(rows, key=lambda row: (row["model"], row["mesh"]))
    (record.RESULTS / "zoo.json").write_text(json.dumps({"machine": facts, "rows": ordered}, indent=1) + "\n")
    lines = [
        "# The zoo",
        "",
        "Every model under every plan, run on all ranks of the mesh in one process, in float64, forward and backward,",
        "against the original: largest relative error of any output, gradient or buffer; then how many collective",
        "calls were observed, each of them predicted. The emitted program is type-checked as well. Written by",
        "`make zoo`.",
        "",
        told(rows) + ".",
        "",
        *(f"* {name}: {value}" for name, value in facts.items() if name != "commit"),
        *(f"* commit {commit}: {', '.join(names)}" for commit, names in by_commit.items()),
        "",
    ]
    for mesh in sorted({str(row["mesh"]) for row in rows}, key=lambda mesh: (len(mesh), mesh)):
        here = [row for row in rows if row["mesh"] == mesh]
        plans = list(dict.fromkeys(str(row["plan"]) for row in here))
        models = sorted({str(row["model"]) for row in here})
        cells = {(row["model"], row["plan"]): cell(row) for row in here}
        lines += [f"## Mesh {mesh}", "", "| plan | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|"]
        lines += [
            f"| {plan} | " + " | ".join(cells.get((model, plan), "") for model in models) + " |" for plan in plans
        ]
        lines.append("")
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != "equal":
            models_of = reasons.setdefault(f"{row['status']}: {row['why']}", [])
            if row["model"] not in models_of:
                models_of.append(str(row["model"]))
    lines += ["## Why not", "", *(f"* {', '.join(names)}: {why}" for why, names in sorted(reasons.items())), ""]
    (record.RESULTS / "zoo.md").write_text("\n".join(lines))


def cell(row: dict[str, Any]) -> str:
    if row["status"] != "equal":
        return str(row["status"])
    worst = max(row["outputs"], row["gradients"], row["buffers"])
    return f"{worst:.0e}, {row['calls']}"


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
