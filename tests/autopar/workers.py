"""What the ranks of ``test_processes`` do: every function runs in each process, with a gloo group initialised.

A worker builds the original model from a seed, so that every rank has the same reference at hand, and asserts.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import logging
import math
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.runtime.data.agreement import CALLS, VARIABLE
from autopar.runtime.host.timeouts import patience
from autopar.runtime.layers import (
    attention,
    batch_norm,
    cross_entropy_loss,
    sharded_embedding_bag,
    vocab_embedding,
)
from autopar.runtime.layers.classes import gather, one_hot, scatter
from autopar.runtime.layers.random import draw
from autopar.runtime.module import ParallelModule
from autopar.runtime.pipeline.executor import PipelineStep
from autopar.runtime.pipeline.p2p import RankLinks
from autopar.runtime.spmd.expert_load import ExpertLoad
from autopar.runtime.spmd.mesh import groups_of, whole_of
from autopar.runtime.spmd.random_state import RandomState
from autopar.runtime.spmd.row_exchange import RowsInFlight
from autopar.runtime.spmd.run_state import RunState
from autopar.verification.collective_counter import count_collectives, count_exchanges, differences
from autopar.verification.float64 import exact, twin
from autopar.verification.memory_meter import LiveBytes, held_tensors
from planner.base.errors import InputError, PinError, PlanError
from planner.cost.cluster import ClusterSpec
from planner.plan.plan import Plan
from tests.autopar import models
from tests.autopar.captured_once import captured_once, made
from tests.autopar.in_flight import InFlight

Batch = dict[str, Tensor]
Pin = Mapping[str, Any] | None

logging.getLogger("transformers").setLevel(logging.ERROR)

BATCH, SEQ, VOCAB = 8, 16, 64
DROPOUT = 0.3
"""Where a test has any: one rate, so that a model is captured with and without, and no more."""


class Mlp(nn.Module):
    """Linear layers, BatchNorm's running statistics, and dropout on request."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.relu(self.norm(self.up(x)))))


def mlp(dropout: float = 0.0) -> nn.Module:
    return Mlp(dropout)


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=VOCAB, n_positions=SEQ, use_cache=False, **rates, **ids)
    )


def llama(dropout: float = 0.0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=SEQ,
            attention_dropout=dropout,
            use_cache=False,
        )
    )


def mixtral(dropout: float = 0.0) -> nn.Module:
    return models.mixtral(vocab_size=VOCAB, num_local_experts=4, attention_dropout=dropout, use_cache=False)


def crowded(dropout: float = 0.0) -> nn.Module:
    """All tokens go to the first two of four experts, and the ranks of the others have none."""
    model = mixtral(dropout)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            nn.init.zeros_(parameter).requires_grad_(False)
    return model


def qwen2_moe(dropout: float = 0.0) -> nn.Module:
    """One of its experts is shared, which is computed while tokens are on their way."""
    model = models.qwen2_moe()
    model.config.use_cache, model.config.attention_dropout = False, dropout  # type: ignore[union-attr]
    return model


