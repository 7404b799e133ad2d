"""Offload: what plans with model data on the host move and predict, what they agree with, and what is refused."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.analysis.memory import enters_before, readers_of, usage
from planner.analysis.memory.storages import BEFORE
from planner.analysis.offload.chunks import (
    ALIGN_BYTES,
    chunks_of,
    gradients,
    home_bytes,
    moments_of,
    parameters,
    run_in_backward,
    update,
)
from planner.analysis.offload.step_timing import largest_working_set
from planner.base.errors import ClusterError, InfeasibleError, PinError, PlanError
from planner.base.formatting import in_all_bytes
from planner.cost.calibration import Calibration
from planner.cost.cluster import ClusterSpec, Host
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.pins import Pins
from planner.formulation.decisions import DecisionGraph
from planner.formulation.resharding import local_bytes
from planner.formulation.training import Training
from planner.ir.graph import Graph, Ref
from planner.ir.layout import I
from planner.plan.document.fingerprint import model_facts
from planner.plan.plan import Plan, Search, describe, reprice
from planner.search import fastest_plan, offload_search
from planner.search.branch_and_bound import ParallelConfigs, Searched, branch_and_bound
from planner.search.candidates import Incumbent
from planner.search.search import search
from planner.search.search_context import SearchContext
from planner.solve.transfers import ItemUse, fewest_bytes, simulate
from tests.planner.plans import plan_of, residual_mlp, unwrapped, whole


def data_bytes(assignment: Assignment) -> int:
    """Of parameters, gradients and optimizer state."""
    return home_bytes(assignment, chunks_of(assignment))


GRAPH = residual_mlp(layers=4, width=128, batch=64)


def cluster(memory: int | str = "64 MiB", devices: int = 1, host: int | str = "1 GiB") -> ClusterSpec:
    """CPU processes with a host beside them, the same on every machine."""
    return ClusterSpec.local(devices, memory, cores=2, host_memory_bytes=host)


def gpu(memory: str = "8 MiB", devices: int = 1) -> ClusterSpec:
    """GPUs so small that a small model does not fit."""
    spec = ClusterSpec.preset("dgx-a100", devices=devices)
    return spec.model_copy(update={"device": spec.device.model_copy(update={"memory_bytes": _bytes(memory)})})


def _bytes(text: str) -> int:
    return ClusterSpec.local(1, text, cores=1).device.memory_bytes


def with_usable(spec: ClusterSpec, usable: int) -> ClusterSpec:
    """A cluster of whose devices a plan may fill so many bytes."""
    device = spec.device.model_copy(update={"memory_bytes": usable, "reserve_fraction": 0.0})
    return spec.model_copy(update={"device": device})


def offload(graph: Graph = GRAPH, spec: ClusterSpec | None = None, **pin: Any) -> Plan:
    """A plan with model data on the host, as :func:`autopar.plan` makes it."""
    pin = {"offload": "host", **pin}
    found = search(graph, spec or cluster("2.5 MiB"), whole(pin), Training())
    tables, predicted = found.planned_step
    facts, result = model_facts(graph, "ResidualMLP"), Search(found.status, found.gap, {"solve": 0.5})
    return describe(found.assignment, facts, Pins.parse(pin).to_dict(), predicted, result, found.staged, tables)


def frozen(graph: Graph, *names: str) -> Graph:
    """The same without gradients of some parameters."""
    nodes = [
        replace(node, results=(replace(node.results[0], grad=False),)) if node.name in names else node
        for node in graph.nodes
    ]
    return Graph(tuple(nodes), graph.outputs)


def tied(layers: int = 3) -> Graph:
    """A model whose head reads the weight of its stem."""
    graph = residual_mlp(layers, width=64, batch=64)
    assert graph.by_name["stem_w"].results == graph.by_name["head_w"].results
    nodes = [node for node in graph.nodes if node.name != "head_w"]
    head = next(node for node in nodes if node.name == "head")
    args = tuple((name, Ref("stem_w") if value == Ref("head_w") else value) for name, value in head.args)
    nodes[nodes.index(head)] = replace(head, args=args)
    return Graph(tuple(nodes), graph.outputs)


def moved(plan: Plan) -> int:
    return sum(plan.transfer_schedule.bytes_moved.values())


FROZEN = ("head_w", "head_b", *(f"up{i}_b" for i in range(4)))
PLANS: dict[str, Callable[[], Plan]] = {
    "tight": lambda: offload(),
    "roomy": lambda: offload(spec=cluster()),
    "two ranks": lambda: offload(spec=cluster("3 MiB", devices=2), data=2, zero=3),
    "tied": lambda: offload(tied(), cluster("1 MiB")),
    "frozen": lambda: offload(frozen(GRAPH, *FROZEN)),
    "gpu": lambda: offload(spec=gpu("3 MiB")),
    "early": lambda: offload(tied(), gpu("1 MiB"), update="backward"),
}


@pytest.fixture(scope="module")
def plans() -> Callable[[str], Plan]:
    """The plans above, each made once."""
    return functools.cache(lambda name: PLANS[name]())


each_plan = pytest.mark.parametrize("name", PLANS)


# ---- what is where ---------------------------------------------------------------------------------------------------


@each_plan
def test_every_parameter_is_in_one_chunk_aligned_and_has_its_bytes(plans: Callable[[str], Plan], name: str) -> None:
    assignment = plans(name).assignment
    graph, mesh = assignment.space.graph, assignment.space.mesh
    chunks = chunks_of(assignment)
    leaves = [leaf for chunk in chunks for leaf in chunk.leaves]
    assert sorted(leaves) == sorted(node.name for node in graph.leaves if node.op == "param")
    for chunk in chunks:
        sizes = [local_bytes(graph.by_name[n].results[0], assignment.produced(Ref(n)), mesh) for n in chunk.leaves]
        trained = [graph.by_name[n].results[0].grad for n in chunk.leaves]
        assert all(start % ALIGN_BYTES == 0 for start in chunk.starts)
        for start, size, end in zip(chunk.starts[:-1], sizes, chunk.starts[1:], strict=True):
            assert start + size <= end < start + size + ALIGN_BYTES
        assert chunk.gradient_bytes == sum(size for size, grad in zip(sizes, trained, strict=True) if grad)


@each_plan
def test_the_trace_has_a_chunk_s_parameters_and_the_gradients_of_the_trained(
    plans: Callable[[str], Plan], name: str
) -> None:
    plan = plans(name)
    chunks, items = chunks_of(plan.assignment), plan.transfer_schedule.trace.item
    wanted = {parameters(chunk): chunk.bytes for chunk in chunks}
    wanted |= {gradients(chunk): chunk.gradient_bytes for chunk in chunks if chunk.gradient_bytes}
    assert {name: item.bytes for name, item in items.items()} == wanted
    for chunk in chunks:
        uses = items[parameters(chunk)].uses
        updated = "update" if name != "early" or chunk.is_before else update(chunk)
        assert [use for use in uses if use.writes] == [
            ItemUse(each, "rw") for each in dict.fromkeys((updated, "update"))
        ]
        assert uses[-1].writes
        entered, left = moments_of(plan.assignment)[chunk.entered]
        assert uses[0] == ItemUse(entered)
        if chunk.gradient_bytes:
            assert items[gradients(chunk)].uses == (ItemUse(left, "w"), ItemUse(updated))


@each_plan
def test_moments_follow_the_blocks_there_and_back(plans: Callable[[str], Plan], name: str) -> None:
    plan = plans(name)
    assignment, trace = plan.assignment, plan.transfer_schedule.trace
    moments, before = moments_of(assignment), [BEFORE] * any(chunk.is_before for chunk in chunks_of(assignment))
    forth = [moments[number][0] for number in sorted(moments) if number != BEFORE or before]
    back = [moments[number][1] for number in reversed([*before, *run_in_backward(assignment)])]
    own = {moments[chunk.entered][1]: update(chunk) for chunk in chunks_of(assignment) if not chunk.is_before}
    found = []
    for moment in back:
        found += [moment, own[moment]] if name == "early" and moment in own else [moment]
    assert [moment.name for moment in trace.moments] == [*forth, *found, "update"]
    assert [moment.name for moment in trace.moments if moment.on == "device"] == [*forth, *back]


def test_what_is_frozen_has_no_gradient_and_is_not_updated(plans: Callable[[str], Plan]) -> None:
    plan = plans("frozen")
    items = plan.transfer_schedule.trace.item
    assert [use.moment for use in items["parameters 5 head"].uses] == ["forward 5 head", "backward 5 head", "update"]
    assert "gradients 5 head" not in items
    assert items["gradients 1 layers.0"].bytes == items["parameters 1 layers.0"].bytes - 4 * 4 * 128
    still = sum(GRAPH.by_name[name].results[0].size_bytes for name in FROZEN)
    less = data_bytes(plans("tight").assignment) - data_bytes(plan.assignment)
    assert less == 3 * still  # a gradient, and Adam's two moments


def test_a_shared_parameter_enters_before_all_blocks_and_its_gradient_leaves_after(
    plans: Callable[[str], Plan],
) -> None:
    plan = plans("tied")
    assignment = plan.assignment
    readers = readers_of(assignment)
    last = len(assignment.space.folded.instances) - 1
    assert readers["stem_w"] == (0, last) and enters_before(assignment, "stem_w", readers["stem_w"])
    assert readers["up1_w"] == (2,) and not enters_before(assignment, "up1_w", readers["up1_w"])
    (chunk,) = (chunk for chunk in chunks_of(assignment) if chunk.is_before)
    assert (chunk.leaves, chunk.name, chunk.entered) == (("stem_w",), "stem.weight", BEFORE)
    items = plan.transfer_schedule.trace.item
    assert [use.moment for use in items[parameters(chunk)].uses] == [
        "begin", "forward 0 stem", f"forward {last} head", f"backward {last} head", "backward 0 stem", "update",
    ]  # fmt: skip
    assert items[gradients(chunk)].uses[0] == ItemUse("end", "w")


def test_backward_fetches_again_only_what_it_reads(plans: Callable[[str], Plan]) -> None:
    """Linear's backward reads its weight, unless nothing needs the gradient of its input."""
    plan = plans("tight")
    items = plan.transfer_schedule.trace.item
    read = {name: [use.moment for use in item.uses] for name, item in items.items() if name.startswith("parameters")}
    assert "backward 2 layers.1" in read["parameters 2 layers.1"]
    again = usage(plan.assignment).read_again
    for chunk in chunks_of(plan.assignment):
        names = again.get(chunk.entered, frozenset())
        backward = moments_of(plan.assignment)[chunk.entered][1]
        assert (backward in read[parameters(chunk)]) == bool(names & {*chunk.leaves})


