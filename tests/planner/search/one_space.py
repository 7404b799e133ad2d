"""Checks a search against brute force over all that it may choose from, on random graphs, clusters and memory limits.

:func:`drawn` draws a small model on a small cluster; :func:`check` searches it within several limits and tells what is
not as brute force has it (:class:`Violation`), with a cause.
"""

from __future__ import annotations

import itertools
import math
import operator
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from planner.analysis.memory import usage
from planner.base.errors import AutoparError, InfeasibleError
from planner.cost.cluster import ClusterSpec, Host
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.ir.graph import Graph
from planner.search.branch_and_bound import Searched
from planner.search.candidates import Candidate
from planner.search.home_search import NOT_PROVED, NOT_SEARCHED, ON_DEVICE
from planner.search.search import search
from tests.planner.plans import Build, whole
from tests.planner.search.brute_force import BruteForce, Config, Optimum, TooLargeError, best_of
from tests.planner.search.brute_force_offload import Home, best_offloaded
from tests.planner.search.test_optimum import random_cluster, with_memory

EXACT = 1e-6
"""Part of a step by which what is proved may be off."""
AMPLE = 2**40
APART = False
"""Whether equal blocks may differ in steps of several micro-batches or stages."""
HOSTS = 0.15
"""Part of the cases that have a host, as far as these plans can be counted out, too."""
PINS: Mapping[Home, str] = {"host": "host", "either": "auto"}
"""How a search is told where model data is at home."""
DEVICES = ((1,), (2,), (2,), (2,), (3,), (4,), (2, 2))


# ---- what is searched: the only places that know how a search is called and what it says of its candidates ---------


def searched(graph: Graph, cluster: ClusterSpec, offload: str | None = None) -> Searched | AutoparError:
    """The best plan of all there are, or why the search says that there is none."""
    try:
        return search(graph, cluster, Pins.parse({"offload": offload} if offload else None), Training())
    except InfeasibleError as error:
        return error


def in_one_piece(graph: Graph, cluster: ClusterSpec, folding: bool) -> Searched | None:
    """The best plan without pipelines and micro-batches, with which folding may be off."""
    try:
        return search(graph, cluster, whole(), Training(), folding=folding)
    except InfeasibleError:
        return None


def config_of(candidate: Candidate, configs: Iterable[Config]) -> Config:
    """Of which configuration a row is; its axes are called by what they are used for."""
    config = candidate.config
    own = Config(config.stages, config.mesh, config.unsharding.once_per_step)
    return next(each for each in configs if each.facts == own.facts)


def is_offloaded(found: Searched) -> bool:
    """Whether a plan's model data has its home on the host."""
    return found.best.space.training.tier != "device"


def is_of_all_homes(found: Searched) -> bool:
    """Whether what is proved is of plans with model data on the host, too."""
    return NOT_SEARCHED not in found.left_out and NOT_PROVED not in found.left_out


