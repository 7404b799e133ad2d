"""Exchange: what the ranks of a pipeline pass one another, counted by hand."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from planner.analysis.pipeline.peak_report import peak_micro_batched
from planner.analysis.pipeline.staged import Staged, price
from planner.analysis.prediction import predict_micro_batched
from planner.cost.model import CostModel
from planner.formulation.constraints.pins import Pins
from planner.formulation.stage_boundaries import Exchange, crossing
from planner.formulation.training import Training
from planner.ir.folding import fold
from planner.ir.graph import Graph, Node, Ref, TensorType
from planner.ir.layout import Axis
from planner.plan.document.fingerprint import model_facts
from planner.plan.plan import Plan, Search, describe
from planner.plan.report import text
from planner.search.branch_and_bound import Searched
from planner.search.search import search
from tests.planner.plans import cluster, residual_mlp

BATCH, WIDTH, LAYERS, MICRO_BATCHED_PLANS = 64, 256, 6, 8


def skipping() -> Graph:
    """The residual MLP, with the stem's weight and result and a mask without gradient read again at the end."""
    plain = residual_mlp(LAYERS, WIDTH, BATCH)
    stem, *layers, head, loss = [node for node in plain.nodes if not node.is_leaf]
    leaves = [node for node in plain.nodes if node.is_leaf]
    bools = TensorType((BATCH, WIDTH), "bool", False)
    mask = Node("mask", "aten.gt.Scalar", (("self", Ref("x")), ("other", 0.0)), (bools,), path="mask")
    whole = stem.results
    last = Ref(layers[-1].name)
    again = Node("again", "aten.linear.default", (("input", last), ("weight", Ref("stem_w"))), whole, path="again")
    skip = (("self", Ref("again")), ("other", Ref("stem")), ("alpha", 1))
    joined = Node("joined", "aten.add.Tensor", skip, whole, path="end")
    hidden = (("self", Ref("joined")), ("mask", Ref("mask")), ("value", 0.0))
    masked = Node("masked", "aten.masked_fill.Scalar", hidden, whole, path="end")
    args = tuple((name, Ref("masked") if name == "input" else value) for name, value in head.args)
    return Graph((*leaves, mask, stem, *layers, again, joined, masked, replace(head, args=args), loss), plain.outputs)


def searched(graph: Graph, pin: dict[str, Any], ranks: int) -> tuple[Searched, Staged]:
    found = search(graph, cluster(ranks), Pins.parse(pin), Training())
    assert found.staged is not None
    return found, found.staged


def planned(graph: Graph, pin: dict[str, Any], ranks: int) -> Plan:
    found, micro_batched = searched(graph, pin, ranks)
    predicted = predict_micro_batched(found.assignment, micro_batched)
    looked = Search(found.status, found.gap, found.seconds)
    return describe(found.assignment, model_facts(graph, "MLP"), pin, predicted, looked, micro_batched)


def test_what_later_blocks_read_crosses_all_between() -> None:
    folded = fold(skipping())
    last = {ref: at for at, each in enumerate(folded.instances) for ref in each.block.inputs}
    for at, values in enumerate(crossing(folded)):
        before = {ref for each in folded.instances[: at + 1] for ref in each.block.outputs}
        assert set(values) == {ref for ref in before if last.get(ref, 0) > at}
    assert crossing(folded)[-1] == []
    assert {Ref("stem"), Ref("mask")} <= set(crossing(folded)[3])


@pytest.mark.parametrize("schedule, ranks", [("1f1b", (0, 1, 2, 3)), ("zbv", (0, 1, 1, 0))])
def test_values_gradients_the_loss_and_ties(schedule: str, ranks: tuple[int, ...]) -> None:
    pin = {
        "pipeline": len(set(ranks)),
        "data": 2,
        "micro_batches": MICRO_BATCHED_PLANS,
        "schedule": schedule,
        "zero": 0,
    }
    plan = planned(skipping(), pin, 2 * len(set(ranks)))
    rows = BATCH // MICRO_BATCHED_PLANS // 2
    expected = Counter[Exchange]()
    for boundary, (here, there) in enumerate(pairwise(ranks)):
        if here != there:
            both = Exchange("send", (here, there), rows * WIDTH * 4, "forward", boundary)
            expected[both] = expected[replace(both, ranks=(there, here), phase="backward")] = 2 * MICRO_BATCHED_PLANS
            expected[Exchange("send", (here, there), rows * WIDTH, "forward", boundary)] = (
                MICRO_BATCHED_PLANS  # the mask
            )
    everybody = tuple(sorted(set(ranks)))
    expected[Exchange("broadcast", everybody, 16, "forward")] = 1
    if ranks[0] != ranks[-1]:
        expected[Exchange("all_reduce", (ranks[0], ranks[-1]), WIDTH * WIDTH * 4, "backward")] = 1
    assert Counter(dict(plan.predicted.exchanges)) == expected
    for rank in everybody:
        sent = {call for call in expected if call.is_made_by(rank)}
        assert {call.ranks[0] for call in sent if call.kind == "send"} == {rank}
        assert Exchange("broadcast", everybody, 16, "forward") in sent


def test_all_that_read_a_parameter_hold_update_and_sum_it() -> None:
    pin = {"pipeline": 4, "micro_batches": MICRO_BATCHED_PLANS, "schedule": "1f1b", "zero": 0}
    done, found = searched(skipping(), pin, 4)
    alone = price([replace(link, shared=()) for link in found.links], found.pipeline, found.cut)
    size = WIDTH * WIDTH * 4
    more = [held - before for held, before in zip(found.rank_bytes, alone.rank_bytes, strict=True)]
    assert more == [0, 0, 0, 3 * size]  # with Adam's two moments; its gradient comes from operators that read it
    (tied,) = [each for name, each in found.links[0].shared if name == "stem_w"]
    pair = Axis("pipeline", 2, 2)
    assert tied.sum_s == CostModel(cluster(4)).collective_s("all_reduce", pair, size) > 0
    assert tied.update_s > 0
    once = [sum(link.once_s for link in found.links[low:high]) for low, high in pairwise(found.cut.bounds)]
    once[0] += tied.sum_s
    once[3] += tied.gather_s + tied.reduce_s + tied.sum_s + tied.update_s
    assert found.step_s == pytest.approx(found.cut.step_s + max(once), rel=1e-12)
    times = found.times
    by_rank = map(sum, zip(times.gather_s, times.reduce_s, times.update_s, strict=True))
    assert list(by_rank) == pytest.approx(once, rel=1e-12)
    assert sum(peak_micro_batched(done.assignment, found).by_use().values()) == found.peak_bytes


def test_exchanges_are_read_and_shown() -> None:
    plan = planned(skipping(), {"pipeline": 2, "micro_batches": MICRO_BATCHED_PLANS, "schedule": "1f1b"}, 2)
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again.predicted.exchanges == plan.predicted.exchanges
    calls = {(call.kind, call.phase): count for call, count in plan.predicted.calls if call.axis == "pipeline"}
    assert calls[("broadcast", "forward")] == calls[("all_reduce", "backward")] == 2  # both ranks
    assert calls[("send", "backward")] == 2 * MICRO_BATCHED_PLANS
    row = next(line for line in text(plan).splitlines() if line.startswith("  forward") and "send" in line)
    assert row.split()[2:4] == ["pipeline", str(3 * MICRO_BATCHED_PLANS)]
    assert (
        "exchanges"
        not in planned(skipping(), {"pipeline": 1, "micro_batches": MICRO_BATCHED_PLANS}, 2).to_dict()["predicted"]
    )
