"""Why not: a pinned recipe beside the best plan, and the smallest set of limits that rules one out."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

import pytest

from planner.analysis.flips import at_speed
from planner.base.errors import InfeasibleError, InputError, PinError, PlanError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.formulation.pinned_space import pinned_space
from planner.formulation.training import Training
from planner.plan.plan import Plan, refold, reprice, restore
from planner.plan.report.why_not import WhyNot
from planner.search.branch_and_bound import Searched
from planner.search.conflict import Recipe
from planner.search.search import search
from tests.planner.plans import WHOLE, cluster, plan_of, residual_mlp, unwrapped

GRAPH = residual_mlp()


def planned(pin: Mapping[str, object]) -> Plan:
    """With some pins; the same once."""
    return _planned(tuple(pin.items()))


@functools.cache
def _planned(pin: tuple[tuple[str, object], ...]) -> Plan:
    return plan_of(GRAPH, pin=dict(pin))


@functools.cache
def plan() -> Plan:
    return plan_of(GRAPH)


@functools.cache
def tight() -> Plan:
    """A plan with hardly more memory than data parallelism needs if all is sharded and everything recomputed."""
    leanest = planned({"data": 4, "zero": 3, "recompute": "full"}).predicted.peak_bytes
    return plan_of(GRAPH, cluster(4, int(leanest / 0.9) + 1024))


def test_recipes_have_the_axes_of_the_plan() -> None:
    """A plan of one axis is compared with recipes of one axis: what two axes gain is not the recipe's."""
    for axes, count in ((1, 1), (2, 2)):
        recipe = {"recompute": "none", **WHOLE}
        found = Recipe(plan().assignment, plan().cluster, recipe, 60.0, axes).search(recipe)
        assert isinstance(found, Searched) and len(found.candidates) == count


@pytest.mark.parametrize("pin", [{"tensor": 4}, {"data": 4}, {"data": 2, "tensor": 2}, {"zero": 3, **WHOLE}])
def test_a_recipe_costs_what_planning_it_says_and_its_blocks_add_up(pin):
    answer, pinned = plan().why_not(pin), planned(pin)
    assert plan().predicted.step_time_s + answer.extra_s == pytest.approx(pinned.predicted.step_time_s)
    assert plan().predicted.peak_bytes + answer.extra_bytes == pinned.predicted.peak_bytes
    assert sum(block.extra_s for block in answer.blocks) == pytest.approx(answer.extra_s)
    assert sum(block.extra_bytes for block in answer.blocks) == answer.extra_bytes
    assert sum(answer.uses_s.values()) == pytest.approx(answer.extra_s)
    assert sum(answer.uses_bytes.values()) == answer.extra_bytes
    assert answer.extra_s >= 0 and answer.proven


def on(plan: Plan, spec: ClusterSpec) -> float:
    """Seconds of a step of a plan's file on another cluster."""
    read = Plan.from_dict({**plan.to_dict(), "cluster": spec.to_dict()})
    folded, stages = refold(read, GRAPH, plan.model), 1 if read.pipeline is None else read.pipeline.ranks
    space = pinned_space(GRAPH, folded, read.mesh, spec, read.pins, Training(), stages)
    return reprice(read, restore(read, space, plan.model)).predicted.step_time_s


@pytest.mark.parametrize(
    "pin, prices",
    [
        ({"tensor": 4}, {"host links", "arithmetic", "device memory"}),
        ({"pipeline": 2, "micro_batches": 4}, {"host links"}),
        ({"data": 4}, set()),
    ],
)
def test_the_order_of_the_plans_turns_where_it_is_said_to(pin, prices):
    answer, other = plan().why_not(pin), planned(pin)
    assert {flip.what for flip in answer.flips} == prices
    for flip in answer.flips:
        assert str(flip) in unwrapped(answer)
        below, above = (at_speed(plan().cluster, flip.what, flip.factor * (1 + eps)) for eps in (-1e-4, 1e-4))
        assert (on(other, below) > on(plan(), below)) != (on(other, above) > on(plan(), above))
        same = at_speed(plan().cluster, flip.what, flip.factor)
        assert on(other, same) == pytest.approx(on(plan(), same), rel=1e-5)


def test_it_says_what_memory_turns_the_order_and_what_a_gib_is_worth():
    answer = plan().why_not({"tensor": 4})
    assert answer.extra_bytes < 0 and "less than 9.8 MiB of memory a device, which the plan takes" in unwrapped(answer)
    pinned = planned(WHOLE)
    curve = pinned.pareto(2)
    priced = pinned.why_not({"tensor": 4}, pareto=curve)
    assert priced.seconds_per_gib == curve.seconds_per_gib(curve.points[-1]) > 0
    assert "each MiB less would cost the plan" in str(priced) and "each MiB" not in str(answer)
    with pytest.raises(InputError, match="the curve is of ResidualMLP on 'local', and the plan of"):
        tight().why_not({"tensor": 4}, pareto=curve)


