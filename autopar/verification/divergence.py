"""Runs an emitted program operator by operator beside the captured graph, and finds where they diverge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import GraphModule

from autopar.capture.capture import Captured
from autopar.runtime.autograd.recompute import recompute
from autopar.verification.simulator import DivergedError, Simulation
from planner.formulation.assignment import Assignment
from planner.ir.folding import Instance
from planner.ir.graph import Node, Ref

aten = torch.ops.aten


@dataclass(frozen=True)
class Divergence:
    """The first operator whose result is not what the model computes."""

    node: Node
    layout: str
    error: float
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.node.path or '(root)'}: {self.node.op} ({self.node.name}), run as {self.layout}: {self.reason}"
            f" (relative error {self.error:.2g})"
        )


def reference_values(captured: Captured, assignment: Assignment, leaves: Mapping[str, Tensor]) -> dict[Ref, Tensor]:
    """Every value of the captured graph, computed whole.

    Args:
        leaves: tensor of every leaf, by placeholder name.
    """
    values: dict[str, Any] = {}
    found: dict[Ref, Tensor] = {}
    known = {node.name for node in assignment.space.graph.nodes}
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            if node.target in leaves:  # fx names it in lower case
                values[node.name] = leaves[node.target]
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n.name])
            # Captured graphs say nothing of strides, so a view may have to copy.
            op = aten.reshape.default if node.target is aten.view.default else node.target
            values[node.name] = op(*args, **kwargs)
            if node.name in known:
                results = values[node.name] if isinstance(values[node.name], (tuple, list)) else [values[node.name]]
                found.update({Ref(node.name, i): value for i, value in enumerate(results)})
    return found


def first_divergence(
    simulation: Simulation,
    assignment: Assignment,
    reference: Mapping[Ref, Tensor],
    leaves: tuple[Tensor, ...],
    rtol: float,
) -> Divergence | None:
    """Run the program on every rank, comparing each operator's result with the reference.

    Args:
        leaves: every rank's part of the program's placeholders, in order.
    """
    watcher = _Watcher(simulation, assignment, reference, rtol)
    root = simulation.module.program
    assert isinstance(root, GraphModule)
    watcher.instances = iter(assignment.space.folded.instances)
    with torch.no_grad():
        _ComparedRoot(root, watcher).run(*leaves)
    return watcher.found


class _Watcher:
    def __init__(self, simulation: Simulation, assignment: Assignment, reference: Mapping[Ref, Tensor], rtol: float):
        self.simulation, self.assignment, self.reference, self.rtol = simulation, assignment, reference, rtol
        self.found: Divergence | None = None
        self.instances: Iterator[Instance] = iter(())

    def compare(self, ref: Ref, value: Tensor) -> None:
        node = self.assignment.space.graph.by_name[ref.node]
        if self.found is not None or ref not in self.reference:
            return
        choice, expected = self.assignment.choice(node), self.reference[ref]
        reason = "its result differs from the model's"
        try:
            whole = self.simulation.whole(value, choice.results[ref.index], tuple(expected.shape))
            error = _relative_error(whole, expected)
        except DivergedError as diverged:
            error, reason = float("inf"), str(diverged)
        if error > self.rtol:
            self.found = Divergence(node, choice.label, error, reason)


def _relative_error(got: Tensor, expected: Tensor) -> float:
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(got, expected) else float("inf")
    if got.numel() == 0:
        return 0.0
    finite = torch.isfinite(expected)
    if not torch.equal(finite, torch.isfinite(got)):
        return float("inf")
    got, expected = got[finite], expected[finite]
    if expected.numel() == 0:
        return 0.0
    scale = expected.abs().max().item()
    return (got - expected).abs().max().item() / scale if scale else got.abs().max().item()


class _ComparedRoot(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, watcher: _Watcher):
        super().__init__(module)
        self.watcher = watcher

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._block(self.fetch_attr(target), args)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is not recompute:
            return super().call_function(target, args, kwargs)
        program, _, *inputs = args
        return self._block(program, inputs)[0]

    def _block(self, program: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return _ComparedBlock(program, self.watcher, next(self.watcher.instances)).run(*inputs)


class _ComparedBlock(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, watcher: _Watcher, instance: Instance):
        super().__init__(module)
        self.watcher, self.instance = watcher, instance

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        ref = n.meta.get("produced")
        if ref is not None:
            # A program is emitted for one instance and called for all that run alike.
            _, at = self.watcher.assignment.space.decision_graph.blocks.seat[ref.node]
            self.watcher.compare(Ref(self.instance.block.nodes[at].name, ref.index), value)
        return value
