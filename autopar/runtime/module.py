"""The parallel module: parameters in their stored layouts under their original names, and the program.

It computes what the original module computes on the global batch; each rank passes its part of the
inputs (:meth:`ParallelModule.shard` cuts a global batch) and gets what the model returns.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from autopar.graph.listing import readable
from autopar.graph.slabs import Slabs, apart
from autopar.runtime.data.agreement import DataAgreement
from autopar.runtime.data.batch_share import BatchShare
from autopar.runtime.data.loader import DistributedDataLoader
from autopar.runtime.data.sampler import DistributedBatchSampler
from autopar.runtime.host.gradient_buckets import Buckets
from autopar.runtime.layers.segment import Compilation, Compiler, segments_in
from autopar.runtime.offload.block_hooks import parts_at_home
from autopar.runtime.offload.executor import OffloadExecutor
from autopar.runtime.optim.early_update import AFTER, EarlyUpdates, check_separate
from autopar.runtime.optim.gradients import Holders, know_each_other
from autopar.runtime.optim.optimizer import Groups, StateKeeper, expect_state, make_optimizer
from autopar.runtime.optim.owners import Owned, owned
from autopar.runtime.optim.parts import is_cut, local
from autopar.runtime.pipeline.executor import PipelineStep
from autopar.runtime.pipeline.stage import programs_in
from autopar.runtime.pipeline.trace import observed, save_together
from autopar.runtime.spmd.expert_load import ExpertLoad, load_of
from autopar.runtime.spmd.input_form import InputForm
from autopar.runtime.spmd.interface import Interface, LeafSpec
from autopar.runtime.spmd.mesh import as_dtensor, contiguous_strides, groups_of, placements
from autopar.runtime.spmd.module_tree import lookup, register
from autopar.runtime.spmd.original import Fronts, fill, warn_of_module
from autopar.runtime.spmd.parameters import local_parts, renew
from autopar.runtime.spmd.pipeline_ranks import PipelineRanks
from autopar.runtime.spmd.pretrained import save_pretrained
from autopar.runtime.spmd.programs import Emitted, Maker, Programs
from autopar.runtime.spmd.run_state import RunState
from autopar.runtime.spmd.state_dict import on_all_stages, part_like, slabs_like, whole_tensors
from autopar.runtime.spmd.step_observer import Seen, StepObserver
from planner.analysis.overlaps import Overlap
from planner.base.errors import InputError, PlanError
from planner.base.formatting import sizes_text
from planner.formulation.resharding import Collective
from planner.ir.layout import Mesh
from planner.plan.comparison import Comparison, compare
from planner.plan.document.document import Document
from planner.plan.timeline import StepTimeline

Program = GraphModule | PipelineStep
"""Leaves -> outputs and updates."""


class ParallelModule(Fronts):
    """One rank's share of a parallelized model; an ordinary module of DTensor parameters.

    It has the attributes of the original, see :mod:`autopar.runtime.spmd.original`.

    Args:
        program: the root of the emitted program.
        interface: how it maps onto the model.
        original: the model; it is asked again for inputs of another form, for which it may be on the meta device.
        mesh: the planner's mesh.
        device_mesh: the torch mesh of the same axes.
        rank: this process's rank.
        names: every parameter and buffer name of the original model -> the first name of that tensor.
        not_saved: the buffers among them that are no part of the state dict.
        make_part: makes this rank's part of a leaf (local tensor).
        state: training mode and random numbers.
        state_bytes: of optimizer state, per element of the parameters, that the plan counts.
        pipeline: the ranks that hold the same part of other stages.
        offload: moves parameters and gradients between tiers, if they move.
        early: updates parameters in backward, if the plan does.
        maker: makes programs for these; ``None``: there are none.
        slabs: parameters that hold several of the original's.
        compiler: of blocks, if they are compiled.
    """

    _is_accelerate_prepared = True  # for accelerate and its Trainer: this is not to be wrapped, moved or sharded
    accepts_loss_kwargs = False  # for Transformers' Trainer: a plan is for the inputs that it was made with

    def __init__(
        self,
        program: Program,
        interface: Interface,
        *,
        original: nn.Module,
        mesh: Mesh,
        device_mesh: DeviceMesh,
        rank: int,
        names: Mapping[str, str],
        not_saved: Collection[str],
        make_part: Callable[[LeafSpec], Tensor],
        state: RunState,
        state_bytes: int,
        pipeline: PipelineRanks | None = None,
        offload: OffloadExecutor | None = None,
        early: EarlyUpdates | None = None,
        maker: Maker | None = None,
        slabs: tuple[Slabs, ...] = (),
        compiler: Compiler | None = None,
    ):
        super().__init__()
        self.offload, self._early, self._state_bytes = offload, early, state_bytes
        self.slabs, self.compiler = slabs, compiler
        self.interface, self.mesh, self.device_mesh, self.rank = interface, mesh, device_mesh, rank
        self.state, self.pipeline = state, pipeline
        self.data_agreement: DataAgreement | None = None  # of ranks that are processes
        self.planned: Document | None = None
        self.planned_overlaps: Sequence[Overlap] = ()
        self.planned_memory: Callable[[], Mapping[str, int]] | None = None  # of this rank, where others hold other
        self.planned_calls: Callable[[], Mapping[Collective, int]] | None = None  # likewise
        self._seen: Seen | None = None
        self._is_observed = False
        self._program = (program,)  # in a tuple: its modules are not parts of the user's model
        tensors: dict[str, Tensor] = {}
        constants: dict[str, Tensor] = {}
        for leaf in interface.leaves:
            if leaf.kind in ("param", "buffer"):
                tensors[leaf.name] = self._stored(leaf, make_part(leaf))
            elif leaf.kind == "const":
                constants[leaf.name] = make_part(leaf)
        self._programs = Programs(Emitted(program, interface, constants), maker)
        self._everywhere = dict(names)
        self._leaf_names = {leaf.name: leaf for leaf in interface.leaves if leaf.kind in ("param", "buffer")}
        self.buckets = Buckets()
        for name, first in names.items():
            if first in tensors:
                register(self, original, name, tensors[first], name not in not_saved)
        self._let_gradients_know()
        self.train(interface.captured_training)
        self._original = (original,)  # last: from now on what is the original's own cannot be set

    def _stored(self, leaf: LeafSpec, part: Tensor) -> Tensor:
        if leaf.kind == "buffer":
            return part
        if self.offload is not None and self.offload.holds(leaf.name):
            part = self.offload.keep(leaf.name, part)
        stored = as_dtensor(part, self.device_mesh, placements(leaf.layout), leaf.shape, contiguous_strides(leaf.shape))
        return nn.Parameter(stored, requires_grad=leaf.trainable)

    def _let_gradients_know(self) -> None:
        """Of each other, where torch's functions over all of them would not see all, and of their files; see
        :mod:`gradients`.
        """
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        step = self.program if isinstance(self.program, PipelineStep) else None
        trainers = None if step is None else step.spec.trainers
        ways = {p.placements for p in trained if isinstance(p, DTensor)}
        disk = None if self.offload is None else self.offload.engine.disk
        is_apart = trainers is not None or len(ways) > 1
        if not is_apart and disk is None:
            return
        repeated = [] if step is None else [leaf for tie in step.spec.ties if not tie.first for leaf in tie.leaves]
        axes = tuple(groups_of(self.device_mesh).values()) if is_apart else ()
        holders = Holders(axes, disk=disk) if trainers is None else Holders(axes, trainers.group, trainers.alike, disk)
        know_each_other(trained, self._stored_as(repeated), holders)

    @property
    def program(self) -> Program:
        """The emitted program of this rank, or what runs those of a micro-batched step."""
        return self._program[0]

    @property
    def planned_form(self) -> InputForm:
        """The form of the inputs that the module was planned for."""
        return self._programs.form

    @property
    def compilation(self) -> Compilation | None:
        """What was compiled so far, and what does not compile, if blocks are compiled: each is when it first runs."""
        return None if self.compiler is None else self.compiler.done

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
        only: Callable[[str, nn.Parameter], bool] | None = None,
        master_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Any:
        """An optimizer over the parameters that this rank holds; it updates them where they are at home.

        It is what ``make([...], **options)`` makes: schedulers, clipping, ``torch.amp.GradScaler`` and checkpoints take
        it as any other. Adam and AdamW step by torch's fused kernels, unless ``fused``, ``foreach`` or
        ``differentiable`` is given; torch's other fused kernels take no DTensors. Of a plan with model data on disk
        its state goes to files after the first step, where one that is made otherwise keeps it in the host's memory.
        Of a plan that updates in backward (pin ``update``), ``backward()`` updates what has its home on the host, or
        what one block alone reads where everything is on the device, and ``step()`` ends the step with what is left:
        there is nothing to clip or unscale between them.

        Where ranks hold parts of parameters, an optimizer that updates every element by itself steps these; so does one
        that goes by norms of whole parameters (:class:`autopar.Lamb`, :class:`autopar.Lars`). One that needs whole
        parameters (``torch.optim.Muon``, ``torch.optim.Adafactor``) has each of them gathered on one of these ranks,
        which steps it and has its state; every rank must call its ``state_dict()``.

        Args:
            make: the optimizer's class, e.g. ``torch.optim.AdamW``.
            only: which parameters it is for, by name and parameter, where others have an optimizer of their own, e.g.
                ``lambda name, p: p.ndim == 2 and "embed" not in name`` for Muon.
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
            InputError: ranks hold parts of the model, and the optimizer updates neither every element nor every
                parameter by itself; or it needs whole ones, and the plan keeps them elsewhere; a pattern matches no
                parameter; masters of ``master_dtype`` do not hold what parameters do, or the optimizer cannot step
                them; or the plan updates in backward, and the optimizer does not update each parameter by itself, or
                is only for some.
            InfeasibleError: by ``step()``, or where that updates by ``backward()``: the disk has no room for the state.
                The step is made, and the next one tries again.
        """
        if self._early is not None and only is not None:
            raise InputError(
                "only: backward updates parameters by one optimizer (pin 'update' is 'backward'), and lets their "
                f"gradients go, which another one would wait for: {AFTER}"
            )
        buffers = {leaf.name for leaf in self._leaf_names.values() if leaf.kind == "buffer"}
        parameters = {self._everywhere[name]: parameter for name, parameter in self.named_parameters()}
        if only is not None:
            parameters = {name: parameter for name, parameter in parameters.items() if only(name, parameter)}
        made = make_optimizer(
            make,
            parameters,
            {name: first for name, first in self._everywhere.items() if first not in buffers},
            {name: each.name for each in self.slabs if each.name in parameters for name in each.tables},
            self.pipeline is not None or any(is_cut(parameter) for parameter in self.parameters()),
            groups,
            options,
            master_dtype,
            partial(self._owned, parameters),
        )
        if master_dtype is not None:
            expect_state(made, self._state_bytes)
        if self.offload is not None and self.offload.engine.disk is not None:
            StateKeeper(self.offload.engine.disk).watch(made)
        if self._early is not None:
            for each in ({}, *groups):
                check_separate(make, {**options, **{key: value for key, value in each.items() if key != "params"}})
            self._early.update_by(made)
        return made

    def accumulate_gradients_in(self, dtype: torch.dtype) -> None:
        """Add gradients of parameters in bfloat16 or float16 up in a wider dtype: those of the micro-batches of a step,
        and those of several calls of backward, until they are set to ``None``.

        What a step adds up is rounded once to the parameter's dtype, in which ranks reduce it and plans price it;
        ``parameter.grad`` is in the wider one. It is for optimizers with ``master_dtype``. Plans do not count the wider
        gradients: they take so many bytes more for each element, as parameters are used and as they are stored.

        Args:
            dtype: e.g. ``torch.float32``.

        Raises:
            InputError: it does not hold what gradients do; there are some in another one; they have their home
                beside the device; or backward uses them.
        """
        if self.offload is not None:
            raise InputError(
                "the plan keeps gradients beside the device, where they are added up in the dtype of their parameter: "
                "plan with pin={'offload': 'none'}, or convert the model to a wider dtype before it is planned"
            )
        if self._early is not None:
            raise InputError(f"gradients are added up in {dtype}, and backward uses each one by itself: {AFTER}")
        trained = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        for name, parameter in trained.items():
            if torch.promote_types(parameter.dtype, dtype) != dtype:
                raise InputError(
                    f"gradients are to be added up in {dtype}, which does not hold those of {name} in "
                    f"{parameter.dtype}: give a wider dtype, e.g. torch.float32"
                )
            if parameter.grad is not None and parameter.grad.dtype != dtype:
                raise InputError(
                    f"gradients are to be added up in {dtype}, and {name} has one in {parameter.grad.dtype}: call this "
                    "before the first backward, or after zero_grad()"
                )
        self.state.gradient_dtype = dtype
        for parameter in trained.values():
            parameter.grad_dtype = dtype

    def _owned(self, parameters: Mapping[str, nn.Parameter]) -> list[Owned]:
        """Who steps each of these parameters that is cut, where an optimizer steps whole ones.

        Raises:
            InputError: they are at home beside the device, or updated before all gradients are there.
        """
        if self._early is not None:
            raise InputError(
                "the optimizer needs whole parameters, which are gathered on one rank each and stepped together, and "
                f"backward updates each block's by themselves (pin 'update' is 'backward'): {AFTER}"
            )
        if self.offload is not None:
            raise InputError(
                "the optimizer needs whole parameters, which are gathered on one rank each, and the plan keeps "
                "parameters beside the device: plan with pin={'offload': 'none'}, or take an optimizer that updates "
                "every element by itself (AdamW, SGD ...) or goes by norms (autopar.Lamb, autopar.Lars)"
            )
        layouts = [self._leaf_names[name].layout for name in parameters]
        stored = [parameter for parameter in parameters.values() if isinstance(parameter, DTensor)]
        return owned(stored, layouts, self.mesh, self.rank)

    def print_code(self) -> None:
        """Print the emitted Python: each distinct block once, then the root that calls them."""
        print(self.code())

    def code(self) -> str:
        """The emitted Python as text."""
        if isinstance(self.program, PipelineStep):
            programs = self.program.programs
        else:
            programs = [*programs_in(self.program), ("root", self.program)]
        segments = {name: each.program for _, module in programs for name, each in segments_in(module)}
        return "\n\n\n".join(_readable(module.code, name) for name, module in [*segments.items(), *programs]) + "\n"

    def load(self) -> ExpertLoad:
        """How many tokens went to each expert in the last calls of experts; every rank must call it.

        Its ``imbalances`` are what a cluster states as ``expert_imbalance``, for the next plan on any number of ranks.

        Raises:
            InputError: no step ran, or the model has no experts.
        """
        return load_of([*self.state.routed], 0 if self.pipeline is None else self.pipeline.rank)

    def timeline(self) -> StepTimeline:
        """What every rank of the pipeline was seen to do in the last step, beside the bubble that was predicted.

        All ranks must call it. A step is a call of the model: what follows it, such as the optimizer's update, is not
        part of it. Clocks of ranks are compared by messages, see :func:`autopar.runtime.pipeline.trace.ahead_s`.

        Raises:
            InputError: there was no step yet, or the plan runs without micro-batches.
        """
        if not isinstance(self.program, PipelineStep):
            raise InputError(
                "this module runs without micro-batches: its backward is autograd's, of which it does not see when it "
                "runs. torch.profiler records such a step; pin micro_batches for a micro-batched step"
            )
        return observed(self.program.spec.recorder, self.pipeline)

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Observe the steps inside, for :meth:`compare`: ``with pmodel.observe(): ...``; every rank does.

        Every second step runs under torch's profiler, which knows what collectives take; the others time blocks, and
        actions of a pipeline's schedule. A step that fails is not counted.

        Raises:
            InputError: they are observed already.
        """
        if self._is_observed:
            raise InputError(
                "steps of this module are observed already: leave the `with pmodel.observe():` around this one, which "
                "sees these steps, too"
            )
        observer = _observer_of(self.program, self._device)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        observer.start()
        self._is_observed = True
        try:
            with _telling(self.program, observer):
                yield
        finally:
            self._is_observed = False
            self._seen = observer.stop()

    def compare(self, optimizer: torch.optim.Optimizer | None = None) -> Comparison:
        """What the observed steps took on this rank beside what the plan predicts: seconds of every distinct block and
        of every kind of collective, with standard errors, and bytes by use; in a micro-batched step seconds of a
        micro-batch, and of the actions of stages. Of the collectives and messages that were on their way while the
        rank computed, it says which the plan has so, and what of their seconds was hidden.

        ``pmodel.compare().save("run.json")`` writes it for ``autopar profile --from run.json``, by which the next plan
        is priced. The peak of memory is observed on GPUs; on CPUs :func:`autopar.verify` counts it.

        Args:
            optimizer: whose state is compared, too.

        Raises:
            InputError: nothing was observed, see :meth:`observe`.
            PlanError: the plan runs micro-batches while model data moves.
        """
        if self._seen is None or self.planned is None or not self._seen.blocks:
            raise InputError("no step was observed: run some inside of `with pmodel.observe():` first, at least two")
        memory = {"parameters": sum(map(_local_bytes, (*self.parameters(), *self.buffers())))}
        if gradients := [each.grad for each in self.parameters() if each.grad is not None]:
            memory["gradients"] = sum(map(_local_bytes, gradients))
        if optimizer is not None:
            state = (value for each in optimizer.state.values() for value in each.values())
            memory["optimizer"] = sum(_local_bytes(value) for value in state if isinstance(value, Tensor))
        if self._device.type == "cuda":
            memory["peak"] = torch.cuda.max_memory_allocated()
        seen = self._seen
        held = None if self.planned_memory is None else self.planned_memory()
        calls = None if self.planned_calls is None else self.planned_calls()
        return compare(
            self.planned,
            seen.blocks,
            seen.collectives,
            memory,
            self.planned_overlaps,
            seen.overlaps,
            seen.actions,
            held,
            calls,
        )

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`timeline` for https://ui.perfetto.dev, as :meth:`planner.plan.plan.Plan.save_trace` writes the
        predicted one. All ranks must call it; rank 0 writes, of the pipeline that it is in.

        Raises:
            InputError: as :meth:`timeline`; or the file cannot be written, on every rank.
        """
        save_together(self.timeline(), path)

    def train(self, mode: bool = True) -> ParallelModule:
        """Set training mode; a program that was captured in eval mode cannot train, another one is made for it."""
        if mode and not self.interface.captured_training:
            if self._programs.maker is None:
                raise PlanError("the model was captured in eval mode: call model.train() before autopar.parallelize")
            self._programs.maker.check()
        for module in self.modules():
            module.training = mode
        self.state.training = mode
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: process groups cannot be pickled."""
        raise InputError(
            "a parallel module cannot be pickled, since it talks to other ranks: autopar.save_checkpoint saves "
            "what ranks hold, pmodel.full_state_dict() is the whole, pmodel.save_pretrained(...) writes that"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelModule:
        """Parameters and buffers of its own, on the same process groups; every rank copies for itself.

        The original is the same one: what :meth:`gather_module` of either returns is filled anew by that of the other.
        """
        if self.offload is not None:
            raise InputError(
                "a module whose parameters have their home on the host or on disk cannot be copied: call "
                "autopar.parallelize again, with state_dict=pmodel.full_state_dict()"
            )
        groups = list(groups_of(self.device_mesh).values())
        for step in (each.program for each in self._programs.all):
            if isinstance(step, PipelineStep):
                groups += [tie.group for tie in step.spec.ties]
                groups += [step.spec.trainers.group] if step.spec.trainers is not None else []
        shared = (
            *(each.interface for each in self._programs.all),
            self.mesh,
            self.device_mesh,
            self.pipeline,
            self.planned,
            self._programs.maker,
            *self._original[0].modules(),
            *groups,
        )
        memo.update({id(value): value for value in shared})
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        made._let_gradients_know()
        return made

    def shard(self, batch: Any) -> Any:
        """This rank's part of a global batch: the same nesting, tensors cut as the plan stores the inputs.

        A batch of another form than planned is cut as that, whole where it does not divide; what it is called with
        then runs in a program of its own, see :meth:`forward`.

        Args:
            batch: keyword inputs (a mapping), or positional ones (a tuple), with global shapes; the same batch on every
                rank. :meth:`dataloader` reads it from a dataset, no more on each rank than it needs.
        """
        if self._programs.maker is None:
            return self.interface.shard(batch, self.mesh, self.rank, self._device)
        is_named = isinstance(batch, Mapping)
        call = self._programs.call_of((), dict(batch)) if is_named else self._programs.call_of(tuple(batch), {})
        args, kwargs = call.with_values(self._programs.shard(call, self.mesh, self.rank, self._device))
        return {name: kwargs[name] for name in batch} if is_named else args

    def dataloader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> DistributedDataLoader:
        """A ``torch.utils.data.DataLoader`` that yields this rank's part of global batches, on its device, as
        :meth:`shard` would cut them: ``for part in loader: loss = pmodel(**part)`` (``*part`` of positional inputs).

        A rank loads the samples that it computes with: data ranks each their own, others the same. Every rank makes the
        loader, of the same dataset with the same arguments.

        Args:
            dataset: map-style; or a ``torch.utils.data.IterableDataset``, which every rank reads whole.
            batch_size: samples of the global batch, over all ranks; left out: the planned one. Another one runs in a
                further program, see :meth:`forward`.
            shuffle: draw the order, from ``seed`` and the epoch (``set_epoch``, else passes are counted).
            seed: of the order, which depends neither on the plan nor on the number of ranks.
            drop_last: leave out a last batch that is smaller than the others. If not, it runs in a further program.
            collate_fn: makes a batch of a list of samples, as of a DataLoader. It is given this rank's samples alone,
                so what it makes of a sample must not depend on the others: pad to the planned length, not the longest.
            options: of the DataLoader, e.g. ``num_workers=4``, ``pin_memory=True``.

        Raises:
            InputError: the dataset, the size or an option does not fit the plan.
        """
        given = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last, "collate_fn": collate_fn, **options}
        share = self._share(batch_size)
        return DistributedDataLoader(dataset, share, self.interface, self.shard, self._device, **given)

    def sampler(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = True,
    ) -> DistributedBatchSampler:
        """The samples that this rank loads, batch by batch, for a loader of your own:
        ``DataLoader(dataset, batch_sampler=pmodel.sampler(dataset))``; arguments as of :meth:`dataloader`.

        Raises:
            InputError: the dataset or the size does not fit the plan; or the plan cuts inputs in different ways, as
                only :meth:`dataloader` does.
        """
        share = self._share(batch_size)
        if share.cut_further:
            raise InputError(
                f"a rank does not take all samples that it loads of {', '.join(map(repr, share.cut_further))}, since "
                "the plan cuts its inputs in different ways: use pmodel.dataloader(dataset), which cuts each of them"
            )
        return DistributedBatchSampler(dataset, share, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def _share(self, batch_size: int | None) -> BatchShare:
        return BatchShare.of(self._programs.inputs_of(batch_size), self.mesh, self.rank, batch_size)

    @property
    def _device(self) -> torch.device:
        return torch.device(self.device_mesh.device_type)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for the global batch, given this rank's part of the inputs.

        The part is of a batch that is the same on every rank: :meth:`shard` cuts it, :meth:`dataloader` loads it.
        Scalars are plain tensors with the global value; other outputs are DTensors of global shape. Inputs of a form
        that did not come before have a program planned and emitted for them first, by all ranks together.

        Raises:
            InputError: the model does not take these inputs, or they may be parts as well as wholes; or, in the first
                calls, ranks that hold the same part of the batch hold different data
                (:class:`autopar.runtime.data.agreement.DataAgreement`), on every rank.
            PlanError: the plan has no further programs, or ranks have inputs of different forms.
            InfeasibleError: the program for them does not fit in memory.
        """
        emitted = self._programs.of_parts(self, args, kwargs, self.mesh)
        interface, program = emitted.interface, emitted.program
        flat, held = interface.flatten(args, kwargs), self._held()
        inputs = interface.inputs(flat, self.mesh)
        if self.data_agreement is not None:
            self.data_agreement.check(interface.input_leaves, inputs)
        of_kind = {"input": inputs, "const": emitted.constants}
        leaves = [of_kind.get(leaf.kind, held)[leaf.name] for leaf in interface.leaves]
        with nullcontext() if self.offload is None else self.offload.running(leaves):
            results = program(*leaves)
        if self.offload is not None:
            results = tuple(map(self.offload.apart, results))
        if isinstance(self.program, PipelineStep) and torch.is_grad_enabled():
            # What the program has of the old memory stays as it is.
            renew(self._stored_as(self.program.borrowed))
        count = len(results) - len(interface.updates)
        if self.training:
            for name, value in zip(interface.updates, results[count:], strict=True):
                if value is not None:  # of a stage of this rank
                    self.update_buffer(name, value.detach())
        return interface.returned(results[:count], self.device_mesh)

    def _held(self) -> dict[str, Tensor]:
        """What this rank holds, by name: of a parameter its part, whose gradient is the parameter's."""
        tensors = {name: lookup(self, name) for name in self._leaf_names}
        if self.offload is None:
            return local_parts(tensors, self.buckets, self._early)
        carried = {name: t for name, t in tensors.items() if isinstance(t, DTensor) and self.offload.holds(name)}
        others = {name: t for name, t in tensors.items() if name not in carried}
        if isinstance(self.program, PipelineStep):
            self.offload.begin_with(carried)
            return local_parts(tensors, self.buckets)
        return {**local_parts(others, self.buckets), **parts_at_home(self.offload, carried)}

    def _stored_as(self, leaves: Collection[str]) -> list[DTensor]:
        """The parameters that are these leaves of a micro-batched step."""
        if not isinstance(self.program, PipelineStep):
            return []
        names = dict(zip(self.program.spec.leaves, self.interface.leaves, strict=True))
        tensors = (lookup(self, names[leaf].name) for leaf in leaves)
        return [tensor for tensor in tensors if isinstance(tensor, DTensor)]

    def update_buffer(self, name: str, value: Tensor) -> None:
        """Give a buffer its new value; the old tensor stays as it was, since backward may need it."""
        old = lookup(self, name)
        for module in self.modules():
            for key, buffer in module._buffers.items():
                if buffer is old:
                    module._buffers[key] = value

    def full_state_dict(self) -> dict[str, Tensor]:
        """The original model's state dict, whole, on the CPU; every rank must call it (it gathers).

        Raises:
            DiskError: a parameter is in a file that cannot be read.
        """
        found = whole_tensors(self.state_dict(), self._everywhere, self.pipeline, self._device)
        return dict(apart(self.slabs, found))

    @property
    def module(self) -> nn.Module:
        """The original, with the parameters and buffers that it had when the model was parallelized; warns of it.

        :meth:`gather_module` gives it those that are trained.
        """
        warn_of_module(type(self._original[0]).__name__)
        return self._original[0]

    def gather_module(self) -> nn.Module:
        """The original, filled with the parameters and buffers as they are now, in place; every rank must call it.

        It is one module, however often this is called, and of a copy (``copy.deepcopy(pmodel)``) the same: copy what it
        returns to keep two states, ``copy.deepcopy(pmodel.gather_module())``.
        Each rank then holds the model whole, where its original lies, and takes one whole tensor more meanwhile. What
        the model never uses stays as it was.

        Raises:
            DiskError: a parameter is in a file that cannot be read.
        """
        fill(self._original[0], self._whole_tensors())
        return self._original[0]

    @property
    def save_pretrained(self) -> Callable[..., None]:
        """Writes what ``save_pretrained`` of the original does, with the parameters and buffers as they are now; takes
        its arguments. Every rank must call it; rank 0 writes, and holds the model whole on the CPU meanwhile.

        Raises:
            AttributeError: the original has no ``save_pretrained``.
            DiskError: a parameter is in a file that cannot be read.
            InputError: rank 0 cannot write it; on every rank.
        """
        if not hasattr(self._original[0], "save_pretrained"):
            raise AttributeError("save_pretrained")
        return partial(save_pretrained, self._original[0], self._everywhere, self._whole_tensors)

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and buffer, whole, by its first name."""
        own = {name: lookup(self, name) for name in self._leaf_names}
        names = dict.fromkeys(self._everywhere.values())
        return apart(self.slabs, whole_tensors(own, names, self.pipeline, self._device))

    def __repr__(self) -> str:
        """One line: what was parallelized, how, and how much of it is here."""
        sizes = dict(zip(self.mesh.names, self.mesh.sizes, strict=True))
        if self.pipeline is not None:
            sizes = {"pipeline": self.pipeline.size, **sizes}
        if isinstance(self.program, PipelineStep):
            sizes |= {"micro-batches": self.program.spec.micro_batches.count}
        rank = dist.get_rank() if dist.is_initialized() else self.rank
        whole = sum(parameter.numel() for parameter in self._original[0].parameters())
        here = sum(local(parameter).numel() for parameter in self.parameters())
        return (
            f"ParallelModule({type(self._original[0]).__name__}, {whole:,} parameters, {here:,} of them on rank "
            f"{rank}; {sizes_text(sizes)}; {'train' if self.training else 'eval'} mode)"
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load full tensors (the original model's dict) or DTensors (another plan's, on this mesh).

        Raises:
            DiskError: a parameter is in a file that cannot be written; nothing was loaded.
        """
        if isinstance(self.program, PipelineStep):
            self.program.left = None  # gradients of other weights
        if self.offload is not None:
            self.offload.early.settle()
        own, slabs = self.state_dict(), {each.name for each in self.slabs}

        def load() -> Any:
            theirs = () if self.pipeline is None else self._everywhere.keys() - own.keys()
            left_out = {*theirs, *(name for each in self.slabs for name in each.tables)}
            given = {name: value for name, value in state_dict.items() if name not in left_out}
            local = {
                name: self._like(name, value, own[name]) if name in own else value for name, value in given.items()
            }
            missing = self._fill_slabs(local, own, state_dict, strict)
            found = super(ParallelModule, self).load_state_dict(local, strict=strict, assign=assign)
            keys = (name for name in found.missing_keys if name not in slabs)
            return found._replace(missing_keys=[*keys, *missing])

        return load() if self.pipeline is None else on_all_stages(load, self.pipeline)

    def _fill_slabs(
        self, local: dict[str, Tensor], own: Mapping[str, Tensor], state_dict: Mapping[str, Any], strict: bool
    ) -> list[str]:
        """Put slabs into ``local`` as the tables of a state dict fill them; returns those of these that it lacks."""
        lacking: list[str] = []
        for slabs in self.slabs:
            if slabs.name in local or slabs.name not in own:
                continue
            tables = {name: state_dict[name] for name in slabs.tables if name in state_dict}
            missing = [name for name in slabs.tables if name not in tables]
            if missing and strict:
                beside = f", in slabs with {', '.join(tables)}" * bool(tables)
                raise InputError(
                    f"{' and '.join(missing)} missing{beside}: give all of them, or load what is there with "
                    "strict=False"
                )
            if tables:
                layout = self._leaf_names[slabs.name].layout
                local[slabs.name] = slabs_like(slabs, tables, own[slabs.name], layout, self.mesh, self.rank)
            lacking += missing
        return lacking

    def _like(self, name: str, value: Tensor, own: Tensor) -> Tensor:
        if not isinstance(own, DTensor):
            return value
        leaf = next(spec for spec in self._leaf_names.values() if lookup(self, spec.name) is lookup(self, name))
        return part_like(name, value, own, leaf.layout, self.mesh, self.device_mesh, self.rank)


def _observer_of(program: Program, device: torch.device) -> StepObserver:
    """Of a program's steps."""
    if isinstance(program, GraphModule):
        return StepObserver(_blocks_of([program]), device)
    stages, recorder = program.spec.stages, program.spec.recorder
    firsts = {number: stage.first_block for number, stage in stages.items()}
    blocks = _blocks_of([stage.program for stage in stages.values()])
    return StepObserver(blocks, device, firsts, lambda: recorder.events(0))


@contextmanager
def _telling(program: Program, observer: StepObserver) -> Iterator[None]:
    """Tell an observer when steps begin and end; one whose backward is autograd's ends where the next begins."""
    if not isinstance(program, GraphModule):
        program.spec.recorder.watcher = observer
        try:
            yield
        finally:
            program.spec.recorder.watcher = None
        return

    def begins(*_: Any) -> None:
        observer.end_step()
        observer.begin_step()

    hook = program.register_forward_pre_hook(begins)
    try:
        yield
        observer.end_step()
    finally:
        hook.remove()


def _blocks_of(programs: Sequence[GraphModule]) -> list[GraphModule]:
    """The programs of the blocks that some call."""
    return [block for each in programs for name, block in programs_in(each) if not name.endswith("_again")]


def _readable(code: str, name: str) -> str:
    """A program's text as :func:`readable`, with the runtime's functions by their own names."""
    words = "convert|(?:replicate|gather|complete)_parameters|gather_ahead|draw|(?:enter|leave)_block"
    code = re.sub(rf"\bautopar_runtime_\w+?_(?={words})", "", code)
    code = re.sub(r"\bautopar_runtime_layers_[a-z]+_", "layers.", code)
    code = re.sub(r"\bautopar_emit_block_program_getitem\((\w+), (\d+)\)", r"\1[\2]", code)
    return readable(code, name)


def _local_bytes(tensor: Tensor) -> int:
    """Bytes of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()
