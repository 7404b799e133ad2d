"""Checks in one process that a plan's program computes what the model computes.

Three independent checks. The emitted program is type-checked for gradient correctness at the plan's real
mesh size (:mod:`autopar.verification.typecheck`). It is run on every rank of a small mesh, forward and backward, beside
the original model, in float64 where that runs (:mod:`autopar.verification.reference`). And the collectives that this
run makes are counted, call by call, against the plan's prediction.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.tensor import DTensor

from autopar.capture.capture import LossFn, _example_inputs
from autopar.driver.arguments import check_arguments, check_comparison, given_plan
from autopar.driver.plan import assign, plan_traced, staged
from autopar.driver.trace import Traced, trace
from autopar.emit.build import MicroBatched
from autopar.functions.carry import Carried
from autopar.graph.slabs import joined
from autopar.runtime.pipeline.executor import PipelineStep
from autopar.runtime.spmd.mesh import groups_of
from autopar.runtime.spmd.not_kept import NotKept
from autopar.verification.collective_counter import count_collectives, count_messages, differences
from autopar.verification.divergence import first_divergence, reference_values
from autopar.verification.float64 import is_narrow
from autopar.verification.reference import (
    Reference,
    aligned,
    buffer,
    gradient,
    output,
    own_reference,
    reference,
    relative_error,
)
from autopar.verification.rounding import BLUNT, FACTOR, Tolerance
from autopar.verification.simulator import DivergedError, Simulation
from autopar.verification.typecheck import TypeReport, typecheck
from planner.analysis.prediction import collectives
from planner.base.errors import AutoparError, PinError, VerificationError
from planner.base.formatting import in_percent
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import Assignment, assignment_of
from planner.formulation.batch_norm import normalizes_by_micro_batch
from planner.formulation.constraints.pins import Pins
from planner.formulation.pinned_space import pinned_space
from planner.formulation.resharding import Collective
from planner.formulation.search_space import Space
from planner.formulation.stage_boundaries import Exchange, exchanges
from planner.formulation.strategies import Choice
from planner.formulation.training import Training, Update
from planner.formulation.variables import Variable
from planner.ir.folding import Folded, fold, refold
from planner.ir.graph import Ref
from planner.ir.layout import Layout, Mesh
from planner.ops import drops
from planner.plan.plan import Plan
from planner.solve.choices import solve

RTOL = 1e-10
SIMULATED_RANKS = 12
"""A mesh of more ranks is simulated with its axes reduced to their least divisors."""
_DTYPE = re.compile(r"dtype|data type|scalar type|\b(b?fp?|b?float)(8|16|32|64)|\b(double|half)\b", re.IGNORECASE)
"""How operators that do not take a dtype say so; ``BF16`` and ``'Double'`` are names of some."""


# ---- the same on all ranks -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """How far a simulated step is from the original's: relative errors by name, and calls not as predicted.

    ``sent`` is what would go between stages on different ranks, if they all were not in one process.
    """

    outputs: Mapping[str, float]
    gradients: Mapping[str, float]
    buffers: Mapping[str, float]
    calls: Counter[Collective]
    sent: Counter[Exchange]
    miscounted: tuple[str, ...]

    @property
    def errors(self) -> dict[str, float]:
        """Every relative error, by what messages call the value."""
        return {
            **{output(name): e for name, e in self.outputs.items()},
            **{gradient(name): e for name, e in self.gradients.items()},
            **{buffer(name): e for name, e in self.buffers.items()},
        }

    @property
    def worst(self) -> tuple[float, str]:
        """The largest relative error, and where it is."""
        return max(((e, name) for name, e in self.errors.items()), default=(0.0, "nothing"))

    def beyond(self, tolerance: Tolerance) -> list[tuple[float, str]]:
        """Errors larger than allowed, with what they are of; first what is furthest beyond."""
        found = [(e, name) for name, e in self.errors.items() if e > tolerance.of(name)]
        return sorted(found, key=lambda each: each[0] / (tolerance.of(each[1]) or RTOL), reverse=True)

    def agrees(self, rtol: float = RTOL) -> bool:
        """Whether every value agrees and every call was predicted."""
        return self.worst[0] <= rtol and not self.miscounted


def simulate(
    reference: Reference, assignment: Assignment, seed: int = 0, micro_batched: MicroBatched | None = None
) -> Agreement:
    """Run one step of an assignment on every rank, in this process, beside the original.

    Args:
        assignment: decisions for ``reference.traced``.
        micro_batched: how they run if they do so with micro-batches.

    Raises:
        DivergedError: ranks that should hold the same values do not.
    """
    captured = reference.traced.captured
    with reference.computing(), Simulation(reference.model, captured, assignment, seed, micro_batched) as simulation:
        return observed_step(reference, assignment, simulation)


def observed_step(reference: Reference, assignment: Assignment, simulation: Simulation) -> Agreement:
    """One step of a running simulation, compared with the original's."""
    module = simulation.module
    specs = module.interface.outputs
    args, kwargs = simulation.inputs(reference.args, reference.kwargs)
    if simulation.is_late:
        before = dict(module.named_buffers())
        module(*args, **kwargs)
        for name, buffer in before.items():
            module.update_buffer(name, buffer)
    messages: contextlib.AbstractContextManager[Counter[Exchange]] = contextlib.nullcontext(Counter())
    if isinstance(module.program, PipelineStep):
        messages = count_messages(module.program, simulation.placed)
    # Without a loss a micro-batched step runs forward only.
    with_loss = torch.set_grad_enabled(reference.loss is not None)
    with with_loss, count_collectives(groups_of(module.device_mesh)) as calls, messages as sent:
        returned = pytree.tree_leaves(module(*args, **kwargs))
        if reference.loss is not None:
            returned[reference.loss].backward()
    predicted = collectives(assignment, simulation.bounds, simulation.late)
    between = exchanges(assignment, simulation.placed, simulation.bounds)
    between = Counter({call: count for call, count in between.items() if call.kind == "send"})
    if reference.loss is None:
        predicted = Counter({call: count for call, count in predicted.items() if call.phase == "forward"})
        between = Counter({call: count for call, count in between.items() if call.phase == "forward"})
    outputs = {}
    for name, expected, got, spec in zip(reference.names, reference.outputs, returned, specs, strict=True):
        if isinstance(expected, Tensor) and not isinstance(got, NotKept):
            layout = spec.layout if spec is not None else ()
            outputs[name] = relative_error(simulation.whole(got, layout, tuple(expected.shape)), expected)
    layouts = {leaf.name: leaf.layout for leaf in module.interface.leaves}
    own = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    for slabs in module.slabs:
        if (grad := own.pop(slabs.name, None)) is not None:
            own |= slabs.apart(simulation.whole(grad, layouts[slabs.name], slabs.shape))
    largest = reference.largest_gradient
    # A parameter that the original's loss does not reach, or that is frozen, must not be trained.
    gradients = {name: math.inf for name, grad in own.items() if name not in reference.gradients and _any_nonzero(grad)}
    for name, expected in reference.gradients.items():
        got = own.get(name)
        if got is None:
            gradients[name] = relative_error(torch.zeros_like(expected), expected, largest)
        else:
            whole = got if name not in layouts else simulation.whole(got, layouts[name], tuple(expected.shape))
            gradients[name] = relative_error(whole, expected, largest)
    buffers = {
        name: relative_error(simulation.whole(value, layouts[name], tuple(value.shape)), reference.buffers[name])
        for name, value in module.named_buffers()
        if name in layouts
    }
    wrong = (*differences(predicted, calls), *differences(between, sent))
    return Agreement(outputs, gradients, buffers, calls, sent, wrong)


