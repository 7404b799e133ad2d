"""Gives each tensor saved for backward one owner among the operators that need it.

The first reader of a tensor that needs it pays: views of one tensor count once, a part not beside the whole, and
parameters are paid as parameters. What an instance of a block pays follows from its level of recomputation and from
what is known of the values that enter it: which of them lie in one tensor, and which tensors are paid for already. So
each block is walked once for each such way to find it, and the graph by its instances alone; of those that go on alike
one after another, by the first two and the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

from planner.formulation.remat.backward_slice import Again
from planner.formulation.remat.levels import Level, Recompute
from planner.ir.folding import Block, Folded
from planner.ir.graph import Node, Ref
from planner.ops import saved_places
from planner.ops.aliasing import shares

Places = tuple[int, ...]
"""Tensors of an operator: its operands, then its results."""
Tensor = int | tuple[int, int]
"""A tensor as a block knows it: the number of one that enters, or the operator and the result that make it."""
Chain = tuple[Tensor, ...]
"""The tensor that a value lies in, the tensor that this one is a part of, and so on."""
STORED, PARAMETER = -1, Ref("")
"""Any parameter, as a block and as the graph know it: all are held."""


@dataclass(frozen=True)
class Found:
    """How an instance finds the values that enter it, parameters left out: their chains, and which tensors are held."""

    form: int
    level: Level
    entering: tuple[Chain, ...]
    held: tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class Paid:
    """What an instance pays.

    Attributes:
        level: at which the instance runs.
        places: of each of its operators.
        tensors: those it pays for of what others may read: of what enters it, and of what its outputs lie in.
        leaving: the chains of its outputs.
    """

    level: Level
    places: tuple[Places, ...]
    tensors: frozenset[Tensor]
    leaving: tuple[Chain, ...]

    @cached_property
    def leaves_its_own(self) -> bool:
        """Whether no output lies in a tensor that enters, parameters aside."""
        return all(tensor == STORED or not isinstance(tensor, int) for chain in self.leaving for tensor in chain)


class Charges:
    """Who pays for what in a folded graph.

    Args:
        folded: the graph and its distinct blocks.
        again: what the instances of a kind recompute at a level other than ``none``.
    """

    def __init__(self, folded: Folded, again: Callable[[int, Level], Again]):
        self.folded, self.graph, self._again = folded, folded.graph, again
        self._paid: dict[Found, Paid] = {}
        self._needed: dict[object, Places] = {}
        self._charged: dict[Recompute, tuple[Paid, ...]] = {}
        self._forms = tuple(self._find_forms())
        parameters = frozenset(self.graph.applying("param").names)
        self._values = tuple(
            tuple([ref for ref in instance.block.inputs if ref.node not in parameters]) for instance in folded.instances
        )
        self._goes_on = tuple(self._find_going_on())

    def of(self, recompute: Recompute) -> tuple[Paid, ...]:
        """What every instance pays, in execution order."""
        if recompute not in self._charged:
            self._charged[recompute] = tuple(self._walk(recompute))
        return self._charged[recompute]

    def _find_forms(self) -> Iterator[int]:
        """A number for every instance, the same for those of one kind that share memory alike inside."""
        numbers: dict[object, int] = {}
        known: dict[object, int] = {}  # copies of a node hold one object
        for instance in self.folded.instances:
            shares = [node.shares for node in instance.block.span.firsts]
            same = (instance.kind, *map(id, shares))
            if same not in known:
                known[same] = numbers.setdefault((instance.kind, tuple(shares)), len(numbers))
            yield known[same]

    def _walk(self, recompute: Recompute) -> Iterator[Paid]:
        chains: dict[Ref, tuple[Ref, ...]] = {}
        held = {PARAMETER}
        instances, levels = self.folded.instances, self._levels(recompute)
        before: Found | None = None
        number = 0
        while number < len(levels):
            kind, block = instances[number].kind, instances[number].block
            form, level, values = self._forms[number], levels[number], self._values[number]
            numbers: dict[Ref, int] = {}
            entering = [
                tuple([numbers.setdefault(each, len(numbers)) for each in chains.get(ref, (ref,))]) for ref in values
            ]
            found = Found(form, level, tuple(entering), tuple([each in held for each in numbers]))
            if found not in self._paid:
                self._paid[found] = self._pay(kind, block, values, found)
            paid = self._paid[found]
            last = number
            if found == before and paid.leaves_its_own:
                while self._goes_on[last] and levels[last + 1] == level:
                    last += 1
            names = {STORED: PARAMETER, **dict(enumerate(numbers))}
            block = instances[last].block
            held.update(_named(tensor, block, names) for tensor in paid.tensors)
            for ref, chain in zip(block.outputs, paid.leaving, strict=True):
                chains[ref] = tuple([_named(tensor, block, names) for tensor in chain])
            yield from repeat(paid, last + 1 - number)
            number, before = last + 1, found

    def _levels(self, recompute: Recompute) -> list[Level]:
        """The level of every instance."""
        count: Counter[int] = Counter()
        found = []
        for instance in self.folded.instances:
            found.append(recompute.level(instance.kind, count[instance.kind]))
            count[instance.kind] += 1
        return found

    def _find_going_on(self) -> Iterator[bool]:
        """For every instance, whether the next is of its form, alone reads its outputs, and finds its values alike.

        That is: each is the same as before, or the same output of the instance before. So where two at one level, one
        after the other, find values in one way, those that go on from there find them so too, and pay the same.
        """
        made: dict[Ref, tuple[int, int]] = {}
        last = {ref: number for number, values in enumerate(self._values) for ref in values}
        for number, instance in enumerate(self.folded.instances):
            outputs = instance.block.outputs
            made.update({ref: (number, place) for place, ref in enumerate(outputs)})
            following = number + 1
            yield (
                following < len(self._forms)
                and self._forms[number] == self._forms[following]
                and all(last.get(ref, following) == following for ref in outputs)
                and all(
                    ours == theirs
                    or (ours in made and made[ours][0] == number and made.get(theirs) == (number - 1, made[ours][1]))
                    for theirs, ours in zip(self._values[number], self._values[following], strict=True)
                )
            )

    def _pay(self, kind: int, block: Block, values: tuple[Ref, ...], found: Found) -> Paid:
        chains: dict[Ref, Chain] = dict.fromkeys(block.inputs, (STORED,))
        chains.update(zip(values, found.entering, strict=True))
        held: set[Tensor] = {STORED, *(number for number, is_held in enumerate(found.held) if is_held)}
        before = frozenset(held)
        places: list[Places] = []
        for at, node in enumerate(block.nodes):
            results = [Ref(node.name, index) for index in range(len(node.results))]
            chains |= {ref: ((at, ref.index),) for ref in results}
            for ref, place in zip(results, shares(node), strict=False):
                if place >= 0:
                    viewed = node.inputs[place]
                    is_part = self.graph.type_of(ref).numel < self.graph.type_of(viewed).numel
                    chains[ref] = (*chains[ref], *chains[viewed]) if is_part else chains[viewed]
            tensors = (*node.inputs, *results)
            mine = []
            for place in self._kept(kind, found.level, at, node):
                chain = chains[tensors[place]]
                if held.isdisjoint(chain):
                    held.add(chain[0])
                    mine.append(place)
            places.append(tuple(mine))
        leaving = tuple(chains[ref] for ref in block.outputs)
        known = {*range(len(found.held)), *(tensor for chain in leaving for tensor in chain)}
        return Paid(found.level, tuple(places), frozenset(held - before) & known, leaving)

    def _kept(self, kind: int, level: Level, at: int, node: Node) -> Places:
        """The places of an operator that are kept for backward."""
        types = self.graph.input_types(node)
        if level != "none":
            again = self._again(kind, level)
            saved, all_ = (saved_places(node, types, own=own) for own in (False, True))
            own = () if at in again.drawing else (place for place in all_ if place not in saved)
            return (*again.kept[at], *own)
        alike = (id(node.first), *map(id, types))  # copies of an operator hold one object for each type
        if alike not in self._needed:
            differentiated = any(tensor.grad for tensor in node.results)
            self._needed[alike] = saved_places(node, types, own=True) if differentiated else ()
        return self._needed[alike]


def _named(tensor: Tensor, block: Block, names: Mapping[int, Ref]) -> Ref:
    """A tensor as the graph knows it."""
    return names[tensor] if isinstance(tensor, int) else Ref(block.span.names[tensor[0]], tensor[1])