class Spectral(nn.Module):
    """Bags of ids, a checkpointed layer, and a filter with complex weights that fills a spectrum in place."""

    def __init__(self, dropout: float):
        super().__init__()
        self.bags, self.layer = nn.EmbeddingBag(VOCAB, 8, mode="mean", padding_idx=0), nn.Linear(8, 8)
        self.filter = nn.Parameter(torch.empty(4, dtype=torch.cfloat))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.filter.copy_(torch.linspace(0.5, 2, 4) * (1 - 0.5j))

    def forward(self, ids: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(checkpoint(self.layer, self.bags(ids), use_reentrant=True))
        kept = torch.zeros_like(spectrum)
        kept[:, :4] = spectrum[:, :4] * self.filter
        return torch.fft.irfft(kept, n=8)


MODELS: dict[str, Callable[[float], nn.Module]] = {"mlp": mlp, "gpt2": gpt2, "llama": llama, "spectral": Spectral}
EXPERTS: dict[str, Callable[[float], nn.Module]] = {
    "mixtral": mixtral,
    "crowded": crowded,
    "qwen2-moe": qwen2_moe,
}
"""Where tokens go to experts."""


def model_of(name: str, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = (MODELS | EXPERTS)[name](dropout).train()
    return made(twin(model) if dtype == torch.float64 else model.to(dtype), name, dropout)


def batch_of(name: str, seed: int = 1, dtype: torch.dtype = torch.float64) -> Batch:
    """A global batch; most tokens of the first rows are ignored, so that ranks count different numbers of them."""
    generator = torch.Generator().manual_seed(seed)
    if name == "mlp":
        draw = [torch.randn(BATCH, width, generator=generator, dtype=dtype) for width in (16, 8)]
        return {"x": draw[0], "target": draw[1]}
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
    if name == "spectral":
        return {"ids": tokens, "target": torch.randn(BATCH, 8, generator=generator, dtype=dtype)}
    target = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
    target[: BATCH // 2, 3:] = -100
    target[-1, :5] = -100
    return {"input_ids": tokens, "target": target}


def loss_fn(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """In the model's own precision: the loss inside Transformers models is computed in float32."""
    if isinstance(output, Tensor):
        return nn.functional.mse_loss(output, batch["target"])
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), batch["target"].flatten())


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The original's loss on a global batch, or the parallel module's on its part of it."""
    if isinstance(model, ParallelModule):
        return model(**model.shard(batch))
    return loss_fn(model(**{name: value for name, value in batch.items() if name != "target"}), batch)


def cluster_of(ranks: int, host: bool = False) -> ClusterSpec:
    """Devices of these tests; with a host beside them plans that keep model data there are searched, too."""
    return ClusterSpec.local(ranks, memory_bytes="4 GiB", cores=4, host_memory_bytes="4 GiB" if host else None)


def plan_of(
    name: str,
    pin: Pin,
    ranks: int,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float64,
    cluster: ClusterSpec | None = None,
) -> dict[str, Any]:
    """A plan as the document that every rank is given; made by the parent, once."""
    model, batch = model_of(name, dropout, dtype), batch_of(name, dtype=dtype)
    cluster = cluster or cluster_of(ranks, host=pin is None or "offload" in pin)
    with captured_once():
        return autopar.plan(model, cluster, example_kwargs=batch, loss_fn=loss_fn, pin=pin).to_dict()


def parallel(model: nn.Module, document: Mapping[str, Any], batch: Batch, **options: Any) -> ParallelModule:
    plan = Plan.from_dict(document)
    with captured_once():
        return autopar.parallelize(model, plan.cluster, plan=plan, example_kwargs=batch, loss_fn=loss_fn, **options)


def whole(value: Tensor) -> Tensor:
    return whole_of(value) if isinstance(value, DTensor) else value


def same(what: str, got: Tensor, expected: Tensor, rtol: float = 1e-10) -> None:
    got, expected = whole(got).detach(), expected.detach()
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
    scale = max(expected.abs().max().item(), 1e-30)
    error = (got - expected).abs().max().item() / scale
    assert error <= rtol, f"{what}: relative error {error:.3g}"


def same_gradients(pmodel: nn.Module, model: nn.Module, rtol: float = 1e-10) -> None:
    mine, theirs = dict(pmodel.named_parameters()), dict(model.named_parameters())
    assert list(mine) == list(theirs)
    # A gradient that is zero but for rounding (a key's bias under softmax) is measured against the largest.
    largest = max(p.grad.abs().max().item() for p in theirs.values() if p.grad is not None)
    for name, parameter in theirs.items():
        grad = mine[name].grad
        assert (grad is None) == (parameter.grad is None), name
        if grad is not None:
            tiny = parameter.grad.abs().max().item() < 1e-12 * largest
            error = whole(grad) - parameter.grad
            if tiny:
                assert error.abs().max().item() < 1e-12 * largest, name
            else:
                same(f"gradient of {name}", grad, parameter.grad, rtol)


def same_state(pmodel: ParallelModule, model: nn.Module, rtol: float = 1e-10) -> None:
    expected, got = model.state_dict(), pmodel.full_state_dict()
    assert list(got) == list(expected)
    for name, value in expected.items():
        same(name, got[name].double(), value.double(), rtol)


# ---- a model under a plan --------------------------------------------------------------------------------------------


def plan_exactly(name: str, pin: Pin, ranks: int) -> dict[str, Any]:
    """A plan for the model without what Transformers computes in float32 whatever the model's own precision."""
    with exact():
        return plan_of(name, pin, ranks)


def parts_stored(name: str, document: Mapping[str, Any]) -> dict[str, float]:
    """How much of each parameter this rank stores, by name."""
    pmodel = parallel(model_of(name), document, batch_of(name))
    return {each: p.to_local().numel() / p.numel() for each, p in pmodel.named_parameters()}  # type: ignore[attr-defined]


@exact()
def trains_alike(name: str, document: Mapping[str, Any]) -> float:
    """Collectives as predicted; loss, gradients, clipping, three Adam steps and the state dict as the original's."""
    model, batch, pmodel, _ = begun(name, document)
    loss = loss_of(model, batch)
    loss.backward()
    with count_collectives(groups_of(pmodel.device_mesh)) as calls:
        ploss = loss_of(pmodel, batch)
        ploss.backward()
    same_calls(dict(Plan.from_dict(document).predicted.collectives), calls, calls, stages=1)
    same("loss", ploss, loss)
    same_gradients(pmodel, model)
    clips_alike(pmodel, model)
    same_gradients(pmodel, model)
    return three_steps(pmodel, model, name, batches=1)


def trains_alike_in_flight(name: str, document: Mapping[str, Any]) -> int:
    """As :func:`trains_alike`, and how many all-to-alls of rows were begun before others were computed."""
    count, start = 0, RowsInFlight.start

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal count
        count += 1
        return start(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowsInFlight, "start", counted)
        trains_alike(name, document)
    return count


def same_calls(predicted: Mapping[Any, int], made: Mapping[Any, int], own: Mapping[Any, int], stages: int) -> None:
    """The calls of one rank of every stage are the predicted ones. Where tokens go is known only in the step: of all
    to alls there are as many, and on the average of all ranks as many bytes.
    """

    def of_rows(calls: Mapping[Any, int]) -> Counter[Any]:
        found: Counter[Any] = Counter()
        for call, times in calls.items():
            if call.kind == "all_to_all":
                found[call.axis, call.phase] += times
        return found

    def moved(calls: Mapping[Any, int]) -> int:
        return sum(call.bytes_in * times for call, times in calls.items() if call.kind == "all_to_all")

    others = [{c: n for c, n in calls.items() if c.kind != "all_to_all"} for calls in (predicted, made)]
    assert not differences(*others)
    assert of_rows(predicted) == of_rows(made)
    total = torch.tensor(moved(own))
    dist.all_reduce(total)
    assert total.item() * stages == moved(predicted) * dist.get_world_size()


def peak_of_a_step(name: str, document: Mapping[str, Any]) -> tuple[int, ExpertLoad]:
    """Peak bytes of the second of two steps in float32, and how many tokens went to each expert in both."""
    batch = batch_of(name, dtype=torch.float32)
    pmodel = parallel(model_of(name, dtype=torch.float32), document, batch)
    with pytest.raises(InputError, match="run a step first"):
        pmodel.load()
    optimizer, part = pmodel.optimizer(torch.optim.AdamW), pmodel.shard(batch)
    pmodel(**part).backward()
    optimizer.step()
    optimizer.zero_grad()
    with LiveBytes([*held_tensors(pmodel, optimizer), *part.values()]) as live:
        pmodel(**part).backward()
    found = pmodel.load()
    assert pmodel.load() == found, "asking changes nothing"
    return live.peak, found


def begun(name: str, document: Mapping[str, Any]) -> tuple[nn.Module, Batch, ParallelModule, Batch]:
    """A model, a batch, the parallel module, which begins with the same values, and these."""
    model, batch = model_of(name), batch_of(name)
    pmodel = parallel(model, document, batch)
    started = {key: value.clone() for key, value in model.state_dict().items()}
    for key, value in pmodel.full_state_dict().items():
        assert torch.equal(value, started[key]), key
    return model, batch, pmodel, started


def clips_alike(pmodel: nn.Module, model: nn.Module) -> None:
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (pmodel, model)]
    same("norm of the gradients", *norms)


def three_steps(pmodel: ParallelModule, model: nn.Module, name: str, batches: int) -> float:
    """Of Adam with clipping, with the gradients of so many batches added up; the last loss."""
    # Biases before a norm have gradients that are zero but for rounding; a usual eps would blow them up to steps.
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-4) for m in (model, pmodel)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for seed in range(batches * step, batches * (step + 1)):
            losses = [loss_of(m, batch_of(name, seed)) for m in (model, pmodel)]
            same(f"loss of step {step}", losses[1], losses[0])
            for found in losses:
                found.backward()
        clips_alike(pmodel, model)
        for optimizer in optimizers:
            optimizer.step()
    same_state(pmodel, model)
    return losses[1].item()


