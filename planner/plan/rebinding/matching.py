"""Matches what a plan decides with what there is to decide for another model.

Blocks are matched first: by the names of their operators, else by which operators follow one another. An operator is
then the one of its block with the same name, or, in blocks without a match, the one of the same module path, in which
numbers of layers count for nothing. Parameters and inputs are matched by the operators that read them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import cast

from planner.base.errors import PlanError
from planner.formulation.decision_names import filled, operator_names, pattern, short_op, variable_names
from planner.formulation.search_space import Space
from planner.formulation.variables import Variable
from planner.ir.folding import Folded, relabel
from planner.ir.graph import Ref
from planner.plan.document.document import BlockPlan, Document

COMMON = 0.5
"""Blocks match that have this part of their operators in common, and models in which this part of all operators is
matched."""

_Key = tuple[str, str, int]
"""Module path without numbers, operator, and which of several."""


@dataclass(frozen=True)
class PlannedDecision:
    """What a plan says of one decision, and the shape of what that is about; ``None``: it does not say."""

    text: str
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Blocks:
    """A model cut into blocks of which each is like one of a plan.

    Attributes:
        folded: the blocks; equal ones apart where the plan decides them apart.
        like: of every kind the number of the plan's block that it is like; ``None``: none is.
    """

    folded: Folded
    like: tuple[int | None, ...]


def matched_blocks(plan: Document, folded: Folded) -> Blocks:
    """Match the blocks of a model with those of a plan.

    Where the plan decides equal blocks apart, its longest run of blocks decided alike takes the difference in depth.
    """
    names = operator_names(folded)
    nearest = [_nearest(plan.blocks, name, each) for name, each in zip(folded.names, names, strict=True)]
    labels: list[int | None] = [nearest[instance.kind] for instance in folded.instances]
    for kind, best in enumerate(nearest):
        if best is None:
            continue
        alike = [number for number, block in enumerate(plan.blocks) if [*block.ops] == [*plan.blocks[best].ops]]
        peers = [other for other, each in enumerate(nearest) if each in alike]
        if len(peers) == 1:
            places = [at for at, instance in enumerate(folded.instances) if instance.kind == kind]
            planned = sorted((number, block) for block in alike for number in plan.blocks[block].at)
            for at, block in zip(places, _stretched([block for _, block in planned], len(places)), strict=True):
                labels[at] = block
        elif len(peers) == len(alike):  # blocks of other constants, in the order in which they occur
            pair = alike[peers.index(kind)]
            labels = [pair if i.kind == kind else was for i, was in zip(folded.instances, labels, strict=True)]
    apart = relabel(folded, labels)
    like = dict(zip((instance.kind for instance in apart.instances), labels, strict=True))
    return Blocks(apart, tuple(like[kind] for kind in range(len(apart.kinds))))


def _nearest(blocks: Sequence[BlockPlan], name: str, ops: Sequence[str]) -> int | None:
    """The block that has most operators in common with one of this name."""
    found = [(_likeness(block, ops), block.name == name, block.count, -number) for number, block in enumerate(blocks)]
    likeness, _, _, number = max(found, default=(0.0, False, 0, 0))
    return -number if likeness >= COMMON else None


def _likeness(block: BlockPlan, ops: Sequence[str]) -> float:
    """1 for the same operators in the same order; which modules they are called by counts beside."""
    planned = [*block.ops]
    common = len({*planned} & {*ops}) / max(1, len(planned), len(ops))
    return 1.0 + common if _follow_alike(planned, ops) else common


def _follow_alike(planned: Sequence[str], ops: Sequence[str]) -> bool:
    return [*map(_op, planned)] == [*map(_op, ops)]


def _op(name: str) -> str:
    """``"linear"`` of ``"mlp.up: linear #2"``."""
    return name.rpartition(": ")[2].partition(" #")[0]


def _path(block: BlockPlan, name: str) -> str:
    """``"layers.*.mlp.up"`` of ``"mlp.up: linear"`` in block ``"layers.*"``, where the plan does not say."""
    return ".".join(filter(None, (block.name.partition("#")[0], name.rpartition(": ")[0])))


def _stretched(blocks: Sequence[int], count: int) -> list[int]:
    """The same sequence with so many members: its longest run has more or fewer, or is all there is."""
    runs = [(block, len([*same])) for block, same in groupby(blocks)]
    longest = max(range(len(runs)), key=lambda at: runs[at][1])
    others = len(blocks) - runs[longest][1]
    if count <= others:
        return [runs[longest][0]] * count
    sizes = (count - others if at == longest else size for at, (_, size) in enumerate(runs))
    return [block for (block, _), size in zip(runs, sizes, strict=True) for _ in range(size)]


def without_numbers(path: str) -> str:
    """``"layers.*.up"`` of ``"layers.3.up"``."""
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


class Matching:
    """What a plan says of the decisions of a model.

    Args:
        plan: the plan.
        blocks: those of the model, matched.
        space: every decision to take for the model.

    Raises:
        PlanError: the model has hardly an operator in common with the plan's.
    """

    def __init__(self, plan: Document, blocks: Blocks, space: Space):
        self.plan, self.blocks, self.space = plan, blocks, space
        self.names = variable_names(space)
        self._ops = {variable: found for variable in space.members if (found := self._like(variable)) is not None}
        operators = [variable for variable in space.members if variable[0] == "op"]
        if len(self._ops) < COMMON * len(operators):
            raise PlanError(self._nothing_in_common(len(self._ops), len(operators)))

    @cached_property
    def planned(self) -> Mapping[Variable, PlannedDecision]:
        """What the plan says of each decision of which it says anything."""
        found = ((variable, self._entry(variable)) for variable in self.space.variables)
        return {variable: entry for variable, entry in found if entry is not None}

    def gone(self) -> Iterator[tuple[str, str]]:
        """Operators that the plan decides and the model does not have: what, and the decision."""
        used = {self._planned_keys[each] for each in self._ops.values()}
        for (number, name), key in self._planned_keys.items():
            if key not in used:
                used.add(key)
                block = self.plan.blocks[number]
                yield f"{name} of block {block.name!r}", block.ops[name]

    def operator(self, kind: int, name: str) -> int | None:
        """Of a kind of block the operator that is like one of the plan's block that the kind is like, by position."""
        block = self.blocks.like[kind]
        at = (each[2] for each, found in self._ops.items() if each[1] == kind and found == (block, name))
        return cast(int | None, next(at, None))

    # ---- one decision after another ----

    def _entry(self, variable: Variable) -> PlannedDecision | None:
        name = self.names[variable][1]
        if variable[0] == "op":
            return self._of_operator(variable)
        if variable[0] == "leaf":
            return self._of_leaf(variable)
        if variable[0] == "output":
            outputs = self.plan.outputs
            return PlannedDecision(outputs[int(name)]) if len(outputs) == len(self.space.leaving) else None
        producer = variable[1]
        assert isinstance(producer, tuple)
        suffix = f" result {variable[2]}" if variable[2] else ""
        if producer[0] == "leaf":
            leaf = self._leaf(producer)
            text = None if leaf is None else self.plan.values.get(leaf[1] + suffix)
        else:
            block, op = self._ops.get(producer, (0, ""))
            text = self.plan.blocks[block].values.get(op + suffix) if op else None
        return None if text is None else PlannedDecision(text)

    def _of_operator(self, variable: Variable) -> PlannedDecision | None:
        if variable not in self._ops:
            return None
        block, name = self._ops[variable]
        details = self.plan.account.blocks
        shape = details[block].ops[name].shape if block < len(details) and name in details[block].ops else None
        return PlannedDecision(self.plan.blocks[block].ops[name], shape)

    def _of_leaf(self, variable: Variable) -> PlannedDecision | None:
        found = self._leaf(variable)
        if found is None:
            return None
        section, name = found
        leaf = self.plan.account.leaves.get(name)
        return PlannedDecision(getattr(self.plan, section)[name], None if leaf is None else leaf.shape)

    def _leaf(self, variable: Variable) -> tuple[str, str] | None:
        """The plan's entry of a leaf: section and name."""
        section, name = self.names[variable]
        assert isinstance(section, str)
        entries: Mapping[str, str] = getattr(self.plan, section)
        if section == "inputs":
            return (section, name) if name in entries else None
        for place in self._read_by(variable):
            if place in entries:
                return section, place
        known = self._leaves[section]
        leaves = (self.space.graph.by_name[member] for member in self.space.members[variable])
        for leaf in leaves:
            own = leaf.target or leaf.name
            if own in known or without_numbers(own) in known:
                return section, known.get(own) or known[without_numbers(own)]
        return None

    def _read_by(self, variable: Variable) -> Iterator[str]:
        """What the plan calls a leaf, according to the operators that read it."""
        leaf = self.space.members[variable][0]
        for reader, position in self.space.graph.users.get(Ref(leaf), ()):
            block, name = self._ops.get(self.space.variable_of[reader.name], (0, ""))
            details = self.plan.account.blocks
            operands = details[block].ops[name].operands if name and block < len(details) else ()
            if position < len(operands):
                yield operands[position][0]

    @cached_property
    def _leaves(self) -> dict[str, dict[str, str]]:
        """What the plan calls parameters and buffers, by each name that they stand for, and by that without numbers."""
        found: dict[str, dict[str, str]] = {}
        for section in ("parameters", "buffers"):
            known = found.setdefault(section, {})
            for name in getattr(self.plan, section):
                leaf, bare = self.plan.account.leaves.get(name), name.partition(" #")[0]
                own = filled(bare, leaf.stands_for) if leaf is not None else (bare,)
                for each in (*own, *map(without_numbers, own)):
                    known.setdefault(each, name)
        return found

    # ---- operators ----

    def _like(self, variable: Variable) -> tuple[int, str] | None:
        """The operator of the plan that one is like: number of the block, and name."""
        if variable[0] != "op":
            return None
        kind, at = variable[1], variable[2]
        assert isinstance(kind, int) and isinstance(at, int)
        block, name = self.blocks.like[kind], self.names[variable][1]
        if block is not None:
            planned = [*self.plan.blocks[block].ops]
            if _follow_alike(planned, self._kinds[kind]):
                return block, planned[at]
            if name in self.plan.blocks[block].ops:
                return block, name
        return self._by_path.get(self._keys[variable])

    @cached_property
    def _kinds(self) -> tuple[tuple[str, ...], ...]:
        return operator_names(self.space.folded)

    @cached_property
    def _keys(self) -> dict[Variable, _Key]:
        """Of every operator of the model the module path without numbers, and which of that path it is."""
        graph, counted, found = self.space.graph, Counter[tuple[str, str]](), dict[Variable, _Key]()
        for variable, members in self.space.members.items():
            first = graph.by_name[members[0]]
            if variable[0] == "op":
                path, op = pattern([graph.by_name[member].path for member in members]), short_op(first.op)
                found[variable] = without_numbers(path), op, counted[path, op]
                counted[path, op] += 1
        return found

    @cached_property
    def _planned_keys(self) -> dict[tuple[int, str], _Key]:
        """The same of the plan's, by number of the block and name."""
        counted, found = Counter[tuple[str, str]](), dict[tuple[int, str], _Key]()
        details = self.plan.account.blocks
        for number, block in enumerate(self.plan.blocks):
            for name in block.ops:
                detail = details[number].ops.get(name) if number < len(details) else None
                path, op = _path(block, name) if detail is None else detail.path, _op(name)
                found[number, name] = without_numbers(path), op, counted[path, op]
                counted[path, op] += 1
        return found

    @cached_property
    def _by_path(self) -> dict[_Key, tuple[int, str]]:
        """Those operators by their keys, the first of each."""
        return {key: each for each, key in reversed(self._planned_keys.items())}

    def _nothing_in_common(self, matched: int, operators: int) -> str:
        folded = self.space.folded
        planned = _listed([(block.count, block.name, [*block.ops]) for block in self.plan.blocks])
        kinds = zip(folded.kinds, folded.names, self._kinds, strict=True)
        there = _listed([(len(instances), name, ops) for instances, name, ops in kinds])
        return (
            f"the plan cannot be rebound to this model, of whose {operators} distinct operators {matched} are like one "
            f"that it decides. The plan is of {self.plan.model.get('class')} and has {planned}; the model has {there}: "
            "plan for it with autopar.plan"
        )


def _listed(blocks: Sequence[tuple[int, str, Sequence[str]]]) -> str:
    """``"4 x layers.* (norm: layer_norm, up: linear, down: linear and 3 more)"``."""
    told = []
    for count, name, ops in sorted(blocks, key=lambda each: -each[0])[:3]:
        notable = [op for op in ops if re.search(r"linear|mm|conv|attention|embedding|norm|loss", _op(op))] or ops
        more = f" and {len(ops) - len(notable[:4])} more" if len(ops) > len(notable[:4]) else ""
        told.append(f"{count} x {name} ({', '.join(notable[:4])}{more})")
    return ", ".join(told)
