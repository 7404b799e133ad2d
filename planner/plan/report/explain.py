"""Explains why an operator or a parameter is laid out as it is, and what the next best would cost.

The next best is found by the same search: the chosen kind of strategy is forbidden for that one decision
(everywhere the block occurs), everything else is free, and the problem is solved again.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from planner.analysis.memory.storages import Held, PeakReport
from planner.base.errors import PlanError
from planner.base.formatting import in_bytes, in_paragraph, in_percent, in_seconds, shape_text, sizes_text
from planner.formulation.assignment import Assignment
from planner.formulation.decision_names import filled, variable_names
from planner.formulation.strategies import Choice
from planner.formulation.variables import Variable
from planner.ir.layout import Layout
from planner.plan.document.account import Meanings, meanings
from planner.plan.document.detail import LeafDetail, Move, OpDetail
from planner.plan.document.document import BlockPlan, Document
from planner.plan.report.summary import is_notable, local_name
from planner.solve.choices import solve
from planner.solve.problem import Evaluation, Problem, evaluate
from planner.tables.tables_plan import TablePlan

IN_WORDS = {
    "batch": "each rank computes its part of the batch",
    "sequence": "each rank computes its part of the sequence",
    "heads": "each rank computes its share of the heads",
    "columns": "each rank holds a part of the weight's output features and computes those",
    "rows": "each rank holds a part of the weight's input features; the results are terms of a sum",
    "vocabulary": "each rank holds a part of the vocabulary; the results are terms of a sum",
    "features": "each rank holds a part of the features and computes those",
    "terms": "the results are terms of a sum",
    "ring": "each rank computes its part of the sequence; keys and values go around the ranks",
    "zigzag": "each rank computes an early and a late part of the sequence, with all keys",
    "zigzag_ring": "each rank computes an early and a late part of the sequence; keys and values go around the ranks",
    "dispatch": "each rank holds some experts; tokens go to where theirs are, and results back",
}

SHOWN = 12
"""So many tensors are listed that are alive at the peak."""


@dataclass(frozen=True)
class Alternative:
    """The best plan in which one decision is taken otherwise.

    Attributes:
        decision: what it would be, in words; empty if nothing else is possible.
        extra_s: seconds more per step than the plan; ``inf`` if none fits in memory.
        extra_share: the same relative to the plan's step.
        proven: whether it is known to be the cheapest; otherwise there may be a cheaper one.
        peak_bytes: its peak.
        changes: how many other decisions change with it.
    """

    decision: str
    extra_s: float = 0.0
    extra_share: float = 0.0
    proven: bool = True
    peak_bytes: int = 0
    changes: int = 0

    def __str__(self) -> str:
        if not self.decision:
            return "none: nothing else is possible here"
        if math.isinf(self.extra_s):
            return f"none fits in memory; the least is {in_bytes(self.peak_bytes)}"
        others = f", with {self.changes} other decision{'s' * (self.changes != 1)} changed" if self.changes else ""
        proof = "" if self.proven else " (the best found in the time)"
        cost = (
            f"+{self.extra_share * 100:.2f} % step time ({in_seconds(self.extra_s)})" if self.extra_s else "no slower"
        )
        return f"{cost}: {self.decision}{others}{proof}"


@dataclass(frozen=True)
class ExplainedOp:
    """One operator of a distinct block; ``shared``: reshardings of what it reads, made once for it and others."""

    block: BlockPlan
    name: str
    strategy: str
    detail: OpDetail | None
    next_best: Alternative | None = None
    shared: tuple[Move, ...] = ()


@dataclass(frozen=True)
class ExplainedLeaf:
    """A parameter, buffer or input, with the operators that read it; ``home``: where, if not on the device."""

    name: str
    layout: str
    detail: LeafDetail | None
    readers: tuple[str, ...]
    uses: tuple[Move, ...]
    next_best: Alternative | None = None
    home: str | None = None


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found; prints as text.

    Attributes:
        fullest_at: the peak of the step, where it is known.
        alive: what of all this is alive then, largest first.
        tables: embedding tables that were placed, by the name of their parameter.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    step_time_s: float
    ops: tuple[ExplainedOp, ...]
    leaves: tuple[ExplainedLeaf, ...]
    tables: tuple[tuple[str, TablePlan], ...] = ()
    remark: str = ""
    fullest_at: str = ""
    alive: tuple[Held, ...] = ()

    def __str__(self) -> str:
        head = f"{self.name}, on mesh {sizes_text(dict(self.axes))}"
        heavy = [op for op in self.ops if len(self.ops) == 1 or op.detail is None or is_notable(op.detail)]
        light = [op for op in self.ops if op not in heavy]
        parts = [head, *(self._op(op) for op in heavy), *(self._leaf(leaf) for leaf in self.leaves)]
        if light:
            rows = [f"  {op.block.name} / {op.name}: {self._short(op)}" for op in light]
            parts.append("\n".join(["and, without parameters, heavy work or communication:", *rows]))
        parts += [f"{name}\n  placed    {in_paragraph(str(table))}" for name, table in self.tables]
        return "\n\n".join([*parts, *filter(None, [self._alive(), self.remark])]) + "\n"

    def _alive(self) -> str:
        if not self.fullest_at:
            return ""
        total = sum(held.all_bytes for held in self.alive)
        rows = [f"  {in_bytes(held.all_bytes):<9} {held.title}" for held in self.alive[:SHOWN]] + (
            [f"  and {len(self.alive) - SHOWN} more"] if len(self.alive) > SHOWN else []
        )
        what = f"{in_bytes(total)} of it" if rows else "nothing of it"
        return "\n".join([f"alive at the peak, {self.fullest_at}: {what}", *rows])

    __repr__ = __str__

    def _short(self, op: ExplainedOp) -> str:
        words = op.detail.meaning if op.detail else ()
        return ", ".join(f"{name} {word}" for (name, _), word in zip(self.axes, words, strict=True))

    def _op(self, op: ExplainedOp) -> str:
        lines = [f"{op.block.count} x {op.block.name} / {op.name}"]
        detail = op.detail
        if detail is None:
            return "\n".join([*lines, f"  strategy  {op.strategy}"])
        factors = dict(part.partition(":")[::2] for part in op.strategy.split())
        for i, (axis, _) in enumerate(self.axes):
            lines.append(f"  {axis:<9} {detail.meaning[i]}: {_in_words(detail, i)} ({factors.get(axis, '?')})")
        lines += [f"  takes     {local_name(what, detail.path)} as {layout}" for what, layout in detail.operands]
        shape = shape_text(detail.shape)
        lines += [
            f"  gives     {layout}" + (f" of {shape}" if not i else "") for i, layout in enumerate(detail.results)
        ]
        lines += [f"  before    {_move(move, detail.path)}" for move in detail.before]
        lines += [f"  shared    {_move(move, '')}" for move in op.shared]
        lines += [
            f"  within    {f'{times} x ' * (times > 1)}{call.kind} {call.axis} {in_bytes(call.bytes_in)} {call.phase}"
            for call, times in Counter(detail.inner).items()
        ]
        lines += [f"  after     {_move(move, detail.path)}" for move in detail.after]
        seconds = detail.forward_s + detail.backward_s
        share = f", {in_percent(seconds * op.block.count / self.step_time_s)} of the step" if self.step_time_s else ""
        times = f" (all {op.block.count}: {in_seconds(seconds * op.block.count)}{share})" if seconds else ""
        lines.append(
            f"  computes  {in_seconds(detail.forward_s)} forward, {in_seconds(detail.backward_s)} backward{times}"
        )
        if detail.saved_bytes:
            lines.append(f"  saves     {in_bytes(detail.saved_bytes)} for backward")
        if op.next_best is not None:
            lines.append(f"  next best {op.next_best}")
        return "\n".join(lines)

    def _leaf(self, leaf: ExplainedLeaf) -> str:
        lines = [leaf.name, f"  stored    {leaf.layout}"]
        if leaf.detail is not None:
            detail = leaf.detail
            shape = shape_text(detail.shape)
            held = f", and {in_bytes(detail.state_bytes)} for gradient and optimizer" if detail.state_bytes else ""
            where = "on each device" if leaf.home is None else f"for each device, with their home {leaf.home}"
            lines[1] += f", of {shape} {detail.dtype}: {in_bytes(detail.local_bytes)} {where}{held}"
            if detail.count > 1:
                lines.append(f"  {detail.count} of them share this entry")
            lines += [f"  once      {_move(move, '')}" for move in detail.after]
        lines += [f"  for use   {_move(move, '')}" for move in leaf.uses]
        lines += [f"  read by   {reader}" for reader in leaf.readers]
        if leaf.next_best is not None:
            lines.append(f"  next best {leaf.next_best}")
        return "\n".join(lines)


def _in_words(detail: OpDetail, axis: int) -> str:
    word = detail.meaning[axis]
    if word == "whole":
        partial = any(result.split()[axis] == "R" for result in detail.results)
        return "every rank computes all of it" + (", and its gradient is a term of a sum" if partial else "")
    return IN_WORDS.get(word, f"each rank computes its part of {word} of the result")


def _move(move: Move, path: str) -> str:
    calls = ", ".join(f"{call.kind} {call.axis} {in_bytes(call.bytes_in)} {call.phase}" for call in move.calls)
    seconds = move.forward_s + move.backward_s
    how = f": {calls}" if calls else ": no communication"
    return (
        f"{local_name(move.value, path)} {move.source} -> {move.target}{how}, {in_seconds(seconds)}, {move.times} times"
    )


# ---- looking up ------------------------------------------------------------------------------------------------------


def explain(
    document: Document, name: str, *, time_limit_s: float = 10.0, fullest: PeakReport | None = None
) -> Explanation:
    """Explain everything that ``name`` means: a module and all below it, an operator, or a parameter.

    Args:
        name: module path (``*`` and ``?`` allowed), operator as the plan writes it, or name of a leaf.
        time_limit_s: for all searches of a next best together.
        fullest: the peak of the plan's step, where it is known.

    Raises:
        PlanError: no name, or nothing of that name; says what is close.
    """
    if not isinstance(name, str) or not name:
        raise PlanError(
            f"{name!r} names nothing: give a module, an operator or a parameter, as print(plan) writes them"
        )
    ops = list(_find_ops(document, name))
    leaves = [leaf for leaf in _leaves(document) if any(_matches(each, name) for each in _leaf_names(document, leaf))]
    placed = {} if document.tables is None else document.tables.tables
    tables = tuple((each, table) for each, table in placed.items() if each == name or _within(each, name))
    if not ops and not leaves and not tables:
        raise PlanError(f"the plan has no module, operator or parameter called {name!r}{_near(document, name)}")
    explained_leaves = [_explain_leaf(document, leaf) for leaf in leaves]
    remark = ""
    if document.pipeline is not None:
        remark = (
            "This plan runs micro-batched (micro-batches, or the stages of a pipeline): figures of operators are "
            "those of one micro-batch, and what the next best would cost is not worked out."
        )
    elif document.assignment is not None:
        rival = _Rival(document.assignment, time.monotonic() + time_limit_s)
        ops = [replace(op, next_best=rival.of_op(op)) if _asks(op, ops) else op for op in ops]
        explained_leaves = [replace(leaf, next_best=rival.of_leaf(leaf)) for leaf in explained_leaves]
    else:
        remark = (
            "This plan was read from a file, which does not hold the alternatives. autopar.evaluate(model, plan, ...) "
            "gives a plan that can tell what the next best would cost."
        )
    axes = tuple((axis.name, axis.size) for axis in document.mesh.axes)
    alive = () if fullest is None else tuple(_alive_of(document, name, fullest, ops, leaves))
    at = "" if fullest is None else fullest.at
    step_s = document.predicted.step_time_s
    return Explanation(name, axes, step_s, tuple(ops), tuple(explained_leaves), tables, remark, at, alive)


def _alive_of(
    document: Document, name: str, fullest: PeakReport, ops: list[ExplainedOp], leaves: list[str]
) -> Iterator[Held]:
    """What of operators and leaves is alive at the peak; what belongs to an operator has its name in it."""
    named = {each for leaf in leaves for each in _leaf_names(document, leaf)}
    known = {each for each in named if _matches(each, name)} or named
    known |= {each for leaf in _leaves(document) for each in _leaf_names(document, leaf) if _within(each, name)}
    for op in ops:
        short = op.name.rpartition(": ")[2].split(" #")[0]
        paths = {op.detail.path, *filled(op.detail.path, op.detail.stands_for)} if op.detail is not None else set()
        meant = {path for path in paths if _within(path, name)} or paths
        known.update(f"{path}: {short}" if path else short for path in meant)
    words = re.compile(rf"(^|(?<= ))({'|'.join(map(re.escape, sorted(known)))})(?![\w.:])")
    yield from (held for held in fullest.alive if words.search(held.name))


def _asks(op: ExplainedOp, ops: list[ExplainedOp]) -> bool:
    return len(ops) == 1 or (op.detail is not None and is_notable(op.detail))


def _find_ops(document: Document, name: str) -> Iterator[ExplainedOp]:
    details = document.account.blocks
    for number, block in enumerate(document.blocks):
        for key, strategy in block.ops.items():
            detail = details[number].ops.get(key) if details else None
            known = {detail.path, *filled(detail.path, detail.stands_for)} if detail else set()
            named = key == name or f"{block.name} / {key}" == name or f"{block.name}: {key}" == name
            if named or any(_within(path, name) for path in known):
                leaves = [document.account.leaves.get(each) for each in detail.parameters] if detail else []
                shared = tuple(move for leaf in leaves if leaf is not None for move in leaf.after)
                yield ExplainedOp(block, key, strategy, detail, shared=shared)


def _leaf_names(document: Document, name: str) -> set[str]:
    """The entry's name, and the names that it stands for."""
    detail = document.account.leaves.get(name)
    return {name, *filled(name, detail.stands_for)} if detail else {name}