def test_the_best_recipe_costs_nothing():
    pinned = planned({"tensor": 4})
    assert pinned.why_not({"tensor": 4}).extra_s == 0
    assert not pinned.why_not({"tensor": 4}).blocks


@pytest.mark.parametrize(
    "recipe, otherwise",
    [
        ({"tensor": 4}, {"data": 4, "zero": 0}),
        ({"tensor": 4, "zero": 0}, {"data": 4}),
        ({"data": 4, "zero": 3}, {"zero": 0}),
        ({"zero": 0, **WHOLE}, {}),  # alone it puts all devices on the data axis, as the plan's pins do
    ],
)
def test_it_names_the_pins_of_the_plan_that_a_recipe_does_not_share(recipe, otherwise):
    answer = planned({"data": 4, "zero": 0}).why_not(recipe)
    assert answer.pinned == otherwise
    assert ("it is faster: the plan was pinned to" in str(answer)) == (answer.extra_s < 0 and bool(otherwise))


def test_it_prints_totals_and_blocks():
    text = str(plan().why_not({"data": 4}))
    assert text.startswith("why not data = 4: mesh data 4\n  step    +")
    assert "memory  +" in text and "layers.*" in text
    assert "0.00 us" not in text and " 0 B" not in text and "+0 " not in text


def test_what_is_alive_at_the_peak_belongs_to_the_block_that_made_it_or_alone_reads_it():
    answer = planned({"tensor": 4}).why_not({"data": 4, "zero": 0})
    extra = {block.name: block.extra_bytes for block in answer.blocks}
    # The stem's weight and bias, each with two numbers of state, were cut in four, and are whole; the input was whole,
    # and is cut; the stem's result is kept in its part as it is made, and was as the layers had gathered it.
    state, x = 3 * 4 * (256 * 256 + 256), 4 * 512 * 256
    assert extra["stem"] == state * 3 // 4 - x * 3 // 4 + x // 4


def test_plans_micro_batched_differ_by_use():
    micro_batched = planned({"pipeline": 2, "micro_batches": 4})
    there, back = plan().why_not({"pipeline": 2, "micro_batches": 4}), micro_batched.why_not({"tensor": 4})
    for answer in (there, back):
        assert not answer.blocks
        assert sum(answer.uses_s.values()) == pytest.approx(answer.extra_s)
        assert sum(answer.uses_bytes.values()) == answer.extra_bytes
        assert "bubble" in str(answer) and "parameters" in str(answer) and "by block" not in str(answer)
    assert there.uses_s["bubble"] == micro_batched.predicted.time_s["bubble"] == -back.uses_s["bubble"]


def test_a_size_that_does_not_divide_is_to_blame_alone():
    conflict = plan().why_not({"tensor": 3, "zero": 3}).conflict
    assert conflict.limits == ("pin tensor = 3",)
    assert "does not divide the 4 devices" in conflict.reason
    assert conflict.relax == (("pin tensor = 3",),)


def test_sizes_that_do_not_multiply_are_to_blame_together():
    conflict = plan().why_not({"tensor": 2, "data": 4}).conflict
    assert conflict.limits == ("pins tensor = 2 and data = 4",)
    assert conflict.relax == (("pin tensor = 2",), ("pin data = 4",))


