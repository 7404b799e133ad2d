"""A search space whose costs know their formula.

Every price is that of the cost model in closed form: a roofline for every operator, the cheapest algorithm for every
collective. What that leaves out are the tiles and waves of products and attention on GPUs, the pieces of attention with
sliding windows, what was measured (a calibration), what other software overlaps, and products in float8. All else, from
the routes of values to the chain of a pipeline, is :class:`planner.formulation.search_space.Space`'s.
"""

from __future__ import annotations

import math
from fractions import Fraction

from planner.base.symbolic_float import Formula, divided, formula_of, growing, largest, smallest
from planner.cost.kernels import attention_kernels
from planner.formulation.decisions import Together
from planner.formulation.resharding import (
    GATHERED,
    STEPS,
    Phase,
    ReshardStep,
    local_bytes,
    passes,
    together_on,
    widened,
)
from planner.formulation.resharding_tables import NOT_GATHERED
from planner.formulation.search_space import Space
from planner.formulation.strategies import Choice
from planner.ir.graph import Node, Ref
from planner.ir.layout import MICRO, Axis, Layout, local_shape
from planner.ops import OPS, attends
from planner.ops.attention import has_scores, sight
from planner.ops.attention_pieces import QueryShards, merged_bytes, query_shards
from planner.ops.memory_traffic import Passes


