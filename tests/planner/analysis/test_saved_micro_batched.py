"""What blocks save with micro-batches: an item for each micro-batch, what stages keep, memories at home, and what is
refused.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from planner.analysis.memory import usage
from planner.analysis.offload.chunks import SAVED, chunks_of, home_bytes, of_micro_batch
from planner.analysis.offload.step_timing import saved_bytes, saved_homes
from planner.base.errors import InfeasibleError, PinError
from planner.base.formatting import in_all_bytes
from planner.cost.cluster import ClusterSpec
from planner.plan.plan import Plan, reprice
from planner.solve.transfers import Item, ItemUse, Moment, TierLink, Trace, TransferSchedule, fewest_bytes
from tests.planner.plans import residual_mlp, unwrapped
from tests.planner.search.test_offload import cluster, gpu, with_usable
from tests.planner.search.test_offload_micro_batched import offload

WIDE, NARROW = 64 * 4 * 128 * 4 // 4, 64 * 128 * 4 // 4
"""Bytes of a layer's hidden values in one of four micro-batches, and of what it adds them to."""
MICRO_BATCHED_PLANS = range(4)
ALL, NONE = {"activations": "all"}, {"activations": "none"}


def micro_batched(spec: ClusterSpec | None = None, **pin: Any) -> Plan:
    """A plan in four micro-batches of which anything may leave, and nothing is recomputed."""
    wanted = {"activations": "all", "recompute": "none", "micro_batches": 4, **pin}
    return offload(spec=spec or cluster(devices=pin.get("pipeline", 1)), **wanted)


def tight(plan: Plan) -> Plan:
    """The same on the smallest devices that will do, one for each rank."""
    tables = (fewest_bytes(table.trace, max(table.trace.needed_bytes)) for table in plan.transfer_schedules)
    return replace(plan, transfer_schedules=tuple(tables))


def saved_in(table: TransferSchedule, micro_batch: int) -> dict[str, int]:
    """Bytes of what is saved in a micro-batch, by name without that."""
    ending = of_micro_batch("", micro_batch)
    items = [item for item in table.trace.items if item.name.startswith(SAVED) and item.name.endswith(ending)]
    return {item.name.removesuffix(ending): item.bytes for item in items}


def leaving(table: TransferSchedule) -> list[str]:
    return [name for entry in table.entries for name in entry.evict if name.startswith(SAVED)]


def test_each_micro_batch_has_items_of_its_own_counted_by_hand() -> None:
    """A quarter of what a layer saves without micro-batches: what enters it and its relu's result."""
    (table,) = micro_batched().transfer_schedules
    layers = {f"saved {number + 1} layers.{number}": NARROW + WIDE for number in range(4)}
    for micro_batch in MICRO_BATCHED_PLANS:
        assert saved_in(table, micro_batch) == {**layers, "saved 5 head": NARROW}
        uses = table.trace.item[of_micro_batch("saved 2 layers.1", micro_batch)].uses
        assert uses == (
            ItemUse(of_micro_batch("forward 2 layers.1", micro_batch), "w"),
            ItemUse(of_micro_batch("backward 2 layers.1", micro_batch)),
        )


def test_what_a_stage_takes_leaves_after_its_last_block() -> None:
    first, last = micro_batched(pipeline=2, schedule="gpipe").transfer_schedules
    assert saved_in(first, 3) == {f"saved {at + 1} layers.{at}": NARROW + WIDE for at in (0, 1)}
    layers = {"saved 3 layers.2": WIDE, "saved 4 layers.3": NARROW + WIDE}
    wanted = {**layers, "saved 5 head of 3": NARROW, "saved 5 head": NARROW}
    assert saved_in(last, 0) == wanted