# ---- what is predicted -----------------------------------------------------------------------------------------------


def plan_update_s(plan: Plan) -> float:
    """Seconds that the host takes for all parameters."""
    space = plan.assignment.space
    return sum(space.update_s(leaf, plan.assignment.produced(Ref(leaf.name))) for leaf in space.graph.leaves)


@each_plan
def test_the_prediction_is_the_transfer_schedule_s(plans: Callable[[str], Plan], name: str) -> None:
    plan = plans(name)
    table, predicted = plan.transfer_schedule, plan.predicted
    table.check()
    usable = plan.cluster.device.usable_bytes
    assert predicted.peak_bytes == table.high_water_bytes <= table.budget_bytes == usable
    assert sum(predicted.memory_bytes.values()) == predicted.peak_bytes
    assert sum(predicted.time_s.values()) == pytest.approx(predicted.step_time_s, rel=1e-9)
    moments = table.trace.moments
    on_device = sum(moment.seconds for moment in moments if moment.on == "device")
    others = sum(s for use, s in predicted.time_s.items() if use not in ("optimizer", "offload"))
    assert on_device == pytest.approx(others, rel=1e-9)
    assert sum(moment.seconds for moment in moments if moment.on == "host") == pytest.approx(
        plan_update_s(plan), rel=1e-12
    )
    if name == "early":
        assert 0 < predicted.time_s["optimizer"] < plan_update_s(plan)
    else:
        assert predicted.time_s["optimizer"] == pytest.approx(plan_update_s(plan), rel=1e-12)
    step_s = on_device + predicted.time_s["optimizer"] + predicted.time_s["offload"]
    assert predicted.step_time_s == pytest.approx(step_s, rel=1e-12)
    if plan.cluster.backend == "gloo":
        assert predicted.time_s["offload"] == pytest.approx(sum(table.link_s.values()), rel=1e-12)
    else:
        assert predicted.step_time_s == pytest.approx(simulate(table).step_s, rel=1e-9)


