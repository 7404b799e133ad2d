"""Keeps ``torch.no_grad()`` regions of models that write in place.

Torch's pass that takes writes in place out of a graph forgets where gradients were off. What such a region reads is
therefore detached before: nothing that it makes has a gradient then, nor what it is written to.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch.export import ExportedProgram

from autopar.capture.passes.functionalization import mutates
from autopar.capture.repeats.markers import writes_in_place
from autopar.graph.aten import SHAPE_ONLY
from planner.base.errors import CaptureError


def no_grad_regions(exported: ExportedProgram) -> ExportedProgram:
    """Detach what regions without gradients read, if the model writes in place.

    Raises:
        CaptureError: such a region turns gradients on again, or writes to a tensor that has one, whose gradient torch
            leaves as it was.
    """
    if not mutates(exported):
        return exported
    root = exported.graph_module
    trained = set(exported.graph_signature.inputs_to_parameters)
    for module in [each for each in root.modules() if isinstance(each, fx.GraphModule)]:
        graded = _graded(module.graph, trained) if module is root else None
        for node in _regions(module.graph, is_on=False):
            body, *reads = node.args[1:]
            assert isinstance(body, fx.Node)
            inner = module.get_submodule(str(body.target))
            assert isinstance(inner, fx.GraphModule)
            operands = [each for each in inner.graph.nodes if each.op == "placeholder"]
            if any(True for _ in _regions(inner.graph, is_on=True)):
                raise CaptureError(
                    "the model writes in place, and turns gradients on inside torch.no_grad(): a graph without the "
                    "writes does not know where: compute what is to have a gradient outside of torch.no_grad()"
                )
            for inside, outside in zip(operands, reads, strict=True):
                is_made = not isinstance(outside, fx.Node) or outside.op != "placeholder"  # others are refused by name
                if is_made and (graded is None or outside in graded) and _is_written(inside):
                    raise CaptureError(
                        f"the model writes under torch.no_grad() into {outside}, which has a gradient, and torch "
                        "leaves that as it was: write to a copy (x = x.detach().clone(), or torch.where), or outside "
                        "of torch.no_grad()"
                    )
                _detach(inner.graph, inside)
            inner.recompile()
    return exported


def _regions(graph: fx.Graph, *, is_on: bool) -> Iterator[fx.Node]:
    for node in list(graph.nodes):
        if getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled" and bool(node.args[0]) == is_on:
            yield node


def _graded(graph: fx.Graph, trained: set[str]) -> set[fx.Node]:
    """The values that may have a gradient: those that parameters reach outside of regions without."""
    off = set(_regions(graph, is_on=False))
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_cut = node in off or SHAPE_ONLY.match(str(node.target)) or node.op == "output"
        if node.name in trained or (not is_cut and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def _is_written(value: fx.Node) -> bool:
    """Whether a value, or a view of it, is written to."""
    for user in value.users:
        if user.op != "call_function" or not user.args or user.args[0] is not value:
            continue
        if writes_in_place(user):
            return True
        schema = getattr(user.target, "_schema", None)
        is_view = schema is not None and any(each.alias_info is not None for each in schema.arguments[:1])
        if is_view and _is_written(user):
            return True
    return False


def _detach(graph: fx.Graph, value: fx.Node) -> None:
    if not isinstance(value.meta.get("val"), torch.Tensor):
        return
    users = list(value.users)
    with graph.inserting_after(value):
        made = graph.call_function(torch.ops.aten.detach.default, (value,))
    made.meta.update(value.meta, val=value.meta["val"].detach())
    for user in users:
        user.replace_input_with(value, made)