def _any_nonzero(gradient: Tensor) -> bool:
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    parts = local._local_tensors.values() if isinstance(local, LocalTensor) else [local]
    return any(bool(part.any()) for part in parts)


def locate(reference: Reference, assignment: Assignment, rtol: float = RTOL, seed: int = 0) -> str:
    """The first operator whose forward result is not the original's, in words."""
    captured, model = reference.traced.captured, reference.model
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **captured.constants}
    tensors = joined(captured.slabs, tensors)
    with reference.computing(), torch.no_grad(), Simulation(model, captured, assignment, seed) as simulation:
        flat = simulation.module.interface.flatten(reference.args, dict(reference.kwargs))
        inputs = {name: value for name, value in zip(captured.input_names, flat, strict=True) if name is not None}
        leaves = {
            name: inputs[name] if kind == "input" else tensors[name if kind == "const" else target].detach()
            for name, (kind, target) in captured.leaves.items()
        }
        with simulation.mode.disable():
            values = reference_values(captured, assignment, leaves)
        parts = tuple(
            simulation.parts(leaves[leaf.name], assignment.produced(Ref(leaf.name)))
            for leaf in assignment.space.graph.leaves
        )
        found = first_divergence(simulation, assignment, values, parts, rtol)
    if found is not None:
        return f"the first module to differ is {found}"
    return "every operator's forward result agrees: a gradient goes wrong on its way back"


