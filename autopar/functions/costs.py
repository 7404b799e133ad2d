"""Costs: what a Function computes, moves and keeps, by its joint graph; in terms of its operands and results.

Every value of the graph is taken for as large as that operand or result is that is cut along the same factors and is
next to it in size, times a number: so what is said holds for slices, and at other sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.functions.carry import Carried
from autopar.functions.joint import Joint, Operand
from autopar.functions.keeping import kept
from autopar.functions.kept import Kept
from planner.formulation.strategies import rule_of
from planner.ir.graph import Ref, TensorType
from planner.ir.layout import Shard
from planner.ops import OPS
from planner.ops.signature import is_floating


def unseen(operands: Sequence[Operand], results: Sequence[TensorType], kept: Kept | None) -> dict[str, object]:
    """Of a kernel that nobody sees into: it reads and writes its tensors once.

    Args:
        kept: what it keeps; of ``None`` nothing is known, and it may be all that floats.
    """
    if kept is None:
        floating = [f"in{place}" for place, operand in enumerate(operands) if operand.dtype.is_floating_point]
        kept = Kept((*floating, *(f"out{place}" for place, result in enumerate(results) if is_floating(result))))
    count = len(operands) + len(results)
    return {
        "saves": kept.saves,
        "holds": kept.holds,
        "kept": kept.others,
        "flops": 0.0,
        "moves": ((1.0,) * count, (2.0,) * count),
        "works": round(kept.works),
    }


def costs(
    carried: Carried, operands: Sequence[Operand], joint: Joint, cuts: Sequence[Mapping[Ref, Shard]]
) -> dict[str, object]:
    """What the node says of it, see :mod:`planner.ops.function`.

    Args:
        cuts: for every factor that was proved, the values that are slices.
    """
    graph, like = joint.graph, _Like(joint, cuts)
    passes = [[0.0] * len(like.refs) for _ in range(2)]
    flops = 0
    for node in graph.nodes:
        if node.is_leaf or (node.shares and all(shared >= 0 for shared in node.shares)):
            continue
        later = node.name in joint.backward
        for ref in (*node.inputs, *(Ref(node.name, i) for i in range(len(node.results)))):
            if graph.type_of(ref).numel > 1:  # numbers are of no size
                place, each = like.of(ref)
                passes[later][place] += each / graph.type_of(like.refs[place]).item_bytes
        row = OPS.get(node.op)
        if row is not None and not later:
            flops += row.flops(node, graph.input_types(node), rule_of(graph, node))
    reads, others = _read(joint, like)
    seen = kept(carried, operands)
    return {
        "saves": seen.saves,
        "holds": tuple(dict.fromkeys(word for word in (*seen.holds, *reads) if word not in seen.saves)),
        "kept": others,
        "flops": flops / (graph.type_of(joint.results[0]).numel or 1),
        "moves": tuple(map(tuple, passes)),
        "works": round(seen.works),
    }


class _Like:
    """Operands, then results, as measures of all values."""

    def __init__(self, joint: Joint, cuts: Sequence[Mapping[Ref, Shard]]):
        self.refs = (*joint.operands, *joint.results)
        self._joint, self._cuts = joint, cuts
        self._types = [joint.graph.type_of(ref) for ref in self.refs]
        self._cut = [self._factors(ref) for ref in self.refs]

    def of(self, ref: Ref) -> tuple[int, float]:
        """Which of them a value is like, and the value's bytes for each element of that."""
        own, cut = self._joint.graph.type_of(ref), self._factors(ref)

        def distance(place: int) -> tuple[int, int]:
            others = sum(a != b for a, b in zip(cut, self._cut[place], strict=True))
            return others, abs(self._types[place].numel - own.numel)

        place = min(range(len(self.refs)), key=distance)
        return place, own.size_bytes / (self._types[place].numel or 1)

    def _factors(self, ref: Ref) -> list[bool]:
        return [ref in shards for shards in self._cuts]


def _read(joint: Joint, like: _Like) -> tuple[tuple[str, ...], tuple[tuple[int, float], ...]]:
    """Words for the operands and results that backward reads, and what else it does."""
    graph = joint.graph
    root: dict[Ref, Ref] = {}
    for node in graph.nodes:
        for index in range(len(node.results)):
            shared = node.shares[index] if node.shares else -1
            ref = Ref(node.name, index)
            root[ref] = root[node.inputs[shared]] if shared >= 0 else ref
    words = {root[ref]: f"out{place}" for place, ref in enumerate(joint.results)}
    words |= {ref: f"in{place}" for place, ref in enumerate(joint.operands)}
    given = {ref for ref in joint.given if ref is not None}
    read = dict.fromkeys(
        root[ref]
        for node in graph.nodes
        if node.name in joint.backward and not node.is_leaf
        for ref in node.inputs
        if root[ref] not in given and root[ref].node not in joint.backward
    )
    reads = tuple(dict.fromkeys(words[ref] for ref in read if ref in words))
    others = (ref for ref in read if ref not in words and graph.by_name[ref.node].op != "const")
    return reads, tuple(map(like.of, others))