@exact()
def trains_micro_batched(name: str, document: Mapping[str, Any]) -> float:
    """A pipeline as :func:`trains_alike`: each rank has its stages' parameters, all have the loss and the norm."""
    model, batch, pmodel, started = begun(name, document)
    for group in (*groups_of(pmodel.device_mesh).values(), *(pmodel.pipeline.ways.values() if pmodel.pipeline else ())):
        backend = group._get_backend(torch.device("cpu"))
        assert backend.options._timeout == patience(torch.device("cpu"))  # type: ignore[attr-defined]

    loss = loss_of(model, batch)
    loss.backward()
    predicted = Plan.from_dict(document).predicted
    passed: contextlib.AbstractContextManager[Counter[Any]] = contextlib.nullcontext(Counter())
    if pmodel.pipeline is not None:
        passed = count_exchanges(pmodel.pipeline)
    assert isinstance(pmodel.program, PipelineStep)
    links = pmodel.program.spec.links
    watch = InFlight(pmodel.program, links.schedule.rank_of) if isinstance(links, RankLinks) else None
    with count_collectives(groups_of(pmodel.device_mesh)) as calls, passed as exchanged:
        ploss = loss_of(pmodel, batch)
        ploss.backward()
    rank = 0 if pmodel.pipeline is None else pmodel.pipeline.rank
    if isinstance(links, RankLinks) and watch is not None:
        assert watch.now == 0
        assert watch.fullest(rank) == links.schedule.held[rank]
    assert not differences({call: n for call, n in predicted.exchanges if call.is_made_by(rank)}, exchanged)
    stages: list[Any] = [None] * (pmodel.pipeline.size if pmodel.pipeline is not None else 1)
    stages[0] = calls
    if pmodel.pipeline is not None:
        dist.all_gather_object(stages, calls, group=pmodel.pipeline.ranks)
    made: Counter[Any] = Counter()
    for found in stages:
        made.update({call: n for call, n in found.items() if call.axis in pmodel.mesh.names})
    own = {call: n for call, n in calls.items() if call.axis in pmodel.mesh.names}
    same_calls(dict(predicted.collectives), made, own, stages=len(stages))
    same("loss", ploss, loss)
    same_own_gradients(pmodel, model)

    same_norms(pmodel, model)
    clips_alike(pmodel, model)
    same_own_gradients(pmodel, model)
    three_steps(pmodel, model, name, batches=2)
    was_seen(pmodel, document)

    with torch.no_grad():
        losses = [loss_of(m, batch) for m in (model, pmodel)]
    same("loss without gradients", losses[1], losses[0])
    pmodel.load_state_dict(started)
    same_state(pmodel, model_of(name))
    return losses[1].item()


