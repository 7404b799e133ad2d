"""Kernels and bytes of compiled blocks as they are predicted, beside those that inductor's scheduler makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode, NopKernelSchedulerNode

from autopar.driver.trace import trace
from planner.ir.folding import fold
from planner.ops.fusion import fuse

ROWS, LENGTH, WIDTH, HEADS = 2, 256, 256, 4
SMALL = 0.05
"""Share of a block's input that statistics of rows come to; kernels that move less fill such for attention."""


class _IsFused(Exception):
    """Raised once kernels are known: nothing need be written or compiled."""


@dataclass
class Scheduled:
    """What inductor fuses: bytes of every kernel that is no call of a library, by graph (forward, backward)."""

    kernels: list[list[int]] = field(default_factory=list)

    def __call__(self, nodes: Sequence[BaseSchedulerNode]) -> Any:
        apart = (ExternKernelSchedulerNode, NopKernelSchedulerNode)
        self.kernels.append([n.get_read_write_buffers_sizes() for n in nodes if not isinstance(n, apart)])
        raise _IsFused


def scheduled(block: Callable[..., Tensor], x: Tensor) -> list[list[int]]:
    """Forward and backward of a block, as inductor schedules them."""
    found = Scheduled()

    def lower(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with pytest.raises(Exception, match="_IsFused"):
            compile_fx_inner(module, inputs)
        return make_boxed_func(module.forward)

    backend = aot_autograd(
        fw_compiler=lower,
        bw_compiler=lower,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    # On a GPU inductor writes the parts of a concatenation in one kernel; on a CPU it does so where it is told.
    with config.patch(_post_fusion_custom_pass=found, force_pointwise_cat=True, fx_graph_cache=False):
        torch._dynamo.reset()
        torch.compile(block, backend=backend, fullgraph=True)(x).sum().backward()
    least = SMALL * x.numel() * x.element_size()
    return [[size for size in sizes if size > least] for sizes in found.kernels]


def predicted(model: nn.Module, path: str) -> tuple[list[int], list[float]]:
    """How many kernels the block at a path has forward and backward, products and attention aside, and their bytes."""
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    graph = trace(model, example_kwargs={"input_ids": ids}).graph
    block = next(kind[0].block for kind in fold(graph).kinds if kind[0].block.path == path)
    found, moved = fuse(graph, block.nodes, block.outputs, on_cpu=True), [0.0, 0.0]
    count = [len(found.kernels), found.backward]
    for node in block.nodes:
        traffic, sizes = found.traffic[node.name], [t.size_bytes for t in (*graph.input_types(node), *node.results)]
        count[1] += traffic.starts
        moved[1] += _dot(traffic.besides, sizes)
        if traffic.fused is not None:
            moved[0] += _dot(traffic.forward, sizes)
            moved[1] += _dot(traffic.backward, sizes)
    return count, moved


def _dot(passes: Sequence[float], sizes: Sequence[int]) -> float:
    return sum(each * size for each, size in zip(passes, sizes, strict=True))


def gpt2() -> tuple[nn.Module, str, Callable[..., Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    drop = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=WIDTH, n_head=HEADS, use_cache=False, **drop)).train()
    return model, "transformer.h.0", model.transformer.h[0]


def llama() -> tuple[nn.Module, str, Callable[..., Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "vocab_size": 512, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=HEADS, use_cache=False, **sizes)).train()
    angles = model.model.rotary_emb(torch.zeros(1, LENGTH, WIDTH), torch.arange(LENGTH)[None])
    return model, "model.layers.0", partial(model.model.layers[0], position_embeddings=angles)


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.slow
def test_blocks(make: Callable[[], tuple[nn.Module, str, Callable[..., Any]]]) -> None:
    """As many kernels, and as many bytes but for those of statistics."""
    model, path, block = make()

    def first(x: Tensor) -> Tensor:
        y = block(x)
        return y[0] if isinstance(y, tuple) else y

    by_inductor = scheduled(first, torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True))
    count, moved = predicted(model, path)
    assert count == [len(sizes) for sizes in by_inductor]
    assert moved == pytest.approx([sum(sizes) for sizes in by_inductor], rel=0.005)
