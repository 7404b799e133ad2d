"""The smallest set of limits that leaves a pinned recipe no plan (an irreducible infeasible subset), and a way out.

The limits in play are the mesh that is pinned, each other pin, and the memory of a device. Sets of them are planned,
smallest first, until one leaves no plan, whatever else of the recipe is kept. What is said to help was planned, too.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from planner.base.errors import InfeasibleError, PinError
from planner.base.formatting import in_bytes
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.mesh_candidates import pinned_mesh
from planner.formulation.constraints.pins import Pins
from planner.formulation.constraints.roles import ROLES, WEIGHTS, sharing
from planner.search.branch_and_bound import Searched
from planner.search.search import GAP, search

MEMORY = "memory"
MESH = ("pipeline", *ROLES)
"""Pins that make the mesh together."""
UNLIMITED_BYTES = 2**50

Limits = tuple[str, ...]
"""Names of pins, and :data:`MEMORY`."""


@dataclass(frozen=True)
class Conflict:
    """Limits that cannot all hold.

    Attributes:
        limits: a smallest set of them, in the user's words: no plan keeps them, whatever else of the recipe is kept.
            Sizes are one limit, the mesh: without one of them it is another.
        reason: what goes wrong under just these.
        relax: the smallest sets of limits without which the recipe has a plan; each was planned.
        excess_bytes: what the minimum-memory plan under just these limits needs beyond a device's memory; 0 if memory
            is none of them.
    """

    limits: tuple[str, ...]
    reason: str
    relax: tuple[tuple[str, ...], ...]
    excess_bytes: int = 0

    def __str__(self) -> str:
        rows = [f"  together impossible: {', '.join(self.limits)}", f"  because: {self.reason}"]
        if self.excess_bytes:
            rows.append(f"  smallest excess under these: {in_bytes(self.excess_bytes)} per device")
        ways = [" and ".join(names) for names in self.relax]
        rows.append(f"  leave out or change: {', or '.join(ways)}" if ways else "  nothing short of all of it helps")
        return "\n".join(rows)

    __repr__ = __str__


@dataclass(frozen=True)
class Recipe:
    """A pinned recipe, any of whose limits may be left out; searches for what remains."""

    assignment: Assignment
    cluster: ClusterSpec
    pin: Mapping[str, Any]
    time_limit_s: float
    max_axes: int
    found: dict[object, Searched | Exception] = field(default_factory=dict)

    @property
    def units(self) -> tuple[Limits, ...]:
        """The limits, those together that make the mesh: without one of them it is another, not a freer one."""
        sizes = tuple(name for name in self.pin if name in MESH)
        others = ((name,) for name in (*self.pin, MEMORY) if name not in MESH)
        return ((sizes,) if sizes else ()) + tuple(others)

    def search(self, limits: Iterable[str]) -> Searched | Exception:
        """The best plan under some of the limits, or why there is none; searched for once."""
        names = frozenset(limits)
        pin, is_limited = self._pinned(names), MEMORY in names
        try:
            key = is_limited, self._key(pin)
        except PinError as error:  # it speaks of what is left out
            return error
        if key not in self.found:
            self.found[key] = self._search(pin, is_limited)
        return self.found[key]

    def is_possible(self, limits: Iterable[str]) -> bool:
        """Whether there is a plan under some of the limits."""
        return isinstance(self.search(limits), Searched)

    def _pinned(self, limits: Iterable[str]) -> dict[str, Any]:
        """The pin with these limits alone."""
        names = frozenset(limits)
        return {name: value for name, value in self.pin.items() if name in names}

    def is_freer(self, limits: Iterable[str]) -> bool:
        """Whether leaving out the other limits leaves what all of them allow.

        It does not where what is left speaks of an axis or a pipeline that is left out, nor where ``zero`` is left
        without sizes: then all devices of a stage are on the data axis, which may be another mesh.
        """
        pin = self._pinned(limits)
        axes = {name for wanted in pin.get("layers", {}).values() for name in wanted}
        if ("sequence_parallel" in pin and pin.keys().isdisjoint(sharing(WEIGHTS))) or axes & {*ROLES} - pin.keys():
            return False
        if pin.keys() & {"schedule", "virtual_stages"} and not pin.keys() & {"pipeline", "micro_batches"}:
            return False
        if "zero" not in pin or not pin.keys().isdisjoint(MESH):
            return True
        return self._mesh(Pins.parse(pin)) == self._mesh(Pins.parse(self.pin))

    def _mesh(self, pins: Pins) -> tuple[int, object]:
        """Stages, and the mesh of one; sizes that make none as they are."""
        stages = pins.stages or 1
        with contextlib.suppress(PinError):
            return stages, pinned_mesh(self.cluster, pins.sizes, stages)
        return stages, pins.sizes

    def _key(self, pin: Mapping[str, Any]) -> str:
        """The same for pins that ask for the same: they make one mesh, and are alike in all else."""
        pins = Pins.parse(pin)
        is_free = all(size == 1 for size in pins.sizes.values())
        return repr((pins.sizes if is_free else self._mesh(pins), replace(pins, sizes={})))

    def _search(self, pin: Mapping[str, Any], is_limited: bool) -> Searched | Exception:
        cluster, space = self.cluster, self.assignment.space
        if not is_limited:
            device = cluster.device.model_copy(update={"memory_bytes": UNLIMITED_BYTES})
            cluster = cluster.model_copy(update={"device": device})
        try:
            return search(
                space.graph,
                cluster,
                replace(Pins.parse(pin), offload="none"),
                space.training,
                time_limit_s=self.time_limit_s,
                gap=GAP,
                max_axes=self.max_axes,
            )
        except (PinError, InfeasibleError) as error:
            return error

    def words(self, limits: Limits) -> str:
        """Limits that are one, as the user wrote them."""
        if limits == (MEMORY,):
            return f"{in_bytes(self.cluster.device.usable_bytes)} of memory per device"
        return f"pin{'s' * (len(limits) > 1)} {' and '.join(as_written(name, self.pin[name]) for name in limits)}"


def conflict_of(recipe: Recipe) -> Conflict:
    """The smallest set of limits that is impossible whatever else is kept, and what to leave out."""
    units = recipe.units
    guilty = _guilty(recipe, units)
    reason = recipe.search(itertools.chain(*guilty))
    assert isinstance(reason, Exception)
    excess = reason.excess_bytes if isinstance(reason, InfeasibleError) else 0
    relax = (tuple(recipe.words((name,)) for name in dropped) for dropped in _ways(recipe, units, guilty))
    return Conflict(tuple(map(recipe.words, guilty)), str(reason), tuple(relax), max(0, excess))


def _guilty(recipe: Recipe, units: tuple[Limits, ...]) -> tuple[Limits, ...]:
    """The fewest units that leave no plan, alone or with any of the others: so that one of them has to go.

    What the recipe is possible without is in every such set.
    """
    needed = {unit for unit in units if recipe.is_possible(itertools.chain(*(each for each in units if each != unit)))}

    def is_impossible(kept: tuple[Limits, ...]) -> bool:
        others = [unit for unit in units if unit not in kept]
        counts = (0, *range(len(others) - 1, 0, -1))  # alone first, then with most
        more = itertools.chain.from_iterable(itertools.combinations(others, count) for count in counts)
        return not any(recipe.is_possible(itertools.chain(*kept, *each)) for each in more)

    sets = (each for size in range(1, len(units)) for each in itertools.combinations(units, size))
    freer = (each for each in sets if needed <= set(each) and recipe.is_freer(itertools.chain(*each)))
    return next((each for each in freer if is_impossible(each)), units)


def _ways(recipe: Recipe, units: tuple[Limits, ...], guilty: tuple[Limits, ...]) -> list[Limits]:
    """The fewest pins to leave out for a plan, each with none that it does without; where more memory alone would do,
    also the fewest without it, if they are two.
    """
    names, blamed = tuple(itertools.chain(*units)), set(itertools.chain(*guilty))
    found: list[Limits] = []
    for size in range(1, len(names) + 1):
        for dropped in itertools.combinations(names, size):
            is_new = not any(set(each) <= set(dropped) for each in found)
            # What leaves the guilty set whole cannot help.
            if is_new and blamed & set(dropped) and recipe.is_possible(set(names) - set(dropped)):
                found.append(dropped)
        if found and (size > 1 or found != [(MEMORY,)]):
            break
    return found


def as_written(name: str, value: object) -> str:
    """A pin as the user wrote it."""
    return f"{name} = {value}"