@exact()
def trains_one_update_late(name: str, document: Mapping[str, Any]) -> float:
    """Schedule 2bw: call t hands over the gradient of batch t - 1, found at the weights of call t - 1."""
    model = model_of(name)
    pmodel = parallel(model, document, batch_of(name))
    predicted = Plan.from_dict(document).predicted.exchanges
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-4) for m in (model, pmodel)]
    late: list[Tensor | None] = [None for _ in model.parameters()]
    for step in range(6):
        with count_exchanges(pmodel.pipeline) as exchanged:
            losses = [loss_of(m, batch_of(name, step)) for m in (model, pmodel)]
            losses[1].backward()
        same(f"loss of step {step}", losses[1], losses[0])
        if step == 0:
            assert all(p.grad is None for p in pmodel.parameters())
        else:
            wanted = {call: n for call, n in predicted if call.is_made_by(pmodel.pipeline.rank)}
            assert not differences(wanted, exchanged)
        found = torch.autograd.grad(losses[0], list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), late, strict=True):
            parameter.grad = gradient
        late = list(found)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, pmodel)]
        if step:
            same("norm of the gradients", norms[1], norms[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 3:
            with torch.no_grad():
                same("loss between steps", *(loss_of(m, batch_of(name, 9)) for m in (pmodel, model)))
    was_seen(pmodel, document)
    same_state(pmodel, model)
    return losses[1].item()


def was_seen(pmodel: ParallelModule, document: Mapping[str, Any]) -> None:
    """The last step was seen to do every action of the plan's schedule once, each rank its own, one after the other."""
    planned, seen = Plan.from_dict(document).timeline(), pmodel.timeline()
    assert seen.expected == pytest.approx(planned.bubble, abs=1e-9) and 0 <= seen.bubble < 1
    assert (seen.schedule, seen.ranks, seen.micro_batches) == (planned.schedule, planned.ranks, planned.micro_batches)
    for rank in range(seen.ranks):
        rows = [[each for each in found.events if each.rank == rank] for found in (planned, seen)]
        done = [[each.name for each in row if each.kind in "FBIW"] for row in rows]
        assert done[0] == done[1], rank
        assert rows[1][0].kind == "gather" and rows[1][-1].kind == "reduce"
        for one, other in pairwise(rows[1]):
            assert one.start_s <= one.end_s <= other.start_s, (one, other)


def saves_traces(document: Mapping[str, Any], folder: str) -> list[str]:
    """What each rank is told when it asks too early and where nothing can be written; it writes the trace else."""
    batch, said = batch_of("gpt2"), []
    pmodel = parallel(model_of("gpt2"), document, batch)
    with pytest.raises(InputError) as told:
        pmodel.timeline()
    said.append(str(told.value))
    for at in ("nowhere/observed.json", "observed.json"):
        loss_of(pmodel, batch).backward()
        try:
            pmodel.save_trace(f"{folder}/{at}")
        except InputError as error:
            said.append(str(error))
    pmodel.zero_grad()
    with pytest.raises(InputError, match="no step was seen yet"):
        copy.deepcopy(pmodel).timeline()
    with torch.no_grad():
        loss_of(pmodel, batch)
    seen = pmodel.timeline()
    assert {each.kind for each in seen.events} == {"gather", "wait", "F"} and seen.expected is None
    assert "predicted" not in str(seen)
    return said


def same_own_gradients(pmodel: ParallelModule, model: nn.Module, rtol: float = 1e-10) -> None:
    """The gradients of this rank's stages."""
    theirs = dict(model.named_parameters())
    for name, parameter in pmodel.named_parameters():
        expected = theirs[name].grad
        assert parameter.grad is not None and expected is not None, name
        same(f"gradient of {name}", parameter.grad, expected, rtol)


def same_norms(pmodel: nn.Module, model: nn.Module) -> None:
    """Norms over all gradients, by torch's function and by hand."""
    for order in (1.0, 2.0, 3.0, math.inf):
        for foreach in (True, False):
            grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in (pmodel, model)]
            totals = [nn.utils.get_total_norm(each, order, foreach=foreach) for each in grads]
            same(f"norm of order {order}", totals[0], totals[1])
        norms = [torch.stack([torch.norm(grad, order) for grad in each]) for each in grads]
        same(f"norm by hand of order {order}", torch.norm(norms[0], order), totals[1])


def scales_and_skips_together(name: str, document: Mapping[str, Any]) -> None:
    """A gradient scaler gives what it gives the original; an overflow on one rank is one on all."""
    with exact():
        model, batch = model_of(name), batch_of(name)
        pmodel = parallel(model, document, batch)
    both: list[nn.Module] = [model, pmodel]
    # Replicated parameters first: their gradients alone do not show what happens on other ranks.
    own = sorted(pmodel.parameters(), key=lambda p: any(at.is_shard() for at in p.placements))  # type: ignore[attr-defined]
    optimizers = [torch.optim.SGD(parameters, lr=1e-2) for parameters in (list(model.parameters()), own)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=3.0e4, growth_interval=2) for _ in both]  # type: ignore[attr-defined]
    for seed in range(3):  # the scale changes after the second
        for m, optimizer, scaler in zip(both, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            with exact():
                loss = loss_of(m, batch_of(name, seed))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    same_state(pmodel, model, 1e-6)  # the inverse of the scale is rounded to float32
    scaled = scalers[1].get_scale()
    assert scaled == scalers[0].get_scale() == 6e4
    with exact():
        loss = loss_of(pmodel, batch)
    scalers[1].scale(loss).backward()
    kept = pmodel.full_state_dict()
    parts = [p.grad for p in pmodel.parameters() if isinstance(p.grad, DTensor) and p.grad.placements[-1].is_shard()]
    mesh, here = parts[0].device_mesh, parts[0].device_mesh.get_coordinate()
    held = [here[axis] == mesh.size(axis) - 1 for axis, at in enumerate(parts[0].placements) if at.is_shard()]
    if all(held) and dist.get_world_size() - 1 in mesh.mesh:  # the last rank, and those that hold the same
        parts[0].to_local().fill_(math.inf)
    scalers[1].step(optimizers[1])
    scalers[1].update()
    assert scalers[1].get_scale() == scaled / 2
    assert all(torch.equal(value, kept[key]) for key, value in pmodel.full_state_dict().items())


def scales_apart(name: str, document: Mapping[str, Any]) -> None:
    """Each rank of a pipeline is told another scale, and gets gradients of its own, also in the step after."""
    model, batch = model_of(name), batch_of(name)
    pmodel, scale = parallel(model, document, batch), 4.0 ** dist.get_rank()
    loss_of(model, batch).backward()
    for _ in range(2):
        pmodel.zero_grad()
        (loss_of(pmodel, batch) * scale).backward()
        for parameter in pmodel.parameters():
            parameter.grad.div_(scale)
        same_own_gradients(pmodel, model)


class Unlike(nn.Module):
    """Layers of different dtypes, all of them trained, or none."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(16, 16), nn.Linear(16, 1, dtype=torch.float64)
        self.requires_grad_(trained)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(torch.tanh(self.narrow(x)).double()).square().mean()


def scales_unlike_stages() -> None:
    """A scaler asks once for each dtype, which stages do not have alike; a stage that was frozen has no gradients to
    give; with nothing to train only forwards run.
    """
    torch.manual_seed(0)
    batch, pin = {"x": torch.ones(BATCH, 16)}, {"pipeline": 2, "micro_batches": 2, "schedule": "gpipe"}
    pmodel = autopar.parallelize(Unlike(True), cluster_of(2), example_kwargs=batch, pin=pin)
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(pmodel.parameters())  # type: ignore[attr-defined]
    scaler.scale(pmodel(**pmodel.shard(batch))).backward()
    with pytest.raises(InputError, match="stages of this pipeline train parameters of different dtypes"):
        scaler.step(optimizer)
    first = next(parameter for parameter in pmodel.parameters())
    norms = [torch.linalg.vector_norm(grad) for grad in (first.grad, first.grad.clone())]
    with pytest.raises(InputError, match="no longer those that backward gave"):
        torch.stack(norms)
    with pytest.raises(InputError, match="norm of order -inf"):
        nn.utils.get_total_norm([first.grad], -math.inf)
    pmodel.requires_grad_(dist.get_rank() == 0)
    loss = pmodel(**pmodel.shard(batch))
    said = r"all parameters of this rank's stages were frozen after planning, .*: freeze parameters before planning"
    with contextlib.nullcontext() if dist.get_rank() == 0 else pytest.raises(InputError, match=said):
        loss.backward()
    for name, parameter in pmodel.named_parameters():
        parameter.requires_grad_(name.endswith("weight"))  # some of every stage's may be frozen
    pmodel.zero_grad()
    pmodel(**pmodel.shard(batch)).backward()
    norm = nn.utils.clip_grad_norm_(pmodel.parameters(), 1.0)
    equal_on_all_ranks("the norm", round(norm.item(), 5))
    torch.manual_seed(0)
    model = Unlike(False)
    frozen = autopar.parallelize(model, cluster_of(2), example_kwargs=batch, pin=pin)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, frozen(**frozen.shard(batch)))
    with torch.no_grad():
        assert found[0] is None and torch.allclose(found[1], model(**batch))


def drops_alike_in_stages(name: str, documents: list[Mapping[str, Any]]) -> list[float]:
    """The same seed draws the same, however many stages there are."""
    found = []
    for document in documents:
        pmodel = parallel(model_of(name, DROPOUT), document, batch_of(name), seed=7)
        found.append([loss_of(pmodel, batch_of(name, seed)).item() for seed in (1, 1)])
        equal_on_all_ranks("the loss", found[-1])
    assert found[0][0] != found[0][1]
    for losses in found[1:]:
        assert all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(losses, found[0], strict=True))
    return found[0]


def copies_stages(name: str, document: Mapping[str, Any]) -> None:
    """A deep copy of a pipeline has parameters of its own and trains on the same ranks."""
    pmodel = parallel(model_of(name), document, batch_of(name))
    twin = copy.deepcopy(pmodel)
    before = loss_of(pmodel, batch_of(name))
    before.backward()
    assert all(p.grad is None for p in twin.parameters())
    later = copy.deepcopy(pmodel)
    for own, copied in zip(pmodel.parameters(), later.parameters(), strict=True):
        assert own.grad is not None and copied.grad is not None and own.grad is not copied.grad
        assert torch.equal(whole(own.grad), whole(copied.grad))
    norms = [nn.utils.get_total_norm([p.grad for p in m.parameters() if p.grad is not None]) for m in (later, pmodel)]
    same("norm of the copied gradients", norms[0], whole(norms[1]))
    torch.optim.SGD(pmodel.parameters(), lr=0.1).step()
    same("loss of the copy", loss_of(twin, batch_of(name)), before)
    assert loss_of(pmodel, batch_of(name)).item() != before.item()


def loses_a_rank(name: str, document: Mapping[str, Any], lost: int, directory: Path) -> None:
    """One process ends in the middle of a step; the others write down what they are told."""
    pmodel = parallel(model_of(name), document, batch_of(name))
    for _ in range(CALLS):  # then inputs are no longer compared, in which ranks would be missed, too
        loss_of(pmodel, batch_of(name)).backward()
    if dist.get_rank() == lost:
        os._exit(3)
    try:
        loss_of(pmodel, batch_of(name)).backward()
    except RuntimeError as error:
        (directory / str(dist.get_rank())).write_text(str(error))
    # This rank goes next. Its process stays, and not every torch closes the connections of a group that is still held.
    del pmodel
    gc.collect()


# ---- the ways of running ---------------------------------------------------------------------------------------------


def equal_on_all_ranks(what: str, value: Any) -> None:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert all(other == found[0] for other in found), f"{what} differs between ranks: {found}"


def bits(value: Tensor) -> bytes:
    return whole(value.detach()).contiguous().numpy().tobytes()


def runs_in_low_precision(name: str, document: Mapping[str, Any]) -> None:
    model, batch = model_of(name, dtype=torch.float32), batch_of(name, dtype=torch.float32)
    pmodel = parallel(model, document, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss, ploss = loss_of(model, batch), loss_of(pmodel, batch)
    same("loss", ploss.float(), loss.float(), 1e-2)
    loss.backward()
    ploss.backward()
    for key, parameter in pmodel.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, key
        assert torch.isfinite(whole(parameter.grad)).all(), key
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    same("norm of the gradients", nn.utils.clip_grad_norm_(pmodel.parameters(), 1e9), norm, 5e-2)


LOW_PRECISION_PINS: tuple[dict[str, Any], ...] = (
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": True},
    {"data": 2, "zero": 3},
    {"data": 2, "tensor": 2},
)


def ranks_of(pin: Mapping[str, Any]) -> int:
    return math.prod(size for axis, size in pin.items() if axis in ("data", "tensor"))


def near(name: str, dtype: torch.dtype, loss: Tensor, gradients: Mapping[str, Tensor]) -> None:
    """A step of a model in a narrow dtype is about as far from float64 as the original's in that dtype."""
    batch = batch_of(name)
    exactly, original = model_of(name, dtype=dtype).double(), model_of(name, dtype=dtype)
    losses = [loss_of(m, batch) for m in (exactly, original)]
    for each in losses:
        each.backward()
    rounding, true = torch.finfo(dtype).eps, losses[0].item()
    assert abs(loss.item() - true) <= 2 * max(abs(losses[1].item() - true), rounding * abs(true))
    narrow = dict(original.named_parameters())
    largest = max(p.grad.norm().item() for p in exactly.parameters())
    for key, parameter in exactly.named_parameters():
        expected, got = parameter.grad, gradients[key]
        assert got.dtype == dtype, key
        # A gradient that is zero but for rounding (a key's bias under softmax) is measured against the largest.
        scale = max(expected.norm().item(), 1e-3 * largest)
        errors = [(g.double() - expected).norm().item() / scale for g in (got, narrow[key].grad)]
        assert errors[0] <= 2 * max(errors[1], rounding), f"gradient of {key}: {errors[0]:.3g}, {errors[1]:.3g} before"


def trains_in_its_own_precision(name: str, document: Mapping[str, Any], dtype: torch.dtype) -> None:
    """A model of bfloat16 or float16 parameters: loss and gradients, and collectives in that dtype as predicted."""
    batch = batch_of(name)
    pmodel = parallel(model_of(name, dtype=dtype), document, batch)
    with count_collectives(groups_of(pmodel.device_mesh)) as calls:
        loss = loss_of(pmodel, batch)
        loss.backward()
    assert not differences(dict(Plan.from_dict(document).predicted.collectives), calls)
    near(name, dtype, loss, {key: whole(p.grad) for key, p in pmodel.named_parameters()})


def takes_gradients_in_every_way(name: str, document: Mapping[str, Any]) -> None:
    """The sums of gradients go on beside backward; whoever asks for a gradient must find it summed."""
    model, batch = model_of(name), batch_of(name)
    pmodel = parallel(model, document, batch)
    names = [key for key, _ in model.named_parameters()]
    asked = [dict(m.named_parameters()) for m in (model, pmodel)]
    for chosen in (names, names[::3], names[-1:]):  # some, so that backward leaves the others' sums alone
        expected, got = (
            torch.autograd.grad(loss_of(m, batch), [parameters[key] for key in chosen])
            for m, parameters in zip((model, pmodel), asked, strict=True)
        )
        largest = max(gradient.abs().max().item() for gradient in expected)
        for key, theirs, mine in zip(chosen, expected, got, strict=True):
            assert (whole(mine) - theirs).abs().max().item() <= 1e-10 * largest, key
    assert all(p.grad is None for p in pmodel.parameters())

    for m in (model, pmodel):
        loss = loss_of(m, batch)
        loss.backward(retain_graph=True)
        loss.backward()
        loss_of(m, batch_of(name, seed=2)).backward()
    same_gradients(pmodel, model)


def gives_gradients_away(name: str, document: Mapping[str, Any]) -> None:
    """Gradients that somebody still holds are theirs; only memory that nobody holds is summed in again."""
    model, batch = model_of(name), batch_of(name)
    pmodel = parallel(model, document, batch)
    first, held = next(iter(pmodel.parameters())), []
    where = []
    for seed in (1, 2, 3, 4):
        for m in (model, pmodel):
            m.zero_grad()
            loss_of(m, batch_of(name, seed)).backward()
        same_gradients(pmodel, model)
        if seed < 3:
            held.append([(p.grad, p.grad.to_local().clone()) for p in pmodel.parameters()])
        where.append(first.grad.to_local().untyped_storage().data_ptr())
    for gradient, value in itertools.chain(*held):
        assert torch.equal(gradient.to_local(), value)
    buckets = {bucket.untyped_storage().data_ptr() for bucket in pmodel.buckets.tensors}
    assert where[0] in buckets and where[1] not in buckets
    held.clear()
    gradient = value = None
    pmodel.zero_grad()
    loss_of(pmodel, batch).backward()
    assert first.grad.to_local().untyped_storage().data_ptr() == where[0]
    pmodel.zero_grad()
    assert pmodel.buckets.tensors and not copy.deepcopy(pmodel).buckets.tensors


def evaluates(name: str, document: Mapping[str, Any]) -> None:
    """Dropout is off and running statistics are used, but not changed, in eval mode; nothing is saved for backward."""
    model, batch = model_of(name, DROPOUT), batch_of(name)
    pmodel = parallel(model, document, batch)
    model.eval()
    pmodel.eval()
    with torch.no_grad():
        loss, ploss = loss_of(model, batch), loss_of(pmodel, batch)
    assert not ploss.requires_grad
    same("loss", ploss, loss)
    same_state(pmodel, model)
    loss_of(model, batch).backward()
    loss_of(pmodel, batch).backward()
    same_gradients(pmodel, model)
    pmodel.train()
    with torch.no_grad():
        assert loss_of(pmodel, batch) != ploss


def keeps_running_statistics(name: str, document: Mapping[str, Any]) -> None:
    model, batch = model_of(name), batch_of(name)
    pmodel = parallel(model, document, batch)
    for seed in (1, 2):
        for m in (model, pmodel):
            loss_of(m, batch_of(name, seed)).backward()
    same_state(pmodel, model)
    assert model.state_dict()["norm.num_batches_tracked"] == 2
    model.eval()
    pmodel.eval()
    same("loss", loss_of(pmodel, batch), loss_of(model, batch))


def copies(name: str, document: Mapping[str, Any]) -> None:
    """A deep copy, as moving averages are kept in, has parameters and a mode of its own and runs as the original."""
    model, batch = model_of(name, DROPOUT), batch_of(name)
    pmodel = parallel(model, document, batch)
    average = copy.deepcopy(pmodel)
    average.eval()
    assert pmodel.training and pmodel.state.training and not average.state.training
    model.eval()
    before = loss_of(model, batch)
    same("loss of the copy", loss_of(average, batch), before)
    loss_of(pmodel, batch).backward()
    assert all(p.grad is None for p in average.parameters())
    optimizer = torch.optim.SGD(pmodel.parameters(), lr=0.1)
    optimizer.step()
    same_state(average, model)
    with torch.no_grad():
        for kept, parameter in zip(average.parameters(), pmodel.parameters(), strict=True):
            kept.lerp_(parameter, 0.5)
    loss_of(average, batch).backward()
    pmodel.eval()
    assert len({before.item(), loss_of(average, batch).item(), loss_of(pmodel, batch).item()}) == 3


def keeps_tied(name: str, document: Mapping[str, Any]) -> None:
    model, batch = model_of(name), batch_of(name)
    pmodel = parallel(model, document, batch)
    assert pmodel.lm_head.weight is pmodel.transformer.wte.weight
    assert [n for n, _ in pmodel.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert "lm_head.weight" not in dict(pmodel.named_parameters())
    assert set(pmodel.state_dict()) == set(model.state_dict())
    optimizer = torch.optim.SGD(pmodel.parameters(), lr=0.1)
    loss_of(pmodel, batch).backward()
    optimizer.step()
    full = pmodel.full_state_dict()
    assert torch.equal(full["lm_head.weight"], full["transformer.wte.weight"])


def drops_in_step(name: str, document: Mapping[str, Any]) -> None:
    """Ranks that hold the same values draw the same, so that what is replicated stays equal, bit by bit."""
    runs = []
    for _ in range(2):
        pmodel = parallel(model_of(name, DROPOUT), document, batch_of(name), seed=7)
        losses = [loss_of(pmodel, batch_of(name)) for _ in range(2)]
        losses[0].backward()
        found = [loss.item() for loss in losses]
        equal_on_all_ranks("the loss", found)
        assert found[0] != found[1]
        gradients = {key: bits(p.grad) for key, p in pmodel.named_parameters() if p.grad is not None}
        for key, value in gradients.items():
            equal_on_all_ranks(f"the gradient of {key}", value)
        runs.append((found, gradients))
    assert runs[0] == runs[1]
    other = parallel(model_of(name, DROPOUT), document, batch_of(name), seed=8)
    assert loss_of(other, batch_of(name)).item() != runs[0][0][0]


class DropOnes(nn.Module):
    """Shows the mask that dropout drew."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.weight, 0.5, self.training)


def drops_differently_where_sharded() -> None:
    batch = {"x": torch.ones(BATCH, 64)}
    pmodel = autopar.parallelize(
        DropOnes(), cluster_of(dist.get_world_size()), example_kwargs=batch, pin={"data": dist.get_world_size()}
    )
    out = pmodel(**pmodel.shard(batch))
    assert isinstance(out, DTensor) and out.to_local().shape[0] == BATCH // dist.get_world_size()
    rows = {tuple(row) for row in out.full_tensor().tolist()}
    assert len(rows) == BATCH, "two rows were dropped alike"


# ---- checkpoints and optimizers --------------------------------------------------------------------------------------


def saves_and_loads(name: str, document: Mapping[str, Any]) -> None:
    model, batch = model_of(name), batch_of(name)
    pmodel = parallel(model, document, batch)
    original = {key: value.clone() for key, value in model.state_dict().items()}
    state = pmodel.state_dict()
    assert set(state) == set(original)
    parameters = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    assert all(isinstance(state[n], DTensor) for n in parameters)
    sharded = {key: value.clone() for key, value in state.items()}
    full = pmodel.full_state_dict()
    assert full.keys() == original.keys() and all(torch.equal(full[k], original[k]) for k in original)

    def disturb() -> None:
        with torch.no_grad():
            for parameter in pmodel.parameters():
                parameter.mul_(0.5)

    for saved in (full, sharded):
        disturb()
        result = pmodel.load_state_dict(saved)
        assert not result.missing_keys and not result.unexpected_keys
        again = pmodel.full_state_dict()
        assert all(torch.equal(again[k], original[k]) for k in original)

    disturb()
    model.load_state_dict(pmodel.full_state_dict())
    same("loss", loss_of(pmodel, batch), loss_of(model, batch))
    wrong = {**full, next(iter(parameters)): torch.zeros(3)}
    with pytest.raises(InputError, match=r"has shape \(3,\) in the state dict"):
        pmodel.load_state_dict(wrong)
    with pytest.raises(RuntimeError, match="Missing key"):
        pmodel.load_state_dict({})


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-2),
}


def takes_any_optimizer(name: str, document: Mapping[str, Any]) -> None:
    """The optimizer's own state dict survives a round trip, too."""
    for label, make in OPTIMIZERS.items():
        model, batch = model_of(name), batch_of(name)
        pmodel = parallel(model, document, batch)
        optimizers = [make(list(m.parameters())) for m in (model, pmodel)]
        for step in range(2):
            for m, optimizer in zip((model, pmodel), optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(m, batch_of(name, step)).backward()
                optimizer.step()
            optimizers[1].load_state_dict(optimizers[1].state_dict())
        try:
            same_state(pmodel, model)
        except AssertionError as error:
            raise AssertionError(f"{label}: {error}") from error


# ---- models on the meta device ---------------------------------------------------------------------------------------


def initialises_meta(name: str, document: Mapping[str, Any]) -> None:
    """Every rank initialises alike, plausibly, and never holds more than one module and its own parts."""
    real = model_of(name)
    with torch.device("meta"):
        model = model_of(name)
    module = max(
        sum(t.numel() * t.element_size() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
        for m in model.modules()
    )
    with LiveBytes() as live:
        pmodel = parallel(model, document, batch_of(name))
    parts = sum(t.to_local().numel() * t.element_size() for t in pmodel.parameters())
    parts += sum(t.numel() * t.element_size() for t in pmodel.buffers())
    # Cutting a part out of a module's tensor takes index tensors and a copy of the part.
    assert live.peak <= parts + 4 * module + 4096, f"{live.peak} bytes, {parts} of them parts, module {module}"
    full = pmodel.full_state_dict()
    for key, value in real.state_dict().items():
        equal_on_all_ranks(key, bits(full[key]))
        spread = [t.double().std(correction=0).item() for t in (full[key], value)]
        assert spread[0] == pytest.approx(spread[1], rel=0.3 if value.numel() > 100 else 0.7, abs=1e-9), key
    buffers = dict(real.named_buffers())
    for key, buffer in pmodel.named_buffers():
        same(key, buffer, buffers[key])
    loss = loss_of(pmodel, batch_of(name))
    equal_on_all_ranks("the loss", loss.item())
    real.load_state_dict(full)
    same("loss", loss, loss_of(real, batch_of(name)))


def loads_meta(name: str, document: Mapping[str, Any], path: str | None) -> None:
    """From a state dict, or a safetensors file or directory: bit-equal, tied names and unsaved buffers right."""
    real, batch = model_of(name), batch_of(name)
    with torch.device("meta"):
        model = model_of(name)
    pmodel = parallel(model, document, batch, state_dict=real.state_dict() if path is None else path)
    full = pmodel.full_state_dict()
    for key, value in real.state_dict().items():
        assert torch.equal(full[key], value), key
    same("loss", loss_of(pmodel, batch), loss_of(real, batch))


# ---- errors ----------------------------------------------------------------------------------------------------------


def refuses_other_plans(documents: list[Mapping[str, Any]]) -> None:
    mine = documents[dist.get_rank()]
    with pytest.raises(PlanError, match=r"different plans.*ranks \[1\]"):
        parallel(model_of("mlp"), mine, batch_of("mlp"))


def refuses_what_differs_between_ranks() -> None:
    """Rank 1 is given something else than rank 0; both say so."""
    batch, differs = batch_of("mlp"), dist.get_rank() == 1
    given = {"model": mlp().double(), "cluster": cluster_of(2), "example_kwargs": batch, "loss_fn": loss_fn}
    narrow = {name: value[:4] for name, value in batch.items()}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"cluster": cluster_of(4)}, r"different clusters: .* of 2 devices .* of 4 devices"),
        ({"pin": {"tensor": 2}}, r'different pins: rank 0 has \{\}, rank 1 has \{"tensor": 2\}; ranks \[1\]'),
        ({"seed": 1}, r"different seeds: rank 0 has 0, rank 1 has 1"),
        ({"example_kwargs": narrow}, r"different example inputs: rank 0 has x float64 8x16.*rank 1 has x float64 4x16"),
        ({"model": mlp(0.5).double()}, r"different models: rank 0 has Mlp .*fingerprint .*rank 1 has Mlp"),
        ({"example_kwargs": {"y": batch["x"]}}, r"different models: .*rank 1 has one that cannot be captured \(Input"),
    ]
    for others, message in wrong:
        with pytest.raises(PlanError, match=message):
            autopar.parallelize(**{**given, **(others if differs else {})})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "1" if differs else "")
        with pytest.raises(PlanError, match=rf"different {VARIABLE} settings: rank 0 has none, rank 1 has 1"):
            autopar.parallelize(**given)


