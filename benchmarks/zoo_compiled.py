"""The compiled zoo: compiled blocks of many kinds of models beside eager ones, from one plan, on processes, in float64.

``python -m benchmarks.zoo_compiled [MODEL ...]`` prints progress and writes ``results/zoo_compiled.md`` and
``results/zoo_compiled.json``, whose other models stay. AOTAutograd compiles every segment, as inductor would be given
it: as one graph, split into forward and backward, which runs operator by operator. What inductor's own code computes is
in the tests.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.measure.local_processes import LocalProcesses
from benchmarks import record

MODELS = ("gpt2", "llama", "bert", "t5", "vit", "mixtral")
PINS: tuple[Mapping[str, Any], ...] = (
    {"data": 2, "zero": 0},
    {"data": 2, "zero": 3, "recompute": "full"},
    {"tensor": 2, "sequence_parallel": True},
    {"pipeline": 2, "micro_batches": 4, "schedule": "1f1b"},
    {"data": 2, "tensor": 2, "zero": 3},
    {"pipeline": 2, "micro_batches": 7, "schedule": "zero_bubble", "data": 2},
)
ROUNDING = 1e-12
TIMEOUT_S = 600.0
"""So long a rank waits for others, which may still be compiling."""


def main(models: Sequence[str]) -> int:
    """Run the table; returns how many cells failed."""
    facts, start = record.circumstances(), time.monotonic()
    rows = [row for row in _recorded() if row["model"] not in (models or MODELS)]
    chosen = [name for name in MODELS if not models or name in models]
    with LocalProcesses(4, ("torch", "tests.autopar.verification.test_micro_batched_models"), TIMEOUT_S) as processes:
        for name, pin in itertools.product(chosen, PINS):
            rows.append(run(processes, name, pin))
            print(f"[{time.monotonic() - start:5.0f} s] {rows[-1]}", flush=True)
    notes = (
        "Models of the tests on gloo processes, compiled and eager from one plan, in float64: the largest relative "
        "error of the loss and of every gradient in two steps; how many segments are compiled, each as one graph, "
        "and how many run as they are. AOTAutograd compiles, without inductor's code."
    )
    record.write("zoo_compiled", "The compiled zoo", notes, table(rows), rows, facts)
    return sum(row["status"] == "FAILED" for row in rows)


def _recorded() -> list[dict[str, Any]]:
    """What was run before."""
    path = record.RESULTS / "zoo_compiled.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())["results"] if path.exists() else []
    return found


def run(processes: LocalProcesses, model: str, pin: Mapping[str, Any]) -> dict[str, Any]:
    """Two steps of a model on as many processes as the pins ask for."""
    from autopar.measure.local_processes import RankError
    from planner.base.errors import PinError
    from tests.autopar.verification.test_micro_batched_models import planned

    ranks = math.prod(pin.get(axis, 1) for axis in ("pipeline", "data", "tensor"))
    row: dict[str, Any] = {"model": model, "pin": dict(pin), "processes": ranks, "status": "equal", "why": ""}
    try:
        found = processes.run(compared, model, planned(model, pin)[1].to_dict(), ranks=ranks)
    except PinError as error:
        return row | {"status": "n/a", "why": str(error)}
    except RankError as error:
        return row | {"status": "FAILED", "why": str(error)}
    row |= {name: max(each[name] for each in found) for name in ("error", "segments", "graphs", "eager")}
    if not row["error"] <= ROUNDING:
        row |= {"status": "FAILED", "why": f"relative error {row['error']:.1e}"}
    return row


def compared(name: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """On a rank: how far compiled blocks are from eager ones in two steps, and what was compiled."""
    import autopar
    from autopar.verification.float64 import exact, widen
    from tests.autopar.compiled import without_inductor
    from tests.autopar.verification.test_micro_batched_models import made
    from tests.autopar.workers import whole

    model, batch = made(name)
    batch, plan = widen(batch), autopar.Plan.from_dict(document)
    with exact():
        both = [
            autopar.parallelize(model.double(), plan.cluster, plan=plan, example_kwargs=batch, compile=compile)
            for compile in (False, True)
        ]
    worst = 0.0
    with without_inductor():
        for _ in range(2):
            losses = [pmodel(**pmodel.shard(batch))["loss"] for pmodel in both]
            for loss in losses:
                loss.backward()
            worst = max(worst, _error(*(loss.detach() for loss in losses)))
            own, others = ({key: p.grad for key, p in pmodel.named_parameters()} for pmodel in both)
            assert [key for key in own if own[key] is None] == [key for key in others if others[key] is None]
            given = zip(own.values(), others.values(), strict=True)
            pairs = [(whole(a), whole(b)) for a, b in given if a is not None and b is not None]
            largest = max(float(expected.abs().max()) for expected, _ in pairs)
            worst = max(worst, *(_error(*pair, largest) for pair in pairs))
    done = both[1].compilation
    assert done is not None
    return {"error": worst, "segments": done.segments, "graphs": done.graphs, "eager": len(done.eager)}


def _error(expected: Any, found: Any, largest: float = 0.0) -> float:
    """Over the largest of what is expected, or of all gradients where it is zero but for rounding: a key's bias."""
    scale = float(expected.abs().max())
    return float((found - expected).abs().max()) / (scale if scale > 1e-12 * largest else largest)


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row for each pin, a column for each model."""
    found = {(row["model"], str(row["pin"])): row for row in rows}
    lines = []
    for pin in PINS:
        cells = {}
        for model in MODELS:
            row = found.get((model, str(dict(pin))), {"status": ""})
            said = f"{row['error']:.0e}, {row['segments']} compiled" if row["status"] == "equal" else row["status"]
            cells[model] = said + (f", {row['eager']} eager" if row.get("eager") else "")
        lines.append({"plan": ", ".join(f"{name} {value}" for name, value in pin.items()), **cells})
    return lines


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
