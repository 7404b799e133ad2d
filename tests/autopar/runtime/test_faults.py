"""Seeded faults: emitted programs that are wrong in one place, and who notices.

Three watch: the type checker (``types``), the comparison with the original (``values``), and the count of
collectives (``calls``; nothing is counted once ranks contradict each other or shapes no longer fit).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import fx

from autopar.emit.rewrite import Rewritten
from autopar.runtime.layers import cross_entropy_loss, partial_mean
from autopar.runtime.spmd.parameters import replicate_parameters
from autopar.runtime.spmd.resharding import convert
from autopar.verification.reference import Reference, own_reference
from autopar.verification.simulator import DivergedError, Simulation, fake_process_group
from autopar.verification.typecheck import check_program, emit
from autopar.verification.verify import RTOL, observed_step
from planner.base.errors import VerificationError
from planner.formulation.assignment import Assignment
from tests.autopar.matrix import Recipe, decide, original
from tests.autopar.models import MODELS

TENSOR = Recipe("tensor", {"tensor": 2})
SEQUENCE = Recipe("tensor + sequence", {"tensor": 2}, {"sequence_parallel": True})
DATA = Recipe("data", {"data": 2})
ZERO = Recipe("data, zero 3", {"data": 2}, {"zero": 3})
MIXED = Recipe("data x tensor", {"data": 2, "tensor": 2})
CONTEXT = Recipe("context", {"context": 2})


# ---- faults ----------------------------------------------------------------------------------------------------------


def sites(root: fx.GraphModule, target: object) -> Iterator[tuple[fx.GraphModule, fx.Node]]:
    """Every call of ``target`` in the programs of all blocks, then in the root."""
    for program in (*(m for _, m in root.named_children() if isinstance(m, fx.GraphModule)), root):
        for node in program.graph.nodes:
            if node.op == "call_function" and node.target is target:
                yield program, node


def conversions(root: fx.GraphModule, src: str, dst: str) -> Iterator[tuple[fx.GraphModule, fx.Node]]:
    """Every resharding between two kinds of types, ``"S"`` for any shard."""
    for program, node in sites(root, convert):
        if str(node.args[2])[0] == src and str(node.args[3])[0] == dst:
            yield program, node


def drop(src: str, dst: str) -> Callable[[fx.GraphModule], None]:
    """Leave out the first such resharding."""

    def apply(root: fx.GraphModule) -> None:
        program, node = next(conversions(root, src, dst))
        node.replace_all_uses_with(node.args[0])
        program.graph.erase_node(node)
        program.recompile()

    return apply


def retype(first: str, second: str, src: str = "", dst: str = "") -> Callable[[fx.GraphModule], None]:
    """Say that the first such resharding is from (``src``) or to (``dst``) another type."""

    def apply(root: fx.GraphModule) -> None:
        program, node = next(conversions(root, first, second))
        x, axis, before, after = node.args
        node.args = (x, axis, src or before, dst or after)
        program.recompile()

    return apply


def repeat(src: str, dst: str) -> Callable[[fx.GraphModule], None]:
    """Do the first such resharding twice."""

    def apply(root: fx.GraphModule) -> None:
        program, node = next(conversions(root, src, dst))
        with program.graph.inserting_after(node):
            again = program.graph.call_function(convert, (node, *node.args[1:]))
        node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
        program.recompile()

    return apply


def other_axis(src: str, dst: str) -> Callable[[fx.GraphModule], None]:
    """Do the first such resharding over the other axis of the mesh."""

    def apply(root: fx.GraphModule) -> None:
        program, node = next(conversions(root, src, dst))
        x, axis, *types = node.args
        node.args = (x, next(n for n in program.graph.nodes if n.op == "get_attr" and n is not axis), *types)
        program.recompile()

    return apply


def unsummed(root: fx.GraphModule) -> None:
    """Use the parameters of the first block as they are stored: their gradients are never summed."""
    program, node = next(sites(root, replicate_parameters))
    for user in list(node.users):
        user.replace_all_uses_with(node.args[0][user.args[1]])
        program.graph.erase_node(user)
    program.graph.erase_node(node)
    program.recompile()


def without_groups(layer: object, keyword: str) -> Callable[[fx.GraphModule], None]:
    """Call a layer as if nothing were sharded: a mean over this rank's tokens instead of everyone's."""

    def apply(root: fx.GraphModule) -> None:
        program, node = next(site for site in sites(root, layer) if keyword in site[1].kwargs)
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != keyword}
        program.recompile()

    return apply


def there_and_back(root: fx.GraphModule) -> None:
    """Gather what is sharded, only to cut it again."""
    program, node = next(conversions(root, "P", "S"))
    _, axis, _, shard = node.args
    with program.graph.inserting_after(node):
        gathered = program.graph.call_function(convert, (node, axis, shard, "R"))
    with program.graph.inserting_after(gathered):
        cut = program.graph.call_function(convert, (gathered, axis, "R", shard))
    node.replace_all_uses_with(cut, delete_user_cb=lambda user: user is not gathered)
    program.recompile()


@dataclass(frozen=True)
class Fault:
    name: str
    model: str
    recipe: Recipe
    apply: Callable[[fx.GraphModule], None]
    noticed: frozenset[str]


def fault(name: str, model: str, recipe: Recipe, apply: Callable[[fx.GraphModule], None], *noticed: str) -> Fault:
    return Fault(name, model, recipe, apply, frozenset(noticed))


GPT = "functional-gpt"
FAULTS = [
    fault("an I put for an R", GPT, TENSOR, drop("I", "R"), "types", "values"),
    fault("a gathered I put for an R", GPT, SEQUENCE, retype("S", "R", dst="I"), "types", "values", "calls"),
    fault("an R put for an I", GPT, TENSOR, retype("P", "I", dst="R"), "types", "values", "calls"),
    fault("a dropped all-reduce", GPT, TENSOR, drop("P", "I"), "types", "values"),
    fault("a dropped reduce-scatter", GPT, SEQUENCE, drop("P", "S"), "types", "values"),
    fault("a dropped all-gather", GPT, SEQUENCE, drop("S", "R"), "types", "values"),
    fault("a parameter used in slices", GPT, ZERO, drop("S", "R"), "types", "values"),
    fault("a double reduction", GPT, TENSOR, repeat("P", "I"), "types", "values", "calls"),
    fault("the wrong dim sharded", GPT, SEQUENCE, retype("P", "S", dst="S(0)"), "types", "values"),
    fault("the wrong axis reduced", GPT, MIXED, other_axis("P", "I"), "types", "values"),
    fault("a missing gradient sum", GPT, DATA, unsummed, "types", "values"),
    fault("a P taken for an R", GPT, TENSOR, retype("P", "I", src="R"), "types", "values"),
    fault("a mean over this rank's part", "mlp", DATA, without_groups(partial_mean, "contracted_groups"), "values"),
    fault(
        "a mean over this rank's tokens", "gpt2", DATA, without_groups(cross_entropy_loss, "token_groups"),
        "values", "calls",
    ),
    fault("a needless round trip", GPT, SEQUENCE, there_and_back, "calls"),
]  # fmt: skip


# ---- who notices -----------------------------------------------------------------------------------------------------


def watchers(ref: Reference, assignment: Assignment, apply: Callable[[fx.GraphModule], None]) -> frozenset[str]:
    """Which checks a changed program fails."""
    found = set()
    with fake_process_group(assignment.space.mesh.size):
        program, groups = emit(ref.traced.captured, assignment)
        apply(program.module)
        try:
            check_program(
                Rewritten(program.module, program.leaves, program.programs), ref.traced.captured, assignment, groups
            )
        except VerificationError:
            found.add("types")
    with ref.computing(), Simulation(ref.model, ref.traced.captured, assignment) as simulation:
        apply(simulation.module.program)
        try:
            agreement = observed_step(ref, assignment, simulation)
        except (DivergedError, RuntimeError, IndexError):  # ranks differ, or shapes no longer fit: nothing to count
            return frozenset(found | {"values"})
    if agreement.beyond(ref.tolerance(assignment.space.mesh.size, RTOL)):
        found.add("values")
    if agreement.miscounted:
        found.add("calls")
    return frozenset(found)


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.name)
def test_fault_is_noticed(case: Fault) -> None:
    ref = original(case.model)
    assert watchers(ref, decide(ref, case.recipe), case.apply) == case.noticed


@functools.cache
def narrow(model: str) -> Reference:
    """A model in bfloat16, as it runs."""
    torch.manual_seed(0)
    module, batch = MODELS[model].build()
    batch = {name: value.bfloat16() if value.is_floating_point() else value for name, value in batch.items()}
    return own_reference(module.bfloat16(), (), batch)


SUMS = {"a dropped all-reduce", "a double reduction", "a missing gradient sum", "a mean over this rank's part"}


@pytest.mark.parametrize("case", [case for case in FAULTS if case.name in SUMS], ids=lambda case: case.name)
def test_fault_is_noticed_in_bfloat16(case: Fault) -> None:
    """Rounding alone changes these models by some per cent, a sum that is not made by much more."""
    ref = narrow(case.model)
    assignment = decide(ref, case.recipe)
    assert watchers(ref, assignment, lambda root: None) == frozenset()
    assert watchers(ref, assignment, case.apply) == case.noticed


SOUND = {(case.model, case.recipe.name): case.recipe for case in FAULTS}


@pytest.mark.parametrize("model,name", SOUND)
def test_nothing_is_noticed_without_a_fault(model: str, name: str) -> None:
    ref = original(model)
    assert watchers(ref, decide(ref, SOUND[model, name]), lambda root: None) == frozenset()
