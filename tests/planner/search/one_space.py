"""Checks a search against brute force over all that it may choose from, on random graphs, clusters and memory limits.

:func:`drawn` draws a small model on a small cluster; :func:`check` searches it within several limits and tells what is
not as brute force has it (:class:`Violation`), with a cause: what of it follows from adding up bytes that are not alive
at once, and what does not.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from planner.analysis.memory import usage
from planner.base.errors import AutoparError, ClusterError, InfeasibleError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.ir.graph import Graph
from planner.search.branch_and_bound import Searched
from planner.search.candidate_bounds import Candidate
from planner.search.search import search
from tests.planner.plans import Build
from tests.planner.search.brute_force import BruteForce, Config, TooLargeError, best_of
from tests.planner.search.test_optimum import random_cluster, with_memory

EXACT = 1e-6
"""Part of a step by which what is proved may be off."""
AMPLE = 2**40
DEVICES = ((1,), (2,), (2,), (2,), (3,), (4,), (2, 2))


# ---- what is searched: the only places that know how a search is called and what it says of its candidates ---------


def searched(graph: Graph, cluster: ClusterSpec) -> Searched | AutoparError:
    """The best plan of all there are, or why the search says that there is none."""
    try:
        return search(graph, cluster, Pins(), Training(), pipelines=True)
    except (InfeasibleError, ClusterError) as error:
        return error


def in_one_piece(graph: Graph, cluster: ClusterSpec, folding: bool) -> Searched | None:
    """The best plan without pipelines and micro-batches, with which folding may be off."""
    try:
        return search(graph, cluster, Pins(), Training(), folding=folding)
    except (InfeasibleError, ClusterError):  # nothing fits, or no size of the model can be divided
        return None


def config_of(candidate: Candidate, configs: Iterable[Config]) -> Config:
    """Of which configuration a row is; its axes are called by what they are used for."""
    config = candidate.config
    own = Config(config.stages, config.mesh, config.unsharding.once_per_step)
    return next(each for each in configs if each.facts == own.facts)


def peak_of(found: Searched) -> int:
    """Bytes of a plan followed."""
    return usage(found.assignment).peak_bytes if found.staged is None else found.staged.peak_bytes


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model on a cluster.

    Attributes:
        text: both in words.
        brute: all its plans.
        limits: of memory in bytes; ``None``: ample.
    """

    seed: int
    text: str
    graph: Graph
    cluster: ClusterSpec
    brute: BruteForce
    limits: tuple[int | None, ...]


