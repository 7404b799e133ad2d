"""Step time on local gloo processes: our plan beside torch's hand-written one, step by step in the same run.

Data parallel: Transformers' GPT-2, ours pinned ``{"data": n, "zero": 0}`` (parameters whole on every rank, as DDP
holds them) against ``DistributedDataParallel``. Sharded: the same model, ours pinned ``{"data": n, "zero": 2}``, or 3,
against ``fully_shard`` of every layer and of the rest, without ``reshard_after_forward``, or with it; both once more
under torch's ``MemTracker`` for their peaks. Tensor parallel: a GPT with one linear per projection, ours pinned
``{"tensor": n}`` against ``parallelize_module`` with column and row styles, vocabulary included. Pipeline: the same
GPT, ours pinned ``{"pipeline": n, "micro_batches": 8, "schedule": "1f1b"}`` against ``torch.distributed.pipelining``'s
``Schedule1F1B`` over stages written by hand with the same cut. Experts: a mixture of experts, ours pinned
``{"expert": n}``, tokens dispatched, against all-to-alls written by hand. Both sides train
the same model on the same batches from the same weights with the same optimizer, and the losses must agree. The
optimizer is torch's fused AdamW: its default walks over parameters one by one, which costs several times more on
DTensors than on plain tensors.

On CPU both sides make their gradients anew in every step, and glibc by default hands the memory of the last step's
back to the system and faults in zeroed pages for the next one's: how many depends on how the heap happens to be cut.
So every case runs twice, with the heap as it comes and with ``heap="kept"``, as launchers for training on CPU set it.

Besides wall seconds the CPU seconds of the busiest rank are recorded: on a machine that others use too, processes
that wait for each other are delayed by chance, and only the latter can be compared.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from autopar import ClusterSpec, parallelize
from autopar.measure.local_processes import LocalProcesses
from benchmarks import moe
from benchmarks.gpt import GPT, Shape

Batch = dict[str, Tensor]
PRELOAD = ("torch", "transformers.models.gpt2.modeling_gpt2", "benchmarks.step_time")


MICRO_BATCHES = 8
ZERO = {"data": 0, "zero 2": 2, "zero 3": 3}
"""Kinds that train Transformers' GPT-2, and how our side stores its parameters."""


@dataclass(frozen=True)
class Case:
    """One comparison over ``ranks`` processes.

    Attributes:
        kind: ``data``, ``zero 2``, ``zero 3``, ``tensor``, ``pipeline`` or ``expert``.
        heap: ``default`` or ``kept``.
    """

    kind: str
    ranks: int
    heap: str = "default"
    shape: Shape = field(default_factory=Shape)
    steps: int = 8
    warmup: int = 2

    @property
    def pin(self) -> dict[str, Any]:
        """What our side is told."""
        if self.kind == "pipeline":
            return {"pipeline": self.ranks, "micro_batches": MICRO_BATCHES, "schedule": "1f1b"}
        if self.kind == "expert":
            dispatched = {"layers": {"": {"expert": "t.dispatch"}}}
            return {"expert": self.ranks, "zero": 0, "pipeline": 1, "micro_batches": 1, **dispatched}
        return {"tensor": self.ranks} if self.kind == "tensor" else {"data": self.ranks, "zero": ZERO[self.kind]}


@dataclass(frozen=True)
class Compared:
    """Seconds per step, wall and CPU, each of the slowest rank, and by how much losses differed at most; bytes at the
    peak of this rank where they were looked at, else 0.
    """

    case: Case
    ours_s: tuple[float, ...]
    theirs_s: tuple[float, ...]
    ours_cpu_s: tuple[float, ...]
    theirs_cpu_s: tuple[float, ...]
    loss_difference: float
    ours_bytes: int = 0
    theirs_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Median wall time of ours over theirs."""
        return statistics.median(self.ours_s) / statistics.median(self.theirs_s)

    @property
    def cpu_ratio(self) -> float:
        """Median CPU time of ours over theirs."""
        return statistics.median(self.ours_cpu_s) / statistics.median(self.theirs_cpu_s)


def compare(case: Case, starts: int = 1) -> list[Compared]:
    """Start the processes and train both sides in them, several times over; by falling ratio.

    How memory happens to lie lasts as long as a process: ratios differ more between starts than between steps.
    """
    found = []
    for _ in range(starts):
        with LocalProcesses(case.ranks, PRELOAD) as processes:
            found.append(processes.run(train_both, case)[0])
    return sorted(found, key=lambda each: -each.ratio)


def train_both(case: Case) -> Compared:
    """One rank: a step of ours, a step of theirs, with micro-batches."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    if case.heap == "kept":
        _keep_heap()
    model = gpt2(case.shape) if case.kind in ZERO else GPT(case.shape)
    if case.kind == "expert":
        model = moe.Mixture(case.shape.hidden)
    by_hand = {"data": _ddp, "tensor": _tensor_parallel, "pipeline": _pipelining, "expert": _dispatched}
    theirs = by_hand.get(case.kind, _fully_sharded)
    sides = [Side(*make(copy.deepcopy(model.train()), case)) for make in (_ours, theirs)]
    times: list[list[tuple[float, float]]] = [[], []]
    difference = 0.0
    for step in range(case.warmup + case.steps):
        batch = _batch(case, step)
        losses = [0.0, 0.0]
        for which in (0, 1) if step % 2 else (1, 0):
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            losses[which] = sides[which].step(batch)
            spent = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if step >= case.warmup:
                times[which].append((spent[0].item(), spent[1].item()))
        difference = max(difference, abs(losses[0] - losses[1]))
    (ours, ours_cpu), (others, others_cpu) = (tuple(zip(*found, strict=True)) for found in times)
    peaks = [side.peak_bytes(_batch(case, 0)) if case.kind.startswith("zero") else 0 for side in sides]
    return Compared(case, ours, others, ours_cpu, others_cpu, difference, *peaks)


