"""Further programs: the model is captured and planned again for inputs of another form, around the tensors that it has.

``plan_inputs`` makes the plan of one to look at; :class:`ProgramMaker` makes the program, when such inputs come.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from autopar.capture.capture import LossFn, accepted_names
from autopar.capture.held_tensors import held_tensors
from autopar.driver.arguments import given_plan, say, warn
from autopar.driver.plan import assign, staged
from autopar.driver.rank_agreement import check_alike, planned_on_rank_0, traced_alike
from autopar.driver.trace import Traced, trace
from autopar.emit.build import further
from autopar.runtime.data.agreement import checksum
from autopar.runtime.module import ParallelModule
from autopar.runtime.spmd.input_form import FlatCall, InputForm, Static, TensorForm, named_inputs
from autopar.runtime.spmd.programs import Emitted
from planner.base.cpython import no_garbage, on_one_stack
from planner.base.errors import InputError, PlanError
from planner.base.formatting import in_seconds, shape_text
from planner.formulation.constraints.stored_layouts import PlannedInputs, PlannedTensor, StoredLayouts
from planner.ir.layout import Layout, Mesh, Shard
from planner.plan.document.document import WITHOUT_GRAPH
from planner.plan.further import check_may_have_further, further_plan, planned_inputs, stored_tensors
from planner.plan.further_stages import Homes, homes
from planner.plan.plan import Plan
from planner.search.search_context import Progress

MANY = 8
"""The number of further programs that is warned of: they are kept, and nothing bounds how many."""
Values = Mapping[str, tuple[str, int]]
"""Path of a tensor -> its dtype and shape in words, and its checksum."""


@on_one_stack
@no_garbage()
def plan_inputs(
    model: nn.Module,
    plan: Plan | str | os.PathLike[str],
    *,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFn | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The plan of the program that a parallel module makes for inputs of another form than it was planned for.

    Parameters and buffers are stored as ``plan`` says. Needs no device and no process group; only shapes and dtypes of
    the inputs matter.

    Args:
        model: in the mode (train or eval) in which the inputs come.
        plan: that of the module, or the path of its file.
        example_args, example_kwargs: the other inputs, with global shapes.
        loss_fn: that of the plan; not used where inputs that only it reads are left out.
        progress: called with a line of text as the search advances.

    Raises:
        PlanError: the plan is of another model, or its steps are tied to its own inputs (``offload``, ``2bw``).
        InputError, CaptureError: the model cannot be captured with these inputs.
        InfeasibleError: no plan around the stored parameters fits in memory.
    """
    plan = given_plan(plan)
    check_may_have_further(plan)
    loss_fn = _loss_fn_for(model, plan, loss_fn, example_kwargs or {})
    traced = trace(model, example_args, example_kwargs, loss_fn).placing(plan.tables, plan.cluster)
    shapes = {leaf.target: leaf.results[0].shape for leaf in traced.graph.leaves if leaf.op == "input"}
    mesh, layouts = planned_inputs(plan).cut(shapes)
    stored = StoredLayouts(stored_tensors(plan), layouts)
    return further_plan(plan, traced.graph, traced.facts, mesh, stored, _homes(plan), progress)


def _homes(plan: Plan) -> Homes:
    if plan.pipeline is None:
        return {}
    if plan.assignment is None:
        raise PlanError(WITHOUT_GRAPH)
    return homes(plan.assignment.space.folded, plan.pipeline)


def values_of(tensors: Mapping[str, torch.Tensor]) -> Values:
    """What tells whether tensors are the same later on, without a copy of them."""
    return {
        name: (f"{str(each.dtype).removeprefix('torch.')} {shape_text(tuple(each.shape))}", int(checksum(each)))
        for name, each in tensors.items()
    }