# ---- the front door --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verification:
    """What was checked, and how well it agrees.

    Attributes:
        model: class name.
        mesh: the plan's mesh; ``types`` is what the type checker saw at that size.
        simulated: the mesh on which the program was run, ``None`` if it was not.
        agreement: errors of that run.
        tolerance: in which dtypes values were compared, and how far each may be from the original's.
        notes: what a reader should know of how the comparison was made.
    """

    model: str
    mesh: Mesh
    types: TypeReport
    simulated: Mesh | None = None
    agreement: Agreement | None = None
    tolerance: Tolerance | None = None
    notes: tuple[str, ...] = ()

    def noting(self, note: str) -> Verification:
        """The same, with a note more."""
        return replace(self, notes=(*self.notes, note))

    @property
    def verdict(self) -> str:
        """What was verified, and on which mesh."""
        if self.simulated is None:
            return "types verified, values not compared"
        if self.simulated == self.mesh:
            return "verified"
        return f"types verified; values verified on mesh {_describe(self.simulated)}"

    def __str__(self) -> str:
        lines = [f"{self.model} on mesh {_describe(self.mesh)}: {self.verdict}", f"  types        {self.types}"]
        if self.agreement is not None and self.simulated is not None and self.tolerance is not None:
            lines.append(f"  compared     {self.tolerance}")
            for what, called, errors in (
                ("outputs", output, self.agreement.outputs),
                ("gradients", gradient, self.agreement.gradients),
                ("buffers", buffer, self.agreement.buffers),
            ):
                if errors:
                    name = max(errors, key=lambda n: errors[n])
                    allowed = f" of {self.tolerance.of(called(name)):.1e}" if self.tolerance.own else ""
                    lines.append(
                        f"  {what:<12} {len(errors)} equal on {_describe(self.simulated)}, "
                        f"largest relative error {errors[name]:.1e}{allowed} ({name})"
                    )
            lines.append(f"  collectives  {self.agreement.calls.total()} calls, all as predicted")
            if self.agreement.sent:
                lines.append(f"  sent         {self.agreement.sent.total()} tensors between stages, all as predicted")
        return "\n".join([*lines, *(f"  note         {note}" for note in self.notes)])


