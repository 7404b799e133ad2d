"""Recipes: what was looked at without pins, held to the recipes that are lean where the search's own sum misleads.

That sum leaves out what is alive for a moment, such as what a conversion makes, and counts as held what is not. Recipes
convert little of much: data parallel on the batch, tensor parallel with norms and residuals along the sequence.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from planner.base.errors import PinError
from planner.formulation.strategies import Choice
from planner.ir.layout import MICRO, Layout, Mesh
from planner.search.candidate_bounds import Best, Look, Setting
from planner.search.parallel_config import Division

NAMES = {1: (("tensor",), ("data",)), 2: (("data", "tensor"),)}
"""What the axes of a mesh of so many are for, major first."""


def by_recipe(setting: Setting, looks: list[Look], until: float) -> list[Look]:
    """The looks held to each recipe for their mesh, if no pin says what its axes are for; as many as time permits."""
    if setting.pins.sizes or setting.pins.layers:
        return []
    found: list[Look] = []
    for look in looks:
        for mesh in _named(look.candidate.division.mesh):
            if time.monotonic() > until:
                return found
            held = _held(setting, look, mesh)
            found += [] if held is None else [held]
    return found


def _named(mesh: Mesh) -> Iterator[Mesh]:
    """A mesh with its axes named by what they are for."""
    micro_batches = tuple(axis for axis in mesh.axes if axis.name == MICRO)
    axes = [axis for axis in mesh.axes if axis.name != MICRO]
    for names in NAMES.get(len(axes), ()) if mesh.size > 1 else ():
        yield Mesh((*micro_batches, *(replace(axis, name=name) for axis, name in zip(axes, names, strict=True))))


def _held(setting: Setting, look: Look, mesh: Mesh) -> Look | None:
    """The look held to the recipe of a named mesh; ``None`` where the recipe does not fit the model."""
    division = replace(look.candidate.division, mesh=mesh)
    sizes = {axis.name: axis.size for axis in mesh.axes if axis.name != MICRO}
    for sequence_parallel in (True, None) if "tensor" in sizes else (None,):
        pins = replace(setting.pins, sizes=sizes, sequence_parallel=sequence_parallel)
        try:
            space = replace(setting, pins=pins, posed={division: look.space}).pose(look.space.skeleton, division)
        except PinError:
            continue
        return replace(look, candidate=replace(look.candidate, division=division), posed=space)
    return None


def freed(best: Best, looks: list[Look]) -> Best:
    """The decisions of a recipe on the mesh that was held to it, whose axes are named as where none is pinned."""
    held = best.space
    free = next(look.space for look in looks if _unnamed(look.candidate.division) == _unnamed(best.division))
    choices = []
    for role, choice in zip(held.roles, best.choices, strict=True):
        decision = _ways(held.options[role][choice])
        choices.append([_ways(option) for option in free.options[role]].index(decision))
    return replace(best, space=free, choices=tuple(choices))


def _ways(decision: Choice | Layout) -> object:
    """What of a decision does not tell how the axes are called."""
    return decision.axes if isinstance(decision, Choice) else decision


def _unnamed(division: Division) -> tuple[object, ...]:
    """What is equal of divisions whose axes have other names alone."""
    return division.stages, division.gathers, *((axis.size, axis.stride) for axis in division.mesh.axes)
