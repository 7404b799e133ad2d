"""Transfer schedules: what must hold for any trace and budget, the same by trying everything, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pybind11_abseil.status import Status, StatusCode, StatusNotOk

from benchmarks.transfer_schedule import farthest, least_recent, models, on_demand, static, trace_of
from planner.base.errors import InfeasibleError, TransferScheduleError
from planner.solve import milp
from planner.solve.transfers import (
    Entry,
    Item,
    ItemUse,
    Moment,
    TierLink,
    Trace,
    TransferSchedule,
    fewest_bytes,
    keep,
    shortest_step,
    simulate,
)
from planner.solve.transfers.table import ACTIONS
from planner.solve.transfers.trace import ACCESSES

LINKS = {"host": TierLink(8.0, 8.0), "disk": TierLink(2.0, 1.0)}


@st.composite
def traces(draw: st.DrawFn, most_items: int = 5, most_moments: int = 6) -> Trace:
    """Random moments, some on the host, and items of any use; sizes equal or not, of a few bytes or of gigabytes."""
    count = draw(st.integers(1, most_moments))
    moments = [Moment(f"m{at}", draw(st.sampled_from([0.0, 1.0, 2.5])), draw(st.integers(0, 3))) for at in range(count)]
    for at in range(draw(st.integers(0, 2))):
        where = draw(st.integers(0, len(moments)))
        moments.insert(where, Moment(f"h{at}", draw(st.sampled_from([0.0, 1.0])), on="host"))
    sizes = draw(st.sampled_from([st.integers(0, 9), st.just(4), st.integers(10**6, 10**10)]))
    items = []
    for number in range(draw(st.integers(1, most_items))):
        home = draw(st.sampled_from(["host", "host", "disk"]))
        may = [moment.name for moment in moments if home == "host" or moment.on == "device"]
        used = draw(st.lists(st.sampled_from(may), unique=True, max_size=4))
        uses = tuple(ItemUse(name, draw(st.sampled_from(ACCESSES))) for name in may if name in used)
        items.append(Item(f"i{number}", draw(sizes), uses, home))
    return Trace(tuple(moments), tuple(items), LINKS)


@st.composite
def cases(draw: st.DrawFn, most_items: int = 5, most_moments: int = 6) -> tuple[Trace, int]:
    """A trace and a budget from just enough to more than plenty."""
    trace = draw(traces(most_items, most_moments))
    everything = sum(item.bytes for item in trace.items)
    return trace, max(trace.needed_bytes) + draw(st.one_of(st.integers(0, 20), st.integers(0, everything)))


@settings(max_examples=40)
@given(cases())
def test_a_transfer_schedule_can_be_carried_out_within_its_budget(case: tuple[Trace, int]) -> None:
    trace, budget = case
    for table in (fewest_bytes(trace, budget), shortest_step(trace, budget)):
        table.check()
        assert table.high_water_bytes <= budget
        seen = simulate(table)
        assert max(trace.needed_bytes) <= seen.high_water_bytes <= table.high_water_bytes
        assert table.link_bound_s <= sum(table.link_s.values()) * (1 + 1e-9)
        assert seen.step_s >= max(table.link_s.values()) * (1 - 1e-9)
        assert seen.step_s == pytest.approx(sum(trace.moments[at].seconds for at in trace.on_device) + seen.exposed_s)
        assert TransferSchedule.from_dict(table.to_dict()) == table


@settings(max_examples=40)
@given(cases(most_items=3, most_moments=5))
def test_nothing_keeps_the_links_busy_for_less(case: tuple[Trace, int]) -> None:
    trace, budget = case
    table = fewest_bytes(trace, budget)
    assert table.stopped == "proved"
    busy = sum(table.link_s.values())
    assert busy == pytest.approx(tried(trace, budget))
    largest = max(trace.seconds(item, way) for item in trace.items for way in ("fetch", "evict"))
    assert table.link_bound_s == pytest.approx(busy, abs=2e-6 * largest)
    assert shortest_step(trace, budget).link_bound_s <= busy * (1 + 1e-9)


@pytest.mark.parametrize("spare", [0, 4, 5, 9, 10])
def test_sizes_far_apart(spare: int) -> None:
    """Room for two items of a gigabyte, and beside them for none to two of 5 bytes, just or not quite."""
    moments = tuple(Moment(f"m{at}", 1) for at in range(5))
    large = [Item(f"large {n}", 10**9, (ItemUse(f"m{n}"), ItemUse(f"m{n + 2}"))) for n in range(2)]
    small = [Item(f"small {n}", 5, (ItemUse(f"m{n}"), ItemUse(f"m{n + 3}"))) for n in range(2)]
    trace = Trace(moments, (*large, *small), {"host": TierLink(1, 1)})
    table = fewest_bytes(trace, 2 * 10**9 + spare)
    assert table.stopped == "proved"
    assert sum(table.link_s.values()) == pytest.approx(tried(trace, 2 * 10**9 + spare), rel=1e-12)


@settings(max_examples=10)
@given(cases(most_items=3, most_moments=5))
def test_without_an_answer_of_the_solver(case: tuple[Trace, int]) -> None:
    """Belady's choice or nothing stays, and the bound is one still."""
    trace, budget = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keep, "ANSWERS", ())
        table = fewest_bytes(trace, budget)
    assert table.high_water_bytes <= budget
    assert table.link_bound_s <= tried(trace, budget) * (1 + 1e-9) <= sum(table.link_s.values()) * (1 + 2e-9)
    assert table.stopped in ("proved", "solver")


