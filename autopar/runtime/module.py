"""The parallel module: parameters in their stored layouts under their original names, and the program.

It computes what the original module computes on the global batch; each rank passes its part of the
inputs (:meth:`ParallelModule.shard` cuts a global batch) and gets what the model returns.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from autopar.graph.listing import readable
from autopar.runtime.host.disk import check_there
from autopar.runtime.host.gradient_buckets import Buckets
from autopar.runtime.host.pages import READ, WRITE
from autopar.runtime.offload.block_hooks import parts_at_home
from autopar.runtime.offload.early_update import check_separate
from autopar.runtime.offload.executor import Carrier
from autopar.runtime.optim.gradients import Holders, know_each_other
from autopar.runtime.optim.optimizer import Groups, StateKeeper, expect_state, make_optimizer
from autopar.runtime.pipeline.executor import Step
from autopar.runtime.pipeline.stage import programs_in
from autopar.runtime.pipeline.trace import observed, save_together
from autopar.runtime.spmd.mesh import as_dtensor, groups_of, part_of, placements, whole_of
from autopar.runtime.spmd.parameters import local_parts, renew
from autopar.runtime.spmd.pipeline_ranks import PipelineRanks
from autopar.runtime.spmd.run_state import RunState
from planner.base.errors import DiskError, InputError, PlanError
from planner.ir.layout import I, Layout, Mesh, R, local_shape
from planner.plan.timeline import StepTimeline

UNCHANGED = (
    "Nothing was changed: if the disk comes back call it again (where other ranks wait for this one, end all), else "
    "load the last checkpoint with another offload_path"
)
"""What is so where a state dict cannot be taken from files, or put there."""
Program = GraphModule | Step
"""Leaves -> outputs and updates."""


@dataclass(frozen=True)
class LeafSpec:
    """A leaf of the program: ``kind``, original ``name``, global shape, dtype, stored layout, whether it is trained."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    trainable: bool = False


@dataclass(frozen=True)
class OutputSpec:
    """A tensor that leaves the program: global shape and layout."""

    shape: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True)
class Interface:
    """How a program's flat inputs and outputs map onto the model's nested ones.

    ``input_names`` aligns with the flattened (args, kwargs): a leaf's placeholder name, or ``None`` for a
    static value. ``outputs`` aligns with the flattened result: a position in the program's results, or
    ``None``, then the value in ``static_outputs``.
    """

    leaves: tuple[LeafSpec, ...]
    input_names: tuple[str | None, ...]
    in_spec: pytree.TreeSpec
    outputs: tuple[OutputSpec | None, ...]
    static_outputs: tuple[Any, ...]
    out_spec: pytree.TreeSpec
    updates: tuple[str, ...]
    captured_training: bool
    static_inputs: tuple[Any, ...] = ()


