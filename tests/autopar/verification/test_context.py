"""Whole models whose sequence is sharded, attending in each way, against the original in float64.

All ranks are in one process: outputs, every gradient, the types of the program and each collective are compared. The
same on real processes is in ``tests/autopar/driver/test_processes.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from benchmarks.million import LossInParts
from tests.autopar import models
from tests.autopar.captured_once import made
from tests.autopar.models import Batch
from tests.autopar.workers import cluster_of

pytestmark = pytest.mark.usefixtures("capturing_once")

LENGTH, SMALL = 16, {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
OTHERS = ("data", "tensor", "pipeline", "ulysses")


def qwen3() -> nn.Module:
    """Norms of queries and keys; a head is larger than its part of the hidden size."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(num_hidden_layers=2, head_dim=12, vocab_size=64, max_position_embeddings=32, **SMALL)
    return Qwen3ForCausalLM(config)


def mistral() -> nn.Module:
    """Sliding windows that are shorter than a rank's part of the sequence."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(
        MistralConfig(num_hidden_layers=2, vocab_size=64, sliding_window=3, max_position_embeddings=32, **SMALL)
    )


def gemma2() -> nn.Module:
    """Soft caps on scores, and a window in every second layer; eager, as Transformers has no other."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0}
    config = Gemma2Config(num_hidden_layers=2, vocab_size=64, max_position_embeddings=32, **sizes, **SMALL)
    return Gemma2ForCausalLM(config)


def bert() -> nn.Module:
    """Which drops weights, where it is not compared with the original."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    config = BertConfig(vocab_size=64, num_hidden_layers=2, **sizes)
    return BertForMaskedLM(config)


def t5() -> nn.Module:
    """A bias by relative positions that is trained, which hides what is later and padding, too."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 1, "relative_attention_num_buckets": 6}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, decoder_start_token_id=0, **sizes))


def vit() -> nn.Module:
    """Fifteen patches and a token of the class."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    config = ViTConfig(num_hidden_layers=2, image_size=(20, 12), patch_size=4, num_labels=8, **sizes)
    return ViTForImageClassification(config)


def in_parts() -> nn.Module:
    """A loss of some tokens after others."""
    return LossInParts(models.llama(), 4)


class Sliced(nn.Module):
    """A loss of parts of the sequence, which ranks do not divide or which lie across theirs."""

    def __init__(self) -> None:
        super().__init__()
        model: Any = models.llama()
        self.body, self.head = model.model, model.lm_head

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.body(input_ids=input_ids).last_hidden_state
        loss = F.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())
        return loss + hidden[:, 5:13].square().mean()


def padded() -> Batch:
    """Texts of different lengths, one of them in the part of the first rank alone."""
    ids = torch.randint(0, 64, (4, LENGTH))
    seen = (torch.arange(LENGTH) < torch.tensor([16, 3, 11, 8]).unsqueeze(1)).long()
    return {"input_ids": ids, "attention_mask": seen, "labels": ids.masked_fill(seen == 0, -100)}


def images() -> Batch:
    return {"pixel_values": torch.randn(4, 3, 20, 12), "labels": torch.arange(4)}


def text() -> Batch:
    ids = torch.randint(0, 64, (4, LENGTH))
    return {"input_ids": ids, "labels": ids}


def packed() -> Batch:
    """Several texts in one sequence, none of which sees another: where each begins its position ids say."""
    starts = torch.tensor([[0, 5, 16], [0, 3, 9], [0, 16, 16], [0, 12, 13]])
    places = torch.arange(LENGTH)
    first = torch.where(starts.unsqueeze(1) <= places.unsqueeze(1), starts.unsqueeze(1), 0).amax(-1)
    return {**text(), "position_ids": places - first}


CASES: list[tuple[Callable[[], nn.Module], Callable[[], Batch], dict[str, Any]]] = [
    (models.llama, text, {"context": 2, "ulysses": 2, "context_kind": "zigzag", "recompute": "full"}),
    (
        models.llama,
        text,
        {"context": 2, "context_kind": "zigzag", "pipeline": 2, "micro_batches": 2, "recompute": "full"},
    ),
    (qwen3, text, {"context": 2, "context_kind": "zigzag_gather", "tensor": 2, "recompute": "full"}),
    (Sliced, text, {"context": 4, "context_kind": "zigzag"}),
    (bert, padded, {"context": 4, "context_kind": "hybrid"}),
    (in_parts, text, {"context": 4, "context_kind": "zigzag", "zero": 3, "recompute": "full"}),
    (models.llama, padded, {"context": 2, "context_kind": "ulysses", "data": 2, "zero": 3}),
    (qwen3, packed, {"context": 2, "context_kind": "ring", "data": 2, "zero": 3, "recompute": "full"}),
    (mistral, text, {"context": 4, "context_kind": "ring"}),
    (gemma2, text, {"context": 4, "context_kind": "zigzag", "recompute": "full"}),
    (gemma2, padded, {"context": 2, "context_kind": "ring", "tensor": 2}),
    (t5, padded, {"context": 2, "ulysses": 2, "context_kind": "ring", "recompute": "full"}),
    (vit, images, {"context": 4, "context_kind": "ring"}),
    (bert, padded, {"context": 2, "context_kind": "ring", "tensor": 2, "sequence_parallel": True}),
]


@pytest.mark.parametrize(
    "model, batch, pin", CASES, ids=lambda each: each.__name__ if callable(each) else "-".join(map(str, each.values()))
)
def test_equals_the_original(model: Callable[[], nn.Module], batch: Callable[[], Batch], pin: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ranks = pin["context"]
    for name in OTHERS:
        ranks *= pin.get(name, 1)
    found = autopar.verify(
        made(model(), model), cluster_of(ranks), example_kwargs=batch(), pin={"pipeline": 1, "micro_batches": 1, **pin}
    )
    assert found.verdict == "verified", str(found)