@settings(max_examples=10)
@given(cases(most_items=3, most_moments=5))
def test_where_solvers_break_off(case: tuple[Trace, int]) -> None:
    """GLOP's numerics may, as they did of a step of a thousand moments; it is as if it had no answer."""

    def breaking(*_: object, **__: object) -> None:
        try:
            raise StatusNotOk(Status(StatusCode.INTERNAL, "Unexpected GLOP termination reason: ABNORMAL"))
        except StatusNotOk:
            raise AttributeError("canonical_code") from None  # what OR-Tools makes of it

    trace, budget = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(milp.mathopt, "solve", breaking)
        table = fewest_bytes(trace, budget)
    assert table.high_water_bytes <= budget
    assert table.link_bound_s <= tried(trace, budget) * (1 + 1e-9) <= sum(table.link_s.values()) * (1 + 2e-9)
    assert table.stopped in ("proved", "solver")


@settings(max_examples=10)
@given(cases(), st.lists(st.sampled_from([0.0, 1e-12, 0.3, 7.0]), min_size=8, max_size=8))
def test_any_prices_of_room_give_a_bound(case: tuple[Trace, int], prices: list[float]) -> None:
    """So what a solver says of the prices is not relied on."""
    trace, budget = case
    least = sum(fewest_bytes(trace, budget).link_s.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keep, "_relaxed", lambda program: ({}, prices[: len(program.held)]))
        patch.setattr(keep, "FEW", -1)
        patch.setattr(keep, "WHOLE", -1)
        table = fewest_bytes(trace, budget)
    assert table.link_bound_s <= least * (1 + 1e-9) <= sum(table.link_s.values()) * (1 + 2e-9)
    assert table.stopped in ("proved", "choices")


def tried(trace: Trace, budget: int) -> float:
    """The least seconds on the links, from every choice of what stays after each use on the device."""
    names = [(item, use) for item in trace.items for use in item.uses if trace.place[use.moment] in trace.on_device]
    return min(
        seconds
        for stays in product([False, True], repeat=len(names))
        if (seconds := followed(trace, budget, dict(zip(names, stays, strict=True)))) is not None
    )