class ParallelModule(nn.Module):
    """One rank's share of a parallelized model; an ordinary module of DTensor parameters.

    Args:
        program: the root of the emitted program.
        interface: how it maps onto the model.
        mesh: the planner's mesh.
        device_mesh: the torch mesh of the same axes.
        rank: this process's rank.
        names: every parameter and buffer name of the original model -> the first name of that tensor.
        not_saved: the buffers among them that are no part of the state dict.
        make_part: makes this rank's part of a leaf (local tensor).
        state: training mode and random numbers.
        state_bytes: of optimizer state, per element of the parameters, that the plan counts.
        pipeline: the ranks that hold the same part of other stages.
        carrier: moves parameters and gradients between tiers, if they move.
    """

    def __init__(
        self,
        program: Program,
        interface: Interface,
        *,
        mesh: Mesh,
        device_mesh: DeviceMesh,
        rank: int,
        names: Mapping[str, str],
        not_saved: Collection[str],
        make_part: Callable[[LeafSpec], Tensor],
        state: RunState,
        state_bytes: int,
        pipeline: PipelineRanks | None = None,
        carrier: Carrier | None = None,
    ):
        super().__init__()
        self.carrier, self._state_bytes = carrier, state_bytes
        self.interface, self.mesh, self.device_mesh, self.rank = interface, mesh, device_mesh, rank
        self.state, self.pipeline = state, pipeline
        self._program = (program,)  # in a tuple: its modules are not parts of the user's model
        tensors: dict[str, Tensor] = {}
        self._constants: dict[str, Tensor] = {}
        for leaf in interface.leaves:
            if leaf.kind in ("param", "buffer"):
                tensors[leaf.name] = self._stored(leaf, make_part(leaf))
            elif leaf.kind == "const":
                self._constants[leaf.name] = make_part(leaf)
        self._everywhere = dict(names)
        for name, first in names.items():
            if first in tensors:
                _register(self, name, tensors[first], name not in not_saved)
        self._leaf_names = {leaf.name: leaf for leaf in interface.leaves if leaf.kind in ("param", "buffer")}
        self.buckets = Buckets()
        self._let_gradients_know()
        self.train(interface.captured_training)

    def _stored(self, leaf: LeafSpec, part: Tensor) -> Tensor:
        if leaf.kind == "buffer":
            return part
        if self.carrier is not None and self.carrier.holds(leaf.name):
            part = self.carrier.keep(leaf.name, part)
        stored = as_dtensor(part, self.device_mesh, placements(leaf.layout), leaf.shape, _strides(leaf.shape))
        return nn.Parameter(stored, requires_grad=leaf.trainable)

    def _let_gradients_know(self) -> None:
        """Of each other, where torch's functions over all of them would not see all, and of their files; see
        :mod:`gradients`.
        """
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        step = self.program if isinstance(self.program, Step) else None
        trainers = None if step is None else step.trainers
        ways = {p.placements for p in trained if isinstance(p, DTensor)}
        disk = None if self.carrier is None else self.carrier.link.disk
        is_apart = trainers is not None or len(ways) > 1
        if not is_apart and disk is None:
            return
        repeated = [] if step is None else [leaf for tie in step.ties if not tie.first for leaf in tie.leaves]
        axes = tuple(groups_of(self.device_mesh).values()) if is_apart else ()
        holders = Holders(axes, disk=disk) if trainers is None else Holders(axes, trainers.group, trainers.alike, disk)
        know_each_other(trained, self._stored_as(repeated), holders)

    @property
    def program(self) -> Program:
        """The emitted program of this rank, or with micro-batches what runs its programs."""
        return self._program[0]

    @property
    def names(self) -> Mapping[str, str]:
        """Every parameter and buffer name of the original model -> the first name of that tensor."""
        return self._everywhere

    @property
    def stored(self) -> Mapping[str, LeafSpec]:
        """How the parameters and buffers that this rank holds are stored, by their first names."""
        return self._leaf_names

    def optimizer(
        self,
        make: Callable[..., Any],
        groups: Groups = (),
        *,
        master_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Any:
        """An optimizer over the parameters that this rank holds; it updates them where they are at home.

        It is what ``make([...], **options)`` makes: schedulers, clipping, ``torch.amp.GradScaler`` and checkpoints take
        it as any other. Adam and AdamW step by torch's fused kernels, unless ``fused``, ``foreach`` or
        ``differentiable`` is given; torch's other fused kernels take no DTensors. Of a plan with model data on disk
        its state goes to files after the first step, where one that is made otherwise keeps it in the host's memory.
        Of a plan that updates in backward (pin ``update``), ``backward()`` updates what is with their home on the host,
        and ``step()`` only ends the step: there is nothing to clip or unscale between them.

        Args:
            make: the optimizer's class, e.g. ``torch.optim.AdamW``.
            groups: parameters that have options of their own, by patterns of their names:
                ``[{"params": ["*.bias", "*norm*"], "weight_decay": 0.0}]``. A parameter is in the first group that
                takes any of its names; those that none takes come first, in ``param_groups[0]``.
            master_dtype: for parameters in bfloat16 or float16, e.g. ``torch.float32``: the optimizer steps *masters*,
                the same values in this dtype, with its state in it and gradients cast to it, and parameters become
                their roundings. Masters are state, ``optimizer.state[parameter]["master"]``, made by the first step.
                An element of a parameter that was changed between steps (loaded, clamped ...) is no rounding of its
                master, which then begins anew from it. Plan with ``optimizer_bytes_per_element=12``; the first step
                warns if the plan counts too little.
            options: of the optimizer.

        Raises:
            InputError: ranks hold parts of the model, and the optimizer is not elementwise, so that it would update a
                part otherwise than the whole; a pattern matches no parameter; masters of ``master_dtype`` do not hold
                what parameters do, or the optimizer cannot step them; or the plan updates in backward, and the
                optimizer does not update each parameter by itself.
            InfeasibleError: by ``step()``, or where that updates by ``backward()``: the disk has no room for the state.
                The step is made, and the next one tries again.
        """
        buffers = {leaf.name for leaf in self._leaf_names.values() if leaf.kind == "buffer"}
        made = make_optimizer(
            make,
            {self._everywhere[name]: parameter for name, parameter in self.named_parameters()},
            {name: first for name, first in self._everywhere.items() if first not in buffers},
            self.pipeline is not None or any(_is_cut(parameter) for parameter in self.parameters()),
            groups,
            options,
            master_dtype,
        )
        if master_dtype is not None:
            expect_state(made, self._state_bytes)
        if self.carrier is not None and self.carrier.link.disk is not None:
            StateKeeper(self.carrier.link.disk).watch(made)
        if self.carrier is not None and self.carrier.updates_in_backward:
            for each in ({}, *groups):
                check_separate(make, {**options, **{key: value for key, value in each.items() if key != "params"}})
            self.carrier.update_by(made)
        return made

    def print_code(self) -> None:
        """Print the emitted Python: each distinct block once, then the root that calls them."""
        print(self.code())

    def code(self) -> str:
        """The emitted Python as text."""
        if isinstance(self.program, Step):
            programs = self.program.programs
        else:
            programs = [*programs_in(self.program), ("root", self.program)]
        return "\n\n\n".join(_readable(module.code, name) for name, module in programs) + "\n"

    def timeline(self) -> StepTimeline:
        """What every rank of the pipeline was seen to do in the last step, beside the bubble that was predicted.

        All ranks must call it. A step is a call of the model: what follows it, such as the optimizer's update, is not
        part of it. Clocks of ranks are compared by messages, see :func:`autopar.runtime.pipeline.trace.ahead_s`.

        Raises:
            InputError: there was no step yet, or the plan runs without micro-batches.
        """
        if not isinstance(self.program, Step):
            raise InputError(
                "this module runs without micro-batches: its backward is autograd's, of which it does not see when it "
                "runs. "
                "torch.profiler records such a step; pin micro_batches for a micro-batched step"
            )
        return observed(self.program.recorder, self.pipeline)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`timeline` for https://ui.perfetto.dev, as :meth:`planner.plan.plan.Plan.save_trace` writes the
        predicted one. All ranks must call it; rank 0 writes, of the pipeline that it is in.

        Raises:
            InputError: as :meth:`timeline`; or the file cannot be written, on every rank.
        """
        save_together(self.timeline(), path)

    def train(self, mode: bool = True) -> ParallelModule:
        """Set training mode; a program that was captured in eval mode cannot train."""
        if mode and not self.interface.captured_training:
            raise PlanError("the model was captured in eval mode: call model.train() before autopar.parallelize")
        super().train(mode)
        self.state.training = mode
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """Parameters and buffers of its own, on the same process groups; every rank copies for itself."""
        if self.carrier is not None:
            raise InputError(
                "a module whose parameters are with their home on the host or on disk cannot be copied: call "
                "autopar.parallelize again, with state_dict=pmodel.full_state_dict()"
            )
        groups = list(groups_of(self.device_mesh).values())
        if isinstance(self.program, Step):
            groups += [tie.group for tie in self.program.ties]
            groups += [self.program.trainers.group] if self.program.trainers is not None else []
        shared = (self.interface, self.mesh, self.device_mesh, self.pipeline, *groups)
        memo.update({id(value): value for value in shared})
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        made._let_gradients_know()
        return made

    def shard(self, batch: Any) -> Any:
        """This rank's part of a global batch: the same nesting, tensors cut as the plan stores the inputs.

        Args:
            batch: keyword inputs (a mapping), or positional ones (a tuple), with global shapes.
        """
        args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})
        flat = self._flatten(args, kwargs)
        specs = {leaf.name: leaf for leaf in self.interface.leaves if leaf.kind == "input"}
        parts = []
        for name, value in zip(self.interface.input_names, flat, strict=True):
            if name is None:
                parts.append(value)
                continue
            leaf = specs[name]
            _check_input(leaf, value, leaf.shape, "the global batch")
            parts.append(part_of(value, leaf.layout, self.mesh, self.rank).to(self._device))
        args, kwargs = pytree.tree_unflatten(parts, self.interface.in_spec)
        return kwargs if isinstance(batch, Mapping) else args

    @property
    def _device(self) -> torch.device:
        return torch.device(self.device_mesh.device_type)

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        expected = self.interface.in_spec.child(1).context
        count = self.interface.in_spec.child(0).num_children
        if args and expected and not count:
            raise InputError(_by_name(len(args), expected))
        if kwargs and count and not expected:
            raise InputError(_by_position(list(kwargs), count))
        missing = [name for name in expected if name not in kwargs]
        extra = [name for name in kwargs if name not in expected]
        if missing or extra:
            raise InputError(
                f"the model was planned with inputs {list(expected)}; "
                + (f"missing: {missing}" if missing else f"unknown: {extra}")
                + ". Plan again with example inputs of this form"
            )
        flat, spec = pytree.tree_flatten((args, {name: kwargs[name] for name in expected}))
        if len(flat) != len(self.interface.input_names):
            raise InputError(_nested_otherwise(expected, spec, self.interface.in_spec))
        for name, value, planned in zip(self.interface.input_names, flat, self.interface.static_inputs, strict=True):
            if name is None and value != planned:
                raise InputError(
                    f"an input is {value!r}, but the model was planned with {planned!r} in its place, and a plan holds "
                    "for one value of every input that is not a tensor: plan again for this one"
                )
        return flat

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for the global batch, given this rank's part of the inputs.

        Scalars are plain tensors with the global value; other outputs are DTensors of global shape.
        """
        flat = self._flatten(args, kwargs)
        inputs = {name: value for name, value in zip(self.interface.input_names, flat, strict=True) if name}
        held = self._held()
        leaves = [self._leaf(leaf, inputs, held) for leaf in self.interface.leaves]
        with nullcontext() if self.carrier is None else self.carrier.running(leaves):
            results = self.program(*leaves)
        if self.carrier is not None:
            results = tuple(map(self.carrier.apart, results))
        if isinstance(self.program, Step) and torch.is_grad_enabled():
            # What the program has of the old memory stays as it is.
            renew(self._stored_as(self.program.borrowed))
        count = len(results) - len(self.interface.updates)
        if self.training:
            for name, value in zip(self.interface.updates, results[count:], strict=True):
                self._update(name, value.detach())
        given = iter(results[:count])
        flat_outputs = [
            static if spec is None else self._leaving(next(given), spec)
            for spec, static in zip(self.interface.outputs, self.interface.static_outputs, strict=True)
        ]
        return pytree.tree_unflatten(flat_outputs, self.interface.out_spec)

    def _held(self) -> dict[str, Tensor]:
        """What this rank holds, by name: of a parameter its part, whose gradient is the parameter's."""
        tensors = {name: _lookup(self, name) for name in self._leaf_names}
        if self.carrier is None:
            return local_parts(tensors, self.buckets)
        carried = {name: t for name, t in tensors.items() if isinstance(t, DTensor) and self.carrier.holds(name)}
        others = {name: t for name, t in tensors.items() if name not in carried}
        if isinstance(self.program, Step):
            self.carrier.begin_with(carried)
            return local_parts(tensors, self.buckets)
        return {**local_parts(others, self.buckets), **parts_at_home(self.carrier, carried)}

    def _stored_as(self, leaves: Collection[str]) -> list[DTensor]:
        """The parameters that are these leaves of a micro-batched step."""
        if not isinstance(self.program, Step):
            return []
        names = dict(zip(self.program.leaves, self.interface.leaves, strict=True))
        tensors = (_lookup(self, names[leaf].name) for leaf in leaves)
        return [tensor for tensor in tensors if isinstance(tensor, DTensor)]

    def _leaf(self, leaf: LeafSpec, inputs: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> Tensor:
        if leaf.kind == "input":
            value = inputs[leaf.name]
            expected = local_shape(leaf.shape, leaf.layout, self.mesh.sizes)
            assert expected is not None
            _check_input(leaf, value, expected, "this rank's part")
            if value.requires_grad and torch.is_grad_enabled():
                raise InputError(
                    f"input {leaf.name!r} requires a gradient, which a plan does not sum over ranks: detach it, or "
                    "make it a parameter of the model"
                )
            return value
        if leaf.kind == "const":
            return self._constants[leaf.name]
        return held[leaf.name]

    def _update(self, name: str, value: Tensor) -> None:
        """Give a buffer its new value; the old tensor stays as it was, since backward may need it."""
        old = _lookup(self, name)
        for module in self.modules():
            for key, buffer in module._buffers.items():
                if buffer is old:
                    module._buffers[key] = value

    def _leaving(self, value: Tensor | None, spec: OutputSpec) -> Tensor | None:
        if value is None or not spec.shape or all(t in (I, R) for t in spec.layout):
            return value
        return DTensor.from_local(
            value,
            self.device_mesh,
            placements(spec.layout),
            run_check=False,
            shape=torch.Size(spec.shape),
            stride=_strides(spec.shape),
        )

    def full_state_dict(self) -> dict[str, Tensor]:
        """The original model's state dict, whole, on the CPU; every rank must call it (it gathers).

        Raises:
            DiskError: a parameter is in a file that cannot be read.
        """
        own = self.state_dict()
        if self.pipeline is None:
            return {name: _on_cpu(name, value) for name, value in own.items()}
        forms = {name: (tuple(value.shape), value.dtype) for name, value in own.items()}
        stages: list[dict[str, Any]] = [{} for _ in range(self.pipeline.size)]
        dist.all_gather_object(stages, forms, group=self.pipeline.ranks)
        found = {}
        for name in self._everywhere:
            home = next((number for number, held in enumerate(stages) if name in held), None)
            if home is None:
                continue
            value = _on_cpu(name, own[name]).to(self._device) if home == self.pipeline.rank else None
            if value is None:
                shape, dtype = stages[home][name]
                value = torch.empty(shape, dtype=dtype, device=self._device)
            dist.broadcast(value, self.pipeline.global_rank(home), self.pipeline.ranks)
            found[name] = value.cpu()
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load full tensors (the original model's dict) or DTensors (another plan's, on this mesh).

        Raises:
            DiskError: a parameter is in a file that cannot be written; nothing was loaded.
        """
        if isinstance(self.program, Step):
            self.program.left = None  # gradients of other weights
        if self.carrier is not None:
            self.carrier.settle()
        own = self.state_dict()
        if self.pipeline is None:
            local = {name: self._like(name, v, own[name]) if name in own else v for name, v in state_dict.items()}
            return super().load_state_dict(local, strict=strict, assign=assign)
        # What is wrong with one stage's part must be an error on all ranks, or the others would wait for that stage.
        theirs = [name for name in state_dict if name in self._everywhere and name not in own]
        wrong: list[Any] = [None] * self.pipeline.size
        mine, result = None, None
        try:
            local = {
                name: self._like(name, value, own[name]) if name in own else value
                for name, value in state_dict.items()
                if name not in theirs
            }
            result = super().load_state_dict(local, strict=strict, assign=assign)
        except (InputError, DiskError, RuntimeError) as error:
            mine = error
        dist.all_gather_object(wrong, mine, group=self.pipeline.ranks)
        first = next((error for error in wrong if error is not None), None)
        if first is not None:
            raise mine or first
        return result

    def _like(self, name: str, value: Tensor, own: Tensor) -> Tensor:
        if not isinstance(own, DTensor):
            return value
        if tuple(value.shape) != tuple(own.shape):
            raise InputError(
                f"{name} has shape {tuple(value.shape)} in the state dict, {tuple(own.shape)} in the model"
            )
        if isinstance(value, DTensor):
            value = _whole(name, value)
        check_there(own._local_tensor, WRITE, name, UNCHANGED)
        leaf = next(spec for spec in self._leaf_names.values() if _lookup(self, spec.name) is _lookup(self, name))
        part = part_of(value, leaf.layout, self.mesh, self.rank).to(own.device, own.dtype)
        return as_dtensor(part, self.device_mesh, own.placements, own.shape, own.stride())


def _is_cut(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(not placement.is_replicate() for placement in parameter.placements)


def _on_cpu(name: str, value: Tensor) -> Tensor:
    """A copy of a tensor, whole, on the CPU."""
    return (_whole(name, value) if isinstance(value, DTensor) else value).detach().cpu().clone()


def _whole(name: str, value: DTensor) -> Tensor:
    check_there(value._local_tensor, READ, name, UNCHANGED)
    return whole_of(value)


def _readable(code: str, name: str) -> str:
    """A program's text without what fx adds for the interpreter."""
    words = "convert|(?:replicate|gather)_parameters|gather_ahead|draw|(?:enter|leave)_block"
    code = re.sub(rf"\bautopar_runtime_\w+?_(?={words})", "", code)
    code = re.sub(r"\bautopar_runtime_layers_[a-z]+_", "layers.", code)
    code = re.sub(r"\bautopar_body_getitem\((\w+), (\d+)\)", r"\1[\2]", code)
    return readable(code, name)


class _Part(nn.Module):
    """Holds parameters and buffers where the original model's submodule held them."""


def _register(root: nn.Module, name: str, tensor: Tensor, saved: bool) -> None:
    *path, last = name.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            module.add_module(part, _Part())
        child = module._modules[part]
        assert child is not None
        module = child
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_buffer(last, tensor, persistent=saved)


def _lookup(root: nn.Module, name: str) -> Tensor:
    *path, last = name.split(".")
    module = root
    for part in path:
        child = module._modules[part]
        assert child is not None
        module = child
    tensor = module._parameters.get(last)
    found = tensor if tensor is not None else module._buffers[last]
    assert found is not None
    return found


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _by_name(given: int, expected: Sequence[str]) -> str:
    """What to say where inputs are given by position to a model that was planned with them by name."""
    batch = ", ".join(f"{name!r}: ..." for name in expected)
    return (
        f"inputs are given by position ({given}), but the model was planned with inputs by name, {list(expected)}: "
        f"call pmodel(**pmodel.shard({{{batch}}}))"
    )


def _by_position(given: Sequence[str], expected: int) -> str:
    """The other way round."""
    return (
        f"inputs are given by name, {list(given)}, but the model was planned with inputs by position ({expected}): "
        f"call pmodel(*pmodel.shard(({('..., ' * expected).rstrip()})))"
    )


def _nested_otherwise(names: Sequence[str], got: pytree.TreeSpec, planned: pytree.TreeSpec) -> str:
    """Which input holds more or fewer values than the plan knows."""
    counts = [spec.child(0).num_children for spec in (got, planned)]
    if counts[0] != counts[1]:
        return f"{counts[0]} positional inputs are given, but the model was planned with {counts[1]}"
    called = [*(f"positional input {number}" for number in range(counts[0])), *(f"input {name!r}" for name in names)]
    each = [[*spec.child(0).children(), *spec.child(1).children()] for spec in (got, planned)]
    what, have, want = next(found for found in zip(called, *each, strict=True) if not _as_many(*found[1:]))
    return (
        f"{what} nests {have.num_leaves} values ({_kind(have)}), but the model was planned with {want.num_leaves} in "
        f"its place ({_kind(want)}): give tensors as in the example inputs (torch.as_tensor(...) of nested lists), or "
        "plan again with inputs of this form"
    )


def _as_many(one: pytree.TreeSpec, other: pytree.TreeSpec) -> bool:
    return one.num_leaves == other.num_leaves


def _kind(spec: pytree.TreeSpec) -> str:
    return "one value" if spec.is_leaf() else f"a {spec.type.__name__}"


def _check_input(leaf: LeafSpec, value: Any, expected: tuple[int, ...], what: str) -> None:
    if not isinstance(value, Tensor):
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise InputError(f"input {leaf.name!r} is of type {kind}: give a torch.Tensor, e.g. torch.as_tensor(value)")
    if tuple(value.shape) != expected:
        raise InputError(
            f"input {leaf.name!r} has shape {tuple(value.shape)}, but {what} was planned as {expected}: pass "
            "pmodel.shard(batch) of a global batch of the planned size (drop or pad the last batch), or plan again for "
            "this size"
        )
    if value.dtype != leaf.dtype:
        raise InputError(
            f"input {leaf.name!r} has dtype {value.dtype}, but was planned as {leaf.dtype}: convert it "
            f"(.to({leaf.dtype})), or plan again with example inputs of this dtype"
        )
