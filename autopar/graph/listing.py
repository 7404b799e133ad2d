"""Listing: an exported program, or ours, as Python to read, each value with its shape and dtype."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import fx
from torch.export import ExportedProgram

from autopar.graph.program import Body, Call, Program

_LEAF = re.compile(r"autopar_capture\.leaf\.default\((\d+)\)$", re.MULTILINE)


def listing(program: ExportedProgram | Program, leaves: Sequence[str] = ()) -> str:
    """A function for each graph or distinct body; that of the whole model comes last.

    Args:
        leaves: names of the parameters and buffers for which marks stand before calls are split; the number in a mark,
            ``leaf.default(2)``, is the place among these.
    """
    if isinstance(program, Program):
        found = list(_of_program(program))
    else:
        named = [each for each in program.graph_module.named_modules() if isinstance(each[1], fx.GraphModule)]
        found = [_function(each.graph, name.replace(".", "_") or "model") for name, each in reversed(named)]
    text = "\n\n\n".join(found) + "\n"
    return _LEAF.sub(lambda mark: f"{mark[0]}  # {leaves[int(mark[1])]}", text) if leaves else text


def readable(code: str, name: str) -> str:
    """The code that fx writes for a graph as a function of this name, without what it adds for the interpreter."""
    code = re.sub(r";  (?:\w+ = )+None|# (?:Annotation: .*|No stacktrace found.*)", "", code)
    code = re.sub(r"def forward\((\s*)self", rf"def {name}(\1self", code.replace("torch.ops.aten.", "aten."), count=1)
    return "\n".join(line for line in code.splitlines() if line.strip())


def _function(graph: fx.Graph, name: str) -> str:
    return readable(graph.python_code("self", verbose=True, expanded_def=True).src, name)


def _of_program(program: Program) -> Iterator[str]:
    """Bodies by the names that their first calls give to values, then the calls."""
    read = {name for call in program.calls for name in call.operands}.union(program.leaving)
    calls: dict[Body, list[Call]] = {}
    for call in program.calls:
        calls.setdefault(call.body, []).append(call)
    results: dict[Body, list[int]] = {}
    for number, (body, found) in enumerate(calls.items()):
        places = results[body] = [i for i in range(len(body.nodes)) if any(call.names[i] in read for call in found)]
        yield _function(_written_out(found[0], places), f"body_{number}")
    number_of = {body: number for number, body in enumerate(calls)}
    leaves = [f"    {leaf.name},  # {leaf.kind} {leaf.target}" for leaf in program.leaves]
    lines = ["def model(", "    self,", *leaves, "):"]
    for call in program.calls:
        made = "".join(f"{call.names[i]}, " for i in results[call.body])
        where = f"  # {call.path}" if call.path else ""
        lines.append(f"    {made}= self.body_{number_of[call.body]}({', '.join(call.operands)}){where}")
    lines += [f"    # buffer {buffer} becomes {name}" for buffer, name in program.updates]
    yield "\n".join([*lines, f"    return ({''.join(f'{name}, ' for name in program.outputs)})"])


def _written_out(call: Call, places: Sequence[int]) -> fx.Graph:
    """The operators of a call as a graph, which gives those at ``places``."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node, name in call.values.items():
        if node in call.body.position:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
            made[node] = graph.create_node("call_function", node.target, args, kwargs, name)
        else:
            made[node] = graph.placeholder(name)
        made[node].meta = dict(node.meta)
    graph.output(tuple(made[call.body.nodes[place]] for place in places))
    return graph
