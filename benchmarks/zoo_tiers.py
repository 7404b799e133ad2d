"""The zoo by tiers: where model data is at home, and how it is sharded, against the original in float64.

``python -m benchmarks.zoo_tiers [MODEL ...]`` prints progress and writes ``results/zoo_tiers.md`` and
``results/zoo_tiers.json``. Every cell trains ten steps of AdamW with clipping on 1, 2, 4 or 8 gloo processes.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from autopar.measure.local_processes import LocalProcesses, RankError
from benchmarks import record
from benchmarks.beside import largest_error, summary
from benchmarks.zoo import PROCESSES, quiet
from planner.plan.plan import Plan

MODELS = ("gpt2", "llama", "shared-layers", "t5")
STEPS, RTOL = 10, 1e-10
CELLS: tuple[Mapping[str, Any], ...] = (
    {},
    {"offload": "host"},
    {"offload": "auto"},
    {"offload": "disk"},
    {"offload": "host", "update": "backward"},
    {"offload": "auto", "update": "backward"},
    {"offload": "host", "activations": "all", "recompute": "none"},
    {"data": 2, "zero": 3, "offload": "disk", "activations": "all", "recompute": "selective"},
    {"tensor": 2, "offload": "host", "update": "backward", "activations": "all"},
    {"data": 2, "zero": 0},
    {"data": 2, "zero": 2},
    {"data": 2, "zero": 3},
    {"data": 2, "zero": 3, "offload": "host"},
    {"data": 2, "zero": 3, "offload": "host", "update": "backward"},
    {"data": 2, "zero": 2, "offload": "auto"},
    {"data": 2, "zero": 0, "offload": "disk"},
    {"tensor": 2},
    {"tensor": 2, "offload": "host"},
    {"tensor": 2, "offload": "disk", "update": "backward"},
    {"tensor": 2, "sequence_parallel": True},
    {"tensor": 2, "sequence_parallel": True, "offload": "auto"},
    {"data": 4, "zero": 3},
    {"replicate": 2, "data": 2, "zero": 2},
    {"replicate": 2, "data": 2, "zero": 3},
    {"replicate": 2, "data": 2, "zero": 3, "offload": "host"},
    {"replicate": 2, "data": 2, "zero": 3, "offload": "auto"},
    {"replicate": 2, "data": 2, "tensor": 2, "zero": 3},
    {"replicate": 2, "data": 2, "tensor": 2, "zero": 2, "offload": "host"},
    {"data": 2, "tensor": 2, "zero": 3},
    {"data": 2, "tensor": 2, "zero": 3, "offload": "disk"},
    {"data": 2, "tensor": 2, "sequence_parallel": True, "zero": 2},
    {"tensor": 4, "offload": "host"},
    {"micro_batches": 2},
    {"micro_batches": 2, "offload": "host"},
    {"micro_batches": 2, "offload": "auto"},
    {"micro_batches": 2, "offload": "disk"},
    {"micro_batches": 4, "offload": "host", "activations": "all", "recompute": "none"},
    {"micro_batches": 2, "data": 2, "zero": 3, "offload": "disk", "activations": "all", "recompute": "none"},
    {"micro_batches": 2, "data": 2, "zero": 0, "offload": "auto"},
    {"micro_batches": 2, "data": 2, "zero": 3, "offload": "host"},
    {"micro_batches": 2, "tensor": 2, "offload": "host"},
    {"micro_batches": 2, "tensor": 2, "sequence_parallel": True, "offload": "disk"},
    {"pipeline": 2, "micro_batches": 4},
    {"pipeline": 2, "micro_batches": 4, "schedule": "1f1b", "offload": "host"},
    {"pipeline": 2, "micro_batches": 4, "schedule": "1f1b", "offload": "disk"},
    {"pipeline": 2, "micro_batches": 4, "virtual_stages": 2, "offload": "auto"},
    {"pipeline": 2, "micro_batches": 4, "schedule": "1f1b", "offload": "host", "activations": "all"},
    {"pipeline": 2, "micro_batches": 4, "schedule": "gpipe", "tensor": 2, "offload": "disk", "activations": "all"},
    {"pipeline": 2, "micro_batches": 4, "virtual_stages": 2, "data": 2, "offload": "host", "activations": "all"},
    {"pipeline": 2, "micro_batches": 2, "data": 2, "zero": 0, "offload": "host"},
    {"pipeline": 2, "micro_batches": 2, "data": 2, "zero": 3, "offload": "auto"},
    {"pipeline": 2, "micro_batches": 2, "tensor": 2, "offload": "host"},
    {"pipeline": 2, "micro_batches": 2, "replicate": 2, "data": 2, "zero": 3},
    {"pipeline": 2, "micro_batches": 2, "replicate": 2, "data": 2, "zero": 2, "offload": "host"},
    {"pipeline": 4, "micro_batches": 4, "schedule": "gpipe", "offload": "host"},
)


def ranks_of(pin: Mapping[str, Any]) -> int:
    """How many processes pins ask for."""
    return math.prod(pin.get(axis, 1) for axis in ("pipeline", "replicate", "data", "tensor"))


def main(models: Sequence[str]) -> int:
    """Run the table; returns how many cells failed."""
    facts, start, rows = record.circumstances(), time.monotonic(), []
    chosen = [name for name in MODELS if not models or name in models]
    with (
        ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn"), initializer=quiet) as pool,
        LocalProcesses(
            max(map(ranks_of, CELLS)), ("torch", "benchmarks.zoo_tiers", "tests.autopar.carried")
        ) as processes,
        tempfile.TemporaryDirectory() as folder,
    ):
        asked = [(name, pin) for name in chosen for pin in CELLS]
        plans = [pool.submit(planned, *each) for each in asked]
        for (name, pin), plan in zip(asked, plans, strict=True):
            rows.append(_row(processes, name, pin, plan, folder))
            told = f"{name} {dict(pin)}: {rows[-1]['status']} {rows[-1]['why']}"
            print(f"[{time.monotonic() - start:5.0f} s] {told}", flush=True)
    said = summary(rows, (row["error"] for row in rows if "error" in row)) + "."
    if not models:
        notes = (
            "Models of the tests on gloo processes, in float64: the largest relative error of any loss, or of a "
            f"parameter relative to its largest element, in {STEPS} steps of AdamW with clipping (without where the "
            "update is in backward), beside plain AdamW on the original; every step has another batch. A plan with "
            "`offload` has room for a tenth of what moves beyond the least, with `auto` for half. "
            f"{said}"
        )
        record.write("zoo_tiers", "The zoo by tiers", notes, table(rows), rows, facts)
    print(said)
    return sum(row["status"] == "FAILED" for row in rows)


def _row(
    processes: LocalProcesses, name: str, pin: Mapping[str, Any], plan: Future[Any], folder: str
) -> dict[str, Any]:
    """What became of a cell."""
    from planner.base.errors import AutoparError, PinError

    row: dict[str, Any] = {"model": name, "pin": dict(pin), "status": "equal", "why": ""}
    try:
        row["error"] = max(processes.run(trained, name, plan.result(), folder, ranks=ranks_of(pin)))
        if not row["error"] <= RTOL:
            row |= {"status": "FAILED", "why": f"relative error {row['error']:.1e}"}
    except PinError as error:
        row |= {"status": "n/a", "why": str(error)}
    except (AutoparError, RankError) as error:
        row |= {"status": "FAILED", "why": str(error)}
    return row


def planned(name: str, pin: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of a cell, with a budget at which model data moves if it is away."""
    from autopar.verification.float64 import exact
    from planner.solve.transfers import fewest_bytes

    with exact():
        plan = _plan(name, {**pin, "offload": "host"} if pin.get("offload") == "auto" else pin)
        traces = [table.trace for table in plan.transfer_schedules]
        sizes = [(max(trace.needed_bytes), sum(item.bytes for item in trace.items)) for trace in traces]
        if pin.get("offload") == "auto":
            plan = _plan(name, pin, int(max(least + moving // 2 for least, moving in sizes) / 0.9))
        elif traces:
            pairs = zip(traces, sizes, strict=True)
            tables = (fewest_bytes(trace, least + moving // 10) for trace, (least, moving) in pairs)
            plan = replace(plan, transfer_schedules=tuple(tables))
    return plan.to_dict()


def _plan(name: str, pin: Mapping[str, Any], memory_bytes: int | str = "1 GiB") -> Plan:
    import autopar
    from planner.cost.cluster import ClusterSpec
    from tests.autopar.carried import model_of

    model, batch = model_of(name)
    cluster = ClusterSpec.local(
        ranks_of(pin), memory_bytes, cores=2, host_memory_bytes="1 GiB", disk_bytes="1 GiB"
    )  # fmt: skip
    return autopar.plan(model, cluster, example_kwargs=batch, pin=dict(pin))


def trained(name: str, document: Mapping[str, Any], folder: str) -> float:
    """On a rank: the largest relative error of a loss or of a parameter in all steps."""
    import torch

    import autopar
    from autopar.verification.float64 import exact
    from tests.autopar.carried import another, loss_of, model_of

    plan = autopar.Plan.from_dict(document)
    path = folder if plan.pin.get("offload") == "disk" else None
    with exact():
        model, batch = model_of(name)
        pmodel = autopar.parallelize(
            copy.deepcopy(model), plan.cluster, plan=plan, example_kwargs=batch, offload_path=path
        )
        optimizers = [
            torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4),
            pmodel.optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-4),
        ]

        def losses(step: int) -> list[torch.Tensor]:
            return [loss_of(m, another(name, step)) for m in (model, pmodel)]

        return largest_error(
            model, pmodel, optimizers, losses, STEPS, None if plan.pin.get("update") == "backward" else 0.5
        )


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row for each pin, a column for each model."""
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        told = ", ".join(f"{name} {value}" for name, value in row["pin"].items()) or "nothing"
        line = lines.setdefault(told, {"pins": told, "processes": str(ranks_of(row["pin"]))})
        line[row["model"]] = f"{row['error']:.0e}" if row["status"] == "equal" else row["status"]
    return list(lines.values())


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
