"""Resharding tables: for each value of a graph, what it takes on one mesh to turn any of its layouts into another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import numpy as np

from planner.cost.model import CostModel
from planner.cost.software import Overlap
from planner.formulation.choices import laid_at_head, laid_at_tail
from planner.formulation.decisions import DecisionGraph, Together
from planner.formulation.local_costs import OVERLAP
from planner.formulation.node_options import NodeOptions
from planner.formulation.resharding import Hidden, ReshardingTable
from planner.formulation.strategies import shards_of
from planner.formulation.training import Training
from planner.formulation.unsharding import Unsharding
from planner.formulation.variables import Variable
from planner.ir.graph import Node, Ref
from planner.ir.layout import MICRO, Axis, LocalType
from planner.ops import OPS
from planner.solve.problem import Floats, Ints

HIDDEN: Mapping[Overlap, tuple[tuple[str, ...], bool]] = {
    "gathers": (("all_gather",), False),
    "tensor": (("all_gather", "reduce_scatter"), True),
}
"""The collectives that software overlaps with products, and whether piece by piece."""
BUCKET_BYTES = 25 * 2**20
NOT_GATHERED = Together(0, 1.0)
"""Of what is no parameter that one operator of one block reads."""


class ReshardingTables:
    """The tables of all values; those of equal type that are cut and priced alike are one.

    Args:
        decision_graph: the variables, and the values between them.
        options: how nodes may run, which says in which layouts a value may be.
        cost: prices of communication.
        unsharding: when parameters are gathered.
        training: in which dtype their gradients are reduced.
        tables: those that were found for the same mesh, see :class:`planner.formulation.local_costs.Known`.
    """

    def __init__(
        self,
        decision_graph: DecisionGraph,
        options: NodeOptions,
        cost: CostModel,
        unsharding: Unsharding,
        training: Training,
        tables: dict[object, ReshardingTable],
    ):
        self.decision_graph, self.variables, self.graph = decision_graph, decision_graph.variables, decision_graph.graph
        self.options, self.mesh, self.cost, self.unsharding = options, options.mesh, cost, unsharding
        self.training, self._tables = training, tables
        self._table_of: dict[tuple[Variable, int], ReshardingTable] = {}
        self._micro_batches_of: dict[Ref, frozenset[LocalType]] = {}

    def table(self, ref: Ref) -> ReshardingTable:
        """All reshardings of a value on this mesh."""
        value = self.variables.variable_of[ref.node], ref.index
        if value not in self._table_of:
            self._table_of[value] = self._find(ref)
        return self._table_of[value]

    def _find(self, ref: Ref) -> ReshardingTable:
        tensor = self.graph.type_of(ref)
        shards = tuple(shards_of(tensor, self.options.strips(ref)))
        micro_batches = self._micro_batches(ref) if self.mesh.micro_batches > 1 else None
        is_param = self.graph.by_name[ref.node].op == "param"
        # What is gathered is used by all micro-batches; what they sum up is reduced once.
        is_summed_first = micro_batches is not None and tensor.grad and is_param and self.unsharding.once_per_step
        comes = is_param and not self.unsharding.once_per_step
        shared = (("all_reduce",) if self.unsharding.all_reduces_once else ()) if comes else None
        together, is_gathered = self.together(ref), self.variables.variable_of[ref.node] in self.decision_graph.together
        beside = self.unsharding.overlaps_gather, self.unsharding.overlaps_reduce
        hidden, widening = self.hidden(ref), self.training.widening(self.graph.by_name[ref.node])
        key = (tensor, shards, micro_batches, is_summed_first, shared, together, is_gathered, beside, hidden, widening)
        if key not in self._tables:
            touch = self.cost.compute_s(0.0, BUCKET_BYTES, tensor.dtype, 0) / BUCKET_BYTES
            launch = self.cost.compute_s(0.0, 0, tensor.dtype, 1)

            def price(kind: str, axis: Axis, bytes_in: Ints, is_shared: bool) -> Floats:
                parts = self.parts(ref, kind, axis)
                if axis.name != MICRO:
                    if not is_shared:
                        return self.cost.collective_s(kind, axis, bytes_in) / parts
                    is_beside = (
                        self.unsharding.overlaps_gather if kind == "all_gather" else self.unsharding.overlaps_reduce
                    )
                    start_s = self.cost.collective_s(kind, axis, 0.0, beside=is_beside)
                    whole_s = self.cost.collective_s(kind, axis, bytes_in * together.times, beside=is_beside)
                    return (start_s / together.parameters + (whole_s - start_s) / together.times) / parts
                # Nothing but sums crosses from micro-batch to micro-batch; they are added up as they come, in
                # place.
                each_s = 3 * touch if kind == "all_reduce" else math.inf
                return np.asarray((axis.size - 1) / parts * each_s * np.maximum(bytes_in, 1), np.float64)

            self._tables[key] = ReshardingTable(
                tensor,
                self.mesh,
                shards,
                price,
                touch,
                launch,
                micro_batches,
                is_summed_first,
                together.parameters,
                is_gathered,
                hidden,
                widening,
                shared,
            )
        return self._tables[key]

    def hidden(self, ref: Ref) -> Hidden | None:
        """What hides the communication of a value where the software overlaps it: each rank's share of what the
        products that read it compute, or the one that makes it, however that is sharded, as far as they hide nothing
        else. Gathers are beside the block before, whose products are as those of the same block are, weight by weight.
        """
        maker, software = self.graph.by_name[ref.node], self.cost.cluster.software
        is_param = maker.op == "param"
        overlap: Overlap = "gathers" if is_param else "tensor"
        if overlap not in software.overlaps or (maker.is_leaf and not is_param):
            return None
        products = dict.fromkeys(node for node, _ in self.graph.users.get(ref, ()) if _contracts(node))
        hiding = products or ([maker] if _contracts(maker) else [])
        seconds = math.fsum(self._shared_s(node) * self._part(ref, node) for node in hiding)
        return Hidden(OVERLAP[self.cost.cluster.backend] * seconds, *HIDDEN[overlap]) if seconds else None

    def _part(self, ref: Ref, product: Node) -> float:
        """The part of a product's seconds that hides the communication of one value, by bytes of all that it hides.

        On an axis either what a product reads is gathered or what it makes is scattered: a result is partial where the
        operands are cut alike. So parameters share with the larger of the two.
        """
        overlaps, by_name = self.cost.cluster.software.overlaps, self.graph.by_name
        size = self.graph.type_of(ref).size_bytes
        read = {each: self.graph.type_of(each).size_bytes for each in product.inputs}
        parameters = sum(size for each, size in read.items() if by_name[each.node].op == "param")
        operands = sum(size for each, size in read.items() if not by_name[each.node].is_leaf)
        beside = parameters if "gathers" in overlaps else 0
        if by_name[ref.node].op == "param":
            made = sum(tensor.size_bytes for tensor in product.results)
            return size / (beside + (max(operands, made) if "tensor" in overlaps else 0))
        return size / (beside + (operands if ref in read else size))

    def _shared_s(self, product: Node) -> float:
        """Seconds of a product that all ranks share, of one micro-batch."""
        flops = OPS[product.op].flops(product, self.graph.input_types(product), self.decision_graph.rules[product.name])
        parts = self.mesh.size * self.mesh.micro_batches
        return self.cost.compute_s(flops / parts, 0.0, product.results[0].dtype, 0)

    def parts(self, ref: Ref, kind: str, axis: Axis) -> int:
        """Among how many micro-batches a call is shared out that is made once for all: a parameter that comes with each
        of them is priced for one.
        """
        is_param = self.graph.by_name[ref.node].op == "param"
        is_once = kind == "all_reduce" and (axis.name == MICRO or self.unsharding.all_reduces_once)
        return self.mesh.micro_batches if is_param and is_once and not self.unsharding.once_per_step else 1

    def together(self, ref: Ref) -> Together:
        """Parameters that are gathered in one call with this one, itself included; each has its share of the call.

        The shares are equal in what a call takes however small it is, and by bytes in the rest. Of a cluster that was
        not measured each pays for a call of its own: what a call there is stated to take is the wire's part alone.
        """
        measured = self.cost.cluster.calibration
        if measured is None or not measured.collectives:
            return NOT_GATHERED
        return self.decision_graph.together.get(self.variables.variable_of[ref.node], NOT_GATHERED)

    def _micro_batches(self, ref: Ref) -> frozenset[LocalType]:
        """The local types that a value has over micro-batches where it is made and where it is read."""
        ref = self.variables.representative(ref)
        if ref not in self._micro_batches_of:
            self._micro_batches_of[ref] = self._find_micro_batches(ref)
        return self._micro_batches_of[ref]

    def _find_micro_batches(self, ref: Ref) -> frozenset[LocalType]:
        every = [laid_at_tail(self.options.of_producer(ref), ref.index)]
        for head, positions in self.decision_graph.reads.get(ref, ()):
            if head[0] == "op":
                every += [self.options.choices(head).operands[at] for at in positions]
            elif head[0] == "output":
                every.append(laid_at_head(self.options.of_output(cast(int, head[1])), 0))
        return frozenset(layout[0] for laid in every for layout in laid.layouts)


def _contracts(node: Node) -> bool:
    row = OPS.get(node.op)
    return row is not None and row.contracts
