"""Edge costs: what it takes to reshard a value from what its source is decided to what its reader is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from planner.formulation.choices import Options, laid_at_head, laid_at_tail
from planner.formulation.decisions import Flow
from planner.formulation.resharding import ReshardingTable
from planner.formulation.variables import Variable
from planner.ir.graph import Graph, Ref
from planner.ir.layout import Mesh, P
from planner.solve.problem import Floats, Ints

Pair = tuple[Floats, Floats, Ints]
"""For every pair of choices: seconds forward, seconds backward, and bytes gathered."""


class Enlarging(NamedTuple):
    """For every pair of choices, what it is to keep the smaller form of a value.

    Attributes:
        again_s: seconds forward, where the resharding makes the value larger.
        smaller_bytes: by operand position.
        larger_bytes: of what the resharding makes then, by operand position; 0 where it makes nothing larger.
    """

    again_s: Floats
    smaller_bytes: tuple[Ints, ...]
    larger_bytes: tuple[Ints, ...]


class EdgeCosts:
    """What one resharding of each flow costs, for every choice of its source and of its reader.

    Args:
        graph: whose values flow.
        mesh: the mesh they are laid on.
        options: the choices of every variable.
        table: the resharding table of a value.
        pairs: costs that were found for the same mesh, see :class:`planner.formulation.local_costs.Known`.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        options: Mapping[Variable, Options],
        table: Callable[[Ref], ReshardingTable],
        pairs: dict[object, Pair],
    ):
        self.graph, self.mesh, self.options, self.table, self._pairs = graph, mesh, options, table, pairs
        self._of: dict[Flow, Pair] = {}
        self._enlarging: dict[Flow, Enlarging] = {}
        self._least: dict[object, tuple[Floats, Floats]] = {}
        self._alike: dict[object, Pair] = {}

    def of(self, flow: Flow) -> Pair:
        """Seconds forward and backward, and bytes gathered, of one resharding, for every pair of choices."""
        if flow not in self._of:
            self._of[flow] = self._find(*flow)
        return self._of[flow]

    def least(self, flow: Flow) -> tuple[Floats, Floats]:
        """Seconds at least of a parameter that is gathered in each micro-batch, for every pair of choices: see
        :attr:`planner.formulation.resharding.ReshardingTable.least_s`.
        """
        tail, head, ref, positions = flow
        table, tails, heads = self.table(ref), self.options[tail], self.options[head]
        alike = id(table), id(tails), id(heads), ref.index, positions
        if alike not in self._least:
            rows = table.numbers(laid_at_tail(tails, ref.index))
            columns = [table.numbers(laid_at_head(heads, position)) for position in positions]
            both, forward = (_each_once(each, rows, columns) for each in table.least_s)
            self._least[alike] = both, forward
        return self._least[alike]

    def enlarging(self, flow: Flow) -> Enlarging:
        """What a resharding of a flow comes to where its value is kept as it was made if that is smaller."""
        if flow not in self._enlarging:
            tail, head, ref, positions = flow
            table = self.table(ref)
            rows = table.numbers(laid_at_tail(self.options[tail], ref.index))
            columns = [table.numbers(laid_at_head(self.options[head], position)) for position in positions]
            before = table.held[rows][:, None]
            seconds = np.zeros((len(rows), len(columns[0])))
            smaller, larger = [], []
            for nth, wanted in enumerate(columns):
                after = np.broadcast_to(table.held[wanted][None, :], seconds.shape)
                repeated = np.any([wanted == earlier for earlier in columns[:nth]], axis=0)
                grows = after > before
                seconds += np.where(grows & ~repeated, table.forward_s[np.ix_(rows, wanted)], 0.0)
                smaller.append(np.minimum(before, after))
                larger.append(np.where(grows, after, 0))
            self._enlarging[flow] = Enlarging(seconds, tuple(smaller), tuple(larger))
        return self._enlarging[flow]

    def _find(self, tail: Variable, head: Variable, ref: Ref, positions: tuple[int, ...]) -> Pair:
        table, tails, heads = self.table(ref), self.options[tail], self.options[head]
        is_param = self.graph.by_name[ref.node].op == "param"
        waits = self.mesh.micro_batches > 1 and head[0] != "output" and not self._known_before(ref)
        # Variables of operators that are alike share a list of choices.
        alike = (id(table), id(tails), id(heads), ref.index, positions, is_param, waits)
        if alike not in self._alike:
            self._alike[alike] = self._convert(table, tails, heads, ref.index, positions, is_param, waits)
        return self._alike[alike]

    def _convert(
        self,
        table: ReshardingTable,
        tails: Options,
        heads: Options,
        index: int,
        positions: tuple[int, ...],
        is_param: bool,
        waits: bool,
    ) -> Pair:
        """The same of a result of so many, for all whose source and reader have these choices.

        Args:
            waits: where it is a sum over micro-batches, it is not there before the last of them.
        """
        rows = table.numbers(laid_at_tail(tails, index))
        columns = [table.numbers(laid_at_head(heads, position)) for position in positions]
        key = (id(table), rows.tobytes(), tuple(each.tobytes() for each in columns), is_param)
        if key not in self._pairs:
            self._pairs[key] = _convert(table, rows, columns, is_param)
        forward, backward, gathered = self._pairs[key]
        summed = np.array([layout[0] == P for layout in table.layouts])
        if waits and summed.any():
            # Only what leaves the model can wait for the last micro-batch.
            early = summed[rows][:, None] & ~np.all([summed[each] for each in columns], axis=0)[None, :]
            forward = np.where(early, math.inf, forward)
        return forward, backward, gathered

    def _known_before(self, ref: Ref) -> bool:
        """Whether it is one number that follows from inputs alone, such as how many tokens a loss is averaged over."""
        tensor = self.graph.type_of(ref)
        return not tensor.grad and tensor.numel == 1 and not self.graph.follows_from_parameters(ref)


def _convert(table: ReshardingTable, rows: Ints, columns: list[Ints], is_param: bool) -> Pair:
    """Seconds forward, seconds backward, and bytes gathered, of the reshardings of a value from layouts to layouts.

    Args:
        rows: the number of its layout for each choice of its source.
        columns: for every operand that reads it, the number of the layout for each choice of the reader; one layout
            is made once.
    """
    forward, backward = (_each_once(seconds, rows, columns) for seconds in (table.forward_s, table.backward_s))
    gathered = np.zeros(forward.shape, np.int64)
    for wanted in columns if is_param else ():
        gathered += np.where(table.held[wanted][None, :] > table.held[rows][:, None], table.held[wanted], 0)
    return forward, backward, gathered


def _each_once(seconds: Floats, rows: Ints, columns: list[Ints]) -> Floats:
    """Of a matrix [from, to] the sums over all that is made; arguments are those of :func:`_convert`."""
    first, *others = columns
    found: Floats = seconds[np.ix_(rows, first)]
    for nth, wanted in enumerate(others, 1):
        repeated = np.any([wanted == earlier for earlier in columns[:nth]], axis=0)
        found += np.where(repeated, 0.0, seconds[np.ix_(rows, wanted)])
    return found
