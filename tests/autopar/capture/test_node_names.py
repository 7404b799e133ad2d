"""Node names: numbered by kind, whatever they were called."""

from __future__ import annotations

from dataclasses import replace

from autopar.capture.passes.node_names import node_names
from tests.autopar.capture.traced import program


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
