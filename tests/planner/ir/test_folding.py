"""Fold: what is found, where it is cut, and what must never be merged."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from planner.ir.folding import Folded, fold, fold_off
from planner.ir.graph import Graph, Node, Ref, TensorType

WIDTH = 16


class Program:
    """Writes a graph down, one operator after another."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.outputs: list[Ref] = []
        self.updates: list[tuple[str, Ref]] = []
        self.path = ""

    def leaf(self, op: str, *shape: int, name: str = "", dtype: str = "float32", grad: bool | None = None) -> Ref:
        name = name or f"{op}{len(self.nodes)}"
        grad = op == "param" if grad is None else grad
        self.nodes.append(Node(name, op, (), (TensorType(shape, dtype, grad),), target=name))
        return Ref(name)

    def op(self, op: str, *reads: Ref, width: int = WIDTH, dtype: str = "float32", at: str = "", **static: Any) -> Ref:
        name = f"{op}_{len(self.nodes)}"
        args = (*((f"arg{i}", ref) for i, ref in enumerate(reads)), *static.items())
        path = ".".join(part for part in (self.path, at) if part)
        self.nodes.append(Node(name, op, args, (TensorType((4, width), dtype, True),), path=path))
        return Ref(name)

    def linear(self, x: Ref, weight: Ref | None = None, width: int = WIDTH, at: str = "") -> Ref:
        return self.op("linear", x, weight or self.leaf("param", width, WIDTH), width=width, at=at)

    def graph(self, *outputs: Ref) -> Graph:
        graph = Graph(tuple(self.nodes), (*self.outputs, *outputs), tuple(self.updates))
        graph.check()
        return graph


def layer(p: Program, x: Ref, *, weight: Ref | None = None, mask: Ref | None = None, **static: Any) -> Ref:
    """A pre-norm layer: two residual branches, eight nodes, four weights."""
    h = p.op("norm", x, p.leaf("param", WIDTH), eps=1e-5, at="attn.norm")
    h = p.op("attend", h, *([mask] if mask else []), at="attn", **static)
    x = p.op("add", x, p.linear(h, weight, at="attn.out"))
    h = p.linear(p.op("norm", x, p.leaf("param", WIDTH), eps=1e-5, at="mlp.norm"), at="mlp.up")
    return p.op("add", x, p.op("gelu", h, at="mlp.act"))


def stack(
    layers: int, build: Callable[[Program, Ref, int], Ref], *, paths: bool = True, p: Program | None = None
) -> Graph:
    """Embedding, ``layers`` times ``build``, head."""
    p = p or Program()
    p.path = "embed" if paths else ""
    x = p.op("embedding", p.leaf("input", 4, dtype="int64"), p.leaf("param", 32, WIDTH))
    for i in range(layers):
        p.path = f"layers.{i}" if paths else ""
        x = build(p, x, i)
    p.path = "head" if paths else ""
    return p.graph(p.linear(p.op("norm", x, p.leaf("param", WIDTH), eps=1e-5), width=32))


def folded(graph: Graph) -> Folded:
    result = fold(graph)
    result.check()
    return result


def shape(result: Folded) -> list[tuple[int, int]]:
    """(instances, nodes of one) per kind."""
    return [(len(kind), len(kind[0].block.nodes)) for kind in result.kinds]


def order(result: Folded) -> list[int]:
    return [instance.kind for instance in result.instances]


# --- repeats are found -------------------------------------------------------------------------------------


def test_a_stack_of_layers_is_one_kind() -> None:
    result = folded(stack(12, lambda p, x, i: layer(p, x)))
    assert shape(result) == [(1, 1), (12, 8), (1, 2)]
    assert result.names == ("embed", "layers.*", "head")
    assert [instance.block.path for instance in result.kinds[1]] == [f"layers.{i}" for i in range(12)]


