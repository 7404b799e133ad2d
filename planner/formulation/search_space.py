"""Formulate: from a folded graph, a mesh and a cost model to the solver's problem, and back.

Every distinct position of the folded graph is one decision (a *role*): each operator of each distinct
block, the storage of each leaf, the layout in which a value with several readers is delivered (its
*relay*), and the layout of each output. Costs are multiplied by how often a role occurs, so the size
of the problem does not depend on depth.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import cast

import numpy as np

from planner.cost.model import CostModel
from planner.formulation.decisions import Flow, Role, Skeleton, Together
from planner.formulation.local_costs import Priced
from planner.formulation.pipeline_pace import Pace, pace_of
from planner.formulation.remat.levels import NOTHING, Recompute
from planner.formulation.resharding import ConversionTable
from planner.formulation.strategies import (
    Allow,
    Choice,
    Strips,
    axis_ways,
    choices_of,
    leaf_layouts,
    rule_of,
    shards_of,
)
from planner.formulation.training import Gathers, Training
from planner.ir.folding import Folded, Instance
from planner.ir.graph import Graph, Node, Ref, static
from planner.ir.layout import MICRO, Axis, I, Layout, LocalType, Mesh, P, R, Shard, local_shape
from planner.ops.sharding_rule import Rule
from planner.solve.problem import Edge, Floats, Ints, Problem, Vertex

AllowLeaf = Callable[[Node, Layout], bool]
BUCKET_BYTES = 25 * 2**20
NOT_BROUGHT = Together(0, 1.0)
"""Of what is no parameter that one operator of one block reads."""
OVERLAP = {"nccl": 0.9, "gloo": 0.0}
"""Share of backward work that can hide gradient communication, where a cluster does not say. Gloo communicates on the
cores that compute."""


class Space(Priced):
    """Every decision to take for one folded graph on one mesh, and what each costs.

    Args:
        folded: the graph and its distinct blocks.
        mesh: the mesh to lay it on.
        cost: prices of work and communication.
        training: what the step keeps per parameter.
        allow, allow_leaf: keep a strategy of an operator on an axis; keep a storage layout of a leaf.
        skeleton: that of the folded graph, where it is known already.
        pace: that of the average rank of a pipeline, each stage of which is on a mesh of its own like ``mesh``: costs
            are no rank's, but all of what a lower bound needs. Left out: one stage.
        like: another space of the same graph, mesh, prices and rules.

    With micro-batches (:data:`planner.ir.layout.MICRO`) work and storage are those of one. Where parameters are
    gathered and gradients reduced once a step, both are held in the layout in which they are used; where in each
    micro-batch, in the layout in which they are stored (:attr:`brings_once`).
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
        skeleton: Skeleton | None = None,
        pace: Pace | None = None,
        like: Space | None = None,
    ):
        super().__init__(skeleton or Skeleton(folded, rules), mesh, cost, training, like)
        self.pace = pace or pace_of(1, mesh.micro_batches)
        self.stages = self.pace.stages
        self.in_flight: float | None = None
        self.folded, self.leaving = folded, folded.graph.leaving
        self.role_of, self.members = self.skeleton.role_of, self.skeleton.members
        stated = cost.cluster.overlap
        self.overlap = OVERLAP[cost.cluster.backend] if stated is None else stated
        self._allow, self._allow_leaf = allow, allow_leaf
        self._cuts = self.skeleton.cuts(mesh.sizes)
        self._pair_of: dict[Flow, tuple[Floats, Floats, Ints]] = {}
        self._choices_of: dict[Role, list[Choice]] = {}
        self._micro_batches_of: dict[Ref, frozenset[LocalType]] = {}
        self._last: tuple[object, tuple[Vertex, ...]] | None = None

    @cached_property
    def options(self) -> dict[Role, list[Choice] | list[Layout]]:
        """The choices of every role, in a fixed order."""
        found: dict[Role, list[Choice] | list[Layout]] = {}
        for role, names in self.members.items():
            node = self.graph.by_name[names[0]]
            if node.is_leaf:
                layouts = self._leaf_layouts(node)
                kept = [layout for layout in layouts if self._allow_leaf is None or self._allow_leaf(node, layout)]
                found[role] = kept or layouts[:1]
            else:
                found[role] = self._choices(role)
        for relay, ref in self.skeleton.relays.items():
            found[relay] = self._relay_layouts(relay, ref)
        for position, ref in enumerate(self.leaving):
            found["output", position] = self._output_layouts(ref, keeps_state=position >= len(self.graph.outputs))
        return found

    @property
    def brings_beside(self) -> bool:
        """Whether parameters are brought, and their gradients reduced, while another block computes."""
        return not self.micro_batched and self.training.tier == "device"

    @property
    def gathers_beside(self) -> bool:
        """Whether parameters are gathered while another block computes."""
        return self.training.tier == "device" and not self.brings_once

    @property
    def micro_batched(self) -> bool:
        """Whether a step is more than one forward and one backward."""
        return self.stages > 1 or self.mesh.micro_batches > 1

    @property
    def brings_once(self) -> bool:
        """Whether parameters are gathered, and gradients reduced, once for all of a micro-batched step: not where that
        was decided otherwise, nor where they come from their home for each forward and backward.
        """
        return self.micro_batched and self.training.tier == "device" and self.training.gathers == "once"

    @property
    def sums_once(self) -> bool:
        """Whether gradients of parameters that come with each micro-batch are summed once a step all the same over
        ranks that store the same: not where they leave the device in between.
        """
        return self.micro_batched and self.training.tier == "device" and not self.brings_once

    @property
    def gathers(self) -> Gathers:
        """When that is done in a micro-batched step."""
        return "once" if self.brings_once else "each"

    @property
    def brought(self) -> int:
        """How often a step converts a parameter for forward."""
        return 1 if self.brings_once else self.mesh.micro_batches

    def is_read(self, ref: Ref) -> bool:
        """Whether anything reads a value."""
        return self.skeleton.readers(ref) > 0

    def is_undone(self, instance: Instance) -> bool:
        """Whether backward passes an instance of a block."""
        made = (Ref(node.name, index) for node in instance.block.nodes for index in range(len(node.results)))
        return not self.graph.differentiated.isdisjoint(made)

    def relay_of(self, ref: Ref) -> Role | None:
        """The relay role of a value, if it has one."""
        return self.skeleton.relay_of(ref)

    def _relay_layouts(self, relay: Role, ref: Ref) -> list[Layout]:
        """Layouts some reader of the value (in any instance) wants or its producer gives; P only if given."""
        readers = self.skeleton.relay_readers[relay]
        wanted = {choice.operands[position]: None for role, position in readers for choice in self._choices(role)}
        for decision in self.options_of_producer(ref):
            wanted[decision.results[ref.index] if isinstance(decision, Choice) else decision] = None
        table = self.table(ref)
        return [layout for layout in table.layouts if layout in wanted]

    def _strips(self, ref: Ref) -> Strips:
        """Where a value may be cut on this mesh."""
        return self._cuts.get(self.skeleton.representative(ref), {})

    def _choices(self, role: Role) -> list[Choice]:
        if role not in self._choices_of:
            node = self.graph.by_name[self.members[role][0]]
            rule = self.rules[node.name]
            strips = tuple(map(self._strips, (*node.inputs, *(Ref(node.name, i) for i in range(len(node.results))))))
            ways = axis_ways(self.graph, node, rule, self.mesh, strips, self._allow, self.skeleton.ways)
            # Operators that share a rule are equal but for what they read; pins may tell them apart.
            key = id(rule), tuple(tuple(id(strategy) for strategy, _ in each) for each in ways)
            if key not in self._known.alike:
                self._known.alike[key] = choices_of(self.graph, node, self.mesh, ways)
            self._choices_of[role] = self._known.alike[key]
        return self._choices_of[role]

    def options_of_producer(self, ref: Ref) -> list[Choice] | list[Layout]:
        """The choices of the node that makes a value."""
        role = self.role_of[ref.node]
        node = self.graph.by_name[ref.node]
        return self._leaf_layouts(node) if node.is_leaf else self._choices(role)

    def _leaf_layouts(self, node: Node) -> list[Layout]:
        """How a leaf may be stored; only the batch is cut into micro-batches."""
        layouts = leaf_layouts(node, self.mesh, self._strips(Ref(node.name)))
        if self.mesh.micro_batches == 1:
            return layouts
        cut = [layout for layout in layouts if isinstance(layout[0], Shard)]
        return cut if node.op == "input" and cut else [each for each in layouts if not isinstance(each[0], Shard)]

    def _output_layouts(self, ref: Ref, keeps_state: bool) -> list[Layout]:
        tensor = self.graph.type_of(ref)
        whole: LocalType = I if tensor.grad else R
        types = [whole] if keeps_state or not tensor.shape else [whole, *shards_of(tensor, {})]
        return [
            layout
            for layout in itertools.product(types, repeat=len(self.mesh.axes))
            if local_shape(tensor.shape, layout, self.mesh.sizes) is not None
        ]

    def table(self, ref: Ref) -> ConversionTable:
        """All reshardings of a value on this mesh."""
        tensor = self.graph.type_of(ref)
        shards = tuple(shards_of(tensor, self._strips(ref)))
        micro_batches = self._micro_batches(ref) if self.mesh.micro_batches > 1 else None
        is_param = self.graph.by_name[ref.node].op == "param"
        # What is gathered is used by all micro-batches; what they sum up is reduced once.
        is_summed_first = micro_batches is not None and tensor.grad and is_param and self.brings_once
        comes = is_param and not self.brings_once, is_param and self.sums_once
        together, is_brought = self.together(ref), self.role_of[ref.node] in self.skeleton.together
        beside = self.gathers_beside, self.brings_beside
        key = (tensor, shards, micro_batches, is_summed_first, comes, together, is_brought, beside)
        if key not in self._known.tables:
            touch = self.cost.compute_s(0.0, BUCKET_BYTES, tensor.dtype, 0) / BUCKET_BYTES
            launch = self.cost.compute_s(0.0, 0, tensor.dtype, 1)

            def price(kind: str, axis: Axis, bytes_in: Ints, is_shared: bool) -> Floats:
                parts = self.parts(ref, kind, axis)
                if axis.name != MICRO:
                    if not is_shared:
                        return self.cost.collective_s(kind, axis, bytes_in) / parts
                    is_beside = self.gathers_beside if kind == "all_gather" else self.brings_beside
                    start_s = self.cost.collective_s(kind, axis, 0.0, beside=is_beside)
                    whole_s = self.cost.collective_s(kind, axis, bytes_in * together.times, beside=is_beside)
                    return (start_s / together.parameters + (whole_s - start_s) / together.times) / parts
                # NothingFits but sums crosses from micro-batch to micro-batch; they are added up as they come, in
                # place.
                each_s = 3 * touch if kind == "all_reduce" else math.inf
                return np.asarray((axis.size - 1) / parts * each_s * np.maximum(bytes_in, 1), np.float64)

            self._known.tables[key] = ConversionTable(
                tensor,
                self.mesh,
                shards,
                price,
                touch,
                launch,
                micro_batches,
                is_summed_first,
                together.parameters,
                is_brought,
            )
        return self._known.tables[key]

    def parts(self, ref: Ref, kind: str, axis: Axis) -> int:
        """Among how many micro-batches a call is shared out that is made once for all: a parameter that comes with each
        of them is priced for one.
        """
        is_param = self.graph.by_name[ref.node].op == "param"
        is_once = kind == "all_reduce" and (axis.name == MICRO or self.sums_once)
        return self.mesh.micro_batches if is_param and is_once and not self.brings_once else 1

    def together(self, ref: Ref) -> Together:
        """Parameters that are brought in one call with this one, itself included; each has its share of the call.

        The shares are equal in what a call takes however small it is, and by bytes in the rest. Of a cluster that was
        not measured each pays for a call of its own: what a call there is stated to take is the wire's part alone.
        """
        if self.cost.cluster.calibration is None:
            return NOT_BROUGHT
        return self.skeleton.together.get(self.role_of[ref.node], NOT_BROUGHT)

    def _micro_batches(self, ref: Ref) -> frozenset[LocalType]:
        """The local types that a value has over micro-batches where it is made and where it is read."""
        ref = self.skeleton.representative(ref)
        if ref not in self._micro_batches_of:
            self._micro_batches_of[ref] = self._find_micro_batches(ref)
        return self._micro_batches_of[ref]

    def _find_micro_batches(self, ref: Ref) -> frozenset[LocalType]:
        produced = self.options_of_producer(ref)
        found = {each.results[ref.index][0] if isinstance(each, Choice) else each[0] for each in produced}
        for head, positions in self.skeleton.reads.get(ref, ()):
            if head[0] == "op":
                found.update(choice.operands[at][0] for choice in self._choices(head) for at in positions)
            elif head[0] == "output":
                position = cast(int, head[1])
                outputs = self._output_layouts(ref, keeps_state=position >= len(self.graph.outputs))
                found.update(layout[0] for layout in outputs)
        return frozenset(found)

    def describe(self, role: Role) -> str:
        """A role in the user's words."""
        if role in self.members:
            node = self.graph.by_name[self.members[role][0]]
            return f"{node.target or node.path or node.name} ({node.op})"
        return " ".join(map(str, role))

    # ---- the problem -------------------------------------------------------------------------------------------

    def holding(self, in_flight: float) -> Space:
        """The same decisions with the bytes of a typical rank, which holds what so many micro-batches saved."""
        space = copy.copy(self)
        space.in_flight = in_flight
        return space

    def at(self, pace: Pace) -> Space:
        """The same decisions at another pace."""
        space = copy.copy(self)
        space.pace = pace
        return space

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """Every decision, in the order of :attr:`options`."""
        outputs: tuple[Role, ...] = tuple(("output", position) for position in range(len(self.leaving)))
        return (*self.members, *self.skeleton.relays, *outputs)

    def vertices(
        self, limit_bytes: int | None, recompute: Recompute = NOTHING, up_to: Sequence[Recompute] = ()
    ) -> tuple[Vertex, ...]:
        """The decisions by themselves, in the order of :attr:`roles`: work and storage, without communication.

        Arguments are those of :meth:`problem`.
        """
        limit = math.inf if limit_bytes is None else limit_bytes
        key = limit_bytes, self.in_flight, self.pace, recompute, *up_to
        if self._last is None or self._last[0] != key:
            amounts = (recompute, *up_to)
            # What operators hold is the same whether parameters are gathered again or not.
            held_with = tuple(dict.fromkeys(each.without_gathering() for each in amounts))
            self._last = key, tuple(self._vertex(role, amounts, held_with, limit) for role in self.roles)
        return self._last[1]

    def problem(
        self, limit_bytes: int | None, recompute: Recompute = NOTHING, up_to: Sequence[Recompute] = ()
    ) -> Problem:
        """The solver's problem; vertex ``i`` decides role ``self.roles[i]``.

        Args:
            recompute: what is recomputed, at least.
            up_to: more of it, in growing amounts. Then the problem is one of bounds: with ``recompute``, any of
                these or anything between, an assignment takes at least as long and holds at least as much.
        """
        index = {role: i for i, role in enumerate(self.roles)}
        least, most = (self.skeleton.flows_again(each) for each in (recompute, (recompute, *up_to)[-1]))
        edges = []
        known: dict[object, tuple[Floats, Floats, Ints]] = {}  # edges that convert alike, equally often, share costs
        for flow, count in self.skeleton.flows.items():
            tail, head, ref, _ = flow
            pair, is_param = self._pair(flow), self.graph.by_name[ref.node].op == "param"
            again, kept, late = least.get(flow, 0), count, False
            if is_param and not self.brings_once:
                # Where it is gathered again, it is there only while an operator runs, and counts as that one's.
                kept -= most.get(flow, 0)
            elif is_param and self.mesh.micro_batches > 1 and self.graph.type_of(ref).grad:
                kept, late = 2 * kept, tail in self.members
            packed = self._packed(flow)
            key = (*map(id, pair), is_param, count, again, kept, late, packed)
            if key not in known:
                known[key] = self._costs(pair, is_param, count, again, kept, packed, self._late(flow) if late else None)
            edges.append(Edge(index[tail], index[head], *known[key]))
        return Problem(self.vertices(limit_bytes, recompute, up_to), tuple(edges), limit_bytes)

    def _costs(
        self,
        pair: tuple[Floats, Floats, Ints],
        is_param: bool,
        count: int,
        again: int,
        kept: int,
        packed: float,
        late: Ints | None = None,
    ) -> tuple[Floats, Floats, Ints]:
        """Seconds, seconds in the background, and bytes held, of a resharding that occurs so often.

        Args:
            again: how often it runs again in backward.
            kept: how many results are held, of a parameter.
            packed: in which part of the blocks that are packed it occurs.
            late: see :meth:`_late`.
        """
        forward, backward, gathered = pair
        if not is_param:
            work = self.pace.work(count, packed)
            there_s = _often(forward, work + self.pace.again(count, again, packed))
            return there_s + _often(backward, work), np.zeros(forward.shape), gathered
        back = self.pace.once(count, packed) * self.brought
        there = back if self.brings_once else back + self.pace.once_again(count, again, packed) * self.brought
        times = self.in_flight if self.in_flight is not None and not self.brings_once else 1
        sizes = (gathered * kept * times).astype(np.int64)
        held = self.on_average(sizes if late is None else sizes - count * late)
        there_s, back_s = _often(forward, there), _often(backward, back)
        if self.micro_batched and not self.brings_once:  # nothing is beside it
            return there_s + back_s, np.zeros(forward.shape), held
        return there_s, back_s, held

    def _late(self, flow: Flow) -> Ints:
        """Bytes of the gradient of a parameter as it is stored, where it is gathered once a step, for every pair of
        choices: it comes at the end of the step alone, since micro-batches add to that of what is gathered.
        """
        table, options = self.table(flow[2]), self.options[flow[0]]
        stored = table.held[[table.index[cast(Layout, layout)] for layout in options]]
        return np.where(self._pair(flow)[2] > 0, stored[:, None], 0)

    def _packed(self, flow: Flow) -> float:
        """In which part of the blocks that are packed a flow occurs: all or none, or its share where each is a kind."""
        packed = self.pace.packed
        return self.skeleton.flows_among(packed).get(flow, 0) / len(packed) if packed else 0.0

    def _packed_of(self, role: Role) -> float:
        """The same of an operator, or a leaf of its own."""
        packed = self.pace.packed
        is_own = packed and len(role) == 3
        return len(self.skeleton.among(packed).get(cast(int, role[1]), ())) / len(packed) if is_own else 0.0

    def on_average(self, held: Ints) -> Ints:
        """Bytes that the average rank holds of what the stages hold together, rounded down so that bounds stay ones."""
        return held // self.stages

    def _vertex(
        self, role: Role, amounts: Sequence[Recompute], held_with: Sequence[Recompute], limit_bytes: float
    ) -> Vertex:
        """One decision.

        Args:
            amounts: what runs again, at least and at most.
            held_with: amounts of recomputation; what is held is the least of what is held with each.
            limit_bytes: what a rank may hold.
        """
        options = self.options[role]
        size, times = len(options), len(self.members.get(role, (role,)))
        time, cover = np.zeros(size), np.zeros(size)
        held, transient = np.zeros(size, np.int64), np.zeros(size, np.int64)
        if role in self.members:
            node = self.graph.by_name[self.members[role][0]]
            if node.is_leaf:
                for i, layout in enumerate(options):
                    assert isinstance(layout, tuple)
                    time[i], held[i] = self.storage(node, layout)
                held, once = self.on_average(held * times), self.pace.once(times, self._packed_of(role))
                return Vertex(str(role), time * once, np.zeros(size), cover, held, transient)
            again = self.skeleton.runs_again(role, amounts[0])
            (forward, backward, inner_again, inner_backward), transient, parameters = self._works_of(node, options)
            inner = inner_again + inner_backward
            again_everywhere = all(each.levels(cast(int, role[1])) for each in amounts)
            # Parameters come only then, or are gathered again (see :meth:`problem`), or their gradients lie beside the
            # buckets that the host keeps for them (see autopar/runtime/host/gradient_buckets.py).
            is_away, on_host = self.training.tier != "device", self.cost.cluster.backend == "gloo"
            if is_away or (not self.micro_batched and (again_everywhere or on_host)):
                transient = transient + parameters
            packed, pace = self._packed_of(role), self.pace
            time = (forward + backward + inner) * (
                pace.work(times, packed) + pace.waited(self.folded.instances, role[1])
            )
            time += (forward + inner_again) * pace.again(times, again, packed)
            cover = backward * self.overlap * pace.once(times, packed)
            held = np.min([self._held(role, node, options, each) for each in held_with], axis=0)
            held = self.on_average((held * (self.in_flight or 1.0)).astype(np.int64))
            if self.stages > 1 and self.in_flight is None:  # the rank with this operator may hold less than the average
                time = np.where(transient > limit_bytes, math.inf, time)
                transient = np.zeros_like(transient)
        return Vertex(str(role), time, np.zeros(size), cover, held, transient)

    def _held(self, role: Role, node: Node, options: list[Choice] | list[Layout], recompute: Recompute) -> Ints:
        """What the members of a role keep for backward, and what one of them has recomputed while its block runs its
        backward.

        The latter is there for a while only, but beside whatever operators of the block then need for themselves.
        """
        charged = self.skeleton.charged(recompute)[role]
        held = sum(
            (self._bytes(node, options, p) * n for p, n in charged.items() if p), np.zeros(len(options), np.int64)
        )
        kind, at = role[1], role[2]
        assert isinstance(kind, int)
        assert isinstance(at, int)
        if recompute.levels(kind) and recompute.leads(kind) and (not self.micro_batched or self.in_flight is not None):
            again = [self.skeleton.again(kind, level).dropped[at] for level, _ in recompute.levels(kind)]
            held = held + np.max([self._bytes(node, options, places) for places in again], axis=0)
        return held

    def conversion_s(self, ref: Ref, source: Layout, target: Layout) -> tuple[float, float]:
        """Seconds forward and backward to convert a value."""
        table = self.table(ref)
        pair = table.index[source], table.index[target]
        return float(table.forward_s[pair]), float(table.backward_s[pair])

    def _pair(self, flow: Flow) -> tuple[Floats, Floats, Ints]:
        """Seconds forward and backward, and bytes gathered, of one resharding, for every pair of choices."""
        if flow not in self._pair_of:
            self._pair_of[flow] = self._find_pair(*flow)
        return self._pair_of[flow]

    def _find_pair(self, tail: Role, head: Role, ref: Ref, positions: tuple[int, ...]) -> tuple[Floats, Floats, Ints]:
        table = self.table(ref)
        is_param = self.graph.by_name[ref.node].op == "param"
        rows = np.array([table.index[self._layout_at_tail(tail, o, ref.index)] for o in self.options[tail]])
        columns = [np.array([table.index[self._layout_at_head(o, p)] for o in self.options[head]]) for p in positions]
        key = (id(table), rows.tobytes(), tuple(each.tobytes() for each in columns), is_param)
        if key not in self._known.pairs:
            self._known.pairs[key] = _convert(table, rows, columns, is_param)
        forward, backward, gathered = self._known.pairs[key]
        if self.mesh.micro_batches > 1 and head[0] != "output" and not self._known_before(ref):
            # A sum over micro-batches is there after the last of them: only what leaves the model can wait for that.
            summed = np.array([layout[0] == P for layout in table.layouts])
            early = summed[rows][:, None] & ~np.all([summed[each] for each in columns], axis=0)[None, :]
            forward = np.where(early, math.inf, forward)
        return forward, backward, gathered

    def _known_before(self, ref: Ref) -> bool:
        """Whether a value is one number without a gradient, such as how many tokens a loss is averaged over."""
        tensor = self.graph.type_of(ref)
        return not tensor.grad and tensor.numel == 1

    @staticmethod
    def _layout_at_tail(tail: Role, option: Choice | Layout, index: int) -> Layout:
        return option.results[index] if isinstance(option, Choice) else option

    @staticmethod
    def _layout_at_head(option: Choice | Layout, position: int) -> Layout:
        return option.operands[position] if isinstance(option, Choice) else option


