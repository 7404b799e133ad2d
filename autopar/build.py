"""Build: from a captured model and an assignment to a :class:`ParallelModule` of one rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autopar.capture import Captured
from autopar.flatten import canonical_names
from autopar.rewrite import STATE, rewrite
from autopar.runtime.mesh import groups_of
from autopar.runtime.module import Interface, LeafSpec, OutputSpec, ParallelModule
from autopar.runtime.random import RandomState
from autopar.runtime.state import RunState
from planner.formulate import Assignment
from planner.graph import Ref


def build(
    model: nn.Module,
    captured: Captured,
    assignment: Assignment,
    device_mesh: DeviceMesh,
    rank: int,
    make_part: Callable[[LeafSpec], Tensor],
    seed: int = 0,
) -> ParallelModule:
    """Emit the program and hold its parameters.

    Args:
        make_part: this rank's part of a parameter, buffer or constant.
        seed: of dropout and other random operators, the same on all ranks.
    """
    state = RunState(RandomState(seed))
    holder = {**groups_of(device_mesh), STATE: state}
    rewritten = rewrite(captured, assignment, holder, torch.device(device_mesh.device_type))
    names = {
        name: first
        for name, first in canonical_names(model).items()
        if any(leaf == ("param", first) or leaf == ("buffer", first) for leaf in captured.leaves.values())
    }
    return ParallelModule(
        rewritten.module,
        interface_of(captured, assignment),
        assignment.space.mesh,
        device_mesh,
        rank,
        names,
        _not_saved(model),
        make_part,
        state,
    )


def interface_of(captured: Captured, assignment: Assignment) -> Interface:
    """How the program's flat inputs and outputs map onto the model's."""
    graph = assignment.space.graph
    leaves = []
    for leaf in graph.leaves:
        tensor = leaf.results[0]
        dtype = getattr(torch, tensor.dtype)
        name = leaf.name if leaf.op in ("input", "const") else leaf.target
        leaves.append(LeafSpec(leaf.op, name, tensor.shape, dtype, assignment.produced(Ref(leaf.name)), tensor.grad))
    outputs: list[OutputSpec | None] = []
    position = 0
    for output in captured.outputs:
        if output is None:
            outputs.append(None)
            continue
        shape = graph.type_of(graph.outputs[position]).shape
        outputs.append(OutputSpec(shape, assignment.output_layout(position)))
        position += 1
    return Interface(
        tuple(leaves),
        captured.input_names,
        captured.in_spec,
        tuple(outputs),
        captured.static_outputs,
        captured.out_spec,
        tuple(name for name, _ in captured.updates),
        captured.training,
        captured.static_inputs,
    )


def _not_saved(model: nn.Module) -> frozenset[str]:
    """Names of the buffers that the model keeps out of its state dict."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    )