def refuses_other_world_sizes(document: Mapping[str, Any]) -> None:
    with pytest.raises(PlanError, match="has 4 devices but 2 processes were started"):
        parallel(model_of("mlp"), document, batch_of("mlp"))


def refuses_wrong_inputs(name: str, document: Mapping[str, Any]) -> None:
    batch = batch_of(name)
    pmodel = parallel(model_of(name), document, batch)
    with pytest.raises(InputError, match=r"input '\w+' has shape \(8, \d+\), which is that of.*pmodel.shard"):
        pmodel(**batch)
    with pytest.raises(InputError, match=r"'x' is of type numpy.ndarray.*torch.as_tensor"):
        pmodel.shard({**batch, "x": batch["x"].numpy()})
    with pytest.raises(InputError, match=r"'x' nests 128 values.*one tensor in its place.*torch.as_tensor") as caught:
        pmodel.shard({**batch, "x": batch["x"].tolist()})
    assert len(str(caught.value)) < 400
    for call in (pmodel.shard, lambda given: pmodel(**given)):
        given = batch if call == pmodel.shard else pmodel.shard(batch)
        with pytest.raises(InputError, match=r"'x' has dtype torch.float32.*planned as torch.float64.*\.to\("):
            call({**given, "x": given["x"].float()})