def _within(path: str, name: str) -> bool:
    """Whether a module path is ``name`` or lies below it."""
    parts = path.split(".")
    ancestors = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return bool(path) and any(_matches(ancestor, name) for ancestor in ancestors)


def _matches(known: str, name: str) -> bool:
    return known == name or fnmatch.fnmatchcase(known, name)


def _leaves(document: Document) -> dict[str, str]:
    return {**document.inputs, **document.parameters, **document.buffers}


def _near(document: Document, name: str) -> str:
    """What is called almost so, and what the ``*`` in it stand for."""
    leaves = document.account.leaves
    known = {leaf: leaves[leaf].stands_for if leaf in leaves else "" for leaf in _leaves(document)}
    for block, detail in zip(document.blocks, document.account.blocks, strict=False):
        known.update(dict.fromkeys(block.ops, ""))
        for op in detail.ops.values():
            parts = op.path.split(".")
            for path in (".".join(parts[:length]) for length in range(1, len(parts) + 1)):
                known[path] = op.stands_for if path.count("*") == op.path.count("*") else ""
    close = difflib.get_close_matches(name, list(known), n=4, cutoff=0.4)
    shown = [f"{each!r}" + (f" (* is {known[each]})" if "*" in each and known[each] else "") for each in close]
    return f"; close are: {', '.join(shown)}" if shown else "; print(plan) names what there is"


