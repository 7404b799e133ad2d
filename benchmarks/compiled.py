"""Compiled blocks: a step of a Llama beside our eager blocks, and beside torch's hand-written plan, compiled.

Data parallel: ours pinned ``{"data": n, "zero": 0}`` against ``DistributedDataParallel``. Sharded: ``zero`` 3 against
``fully_shard`` of every layer and of the rest. Torch's own run eager, and with every layer compiled as a whole graph,
as torchtitan does it, which says what compiling gains on this machine. All sides train the same model on the same
batches from the same weights with torch's fused AdamW, interleaved in one run, and the losses must agree. Tensor
parallel is left out: layers of ``parallelize_module`` that are compiled so raise in backward (torch 2.13, ``'Tensor'
object has no attribute '_local_tensor'``).

How compiling grows with depth is measured apart, in one process: CPU seconds of a model's first step, which compiles,
less those of a later one.
"""

from __future__ import annotations

import contextlib
import copy
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from autopar import ClusterSpec, parallelize
from autopar.measure.local_processes import LocalProcesses
from autopar.runtime.module import ParallelModule
from benchmarks.gpt import Shape
from benchmarks.step_time import Batch, Side

PRELOAD = ("torch", "transformers.models.llama.modeling_llama", "benchmarks.compiled")
KINDS: dict[str, dict[str, int]] = {"data": {"zero": 0}, "zero 3": {"zero": 3}}
"""What is compared, and what our side is told beside the number of ranks."""
SIDES = ("compiled", "eager", "theirs", "theirs eager")
SHAPES = {"wide": Shape(layers=4), "narrow": Shape(layers=4, hidden=128, heads=4, vocab=1024, sequence=256)}
"""Of a wide model products take most of the time, which compiling leaves as they are; of a narrow one less."""
DEPTHS = (2, 32)
STEPS, WARMUP = 8, 2
STARTS = 3
"""Times that the processes of a comparison are started: ratios differ more between starts than between steps."""
TIMEOUT_S = 600.0
"""So long a rank waits for others, which may still be compiling."""


@dataclass(frozen=True)
class Case:
    """One comparison over ``ranks`` processes."""

    kind: str
    ranks: int
    shape: Shape

    @property
    def pin(self) -> dict[str, Any]:
        """What our side is told."""
        return {"data": self.ranks, **KINDS[self.kind]}


Clock = Literal["wall", "cpu"]


@dataclass(frozen=True)
class Steps:
    """Of one start: wall and CPU seconds of every step by side, each of the slowest rank; by how much losses differed
    at most; how many graphs our side compiled.
    """

    wall_s: dict[str, tuple[float, ...]]
    cpu_s: dict[str, tuple[float, ...]]
    loss_difference: float
    graphs: int

    def median_s(self, clock: Clock, side: str) -> float:
        """Seconds of a side's median step."""
        return statistics.median((self.wall_s if clock == "wall" else self.cpu_s)[side])


@dataclass(frozen=True)
class Compared:
    """One comparison in several starts."""

    case: Case
    starts: tuple[Steps, ...]

    def seconds(self, clock: Clock, side: str) -> float:
        """Median over starts of a side's median step."""
        return statistics.median(each.median_s(clock, side) for each in self.starts)

    def ratio(self, clock: Clock, side: str, of: str) -> float:
        """Median over starts of a side's median step over that of another."""
        return statistics.median(each.median_s(clock, side) / each.median_s(clock, of) for each in self.starts)


@dataclass(frozen=True)
class Depth:
    """CPU seconds that compiling a model of so many layers took, with inductor's cache empty and full, and of how many
    graphs it is.
    """

    layers: int
    compile_s: float
    again_s: float
    graphs: int


def compare(case: Case) -> Compared:
    """Start the processes and train all sides in them, several times over."""
    found = []
    for _ in range(STARTS):
        with LocalProcesses(case.ranks, PRELOAD, TIMEOUT_S) as processes:
            found.append(processes.run(_train_all, case)[0])
    return Compared(case, tuple(found))


