"""Memory traffic: how often an operator reads and writes its tensors, forward and backward.

``(Node, readers of its block) -> passes over each operand and result``. Forward reads operands and writes results and
what it keeps of its own, such as dropout's mask; of a table a row for each id that is looked up.
Backward reads the gradients of results and what was kept, and writes the gradients of operands, one pass for each of
them as autograd's kernels do. What is passed on, not computed (the gradient of a sum's operand), is free; what autograd
runs besides an operator's own kernels is not: it sums gradients of biases and of what was expanded, puts those of parts
together, and adds where a value has several readers.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.ir.graph import Graph, Node, Ref, TensorType
from planner.ops import OPS, passed_places
from planner.ops.aliasing import shares
from planner.ops.function import moves
from planner.ops.table import Row, no_flops

Passes = tuple[float, ...]
"""How often each tensor of an operator, operands, then results, is read or written."""
ADDING = 3
"""Two gradients are read and one is written."""


@dataclass(frozen=True)
class MemoryTraffic:
    """What one operator moves, in passes over its tensors.

    Attributes:
        forward, backward: of its own kernels.
        besides: of what backward runs besides.
        starts: kernels of ``besides``.
        runs: whether it has kernels of its own, as all but views have.
        fused: of what is fused with others (:mod:`planner.ops.fusion`), how many kernels begin with it, forward and
            backward.
    """

    forward: Passes
    backward: Passes
    besides: Passes
    starts: int
    runs: bool
    fused: tuple[int, int] | None = None


def traffic(graph: Graph, node: Node, added: tuple[int, ...] = (), *, on_cpu: bool = False) -> MemoryTraffic:
    """What an operator moves.

    Args:
        graph: that it stands in.
        node: the operator.
        added: operands whose gradients are added to what other readers have found.
        on_cpu: whether it runs on a CPU, where dropout draws a mask like its operand, not of bytes.
    """
    row, types = OPS.get(node.op), graph.input_types(node)
    tensors = (*types, *node.results)
    nothing = [0.0] * len(tensors)
    flows = any(tensor.grad for tensor in node.results)
    forward, backward, besides, starts = [1.0] * len(tensors), nothing, nothing[:], 0
    if row is None:
        backward = [2.0] * len(tensors)
    elif is_view(node):
        forward = nothing
        if flows:
            besides, starts = _backward_passes(types, node.results)
    elif row.view:
        backward = nothing  # the gradient of a copy is that of the view
    elif (passes := moves(node)) is not None:
        forward, backward = ([each] * len(tensors) for each in passes)
    else:
        own = _own(row, node, types, on_cpu)
        if own:
            forward[0] += own
        if row.looks_up == "rows":
            forward[0], forward[-1] = 0.0, 1 + types[1].numel * types[0].shape[-1] / node.results[0].numel
        if row.flops is no_flops:
            backward = _streamed(row, node, types, own)
        else:
            backward = [2.0] * len(tensors)
            for place in _biases(types, node.results):
                besides[place] += 1
                besides[len(types)] += 1
                starts += 1
    for place in added if flows else ():
        besides[place] += ADDING
        starts += 1
    if not flows:
        backward, besides = nothing, nothing
    return MemoryTraffic(tuple(forward), tuple(backward), tuple(besides), starts, any(forward))


def added_places(graph: Graph, node: Node, later: frozenset[Ref]) -> tuple[int, ...]:
    """Operands of which other readers find a gradient, too, before this one does.

    Args:
        later: what operators with a gradient read after this one.
    """
    found = []
    for place, ref in enumerate(node.inputs):
        is_value = graph.type_of(ref).grad and graph.by_name[ref.node].op != "param"
        if is_value and (ref in later or ref in node.inputs[place + 1 :]):
            found.append(place)
    return tuple(found)


def is_view(node: Node) -> bool:
    """Whether nothing is moved: a view that was not seen to copy, or what was seen to return its operand."""
    row, found = OPS.get(node.op), shares(node)
    if row is None:
        return False
    return all(place >= 0 for place in found) if found else row.view and not node.shares


def _backward_passes(types: tuple[TensorType, ...], results: tuple[TensorType, ...]) -> tuple[list[float], int]:
    """Passes and kernels that the gradient of a view takes: a part's is put into zeros, those of all parts together are
    joined, an expanded one's is summed.
    """
    whole, parts = types[0].numel, [result.numel for result in results]
    if parts == [whole]:
        return [0.0] * (len(types) + len(results)), 0
    kernels = 2 if len(parts) == 1 and parts[0] < whole else 1
    return [1.0, *[0.0] * (len(types) - 1), *[float(kernels)] * len(results)], kernels


def _own(row: Row, node: Node, types: tuple[TensorType, ...], on_cpu: bool) -> float:
    """Passes over the first operand that come to what an operator keeps of its own for backward."""
    passes = {"own": 1.0, "mask": 1.0 if on_cpu or not types else 1 / types[0].item_bytes}
    return sum(passes.get(saved.kind, 0.0) for saved in row.saved(node, types)) if types else 0.0


def _streamed(row: Row, node: Node, types: tuple[TensorType, ...], own: float) -> list[float]:
    """Backward of an operator that streams."""
    count, results = len(types), node.results
    passes = [0.0] * (count + len(results))
    passed = passed_places(node, types)
    wanted = [place for place, tensor in enumerate(types) if tensor.grad and place not in passed]
    if not wanted:
        return passes
    for saved in row.saved(node, types):
        if (place := saved.among(count)) is not None and place < len(passes):
            passes[place] += 1
    passes[0] += own + 2 * row.works
    smaller = [place for place in wanted if _is_broadcast(types[place], results[0])]
    whole = [place for place in wanted if place not in smaller]
    reads = len(whole) if all(types[place].shape == results[0].shape for place in whole) else 1
    for place in wanted:
        passes[place] += 1
    if row.mutual:  # each gradient is a product, as large as the result before it is summed
        reads += 3 * len(smaller)
    elif smaller and row.passes:
        reads += len(smaller)
    elif smaller:  # of a norm: all in one pass over the gradient and the operand
        reads += 1
        passes[0] += 1
    for number, tensor in enumerate(results):
        if tensor.grad:
            passes[count + number] += reads
    return passes


def _is_broadcast(operand: TensorType, result: TensorType) -> bool:
    """Whether an operand has fewer elements than the result, along whose last dims it is repeated."""
    lead = len(result.shape) - len(operand.shape)
    if lead < 0 or operand.numel >= result.numel:
        return False
    return all(size in (1, whole) for size, whole in zip(operand.shape, result.shape[lead:], strict=True))


def _biases(types: tuple[TensorType, ...], results: tuple[TensorType, ...]) -> list[int]:
    """Operands of a product that are added to each of its rows."""
    if len(types) < 3 or len(results[0].shape) < 2:
        return []
    return [place for place, tensor in enumerate(types) if tensor.grad and len(tensor.shape) == 1]
