"""Strategies follow from factor rules: what is tried, and which cuts into strips survive."""

import pytest

from planner.formulation.choices import choices_of
from planner.formulation.decisions import DecisionGraph
from planner.formulation.strategies import axis_ways, leaf_layouts, rule_of, rules_of
from planner.ir.folding import fold_off
from planner.ir.graph import Node, Ref, TensorType
from planner.ir.layout import I, Mesh, P, R, Shard
from planner.ops.sharding_rule import Rule, axis_strategies, shard_factor
from tests.planner.plans import Build


def linear_rule(m=8, k=4, n=6):
    return Rule(
        sizes={"m": m, "k": k, "n": n},
        operands=((("m",), ("k",)), (("n",), ("k",)), (("n",),)),
        results=((("m",), ("n",)),),
        addends=frozenset({2}),
        linear=(frozenset({0, 2}), frozenset({1, 2})),
    )


@pytest.mark.parametrize(
    ("factor", "operands", "result"),
    [
        ("m", (Shard(0), R, R), Shard(0)),
        ("n", (R, Shard(0), Shard(0)), Shard(1)),
        ("k", (Shard(1), Shard(1), P), P),
    ],
)
def test_sharding_a_factor_of_a_linear(factor, operands, result):
    strategy = shard_factor(linear_rule(), factor)
    assert strategy.operands == operands
    assert strategy.results == (result,)


def test_every_strategy_of_a_linear_on_two_ranks():
    assert [str(s) for s in axis_strategies(linear_rule(), 2)] == [
        "invariant", "replicate", "m", "k", "n", "partial/0+2", "partial/1+2",
    ]  # fmt: skip


def test_factors_that_do_not_divide_are_left_out():
    assert [str(s) for s in axis_strategies(linear_rule(), 4)][2:4] == ["m", "k"]


def test_whole_factors_are_never_sharded():
    rule = Rule({"a": 8, "b": 8}, ((("a",), ("b",)),), ((("a",), ("b",)),), whole=frozenset({"b"}))
    assert [str(s) for s in axis_strategies(rule, 2)] == ["invariant", "replicate", "a"]


def ways(graph, name, mesh, strips):
    node = graph.by_name[name]
    return choices_of(graph, node, mesh, axis_ways(graph, node, rule_of(graph, node), mesh, strips, None, {}))


def test_a_sequence_survives_being_merged_behind_the_batch():
    """x[b, s, h] -> relu -> view[b*s, h] -> relu -> view[b, s, h]: the sequence is strip-wise in the middle."""
    b, shape, flat = Build(), (2, 8, 4), (16, 4)
    value = b.relu("relu", b.leaf("w", *shape, op="param"))
    middle = b.relu("middle", b.call("merged", "view.default", *flat, self=value, size=flat))
    graph = b.graph(b.call("parted", "view.default", *shape, self=middle, size=shape))
    cuts = DecisionGraph(fold_off(graph), rules_of(graph)).cuts((4,))
    assert cuts[Ref("merged")] == {0: frozenset({2})}
    strips = cuts[Ref("merged")], cuts[Ref("middle")]
    choices = ways(graph, "middle", Mesh.of(a=4), strips)
    assert (Shard(0, 2),) in [choice.results[0] for choice in choices]


def test_a_cut_that_no_one_can_use_is_dropped():
    """Softmax over the merged dim keeps it whole, so nothing asks for strips."""
    b = Build()
    merged = b.call("merged", "view.default", 16, self=b.leaf("w", 2, 8, op="param"), size=(16,))
    graph = b.graph(b.call("soft", "softmax.int", 16, self=merged, dim=0, dtype=None))
    assert not DecisionGraph(fold_off(graph), rules_of(graph)).cuts((2, 4))


def test_an_unknown_operator_is_replicated():
    b = Build()
    graph = b.graph(b.call("odd", "house.odd.default", 4, 4, x=b.leaf("x", 4, 4, op="param")))
    choices = ways(graph, "odd", Mesh.of(a=2, b=2), ({}, {}))
    assert {t for choice in choices for layout in (*choice.operands, *choice.results) for t in layout} == {I, R}


def test_how_leaves_may_be_stored():
    param = Node("w", "param", (), (TensorType((8, 6), "float32", True),), target="w")
    assert leaf_layouts(param, Mesh.of(a=4), {}) == [(I,), (Shard(0),)]
    batch = Node("x", "input", (), (TensorType((8, 6), "float32"),), target="x")
    assert leaf_layouts(batch, Mesh.of(a=2), {}) == [(R,), (Shard(0),)]
    scale = Node("s", "buffer", (), (TensorType((), "float32"),), target="s")
    assert leaf_layouts(scale, Mesh.of(a=2), {}) == [(R,)]