@each_plan
def test_what_is_beside_chunks_is_followed_by_block(plans: Callable[[str], Plan], name: str) -> None:
    plan = plans(name)
    memory = usage(plan.assignment)
    assert max(memory.by_block.values()) == memory.peak_bytes
    others = {moment.name: moment.other_bytes for moment in plan.transfer_schedule.trace.moments}
    for number, names in moments_of(plan.assignment).items():
        for direction, moment in zip(("forward", "backward"), names, strict=True):
            if moment in others:
                assert others[moment] == memory.by_block.get((direction, number), 0)  # type: ignore[call-overload]
            else:
                assert number == BEFORE
    assert memory.by_use()["parameters"] == memory.by_use()["optimizer"] == 0


@each_plan
def test_a_plan_is_certified_and_comes_back_from_its_file(plans: Callable[[str], Plan], name: str) -> None:
    plan = plans(name)
    assert plan.certificate.holds and "nothing moves beside computing" in plan.certificate.of
    without = "what stays, and what moves beside computing, with which a step takes"
    assert f"{without} {plan.predicted.step_time_s:.9g} s" in str(plan.certificate)
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan and again.transfer_schedule == plan.transfer_schedule and again.digest() == plan.digest()
    assert again.predicted == plan.predicted


@each_plan
def test_pricing_again_keeps_the_plan(plans: Callable[[str], Plan], name: str) -> None:
    plan = plans(name)
    again = reprice(plan, plan.assignment)
    assert again == plan and again.search.status == plan.search.status