class ClosedSpace(Space):
    """The same decisions at sizes that know how they grow, see :meth:`planner.sizes.rescale.Scale.symbolic`."""

    def flops(self, node: Node, choice: Choice) -> Formula:
        """Forward operations of an operator on one rank, for one micro-batch."""
        return divided(formula_of(self._whole_flops(node)), self._sharing(choice))

    def heavier(self, node: Node) -> Fraction:
        """Operations of backward for each of forward: two products for one; flash attention scores once more."""
        return Fraction(5, 2) if attends(node.op) else Fraction(2)

    def collective_s(self, kind: str, axis: Axis, bytes_in: int, together: Together = NOT_GATHERED) -> float:
        if axis.name == MICRO:  # only sums cross from micro-batch to micro-batch; they are added up as they come
            return growing(0.0, 3 / self._bandwidth, (axis.size - 1) * bytes_in)
        terms = self.cost.collective_terms(kind, axis)
        least_s = min(term.latency_s for term in terms)
        share_s = least_s / max(1, together.parameters)
        return smallest(
            growing(share_s + (latency_s - least_s) / together.times, seconds_per_byte, bytes_in)
            for latency_s, seconds_per_byte in terms
        )

    def conversion_s(self, ref: Ref, source: Layout, target: Layout) -> tuple[float, float]:
        tensor, device = self.graph.type_of(ref), self.cost.slowest
        forward_s: float = 0.0
        backward_s: float = 0.0
        together, widening = self.tables.together(ref), self.widening(ref)

        def copied_s(step: ReshardStep, phase: Phase) -> float:
            sizes = [local_bytes(tensor, layout, self.mesh) for layout in (step.before, step.after)]
            axis = self.mesh.axes[step.axis]
            wide = widened(STEPS[step.rule][1], axis, widening)
            often = passes(step.rule, phase, together_on(axis, together.parameters), wide)
            each = (growing(0.0, n / self._bandwidth, size) for size, n in zip(sizes, often, strict=True) if n)
            return sum(each, device.launch_overhead_s) if any(often) else 0.0

        for step in self.table(ref).route(source, target) if source != target else ():
            forward_s += copied_s(step, "forward")
            backward_s += copied_s(step, "backward") if tensor.grad else 0.0
            axis = self.mesh.axes[step.axis]
            for call in step.collectives(tensor, self.mesh, widening):
                sharing = together if step.rule in GATHERED else NOT_GATHERED
                called_s = self.collective_s(call.kind, axis, call.bytes_in, sharing) / self.tables.parts(
                    ref, call.kind, axis
                )
                forward_s += called_s if call.phase == "forward" else 0.0
                backward_s += called_s if call.phase == "backward" else 0.0
        return forward_s, backward_s

    def _computed_s(self, node: Node, choice: Choice) -> tuple[float, float]:
        """Arithmetic or memory, whichever takes longer, with what backward runs besides."""
        device, traffic = self.cost.slowest, self.traffic(node)
        sizes = self._sizes(node, choice)

        def memory_s(often: Passes) -> float:
            pairs = zip(sizes, often, strict=True)
            return sum(growing(0.0, each / self._bandwidth, size) for size, each in pairs if each)

        flops = self._whole_flops(node) if traffic.runs else 0
        besides_s = memory_s(traffic.besides) + traffic.starts * device.launch_overhead_s
        found, shards = [], query_shards(node, zip(choice.axes, self.mesh.sizes, strict=True))
        turns = math.prod(axis.size for axis, way in zip(self.mesh.axes, choice.axes, strict=True) if way.way.in_turn)
        in_pieces = shards.is_in_pieces(node) and sight(node).window is None
        for is_backward, often in enumerate((traffic.forward, traffic.backward)):
            if in_pieces:
                found.append(self._attended_s(node, choice, shards, memory_s(often), bool(is_backward)))
                continue
            share = device.attention[is_backward] if attends(node.op) else device.matmul_efficiency
            rate = device.peak(node.results[0].dtype if node.results else "float32") * share
            heavier = float(self.heavier(node)) if is_backward else 1.0
            arithmetic_s = growing(0.0, heavier / rate, flops) / self._sharing(choice) * self.load(node, choice)
            kernels = any(often) if traffic.fused is None else traffic.fused[is_backward]
            starts_s = device.launch_overhead_s * kernels * turns
            found.append(largest((arithmetic_s, memory_s(often))) + starts_s + is_backward * besides_s)
        found = [each + between_s for each, between_s in zip(found, self.between_s(node, choice), strict=True)]
        return found[0], found[1] if any(tensor.grad for tensor in node.results) else 0.0

    def _attended_s(self, node: Node, choice: Choice, shards: QueryShards, memory_s: float, is_backward: bool) -> float:
        """Attention piece by piece: its kernels, and what merges their results or adds up gradients."""
        device, types, dtype = self.cost.slowest, self.graph.input_types(node), node.results[0].dtype
        layouts = zip(types, choice.operands, strict=True)
        shapes = [local_shape(tensor.shape, layout, self.mesh.sizes) or () for tensor, layout in layouts]
        kernels = attention_kernels(shapes, sight(node), shards)
        merged = merged_bytes(node, shapes, shards, has_scores(node, types, self.cost.cluster.on_cpu))[is_backward]
        count, rate = sum(kernels.values()), device.peak(dtype) * device.attention[is_backward]
        total_s: float = growing(3 * count * device.launch_overhead_s, 1 / self._bandwidth, merged)
        for kernel, times in kernels.items():
            pairs = kernel.heads * kernel.queries * kernel.keys
            flops = kernel.backward.flops if is_backward else kernel.flops
            arithmetic_s = growing(0.0, flops / int(pairs) / rate, pairs)
            total_s += (largest((arithmetic_s, memory_s * (1 / count))) + device.launch_overhead_s) * times
        return total_s

    def passing_s(self, size: int, dtype: str) -> float:
        return growing(0.0, 1 / self._bandwidth, size) if size else 0.0

    def _whole_flops(self, node: Node) -> int:
        row = OPS.get(node.op)
        return 0 if row is None else row.flops(node, self.graph.input_types(node), self.rules[node.name])

    def _sharing(self, choice: Choice) -> int:
        """Ranks, and micro-batches, that share an operator's work."""
        axes = zip(self.mesh.axes, choice.axes, strict=True)
        return math.prod(axis.size for axis, strategy in axes if strategy.factor)

    @property
    def _bandwidth(self) -> float:
        device = self.cost.slowest
        return device.memory_bandwidth_bytes_per_s * device.memory_efficiency