def peak_of(found: Searched) -> int:
    """Bytes of a plan followed."""
    if is_offloaded(found):
        return found.working_set().bytes
    return usage(found.assignment).peak_bytes if found.staged is None else found.staged.peak_bytes


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model on a cluster.

    Attributes:
        text: both in words.
        brute: all its plans with model data on the device.
        limits: of memory in bytes; ``None``: ample.
        offloaded: the best plans with model data offloaded to the host, by limit, where there is one.
    """

    seed: int
    text: str
    graph: Graph
    cluster: ClusterSpec
    brute: BruteForce
    limits: tuple[int | None, ...]
    offloaded: Mapping[tuple[int | None, Home], Optimum] = field(default_factory=dict)


def drawn(seed: int, limits: int = 3) -> Case | None:
    """The case of a seed; ``None`` where it is too large."""
    rng = random.Random(seed)
    graph, text = random_model(rng)
    devices = rng.choice(DEVICES)
    cluster = with_memory(random_cluster(rng, devices), AMPLE)
    try:
        brute = BruteForce(graph, cluster, apart=APART)
        best = best_of(brute.optima(None))
        tight = [max(1, int(best.peak_bytes * rng.uniform(0.5, 1.05))) for _ in range(limits - 1)]
        for limit in tight:
            brute.optima(limit)
    except TooLargeError:
        return None
    text = f"{text} on {' x '.join(map(str, devices))} devices"
    case = Case(seed, text, graph, cluster, brute, (None, *tight))
    return with_host(case, rng, best.peak_bytes) if rng.random() < HOSTS else case


def with_host(case: Case, rng: random.Random, device_bytes: int) -> Case:
    """A case with a host, of ample or little memory, or the same where there are too many plans that use it."""
    host = Host(
        memory_bytes=rng.choice([AMPLE, int(device_bytes * rng.uniform(0.3, 1.2))]),
        link_bytes_per_s=10 ** rng.uniform(7, 10),
        memory_bandwidth_bytes_per_s=10 ** rng.uniform(7, 10),
    )
    cluster, found = case.cluster.model_copy(update={"host": host}), {}
    limits = case.limits[:2]
    try:
        for limit, home in itertools.product(limits, PINS):
            found[limit, home] = best_offloaded(case.graph, within(cluster, limit), home)
    except TooLargeError:
        return case
    return replace(case, text=f"{case.text} with a host", cluster=cluster, limits=limits, offloaded=found)


def within(cluster: ClusterSpec, limit_bytes: int | None) -> ClusterSpec:
    """The cluster with so much memory, or ample."""
    return cluster if limit_bytes is None else with_memory(cluster, limit_bytes)


def random_model(rng: random.Random) -> tuple[Graph, str]:
    """An embedding or what is like one, equal layers, a head that is like no layer, and a loss."""
    b, batch, width, vocab = (
        Build(),
        rng.choice([1, 2, 2, 3, 4, 6]),
        rng.choice([2, 3, 3, 3, 5]),
        rng.choice([3, 5, 7, 4]),
    )
    first, layers, kind = rng.choice(["embedding", "linear", "none"]), rng.choice([0, 1, 1, 2, 2, 3]), rng.choice(KINDS)
    if first == "embedding":
        value = b.embedding("stem", b.tokens("tokens", batch), vocab, width, "stem")
    elif first == "linear":
        value = b.linear("stem", b.leaf("x", batch, vocab), width, "stem")
    else:
        value = b.leaf("x", batch, width)
    for i in range(layers):
        path = f"layers.{i}"
        inner = b.linear(f"linear{i}", value, width, path)
        if "silu" in kind:
            inner = b.call(f"silu{i}", "silu.default", batch, width, path=path, self=inner)
        value = b.add(f"add{i}", value, inner, path) if "add" in kind else inner
    if layers == 0 or rng.random() < 0.7:
        value = b.linear("head", value, vocab, "head")
    return b.mean(value), f"{first}, {layers} x {kind}, head, {batch} x {width} of {vocab}"


KINDS = ("linear", "linear silu", "linear add", "linear silu add")


# ---- the check -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Violation:
    """Something that a search said and that is not so.

    Attributes:
        what: ``missed`` (said to be optimal), ``bound`` (above the optimum), ``row`` (the same of one configuration),
            ``better`` (than all there is), ``too large``, ``unfolded`` (a plan is below the bound of the same search
            with folding, or without).
        cause: ``home`` where it holds of plans with model data on the device, ``offload`` where the home of model data
            is pinned to the host, else ``search``.
        off: by which part.
    """

    seed: int
    case: str
    limit_bytes: int | None
    what: str
    cause: str
    off: float
    text: str

    def __str__(self) -> str:
        limit = "ample memory" if self.limit_bytes is None else f"{self.limit_bytes} B"
        return f"{self.what} ({self.cause}) seed {self.seed}, {self.case}, {limit}: {self.text}"


@dataclass
class Tally:
    """What became of all that was checked.

    Attributes:
        optimal, open: plans said to be optimal, and with a gap; ``infeasible``: none said to fit; ``staged``: of these
            with micro-batches or stages.
        unfound: searches that found nothing that fits where something does.
        offloaded: plans with model data on the host, of those that fit.
        offloads: searches with the home of model data pinned to the host.
        above: plans that take longer than the optimum, ``worst_excess`` by which part at most.
        rows: bounds of single configurations that were compared.
    """

    cases: int = 0
    problems: int = 0
    optimal: int = 0
    open: int = 0
    infeasible: int = 0
    staged: int = 0
    offloaded: int = 0
    offloads: int = 0
    unfound: int = 0
    above: int = 0
    rows: int = 0
    worst_gap: float = 0.0
    worst_excess: float = 0.0
    search_s: float = 0.0
    violations: list[Violation] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count those of another one, too."""
        for each in fields(self):
            join = max if each.name.startswith("worst") else operator.add
            setattr(self, each.name, join(getattr(self, each.name), getattr(other, each.name)))

    def __str__(self) -> str:
        search_s = self.search_s / max(1, self.problems)
        return (
            f"{self.problems} problems of {self.cases} models on clusters: {self.optimal} optimal, {self.open} open "
            f"(worst gap {self.worst_gap:.1%}); {self.above} above the optimum (worst {self.worst_excess:.1%}); "
            f"{self.infeasible} in which nothing was found that fits, of which something does in {self.unfound}; "
            f"{self.staged} with micro-batches or stages; {self.offloaded} with model data on the host, and "
            f"{self.offloads} more searches with it pinned there; {self.rows} bounds of configurations; "
            f"{len(self.violations)} violations; {search_s:.2f} s a search"
        )


