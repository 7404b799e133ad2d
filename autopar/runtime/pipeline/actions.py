"""Stage actions: forward and backward of one micro-batch in one stage."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopar.runtime.autograd.split_backward import Later, backward_of_inputs
from autopar.runtime.pipeline.outputs import Outputs
from autopar.runtime.pipeline.stage import Stage
from autopar.runtime.pipeline.step_spec import StepSpec
from autopar.runtime.pipeline.used_parameters import UsedParameters


class _ReceivedGradient:
    """Where the gradient of a received value arrives that nothing holds but what saves it.

    Attributes:
        grad: when backward is over, if any came.
    """

    def __init__(self, value: Tensor):
        self.grad: Tensor | None = None
        self._like, self._shape = value.new_empty(0), value.shape

    def zeros(self) -> Tensor:
        """A gradient in place of one that did not come."""
        return self._like.new_zeros(self._shape)


class _GradientSink(torch.autograd.Function):
    """Identity; the gradient goes no further."""

    @staticmethod
    def forward(ctx, _, arrived, value):  # type: ignore[no-untyped-def]
        ctx.arrived = arrived
        return value.detach()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.arrived.grad = grad
        return None, None, None


InFlight = tuple[list[Tensor | _ReceivedGradient], list[GradientEdge | None], list[Tensor]]
"""What came in (if what blocks save may leave, only where its gradients arrive), where its values went out (these
themselves are the next stage's to keep) and the loss, if it is there."""


class StageActions:
    """What a schedule's actions do in one step.

    Args:
        started: how often random numbers were drawn before the step.
        in_flight: what is held from forward to backward, of a stage and a micro-batch.
    """

    def __init__(
        self,
        spec: StepSpec,
        parameters: UsedParameters,
        outputs: Outputs,
        trains: bool,
        started: int,
        in_flight: dict[tuple[int, int], InFlight],
    ):
        self._spec, self._parameters, self._outputs = spec, parameters, outputs
        self._trains, self._started, self._in_flight = trains, started, in_flight
        self._later: dict[tuple[int, int], Later] = {}

    def forward(self, stage: Stage, micro_batch: int) -> None:
        """Forward of one micro-batch."""
        received: list[Tensor] = []
        if stage.number:
            received = self._spec.links.take((stage.number, "F", micro_batch))
            self._spec.recorder.arrived()
            wanted = zip(received, stage.received, strict=True)
            received = [t.detach().requires_grad_(self._trains and passed.differentiable) for t, passed in wanted]
        inputs: list[Tensor | _ReceivedGradient] = [*received]
        if self._spec.offload is not None and self._spec.offload.saved.may_leave:
            inputs = [_ReceivedGradient(t) for t in received]
            gate = torch.empty(0, requires_grad=True)
            pairs = zip(received, inputs, strict=True)
            received = [_GradientSink.apply(gate, end, t) if t.requires_grad else t for t, end in pairs]
        counts = self._parameters.counts[stage.number]
        self._spec.state.random.calls = self._started + sum(self._spec.draws[: stage.number])
        used, leaves = self._parameters.used[stage.number], self._parameters.leaves(stage, micro_batch)
        results = stage.program(*used, *leaves, *received, *counts)
        sent, leaving = results[: len(stage.sent)], results[len(stage.sent) :]
        if stage.number + 1 < len(self._spec.draws):
            sent = [value.to(form.dtype) for value, form in zip(sent, stage.sent, strict=True)]
            self._spec.recorder.made()
            self._spec.links.put((stage.number + 1, "F", micro_batch), [value.detach() for value in sent])
        roots = []
        for position, value in zip(stage.outputs, leaving, strict=True):
            if self._spec.outputs[position].is_kept or not self._trains:
                self._outputs.put(position, value, micro_batch)
            self._parameters.carry(self._spec.outputs[position].buffer, value)
            if position == self._spec.loss:
                roots.append(value)
        if self._spec.offload is not None:
            torch.clear_autocast_cache()  # which would hold all parameters on the device, cast, until the step is over
        if self._trains:
            ends = [_edge(value) for value, form in zip(sent, stage.sent, strict=True) if form.differentiable]
            self._in_flight[stage.number, micro_batch] = inputs, ends, roots

    def backward(self, stage: Stage, micro_batch: int, seed: Tensor, split: bool) -> None:
        """Backward of one micro-batch, of a loss that is scaled by ``seed``.

        Args:
            split: gradients of weights later, where something waits for the others.
        """
        received, ends, roots = self._in_flight.pop((stage.number, micro_batch))
        came: list[Tensor] = []
        if stage.number + 1 < len(self._spec.draws):
            came = self._spec.links.take((stage.number, "B", micro_batch))
            self._spec.recorder.arrived()
        pairs = [(edge, grad) for edge, grad in zip(ends, came, strict=True) if edge is not None]
        seed = self._spec.share_of_loss * seed
        pairs += [(edge, seed.to(loss)) for loss in roots if (edge := _edge(loss)) is not None]
        inputs = [t for t, passed in zip(received, stage.received, strict=True) if passed.differentiable]
        found: tuple[Tensor | None, ...] = (None,) * len(inputs)
        if pairs:
            starts, gradients = zip(*pairs, strict=True)
            with torch.autocast(gradients[0].device.type, enabled=False):
                if split:
                    weights = tuple(t for t in self._parameters.used[stage.number] if t.requires_grad)
                    leaves = [t for t in inputs if isinstance(t, Tensor)]
                    found, later = backward_of_inputs(tuple(pairs), leaves, weights)
                    self._later[stage.number, micro_batch] = later
                else:
                    torch.autograd.backward(starts, gradients)
                    found = tuple(t.grad for t in inputs)
        if stage.number:
            back = [_zeros_like(t) if grad is None else grad for t, grad in zip(inputs, found, strict=True)]
            self._spec.recorder.made()
            self._spec.links.put((stage.number - 1, "B", micro_batch), back)

    def backward_of_weights(self, stage: Stage, micro_batch: int) -> None:
        """What a split backward left over."""
        later = self._later.pop((stage.number, micro_batch), None)
        if later is not None and later.weights:
            with torch.autocast(later.weights[0].device.type, enabled=False):
                later.run()


def _zeros_like(value: Tensor | _ReceivedGradient) -> Tensor:
    return value.zeros() if isinstance(value, _ReceivedGradient) else torch.zeros_like(value)


def _edge(value: Tensor) -> GradientEdge | None:
    """Where the gradient of a value arrives, if it has one."""
    return get_gradient_edge(value) if value.requires_grad else None
