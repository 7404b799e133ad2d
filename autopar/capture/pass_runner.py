"""Pass runner: runs passes one after another, checks what each leaves, and writes it to ``AUTOPAR_DUMP``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import fx
from torch.export import ExportedProgram

from autopar.graph import dump
from autopar.graph.listing import listing
from autopar.graph.program import Body, Program

Pass = Callable[[Any], ExportedProgram | Program]
"""A valid program in, a valid program out. Those of torch are changed in place, and returned."""


def run(passes: Sequence[Pass], exported: ExportedProgram, leaves: Sequence[str] = ()) -> Program:
    """Run passes, of which the last gives a :class:`Program`.

    Args:
        leaves: names of the parameters and buffers that marks in the graph stand for, see :func:`listing`.

    Raises:
        AssertionError: what a pass left is not valid; names the pass.
    """
    program: ExportedProgram | Program = exported
    dump.begin()
    dump.write("00_torch_export", partial(listing, program, leaves))
    for number, each in enumerate(passes, 1):
        program = each(program)
        dump.write(f"{number:02}_{name_of(each)}", partial(listing, program, leaves))
        for fault in faults(program):
            raise AssertionError(f"pass {name_of(each)} left a program that is not valid: {fault}")
    assert isinstance(program, Program), "the last pass gives a program"
    return program


def name_of(each: Pass) -> str:
    """The name of a pass: that of its function, beside what it was given (:func:`functools.partial`)."""
    return str(getattr(each, "func", each).__name__)


# --- what is valid -------------------------------------------------------------------------------------


def faults(program: ExportedProgram | Program) -> Iterator[str]:
    """What makes a program invalid."""
    if isinstance(program, Program):
        yield from _faults_of_program(program)
    else:
        yield from _faults_of_exported(program)


def _faults_of_exported(exported: ExportedProgram) -> Iterator[str]:
    graph, signature = exported.graph, exported.graph_signature
    try:
        graph.lint()
    except RuntimeError as error:
        yield str(error)
    yield from _without_value(node for node in graph.nodes if node.users)  # assertions give nothing
    leaving = [value for node in graph.nodes if node.op == "output" for value in node.args[0]]
    placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(signature.input_specs):
        yield f"it has {len(placeholders)} placeholders, and its signature {len(signature.input_specs)} inputs"
    if len(leaving) != len(signature.output_specs):
        yield f"it has {len(leaving)} outputs, and its signature {len(signature.output_specs)}"


def _without_value(nodes: Iterable[fx.Node]) -> Iterator[str]:
    for node in nodes:
        if node.op == "call_function" and "val" not in node.meta:
            yield f'{node.name} = {node.target}(...) has no meta["val"], which tells its shape and dtype'


def _faults_of_program(program: Program) -> Iterator[str]:
    known = {leaf.name for leaf in program.leaves}
    if len(known) < len(program.leaves):
        yield "two leaves have one name"
    bodies: set[Body] = set()
    for call in program.calls:
        body = call.body
        if body not in bodies:
            bodies.add(body)
            yield from _without_value(body.nodes)
            yield from _too_early(body)
        if len(call.operands) != len(body.operands) or len(call.names) != len(body.nodes):
            yield f"a call at {call.path or '(root)'} has names for other operands or operators than its body's"
        if not known.issuperset(call.operands):
            wrong = next(name for name in call.operands if name not in known)
            yield f"the call that begins with {call.names[0]} reads {wrong}, which nothing before it makes"
        if not known.isdisjoint(call.names) or len(set(call.names)) < len(call.names):
            yield f"the call that begins with {call.names[0]} gives a value a name that another has"
        known.update(call.names)
    yield from (f"{name} leaves, but nothing makes it" for name in program.leaving if name not in known)


def _too_early(body: Body) -> Iterator[str]:
    made = set(body.operands)
    for node in body.nodes:
        early = (each.name for each in node.all_input_nodes if each not in made)
        yield from (f"{node.name} reads {name} before it is made" for name in early)
        made.add(node)
