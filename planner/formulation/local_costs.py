"""What operators and parameters cost on one rank of a mesh, for each way to run or store them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.base.symbolic_float import at_least_zero
from planner.cost.kernels import Kernel, Product, Scaling, Stream, attention_kernels, kernel_of
from planner.cost.model import CostModel
from planner.formulation.choices import Choices, Options
from planner.formulation.decisions import DecisionGraph
from planner.formulation.float8 import is_scalable, may_scale
from planner.formulation.overlap import needs_of, overlapped
from planner.formulation.resharding import ReshardingTable, local_bytes
from planner.formulation.strategies import Choice
from planner.formulation.training import Tier, Training
from planner.ir.graph import Node, Ref
from planner.ir.layout import MICRO, Axis, Layout, Mesh, P, R, Shard, local_shape
from planner.ops import OPS, attends
from planner.ops.attention import has_scores, is_causal, sight
from planner.ops.attention_pieces import UNSHARDED, QueryShards, merged_bytes, query_shards, sent_keys
from planner.ops.memory_traffic import MemoryTraffic
from planner.ops.saved_tensors import is_own, own_bytes, saved_tensors
from planner.ops.sharding_rule import AxisStrategy, Inner, Rule
from planner.ops.table import Share
from planner.solve.problem import Floats, Ints

Mask = NDArray[np.bool_]
OVERLAP = {"nccl": 0.9, "gloo": 0.0}
"""Share of work that can hide communication, where a cluster does not say: backward's that of gradients, attention's
that of keys that go around. Gloo communicates on the cores that compute."""
FOREACH, FOREACH_KERNELS = 7, 8
"""Of AdamW without a fused kernel (torch's ``_multi_tensor_adamw``: decay, lerp, two for the squares, root, two for the
denominator, step): passes over its state, 3 over the mean, 5 over the squares and 6 over the denominator for two
moments' worth, beside 4 over parameters and 2 over gradients; and kernels."""
SHAPED = ("matmul", "linear", "attention")
"""Kernels whose seconds depend on shapes, not on flops and bytes alone (:func:`planner.cost.kernels.kernel_of`)."""
WIDE_STATE_BYTES = 8
"""Bytes of state for each element from which on an update is taken to compute in float32: its two moments."""


class Known:
    """What was worked out for a mesh and holds for every folding of a graph on it.

    Attributes:
        alike: ways to run operators, by rule and by ways to run them on each axis. The lists stay, so that their ids
            may stand for them.
        tables: reshardings, by type of tensor and where it may be cut.
        pairs: reshardings between choices, by table and layouts.
        computed: seconds of an operator by itself, by rule, local shapes and what it passes over.
        seconds, works, parts, sizes: of every choice in a list, see :meth:`LocalCosts.works_of` and what it calls.
    """

    def __init__(self) -> None:
        self.alike: dict[object, Choices] = {}
        self.tables: dict[object, ReshardingTable] = {}
        self.pairs: dict[object, tuple[Floats, Floats, Ints]] = {}
        self.computed: dict[object, tuple[float, float]] = {}
        self.seconds: dict[object, Floats] = {}
        self.works: dict[object, tuple[Floats, Ints, Ints]] = {}
        self.parts: dict[int, tuple[Ints, Mask, Mask]] = {}
        self.sizes: dict[object, Ints] = {}


@dataclass(frozen=True)
class Work:
    """One operator on one rank: seconds forward and backward, by itself and in collectives of its own."""

    forward_s: float
    backward_s: float
    inner_forward_s: float
    inner_backward_s: float

    @property
    def inner_s(self) -> float:
        return self.inner_forward_s + self.inner_backward_s


class Moved(NamedTuple):
    """Bytes that an operator reads and writes (:mod:`planner.ops.memory_traffic`); ``once``: each tensor once."""

    once: int
    forward: float
    backward: float
    besides: float


def _moved(traffic: MemoryTraffic, sizes: Ints) -> list[Moved]:
    """What an operator passes over for each of several ways to lay its tensors out.

    Args:
        sizes: bytes by tensor and way.
    """
    passes = np.array([traffic.forward, traffic.backward, traffic.besides]) @ sizes
    return [Moved(once, *each) for once, each in zip(sizes.sum(axis=0).tolist(), passes.T.tolist(), strict=True)]


