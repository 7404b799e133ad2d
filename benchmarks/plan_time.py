"""Plan time: what a person waits for, from the start of ``python`` and from the call of ``autopar.plan`` to a plan.

Each case is a process of its own, as its user's would be: nothing is imported or planned before, and arguments are the
default ones. Models are Transformers' own on the meta device, in bfloat16.

``python -m benchmarks.plan_time CASE`` is such a process; ``python -m benchmarks plan`` starts one for each case.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from autopar import ClusterSpec

CAP_S = 45.0
"""A process that takes longer is ended, so that all cases take about five minutes at most."""
SEQUENCE = 8192
SHAPES = {
    "narrow": {"hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 8},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128},
}
GPT_SHAPES = {"XL": {"n_embd": 1600, "n_head": 25}, "175B": {"n_embd": 12288, "n_head": 96}}
"""Of GPT-2 and GPT-3, which differ in sizes alone as far as operators are concerned."""


@dataclass(frozen=True)
class Case:
    """A model and a cluster, with one global batch of sequences.

    Attributes:
        shape: of :data:`SHAPES` or :data:`GPT_SHAPES`.
        devices: so many of a preset.
        memory: of each device, and of its share of the host, where they have less than the preset's.
    """

    model: str
    shape: str
    layers: int
    preset: str
    devices: int
    batch: int
    sequence: int = SEQUENCE
    memory: Mapping[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The cluster in words."""
        less = "".join(f", {size} of {part} memory" for part, size in self.memory.items())
        return f"{self.devices:,} of {self.preset}{less}"


CASES = (
    Case("Llama 8B", "8B", 32, "dgx-h100", 8, 128),
    Case("Llama 8B", "8B", 32, "dgx-h100", 64, 512),
    Case("Llama 70B", "70B", 80, "dgx-h100", 64, 1024),
    Case("Llama 405B", "405B", 126, "dgx-h100", 16384, 2048),
    Case("GPT-3 175B", "175B", 96, "dgx-a100", 1024, 1536, 2048),
    Case("GPT-2 XL", "XL", 48, "workstation", 1, 8, 1024, {"device": "8 GiB", "host": "64 GiB"}),
    Case("1,000 narrow layers", "narrow", 1000, "dgx-h100", 8, 8),
)


@dataclass(frozen=True)
class Planned:
    """How long a plan took, and what was found.

    Attributes:
        start_s: wall seconds from the start of the process to the plan; imports and the model are part of it.
        call_s, cpu_s: wall and CPU seconds of the call of ``autopar.plan``, its processes included.
        seconds: of the call, by phase.
        status, gap: of the search; ``status`` says why there is no plan where there is none.
        found: how the model is divided, in words.
    """

    case: Case
    status: str
    start_s: float = 0.0
    call_s: float = 0.0
    cpu_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    gap: float | None = None
    found: str = ""
    step_time_s: float | None = None
    peak_bytes: int = 0


def measured(number: int) -> Planned:
    """Plan a case in a process of its own."""
    # Installed packages have their bytecode beside them; so that ours has, too, the first process writes it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "benchmarks.plan_time", str(number)]
    start = time.time()
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=CAP_S, check=True)
    except subprocess.TimeoutExpired as ended:
        so_far = (ended.stdout or b"").decode().splitlines()  # bytes, also where text is asked for
        return Planned(CASES[number], f"ended after {CAP_S:g} s, at: {so_far[-1] if so_far else 'imports'}", CAP_S)
    told = json.loads(done.stdout.splitlines()[-1])
    return Planned(CASES[number], start_s=told.pop("at") - start, **told)


def _cpu_s() -> float:
    """CPU seconds of this process and of those that it waited for."""
    return sum(os.times()[:4])


def plan_here(case: Case) -> dict[str, Any]:
    """Plan a case in this process: the fields of :class:`Planned`, and at what time the plan was there."""
    import autopar

    model, batch = gpt(case) if case.shape in GPT_SHAPES else llama(case.layers, case.batch, case.sequence, case.shape)
    cluster = _cluster(case)
    wall, cpu = time.perf_counter(), _cpu_s()
    try:
        plan = autopar.plan(model, cluster, example_kwargs=batch, progress=partial(print, flush=True))
    except autopar.InfeasibleError as error:
        seconds = {"call_s": time.perf_counter() - wall, "cpu_s": _cpu_s() - cpu}
        return {"status": str(error).splitlines()[0].partition(":")[0], "at": time.time(), **seconds}
    call_s, cpu_s, at = time.perf_counter() - wall, _cpu_s() - cpu, time.time()
    from planner.plan.report.sentence import sentence

    return {
        "status": plan.search.status,
        "at": at,
        "call_s": call_s,
        "cpu_s": cpu_s,
        "seconds": dict(plan.search.seconds),
        "gap": plan.search.gap,
        "found": sentence(plan).partition(";")[0],
        "step_time_s": plan.predicted.step_time_s,
        "peak_bytes": plan.predicted.peak_bytes,
    }


def _cluster(case: Case) -> ClusterSpec:
    from autopar import ClusterSpec

    fields = ClusterSpec.preset(case.preset, devices=case.devices).to_dict()
    return ClusterSpec.from_dict(
        {**fields, **{part: {**fields[part], "memory_bytes": size} for part, size in case.memory.items()}}
    )


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
    return _without_data(LlamaForCausalLM, config, batch, sequence)


def gpt(case: Case) -> tuple[nn.Module, dict[str, Tensor]]:
    """Transformers' GPT-2 in a shape of GPT-2 or GPT-3, and a global batch, both without data."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        **GPT_SHAPES[case.shape],
        n_layer=case.layers,
        n_positions=case.sequence,
        use_cache=False,
    )
    return _without_data(GPT2LMHeadModel, config, case.batch, case.sequence)


def _without_data(kind: Any, config: Any, batch: int, sequence: int) -> tuple[nn.Module, dict[str, Tensor]]:
    import torch

    with torch.device("meta"):
        model = kind(config).to(torch.bfloat16).train()
        ids = torch.zeros(batch, sequence, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids.clone()}


def rows(results: list[Planned]) -> list[dict[str, str]]:
    """The table: column -> text, a row for each case."""
    return [
        {
            "model": r.case.model,
            "cluster": r.case.where,
            "batch": f"{r.case.batch:,} of {r.case.sequence:,}",
            "from the start s": f"{r.start_s:.1f}",
            "from the call s": f"{r.call_s:.1f}" if r.call_s else "",
            "CPU s": f"{r.cpu_s:.1f}" if r.call_s else "",
            "proved gap": "" if r.gap is None else f"{r.gap:.2%}",
            "step s": "" if r.step_time_s is None else f"{r.step_time_s:.4g}",
            "peak GiB": f"{r.peak_bytes / 2**30:.1f}" if r.peak_bytes else "",
            "found": r.found or r.status,
        }
        for r in results
    ]


def raw(results: list[Planned]) -> list[dict[str, Any]]:
    """Every measurement, as JSON."""
    return [asdict(r) for r in results]


if __name__ == "__main__":
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print(json.dumps(plan_here(CASES[int(sys.argv[1])])))