def test_a_digest_names_the_transfer_schedule_too(plans: Callable[[str], Plan]) -> None:
    plan = plans("tight")
    assert replace(plan, transfer_schedules=plans("roomy").transfer_schedules).digest() != plan.digest()


def test_a_file_with_a_transfer_schedule_that_cannot_be_is_refused(plans: Callable[[str], Plan]) -> None:
    data = json.loads(json.dumps(plans("tight").to_dict()))
    data["transfer_schedule"]["budget_bytes"] = 1000
    with pytest.raises(PlanError, match=r"transfer_schedule.*over the budget of 1,000 bytes"):
        Plan.from_dict(data)


def test_the_report_says_what_moves(plans: Callable[[str], Plan]) -> None:
    plan = plans("tight")
    text = str(plan)
    assert "pinned  offload host" in text and "certified" in text
    step, memory = plan.predicted.time_s["offload"], plan.predicted.memory_bytes
    assert step > 0 and re.search(r"optimizer [\d.]+ \ws \(\d+ %\), offload [\d.]+ \ws \(\d+ %\)", text)
    assert memory.keys() == {"chunks", "beside"} and re.search(r"chunks [\d.]+ \w+ \(\d+ %\), beside [\d.]+", text)
    assert "fullest in " in text and repr(plan).startswith("<Plan of ResidualMLP")
    page = plan.to_html()
    assert "waiting for what moves between device and host" in page
    assert "what moves and is on the device just then" in page


def test_the_report_says_what_chunks_waste() -> None:
    """Here bytes up to the next multiple of 64 behind each parameter, and nothing else."""
    graph = residual_mlp(layers=2, width=9, batch=4)
    plan = offload(graph, cluster("1 MiB"))
    whole = sum(chunk.bytes for chunk in chunks_of(plan.assignment))
    held = sum(leaf.results[0].size_bytes for leaf in graph.leaves if leaf.op == "param")
    assert 0 < whole - held < 64 * sum(leaf.op == "param" for leaf in graph.leaves)
    told = f"of parameters, {100 * (whole - held) / whole:.2f} % of it padding) with their home on the host"
    assert told in unwrapped(plan) and told in unwrapped(Plan.from_dict(plan.to_dict()))


def test_a_parameter_is_explained_as_at_home_on_the_host(plans: Callable[[str], Plan]) -> None:
    found = plans("tight").explain("layers.0.up.weight")
    assert "256.0 KiB for each device, with their home on the host" in str(found)
    assert "layers.* / up: linear" in str(plans("tight").explain("layers.0.up"))
    assert "on each device" in str(plans("tight").explain("x"))


# ---- laws ------------------------------------------------------------------------------------------------------------


def test_with_room_for_all_the_host_s_update_is_all_that_moves_anything(plans: Callable[[str], Plan]) -> None:
    """Parameters come once, since the host writes them, and gradients go once."""
    plan = plans("roomy")
    chunks = chunks_of(plan.assignment)
    assert plan.transfer_schedule.bytes_moved == {
        ("host", "fetch"): sum(chunk.bytes for chunk in chunks),
        ("host", "evict"): sum(chunk.gradient_bytes for chunk in chunks),
    }


