"""Programs of one call, for tests of passes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.graph.program import Body, Call, Leaf, Program

X = torch.randn(4, 8)


def program(forward: Callable[[Tensor], Tensor]) -> Program:
    """What ``forward`` computes as one call, as traced."""
    graph = make_fx(forward, tracing_mode="fake")(X).graph
    x, *nodes = (node for node in graph.nodes if node.op != "output")
    names = tuple(node.name for node in nodes)
    result = graph.output_node().args[0]
    call = Call(Body(tuple(nodes)), (x.name,), names)
    return Program((Leaf(x.name, "input", x.name, X),), (call,), (result.name,), ())
