"""Levels of recomputation by name, as a plan states them, and back.

A level with a name of its own is known by it. Another is a set of operators whose results are kept: the plan calls
those of a block ``part 1``, ``part 2`` and so on, from what keeps least, and says which operators they are by the names
that decisions have (:mod:`planner.formulation.decision_names`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from planner.analysis.pipeline.staged import Staged
from planner.base.errors import PlanError
from planner.formulation.assignment import Assignment
from planner.formulation.decision_names import operator_names
from planner.formulation.remat.levels import LEVELS, Amount, Kept, Level, least_memory_first
from planner.formulation.search_space import Space
from planner.ops.aliasing import shares
from planner.plan.document.document import BlockPlan, Document

PART = "part {}"


@dataclass(frozen=True)
class Stated:
    """What a plan calls the levels at which the blocks of each kind run.

    Attributes:
        levels: of every kind its levels, those that keep least first.
    """

    space: Space
    levels: tuple[tuple[Level, ...], ...]

    @classmethod
    def of(cls, assignment: Assignment, staged: Staged | None = None) -> Stated:
        """Those of an assignment; ``staged``: how it runs micro-batched."""
        space, found = assignment.space, []
        micro_batched = None if staged is None else staged.recompute(space.folded)
        for kind in range(len(space.folded.kinds)):
            both = (*assignment.recompute.levels(kind), *(() if micro_batched is None else micro_batched.levels(kind)))
            found.append(tuple(sorted({level for level, _ in both}, key=least_memory_first)))
        return cls(space, tuple(found))

    @cached_property
    def operators(self) -> tuple[tuple[str, ...], ...]:
        """Of every kind the names of its operators, by position."""
        return operator_names(self.space.folded)

    def name(self, kind: int, level: Level) -> str:
        """What a level of a kind is called."""
        if not isinstance(level, tuple):
            return level
        return PART.format(1 + self._parts(kind).index(level))

    def keeps(self, kind: int) -> dict[str, tuple[str, ...]]:
        """The operators whose results are kept at the levels of a kind that have no name of their own."""
        return {self.name(kind, part): tuple(self.operators[kind][at] for at in part) for part in self._parts(kind)}

    def by_number(self, staged: Staged, assignment: Assignment) -> dict[str, tuple[int, ...]]:
        """The blocks of a chain that recompute, by number, and by what their level is called."""
        found: dict[str, list[int]] = {}
        for number, level in enumerate(staged.levels):
            if level != "none":
                found.setdefault(self.name(assignment.space.folded.instances[number].kind, level), []).append(number)
        order = ("full", *sorted({*found} - {*LEVELS}, key=lambda name: (len(name), name)), *reversed(LEVELS[1:-1]))
        return {name: tuple(found[name]) for name in order if name in found}

    def _parts(self, kind: int) -> list[Kept]:
        return [level for level in self.levels[kind] if isinstance(level, tuple)]


def read_amounts(plan: Document, space: Space) -> tuple[Amount, ...]:
    """How many instances of each block recompute, as a plan says.

    Raises:
        PlanError: a level that there is not, or that keeps what the block does not make; more instances than there are.
    """
    found = []
    for block, known in zip(plan.blocks, _read_levels(plan, space), strict=True):
        for name, count in block.recompute.items():
            if name not in known or not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise PlanError(
                    f"the plan recomputes {{{name!r}: {count!r}}} of block {block.name!r}; it takes "
                    f"{', '.join(map(repr, known))}, each with a whole number of instances"
                    + (
                        ""
                        if name in known
                        else f', and others if "keeps" says which operators\' results {name!r} keeps'
                    )
                )
        if sum(block.recompute.values()) > block.count:
            raise PlanError(
                f"the plan recomputes {sum(block.recompute.values())} instances of block {block.name!r}, which occurs "
                f'{block.count} times: lower the numbers in its "recompute"'
            )
        counts: dict[Level, int] = {}
        for name, count in block.recompute.items():
            counts[known[name]] = counts.get(known[name], 0) + count
        found.append(Amount.of(counts))
    return tuple(found)


def read_by_number(plan: Document, space: Space) -> tuple[Level, ...]:
    """The level of every block of the chain that a micro-batched plan cuts.

    Raises:
        PlanError: a level that there is not, or that keeps what the block does not make; a block that cannot recompute.
    """
    assert plan.pipeline is not None
    folded, levels = space.folded, _read_levels(plan, space)
    found: list[Level] = ["none"] * len(folded.instances)
    for name, numbers in plan.pipeline.recompute.items():
        for number in numbers:
            kind = folded.instances[number].kind if number < len(found) else 0
            known = {
                each: level
                for each, level in levels[kind].items()
                if level != "gathered" or not space.unsharding.once_per_step
            }
            is_alone = len(folded.kinds[kind]) == 1 and name != "gathered"
            if number >= len(found) or name not in known or is_alone:
                raise PlanError(
                    f"the plan recomputes block {number} at level {name!r}; levels are "
                    f"{' and '.join(map(repr, known))}, and only blocks below {len(found)} that repeat recompute"
                )
            found[number] = known[name]
    return tuple(found)


def _read_levels(plan: Document, space: Space) -> list[dict[str, Level]]:
    """Of every block, what its levels are called and what they are."""
    operators = operator_names(space.folded)
    return [
        {**{str(level): level for level in LEVELS[1:]}, **_read_keeps(block, space, kind, operators[kind])}
        for kind, block in enumerate(plan.blocks)
    ]


def _read_keeps(block: BlockPlan, space: Space, kind: int, operators: tuple[str, ...]) -> Mapping[str, Kept]:
    nodes, found = space.folded.kinds[kind][0].block.nodes, {}
    for level, names in block.keeps.items():
        where = f'in "keeps", {level!r}, of block {block.name!r}'
        if level in LEVELS:
            raise PlanError(f"the plan says {where} what has a meaning already: give the level another name")
        for name in names:
            if name not in operators:
                near = difflib.get_close_matches(name, operators, n=1, cutoff=0.6)
                raise PlanError(
                    f"the plan names an operator {name!r} {where}, which the block does not have"
                    + (f"; did you mean {near[0]!r}?" if near else ": remove it")
                )
            if shares(nodes[operators.index(name)]):
                raise PlanError(
                    f"the plan names {name!r} {where}, whose result lies in the memory of its operand: name the "
                    "operator that made that"
                )
        found[level] = tuple(sorted({operators.index(name) for name in names}))
    return found
