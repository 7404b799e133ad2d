"""Region inlining: ``torch.no_grad()`` and ``autocast(enabled=False)`` regions become part of the graph around them."""

from __future__ import annotations

import inspect
from typing import Any

from torch import fx, nn
from torch.export import ExportedProgram

from planner.base.errors import CaptureError


def region_inlining(exported: ExportedProgram, model: nn.Module) -> ExportedProgram:
    """Inline ``torch.no_grad()`` regions, whose nodes then carry ``meta["no_grad"]``, and ``autocast(enabled=False)``.

    Args:
        model: the user's, for the message.

    Raises:
        CaptureError: a region computes in another precision; names its module.
    """
    _inline(exported.graph_module, model)
    return exported


def _inline(module: fx.GraphModule, model: nn.Module) -> None:
    graph = module.graph
    for node in list(graph.nodes):
        kind = getattr(node.target, "__name__", "")
        if node.op != "call_function" or kind not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            continue
        body_at = 1 if kind == "wrap_with_set_grad_enabled" else 4
        body, operands = node.args[body_at], node.args[body_at + 1 :]
        inner = getattr(module, str(body.target))
        no_grad = kind == "wrap_with_set_grad_enabled" and not node.args[0]
        if kind == "wrap_with_autocast" and node.args[2]:
            raise CaptureError(_autocast_message(node, inner, model))
        _inline(inner, model)
        mapping = dict(zip((n for n in inner.graph.nodes if n.op == "placeholder"), operands, strict=True))
        results: Any = ()
        with graph.inserting_before(node):
            for inner_node in inner.graph.nodes:
                if inner_node.op == "output":
                    results = inner_node.args[0]
                elif inner_node.op != "placeholder":
                    mapping[inner_node] = graph.node_copy(inner_node, mapping.__getitem__)
                    if kind == "wrap_with_set_grad_enabled":
                        mapping[inner_node].meta["no_grad"] = no_grad
        for user in list(node.users):
            assert user.target.__name__ == "getitem", "a region is read only through its results"
            user.replace_all_uses_with(mapping[results[user.args[1]]])
            graph.erase_node(user)
        graph.erase_node(node)
        if not body.users:
            graph.erase_node(body)
            delattr(module, str(body.target))


def _autocast_message(node: fx.Node, inner: fx.GraphModule, model: nn.Module) -> str:
    made = next((n for n in inner.graph.nodes if n.op == "call_function"), node)
    stack = [path for path, _ in (made.meta.get("nn_module_stack") or {}).values()]
    owners = [(path, model.get_submodule(path)) for path in stack if path] or [("", model)]
    path, owner = next((o for o in reversed(owners) if "autocast" in _source(o[1])[0]), owners[-1])
    device, dtype = node.args[:2]
    return (
        f"module {path or '(root)'} ({type(owner).__name__}, {_source(owner)[1]}) runs {made.target} under "
        f"torch.autocast({device!r}, {dtype}): which operators then compute in another precision is decided while they "
        "run, and a plan cannot hold it. Convert the model (model.bfloat16()) or the tensors (x.to(torch.bfloat16)) "
        "instead; autocast(enabled=False) may stay."
    )


def _source(module: nn.Module) -> tuple[str, str]:
    """The text of a module's forward, and where it is: the line with autocast, if there is one."""
    try:
        lines, line = inspect.getsourcelines(type(module).forward)
    except (OSError, TypeError):
        return "", "source unknown"
    at = next((number for number, text in enumerate(lines, line) if "autocast" in text), line)
    return "".join(lines), f"{inspect.getsourcefile(type(module).forward)}:{at}"