def followed(trace: Trace, budget: int, stays: dict[tuple[Item, ItemUse], bool]) -> float | None:
    """The seconds of the second step that goes as said; ``None`` if it does not fit, or a stale copy would stay."""
    here = dict.fromkeys(trace.items, False)
    behind = dict(here)
    for step in range(2):
        seconds = 0.0
        for place, moment in enumerate(trace.moments):
            for item, use in trace.used[place]:
                if moment.on == "device":
                    if not here[item] and use.reads:
                        seconds += trace.seconds(item, "fetch")
                    here[item] = True
                    behind[item] |= use.writes
                elif here[item]:
                    return None
            held = sum(item.bytes for item, is_here in here.items() if is_here)
            if moment.on == "device" and held + moment.other_bytes > budget and step:
                return None
            for item, use in trace.used[place] if moment.on == "device" else ():
                if not stays[item, use]:
                    here[item] = False
                    following = (item.uses * 2)[item.uses.index(use) + 1]
                    if behind[item] and following.reads:
                        seconds += trace.seconds(item, "evict")
                        behind[item] = False
                    behind[item] &= following.reads
            for item, use in trace.used[place] if moment.on == "host" else ():
                behind[item] &= not use.writes
    return seconds


@settings(max_examples=40)
@given(cases())
def test_no_rule_on_demand_and_no_fixed_set_moves_less(case: tuple[Trace, int]) -> None:
    """On average over the steps after which a rule repeats: so none is below the bound on one step."""
    trace, budget = replace(case[0], links=dict.fromkeys(LINKS, TierLink(1, 1))), case[1]
    table = fewest_bytes(trace, budget)
    for rule in (least_recent, farthest):
        assert table.link_bound_s <= on_demand(trace, budget, rule) * (1 + 1e-9)
    assert sum(table.bytes_moved.values()) <= static(trace, budget)


def test_a_model_moves_less_than_by_any_rule() -> None:
    trace = trace_of(models()[0])
    budget = max(trace.needed_bytes) + sum(item.bytes for item in trace.items) // 3
    moved = sum(fewest_bytes(trace, budget).bytes_moved.values())
    assert moved <= on_demand(trace, budget, farthest)
    assert moved < min(on_demand(trace, budget, least_recent), static(trace, budget))


@settings(max_examples=40)
@given(cases(), st.data())
def test_a_transfer_schedule_that_was_tampered_with_is_refused(case: tuple[Trace, int], data: st.DataObject) -> None:
    """An action left out, doubled, of another kind, or done at another moment than where it may be."""
    table = shortest_step(*case)
    done = [(at, *each) for at, entry in enumerate(table.entries) for each in entry.actions()]
    assume(done)
    at, action, name = data.draw(st.sampled_from(done))
    without = changed(table, at, action, [each for each in getattr(table.entries[at], action) if each != name])
    with pytest.raises(TransferScheduleError, match=f"{name}|over the budget"):
        without.check()
    other = data.draw(st.sampled_from([each for each in ACTIONS if each != action]))
    with pytest.raises(TransferScheduleError, match=f"{name}|over the budget"):
        changed(without, at, other, [*getattr(without.entries[at], other), name]).check()
    with pytest.raises(TransferScheduleError, match=f"{action} {name} is there 2 times"):
        changed(table, at, action, [*getattr(table.entries[at], action), name]).check()


def changed(table: TransferSchedule, at: int, action: str, names: Sequence[str]) -> TransferSchedule:
    entries = list(table.entries)
    entries[at] = replace(entries[at], **{action: tuple(names)})
    return replace(table, entries=tuple(entries))


def two_layers() -> Trace:
    """Parameters of 4 bytes that the update writes anew from 8 bytes of state; links of 8 bytes per second."""
    moments = [
        Moment("forward 0", 1),
        Moment("forward 1", 1, other_bytes=1),
        Moment("backward 1", 2, other_bytes=1),
        Moment("backward 0", 2),
        Moment("update 0", 1),
        Moment("update 1", 1),
    ]
    items = [
        item
        for n in (0, 1)
        for item in (
            Item(
                f"parameters {n}", 4, (ItemUse(f"forward {n}"), ItemUse(f"backward {n}"), ItemUse(f"update {n}", "w"))
            ),
            Item(f"gradients {n}", 4, (ItemUse(f"backward {n}", "w"), ItemUse(f"update {n}"))),
            Item(f"state {n}", 8, (ItemUse(f"update {n}", "rw"),)),
        )
    ]
    return Trace(tuple(moments), tuple(items), {"host": TierLink(8, 8)})