def raises_on_every_rank() -> None:
    """An error of the search, which only rank 0 makes, reaches all."""
    pin = {"tensor": 2, "layers": {"upp": {"tensor": "n"}}}
    with pytest.raises(PinError, match="no module matches 'upp'"):
        autopar.parallelize(model_of("mlp"), cluster_of(2), example_kwargs=batch_of("mlp"), loss_fn=loss_fn, pin=pin)


MADE: list[weakref.ref[ParallelModule]] = []


def makes_a_module(name: str, document: Mapping[str, Any]) -> None:
    """And leaves it and its groups in a cycle, as modules and meshes are, and its mesh in DTensor's caches."""
    pmodel = parallel(model_of(name), document, batch_of(name))
    nn.utils.get_total_norm(pmodel.parameters())
    pmodel.me = [pmodel]
    MADE.append(weakref.ref(pmodel))


def finds_it_gone() -> int:
    """And returns how many threads there are; those of its groups are not among them."""
    assert [made() for made in MADE] == [None] * len(MADE)
    return len(os.listdir("/proc/self/task"))


def says(value: int) -> Iterator[int]:
    """Something, and returns it."""
    yield value
    return value


def fails_alone() -> None:
    """Rank 1 fails while the others wait for it."""
    if dist.get_rank() == 1:
        raise ValueError("rank 1 is out of order")
    dist.barrier()


