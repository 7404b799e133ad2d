"""The matrix: every model of the zoo under every plan, against the original.

A recipe is data: a mesh, pins, and how the costs are bent. ``check`` decides, type-checks and simulates
one cell of the matrix.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.verification.reference import Reference, reference
from autopar.verification.simulator import DivergedError
from autopar.verification.typecheck import typecheck
from autopar.verification.verify import RTOL, Agreement, locate, simulate, space_on
from planner.base.errors import PinError, VerificationError
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import Assignment, assignment_of
from planner.formulation.constraints.pins import Pins
from planner.ir.layout import Mesh
from planner.solve.choices import solve
from planner.solve.problem import Problem
from tests.autopar.models import MODELS

PINS = ("replicate", "data", "expert", "context", "tensor")


@dataclass(frozen=True)
class Recipe:
    """One way to plan.

    Attributes:
        name: what is planned; with the mesh, unique.
        mesh: axis name -> ranks; axes called after pins are pinned.
        extra: further pins.
        slowdown: how many times slower than this machine each device computes; then sharding pays.
        seed: of random costs, which lead to layouts that no recipe means; ``None`` for the real ones.
    """

    name: str
    mesh: Mapping[str, int]
    extra: Mapping[str, object] = field(default_factory=dict)
    slowdown: float = 1.0
    seed: int | None = None

    @property
    def sizes(self) -> str:
        return "x".join(str(size) for size in self.mesh.values())

    @property
    def pins(self) -> Pins:
        return Pins.parse({name: size for name, size in self.mesh.items() if name in PINS} | dict(self.extra))


def _line(size: int) -> list[Recipe]:
    """Every recipe of one axis."""
    return [
        Recipe("search", {"all": size}),
        Recipe("search, slow devices", {"all": size}, slowdown=1e5),
        Recipe("data", {"data": size}),
        Recipe("data, zero 3", {"data": size}, {"zero": 3}),
        Recipe("tensor", {"tensor": size}),
        Recipe("tensor + sequence", {"tensor": size}, {"sequence_parallel": True}),
        Recipe("context", {"context": size}),
        Recipe("expert", {"expert": size}),
        *(Recipe(f"random {seed}", {"all": size}, seed=seed) for seed in range(2)),
    ]


def _plane(outer: int, inner: int) -> list[Recipe]:
    """Every recipe of two axes."""
    return [
        Recipe("search", {"outer": outer, "inner": inner}),
        Recipe("search, slow devices", {"outer": outer, "inner": inner}, slowdown=1e5),
        Recipe("data x tensor", {"data": outer, "tensor": inner}),
        Recipe("data x tensor + sequence", {"data": outer, "tensor": inner}, {"sequence_parallel": True}),
        Recipe("data x tensor, zero 3", {"data": outer, "tensor": inner}, {"zero": 3}),
        Recipe("data x context", {"data": outer, "context": inner}),
        Recipe("context x tensor", {"context": outer, "tensor": inner}),
        Recipe("data x expert", {"data": outer, "expert": inner}, {"zero": 3}),
        Recipe("expert x tensor", {"expert": outer, "tensor": inner}),
        *(Recipe(f"random {seed}", {"outer": outer, "inner": inner}, seed=seed) for seed in range(2)),
    ]


RECIPES: tuple[Recipe, ...] = (*_line(2), *_line(4), *_plane(2, 2), *_plane(2, 4))


@dataclass(frozen=True)
class Cell:
    """What became of one model under one recipe.

    ``status`` is ``equal``, ``n/a`` (the recipe does not apply: ``why``), or ``FAILED`` (``why``).
    """

    model: str
    recipe: Recipe
    status: str
    why: str = ""
    agreement: Agreement | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        error = f"{self.agreement.worst[0]:.0e}" if self.agreement is not None else ""
        return f"{self.model} {self.recipe.sizes} {self.recipe.name}: {self.status} {error} {self.why}".rstrip()


@functools.lru_cache(maxsize=2)
def original(name: str) -> Reference:
    """One step of a model of the zoo in float64."""
    model, batch = MODELS[name].build()
    return reference(model, None, batch)


def decide(reference: Reference, recipe: Recipe) -> Assignment:
    """The plan that a recipe means for a model."""
    mesh = Mesh.of(**recipe.mesh)
    space = space_on(reference.traced, mesh, _cluster(mesh.size, recipe.slowdown), recipe.pins)
    problem = space.problem(None)
    if recipe.seed is not None:
        problem = _bent(problem, recipe.seed)
    return assignment_of(space, solve(problem, time_limit_s=5.0).choices)


def _cluster(devices: int, slowdown: float) -> ClusterSpec:
    described = ClusterSpec.local(devices).to_dict()
    device = described["device"]
    device["memory_bandwidth_bytes_per_s"] /= slowdown
    device["peak_flops_per_s"] = {k: v and v / slowdown for k, v in device["peak_flops_per_s"].items()}
    return ClusterSpec.from_dict(described)


def _bent(problem: Problem, seed: int) -> Problem:
    """Random prices of choices, reshardings nearly free: the optimum wanders through all kinds of layouts."""
    random = np.random.default_rng(seed)
    return replace(
        problem,
        vertices=tuple(replace(v, time_s=v.time_s + random.random(v.choices) * 1e-2) for v in problem.vertices),
        edges=tuple(replace(e, time_s=e.time_s * 0.01) for e in problem.edges),
    )


def check(model: str, recipe: Recipe) -> Cell:
    """Plan, type-check, simulate and compare one cell."""
    ref = original(model)
    start = time.monotonic()
    try:
        assignment = decide(ref, recipe)
        typecheck(ref.traced.captured, assignment)
        agreement = simulate(ref, assignment)
    except PinError as error:
        return Cell(model, recipe, "n/a", str(error))
    except (VerificationError, DivergedError) as error:
        return Cell(model, recipe, "FAILED", str(error))
    seconds = time.monotonic() - start
    if agreement.worst[0] > RTOL:
        why = f"{agreement.worst[1]}: {locate(ref, assignment)}"
    else:
        why = "; ".join(agreement.miscounted)
    return Cell(model, recipe, "FAILED" if why else "equal", why, agreement, seconds)