def test_code_without_modules_folds_alike() -> None:
    result = folded(stack(12, lambda p, x, i: layer(p, x), paths=False))
    assert shape(result) == [(1, 1), (12, 8), (1, 2)]
    assert len(set(result.names)) == 3


def test_a_block_says_what_crosses_its_boundary() -> None:
    p = Program()
    mask = p.leaf("input", 4, 4, name="mask")
    result = folded(stack(3, lambda p, x, i: layer(p, x, mask=mask), p=p))
    first, second, _ = (instance.block for instance in result.kinds[1])
    assert first.inputs[0].node.startswith("embedding")
    assert second.inputs[0] == first.outputs[0] == Ref(first.nodes[-1].name)
    assert [str(ref)[:5] for ref in second.inputs[1:]] == ["param", "mask", "param", "param", "param"]


def test_the_first_layer_of_a_stack_may_differ() -> None:
    def build(p: Program, x: Ref, i: int) -> Ref:
        q = p.linear(x)
        if i == 0:
            bias.append(p.op("relative_bias", p.leaf("param", 8)))
        return p.op("add", x, p.linear(p.op("attend", q, *bias)))

    bias: list[Ref] = []
    result = folded(stack(6, build))
    assert shape(result) == [(1, 6), (5, 4), (1, 2)]
    assert all(bias[0] in instance.block.inputs for instance in result.kinds[1])


def test_two_stacks_are_two_kinds() -> None:
    def build(p: Program, x: Ref, i: int) -> Ref:
        return layer(p, x) if i < 5 else layer(p, layer(p, x, causal=True), mask=Ref("input0"))

    assert shape(folded(stack(9, build))) == [(1, 1), (5, 8), (4, 16), (1, 2)]


def test_equal_stacks_apart_are_one_kind() -> None:
    def build(p: Program, x: Ref, i: int) -> Ref:
        return p.op("pool", x) if i == 4 else layer(p, x)

    result = folded(stack(9, build))
    assert shape(result) == [(1, 1), (8, 8), (1, 1), (1, 2)]
    assert order(result) == [0, 1, 1, 1, 1, 2, 1, 1, 1, 1, 3]


@pytest.mark.parametrize("paths", [True, False])
def test_a_layer_between_odd_ones_is_still_that_layer(paths: bool) -> None:
    def build(p: Program, x: Ref, i: int) -> Ref:
        return p.op(f"odd{i}", x) if i in (3, 5) else layer(p, x)

    assert order(folded(stack(9, build, paths=paths))) == [0, 1, 1, 1, 2, 1, 3, 1, 1, 1, 4]


@pytest.mark.parametrize("paths", [True, False])
def test_alternating_layers_fold_as_pairs(paths: bool) -> None:
    result = folded(stack(8, lambda p, x, i: layer(p, x, window=128 if i % 2 else 0), paths=paths))
    assert shape(result) == [(1, 1), (4, 16), (1, 2)]


def test_mostly_one_kind_of_layer_folds_as_two_kinds() -> None:
    result = folded(stack(20, lambda p, x, i: layer(p, x, window=128 if i % 6 < 5 else 0)))
    assert shape(result) == [(1, 1), (17, 8), (3, 8), (1, 2)]


def test_equal_towers_fold_by_layer() -> None:
    p = Program()
    towers = []
    for tower in ("left", "right"):
        p.path = f"{tower}.embed"
        x = p.op("embedding", p.leaf("input", 4, dtype="int64"), p.leaf("param", 32, WIDTH))
        for i in range(6):
            p.path = f"{tower}.layers.{i}"
            x = layer(p, x)
        towers.append(x)
    result = folded(p.graph(p.op("similarity", *towers)))
    assert shape(result) == [(2, 1), (12, 8), (1, 1)]
    assert result.names[1] == "*.layers.*"