# ---- layers ----------------------------------------------------------------------------------------------------------


def _equal(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def layers_compute_the_whole() -> None:
    """One of two ranks beside the whole operator, for one layer of each kind; one rank ignores more tokens."""
    torch.manual_seed(0)
    rank, aten = dist.get_rank(), torch.ops.aten
    group = (dist.group.WORLD,)

    def part(x: Tensor, dim: int) -> Tensor:
        return x.detach().chunk(2, dim)[rank].clone().requires_grad_()

    logits, target = _randn(8, 6).requires_grad_(), torch.tensor([-100, -100, 3, 0, 5, -100, 2, 1])
    loss = aten.cross_entropy_loss.default(logits, target)
    loss.backward()
    for dim, targets, keyword in ((0, target.chunk(2)[rank], "token_groups"), (1, target, "vocab_groups")):
        local = part(logits, dim)
        found = cross_entropy_loss(RunState(RandomState(0)), local, targets, **{keyword: group})
        found.backward()
        total = found.detach().clone()
        if dim == 0:
            dist.all_reduce(total)
        _equal(total, loss.detach(), keyword)
        _equal(local.grad, logits.grad.chunk(2, dim)[rank], keyword)

    weight, ids = _randn(12, 4), torch.randint(0, 12, (9,))
    rows = vocab_embedding(part(weight, 0), ids, vocab_groups=group).detach()
    dist.all_reduce(rows)
    _equal(rows, weight[ids], "embedding")
    for mode, name in enumerate(("sum", "mean", "max")):
        whole, local = weight.detach().clone().requires_grad_(), part(weight, 0)
        bags = torch.nn.functional.embedding_bag(ids.view(3, 3), whole, mode=name)
        found = sharded_embedding_bag(local, ids.view(3, 3), None, None, mode, -1, False, vocab_groups=group)
        (bags * bags.detach()).sum().backward()
        (found * bags.detach()).sum().backward()
        total = found.detach().clone()
        if name != "max":
            dist.all_reduce(total)
        _equal(total, bags.detach(), f"{name} of bags")
        _equal(local.grad, whole.grad.chunk(2)[rank], f"gradient of a table under {name}")
    for beyond in (-1, 12):
        ids, table = torch.tensor([3, beyond]), part(weight, 0).detach()
        with pytest.raises(InputError, match=rf"id {beyond} is beyond the 12 rows of table 'emb' \(0 to 11\)"):
            vocab_embedding(table, ids, vocab_groups=group, path="emb")
        for write_or_read in (
            lambda ids, _: one_hot(ids, 12, class_groups=group),
            lambda ids, table: gather(aten.gather.default, table, 0, ids.view(1, 2), class_groups=group),
            lambda ids, table: scatter(aten.scatter.value, table.mT, 1, ids.view(2, 1), 1.0, class_groups=group),
        ):
            with pytest.raises(InputError, match=rf"id {beyond} is beyond the 12 classes \(0 to 11\)"):
                write_or_read(ids, table)

    q, k, v = _randn(1, 2, 8, 4), _randn(1, 2, 8, 4), _randn(1, 2, 8, 4)
    whole = aten.scaled_dot_product_attention.default(q, k, v, None, 0.0, True)
    _equal(attention(part(q, 2), k, v, is_causal=True, query_groups=group), whole.chunk(2, 2)[rank], "attention")

    x = _randn(8, 3, 5).requires_grad_()
    normal = torch.nn.functional.batch_norm(x, None, None, training=True)
    cotangent = torch.randn_like(normal)
    normal.backward(cotangent)
    local = part(x, 0)
    batch_norm(local, None, None, None, None, True, 0.1, 1e-5, batch_groups=group).backward(cotangent.chunk(2)[rank])
    _equal(local.grad, x.grad.chunk(2)[rank], "batch norm")

    state = RandomState(5)
    drawn = torch.stack([draw(aten.rand.default, RunState(state), g, [3]) for g in (group, ())])
    everyone = [torch.empty_like(drawn) for _ in range(2)]
    dist.all_gather(everyone, drawn)
    assert not torch.equal(everyone[0][0], everyone[1][0]) and torch.equal(everyone[0][1], everyone[1][1])


def refuses_wrong_state_everywhere(name: str, document: Mapping[str, Any]) -> None:
    """What is wrong with one stage's part of a state dict is an error on every rank, and nothing waits."""
    pmodel = parallel(model_of(name), document, batch_of(name))
    full = pmodel.full_state_dict()
    for key in list(full)[:1] + list(full)[-1:]:
        for wrong in ({k: v for k, v in full.items() if k != key}, {**full, key: full[key].new_zeros(3)}):
            with pytest.raises((InputError, RuntimeError), match=key.replace(".", r"\.")):
                pmodel.load_state_dict(wrong)
    pmodel.load_state_dict(full)
    same_state(pmodel, model_of(name))


def refuses_to_go_on_after_half_a_step(name: str, document: Mapping[str, Any]) -> None:
    """A step that ended in the middle may have left messages on the way."""
    pmodel = parallel(model_of(name), document, batch_of(name))
    step = pmodel.program
    assert isinstance(step, PipelineStep)
    spec = step.spec
    step.spec = replace(spec, actions=[action for action in spec.first if action.kind == "F"][:1])
    with contextlib.suppress(AssertionError):
        loss_of(pmodel, batch_of(name))
    step.spec = spec
    with pytest.raises(RuntimeError, match="did not finish"):
        loss_of(pmodel, batch_of(name))
    dist.barrier()  # the others still begin to receive from whoever is done
