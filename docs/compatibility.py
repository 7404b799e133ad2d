"""Writes ``compatibility.md`` from records of executed checks: ``python docs/compatibility.py``.

Nothing in the page is claimed by hand: a cell counts runs in ``benchmarks/results``, and every record says of which
versions it is. A part of the page is a function in ``PARTS``.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT, PAGE = DOCS.parent, DOCS / "compatibility.md"
RESULTS = ROOT / "benchmarks" / "results"
INTRODUCTION = """# What works with what

Written by `python docs/compatibility.py` from records of checks that were run, to which
[a test](../tests/planner/test_docs.py) holds it.
"""


def record(name: str) -> dict[str, Any]:
    """A record of ``benchmarks/results``."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def page() -> str:
    """The page as the records have it."""
    return "\n".join([INTRODUCTION, *(f"{part().strip()}\n" for part in PARTS)])


def models() -> str:
    """Models under plans: how many runs equal the original."""
    runs: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    zoo = record("zoo")["rows"]
    calls = {(row["model"], row["mesh"], row["plan"]): row.get("calls") for row in zoo}
    commits = {row["model"]: row["commit"] for row in zoo}
    reasons: dict[str, str] = {}  # why a plan was refused -> what a cell says
    for row in zoo:
        plainer = calls.get((row["model"], row["mesh"], re.sub(r" \+ sequence|, zero 3", "", row["plan"])))
        is_another = row["plan"].endswith(("+ sequence", "zero 3")) and plainer == row.get("calls")
        if is_another or (row["plan"].startswith("search") and not row["calls"]):
            continue
        status = row["status"]
        if status == "n/a":
            why = re.sub(r" is \d+ but", " is more than 1 but", row["why"])
            if why not in reasons:
                reasons[why] = f"n/a ({'abcdef'[len(reasons)]})"
            status = reasons[why]
        for column in _ways_of_zoo(row["plan"]):
            runs[row["model"]][column].append(status)
    for name in ("zoo_micro_batched", "zoo_tiers"):
        for row in record(name)["results"]:
            for column in _ways_of_pin(row["pin"]):
                runs[row["model"]][column].append(row["status"])
    for row in record("zoo_compiled")["results"]:
        runs[row["model"]]["compiled"].append(row["status"])
    columns = [each for each in COLUMNS if any(each in found for found in runs.values())]
    rows = [
        [model, *(_count(found[column]) for column in columns), commits.get(model, "")]
        for model, found in sorted(runs.items())
    ]
    why_not = "\n".join(f"* {said}: {why}." for why, said in reasons.items())
    return f"""## Models and parallelisms

How many runs under such a plan equal the original, in float64, outputs, gradients and buffers, of how many; on meshes
of up to eight ranks. Those with a pipeline, micro-batches or offload ran on processes, the others on all ranks of the
mesh in one process. A cell is empty where no such plan was run, or where it made exactly the collective calls of the
plan without that word (a ResNet has nothing to shard along a sequence), which is counted once; searched plans without
any collective are left out. *Compiled* counts plans on processes whose compiled blocks equal eager ones to 1e-12.
*n/a* are plans that were refused:

{why_not}

The last column is the commit at which a model's plans ran on all ranks in one process; the others' are
[below](#versions). What was changed since did not run for this page: `git log COMMIT..` lists it, and what was refused
then may run today. Records: [zoo](../benchmarks/results/zoo.md),
[micro-batched](../benchmarks/results/zoo_micro_batched.md), [tiers](../benchmarks/results/zoo_tiers.md),
[compiled](../benchmarks/results/zoo_compiled.md).

{_table(["model", *columns, "zoo at"], rows)}
"""


COLUMNS = (
    *("searched", "random", "data", "ZeRO 3", "tensor", "sequence", "context", "expert", "pipeline", "micro-batches"),
    *("recompute", "offload", "compiled"),
)