def test_interleaved_stacks_fold_as_pairs() -> None:
    p = Program()
    x = p.op("embedding", p.leaf("input", 4, dtype="int64"))
    y = p.op("patch", p.leaf("input", 4))
    for i in range(5):
        p.path = f"text.{i}"
        x = layer(p, x, causal=True)
        p.path = f"image.{i}"
        y = p.op("gelu", p.linear(y))
    result = folded(p.graph(x, y))
    assert shape(result) == [(1, 2), (5, 10)]
    assert [len(instance.block.outputs) for instance in result.kinds[1]] == [2] * 5


def test_a_chain_of_small_layers_folds() -> None:
    result = folded(stack(4, lambda p, x, i: p.op("relu", p.linear(x))))
    assert shape(result) == [(1, 1), (4, 2), (1, 2)]


def test_neighbours_that_merely_look_alike_stay_together() -> None:
    def build(p: Program, x: Ref, i: int) -> Ref:
        q, k, v = (p.op("view", p.linear(x)) for _ in range(3))
        return p.op("slice", p.op("slice", p.op("attend", q, k, v)))

    assert shape(folded(stack(1, build))) == [(1, 12)]


def test_skip_connections_cross_windows() -> None:
    p = Program()
    skips: list[Ref] = []

    def build(p: Program, x: Ref, i: int) -> Ref:
        if i < 4:
            skips.append(layer(p, x))
            return skips[-1]
        return p.op("middle", x) if i == 4 else layer(p, p.op("cat", x, skips.pop()))

    result = folded(stack(9, build, p=p))
    assert shape(result) == [(1, 1), (4, 8), (1, 1), (4, 9), (1, 2)]
    up = [instance.block for instance in result.kinds[3]]
    down = [instance.block for instance in result.kinds[1]]
    assert [block.inputs[1] for block in up] == [block.outputs[-1] for block in reversed(down)]


def test_a_value_may_skip_a_block() -> None:
    values: list[Ref] = []

    def build(p: Program, x: Ref, i: int) -> Ref:
        values.append(layer(p, x, mask=values[-2] if i >= 2 else None))
        return values[-1]

    result = folded(stack(8, build))
    assert (6, 8) in shape(result)


# --- where the cut goes ------------------------------------------------------------------------------------


def test_the_cut_crosses_the_fewest_values() -> None:
    """One wide value in the module's middle rather than two narrow ones between modules."""

    def build(p: Program, x: Ref, i: int) -> Ref:
        joined = p.op("join", x, sides[-1], width=4 * WIDTH)
        sides.append(p.linear(p.op("gelu", joined)))
        return p.op("tail", p.linear(joined))

    p = Program()
    sides = [p.leaf("input", 4, WIDTH)]
    result = folded(stack(6, build, p=p))
    repeated = max(result.kinds, key=len)
    assert [len(instance.block.outputs) for instance in repeated] == [1] * len(repeated)
    assert repeated[0].block.nodes[-1].op == "join"


def test_the_cut_crosses_the_fewest_bytes() -> None:
    def build(p: Program, x: Ref, i: int) -> Ref:
        narrow = p.op("down", p.op("gelu", x, width=64), p.leaf("param", WIDTH, 64))
        return p.op("up", narrow, p.leaf("param", 64, WIDTH), width=64)

    repeated = max(folded(stack(5, build, paths=False)).kinds, key=len)
    assert [node.op for node in repeated[0].block.nodes] == ["up", "gelu", "down"]


def test_a_stack_is_cut_like_its_equal() -> None:
    """Code without modules, interrupted inside a layer: the cut between its branches would do as well."""
    result = folded(stack(20, lambda p, x, i: layer(p, x, window=int(i == 10)), paths=False))
    assert shape(result) == [(1, 1), (19, 8), (1, 8), (1, 2)]


def test_collected_hidden_states_do_not_move_the_cut() -> None:
    def build(p: Program, x: Ref, i: int) -> Ref:
        p.outputs.append(layer(p, x))
        return p.outputs[-1]

    result = folded(stack(6, build))
    assert shape(result) == [(1, 1), (6, 8), (1, 2)]
    assert all(len(instance.block.outputs) == 1 for instance in result.kinds[1])


