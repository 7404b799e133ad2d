"""Micro-batched plans: micro-batches and pipelines as the search finds them, as documents, and what they refuse."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.analysis.pipeline.peak_report import COMING, peak_micro_batched
from planner.analysis.pipeline.staged import waiting
from planner.analysis.prediction import predict_micro_batched
from planner.base.errors import InfeasibleError, InputError, PinError, PlanError
from planner.cost.cluster import ClusterSpec
from planner.cost.model import CostModel
from planner.formulation.constraints.pins import Pins
from planner.formulation.search_space import Space
from planner.formulation.strategies import rules_of
from planner.formulation.training import Training
from planner.ir.folding import fold
from planner.ir.graph import Graph, Node, Ref, TensorType
from planner.ir.layout import Mesh
from planner.plan.document.detail import Account
from planner.plan.document.fingerprint import model_facts
from planner.plan.plan import Plan, Search, describe, refold, reprice
from planner.plan.report.summary import blocks, stages
from planner.plan.timeline import bubble_of
from planner.search.block_splitting import finer
from planner.search.branch_and_bound import Searched
from planner.search.parallel_config import ParallelConfig, micro_batched
from planner.search.search import search
from planner.solve.choices import lower_bounds
from tests.planner.plans import WHOLE, Build, cluster, filtered, plan_of, residual_mlp, unwrapped
from tests.planner.search.test_optimum import random_cluster, with_memory

GRAPH = residual_mlp(layers=6, batch=64)


def searched(spec: ClusterSpec, pin: dict[str, Any] | None = None) -> Searched:
    return search(GRAPH, spec, Pins.parse(pin), Training())


@functools.cache
def planned(pin: str = "{}") -> Plan:
    spec, pins = cluster(8), json.loads(pin)
    found = searched(spec, pins)
    assert found.staged is not None
    predicted = predict_micro_batched(found.assignment, found.staged)
    facts = tuple(candidate.facts() for candidate in found.candidates if candidate.proof != "arithmetic")
    looked = Search(found.status, found.gap, found.seconds, facts, len(found.candidates) - len(facts))
    return describe(found.assignment, model_facts(GRAPH, "MLP"), pins, predicted, looked, found.staged)


def test_pipelines_are_never_worse_and_bounds_hold() -> None:
    won = 0
    for number in (0, 7):
        rng = random.Random(number)
        spec = random_cluster(rng, (2, 2))
        plain, both = searched(spec, WHOLE), searched(spec)
        assert both.evaluation.time_s <= plain.evaluation.time_s * (1 + 1e-9)
        assert min(c.bound_s for c in both.candidates) <= both.evaluation.time_s * (1 + 1e-9)
        assert (both.gap > 0) == (both.status == "feasible")
        assert min(c.objective_s for c in both.candidates) == both.evaluation.time_s
        for candidate in both.candidates:
            assert candidate.bound_s <= candidate.objective_s * (1 + 1e-9)
        won += both.staged is not None
        tight = with_memory(spec, both.peak_bytes - 1)
        less = searched(tight)
        assert less.evaluation.time_s >= both.evaluation.time_s * (1 - both.gap) * (1 - 1e-9)
        assert less.peak_bytes <= tight.device.usable_bytes
    assert won


def test_a_pinned_pipeline_is_what_was_pinned() -> None:
    plan = planned(
        '{"pipeline": 4, "data": 2, "micro_batches": 8, "schedule": "interleaved_1f1b", "virtual_stages": 2}'
    )
    assert plan.sizes == {"pipeline": 4, "micro": 8, "data": 2}
    assert (plan.pipeline.schedule, plan.pipeline.ranks, plan.pipeline.virtual_stages) == ("interleaved_1f1b", 4, 2)
    assert len(plan.pipeline.bounds) == 9
    assert sum(plan.predicted.time_s.values()) == pytest.approx(plan.predicted.step_time_s)
    assert plan.predicted.time_s["bubble"] > 0
    assert sum(plan.predicted.memory_bytes.values()) == plan.predicted.peak_bytes
    assert {call.axis for call, _ in plan.predicted.collectives} == {"data"}
    assert plan.certificate.holds


@pytest.mark.parametrize("level", ["none", "selective", "full"])
def test_a_pinned_recomputation_holds_in_every_stage(level: str) -> None:
    """Blocks that repeat recompute as pinned, though memory asks for none, and those alone."""
    pin = {"pipeline": 4, "data": 2, "micro_batches": 8, "recompute": level}
    found, free = searched(cluster(8), pin), searched(cluster(8), {**pin, "recompute": None})
    assert {*free.staged.levels} == {"none"}
    repeated = tuple(
        number
        for number, instance in enumerate(found.assignment.space.folded.instances)
        if len(found.assignment.space.folded.kinds[instance.kind]) > 1
    )
    assert 0 < len(repeated) < len(found.staged.links)
    expected = [level if number in repeated else "none" for number in range(len(found.staged.links))]
    assert [*found.staged.levels] == expected
    assert (found.staged.time_s["recompute"] > 0) == (level != "none")
    assert found.evaluation.time_s >= free.evaluation.time_s * (1 - 1e-9)


def test_a_pipelined_plan_reads_shows_and_comes_back() -> None:
    plan = planned('{"pipeline": 4, "micro_batches": 8, "recompute": "full"}')
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan and again.digest() == plan.digest()
    assert again.pipeline == plan.pipeline
    text = str(again)
    assert "pipeline 4 x micro 8" in text and "4 pipeline ranks" in text and "8 micro-batches" in text
    page = again.to_html()
    assert "4 pipeline ranks" in page
    priced = reprice(again, plan.assignment)
    assert priced.predicted.step_time_s == pytest.approx(plan.predicted.step_time_s, rel=1e-12)
    assert priced.predicted.peak_bytes == plan.predicted.peak_bytes


def test_a_report_says_which_blocks_a_stage_has() -> None:
    plan = planned('{"pipeline": 4, "micro_batches": 8}')
    names = {number: block.name for block in plan.blocks for number in block.at}
    found = []
    for own, text in stages(plan):
        first, _, last = own.partition("-")
        blocks = [each.partition(" x ") for each in text.split(", ")]
        held = [name for count, _, named in blocks for name in ([named] * int(count) if named else [count])]
        found += [held] * (int(last or first) - int(first) + 1)
        assert f"{own}: {text}" in str(plan) and f"stage {own}: {text}" in plan.to_html()
    bounds = itertools.pairwise(plan.pipeline.bounds)
    assert found == [[names[number] for number in range(low, high)] for low, high in bounds]


def test_a_plan_draws_the_step_that_it_predicts(tmp_path: Path) -> None:
    plan = planned('{"pipeline": 4, "micro_batches": 8, "recompute": "full"}')
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    drawn = again.timeline()
    assert drawn.step_s == drawn.end_s == pytest.approx(plan.predicted.step_time_s, rel=1e-12)
    assert drawn.bubble == pytest.approx(bubble_of(drawn.events, 4), rel=1e-9)
    told = f"bubble {drawn.bubble * 100:.1f} %"
    assert told in str(again) and again.to_html().count(told) == 3  # in words, and as the picture's name and title
    again.save_trace(tmp_path / "step.json")
    assert json.loads((tmp_path / "step.json").read_text()) == drawn.trace()


def test_a_plan_that_has_no_timeline_says_why() -> None:
    plan = planned('{"pipeline": 4, "micro_batches": 8, "data": 2}')
    document = plan.to_dict()
    del document["predicted"]["micro_batch_times"]
    old = Plan.from_dict(document)
    with pytest.raises(PlanError, match=r"does not say what its stages take.*autopar\.evaluate"):
        old.timeline()
    assert "does not say what its stages take" in old.to_html() and "of all ranks' time" not in str(old)
    assert plan.pipeline is not None
    fewer = replace(plan.pipeline, schedule="1f1b", virtual_stages=1, bounds=plan.pipeline.bounds[::2])
    recut = replace(plan, pipeline=fewer)
    with pytest.raises(PlanError, match="or was edited since"):
        recut.timeline()
    bare = replace(plan_of(GRAPH, cluster(8)), recorded=Account())
    with pytest.raises(PlanError, match=r"does not say what its operators take.*autopar\.evaluate"):
        bare.timeline()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"stages": ["0-1", *"2345678"]}, "cuts 9 blocks into 8 stages, but the model has 8 blocks"),
        ({"stages": ["0-1", "2-3", "4", "5"]}, "has 4 'stages', and 4 ranks of 2 are 8"),
        ({"stages": ["0-1", "3-4", "5", "6-7"]}, "not every block once, in order"),
        ({"stages": []}, "not every block once, in order"),
        ({"ranks": 2}, "has 8 'stages', and 2 ranks of 2 are 4"),
        ({"ranks": 2, "virtual_stages": 4}, "mesh has 4 ranks, but its cluster has 8 devices"),
        ({"schedule": "1f2b"}, "no schedule '1f2b'"),
        ({"recompute": {"some": "1"}}, "recomputes block 1 at level 'some'"),
        ({"recompute": {"full": "99"}}, "recomputes block 99"),
        ({"recompute": {"full": "0"}}, "recomputes block 0"),
        ({"ranks": None}, "field .pipeline. is wrong"),
    ],
    ids=str,
)
def test_an_edited_pipeline_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    plan = planned('{"pipeline": 4, "micro_batches": 8, "data": 2}')
    data = plan.to_dict()
    data["pipeline"] = {**data["pipeline"], **change}
    with pytest.raises(PlanError, match=message):
        reprice(Plan.from_dict(data), plan.assignment)


@pytest.mark.parametrize(
    "pin, message",
    [
        ({"pipeline": 3}, "which does not divide the 8 devices"),
        ({"pipeline": 4, "tensor": 4}, "pipeline 4 x tensor 4 = 16 does not divide the 8 devices"),
        ({"pipeline": 2, "micro_batches": 7}, "does not divide the batch of 64"),
        ({"micro_batches": 32, "data": 8}, "'data' is 8, which does not divide a micro-batch: .* 64 into 32 of 2"),
        ({"micro_batches": 32, "tensor": 2}, "leave 4 ranks to 'data', which does not divide .* 64 into 32 of 2"),
        ({"pipeline": 8, "virtual_stages": 4}, "every stage needs a block, and this model can be cut into 27 at most"),
    ],
    ids=str,
)
def test_a_wrong_pin_is_named(pin: dict[str, Any], message: str) -> None:
    with pytest.raises(PinError, match=message):
        searched(cluster(8), pin)


def test_stages_whose_data_axis_does_not_divide_the_batch_are_left_out() -> None:
    """12 samples on 8 devices that are all on the data axis: no single stage, but pipelines of 2 and 4."""
    graph, pins = residual_mlp(layers=4, batch=12), Pins.parse({"zero": 0, "recompute": "full"})
    found = search(graph, cluster(8), pins, Training())
    sizes = {
        tuple(candidate.config.sizes.get(name, 1) for name in ("pipeline", "data")) for candidate in found.candidates
    }
    assert sizes == {(2, 4), (4, 2)} and found.staged is not None
    pinned = search(graph, cluster(8), replace(pins, micro_batches=6), Training())
    assert {str(candidate.config) for candidate in pinned.candidates} == {"pipeline 4 x micro 6 x data 2"}
    with pytest.raises(PinError, match=r"'data' is 8 but input 'x' has a batch of 12"):
        search(graph, cluster(8), replace(pins, stages=1, micro_batches=1), Training())
    with pytest.raises(PinError, match=r"leave 8 ranks to 'data', which does not divide .* 12 into 6 of 2"):
        search(graph, cluster(8), replace(pins, stages=1, micro_batches=6), Training())


@pytest.mark.parametrize("pin", [{"pipeline": 4, "data": 2}, {"pipeline": 2, "tensor": 2}], ids=str)
def test_micro_batches_leave_a_sample_to_every_rank(pin: dict[str, Any]) -> None:
    found = searched(cluster(8), {**pin, "schedule": "1f1b"})
    counts = {candidate.config.mesh.micro_batches for candidate in found.candidates}
    assert max(counts) == 32


def test_without_folding_nothing_is_cut() -> None:
    with pytest.raises(InputError, match=r"folding is off, and pipelines .* cut between folded blocks"):
        search(GRAPH, cluster(8), Pins.parse({"pipeline": 4}), Training(), folding=False)


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(PinError, match=r"'pipeline' is 32, .* this model can be cut into 27 at most: pin fewer stages"):
        searched(cluster(32), {"pipeline": 32})


def test_layers_are_cut_where_stages_outnumber_them() -> None:
    """Eight blocks by repetition; sixteen stages take what a layer consists of, all six alike."""
    plan, folded = planned('{"pipeline": 8, "schedule": "zbv"}'), fold(GRAPH)
    assert plan.pipeline is not None and plan.pipeline.bounds[-1] == sum(block.count for block in plan.blocks) > 15
    assert {block.count for block in plan.blocks} == {1, 6} and len(folded.instances) == 8
    assert [block.name for block in plan.blocks] == ["stem", "layers.*.up", "layers.*", "layers.*#2", "head"]
    again, facts = Plan.from_dict(json.loads(json.dumps(plan.to_dict()))), model_facts(GRAPH, "MLP")
    found = refold(again, GRAPH, facts)
    assert [instance.block for instance in found.instances] == [
        instance.block for instance in finer(folded, rules_of(GRAPH), plan.pipeline.bounds[-1]).instances
    ]


def test_a_pipeline_that_does_not_fit_says_by_how_much() -> None:
    leanest = r"pipeline 4 x micro 8 x all 2\)"
    with pytest.raises(InfeasibleError, match=leanest + r" needs [\d,]+ bytes \(.*\), [\d,]+ bytes .*too many"):
        searched(cluster(8, memory="1 MiB"), {"pipeline": 4, "micro_batches": 8})


def test_recipes_are_compared_with_plans_micro_batched() -> None:
    plan = planned('{"pipeline": 4, "micro_batches": 8, "data": 2}')
    told = plan.why_not({"pipeline": 2, "micro_batches": 8, "data": 4})
    there = planned('{"pipeline": 2, "micro_batches": 8, "data": 4}').predicted
    assert told.mesh == "pipeline 2 x micro 8 x data 4" and not told.blocks
    assert told.extra_s == pytest.approx(there.step_time_s - plan.predicted.step_time_s, rel=1e-9)
    assert told.extra_bytes == there.peak_bytes - plan.predicted.peak_bytes
    assert plan.why_not({"data": 8, "micro_batches": 1}).mesh == "data 8"
    refused = plan.why_not({"schedule": "1f1b", "pipeline": 2, "micro_batches": 7}).conflict
    assert refused is not None and refused.limits == ("pin micro_batches = 7",)
    assert plan_of(residual_mlp(), cluster(2), {"data": 2}).why_not({"pipeline": 2}).mesh.startswith("pipeline 2 x")


def test_the_report_tells_a_rank_from_a_moment_and_micro_batches_from_ranks() -> None:
    plan = planned('{"pipeline": 4, "micro_batches": 8, "tensor": 2}')
    assert (
        "in flight in its 2 stages together, on pipeline rank" in str(plan) and "\nwith ," not in plan.predicted.fullest
    )
    plan = planned('{"pipeline": 4, "micro_batches": 8, "data": 2}')
    ops = [op for block in plan.account.blocks for op in block.ops.values()]
    moves = [move for op in ops for move in (*op.before, *op.after)]
    assert {call.axis for move in moves for call in move.calls} == {"data"}
    explained = plan.explain("layers.1.up")
    assert "figures of operators are those of one micro-batch" in str(explained)
    assert all(op.next_best is None for op in explained.ops)


@pytest.mark.parametrize("centred", [False, True])
def test_what_mixes_samples_has_no_plan_in_micro_batches(centred: bool) -> None:
    """A mean over the batch is there after the last micro-batch: a loss may be one, but nothing may read it."""
    b = Build()
    value = b.linear("y", b.leaf("x", 16, 8), 8)
    if centred:
        mean = b.call("mean", "mean.dim", 1, 8, self=value, dim=(0,), keepdim=True)
        value = b.call("centred", "sub.Tensor", 16, 8, self=value, other=mean)
    graph = b.mean(value)
    folded, rules = fold(graph), rules_of(graph)
    for micro_batches in (1, 4):
        mesh = Mesh.of(all=2).micro_batched(micro_batches)
        kept = filtered(Pins(), graph, rules, mesh)
        space = Space(folded, mesh, CostModel(cluster(2)), Training(), rules, *kept)
        assert math.isinf(lower_bounds(space.problem(None)).time_s) == (centred and micro_batches > 1)


def test_2bw_is_planned_by_name_and_says_that_it_changes_training() -> None:
    plan, usual = (
        planned(f'{{"pipeline": 4, "data": 2, "micro_batches": 8, "schedule": "{n}"}}') for n in ("2bw", "1f1b")
    )
    assert plan.pipeline is not None and plan.pipeline.schedule == "2bw"
    for text in (str(plan), plan.to_html()):
        assert "this changes training: an update takes the gradient of the batch before, found one update ago" in text
    assert "changes training" not in str(usual)
    assert plan.predicted.time_s["bubble"] < usual.predicted.time_s["bubble"]
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    alone = searched(cluster(8), {"schedule": "2bw"})
    assert alone.staged is not None and alone.staged.pipeline.schedule == "2bw"


@pytest.mark.parametrize(
    "spec, pin", [(cluster(4), {}), (cluster(8), {"data": 2, "zero": 2})], ids=["whole", "sharded"]
)
def test_2bw_holds_a_second_version_of_the_weights_and_of_their_gradients(
    spec: ClusterSpec, pin: dict[str, Any]
) -> None:
    found = searched(spec, {"pipeline": 4, "micro_batches": 8, "schedule": "2bw", **pin})
    fullest = peak_micro_batched(found.assignment, found.staged)
    assert found.staged.peak_bytes == sum(fullest.by_use().values())
    sizes = {leaf.name: leaf.results[0].size_bytes for leaf in GRAPH.leaves if leaf.op == "param"}
    held, come = Counter[str](), Counter[str]()
    for link in found.staged.links:
        held.update(link.held)
        come.update(link.gradients)
    assert come["gathered"] == held["gathered"] // 2  # in two versions
    gathered = come["gathered"]
    assert (gathered > 0) == bool(pin)
    used_as_stored = sum(sizes.values()) - gathered
    assert held["parameters"] == (gathered // 2 if pin else 0) + 2 * used_as_stored
    assert come["gradients"] == used_as_stored
    alive, both = found.staged.alive, come.total()
    assert sum(alive.held) == held.total() + both + sum(map(alive.given_bytes, range(4)))  # those of the batch before
    assert sum(link.at_end_bytes for link in found.staged.links) >= gathered // 2


def test_2bw_that_gathers_in_each_micro_batch_holds_two_versions_as_stored() -> None:
    found = searched(cluster(8), {"pipeline": 4, "micro_batches": 8, "schedule": "2bw", "data": 2, "zero": 3})
    held = sum((Counter(link.held) for link in found.staged.links), Counter[str]())
    stored = sum(leaf.results[0].size_bytes for leaf in GRAPH.leaves if leaf.op == "param") // 2
    assert (held["parameters"], held["gradients"], held["gathered"]) == (2 * stored, 0, 0)
    come = sum((Counter(link.gradients) for link in found.staged.links), Counter[str]())
    assert (come["gradients"], come["gathered"]) == (stored, 0)


@pytest.mark.parametrize("micro_batches, stages", [(2, 4), (1, 1)])
def test_2bw_needs_as_many_micro_batches_as_stages(micro_batches: int, stages: int) -> None:
    with pytest.raises(
        PinError, match=f"at most {micro_batches} micro-batches, at least {stages} stages, and 8 blocks"
    ):
        searched(cluster(8), {"schedule": "2bw", "pipeline": stages, "micro_batches": micro_batches})


def test_shapes_are_every_configuration() -> None:
    configs = micro_batched(cluster(8), Pins(), GRAPH, len(fold(GRAPH).instances), 2)
    assert len(set(configs)) == len(configs)
    assert {config.stages for config in configs} == {1, 2, 4, 8}
    assert {config.mesh.micro_batches for config in configs} == {1, 2, 4, 8, 16, 32, 64}
    assert all(config.stages * config.mesh.size == 8 and config.micro_batched for config in configs)
    near = min(configs, key=lambda config: config.distance(ParallelConfig(2, configs[-1].mesh)))
    assert near.distance(near) == 0


def test_of_many_divisors_of_a_batch_those_that_the_ranks_share_evenly() -> None:
    """1536 GPUs and a batch of 2304 = 9 * 256, as in Megatron's run of 145 billion parameters."""
    ids = Node("ids", "input", (), (TensorType((2304, 8), "int64"),), target="ids")
    configs = micro_batched(ClusterSpec.preset("dgx-a100", devices=1536), Pins(), Graph((ids,), (Ref("ids"),)), 8, 2)
    micro_batches = {
        each.mesh.micro_batches for each in configs if each.stages == 8 and each.mesh.sizes[-2:] == (24, 8)
    }
    assert micro_batches == {1, 3, 6, 12, 24, 48, 96}


