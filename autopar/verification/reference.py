"""One step of the original model, which a plan's step is compared with.

Usually it is that of a float64 twin (:mod:`autopar.verification.float64`), where errors stand out from rounding. A
model that does not run in float64 (grouped products and kernels take narrow dtypes alone) is run as it is, and compared
in its own dtypes, with tolerances that are measured (:mod:`autopar.verification.rounding`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autopar.capture.capture import LossFn, _caches_off, _example_inputs, _WithLoss, output_name
from autopar.capture.model_state import Snapshot
from autopar.capture.transformers_experts import experts_in_loops
from autopar.driver.trace import Traced, trace
from autopar.graph import dump
from autopar.graph.module_walk import ModuleWalk
from autopar.verification.float64 import copied, dropping_nothing, exact, is_narrow, twin, widen, widened
from autopar.verification.micro_batch_norm import normalizing_by_micro_batch
from autopar.verification.rounding import RandomRounding, Tolerance, measured
from planner.base.errors import CaptureError, VerificationError
from planner.cost.cluster import ClusterSpec
from planner.ir.graph import Graph
from planner.tables.tables_plan import TablesPlan


@dataclass(frozen=True)
class StepValues:
    """What a step of the original gave.

    Attributes:
        outputs: what it returned, flattened; ``names`` aligns with it.
        gradients, buffers: after the step, by name.
    """

    outputs: tuple[Any, ...]
    names: tuple[str, ...]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    @property
    def values(self) -> dict[str, Tensor]:
        """Every tensor, by what messages call it."""
        outputs = zip(self.names, self.outputs, strict=True)
        return {
            **{output(name): value for name, value in outputs if isinstance(value, Tensor)},
            **{gradient(name): value for name, value in self.gradients.items()},
            **{buffer(name): value for name, value in self.buffers.items()},
        }

    @property
    def largest_gradient(self) -> float:
        """The largest number in any gradient."""
        return max((_wide(g).abs().max().item() for g in self.gradients.values() if g.numel()), default=0.0)

    def error(self, name: str, got: Tensor, expected: Tensor) -> float:
        """The relative error of a value, by what messages call it."""
        largest = self.largest_gradient if name.startswith(gradient("")) else 0.0
        return relative_error(got, expected, largest)


def output(name: str) -> str:
    """What messages call an output."""
    return f"output {name}"


def gradient(name: str) -> str:
    """What messages call the gradient of a parameter."""
    return f"gradient of {name}"


def buffer(name: str) -> str:
    """What messages call a buffer's value after the step."""
    return f"buffer {name}"