def test_outputs_are_the_union_over_instances() -> None:
    def build(p: Program, x: Ref, i: int) -> Ref:
        y = layer(p, x)
        if i == 2:
            p.outputs.append(Ref(p.nodes[-2].name))
        if i == 3:
            p.updates.append(("seen", Ref(p.nodes[-3].name)))
        return y

    result = folded(stack(5, build))
    ops = [[ref.node.split("_")[0] for ref in instance.block.outputs] for instance in result.kinds[1]]
    assert ops == [["linear", "gelu", "add"]] * 5


def test_many_readers_of_the_last_layer_change_nothing() -> None:
    p = Program()
    p.outputs = [p.leaf("input", 4)]
    graph = stack(5, lambda p, x, i: layer(p, x), p=p)
    last = next(node for node in reversed(graph.nodes) if node.op == "add")
    p.outputs += [p.op(f"probe{i}", Ref(last.name)) for i in range(4)]
    result = folded(p.graph(*graph.outputs))
    assert shape(result) == [(1, 1), (5, 8), (1, 6)]
    assert [len(instance.block.outputs) for instance in result.kinds[1]] == [1] * 5


# --- what must not be merged ---------------------------------------------------------------------------------

ODD: dict[str, Callable[[Program, Ref], dict[str, Any]]] = {
    "static argument": lambda p, x: {"window": 128},
    "number type of a static argument": lambda p, x: {"window": True},
    "tied weight": lambda p, x: {"weight": Ref("tied")},
    "buffer for a param": lambda p, x: {"weight": p.leaf("buffer", WIDTH, WIDTH, grad=True)},
    "input for a param": lambda p, x: {"weight": p.leaf("input", WIDTH, WIDTH, grad=True)},
    "frozen param": lambda p, x: {"weight": p.leaf("param", WIDTH, WIDTH, grad=False)},
    "computed for a param": lambda p, x: {"weight": Ref("computed")},
    "type of a param": lambda p, x: {"weight": p.leaf("param", WIDTH, WIDTH, dtype="bfloat16")},
    "shape of a param": lambda p, x: {"weight": p.leaf("param", WIDTH + 1, WIDTH)},
    "operand": lambda p, x: {"mask": x},
}


@pytest.mark.parametrize("case", ODD)
def test_an_odd_layer_splits_the_stack(case: str) -> None:
    def build(p: Program, x: Ref, i: int) -> Ref:
        return layer(p, x, **{"window": 1, **(ODD[case](p, x) if i == 4 else {})})

    p = Program()
    tied = p.leaf("param", WIDTH, WIDTH, name="tied")
    p.nodes.append(Node("computed", "seed", (("arg0", tied),), (TensorType((WIDTH, WIDTH), "float32", True),)))
    result = folded(stack(9, build, p=p))
    assert [(count, size) for count, size in shape(result) if count > 1] == [(8, 8)]
    assert [len(result.kinds[kind]) for kind in order(result)] == [1, 8, 8, 8, 8, 1, 8, 8, 8, 8, 1]


def test_the_same_operators_in_another_order_are_another_kind() -> None:
    def build(p: Program, x: Ref, i: int) -> Ref:
        ops = ("norm", "gelu", "tanh") if i < 4 else ("gelu", "norm", "tanh")
        for op in ops:
            x = p.op(op, p.linear(x))
        return x

    repeated = [kind for kind in folded(stack(8, build)).kinds if len(kind) > 1]
    seen = [[node.op for node in kind[0].block.nodes] for kind in repeated]
    assert sorted(seen[0]) == sorted(seen[1]) and seen[0] != seen[1]