class LocalCosts:
    """Single operators and leaves, with their prices.

    Args:
        decision_graph: of the folded graph, with the rules of its operators.
        mesh: the mesh it is laid on; of micro-batches prices are those of one.
        cost: prices of work and communication.
        training: what the step keeps per parameter.
        like: those of another folding of the same graph, on the same mesh.
    """

    def __init__(
        self,
        decision_graph: DecisionGraph,
        mesh: Mesh,
        cost: CostModel,
        training: Training,
        like: LocalCosts | None = None,
    ):
        self.decision_graph, self.graph, self.rules = decision_graph, decision_graph.graph, decision_graph.rules
        self.mesh, self.cost, self.training = mesh, cost, training
        stated = cost.cluster.overlap
        self.overlap = OVERLAP[cost.cluster.backend] if stated is None else stated
        # Lists of choices are told apart by the ways that they are made of, so these must be the same ones.
        is_like = like is not None and like.decision_graph.blocks.ways is decision_graph.blocks.ways
        self._overlapped: dict[str, tuple[float, float]] = {}
        self._known: Known = like._known if like is not None and is_like else Known()

    def works_of(self, node: Node, options: Options) -> tuple[Floats, Ints, Ints]:
        """Seconds (as :class:`Work` has them), bytes, and bytes of parameters, of every choice of an operator.

        Operators that share their choices share their rule, and so what they cost; what is held of it, and what their
        collectives overlap, may differ.
        """
        assert isinstance(options, Choices)
        working, traffic = self.decision_graph.blocks.working(node), self.traffic(node)
        calls = [call for ways in options.strategies for strategy in ways for call in strategy.inner]
        scaling = may_scale(self.training, self.decision_graph.blocks, node)
        of_seconds = id(options), traffic, self._overlapped_s(node, needs_of(calls)), scaling
        key = (of_seconds, working)
        if key not in self._known.works:
            sizes, is_term, is_whole = self._parts_of(node, options)
            if of_seconds not in self._known.seconds:
                self._known.seconds[of_seconds] = self._seconds_of(node, options, sizes)
            transient = working.bytes_of_each(sizes, is_term, is_whole)
            parameters = sizes[list(working.parameters)].sum(axis=0)
            self._known.works[key] = self._known.seconds[of_seconds], transient, parameters
        return self._known.works[key]

    def _parts_of(self, node: Node, choices: Choices) -> tuple[Ints, Mask, Mask]:
        """Of an operator's tensors (operands, then results), for every choice: bytes on a rank, and whether it is
        partial, and replicated, on some axis.
        """
        if id(choices) not in self._known.parts:
            tensors, laid = (*self.graph.input_types(node), *node.results), (*choices.operands, *choices.results)
            sizes, is_term, is_whole = (np.zeros((len(laid), len(choices)), t) for t in (np.int64, bool, bool))
            for place, (tensor, each) in enumerate(zip(tensors, laid, strict=True)):
                parts = np.array([self._parts(layout) for layout in each.layouts], np.int64)
                sizes[place] = (tensor.size_bytes // parts)[each.numbers]
                is_term[place] = np.array([P in layout for layout in each.layouts])[each.numbers]
                is_whole[place] = np.array([R in layout for layout in each.layouts])[each.numbers]
            self._known.parts[id(choices)] = sizes, is_term, is_whole
        return self._known.parts[id(choices)]

    def sizes_of(self, node: Node, options: Options) -> Ints:
        """Bytes on a rank of each of an operator's tensors (operands, then results), for every choice."""
        assert isinstance(options, Choices)
        return self._parts_of(node, options)[0]

    def _parts(self, layout: Layout) -> int:
        """Into how many parts a tensor is cut."""
        return math.prod([size for t, size in zip(layout, self.mesh.sizes, strict=True) if isinstance(t, Shard)])

    def _bytes(self, node: Node, options: Options, places: tuple[int, ...]) -> Ints:
        """Bytes of some of an operator's tensors (operands, then results), for every choice."""
        assert isinstance(options, Choices)
        key = (id(options), places)
        if key not in self._known.sizes:
            self._known.sizes[key] = self._parts_of(node, options)[0][list(places)].sum(axis=0)
        return self._known.sizes[key]

    def bytes_of(self, node: Node, choice: Choice | Layout, places: tuple[int, ...]) -> int:
        """Bytes of some tensors of an operator on one rank: operands, then results, by place."""
        assert isinstance(choice, Choice)
        tensors = (*self.graph.input_types(node), *node.results)
        layouts = (*choice.operands, *choice.results)
        return sum(local_bytes(tensors[place], layouts[place], self.mesh) for place in places)

    def own_bytes(self, node: Node, choice: Choice | Layout) -> int:
        """Bytes of what an operator keeps for backward besides its operands and results, on one rank."""
        assert isinstance(choice, Choice)
        if not any(Ref(node.name, index) in self.graph.differentiated for index in range(len(node.results))):
            return 0
        types, on_cpu, sizes = self.graph.input_types(node), self.cost.cluster.on_cpu, self._sizes(node, choice)
        share = self.share(choice)
        kept = (saved for saved in saved_tensors(node, types, on_cpu, share) if is_own(saved))
        kept = (saved for saved in kept if saved.kind != "copy")  # operands, which are counted, stand for copies
        return sum(own_bytes(saved, node, types, sizes, on_cpu, share) for saved in kept)

    def storage(self, node: Node, layout: Layout) -> tuple[float, int]:
        """Seconds once a step for one leaf, to update and to move it, and the bytes of it that a device always holds:
        parameter, gradient unless backward uses it, and optimizer state.
        """
        tensor = node.results[0]
        held = local_bytes(tensor, layout, self.mesh)
        if node.op != "param":
            return 0.0, held
        seconds = self.update_s(node, layout) + self.moved_s(node, layout)
        if self.training.tier != "device":
            return seconds, 0
        keeps_gradient = tensor.grad and not self.training.updates_on_device
        return seconds, held * (1 + keeps_gradient) + self.state_bytes(node, layout)

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
        if tier is None and self.training.hides_transfers:
            return self._least_update_s(node, layout)
        held, state = local_bytes(tensor, layout, self.mesh), self.state_bytes(node, layout)
        if (tier or self.training.tier) == "device":
            if self.cost.cluster.software.optimizer == "foreach":
                return self.cost.compute_s(0.0, 6 * held + FOREACH * state, tensor.dtype, FOREACH_KERNELS)
            return self.cost.compute_s(0.0, 3 * held + 2 * state, tensor.dtype, kernel=Stream("optimizer"))
        is_wide = self.training.optimizer_bytes_per_element >= WIDE_STATE_BYTES
        home = self.cost.cluster.home(self.training.on_disk, "float32" if is_wide else tensor.dtype)
        passing_s = (2 * held + state) / home.read_bytes_per_s + (held + state) / home.write_bytes_per_s
        return self.cost.start_s + passing_s

    def _least_update_s(self, node: Node, layout: Layout) -> float:
        """The same where it may be that is quickest; none where the host may do so beside backward."""
        if self.training.update == "backward":
            return 0.0
        tiers: tuple[Tier, ...] = ("device", "host") if self.training.tier == "either" else (self.training.tier,)
        return min(self.update_at_least_s(node, layout, tier) for tier in tiers)

    def update_at_least_s(self, node: Node, layout: Layout, tier: Tier) -> float:
        """Seconds that a step takes at least for the update of one parameter at a home: on CPUs, where nothing moves
        beside computing, it also waits for the parameter to come and for the gradient to leave.
        """
        update_s, tensor = self.update_s(node, layout, tier), node.results[0]
        if tier == "device" or not tensor.grad or not self.cost.cluster.on_cpu:
            return update_s
        home, held = self.cost.cluster.home(self.training.on_disk), local_bytes(tensor, layout, self.mesh)
        return update_s + held / home.fetch_bytes_per_s + held / home.evict_bytes_per_s

    def moved_s(self, node: Node, layout: Layout) -> float:
        """Seconds to fetch a parameter for forward and for backward and to evict its gradient, as if nothing of it
        stayed and nothing were computed meanwhile. With micro-batches it comes and goes with each; so does the sum of
        gradients.
        """
        if self.training.tier == "device" or self.training.hides_transfers:
            return 0.0
        tensor, home, micro_batches = (
            node.results[0],
            self.cost.cluster.home(self.training.on_disk),
            self.mesh.micro_batches,
        )
        fetches, evictions = 2 * micro_batches + tensor.grad * (micro_batches - 1), tensor.grad * micro_batches
        seconds_per_byte = fetches / home.fetch_bytes_per_s + evictions / home.evict_bytes_per_s
        return local_bytes(tensor, layout, self.mesh) * seconds_per_byte

    def work(self, node: Node, choice: Choice) -> Work:
        """Seconds of one operator on one rank."""
        computed_s = self._computed_s(node, choice)
        return Work(*computed_s, *self._inner_s(node, self.rules[node.name], choice, computed_s))

    def transient_bytes(self, node: Node, choice: Choice) -> int:
        """Bytes that an operator needs at most while it runs, besides what is held."""
        working = self.decision_graph.blocks.working(node)
        return max(working.moments(self._sizes(node, choice), (*choice.operands, *choice.results)))

    def _sizes(self, node: Node, choice: Choice) -> list[int]:
        """Bytes of an operator's tensors on one rank: operands, then results."""
        tensors, layouts = (*self.graph.input_types(node), *node.results), (*choice.operands, *choice.results)
        return [local_bytes(tensor, layout, self.mesh) for tensor, layout in zip(tensors, layouts, strict=True)]

    def _computed_s(self, node: Node, choice: Choice) -> tuple[float, float]:
        """Seconds of an operator by itself, forward and backward."""
        sizes = np.array(self._sizes(node, choice), np.int64)[:, None]
        forward_s, backward_s, _, _ = self._seconds_of(node, Choices.only(choice), sizes)[:, 0].tolist()
        return forward_s, backward_s

    def scaling(self, node: Node, choice: Choice) -> Scaling | None:
        """How an operator that is run so multiplies in float8, if it does; what is streamed does not."""
        found = may_scale(self.training, self.decision_graph.blocks, node)
        if found is None or any(self.mesh.axes[axis].size > 1 for axis, _ in choice.inner):
            return None
        layouts = zip(self.graph.input_types(node), choice.operands, strict=True)
        shapes = [local_shape(tensor.shape, layout, self.mesh.sizes) or () for tensor, layout in layouts]
        return found if is_scalable(node, shapes) else None

    def traffic(self, node: Node) -> MemoryTraffic:
        """What an operator passes over in memory."""
        blocks, cluster = self.decision_graph.blocks, self.cost.cluster
        compiled = self.training.compiles(cluster, blocks.repeats(node))
        return blocks.traffic(node, on_cpu=cluster.on_cpu, compiled=compiled)

    def _seconds_of(self, node: Node, choices: Choices, held: Ints) -> Floats:
        """Seconds of one operator on one rank, as :class:`Work` has them, for each of some choices.

        Args:
            held: bytes of its tensors (operands, then results) with each.
        """
        row, rule, operands = OPS.get(node.op), self.rules[node.name], self.graph.input_types(node)
        traffic = self.traffic(node)
        seconds = np.zeros((4, len(choices)))
        if traffic.starts or traffic.runs:
            is_uneven = any(strategy.way.uneven for strategies in choices.strategies for strategy in strategies)
            loads = np.array([self.load(node, choice) for choice in choices]) if is_uneven else np.ones(len(choices))
            flops = 0.0 if row is None or row.view else row.flops(node, operands, rule)
            turns = self._turns(choices)
            busiest = flops / (self._shares(choices) * turns) * loads
            is_shaped = traffic.fused is None and row is not None and row.kernel in SHAPED
            own_s = self._shaped_s if is_shaped or not self.cost.is_closed else self._streamed_s
            seconds[:2] = own_s(node, choices, traffic, held, busiest) * turns
        talks = any(strategy.inner for strategies in choices.strategies for strategy in strategies)
        if row is not None and row.between is not None and (talks or not row.mutual):
            seconds[:2] += np.array([self.between_s(node, choice) for choice in choices]).T
        if talks:
            computed_s = ((forward_s, backward_s) for forward_s, backward_s in seconds[:2].T.tolist())
            pairs = zip(choices, computed_s, strict=True)
            seconds[2:] = np.array([self._inner_s(node, rule, choice, each_s) for choice, each_s in pairs]).T
        return seconds

    def _streamed_s(self, node: Node, choices: Choices, traffic: MemoryTraffic, held: Ints, flops: Floats) -> Floats:
        """Seconds of each choice, forward and backward, of an operator whose prices are closed forms of the bytes that
        it passes over: what :meth:`_shaped_s` finds one by one, all at once.
        """
        dtype = node.results[0].dtype if node.results else "float32"
        forward, backward, besides = np.array([traffic.forward, traffic.backward, traffic.besides]) @ held
        found, nothing = np.zeros((2, len(choices))), np.zeros(len(choices))
        if traffic.fused is not None:
            for row, (size, kernels) in enumerate(zip((forward, backward), traffic.fused, strict=True)):
                found[row] = self.cost.compute_s(nothing, size, dtype, kernels)
        elif traffic.runs:
            found[0] = self.cost.compute_s(flops, forward, dtype)
            found[1] = np.where(backward > 0.0, self.cost.compute_s(2 * flops, backward, dtype), 0.0)
        if traffic.starts:
            found[1] += self.cost.compute_s(nothing, besides, dtype, traffic.starts)
        return found

    def _shaped_s(self, node: Node, choices: Choices, traffic: MemoryTraffic, held: Ints, flops: Floats) -> Floats:
        """Seconds of each choice, forward and backward, of an operator whose kernels' prices are of local shapes."""
        rule, operands, sizes = self.rules[node.name], self.graph.input_types(node), self.mesh.sizes
        each_of = [
            laid.each([local_shape(tensor.shape, layout, sizes) or () for layout in laid.layouts])
            for tensor, laid in zip(operands, choices.operands, strict=True)
        ]
        shapes = [*zip(*each_of, strict=True)] if each_of else [()] * len(choices)
        shards = [UNSHARDED] * len(choices)
        if attends(node.op):
            shards = [query_shards(node, zip(choice.axes, sizes, strict=True)) for choice in choices]
        found = []
        wanted = may_scale(self.training, self.decision_graph.blocks, node)
        streamed = (self._product(choices, lambda strategy: bool(strategy.inner)) > 1).tolist()
        each = zip(shapes, _moved(traffic, held), flops.tolist(), shards, streamed, strict=True)
        for local, moved, most, shared, is_streamed in each:
            scaling = wanted if wanted and not is_streamed and is_scalable(node, local) else None
            key = (id(rule), local, moved, most, traffic.starts, traffic.fused, shared, scaling)
            if key not in self._known.computed:
                self._known.computed[key] = self._compute(node, traffic, local, moved, most, shared, scaling)
            found.append(self._known.computed[key])
        return np.array(found).T

    def _shares(self, choices: Choices) -> Ints:
        """How many ranks, and micro-batches, share the work with each choice."""
        return self._product(choices, lambda strategy: bool(strategy.factor))

    def _turns(self, choices: Choices) -> Ints:
        """How often a rank runs the kernel with each choice."""
        return self._product(choices, lambda strategy: strategy.way.in_turn)

    def _product(self, choices: Choices, counts: Callable[[AxisStrategy], bool]) -> Ints:
        """The ranks of all axes that count."""
        found = np.ones(len(choices), np.int64)
        for axis, strategies, taken in zip(self.mesh.axes, choices.strategies, choices.taken, strict=True):
            found *= np.array([axis.size if counts(strategy) else 1 for strategy in strategies])[taken]
        return found

    def between_s(self, node: Node, choice: Choice) -> tuple[float, float]:
        """Seconds, forward and backward, in which an operator made of several passes over what it has between these."""
        row = OPS.get(node.op)
        if row is None or row.between is None or (row.mutual and not choice.inner):  # a product is one, if not streamed
            return 0.0, 0.0
        types = self.graph.input_types(node)
        passed = row.between(node, types, self._sizes(node, choice), self.share(choice))
        backward = passed.passed_backward if any(tensor.grad for tensor in node.results) else 0
        return self.passing_s(passed.passed_forward, types[0].dtype), self.passing_s(backward, types[0].dtype)

    def passing_s(self, size: int, dtype: str) -> float:
        """Seconds to read or write so many bytes."""
        return float(self.cost.compute_s(0.0, size, dtype, 0, Stream("multiply")))

    def _inner_s(self, node: Node, rule: Rule, choice: Choice, computed_s: tuple[float, float]) -> tuple[float, float]:
        """Seconds, forward and backward, of the collectives of an operator's local form.

        Args:
            computed_s: of the operator by itself. What goes around is hidden by what is computed at each step.
        """
        if not any(strategy.inner for strategy in choice.axes):
            return 0.0, 0.0
        inner, around = {"forward": 0.0, "backward": 0.0}, dict[tuple[str, int], list[tuple[float, int]]]()
        least_s = self._overlapped_s(node, needs_of([call for _, call in choice.inner]))
        hides_s = {phase: self.overlap * seconds for phase, seconds in zip(inner, least_s, strict=True)}
        for axis, call, bytes_in, times in self.inner_calls(rule, choice, any(t.grad for t in node.results)):
            seconds = self.collective_s(call.kind, axis, bytes_in)
            if call.around:
                around.setdefault((call.phase, axis.size), []).append((seconds, times))
            else:
                # Of several axes the first is begun early: what goes on from there waits for it.
                hidden_s = hides_s.pop(call.phase, 0.0) if call.needs else 0.0
                inner[call.phase] += at_least_zero(seconds * times * self._uneven(choice) - hidden_s)
        for (phase, _), sent in around.items():
            calls = sum(call.around and call.phase == phase for _, call in choice.inner)
            first, behind = sent[: len(sent) // calls], sent[len(sent) // calls :]
            hops = sum(times for _, times in first)
            beside_s = self.overlap * computed_s[phase == "backward"] / (hops + 1)
            first_s, behind_s = first[0][0], sum(seconds * times / hops for seconds, times in behind)
            exposed_s = at_least_zero(first_s + behind_s - beside_s)
            inner[phase] += (hops - 1) * exposed_s + at_least_zero(first_s - beside_s) + behind_s
        return inner["forward"], inner["backward"]

    def _overlapped_s(self, node: Node, needs: Sequence[int]) -> tuple[float, float]:
        """Seconds, forward and backward, of products that an operator's collective overlaps, at least: shared by all
        ranks, however they are sharded.
        """
        if not needs:
            return 0.0, 0.0
        if node.name not in self._overlapped:
            forward_s = backward_s = 0.0
            for other in overlapped(self.decision_graph.blocks.block_of(node).nodes, node, needs):
                row, operands = OPS.get(other.op), self.graph.input_types(other)
                if row is not None and row.contracts:
                    flops = row.flops(other, operands, self.rules[other.name]) / self.mesh.size
                    trained = sum(tensor.grad and len(tensor.shape) > 1 for tensor in operands)  # not of a bias
                    forward_s += self.cost.compute_s(flops, 0.0, other.results[0].dtype)
                    backward_s += self.cost.compute_s(trained * flops, 0.0, other.results[0].dtype, trained)
            self._overlapped[node.name] = forward_s, backward_s
        return self._overlapped[node.name]

    def load(self, node: Node, choice: Choice) -> float:
        """What the busiest rank has of an operator's work over the average: of what is uneven as the cluster states it,
        of pairs of queries and keys the last rank.
        """
        shards = query_shards(node, zip(choice.axes, self.mesh.sizes, strict=True))
        return self._uneven(choice) * shards.load(node)

    def _uneven(self, choice: Choice) -> float:
        axes = zip(self.mesh.sizes, choice.axes, strict=True)
        return self.cost.cluster.imbalance(math.prod(size for size, strategy in axes if strategy.way.uneven))

    def share(self, choice: Choice) -> Share:
        """How much of an operator the busiest rank has."""
        ways = frozenset(strategy.sharded for strategy in choice.axes if strategy.factor)
        return Share(choice.shares(self.mesh), ways, self._uneven(choice))

    def inner_calls(self, rule: Rule, choice: Choice, differentiated: bool) -> Iterator[tuple[Axis, Inner, int, int]]:
        """The collectives of an operator's local form, on which axis, the bytes that each rank passes to them, and how
        often; those of backward only where it is differentiated.
        """
        for number, call in choice.inner:
            axis = self.mesh.axes[number]
            if axis.size > 1 and axis.name != MICRO and (call.phase == "forward" or differentiated):
                size = self.inner_bytes(rule, choice, call)
                if call.around and call.reach is not None:
                    own = rule.sizes[call.factors[-1]] // axis.size
                    for sent, times in sent_keys(axis.size, own, call.reach + 1):
                        yield axis, call, size * sent // own, times
                else:
                    yield axis, call, size, axis.size - 1 if call.around else 1

    def _compute(
        self,
        node: Node,
        traffic: MemoryTraffic,
        shapes: Sequence[tuple[int, ...]],
        moved: Moved,
        flops: float,
        shards: QueryShards,
        scaling: Scaling | None,
    ) -> tuple[float, float]:
        """Seconds of an operator forward and backward, from its operands' local shapes and the bytes it passes over."""
        dtype = node.results[0].dtype if node.results else "float32"
        forward_s = backward_s = 0.0
        if traffic.fused is not None:
            passes = zip((moved.forward, moved.backward), traffic.fused, strict=True)
            forward_s, backward_s = (self.cost.fused_s(size, dtype, kernels) for size, kernels in passes)
        elif shards.is_in_pieces(node):
            forward_s, backward_s = self._in_pieces_s(node, shapes, moved, shards)
        elif traffic.runs:
            kernel = kernel_of(node.op, shapes, causal=is_causal(node) and shards.ranks == 1)
            if scaling is not None and isinstance(kernel, Product):
                kernel = replace(kernel, scaling=scaling)
            forward_s = self.cost.compute_s(
                flops, moved.forward, dtype, _starts(kernel), kernel=kernel, known_by=moved.once
            )
            if moved.backward:
                kernel = kernel and kernel.backward
                backward_s = self.cost.compute_s(
                    2 * flops, moved.backward, dtype, _starts(kernel), kernel=kernel, known_by=2 * moved.once
                )
        if traffic.starts:
            backward_s += self.cost.compute_s(0.0, moved.besides, dtype, traffic.starts, Stream("add"))
        return forward_s, backward_s

    def _in_pieces_s(
        self, node: Node, shapes: Sequence[tuple[int, ...]], moved: Moved, shards: QueryShards
    ) -> tuple[float, float]:
        """Seconds of attention piece by piece: its kernels, and what merges their results and adds up gradients."""
        dtype, found = node.results[0].dtype, []
        kernels = attention_kernels(shapes, sight(node), shards)
        scores = has_scores(node, self.graph.input_types(node), self.cost.cluster.on_cpu)
        count, merged = sum(kernels.values()), merged_bytes(node, shapes, shards, scores)
        for is_backward, bytes_moved in enumerate((moved.forward, moved.backward)):
            seconds = self.cost.compute_s(0.0, merged[is_backward], dtype, 3 * count, Stream("add"))
            for kernel, times in kernels.items():
                runs = kernel.backward if is_backward else kernel
                seconds += times * self.cost.compute_s(0.0, bytes_moved / count, dtype, kernel=runs)
            found.append(seconds if bytes_moved else 0.0)
        return found[0], found[1]

    def inner_bytes(self, rule: Rule, choice: Choice, call: Inner) -> int:
        """Bytes that each rank passes to a collective of an operator's local form."""
        elements, shares = call.count, choice.shares(self.mesh)
        for factor in call.factors:
            elements *= rule.sizes[factor] // shares.get(factor, 1)
        return elements // call.parts // math.prod(shares.get(factor, 1) for factor in call.shared) * call.item_bytes

    def collective_s(self, kind: str, axis: Axis, bytes_in: int) -> float:
        """Seconds of a collective in every group of an axis at once."""
        return self.cost.collective_s(kind, axis, bytes_in)


def _starts(kernel: Kernel | None) -> int:
    """Kernels that an operator starts, with those that cast what it multiplies."""
    return kernel.starts if isinstance(kernel, Product) else 1
