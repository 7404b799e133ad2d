"""Tries the recipes that need little memory (pure data or tensor parallel) beside what the search found.

That sum leaves out what is alive for a moment, such as what a resharding makes, and counts as held what is not. Recipes
convert little of much: data parallel on the batch, tensor parallel with norms and residuals along the sequence.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from planner.base.errors import PinError
from planner.formulation.constraints.roles import ROLES, WEIGHTS, sharing
from planner.formulation.strategies import Choice
from planner.ir.layout import MICRO, Layout, Mesh
from planner.search.candidates import Branch, Incumbent
from planner.search.parallel_config import ParallelConfig
from planner.search.search_context import SearchContext


def by_recipe(context: SearchContext, branches: list[Branch], until: float) -> list[Branch]:
    """The branches held to each recipe for their mesh, if no pin says what its axes are for; as time permits."""
    if context.pins.sizes or context.pins.layers:
        return []
    found: list[Branch] = []
    for branch in branches:
        for mesh in _named(branch.candidate.config.mesh):
            if time.monotonic() > until:
                return found
            held = _held(context, branch, mesh)
            found += [] if held is None else [held]
    return found


def _named(mesh: Mesh) -> Iterator[Mesh]:
    """A mesh with its axes named by what they are for."""
    micro_batches = tuple(axis for axis in mesh.axes if axis.name == MICRO)
    axes = [axis for axis in mesh.axes if axis.name != MICRO]
    tried = [name for name, role in ROLES.items() if role.is_tried] if mesh.size > 1 else []
    for names in reversed([*combinations(tried, len(axes))]):
        yield Mesh((*micro_batches, *(replace(axis, name=name) for axis, name in zip(axes, names, strict=True))))


def _held(context: SearchContext, branch: Branch, mesh: Mesh) -> Branch | None:
    """The branch held to the recipe of a named mesh; ``None`` where the recipe does not fit the model."""
    config = replace(branch.candidate.config, mesh=mesh)
    sizes = {axis.name: axis.size for axis in mesh.axes if axis.name != MICRO}
    for sequence_parallel in (True, None) if not sizes.keys().isdisjoint(sharing(WEIGHTS)) else (None,):
        pins = replace(context.pins, sizes=sizes, sequence_parallel=sequence_parallel)
        try:
            held = replace(context, pins=pins, formulated={})
            space = held.formulate(branch.space.decision_graph, config, like=branch.space)
        except PinError:
            continue
        return replace(branch, candidate=replace(branch.candidate, config=config), formulated=space)
    return None


def freed(best: Incumbent, branches: list[Branch]) -> Incumbent:
    """The decisions of a recipe on the mesh that was held to it, whose axes are named as where none is pinned."""
    held = best.space
    free = next(branch.space for branch in branches if _unnamed(branch.candidate.config) == _unnamed(best.config))
    choices = []
    for variable, choice in zip(held.variables, best.choices, strict=True):
        decision = _ways(held.options[variable][choice])
        choices.append([_ways(option) for option in free.options[variable]].index(decision))
    return replace(best, space=free, choices=tuple(choices))


def _ways(decision: Choice | Layout) -> object:
    """What of a decision does not tell how the axes are called."""
    return decision.axes if isinstance(decision, Choice) else decision


def _unnamed(config: ParallelConfig) -> tuple[object, ...]:
    """What is equal of configurations whose axes have other names alone."""
    return (
        config.stages,
        config.unsharding,
        *((axis.size, axis.stride) for axis in config.mesh.axes),
    )
