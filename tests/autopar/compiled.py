"""What ranks do in the tests of compiled blocks: compiled beside eager, from one plan, in float64.

Inductor's code takes seconds of a C++ compiler for every graph, so that only :func:`compiles_once` asks for it.
Elsewhere AOTAutograd alone compiles: the same graphs, split into forward and backward alike, run operator by operator.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime.autograd import recompute
from autopar.runtime.layers.segment import Compilation
from autopar.runtime.module import ParallelModule
from autopar.verification.float64 import exact
from planner.cost.cluster import ClusterSpec
from tests.autopar import workers

ROUNDING = 1e-12


class Stack(nn.Module):
    """Blocks alike, of which each is one segment."""

    def __init__(self, layers: int):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x.mean()


@contextlib.contextmanager
def without_inductor() -> Iterator[None]:
    """Inside, graphs are compiled into their operators."""
    from torch._dynamo.backends.debugging import aot_eager_decomp_partition

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._inductor.compile_fx.compile_fx", aot_eager_decomp_partition)
        yield


def trains_compiled(name: str, document: Mapping[str, Any], dropout: float = 0.0) -> Compilation:
    """Two steps give the loss and the gradients of eager blocks; returns what was compiled, which is all."""
    with exact():
        eager, compiled = (_made(name, document, dropout, compile) for compile in (False, True))
    assert eager.compilation is None and compiled.compilation is not None
    batch = workers.batch_of(name)
    with without_inductor():
        for _ in range(2):
            losses = [workers.loss_of(compiled, batch)]
            if document["pin"].get("recompute") == "full" and "pipeline" not in document:
                keeps_what_blocks_start_from(compiled)
            losses.append(workers.loss_of(eager, batch))
            workers.same("loss", *losses, ROUNDING)
            for loss in losses:
                loss.backward()
            own, others = (dict(module.named_parameters()) for module in (compiled, eager))
            for key, parameter in others.items():
                assert (parameter.grad is None) == (own[key].grad is None), key
                if parameter.grad is not None:
                    workers.same(key, own[key].grad, workers.whole(parameter.grad), ROUNDING)
    assert not compiled.compilation.eager
    return compiled.compilation


def _made(name: str, document: Mapping[str, Any], dropout: float, compile: bool) -> ParallelModule:
    return workers.parallel(workers.model_of(name, dropout), document, workers.batch_of(name), compile=compile)


def keeps_what_blocks_start_from(module: ParallelModule) -> None:
    """Of what segments save nothing is held that can be made again: only parameters, and what frames keep."""
    frames = [each for each in gc.get_objects() if type(each) is recompute._Frame]
    kept = {recompute.memory_of(held.read()) for frame in frames for held, _ in frame._kept}
    kept |= {recompute.memory_of(p.to_local()) for p in module.parameters()}
    cells = [each for each in gc.get_objects() if type(each) is recompute._Cell]
    assert cells and frames
    held = [cell.tensor for cell in cells if cell.held is not None]
    more = [tuple(t.shape) for t in held if recompute.memory_of(t) not in kept and t.numel() > 1]
    assert not more, more


def compiles_once(layers: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """A model of so many layers, compiled by inductor, gives the original's loss and gradients; returns how many
    segments and graphs were compiled, and how much of their code was not on disk.
    """
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    model, x = Stack(layers).to(dtype), torch.randn(4, 8, 16, dtype=dtype)
    module = autopar.parallelize(model, ClusterSpec.local(1), example_kwargs={"x": x}, compile=True)
    rounding = ROUNDING if dtype == torch.float64 else 32 * torch.finfo(dtype).eps
    losses = [module(x=x), model(x)]
    for loss in losses:
        loss.backward()
    workers.same("loss", *losses, rounding)
    workers.same_gradients(module, model, rounding)
    done = module.compilation
    assert done is not None and not done.eager
    return done.segments, done.graphs, counters["inductor"]["fxgraph_cache_miss"]