@dataclass(frozen=True)
class ModelState:
    """What of a model's state decides what is captured: users may change it on the original afterwards.

    Attributes:
        training: path of a module -> whether it is in train mode.
        trained: name of a parameter -> whether it has a gradient.
    """

    training: Mapping[str, bool]
    trained: Mapping[str, bool]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """The state that a model is in."""
        training = {path: module.training for path, module in model.named_modules()}
        return cls(training, {name: parameter.requires_grad for name, parameter in model.named_parameters()})

    def restore(self, model: nn.Module) -> None:
        """Put a model into this state; what it did not have then stays as it is."""
        for path, module in model.named_modules():
            module.training = self.training.get(path, module.training)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.trained.get(name, parameter.requires_grad))

    def in_mode(self, training: bool) -> ModelState:
        """The same in train or eval mode; parts that did not train in train mode do not."""
        if training == any(self.training.values()):
            return self
        return ModelState(dict.fromkeys(self.training, training), self.trained)


@dataclass(frozen=True)
class ProgramMaker:
    """Makes programs of a parallel module for inputs of other forms than planned; see
    :class:`autopar.runtime.spmd.programs.Maker`.

    Attributes:
        plan: that of the first program.
        loss_fn: as it was planned with.
        state: the model's, as it was planned.
        stored: how parameters and buffers are stored, by name.
        held: what the ranks of a pipeline hold.
        constants: the tensors besides that modules hold and that the first program was made with.
        progress: called with lines of text, on rank 0.
    """

    plan: Plan
    loss_fn: LossFn | None
    state: ModelState
    stored: Mapping[str, PlannedTensor]
    held: Homes
    constants: Values
    progress: Progress | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ProgramMaker:
        """A value: a copy of a parallel module has the same one."""
        return self

    @cached_property
    def inputs(self) -> PlannedInputs:
        """How the plan cuts its inputs."""
        return planned_inputs(self.plan)

    def check(self) -> None:
        """Raise :class:`planner.base.errors.PlanError` if the plan has no further programs."""
        check_may_have_further(self.plan)

    def check_alike(self, inputs: str, training: bool) -> None:
        """Compare with the inputs that all other ranks are to have a program for.

        Raises:
            PlanError: they differ, on every rank; or others have a program for what they were given, and did not come
                before the process group's timeout.
        """
        try:
            check_alike({"input": inputs, "mode": "train" if training else "eval"})
        except RuntimeError as error:  # as torch says that others did not come
            raise PlanError(
                f"there is no program for inputs {inputs} yet, and some ranks did not come to make one: they have "
                "inputs of another form, or have gone; give every rank the same global batch"
            ) from error

    @on_one_stack
    @no_garbage()
    def __call__(
        self,
        module: ParallelModule,
        call: FlatCall,
        form: InputForm,
        mesh: Mesh,
        layouts: Mapping[str, Layout],
        earlier: Collection[InputForm],
    ) -> Emitted:
        """Capture on every rank, plan on rank 0, emit on every rank."""
        start, (model,) = time.monotonic(), module._original
        self._check_constants(model)
        say(self.progress, f"capturing {type(model).__name__} for inputs {form}")
        args, kwargs = _examples(call, form)
        loss_fn = _loss_fn_for(model, self.plan, self.loss_fn, kwargs)
        with _in_state(model, self.state.in_mode(form.training)):
            traced = traced_alike(model, args, kwargs, loss_fn).placing(self.plan.tables, self.plan.cluster)
        stored = StoredLayouts(self.stored, _by_leaf(traced, layouts))
        plan = planned_on_rank_0(
            lambda: further_plan(self.plan, traced.graph, traced.facts, mesh, stored, self.held, self.progress)
        )
        assignment, micro_batched = staged(plan, assign(traced, plan))
        if micro_batched is not None:
            micro_batched = replace(micro_batched, pipeline=module.pipeline)
        made = further(module, traced.captured, assignment, micro_batched)
        warn([self._said(module, form, plan, layouts, time.monotonic() - start)])
        if len(earlier) == MANY:  # with the planned one
            warn([_many([*earlier, form])])
        return made

    def _check_constants(self, model: nn.Module) -> None:
        """Refuse a model whose constants are others than those that the first program was made with.

        Raises:
            InputError: they are, on every rank.
            PlanError: they are on some ranks.
        """
        there = held_tensors(model)
        now = values_of({name: there[name] for name in self.constants if name in there})
        changed = next((name for name, planned in self.constants.items() if now.get(name) != planned), None)
        check_alike({"change of the model's constant": changed or "none"})
        if changed is not None:
            planned, found = self.constants[changed][0], now[changed][0] if changed in now else "no tensor"
            what = f"is now {found}, and was {planned}" if found != planned else "has other values than"
            raise InputError(
                f"the model's {changed} {what} when it was planned, and programs for other inputs would compute "
                "something else than the first: leave the model as it was, make what changes an input, or call "
                "autopar.parallelize again"
            )

    def _said(
        self,
        module: ParallelModule,
        form: InputForm,
        plan: Plan,
        layouts: Mapping[str, Layout],
        seconds: float,
    ) -> str:
        """What was made, for what, and where it is slower than it could be."""
        planned = module.planned_form
        missing = planned.shapes.keys() - form.shapes.keys()
        without = f" (without {', '.join(sorted(missing))})" if missing else ""
        mode = "" if form.training == planned.training else f" in {plan.model['mode']} mode"
        is_whole = not any(isinstance(t, Shard) for layout in layouts.values() for t in layout)
        is_slower = is_whole and any(self.inputs.ranks(name) > 1 for name in self.inputs.layouts)
        slower = "; ranks do not divide its batch, and each takes it whole" if is_slower else ""
        return (
            f"planned a further program for inputs {form}{without}{mode} in {seconds:.1f} s: "
            f"{in_seconds(plan.predicted.step_time_s)} a step{slower}"
        )


