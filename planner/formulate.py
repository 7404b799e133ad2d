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
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from planner.conversion import ConversionTable, local_bytes
from planner.cost import CostModel
from planner.fold import Folded, Instance
from planner.graph import Graph, Node, Ref, static
from planner.kernel import Stream, kernel_of
from planner.layout import MICRO, Axis, I, Layout, LocalType, Mesh, P, R, Shard, local_shape
from planner.ops import OPS
from planner.pace import Pace, pace_of
from planner.problem import Edge, Floats, Ints, Problem, Vertex
from planner.recompute import NOTHING, Recompute
from planner.rules import Inner, Rule
from planner.skeleton import Flow, Role, Skeleton, Together
from planner.strategy import Allow, Choice, Strips, axis_ways, choices_of, leaf_layouts, rule_of, shards_of
from planner.traffic import Traffic
from planner.training import Gathers, Tier, Training

AllowLeaf = Callable[[Node, Layout], bool]
Mask = NDArray[np.bool_]
BUCKET_BYTES = 25 * 2**20
NOT_BROUGHT = Together(0, 1.0)
"""Of what is no parameter that one operator of one block reads."""
OVERLAP = {"nccl": 0.9, "gloo": 0.0}
"""Share of backward work that can hide gradient communication, where a cluster does not say. Gloo communicates on the
cores that compute."""

WIDE_STATE_BYTES = 8
"""Bytes of state for each element from which on an update is taken to compute in float32: its two moments."""


class Prices:
    """What was worked out for a mesh and holds for every folding of a graph on it.

    Attributes:
        alike: ways to run operators, by rule and by ways to run them on each axis. The lists stay, so that their ids
            may stand for them.
        tables: conversions, by type of tensor and where it may be cut.
        pairs: conversions between choices, by table and layouts.
        computed: seconds of an operator by itself, by rule, local shapes and what it passes over.
        seconds, works, parts, sizes: of every choice in a list, see :meth:`Space._works_of` and what it calls.
    """

    def __init__(self) -> None:
        self.alike: dict[object, list[Choice]] = {}
        self.tables: dict[object, ConversionTable] = {}
        self.pairs: dict[object, tuple[Floats, Floats, Ints]] = {}
        self.computed: dict[object, tuple[float, float]] = {}
        self.seconds: dict[tuple[int, Traffic], Floats] = {}
        self.works: dict[object, tuple[Floats, Ints, Ints]] = {}
        self.parts: dict[int, tuple[Ints, Mask, Mask]] = {}
        self.sizes: dict[object, Ints] = {}


