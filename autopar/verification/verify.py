"""Checks in one process that a plan's program computes what the model computes.

Three independent checks. The emitted program is type-checked for gradient correctness at the plan's real
mesh size (:mod:`autopar.verification.typecheck`). It is run on every rank of a small mesh, forward and backward, in
float64, beside the original model. And the collectives that this run makes are counted, call by call,
against the plan's prediction.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.tensor import DTensor

from autopar.capture.capture import LossFn, _caches_off, _example_inputs, _WithLoss, path_name
from autopar.capture.model_state import Snapshot
from autopar.driver.arguments import check_arguments, given_plan
from autopar.driver.plan import assign, plan_traced, staged
from autopar.driver.trace import Traced, trace
from autopar.emit.build import MicroBatched
from autopar.functions.carry import Carried
from autopar.graph.module_walk import Walk
from autopar.runtime.pipeline.executor import PipelineStep
from autopar.runtime.spmd.mesh import groups_of
from autopar.verification.collective_counter import count_collectives, count_messages, differences
from autopar.verification.divergence import first_divergence, reference_values
from autopar.verification.float64 import exact, is_narrow, twin, widen, widened
from autopar.verification.simulator import DivergedError, Simulation
from autopar.verification.typecheck import TypeReport, typecheck
from planner.analysis.prediction import collectives
from planner.base.errors import CaptureError, PinError, VerificationError
from planner.cost.cluster import ClusterSpec
from planner.cost.model import CostModel
from planner.formulation.assignment import Assignment, assignment_of
from planner.formulation.constraints.filters import filters
from planner.formulation.constraints.pins import Pins
from planner.formulation.pipeline_pace import pace_of
from planner.formulation.resharding import Collective
from planner.formulation.search_space import Space
from planner.formulation.stage_boundaries import Exchange, exchanges
from planner.formulation.strategies import Choice, rules_of
from planner.formulation.training import Training
from planner.formulation.variables import Variable
from planner.ir.folding import Folded, fold, refold
from planner.ir.graph import Graph, Ref
from planner.ir.layout import Layout, Mesh
from planner.plan.plan import Plan
from planner.solve.choices import solve

RTOL = 1e-10
SIMULATED_RANKS = 12
"""A mesh of more ranks is simulated with its axes reduced to their least divisors."""


# ---- what the original computes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """One step of the original model in float64.

    Attributes:
        model: the float64 twin, as it was before the step.
        traced: its graph, or one that stands for it (:func:`aligned`).
        args, kwargs: the global batch.
        outputs: what it returned, flattened; ``names`` aligns with it.
        loss: position of the loss among the outputs, ``None`` if there is none (then no gradients).
        gradients, buffers: after the step, by name.
    """

    model: nn.Module
    traced: Traced
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Any, ...]
    names: tuple[str, ...]
    loss: int | None
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def reference(
    model: nn.Module,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
) -> Reference:
    """Capture the float64 twin of ``model`` and run one step of it.

    Raises:
        CaptureError: as for the model; or since tensors outside of it are of another type than the twin's.
    """
    args, kwargs = widen(_example_inputs(model, example_args, example_kwargs))
    before, stepped = twin(model), twin(model)
    whole = stepped if loss_fn is None else _WithLoss(stepped, loss_fn)
    with exact():
        try:
            traced = trace(before, args, kwargs, loss_fn)
        except CaptureError as error:
            _refuse_narrow(whole, error)
            raise
        with _caches_off(stepped):
            returned = whole(*args, **kwargs)
        paths, _ = pytree.tree_flatten_with_path(returned)
        outputs = tuple(value for _, value in paths)
        names = tuple(path_name(path) or "output" for path, _ in paths)
        loss = _loss_position(traced)
        if loss is not None:
            outputs[loss].backward()
    gradients = {name: p.grad for name, p in stepped.named_parameters() if p.grad is not None}
    kept = tuple(value.detach() if isinstance(value, Tensor) else value for value in outputs)
    return Reference(before, traced, args, kwargs, kept, names, loss, gradients, dict(stepped.named_buffers()))


def _refuse_narrow(twin: nn.Module, error: CaptureError) -> None:
    """Say which tensors stay in their type when a model's twin, which could not be captured, is in float64."""
    found = [name.words for name in Snapshot(Walk(twin)).shared if is_narrow(name.value)]
    if found:
        raise CaptureError(
            "values are compared in float64, in which the model cannot be captured. Tensors of a narrower type, which "
            f"are not the model's own, are in {', '.join(dict.fromkeys(found))}: register them as buffers, or keep "
            f"them in attributes of its modules.\n{error}"
        ) from error


