"""The ways in which the ranks of a context axis attend: what each moves, what it takes, and when it cannot be had."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from planner.base.errors import PinError
from planner.cost.cluster import ClusterSpec
from planner.cost.kernels import Attention
from planner.cost.model import CostModel
from planner.formulation.choices import choices_of
from planner.formulation.constraints.context import with_ulysses
from planner.formulation.constraints.pins import Pins
from planner.formulation.strategies import axis_ways, rule_of, rules_of
from planner.ir.graph import Graph, Ref
from planner.ir.layout import Axis, Mesh
from planner.ops.attention import Sight, sight
from planner.ops.attention_pieces import QueryShards, pieces, zigzag
from planner.ops.sharding_rule import shard_factor
from planner.plan.plan import Plan
from tests.planner.plans import Build, cluster, filtered, plan_of, unwrapped

BATCH, LENGTH, HEADS, KV, SIZE, ITEM = 2, 64, 8, 4, 16, 4


def layer(heads: int = HEADS, kv: int = KV, **given: Any) -> Graph:
    """Grouped attention of three projections; ``given``: ``length``, ``keys`` (so many of another input), or
    arguments of the operator, with ``window`` ours.
    """
    b, length = Build(), given.pop("length", LENGTH)
    x, keys = b.leaf("x", BATCH, length, heads * SIZE), given.pop("keys", length)
    y = x if keys == length else b.leaf("y", BATCH, keys, heads * SIZE)

    def projected(name: str, count: int, of: Ref, length: int) -> Any:
        made = b.linear(name, of, count * SIZE, name)
        shape = BATCH, length, count, SIZE
        split = b.call(f"{name}_heads", "view.default", *shape, self=made, size=shape)
        return b.call(f"{name}_first", "transpose.int", BATCH, count, length, SIZE, self=split, dim0=1, dim1=2)

    q, k, v = projected("q", heads, x, length), projected("k", kv, y, keys), projected("v", kv, y, keys)
    mask = b.leaf("bias", 1, heads, length, length, op="param", target="bias") if given.pop("biased", False) else None
    args = {"attn_mask": mask, "dropout_p": 0.0, "is_causal": mask is None, "scale": None, "enable_gqa": True, **given}
    op = "autopar.attention.default" if "window" in given else "scaled_dot_product_attention.default"
    out = b.call(
        "a", op, BATCH, heads, length, SIZE, path="attn", query=q, key=k, value=v,
        **args,
    )  # fmt: skip
    return b.mean(out)


def planned(kind: str, ranks: int = 4, **given: Any) -> Plan:
    return plan_of(layer(**given), cluster(ranks), {"context": ranks, "context_kind": kind, "zero": 0})


def sent_bytes(plan: Plan, ranks: int) -> float:
    """What each rank sends in a step along the ring of a collective, sums of weights' gradients and losses aside."""
    share = (ranks - 1) / ranks
    often = {"all_gather": ranks - 1, "reduce_scatter": share, "all_to_all": share, "send": 1}
    calls = [(call, count) for call, count in plan.predicted.collectives if call.kind != "all_reduce"]
    return sum(often[call.kind] * call.bytes_in * count for call, count in calls)


@pytest.mark.parametrize("ranks", [2, 4])
def test_volumes(ranks: int) -> None:
    """Elements of ``b s h d``: keys and values gathered and their gradients scattered; around, around again, and their
    gradients around; all four of attention's tensors to heads and back (Jacobs et al. 2023). In zigzag order halves of
    queries and results forward, of them and both gradients backward; in a ring those of keys and values likewise.
    """
    each, share = BATCH * LENGTH * SIZE * ITEM, (ranks - 1) / ranks
    assert sent_bytes(planned("gather", ranks), ranks) == 2 * share * 2 * KV * each
    assert sent_bytes(planned("ring", ranks), ranks) == 3 * share * 2 * KV * each
    halves, gathered = 3 * HEADS * each / ranks, 2 * share * 2 * KV * each
    assert sent_bytes(planned("zigzag_gather", ranks), ranks) == gathered + halves
    assert sent_bytes(planned("zigzag", ranks), ranks) == 1.5 * gathered + halves + 3 * KV * each / ranks
    assert sent_bytes(planned("ulysses", ranks), ranks) == 2 * share * (2 * HEADS + 2 * KV) * each / ranks


def test_ulysses_moves_less_from_some_ranks_on() -> None:
    """Than a ring above 2 (g + 1) / 3, than gathers above g + 1: of g = 2 heads of queries to one of keys, 2 and 3."""
    gather, ring, ulysses = (
        {ranks: sent_bytes(planned(kind, ranks), ranks) for ranks in (2, 4)} for kind in ("gather", "ring", "ulysses")
    )
    assert ulysses[2] == ring[2] and ulysses[4] < ring[4]
    assert ulysses[2] > gather[2] and ulysses[4] < gather[4]