def verify(
    model: nn.Module,
    cluster_or_plan: ClusterSpec | Plan | str | os.PathLike[str],
    *,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
    pin: Mapping[str, Any] | None = None,
    mesh: Mapping[str, int] | None = None,
    seed: int = 0,
    rtol: float = RTOL,
    time_limit_s: float = 60.0,
) -> Verification:
    """Check that a plan computes what the model computes; needs no process group and no device.

    Args:
        model: as for :func:`autopar.plan`. On the meta device there are no values: only types are checked.
        cluster_or_plan: a plan, the path of one's file, or a cluster to plan for.
        example_args, example_kwargs, loss_fn, pin, time_limit_s: as for :func:`autopar.plan`; the batch is also
            the one that is compared.
        mesh: with a cluster, plan on this mesh (axis name -> ranks) instead of searching all.
        rtol: largest relative error allowed, in float64. Where the model does not run in that, it is compared in its
            own dtypes, with tolerances that are measured (:mod:`autopar.verification.rounding`) and told.

    Raises:
        VerificationError: a type is wrong, a value differs (names the first module that does), a collective
            was not predicted; or this could not be found out, and why.
        PlanError: the plan does not fit the model.
    """
    if not isinstance(cluster_or_plan, ClusterSpec):
        cluster_or_plan = given_plan(cluster_or_plan, "cluster_or_plan", "a ClusterSpec, a Plan,")
    cluster = cluster_or_plan.cluster if isinstance(cluster_or_plan, Plan) else cluster_or_plan
    check_arguments(model, cluster, example_args, example_kwargs, pin)
    check_comparison(mesh, rtol)
    if isinstance(cluster_or_plan, Plan) and (pin or mesh):
        raise PinError("a plan is already decided, so pin and mesh have nothing left to fix: give a cluster instead")
    with _telling(model, "capturing and planning the model"):
        traced = trace(model, example_args, example_kwargs, loss_fn)
        plan = None if mesh is not None else _plan(traced, cluster_or_plan, pin, time_limit_s)
        tables = None if plan is None else plan.tables
        traced = traced.placing(tables, cluster)
        if plan is not None:
            assignment, micro_batched = staged(plan, assign(traced, plan))
        else:
            assignment = decide_on(traced, Mesh.of(**mesh or {}), cluster, Pins.parse(pin), time_limit_s)
            micro_batched = None
    with _telling(model, "checking the types of the plan's program"):
        types = typecheck(traced.captured, assignment, micro_batched)
    found = Verification(traced.name, assignment.space.mesh, types)
    args, kwargs = _example_inputs(model, example_args, example_kwargs)
    tensors = _tensors(model, args, kwargs)
    if any(t.is_meta for t in tensors):
        return found.noting("the model or its batch is on the meta device: types were checked, values were not")
    if _draws(traced):
        found = found.noting("dropout was switched off for the comparison")
    if assignment.space.training.float8 is not None:
        found = found.noting("products that the plan has in float8 were compared in the dtype of the comparison")
    if assignment.space.training.reduce_dtype is not None:
        found = found.noting("gradients were reduced in the dtype of the comparison, not in the plan's 'reduce_dtype'")
    apart = assignment.space.mesh.micro_batches if normalizes_by_micro_batch(assignment) else 1
    if apart > 1:
        found = found.noting(
            "batch norms of the original normalised each micro-batch by its own statistics, as pin 'batch_norm' says"
        )
    compared = partial(_compared, assignment=assignment, micro_batched=micro_batched, rtol=rtol, seed=seed)
    try:
        return compared(found, aligned(reference(model, args, kwargs, loss_fn, apart).placing(tables, cluster), traced))
    except VerificationError:
        raise
    except Exception as error:
        if not (is_narrow(tensors) and _DTYPE.search(_reason(error))):
            with _telling(model, "running the model, and all ranks of the plan, in float64"):
                raise
        found = found.noting(f"in float64 the model does not run: {_reason(error)}")
    with _telling(model, "running the model itself on this batch"):
        own = own_reference(model, args, kwargs, loss_fn, apart).placing(tables, cluster)
    with _telling(model, "running all ranks of the plan"):
        return compared(found, own)


