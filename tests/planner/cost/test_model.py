"""Prices against numbers computed by hand, and their shape: growing in bytes and ranks, without cliffs."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from planner.base.errors import ClusterError
from planner.cost.cluster import ClusterSpec
from planner.cost.kernels import Attention, Product, Scaling, Stream, kernel_of
from planner.cost.model import KINDS, CostModel, crossings
from planner.cost.software import Software
from planner.formulation.constraints.mesh_candidates import candidate_meshes
from planner.ir.layout import Axis, Mesh


def model(
    *levels: tuple[int, float, float],
    backend: str = "nccl",
    launch_overhead_s: float = 0.0,
    matmul: float = 1.0,
    in_switch: float | None = None,
) -> CostModel:
    """A cluster of levels (size, latency in s, bandwidth in bytes/s), innermost first; 100 TFLOP/s, 1 TB/s.

    ``in_switch`` is the rate, in bytes/s, at which the innermost level's switches add up.
    """
    device = {
        "kind": "test",
        "memory_bytes": "1 GiB",
        "peak_flops_per_s": {"float32": 1e13, "bfloat16": 1e14},
        "memory_bandwidth_bytes_per_s": 1e12,
        "launch_overhead_s": launch_overhead_s,
        "matmul_efficiency": matmul,
        "memory_efficiency": 0.5,
    }
    named = [
        {"name": f"level{i}", "size": size, "latency_s": latency_s, "bandwidth_bytes_per_s": bandwidth}
        for i, (size, latency_s, bandwidth) in enumerate(levels)
    ]
    if in_switch is not None:
        named[0]["in_switch_bytes_per_s"] = in_switch
    return CostModel(ClusterSpec.from_dict({"name": "test", "device": device, "levels": named, "backend": backend}))


def axis(size: int, stride: int = 1) -> Axis:
    return Axis("axis", size, stride)


GB = 10**9
SLACK = 1 + 1e-9
NODE = model((4, 2e-6, 100e9), launch_overhead_s=5e-6)
TWO_NODES = model((4, 1e-6, 100e9), (2, 10e-6, 20e9))


@pytest.mark.parametrize(
    "kind, expected_s",
    [
        ("all_reduce", 5e-6 + 2 * 3 * 2e-6 + 2 * 3 / 4 * 0.01),  # 2 (P-1)/P * 1 GB at 100 GB/s
        ("reduce_scatter", 5e-6 + 3 * 2e-6 + 3 / 4 * 0.01),
        ("all_gather", 5e-6 + 3 * 2e-6 + 3 * 0.01),  # the shard is 1 GB: three more arrive
        ("all_to_all", 5e-6 + 3 * 2e-6 + 3 / 4 * 0.01),
        ("broadcast", 5e-6 + 3 * 2e-6 + 0.01),
        ("send", 5e-6 + 2e-6 + 0.01),
    ],
)
def test_one_node_by_hand(kind: str, expected_s: float) -> None:
    assert NODE.collective_s(kind, axis(4), GB) == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize(
    "kind, group, expected_s",
    [
        # All eight devices: rings leave a node through four devices' links, 80 GB/s; 6 hops inside, 1 between.
        ("reduce_scatter", axis(8), 6e-6 + 10e-6 + 7 / 8 / 80),
        ("all_gather", axis(8), 6e-6 + 10e-6 + 7 / 80),
        ("all_reduce", axis(8), 2 * (6e-6 + 10e-6) + 2 * 7 / 8 / 80),
        # Half of what a device sends leaves the node, through its own link.
        ("all_to_all", axis(8), 3e-6 + 10e-6 + 4 / 8 / 20),
        ("send", axis(8), 10e-6 + 1 / 20),
        # One device of each node: its own link, though four groups do the same at once.
        ("reduce_scatter", axis(2, 4), 10e-6 + 1 / 2 / 20),
        ("all_to_all", axis(2, 4), 10e-6 + 1 / 2 / 20),
        # Every other device: two members leave together.
        ("reduce_scatter", axis(4, 2), 2 * 1e-6 + 10e-6 + 3 / 4 / 40),
        # Within a node, with and without gaps.
        ("reduce_scatter", axis(2, 2), 1e-6 + 1 / 2 / 100),
        ("reduce_scatter", axis(4), 3e-6 + 3 / 4 / 100),
    ],
)
def test_two_nodes_by_hand(kind: str, group: Axis, expected_s: float) -> None:
    assert TWO_NODES.collective_s(kind, group, GB) == pytest.approx(expected_s, rel=1e-12)


def test_a_small_all_reduce_climbs_a_tree() -> None:
    many = model((4, 1e-6, 100e9), (64, 10e-6, 20e9))
    # Up and down: a chain of 3 in the node, then log2(64) = 6 levels over the nodes.
    assert many.collective_s("all_reduce", axis(256), 0) == pytest.approx(2 * (3e-6 + 6 * 10e-6))
    # A large one takes the ring.
    assert many.collective_s("all_reduce", axis(256), 100 * GB) < 2 * 100 / 80


def test_gloo_has_no_tree() -> None:
    hosts = model((64, 10e-6, 1e9), backend="gloo")
    assert hosts.collective_s("all_reduce", axis(64), 0) == pytest.approx(2 * 63 * 10e-6)


def test_switches_that_add_up() -> None:
    node = model((8, 1e-6, 100e9), in_switch=80e9)
    # One hop up and one down; the whole tensor at 80 GB/s, where rings move 14/8 of it at 100 GB/s.
    assert node.collective_s("all_reduce", axis(8), GB) == pytest.approx(2e-6 + 1 / 80)
    assert node.collective_s("all_reduce", axis(2), GB) == pytest.approx(2e-6 + 1 / 100)  # rings are faster for two
    # Over nodes the tree above decides: up and down at 8 x 10 GB/s.
    nodes = model((8, 1e-6, 100e9), (4, 10e-6, 10e9), in_switch=80e9)
    assert nodes.collective_s("all_reduce", axis(32), 10 * GB) == pytest.approx(2 * (31 / 32) * 10 / 80, rel=1e-2)
    assert nodes.collective_s("all_reduce", axis(32), 0) == pytest.approx(2 * (1e-6 + 2 * 10e-6))
    # Groups that do not leave by the node's switches do not use them.
    assert nodes.collective_s("all_reduce", axis(4, 8), GB) == pytest.approx(6 * 10e-6 + 2 * 3 / 4 / 10)


def test_groups_that_share_a_link_share_its_bandwidth() -> None:
    """Four groups over the same nodes at once cross with a quarter of what one group of all has."""
    one_s = TWO_NODES.collective_s("reduce_scatter", axis(8), GB)
    each_s = TWO_NODES.collective_s("reduce_scatter", axis(2, 4), GB)
    assert one_s == pytest.approx(7 / 8 / (4 * 20), rel=1e-2)
    assert each_s == pytest.approx(1 / 2 / 20, rel=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_costs_nothing(kind: str) -> None:
    assert TWO_NODES.collective_s(kind, axis(1), GB) == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_are_priced_entry_by_entry(kind: str) -> None:
    sizes = np.array([0, 1000, 10**6, 10**9])
    prices = TWO_NODES.collective_s(kind, axis(8), sizes)
    assert prices.dtype == np.float64
    assert prices.tolist() == [TWO_NODES.collective_s(kind, axis(8), int(size)) for size in sizes]


def test_a_group_that_straddles_nodes_pays_for_its_smallest_part() -> None:
    eights = model((8, 1e-6, 100e9), (3, 10e-6, 20e9))
    # Twelve consecutive ranks: eight in one node and four in another, which leave through four links.
    (inside, between) = crossings(eights.cluster, axis(12))
    assert (inside.units, inside.groups, inside.inside) == (12, 2, 1)
    assert (between.units, between.groups, between.inside) == (2, 1, 4)
    # Three consecutive ranks: ranks 6, 7 | 8 are the worst group.
    (inside, between) = crossings(eights.cluster, axis(3))
    assert (inside.groups, between.units, between.inside) == (2, 2, 1)


def test_an_axis_larger_than_the_cluster() -> None:
    with pytest.raises(ClusterError, match="does not fit the 8 devices"):
        TWO_NODES.collective_s("send", axis(4, 4), 1)


def test_roofline_by_hand() -> None:
    device = model((1, 0, 1e9), launch_overhead_s=1e-6, matmul=0.8)
    assert device.compute_s(8e13, 1, "bfloat16") == pytest.approx(1 + 1e-6)  # 80 of 100 TFLOP/s
    assert device.compute_s(8e13, 1, "float32") == pytest.approx(10 + 1e-6)
    assert device.compute_s(8e13, 1, "float16") == device.compute_s(8e13, 1, "float32")  # none stated
    assert device.compute_s(1, 5e11, "bfloat16", launches=3) == pytest.approx(1 + 3e-6)  # half of 1 TB/s
    assert device.compute_s(0, 0, "bfloat16", launches=0) == 0
    both = device.compute_s(np.array([8e13, 1.0]), np.array([1.0, 5e11]), "bfloat16")
    assert both == pytest.approx([1 + 1e-6, 1 + 1e-6])


def gpu(**fields: object) -> CostModel:
    """100 multiprocessors of 1 TFLOP/s each, memory too fast to matter, unless ``fields`` say otherwise."""
    device = {
        "kind": "test", "memory_bytes": "1 GiB", "peak_flops_per_s": {"float32": 1e14}, "launch_overhead_s": 0,
        "memory_bandwidth_bytes_per_s": 1e18, "memory_efficiency": 1.0, "matmul_efficiency": 1.0,
        "multiprocessors": 100, "attention_efficiency": [0.5, 0.25], **fields,
    }  # fmt: skip
    level = {"name": "node", "size": 1, "latency_s": 0, "bandwidth_bytes_per_s": 1}
    return CostModel(ClusterSpec.from_dict({"name": "test", "device": device, "levels": [level]}))


def product_s(costs: CostModel, *sizes: int) -> float:
    return costs.compute_s(0.0, 0.0, "float32", kernel=Product(*sizes))


TILE_S = 2 * 256 * 128 * 1024 / 1e12
"""One tile of 256 x 128 over 1,024 elements, at 1 TFLOP/s."""


@pytest.mark.parametrize(
    "sizes, waves",
    [
        ((2560, 1280, 1024), 1),  # 10 x 10 tiles on 100 multiprocessors
        ((2560, 1280, 1024, 3), 3),  # three such in one kernel
        ((2560, 2560, 1024), 2),
        ((2560, 2560 + 1280, 1024), 3),
        ((2559, 1279, 1024), 1),  # a partial tile costs a whole one
    ],
)
def test_products_come_in_waves_of_tiles(sizes: tuple[int, ...], waves: int) -> None:
    filled = (1024 + 192) / 1024  # the pipeline fills over 192 elements more
    assert product_s(gpu(), *sizes) == pytest.approx(waves * TILE_S * filled)


def test_one_tile_too_many_starts_another_wave_of_smaller_ones() -> None:
    fits, more = product_s(gpu(), 2560, 1280, 1024), product_s(gpu(), 2560, 1281, 1024)
    assert fits < more < 2 * fits


def test_few_tiles_share_k() -> None:
    # One tile of 64 x 64: k in 16 parts of 1,024, each on a multiprocessor of its own.
    one_s = 2 * 64 * 64 / 1e12
    assert product_s(gpu(), 64, 64, 16 * 1024) == pytest.approx((1024 + 192) * one_s, rel=1e-3)
    assert product_s(gpu(), 64, 64, 256) == pytest.approx((256 + 192) * one_s)  # too short to share


def test_thin_products_wait_for_the_cache_or_for_memory() -> None:
    # Through 1 TB/s of cache, a tile of 256 x 128 in float32 takes 384 * 4 bytes per k from a hundredth of it.
    assert product_s(gpu(cache_bandwidth_bytes_per_s=1e12), 2560, 1280, 1024) == pytest.approx(
        (1024 + 192) * 384 * 4 / 1e10
    )
    thin = Product(16, 4096, 4096)
    assert gpu(memory_bandwidth_bytes_per_s=1e12).compute_s(0.0, 67e6, "float32", kernel=thin) == pytest.approx(67e-6)


def test_a_backward_is_two_products() -> None:
    forward = Product(512, 1024, 2048)
    backward_s = gpu().compute_s(0.0, 0.0, "float32", kernel=forward.backward)
    assert backward_s == pytest.approx(product_s(gpu(), 512, 2048, 1024) + product_s(gpu(), 2048, 1024, 512))
    assert forward.backward.flops == 2 * forward.flops == 4 * 512 * 1024 * 2048


def test_attention_by_hand() -> None:
    forward = Attention(heads=25, queries=512, keys=512, depth=64, causal=True)
    assert forward.flops == 4 * 25 * 512 * 512 * 64 / 2
    assert forward.backward.flops == 2.5 * forward.flops  # scores are computed again
    # 25 heads of four blocks of 128 queries fill 100 multiprocessors, which reach half and a quarter of the peak.
    assert gpu().compute_s(0, 0, "float32", kernel=forward) == pytest.approx(forward.flops / 5e13)
    assert gpu().compute_s(0, 0, "float32", kernel=forward.backward) == pytest.approx(2.5 * forward.flops / 2.5e13)
    one = Attention(heads=1, queries=512, keys=512, depth=64, causal=True)
    assert gpu().compute_s(0, 0, "float32", kernel=one) == pytest.approx(forward.flops / 5e13)  # most are idle


SIZES = st.integers(1, 20000)


@given(st.sampled_from(["dgx-a100", "dgx-h100"]), SIZES, SIZES, SIZES, st.sampled_from("mnk"), st.integers(1, 5000))
def test_a_larger_product_never_takes_less_time(name: str, m: int, n: int, k: int, which: str, more: int) -> None:
    costs, sizes = CostModel(ClusterSpec.preset(name)), {"m": m, "n": n, "k": k}
    smaller, larger = Product(**sizes), Product(**sizes | {which: sizes[which] + more})
    for a, b in ((smaller, larger), (smaller.backward, larger.backward)):
        price_s, next_s = (costs.compute_s(0.0, 0.0, "bfloat16", kernel=kernel) for kernel in (a, b))
        assert price_s <= next_s * SLACK


@given(SIZES, SIZES, SIZES)
def test_no_product_is_faster_than_the_sustained_peak(m: int, n: int, k: int) -> None:
    costs = CostModel(ClusterSpec.preset("dgx-a100"))
    device, product = costs.cluster.device, Product(m, n, k)
    sustained = device.peak("bfloat16") * device.matmul_efficiency
    assert product.flops <= sustained * costs.compute_s(0.0, 0.0, "bfloat16", kernel=product) * SLACK


@pytest.mark.parametrize(
    "name, sizes, low, high",
    [  # TFLOP/s of half-precision products as cuBLAS is known to reach them
        ("dgx-a100", (4096, 4096, 4096), 240, 275),
        ("dgx-a100", (1024, 1024, 1024), 100, 190),
        ("dgx-h100", (8192, 8192, 8192), 600, 760),
        ("hgx-h200", (8192, 8192, 8192), 650, 800),
        ("dgx-v100", (4096, 4096, 4096), 80, 105),
    ],
)
def test_known_rates_of_products(name: str, sizes: tuple[int, int, int], low: float, high: float) -> None:
    product = Product(*sizes)
    seconds = CostModel(ClusterSpec.preset(name)).compute_s(0.0, 0.0, "float16", kernel=product)
    assert low < product.flops / seconds / 1e12 < high


@pytest.mark.parametrize(
    "op, shapes, kernel",
    [
        ("aten.linear.default", [(4, 32, 64), (128, 64), (128,)], Product(128, 128, 64)),
        ("aten.addmm.default", [(128,), (32, 64), (64, 128)], Product(32, 128, 64)),
        ("aten.matmul.default", [(4, 32, 64), (64, 128)], Product(128, 128, 64)),
        ("aten.bmm.default", [(6, 32, 64), (6, 64, 16)], Product(32, 16, 64, 6)),
        ("aten.matmul.default", [(2, 3, 32, 64), (2, 3, 64, 16)], Product(32, 16, 64, 6)),
        ("aten.mv.default", [(32, 64), (64,)], None),
        ("aten.convolution.default", [(1, 3, 8, 8), (4, 3, 3, 3)], None),
        ("aten.scaled_dot_product_attention.default", [(2, 8, 32, 64)] * 3, Attention(16, 32, 32, 64, False)),
        (
            "aten.scaled_dot_product_attention.default",
            [(2, 8, 32, 64), *[(2, 2, 16, 64)] * 2],
            Attention(16, 32, 16, 64, False),
        ),
        ("aten.add.Tensor", [(8,), (8,)], Stream("add")),
        ("aten.gelu.default", [(8,)], Stream("activation")),
        ("mine.tomorrow.default", [(8,)], Stream("multiply")),
    ],
)
def test_kernels_of_operators(op: str, shapes: list[tuple[int, ...]], kernel: object) -> None:
    assert kernel_of(op, shapes) == kernel


LEVELS = st.tuples(
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4),
    st.lists(st.floats(1e-7, 1e-4), min_size=4, max_size=4).map(sorted),
    st.lists(st.floats(1e8, 1e12), min_size=4, max_size=4).map(lambda xs: sorted(xs, reverse=True)),
)
"""Levels whose links get slower outwards: (sizes, latencies, bandwidths)."""


@st.composite
def clusters(draw: st.DrawFn) -> CostModel:
    sizes, latencies, bandwidths = draw(LEVELS)
    return model(
        *zip(sizes, latencies, bandwidths, strict=False),
        backend=draw(st.sampled_from(["nccl", "gloo"])),
        in_switch=draw(st.none() | st.floats(1e8, 1e12)),
    )


@given(clusters(), st.sampled_from(KINDS), st.data())
def test_more_bytes_never_cost_less(costs: CostModel, kind: str, data: st.DataObject) -> None:
    group = data.draw(st.sampled_from([a for mesh in candidate_meshes(costs.cluster) for a in mesh.axes]))
    fewer, more = sorted(data.draw(st.tuples(st.integers(0, 10**12), st.integers(0, 10**12))))
    assert costs.collective_s(kind, group, fewer) <= costs.collective_s(kind, group, more)


@given(clusters(), st.sampled_from(KINDS), st.integers(0, 10**11))
def test_more_ranks_never_cost_less_and_twice_as_many_are_no_cliff(costs: CostModel, kind: str, bytes_in: int) -> None:
    spec = costs.cluster
    strides = [2**i for i in range(spec.world_size.bit_length() - 1)]
    for stride in strides:
        group = axis(2, stride)
        while group.size * 2 * stride <= spec.world_size:
            twice = axis(group.size * 2, stride)
            price_s, twice_s = (costs.collective_s(kind, each, bytes_in) for each in (group, twice))
            assert price_s <= twice_s * SLACK
            # Through the same levels, P - 1 hops and shards become 2P - 1: three times for two ranks, then twice.
            if len(crossings(spec, group)) == len(crossings(spec, twice)):
                assert twice_s <= 3 * price_s * SLACK
            group = twice


@given(clusters(), st.sampled_from(KINDS), st.data())
def test_prices_lie_between_the_slowest_link_and_all_links_together(
    costs: CostModel, kind: str, data: st.DataObject
) -> None:
    axes = [a for mesh in candidate_meshes(costs.cluster) for a in mesh.axes if a.size > 1]
    assume(axes)
    group = data.draw(st.sampled_from(axes))
    crossed = crossings(costs.cluster, group)
    received = {"all_gather": group.size - 1, "all_reduce": 2 * (group.size - 1) / group.size}.get(kind, 1)
    slowest = min(c.level.bandwidth_bytes_per_s for c in crossed)
    fastest = max(c.level.bandwidth_bytes_per_s * c.inside for c in crossed)
    # A whole tensor arrives at most, or half of one at least where only shards of it do.
    for latency_s, seconds_per_byte in costs.collective_terms(kind, group)[:1]:
        assert received / 2 / fastest <= seconds_per_byte * SLACK
        assert seconds_per_byte <= received / slowest * SLACK
        assert latency_s <= 2 * group.size * max(c.level.latency_s for c in crossed)


@pytest.mark.parametrize("kind", KINDS)
def test_every_further_node_adds_its_part_and_no_more(kind: str) -> None:
    costs = CostModel(ClusterSpec.preset("dgx-h100", nodes=256))
    nodes = range(2, 129)
    for stride, per_node in ((1, 8), (8, 1)):
        prices = [costs.collective_s(kind, axis(n * per_node, stride), 2**20) for n in nodes]
        for n, (price_s, next_s) in zip(nodes, itertools.pairwise(prices), strict=False):
            assert price_s <= next_s * SLACK
            grown = ((n + 1) * per_node - 1) / (n * per_node - 1)
            assert next_s <= price_s * max(grown, 1 + 2 / n)


def test_the_gather_over_twice_the_nodes_is_twice_as_long() -> None:
    costs = CostModel(ClusterSpec.preset("dgx-h100", nodes=64))
    half_s, whole_s = (costs.collective_s("all_gather", axis(n, 8), 2**24) for n in (32, 64))
    assert whole_s == pytest.approx(half_s * 63 / 31, rel=1e-2)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    mesh = Mesh.of(data=2, tensor=4)
    for group in mesh.axes:
        parts_s = TWO_NODES.collective_s("reduce_scatter", group, GB)
        parts_s += TWO_NODES.collective_s("all_gather", group, GB // group.size)
        assert math.isclose(TWO_NODES.collective_s("all_reduce", group, GB), parts_s, rel_tol=1e-6)


def test_published_all_reduce_on_one_dgx_h100() -> None:
    """8 x H100: nccl-tests report 460 to 480 GB/s bus bandwidth with in-switch sums."""
    costs = CostModel(ClusterSpec.preset("dgx-h100"))
    bus_bandwidth = 2 * 7 / 8 * 8 * 2**30 / costs.collective_s("all_reduce", axis(8), 8 * 2**30)
    assert 460e9 < bus_bandwidth < 480e9


def test_arithmetic_takes_as_long_as_on_the_slowest_device_and_memory_does_not() -> None:
    alone, many = (CostModel(ClusterSpec.preset("dgx-a100", devices=count)) for count in (1, 1024))
    longer = 1 / (1 - 0.08 / 2)  # the last of 1,024 is the last that is no outlier
    for kernel in (Product(8192, 8192, 8192), Attention(64, 4096, 4096, 128, causal=True)):
        seconds = [
            cost.compute_s(0.0, 0.0, "bfloat16", 0, each)
            for cost in (alone, many)
            for each in (kernel, kernel.backward)
        ]
        assert seconds[2:] == pytest.approx([longer * each for each in seconds[:2]], rel=1e-3)
        least = [cost.least_s(kernel.flops, 0.0, "bfloat16", kernel) for cost in (alone, many)]
        assert least[1] == pytest.approx(longer * least[0], rel=1e-3) and least[1] <= seconds[2] * SLACK
    assert alone.compute_s(0.0, 1e9, "bfloat16") == many.compute_s(0.0, 1e9, "bfloat16")


def test_products_in_float8_by_hand() -> None:
    """On a device without tiles: flops at float8's peak, and five bytes for each element of both operands; backward
    twice those flops, three bytes for operands that are cast again and five for the gradient.
    """
    alone = ClusterSpec.preset("dgx-h100", devices=1)
    device = alone.device.model_copy(update={"multiprocessors": None})
    cluster = alone.model_copy(update={"device": device, "software": Software(float8=True)})
    cost, product = CostModel(cluster), Product(4096, 1024, 2048)
    flops, memory = 2 * 4096 * 1024 * 2048 / (1979e12 * 0.73), 3.35e12 * 0.85
    operands, result = 4096 * 2048 + 2048 * 1024, 4096 * 1024
    start_s = device.launch_overhead_s
    assert cost.compute_s(0.0, 0.0, "bfloat16", kernel=product) == pytest.approx(
        start_s + flops + 5 * operands / memory
    )
    backward_s = start_s + 2 * flops + (3 * operands + 5 * result) / memory
    assert cost.compute_s(0.0, 0.0, "bfloat16", kernel=product.backward) == pytest.approx(backward_s)
    assert cost.compute_s(0.0, 0.0, "float32", kernel=product) == CostModel(
        cluster.model_copy(update={"software": Software()})
    ).compute_s(0.0, 0.0, "float32", kernel=product)


def test_products_that_a_plan_scales_by_hand() -> None:
    """By rows, backward finds all scales anew, and two of the gradient; each takes seven kernels, and a cast one."""
    alone = ClusterSpec.preset("dgx-h100", devices=1)
    cost = CostModel(alone.model_copy(update={"device": alone.device.model_copy(update={"multiprocessors": None})}))
    flops, memory = 2 * 4096 * 1024 * 2048 / (1979e12 * 0.73), 3.35e12 * 0.85
    operands, result = 4096 * 2048 + 2048 * 1024, 4096 * 1024
    kinds: tuple[tuple[Scaling, int, int, int], ...] = (("tensorwise", 3, 8, 11), ("rowwise", 5, 10, 32))
    for scaling, again, gradient, starts in kinds:
        product = Product(4096, 1024, 2048, scaling=scaling)
        assert (product.starts, product.backward.starts) == (1 + 16, 1 + starts)
        found = [cost.compute_s(0.0, 0.0, "bfloat16", 0, each) for each in (product, product.backward)]
        backward_s = 2 * flops + (again * operands + gradient * result) / memory
        assert found == pytest.approx([flops + 5 * operands / memory, backward_s])


def test_fused_kernels_cost_their_bytes_and_begin_once() -> None:
    cost = CostModel(ClusterSpec.preset("dgx-h100"))
    device = cost.cluster.device
    each_s = 1e9 / (3.35e12 * device.memory_efficiency)
    assert cost.fused_s(1e9, "bfloat16", 0) == pytest.approx(each_s)
    assert cost.fused_s(1e9, "bfloat16", 2) == pytest.approx(each_s + 2 * device.launch_overhead_s)
    assert cost.fused_s(0.0, "bfloat16", 0) == 0.0