def _explain_leaf(document: Document, name: str) -> ExplainedLeaf:
    readers, uses = [], []
    for block, detail in zip(document.blocks, document.account.blocks, strict=False):
        for key, op in detail.ops.items():
            wanted = [layout for what, layout in op.operands if what == name]
            readers += [f"{block.count} x {block.name} / {key}, as {layout}" for layout in wanted]
            uses += [move for move in op.before if move.value == name]
    leaf = document.account.leaves.get(name)
    home = None
    if any(table.trace.items for table in document.transfer_schedules) and name in document.parameters:
        home = "on disk" if document.offload == "disk" else "on the host"
        if "stays" in document.predicted.memory_bytes:
            home += ", or staying there"
    return ExplainedLeaf(name, _leaves(document)[name], leaf, tuple(readers), tuple(uses), home=home)


# ---- the next best ---------------------------------------------------------------------------------------------------


class _Rival:
    """Solves the plan's problem again with one decision forbidden."""

    def __init__(self, assignment: Assignment, deadline: float) -> None:
        space = assignment.space
        self._assignment, self._deadline = assignment, deadline
        self._problem: Problem = space.problem(space.cost.cluster.device.usable_bytes, assignment.recompute)
        self._chosen = tuple(
            next(i for i, option in enumerate(space.options[variable]) if option == assignment.chosen[variable])
            for variable in space.variables
        )
        self._now: Evaluation = evaluate(self._problem, self._chosen)
        self._meaning_of: Meanings = meanings(space)
        self._variable_of = {name: variable for variable, name in variable_names(space).items()}

    def of_op(self, op: ExplainedOp) -> Alternative:
        """The best plan in which an operator shards something else (not merely the same on a mirrored mesh)."""
        space = self._assignment.space
        names = list(space.folded.names)
        return self._without(self._variable_of[("ops", names.index(op.block.name)), op.name])

    def of_leaf(self, leaf: ExplainedLeaf) -> Alternative:
        """The best plan in which a leaf is stored otherwise."""
        sections = ("parameters", "inputs", "buffers")
        return self._without(
            next(self._variable_of[s, leaf.name] for s in sections if (s, leaf.name) in self._variable_of)
        )

    def _without(self, variable: Variable) -> Alternative:
        space = self._assignment.space
        number = space.variables.order.index(variable)
        options = space.options[variable]
        now = self._mirrored(self._words(variable, options[self._chosen[number]]))
        allowed = np.array([self._mirrored(self._words(variable, option)) != now for option in options])
        if not allowed.any():
            return Alternative("")
        vertex = self._problem.vertices[number]
        forbidden = replace(vertex, time_s=np.where(allowed, vertex.time_s, np.inf))
        vertices = (*self._problem.vertices[:number], forbidden, *self._problem.vertices[number + 1 :])
        problem = replace(self._problem, vertices=vertices)
        answer = solve(problem, time_limit_s=max(0.5, self._deadline - time.monotonic()))
        found = evaluate(problem, answer.choices)
        extra = found.time_s - self._now.time_s if found.feasible else math.inf
        changes = sum(
            self._words(each, space.options[each][mine]) != self._words(each, space.options[each][other])
            for each, mine, other in zip(space.variables, self._chosen, answer.choices, strict=True)
            if each in space.members and each != variable
        )
        return Alternative(
            self._say(variable, options[answer.choices[number]]),
            0.0 if abs(extra) <= 1e-9 * self._now.time_s else extra,
            extra / self._now.time_s if self._now.time_s else 0.0,
            answer.status != "feasible",
            found.peak_bytes,
            changes,
        )

    def _words(self, variable: Variable, option: Choice | Layout) -> tuple[str, ...]:
        """A decision, one word for each axis."""
        if isinstance(option, Choice):
            space = self._assignment.space
            return self._meaning_of(space.graph.by_name[space.members[variable][0]], option)
        return tuple(map(str, option))

    def _mirrored(self, words: tuple[str, ...]) -> list[list[str]]:
        """Words as a set per group of axes that may be exchanged: the mirror image of a plan is no other plan."""
        space = self._assignment.space
        groups: dict[object, list[str]] = {}
        for axis, word in zip(space.mesh.axes, words, strict=True):
            if axis.size == 1:
                continue
            prices = tuple(
                space.cost.collective_terms(kind, axis) for kind in ("all_reduce", "all_gather", "all_to_all")
            )
            groups.setdefault((axis.size, prices), []).append(word)
        return [sorted(group) for group in groups.values()]

    def _say(self, variable: Variable, option: Choice | Layout) -> str:
        """A decision in words."""
        words = self._words(variable, option)
        if not isinstance(option, Choice):
            return f"stored {' '.join(words)}"
        names = self._assignment.space.mesh.names
        return ", ".join(f"{axis} {word}" for axis, word in zip(names, words, strict=True))
