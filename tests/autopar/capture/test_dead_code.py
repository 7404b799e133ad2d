"""Dead code: what nothing reads is gone, in each call for itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.capture.passes.dead_code import dead_code
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


def test_what_nothing_reads_is_left_out() -> None:
    before = program(lambda x: (x.exp(), x.sin().cos(), x.relu() + 1)[2])
    after = dead_code(before)
    assert [call.names for call in after.calls] == [("relu", "add")] and len(before.calls[0].names) == 5
    assert dead_code(after) == after


def test_calls_of_one_body_are_trimmed_apart() -> None:
    (call,) = program(lambda x: (x.exp(), x.sin())[0]).calls
    again = replace(call, operands=("sin",), names=("exp_1", "sin_1"))
    leaf = Leaf(call.operands[0], "input", "x", X)
    first, second = dead_code(Program((leaf,), (call, again), ("exp_1",), ())).calls
    assert (first.names, second.names) == (("sin",), ("exp_1",)) and second.operands == ("sin",)