def test_a_schedule_needs_a_pipeline() -> None:
    with pytest.raises(PinError, match="are a pipeline's, and pins 'pipeline' and 'micro_batches' are 1"):
        searched(cluster(8), {"schedule": "1f1b", **WHOLE})
    with pytest.raises(PinError, match=r"are a pipeline's, and left out are .* since folding is off"):
        search(GRAPH, cluster(8), Pins.parse({"schedule": "1f1b"}), Training(), folding=False)


def test_pinned_virtual_stages_alone_are_interleaved() -> None:
    found = searched(cluster(8), {"pipeline": 4, "micro_batches": 8, "virtual_stages": 2})
    assert (found.staged.pipeline.schedule, found.staged.pipeline.virtual_stages) == ("interleaved_1f1b", 2)


def test_samples_that_are_mixed_leave_no_micro_batches() -> None:
    """``x - mean of x over the batch``: no micro-batch is done before all have begun."""
    b = Build()
    y = b.linear("y", b.leaf("x", 64, 8), 8)
    m = b.call("m", "mean.dim", 8, self=y, dim=(0,), keepdim=False, dtype=None)
    graph = b.mean(b.relu("r", b.call("c", "sub.Tensor", 64, 8, self=y, other=m, alpha=1)))
    for limit_s in (60.0, 1e-9):
        with pytest.raises(PinError, match=r"sub.Tensor on operands of shapes \(64, 8\), \(8,\) mixes samples"):
            search(graph, cluster(8), Pins.parse({"micro_batches": 2}), Training(), time_limit_s=limit_s)


