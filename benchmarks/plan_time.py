"""Plan time: from an ``nn.Module`` to a ``Plan``, and to one rank's program, for the shapes of Llama 3.

The model is Transformers' own on the meta device, in bfloat16, with a number of layers. Capture, fold, build and
solve are the plan's own times (``plan.search.seconds``); rewrite emits one rank's program under a fake process group
of the whole cluster.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar import ClusterSpec, Plan
from autopar.driver.plan import assign, plan_traced
from autopar.driver.trace import Traced, trace
from autopar.emit.block_program import STATE
from autopar.emit.rewrite import rewrite
from autopar.graph.cpython import no_garbage
from autopar.runtime.spmd.mesh import device_mesh, groups_of
from autopar.runtime.spmd.random_state import RandomState
from autopar.runtime.spmd.run_state import RunState
from autopar.verification.simulator import fake_process_group
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training

SEQUENCE = 4096
SHAPES = {
    "narrow": {"hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 8},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128},
}
PHASES = ("capture", "fold", "build", "solve", "rewrite")


@dataclass(frozen=True)
class Case:
    """A number of layers, for a number of nodes of eight H100, with one global batch of sequences.

    ``memory`` is that of each device, where it has less than an H100.
    """

    layers: int
    nodes: int
    batch: int
    shape: str = "8B"
    sequence: int = SEQUENCE
    time_limit_s: float = 60.0
    memory: str = "80 GiB"


@dataclass(frozen=True)
class Planned:
    """Seconds by phase, and what was found.

    Attributes:
        total_s: wall seconds from the module to the plan; rewrite is not part of it.
        cpu_s: CPU seconds of the same stretch.
    """

    case: Case
    seconds: Mapping[str, float]
    total_s: float
    cpu_s: float
    status: str
    gap: float
    mesh: Mapping[str, int]
    step_time_s: float
    peak_bytes: int


def measured_alone(case: Case, times: int) -> list[Planned]:
    """Plan so often in a process of its own, as its user would: after a first plan, which imports, and no other."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        alone.submit(measure, Case(1, 1, 8)).result()
        return [alone.submit(measure, case).result() for _ in range(times)]


@no_garbage()
def measure(case: Case) -> Planned:
    """Plan once."""
    model, batch = llama(case.layers, case.batch, case.sequence, case.shape)
    fields = ClusterSpec.preset("dgx-h100", nodes=case.nodes).to_dict()
    cluster = ClusterSpec.from_dict({**fields, "device": {**fields["device"], "memory_bytes": case.memory}})
    wall, cpu = time.perf_counter(), time.process_time()
    traced = trace(model, example_kwargs=batch)
    plan = plan_traced(traced, cluster, Pins.parse(None), Training(), time_limit_s=case.time_limit_s)
    total_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    return Planned(
        case,
        {**plan.search.seconds, **({"rewrite": _rewrite_s(traced, plan)} if plan.pipeline is None else {})},
        total_s,
        cpu_s,
        plan.search.status,
        plan.search.gap,
        plan.sizes,
        plan.predicted.step_time_s,
        plan.predicted.peak_bytes,
    )


def depth(few: Planned, many: Planned) -> str:
    """How much longer planning takes for more layers of the same block."""
    searching, whole = (
        part(many) / part(few)
        for part in (lambda run: run.seconds["build"] + run.seconds["solve"], lambda run: run.total_s)
    )
    return (
        f"{many.case.layers:,} {few.case.shape} layers against {few.case.layers}: the search (build and solve) takes "
        f"{searching:.2f} times as long, the way from `nn.Module` to `Plan` {whole:.1f} times."
    )


def _rewrite_s(traced: Traced, plan: Plan) -> float:
    with fake_process_group(plan.mesh.size):
        groups = {**groups_of(device_mesh(plan.mesh, "cpu")), STATE: RunState(RandomState(0))}
        start = time.perf_counter()
        rewrite(traced.captured, assign(traced, plan), groups, torch.device("cpu"))
        return time.perf_counter() - start


def llama(layers: int, batch: int, sequence: int = SEQUENCE, shape: str = "8B") -> tuple[nn.Module, dict[str, Tensor]]:
    """Transformers' Llama in a shape of Llama 3, and a global batch, both without data."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **SHAPES[shape],
        num_hidden_layers=layers,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.zeros(batch, sequence, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids.clone()}
