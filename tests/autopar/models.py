"""The zoo: small models of every kind, as data.

Sizes divide by 4 (batches by 8), batches differ from row to row, and ignored labels lie unevenly: whole
sequences of them, halves, single ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

BATCH, LENGTH, WIDTH, HEADS, VOCAB, LABELS = 8, 8, 32, 4, 64, 8

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """A model and a global batch for it.

    Attributes:
        name: short, unique.
        make: makes the module; the caller seeds torch first.
        batch: makes a batch of keyword inputs.
        attends: whether query sequences can be sharded (the ``context`` recipe applies).
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    attends: bool = True

    def build(self, seed: int = 0) -> tuple[nn.Module, Batch]:
        """The module, in training mode with weights that matter, and its batch."""
        torch.manual_seed(seed)
        model, batch = self.make().train(), self.batch()
        with torch.no_grad():
            for parameter in model.parameters():
                # Fresh weights are often zero or one: what multiplies them would go unnoticed.
                parameter.add_(torch.randn_like(parameter) * 0.2)
        return model, batch


def tokens(rows: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length))


def labels(rows: int = BATCH, length: int = LENGTH) -> Tensor:
    """Class indices, some ignored: all of row 0, half of row 1, row 2 but one, and here and there."""
    found = tokens(rows, length)
    found[0] = -100
    found[1, : length // 2] = -100
    found[2, :-1] = -100
    found[3, 1::3] = -100
    return found


def images(size: int) -> Batch:
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.randint(0, LABELS, (BATCH,))}


def text() -> Batch:
    return {"input_ids": tokens(), "labels": labels()}


# ---- written by hand -------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Four linear layers in a sequence, mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(),
            nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16),
        )  # fmt: skip

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = self.layers(x)
        return {"loss": F.mse_loss(out, y), "out": out}