def test_what_others_in_flight_have_saved_is_not_beside() -> None:
    """But for what stays: the first stage's input is no one's, and what it hands on is in no block's hands."""
    plan, still = (micro_batched(pipeline=2, schedule="gpipe", activations=which) for which in ("all", "none"))
    assert plan.pipeline is not None and still.pipeline is not None and plan.pipeline.bounds == still.pipeline.bounds
    for rank, table in enumerate(plan.transfer_schedules):
        blocks = range(*plan.pipeline.bounds[rank : rank + 2])
        moved, held = (usage(each.assignment, blocks) for each in (plan, still))
        assert held.saved_bytes - moved.saved_bytes == sum(saved_in(table, 0).values()) > 0
        beside = {moment.name: moment.other_bytes for moment in table.trace.moments}
        each = [
            beside[of_micro_batch(f"forward {blocks.start + 1} layers.{blocks.start}", micro_batch)]
            for micro_batch in MICRO_BATCHED_PLANS
        ]
        loss = 4 * rank
        assert [more - before for before, more in pairwise(each)] == [moved.saved_bytes + loss] * 3


def test_micro_batches_that_are_not_in_flight_together_share_memory_at_home() -> None:
    (table,) = tight(micro_batched()).transfer_schedules
    assert len(leaving(table)) == 3 * 3  # the first micro-batch adds no gradients, and has room
    assert saved_homes(table) == (NARROW + WIDE,) * 3
    assert saved_bytes(table) == 3 * (NARROW + WIDE)
    flushed = tight(micro_batched(pipeline=2, schedule="gpipe")).transfer_schedules
    for each in flushed:  # all of them are in flight
        assert sorted(saved_homes(each)) == sorted(each.trace.item[name].bytes for name in leaving(each))
    in_micro_batch = tight(micro_batched(pipeline=2, schedule="1f1b")).transfer_schedules
    assert 0 < sum(map(saved_bytes, in_micro_batch)) < sum(map(saved_bytes, flushed))


@pytest.mark.parametrize("seed", range(8))
def test_memories_at_home_are_as_many_as_are_taken_at_once(seed: int) -> None:
    """Of random transfer schedules, against counting at every moment."""
    draw = random.Random(seed)
    moments = tuple(Moment(str(number), 1.0, draw.randrange(20)) for number in range(12))
    items = []
    for number in range(8):
        first, *more = sorted(draw.sample(range(12), draw.choice((2, 3))))
        uses = (ItemUse(str(first), "w"), *(ItemUse(str(place)) for place in more))
        items.append(Item(f"{draw.choice((SAVED, SAVED, 'other '))}{number}", draw.choice((8, 16, 16)), uses))
    trace = Trace(moments, tuple(items), {"host": TierLink(1.0, 1.0)})
    table = fewest_bytes(trace, max(trace.needed_bytes) + draw.randrange(16))
    taken: dict[int, list[int]] = {8: [], 16: []}
    for place in range(12):
        for size, counts in taken.items():
            counts.append(0)
            for item in items:
                gone = [at for at, entry in enumerate(table.entries) if item.name in entry.evict]
                back = [at for at, entry in enumerate(table.entries) if item.name in entry.drop]
                is_there = gone and gone[0] <= place < max((at for at in back if at > gone[0]), default=12)
                counts[-1] += bool(is_there and item.bytes == size and item.name.startswith(SAVED))
    wanted = [size for size, counts in taken.items() for _ in range(max(counts))]
    assert sorted(saved_homes(table)) == sorted(wanted)


GRAPH = residual_mlp(layers=6, width=64, batch=512)
SMALL: dict[str, tuple[ClusterSpec, dict[str, Any]]] = {
    "one stage": (with_usable(cluster(), 1_400_000), {"micro_batches": 2}),
    "gpipe": (with_usable(cluster(devices=2), 1_200_000), {"pipeline": 2, "micro_batches": 4, "schedule": "gpipe"}),
    "1f1b": (with_usable(cluster(devices=2), 760_000), {"pipeline": 2, "micro_batches": 8, "schedule": "1f1b"}),
    "on GPUs": (with_usable(gpu(devices=2), 1_200_000), {"pipeline": 2, "micro_batches": 4, "schedule": "gpipe"}),
}