def test_the_results_of_one_operator_are_told_apart() -> None:
    p = Program()

    def build(p: Program, x: Ref, i: int) -> Ref:
        node = Node(f"split{i}", "split", (("x", x),), (TensorType((4, WIDTH), "float32", True),) * 2)
        p.nodes.append(node)
        halves = Ref(node.name, 0), Ref(node.name, 1)
        return p.linear(p.op("gate", *(halves if i < 4 else reversed(halves))))

    result = folded(stack(8, build, p=p))
    assert order(result) == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_names_that_are_prefixes_of_each_other() -> None:
    def build(p: Program, x: Ref, i: int) -> Ref:
        p.path = f"layer_{i}"
        return layer(p, x, window=i == 1 or i == 10)

    result = folded(stack(12, build))
    assert [instance.block.path for instance in result.kinds[order(result)[2]]] == ["layer_1", "layer_10"]
    assert sorted(len(kind) for kind in result.kinds) == [1, 1, 2, 10]


def test_a_shared_layer_applied_repeatedly_is_one_kind() -> None:
    p = Program()
    shared = p.leaf("param", WIDTH, WIDTH, name="shared")
    result = folded(stack(6, lambda p, x, i: p.op("gelu", p.linear(x, shared)), p=p))
    assert shape(result) == [(1, 1), (6, 2), (1, 2)]
    assert {instance.block.inputs[1] for instance in result.kinds[1]} == {shared}


def test_layers_that_share_weights_in_groups_are_kinds_of_their_own() -> None:
    p = Program()
    weights = [p.leaf("param", WIDTH, WIDTH) for _ in range(2)]
    result = folded(stack(6, lambda p, x, i: layer(p, x, weight=weights[i % 2]), p=p))
    assert order(result) == [0, 1, 2, 1, 2, 1, 2, 3]


def test_a_weight_used_twice_in_each_layer_is_fresh_per_layer() -> None:
    def build(p: Program, x: Ref, i: int) -> Ref:
        weight = p.leaf("param", WIDTH, WIDTH)
        return p.op("gelu", p.linear(p.op("tanh", p.linear(x, weight)), weight))

    result = folded(stack(6, build))
    assert shape(result) == [(1, 1), (6, 4), (1, 2)]
    assert all(len(instance.block.inputs) == 2 for instance in result.kinds[1])


def test_a_weight_tied_to_the_next_layer_is_not_a_fresh_one() -> None:
    p = Program()
    chain = [p.leaf("param", WIDTH, WIDTH) for _ in range(6)]

    def build(p: Program, x: Ref, i: int) -> Ref:
        return p.op("gelu", p.linear(p.op("tanh", p.linear(x, chain[i])), chain[i + 1]))

    assert shape(folded(stack(5, build, p=p))) == [(1, 23)]


# --- edges -------------------------------------------------------------------------------------------------


def test_a_graph_without_operators_has_no_blocks() -> None:
    p = Program()
    for graph in (Graph((), ()), p.graph(p.leaf("input", 4))):
        assert folded(graph).instances == fold_off(graph).instances == ()
        assert folded(graph).names == ()


def test_a_single_operator_is_a_block() -> None:
    p = Program()
    result = folded(p.graph(p.op("gelu", p.leaf("input", 4))))
    assert shape(result) == [(1, 1)]
    assert result.names == ("gelu_1",)


def test_fold_off_is_one_block() -> None:
    graph = stack(5, lambda p, x, i: layer(p, x))
    result = fold_off(graph)
    result.check()
    assert shape(result) == [(1, 43)]
    assert result.instances[0].block.outputs == graph.outputs


def test_a_deep_model_folds_in_no_time() -> None:
    def deep(p: Program, x: Ref, i: int) -> Ref:
        for j in range(9):
            x = layer(p, x, window=j)
        return x

    graph = stack(126, deep)
    start = time.perf_counter()
    result = fold(graph)
    assert time.perf_counter() - start < 2.0  # 0.2 s on one slow core; the rest is for busy ones
    assert shape(result) == [(1, 1), (126, 72), (1, 2)]