def test_by_hand() -> None:
    """An update needs all 16 bytes, so that whatever is needed before and after it must go: both states (8 bytes there
    and back each), gradients 1 over update 0, and parameters 0 over update 1 (4 each). All else can stay.
    """
    table = fewest_bytes(two_layers(), 16)
    assert table.high_water_bytes == 16
    assert table.bytes_moved == {("host", "fetch"): 24, ("host", "evict"): 24}
    assert table.link_bound_s == pytest.approx(6)
    everything = sum(item.bytes for item in two_layers().items)
    free = shortest_step(two_layers(), everything + 1)
    assert not any(free.bytes_moved.values())
    assert simulate(free).step_s == 8


TEXT = """\
budget 16 B, at most 16 B taken; a step moves: fetch 24 B (host), evict 24 B (host)
resident as a step begins: parameters 1, gradients 1, state 1
forward 0: drop gradients 1; evict state 1; fetch parameters 0; wait for parameters 0
forward 1: wait for the eviction of state 1
backward 1: make gradients 1
backward 0: drop parameters 1; evict gradients 1; make gradients 0
update 0: wait for the eviction of gradients 1; fetch state 0; wait for state 0
update 1: drop gradients 0; evict parameters 0, state 0; wait for the eviction of parameters 0, state 0; \
make parameters 1; fetch gradients 1, state 1; wait for gradients 1, state 1
"""


def test_the_text_of_a_transfer_schedule() -> None:
    assert fewest_bytes(two_layers(), 16).text() == TEXT


def test_an_update_on_the_host() -> None:
    """Gradients go there as soon as they are there, and parameters are fetched when the host has written them."""
    moments = (Moment("forward", 1), Moment("backward", 2), Moment("update", 4, on="host"))
    items = (
        Item("parameters", 8, (ItemUse("forward"), ItemUse("backward"), ItemUse("update", "w"))),
        Item("gradients", 8, (ItemUse("backward", "w"), ItemUse("update"))),
        Item("state", 100, (ItemUse("update", "rw"),)),
    )
    table = fewest_bytes(Trace(moments, items, {"host": TierLink(8, 8)}), 16)
    assert table.bytes_moved == {("host", "fetch"): 8, ("host", "evict"): 8}
    assert table.entries[2] == Entry(drop=("parameters",), evict=("gradients",))
    seen = simulate(table)
    assert seen.step_s == 1 + 2 + 1 + 4 + 1  # forward, backward, the gradients' way, the update, the parameters' way
    assert seen.waiting_s == {"forward": 6}


def test_double_buffering_hides_what_fewest_bytes_cannot() -> None:
    """Frozen layers are streamed, each as long on its way as one computes."""
    moments = tuple(Moment(f"layer {n}", 1) for n in range(12))
    items = tuple(Item(f"weights {n}", 8, (ItemUse(f"layer {n}"),)) for n in range(12))
    trace = Trace(moments, items, {"host": TierLink(8, 8)})
    assert simulate(shortest_step(trace, 8)).step_s == 24  # one at a time
    assert simulate(shortest_step(trace, 16)).step_s == 12  # the next comes while one is in use
    assert simulate(fewest_bytes(trace, 16)).exposed_s > 0


def test_a_budget_below_the_largest_working_set() -> None:
    with pytest.raises(
        InfeasibleError, match=r"15 bytes is below .*: update 0 needs 16 bytes, 1 bytes more: state 0 8 B"
    ) as caught:
        shortest_step(two_layers(), 15)
    assert caught.value.excess_bytes == 1
    with pytest.raises(TransferScheduleError, match="a budget of -1 bytes"):
        fewest_bytes(two_layers(), -1)