class FunctionalGPT(nn.Module):
    """A GPT as functions over one dictionary of parameters: no layer is a module, the loss is written out."""

    LAYERS = 3

    def __init__(self) -> None:
        super().__init__()
        shapes: dict[str, tuple[int, ...]] = {"token": (VOCAB, WIDTH), "position": (LENGTH, WIDTH), "scale": (WIDTH,)}
        for i in range(self.LAYERS):
            shapes |= {
                f"norm1_{i}": (WIDTH,), f"qkv_{i}": (3 * WIDTH, WIDTH), f"mix_{i}": (WIDTH, WIDTH),
                f"norm2_{i}": (WIDTH,), f"up_{i}": (WIDTH, 64), f"up_bias_{i}": (64,), f"down_{i}": (64, WIDTH),
            }  # fmt: skip
        self.p = nn.ParameterDict({name: nn.Parameter(torch.randn(shape) * 0.1) for name, shape in shapes.items()})

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        p = self.p
        x = p["token"][ids] + p["position"][torch.arange(ids.shape[1])]
        for i in range(self.LAYERS):
            x = x + self.attend(F.layer_norm(x, (WIDTH,), p[f"norm1_{i}"]), i)
            hidden = F.gelu(F.layer_norm(x, (WIDTH,), p[f"norm2_{i}"]) @ p[f"up_{i}"] + p[f"up_bias_{i}"])
            x = x + hidden @ p[f"down_{i}"]
        logits = F.layer_norm(x, (WIDTH,), p["scale"]) @ p["token"].T
        counted = labels >= 0
        losses = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return (losses * counted).sum() / counted.sum(), logits

    def attend(self, x: Tensor, i: int) -> Tensor:
        query, key, value = F.linear(x, self.p[f"qkv_{i}"]).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2).flatten(2) @ self.p[f"mix_{i}"]


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` over vectors, classified."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encoder(x).mean(1)), y, label_smoothing=0.1)


class SharedLayers(nn.Module):
    """One layer applied three times, the embedding tied to the output: as ALBERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for _ in range(3):
            x = self.layer(x)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class OfFloat32(nn.Linear):
    """Guarded as kernels of narrow dtypes often are; here, since pytest writes assertions of tests anew."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return super().forward(x).square().mean()


@torch.library.custom_op("autopar_zoo::bend", mutates_args=())
def bend(x: Tensor, amount: float) -> Tensor:
    """``x + amount * sin(x).mean(-1)``: an operator that only this file knows."""
    return x + amount * x.sin().mean(-1, keepdim=True)


@torch.library.custom_op("autopar_zoo::bend_backward", mutates_args=())
def bend_backward(grad: Tensor, x: Tensor, amount: float) -> Tensor:
    return grad + amount * grad.sum(-1, keepdim=True) * x.cos() / x.shape[-1]


@bend.register_fake
def _(x: Tensor, amount: float) -> Tensor:
    return torch.empty_like(x)


@bend_backward.register_fake
def _(grad: Tensor, x: Tensor, amount: float) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.amount = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return bend_backward(grad.contiguous(), *ctx.saved_tensors, ctx.amount), None


bend.register_autograd(_backward, setup_context=_save)


class UnknownOp(nn.Module):
    """An MLP with an operator that has no row in the op table, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.down(bend(self.up(x), 0.3).relu())
        return F.cross_entropy(self.head(x), y)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class PrototypeExperts(nn.Module):
    """Two prototypes of four experts, each with a top-1 of its own (M6-T)."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.Linear(WIDTH, 8, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(8, 2 * 16, WIDTH)), nn.Parameter(torch.randn(8, WIDTH, 16))

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = self.routers(x).unflatten(-1, (2, 4)).softmax(-1).max(-1)
        return autopar.experts(x, indices, weights, self.up, self.down, prototypes=2)


class WideLayer(nn.Module):
    def __init__(self, attention: nn.Module, experts: nn.Module):
        super().__init__()
        self.attention, self.experts = attention, experts
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.experts(self.norms[1](x))


class WideNet(nn.Module):
    """Three layers that share attention and experts, each with norms of its own (Xue et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        attention, experts = SelfAttention(), PrototypeExperts()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(WideLayer(attention, experts) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


# ---- Transformers' ---------------------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=WIDTH, n_layer=2, n_head=HEADS, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def bloom() -> nn.Module:
    """Its GELU is a ``torch.autograd.Function``; attention with ALiBi and a dropout, in its own operators."""
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=VOCAB, hidden_size=WIDTH, n_layer=2, n_head=HEADS, hidden_dropout=0.1)
    return BloomForCausalLM(config)


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 64,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


MOE = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 64,
}  # fmt: skip
"""What models of experts have in common; their own loop over experts runs in float64, torch's product does not."""


def mixtral(**changes: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**{**MOE, "intermediate_size": 48, "num_local_experts": 4, **changes})
    config._experts_implementation = "eager"
    return MixtralForCausalLM(config)


def qwen2_moe() -> nn.Module:
    """With a shared expert behind a gate of its own."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        **MOE, intermediate_size=64, moe_intermediate_size=16, shared_expert_intermediate_size=32, num_experts=8
    )
    config._experts_implementation = "eager"
    return Qwen2MoeForCausalLM(config)


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **MOE, intermediate_size=64, moe_intermediate_size=16, num_experts=8, head_dim=8, norm_topk_prob=True
    )
    config._experts_implementation = "eager"
    return Qwen3MoeForCausalLM(config)


def deepseek_v3() -> nn.Module:
    """A dense layer, then one with a shared expert, and routing that is limited to groups and corrected by a bias."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **{**MOE, "num_key_value_heads": HEADS}, intermediate_size=64, moe_intermediate_size=16, n_routed_experts=8,
        n_shared_experts=1, n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    config._experts_implementation = "eager"
    model = DeepseekV3ForCausalLM(config)
    model.model.layers[1].mlp.gate.e_score_correction_bias.normal_(std=0.1)
    return model


def gpt_oss() -> nn.Module:
    """With biases, and matrices that are transposed and have gates and ups in turn."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **MOE, intermediate_size=16, head_dim=8, num_local_experts=8, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, pad_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config._experts_implementation = "eager"
    return GptOssForCausalLM(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=HEADS
        )
    )


def bert_batch() -> Batch:
    """Rows are padded to different lengths."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, 5:], mask[4, 3:], mask[6, 7:] = 0, 0, 0
    kinds = (torch.arange(LENGTH) >= 4).long().expand(BATCH, LENGTH).contiguous()
    return {"input_ids": tokens(), "attention_mask": mask, "token_type_ids": kinds, "labels": labels()}


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=WIDTH,
            d_ff=64,
            d_kv=8,
            num_layers=2,
            num_heads=HEADS,
            decoder_start_token_id=0,
            use_cache=False,  # with caches the original concatenates keys, which then lie otherwise in memory
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            image_size=16,
            patch_size=4,
            num_labels=LABELS,
        )
    )


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], num_labels=LABELS)
    )


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("mlp", MLP, lambda: {"x": torch.randn(BATCH, WIDTH), "y": torch.randn(BATCH, 16)}, attends=False),
        Model("functional-gpt", FunctionalGPT, lambda: {"ids": tokens(), "labels": labels()}),
        Model("gpt2", gpt2, text),
        Model("bloom", bloom, text, attends=False),
        Model("llama", llama, text),
        Model("mixtral", mixtral, text),
        Model("qwen2-moe", qwen2_moe, text),
        Model("qwen3-moe", qwen3_moe, text),
        Model("deepseek-v3", deepseek_v3, text),
        Model("gpt-oss", gpt_oss, text, attends=False),
        Model("bert", bert, bert_batch),
        Model("t5", t5, lambda: {"input_ids": tokens(), "labels": labels(length=12)}),
        # 16 patches and the class token: no number of ranks divides the sequence.
        Model("vit", vit, lambda: images(16), attends=False),
        Model("resnet", resnet, lambda: images(32), attends=False),
        Model(
            "encoder",
            Encoder,
            lambda: {"x": torch.randn(BATCH, LENGTH, WIDTH), "y": torch.randint(0, LABELS, (BATCH,))},
        ),
        Model("shared-layers", SharedLayers, lambda: {"ids": tokens(), "labels": labels()}),
        Model("widenet", WideNet, lambda: {"ids": tokens(), "labels": labels()}),
        Model(
            "unknown-op",
            UnknownOp,
            lambda: {"x": torch.randn(BATCH, WIDTH), "y": torch.randint(0, LABELS, (BATCH,))},
            attends=False,
        ),
    )
}  # fmt: skip
