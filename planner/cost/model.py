"""What work and communication cost, in seconds: as it was measured, or a closed form of what the cluster states.

Compute is a roofline whose product side knows tiles and waves (:mod:`planner.cost.gemm`). A collective is priced on the
levels of the network that its group crosses, in the cheapest of the library's algorithms. What a cluster's
calibration has measured goes before both.

*What is shared.* A level's bandwidth is per device, so groups that run at the same time do not share
links: with an axis of stride 8 over nodes of eight, eight groups cross the network at once, each member
through its own device's share. Conversely a group with ``m`` members in a node leaves the node through
``m`` devices' shares at once, which ring algorithms use by running rotated rings next to each other. The
bandwidth of a ring is therefore ``min over crossed levels of (bandwidth * members inside the unit below)``.

*Hops.* A chunk on its way around a ring of P ranks makes P - 1 hops; with ``u`` units of a level inside
``v`` units of the next one touched by the group, ``u - v`` of them cross that level.

Groups of one axis may lie differently over the nodes where an axis does not respect them; the price is
that of the worst.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from planner.base.errors import ClusterError
from planner.cost.cluster import ClusterSpec, Device, Level
from planner.cost.gemm import attention_s, float8_product_s, product_at_least_s, product_s
from planner.cost.kernels import FLOAT8, Attention, Kernel, Product, Stream
from planner.ir.graph import ITEM_BYTES
from planner.ir.layout import Axis

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
Floats = NDArray[np.float64]


class Term(NamedTuple):
    """One algorithm's price: ``latency_s + seconds_per_byte * bytes_in``."""

    latency_s: float
    seconds_per_byte: float


class Crossing(NamedTuple):
    """A level that a group crosses: from ``units`` touched units of the level below into ``groups`` of this one.

    ``inside`` members of the group, at least, lie in each unit below and share the way out of it.
    """

    level: Level
    depth: int
    units: int
    groups: int
    inside: int

    @property
    def hops(self) -> int:
        """Times that a chunk crosses this level on its way around a ring."""
        return self.units - self.groups

    @property
    def peers(self) -> int:
        """Units of the level below that meet in one unit of this level."""
        return math.ceil(self.units / self.groups)


