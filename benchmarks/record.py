"""Record: results as JSON for programs and as Markdown for people, with the machine and the versions they are of."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from planner.base.files import write_text

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "spmd_types", "numpy", "ortools")


def circumstances() -> dict[str, Any]:
    """The machine, the versions, and how busy the machine is now."""
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "load_before": round(os.getloadavg()[0], 1),
    }


def write(name: str, title: str, notes: str, rows: Sequence[Mapping[str, str]], raw: Any, facts: dict[str, Any]) -> str:
    """Write ``results/<name>.json`` and ``.md``; returns the table.

    Args:
        rows: the table, column name -> text, all rows with the same columns.
        raw: every measurement, as JSON.
        facts: :func:`circumstances`, taken before measuring.
    """
    facts = {**facts, "load_after": round(os.getloadavg()[0], 1)}
    RESULTS.mkdir(exist_ok=True)
    write_text(RESULTS / f"{name}.json", json.dumps({"circumstances": facts, "results": raw}, indent=1) + "\n")
    table = _table(rows)
    told = ", ".join(f"{key} {value}" for key, value in facts.items())
    (RESULTS / f"{name}.md").write_text(f"# {title}\n\n{notes}\n\n{table}\n\nMeasured: {told}.\n")
    return table


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([row[name] for name in head] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=RESULTS.parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
