"""Dead code: operators that nothing reads are left out, in each call for itself; leaves stay."""

from __future__ import annotations

from dataclasses import replace

from autopar.graph.program import Body, Program


def dead_code(program: Program) -> Program:
    """Leave out every operator that nothing reads."""
    live = set(program.leaving)
    trimmed: dict[tuple[Body, frozenset[int]], Body] = {}
    calls = []
    for call in reversed(program.calls):
        read = frozenset(at for at, name in enumerate(call.names) if name in live)
        if (call.body, read) not in trimmed:
            trimmed[call.body, read] = _trimmed(call.body, read)
        calls.append(call.of(trimmed[call.body, read]))
        live.update(calls[-1].operands)
    return replace(program, calls=tuple(reversed(calls)))


def _trimmed(body: Body, read: frozenset[int]) -> Body:
    needed = {body.nodes[at] for at in read}
    for node in reversed(body.nodes):
        if node in needed or node.is_impure():
            needed.add(node)
            needed.update(node.all_input_nodes)
    kept = tuple(node for node in body.nodes if node in needed)
    return body if len(kept) == len(body.nodes) else Body(kept)