@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_a_tighter_budget_moves_no_less(data: st.DataObject) -> None:
    """Of one trace, where everything is proved to be the least."""
    assignment, trace = _case()
    least, room = max(trace.needed_bytes), sum(item.bytes for item in trace.items)
    budgets = sorted(data.draw(st.lists(st.integers(least, least + room), min_size=2, max_size=4)))
    tables = [fewest_bytes(trace, budget) for budget in budgets]
    assert all(table.stopped == "proved" for table in tables)
    numbers = [sum(table.bytes_moved.values()) for table in tables]
    assert numbers == sorted(numbers, reverse=True)
    most = sum(item.bytes * len(item.uses) for item in trace.items)
    trained = sum(chunk.bytes + chunk.gradient_bytes for chunk in chunks_of(assignment))
    assert trained <= numbers[-1] <= numbers[0] <= most


_made: list[Any] = []


def _case() -> Any:
    if not _made:
        plan = offload(residual_mlp(layers=5, width=32, batch=32), cluster())
        _made.append((plan.assignment, plan.transfer_schedule.trace))
    return _made[0]


def test_a_tighter_device_gives_a_plan_that_moves_no_less(plans: Callable[[str], Plan]) -> None:
    spec, graph = cluster(), residual_mlp(layers=4, width=64, batch=16)
    whole = offload(graph, spec)
    least = largest_working_set(whole.assignment, usage(whole.assignment)).bytes
    found = [offload(graph, with_usable(spec, least + extra), recompute="none") for extra in (0, 10**5, 3 * 10**5)]
    assert moved(found[0]) > moved(found[1]) > moved(found[2]) >= moved(whole)
    assert found[0].predicted.step_time_s > found[2].predicted.step_time_s


def test_zero_3_halves_what_two_ranks_move() -> None:
    graph, spec = residual_mlp(layers=2, width=32, batch=32), cluster(devices=2)
    whole, sharded = (offload(graph, spec, data=2, zero=zero) for zero in (0, 3))
    assert moved(whole) == 2 * moved(sharded)
    assert data_bytes(whole.assignment) == 2 * data_bytes(sharded.assignment)
    starts_s = spec.device.launch_overhead_s * sum(leaf.op == "param" for leaf in graph.leaves)
    whole_s, sharded_s = (each.predicted.time_s["optimizer"] - starts_s for each in (whole, sharded))
    assert whole_s == pytest.approx(2 * sharded_s)


def test_a_faster_link_waits_less(plans: Callable[[str], Plan]) -> None:
    slow, spec = plans("tight"), cluster("2.5 MiB")
    host = spec.host.model_copy(update={"link_bytes_per_s": 4 * spec.host.link_bytes_per_s})
    fast = offload(spec=spec.model_copy(update={"host": host}))
    assert fast.predicted.time_s["offload"] <= slow.predicted.time_s["offload"] / 4 * 1.001


def test_over_nccl_moving_hides_behind_computing() -> None:
    """With a link so fast that nothing is waited for, and one so slow that everything is."""
    spec = gpu("3 MiB")
    assert spec.host is not None

    def plan(speed: float) -> Plan:
        return offload(
            spec=spec.model_copy(update={"host": Host(**{**dict(spec.host or {}), "link_bytes_per_s": speed})})
        )

    fast, slow = plan(1e15), plan(1e9)
    assert fast.predicted.time_s["offload"] < 1e-3 * fast.predicted.step_time_s
    assert (
        0.5 * slow.predicted.step_time_s
        < slow.predicted.time_s["offload"]
        <= sum(slow.transfer_schedule.link_s.values())
    )


# ---- what does not fit -----------------------------------------------------------------------------------------------


def test_what_was_found_is_cut_into_less_memory_where_there_is_no_time_to_search_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec, known, fastest = cluster("2 MiB"), list[Incumbent | None](), fastest_plan.fastest

    def found(
        context: SearchContext, decision_graph: DecisionGraph, configs: ParallelConfigs, given: Incumbent | None
    ) -> Searched:
        known.append(given)
        return fastest(replace(context, deadline=0.0) if given else context, decision_graph, configs, given)

    monkeypatch.setattr(offload_search, "fastest", found)
    late = search(GRAPH, spec, whole({"offload": "host", "activations": "none", "micro_batches": 1}), Training())
    first, *others = known
    assert first is None and others and late.best is others[-1]
    assert late.working_set().bytes <= spec.device.usable_bytes


def test_model_data_that_does_not_fit_the_device_does_on_the_host() -> None:
    spec, graph = cluster("3 MiB"), residual_mlp(layers=8, width=128, batch=32)
    data = sum(16 * n.results[0].numel for n in graph.leaves if n.op == "param")
    assert data > 5 * spec.device.usable_bytes
    with pytest.raises(InfeasibleError):
        plan_of(graph, spec)
    plan = offload(graph, spec)
    assert plan.predicted.peak_bytes <= spec.device.usable_bytes
    assert data_bytes(plan.assignment) == data