@dataclass(frozen=True)
class Reference(StepValues):
    """One step of the original model.

    Attributes:
        model: what ran, as it was before the step: the float64 twin, or a copy.
        traced: its graph, or one that stands for it (:func:`aligned`).
        args, kwargs: the global batch.
        loss: position of the loss among the outputs, ``None`` if there is none (then no gradients).
        loss_fn: what it was computed with.
        is_exact: it is in float64, not in the model's own dtypes.
        normalized_apart: into how many micro-batches its batch norms cut what they normalise.
    """

    model: nn.Module
    traced: Traced
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: int | None
    loss_fn: LossFn | None = None
    is_exact: bool = True
    normalized_apart: int = 1

    def placing(self, tables: TablesPlan | None, cluster: ClusterSpec) -> Reference:
        """The same, whose graph has tables in slabs as a plan has them; values are of the model as it is."""
        return replace(self, traced=self.traced.placing(tables, cluster))

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Inside, programs compute as the step did: in float64 or as they are, and without dropout."""
        return exact() if self.is_exact else dropping_nothing()

    def tolerance(self, ranks: int, rtol: float) -> Tolerance:
        """How far a step on so many ranks may be from this one.

        Args:
            rtol: the relative error allowed in float64.
        """
        if self.is_exact:
            return Tolerance("float64", rtol)

        def again(mode: RandomRounding) -> Mapping[str, Tensor]:
            model = copied(self.model)
            return _step(model, self.args, self.kwargs, self.loss_fn, self.loss, self.normalized_apart, mode).values

        with dropping_nothing():
            found = measured(self.values, again, self.error, ranks)
        return Tolerance(_own_dtypes(self.model, self.args, self.kwargs), rtol, found)


def reference(
    model: nn.Module,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
    normalized_apart: int = 1,
) -> Reference:
    """Capture the float64 twin of ``model`` and run one step of it.

    Args:
        model, example_args, example_kwargs, loss_fn: as in :func:`autopar.verify`.
        normalized_apart: as in :class:`Reference`.

    Raises:
        CaptureError: as for the model; or since tensors outside of it are of another type than the twin's.
    """
    args, kwargs = widen(_example_inputs(model, example_args, example_kwargs))
    before, stepped = twin(model), twin(model)
    with exact(), dump.paused():
        try:
            traced = trace(before, args, kwargs, loss_fn)
        except CaptureError as error:
            _refuse_narrow(stepped if loss_fn is None else _WithLoss(stepped, loss_fn), error)
            raise
        return _reference(before, stepped, traced, args, kwargs, loss_fn, True, normalized_apart)


def own_reference(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_fn: LossFn | None = None,
    normalized_apart: int = 1,
) -> Reference:
    """Capture a copy of ``model`` in its own dtypes, without dropout, and run one step of it."""
    before, stepped = copied(model), copied(model)
    with dropping_nothing(), dump.paused():
        traced = trace(before, args, kwargs, loss_fn)
        return _reference(before, stepped, traced, args, dict(kwargs), loss_fn, False, normalized_apart)


def _reference(
    before: nn.Module,
    stepped: nn.Module,
    traced: Traced,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: LossFn | None,
    is_exact: bool,
    normalized_apart: int,
) -> Reference:
    loss = _loss_position(traced)
    step = _step(stepped, args, kwargs, loss_fn, loss, normalized_apart)
    return Reference(
        **vars(step),
        model=before,
        traced=traced,
        args=args,
        kwargs=kwargs,
        loss=loss,
        loss_fn=loss_fn,
        is_exact=is_exact,
        normalized_apart=normalized_apart,
    )


def _step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_fn: LossFn | None,
    loss: int | None,
    normalized_apart: int,
    mode: contextlib.AbstractContextManager[Any] | None = None,
) -> StepValues:
    """Run a step of a model; inside ``mode``, forward and backward.

    Experts of Transformers run as loops: grouped products know no float64.
    """
    whole = model if loss_fn is None else _WithLoss(model, loss_fn)
    with mode or contextlib.nullcontext(), _caches_off(model), experts_in_loops():
        with normalizing_by_micro_batch(model, normalized_apart):
            returned = whole(*args, **kwargs)
        paths, _ = pytree.tree_flatten_with_path(returned)
        outputs = tuple(value for _, value in paths)
        if loss is not None:
            if not bool(torch.isfinite(outputs[loss])):
                found = f"{type(model).__name__}'s loss is {outputs[loss].item()}"
                raise VerificationError(
                    f"{found} on this batch, so that no gradients can be compared: give example inputs, and "
                    "parameters, with which it is finite"
                    if mode is None
                    else f"{found} where every operator's result is off by a rounding error, though it is finite as it "
                    "is: verify measures so how far values may be apart, since the model does not run in float64, and "
                    "can say nothing of it"
                )
            # From a tensor, backward would leave the mode, which what is checkpointed runs in again.
            edge, start = torch.autograd.graph.get_gradient_edge(outputs[loss]), torch.ones_like(outputs[loss])
            torch.autograd.backward(edge, start)
    names = tuple(output_name(path) for path, _ in paths)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    kept = tuple(value.detach() if isinstance(value, Tensor) else value for value in outputs)
    return StepValues(kept, names, gradients, dict(model.named_buffers()))


def _refuse_narrow(twin: nn.Module, error: CaptureError) -> None:
    """Say which tensors stay in their type when a model's twin, which could not be captured, is in float64."""
    found = [name.words for name in Snapshot(ModuleWalk(twin)).shared if is_narrow(name.value)]
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


def _own_dtypes(model: nn.Module, *trees: Any) -> str:
    """The narrow types of a model and its inputs: ``bfloat16 and float32``."""
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(trees)]
    found = {str(t.dtype).removeprefix("torch.") for t in tensors if isinstance(t, Tensor) and is_narrow(t)}
    return " and ".join(sorted(found))


# ---- errors ----------------------------------------------------------------------------------------------------------


def relative_error(got: Tensor, expected: Tensor, largest: float = 0.0) -> float:
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
    negligible = max(1e-9, torch.finfo(expected.dtype).eps) * largest
    got, expected = _wide(got), _wide(expected)
    finite = torch.isfinite(expected)
    if not torch.equal(got[~finite], expected[~finite]):
        return math.inf
    difference = torch.where(finite, got - expected, 0).abs().max().item()
    scale = torch.where(finite, expected, 0).abs().max().item()
    scale = max(scale, largest) if scale < negligible else scale
    if math.isnan(difference):
        return math.inf
    return difference / scale if scale else difference


def _wide(value: Tensor) -> Tensor:
    """A tensor in a type in which differences do not round."""
    return value.to(torch.complex128 if value.is_complex() else torch.float64)
