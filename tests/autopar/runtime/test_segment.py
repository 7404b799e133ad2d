"""Segments of block programs: which operators are in one, what is compiled once, and what stays eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.emit.block_program import STATE, WEIGHT, getitem, module_of
from autopar.emit.segments import in_segments
from autopar.runtime.layers.experts import begin_experts, experts
from autopar.runtime.layers.random import draw
from autopar.runtime.layers.segment import Compiler, run_segment, segments_in
from autopar.runtime.spmd.random_state import RandomState
from autopar.runtime.spmd.run_state import RunState

aten = torch.ops.aten


def program_of(compiler: Compiler) -> fx.GraphModule:
    """``silu(x @ w + x)``, halved by a random operator, and what follows from both."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    w.meta[WEIGHT] = True
    state = graph.get_attr(STATE)
    product = graph.call_function(aten.mm.default, (x, w))
    active = graph.call_function(aten.silu.default, (graph.call_function(aten.add.Tensor, (product, x)),))
    dropped = graph.call_function(draw, (aten.dropout.default, state, (), active, 0.5, True))
    scaled = graph.call_function(aten.mul.Tensor, (dropped, active))
    graph.output((graph.call_function(aten.exp.default, (scaled,)), product))
    made, again, segments = in_segments("block", graph, None, compiler)
    assert again is None
    return module_of({STATE: RunState(RandomState(0)), **segments}, made, "Block")


def statements(module: fx.GraphModule) -> list[list[str]]:
    """The operators of every segment."""
    graphs = [each.program.graph for _, each in segments_in(module)]
    return [[str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function"] for graph in graphs]


@pytest.mark.parametrize(
    "splits_backward, expected",
    [(False, [["mm", "add", "silu"], ["mul", "exp"]]), (True, [["add", "silu"], ["mul", "exp"]])],
)
def test_operators_between_random_ones_are_in_one_segment(splits_backward: bool, expected: list[list[str]]) -> None:
    """What reads a weight is in none where the weight's gradient comes later."""
    before = torch._functorch.config.donated_buffer
    try:
        assert statements(program_of(Compiler(splits_backward))) == expected
    finally:
        torch._functorch.config.donated_buffer = before


def test_what_hides_an_exchange_stays_between_its_beginning_and_its_end() -> None:
    graph = fx.Graph()
    x, w, indices, weights, up, down = map(graph.placeholder, ("x", "w", "indices", "weights", "up", "down"))
    state = graph.get_attr(STATE)
    before = graph.call_function(aten.neg.default, (x,))
    sent = graph.call_function(begin_experts, (state, x, indices, 2))
    shared = graph.call_function(aten.silu.default, (graph.call_function(aten.mm.default, (before, w)),))
    routed = graph.call_function(experts, (state, x, indices, weights, up, down), {"sent": sent})
    graph.output((graph.call_function(aten.exp.default, (graph.call_function(aten.add.Tensor, (routed, shared)),)),))
    made, _, segments = in_segments("block", graph, None, Compiler())
    calls = [node.target for node in made.nodes if node.op == "call_function"]
    assert calls == [begin_experts, run_segment, experts, run_segment]
    assert statements(module_of({STATE: None, **segments}, made, "Block")) == [["neg", "mm", "silu"], ["add", "exp"]]


def test_a_segment_returns_no_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's cache spoils the sizes of views that compiled functions return; a view is made of what is returned."""
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, inputs: graph.forward)
    graph = fx.Graph()
    x, w = map(graph.placeholder, ("x", "w"))
    made = graph.call_function(aten.linear.default, (graph.call_function(aten.exp.default, (x,)), w))
    inner = graph.call_function(aten.transpose.int, (made, 0, 1))
    rows, heads = (graph.call_function(aten.view.default, (made, shape)) for shape in ([-1, 4], [-1, 2, 2, 2]))
    parts = graph.call_function(aten.split.Tensor, (heads, 1, 3))
    half = graph.call_function(getitem, (parts, 0))
    graph.output((graph.call_function(aten.sin.default, (inner,)), inner, rows, half))
    expected = module_of({}, graph, "Eager")
    program, _, segments = in_segments("block", graph, None, Compiler())
    module = module_of({STATE: RunState(RandomState(0)), **segments}, program, "Block")
    assert statements(module) == [["exp", "linear", "transpose", "sin"]]
    (segment,) = (each for _, each in segments_in(module))
    x_, w_ = torch.randn(2, 3, 4), torch.randn(4, 4)
    memory = {value.untyped_storage()._cdata for value in segment.program(x_, w_)}
    assert len(memory) == 2, "of the product and of the sine"
    for found, wanted in zip(module(x_, w_), expected(x_, w_), strict=True):
        assert torch.equal(found, wanted)


def test_segments_of_the_same_operators_are_compiled_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, inputs: graph.forward)
    compiler = Compiler()
    modules = [program_of(compiler) for _ in range(2)]
    for module in modules:
        module(*map(torch.ones, ((2, 2), (2, 2))))
    assert compiler.done.segments == 2
    program_of(compiler)(*map(torch.ones, ((3, 3), (3, 3))))
    assert compiler.done.segments == 4 and not compiler.done.eager


@pytest.mark.parametrize("error", [RuntimeError("no C++ compiler"), AssertionError()], ids=["words", "none"])
def test_what_does_not_compile_runs_as_it_is_and_says_why(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", refuse)
    compiler = Compiler()
    module = program_of(compiler)
    x, w = torch.randn(2, 2, requires_grad=True), torch.randn(2, 2)
    with pytest.warns(
        UserWarning, match=r"block_segment_\d is not compiled and runs as it is: .*(no C\+\+ compiler|AssertionError)"
    ):
        found: tuple[Tensor, Tensor] = module(x, w)
    assert torch.equal(found[1], x @ w)
    assert compiler.done.segments == 0 and compiler.done.eager.keys() == {"block_segment_0", "block_segment_1"}
    module(x, w)  # and is silent from then on