def depths() -> list[Depth]:
    """What compiling takes at each depth."""
    found = []
    for layers in DEPTHS:
        with LocalProcesses(1, PRELOAD) as processes:
            found.append(processes.run(_compile, layers)[0])
    return found


def llama(shape: Shape) -> nn.Module:
    """Transformers' Llama with two heads to a key, whose perceptron has the size that its paper gives it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 8 // 3,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2,
        max_position_embeddings=shape.sequence,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _train_all(case: Case) -> Steps:
    """One rank: steps of all sides, interleaved."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = llama(case.shape).train()
    made = {"compiled": _ours(True), "eager": _ours(False), "theirs": _theirs(True), "theirs eager": _theirs(False)}
    sides = {name: Side(*make(copy.deepcopy(model), case)) for name, make in made.items()}
    wall_s: dict[str, list[float]] = {name: [] for name in SIDES}
    cpu_s: dict[str, list[float]] = {name: [] for name in SIDES}
    difference = 0.0
    for step in range(WARMUP + STEPS):
        batch, losses = _batch(case.shape, step), []
        for place in range(len(SIDES)):
            name = SIDES[(place + step) % len(SIDES)]
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            losses.append(sides[name].step(batch))
            spent = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if step >= WARMUP:
                wall_s[name].append(spent[0].item())
                cpu_s[name].append(spent[1].item())
        difference = max(difference, max(losses) - min(losses))
    return Steps(
        {name: tuple(each) for name, each in wall_s.items()},
        {name: tuple(each) for name, each in cpu_s.items()},
        difference,
        _graphs(sides["compiled"].module),
    )


def _ours(compiled: bool) -> Callable[[nn.Module, Case], tuple[Any, ...]]:
    def make(model: nn.Module, case: Case) -> tuple[Any, ...]:
        example = _batch(case.shape, 0)
        cluster = ClusterSpec.local(case.ranks)
        pmodel = parallelize(model, cluster, example_kwargs=example, pin=case.pin, compile=compiled)
        return pmodel, pmodel.shard, contextlib.nullcontext, False

    return make


def _theirs(compiled: bool) -> Callable[[nn.Module, Case], tuple[Any, ...]]:
    def make(model: nn.Module, case: Case) -> tuple[Any, ...]:
        rank, layers = dist.get_rank(), model.get_submodule("model.layers")

        def own_part(batch: Batch) -> Batch:
            return {name: t.chunk(case.ranks)[rank] for name, t in batch.items()}

        if compiled:
            for layer in layers.children():
                layer.compile(fullgraph=True)
        if case.kind == "data":
            return DistributedDataParallel(model), own_part, contextlib.nullcontext, True
        for part in (*layers.children(), model):
            fully_shard(part)
        return model, own_part, contextlib.nullcontext, True

    return make


def _compile(layers: int) -> Depth:
    """One process: first steps of a model of so many layers, with inductor's cache empty, then as that left it."""
    from torch._inductor.utils import fresh_cache

    warnings.simplefilter("ignore")
    case = Case("data", 1, Shape(layers, hidden=64, heads=4, vocab=128, batch=2, sequence=16))
    spent, graphs = [], 0
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            side = Side(*_ours(True)(llama(case.shape).train(), case))
            first_s, later_s = (_cpu_of(side, case, step) for step in range(2))
            spent.append(first_s - later_s)
            graphs = _graphs(side.module)
    return Depth(layers, spent[0], spent[1], graphs)


def _graphs(module: nn.Module) -> int:
    """How many a parallel module compiled, which are all of its segments."""
    assert isinstance(module, ParallelModule) and module.compilation is not None and not module.compilation.eager
    return module.compilation.graphs


def _cpu_of(side: Side, case: Case, step: int) -> float:
    """CPU seconds of a step, compilers' included."""
    before = _cpu_s()
    side.step(_batch(case.shape, step))
    return _cpu_s() - before


def _cpu_s() -> float:
    """Of this process and those that it started and that have ended."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _batch(shape: Shape, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, shape.vocab, (shape.batch, shape.sequence), generator=generator)
    return {"input_ids": ids, "labels": ids}