def _ways_of_zoo(plan: str) -> list[str]:
    if plan.startswith(("search", "random")):
        return ["searched" if plan.startswith("search") else "random"]
    ways = {"data": "data", "zero 3": "ZeRO 3", "tensor": "tensor", "sequence": "sequence", "context": "context"}
    ways |= {"expert": "expert"}
    return [ways[word] for word in re.split(r" x | \+ |, ", plan)]


def _ways_of_pin(pin: Mapping[str, Any]) -> list[str]:
    ways = {"data": "data", "tensor": "tensor", "sequence_parallel": "sequence", "context": "context"}
    found = [ways[name] for name in pin if name in ways]
    found += ["ZeRO 3"] * (pin.get("zero") == 3) + ["pipeline"] * (pin.get("pipeline", 1) > 1)
    found += ["micro-batches"] * (pin.get("micro_batches", 1) > 1)
    found += ["recompute"] * (pin.get("recompute", "none") != "none") + ["offload"] * ("offload" in pin)
    return found


def _count(statuses: Sequence[str]) -> str:
    run = [status for status in statuses if not status.startswith("n/a")]
    if not run:
        return ", ".join(sorted({*statuses}))
    return f"{sum(status == 'equal' for status in run)} of {len(run)}"


def loops() -> str:
    """Other training loops: recipes that were run."""
    rows = [
        [
            f"[{run['recipe']}](integrations.md#{re.sub(r'[^a-z -]', '', run['recipe'].lower()).replace(' ', '-')})",
            str(run["processes"]),
            ", ".join(f"{name} {value}" for name, value in run["pin"].items()),
            "state of four processes" if run["goes_on"] else "start",
            f"{run['values']} values within {run['error']:.0e}",
        ]
        for run in record("integrations")["results"]
    ]
    return f"""## Training loops

Recipes as the page has them, beside the framework's own class in one process, every process compared; TRL computes in
float32. What cannot be served is [listed there](integrations.md#what-cannot-be-served).

{_table(["recipe", "processes", "plan", "from", "equal to one process"], rows)}
"""


def exporters() -> str:
    """Other tools' configurations: what was run of them, or read by the tool."""
    rows = [
        [f"[`{run['format']}`](interchange.md)", run["tool"], run["of"], run["check"]]
        for run in record("exporters")["results"]
    ]
    return f"""## Exporters

What `plan.export` writes, run beside the original in float64, or given to the tool's own reader. What was tried by hand
is [there](interchange.md). Record: [exporters](../benchmarks/results/exporters.md).

{_table(["format", "of", "run, or read", "found"], rows)}
"""


def versions() -> str:
    """Which versions the records are of, and which may be installed."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    least: dict[str, set[str]] = defaultdict(set)
    for package, lowest in re.findall(r"\"([\w-]+)>=([\d.]+)", project):
        least[package].add(lowest)
    least["python"] = {*re.findall(r'requires-python = ">=([\d.]+)', project)}
    ran: dict[str, set[str]] = defaultdict(set)
    dates = []
    for name in RECORDS:
        found = record(name)
        facts = found.get("circumstances") or found["machine"]
        commits = sorted({row.get("commit", facts["commit"]) for row in found.get("rows", [{}])})
        when = (facts.get("when") or facts["date"])[:10]
        dates.append(f"{name.replace('_', ' ')}, last of {when}, at {' and '.join(commits)}")
        for package in PACKAGES:
            if package in facts:
                ran[package].add(str(facts[package]))
    rows = [[name, " or ".join(sorted(least[name])), ", ".join(sorted(ran[name]))] for name in PACKAGES]
    return f"""## Versions

{_table(["package", "oldest", "run for this page"], rows)}

Where two are named, the newer one is what training loops need. The test suite runs with the versions of
`constraints.txt`, and with the oldest by `make test-oldest`. Records: {"; ".join(dates)}.
"""


RECORDS = ("zoo", "zoo_micro_batched", "zoo_tiers", "zoo_compiled", "integrations", "exporters")
PACKAGES = (
    *("python", "torch", "transformers", "spmd_types", "ortools", "numpy"),
    *("accelerate", "lightning", "trl", "peft", "datasets"),
)
PARTS: tuple[Callable[[], str], ...] = (models, loops, exporters, versions)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
