"""Placements of embedding tables: fifty random sets, solved, beside largest-first placement and the proven bound."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from planner.cost.cluster import ClusterSpec
from planner.tables.embedding_table import EmbeddingTable
from planner.tables.largest_first import largest_first
from planner.tables.place_tables import place
from planner.tables.placement import slowest_s
from planner.tables.sharding_options import TableStep, sharding_options

SETS, BATCH = 50, 65536
STATE = 1
"""Numbers that the optimizer keeps for each weight: Adagrad's."""
LIMIT_S = 5.0


@dataclass(frozen=True)
class PlacedSet:
    """A set: seconds of the slowest rank, whole tables only and in every dimension, and the bounds on these."""

    seed: int
    tables: int
    ranks: int
    greedy_s: float
    whole_s: float
    whole_bound_s: float
    whole_solve_s: float
    every_s: float
    every_bound_s: float
    every_solve_s: float


def random_tables(seed: int) -> list[EmbeddingTable]:
    """10 to 300 tables of 10 to 3 million rows."""
    rng = np.random.default_rng(seed)
    return [
        EmbeddingTable(
            f"t{number}", int(10 ** rng.uniform(1, 6.5)), int(rng.choice([16, 32, 64, 128])), int(rng.integers(1, 30))
        )
        for number in range(int(rng.integers(10, 301)))
    ]


def compare() -> list[PlacedSet]:
    """Every set, alternately on one node of eight GPUs and on two."""
    found = []
    for seed in range(SETS):
        cluster = ClusterSpec.preset("dgx-h100", nodes=1 + seed % 2)
        tables, step, memory = random_tables(seed), TableStep(BATCH, STATE), cluster.device.usable_bytes
        every = {table.name: sharding_options(table, cluster, step) for table in tables}
        whole = {name: tuple(o for o in options if o.kind == "table") for name, options in every.items()}
        ranks = cluster.world_size
        greedy = largest_first(whole, ranks, memory)
        assert greedy is not None, f"set {seed} does not fit"
        begins = [time.process_time()]
        placements = []
        for options in (whole, every):
            placements.append(place(options, ranks, memory, time_limit_s=LIMIT_S))
            begins.append(time.process_time())
        each = [
            value
            for placement, start, end in zip(placements, begins, begins[1:], strict=False)
            for value in (placement.step_s, placement.bound_s, end - start)
        ]
        found.append(PlacedSet(seed, len(tables), ranks, slowest_s(greedy, ranks), *each))
    return found
