"""What ranks do with exported configurations: run them, and compare loss and gradients with the original's."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

from autopar.verification.float64 import exact

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attn_implementation": "sdpa",
}


GRADIENTS = 4 * 11 + 3
"""So many parameters it has; its norms of queries and keys are whole on every rank, and see the heads of one."""


def decoder(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES)).double()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (8, 16))
    return {"input_ids": ids, "labels": ids}


def reference() -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the original on the global batch."""
    model: Any = decoder()
    with exact():
        loss = model(**batch()).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def check(loss: float, gradients: dict[str, Tensor]) -> None:
    """Every gradient that a rank has, whole, and the loss, to float64's rounding."""
    expected, originals = reference()
    assert abs(loss - expected) < 1e-12, (loss, expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, originals[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """By the original's names."""
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        found[name.replace("_checkpoint_wrapped_module.", "")] = whole
    return found


def exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that casts nothing to less than float64."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with exact():
            return function(*args, **kwargs)

    return called


def run_hf(text: str, folder: str) -> int:
    """The configuration, loaded; returns how many gradients were compared."""
    config = DistributedConfig.from_dict(json.loads(text))
    model: Any = Qwen3ForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float64)
    ranks = config.dp_replicate_size * config.fsdp_size
    mine = dist.get_rank() // config.tp_size
    part = {name: value.chunk(ranks)[mine] for name, value in batch().items()}
    with exact():
        loss = model(**part).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    found = gradients_of(model)
    check((total / dist.get_world_size()).item(), found)
    return len(found)


def run_fsdp2(text: str) -> int:
    """The exported module, executed; returns how many gradients this rank compared."""
    module = types.ModuleType("exported")
    exec(compile(text, "exported.py", "exec"), module.__dict__)
    model: Any = decoder()
    if "RECOMPUTE" in vars(module):
        for layer in model.model.layers:
            layer.forward = exactly(layer.forward)  # in backward, too
    built = module.build(model, "cpu")
    with exact():
        loss = module.train_step(model, built, batch()).item()
    if "STAGES" not in vars(module):
        found = gradients_of(model)
    else:
        found, stages, first = {}, module.STAGES, None
        for stage, number in zip(
            built[1], range(built[0].get_local_rank("pipeline"), len(stages), built[0]["pipeline"].size()), strict=True
        ):
            first = sum(stages[:number])
            for name, gradient in gradients_of(stage).items():
                kind, _, rest = name.partition(".")
                if kind == "head":
                    found[f"lm_head.{rest}"] = gradient
                    continue
                if rest.startswith("layers."):
                    _, own, rest = rest.split(".", 2)
                    rest = f"layers.{first + int(own)}.{rest}"
                found[f"model.{rest}"] = gradient
    check(loss, found)
    with exact():
        again = module.train_step(model, built, batch()).item()
    assert abs(again - loss) < 1e-12, "a second step on the same parameters"
    if "PRODUCTS" in vars(module):
        original = decoder()
        with exact():
            module.check(original, model, built, batch())
        refuse_counted_heads(module)
    return len(found)


def refuse_counted_heads(module: Any) -> None:
    """What is built of an attention that counts its heads itself is not taken for the original."""
    model: Any = decoder()
    for layer in model.model.layers:
        count_heads(layer.self_attn)
        layer.forward = exactly(layer.forward)
    original, built = decoder(), module.build(model, "cpu")
    with exact(), pytest.raises(RuntimeError, match=r"gradients of \d+ parameters are not .*counts its"):
        module.check(original, model, built, batch())


def count_heads(attention: Any) -> None:
    """As OPT's attention: as many heads as the configuration has, whatever part of the features there is."""

    def forward(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        samples = len(hidden_states)
        q, k, v = (
            projection(hidden_states).view(samples, -1, SIZES["num_key_value_heads"], SIZES["head_dim"]).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        rows = min(q.shape[2], k.shape[2])
        mixed = nn.functional.scaled_dot_product_attention(q, k[:, :, :rows], v[:, :, :rows], is_causal=True)
        return attention.o_proj(mixed.transpose(1, 2).reshape(*hidden_states.shape[:2], -1)), None

    attention.forward = forward
