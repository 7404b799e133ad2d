"""Search space: from a folded graph, a mesh and a cost model to the solver's problem.

Every distinct position of the folded graph is one decision (:mod:`planner.formulation.variables`). Costs are multiplied
by how often a variable occurs, so the size of the problem does not depend on depth. What an answer of the solver
decides says :mod:`planner.formulation.assignment`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import cached_property
from typing import cast

import numpy as np

from planner.cost.model import CostModel
from planner.formulation.choices import Options, laid_at_tail
from planner.formulation.decisions import DecisionGraph, Flow
from planner.formulation.discarded_outputs import discarded_outputs
from planner.formulation.edge_costs import EdgeCosts, Pair
from planner.formulation.local_costs import LocalCosts
from planner.formulation.node_options import AllowLeaf, NodeOptions
from planner.formulation.pipeline_pace import PipelinePace, pace_of
from planner.formulation.remat.levels import NOTHING, Recompute
from planner.formulation.resharding import ReshardingTable, local_bytes
from planner.formulation.resharding_tables import ReshardingTables
from planner.formulation.strategies import Allow
from planner.formulation.training import Training
from planner.formulation.variables import Variable
from planner.ir.folding import Folded, Instance
from planner.ir.graph import Node, Ref
from planner.ir.layout import Layout, Mesh
from planner.ops.sharding_rule import Rule
from planner.solve.problem import Edge, Floats, Ints, Problem, Vertex


class Space(LocalCosts):
    """Every decision to take for one folded graph on one mesh, and the solver's problem that they make.

    The problem's rows are added up here, of what single operators cost (:class:`LocalCosts`), what a resharding on an
    edge costs (:class:`planner.formulation.edge_costs.EdgeCosts`) and how often a step at some pace runs each. Options
    and rows stay in one class, since a certificate and closed forms are the same problem with other options or costs.

    Args:
        folded: the graph and its distinct blocks.
        mesh: the mesh to lay it on.
        cost: prices of work and communication.
        training: what the step keeps per parameter.
        allow, allow_leaf: keep a strategy of an operator on an axis; keep a storage layout of a leaf.
        decision_graph: that of the folded graph, where it is known already.
        pace: that of the average rank of a pipeline, each stage of which is on a mesh of its own like ``mesh``: costs
            are no rank's, but all of what a lower bound needs. Left out: one stage.
        like: another space of the same graph, mesh, prices and rules; stages and unsharding may be others.

    With micro-batches (:data:`planner.ir.layout.MICRO`) work and storage are those of one. Where parameters are
    gathered and gradients reduced once a step, both are held in the layout in which they are used; where in each
    micro-batch, in the layout in which they are stored (:attr:`Unsharding.once_per_step`).
    """

    def __init__(
        self,
        folded: Folded,
        mesh: Mesh,
        cost: CostModel,
        training: Training,
        rules: Mapping[str, Rule],
        allow: Allow | None = None,
        allow_leaf: AllowLeaf | None = None,
        decision_graph: DecisionGraph | None = None,
        pace: PipelinePace | None = None,
        like: Space | None = None,
    ):
        super().__init__(decision_graph or DecisionGraph(folded, rules), mesh, cost, training, like)
        self.pace = pace or pace_of(1, mesh.micro_batches)
        self.stages = self.pace.stages
        self.in_flight: float | None = None
        self.folded, self.leaving = folded, folded.graph.leaving
        self.variables = self.decision_graph.variables
        self.variable_of, self.members = self.variables.variable_of, self.variables.members
        self.unsharding = training.unsharding.of_step(self.micro_batched, training.tier == "device")
        self._node_options = NodeOptions(self.decision_graph, mesh, allow, allow_leaf, self._known.alike)
        self.tables = ReshardingTables(
            self.decision_graph, self._node_options, cost, self.unsharding, training, self._known.tables
        )
        self._last: tuple[object, tuple[Vertex, ...]] | None = None

    @cached_property
    def options(self) -> dict[Variable, Options]:
        """The choices of every variable, in a fixed order."""
        found: dict[Variable, Options] = {}
        for variable in self.members:
            found[variable] = self._node_options.of_nodes(variable)
        for point, ref in self.variables.reshard_points.items():
            found[point] = self.reshard_layouts(point, ref)
        for position in range(len(self.leaving)):
            found["output", position] = self._node_options.of_output(position)
        return found

    @cached_property
    def edge_costs(self) -> EdgeCosts:
        """What one resharding of each flow costs."""
        return EdgeCosts(self.graph, self.mesh, self.options, self.table, self._known.pairs)

    def table(self, ref: Ref) -> ReshardingTable:
        """All reshardings of a value on this mesh."""
        return self.tables.table(ref)

    @cached_property
    def discards(self) -> frozenset[int]:
        """Positions of the outputs that a training step does not keep."""
        return discarded_outputs(self.graph, self.training.discards, self.mesh.micro_batches)

    @property
    def discarded_names(self) -> tuple[str, ...]:
        """What the model calls these."""
        return tuple(self.graph.output_names[position] for position in sorted(self.discards))

    @property
    def micro_batched(self) -> bool:
        """Whether a step is more than one forward and one backward."""
        return self.stages > 1 or self.mesh.micro_batches > 1

    @property
    def gathers_per_step(self) -> int:
        """How often a step gathers a parameter for forward."""
        return 1 if self.unsharding.once_per_step else self.mesh.micro_batches

    def widening(self, ref: Ref) -> int:
        """How many bytes of a value's gradient are reduced for one that is stored."""
        return self.training.widening(self.graph.by_name[ref.node])

    def is_read(self, ref: Ref) -> bool:
        """Whether anything reads a value."""
        return self.variables.readers(ref) > 0

    def runs_backward(self, instance: Instance) -> bool:
        """Whether backward passes an instance of a block."""
        made = (Ref(node.name, index) for node in instance.block.nodes for index in range(len(node.results)))
        return not self.graph.differentiated.isdisjoint(made)

    def reshard_point_of(self, ref: Ref) -> Variable | None:
        """The reshard point of a value, if it has one."""
        return self.variables.reshard_point_of(ref)

    def reshard_layouts(self, point: Variable, ref: Ref) -> list[Layout]:
        """Layouts some reader of the value (in any instance) wants or its producer gives; P only if given."""
        readers = self.decision_graph.reshard_readers[point]
        every = [self._node_options.choices(variable).operands[position] for variable, position in readers]
        every.append(laid_at_tail(self._node_options.of_producer(ref), ref.index))
        wanted = {layout for laid in every for layout in laid.layouts}
        return [layout for layout in self.table(ref).layouts if layout in wanted]

    def describe(self, variable: Variable) -> str:
        """A variable in the user's words."""
        if variable in self.members:
            node = self.graph.by_name[self.members[variable][0]]
            return f"{node.target or node.path or node.name} ({node.op})"
        return " ".join(map(str, variable))

    # ---- the problem -------------------------------------------------------------------------------------------

    def holding(self, in_flight: float) -> Space:
        """The same decisions with the bytes of a typical rank, which holds what so many micro-batches saved."""
        space = copy.copy(self)
        space.in_flight = in_flight
        return space

    def called(self, mesh: Mesh) -> Space:
        """The same decisions on the same mesh with its axes called otherwise."""
        return self._like(mesh, self.cost)

    def priced(self, cost: CostModel) -> Space:
        """The same decisions at other prices."""
        return self._like(self.mesh, cost)

    def _like(self, mesh: Mesh, cost: CostModel) -> Space:
        found = Space(
            self.folded,
            mesh,
            cost,
            self.training,
            self.decision_graph.rules,
            self.allow,
            self.allow_leaf,
            self.decision_graph,
            self.pace,
        )
        found.in_flight = self.in_flight
        return found

    @property
    def allow(self) -> Allow | None:
        """Keeps a strategy of an operator on an axis; ``None``: all are kept."""
        return self._node_options.allow

    @property
    def allow_leaf(self) -> AllowLeaf | None:
        """Keeps a storage layout of a leaf; ``None``: all are kept."""
        return self._node_options.allow_leaf

    def vertices(self, limit_bytes: int | None, recompute: Recompute = NOTHING) -> tuple[Vertex, ...]:
        """The decisions by themselves, in the order of :attr:`variables`: work and storage, without communication.

        Arguments are those of :meth:`problem`.
        """
        limit = math.inf if limit_bytes is None else limit_bytes
        key = limit_bytes, self.in_flight, self.pace, recompute
        if self._last is None or self._last[0] != key:
            self._last = key, tuple(self._vertex(variable, recompute, limit) for variable in self.variables)
        return self._last[1]

    def problem(self, limit_bytes: int | None, recompute: Recompute = NOTHING) -> Problem:
        """The solver's problem; vertex ``i`` decides variable ``self.variables[i]``.

        Its bytes are a sum of what all decisions hold, not of what is alive at once.
        """
        index = {variable: i for i, variable in enumerate(self.variables)}
        runs_again = self.decision_graph.flows_again(recompute)
        enlarged, as_made = self.decision_graph.as_made(recompute).again, self._as_made(recompute)
        edges = []
        known: dict[object, Pair] = {}  # edges that convert alike, equally often, share costs
        for flow, count in self.decision_graph.flows.items():
            tail, head, ref, _ = flow
            pair, is_param = self.edge_costs.of(flow), self.graph.by_name[ref.node].op == "param"
            again, kept, late = runs_again.get(flow, 0), count, False
            if is_param and not self.unsharding.once_per_step:
                # Where it is gathered again, it is there only while an operator runs, and counts as that one's.
                kept -= again
            elif is_param and self.mesh.micro_batches > 1 and self.graph.type_of(ref).grad:
                kept, late = 2 * kept, tail in self.members
            larger, held_as_made = enlarged.get(flow, 0), as_made.get(flow, ())
            key = (*map(id, pair), is_param, count, again, kept, late, larger, held_as_made)
            if key not in known:
                known[key] = self._costs(
                    pair, is_param, count, again, kept, self.late_gradients(flow) if late else None
                )
                if larger or held_as_made:
                    known[key] = self._kept_as_made(flow, known[key], larger, held_as_made)
            edges.append(Edge(index[tail], index[head], *known[key]))
        return Problem(self.vertices(limit_bytes, recompute), tuple(edges), limit_bytes)

    def _costs(
        self,
        pair: Pair,
        is_param: bool,
        count: int,
        again: int,
        kept: int,
        late: Ints | None = None,
    ) -> Pair:
        """Seconds, seconds in the background, and bytes held, of a resharding that occurs so often.

        Args:
            again: how often it runs again in backward.
            kept: how many results are held, of a parameter.
            late: see :meth:`late_gradients`.
        """
        forward, backward, gathered = pair
        if not is_param:
            work = count * self.pace.rounds
            there_s = _often(forward, work + again * self.pace.rounds)
            return there_s + _often(backward, work), np.zeros(forward.shape), gathered
        back = count / self.stages * self.gathers_per_step
        there = back if self.unsharding.once_per_step else back + again / self.stages * self.gathers_per_step
        times = self.in_flight if self.in_flight is not None and not self.unsharding.once_per_step else 1
        sizes = (gathered * kept * times).astype(np.int64)
        held = self.on_average(sizes if late is None else sizes - count * late)
        there_s, back_s = _often(forward, there), _often(backward, back)
        if not (self.unsharding.overlaps_reduce or self.unsharding.once_per_step):  # nothing is beside it
            return there_s + back_s, np.zeros(forward.shape), held
        return there_s, back_s, held

    def _as_made(self, recompute: Recompute) -> dict[Flow, tuple[tuple[int, int, int], ...]]:
        """Of flows whose values are kept as they were made, by operand position: how many are held, and whether one is
        there, as its reader takes it, while a block runs its backward.
        """
        as_made = self.decision_graph.as_made(recompute)
        one_runs = not self.micro_batched or self.in_flight is not None
        return {
            flow: tuple(
                (at, as_made.held[flow, at], int(one_runs and (flow, at) in as_made.leading))
                for at in range(len(flow[3]))
                if (flow, at) in as_made.held
            )
            for flow in dict.fromkeys(flow for flow, _ in as_made.held)
        }

    def _kept_as_made(self, flow: Flow, costs: Pair, larger: int, held: tuple[tuple[int, int, int], ...]) -> Pair:
        """The costs of a resharding with what it takes to keep its value as it was made.

        Args:
            larger: how often it runs again in backward if it makes the value larger.
            held: what is held: see :meth:`_as_made`.
        """
        found = self.edge_costs.enlarging(flow)
        seconds, background, held_bytes = costs
        sizes = [found.smaller_bytes[at] * times + found.larger_bytes[at] * leads for at, times, leads in held]
        if sizes:
            every = np.sum(sizes, axis=0) * (self.in_flight or 1.0)
            held_bytes = held_bytes + self.on_average(every.astype(np.int64))
        return seconds + _often(found.again_s, larger * self.pace.rounds), background, held_bytes

    def late_gradients(self, flow: Flow) -> Ints:
        """Bytes of the gradient of a parameter as it is stored, where it is gathered once a step, for every pair of
        choices: it comes at the end of the step alone, since micro-batches add to that of what is gathered.
        """
        table, options = self.table(flow[2]), self.options[flow[0]]
        stored = table.held[[table.index[cast(Layout, layout)] for layout in options]]
        return np.where(self.edge_costs.of(flow)[2] > 0, stored[:, None], 0)

    def on_average(self, held: Ints) -> Ints:
        """Bytes that the average rank holds of what the stages hold together, rounded down so that bounds stay ones."""
        return held // self.stages

    def _vertex(self, variable: Variable, recompute: Recompute, limit_bytes: float) -> Vertex:
        """One decision, of a rank that may hold so much."""
        options = self.options[variable]
        size, times = len(options), len(self.members.get(variable, (variable,)))
        time, cover = np.zeros(size), np.zeros(size)
        held, transient = np.zeros(size, np.int64), np.zeros(size, np.int64)
        if variable in self.members:
            node = self.graph.by_name[self.members[variable][0]]
            if node.is_leaf:
                for i, layout in enumerate(options):
                    assert isinstance(layout, tuple)
                    time[i], held[i] = self.storage(node, layout)
                    held[i] -= self.not_with_all(node, layout) * self.micro_batched
                held, once = self.on_average(held * times), times / self.stages
                return Vertex(str(variable), time * once, np.zeros(size), cover, held, transient)
            again = self.decision_graph.runs_again(variable, recompute)
            (forward, backward, inner_again, inner_backward), transient, parameters = self.works_of(node, options)
            inner = inner_again + inner_backward
            again_somewhere = bool(recompute.levels(cast(int, variable[1])))
            # Parameters come only then, or are gathered again (see :meth:`problem`), or their gradients lie beside the
            # buckets that the host keeps for them (see autopar/runtime/host/gradient_buckets.py).
            is_away, on_cpu = self.training.tier != "device", self.cost.cluster.on_cpu
            if is_away or (not self.micro_batched and (again_somewhere or on_cpu)):
                transient = transient + parameters
            pace = self.pace
            time = (forward + backward + inner) * (
                times * pace.rounds + pace.waited(self.folded.instances, variable[1])
            )
            time += (forward + inner_again) * (again * pace.rounds)
            cover = backward * self.overlap * (times / self.stages)
            # What operators hold is the same whether parameters are gathered again or not.
            held = self.held_by(variable, node, options, recompute.without_gathered())
            held = self.on_average((held * (self.in_flight or 1.0)).astype(np.int64))
            # A rank with this operator may hold less than the average, and less than all when it runs.
            if self.micro_batched and self.in_flight is None:
                time = np.where(transient > limit_bytes, math.inf, time)
                transient = np.zeros_like(transient)
        return Vertex(str(variable), time, np.zeros(size), cover, held, transient)

    def not_with_all(self, leaf: Node, layout: Layout) -> int:
        """Bytes of the gradient of a parameter where a step has one micro-batch: there is no moment at which all that
        is saved and all gradients are there.
        """
        is_alone = self.mesh.micro_batches == 1 and self.training.tier == "device" and self.training.update == "after"
        is_trained = leaf.op == "param" and leaf.results[0].grad
        return local_bytes(leaf.results[0], layout, self.mesh) if is_alone and is_trained else 0

    def held_by(self, variable: Variable, node: Node, options: Options, recompute: Recompute) -> Ints:
        """What members of a variable keep for backward, and what one of them has recomputed while its block runs its
        backward.

        The latter is there for a while only, but beside whatever operators of the block then need for themselves.
        """
        charged = self.decision_graph.blocks.charged(recompute)[variable]
        held = sum(
            (self._bytes(node, options, p) * n for p, n in charged.items() if p), np.zeros(len(options), np.int64)
        )
        kind, at = variable[1], variable[2]
        assert isinstance(kind, int)
        assert isinstance(at, int)
        if recompute.levels(kind) and recompute.leads(kind) and (not self.micro_batched or self.in_flight is not None):
            again = [self.decision_graph.blocks.again(kind, level).dropped[at] for level, _ in recompute.levels(kind)]
            held = held + np.max([self._bytes(node, options, places) for places in again], axis=0)
        return held

    def conversion_s(self, ref: Ref, source: Layout, target: Layout) -> tuple[float, float]:
        """Seconds forward and backward to convert a value."""
        table = self.table(ref)
        pair = table.index[source], table.index[target]
        return float(table.forward_s[pair]), float(table.backward_s[pair])


def _often(seconds: Floats, times: float) -> Floats:
    """Seconds of what is done so often; what is forbidden stays so where nothing is known of how often."""
    return seconds * times if times else np.where(np.isinf(seconds), math.inf, 0.0)