@pytest.mark.parametrize("name", [*SMALL])
def test_devices_too_small_for_all_that_is_saved_are_enough_where_it_leaves(name: str) -> None:
    spec, pin = SMALL[name]
    plan = offload(GRAPH, spec, activations="all", recompute="none", **pin)
    left = [len(leaving(table)) for table in plan.transfer_schedules]
    assert all(left) and plan.predicted.peak_bytes <= plan.cluster.device.usable_bytes
    assert plan.predicted.peak_bytes == max(table.high_water_bytes for table in plan.transfer_schedules)
    with pytest.raises(
        InfeasibleError, match=r"largest working set .* What would lower it: .* pin 'activations' 'all'"
    ):
        offload(GRAPH, spec, activations="none", recompute="none", **pin)
    saved = sum(
        len([item for item in table.trace.items if item.name.startswith(SAVED)]) for table in plan.transfer_schedules
    )
    told = f"activations of {sum(left)} of {saved} forwards of blocks on the host between forward and backward"
    assert told in unwrapped(plan)
    assert sum(plan.predicted.time_s.values()) == pytest.approx(plan.predicted.step_time_s)
    again = Plan.from_dict(plan.to_dict())
    assert again.to_dict() == plan.to_dict() and again.activations == "all"
    assert reprice(again, plan.assignment).transfer_schedules == plan.transfer_schedules


def test_a_count_is_of_the_first_blocks_of_each_stage() -> None:
    first, last = micro_batched(pipeline=2, activations=1, schedule="1f1b").transfer_schedules
    assert [*saved_in(first, 1)] == ["saved 1 layers.0"] and [*saved_in(last, 1)] == ["saved 3 layers.2"]
    with pytest.raises(PinError, match=r"'activations' is 4, but 3 blocks of a stage save .*: pin that many, or 'all'"):
        micro_batched(pipeline=2, activations=4, schedule="1f1b")
    with pytest.raises(PinError, match=r"'activations' is 6, but 5 blocks save"):
        micro_batched(activations=6)


def test_a_host_too_small_for_what_leaves_is_refused_with_its_numbers() -> None:
    spec = with_usable(cluster(), max(micro_batched().transfer_schedules[0].trace.needed_bytes))
    plan = micro_batched(spec)
    more, data = saved_bytes(plan.transfer_schedules[0]), home_bytes(plan.assignment, chunks_of(plan.assignment))
    assert more and spec.host is not None
    for missing in (0, 1000):
        host = spec.host.model_copy(update={"memory_bytes": data + more - missing})
        small = spec.model_copy(update={"host": host})
        if not missing:
            assert micro_batched(small).transfer_schedules == plan.transfer_schedules
            continue
        with pytest.raises(InfeasibleError) as caught:
            micro_batched(small)
        assert caught.value.excess_bytes == missing
        assert f"{in_all_bytes(data)}, of activations that leave {in_all_bytes(more)} more" in str(caught.value)


@pytest.mark.parametrize("memory, makes_again", [("6 MiB", True), ("8 MiB", False)])
def test_it_leaves_where_a_step_is_shorter_so(memory: str, makes_again: bool) -> None:
    """Also where nothing would be recomputed, since parameters then need not come for each micro-batch."""
    graph, spec = residual_mlp(layers=6, width=128, batch=1024), gpu(memory, devices=2)
    pin = {"pipeline": 2, "micro_batches": 4, "schedule": "1f1b"}
    stays, leaves, chosen = (offload(graph, spec, **pin, **more) for more in (NONE, ALL, {}))
    assert not any(map(leaving, stays.transfer_schedules)) and any(map(leaving, chosen.transfer_schedules))
    assert bool(stays.predicted.time_s["recompute"]) == makes_again
    assert chosen.transfer_schedules == leaves.transfer_schedules and chosen.activations == "all"
    assert chosen.predicted.step_time_s == leaves.predicted.step_time_s < 0.98 * stays.predicted.step_time_s
    assert chosen.predicted.peak_bytes <= spec.device.usable_bytes and chosen.certificate.holds


def test_it_stays_where_all_fits() -> None:
    plan = offload(GRAPH, cluster(), micro_batches=2)
    assert plan.activations == 0 and not saved_in(plan.transfer_schedules[0], 0)
