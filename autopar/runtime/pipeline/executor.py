"""Pipeline executor: forward and backward of every micro-batch of a step, in the order of a schedule.

A pipeline is only full if the backward of one micro-batch runs beside the forward of another. So all of it happens when
the model is called, and ``loss.backward()`` hands the gradients over
(:mod:`autopar.runtime.autograd.gradient_handover`). By how much the loss is scaled is known only then, so a step
assumes the scale of the one before, a power of two close to it. Where nobody wants gradients only forwards run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from autopar.runtime.autograd.gradient_handover import handing_over, power_of_two, refusing
from autopar.runtime.host.error_notes import add_note
from autopar.runtime.pipeline.actions import InFlight, StageActions
from autopar.runtime.pipeline.outputs import Outputs
from autopar.runtime.pipeline.p2p import Messages
from autopar.runtime.pipeline.stage import programs_in
from autopar.runtime.pipeline.step_spec import StepSpec
from autopar.runtime.pipeline.used_parameters import UsedParameters
from planner.base.errors import InputError
from planner.solve.pipeline.schedule import Action, is_left_over

_NO_LOSS = (
    "a micro-batched step finds the gradients of one loss, the first scalar that the model returns, and backward was "
    "asked for those of another output: detach it, or add it to the loss inside the model or in loss_fn"
)
_FROZEN = (
    "all parameters of this rank's stages were frozen after planning, and in a norm over all gradients or a GradScaler "
    "the ranks of other stages would wait for theirs: freeze parameters before planning, or leave some of every rank's "
    "trained; without training call the model under torch.no_grad()"
)


class PipelineStep:
    """Runs micro-batched steps; takes the leaves of the model and returns its outputs, as a program of a step that is
    not micro-batched does.

    Attributes:
        left: where a step leaves backwards to the next one, the step that did.
    """

    def __init__(self, spec: StepSpec):
        self.spec = spec
        self.left: _Run | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins with nothing left to do."""
        return {**self.__dict__, "left": None}

    @property
    def borrowed(self) -> set[str]:
        """The leaves whose memory the backwards that are left need as it is."""
        return set() if self.left is None else self.left.parameters.borrowed()

    @property
    def programs(self) -> list[tuple[str, GraphModule]]:
        """All programs by name."""
        found: list[tuple[str, GraphModule]] = []
        for number, stage in self.spec.stages.items():
            parts = [("gather", stage.gather), ("count", stage.count), ("stage", stage.program)]
            found += programs_in(stage.program)
            found += [(f"{name}_{number}", part) for name, part in parts if part is not None]
        return found

    def __call__(self, *leaves: Tensor) -> tuple[Tensor | None, ...]:
        """Outputs in order; ``None`` for those, the loss excepted, that other processes have or that are not kept."""
        given = dict(zip(self.spec.leaves, leaves, strict=True))
        trains = torch.is_grad_enabled() and self.spec.trained
        if trains and self.spec.loss is None:
            raise InputError(
                "a micro-batched step runs its own backward, so the model must return its loss, or be given a loss_fn; "
                "to run it forward only, call it under torch.no_grad()"
            )
        before = None
        if trains:
            before, self.left = self.left, None
        run = _Run(self.spec, given, trains, self._loss_scale, before)
        with torch.set_grad_enabled(trains):
            run.forward_and_backward()
        results = run.results()
        if trains:
            complete = before if self.spec.overlaps else run
            if self.spec.overlaps:
                self.left = run.leave()
            self._let_backward_begin(results, given, complete)
        return tuple(results)

    def _let_backward_begin(self, results: list[Any], given: Mapping[str, Tensor], complete: _Run | None) -> None:
        """From the loss, which hands over the gradients of a complete step, and from no other output."""
        parameters = {name: leaf for name, leaf in given.items() if leaf.requires_grad}
        is_frozen = not parameters and self.spec.trainers is not None and self.spec.trainers.group.size() > 1
        found = {} if complete is None else {name: leaf.grad for name, leaf in complete.parameters.local.items()}
        gradients = [found.get(name) for name in parameters]
        seed = self._loss_scale if complete is None else complete.seed
        for position, leaving in enumerate(self.spec.outputs):
            value = results[position]
            if position == self.spec.loss:
                results[position] = (
                    refusing(value, _FROZEN)
                    if is_frozen
                    else handing_over(value, list(parameters.values()), gradients, seed, self._scaled)
                )
            elif leaving.differentiable and value is not None:
                results[position] = refusing(value, _NO_LOSS)

    @property
    def _loss_scale(self) -> Tensor:
        scale = self.spec.state.loss_scale
        return torch.ones(()) if scale is None else scale

    def _scaled(self, scale: Tensor) -> None:
        """The loss was scaled so; the next step assumes the same."""
        self.spec.state.loss_scale = power_of_two(scale)