def _compared(
    found: Verification,
    ref: Reference,
    *,
    assignment: Assignment,
    micro_batched: MicroBatched | None,
    rtol: float,
    seed: int,
) -> Verification:
    """What was verified, and values on a mesh that can be simulated.

    Raises:
        VerificationError: a value differs, or a collective was not predicted.
    """
    real = assignment.space.mesh
    small = real if real.size <= SIMULATED_RANKS else _shrunk(real.micro_batched(1)).micro_batched(real.micro_batches)
    like = refold(assignment.space.folded, ref.traced.graph)
    given = assignment.space.training
    update: Update = "backward" if given.updates_on_device else "after"
    training = Training(update=update, unsharding=assignment.space.unsharding, discards=given.discards)
    cluster = assignment.space.cost.cluster
    pins = Pins(batch_norm=None if ref.normalized_apart == 1 else "micro_batch", streamed=True)
    space = space_on(ref.traced, small, cluster, pins, like, assignment.space.stages, training)
    simulated, missing = _transfer(assignment, space)
    if simulated is None:
        return found.noting(
            f"WARNING: {real.size} ranks are too many to simulate, and the layout of {missing} does not exist on "
            f"{_describe(small)}: values were not compared. Verify a plan for fewer devices with the same pins, or a "
            "model whose sizes divide by them"
        )
    if small != real:
        found = found.noting(f"{real.size} ranks are too many to simulate: values were compared on {_describe(small)}")
    if ref.loss is None:
        found = found.noting("the model returns no differentiable scalar: outputs were compared, gradients were not")
    if simulated.space.discards:
        names = ", ".join(simulated.space.discarded_names)
        found = found.noting(f"not compared, since training steps do not keep them: {names}")
    tolerance = ref.tolerance(small.size, rtol)
    if tolerance.blunt:
        worst = max(tolerance.blunt, key=tolerance.of)
        found = found.noting(
            f"WARNING: rounding alone changes {len(tolerance.blunt)} of {len(tolerance.own)} values by more than "
            f"{in_percent(BLUNT / FACTOR)} (the {worst} by {in_percent(tolerance.of(worst) / FACTOR)}), so that their "
            "agreement says little: verify the model in wider dtypes, with smaller sizes or with fewer layers"
        )
    agreement = _agree(ref, simulated, tolerance, seed, micro_batched)
    return replace(found, simulated=small, agreement=agreement, tolerance=tolerance)


@contextlib.contextmanager
def _telling(model: nn.Module, doing: str) -> Iterator[None]:
    """Inside, whatever is raised that is no error for users becomes one, which says what was going on."""
    try:
        yield
    except AutoparError:
        raise
    except Exception as error:
        raise VerificationError(
            f"{type(model).__name__} could not be verified: {doing} failed with {_reason(error)}. If the model runs "
            "forward and backward on this batch by itself, the fault is autopar's, and the error before this one says "
            "where; if not, mend the model, or give example inputs with values that it takes"
        ) from error


def _reason(error: BaseException) -> str:
    """The first line of what the user's code or torch raised; of what says nothing, the line of code."""
    cause = error.__cause__
    told = cause if isinstance(cause, Exception) and not isinstance(cause, AutoparError) else error
    raised_at = traceback.extract_tb(told.__traceback__)[-1:]
    lines = (*str(told).strip().splitlines(), *(frame.line for frame in raised_at))
    return f"{type(told).__name__}: {next(filter(None, lines), 'without a message')}"


def _plan(
    traced: Traced, cluster_or_plan: ClusterSpec | Plan, pin: Mapping[str, Any] | None, time_limit_s: float
) -> Plan:
    if isinstance(cluster_or_plan, Plan):
        return cluster_or_plan
    return plan_traced(traced, cluster_or_plan, Pins.parse(pin), Training(), time_limit_s=time_limit_s)


