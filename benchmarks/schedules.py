"""Schedules as simulated beside schedules as run: stages that sleep, on local processes, under every schedule.

The runtime's own step (:class:`autopar.runtime.pipeline.executor.PipelineStep`) runs them; what differs from the
simulation is all that is no work: waiting for messages, Python, autograd. A step starts with all ranks at a barrier.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar.measure.local_processes import LocalProcesses
from autopar.runtime.pipeline.executor import PipelineStep
from autopar.runtime.pipeline.outputs import Leaving
from autopar.runtime.pipeline.p2p import RankLinks
from autopar.runtime.pipeline.stage import Passed, Stage
from autopar.runtime.pipeline.step_spec import StepSpec
from autopar.runtime.pipeline.trace import Recorder
from autopar.runtime.spmd.mesh import pipeline_mesh
from autopar.runtime.spmd.micro_batch import MicroBatches
from autopar.runtime.spmd.random_state import RandomState
from autopar.runtime.spmd.run_state import RunState
from planner.ir.layout import Mesh
from planner.solve.pipeline.schedule import schedule
from planner.solve.pipeline.simulate import Times, simulate

RANKS = 4
NAP_S = 0.1
"""Seconds of a forward, of a backward for inputs, and of one for weights; of every stage."""
REPEATS = 3
CASES = (
    ("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zero_bubble", 1), ("zbv", 2),
    ("dualpipev", 2),
)  # fmt: skip
MICRO_BATCHES = (4, 8)


@dataclass(frozen=True)
class Beside:
    """A schedule: seconds of a step as simulated, and of each as run, of the slowest rank; the share of idle time."""

    schedule: str
    virtual_stages: int
    micro_batches: int
    simulated_s: float
    observed_s: tuple[float, ...]
    bubble: float

    @property
    def median_s(self) -> float:
        """Of the steps that were run."""
        return statistics.median(self.observed_s)

    @property
    def error(self) -> float:
        """Relative, of the median."""
        return self.median_s / self.simulated_s - 1

    @property
    def observed_bubble(self) -> float:
        """The share of the ranks' time in the median step that is no work."""
        return 1 - (1 - self.bubble) * self.simulated_s / self.median_s


def compare() -> list[Beside]:
    """Every schedule, every number of micro-batches."""
    with LocalProcesses(RANKS, ("torch", "benchmarks.schedules")) as processes:
        return [processes.run(_steps, name, virtual, count)[0] for name, virtual in CASES for count in MICRO_BATCHES]


class _Nap(torch.autograd.Function):
    """Identity that takes its time, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(ctx.backward_s)
        return gradient, None, None


def nap(x: Tensor, forward_s: float, backward_s: float) -> Tensor:
    """``x``, after a while."""
    result: Tensor = _Nap.apply(x, forward_s, backward_s)
    return result


def _steps(name: str, virtual: int, count: int) -> Beside:
    torch.set_num_threads(1)
    actions = schedule(name, RANKS, count, virtual)
    here = [_stage(s, actions.stages, NAP_S) for s in range(actions.stages) if actions.rank_of[s] == dist.get_rank()]
    _, pipeline = pipeline_mesh(Mesh.of(all=1), "cpu", RANKS)
    assert pipeline is not None
    spec = StepSpec(
        stages={stage.number: stage for stage in here},
        actions=actions.rows[pipeline.rank],
        leaves=["weight"],
        split={},
        outputs=[Leaving(None, True, actions.stages - 1, torch.float32, True)],
        loss=0,
        micro_batches=MicroBatches(count),
        state=RunState(RandomState(0)),
        links=RankLinks(actions, here, pipeline, torch.device("cpu")),
        draws=[0] * actions.stages,
        recorder=Recorder(actions, torch.device("cpu")),
        trained=True,
        offloaded={},
    )
    step = PipelineStep(spec)
    weight = torch.ones(1, requires_grad=True)
    observed = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        start = time.perf_counter()
        step(weight)
        spent = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        observed.append(spent.item())
    each = np.full(actions.stages, NAP_S)
    found = simulate(actions, Times(each, each, each, np.zeros(actions.stages - 1)))
    return Beside(name, virtual, count, found.step_s, tuple(observed[1:]), found.bubble)


def _stage(number: int, stages: int, nap_s: float) -> Stage:
    """A stage of one number: what comes in (or 1), plus a weight."""
    gather, program = fx.Graph(), fx.Graph()
    gather.output((gather.placeholder("weight"),))
    weight = program.placeholder("weight")
    value = program.placeholder("value") if number else weight
    slow = program.call_function(nap, (value, nap_s, nap_s))
    heavy = program.call_function(nap, (weight, 0.0, nap_s))
    both = program.call_function(torch.add, (slow, heavy))
    last = number == stages - 1
    program.output((program.call_function(torch.sum, (both,)) if last else both,))
    passed = (Passed((1,), torch.float32, True),)
    holder = torch.nn.Module()
    return Stage(
        number=number,
        first_block=number,
        parameters=("weight",),
        leaves=(),
        received=passed if number else (),
        sent=() if last else passed,
        outputs=(0,) if last else (),
        gather=fx.GraphModule(holder, gather),
        count=None,
        program=fx.GraphModule(holder, program),
    )