def test_a_budget_below_the_largest_working_set_says_what_is_needed_and_what_would_lower_it() -> None:
    graph, spec = residual_mlp(layers=2, width=64, batch=32), cluster("200 KiB")
    with pytest.raises(InfeasibleError, match="largest working set") as caught:
        offload(graph, spec)
    text = str(caught.value)
    usable, takes, over, chunks, beside, memory = (
        int(re.search(pattern, text)[1].replace(",", ""))  # type: ignore[index]
        for pattern in (
            r"can use ([\d,]+) bytes", r"takes ([\d,]+) bytes", r", ([\d,]+) bytes \([^,]*\) too many",
            r"needs ([\d,]+) bytes \(.*\) of parameters", r"and ([\d,]+) bytes \(.*\) beside",
            r"memory_bytes of at least ([\d,]+)",
        )
    )  # fmt: skip
    assert usable == spec.device.usable_bytes and takes - usable == over == caught.value.excess_bytes
    assert chunks + beside == takes and re.search(r"too many: backward \d layers.\d needs", text)
    for way in ("smaller global batch", "zero", "tensor"):
        assert way in text
    assert "Relaxing" not in text and "'recompute'" not in text
    assert offload(graph, cluster(memory)).predicted.peak_bytes <= takes
    with pytest.raises(InfeasibleError):
        offload(graph, cluster(memory - 1024))
    with pytest.raises(InfeasibleError, match="pin 'recompute' 'full'"):
        offload(graph, spec, recompute="none")


def test_no_limit_is_searched_twice_where_plans_need_more_than_the_search_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chunk that is much larger than all else: the search's own sum has room to spare, and the plan none."""
    found: list[Any] = []

    def counted(*args: Any) -> Any:
        found.append(branch_and_bound(*args))
        return found[-1]

    for room in (fastest_plan, offload_search):
        monkeypatch.setattr(room, "branch_and_bound", counted)
    graph, spec = residual_mlp(layers=2, width=256, batch=8), cluster()
    still = offload(graph, spec, activations="none").assignment
    need = largest_working_set(still, usage(still)).bytes
    found.clear()
    with pytest.raises(InfeasibleError):
        offload(graph, with_usable(spec, need // 50 * 48), activations="none")
    plans = [each.assignment for each in found if isinstance(each, Searched)]
    assert plans and len({(each.recompute, tuple(each.chosen.items())) for each in plans}) == len(plans)


def test_a_host_that_is_too_small_is_refused_with_its_numbers() -> None:
    needed = data_bytes(offload().assignment)
    with pytest.raises(InfeasibleError) as caught:
        offload(spec=cluster("2.5 MiB", host=needed - 1000))
    assert caught.value.excess_bytes == 1000
    for part in (
        f"{in_all_bytes(needed - 1000)} for each device",
        in_all_bytes(needed),
        "'zero' 2 or 3",
        "more memory",
    ):
        assert part in str(caught.value)
    assert offload(spec=cluster("2.5 MiB", host=needed)).transfer_schedule is not None


def test_gradients_that_are_used_as_they_arrive_take_three_memories_of_the_host() -> None:
    found = offload(update="backward").assignment
    sizes = [chunk.gradient_bytes for chunk in chunks_of(found)]
    assert len(sizes) == 6 and not any(chunk.is_before for chunk in chunks_of(found))
    needed = data_bytes(found) - sum(sizes) + sum(sorted(sizes)[-3:])
    with pytest.raises(InfeasibleError) as caught:
        offload(spec=cluster("2.5 MiB", host=needed - 1000), update="backward")
    assert caught.value.excess_bytes == 1000
    assert offload(spec=cluster("2.5 MiB", host=needed), update="backward").transfer_schedule is not None
    with pytest.raises(InfeasibleError):
        offload(spec=cluster("2.5 MiB", host=needed))


def test_a_cluster_that_does_not_say_what_its_host_has_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"'local' does not say .*ClusterSpec.local takes host_memory_bytes"):
        offload(spec=ClusterSpec.local(1, "1 GiB", cores=2))


# ---- what cannot be asked --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ask, instead",
    [
        (lambda plan: plan.at(batch=128), "plan again at the other size"),
        (lambda plan: plan.max_batch(), "plan again at the other size"),
        (lambda plan: plan.max_sequence(), "plan again at the other size"),
        (lambda plan: plan.formulas, "plan again at the other size"),
        (lambda plan: plan.why_not({"tensor": 1}), "plan with the recipe and pin 'offload', and compare"),
        (lambda plan: plan.fullest, "read plan.transfer_schedules"),
    ],
)
def test_questions_about_plans_on_the_device_are_refused(
    plans: Callable[[str], Plan], ask: Callable[[Plan], object], instead: str
) -> None:
    with pytest.raises(PlanError, match=r"keeps model data on the host.*with pin 'offload' 'none', or " + instead):
        ask(plans("tight"))