def aligned(reference: Reference, traced: Traced) -> Reference:
    """``reference`` with a graph of the same operators as the model's own, whose decisions then apply to it.

    Args:
        traced: the model as it was captured for the plan.
    """
    if _wiring(reference.traced.graph) == _wiring(traced.graph):
        return reference
    exactly, constants = reference.traced.captured.constants, widen(dict(traced.captured.constants))
    if {name: c.shape for name, c in exactly.items()} == {name: c.shape for name, c in constants.items()}:
        constants = exactly  # computed in float64, not rounded before
    program = traced.captured.program
    leaves = tuple(leaf._replace(value=constants.get(leaf.name, leaf.value)) for leaf in program.leaves)
    captured = replace(traced.captured, program=replace(program, leaves=leaves))
    return replace(reference, traced=replace(traced, captured=captured, graph=widened(traced.graph)))


def _wiring(graph: Graph) -> object:
    """Every operator and what it reads; after a cast to what it is already, the tracer reads the operand on."""
    return [(node.name, node.op, node.inputs) for node in graph.nodes], graph.outputs, graph.updates


def _loss_position(traced: Traced) -> int | None:
    """Which of all outputs the loss is, see :attr:`planner.ir.graph.Graph.roots`."""
    nodes = [place for place, name in enumerate(traced.captured.outputs) if name is not None]
    return None if traced.graph.loss is None else nodes[traced.graph.loss]


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
    def worst(self) -> tuple[float, str]:
        """The largest relative error, and where it is."""
        every = {
            **{f"output {name}": e for name, e in self.outputs.items()},
            **{f"gradient of {name}": e for name, e in self.gradients.items()},
            **{f"buffer {name}": e for name, e in self.buffers.items()},
        }
        return max(((e, name) for name, e in every.items()), default=(0.0, "nothing"))

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
    with exact(), Simulation(reference.model, captured, assignment, seed, micro_batched) as simulation:
        return observed_step(reference, assignment, simulation)


def observed_step(reference: Reference, assignment: Assignment, simulation: Simulation) -> Agreement:
    """One step of a running simulation, compared with the original's."""
    module = simulation.module
    specs = module.interface.outputs
    args, kwargs = simulation.inputs(reference.args, reference.kwargs)
    if simulation.is_late:
        module(*args, **kwargs)
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
        if isinstance(expected, Tensor):
            layout = spec.layout if spec is not None else ()
            outputs[name] = _error(simulation.whole(got, layout, tuple(expected.shape)), expected)
    layouts = {leaf.name: leaf.layout for leaf in module.interface.leaves}
    own = dict(module.named_parameters())
    largest = max((g.abs().max().item() for g in reference.gradients.values()), default=0.0)
    # A parameter that the original's loss does not reach, or that is frozen, must not be trained.
    gradients = {
        name: math.inf
        for name, p in own.items()
        if p.grad is not None and name not in reference.gradients and _any_nonzero(p.grad)
    }
    for name, gradient in reference.gradients.items():
        got = own[name].grad if name in own else None
        if got is None:
            gradients[name] = _error(torch.zeros_like(gradient), gradient, largest)
        else:
            whole = simulation.whole(got, layouts[name], tuple(gradient.shape))
            gradients[name] = _error(whole, gradient, largest)
    buffers = {
        name: _error(simulation.whole(value, layouts[name], tuple(value.shape)), reference.buffers[name])
        for name, value in module.named_buffers()
        if name in layouts
    }
    wrong = (*differences(predicted, calls), *differences(between, sent))
    return Agreement(outputs, gradients, buffers, calls, sent, wrong)


def _any_nonzero(gradient: Tensor) -> bool:
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    parts = local._local_tensors.values() if isinstance(local, LocalTensor) else [local]
    return any(bool(part.any()) for part in parts)


def _error(got: Tensor, expected: Tensor, largest: float = 0.0) -> float:
    """Largest difference, relative to the largest value expected.

    Args:
        largest: the largest value of all tensors of the kind; one that is all rounding beside it (a key's
            bias has no gradient) is measured against it.
    """
    if got.shape != expected.shape:
        return math.inf
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(got, expected) else math.inf
    if not expected.numel():
        return 0.0
    finite = torch.isfinite(expected)
    if not torch.equal(got[~finite], expected[~finite]):
        return math.inf
    difference = torch.where(finite, got - expected, 0).abs().max().item()
    scale = torch.where(finite, expected, 0).abs().max().item()
    scale = max(scale, largest) if scale < 1e-9 * largest else scale
    if math.isnan(difference):
        return math.inf
    return difference / scale if scale else difference