@pytest.mark.parametrize("window, messages", [(1, []), (6, [5]), (17, [16]), (24, [16, 7]), (64, [16, 16, 16])])
def test_of_a_window_only_the_keys_that_are_seen_are_sent(window: int, messages: list[int]) -> None:
    """Forward and backward, and their gradients home; of 16 keys on each of four ranks. Gathered are all."""
    plan, each = planned("ring", window=window), BATCH * KV * 2 * SIZE * ITEM
    sends = [(call.phase, call.bytes_in // each) for call, n in plan.predicted.collectives for _ in range(n)
             if call.kind == "send"]  # fmt: skip
    assert sorted(sends) == sorted([("forward", k) for k in messages] + [("backward", k) for k in messages] * 2)
    assert sent_bytes(planned("gather", window=window), 4) == sent_bytes(planned("gather"), 4)
    assert "ring attention" in planned("zigzag", window=window).sentence, "all ranks have as much as they are"


@pytest.mark.parametrize("shards", [QueryShards(4), QueryShards(4, ring=4), QueryShards(4, strips=2), QueryShards()])
def test_the_last_rank_is_the_busiest_under_a_window(shards: QueryShards) -> None:
    length, window = 1024, 160
    node = layer(length=length, window=window).by_name["a"]
    found = shards.pieces(length // shards.ranks, length // shards.ring, sight(node))
    met, of_all = (sum(min(row + 1, window) for row in rows) for rows in (
        range(length - length // shards.ranks, length), range(length)))  # fmt: skip
    assert met <= sum(times * n * m for (n, m, _), times in found.items()) < 2.2 * met
    if shards.strips == 1:
        assert math.isclose(shards.load(node), met / of_all * shards.ranks, rel_tol=0.01)


def test_volume_of_a_hybrid() -> None:
    """Of 8 ranks in nodes of 4: what Ulysses moves among four, and a ring of two with a quarter of the heads."""
    spec = ClusterSpec.preset("dgx-h100", nodes=2, devices=8)
    pin = {"context": 8, "context_kind": "hybrid"}
    plan = plan_of(layer(), spec, pin)
    each = BATCH * LENGTH * SIZE * ITEM
    assert plan.mesh.names == ("context", "ulysses") and plan.mesh.sizes == (2, 4)
    shared = 2 * (3 / 4) * (2 * HEADS + 2 * KV) * each / 8
    ring = 3 * (1 / 2) * 2 * (KV / 4) * each
    by_axis = dict.fromkeys(plan.mesh.names, 0.0)
    for call, count in plan.predicted.collectives:
        if call.kind in ("send", "all_to_all"):
            by_axis[call.axis] += (0.75 if call.kind == "all_to_all" else 1) * call.bytes_in * count
    assert by_axis == {"context": ring, "ulysses": shared}
    told = "(context parallel: hybrid of Ulysses and ring attention)"
    assert f"Splits the sequence over the 4 GPUs of a node and over 2 nodes {told}" in unwrapped(plan)


@pytest.mark.parametrize("heads, kv, tensor, shared", [(8, 4, 1, 4), (12, 12, 2, 2), (8, 4, 2, 4), (8, 4, 4, 2)])
def test_a_hybrid_leaves_heads_to_the_tensor_axis(heads: int, kv: int, tensor: int, shared: int) -> None:
    """Of twelve heads two times two are taken, of four groups of two the groups by one axis, and the two by the other;
    nodes have eight devices.
    """
    spec = ClusterSpec.preset("dgx-h100", nodes=tensor)
    pins = Pins.parse({"context": 8, "tensor": tensor, "context_kind": "hybrid"})
    assert with_ulysses(pins, layer(heads, kv), spec).sizes["ulysses"] == shared
    wide = Pins.parse({"context": 8, "tensor": 16, "context_kind": "hybrid"})
    with pytest.raises(PinError, match="what 16 ranks of tensor parallelism leave of the 8 devices of a node"):
        with_ulysses(wide, layer(), spec)


def test_calls() -> None:
    """Keys and values are one message, sent to the next rank as often as there are others."""
    calls = [call for call in planned("ring").predicted.collectives if call[0].kind == "send"]
    part = BATCH * LENGTH // 4 * KV * 2 * SIZE * ITEM
    assert sorted((call.phase, call.bytes_in, count) for call, count in calls) == [
        ("backward", part, 6),
        ("forward", part, 3),
    ]
    calls = [call for call in planned("ulysses").predicted.collectives if call[0].kind == "all_to_all"]
    assert sum(count for _, count in calls) == 8


@pytest.mark.parametrize("kind, told", [
    ("gather", "context parallel: keys gathered"), ("ring", "context parallel: ring attention"),
    ("zigzag", "context parallel: ring attention, zigzag order"), ("ulysses", "context parallel: Ulysses"),
    ("zigzag_gather", "context parallel: keys gathered, zigzag order"),
])  # fmt: skip
def test_reports_name_it(kind: str, told: str) -> None:
    plan = planned(kind)
    assert f"Splits the sequence over all 4 processes ({told})" in unwrapped(plan)
    assert told in planned(kind, length=4096).sentence, "where attention is most of the work, too"
    goes_around = kind in ("ring", "zigzag")
    explained = unwrapped(plan.explain("attn"))
    assert ("within 3 x send context 16.0 KiB forward" in explained) == goes_around
    assert ("keys and values go around the ranks" in explained) == goes_around


@pytest.mark.parametrize("kind", ["gather", "ring", "zigzag_gather", "zigzag", "ulysses"])
def test_formulas_know_pieces(kind: str) -> None:
    """Those of a short sequence give what a long one takes; only pieces of windows are left out, which do not grow."""
    plan = planned(kind)
    formulas, there = plan.formulas, plan.at(batch=8, sequence=1024)
    sizes = {formulas.batch: 8, formulas.sequence: 1024}
    assert math.isclose(formulas.step_time_s.subs(sizes), there.step_time_s) and not formulas.left_out
    assert formulas.peak_bytes.subs(sizes) == there.peak_bytes


def test_formulas_say_that_they_do_not_know_windows() -> None:
    plan = planned("ring", window=24, length=256)
    assert "sliding windows as one kernel" in plan.formulas.left_out
    assert plan.formulas.peak_bytes.subs({**plan.formulas.planned}) == plan.predicted.peak_bytes


def test_keys_go_around_one_axis_at_most() -> None:
    """Two axes may share the queries, and one of them pass keys around."""
    graph = layer()
    node, axes = graph.by_name["a"], (Axis("outer", 2, 2), Axis("inner", 2, 1))
    rule, mesh = rule_of(graph, node), Mesh(axes)
    ways = axis_ways(graph, node, rule, mesh, tuple({} for _ in (*rule.operands, *rule.results)), None, {})
    rings = [[s.way.name == "ring" for s in choice.axes] for choice in choices_of(graph, node, mesh, ways)]
    shared = [[s.sharded.startswith("query") for s in choice.axes] for choice in choices_of(graph, node, mesh, ways)]
    assert {sum(each) for each in rings} == {0, 1} and [True, True] in shared


def test_on_a_tensor_axis_attention_does_not_go_along_the_sequence_beside_a_context_axis() -> None:
    """How it does is pinned of the context axis alone."""
    graph, mesh, pin = layer(), Mesh.of(context=2, tensor=2), {"context": 2, "tensor": 2, "context_kind": "gather"}
    rules = rules_of(graph)
    allow, _ = filtered(Pins.parse(pin), graph, rules, mesh)
    assert allow is not None
    node, rule = graph.by_name["a"], rules["a"]
    factors = [factor for factor in rule.sizes if factor not in rule.whole]
    every = [shard_factor(rule, factor, 1, way) for factor in factors for way in rule.ways_of(factor)]
    kept = [{str(each) for each in every if allow(node, axis, each)} for axis in range(2)]
    assert kept == [{"query"}, {"kv", "group"}]


# ---- what it takes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shards",
    [
        QueryShards(4), QueryShards(4, strips=2), QueryShards(4, ring=4), QueryShards(8, ring=2),
        QueryShards(4, is_zigzag=True), QueryShards(8, ring=8, is_zigzag=True),
    ],
)  # fmt: skip
def test_the_last_rank_is_the_busiest(shards: QueryShards) -> None:
    """The pairs of its pieces, counted one by one where it sees keys up to its own place, over the average; in zigzag
    order all have the average.
    """
    length = 64
    queries, keys = length // shards.ranks, length // shards.ring
    found = shards.pieces(queries, keys, Sight(True))
    pairs = sum(times * (n * (n + 1) // 2 if is_causal else n * m) for (n, m, is_causal), times in found.items())
    strip, run = length // shards.strips, queries // shards.strips
    rows = [strip * (number + 1) - run + row for number in range(shards.strips) for row in range(run)]
    if shards.is_zigzag:  # its first half, and the second of the first rank's part
        rows = [*range(length - queries, length - queries // 2), *range(queries // 2, queries)]
    assert pairs == sum(row + 1 for row in rows)
    halves = sum(times * n * m / (2 if is_causal else 1) for (n, m, is_causal), times in found.items())
    assert math.isclose(halves, length * queries / 2 * shards.busiest)


@pytest.mark.parametrize("seen", [Sight(True), Sight(False), Sight(True, 5), Sight(True, 40)])
@pytest.mark.parametrize("ring, more", [(1, 1), (4, 1), (8, 1), (4, 2)])
@pytest.mark.parametrize("is_zigzag", [False, True])
def test_blocks_of_keys_that_lie_alike_are_counted_together(seen: Sight, ring: int, more: int, is_zigzag: bool) -> None:
    """What the last rank meets, block by block."""
    shards = QueryShards(ring * more, ring=ring, is_zigzag=is_zigzag and more == 1)
    queries, keys, length = 12, 12 * more, 12 * ring * more
    starts, run = ([length - queries], queries)
    firsts, columns = [[block * keys] for block in range(ring)], keys
    if shards.is_zigzag:
        starts, run = [*zigzag(ring - 1, ring, length)], queries // 2
        firsts, columns = [[*zigzag(block, ring, length)] for block in range(ring)], keys // 2
        firsts, columns = (firsts, columns) if ring > 1 else ([[0]], keys)
    each = Counter(part.form for first in firsts for part in pieces(starts, run, first, columns, seen))
    assert shards.pieces(queries, keys, seen) == each


def test_pieces_are_priced_as_they_run() -> None:
    """By hand: of 1,024 places the last of 4 ranks meets its 256 with themselves, and with 768 at once or in turn."""
    spec = cluster(4)
    assert QueryShards(4).pieces(256, 1024, Sight(True)) == {(256, 256, True): 1, (256, 768, False): 1}
    assert QueryShards(4, ring=4).pieces(256, 256, Sight(True)) == {(256, 256, True): 1, (256, 256, False): 3}
    assert QueryShards(4, ring=4).pieces(256, 256, Sight(False)) == {(256, 256, False): 4}
    assert QueryShards(4, is_zigzag=True).pieces(256, 1024, Sight(True)) == {
        (128, 128, True): 2, (128, 128, False): 1, (128, 768, False): 1
    }  # fmt: skip
    assert QueryShards(4, ring=4, is_zigzag=True).pieces(256, 256, Sight(True)) == {
        (256, 256, True): 1, (128, 256, False): 2, (256, 128, False): 1  # keys of the first rank are earlier and later
    }  # fmt: skip
    square, rest = Attention(8, 256, 256, 64, True), Attention(8, 256, 768, 64, False)
    cost = CostModel(spec)
    flops = 4 * 8 * 64 * (256 * 256 / 2 + 256 * 768)
    start_s = 2 * spec.device.launch_overhead_s
    found_s = sum(cost.compute_s(0.0, 0.0, "float32", kernel=kernel) for kernel in (square, rest))
    assert math.isclose(found_s - start_s, flops / (spec.device.peak("float32") * spec.device.attention[0]))


def test_what_goes_around_is_hidden_where_links_and_cores_are_apart() -> None:
    """Seven messages forward, twice as many backward; of which computing hides all but gradients' last, or nothing."""
    found = {}
    for overlap in (0.0, 1.0):
        spec = ClusterSpec.preset("dgx-h100").model_copy(update={"overlap": overlap})
        plan = plan_of(layer(), spec, {"context": 8, "context_kind": "ring"})
        (op,) = (op for block in plan.account.blocks for name, op in block.ops.items() if "attention" in name)
        found[overlap] = op.inner_s
    part = BATCH * LENGTH // 8 * KV * 2 * SIZE * ITEM
    message_s = CostModel(spec).collective_s("send", plan.mesh.axes[0], part)
    assert math.isclose(found[0.0], 21 * message_s) and math.isclose(found[1.0], message_s)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, given, message", [
    ("zigzag", {"is_causal": False}, "'zigzag', but attention 'attn' is not causal.*: pin 'ring' or 'gather'"),
    ("zigzag_gather", {"biased": True}, "but attention 'attn' has a mask as a tensor, .* of position_ids"),
    ("zigzag", {"length": 60}, "has 60 queries, of which 4 ranks .* pad the sequence to 64, or pin 'ring' or 'gather'"),
    ("ring", {"keys": 62, "is_causal": False}, "has 62 keys, which 4 ranks .*: pad .* to 64, or pin 'gather'"),
    ("hybrid", {"heads": 3, "kv": 3}, "'hybrid', but of the 4 ranks of pin 'context' no part .* the 3 heads of attent"),
    ("ulysses", {"heads": 6, "kv": 3}, "'attn' has 6 heads, in groups that share 3 heads of keys and values, which 4"),
    ("ulysses", {"heads": 6, "kv": 3}, "change pin 'context', pin 'ulysses' 2 and 'context' 2, pin 'gather' or 'ring'"),
])  # fmt: skip
def test_what_cannot_be_had_is_refused(kind: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(PinError, match=message):
        planned(kind, **given)
    assert planned("gather", **given).predicted.step_time_s > 0
