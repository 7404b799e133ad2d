"""Step: a micro-batched step, forward and backward of every micro-batch in the order of a schedule.

A pipeline is only full if the backward of one micro-batch runs beside the forward of another. So all of it happens when
the model is called, and ``loss.backward()`` hands the gradients over
(:mod:`autopar.runtime.autograd.gradient_handover`). By how much the loss is scaled is known only then, so a step
assumes the scale of the one before, a power of two close to it. Where nobody wants gradients only forwards run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup
from torch.fx import GraphModule

from autopar.runtime.autograd.gradient_handover import handing_over, power_of_two, refusing
from autopar.runtime.autograd.recompute import memory_of
from autopar.runtime.autograd.split_backward import Later, backward_of_inputs
from autopar.runtime.host.error_notes import add_note
from autopar.runtime.offload.executor import Carrier
from autopar.runtime.pipeline.outputs import Leaving, Outputs
from autopar.runtime.pipeline.p2p import Mail, Messages
from autopar.runtime.pipeline.stage import Stage, programs_in
from autopar.runtime.pipeline.trace import Recorder
from autopar.runtime.spmd.micro_batch import MicroBatches
from autopar.runtime.spmd.run_state import RunState
from planner.base.errors import InputError
from planner.solve.pipeline.schedule import Action, is_left_over

_NO_LOSS = (
    "a micro-batched step finds the gradients of one loss, the first scalar that the model returns, and backward was "
    "asked "
    "for those of another output: detach it, or add it to the loss inside the model or in loss_fn"
)
_FROZEN = (
    "all parameters of this rank's stages were frozen after planning, and in a norm over all gradients or a GradScaler "
    "the ranks of other stages would wait for theirs: freeze parameters before planning, or leave some of every rank's "
    "trained; without training call the model under torch.no_grad()"
)


@dataclass(frozen=True)
class Trainers:
    """The ranks of a pipeline that hold parameters that are trained.

    Attributes:
        alike: whether their parameters have the same dtypes.
    """

    group: ProcessGroup
    alike: bool


@dataclass(frozen=True)
class Tie:
    """Parameters that several ranks of a pipeline hold, each for its own stages.

    Attributes:
        leaves: their names.
        group: the ranks that hold them.
        first: whether this is the first of these ranks.
    """

    leaves: tuple[str, ...]
    group: ProcessGroup
    first: bool


class Step:
    """Runs a step's actions; takes the leaves of the model and returns its outputs, as a program of one micro-batch
    does.

    Args:
        stages: those of this process.
        actions: its actions in order; where a step takes over backwards from the one before, those of micro-batches
            below 0.
        leaves: the names of all leaves, in the order in which they are given.
        split_leaves: the leaves of which a micro-batch takes a part -> the dim along which micro-batches lie behind one
            another.
        outputs: the outputs of the model.
        loss: the position of the output that backward starts at, if there is one.
        draws: how often each stage of the model draws random numbers for a micro-batch.
        trained: whether the model has parameters that are trained, on this process or another.
        recorder: of what is done when.
        ties: the parameters that other processes hold too.
        trainers: who trains parameters, where this rank does and stages are on several.
        carrier: what moves parameters and gradients, if they move; ``carried``: the names that it has of them -> those
            of the leaves.

    Attributes:
        first: the actions of a step that nothing is left to.
        overlaps: whether a step takes over backwards from the one before, and hands over the gradients of that one.
        left: where a step leaves backwards to the next one, the step that did.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        actions: Sequence[Action],
        *,
        leaves: Sequence[str],
        split_leaves: Mapping[str, int],
        outputs: Sequence[Leaving],
        loss: int | None,
        micro_batches: MicroBatches,
        state: RunState,
        mail: Mail,
        draws: Sequence[int],
        trained: bool,
        recorder: Recorder,
        ties: Sequence[Tie] = (),
        trainers: Trainers | None = None,
        carrier: Carrier | None = None,
        carried: Mapping[str, str] | None = None,
    ):
        self.stages = {stage.number: stage for stage in stages}
        self.first = [action for action in actions if not is_left_over(action)]
        self.overlaps = len(self.first) < len(actions)
        self.actions, self.leaves, self.split_leaves, self.outputs, self.loss = (
            actions,
            leaves,
            split_leaves,
            outputs,
            loss,
        )
        self.micro_batches, self.state, self.mail, self.draws = micro_batches, state, mail, draws
        self.trained, self.ties, self.trainers = trained, ties, trainers
        self.recorder, self.seed, self.carrier = recorder, torch.ones(()), carrier
        self.carried = carried or {}
        self.left: _Run | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins with nothing left to do."""
        return {**self.__dict__, "left": None}

    @property
    def borrowed(self) -> set[str]:
        """The leaves whose memory the backwards that are left need as it is."""
        return set() if self.left is None else self.left.borrowed()

    @property
    def programs(self) -> list[tuple[str, GraphModule]]:
        """All programs by name."""
        found: list[tuple[str, GraphModule]] = []
        for number, stage in self.stages.items():
            parts = [("gather", stage.gather), ("count", stage.count), ("stage", stage.program)]
            found += programs_in(stage.program)
            found += [(f"{name}_{number}", part) for name, part in parts if part is not None]
        return found

    @property
    def share_of_loss(self) -> float:
        """The gradient of what one micro-batch gives to the loss."""
        assert self.loss is not None
        return 1.0 if self.outputs[self.loss].summed else 1 / self.micro_batches.count

    def __call__(self, *leaves: Tensor) -> tuple[Tensor | None, ...]:
        """Outputs in order; ``None`` for those, the loss excepted, that other processes have."""
        given = dict(zip(self.leaves, leaves, strict=True))
        trains = torch.is_grad_enabled() and self.trained
        if trains and self.loss is None:
            raise InputError(
                "a micro-batched step runs its own backward, so the model must return its loss, or be given a loss_fn; "
                "to run it forward only, call it under torch.no_grad()"
            )
        before = None
        if trains:
            before, self.left = self.left, None
        run = _Run(self, given, trains, before)
        with torch.set_grad_enabled(trains):
            run.forward_and_backward()
        results = run.results()
        if trains:
            complete = before if self.overlaps else run
            if self.overlaps:
                self.left = run.leave()
            self._let_backward_begin(results, given, complete)
        return tuple(results)

    def _let_backward_begin(self, results: list[Any], given: Mapping[str, Tensor], complete: _Run | None) -> None:
        """From the loss, which hands over the gradients of a complete step, and from no other output."""
        parameters = {name: leaf for name, leaf in given.items() if leaf.requires_grad}
        is_frozen = not parameters and self.trainers is not None and self.trainers.group.size() > 1
        found = {} if complete is None else {name: leaf.grad for name, leaf in complete.local.items()}
        gradients = [found.get(name) for name in parameters]
        seed = self.seed if complete is None else complete.seed
        for position, leaving in enumerate(self.outputs):
            value = results[position]
            if position == self.loss:
                results[position] = (
                    refusing(value, _FROZEN)
                    if is_frozen
                    else handing_over(value, list(parameters.values()), gradients, seed, self._scaled)
                )
            elif leaving.differentiable and value is not None:
                results[position] = refusing(value, _NO_LOSS)

    def _scaled(self, scale: Tensor) -> None:
        """The loss was scaled so; the next step assumes the same."""
        self.seed = power_of_two(scale)


class _Arrived:
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


class _Arriving(torch.autograd.Function):
    """Identity; the gradient goes no further."""

    @staticmethod
    def forward(ctx, _, arrived, value):  # type: ignore[no-untyped-def]
        ctx.arrived = arrived
        return value.detach()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.arrived.grad = grad
        return None, None, None


_InFlight = tuple[list[Tensor | _Arrived], list[GradientEdge | None], list[Tensor]]


class _Run:
    """One step.

    Attributes:
        before: the step whose last backwards this one does.
        seed: the scale of the loss that its backwards assume.
        local: the leaves, apart from what made them.
        split_leaves: of those of which a micro-batch takes a part, the parts.
        made, used: of each stage, the parameters as ``gather`` gives them: what the gradients go back through, and the
            same apart, where they add up.
        alive: of a stage and a micro-batch in flight: what came in (if what blocks save may leave, only where its
            gradients arrive), where its values went out (these themselves are
            the next stage's to keep) and the loss, if it is there.
        messages: what came for backwards that are left.
    """

    def __init__(self, step: Step, given: Mapping[str, Tensor], trains: bool, before: _Run | None):
        self.step, self.trains, self.before, self.seed = step, trains, before, step.seed
        self.local = {name: leaf.detach().requires_grad_(leaf.requires_grad and trains) for name, leaf in given.items()}
        self.split_leaves = {
            name: self.local[name].chunk(step.micro_batches.count, dim) for name, dim in step.split_leaves.items()
        }
        self.used: dict[int, tuple[Tensor, ...]] = {}
        self.made: dict[int, tuple[Tensor, ...]] = {}
        self.counts: dict[int, tuple[Tensor, ...]] = {}
        self.alive: dict[tuple[int, int], _InFlight] = {} if before is None else before.alive
        self.messages: Messages = {}
        self.later: dict[tuple[int, int], Later] = {}
        self.outputs = Outputs(step.outputs, step.micro_batches.count)
        self.started = step.state.random.calls

    def forward_and_backward(self) -> None:
        """Everything, in order."""
        self.step.recorder.open()
        self.step.mail.open(self.trains, None if self.before is None else self.before.messages)
        self.step.recorder.begin("gather")
        for number, stage in self.step.stages.items():
            stored = tuple(self.local[name] for name in stage.parameters)
            self.made[number] = stored if stage.gather is None else stage.gather(*stored)
            self.used[number] = tuple(t.detach().requires_grad_(t.requires_grad) for t in self.made[number])
            self.counts[number] = self._counted(stage)
        self.step.recorder.end()
        try:
            for number, kind, micro_batch in self.step.first if self.before is None else self.step.actions:
                self._act(self.step.stages[number], kind, micro_batch)
        finally:
            self.step.state.random.calls = self.started + sum(self.step.draws)
            torch.clear_autocast_cache()  # of the used parameters, which are others in every step
        self.messages = self.step.mail.close()
        assert self.step.overlaps or not self.messages, "a message that nobody took"
        complete = self.before if self.step.overlaps else self
        if self.trains and complete is not None:
            self.step.recorder.begin("reduce")
            if self.step.carrier is not None:
                for name, gradient in self.step.carrier.end_micro_batches().items():
                    self.local[self.step.carried[name]].grad = gradient
            complete._spread()
            self.step.recorder.end()
        self.step.recorder.close()

    def _act(self, stage: Stage, kind: str, micro_batch: int) -> None:
        if kind != "F" and not self.trains:
            return
        action = Action(stage.number, kind, micro_batch)
        self.step.micro_batches.now = micro_batch % self.step.micro_batches.count
        if self.step.carrier is not None:
            self.step.carrier.go_on_with(self.step.micro_batches.now)
        self.step.recorder.begin(kind, action)
        try:
            if kind == "F":
                self._forward(stage, micro_batch)
            elif kind == "W":
                self._backward_of_weights(stage, micro_batch)
            else:
                self._backward(stage, micro_batch, split=kind == "I")
        except Exception as error:
            add_note(error, f"on rank {dist.get_rank()}, in action {action}: {_written(action)}")
            raise
        self.step.recorder.end()

    def _counted(self, stage: Stage) -> tuple[Tensor, ...]:
        if stage.count is None:
            return ()
        found = []
        for micro_batch in range(self.step.micro_batches.count):
            self.step.micro_batches.now = micro_batch
            found.append(stage.count(*self._leaves(stage, micro_batch)))
        return tuple(torch.stack(each).sum(0) for each in zip(*found, strict=True))

    def _leaves(self, stage: Stage, micro_batch: int) -> list[Tensor]:
        return [
            self.split_leaves[name][micro_batch] if name in self.split_leaves else self.local[name]
            for name in stage.leaves
        ]

    def _forward(self, stage: Stage, micro_batch: int) -> None:
        received: list[Tensor] = []
        if stage.number:
            received = self.step.mail.take((stage.number, "F", micro_batch))
            self.step.recorder.arrived()
            wanted = zip(received, stage.received, strict=True)
            received = [t.detach().requires_grad_(self.trains and passed.differentiable) for t, passed in wanted]
        inputs: list[Tensor | _Arrived] = [*received]
        if self.step.carrier is not None and self.step.carrier.lets_saved_leave:
            inputs = [_Arrived(t) for t in received]
            gate = torch.empty(0, requires_grad=True)
            pairs = zip(received, inputs, strict=True)
            received = [_Arriving.apply(gate, end, t) if t.requires_grad else t for t, end in pairs]
        counts = self.counts[stage.number]
        self.step.state.random.calls = self.started + sum(self.step.draws[: stage.number])
        results = stage.program(*self.used[stage.number], *self._leaves(stage, micro_batch), *received, *counts)
        sent, leaving = results[: len(stage.sent)], results[len(stage.sent) :]
        if stage.number + 1 < len(self.step.draws):
            sent = [value.to(form.dtype) for value, form in zip(sent, stage.sent, strict=True)]
            self.step.recorder.made()
            self.step.mail.put((stage.number + 1, "F", micro_batch), [value.detach() for value in sent])
        roots = []
        for position, value in zip(stage.outputs, leaving, strict=True):
            self.outputs.put(position, value, micro_batch)
            if position == self.step.loss:
                roots.append(value)
        if self.step.carrier is not None:
            torch.clear_autocast_cache()  # which would hold all parameters on the device, cast, until the step is over
        if self.trains:
            ends = [_edge(value) for value, form in zip(sent, stage.sent, strict=True) if form.differentiable]
            self.alive[stage.number, micro_batch] = inputs, ends, roots

    def _backward(self, stage: Stage, micro_batch: int, split: bool) -> None:
        """Backward of one micro-batch; ``split``: gradients of weights later, where something waits for the others."""
        received, ends, roots = self.alive.pop((stage.number, micro_batch))
        came: list[Tensor] = []
        if stage.number + 1 < len(self.step.draws):
            came = self.step.mail.take((stage.number, "B", micro_batch))
            self.step.recorder.arrived()
        pairs = [(edge, grad) for edge, grad in zip(ends, came, strict=True) if edge is not None]
        run = self if micro_batch >= 0 or self.before is None else self.before
        seed = self.step.share_of_loss * run.seed
        pairs += [(edge, seed.to(loss)) for loss in roots if (edge := _edge(loss)) is not None]
        inputs = [t for t, passed in zip(received, stage.received, strict=True) if passed.differentiable]
        found: tuple[Tensor | None, ...] = (None,) * len(inputs)
        if pairs:
            starts, gradients = zip(*pairs, strict=True)
            with torch.autocast(gradients[0].device.type, enabled=False):
                if split:
                    weights = tuple(t for t in self.used[stage.number] if t.requires_grad)
                    leaves = [t for t in inputs if isinstance(t, Tensor)]
                    found, later = backward_of_inputs(tuple(pairs), leaves, weights)
                    self.later[stage.number, micro_batch] = later
                else:
                    torch.autograd.backward(starts, gradients)
                    found = tuple(t.grad for t in inputs)
        if stage.number:
            back = [_zeros_like(t) if grad is None else grad for t, grad in zip(inputs, found, strict=True)]
            self.step.recorder.made()
            self.step.mail.put((stage.number - 1, "B", micro_batch), back)

    def _backward_of_weights(self, stage: Stage, micro_batch: int) -> None:
        """What a split backward left over."""
        later = self.later.pop((stage.number, micro_batch), None)
        if later is not None and later.weights:
            with torch.autocast(later.weights[0].device.type, enabled=False):
                later.run()

    def _spread(self) -> None:
        """From the gradients of used parameters to those of stored ones."""
        stored = {id(leaf) for leaf in self.local.values()}
        starts, gradients = [], []
        for number in self.step.stages:
            for made, used in zip(self.made[number], self.used[number], strict=True):
                gradient, used.grad = used.grad, None
                if gradient is None:
                    continue
                if id(made) in stored:  # used as it is stored
                    made.grad = gradient if made.grad is None else made.grad.add_(gradient)
                else:
                    starts.append(made)
                    gradients.append(gradient)
        if starts:
            torch.autograd.backward(starts, gradients)
        for tie in self.step.ties:
            for leaf in (self.local[name] for name in tie.leaves):
                if leaf.requires_grad:
                    leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                    dist.all_reduce(leaf.grad, group=tie.group)

    def leave(self) -> _Run:
        """What the next step needs of this one, whose micro-batches it counts below 0."""
        count = self.step.micro_batches.count
        self.before = None
        self.alive = {(stage, micro_batch - count): held for (stage, micro_batch), held in self.alive.items()}
        self.messages = {
            (stage, kind, micro_batch - count): sent for (stage, kind, micro_batch), sent in self.messages.items()
        }
        self.split_leaves.clear()
        self.counts.clear()
        self.outputs = Outputs(self.step.outputs, count)
        return self

    def borrowed(self) -> set[str]:
        """The parameters that are used in the memory in which they are stored."""
        taken = {memory_of(used) for each in self.used.values() for used in each if used.requires_grad}
        names = {name for stage in self.step.stages.values() for name in stage.parameters}
        return {name for name in names if memory_of(self.local[name]) in taken}

    def results(self) -> list[Any]:
        """The outputs, micro-batches put together."""
        found: list[Any] = []
        for position, leaving in enumerate(self.step.outputs):
            whole = self.outputs.get(position)
            if position == self.step.loss:
                # Ranks divide by what the loss's own began with, whatever each was told of the scale.
                whole, self.seed = self.step.mail.share(whole, self.seed, leaving.stage, leaving.dtype)
            found.append(whole)
        return found


def _written(action: Action) -> str:
    """``forward of micro-batch 0 in stage 2``."""
    what = {"F": "forward", "B": "backward", "I": "backward (of inputs)", "W": "backward (of weights)"}[action.kind]
    late = ", counted from the end of the batch before," if is_left_over(action) else ""
    return f"{what} of micro-batch {action.micro_batch}{late} in stage {action.stage}"


def _zeros_like(value: Tensor | _Arrived) -> Tensor:
    return value.zeros() if isinstance(value, _Arrived) else torch.zeros_like(value)


def _edge(value: Tensor) -> GradientEdge | None:
    """Where the gradient of a value arrives, if it has one."""
    return get_gradient_edge(value) if value.requires_grad else None
