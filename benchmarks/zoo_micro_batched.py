"""The micro-batched zoo: models of all kinds in 2 and 4 stages under every schedule, against the original in float64.

``python -m benchmarks.zoo_micro_batched [MODEL ...]`` prints progress and writes ``results/zoo_micro_batched.md`` and
``results/zoo_micro_batched.json``. One step of each cell runs with all ranks in one process; then every model is
trained for three steps, clipped, on 4 and on 8 gloo processes.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from autopar.measure.local_processes import LocalProcesses
from benchmarks import record
from benchmarks.beside import largest_error, summary
from benchmarks.zoo import PROCESSES, quiet

MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v3", "gpt-oss")
MODELS = ("gpt2", "llama", "t5", "vit", "bert", "unet", *MIXTURES)
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev")
MICRO_BATCHES = (1, 4, 7)
COMPOSED: tuple[Mapping[str, Any], ...] = (
    {"pipeline": 2, "micro_batches": 7, "schedule": "1f1b", "tensor": 2},
    {"pipeline": 2, "micro_batches": 7, "schedule": "zero_bubble", "data": 2, "zero": 3},
    {"pipeline": 2, "micro_batches": 7, "schedule": "1f1b", "data": 2, "tensor": 2},
    {"pipeline": 2, "micro_batches": 7, "schedule": "interleaved_1f1b", "data": 2, "recompute": "full"},
    {"pipeline": 2, "micro_batches": 7, "schedule": "1f1b", "expert": 2},
    {"pipeline": 2, "micro_batches": 7, "schedule": "interleaved_1f1b", "expert": 2, "tensor": 2, "recompute": "full"},
    {"pipeline": 1, "micro_batches": 7, "expert": 4, "zero": 3},
)
TRAINED: tuple[Mapping[str, Any], ...] = (
    {"pipeline": 4, "micro_batches": 4, "schedule": "1f1b"},
    {"pipeline": 2, "micro_batches": 7, "schedule": "zero_bubble", "tensor": 2},
    {"pipeline": 2, "micro_batches": 7, "schedule": "1f1b", "data": 2, "tensor": 2},
    {"pipeline": 2, "micro_batches": 7, "schedule": "1f1b", "expert": 2},
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
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn"), initializer=quiet) as pool:
        for done in as_completed([pool.submit(run, name) for name in chosen]):
            rows += done.result()
            failed = [row for row in rows if row["status"] == "FAILED"]
            print(f"[{time.monotonic() - start:5.0f} s] {len(rows)} cells, {len(failed)} failed", flush=True)
            for row in (row for row in done.result() if row["status"] == "FAILED"):
                print(f"  FAILED {row['model']} {row['pin']}: {row['why']}", flush=True)
    with LocalProcesses(8, ("torch", "tests.autopar.verification.test_micro_batched_models")) as processes:
        for name, pin in itertools.product(chosen, TRAINED):
            rows.append(train(processes, name, pin))
            print(
                f"[{time.monotonic() - start:5.0f} s] {name}, trained with {dict(pin)}: {rows[-1]['status']}",
                flush=True,
            )
    said = summary(rows, (row["error"] for row in rows if "error" in row)) + "."
    if not models:
        notes = (
            "Models of the tests, all ranks in one process, in float64: the largest relative error of the loss and of "
            "every gradient over the global batch, whose micro-batches ignore different numbers of tokens. The emitted "
            "programs are type-checked, and collectives counted, as well. With *processes*: the largest error of any "
            f"loss or weight in three steps of AdamW with clipping, on so many gloo processes. {said}"
        )
        record.write("zoo_micro_batched", "The micro-batched zoo", notes, table(rows), rows, facts)
    print(said)
    return sum(row["status"] == "FAILED" for row in rows)


def run(model: str) -> list[dict[str, Any]]:
    """All cells of a model."""
    from planner.base.errors import AutoparError, PinError
    from tests.autopar.verification.test_micro_batched_models import check

    rows = []
    for pin in cells():
        row: dict[str, Any] = {"model": model, "pin": dict(pin), "status": "equal", "why": ""}
        try:
            row["error"] = check(model, pin)
        except PinError as error:
            row |= {"status": "n/a", "why": str(error)}
        except (AssertionError, AutoparError, RuntimeError):
            row |= {"status": "FAILED", "why": traceback.format_exc(limit=-4)}
        rows.append(row)
    return rows


def train(processes: LocalProcesses, model: str, pin: Mapping[str, Any]) -> dict[str, Any]:
    """Three steps of a model on as many processes as the pins ask for."""
    from autopar.measure.local_processes import RankError
    from planner.base.errors import PinError
    from tests.autopar.verification.test_micro_batched_models import planned

    ranks = _ranks(pin)
    row: dict[str, Any] = {"model": model, "pin": {**pin, "processes": ranks}, "status": "equal", "why": ""}
    try:
        document = planned(model, pin)[1].to_dict()
        row["error"] = max(processes.run(trained, model, document, ranks=ranks))
        if not row["error"] <= 1e-10:
            row |= {"status": "FAILED", "why": f"relative error {row['error']:.1e}"}
    except PinError as error:
        row |= {"status": "n/a", "why": str(error)}
    except RankError as error:
        row |= {"status": "FAILED", "why": str(error)}
    return row


def _ranks(pin: Mapping[str, Any]) -> int:
    return math.prod(pin.get(axis, 1) for axis in ("pipeline", "data", "expert", "tensor"))


def trained(name: str, document: Mapping[str, Any]) -> float:
    """On a rank: the largest relative error of a loss or a weight in three steps of AdamW with clipping."""
    import torch

    import autopar
    from autopar.verification.float64 import exact, widen
    from tests.autopar.verification.test_micro_batched_models import made

    model, batch = made(name)
    batch, plan = widen(batch), autopar.Plan.from_dict(document)
    with exact():
        model = model.double()
        pmodel = autopar.parallelize(model, plan.cluster, plan=plan, example_kwargs=batch)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (model, pmodel)]

        def losses(step: int) -> list[torch.Tensor]:
            given = {key: value.roll(step, -1) for key, value in batch.items()}
            return [m(**inputs)["loss"] for m, inputs in ((model, given), (pmodel, pmodel.shard(given)))]

        return largest_error(model, pmodel, optimizers, losses, 3)


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row for each pin, a column for each model."""
    found = {(row["model"], str(row["pin"])): row for row in rows}
    lines = []
    for pin in (*cells(), *({**pin, "processes": _ranks(pin)} for pin in TRAINED)):
        each = [found[model, str(dict(pin))] for model in MODELS]
        errors = [f"{row['error']:.0e}" if row["status"] == "equal" else row["status"] for row in each]
        told = ", ".join(f"{name} {value}" for name, value in pin.items())
        lines.append({"plan": told, **dict(zip(MODELS, errors, strict=True))})
    return lines


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
