"""Reshardings: the table of steps, legal routes, and routes that are as cheap as any."""

import itertools

import numpy as np
import pytest

from planner.cost.calibration import Calibration
from planner.cost.cluster import ClusterSpec
from planner.cost.model import CostModel
from planner.formulation.resharding import STEPS, Collective, ReshardingTable, ReshardStep, passes
from planner.formulation.resharding_tables import BUCKET_BYTES, NOT_GATHERED
from planner.formulation.search_space import Space
from planner.formulation.strategies import rules_of
from planner.formulation.training import Training
from planner.formulation.unsharding import Unsharding
from planner.ir.folding import fold
from planner.ir.graph import Ref, TensorType
from planner.ir.layout import MICRO, I, Mesh, P, R, Shard, local_shape
from tests.planner.plans import cluster, residual_mlp

TENSOR = TensorType((8, 4), "float32", grad=True)


def price(kind, axis, bytes_in, is_shared):
    """Whole microseconds, so that sums are exact."""
    return {"all_reduce": 8, "all_gather": 3, "reduce_scatter": 4, "all_to_all": 2}[
        kind
    ] * 1e-6 * axis.size + 0 * bytes_in


def table(mesh):
    return ReshardingTable(TENSOR, mesh, (Shard(0), Shard(1)), price, touch_s_per_byte=0.0, launch_s=1e-8)


@pytest.mark.parametrize(
    ("src", "dst", "forward", "backward"),
    [
        (I, R, None, ("all_reduce", 128)),
        (P, I, ("all_reduce", 128), None),
        (P, R, ("all_reduce", 128), ("all_reduce", 128)),
        (P, Shard(0), ("reduce_scatter", 128), ("all_gather", 32)),
        (Shard(0), R, ("all_gather", 32), ("reduce_scatter", 128)),
        (Shard(0), I, ("all_gather", 32), None),
        (I, Shard(0), None, ("all_gather", 32)),
        (R, Shard(0), None, None),
        (Shard(0), Shard(1), ("all_to_all", 32), ("all_to_all", 32)),
        (I, P, None, None),
        (R, P, None, None),
        (R, I, None, None),
    ],
)
def test_each_step_has_its_collectives(src, dst, forward, backward):
    """The table of architecture.md, with the bytes that each rank passes in on four ranks."""
    mesh = Mesh.of(a=4)
    expected = [
        Collective(call[0], "a", call[1], phase)
        for call, phase in ((forward, "forward"), (backward, "backward"))
        if call
    ]
    assert list(ReshardStep(0, src, dst, (src,)).collectives(TENSOR, mesh)) == expected


def test_without_a_gradient_nothing_runs_backward():
    tensor = TensorType((8, 4), "int64")
    for src, dst in ((P, R), (Shard(0), R), (Shard(0), Shard(1))):
        assert all(
            call.phase == "forward" for call in ReshardStep(0, src, dst, (src,)).collectives(tensor, Mesh.of(a=4))
        )


def test_an_axis_of_one_rank_is_silent():
    assert ReshardStep(0, P, R, (P,)).collectives(TENSOR, Mesh.of(a=1)) == ()


@pytest.mark.parametrize("mesh", [Mesh.of(a=4), Mesh.of(a=2, b=2)])
def test_routes_are_legal_and_as_cheap_as_promised(mesh):
    found = table(mesh)
    for src, dst in itertools.product(found.layouts, repeat=2):
        i, j = found.index[src], found.index[dst]
        if not np.isfinite(found.forward_s[i, j] + found.backward_s[i, j]):
            continue
        at, seconds = src, {"forward": 0.0, "backward": 0.0}
        for step in found.route(src, dst):
            assert step.before == at
            assert step.rule in STEPS
            assert local_shape(TENSOR.shape, step.after, mesh.sizes) is not None
            # A slice can only be taken or joined where no minor axis cuts the same strips.
            assert not {step.src, step.dst} & set(at[step.axis + 1 :]) & {Shard(0), Shard(1)}
            for call in step.collectives(TENSOR, mesh):
                seconds[call.phase] += price(call.kind, mesh.axes[step.axis], call.bytes_in, False)
            at = step.after
        assert at == dst
        assert seconds["forward"] == pytest.approx(found.forward_s[i, j], abs=1e-7)
        assert seconds["backward"] == pytest.approx(found.backward_s[i, j], abs=1e-7)


def gathering_table(mesh):
    """Of a parameter, where to gather it and to sum all of its gradient by itself would be the quickest."""

    def quick_sums(kind, axis, bytes_in, is_shared):
        return price(kind, axis, bytes_in, is_shared) * (0.1 if kind == "all_reduce" else 1.0)

    return ReshardingTable(
        TENSOR, mesh, (Shard(0), Shard(1)), quick_sums, touch_s_per_byte=0.0, launch_s=1e-8, is_gathered=True
    )


