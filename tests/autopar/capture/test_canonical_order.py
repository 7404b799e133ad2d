"""Order: a set that the model's code walks leaves no trace in the graph, and nothing else loses its place."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.capture import capture
from autopar.capture.lowering import lower
from planner.cost.cluster import ClusterSpec
from planner.ir.folding import fold
from planner.ir.graph import Graph

KINDS = {"near", "far", "whole"}
LENGTH, WIDTH = 6, 16
DRAWN = {"near": 3, "far": 5, "whole": 7}


class Table(nn.Module):
    """Positions times a frequency: modules that are alike, so that folding traces one of them and copies it."""

    def __init__(self, frequency: float):
        super().__init__()
        self.register_buffer("frequency", torch.tensor(frequency))

    def forward(self, positions: Tensor) -> Tensor:
        return torch.sin(positions * self.frequency)


class Layer(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.up = kind, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        shifted = table[:, None] * 2  # reads no parameter, and belongs to the layer all the same
        return x + torch.relu(self.up(x + shifted)).masked_fill(mask[:, None], 0.25)


class Kinds(nn.Module):
    """Makes a table and a mask for each kind of its layers, in the order in which ``kinds`` is walked."""

    def __init__(self, kinds: Collection[str], draws: bool = False):
        super().__init__()
        self.kinds, self.draws = kinds, draws
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.tables = nn.ModuleDict({kind: Table(at + 0.5) for at, kind in enumerate(sorted(kinds))})
        self.layers = nn.ModuleList([Layer(kind) for kind in ("far", "near", "whole", "near", "far", "whole")])

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(LENGTH).float()
        tables, masks, noise = {}, {}, x.new_zeros(())
        for kind in self.kinds:
            tables[kind] = self.tables[kind](positions)
            masks[kind] = positions < 1
            if kind != "whole":
                masks[kind] = masks[kind] | (positions > (4 if kind == "far" else 2))
            if kind == "far":
                tables[kind] = tables[kind] / (tables["far"] + 2).log()
            if self.draws:
                noise = noise + torch.rand(DRAWN[kind]).sum()
        x = self.enter(x) + noise
        for layer in self.layers:
            x = layer(x, tables[layer.kind], masks[layer.kind])
        return x.square().mean()


def batch() -> Tensor:
    return torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def graph_of(kinds: Collection[str], draws: bool = False, folded: bool = True) -> Graph:
    torch.manual_seed(0)
    return lower(capture(Kinds(kinds, draws), (batch(),), fold=folded))


def decided(kinds: Collection[str]) -> str:
    """The order in which this process walks the kinds, and all that a plan holds but for the seconds that it took."""
    torch.manual_seed(0)
    plan = autopar.plan(Kinds(kinds), ClusterSpec.local(2), example_args=(batch(),), pin={"data": 2}).to_dict()
    del plan["search"]["seconds"]
    return json.dumps([list(kinds), plan])


@pytest.mark.parametrize("folded", [True, False], ids=["folded", "whole"])
def test_the_graph_is_the_same_in_whatever_order_a_set_is_walked(folded: bool) -> None:
    expected, *others = (graph_of(kinds, folded=folded) for kinds in itertools.permutations(sorted(KINDS)))
    assert len(others) == 5
    assert all(other == expected for other in others)


def test_what_is_read_first_is_computed_first() -> None:
    graph = graph_of(("whole", "near", "far"))
    made = [node.path.removeprefix("tables.") for node in graph.nodes if node.path.startswith("tables.")]
    assert [kind for kind, _ in itertools.groupby(made)] == ["far", "near", "whole"]


def test_blocks_stay_whole() -> None:
    graph = graph_of(("whole", "near", "far"))
    nodes = [node for node in graph.nodes if not node.is_leaf]
    paths = [path for path, _ in itertools.groupby(".".join(node.path.split(".")[:2]) for node in nodes)]
    assert [path for path in paths if path.startswith("layers")] == [f"layers.{at}" for at in range(6)]
    assert max(map(len, fold(graph).kinds)) == 6


def test_random_numbers_are_drawn_in_micro_batch() -> None:
    for kinds in itertools.permutations(sorted(KINDS)):
        drawn = [node.results[0].shape for node in graph_of(kinds, draws=True).nodes if node.op == "aten.rand.default"]
        assert drawn == [(DRAWN[kind],) for kind in kinds]


def test_what_was_put_in_order_computes_what_the_model_does() -> None:
    torch.manual_seed(0)
    model = Kinds(("whole", "near", "far"))
    found = autopar.verify(model, ClusterSpec.local(4), example_args=(batch(),), mesh={"data": 2, "tensor": 2})
    assert found.verdict == "verified"


def test_every_process_plans_alike() -> None:
    other = subprocess.run(
        [
            sys.executable,
            "-c",
            "from tests.autopar.capture.test_canonical_order import KINDS, decided; print(decided(KINDS))",
        ],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    walked, plan = json.loads(other.stdout)
    _, again = json.loads(decided(walked[::-1]))
    assert plan == again
