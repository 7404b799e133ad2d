"""Slurm: a script for ``sbatch``. Options that it leaves out (partition, time, account) are given to ``sbatch``."""

from __future__ import annotations

from planner.launch.job import Job, Launcher, commented


def write(job: Job) -> str:
    """One task on each node, which has all of its cores and starts the processes there.

    Where nodes lie in units, their order is that of the network (``SLURM_TOPOLOGY_ADDR``), not that of their names.
    """
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        **({"gpus-per-node": str(job.per_node)} if job.on_gpu else {}),
        "exclusive": "",
        **({"switches": str(-(-job.nodes // job.unit[1]))} if job.unit else {}),
    }
    asked = "".join(f"#SBATCH --{name}{f'={value}' if value else ''}\n" for name, value in options.items())
    order = 'scontrol show hostnames "$SLURM_JOB_NODELIST"'
    if job.unit:
        order = """srun bash -c 'echo "${SLURM_TOPOLOGY_ADDR:-} $SLURMD_NODENAME"' | sort | awk '{print $NF}'"""
    run = job.torchrun('"$rank"', '"$MASTER_ADDR"', '"$@"')
    return (
        f"#!/usr/bin/env bash\n{asked}{commented(job.about)}set -euo pipefail\n\n"
        f'if [ "$SLURM_JOB_NUM_NODES" -ne {job.nodes} ]; then\n'
        f'  echo "the plan is for {job.nodes} nodes, and the job has $SLURM_JOB_NUM_NODES" >&2\n  exit 2\nfi\n'
        f"mapfile -t nodes < <({order})\n"
        'export NODES="${nodes[*]}" MASTER_ADDR="${nodes[0]}"\n'
        "srun --kill-on-bad-exit=1 --cpu-bind=none bash -c '\n"
        "  rank=0\n"
        "  for node in $NODES; do\n"
        '    if [ "$node" = "$SLURMD_NODENAME" ]; then break; fi\n'
        "    rank=$((rank + 1))\n"
        "  done\n"
        f"  exec {run}\n"
        f"' launch {job.script}\n"
    )


LAUNCHER = Launcher("slurm", write, (), "sbatch {file}")