def _often(seconds: Floats, times: float) -> Floats:
    """Seconds of what is done so often; what is forbidden stays so where nothing is known of how often."""
    return seconds * times if times else np.where(np.isinf(seconds), math.inf, 0.0)


def _convert(table: ConversionTable, rows: Ints, columns: list[Ints], is_param: bool) -> tuple[Floats, Floats, Ints]:
    """Seconds forward, seconds backward, and bytes gathered, of the reshardings of a value from layouts to layouts.

    Args:
        rows: the number of its layout for each choice of its source.
        columns: for every operand that reads it, the number of the layout for each choice of the reader; one layout
            is made once.
    """
    shape = (len(rows), len(columns[0]))
    forward, backward = np.zeros(shape), np.zeros(shape)
    gathered = np.zeros(shape, np.int64)
    for nth, wanted in enumerate(columns):
        pairs = np.ix_(rows, wanted)
        repeated = np.any([wanted == earlier for earlier in columns[:nth]], axis=0)
        forward += np.where(repeated, 0.0, table.forward_s[pairs])
        backward += np.where(repeated, 0.0, table.backward_s[pairs])
        if is_param:
            gathered += np.where(table.held[wanted][None, :] > table.held[rows][:, None], table.held[wanted], 0)
    return forward, backward, gathered


def rules_of(graph: Graph, folded: Folded | None = None) -> dict[str, Rule]:
    """The factor rule of every operator of the graph; those of equal blocks are found once if it is ``folded``."""
    cache: dict[object, Rule] = {}
    found: dict[str, Rule] = {}
    kinds = [[instance.block.span for instance in kind] for kind in folded.kinds] if folded else [[graph.operators]]
    for node in (node for first, *_ in kinds for node in first):
        arguments = tuple((name, static(value)) for name, value in node.args)
        repeats = tuple(node.inputs.index(ref) for ref in node.inputs)
        key = (node.op, arguments, repeats, graph.input_types(node), node.results)
        if key not in cache:
            cache[key] = rule_of(graph, node)
        found[node.name] = cache[key]
    for first, *others in kinds:
        rules = [found[name] for name in first.names]
        for other in others:
            found.update(zip(other.names, rules, strict=True))
    return found