def drawn(seed: int, limits: int = 3) -> Case | None:
    """The case of a seed; ``None`` where it is too large."""
    rng = random.Random(seed)
    graph, text = random_model(rng)
    devices = rng.choice(DEVICES)
    cluster = with_memory(random_cluster(rng, devices), AMPLE)
    try:
        brute = BruteForce(graph, cluster)
        best = best_of(brute.optima(None))
        tight = [max(1, int(best.peak_bytes * rng.uniform(0.5, 1.05))) for _ in range(limits - 1)]
        for limit in tight:
            brute.optima(limit)
    except TooLargeError:
        return None
    text = f"{text} on {' x '.join(map(str, devices))} devices"
    return Case(seed, text, graph, cluster, brute, (None, *tight))


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
            ``refused`` (something fits), ``better`` (than all there is), ``too large``, ``unfolded``.
        cause: ``sum`` where it holds of plans that fit by the sum of bytes, ``frontier`` where it holds of those of
            them on the Pareto frontier of recomputation, ``indivisible`` where the search says that the model cannot
            be divided among the devices, else ``search``.
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
        rows: bounds of single configurations that were compared.
        worst_excess: the most by which a plan takes longer than the optimum.
    """

    cases: int = 0
    problems: int = 0
    optimal: int = 0
    open: int = 0
    infeasible: int = 0
    staged: int = 0
    rows: int = 0
    worst_gap: float = 0.0
    worst_excess: float = 0.0
    search_s: float = 0.0
    violations: list[Violation] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Count those of another one, too."""
        for name in ("cases", "problems", "optimal", "open", "infeasible", "staged", "rows", "search_s", "violations"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.worst_gap = max(self.worst_gap, other.worst_gap)
        self.worst_excess = max(self.worst_excess, other.worst_excess)

    def __str__(self) -> str:
        search_s = self.search_s / max(1, self.problems)
        return (
            f"{self.problems} problems of {self.cases} models on clusters: {self.optimal} optimal, {self.open} open "
            f"(worst gap {self.worst_gap:.1%}, worst step {self.worst_excess:.1%} above the optimum), "
            f"{self.infeasible} in which nothing fits, {self.staged} with micro-batches or stages; {self.rows} bounds "
            f"of configurations; {len(self.violations)} violations; {search_s:.2f} s a search"
        )


def check(case: Case, tally: Tally) -> None:
    """Search a case within each of its limits, and count and compare what is found."""
    tally.cases += 1
    for limit in case.limits:
        _check_limit(case, limit, tally)


def _check_limit(case: Case, limit: int | None, tally: Tally) -> None:
    cluster = case.cluster if limit is None else with_memory(case.cluster, limit)
    optima, start = case.brute.optima(limit), time.monotonic()
    found = searched(case.graph, cluster)
    tally.search_s += time.monotonic() - start
    tally.problems += 1
    best = best_of(optima)

    def say(what: str, cause: str, off: float, text: str) -> None:
        tally.violations.append(Violation(case.seed, case.text, limit, what, cause, off, text))

    _check_folding(case, cluster, say)
    if isinstance(found, AutoparError):
        tally.infeasible += 1
        if math.isfinite(best.time_s):
            config = next(config for config, each in optima.items() if each is best)
            cause = "indivisible" if isinstance(found, ClusterError) else _cause(case, limit, config, math.inf)
            say("refused", cause, math.inf, f"{best.time_s:.6g} s fits on {config}: {best}; the search says: {found}")
        return
    time_s, bound_s = found.evaluation.time_s, found.bound_s
    tally.staged += found.staged is not None
    tally.optimal, tally.open = tally.optimal + (found.gap == 0), tally.open + (found.gap > 0)
    tally.worst_gap = max(tally.worst_gap, found.gap)
    tally.worst_excess = max(tally.worst_excess, time_s / best.time_s - 1)
    if limit is not None and peak_of(found) > limit:
        say("too large", "search", peak_of(found) / limit - 1, f"a plan of {peak_of(found)} B")
    if time_s < best.time_s * (1 - EXACT):
        say("better", "search", 1 - time_s / best.time_s, f"{time_s:.6g} s on {found.best.config}, not {best}")
    config = next(config for config, each in optima.items() if each is best)
    claimed = min(bound_s, time_s)
    if claimed > best.time_s * (1 + EXACT):
        what = "missed" if found.gap == 0 else "bound"
        text = f"{claimed:.6g} s said to be the least, {best.time_s:.6g} on {config}: {best}"
        say(what, _cause(case, limit, config, claimed), claimed / best.time_s - 1, text)
    for row in found.candidates:
        tally.rows += 1
        own = config_of(row, optima)
        truth = optima[own]
        if row.bound_s > truth.time_s * (1 + EXACT):
            off = row.bound_s / truth.time_s - 1
            text = f"bound {row.bound_s:.6g} s by {row.proof}, {truth.time_s:.6g} on {own}: {truth}"
            say("row", _cause(case, limit, own, row.bound_s), off, text)


def _cause(case: Case, limit: int | None, config: Config, claimed_s: float) -> str:
    """Of which plans of a configuration it holds that none is faster than is claimed."""
    if config.in_one_piece:
        for name, is_on_frontier in (("sum", False), ("frontier", True)):
            by_sum = case.brute.by_the_sum(limit, frontier=is_on_frontier)[config]
            if claimed_s <= by_sum.time_s * (1 + EXACT):
                return name
    return "search"


def _check_folding(case: Case, cluster: ClusterSpec, say: Callable[[str, str, float, str], None]) -> None:
    """Folded is unfolded, of plans that both can have."""
    folded, unfolded = (in_one_piece(case.graph, cluster, folding) for folding in (True, False))
    if folded is None or unfolded is None:
        if folded is not unfolded:
            text = f"folded {folded and folded.evaluation}, unfolded {unfolded and unfolded.evaluation}"
            say("unfolded", "search", math.inf, text)
        return
    mine, other = folded.evaluation.time_s, unfolded.evaluation.time_s
    if not math.isclose(mine, other, rel_tol=EXACT):
        text = f"folded {mine:.6g} s ({folded.status}), unfolded {other:.6g} s ({unfolded.status})"
        say("unfolded", "search", max(mine, other) / min(mine, other) - 1, text)