class Space:
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

    With micro-batches (:data:`planner.layout.MICRO`) work and storage are those of one. Where parameters are gathered
    and gradients reduced once a step, both are held in the layout in which they are used; where in each micro-batch,
    in the layout in which they are stored (:attr:`brings_once`).
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
        self.pace = pace or pace_of(1, mesh.micro_batches)
        self.stages = self.pace.stages
        self.in_flight: float | None = None
        self.folded, self.graph, self.mesh, self.cost, self.training = folded, folded.graph, mesh, cost, training
        self.rules = rules
        stated = cost.cluster.overlap
        self.overlap = OVERLAP[cost.cluster.backend] if stated is None else stated
        self._allow, self._allow_leaf = allow, allow_leaf
        self.skeleton = skeleton or Skeleton(folded, rules)
        self.role_of, self.members, self.leaving = self.skeleton.role_of, self.skeleton.members, folded.graph.leaving
        self._cuts = self.skeleton.cuts(mesh.sizes)
        # Lists of choices are told apart by the ways that they are made of, so these must be the same ones.
        is_like = like is not None and like.skeleton.ways is self.skeleton.ways
        self._prices: Prices = like._prices if like is not None and is_like else Prices()
        self._pair_of: dict[Flow, tuple[Floats, Floats, Ints]] = {}
        self._choices_of: dict[Role, list[Choice]] = {}
        self._turns_of: dict[Ref, frozenset[LocalType]] = {}
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
        return not self.in_turns and self.training.tier == "device"

    @property
    def in_turns(self) -> bool:
        """Whether a step is more than one forward and one backward."""
        return self.stages > 1 or self.mesh.micro_batches > 1

    @property
    def brings_once(self) -> bool:
        """Whether parameters are gathered, and gradients reduced, once for all of a step in turns: not where that was
        decided otherwise, nor where they come from their home for each forward and backward.
        """
        return self.in_turns and self.training.tier == "device" and self.training.gathers == "once"

    @property
    def sums_once(self) -> bool:
        """Whether gradients of parameters that come with each micro-batch are summed once a step all the same over
        ranks that store the same: not where they leave the device in between.
        """
        return self.in_turns and self.training.tier == "device" and not self.brings_once

    @property
    def gathers(self) -> Gathers:
        """When that is done in a step in turns."""
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
            if key not in self._prices.alike:
                self._prices.alike[key] = choices_of(self.graph, node, self.mesh, ways)
            self._choices_of[role] = self._prices.alike[key]
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
        """All conversions of a value on this mesh."""
        tensor = self.graph.type_of(ref)
        shards = tuple(shards_of(tensor, self._strips(ref)))
        turns = self._turns(ref) if self.mesh.micro_batches > 1 else None
        is_param = self.graph.by_name[ref.node].op == "param"
        # What is gathered is used by all micro-batches; what they sum up is reduced once.
        is_summed_first = turns is not None and tensor.grad and is_param and self.brings_once
        comes = is_param and not self.brings_once, is_param and self.sums_once
        together, is_brought = self.together(ref), self.role_of[ref.node] in self.skeleton.together
        beside = self.brings_beside
        key = (tensor, shards, turns, is_summed_first, comes, together, is_brought, beside)
        if key not in self._prices.tables:
            touch = self.cost.compute_s(0.0, BUCKET_BYTES, tensor.dtype, 0) / BUCKET_BYTES
            launch = self.cost.compute_s(0.0, 0, tensor.dtype, 1)

            def price(kind: str, axis: Axis, bytes_in: Ints, is_shared: bool) -> Floats:
                parts = self.parts(ref, kind, axis)
                if axis.name != MICRO:
                    if not is_shared:
                        return self.cost.collective_s(kind, axis, bytes_in) / parts
                    start_s = self.cost.collective_s(kind, axis, 0.0, beside=beside)
                    whole_s = self.cost.collective_s(kind, axis, bytes_in * together.times, beside=beside)
                    return (start_s / together.parameters + (whole_s - start_s) / together.times) / parts
                # Nothing but sums crosses from micro-batch to micro-batch; they are added up as they come, in place.
                each_s = 3 * touch if kind == "all_reduce" else math.inf
                return np.asarray((axis.size - 1) / parts * each_s * np.maximum(bytes_in, 1), np.float64)

            self._prices.tables[key] = ConversionTable(
                tensor, self.mesh, shards, price, touch, launch, turns, is_summed_first, together.parameters, is_brought
            )
        return self._prices.tables[key]

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

    def _turns(self, ref: Ref) -> frozenset[LocalType]:
        """The local types that a value has over micro-batches where it is made and where it is read."""
        ref = self.skeleton.representative(ref)
        if ref not in self._turns_of:
            self._turns_of[ref] = self._find_turns(ref)
        return self._turns_of[ref]

    def _find_turns(self, ref: Ref) -> frozenset[LocalType]:
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
        space.in_flight, space._last = in_flight, None
        return space

    def at(self, pace: Pace) -> Space:
        """The same decisions at another pace."""
        space = copy.copy(self)
        space.pace, space._last = pace, None
        return space

    @cached_property
    def _kinds(self) -> list[int]:
        return [instance.kind for instance in self.folded.instances]

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
        key, limit = (limit_bytes, recompute, *up_to), math.inf if limit_bytes is None else limit_bytes
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
            recompute: what is made again, at least.
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
            again, kept = least.get(flow, 0), count
            if is_param and not self.brings_once:
                # Where it is gathered again, it is there only while an operator runs, and counts as that one's.
                kept -= most.get(flow, 0)
            elif is_param and self.mesh.micro_batches > 1 and self.graph.type_of(ref).grad:
                kept *= 2
            packed = self._packed(flow)
            key = (*map(id, pair), is_param, count, again, kept, packed)
            if key not in known:
                known[key] = self._costs(pair, is_param, count, again, kept, packed)
            edges.append(Edge(index[tail], index[head], *known[key]))
        return Problem(self.vertices(limit_bytes, recompute, up_to), tuple(edges), limit_bytes)

    def _costs(
        self, pair: tuple[Floats, Floats, Ints], is_param: bool, count: int, again: int, kept: int, packed: float
    ) -> tuple[Floats, Floats, Ints]:
        """Seconds, seconds in the background, and bytes held, of a conversion that occurs so often.

        Args:
            again: how often it runs again in backward.
            kept: how many results are held, of a parameter.
            packed: in which part of the blocks that are packed it occurs.
        """
        forward, backward, gathered = pair
        if not is_param:
            work = self.pace.work(count, packed)
            there_s = _often(forward, work + self.pace.again(count, again, packed))
            return there_s + _often(backward, work), np.zeros(forward.shape), gathered
        back = self.pace.once(count, packed) * self.brought
        there = back if self.brings_once else back + self.pace.once_again(count, again, packed) * self.brought
        times = self.in_flight if self.in_flight is not None and not self.brings_once else 1
        held = self.on_average((gathered * kept * times).astype(np.int64))
        there_s, back_s = _often(forward, there), _often(backward, back)
        if self.in_turns and not self.brings_once:  # nothing is beside it
            return there_s + back_s, np.zeros(forward.shape), held
        return there_s, back_s, held

    def _packed(self, flow: Flow) -> float:
        """In which part of the blocks that are packed a flow occurs: all or none, or its share where each is a kind."""
        packed = self.pace.packed
        if packed is None:
            return 0.0
        return self.skeleton.flows_among(packed.instances).get(flow, 0) / len(packed.instances)

    def _packed_of(self, role: Role) -> float:
        """The same of an operator, or a leaf of its own."""
        packed = self.pace.packed
        if packed is None or len(role) == 2:
            return 0.0
        return len(self.skeleton.among(packed.instances).get(cast(int, role[1]), ())) / len(packed.instances)

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
            # buckets that the host keeps for them (see autopar/runtime/buckets.py).
            is_away, on_host = self.training.tier != "device", self.cost.cluster.backend == "gloo"
            if is_away or (not self.in_turns and (again_everywhere or on_host)):
                transient = transient + parameters
            packed, pace = self._packed_of(role), self.pace
            time = (forward + backward + inner) * (pace.work(times, packed) + pace.waited(self._kinds, role[1]))
            time += (forward + inner_again) * pace.again(times, again, packed)
            cover = backward * self.overlap * pace.once(times, packed)
            held = np.min([self._held(role, node, options, each) for each in held_with], axis=0)
            held = self.on_average((held * (self.in_flight or 1.0)).astype(np.int64))
            if self.stages > 1 and self.in_flight is None:  # the rank with this operator may hold less than the average
                time = np.where(transient > limit_bytes, math.inf, time)
                transient = np.zeros_like(transient)
        return Vertex(str(role), time, np.zeros(size), cover, held, transient)

    def _works_of(self, node: Node, options: list[Choice] | list[Layout]) -> tuple[Floats, Ints, Ints]:
        """Seconds (as :class:`Work` has them), bytes, and bytes of parameters, of every choice of an operator.

        Operators that share their choices share their rule, and so what they cost; what is held of it may differ.
        """
        working, traffic = self.skeleton.working(node), self.traffic(node)
        key = (id(options), working, traffic)
        if key not in self._prices.works:
            sizes, is_term, is_whole = self._parts_of(node, options)
            if (id(options), traffic) not in self._prices.seconds:
                choices = [option for option in options if isinstance(option, Choice)]
                seconds = self._seconds_of(node, choices, _moved(traffic, sizes))
                self._prices.seconds[id(options), traffic] = np.array(seconds).T
            transient = working.bytes_of_each(sizes, is_term, is_whole)
            parameters = sizes[list(working.parameters)].sum(axis=0)
            self._prices.works[key] = self._prices.seconds[id(options), traffic], transient, parameters
        return self._prices.works[key]

    def _parts_of(self, node: Node, options: list[Choice] | list[Layout]) -> tuple[Ints, Mask, Mask]:
        """Of an operator's tensors (operands, then results), for every choice: bytes on a rank, and whether it is
        partial, and replicated, on some axis.
        """
        if id(options) not in self._prices.parts:
            tensors = (*self.graph.input_types(node), *node.results)
            choices = [option for option in options if isinstance(option, Choice)]
            layouts = [
                [(*choice.operands, *choice.results)[place] for choice in choices] for place in range(len(tensors))
            ]
            cut = [[[isinstance(t, Shard) for t in layout] for layout in each] for each in layouts]
            parts = np.where(np.array(cut, bool), np.array(self.mesh.sizes), 1).prod(axis=-1)
            is_term, is_whole = (np.array([[t in layout for layout in each] for each in layouts]) for t in (P, R))
            whole = np.array([tensor.size_bytes for tensor in tensors], np.int64)
            self._prices.parts[id(options)] = whole[:, None] // parts, is_term, is_whole
        return self._prices.parts[id(options)]

    def _held(self, role: Role, node: Node, options: list[Choice] | list[Layout], recompute: Recompute) -> Ints:
        """What the members of a role keep for backward, and what one of them has made again while its block is undone.

        The latter is there for a while only, but beside whatever operators of the block then need for themselves.
        """
        charged = self.skeleton.charged(recompute)[role]
        held = sum(
            (self._bytes(node, options, p) * n for p, n in charged.items() if p), np.zeros(len(options), np.int64)
        )
        kind, at = role[1], role[2]
        assert isinstance(kind, int)
        assert isinstance(at, int)
        if recompute.levels(kind) and recompute.leads(kind) and (not self.in_turns or self.in_flight is not None):
            again = [self.skeleton.again(kind, level).dropped[at] for level, _ in recompute.levels(kind)]
            held = held + np.max([self._bytes(node, options, places) for places in again], axis=0)
        return held

    def _bytes(self, node: Node, options: list[Choice] | list[Layout], places: tuple[int, ...]) -> Ints:
        """Bytes of some of an operator's tensors (operands, then results), for every choice."""
        key = (id(options), places)
        if key not in self._prices.sizes:
            self._prices.sizes[key] = self._parts_of(node, options)[0][list(places)].sum(axis=0)
        return self._prices.sizes[key]

    def bytes_of(self, node: Node, choice: Choice | Layout, places: tuple[int, ...]) -> int:
        """Bytes of some tensors of an operator on one rank: operands, then results, by place."""
        assert isinstance(choice, Choice)
        tensors = (*self.graph.input_types(node), *node.results)
        layouts = (*choice.operands, *choice.results)
        return sum(local_bytes(tensors[place], layouts[place], self.mesh) for place in places)

    def storage(self, node: Node, layout: Layout) -> tuple[float, int]:
        """Seconds once a step for one leaf, to update and to move it, and the bytes of it that a device always holds:
        parameter, gradient and optimizer state.
        """
        tensor = node.results[0]
        held = local_bytes(tensor, layout, self.mesh)
        if node.op != "param":
            return 0.0, held
        seconds = self.update_s(node, layout) + self.moved_s(node, layout)
        if self.training.tier != "device":
            return seconds, 0
        return seconds, held * (1 + tensor.grad) + self.state_bytes(node, layout)

    def state_bytes(self, node: Node, layout: Layout) -> int:
        """Bytes of optimizer state for one parameter."""
        tensor = node.results[0]
        if not tensor.grad:
            return 0
        return local_bytes(tensor, layout, self.mesh) // tensor.item_bytes * self.training.optimizer_bytes_per_element

    def update_s(self, node: Node, layout: Layout, tier: Tier | None = None) -> float:
        """Seconds of the optimizer for one parameter: it reads parameter, gradient and state, and writes parameter and
        state. So it does with masters, which are state: it looks whether the parameter is still the rounding of one.

        Args:
            tier: where it is at home; left out: where this step keeps all.
        """
        tensor = node.results[0]
        if not tensor.grad:
            return 0.0
        held, state = local_bytes(tensor, layout, self.mesh), self.state_bytes(node, layout)
        if (tier or self.training.tier) == "device":
            return self.cost.compute_s(0.0, 3 * held + 2 * state, tensor.dtype, kernel=Stream("optimizer"))
        is_wide = self.training.optimizer_bytes_per_element >= WIDE_STATE_BYTES
        home = self.cost.cluster.home(self.training.on_disk, "float32" if is_wide else tensor.dtype)
        return (2 * held + state) / home.read_bytes_per_s + (held + state) / home.write_bytes_per_s

    def moved_s(self, node: Node, layout: Layout) -> float:
        """Seconds to fetch a parameter for forward and for backward and to evict its gradient, as if nothing of it
        stayed and nothing were computed meanwhile. In turns it comes and goes with each; so does the sum of gradients.
        """
        if self.training.tier == "device":
            return 0.0
        tensor, home, turns = node.results[0], self.cost.cluster.home(self.training.on_disk), self.mesh.micro_batches
        fetches, evictions = 2 * turns + tensor.grad * (turns - 1), tensor.grad * turns
        seconds_per_byte = fetches / home.fetch_bytes_per_s + evictions / home.evict_bytes_per_s
        return local_bytes(tensor, layout, self.mesh) * seconds_per_byte

    def work(self, node: Node, choice: Choice) -> Work:
        """Seconds and bytes of one operator on one rank."""
        inner_s = self._inner_s(node, self.rules[node.name], choice)
        return Work(*self._computed_s(node, choice), *inner_s, max(self.transients(node, choice)))

    def transients(self, node: Node, choice: Choice) -> tuple[int, ...]:
        """Bytes that an operator needs besides what is held, at each moment while it runs that may be the fullest."""
        return self.skeleton.working(node).moments(self._sizes(node, choice), (*choice.operands, *choice.results))

    def _sizes(self, node: Node, choice: Choice) -> list[int]:
        """Bytes of an operator's tensors on one rank: operands, then results."""
        tensors, layouts = (*self.graph.input_types(node), *node.results), (*choice.operands, *choice.results)
        return [local_bytes(tensor, layout, self.mesh) for tensor, layout in zip(tensors, layouts, strict=True)]

    def _computed_s(self, node: Node, choice: Choice) -> tuple[float, float]:
        """Seconds of an operator by itself, forward and backward."""
        moved = _moved(self.traffic(node), np.array(self._sizes(node, choice), np.int64)[:, None])
        ((forward_s, backward_s, _, _),) = self._seconds_of(node, [choice], moved)
        return forward_s, backward_s

    def collective_s(self, kind: str, axis: Axis, bytes_in: int) -> float:
        """Seconds of a collective in every group of an axis at once."""
        return self.cost.collective_s(kind, axis, bytes_in)

    def conversion_s(self, ref: Ref, source: Layout, target: Layout) -> tuple[float, float]:
        """Seconds forward and backward to convert a value."""
        table = self.table(ref)
        pair = table.index[source], table.index[target]
        return float(table.forward_s[pair]), float(table.backward_s[pair])

    def traffic(self, node: Node) -> Traffic:
        """What an operator passes over in memory."""
        return self.skeleton.traffic(node, on_host=self.cost.cluster.backend == "gloo")

    def _seconds_of(
        self, node: Node, choices: Sequence[Choice], moved: Sequence[Moved]
    ) -> list[tuple[float, float, float, float]]:
        """Seconds of one operator on one rank, as :class:`Work` has them, for each of some choices.

        Args:
            moved: what it passes over with each.
        """
        row, rule, operands = OPS.get(node.op), self.rules[node.name], self.graph.input_types(node)
        traffic, sizes = self.traffic(node), self.mesh.sizes
        flops = 0.0 if row is None or row.view else row.flops(node, operands, rule)
        local: dict[tuple[int, int], tuple[int, ...]] = {}
        found = []
        for choice, bytes_moved in zip(choices, moved, strict=True):
            computed_s = 0.0, 0.0
            if traffic.starts or traffic.runs:
                shapes = []
                for place, layout in enumerate(choice.operands):
                    if (place, id(layout)) not in local:
                        local[place, id(layout)] = local_shape(operands[place].shape, layout, sizes) or ()
                    shapes.append(local[place, id(layout)])
                share = math.prod([size for size, strategy in zip(sizes, choice.axes, strict=True) if strategy.factor])
                key = (id(rule), tuple(shapes), bytes_moved, share, traffic.starts)
                if key not in self._prices.computed:
                    self._prices.computed[key] = self._compute(node, traffic, shapes, bytes_moved, flops / share)
                computed_s = self._prices.computed[key]
            found.append((*computed_s, *self._inner_s(node, rule, choice)))
        return found

    def _inner_s(self, node: Node, rule: Rule, choice: Choice) -> tuple[float, float]:
        """Seconds, forward and backward, of the collectives of an operator's local form."""
        if not any(strategy.inner for strategy in choice.axes):
            return 0.0, 0.0
        inner = {"forward": 0.0, "backward": 0.0}
        for axis, call in choice.inner:
            if self.mesh.axes[axis].name != MICRO and (call.phase == "forward" or any(t.grad for t in node.results)):
                bytes_in = self.inner_bytes(rule, choice, call)
                inner[call.phase] += self.collective_s(call.kind, self.mesh.axes[axis], bytes_in)
        return inner["forward"], inner["backward"]

    def saved_bytes(self, node: Node, choice: Choice, recompute: Recompute = NOTHING) -> int:
        """Bytes that an operator pays for as kept for backward."""
        return self.bytes_of(node, choice, self.skeleton.charge(node, recompute))

    def _compute(
        self, node: Node, traffic: Traffic, shapes: Sequence[tuple[int, ...]], moved: Moved, flops: float
    ) -> tuple[float, float]:
        """Seconds of an operator forward and backward, from its operands' local shapes and the bytes it passes over."""
        dtype = node.results[0].dtype if node.results else "float32"
        forward_s = backward_s = 0.0
        if traffic.runs:
            kernel = kernel_of(node.op, shapes, causal=dict(node.args).get("is_causal") is True)
            forward_s = self.cost.compute_s(flops, moved.forward, dtype, kernel=kernel, known_by=moved.once)
            if moved.backward:
                kernel = kernel and kernel.backward
                backward_s = self.cost.compute_s(
                    2 * flops, moved.backward, dtype, kernel=kernel, known_by=2 * moved.once
                )
        if traffic.starts:
            backward_s += self.cost.compute_s(0.0, moved.besides, dtype, traffic.starts, Stream("add"))
        return forward_s, backward_s

    def inner_bytes(self, rule: Rule, choice: Choice, call: Inner) -> int:
        """Bytes that each rank passes to a collective of an operator's local form."""
        elements = call.count
        for factor in call.factors:
            cut = math.prod(a.size for a, s in zip(self.mesh.axes, choice.axes, strict=True) if s.factor == factor)
            elements *= rule.sizes[factor] // cut
        return elements * call.item_bytes

    def _pair(self, flow: Flow) -> tuple[Floats, Floats, Ints]:
        """Seconds forward and backward, and bytes gathered, of one conversion, for every pair of choices."""
        if flow not in self._pair_of:
            self._pair_of[flow] = self._find_pair(*flow)
        return self._pair_of[flow]

    def _find_pair(self, tail: Role, head: Role, ref: Ref, positions: tuple[int, ...]) -> tuple[Floats, Floats, Ints]:
        table = self.table(ref)
        is_param = self.graph.by_name[ref.node].op == "param"
        rows = np.array([table.index[self._layout_at_tail(tail, o, ref.index)] for o in self.options[tail]])
        columns = [np.array([table.index[self._layout_at_head(o, p)] for o in self.options[head]]) for p in positions]
        key = (id(table), rows.tobytes(), tuple(each.tobytes() for each in columns), is_param)
        if key not in self._prices.pairs:
            self._prices.pairs[key] = _convert(table, rows, columns, is_param)
        forward, backward, gathered = self._prices.pairs[key]
        if self.mesh.micro_batches > 1 and head[0] != "output" and not self._known_before(ref):
            # A sum over turns is there after the last of them: only what leaves the model can wait for that.
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