def test_gradients_of_parameters_are_reduced_to_where_they_are_stored():
    mesh = Mesh.of(a=2, b=2)
    found = gathering_table(mesh)
    for src, dst in itertools.product(found.layouts, repeat=2):
        if np.isfinite(found.forward_s[found.index[src], found.index[dst]]):
            rules = [step.rule for step in found.route(src, dst)]
            gathered = [number for number, rule in enumerate(rules) if rule == "S>I"]
            assert all(rule == "S>I" for rule in rules[gathered[0] :]) if gathered else True
    assert [step.rule for step in found.route((Shard(0), I), (R, I))] == ["S>R"]
    assert [step.rule for step in found.route((Shard(0), Shard(1)), (I, I))] == ["S>I", "S>I"]


@pytest.mark.parametrize("made", [table, gathering_table])
def test_what_sums_over_micro_batches_is_added_up_along_routes(made):
    costs = made(Mesh.of(**{MICRO: 2, "a": 2}))
    several = 0
    for src, dst in itertools.product(costs.layouts, repeat=2):
        at = costs.index[src], costs.index[dst]
        route = costs.route(src, dst) if np.isfinite(costs.backward_s[at]) else ()
        sums = [costs.backward_s[costs.index[step.before], costs.index[step.after]] for step in route if not step.axis]
        several += len(route) > 2 and sum(sums) > 0
        assert costs.summing_s[at] == pytest.approx(sum(sums), abs=1e-15)
    assert several


def test_only_calls_that_parameters_share_are_priced_as_shared():
    def halved(kind, axis, bytes_in, is_shared):
        return price(kind, axis, bytes_in, is_shared) / (1 + is_shared)

    mesh, both = Mesh.of(a=4), {}
    for together in (0, 3):
        table = ReshardingTable(TENSOR, mesh, (Shard(0),), halved, 0.0, 0.0, together=together)
        both[together] = {
            (src, dst): table.forward_s[table.index[src,], table.index[dst,]]
            + table.backward_s[table.index[src,], table.index[dst,]]
            for src, dst in ((Shard(0), R), (Shard(0), I), (I, R))
        }
    assert {pair: both[0][pair] / both[3][pair] for pair in both[0]} == {
        (Shard(0), R): 2.0,
        (Shard(0), I): 1.0,
        (I, R): 2.0,
    }


def test_routes_obey_the_triangle_inequality():
    found = table(Mesh.of(a=2, b=2))
    total = found.forward_s + found.backward_s
    through = np.min(total[:, :, None] + total[None, :, :], axis=1)
    assert np.all(total <= through * (1 + 1e-9))


def test_partial_sums_are_never_made_up():
    """Nothing but a whole value turns into terms of a sum, and shards never do."""
    found = table(Mesh.of(a=2))
    assert np.isfinite(found.forward_s[found.index[(R,)], found.index[(P,)]])
    assert all(step.src in (R, I) for step in found.route((Shard(0),), (P,)) if step.dst == P)