def _agree(
    ref: Reference, assignment: Assignment, tolerance: Tolerance, seed: int, micro_batched: MicroBatched | None
) -> Agreement:
    def located() -> str:
        return "" if micro_batched is not None else f"; {locate(ref, assignment, tolerance.widest, seed)}"

    try:
        agreement = simulate(ref, assignment, seed, micro_batched)
    except DivergedError as error:
        raise VerificationError(f"{error}{located()}") from error
    for wrong, where in agreement.beyond(tolerance)[:1]:
        allowed = f"{tolerance.of(where):.{0 if ref.is_exact else 1}e}"
        in_own = "" if ref.is_exact else f", in {tolerance.dtypes}"
        raise VerificationError(
            f"the {where} differs from the model's by {wrong:.2g}, relative ({allowed} is allowed{in_own}){located()}"
        )
    if agreement.miscounted:
        lines = "\n  ".join(("communication is not as predicted:", *agreement.miscounted))
        raise VerificationError(lines + _unseen(ref.traced.captured.functions))
    return agreement


def _unseen(functions: Sequence[Carried]) -> str:
    """The Functions that are taken to keep all tensors, and what to do about it; ``""`` if there are none."""
    names = [each.name for each in functions if any(known.is_unseen for known in each.described.values())]
    if not names:
        return ""
    return (
        f"\n  of {', '.join(names)} it is not known what backward asks for, so all that floats was counted: give "
        "autopar.register an example=, which shows it"
    )


def space_on(
    traced: Traced,
    mesh: Mesh,
    cluster: ClusterSpec,
    pins: Pins,
    folded: Folded | None = None,
    stages: int = 1,
    training: Training | None = None,
) -> Space:
    """Every decision to take for a captured model on the mesh of a stage, for its own folding or a given one."""
    folded = fold(traced.graph) if folded is None else folded
    return pinned_space(traced.graph, folded, mesh, cluster, pins, training or Training(), stages)


def decide_on(traced: Traced, mesh: Mesh, cluster: ClusterSpec, pins: Pins, time_limit_s: float = 60.0) -> Assignment:
    """The fastest plan found on one mesh, memory unlimited."""
    space = space_on(traced, mesh, cluster, pins)
    return assignment_of(space, solve(space.problem(None), time_limit_s=time_limit_s).choices)


def _transfer(assignment: Assignment, space: Space) -> tuple[Assignment | None, str]:
    """The same decisions for another space of the same variables; ``None``, and what cannot be decided so, if not."""
    chosen: dict[Variable, Choice | Layout] = {}
    for variable in space.variables:
        wanted = _key(assignment.chosen[variable])
        found = next((option for option in space.options[variable] if _key(option) == wanted), None)
        if found is None:
            return None, space.describe(variable)
        chosen[variable] = found
    return Assignment(space, chosen, assignment.recompute), ""


def _key(decision: Choice | Layout) -> object:
    return (decision.operands, decision.results) if isinstance(decision, Choice) else decision


def _shrunk(mesh: Mesh) -> Mesh:
    """A mesh of the same axes, small enough to simulate; of least divisors, so that what divided still does."""
    least = {axis.name: _least_divisor(axis.size) for axis in mesh.axes}
    if math.prod(least.values()) <= SIMULATED_RANKS:
        return Mesh.of(**least)
    return Mesh.of(**{name: min(size, 2) for name, size in least.items()})


def _least_divisor(size: int) -> int:
    return next((d for d in range(2, size + 1) if size % d == 0), 1)


def _describe(mesh: Mesh) -> str:
    return " x ".join(f"{axis.name} {axis.size}" for axis in mesh.axes)


def _draws(traced: Traced) -> bool:
    """Whether any operator drops values at random."""
    return any(map(drops, traced.graph.nodes))


def _tensors(model: nn.Module, *trees: Any) -> list[Tensor]:
    given = [leaf for leaf in pytree.tree_leaves(trees) if isinstance(leaf, Tensor)]
    return [*model.parameters(), *model.buffers(), *given]