class Moved(NamedTuple):
    """Bytes that an operator passes over, see :mod:`planner.traffic`; ``once``: its operands and results once."""

    once: int
    forward: float
    backward: float
    besides: float


def _moved(traffic: Traffic, sizes: Ints) -> list[Moved]:
    """What an operator passes over for each of several ways to lay its tensors out.

    Args:
        sizes: bytes by tensor and way.
    """
    passes = np.array([traffic.forward, traffic.backward, traffic.besides]) @ sizes
    return [Moved(once, *each) for once, each in zip(sizes.sum(axis=0).tolist(), passes.T.tolist(), strict=True)]


def _convert(table: ConversionTable, rows: Ints, columns: list[Ints], is_param: bool) -> tuple[Floats, Floats, Ints]:
    """Seconds forward, seconds backward, and bytes gathered, of the conversions of a value from layouts to layouts.

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


@dataclass(frozen=True)
class Work:
    """One operator on one rank: seconds forward and backward, by itself and in collectives of its own.

    Attributes:
        transient_bytes: what it needs while it runs besides what is held: see :mod:`planner.working`.
    """

    forward_s: float
    backward_s: float
    inner_forward_s: float
    inner_backward_s: float
    transient_bytes: int

    @property
    def inner_s(self) -> float:
        return self.inner_forward_s + self.inner_backward_s


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