def _keep_heap() -> None:
    """Let this process keep what it frees (glibc's ``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD`` at their largest)."""
    libc = ctypes.CDLL(None)
    accepted = libc.mallopt(-1, 2**31 - 1) and libc.mallopt(-3, 2**25)
    assert accepted, "this C library has no such setting"


class Side:
    """A parallelized model with its optimizer.

    Args:
        module: what is called.
        cut: this rank's part of a global batch.
        around: context of forward and backward.
        mean: whether losses are of this rank's part and still to be averaged.
    """

    def __init__(self, module: nn.Module, cut: Callable[[Batch], Batch], around: Any, mean: bool):
        self.module, self.cut, self.around, self.mean = module, cut, around, mean
        # The fused optimizer takes DTensors or plain tensors at a time; parallelize_module leaves norms plain.
        kinds: dict[bool, list[nn.Parameter]] = {}
        for parameter in module.parameters():
            kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        groups = [{"params": parameters} for parameters in kinds.values()]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)

    def step(self, batch: Batch) -> float:
        with self.around():
            found = self.module(**self.cut(batch))
            loss = found if isinstance(found, Tensor) else found.loss
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        value = loss.detach().clone()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if self.mean:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        return value.item()

    def peak_bytes(self, batch: Batch) -> int:
        """Of one more step."""
        tracker = MemTracker()
        tracker.track_external(self.module, self.optimizer)
        with tracker:
            self.step(batch)
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def _ours(model: nn.Module, case: Case) -> tuple[Any, ...]:
    pmodel = parallelize(model, ClusterSpec.local(case.ranks), example_kwargs=_batch(case, 0), pin=case.pin)
    return pmodel, pmodel.shard, contextlib.nullcontext, False


def _ddp(model: nn.Module, case: Case) -> tuple[Any, ...]:
    return DistributedDataParallel(model), _own_part(case), contextlib.nullcontext, True


def _own_part(case: Case) -> Callable[[Batch], Batch]:
    rank = dist.get_rank()
    return lambda batch: {name: t.chunk(case.ranks)[rank] for name, t in batch.items()}


def _fully_sharded(model: nn.Module, case: Case) -> tuple[Any, ...]:
    for part in (*model.get_submodule("transformer.h").children(), model):
        fully_shard(part, reshard_after_forward=case.kind == "zero 3")
    return model, _own_part(case), contextlib.nullcontext, True


def _tensor_parallel(model: nn.Module, case: Case) -> tuple[Any, ...]:
    plan: dict[str, ParallelStyle] = {
        "token": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(case.shape.layers):
        for name in ("attention.q", "attention.k", "attention.v", "up"):
            plan[f"layers.{i}.{name}"] = ColwiseParallel()
        for name in ("attention.o", "down"):
            plan[f"layers.{i}.{name}"] = RowwiseParallel()
    mesh = init_device_mesh("cpu", (case.ranks,))
    return parallelize_module(model, mesh, plan), lambda batch: batch, loss_parallel, False


def _dispatched(model: nn.Module, case: Case) -> tuple[Any, ...]:
    assert isinstance(model, moe.Mixture)
    return moe.ByHand(model), _own_part(case), contextlib.nullcontext, True


class _Part(nn.Module):
    """What one stage has of a GPT, by hand."""

    def __init__(self, model: GPT, layers: Sequence[int], first: bool, last: bool):
        super().__init__()
        self.first, self.last = first, last
        if self.first:
            self.token, self.position = model.token, model.position
        self.layers = nn.ModuleDict({str(number): model.layers[number] for number in layers})
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.token(x) + self.position
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if self.last else x


class _Pipelining(nn.Module):
    """A stage under torch's schedule, called as a model is; the loss is the last rank's, for all."""

    def __init__(self, part: _Part, case: Case):
        super().__init__()
        rank = dist.get_rank()
        self.part, self.ranks, self.is_last = part, case.ranks, rank == case.ranks - 1
        stage = PipelineStage(part, rank, case.ranks, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=_token_loss)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        losses: list[Tensor] = []
        given = (ids,) if dist.get_rank() == 0 else ()
        self.schedule.step(*given, target=labels if self.is_last else None, losses=losses, return_outputs=False)
        loss = torch.stack(losses).mean().detach() * self.ranks if self.is_last else torch.zeros(())
        return loss.requires_grad_()


def _token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _pipelining(model: nn.Module, case: Case) -> tuple[Any, ...]:
    assert isinstance(model, GPT)
    held = _ours(copy.deepcopy(model), case)[0].state_dict()
    numbers = sorted({int(name.split(".")[1]) for name in held if name.startswith("layers.")})
    part = _Part(model, numbers, "token.weight" in held, "head.weight" in held)
    assert set(part.state_dict()) == set(held), "our cut is within a layer"
    return _Pipelining(part, case), lambda batch: batch, contextlib.nullcontext, True


def gpt2(shape: Shape) -> nn.Module:
    """Transformers' GPT-2, without dropout so that losses can be compared."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=shape.layers,
            n_embd=shape.hidden,
            n_head=shape.heads,
            n_positions=shape.sequence,
            vocab_size=shape.vocab,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def _batch(case: Case, step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    if case.kind == "expert":
        size = case.shape.batch * case.shape.sequence, case.shape.hidden
        return {name: torch.randn(size, generator=generator) for name in ("x", "y")}
    ids = torch.randint(0, case.shape.vocab, (case.shape.batch, case.shape.sequence), generator=generator)
    return {"input_ids" if case.kind in ZERO else "ids": ids, "labels": ids.roll(-1, 1)}
