"""``torchrun``'s elastic launch with agents that are killed: the program that ``test_elastic`` runs.

Agents and workers are forks of this process, so that torch is imported once; it has no threads of its own, so the plans
are made elsewhere. It runs as a file: under ``-m`` torch's ``inspect.stack()`` takes a second. An agent has one worker,
as a node of one device has: ``torchrun --nnodes 3:4 --nproc-per-node 1``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import autopar
from autopar.driver.trace import trace
from planner.plan.plan import Plan
from tests.autopar import elastic

STEPS, EVERY, PATIENCE_S = 24, 4, 300
RENDEZVOUS = {"store_type": "file", "last_call_timeout": 5, "keep_alive_interval": 1, "keep_alive_max_attempt": 10}


def train(directory: str) -> None:
    """One generation of a rank: what a user's script does."""
    Path(directory, f"worker{os.environ['AGENT']}").write_text(str(os.getpid()))
    ranks = int(os.environ["WORLD_SIZE"])
    plan = Plan.load(f"{directory}/{ranks}.json")
    run = elastic.Run(plan.to_dict())
    steps = autopar.ElasticRun(
        f"{directory}/checkpoint", run.model, run.optimizer, run.loader, every=EVERY, extra={"schedule": run.schedule}
    )
    for part in steps.steps(STEPS):
        loss = run.step(part)
        if os.environ["RANK"] == "0":
            with Path(directory, "losses").open("a") as file:
                file.write(json.dumps({"step": steps.step, "loss": loss, "ranks": ranks}) + "\n")
        time.sleep(0.05 if ranks == 4 else 0.5)  # a node that comes takes a second or two to join


def agent(number: int, directory: str) -> int:
    """Start an agent; returns its process."""
    process = os.fork()
    if process:
        return process
    os.environ["AGENT"] = str(number)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else others look for the first node when it is lost
    config = LaunchConfig(
        min_nodes=3,
        max_nodes=4,
        nproc_per_node=1,
        run_id="elastic",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{directory}/rendezvous",
        rdzv_configs={**RENDEZVOUS},
        max_restarts=20,
        monitor_interval=0.1,
        start_method="fork",
        local_addr="127.0.0.1",
    )
    status = 1
    try:
        elastic_launch(config, train)(directory)
        status = 0
    finally:
        os._exit(status)


def losses(directory: str) -> list[dict[str, Any]]:
    """What was written so far."""
    path = Path(directory, "losses")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(directory: str, steps: int, ranks: int) -> None:
    """Until so many steps were made by so many ranks."""
    deadline = time.monotonic() + PATIENCE_S
    while sum(line["ranks"] == ranks for line in losses(directory)) < steps:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {steps} steps of {ranks} ranks: {losses(directory)[-3:]}")
        time.sleep(0.05)


def give_up(*_: object) -> None:
    """When agents do not end."""
    raise TimeoutError(f"agents are still there after {PATIENCE_S} s")


def main(directory: str, seed: int) -> None:
    """4 nodes, of which one is killed at a random moment; then 3, and at another one comes, for which workers end."""
    assert callable(autopar.parallelize) and callable(autopar.ElasticRun)
    trace(elastic.net(), elastic.example(), None, None)  # all that it imports is there in the forks
    draw = random.Random(seed)
    agents = {number: agent(number, directory) for number in range(4)}
    try:
        wait_for(directory, draw.randrange(2, 8), 4)
        time.sleep(draw.uniform(0, 0.2))
        lost = draw.randrange(4)
        os.kill(agents[lost], signal.SIGKILL)
        os.kill(int(Path(directory, f"worker{lost}").read_text()), signal.SIGKILL)
        os.waitpid(agents.pop(lost), 0)
        wait_for(directory, draw.randrange(2, 6), 3)
        agents[4] = agent(4, directory)
        signal.signal(signal.SIGALRM, give_up)
        signal.alarm(PATIENCE_S)
        for number, process in [*agents.items()]:
            status = os.waitpid(process, 0)[1]
            del agents[number]
            assert status == 0, f"agent {number} ended with {status}"
    finally:
        for process in agents.values():
            os.kill(process, signal.SIGTERM)
            os.waitpid(process, 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