def locate(reference: Reference, assignment: Assignment, rtol: float = RTOL, seed: int = 0) -> str:
    """The first operator whose forward result is not the original's, in words."""
    captured, model = reference.traced.captured, reference.model
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), **captured.constants}
    with exact(), torch.no_grad(), Simulation(model, captured, assignment, seed) as simulation:
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
        notes: what a reader should know of how the comparison was made.
    """

    model: str
    mesh: Mesh
    types: TypeReport
    simulated: Mesh | None
    agreement: Agreement | None
    notes: tuple[str, ...]

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
        if self.agreement is not None and self.simulated is not None:
            for what, errors in (
                ("outputs", self.agreement.outputs),
                ("gradients", self.agreement.gradients),
                ("buffers", self.agreement.buffers),
            ):
                if errors:
                    name = max(errors, key=lambda n: errors[n])
                    lines.append(
                        f"  {what:<12} {len(errors)} equal on {_describe(self.simulated)}, "
                        f"largest relative error {errors[name]:.1e} ({name})"
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
        rtol: largest relative error allowed, in float64.

    Raises:
        VerificationError: a type is wrong, a value differs (names the first module that does), or a collective
            was not predicted.
        PlanError: the plan does not fit the model.
    """
    if not isinstance(cluster_or_plan, ClusterSpec):
        cluster_or_plan = given_plan(cluster_or_plan, "cluster_or_plan", "a ClusterSpec, a Plan,")
    cluster = cluster_or_plan.cluster if isinstance(cluster_or_plan, Plan) else cluster_or_plan
    check_arguments(model, cluster, example_args, example_kwargs, pin)
    if isinstance(cluster_or_plan, Plan) and (pin or mesh):
        raise PinError("a plan is already decided, so pin and mesh have nothing left to fix: give a cluster instead")
    traced = trace(model, example_args, example_kwargs, loss_fn)
    assignment, micro_batched = _decide(traced, cluster_or_plan, pin, mesh, time_limit_s)
    real = assignment.space.mesh
    types = typecheck(traced.captured, assignment, micro_batched)
    notes: list[str] = []
    args, kwargs = _example_inputs(model, example_args, example_kwargs)
    if any(t.is_meta for t in _tensors(model, args, kwargs)):
        notes.append("the model or its batch is on the meta device: types were checked, values were not")
        return Verification(traced.name, real, types, None, None, tuple(notes))
    ref = aligned(reference(model, args, kwargs, loss_fn), traced)
    small = real if real.size <= SIMULATED_RANKS else _shrunk(real.micro_batched(1)).micro_batched(real.micro_batches)
    like = refold(assignment.space.folded, ref.traced.graph)
    training = Training(unsharding=assignment.space.unsharding)
    space = space_on(ref.traced, small, cluster, Pins.parse(None), like, assignment.space.stages, training)
    simulated, missing = _transfer(assignment, space)
    if simulated is None:
        notes.append(
            f"WARNING: {real.size} ranks are too many to simulate, and the layout of {missing} does not exist on "
            f"{_describe(small)}: values were not compared. Verify a plan for fewer devices with the same pins, or a "
            "model whose sizes divide by them"
        )
        return Verification(traced.name, real, types, None, None, tuple(notes))
    if small != real:
        notes.append(f"{real.size} ranks are too many to simulate: values were compared on {_describe(small)}")
    if _draws(traced):
        notes.append("dropout was switched off for the comparison")
    if ref.loss is None:
        notes.append("the model returns no differentiable scalar: outputs were compared, gradients were not")
    agreement = _agree(ref, simulated, rtol, seed, micro_batched)
    return Verification(traced.name, real, types, small, agreement, tuple(notes))


def _decide(
    traced: Traced,
    cluster_or_plan: ClusterSpec | Plan,
    pin: Mapping[str, Any] | None,
    mesh: Mapping[str, int] | None,
    time_limit_s: float,
) -> tuple[Assignment, MicroBatched | None]:
    if isinstance(cluster_or_plan, Plan):
        return staged(cluster_or_plan, assign(traced, cluster_or_plan))
    pins = Pins.parse(pin)
    if mesh is not None:
        return decide_on(traced, Mesh.of(**mesh), cluster_or_plan, pins, time_limit_s), None
    plan = plan_traced(traced, cluster_or_plan, pins, Training(), time_limit_s=time_limit_s)
    return staged(plan, assign(traced, plan))


def _agree(
    ref: Reference, assignment: Assignment, rtol: float, seed: int, micro_batched: MicroBatched | None
) -> Agreement:
    def located() -> str:
        return "" if micro_batched is not None else f"; {locate(ref, assignment, rtol, seed)}"

    try:
        agreement = simulate(ref, assignment, seed, micro_batched)
    except DivergedError as error:
        raise VerificationError(f"{error}{located()}") from error
    worst, where = agreement.worst
    if worst > rtol:
        raise VerificationError(
            f"the {where} differs from the model's by {worst:.2g}, relative ({rtol:.0e} is allowed){located()}"
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
    rules = rules_of(traced.graph)
    folded = fold(traced.graph) if folded is None else folded
    kept = filters(pins, traced.graph, rules, mesh)
    pace = pace_of(stages, mesh.micro_batches, pins.schedule)
    return Space(folded, mesh, CostModel(cluster), training or Training(), rules, *kept, pace=pace)


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
    return any(("dropout" in node.op and node["p"]) or node["dropout_p"] for node in traced.graph.nodes)


def _tensors(model: nn.Module, *trees: Any) -> list[Tensor]:
    given = [leaf for leaf in pytree.tree_leaves(trees) if isinstance(leaf, Tensor)]
    return [*model.parameters(), *model.buffers(), *given]