@pytest.mark.parametrize("src, dst, phase", [(P, I, "forward"), (I, R, "backward")])
def test_large_sums_over_nodes_are_scattered_inside_them_first(src, dst, phase):
    """Sums of activations and of gradients, over an axis across nodes and one inside; and one across rooms."""
    fields = ClusterSpec.preset("dgx-h100", nodes=4).to_dict()
    node, nodes = fields["levels"]
    rooms = {**nodes, "name": "rooms", "bandwidth_bytes_per_s": nodes["bandwidth_bytes_per_s"] / 4}

    def calls(rows, levels, **sizes):
        cost, mesh = CostModel(ClusterSpec.from_dict({**fields, "levels": levels})), Mesh.of(**sizes)
        tensor, shards = TensorType((rows, 64), "bfloat16", grad=True), (Shard(0), Shard(1))
        prices = ReshardingTable(
            tensor, mesh, shards, lambda kind, axis, size, _: cost.collective_s(kind, axis, size), 0.0, 0.0
        )
        steps = prices.route((src,) * len(sizes), (dst,) * len(sizes))
        found = [call for step in steps for call in step.collectives(tensor, mesh) if call.phase == phase]
        found = found[::-1] if phase == "backward" else found
        return [(call.kind, call.axis, call.bytes_in) for call in found]

    two, three, size = {"across": 4, "inside": 8}, {"far": 4, "across": 4, "inside": 8}, 2**20 * 128
    assert sorted(calls(8, [node, nodes], **two)) == [("all_reduce", "across", 1024), ("all_reduce", "inside", 1024)]
    first, last = ("reduce_scatter", "inside", size), ("all_gather", "inside", size // 8)
    assert calls(2**20, [node, nodes], **two) == [first, ("all_reduce", "across", size // 8), last]
    assert calls(2**20, [node, nodes, rooms], **three) == [
        first,
        ("reduce_scatter", "across", size // 8),
        ("all_reduce", "far", size // 32),
        ("all_gather", "across", size // 32),
        last,
    ]


def test_the_major_axis_is_gathered_after_the_minor_one():
    route = table(Mesh.of(a=2, b=2)).route((Shard(0), Shard(0)), (R, R))
    assert [step.axis for step in route] == [1, 0]


def measured_cluster():
    """A call takes 5 ms however small it is, and 2 ms of the cores that compute beside it."""
    curves = [
        {"kind": kind, "size": 4, "beside": beside, "bytes": [2**12, 2**23], "seconds": seconds}
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
        for beside, seconds in ((False, [0.005, 0.015]), (True, [0.002, 0.009]))
    ]
    facts = {"format": "autopar-calibration", "version": 2, "device": "cpu", "ranks": 4, "launch_s": 1e-5}
    return cluster(4).calibrated(Calibration.from_dict({**facts, "collectives": curves}))


@pytest.mark.parametrize(
    "source, kind", [((I,), "all_reduce"), ((Shard(0),), "reduce_scatter")], ids=["sums", "shards"]
)
@pytest.mark.parametrize("tier", ["device", "host"])
def test_parameters_that_one_call_gathers_pay_for_one_call_together(source, kind, tier):
    """A block has weights and biases of several sizes; what they pay besides is that they are copied into one piece.

    The call runs beside another block's computing unless parameters come from the host.
    """
    graph, mesh, cost, beside = residual_mlp(), Mesh.of(data=4), CostModel(measured_cluster()), tier == "device"
    space = Space(fold(graph), mesh, cost, Training(tier=tier), rules_of(graph))
    layer = next(i.block for i in space.folded.instances if i.block.path.startswith("layers"))
    refs = [ref for ref in layer.inputs if graph.by_name[ref.node].op == "param"]
    sizes = {ref: graph.type_of(ref).size_bytes for ref in refs}
    assert len(refs) == 4 and len(set(sizes.values())) > 1
    copied_s = 2 * cost.compute_s(0.0, BUCKET_BYTES, "float32", 0) / BUCKET_BYTES
    start_s = cost.compute_s(0.0, 0, "float32", 1)
    shares, stated = [], Space(fold(graph), mesh, CostModel(cluster(4)), Training(), rules_of(graph))
    for ref in refs:
        found = space.table(ref)
        back_s = found.backward_s[found.index[source], found.index[(R,)]]
        shares.append(back_s - start_s - copied_s * sizes[ref])
    assert sum(shares) == pytest.approx(cost.collective_s(kind, mesh.axes[0], sum(sizes.values()), beside=beside))
    assert min(shares) >= cost.collective_s(kind, mesh.axes[0], 0, beside=beside) / len(refs)
    assert all(stated.tables.together(ref) == NOT_GATHERED for ref in refs)


@pytest.mark.parametrize("gathers", ["each", "once"])
def test_micro_batched_gathers_of_each_micro_batch_alone_run_beside_computing(gathers):
    """Their gradients are waited for, and so is all that is done once a step."""
    graph, cost, axis = residual_mlp(), CostModel(measured_cluster()), Mesh.of(data=4).axes[0]
    training = Training(unsharding=Unsharding.named(gathers))
    spaces = (
        Space(fold(graph), Mesh.of(data=4), cost, Training(), rules_of(graph)),
        Space(fold(graph), Mesh.of(**{MICRO: 2, "data": 4}), cost, training, rules_of(graph)),
    )
    layer = next(i.block for i in spaces[0].folded.instances if i.block.path.startswith("layers"))
    refs = [ref for ref in layer.inputs if graph.by_name[ref.node].op == "param"]
    size = sum(graph.type_of(ref).size_bytes for ref in refs)

    def waits_s(kind, bytes_in):
        return cost.collective_s(kind, axis, bytes_in) - cost.collective_s(kind, axis, bytes_in, beside=True)

    more_s = np.zeros(2)
    for sign, space in zip((-1, 1), spaces, strict=True):
        before = (I,) * (len(space.mesh.axes) - 1)
        more_s += sign * np.sum([space.conversion_s(ref, (*before, Shard(0)), (*before, R)) for ref in refs], axis=0)
    assert more_s[0] == pytest.approx(waits_s("all_gather", size // 4) if gathers == "once" else 0.0, abs=1e-12)
    assert more_s[1] == pytest.approx(waits_s("reduce_scatter", size))


def test_values_that_are_no_parameters_pay_for_calls_of_their_own():
    graph, mesh, cost = residual_mlp(), Mesh.of(data=4), CostModel(measured_cluster())
    space = Space(fold(graph), mesh, cost, Training(), rules_of(graph))
    value = next(Ref(node.name) for node in graph.nodes if node.op == "aten.linear.default")
    found, size = space.table(value), graph.type_of(value).size_bytes
    there_s = found.forward_s[found.index[(P,)], found.index[(I,)]]
    moved_s = (
        cost.compute_s(0.0, 0, "float32", 1) + 2 * size * cost.compute_s(0.0, BUCKET_BYTES, "float32", 0) / BUCKET_BYTES
    )
    assert there_s == pytest.approx(cost.collective_s("all_reduce", mesh.axes[0], size) + moved_s)


def test_what_is_copied_beside_a_call():
    assert passes("I>R", "forward", 3) == passes("I>R", "backward", 0) == (0, 0)
    assert passes("I>R", "backward", 3) == passes("S>R", "backward", 1) == (0, 2)
    assert passes("S>R", "forward", 3) == (2, 2)
    assert passes("S>R", "forward", 1) == passes("S>R", "forward", 0) == passes("P>S", "backward", 3) == (1, 1)
