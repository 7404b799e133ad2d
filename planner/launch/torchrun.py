"""torchrun on machines that are at hand: a script that each of them runs, told its number."""

from __future__ import annotations

from planner.launch.job import Job, Launcher, commented


def write(job: Job) -> str:
    """A shell script."""
    head = f"#!/usr/bin/env bash\n{commented(job.about)}set -euo pipefail\n\n"
    if job.nodes == 1:
        return f"{head}exec torchrun --standalone --nproc-per-node={job.per_node} {job.script}\n"
    last, run = job.nodes - 1, job.torchrun('"$node"', '"$MASTER_ADDR"', job.script)
    return (
        f"{head}"
        f"node=${{1:?give the number of this machine, 0 to {last}, in the order above}}\n"
        ': "${MASTER_ADDR:?set it to the name or address of machine 0, on every machine}"\n'
        f"if (( node < 0 || node > {last} )); then\n"
        f'  echo "there are machines 0 to {last}, and not $node" >&2\n  exit 2\nfi\n'
        f"exec {run}\n"
    )


LAUNCHER = Launcher("torchrun", write, (), "MASTER_ADDR=... bash {file} NODE on every machine")
