"""Transfer schedules: bytes that planned transfer schedules move, beside those of moving on demand and of a fixed set
that stays.

Traces are built from the shapes of models: a block's parameters in bf16, its gradients, and fp32 master weights with
two moments, each a chunk; forward, backward and update are moments. The rules that transfer schedules are compared with
start from an empty device and go around until what is on it at the beginning of a step repeats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from planner.solve.transfers import Item, ItemUse, Moment, TierLink, Trace, fewest_bytes, shortest_step, simulate
from planner.solve.transfers.gaps import gaps_of
from planner.solve.transfers.ways import Way, ways_of

GIB = 2**30
LINK = TierLink(25e9, 25e9)
FLOPS = 200e12
SHARES = (0.02, 0.1, 0.3, 0.6)
"""Budgets: the largest working set, and so much of all items beside it."""


@dataclass(frozen=True)
class Model:
    """Parameters of every block in the order of forward, tokens of a step, activation bytes that a block saves."""

    name: str
    blocks: tuple[int, ...]
    tokens: int
    saved_bytes: int
    update: str


@dataclass(frozen=True)
class Row:
    """A model under a budget: bytes of a step by each rule, the bound on them, steps, and CPU seconds of planning."""

    model: str
    update: str
    items: int
    share: float
    budget_bytes: int
    lru_bytes: float
    static_bytes: float
    belady_bytes: float
    ours_bytes: int
    bound_bytes: float
    solve_s: float
    fewest_step_s: float
    shortest_step_s: float
    shortest_bytes: int
    shortest_solve_s: float
    compute_s: float


def models() -> tuple[Model, ...]:
    """Blocks in the shapes of GPT-2 small and XL, Llama 3 8B and 405B, T5-large, and of a U-Net of three levels."""

    def transformer(width: int) -> int:
        return 12 * width * width + 13 * width

    llama = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    encoder, decoder = 4 * 1024 * 1024 + 2 * 1024 * 4096, 8 * 1024 * 1024 + 2 * 1024 * 4096
    levels = [(320 << level, 2) for level in range(3)]
    down = [9 * width * width * 2 + 10 * width * width for width, count in levels for _ in range(count)]
    xl = (50257 * 1600, *[transformer(1600)] * 48)
    large = 2 * 16384 * 16384 + 2 * 16384 * 1024 + 3 * 16384 * 53248
    unet = (320 * 36, *down, 2 * down[-1], *[3 * each // 2 for each in reversed(down)], 320 * 36)
    return (
        Model("GPT-2 small", (50257 * 768, *[transformer(768)] * 12), 8192, 200 << 20, "device"),
        Model("GPT-2 XL", xl, 8192, 400 << 20, "device"),
        Model("Llama 8B", (128256 * 4096, *[llama] * 32, 128256 * 4096), 8192, 512 << 20, "device"),
        Model("T5 large", (32128 * 1024, *[encoder] * 24, *[decoder] * 24), 8192, 150 << 20, "device"),
        Model("U-Net", unet, 16384, 90 << 20, "device"),
        Model("GPT-2 XL", xl, 8192, 400 << 20, "host"),
        Model("126 blocks", (large,) * 126, 65536, 512 << 20, "device"),
    )


def trace_of(model: Model) -> Trace:
    """One step of a model: forward, backward, and an update of each block as soon as its gradients are there."""
    last = len(model.blocks) - 1
    forward = [2 * model.tokens * size / FLOPS for size in model.blocks]
    moments = [Moment(f"forward {n}", forward[n], (n + 1) * model.saved_bytes) for n in range(last + 1)]
    items = []
    for n in range(last, -1, -1):
        moments.append(Moment(f"backward {n}", 2 * forward[n], (n + 1) * model.saved_bytes))
        seconds = 28 * model.blocks[n] / (100e9 if model.update == "host" else 2000e9)
        if model.update == "host":
            moments.append(Moment(f"update {n}", seconds, on="host"))
        else:
            moments.append(Moment(f"update {n}", seconds, (n + 1) * model.saved_bytes))
    for n, size in enumerate(model.blocks):
        here = ItemUse(f"update {n}", "w")
        items.append(Item(f"parameters {n}", 2 * size, (ItemUse(f"forward {n}"), ItemUse(f"backward {n}"), here)))
        items.append(Item(f"gradients {n}", 2 * size, (ItemUse(f"backward {n}", "w"), ItemUse(f"update {n}"))))
        for name in ("master", "first moment", "second moment"):
            items.append(Item(f"{name} {n}", 4 * size, (ItemUse(f"update {n}", "rw"),)))
    return Trace(tuple(moments), tuple(items), {"host": LINK})


def compare() -> Iterator[Row]:
    """Every model under every budget."""
    for model in models():
        trace = trace_of(model)
        total = sum(
            item.bytes for item in trace.items if any(trace.place[u.moment] in trace.on_device for u in item.uses)
        )
        for share in SHARES:
            budget = max(trace.needed_bytes) + int(share * total)
            start = time.process_time()
            fewest = fewest_bytes(trace, budget)
            solved = time.process_time()
            shortest = shortest_step(trace, budget)
            ended = time.process_time()
            yield Row(
                model.name,
                model.update,
                len(trace.items),
                share,
                budget,
                on_demand(trace, budget, least_recent),
                static(trace, budget),
                on_demand(trace, budget, farthest),
                sum(fewest.bytes_moved.values()),
                fewest.link_bound_s * LINK.fetch_bytes_per_s,
                solved - start,
                simulate(fewest).step_s,
                simulate(shortest).step_s,
                sum(shortest.bytes_moved.values()),
                ended - solved,
                sum(trace.moments[at].seconds for at in trace.on_device),
            )


Rule = Callable[["Demand", Item, int], int]
"""Of an item on the device at a moment: the one where this is largest goes first."""


def least_recent(demand: Demand, item: Item, now: int) -> int:
    """How long ago the item was used."""
    return now - demand.used[item]


def farthest(demand: Demand, item: Item, now: int) -> int:
    """How far ahead the item's next use is (Belady, 1966)."""
    place = now % len(demand.trace.moments)
    return min((at - place - 1) % len(demand.trace.moments) for at in demand.here[item])


