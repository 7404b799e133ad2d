"""Micro-batched offload: what a step of several micro-batches moves and predicts, and what is refused."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from planner.analysis.memory import usage
from planner.analysis.offload.chunks import chunks_of, gradients, of_micro_batch, parameters
from planner.base.errors import InfeasibleError, PinError, PlanError
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.plan.plan import Plan, reprice
from planner.search.offload_search import AMOUNTS
from planner.search.search import search
from planner.solve.transfers import ItemUse, fewest_bytes, simulate
from tests.planner.plans import residual_mlp, unwrapped
from tests.planner.search.test_offload import GRAPH, cluster, gpu, offload, tied

PLANS: dict[str, Callable[[], Plan]] = {
    "tight": lambda: offload(spec=cluster("1.8 MiB"), micro_batches=4),
    "roomy": lambda: offload(spec=cluster(), micro_batches=2),
    "tied": lambda: offload(tied(), cluster("1 MiB"), micro_batches=2),
    "two ranks": lambda: offload(spec=cluster("2.5 MiB", devices=2), data=2, zero=3, micro_batches=2),
    "some stays": lambda: offload(spec=cluster("3 MiB"), offload="auto", micro_batches=2),
    "on a GPU": lambda: offload(spec=gpu("2 MiB"), micro_batches=4),
    "two stages": lambda: offload(
        spec=cluster("1.8 MiB", devices=2), pipeline=2, micro_batches=4, schedule="1f1b", activations="none"
    ),
    "tied over four": lambda: offload(
        tied(6), cluster("1 MiB", devices=2), pipeline=2, micro_batches=4, virtual_stages=2, offload="auto"
    ),
    "stages on GPUs": lambda: offload(spec=gpu("2 MiB", devices=2), pipeline=2, micro_batches=4),
}
PIPELINES = ("two stages", "tied over four", "stages on GPUs")


@pytest.fixture(scope="module")
def plans() -> Callable[[str], Plan]:
    return functools.cache(lambda name: PLANS[name]())


def test_each_micro_batch_goes_there_and_back(plans: Callable[[str], Plan]) -> None:
    plan = plans("tight")
    names = [moment.name for moment in plan.transfer_schedule.trace.moments]
    micro_batches = [
        [name for name in names if name.endswith(f"micro-batch {micro_batch}")] for micro_batch in range(4)
    ]
    assert names == [*(name for each in micro_batches for name in each), "outputs", "update"]
    for micro_batch, each in enumerate(micro_batches):
        there, back = each[: len(each) // 2], each[len(each) // 2 :]
        assert [name.replace("forward", "backward") for name in reversed(there)] == back
        assert [name.replace(f"micro-batch {micro_batch}", "micro-batch 0") for name in each] == micro_batches[0]


def test_candidates_say_as_the_plan_does_that_parameters_come_for_each_micro_batch(
    plans: Callable[[str], Plan],
) -> None:
    found = search(GRAPH, cluster("2 MiB"), Pins.parse({"offload": "host", "micro_batches": 4}), Training())
    assert {row.facts()["gathers"] for row in found.candidates} == {plans("tight").unsharding.name} == {"each"}
    assert found.best.config in {row.config for row in found.candidates}


@pytest.mark.parametrize("name", ["tight", "tied"])
def test_the_first_backward_makes_gradients_and_others_add_to_them(plans: Callable[[str], Plan], name: str) -> None:
    plan = plans(name)
    trace, micro_batches = plan.transfer_schedule.trace, plan.mesh.micro_batches
    for chunk in chunks_of(plan.assignment):
        *made, last = trace.item[gradients(chunk)].uses
        assert [use.access for use in made] == ["w", *["rw"] * (micro_batches - 1)]
        assert last == ItemUse("update")
        wanted = {of_micro_batch("end", micro_batch) for micro_batch in range(micro_batches)}
        if chunk.is_before:
            assert {use.moment for use in made} == wanted
        assert trace.item[parameters(chunk)].uses[-1] == ItemUse("update", "rw")
    assert ("tied" in name) == any(chunk.is_before for chunk in chunks_of(plan.assignment))


def test_a_later_backward_holds_what_it_adds(plans: Callable[[str], Plan]) -> None:
    """Beside the sums: of each block one gradient at a time, the largest; and the loss of every micro-batch so far."""
    plan = plans("tight")
    beside = {moment.name: moment.other_bytes for moment in plan.transfer_schedule.trace.moments}
    largest = {
        chunk.name: max(plan.assignment.space.graph.by_name[name].results[0].size_bytes for name in chunk.leaves)
        for chunk in chunks_of(plan.assignment)
    }
    loss = 4
    for name, size in largest.items():
        each = [beside[of_micro_batch(f"backward {name}", micro_batch)] for micro_batch in range(4)]
        assert [more - each[0] for more in each] == [0, *(size + micro_batch * loss for micro_batch in (1, 2, 3))]


@pytest.mark.parametrize("name", [*PLANS])
def test_the_prediction_is_the_transfer_schedules(plans: Callable[[str], Plan], name: str) -> None:
    plan = plans(name)
    tables, found = plan.transfer_schedules, plan.predicted
    assert found.peak_bytes == max(table.high_water_bytes for table in tables) == sum(found.memory_bytes.values())
    assert found.peak_bytes <= plan.cluster.device.usable_bytes
    assert sum(found.time_s.values()) == pytest.approx(found.step_time_s)
    assert plan.timeline().end_s == pytest.approx(found.step_time_s)
    memory = plan.memory_over_step
    assert max(each.fullest.peak.bytes for each in memory) == found.peak_bytes
    assert all(each.stretches[-1].end_s == pytest.approx(found.step_time_s) for each in memory)
    assert Plan.from_dict(plan.to_dict()).memory_over_step == memory
    alone_s = []
    for table in tables:
        computing_s = sum(moment.seconds for moment in table.trace.moments)
        is_on_cpu = plan.cluster.backend == "gloo"  # where nothing moves beside computing
        alone_s.append(computing_s + sum(table.link_s.values()) if is_on_cpu else simulate(table).step_s)
    if len(tables) == 1:
        assert found.step_time_s == pytest.approx(alone_s[0])
    else:  # a rank waits for others besides
        assert max(alone_s) < found.step_time_s < sum(alone_s) + found.time_s["gradients"]


def test_each_rank_has_the_moments_of_its_stages(plans: Callable[[str], Plan]) -> None:
    plan = plans("two stages")
    assert plan.pipeline is not None and len(plan.transfer_schedules) == 2
    for rank, table in enumerate(plan.transfer_schedules):
        wanted = range(*plan.pipeline.bounds[rank : rank + 2])
        words = [moment.name.split(" ") for moment in table.trace.moments if "micro-batch" in moment.name]
        assert {int(number) for _, number, *_ in words} == {*wanted}
    there = [moment.name for moment in plan.transfer_schedules[0].trace.moments]
    # 1f1b: the first of two ranks takes a second micro-batch before the first one runs its backward.
    assert there.index("forward 0 stem, micro-batch 1") < there.index("backward 0 stem, micro-batch 0")


def test_a_rank_holds_what_micro_batches_in_flight_saved(plans: Callable[[str], Plan]) -> None:
    plan = plans("two stages")
    table, own = plan.transfer_schedules[0], usage(plan.assignment, range(*plan.pipeline.bounds[:2]))
    beside = {moment.name: moment.other_bytes for moment in table.trace.moments}
    assert own.saved_bytes > 0
    assert beside["forward 0 stem, micro-batch 1"] - beside["forward 0 stem, micro-batch 0"] == own.saved_bytes


def test_what_several_stages_of_a_rank_read_enters_before_each(plans: Callable[[str], Plan]) -> None:
    plan = plans("tied over four")
    assert plan.pipeline is not None and plan.pipeline.virtual_stages == 2
    for rank, table in enumerate(plan.transfer_schedules):
        names = {moment.name for moment in table.trace.moments}
        for stage in range(4):
            reads = stage in (0, 3)  # the stem and the head
            assert (of_micro_batch(f"begin stage {stage}", 0) in names) == (reads and stage % 2 == rank)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_file_with_too_few_transfer_schedules_is_refused(plans: Callable[[str], Plan], name: str) -> None:
    data = plans(name).to_dict()
    with pytest.raises(PlanError, match="the plan has 1 transfer schedules, and 2 pipeline ranks"):
        Plan.from_dict({**data, "transfer_schedule": data["transfer_schedule"][0]})


def test_parameters_that_move_come_for_each_micro_batch(plans: Callable[[str], Plan]) -> None:
    data = plans(PIPELINES[0]).to_dict()
    with pytest.raises(PlanError, match="parameters come for each micro-batch, and its pipeline gathers them 'once'"):
        Plan.from_dict({**data, "pipeline": {**data["pipeline"], "gathers": "once"}})
    del data["pipeline"]["gathers"]  # as it was before there was a choice
    assert Plan.from_dict(data).unsharding.name == "each"


@pytest.mark.parametrize("name", [*PLANS])
def test_a_plan_comes_back_from_its_file_and_keeps_its_price(plans: Callable[[str], Plan], name: str) -> None:
    plan = plans(name)
    again = Plan.from_dict(plan.to_dict())
    assert again.to_dict() == plan.to_dict() and again.digest() == plan.digest()
    assert again.pipeline is not None and not again.pipeline.unsharding.once_per_step
    priced = reprice(again, plan.assignment)
    assert priced.transfer_schedules == plan.transfer_schedules and priced.search == plan.search
    assert priced.predicted.step_time_s == pytest.approx(plan.predicted.step_time_s)
    assert plan.certificate.holds


def test_with_room_for_all_each_moves_once_a_step_and_else_more_often(plans: Callable[[str], Plan]) -> None:
    chunks = chunks_of(plans("roomy").assignment)
    ways = {("host", "fetch"): sum(c.bytes for c in chunks), ("host", "evict"): sum(c.gradient_bytes for c in chunks)}
    roomy, tight = plans("roomy").transfer_schedule, plans("tight").transfer_schedule
    assert dict(roomy.bytes_moved) == ways
    least = fewest_bytes(tight.trace, max(tight.trace.needed_bytes)).bytes_moved
    for way, size in ways.items():
        assert size < tight.bytes_moved[way] <= least[way]
        assert least[way] > (3 if way[1] == "evict" else 4) * size  # sums of gradients come back, too


def test_the_report_says_how_it_runs_and_what_moves(plans: Callable[[str], Plan]) -> None:
    text = unwrapped(plans("tight"))
    assert re.search(r"batches +4 micro-batches", text)
    assert re.search(
        r"offload +parameters, gradients .* of 6 chunks \(.* none of it padding\) with their home on the host;",
        text,
    )
    assert re.search(r"fullest in backward .*, micro-batch [1-3] search", text)
    assert "transfer_schedule" in plans("tight").to_dict()


def test_gathering_comes_with_every_micro_batch() -> None:
    graph, spec = residual_mlp(layers=2, width=32, batch=32), cluster(devices=2)
    few, many = (offload(graph, spec, data=2, zero=3, micro_batches=micro_batches) for micro_batches in (2, 4))
    counts = [sum(times for _, times in plan.predicted.collectives) for plan in (few, many)]
    gathers = [
        sum(times for call, times in plan.predicted.collectives if call.kind == "all_gather") for plan in (few, many)
    ]
    assert gathers[1] == 2 * gathers[0] > 0 and counts[1] == 2 * counts[0]


def test_blocks_that_gather_again_say_so(plans: Callable[[str], Plan]) -> None:
    plan = plans("two ranks")
    assert plan.pipeline is not None and set(plan.pipeline.recompute) == {"gathered"}
    assert Plan.from_dict(plan.to_dict()).pipeline == plan.pipeline


def test_what_is_followed_is_one_micro_batch() -> None:
    """Activations of a step in four micro-batches are a quarter of those in one."""
    pin = {"offload": "host", "recompute": "none"}
    whole = search(GRAPH, cluster(), Pins.parse(pin), Training())
    parts = search(GRAPH, cluster(), Pins.parse({**pin, "micro_batches": 4}), Training())
    assert usage(parts.recomputing).saved_bytes * 4 == pytest.approx(whole.memory.saved_bytes, rel=0.05)


def test_a_budget_below_the_largest_working_set_names_the_moment_and_the_way_out() -> None:
    graph, spec = residual_mlp(layers=2, width=64, batch=32), cluster("120 KiB")
    with pytest.raises(InfeasibleError, match="largest working set") as caught:
        offload(graph, spec, micro_batches=2)
    text = str(caught.value)
    assert re.search(
        r"too many: backward \d layers.\d, micro-batch 1 needs [\d,]+ bytes .* of parameters and gradients", text
    )
    for way in ("smaller global batch", "more micro-batches", "zero", "tensor"):
        assert way in text
    memory = int(re.search(r"memory_bytes of at least ([\d,]+)", text)[1].replace(",", ""))  # type: ignore[index]
    assert offload(graph, cluster(memory), micro_batches=2).predicted.peak_bytes <= memory
    with pytest.raises(InfeasibleError):
        offload(graph, cluster(memory - 1024), micro_batches=2)


def test_a_budget_below_a_rank_s_working_set_names_the_rank() -> None:
    with pytest.raises(
        InfeasibleError, match=r"backward \d layers.\d, micro-batch 1, on pipeline rank \d needs [\d,]+"
    ):
        offload(residual_mlp(layers=2, width=64, batch=32), cluster("120 KiB", devices=2), pipeline=2, micro_batches=2)


def test_an_update_in_backward_is_refused_micro_batched() -> None:
    with pytest.raises(PinError, match=r"'update' is 'backward', but a micro-batched step .*: pin 'update' 'after'"):
        offload(micro_batches=2, update="backward")


def test_a_transfer_schedule_of_fewer_micro_batches_is_another_plan_s(plans: Callable[[str], Plan]) -> None:
    plan, other = plans("tight"), plans("roomy")
    assert replace(plan, transfer_schedules=other.transfer_schedules).digest() != plan.digest()


def test_steps_are_shorter_where_some_of_what_may_leave_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four micro-batches that save 128 MiB each, on a device of 96 MiB: devices wait for all of it to come and go."""
    pins = Pins.parse({"offload": "host", "activations": "all", "micro_batches": 4, "pipeline": 1})
    steps_s = []
    for amounts in ((), AMOUNTS):
        monkeypatch.setattr("planner.search.offload_search.AMOUNTS", amounts)
        found = search(residual_mlp(8, 64, 65536), gpu("96 MiB"), pins, Training())
        steps_s.append(found.planned_step_s)
        assert bool(found.recomputing.recompute.without_gathered()) == bool(amounts)
    assert 2 * steps_s[1] < steps_s[0]