M, HOST = (Moment("a", 1), Moment("b", 1), Moment("c", 1, on="host")), {"host": TierLink(1, 1)}
DISK = {**HOST, "disk": TierLink(1, 1)}
WRONG = {
    "no moment computes on the device": ((), (), HOST),
    "2 moments have the name 'a'": ((*M, M[0]), (), HOST),
    "a takes nan s": ((Moment("a", float("nan")),), (), HOST),
    "a takes -1 bytes": ((Moment("a", 1, -1),), (), HOST),
    "b computes on 'disk'": ((M[0], Moment("b", 1, on="disk")), (), HOST),  # type: ignore[arg-type]
    "c computes on the host and cannot take 5 bytes": ((*M[:2], Moment("c", 1, 5, "host")), (), HOST),
    "host would evict at 0 bytes": (M, (), {"host": TierLink(1, 0)}),
    "a beside its items: 1.5 bytes; give a whole number": ((Moment("a", 1, 1.5),), (), HOST),  # type: ignore[arg-type]
    "item x: nan bytes; give a whole number": (M, (Item("x", float("nan"), ()),), HOST),  # type: ignore[arg-type]
    "2 items have the name 'x'": (M, (Item("x", 1, ()), Item("x", 1, ())), HOST),
    "item x has -1 bytes": (M, (Item("x", -1, ()),), HOST),
    "item x has its home on 'disk'": (M, (Item("x", 1, (), "disk"),), HOST),
    "access 'read'": (M, (Item("x", 1, (ItemUse("a", "read"),)),), HOST),  # type: ignore[arg-type]
    "there is no such moment": (M, (Item("x", 1, (ItemUse("d"),)),), HOST),
    "x is used by a after b": (M, (Item("x", 1, (ItemUse("b"), ItemUse("a"))),), HOST),
    "x is used by a after a": (M, (Item("x", 1, (ItemUse("a"), ItemUse("a"))),), HOST),
    "c computes on the host, but item x": (M, (Item("x", 1, (ItemUse("c"),), "disk"),), DISK),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_traces(message: str) -> None:
    with pytest.raises(TransferScheduleError, match=message):
        Trace(*WRONG[message])


def test_wrong_files() -> None:
    data = shortest_step(two_layers(), 20).to_dict()
    with pytest.raises(TransferScheduleError, match="cannot be read: 'items' is missing; take one"):
        TransferSchedule.from_dict({key: value for key, value in data.items() if key != "items"})
    with pytest.raises(TransferScheduleError, match=r"cannot be read: .*colour"):
        TransferSchedule.from_dict({**data, "items": [{**data["items"][0], "colour": "red"}]})
    with pytest.raises(TransferScheduleError, match="over the budget of 9"):
        TransferSchedule.from_dict({**data, "budget_bytes": 9})
    for budget in (None, "9", 1e300, [9]):
        with pytest.raises(TransferScheduleError, match=r"'budget_bytes' is .*, and takes a whole number"):
            TransferSchedule.from_dict({**data, "budget_bytes": budget})
    for bound, takes in ((-1.0, "bounds are not below zero"), (float("nan"), "takes a finite number")):
        with pytest.raises(TransferScheduleError, match=f"'link_bound_s' is {bound}, and {takes}"):
            TransferSchedule.from_dict({**data, "link_bound_s": bound})
    with pytest.raises(TransferScheduleError, match="'stopped' is 'tired', and takes 'proved' or"):
        TransferSchedule.from_dict({**data, "stopped": "tired"})
    drops_no_name = [{**data["moments"][0], "drop": [[]]}, *data["moments"][1:]]
    for key, value in (("link_bound_s", None), ("moments", None), ("moments", drops_no_name)):
        with pytest.raises(TransferScheduleError, match="cannot be read"):
            TransferSchedule.from_dict({**data, key: value})


def test_fetching_what_is_not_at_home() -> None:
    """The state is written by the update, so that dropping it loses what was written."""
    trace = Trace((Moment("a", 1), Moment("b", 1)), (Item("state", 1, (ItemUse("a", "rw"),)),), HOST)
    with pytest.raises(
        TransferScheduleError, match="a: fetch state: its home does not hold the value; last: drop on enter"
    ):
        TransferSchedule(trace, 9, (Entry(fetch=("state",), fetched=("state",)), Entry(drop=("state",)))).check()
