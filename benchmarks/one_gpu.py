"""One GPU: steps as predicted and as measured, and model data on the host beside FSDP2's offload.

Every row is a process of its own, so that none finds memory that another left. What is compared with FSDP2 is one
model, one batch and one limit of device memory on both sides; of FSDP2 with and without recomputing every layer the
faster one that fits counts.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import autopar
from autopar.measure.profile import measured_cluster, profile
from benchmarks.gpt import GPT, Shape
from planner.cost.calibration import Calibration
from planner.cost.cluster import ClusterSpec

if TYPE_CHECKING:
    from torch.distributed.fsdp import OffloadPolicy

STEPS, WARMUP = 5, 3
SHAPES = {
    "GPT 0.16B": Shape(layers=12, hidden=768, heads=12, vocab=50304, batch=16, sequence=1024),
    "GPT 1.1B": Shape(layers=20, hidden=2048, heads=16, vocab=32768, batch=8, sequence=1024),
    "GPT 3.4B": Shape(layers=28, hidden=3072, heads=24, vocab=32768, batch=8, sequence=1024),
}
STEP_CASES = tuple(
    {"model": model, "dtype": dtype, "pin": {"recompute": recompute}}
    for model, dtype, recompute in (
        ("GPT 0.16B", "bfloat16", "none"),
        ("GPT 1.1B", "bfloat16", "none"),
        ("GPT 1.1B", "bfloat16", "full"),
        ("GPT 1.1B", "float32", "none"),
        ("Llama 0.9B", "bfloat16", "none"),
        ("Llama 0.9B", "bfloat16", "full"),
    )
)
OFFLOAD_CASES = tuple(
    {"model": model, "limit_gib": limit_gib} for model, limit_gib in (("GPT 1.1B", 8), ("GPT 3.4B", 16))
)
SIDES = ("ours", "fsdp2", "fsdp2, recomputing")


@dataclass(frozen=True)
class Run:
    """A row: seconds of a step and bytes of device memory, measured; what a plan said of them.

    ``predicted_s`` and ``predicted_bytes`` by the cluster's description: as detected, and as profiled. ``link`` has,
    by direction, bytes that a step moves, seconds that it takes, and what part of these the device computes.
    """

    case: Mapping[str, Any]
    side: str
    parameters: int
    seconds: tuple[float, ...]
    peak_bytes: int
    predicted_s: Mapping[str, float]
    predicted_bytes: Mapping[str, int]
    link: Mapping[str, tuple[int, float, float]]
    loss: float
    set_up_s: float

    @property
    def median_s(self) -> float:
        return median(self.seconds)


def steps() -> list[Run]:
    """Device-resident plans, as predicted and as measured."""
    return _all([({**case, "limit_gib": None}, "ours") for case in STEP_CASES])


def offloads() -> list[Run]:
    """Model data on the host, ours and FSDP2's; what does not fit is left out."""
    return _all([({**case, "dtype": "bfloat16"}, side) for case in OFFLOAD_CASES for side in SIDES])


def _all(cases: list[tuple[dict[str, Any], str]]) -> list[Run]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        measured_cluster(calibration()).save(Path(folder) / "cluster.yaml")
        for case, side in cases:
            run = _in_its_own_process(case, side, folder)
            if run is not None:
                found.append(run)
                print(f"{case} {side}: {run.median_s:.3f} s, predicted {dict(run.predicted_s)}", flush=True)
    return found


@cache
def calibration() -> Calibration:
    """Of this machine."""
    return profile()


def _in_its_own_process(case: Mapping[str, Any], side: str, folder: str) -> Run | None:
    told = json.dumps({"case": case, "side": side, "cluster": f"{folder}/cluster.yaml", "to": f"{folder}/run.json"})
    done = subprocess.run([sys.executable, "-m", "benchmarks.one_gpu", told], capture_output=True, text=True)
    if done.returncode:
        print(f"{case} {side}: {error_in(done.stderr)}", flush=True)
        return None
    return Run(**json.loads(Path(f"{folder}/run.json").read_text(encoding="utf-8")))


def error_in(said: str) -> str:
    """The beginning of the error with which a process ended, whose notes may follow; else of the last that it said."""
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\[rank0\]: )?[\w.]*Error\b", line)]
    return (errors or lines or [""])[-1][:300]


# ---- one row, in its process -----------------------------------------------------------------------------------------


def _row(case: Mapping[str, Any], side: str, cluster: str) -> Run:
    warnings.simplefilter("ignore")
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    begun = time.perf_counter()
    model, batch = _model(case)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    limit_gib = case["limit_gib"]
    if limit_gib is not None:
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * 2**30 / total_bytes))
    plans: dict[str, autopar.Plan] = {}
    if side == "ours":
        step, plans = _ours(case, model, batch, cluster)
    else:
        step = _fsdp2(model, batch, recomputes=side.endswith("recomputing"))
    del model
    gc.collect()
    for _ in range(WARMUP):
        step()
    set_up_s = time.perf_counter() - begun
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds, loss = [], 0.0
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return Run(
        case,
        side,
        parameters,
        tuple(seconds),
        torch.cuda.max_memory_allocated(),
        {name: plan.predicted.step_time_s for name, plan in plans.items()},
        {name: plan.predicted.peak_bytes for name, plan in plans.items()},
        {} if limit_gib is None else _moved(step),
        loss,
        set_up_s,
    )


