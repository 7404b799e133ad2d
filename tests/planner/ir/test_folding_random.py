"""Fold on random programs: everything is kept, equal is equal, and nothing else is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import networkx as nx
from hypothesis import event, given
from hypothesis import strategies as st

from planner.ir.folding import Block, Folded, fold
from planner.ir.graph import Graph, Node, Ref, TensorType
from planner.ir.repetition import SMALL

STORED = ("param", "buffer", "const")
DTYPES = ("float32", "bfloat16")
GLOBALS = ("mask", "table", "shared")


@dataclass(frozen=True)
class Step:
    """One operator of a unit. Operands: ``-k`` is the k-th last value, a word is a leaf; ``fresh`` a param."""

    op: str
    reads: tuple[int | str, ...]
    static: int
    dtype: str


@dataclass(frozen=True)
class Program:
    """``layers`` written one after another, each reading the last value before it and leaves only."""

    layers: tuple[tuple[Step, ...], ...]
    kept: frozenset[int]
    paths: bool

    def graph(self) -> Graph:
        tensor = TensorType((4, 4), "float32", True)
        nodes = [
            Node("ids", "input", (), (tensor,)),
            Node("mask", "input", (), (tensor,)),
            Node("table", "buffer", (), (tensor,)),
            Node("shared", "param", (), (tensor,)),
            Node("embed", "embed", (("ids", Ref("ids")),), (tensor,), path="embed" if self.paths else ""),
        ]
        values = [Ref("embed")]
        outputs = []
        for i, layer in enumerate(self.layers):
            values = values[-1:]
            for j, step in enumerate(layer):
                args: list[tuple[str, object]] = [("static", step.static)]
                for position, read in enumerate(step.reads):
                    if read == "fresh":
                        nodes.append(Node(f"w{i}.{j}.{position}", "param", (), (tensor,)))
                        ref = Ref(nodes[-1].name)
                    else:
                        ref = Ref(read) if isinstance(read, str) else values[max(read, -len(values))]
                    args.append((f"x{position}", ref))
                kind = replace(tensor, dtype=step.dtype)
                nodes.append(Node(f"n{i}.{j}", step.op, tuple(args), (kind,), path=f"layers.{i}" if self.paths else ""))
                values.append(Ref(nodes[-1].name))
            if i in self.kept:
                outputs.append(values[-1])
        graph = Graph(tuple(nodes), (*outputs, values[-1]))
        graph.check()
        return graph


reads = st.lists(st.integers(-4, -1) | st.sampled_from((*GLOBALS, "fresh")), max_size=2).map(tuple)
steps = st.builds(
    lambda op, reads, static, dtype: Step(op, (-1, *reads), static, dtype),
    st.sampled_from("abc"), reads, st.integers(0, 1), st.sampled_from(DTYPES),
)  # fmt: skip
units = st.lists(steps, min_size=2, max_size=12).map(tuple)
counts = st.integers(2, 6)
programs = st.builds(
    lambda unit, count, kept, paths: Program((unit,) * count, frozenset(kept), paths),
    units, counts, st.sets(st.integers(0, 5), max_size=2), st.booleans(),
)  # fmt: skip
anything = st.builds(Program, st.lists(units, max_size=5).map(tuple), st.just(frozenset()), st.booleans())


def drawn(graph: Graph, block: Block, readers: dict[Ref, int]) -> nx.DiGraph[str]:
    """A block with its inputs, labelled so that isomorphism means what a kind means."""
    picture: nx.DiGraph[str] = nx.DiGraph()
    for node in block.nodes:
        static = tuple((name, repr(value)) for name, value in node.args if not isinstance(value, Ref))
        picture.add_node(node.name, label=(node.op, static, node.results))
    for ref in block.inputs:
        source = graph.by_name[ref.node]
        tied = source.name if source.op in STORED and readers[ref] > 1 else ""
        picture.add_node(str(ref), label=(source.op if source.is_leaf else "", graph.type_of(ref), tied))
    for node in block.nodes:
        for name, value in node.args:
            if isinstance(value, Ref):
                edge = picture.get_edge_data(str(value), node.name, {"label": frozenset()})
                picture.add_edge(str(value), node.name, label=edge["label"] | {name})
    return picture


def same(one: dict[str, object], other: dict[str, object]) -> bool:
    return one["label"] == other["label"]


def check(result: Folded) -> None:
    """What :meth:`Folded.check` asserts, and isomorphism as networkx sees it."""
    result.check()
    readers: dict[Ref, int] = {}
    for instance in result.instances:
        for ref in instance.block.inputs:
            readers[ref] = readers.get(ref, 0) + 1
    for first, *others in result.kinds:
        picture = drawn(result.graph, first.block, readers)
        for other in others:
            twin = drawn(result.graph, other.block, readers)
            assert nx.is_isomorphic(picture, twin, node_match=same, edge_match=same)


def distinct_nodes(result: Folded) -> int:
    return sum(len(kind[0].block.nodes) for kind in result.kinds)


@given(anything)
def test_any_program_is_kept_whole(program: Program) -> None:
    check(fold(program.graph()))


@given(programs)
def test_repeated_units_are_isomorphic(program: Program) -> None:
    check(fold(program.graph()))


@given(programs)
def test_work_does_not_grow_with_depth(program: Program) -> None:
    deeper = replace(program, layers=program.layers * 4, kept=frozenset())
    result = fold(deeper.graph())
    unit = program.layers[0]
    event(f"kinds: {len(result.kinds)}")
    if len(unit) >= SMALL or any("fresh" in step.reads for step in unit):
        assert distinct_nodes(result) <= 1 + 2 * len(unit)


@given(programs, st.data())
def test_a_mutated_node_is_equal_to_no_other(program: Program, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(program.layers) - 1), label="layer")
    layer = program.layers[at]
    j = data.draw(st.integers(0, len(layer) - 1), label="step")
    odd = data.draw(
        st.sampled_from(
            [
                replace(layer[j], op="odd"),
                replace(layer[j], static=7),
                replace(layer[j], dtype="float16"),
                replace(layer[j], reads=(*layer[j].reads, -1, -1, -1)),
                replace(layer[j], reads=("ids", "ids")),
            ]
        ),
        label="mutation",
    )
    mutated = (*layer[:j], odd, *layer[j + 1 :])
    graph = replace(program, layers=(*program.layers[:at], mutated, *program.layers[at + 1 :])).graph()
    result = fold(graph)
    check(result)
    (kind,) = (i.kind for i in result.instances if graph.by_name[f"n{at}.{j}"] in i.block.nodes)
    assert len(result.kinds[kind]) == 1


@given(programs, st.data())
def test_rewired_and_retied_layers_are_told_apart(program: Program, data: st.DataObject) -> None:
    """Mutations that may, by chance, mean the same: the independent check decides."""
    layers = list(program.layers)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(layers) - 1))
        j = data.draw(st.integers(0, len(layers[at]) - 1))
        other = data.draw(reads)
        layers[at] = (*layers[at][:j], replace(layers[at][j], reads=(-1, *other)), *layers[at][j + 1 :])
    check(fold(replace(program, layers=tuple(layers)).graph()))