def test_without_one_of_its_sizes_a_recipe_has_another_mesh_and_is_no_freer():
    """``data = 2`` alone is impossible, and ``zero = 0`` alone puts all on it: neither is to blame where both plan."""
    recipe = {"tensor": 2, "data": 2, "zero": 0, "recompute": "none", **WHOLE}
    graph, room = residual_mlp(batch=2048), cluster(4, 25 * 2**20 * 10 // 9)
    base = plan_of(graph, room)
    conflict = base.why_not(recipe).conflict
    memory = "25.0 MiB of memory per device"
    pins = ("pin zero = 0", "pin recompute = none", "pin micro_batches = 1")
    assert conflict.limits == ("pins tensor = 2 and data = 2 and pipeline = 1", *pins, memory)
    assert conflict.relax == tuple((limit,) for limit in (*pins, memory))
    for name in ("zero", "recompute", "micro_batches"):
        assert plan_of(graph, room, without(recipe, name)).predicted.peak_bytes <= room.device.usable_bytes
    with pytest.raises(InfeasibleError) as refused:
        plan_of(graph, room, recipe)
    assert conflict.excess_bytes == refused.value.excess_bytes
    assert plan_of(graph, pin=recipe).predicted.peak_bytes > room.device.usable_bytes


def test_what_a_pin_says_of_an_axis_goes_with_it():
    recipe = {"tensor": 3, "sequence_parallel": True, "layers": {"layers.*.up": {"tensor": "rows"}}}
    conflict = plan().why_not(recipe).conflict
    assert conflict is not None and conflict.limits == ("pin tensor = 3",)
    assert len(conflict.relax) == 1 and len(conflict.relax[0]) == 3  # no two of them plan
    misspelt = f"pin layers = {(layers := {'layers.*.upp': {'tensor': 'rows'}})}"
    conflict = plan().why_not({"tensor": 2, "layers": layers}).conflict
    assert conflict is not None and conflict.limits == ("pin tensor = 2", misspelt)
    assert conflict.relax == ((misspelt,),) and "no module matches" in conflict.reason


def test_stages_that_have_no_part_in_it_are_not_blamed():
    conflict = plan().why_not({"pipeline": 2, "micro_batches": 3, "zero": 0}, time_limit_s=5).conflict
    assert conflict is not None and conflict.limits == ("pin micro_batches = 3",)
    assert conflict.relax == (("pin micro_batches = 3",),)


def without(pin: dict[str, object], *names: str) -> dict[str, object]:
    return {name: value for name, value in pin.items() if name not in names}


def test_memory_and_a_pin_are_to_blame_together_and_the_excess_is_theirs_and_enough():
    recipe = {"data": 4, "zero": 0, "recompute": "none"}
    answer = tight().why_not(recipe)
    conflict = answer.conflict
    data, zero, memory = conflict.limits
    assert (data, zero) == ("pin data = 4", "pin zero = 0") and memory.endswith("of memory per device")
    assert conflict.relax == ((data,), (memory,))  # without it stages share parameters that are whole on each
    stages = search(GRAPH, tight().cluster, Pins.parse(without(recipe, "data")), Training())
    assert stages.best.config.stages > 1 and stages.peak_bytes <= tight().cluster.device.usable_bytes
    assert f"{conflict.excess_bytes:,} bytes" in conflict.reason and "smallest excess under these" in str(answer)
    assert "it cannot be" in str(answer) and "it has a plan from" in str(answer)
    whole = cluster(4, answer.fits_from_bytes + 1)
    assert plan_of(GRAPH, whole, recipe).predicted.peak_bytes <= answer.fits_from_bytes
    room = tight().cluster.device.usable_bytes + conflict.excess_bytes
    enough = cluster(4, -(-room * 10 // 9) + 1)
    assert plan_of(GRAPH, enough, {"zero": 0}).predicted.peak_bytes <= room
    with pytest.raises(InfeasibleError):  # the whole recipe needs more
        plan_of(GRAPH, enough, recipe)


def test_a_plan_from_a_file_says_how_to_get_one_that_can_tell():
    bare = Plan.from_dict(plan().to_dict())
    for ask in (lambda: bare.why_not({"tensor": 4}), lambda: bare.certificate):
        with pytest.raises(PlanError, match=r"autopar.evaluate\(model, plan, example_kwargs=batch\)"):
            ask()


def test_wrong_questions():
    with pytest.raises(PinError, match="tensr"):
        plan().why_not({"tensr": 4})
    with pytest.raises(PinError, match=r"'schedule' and 'virtual_stages' are a pipeline's, .* pin 'pipeline'"):
        plan().why_not({"schedule": "1f1b"})
    with pytest.raises(PinError, match="pin is 'tensor'; give a dict"):
        plan().why_not("tensor")
    with pytest.raises(InputError, match="time_limit_s is 0"):
        plan().why_not({"tensor": 4}, time_limit_s=0)


def test_a_recipe_that_is_faster_is_recommended() -> None:
    answer = WhyNot({"tensor": 4}, 1.0, 100, mesh="tensor 4", extra_s=-0.1, proven=False)
    assert "it is faster: the plan's search did not find it. Plan again with this pin" in str(answer)
    assert "faster" not in str(replace(answer, extra_s=0.1))
    assert "left out pipelines, since none can be" in str(replace(answer, left_out="pipelines, since none can be"))
    excluded = str(replace(answer, pinned={"data": 2, "zero": 0}))
    assert "it is faster: the plan was pinned to data = 2, zero = 0, and this recipe is not" in excluded
    assert "did not find it" not in excluded