def _model(case: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    """In the host's memory: a parallel module keeps it."""
    dtype = getattr(torch, case["dtype"])
    if case["model"] in SHAPES:
        shape = SHAPES[case["model"]]
        with torch.device("meta"):
            model: nn.Module = GPT(shape).to(dtype)
        sizes, names = (shape.batch, shape.sequence), ("ids", "labels")
        vocab = shape.vocab
    else:
        from transformers import LlamaConfig, LlamaForCausalLM

        vocab, sizes, names = 32000, (4, 2048), ("input_ids", "labels")
        config = LlamaConfig(
            vocab_size=vocab, hidden_size=2048, intermediate_size=5632, num_hidden_layers=16,
            num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=2048,
        )  # fmt: skip
        with torch.device("cuda"):
            model = LlamaForCausalLM(config).to(dtype).cpu()
    if next(model.parameters()).is_meta:
        model = model.to_empty(device="cpu")
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                scale, shift = (0.0, 1.0) if "norm" in name and name.endswith("weight") else (0.02, 0.0)
                parameter.copy_(torch.randn(parameter.shape, dtype=dtype, device="cuda") * scale + shift)
    ids = torch.randint(0, vocab, sizes, device="cuda")
    return model, dict(zip(names, (ids, ids.roll(-1, 1)), strict=True))


Step = Callable[[], float]


def stepping(model: nn.Module, batch: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> Step:
    """A step of training that gives the loss."""

    def step() -> float:
        output = model(**batch)
        loss: Tensor = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _ours(
    case: Mapping[str, Any], model: nn.Module, batch: dict[str, Tensor], cluster: str
) -> tuple[Step, dict[str, autopar.Plan]]:
    specs, pin = {"profiled": ClusterSpec.load(cluster), "detected": ClusterSpec.detect()}, case.get("pin")
    if case["limit_gib"] is not None:
        pin = {"offload": "auto"}
        for name, spec in specs.items():
            device = spec.device.model_copy(update={"memory_bytes": int(case["limit_gib"] * 2**30)})
            specs[name] = spec.model_copy(update={"device": device})
    state_bytes = 2 * getattr(torch, case["dtype"]).itemsize
    plans = {
        name: autopar.plan(model, spec, example_kwargs=batch, pin=pin, optimizer_bytes_per_element=state_bytes)
        for name, spec in specs.items()
    }
    pmodel = autopar.parallelize(model, specs["profiled"], plan=plans["profiled"], example_kwargs=batch)
    optimizer = pmodel.optimizer(torch.optim.AdamW, lr=1e-5)
    return stepping(pmodel, pmodel.shard(batch), optimizer), plans


def _fsdp2(model: nn.Module, batch: dict[str, Tensor], recomputes: bool) -> Step:
    from torch.distributed.fsdp import CPUOffloadPolicy

    torch.cuda.set_device(0)
    fully_sharded(model, recomputes, CPUOffloadPolicy(pin_memory=True))
    return stepping(model, batch, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True))


def fully_sharded(model: nn.Module, recomputes: bool, policy: OffloadPolicy, device: str = "cuda") -> None:
    """Give FSDP2 every layer and the rest of a model, in a group of one process.

    Args:
        recomputes: every layer in backward.
        device: the type of that which computes.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (1,))
    layers = model.get_submodule("layers")
    for name, layer in layers.named_children():
        if recomputes:
            layer = checkpoint_wrapper(layer)
            layers.register_module(name, layer)
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)


def _moved(step: Step) -> dict[str, tuple[int, float, float]]:
    """By direction: bytes that a step copies, seconds of the copies, and the part of these that kernels run beside."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    with profiled(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text(encoding="utf-8"))["traceEvents"]
    kernels = _joined((each["ts"], each["ts"] + each["dur"]) for each in events if each.get("cat") == "kernel")
    found = {}
    for way, name in (("fetch", "HtoD"), ("evict", "DtoH")):
        copies = [each for each in events if each.get("cat") == "gpu_memcpy" and name in each["name"]]
        spans = [(each["ts"], each["ts"] + each["dur"]) for each in copies]
        seconds = sum(end - start for start, end in spans)
        beside = sum(max(0.0, min(end, b) - max(start, a)) for start, end in spans for a, b in kernels)
        size = sum(each["args"].get("bytes", 0) for each in copies)
        found[way] = (size, seconds / 1e6, beside / seconds if seconds else 0.0)
    return found


def _joined(spans: Any) -> list[tuple[float, float]]:
    """Spans in order, those that overlap as one."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    run = _row(told["case"], told["side"], told["cluster"])
    Path(told["to"]).write_text(json.dumps(asdict(run)), encoding="utf-8")