class Demand:
    """A device that fetches what a moment uses when it comes, and lets items go by a rule where room is wanted.

    What is dead or out of date is dropped at once; what the host reads is evicted at once.
    """

    def __init__(self, trace: Trace, budget_bytes: int, rule: Rule):
        self.trace, self.budget, self.rule = trace, budget_bytes, rule
        self.here = {
            item: [trace.place[use.moment] for use in item.uses if trace.place[use.moment] in trace.on_device]
            for item in trace.items
        }
        self.used: dict[Item, int] = {}
        self.behind: set[Item] = set()
        self.goes = {(gap.item, trace.on_device[gap.after]): gap for gap in gaps_of(trace) if gap.must_go}
        self.moved = 0

    def step(self, number: int) -> int:
        """Bytes that one more step moves."""
        before = self.moved
        for place, moment in enumerate(self.trace.moments):
            now = number * len(self.trace.moments) + place
            if moment.on == "host":
                self.behind -= {item for item, use in self.trace.used[place] if use.writes}
                continue
            now_used = {item for item, _ in self.trace.used[place]}
            room = self.budget - self.trace.needed_bytes[place]
            others = sorted((item for item in self.used if item not in now_used), key=lambda item: item.name)
            while sum(item.bytes for item in others) > room:
                worst = max(others, key=lambda item: self.rule(self, item, now))
                others.remove(worst)
                self.go(worst)
            for item, use in self.trace.used[place]:
                if item not in self.used and use.reads:
                    self.moved += item.bytes
                self.used[item] = now
                if use.writes:
                    self.behind.add(item)
            for item in now_used:
                gap = self.goes.get((item, place))
                if gap is not None:
                    self.go(item, gap.needed)
        return self.moved - before

    def go(self, item: Item, needed: bool = True) -> None:
        """Let an item go, with its value if that is needed and not at home."""
        del self.used[item]
        if needed and item in self.behind:
            self.moved += item.bytes
        self.behind.discard(item)


def on_demand(trace: Trace, budget_bytes: int, rule: Rule) -> float:
    """Bytes of a step by the rule, on average over the steps after which the device's contents repeat."""
    demand = Demand(trace, budget_bytes, rule)
    moved: list[int] = []
    seen: dict[tuple[frozenset[Item], frozenset[Item]], int] = {}
    while True:
        state = (frozenset(demand.used), frozenset(demand.behind))
        if state in seen:
            return float(Fraction(sum(moved[seen[state] :]), len(moved) - seen[state]))
        seen[state] = len(moved)
        moved.append(demand.step(len(moved)))


def static(trace: Trace, budget_bytes: int) -> float:
    """Bytes of a step where a fixed set stays on the device and all else comes for each use and goes after it.

    The set is filled in the order of bytes saved for each byte that stays, as far as it fits beside the others' uses.
    """
    gaps = gaps_of(trace)
    costs, forced = (_by_item(trace, ways_of(gaps, kept)) for kept in (set[int](), {gap.number for gap in gaps}))
    stays: set[Item] = set()
    free = [budget_bytes - trace.needed_bytes[place] for place in trace.on_device]
    for item in sorted(costs, key=lambda item: (-(costs[item] - forced[item]) / max(item.bytes, 1), item.name)):
        used = {trace.place[use.moment] for use in item.uses}
        less = [room - (place not in used) * item.bytes for room, place in zip(free, trace.on_device, strict=True)]
        if min(less) >= 0 and costs[item] > forced[item]:
            free = less
            stays.add(item)
    return float(sum(forced[item] if item in stays else costs[item] for item in costs))


def _by_item(trace: Trace, ways: Iterable[Way]) -> dict[Item, int]:
    """Bytes that each item's ways move."""
    moved = dict.fromkeys(trace.items, 0)
    for way in ways:
        moved[way.gap.item] += (way.gap.reads + way.evicts) * way.gap.item.bytes
    return moved