def test_why_not_offload_is_refused() -> None:
    graph = residual_mlp(layers=1, width=32, batch=32)
    with pytest.raises(PinError, match=r"'offload' is 'host', and why_not compares .* plan with this pin"):
        plan_of(graph, cluster()).why_not({"offload": "host"})
    assert plan_of(graph, cluster()).why_not({"offload": "none"}).extra_s == 0


def test_offload_none_is_an_ordinary_plan() -> None:
    plan = plan_of(GRAPH, cluster(), {"offload": "none"})
    assert plan.transfer_schedule is None and "offload" not in plan.predicted.time_s
    assert plan.predicted == plan_of(GRAPH, cluster()).predicted


def auto(spec: ClusterSpec) -> tuple[Plan, set[str]]:
    """A plan of which some may stay on the device, and the parameters that do."""
    plan = offload(spec=spec, offload="auto", recompute="none")
    items = plan.transfer_schedule.trace.item
    return plan, {chunk.name for chunk in chunks_of(plan.assignment) if parameters(chunk) not in items}


def test_as_much_stays_as_makes_the_step_shortest() -> None:
    found, steps = [], []
    for memory in ("2.5 MiB", "4 MiB", "5.5 MiB", "16 MiB"):
        plan, stays = auto(gpu(memory))
        found.append(len(stays))
        steps.append(plan.predicted.step_time_s)
        whole = offload(spec=gpu(memory), recompute="none")
        assert plan.predicted.step_time_s <= whole.predicted.step_time_s
        assert plan.predicted.peak_bytes <= plan.cluster.device.usable_bytes
        assert sum(plan.predicted.memory_bytes.values()) == plan.predicted.peak_bytes
        assert sum(plan.predicted.time_s.values()) == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
        assert reprice(plan, plan.assignment).transfer_schedule == plan.transfer_schedule
        held = home_bytes(plan.assignment, [c for c in chunks_of(plan.assignment) if c.name in stays])
        assert plan.predicted.memory_bytes.get("stays", 0) == held
    assert found == sorted(found) and 0 < found[2] < found[3] == len(chunks_of(plan.assignment))
    assert steps == sorted(steps, reverse=True)
    assert plan.transfer_schedule is not None and not plan.transfer_schedule.trace.items
    assert plan.predicted.time_s["offload"] == 0


def test_a_host_that_holds_some_is_enough_where_the_rest_stays() -> None:
    data = data_bytes(offload().assignment)
    spec = gpu("5.5 MiB")
    spec = spec.model_copy(update={"host": spec.host.model_copy(update={"memory_bytes": data - 1024})})
    plan, stays = auto(spec)
    assert stays and plan.predicted.step_time_s == auto(gpu("5.5 MiB"))[0].predicted.step_time_s
    with pytest.raises(InfeasibleError, match="the host has"):
        offload(spec=spec)


def test_a_plan_file_has_a_transfer_schedule_if_it_offloads(plans: Callable[[str], Plan]) -> None:
    data = plans("tight").to_dict()
    with pytest.raises(PlanError, match="pin 'offload' is 'host', and it has no transfer_schedule"):
        Plan.from_dict({key: value for key, value in data.items() if key != "transfer_schedule"})
    with pytest.raises(PlanError, match="pin 'offload' is 'none', and it has a transfer_schedule"):
        Plan.from_dict({**data, "pin": {}})
    with pytest.raises(
        PlanError, match="transfer schedule updates in backward, and its pin 'update' is not 'backward'"
    ):
        Plan.from_dict({**plans("early").to_dict(), "pin": {"offload": "host"}})


