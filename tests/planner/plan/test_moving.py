"""The bill of moving: by hand, and against the elements of every tensor counted out one by one."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.base.errors import InputError, PlanError
from planner.cost.cluster import ClusterSpec
from planner.ir.elements import DisjointParts, count, elements_of
from planner.ir.graph import Ref
from planner.ir.layout import Layout, Mesh, Shard, local_shape, over_micro_batches, parse_layout
from planner.plan.further_stages import homes
from planner.plan.moving.bill import MovingBill, moving_bill
from planner.plan.moving.replanned import MovedPlan, Replanned, undivided
from planner.plan.moving.sources import level_between, source_of
from planner.plan.plan import Plan
from tests.planner.plans import cluster, plan_of, residual_mlp

LAYERS, WIDTH = 2, 24


@cache
def planned(devices: int, width: int = WIDTH, **pin: Any) -> Plan:
    spec = cluster(devices)
    disk = {"memory_bytes": "1 GiB", "read_bytes_per_s": "1 GB/s", "write_bytes_per_s": "0.5 GB/s"}
    spec = ClusterSpec.model_validate({**spec.model_dump(), "disk": disk})
    return plan_of(residual_mlp(LAYERS, width, batch=48), spec, {"recompute": "none", **pin})


def counted(shape: tuple[int, ...], layout: Layout, mesh: Mesh, rank: int) -> set[tuple[int, ...]]:
    """The elements that a rank holds, by cutting the numbers of all of them axis by axis."""
    numbers = [np.arange(size) for size in shape]
    for axis, local_type in enumerate(layout):
        if isinstance(local_type, Shard):
            part, at = numbers[local_type.dim], mesh.axes[axis]
            inner = [o for o in layout[:axis] if isinstance(o, Shard) and o.dim == local_type.dim]
            strips = local_type.outer
            for other, size in zip(layout[:axis], mesh.sizes, strict=False):
                strips //= size if other in inner and isinstance(other, Shard) and other.outer < local_type.outer else 1
            cut = part.reshape(strips, at.size, -1)
            numbers[local_type.dim] = cut[:, rank // at.stride % at.size].ravel()
    return set(itertools.product(*(each.tolist() for each in numbers)))


@pytest.mark.parametrize("text", ["S(0) R", "R S(1)", "S(0) S(0)", "S(0,3) S(1)", "S(1) S(1,6)", "S(0) S(0,6)", "R I"])
def test_elements_are_those_that_a_layout_leaves(text: str) -> None:
    mesh, shape = Mesh.of(a=2, b=3), (36, 36)
    layout = parse_layout(text, 2)
    parts = [elements_of(shape, layout, mesh, rank) for rank in range(6)]
    sets = [counted(shape, layout, mesh, rank) for rank in range(6)]
    local = local_shape(shape, layout, mesh.sizes)
    assert local is not None
    assert [count(part) for part in parts] == [len(each) for each in sets] == [local[0] * local[1]] * 6
    other = [elements_of(shape, parse_layout("S(1) S(0)", 2), mesh, rank) for rank in range(6)]
    others = [counted(shape, parse_layout("S(1) S(0)", 2), mesh, rank) for rank in range(6)]
    for wanted, numbers in zip((*parts, *other), (*sets, *others), strict=True):
        found = dict(DisjointParts(parts).overlapping(wanted))
        assert found == {part: len(held & numbers) for part, held in zip(parts, sets, strict=True) if held & numbers}


def elements(plan: Plan) -> dict[str, tuple[int, dict[int, set[tuple[int, ...]]]]]:
    """Of every parameter its bytes an element, and what each rank holds of it."""
    assert plan.assignment is not None
    space, found = plan.assignment.space, {}
    mesh, is_at = space.mesh.micro_batched(1), {} if plan.pipeline is None else homes(space.folded, plan.pipeline)
    for leaf in space.graph.applying("param"):
        layout = over_micro_batches(plan.assignment.produced(Ref(leaf.name)), space.mesh)
        ranks = [stage * mesh.size + rank for stage in is_at.get(leaf.target, {0}) for rank in range(mesh.size)]
        held = {rank: counted(leaf.results[0].shape, layout, mesh, rank % mesh.size) for rank in ranks}
        found[leaf.target] = 4 + plan.optimizer_bytes_per_element, held
    return found


STAGED = {"pipeline": 2, "micro_batches": 2, "data": 2, "zero": 3}


@pytest.mark.parametrize(
    ("old", "new", "was"),
    [
        ((4, {"data": 4, "zero": 3}), (3, {"data": 3, "zero": 3}), (0, 1, 3)),
        ((3, {"data": 3, "zero": 3}), (4, {"tensor": 4}), (0, 1, 2, None)),
        ((4, {"data": 2, "tensor": 2}), (4, STAGED), (3, 2, None, 0)),
        ((4, STAGED), (2, {"data": 2}), (1, 2)),
    ],
    ids=["a rank is lost", "one comes", "into stages", "out of stages"],
)
def test_the_bill_is_what_moves_element_by_element(
    old: tuple[int, dict[str, Any]], new: tuple[int, dict[str, Any]], was: tuple[int | None, ...]
) -> None:
    before, after = (planned(devices, **pin) for devices, pin in (old, new))
    bill = moving_bill(before, after, was)
    kept, lost, received = Counter[int](), Counter[int](), Counter[int]()
    held, whole = elements(before), 0
    for name, (size, wanted) in elements(after).items():
        staying = {now: held[name][1].get(rank, set()) for now, rank in enumerate(was) if rank is not None}
        there = set().union(*staying.values())
        whole += size * len(set().union(*wanted.values()))
        for rank, own in wanted.items():
            kept[rank] += size * len(own & staying.get(rank, set()))
            lost[rank] += size * len(own - there)
            received[rank] += size * len((own & there) - staying.get(rank, set()))
    assert bill.state_bytes == whole
    for rank in bill.ranks:
        assert (rank.kept_bytes, rank.lost_bytes) == (kept[rank.rank], lost[rank.rank])
        assert sum(rank.received_bytes.values()) == received[rank.rank]
    sent = sum((Counter(rank.sent_bytes) for rank in bill.ranks), Counter[str]())
    assert dict(sent) == bill.received_bytes


def test_a_bill_by_hand() -> None:
    """All is copied on 2 ranks; on 4, in shards, both that stay keep their quarter, and each sends one that comes its
    own.
    """
    bill = moving_bill(planned(2, data=2, zero=0), planned(4, data=4, zero=3))
    layer = WIDTH * 4 * WIDTH * 2 + 5 * WIDTH
    whole = 12 * (LAYERS * layer + WIDTH * WIDTH + WIDTH + _head())
    assert bill.state_bytes == whole
    quarter = sum(rank.kept_bytes for rank in bill.ranks) // 2
    assert [rank.kept_bytes for rank in bill.ranks] == [quarter, quarter, 0, 0]
    assert [sum(rank.received_bytes.values()) for rank in bill.ranks] == [0, 0, quarter, quarter]
    assert [sum(rank.sent_bytes.values()) for rank in bill.ranks] == [quarter, quarter, 0, 0]
    assert bill.lost_bytes == 0 and bill.read_s == 0
    level = planned(4, data=4, zero=3).cluster.levels[0]
    assert bill.message_s == pytest.approx(level.latency_s + quarter / level.bandwidth_bytes_per_s)
    assert bill.checkpoint_s == pytest.approx(whole / 2 / 0.5e9 + quarter / 1e9)


def _head() -> int:
    graph = residual_mlp(LAYERS, WIDTH, batch=48)
    return sum(leaf.results[0].numel for leaf in graph.applying("param") if leaf.target.startswith("head"))


def test_what_is_near_sends_first_and_equals_take_turns() -> None:
    spans = (4, 16)
    assert [level_between(1, other, spans) for other in (0, 3, 4, 15)] == [0, 0, 1, 1]
    assert source_of(5, [0, 5, 6], spans) == 5
    assert source_of(5, [0, 4, 6], spans) == 6 and source_of(7, [0, 4, 6], spans) == 6
    assert [source_of(rank, [0, 1], spans) for rank in (8, 9, 10, 11)] == [0, 1, 0, 1]


def test_without_a_disk_in_the_cluster_reading_has_no_price() -> None:
    plans = [plan_of(residual_mlp(LAYERS, WIDTH, batch=48), cluster(n), {"data": n, "zero": 3}) for n in (4, 3)]
    bill = moving_bill(*plans)
    assert bill.lost_bytes and bill.read_s is None and bill.seconds is None and bill.checkpoint_s is None
    assert "only a checkpoint has: not known to take how long, as the cluster file does not say" in str(bill)


def test_what_is_wrong_says_so() -> None:
    old, new = planned(4, data=4), planned(3, data=3)
    for was, match in (
        ((0, 1), "2 entries, and there are 3"),
        ((0, 0, 1), "rank 0 twice, and"),
        ((0, 1, 4), "rank 4, and"),
    ):
        with pytest.raises(InputError, match=match):
            moving_bill(old, new, was)
    with pytest.raises(PlanError, match="different models or batches"):
        moving_bill(old, planned(3, 48, data=3))
    with pytest.raises(PlanError, match="was read from a file"):
        moving_bill(Plan.from_dict(old.to_dict()), new)


def test_a_replanned_run_prints_and_is_json(tmp_path: Path) -> None:
    old, best, kept = planned(4, data=4, zero=3), planned(8, tensor=8), planned(8, data=8, zero=3)
    moves = [MovedPlan(plan, moving_bill(old, plan)) for plan in (best, kept)]
    found = Replanned(old, moves[0], moves[1], notes=undivided(residual_mlp(batch=20), cluster(8)))
    found.save(tmp_path / "replanned.json")
    data = json.loads((tmp_path / "replanned.json").read_text())
    assert Plan.from_dict(data["best"]["plan"]).digest() == best.digest()
    assert data["best"]["bill"]["ranks"][7]["received_bytes"] == moves[0].bill.ranks[7].received_bytes
    text = str(found)
    assert text.startswith("From 4 x cpu to 8 x cpu, with ")
    assert "ranks 4 to 7: each comes, keeps 0 B, receives" in text
    assert "8 devices do not divide the global batch of 20" in text and "go on with 5" in text and "such as 24" in text
    alone = Replanned(old, moves[0], None, "no mesh")
    assert "does not run there: no mesh" in str(alone) and alone.pays_after == 0
    assert json.loads(json.dumps(alone.to_dict()))["kept"] is None


def test_the_best_plan_pays_for_a_longer_move() -> None:
    old, plan = planned(4, data=4, zero=3), planned(8, data=8, zero=3)

    def move(step_s: float, message_s: float) -> MovedPlan:
        predicted = replace(plan.predicted, step_time_s=step_s)
        return MovedPlan(replace(plan, predicted=predicted), MovingBill(1, (), message_s, 0.0, 0.0, None))

    assert Replanned(old, move(1.0, 9.0), move(1.5, 1.0)).pays_after == 16
    assert Replanned(old, move(1.0, 1.0), move(1.5, 2.0)).pays_after == 0
    assert Replanned(old, move(1.5, 9.0), move(1.5, 1.0)).pays_after is None
