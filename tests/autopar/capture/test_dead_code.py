"""Dead code: what nothing reads is gone, in each call for itself."""

from __future__ import annotations

from dataclasses import replace

from autopar.capture.passes.dead_code import dead_code
from autopar.graph.program import Leaf, Program
from tests.autopar.capture.traced import X, program


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
