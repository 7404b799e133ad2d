"""What the ranks of ``test_processes`` do: every function runs in each process, with a gloo group initialised.

A worker builds the original model from a seed, so that every rank has the same reference at hand, and asserts.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.observe import differences, observe
from autopar.runtime.mesh import groups_of
from autopar.runtime.module import ParallelModule
from planner.cluster import ClusterSpec
from planner.plan import Plan

Batch = dict[str, Tensor]
Pin = Mapping[str, Any] | None

logging.getLogger("transformers").setLevel(logging.ERROR)
warnings.simplefilter("ignore", FutureWarning)  # torch's, of its own functions and those that spmd_types calls

BATCH, SEQ, VOCAB = 8, 16, 64


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


MODELS: dict[str, Callable[[float], nn.Module]] = {"mlp": mlp, "gpt2": gpt2, "llama": llama}


def model_of(name: str, dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name](dropout).to(dtype).train()


def batch_of(name: str, seed: int = 1, dtype: torch.dtype = torch.float64) -> Batch:
    """A global batch; most tokens of the first rows are ignored, so that ranks count different numbers of them."""
    generator = torch.Generator().manual_seed(seed)
    if name == "mlp":
        draw = [torch.randn(BATCH, width, generator=generator, dtype=dtype) for width in (16, 8)]
        return {"x": draw[0], "target": draw[1]}
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
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


def cluster_of(ranks: int) -> ClusterSpec:
    return ClusterSpec.local(ranks, memory_bytes="4 GiB", cores=4)


def plan_of(name: str, pin: Pin, ranks: int, dropout: float = 0.0) -> dict[str, Any]:
    """A plan as the document that every rank is given; made by the parent, once."""
    model, batch = model_of(name, dropout), batch_of(name)
    return autopar.plan(model, cluster_of(ranks), example_kwargs=batch, loss_fn=loss_fn, pin=pin).to_dict()


def parallel(model: nn.Module, document: Mapping[str, Any], batch: Batch, **options: Any) -> ParallelModule:
    plan = Plan.from_dict(document)
    return autopar.parallelize(model, plan.cluster, plan=plan, example_kwargs=batch, loss_fn=loss_fn, **options)


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


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


def trains_alike(name: str, document: Mapping[str, Any]) -> float:
    """Collectives as predicted; loss, gradients, clipping, three Adam steps and the state dict as the original's."""
    model, batch = model_of(name), batch_of(name)
    pmodel = parallel(model, document, batch)
    started = model.state_dict()
    for key, value in pmodel.full_state_dict().items():
        assert torch.equal(value, started[key]), key

    loss = loss_of(model, batch)
    loss.backward()
    with observe(groups_of(pmodel.device_mesh)) as calls:
        ploss = loss_of(pmodel, batch)
        ploss.backward()
    assert not differences(dict(Plan.from_dict(document).predicted.collectives), calls)
    same("loss", ploss, loss)
    same_gradients(pmodel, model)

    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    same("norm of the gradients", nn.utils.clip_grad_norm_(pmodel.parameters(), 0.5), norm)
    same_gradients(pmodel, model)

    # Biases before a norm have gradients that are zero but for rounding; a usual eps would blow them up to steps.
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, eps=1e-4) for m in (model, pmodel)]
    for step in range(3):
        batch = batch_of(name, seed=step)
        losses = loss_of(model, batch), loss_of(pmodel, batch)
        same(f"loss of step {step}", losses[1], losses[0])
        for optimizer, found in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
    same_state(pmodel, model)
    return losses[1].item()