class _Run:
    """One step: the actions in order, and what the next step takes over.

    Attributes:
        before: the step whose last backwards this one does.
        in_flight: what is held from forward to backward, of a stage and a micro-batch.
        seed: the scale of the loss that its backwards assume.
        messages: what came for backwards that are left.
    """

    def __init__(self, spec: StepSpec, given: Mapping[str, Tensor], trains: bool, seed: Tensor, before: _Run | None):
        self.spec, self.trains, self.before, self.seed = spec, trains, before, seed
        self.parameters = UsedParameters(spec, given, trains)
        self.outputs = Outputs(spec.outputs, spec.micro_batches.count)
        self.started = spec.state.random.calls
        self.in_flight: dict[tuple[int, int], InFlight] = {} if before is None else before.in_flight
        self.messages: Messages = {}

    def forward_and_backward(self) -> None:
        """Everything, in order."""
        spec = self.spec
        spec.recorder.open()
        spec.links.open(self.trains, None if self.before is None else self.before.messages)
        spec.recorder.begin("gather")
        self.parameters.gather()
        spec.recorder.end()
        actions = StageActions(spec, self.parameters, self.outputs, self.trains, self.started, self.in_flight)
        try:
            for action in spec.first if self.before is None else spec.actions:
                if action.kind == "F" or self.trains:
                    self._act(actions, action)
        finally:
            spec.state.random.calls = self.started + sum(spec.draws)
            torch.clear_autocast_cache()  # of the used parameters, which are others in every step
        self.messages = spec.links.close()
        assert spec.overlaps or not self.messages, "a message that nobody took"
        complete = self.before if spec.overlaps else self
        if self.trains and complete is not None:
            spec.recorder.begin("reduce")
            if spec.offload is not None:
                for name, gradient in spec.offload.finish_micro_batches().items():
                    self.parameters.local[spec.offloaded[name]].grad = gradient
            complete.parameters.reduce()
            spec.recorder.end()
        spec.recorder.close()

    def _act(self, actions: StageActions, action: Action) -> None:
        stage, kind, micro_batch = self.spec.stages[action.stage], action.kind, action.micro_batch
        self.spec.micro_batches.now = micro_batch % self.spec.micro_batches.count
        if self.spec.offload is not None:
            self.spec.offload.go_on_with(self.spec.micro_batches.now)
        self.spec.recorder.begin(kind, action)
        try:
            if kind == "F":
                actions.forward(stage, micro_batch)
            elif kind == "W":
                actions.backward_of_weights(stage, micro_batch)
            else:
                its = self if micro_batch >= 0 or self.before is None else self.before
                actions.backward(stage, micro_batch, its.seed, split=kind == "I")
        except Exception as error:
            add_note(error, f"on rank {dist.get_rank()}, in action {action}: {_written(action)}")
            raise
        self.spec.recorder.end()

    def leave(self) -> _Run:
        """What the next step needs of this one, whose micro-batches it counts below 0."""
        count = self.spec.micro_batches.count
        self.before = None
        self.in_flight = {(stage, number - count): held for (stage, number), held in self.in_flight.items()}
        self.messages = {(stage, kind, number - count): sent for (stage, kind, number), sent in self.messages.items()}
        self.parameters.leave()
        self.outputs = Outputs(self.spec.outputs, count)
        return self

    def results(self) -> list[Any]:
        """The outputs, micro-batches put together."""
        found: list[Any] = []
        for position, leaving in enumerate(self.spec.outputs):
            whole = self.outputs.get(position)
            if position == self.spec.loss:
                # Ranks divide by what the loss's own began with, whatever each was told of the scale.
                whole, self.seed = self.spec.links.share(whole, self.seed, leaving.stage, leaving.dtype)
            found.append(whole)
        return found


def _written(action: Action) -> str:
    """``forward of micro-batch 0 in stage 2``."""
    what = {"F": "forward", "B": "backward", "I": "backward (of inputs)", "W": "backward (of weights)"}[action.kind]
    late = ", counted from the end of the batch before," if is_left_over(action) else ""
    return f"{what} of micro-batch {action.micro_batch}{late} in stage {action.stage}"
