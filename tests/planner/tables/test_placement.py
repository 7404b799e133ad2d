"""Placements of embedding tables: against brute force, against largest first, and within memory."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from planner.base.errors import InfeasibleError, InputError
from planner.cost.cluster import ClusterSpec
from planner.tables.average_rank import average_rank
from planner.tables.embedding_table import EmbeddingTable
from planner.tables.largest_first import exchange, largest_first
from planner.tables.lookups import TableLookup
from planner.tables.place_tables import place, place_tables
from planner.tables.placement import Options, slowest_s
from planner.tables.sharding_options import KINDS, ShardingOption, TableStep, sharding_options
from planner.tables.tables_plan import plan_tables

CLUSTER = ClusterSpec.preset("dgx-h100", nodes=2)
BATCH = 4096


def random_tables(seed: int, count: int) -> list[EmbeddingTable]:
    rng = np.random.default_rng(seed)
    return [
        EmbeddingTable(
            f"t{number}",
            int(10 ** rng.uniform(1, 6.5)),
            int(rng.choice([16, 32, 64, 128])),
            int(rng.integers(1, 30)),
        )
        for number in range(count)
    ]


def whole_tables(seed: int, count: int, ranks: int) -> Options:
    """Made-up times and sizes, so that tables that are fast to look up may be large."""
    rng = np.random.default_rng(seed)
    singles = tuple((rank,) for rank in range(ranks))
    return {
        f"t{number}": (ShardingOption("table", 1, singles, float(rng.uniform(0.1, 1) ** 3), int(rng.integers(1, 9))),)
        for number in range(count)
    }


def fastest_of_all(options: Options, ranks: int, memory_bytes: int) -> float:
    """Seconds of the slowest rank of the best of every placement of whole tables; ranks are alike."""
    each = [option for (option,) in options.values()]
    seconds, sizes = np.zeros((1, ranks)), np.zeros((1, ranks))
    seconds[0, 0], sizes[0, 0] = each[0].seconds, each[0].bytes
    for number, option in enumerate(each[1:], 2):  # so many tables are on the first so many ranks
        there = np.eye(ranks)[:number]
        seconds = (seconds[:, None] + option.seconds * there).reshape(-1, ranks)
        sizes = (sizes[:, None] + option.bytes * there).reshape(-1, ranks)
        seconds, sizes = (array[(sizes <= memory_bytes).all(1)] for array in (seconds, sizes))
    return float(seconds.max(1).min()) if len(seconds) else math.inf


SETS = [(12, 4, 0), (10, 3, 1), (1, 4, 2), *((n, 4, seed) for n in (5, 8, 9) for seed in range(n, n + 4))]


@pytest.mark.parametrize("count, ranks, seed", SETS)
def test_it_is_as_fast_as_the_best_of_all(count: int, ranks: int, seed: int) -> None:
    """With as much memory as there may be, and with little more than the tables take on average."""
    options = whole_tables(seed, count, ranks)
    for memory in (10**9, max(9, 1 + sum(option.bytes for (option,) in options.values()) // ranks)):
        best_s = fastest_of_all(options, ranks, memory)
        if math.isinf(best_s):
            with pytest.raises(InfeasibleError):
                place(options, ranks, memory)
            continue
        found = place(options, ranks, memory, gap=0)
        assert found.status == "optimal" and max(found.bytes) <= memory
        assert found.step_s == pytest.approx(best_s, rel=1e-6) and found.bound_s <= best_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_it_is_as_fast_as_the_best_of_all_with_every_dimension(seed: int) -> None:
    """Options and groups of three tables on two nodes of two, with as much memory as there may be, and with little."""
    cluster = ClusterSpec.from_dict({**CLUSTER.to_dict(), "levels": _levels(2)})
    options = {table.name: sharding_options(table, cluster, TableStep(BATCH, 1)) for table in random_tables(seed, 3)}
    assert {option.kind for each in options.values() for option in each} == {*KINDS}
    ways = [
        [(option, held) for option in each for held in itertools.combinations(range(len(option.groups)), option.parts)]
        for each in options.values()
    ]
    taken = [np.zeros((len(each), 2, 4)) for each in ways]  # seconds and bytes of each rank, for every way
    for of_table, each in zip(taken, ways, strict=True):
        for way, (option, held) in zip(of_table, each, strict=True):
            for group in held:
                way[:, list(option.groups[group])] += np.array([[option.seconds], [option.bytes]])
    every = taken[0][:, None, None] + taken[1][:, None] + taken[2]
    seconds, sizes = every[..., 0, :].max(-1), every[..., 1, :].max(-1)
    for memory in (10**12, int(sizes.min() * 1.1)):
        best_s = seconds[sizes <= memory].min()
        found = place(options, 4, memory, gap=0)
        assert found.status == "optimal" and max(found.bytes) <= memory
        assert found.step_s == pytest.approx(best_s, rel=1e-6)


def _levels(inside: int) -> list[object]:
    levels = CLUSTER.to_dict()["levels"]
    return [{**level, "size": inside} for level in levels]


def greedy_s(options: Options, ranks: int) -> float:
    """Seconds of the slowest rank where each table, the slowest first, goes to the rank that is done first."""
    done = [0.0] * ranks
    for (option,) in sorted(options.values(), key=lambda each: -each[0].seconds):
        done[done.index(min(done))] += option.seconds
    return max(done)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_it_is_faster_than_largest_first_where_that_is_worst(ranks: int) -> None:
    """Times of which that makes 4 r - 1, a third more than the best, 3 r (Graham 1969)."""
    times = [float(t) for t in range(2 * ranks - 1, ranks, -1) for _ in range(2)] + [float(ranks)] * 3
    singles = tuple((rank,) for rank in range(ranks))
    options = {f"t{n}": (ShardingOption("table", 1, singles, time, 1),) for n, time in enumerate(times)}
    assert greedy_s(options, ranks) == 4 * ranks - 1
    found = place(options, ranks, 100)
    assert found.step_s == pytest.approx(3 * ranks) and found.status == "optimal"


def test_it_is_faster_than_largest_first_on_random_tables() -> None:
    """None is slower, and what is gained is more than what the bound leaves open; the benchmark has fifty sets."""
    gained = left = 0.0
    for seed in range(6):
        options = whole_tables(seed, 12 + 2 * seed, 5)
        greedy, found = greedy_s(options, 5), place(options, 5, 10**9, time_limit_s=1)
        assert found.bound_s <= found.step_s <= greedy * (1 + 1e-9)
        gained, left = gained + 1 - found.step_s / greedy, left + found.gap
    assert gained > max(0.03, left)


def test_exchanges_keep_parts_apart_and_memory() -> None:
    options = {
        t.name: sharding_options(t, CLUSTER, TableStep(BATCH), ("table", "column")) for t in random_tables(0, 60)
    }
    start = largest_first(options, 16, 10**10)
    assert start is not None
    found = exchange(start, 16, 10**10)
    assert slowest_s(found, 16) <= slowest_s(start, 16)
    for before, after in zip(start, found, strict=True):
        assert before.option is after.option and len({*after.groups}) == after.option.parts


def test_thousands_of_tables_have_a_bound() -> None:
    options = {t.name: sharding_options(t, CLUSTER, TableStep(BATCH, 0)) for t in random_tables(7, 2000)}
    found = place(options, 16, CLUSTER.device.usable_bytes)
    assert found.gap < 0.01
    assert average_rank(options, 16, CLUSTER.device.usable_bytes)[0] == pytest.approx(found.bound_s)


def test_a_table_that_is_too_large_for_a_device_is_cut() -> None:
    large = EmbeddingTable("large", 200_000_000, 128)
    found = place_tables([large, *random_tables(0, 8)], CLUSTER, batch=BATCH, time_limit_s=1)
    assert len({rank for part in found.tables[0].ranks for rank in part}) > 1 and found.tables[0].kind != "data"
    assert max(found.bytes) <= CLUSTER.device.usable_bytes
    with pytest.raises(InfeasibleError, match=r"of 1 tables fits 16 devices .* part of 'large' 381\.5 GiB"):
        place_tables([large], CLUSTER, batch=BATCH, kinds=("table",))


def test_what_is_looked_up_counts() -> None:
    """Pooling, rows, and how many of them are distinct; rows that few look-ups reach are only updated."""

    def seconds(**sizes: object) -> float:
        table = EmbeddingTable("t", **{"rows": 10**6, "features": 64, "pooling": 10, **sizes})  # type: ignore[arg-type]
        return sharding_options(table, CLUSTER, TableStep(BATCH, 0), ("table",))[0].seconds

    hot = np.ones(10**6)
    hot[:10] = 10**9
    assert seconds(pooling=20) > seconds() > seconds(pooling=5)
    assert seconds(rows=2 * 10**6) > seconds()
    assert seconds(histogram=hot) < seconds() == pytest.approx(seconds(histogram=np.ones(10**6)))


def test_unique_ids() -> None:
    two = EmbeddingTable("t", 2, 1, histogram=[3, 1])
    assert two.unique_ids(2) == pytest.approx((1 - 1 / 16) + (1 - 9 / 16))
    assert two.share(slice(0, 1)) == 0.75 and EmbeddingTable("t", 4, 1).share(slice(1, 2)) == 0.25
    assert EmbeddingTable("t", 2, 1).unique_ids(2) == pytest.approx(1.5)
    assert EmbeddingTable("t", 1, 1).unique_ids(5) == 1
    rng = np.random.default_rng(0)
    zipf = 1 / np.arange(1, 1001)
    drawn = [len(np.unique(rng.choice(1000, 500, p=zipf / zipf.sum()))) for _ in range(50)]
    assert EmbeddingTable("t", 1000, 1, histogram=zipf).unique_ids(500) == pytest.approx(np.mean(drawn), rel=0.02)


@pytest.mark.parametrize(
    "histogram, message",
    [
        ([1, 2], r"the histogram of table 'user' has shape \(2,\) and the table 3 rows"),
        ([1, -1, 1], "'user' must hold counts of at least 0"),
        ([0, 0, 0], "'user' must hold counts of at least 0, and some above"),
        ("abc", "the histogram of table 'user' holds no numbers"),
    ],
)
def test_histograms_that_are_none(histogram: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EmbeddingTable("user", 3, 8, histogram=histogram)
    for rows in (0, 10.5):
        with pytest.raises(InputError, match=f"rows of table 'user' is {rows}; give a whole number from 1"):
            EmbeddingTable("user", rows, 8)  # type: ignore[arg-type]


def test_what_cannot_be_placed_is_named() -> None:
    tables = random_tables(0, 2)
    with pytest.raises(InputError, match="two embedding tables are called 't0'"):
        place_tables([tables[0], tables[0]], CLUSTER, batch=BATCH)
    with pytest.raises(InputError, match="table 't0' cannot be sharded by table-row on"):
        place_tables(tables, ClusterSpec.preset("dgx-h100"), batch=BATCH, kinds="table-row")


@pytest.mark.parametrize("arguments, message", [
    ({"tables": []}, r"tables is \[\]; give a list of autopar\.EmbeddingTable, one at least"),
    ({"cluster": 2}, "cluster is 2; give a ClusterSpec"),
    ({"batch": 1.5}, "batch is 1.5; give a whole number from 1"),
    ({"batch": 0}, "batch is 0; give a whole number from 1"),
    ({"optimizer_state": -1}, "optimizer_state is -1; give a whole number from 0"),
    ({"memory_bytes": 0}, "memory_bytes is 0; give a whole number from 1"),
    ({"kinds": "rows"}, "kinds has no 'rows'; there are: table, column, row"),
    ({"kinds": []}, "kinds is empty; there are: table"),
], ids=str)  # fmt: skip
def test_arguments_of_no_use_are_named(arguments: dict[str, object], message: str) -> None:
    given = {"tables": random_tables(0, 2), "cluster": CLUSTER, "batch": BATCH, **arguments}
    with pytest.raises(InputError, match=message):
        place_tables(**given)  # type: ignore[arg-type]


def test_what_one_width_leaves_no_room_for_is_said() -> None:
    """Tables of each width are placed by themselves, so that the first may take all that there is."""
    step = TableStep(BATCH)
    found = [TableLookup(EmbeddingTable(f"t{width}", 1000, width), f"look_{width}", BATCH, False) for width in (8, 16)]
    (first,) = (option.bytes for option in sharding_options(found[0].table, ClusterSpec.local(1), step))
    with pytest.raises(InfeasibleError, match="no memory is left for the 1 embedding tables of 16 features: those of"):
        plan_tables(found, ClusterSpec.local(1), 2, first, {}, 1.0)
    with pytest.raises(InfeasibleError, match="no placement of 1 tables fits 1 devices of 1000 B"):
        plan_tables(found, ClusterSpec.local(1), 2, 1000, {}, 1.0)


def test_of_equally_fast_placements_the_fullest_rank_is_emptiest() -> None:
    """One table takes longest, by itself; the others are spread by bytes as well as may be."""
    singles = tuple((rank,) for rank in range(3))
    sizes = {"slow": (8.0, 1), "a": (1.0, 5), "b": (1.0, 1), "c": (1.0, 5), "d": (1.0, 1)}
    options = {name: (ShardingOption("table", 1, singles, seconds, size),) for name, (seconds, size) in sizes.items()}
    found = place(options, 3, 100)
    assert found.step_s == 8 and max(found.bytes) == 6


def test_a_placement_prints() -> None:
    text = str(place_tables(random_tables(1, 3), CLUSTER, batch=BATCH, kinds=("table",)))
    assert text.startswith("3 tables on 16 ranks, optimal") and "  t2  table " in text and "\n  rank 15: " in text


def test_an_interrupt_is_still_one_after_tables_were_placed() -> None:
    """CP-SAT's own handler would leave behind one that kills the process without a word."""
    code = (
        "import signal\n"
        "from tests.planner.tables.test_placement import BATCH, CLUSTER, place_tables, random_tables\n"
        "place_tables(random_tables(1, 3), CLUSTER, batch=BATCH)\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert done.stdout == "interrupted\n"
