"""Lean: the plans of a search that need least memory, followed, for when none fits by the search's own reckoning.

The search adds up bytes that are not all alive at once, so that a plan may fit although its sum does not.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, replace

import numpy as np

from planner.assignment import assignment_of
from planner.chain import links_of
from planner.conversion import local_bytes
from planner.division import Division
from planner.formulate import Space
from planner.looks import GRACE_S, Best, Look, Setting
from planner.memory import usage
from planner.offload import WorkingSet, largest_working_set
from planner.problem import Problem, evaluate, most_bytes
from planner.solve import lightest, lower_bounds, solve
from planner.turns import THOROUGH, Staged, stage

LEANEST_S = 5.0
"""How long the leanest plan of all is looked for when nothing fits; the leanest found is told."""
SLACKS = (1.05, 1.02, 1.15)
"""What is almost as lean counts so many times as much."""


@dataclass(frozen=True)
class Lean:
    """A plan that needs little memory.

    Attributes:
        best: the plan, and what it costs by the search's reckoning.
        needed: what a device must hold at the least, as followed; in turns, as its cut has it.
    """

    best: Best
    needed: WorkingSet

    @property
    def bytes(self) -> int:
        """That a device must hold."""
        return self.needed.bytes


def begun(looks: list[Look]) -> list[Look]:
    """A look at each division that was begun, in the order of what they need at least."""
    found = {look.candidate.division: look for look in looks if look.posed is not None}
    return sorted(found.values(), key=lambda look: look.candidate.peak_bytes)


def lean_plans(setting: Setting, looks: list[Look]) -> list[Lean]:
    """Lean plans of looks at different divisions, the same whatever the memory limit unless time runs short.

    A light plan of each division comes first. Then, while there is time, come the leanest of all and the fastest of
    those almost as lean: what the leanest save, they may lose in conversions, which the sum leaves out.
    """
    found: dict[object, Lean | None] = {}
    until = min(setting.deadline, time.monotonic() + LEANEST_S)

    def light(problem: Problem) -> list[tuple[int, ...] | None]:
        lean = lightest(replace(problem, limit_bytes=most_bytes(problem)))
        return [] if lean is None else [*(lower_bounds(each).choices for each in almost_as_lean(problem, lean)), lean]

    def leanest(problem: Problem) -> list[tuple[int, ...] | None]:
        lean = _solved(replace(problem, limit_bytes=0), until)
        return [*(_solved(each, until) for each in almost_as_lean(problem, lean)), lean]

    rungs = itertools.zip_longest(*([(look, bend) for bend in reversed(look.ladder.bends)] for look in looks))
    steps = [(each[0], each[0].ladder.steps[each[1]]) for rung in rungs for each in rung if each is not None]
    for pick, (look, recompute) in itertools.product((light, leanest), steps):
        if found and time.monotonic() > until:
            break
        division = look.candidate.division
        space = look.space.holding(division.in_flight) if division.in_turns else look.space
        problem = space.problem(None, recompute)
        for choices in itertools.chain.from_iterable(map(pick, dict.fromkeys((problem, _with_chunks(space, problem))))):
            key = division, recompute, choices
            if choices is not None and key not in found:
                best = Best(look.space, choices, recompute, evaluate(problem, choices))
                found[key] = _in_turns(setting, best) if division.in_turns else _in_one_turn(best)
    return [lean for lean in found.values() if lean is not None]


def almost_as_lean(problem: Problem, lean: tuple[int, ...]) -> list[Problem]:
    """The problem with little more memory than an assignment needs: the fastest in that converts less."""
    least = evaluate(problem, lean).peak_bytes
    return [replace(problem, limit_bytes=math.ceil(slack * least)) for slack in SLACKS]


def _solved(problem: Problem, until: float) -> tuple[int, ...]:
    return solve(problem, time_limit_s=max(GRACE_S, until - time.monotonic())).choices


def _with_chunks(space: Space, problem: Problem) -> Problem:
    """The problem that counts parameters and gradients that are at home elsewhere as if they stayed.

    The search counts of them what one operator needs; a moment needs those of a block.
    """
    if space.training.tier == "device":
        return problem
    vertices = list(problem.vertices)
    for number, role in enumerate(space.roles):
        node = space.graph.by_name[space.members[role][0]] if role in space.members else None
        if node is not None and node.op == "param":
            layouts = (layout for layout in space.options[role] if isinstance(layout, tuple))
            sizes = [2 * local_bytes(node.results[0], layout, space.mesh) for layout in layouts]
            vertices[number] = replace(vertices[number], held_bytes=vertices[number].held_bytes + np.array(sizes))
    return replace(problem, vertices=tuple(vertices))


def _in_one_turn(best: Best) -> Lean:
    assignment = assignment_of(best.space, best.choices, best.recompute)
    return Lean(best, largest_working_set(assignment, usage(assignment)))


def _in_turns(setting: Setting, best: Best) -> Lean | None:
    """The pipeline of the choices that fits, or else the one that makes again all that can be, if there is any."""
    links = links_of(assignment_of(best.space, best.choices), setting.levels, setting.pins.schedule)
    wanted, usable_bytes = setting.pipelines(best.division, len(links)), setting.cost.cluster.device.usable_bytes
    found = None
    for chain, limit_bytes in ((links, usable_bytes), ([link.leanest for link in links], None)):
        staged = stage(chain, wanted, limit_bytes, effort=THOROUGH)
        if staged is not None:
            found = _staged(best, staged)
            if found.bytes <= usable_bytes:
                break
    return found


def _staged(best: Best, staged: Staged) -> Lean:
    """The choices as they run in turns, and what a device must hold of that."""
    best, space = replace(best, staged=staged, evaluation=staged.evaluation), best.space
    if space.training.tier == "device":
        return Lean(best, WorkingSet("a step in turns", 0, staged.peak_bytes))
    decided = assignment_of(space, best.choices, staged.recompute(space.folded))
    return Lean(best, largest_working_set(decided, None, staged))


def fastest_that_fits(leans: list[Lean], usable_bytes: int) -> Best | None:
    """The fastest of the plans whose followed need a device has room for."""
    fitting = [lean.best for lean in leans if lean.bytes <= usable_bytes and math.isfinite(lean.best.evaluation.time_s)]
    return min(fitting, key=lambda best: best.evaluation.time_s, default=None)


def bounds_s(looks: list[Look]) -> dict[Division, float]:
    """Seconds that plans of each division take at least, however much memory there is."""
    found: dict[Division, float] = {}
    for look in looks:
        division = look.candidate.division
        if look.posed is None:
            found.setdefault(division, look.candidate.bound_s)
        elif division not in found:
            found[division] = lower_bounds(look.space.problem(None, look.ladder.steps[0])).time_s
    return found