def _many(forms: Collection[InputForm]) -> str:
    """Which inputs differ most between these forms, the planned one among them, and what to do."""
    found: dict[str, set[TensorForm | Static]] = {}
    for form in forms:
        for name, each in form.inputs:
            found.setdefault(name, set()).add(each)
    most = max(map(len, found.values()))
    varying = [name for name, seen in found.items() if len(seen) == most]
    numbers = [name for name in varying if any(isinstance(each, Static) for each in found[name])]
    ways = [
        f"give {', '.join(numbers)} as a tensor, torch.as_tensor(value)" if numbers else "",
        "pad batches to a few sizes" if len(numbers) < len(varying) else "",
    ]
    return (
        f"{len(forms) - 1} further programs were planned so far, all of which are kept: {', '.join(varying)} came "
        f"in {most} forms, and each new one takes a capture and a plan; {', and '.join(filter(None, ways))}"
    )


def _examples(call: FlatCall, form: InputForm) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of a form; only shapes and dtypes of tensors matter."""
    values = [
        torch.zeros(each.shape, dtype=each.dtype) if isinstance(each, TensorForm) else each.value
        for _, each in form.inputs
    ]
    return call.with_values(values)


def _by_leaf(traced: Traced, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Layouts of inputs by the names of the graph's leaves instead of the call's."""
    targets = {leaf.name: leaf.target or leaf.name for leaf in traced.graph.leaves if leaf.op == "input"}
    leaf_of = named_inputs(traced.captured.in_spec, traced.captured.input_names)
    return {targets[leaf]: layouts[name] for name, leaf in leaf_of.items() if leaf in targets}


def _loss_fn_for(model: nn.Module, plan: Plan, loss_fn: LossFn | None, given: Mapping[str, Any]) -> LossFn | None:
    """The loss, unless inputs that it alone reads are left out: then the model returns its outputs."""
    if loss_fn is None:
        return None
    of_model = accepted_names(model)
    of_loss = [name for name in plan.inputs if not any(_is_of(name, each) for each in of_model)]
    return loss_fn if not of_loss or any(_is_of(name, each) for name in of_loss for each in given) else None


def _is_of(name: str, top: str) -> bool:
    """Whether an input as a plan names it is that keyword input, or nested in it: ``batch_x`` in ``batch``."""
    return name == top or name.startswith(f"{top}_")


@contextlib.contextmanager
def _in_state(model: nn.Module, state: ModelState) -> Iterator[None]:
    """The model in a state; afterwards as it was."""
    before = ModelState.of(model)
    state.restore(model)
    try:
        yield
    finally:
        before.restore(model)
