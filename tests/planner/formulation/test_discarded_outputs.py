"""Which outputs a training step does not keep, and that a plan, its report and its memory know."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.formulation.discarded_outputs import discarded_outputs
from planner.ir.graph import Graph, Ref
from planner.plan.plan import Plan
from tests.planner.plans import cluster, plan_of, residual_mlp, unwrapped

LOSS, WIDE = residual_mlp(layers=2, width=64, batch=48).outputs[0], Ref("add1")


def returning(*names: str) -> Graph:
    """The model that returns its loss by these names, and by all others what its layers make."""
    graph = residual_mlp(layers=2, width=64, batch=48)
    return replace(graph, outputs=tuple(LOSS if "loss" in name else WIDE for name in names), output_names=names)


@pytest.mark.parametrize(
    "names, discards, micro_batches, expected",
    [
        (("loss", "logits"), None, 1, set()),
        (("loss", "logits"), None, 4, {1}),
        (("logits", "loss", "other loss"), None, 4, {0}),  # numbers take no memory
        (("other loss", "logits", "loss"), ("other loss", "logits"), 1, {1}),
        (("loss", "logits", "hidden.0"), ("hidden.0",), 4, {2}),
        (("loss", "logits"), ("loss",), 4, set()),  # backward begins at it
        (("loss", "logits"), ("gone",), 4, set()),  # of a further program, which returns less
        (("logits", "hidden"), None, 4, set()),  # without a loss backward may begin at any
        (("logits", "hidden"), ("logits",), 4, set()),
    ],
)
def test_what_is_not_kept(
    names: tuple[str, ...], discards: tuple[str, ...] | None, micro_batches: int, expected: set[int]
) -> None:
    assert discarded_outputs(returning(*names), discards, micro_batches) == expected


def test_a_model_that_trains_nothing_keeps_all() -> None:
    graph = returning("loss", "logits")
    nodes = tuple(replace(n, results=tuple(replace(t, grad=False) for t in n.results)) for n in graph.nodes)
    assert discarded_outputs(replace(graph, nodes=nodes), ("logits",), 4) == set()


def test_the_plan_and_its_report_say_so_and_count_no_memory_for_it() -> None:
    names = ("loss", "logits", *(f"hidden.{number}" for number in range(3)))
    peaks = {}
    for returned in (names, names[:1]):
        plan = plan_of(returning(*returned), cluster(1), {"micro_batches": 4})
        assert plan.discards == returned[1:] and Plan.from_dict(plan.to_dict()).discards == plan.discards
        peaks[returned] = plan.predicted.peak_bytes
        said = "outputs logits, hidden.0, hidden.1 and 1 more not kept by training steps; outputs='all'"
        assert (said in unwrapped(plan)) == (len(returned) > 1)
        assert [held.bytes for held in plan.fullest.alive if held.name.startswith("output")] == [4 * 4]  # its terms
    assert peaks[names] == peaks[names[:1]]
    assert "discards" not in plan.to_dict()
    assert plan_of(returning(*names), cluster(2), {"data": 2}).discards == ()
