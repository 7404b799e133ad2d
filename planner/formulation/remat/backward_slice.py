"""What one instance of a block recomputes in backward at a level of recomputation.

What was drawn at random is drawn again, alike; what operators without a row made is always kept, and so is what
nothing but the backward of an operator reads of its results, such as the statistics of a norm. What the block
converts for an operator that needs it is converted again unless it is the result of a kept operator: gathered
parameters too. Of what is kept, that which products and attention save is kept as it was made, and converted again,
where its converted form is larger. Which that is depends on what is decided; :meth:`Assignment.again` says it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.formulation.remat.levels import GATHERING, Level
from planner.ir.folding import Block
from planner.ir.graph import Graph, Node, Ref
from planner.ops import OPS, saved_places
from planner.ops.aliasing import shares
from planner.ops.table import OWN, no_flops


@dataclass(frozen=True)
class Again:
    """What one instance of a block recomputes, by position in ``block.nodes``.

    Attributes:
        values: (operator, result) of every value that is recomputed.
        lasting: operators whose results are kept.
        sources: (operator, result) of every value that is kept and needed by backward or an operator that runs again.
        taken: per operator, the operands of which its own resharding runs again.
        dropped: per operator, the places (operands, then results) that its backward needs and that are not kept; a
            value counts once, for the first operator that needs it, and its views not at all.
        kept: per operator, the places that its backward, or it when it runs again, needs and that are kept.
        drawing: operators that run again for what they drew, and keep nothing of it in between.
        as_made: (operator, result) of kept values, and their views, that are kept as they were made where that is
            smaller.
        needed_as_made: per operator, the operands that its backward, or it when it runs again, needs and that are such
            a value or a view of one.
        taken_if_larger: per operator, the operands of which its own resharding runs again if it makes them larger.
        delivered: (operator, result) of every value whose resharding for all of its readers runs again.
    """

    values: frozenset[tuple[int, int]]
    lasting: frozenset[int]
    sources: frozenset[tuple[int, int]]
    taken: tuple[frozenset[int], ...]
    dropped: tuple[tuple[int, ...], ...]
    kept: tuple[tuple[int, ...], ...]
    drawing: frozenset[int] = frozenset()
    as_made: frozenset[tuple[int, int]] = frozenset()
    needed_as_made: tuple[frozenset[int], ...] = ()
    taken_if_larger: tuple[frozenset[int], ...] = ()
    delivered: frozenset[tuple[int, int]] = frozenset()

    @cached_property
    def operators(self) -> frozenset[int]:
        """Operators that run again."""
        return frozenset(at for at, _ in self.values)


class Backward:
    """What backward of a block needs, worked out once for all levels; the same for all instances of a kind.

    Attributes:
        nodes: the operators of the block.
        tensors: of every operator, the values that its places (operands, then results) stand for.
        saved: of every operator, the places that its backward needs.
        aside: the results among these that nothing else reads; no value of the program, they stay with autograd.
    """

    def __init__(self, graph: Graph, block: Block):
        self.graph, self.nodes = graph, block.nodes
        self.at_of = {node.name: at for at, node in enumerate(block.nodes)}
        self.tensors = [(*node.inputs, *(Ref(node.name, i) for i in range(len(node.results)))) for node in block.nodes]
        self.saved = [
            saved_places(node, graph.input_types(node)) if any(t.grad for t in node.results) else ()
            for node in block.nodes
        ]
        results = (
            refs[place]
            for node, refs, places in zip(block.nodes, self.tensors, self.saved, strict=True)
            for place in places
            if place >= len(node.inputs)
        )
        self.aside = frozenset(results).difference(block.outputs, *(node.inputs for node in block.nodes))
        self.draws = frozenset(at for at, node in enumerate(block.nodes) if _keeps_what_it_draws(graph, node))
        self._root = _roots(block.nodes)
        self._own = [
            tuple(
                place
                for place in saved_places(node, graph.input_types(node), own=True)
                if place not in saved and any(t.grad for t in node.results)
            )
            for node, saved in zip(block.nodes, self.saved, strict=True)
        ]

    def origin(self, at: int, place: int) -> Ref:
        """What the value at a place of an operator is a view of, in the end and within the block."""
        ref = self.tensors[at][place]
        return self._root.get(ref, ref)

    @cached_property
    def read(self) -> frozenset[Ref]:
        """The values whose memory backward needs, themselves or views of them."""
        return frozenset(self.origin(at, place) for at, places in enumerate(self.saved) for place in places)

    def own_places(self, at: int) -> tuple[int, ...]:
        """The places that stand for what backward of an operator needs besides operands and results."""
        return self._own[at]

    def again(self, level: Level) -> Again:
        """What is recomputed at a level other than ``none``."""
        nodes, at_of = self.nodes, self.at_of
        is_kept = [_is_kept(at, node, level) for at, node in enumerate(nodes)]
        products = () if level == "gathered" else self._read_by_products(is_kept)
        if level == "resharded":
            for at, _ in products:
                is_kept[at] = not is_view(nodes[at])
        as_made = frozenset(made for made in products if is_kept[made[0]] or level == "resharded")

        def is_converted_again(ref: Ref) -> bool:
            if level in GATHERING:
                return self.graph.by_name[ref.node].op == "param"
            return not (ref.node in at_of and is_kept[at_of[ref.node]])

        def is_made_again(ref: Ref) -> bool:
            return ref.node in at_of and not is_kept[at_of[ref.node]] and ref not in self.aside

        values: set[tuple[int, int]] = set()
        drawing = frozenset(at for at in self.draws if not is_kept[at])
        waiting = [refs[place] for places, refs in zip(self.saved, self.tensors, strict=True) for place in places]
        waiting += [Ref(nodes[at].name) for at in drawing]
        while waiting:
            ref = waiting.pop()
            if is_made_again(ref) and (at_of[ref.node], ref.index) not in values:
                values.add((at_of[ref.node], ref.index))
                waiting.extend(nodes[at_of[ref.node]].inputs)
        running = {at for at, _ in values}
        taken, if_larger, needed_as_made, dropped, kept = [], [], [], [], []
        counted: set[Ref] = set()
        for at, node in enumerate(nodes):
            operands = range(len(node.inputs))
            wanted = dict.fromkeys((*self.saved[at], *(operands if at in running else ())))
            origin = {place: self.origin(at, place) for place in wanted}
            taken.append(frozenset(i for i in operands if i in wanted and is_converted_again(node.inputs[i])))
            if_larger.append(frozenset(i for i in operands if i in wanted and self._made(node.inputs[i]) in as_made))
            roots = {i: self._made(origin[i]) for i in operands if i in wanted}
            needed_as_made.append(frozenset(i for i, made in roots.items() if made in as_made))
            kept.append(tuple(place for place in wanted if not is_made_again(origin[place])))
            gone = {origin[place]: place for place in reversed(self.saved[at]) if is_made_again(origin[place])}
            more = {place for ref, place in gone.items() if ref not in counted}
            if at in drawing:
                more |= {*self.own_places(at)}
            dropped.append(tuple(sorted(more)))
            counted.update(gone)
        lasting = frozenset(at for at, keeps in enumerate(is_kept) if keeps)
        origins = (self.origin(at, place) for at, places in enumerate(kept) for place in places)
        sources = frozenset((at_of[ref.node], ref.index) for ref in origins if ref.node in at_of)
        return Again(
            frozenset(values),
            lasting,
            sources,
            tuple(taken),
            tuple(dropped),
            tuple(kept),
            drawing,
            as_made,
            tuple(needed_as_made),
            tuple(if_larger),
            frozenset(values - as_made),
        )

    def _made(self, ref: Ref) -> tuple[int, int]:
        """The operator and the result that a value is; of what enters the block, none there is."""
        return self.at_of.get(ref.node, -1), ref.index

    def viewed(self, at: int, index: int) -> int:
        """The operand that a result of an operator is a view of."""
        return shares(self.nodes[at])[index]

    def way_up(self, at: int, place: int) -> Iterator[tuple[int, int]]:
        """The operand of an operator, those of the views in the block that it is made by, and so on: (operator,
        place).
        """
        yield at, place
        maker = self.at_of.get(self.nodes[at].inputs[place].node)
        while maker is not None and is_view(self.nodes[maker]):
            at, place = maker, self.viewed(maker, self.nodes[at].inputs[place].index)
            yield at, place
            maker = self.at_of.get(self.nodes[at].inputs[place].node)

    def _read_by_products(self, is_kept: Sequence[bool]) -> frozenset[tuple[int, int]]:
        """(operator, result) of the kept values that the backward of products and attention needs as operands, and of
        the views in between.
        """
        found = set[tuple[int, int]]()
        for at, node in enumerate(self.nodes):
            for place in self.saved[at] if multiplies(node) else ():
                if place < len(node.inputs):
                    way = [self._made(self.nodes[each].inputs[i]) for each, i in self.way_up(at, place)]
                    found.update(way if way[-1][0] >= 0 and is_kept[way[-1][0]] else ())
        return frozenset(found)


def _is_kept(at: int, node: Node, level: Level) -> bool:
    """Whether what an operator makes is kept; ``at``: its position."""
    row = OPS.get(node.op)
    if row is None or level in GATHERING:
        return True
    if level == "selective":
        return multiplies(node)
    return isinstance(level, tuple) and at in level


def is_view(node: Node) -> bool:
    """Whether all that an operator makes lies in the memory of its operands."""
    return all(shared >= 0 for shared in shares(node) or (-1,))


def multiplies(node: Node) -> bool:
    """Whether an operator is a contraction, a convolution or attention."""
    row = OPS.get(node.op)
    return row is not None and row.flops is not no_flops


def _keeps_what_it_draws(graph: Graph, node: Node) -> bool:
    """Whether backward of an operator needs what it drew, as of dropout that drops anything, or made anew."""
    row = OPS.get(node.op)
    if row is None or shares(node) or not any(tensor.grad for tensor in node.results):
        return False
    if not row.random:
        return row.anew
    rate = node["p"] if node["dropout_p"] is None else node["dropout_p"]
    return rate != 0 and any(saved.kind in OWN for saved in row.saved(node, graph.input_types(node)))


def _roots(nodes: tuple[Node, ...]) -> dict[Ref, Ref]:
    """View -> what it is a view of, within a block."""
    root: dict[Ref, Ref] = {}
    for node in nodes:
        for index, shared in enumerate(shares(node)):
            if shared >= 0:
                root[Ref(node.name, index)] = root.get(node.inputs[shared], node.inputs[shared])
    return root