def check(case: Case, tally: Tally) -> None:
    """Search a case within each of its limits, and count and compare what is found."""
    tally.cases += 1
    for limit in case.limits:
        of_limit = _Check(case, limit, tally)
        of_limit.of_the_search()
        of_limit.of_folding()
        of_limit.of_offload()


class _Check:
    """A case within one limit."""

    def __init__(self, case: Case, limit: int | None, tally: Tally):
        self.case, self.limit, self.tally = case, limit, tally
        self.cluster, self.optima = within(case.cluster, limit), case.brute.optima(limit)

    def say(self, what: str, cause: str, off: float, text: str) -> None:
        """Tell a violation."""
        self.tally.violations.append(Violation(self.case.seed, self.case.text, self.limit, what, cause, off, text))

    def _compare(self, found: Searched, optimum: Optimum, where: object, cause: str) -> bool:
        """Whether no plan is faster than a search says; else it is told."""
        is_best = found.gap > 0 or self._holds("missed", found.planned_step_s, optimum, where, cause)
        return is_best and self._holds("bound", found.bound_s, optimum, where, cause)

    def _holds(self, what: str, claimed_s: float, optimum: Optimum, where: object, cause: str) -> bool:
        if claimed_s <= optimum.time_s * (1 + EXACT):
            return True
        text = f"{claimed_s:.6g} s said to be the least, and {optimum.time_s:.6g} s on {where}: {optimum.what}"
        self.say(what, cause, claimed_s / optimum.time_s - 1, text)
        return False

    def of_the_search(self) -> None:
        """What is found, what is proved of it and of every configuration, and what is refused."""
        start, tally = time.monotonic(), self.tally
        found = searched(self.case.graph, self.cluster)
        tally.search_s += time.monotonic() - start
        tally.problems += 1
        config, on_device = min(self.optima.items(), key=lambda each: each[1].time_s)
        offloaded = {home: best for (limit, home), best in self.case.offloaded.items() if limit == self.limit}
        best = min([on_device, *offloaded.values()], key=lambda each: each.time_s)
        if isinstance(found, AutoparError):  # which says that none was found, not that there is none
            tally.infeasible += 1
            tally.unfound += math.isfinite(best.time_s)
            return
        self._count(found, best)
        if ON_DEVICE not in found.left_out:
            is_true = self._compare(found, on_device, config, "search")
            if is_true and is_of_all_homes(found):
                for home, other in offloaded.items():
                    self._compare(found, other, f"home {home}", "home")
        if not is_offloaded(found):
            for row in found.candidates:
                tally.rows += 1
                own = config_of(row, self.optima)
                self._holds("row", row.bound_s, self.optima[own], own, "search")

    def _count(self, found: Searched, best: Optimum) -> None:
        """Count what is found, and see that it is no better than can be."""
        tally, step_s = self.tally, found.planned_step_s
        tally.staged += found.staged is not None
        tally.offloaded += is_offloaded(found)
        tally.optimal, tally.open = tally.optimal + (found.gap == 0), tally.open + (found.gap > 0)
        tally.worst_gap = max(tally.worst_gap, found.gap)
        tally.above += step_s > best.time_s * (1 + EXACT)
        tally.worst_excess = max(tally.worst_excess, step_s / best.time_s - 1)
        if self.limit is not None and peak_of(found) > self.limit:
            self.say("too large", "search", peak_of(found) / self.limit - 1, f"a plan of {peak_of(found)} B")
        if step_s < best.time_s * (1 - EXACT):
            self.say("better", "search", 1 - step_s / best.time_s, f"{step_s:.6g} s on {found.best.config}, not {best}")

    def of_folding(self) -> None:
        """Neither with folding nor without is a plan found that is below what is proved of the other, of plans that
        both can have.
        """
        plans = [in_one_piece(self.case.graph, self.cluster, folding) for folding in (True, False)]
        folded, unfolded = ((each.evaluation.time_s, each.bound_s) if each else (math.inf, 0.0) for each in plans)
        least_s, proved_s = min(folded[0], unfolded[0]), max(folded[1], unfolded[1])
        if least_s < proved_s * (1 - EXACT):
            text = f"{least_s:.6g} s found, and {proved_s:.6g} s proved: folded {folded}, unfolded {unfolded}"
            self.say("unfolded", "search", proved_s / least_s - 1, text)

    def of_offload(self) -> None:
        """The same with the home of model data pinned to the host."""
        for (limit, home), best in self.case.offloaded.items():
            if limit == self.limit:
                self.tally.offloads += 1
                found = searched(self.case.graph, self.cluster, PINS[home])
                if isinstance(found, AutoparError):
                    self.tally.unfound += math.isfinite(best.time_s)
                    continue
                self._compare(found, best, f"home {home}", "offload")
                step_s = found.planned_step_s
                if step_s < best.time_s * (1 - EXACT):
                    self.say("better", "offload", 1 - step_s / best.time_s, f"{step_s:.6g} s, not {best}")