def test_what_is_made_again_leaves_room_for_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = residual_mlp(layers=8, width=256, batch=2048)
    sizes = ("80 MiB", "120 MiB")
    pin = {"offload": "auto", "activations": "none"}
    with_room = [offload(graph, gpu(size), **pin).predicted for size in sizes]
    monkeypatch.setattr("planner.search.offload_search.ROOM", ())
    without = [offload(graph, gpu(size), **pin).predicted for size in sizes]
    assert all(mine.step_time_s <= other.step_time_s for mine, other in zip(with_room, without, strict=True))
    assert with_room[1].step_time_s < 0.95 * without[1].step_time_s
    assert with_room[1].memory_bytes["stays"] > 10 * without[1].memory_bytes["stays"]
    assert with_room[1].time_s["recompute"] > without[1].time_s["recompute"]


# ---- updates in backward ---------------------------------------------------------------------------------------------


def slow_host(speed: float) -> ClusterSpec:
    """A small GPU whose host updates at so many bytes per second."""
    spec = gpu("3 MiB")
    host = spec.host.model_copy(update={"memory_bandwidth_bytes_per_s": speed})
    return spec.model_copy(update={"host": host})


def test_an_update_in_backward_hides_what_it_can() -> None:
    """Of a host that is fast, all but what comes last; of a slow one, as much as backward takes."""
    for speed in (5e10, 5e8):
        after, early = (offload(spec=slow_host(speed), update=when) for when in ("after", "backward"))
        assert early.transfer_schedule.bytes_moved == after.transfer_schedule.bytes_moved
        assert early.predicted.time_s["offload"] == pytest.approx(after.predicted.time_s["offload"])
        moments = early.transfer_schedule.trace.moments
        first = next(place for place, moment in enumerate(moments) if moment.on == "host")
        backward_s = sum(moment.seconds for moment in moments[first:] if moment.on == "device")
        hidden_s = after.predicted.time_s["optimizer"] - early.predicted.time_s["optimizer"]
        each_s = [moment.seconds for moment in moments if moment.on == "host" and moment.seconds]
        moving_s = early.predicted.time_s["offload"]  # the last eviction, too, is beside what the host does
        assert hidden_s <= min(backward_s + moving_s, sum(each_s[:-1])) * 1.000001
        assert hidden_s > (0.9 * backward_s if speed < 1e9 else sum(each_s[:-2]))
        assert early.certificate.holds and "updates 6 of them in backward" in unwrapped(early)


def test_on_cpu_processes_an_update_in_backward_hides_nothing() -> None:
    early, after = (offload(update=when).predicted for when in ("backward", "after"))
    assert early.time_s == pytest.approx(after.time_s) and early.step_time_s == pytest.approx(after.step_time_s)


def test_what_stays_is_updated_after_backward() -> None:
    plan = offload(spec=gpu("4 MiB"), offload="auto", recompute="none", update="backward")
    names = [moment.name for moment in plan.transfer_schedule.trace.moments]
    assert "stays" in plan.predicted.memory_bytes and names[-2:] == ["update what stays", "update"]
    assert 0 < sum(name.startswith("update ") for name in names) - 1 < len(chunks_of(plan.assignment))
    assert sum(plan.predicted.time_s.values()) == pytest.approx(plan.predicted.step_time_s, rel=1e-9)


@pytest.mark.parametrize("state_bytes, rate", [(4, 4e9), (8, 5e9), (12, 5e9)])
def test_the_host_updates_at_the_rate_of_the_state(state_bytes: int, rate: float) -> None:
    rates = [{"dtype": "float32", "bytes_per_s": 5e9}, {"dtype": "bfloat16", "bytes_per_s": 4e9}]
    measured = Calibration.from_dict(
        {
            "format": "autopar-calibration", "version": 2, "device": "cpu", "ranks": 1, "launch_s": 1e-5,
            "products": [], "attention": [], "streams": [], "collectives": [], "host_updates": rates,
        }
    )  # fmt: skip
    pins, training = whole({"offload": "host"}), Training(state_bytes)
    space = search(GRAPH, cluster().calibrated(measured), pins, training).assignment.space
    leaf = next(leaf for leaf in GRAPH.leaves if leaf.op == "param")
    half = replace(leaf, results=(replace(leaf.results[0], dtype="bfloat16"),))
    elements = math.prod(leaf.results[0].shape)
    layout = (I,) * len(space.mesh.axes)
    start_s = space.cost.cluster.device.launch_overhead_s
    passing_s = elements * (3 * 2 + 2 * state_bytes) / rate
    assert space.update_s(half, layout) == pytest.approx(start_s + passing_s, rel=1e-12)
