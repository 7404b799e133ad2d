"""Diagnoses infeasibility: why there is no plan, by how much it fails, and how large a device must be."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from planner.analysis.offload.step_timing import WorkingSet
from planner.base.errors import InfeasibleError, PinError
from planner.base.formatting import in_all_bytes, in_bytes
from planner.formulation.batch_norm import may_be_by_micro_batch
from planner.formulation.decision_names import short_op
from planner.formulation.search_space import Space
from planner.ir.graph import Graph, Node
from planner.ops import OPS
from planner.ops.function import is_unregistered
from planner.search.candidates import Branch, Incumbent
from planner.search.search_context import SearchContext
from planner.solve.choices import lower_bounds
from planner.solve.problem import Edge


@dataclass(frozen=True)
class MinMemoryPlan:
    """A plan that needs little memory, and what a device must hold for it at the least."""

    best: Incumbent
    needed: WorkingSet

    @property
    def bytes(self) -> int:
        """That a device must hold."""
        return self.needed.bytes


def free_s(space: Space) -> float:
    """Seconds that plans of a configuration take at least, whatever memory there is; infinite: none runs."""
    return lower_bounds(space.problem(None)).time_s


def check_micro_batches(spaces: Iterable[Space]) -> None:
    """Refuse micro-batches where no configuration has a plan, whatever it needs of memory."""
    without = list[Space]()
    for space in spaces:
        if math.isfinite(free_s(space)):
            return
        without.append(space)
    if without:
        space = min(without, key=lambda space: space.mesh.size)
        reason = what_forbids(space) or (
            "its operators ask for it in ways that go together with none, or inputs differ in dim 0"
        )
        raise PinError(f"no micro-batches can be cut from this model's batch: {reason}, or pin 'micro_batches' 1")


def what_forbids(space: Space) -> str:
    """The first operator that does not run on one micro-batch after the other, and what to do about it; empty if each
    by itself may.
    """
    node = _first_to_forbid(space)
    if node is None:
        return ""
    likes = len(space.members[space.variable_of[node.name]]) > 1
    where = (f" in {node.path}" if node.path else "") + ", or one of its kind," * likes
    if is_unregistered(node):
        return (
            f"{short_op(node.op)}{where} is not registered, so it runs on all samples at once: say what its dims "
            "mean with autopar.register (docs/adding_an_op.md), take it out of the model"
        )
    if node.op not in OPS:
        return (
            f"{short_op(node.op)}{where} is not in the op table, so it runs on all samples at once: add a row "
            "(docs/adding_an_op.md), take it out of the model"
        )
    if may_be_by_micro_batch(space.rules[node.name]):
        return (
            f"{short_op(node.op)}{where} normalises by the mean and the variance of the whole batch, which are not "
            "known before all micro-batches have come as far: pin 'batch_norm' 'micro_batch' to normalise each by its "
            "own, as where gradients are accumulated (docs/micro_batches.md), freeze it with eval()"
        )
    shapes = ", ".join(str(operand.shape) for operand in space.graph.input_types(node))
    has_experts = any(row.labels.get("expert") for each in space.graph.operators if (row := OPS.get(each.op)))
    balance = "; if it is a loss that balances experts, a product of two such means, leave it out, see "
    balance += "docs/micro_batches.md"
    return (
        f"{short_op(node.op)}{where} on operands of shapes {shapes} mixes samples, or reads what is known when all of "
        f"them are through (a mean over the batch){balance if has_experts else ''}: compute it outside of the model"
    )


def _first_to_forbid(space: Space) -> Node | None:
    """The first operator that has no way to run on what those before it can give; ``None`` if each by itself has."""
    problem = space.problem(None)
    possible = [np.isfinite(vertex.time_s) for vertex in problem.vertices]
    reading: dict[int, list[Edge]] = {}
    for edge in problem.edges:
        reading.setdefault(edge.tail, []).append(edge)
    waiting = list(range(len(possible)))
    while waiting:
        tail = waiting.pop()
        for edge in reading.get(tail, ()):
            left = possible[edge.head] & np.isfinite(edge.time_s)[possible[tail]].any(axis=0)
            if possible[tail].any() and (left != possible[edge.head]).any():
                possible[edge.head] = left
                waiting.append(edge.head)
    position = {node.name: at for at, node in enumerate(space.graph.nodes)}
    without = (variable for variable, left in zip(space.variables, possible, strict=True) if not left.any())
    names = [space.members[variable][0] for variable in without if variable in space.members]
    return space.graph.by_name[min(names, key=position.__getitem__)] if names else None


def nothing_fits(
    context: SearchContext, graph: Graph, branches: list[Branch], minimal: list[MinMemoryPlan]
) -> InfeasibleError:
    """The error that says by how much the minimum-memory plan exceeds what a device can use, and what would fit."""
    cluster = context.cost.cluster
    if not minimal:
        return InfeasibleError(
            f"no plan for {cluster.name!r} was found before the time limit: give a longer time_limit_s, or pin "
            "decisions to narrow the search",
            0,
        )
    limit, least = context.usable_bytes, min(minimal, key=lambda plan: plan.bytes)
    excess, config = least.bytes - limit, least.best.config
    needed = math.ceil(least.bytes / (1 - cluster.device.reserve_fraction))
    is_open = any(math.isfinite(branch.candidate.bound_s) for branch in branches)
    if context.training.tier != "device":
        return _nothing_works(context, least, needed, is_open)
    held = [t for node in graph.leaves if node.op == "param" for t in node.results]
    params = sum(t.size_bytes for t in held)
    late = " before the time limit" * (is_open and context.is_late())
    return InfeasibleError(
        f"no plan that fits {cluster.name!r} was found{late}: each of its {cluster.world_size} devices can use "
        f"{in_all_bytes(limit)}, and the minimum-memory plan found ({config}) needs {in_all_bytes(least.bytes)}, "
        f"{in_all_bytes(excess)} too many (the parameters alone are {in_bytes(params)} in all, "
        f"{context.training.optimizer_bytes_per_element} bytes more per element for the optimizer). What would fit: "
        f"devices with memory_bytes of at least {in_all_bytes(needed)}{', or a longer time_limit_s' * bool(late)}.",
        excess,
    )


def _nothing_works(context: SearchContext, least: MinMemoryPlan, needed: int, is_open: bool) -> InfeasibleError:
    """The same of plans with model data on the host: what a device must hold is the largest working set."""
    cluster, working = context.cost.cluster, least.needed
    limit = context.usable_bytes
    excess = working.bytes - limit
    head = (
        f"no plan that fits {cluster.name!r} was found{' before the time limit' * context.is_late()}, but none was "
        "ruled out either"
        if is_open
        else f"no plan with model data on the host fits {cluster.name!r}"
    )
    recompute = "" if context.pins.recompute in (None, "full") else "pin 'recompute' 'full', "
    leave = "" if context.pins.activations in (None, "all") else "pin 'activations' 'all', "
    micro_batches = "more micro-batches" if least.best.config.mesh.micro_batches > 1 else "micro-batches"
    return InfeasibleError(
        f"{head}: each of its {cluster.world_size} devices can use {in_all_bytes(limit)}, and the largest working set "
        f"of the minimum-memory plan found ({least.best.config}) takes {in_all_bytes(working.bytes)}, "
        f"{in_all_bytes(excess)} too many: {working.moment} needs {in_all_bytes(working.chunk_bytes)} of parameters "
        f"and gradients at once, and {in_all_bytes(working.beside_bytes)} beside them for activations and what "
        f"operators need. What would lower it: a smaller global batch, {micro_batches} (pin 'micro_batches'), "
        f"{recompute}"
        f"{leave}parameters sharded over more devices (pin 'zero' 3 or 'tensor'). What would fit: devices with "
        f"memory_bytes of at least {in_all_bytes(needed)}.",
        excess,
    )
