"""Constant order: by first use, and none that is not used."""

from __future__ import annotations

import torch

from autopar.capture.passes.constant_order import constant_order
from autopar.graph.program import Body, Call, Leaf, Program

X = torch.randn(4, 8)


def test_constants_are_numbered_by_first_use() -> None:
    leaves = [Leaf(f"c_{n}", "const", f"c_{n}", torch.tensor(n)) for n in range(4)]
    leaves = [Leaf("x", "input", "x", X), *leaves, Leaf("c_1x", "param", "c_1x", X)]
    body = Body(())
    calls = (Call(body, ("c_2", "x"), ()), Call(body, ("c_0", "c_2"), ()))
    after = constant_order(Program(tuple(leaves), calls, ("c_3",), ()))
    assert [leaf.name for leaf in after.leaves] == ["c_1x", "c_0", "c_1", "c_2", "x"]
    assert [int(value) for value in after.constants.values()] == [2, 0, 3]
    assert [call.operands for call in after.calls] == [("c_0", "x"), ("c_1", "c_0")] and after.outputs == ("c_2",)