# ---- when parameters are gathered ------------------------------------------------------------------------------------

IN_EACH = '{"data": 4, "micro_batches": 4, "zero": 3}'


def test_parameters_are_gathered_in_each_micro_batch_where_memory_asks_for_it() -> None:
    """Once a step all of them, and their gradients, are there whole; in each micro-batch those of a block, and as they
    come those of the next.
    """
    pin: dict[str, Any] = {"data": 4, "micro_batches": 4}
    once, each = (searched(cluster(4), {**pin, "zero": zero}) for zero in (2, 3))
    assert (once.best.config.unsharding.name, each.best.config.unsharding.name) == ("once", "each")
    uses = [peak_micro_batched(found.assignment, found.staged).by_use() for found in (once, each)]
    assert uses[0]["gathered"] > 3 * uses[1]["gathered"] > 0
    coming_bytes = 4 * (2 * 256 * 1024 + 256 + 1024) * 5 // 4  # of a layer, and parts of it behind one another
    (run,) = each.staged.alive.runs
    assert max(map(sum, run.on_the_way)) == coming_bytes
    assert each.evaluation.peak_bytes - coming_bytes < 0.5 * once.evaluation.peak_bytes
    assert each.evaluation.time_s > once.evaluation.time_s
    roomy, tight = searched(cluster(4), pin), searched(cluster(4, "30 MiB"), pin)
    assert roomy.best.config.unsharding.name == "once"
    assert {(each.config.unsharding.name, each.status) for each in roomy.candidates[1:]} == {("each", "pruned")}
    assert roomy.evaluation.time_s <= once.evaluation.time_s
    assert tight.best.config.unsharding.name == "each"
    assert tight.evaluation.time_s <= each.evaluation.time_s
    assert [(c.config.unsharding.name, c.status) for c in tight.candidates] == [
        ("each", "feasible"),
        ("once", "infeasible"),
    ]
    with pytest.raises(InfeasibleError):
        searched(cluster(4, "30 MiB"), {**pin, "zero": 2})


