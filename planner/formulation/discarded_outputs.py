"""Which outputs of the model a training step does not keep.

Backward begins at the loss. In a step of several micro-batches any other output, such as logits, would have to be held
for all of them until the step is over, so it is kept on request alone; single numbers take nothing, and always are. A
step that runs forward only keeps everything.
"""

from __future__ import annotations

from planner.ir.graph import Graph


def discarded_outputs(graph: Graph, discards: tuple[str, ...] | None, micro_batches: int) -> frozenset[int]:
    """Positions of the outputs that a step with backward does not keep: never single numbers, nor what backward begins
    at.

    Args:
        discards: their names; ``None``: in a step of several micro-batches all others.
    """
    if not graph.roots or (discards is None and micro_batches == 1):
        return frozenset()
    return frozenset(
        position
        for position, (name, ref) in enumerate(zip(graph.output_names, graph.outputs, strict=False))
        if position not in graph.roots and graph.type_of(ref).shape and (discards is None or name in discards)
    )
