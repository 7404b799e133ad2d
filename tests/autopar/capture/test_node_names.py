"""Node names: numbered by kind, whatever they were called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.capture.passes.node_names import node_names
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


def test_names_are_numbered_by_kind() -> None:
    before = program(lambda x: x.exp().sum().exp() + x.pow(2).exp())
    (call,) = before.calls
    renamed = replace(call, names=tuple(f"again7_{name}" for name in call.names))
    after = node_names(replace(before, calls=(renamed,), outputs=(renamed.names[-1],)))
    assert after.calls[0].names == ("exp", "sum_1", "exp_1", "pow_1", "exp_2", "add")
    assert after.outputs == ("add",)


def test_names_of_leaves_are_taken() -> None:
    before = program(lambda x: x.exp())
    (leaf,), (call,) = before.leaves, before.calls
    leaf, call = leaf._replace(name="exp"), replace(call, operands=("exp",), names=("y",))
    after = node_names(replace(before, leaves=(leaf,), calls=(call,), outputs=("y",)))
    assert after.calls[0].operands == ("exp",) and after.outputs == ("exp_1",)