def test_nothing_is_gathered_ahead_where_memory_has_no_room_for_it() -> None:
    """The plan is found all the same, says so, and comes back; a refusal counts with it."""
    pin: dict[str, Any] = {"data": 4, "micro_batches": 4, "zero": 3}
    roomy = searched(cluster(4), pin)
    assert roomy.staged is not None and roomy.staged.prefetch
    coming_bytes = roomy.evaluation.peak_bytes - waiting(roomy.staged).peak_bytes
    assert coming_bytes > 0
    tight = searched(of_usable(roomy.evaluation.peak_bytes - coming_bytes), pin)
    assert tight.staged is not None and not tight.staged.prefetch
    assert tight.evaluation.peak_bytes == roomy.evaluation.peak_bytes - coming_bytes
    assert tight.evaluation.time_s == roomy.evaluation.time_s
    fullest = peak_micro_batched(tight.assignment, tight.staged)
    assert fullest.bytes == sum(held.all_bytes for held in fullest.alive) == tight.evaluation.peak_bytes
    assert not any(held.name == COMING for held in fullest.alive)
    with pytest.raises(InfeasibleError) as refused:
        searched(of_usable(tight.evaluation.peak_bytes // 2), pin)
    needed = int(re.findall(r"needs ([0-9,]+) bytes", str(refused.value))[0].replace(",", ""))
    assert needed <= tight.evaluation.peak_bytes
    found = searched(of_usable(needed), pin)
    assert found.staged is not None and not found.staged.prefetch and found.evaluation.peak_bytes <= needed


def of_usable(usable_bytes: int) -> ClusterSpec:
    """Four devices with room for so many bytes."""
    whole = math.floor(usable_bytes / (1 - cluster(4).device.reserve_fraction))
    return next(spec for more in range(3) if (spec := cluster(4, whole + more)).device.usable_bytes >= usable_bytes)


def test_a_plan_says_whether_it_waits_for_what_it_gathers() -> None:
    plan = planned(IN_EACH.replace("4", "8", 1))
    data, told = plan.to_dict(), "reduced in each micro-batch, none ahead"
    assert data["pipeline"]["waits"] is False and told not in unwrapped(plan)
    waiting = Plan.from_dict({**data, "pipeline": {**data["pipeline"], "waits": True}})
    assert waiting.pipeline is not None and not waiting.pipeline.unsharding.prefetch
    assert waiting.to_dict()["pipeline"]["waits"] is True and told in unwrapped(waiting)
    del data["pipeline"]["waits"]  # as it was before there was a choice
    old = Plan.from_dict(data)
    assert old.pipeline is not None and not old.pipeline.unsharding.prefetch
    with pytest.raises(PlanError, match="'waits' is 'no', and takes true or false"):
        Plan.from_dict({**data, "pipeline": {**data["pipeline"], "waits": "no"}})


def test_a_search_takes_the_faster_of_both() -> None:
    """With pipelines, and memory that leaves both possible: no plan that a pin asks for is faster."""
    free = searched(cluster(4, "45 MiB"), {"data": 2, "pipeline": 2})
    pinned = [searched(cluster(4, "45 MiB"), {"data": 2, "pipeline": 2, "zero": zero}) for zero in (0, 2, 3)]
    seconds = [each.evaluation.time_s for each in pinned]
    assert free.evaluation.time_s * (1 - free.gap) <= min(seconds)
    assert free.evaluation.time_s <= min(seconds) * (1 + 1e-9)


def test_a_plan_says_when_it_gathers_and_comes_back() -> None:
    plan, usual = planned(IN_EACH.replace("4", "8", 1)), planned('{"data": 8, "micro_batches": 4, "zero": 2}')
    data, usually = plan.to_dict(), usual.to_dict()
    assert data["pipeline"]["gathers"] == "each" and usually["pipeline"]["gathers"] == "once"
    assert Plan.from_dict(json.loads(json.dumps(data))) == plan and plan.certificate.holds
    told = "parameters gathered and gradients reduced in each micro-batch"
    for shown, other in ((unwrapped(plan), unwrapped(usual)), (plan.to_html(), usual.to_html())):
        assert told in shown and told not in other
    assert plan.predicted.time_s["recompute"] == plan.predicted.time_s["gradients"] == 0  # all of it communication
    assert "of 8 blocks gathered again in backward: 7" in unwrapped(plan)
    works = [block for block in blocks(plan) if block.compute_s]
    communication_s = sum(block.communication_s for block in works)
    assert 0.5 * plan.predicted.time_s["communication"] < communication_s < plan.predicted.time_s["communication"]
    priced = reprice(Plan.from_dict(data), plan.assignment)
    assert priced.predicted == plan.predicted
    told_why = usual.why_not({"data": 8, "micro_batches": 4, "zero": 3})
    assert told_why.mesh == "micro 4 x data 8, gathering in each micro-batch"
    assert told_why.extra_s == pytest.approx(plan.predicted.step_time_s - usual.predicted.step_time_s, rel=1e-9)
    assert told_why.extra_bytes == plan.predicted.peak_bytes - usual.predicted.peak_bytes < 0
    del usually["pipeline"]["gathers"]  # as it was before there was a choice
    assert Plan.from_dict(usually) == usual


def test_a_file_from_before_zero_3_meant_each_micro_batch_says_so() -> None:
    data = planned(json.dumps({"data": 8, "micro_batches": 2, "zero": 2})).to_dict()
    del data["pipeline"]["gathers"]
    with pytest.raises(PlanError, match=r"from before pin 'zero' 3 meant .*, which is 'zero' 1 or 2"):
        Plan.from_dict({**data, "pin": {**data["pin"], "zero": 3}})


@pytest.mark.parametrize(
    "zero, gathers, message",
    [
        (3, "once", "pin 'zero' is 3, which gathers parameters in each micro-batch, but they are gathered once a step"),
        (2, "each", "pin 'zero' is 2, which gathers parameters once a step, but they are gathered in each micro-batch"),
        (3, "never", "'gathers' is 'never', and takes 'once' or 'each'"),
    ],
)
def test_a_plan_that_gathers_otherwise_than_pinned_is_refused(zero: int, gathers: str, message: str) -> None:
    data = planned(f'{{"data": 8, "micro_batches": 4, "zero": {zero}}}').to_dict()
    with pytest.raises(PlanError, match=message):
        Plan.from_dict({**data, "pipeline": {**data["pipeline"], "gathers": gathers}})


def test_what_is_gathered_in_each_micro_batch_is_counted_in_each() -> None:
    plan = planned('{"data": 2, "pipeline": 4, "micro_batches": 8, "zero": 3}')
    calls, sizes = Counter[str](), [leaf.results[0].size_bytes for leaf in GRAPH.leaves if leaf.op == "param"]
    for call, count in plan.predicted.collectives:
        if call.bytes_in > 8:
            calls[call.kind, call.phase] += call.bytes_in * count  # type: ignore[index]
    weights = sum(sizes) // 2
    assert calls["reduce_scatter", "backward"] == 8 * 2 * weights  # type: ignore[index]
    assert calls["all_gather", "forward"] == 8 * weights  # type: ignore[index]
    # Of what backward reads again: not the first layer's of a stage whose input needs no gradient, and no biases.
    assert 0.9 * 8 * weights < calls["all_gather", "backward"] <= 8 * weights  # type: ignore[index]


def test_a_pinned_pipeline_whose_stages_cut_across_nodes_is_planned() -> None:
    graph, spec = residual_mlp(layers=6, batch=96), random_cluster(random.Random(1), (2, 3))
    free, named = (
        search(graph, spec, Pins.parse(pin), Training()) for pin in ({"pipeline": 2}, {"pipeline": 2, "data": 3})
    )
    assert free.best.config.stages == 2 and free.best.config.mesh.micro_batched(1).size == 3
    assert free.evaluation.time_s <= named.evaluation.time_s * (1 + 1e-9)
