"""The zoo in turns: models of all kinds in 2 and 4 stages under every schedule, against the original in float64.

``python -m benchmarks.zoo_turns [MODEL ...]`` runs all ranks in one process, prints progress and writes
``results/zoo_turns.md`` and ``results/zoo_turns.json``.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from benchmarks import record

MODELS = ("gpt2", "llama", "t5", "vit", "bert", "unet")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev")
MICRO_BATCHES = (1, 4, 7)
COMPOSED: tuple[Mapping[str, Any], ...] = (
    {"pipeline": 2, "micro_batches": 7, "schedule": "1f1b", "tensor": 2},
    {"pipeline": 2, "micro_batches": 7, "schedule": "zero_bubble", "data": 2, "zero": 3},
    {"pipeline": 2, "micro_batches": 7, "schedule": "1f1b", "data": 2, "tensor": 2},
    {"pipeline": 2, "micro_batches": 7, "schedule": "interleaved_1f1b", "data": 2, "recompute": "full"},
)


def cells() -> list[Mapping[str, Any]]:
    """All pins."""
    alone = [
        {"pipeline": stages, "micro_batches": count, "schedule": schedule}
        for stages, schedule, count in itertools.product((2, 4), SCHEDULES, MICRO_BATCHES)
    ]
    return [*alone, *COMPOSED]


def main(models: Sequence[str]) -> int:
    """Run the table; returns how many cells failed."""
    facts, start, rows = record.circumstances(), time.monotonic(), []
    chosen = [name for name in MODELS if not models or name in models]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), initializer=quiet) as pool:
        for done in as_completed([pool.submit(run, name) for name in chosen]):
            rows += done.result()
            failed = [row for row in rows if row["status"] == "FAILED"]
            print(f"[{time.monotonic() - start:5.0f} s] {len(rows)} cells, {len(failed)} failed", flush=True)
            for row in (row for row in done.result() if row["status"] == "FAILED"):
                print(f"  FAILED {row['model']} {row['pin']}: {row['why']}", flush=True)
    said = summary(rows)
    if not models:
        notes = (
            "Models of the tests, all ranks in one process, in float64: the largest relative error of the loss and of "
            "every gradient over the global batch, whose micro-batches ignore different numbers of tokens. The emitted "
            f"programs are type-checked, and collectives counted, as well. {said}"
        )
        record.write("zoo_turns", "The zoo in turns", notes, table(rows), rows, facts)
    print(said)
    return sum(row["status"] == "FAILED" for row in rows)


def quiet() -> None:
    """One thread a process, and no chatter of third parties."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def run(model: str) -> list[dict[str, Any]]:
    """All cells of a model."""
    from planner.errors import PinError
    from tests.autopar.test_turns_models import check

    rows = []
    for pin in cells():
        row: dict[str, Any] = {"model": model, "pin": dict(pin), "status": "equal", "why": ""}
        try:
            row["error"] = check(model, pin)
        except PinError as error:
            row |= {"status": "n/a", "why": str(error)}
        except Exception:
            row |= {"status": "FAILED", "why": traceback.format_exc(limit=-4)}
        rows.append(row)
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line about everything."""
    count = {status: sum(row["status"] == status for row in rows) for status in ("equal", "n/a", "FAILED")}
    worst = max((row["error"] for row in rows if "error" in row), default=0.0)
    return (
        f"{count['equal']} equal, {count['n/a']} not applicable, {count['FAILED']} failed; largest relative error "
        f"{worst:.1e}."
    )


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row for each pin, a column for each model."""
    found = {(row["model"], str(row["pin"])): row for row in rows}
    lines = []
    for pin in cells():
        each = [found[model, str(dict(pin))] for model in MODELS]
        errors = [f"{row['error']:.0e}" if row["status"] == "equal" else row["status"] for row in each]
        told = ", ".join(f"{name} {value}" for name, value in pin.items())
        lines.append({"plan": told, **dict(zip(MODELS, errors, strict=True))})
    return lines


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