@dataclass(frozen=True)
class CostModel:
    """Prices in seconds on one cluster; the only thing about cost that the search calls."""

    cluster: ClusterSpec
    _terms: dict[tuple[str, int, int], tuple[Term, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _kernels: dict[tuple[Kernel, str], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def slowest(self) -> Device:
        """The one that all others wait for."""
        return self.cluster.slowest

    @overload
    def collective_s(self, kind: str, axis: Axis, bytes_in: float, *, beside: bool = False) -> float: ...
    @overload
    def collective_s(self, kind: str, axis: Axis, bytes_in: NDArray[np.number], *, beside: bool = False) -> Floats: ...
    def collective_s(
        self, kind: str, axis: Axis, bytes_in: float | NDArray[np.number], *, beside: bool = False
    ) -> float | Floats:
        """Seconds of a collective in every group of ``axis`` at once.

        Args:
            kind: which one; ``send`` is every rank sending to its neighbour along the axis.
            axis: the mesh axis; an axis of size 1 costs nothing.
            bytes_in: size of the tensor that each rank passes in: for ``all_gather`` the local shard, for
                ``reduce_scatter`` the full tensor. A number or an array.
            beside: whether it runs beside computing, which becomes so much longer; where that was measured.
        """
        stated_s = self._stated_s(kind, axis, bytes_in)
        measured = self.cluster.calibration
        if measured is None or axis.size == 1 or axis.stride >= measured.ranks or not measured.measures(kind):
            return stated_s
        ratio = measured.ratio(kind)
        if self._is_measured(axis):
            return ratio * measured.collective_s(kind, axis.size, bytes_in, beside=beside)
        # A group that leaves what was measured costs no less than its part inside.
        inside_s = ratio * measured.collective_s(kind, max(2, measured.ranks // axis.stride), bytes_in, beside=beside)
        return np.maximum(stated_s, inside_s) if isinstance(bytes_in, np.ndarray) else max(float(stated_s), inside_s)

    def _is_measured(self, axis: Axis) -> bool:
        """Whether every group of an axis lies within the ranks that were measured together."""
        measured = self.cluster.calibration
        assert measured is not None
        reach = axis.size * axis.stride
        whole = measured.ranks == self.cluster.world_size
        return reach <= measured.ranks and (whole or measured.ranks % reach == 0)

    def _stated_s(self, kind: str, axis: Axis, bytes_in: float | NDArray[np.number]) -> float | Floats:
        """By the closed forms."""
        terms = self.collective_terms(kind, axis)
        if isinstance(bytes_in, np.ndarray):
            prices = [latency_s + seconds_per_byte * bytes_in for latency_s, seconds_per_byte in terms]
            return np.asarray(np.minimum.reduce(prices), dtype=np.float64)
        return min(latency_s + seconds_per_byte * bytes_in for latency_s, seconds_per_byte in terms)

    def collective_terms(self, kind: str, axis: Axis) -> tuple[Term, ...]:
        """The affine price of each algorithm for this collective; the library picks the cheapest."""
        key = (kind, axis.size, axis.stride)
        if key not in self._terms:
            ratio = self._correction(kind)
            terms = _terms_of(self.cluster, kind, axis)
            self._terms[key] = tuple(Term(ratio * each.latency_s, ratio * each.seconds_per_byte) for each in terms)
        return self._terms[key]

    @overload
    def compute_s(
        self,
        flops: float,
        bytes_moved: float,
        dtype: str,
        launches: int = 1,
        kernel: Kernel | None = None,
        known_by: float | None = None,
    ) -> float: ...
    @overload
    def compute_s(
        self, flops: NDArray[np.number], bytes_moved: NDArray[np.number], dtype: str, launches: int = 1
    ) -> Floats: ...
    def compute_s(
        self,
        flops: float | NDArray[np.number],
        bytes_moved: float | NDArray[np.number],
        dtype: str,
        launches: int = 1,
        kernel: Kernel | None = None,
        known_by: float | None = None,
    ) -> float | Floats:
        """Seconds of local work: the roofline of Williams et al. (2009), plus the start of each kernel.

        Args:
            flops: floating-point operations, a multiply-add counted as two.
            bytes_moved: bytes read from and written to device memory.
            dtype: of the operands; one without a stated peak computes at float32's.
            launches: kernels started.
            kernel: what runs, if that is known: a product's or an attention's own seconds take the place of those
                of ``flops``; a stream has its family's rate where that was measured. For a backward, ``bytes_moved``
                is that of all its kernels together.
            known_by: bytes by which a calibration knows an operator: its operands and results once, twice for its
                backward; left out: ``bytes_moved``.
        """
        if kernel is None and not isinstance(bytes_moved, np.ndarray) and flops == 0:
            kernel = Stream("copy")
        measured_s = (
            None
            if kernel is None
            else self._measured_s(kernel, float(bytes_moved if known_by is None else known_by), dtype, launches)
        )
        ratio = self._correction("compute")
        if measured_s is not None:
            return ratio * measured_s
        device = self.slowest
        work_s = flops / (device.peak(dtype) * device.matmul_efficiency)
        if isinstance(kernel, Product | Attention):
            work_s = self._kernel_s(kernel, dtype)
        memory_s = bytes_moved / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
        start_s = launches * device.launch_overhead_s
        if isinstance(work_s, np.ndarray) or isinstance(memory_s, np.ndarray):
            return np.asarray(ratio * (np.maximum(work_s, memory_s) + start_s), dtype=np.float64)
        return ratio * (max(work_s, memory_s) + start_s)

    @property
    def is_closed(self) -> bool:
        """Whether all prices are closed forms, corrected or not: of tables nothing is known beforehand."""
        measured = self.cluster.calibration
        return measured is None or not measured.has_tables

    def least_s(self, flops: float, bytes_moved: float, dtype: str, kernel: Kernel | None) -> float:
        """Seconds of all devices together that local work takes at least, however it is cut among them; starts aside.

        Arguments are those of :meth:`compute_s` for the whole work. Nothing is known of rates that were measured.
        """
        device = self.slowest
        if not self.is_closed:
            return 0.0
        work_s = flops / (device.peak(dtype) * device.matmul_efficiency)
        if isinstance(kernel, Product):
            work_s = product_at_least_s(device, kernel, dtype, ITEM_BYTES.get(dtype, 4))
            if self._is_in_float8(kernel, dtype):
                narrow_s = product_at_least_s(device, kernel, FLOAT8, 1)
                # A plan's own products are in it as far as their sizes allow on a rank.
                work_s = narrow_s if kernel.scaling is None else min(work_s, narrow_s)
        elif isinstance(kernel, Attention):
            work_s = kernel.flops / (device.peak(dtype) * device.attention[kernel.is_backward])
        memory_s = bytes_moved / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
        return self._correction("compute") * max(work_s, memory_s)

    @property
    def least_start_s(self) -> float:
        """Seconds that a kernel takes at least, however small it is."""
        return self._correction("compute") * self.cluster.device.launch_overhead_s if self.is_closed else 0.0

    @property
    def start_s(self) -> float:
        """Seconds to start an operator, on a device or on its host."""
        measured = self.cluster.calibration
        if measured is not None and measured.has_tables:
            return measured.launch_s
        return self._correction("compute") * self.slowest.launch_overhead_s

    def _correction(self, work: str) -> float:
        """What closed forms are multiplied by, as steps that ran took so much longer."""
        return 1.0 if self.cluster.calibration is None else self.cluster.calibration.ratio(work)

    def _is_in_float8(self, product: Product, dtype: str) -> bool:
        by_software = self.cluster.software.float8 and product.batch == 1 and ITEM_BYTES.get(dtype) == 2
        return by_software or product.scaling is not None

    def fused_s(self, bytes_moved: float, dtype: str, kernels: int) -> float:
        """Seconds of an operator's share of fused kernels: what it moves of their bytes, and those that begin with it.

        A calibration knows such a kernel as an elementwise one.
        """
        if not bytes_moved and not kernels:
            return 0.0
        return self.compute_s(0.0, bytes_moved, dtype, kernels, Stream("multiply"))

    def _measured_s(self, kernel: Kernel, bytes_moved: float, dtype: str, launches: int) -> float | None:
        """Seconds by the calibration, which holds one start in every figure; ``None`` where it says nothing."""
        measured = self.cluster.calibration
        if measured is None:
            return None
        found: float | None
        if isinstance(kernel, Product):
            found = measured.product_s(kernel, dtype)
        elif isinstance(kernel, Attention):
            found = measured.attention_s(kernel, dtype)
        else:
            curve = measured.stream(kernel)
            found = None if curve is None else curve.price(bytes_moved)
        return None if found is None else max(0.0, found + (launches - 1) * measured.launch_s)

    def _kernel_s(self, kernel: Product | Attention, dtype: str) -> float:
        """Seconds that the multiprocessors are busy, by the closed forms."""
        key = (kernel, dtype)
        if key not in self._kernels:
            device = self.slowest
            if isinstance(kernel, Product):
                seconds = float8_product_s if self._is_in_float8(kernel, dtype) else product_s
                self._kernels[key] = seconds(device, kernel, dtype, ITEM_BYTES.get(dtype, 4))
            else:
                self._kernels[key] = attention_s(device, kernel, dtype)
        return self._kernels[key]


def crossings(cluster: ClusterSpec, axis: Axis) -> tuple[Crossing, ...]:
    """The levels that groups of ``axis`` cross, innermost first; of the worst group where they differ.

    A group occupies ``reach = size * stride`` ranks from a multiple of ``reach`` on, so it is cut by units of
    ``span`` ranks only at multiples of ``gcd(reach, span)``: its smallest piece has that many ranks, and it
    touches at most ``ceil((reach - gcd) / span) + 1`` units.
    """
    reach = axis.size * axis.stride
    if reach > cluster.world_size:
        raise ClusterError(
            f"axis {axis.name!r} of {axis.size} ranks, {axis.stride} apart, does not fit the "
            f"{cluster.world_size} devices of {cluster.name!r}"
        )
    found, below, units = [], 1, axis.size
    for depth, (level, span) in enumerate(zip(cluster.levels, cluster.spans, strict=True)):
        piece = math.gcd(reach, span)
        groups = 1 if span == cluster.world_size else min(axis.size, -((piece - reach) // span) + 1)
        if groups < units:
            inside = max(1, math.gcd(reach, below) // axis.stride)
            found.append(Crossing(level, depth, units, groups, inside))
        below, units = span, groups
    return tuple(found)


def _terms_of(cluster: ClusterSpec, kind: str, axis: Axis) -> tuple[Term, ...]:
    """Prices by algorithm.

    Ring volumes and hops: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH" (2005); hops split by level, and the tree (a chain in the node, a binary tree over
    nodes, pipelined at full bandwidth both up and down): NCCL, ``src/graph/tuning.cc``.
    """
    ranks = axis.size
    if ranks == 1:
        return (Term(0.0, 0.0),)
    crossed = crossings(cluster, axis)
    start_s = cluster.device.launch_overhead_s
    ring_s = start_s + sum(c.hops * c.level.latency_s for c in crossed)
    per_byte = 1 / min(c.level.bandwidth_bytes_per_s * c.inside for c in crossed)
    share = (ranks - 1) / ranks

    match kind:
        case "all_reduce":
            ring = Term(2 * ring_s - start_s, 2 * share * per_byte)
            if cluster.backend == "gloo":  # which has the ring only
                return (ring,)
            climb_s = sum(_tree_hops(c) * c.level.latency_s for c in crossed)
            tree = Term(start_s + 2 * climb_s, 2 * per_byte)
            return ring, tree, *_in_switch(crossed, start_s)
        case "all_gather":
            return (Term(ring_s, (ranks - 1) * per_byte),)
        case "reduce_scatter":
            return (Term(ring_s, share * per_byte),)
        case "broadcast":  # pipelined along the ring
            return (Term(ring_s, per_byte),)
        case "all_to_all":
            # Messages to one node are gathered inside it first (NCCL's PXN), and what leaves a unit of a level
            # leaves through the sender's own share: the fullest link decides.
            messages_s = sum((c.peers - 1) * c.level.latency_s for c in crossed)
            fullest = max((ranks - c.inside) / ranks / c.level.bandwidth_bytes_per_s for c in crossed)
            return (Term(start_s + messages_s, fullest),)
        case "send":
            latency_s = max(c.level.latency_s for c in crossed)
            return (Term(start_s + latency_s, 1 / min(c.level.bandwidth_bytes_per_s for c in crossed)),)
        case _:
            raise ValueError(f"there is no collective called {kind!r}; there are: {', '.join(KINDS)}")


def _in_switch(crossed: tuple[Crossing, ...], start_s: float) -> tuple[Term, ...]:
    """All-reduce where the switches of the innermost level add up: up and down one hop there, a tree above.

    NCCL's NVLS within a node and NVLSTree over nodes (``src/graph/tuning.cc``); they run in chunks, so that the
    slowest of the two levels decides.
    """
    node, *above = crossed
    if node.level.in_switch_bytes_per_s is None:
        return ()
    per_byte = [1 / node.level.in_switch_bytes_per_s, *(2 / (c.level.bandwidth_bytes_per_s * c.inside) for c in above)]
    climb_s = node.level.latency_s + sum(_tree_hops(c) * c.level.latency_s for c in above)
    return (Term(start_s + 2 * climb_s, max(per_byte)),)


def _tree_hops(crossing: Crossing) -> float:
    """Hops up the tree: along a chain of devices in the innermost level, up a binary tree above it.

    The height is not rounded up, so that one node more is never a step in the price.
    """
    return crossing.peers - 1 if crossing.depth == 0 else math.log2(crossing.peers)
