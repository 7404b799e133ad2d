"""An ``Accelerator`` whose processes hold one parallel module together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from autopar.checkpoint.load import load_checkpoint
from autopar.checkpoint.save import save_checkpoint
from autopar.integrations import FOLDER
from autopar.runtime.data.loader import DistributedDataLoader
from autopar.runtime.module import ParallelModule
from planner.base.errors import InputError


class ParallelAccelerator(Accelerator):
    """An ``accelerate.Accelerator`` for what :func:`autopar.parallelize` returns; ``prepare`` takes it as it is.

    Accelerate's own wraps no such module, but shares every batch out among processes, lets a scheduler step once for
    each of them, and saves the part of the first as if it were the whole. Here

    * loaders yield whole global batches on every process, of which ``pmodel.shard(batch)`` takes the part;
    * a scheduler steps once a step;
    * ``gather``, ``gather_for_metrics`` and ``reduce`` return whole values, which every process has already, and
      ``split_between_processes`` gives all of them all of it;
    * ``save_state`` and ``load_state`` keep the module and its optimizer in an autopar checkpoint, for any plan, and
      ``get_state_dict`` and ``save_model`` give the original's weights, whole; every process must call them.

    Args:
        options: of ``Accelerator``. ``split_batches``, ``even_batches`` are without effect: nothing is shared out.

    Raises:
        InputError: one process is to load for all (``dispatch_batches``).
    """

    _models: list[nn.Module]
    _optimizers: list[Any]
    flag_tensor: torch.Tensor | None

    def __init__(self, **options: Any):
        config = options.pop("dataloader_config", None) or DataLoaderConfiguration()
        if config.dispatch_batches:
            raise InputError(
                "dispatch_batches has one process load for all, and every process of a plan loads whole batches: leave "
                "it out, or have pmodel.dataloader(...) load each process's share"
            )
        super().__init__(dataloader_config=replace(config, split_batches=True), **options)
        self._folder = ""  # of the state that is being saved or loaded
        self._autocasting: WeakSet[nn.Module] = WeakSet()
        self.register_save_state_pre_hook(lambda models, weights, folder: setattr(self, "_folder", folder))
        self.register_load_state_pre_hook(lambda models, folder: setattr(self, "_folder", folder))

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """As of ``Accelerator``; a parallel module stays unwrapped, and is called under the accelerator's autocast."""
        if isinstance(model, ParallelModule) and self.native_amp and model not in self._autocasting:
            calls: list[ExitStack] = []  # that are running

            def enter(*_: Any) -> None:
                calls.append(ExitStack())
                calls[-1].enter_context(self.autocast())

            model.register_forward_pre_hook(enter, prepend=True)
            model.register_forward_hook(lambda *_: calls.pop().close(), always_call=True)
            self._autocasting.add(model)
        return super().prepare_model(model, *args, **kwargs)

    def prepare_data_loader(self, data_loader: DataLoader, device_placement: bool | None = None, **kwargs: Any) -> Any:
        """As of ``Accelerator``, but every process is given all of a batch, which is the global one.

        Raises:
            InputError: the loader yields parts of global batches already.
        """
        if isinstance(data_loader, DistributedDataLoader):
            raise InputError(
                "pmodel.dataloader(...) yields this rank's part of global batches already, and Accelerate would not "
                "know when it ends: give prepare() a torch.utils.data.DataLoader of whole batches, and the module "
                "pmodel.shard(batch); or leave the loader out of prepare()"
            )
        if not getattr(data_loader, "_is_accelerate_prepared", False):
            data_loader = prepare_data_loader(
                data_loader,
                self.device,
                num_processes=1,
                process_index=0,
                put_on_device=self.device_placement if device_placement is None else device_placement,
                rng_types=self.rng_types.copy(),
                dispatch_batches=False,
                use_seedable_sampler=self.use_seedable_sampler,
                data_seed=self.dataloader_config.data_seed,
                non_blocking=self.non_blocking,
                use_stateful_dataloader=self.use_stateful_dataloader,
            )
        if data_loader not in self._dataloaders:
            self._dataloaders.append(data_loader)
        return data_loader

    def gather(self, tensor: Any) -> Any:
        """Whole values of what the module returned; other tensors are of the global batch, and are returned as is."""
        return tree_map(lambda each: each.full_tensor() if isinstance(each, DTensor) else each, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As of ``Accelerator`` in one process; objects that are no tensors are of the whole batch, too."""
        if use_gather_object or not all(isinstance(each, torch.Tensor) for each in tree_leaves(input_data)):
            return self.gather(input_data)
        return super().gather_for_metrics(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As :meth:`gather`, whatever the reduction: a value of the global batch is one value, not one a process."""
        return self.gather(tensor)

    def check_trigger(self) -> bool:
        """As of ``Accelerator``: whether any process set it, as one may for a reason of its own."""
        flag = torch.tensor(0, device=self.device) if self.flag_tensor is None else self.flag_tensor
        self.flag_tensor = None
        if dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """All of the inputs: the module takes the same ones on every process."""
        yield inputs

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The original's weights, whole, on the CPU; every process must call it."""
        if isinstance(model, ParallelModule):
            return model.full_state_dict()
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """As of ``Accelerator``; the module and its optimizer are saved for any plan."""
        with self._apart() as (module, optimizer):
            saved = super().save_state(output_dir, *args, **kwargs)
        if module is not None:
            save_checkpoint(Path(self._folder) / FOLDER, module, optimizer)
        return saved

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As of ``Accelerator``, under any plan and on any number of processes.

        Raises:
            CheckpointError: the folder has no checkpoint of the module, or one of another.
        """
        with self._apart() as (module, optimizer):
            super().load_state(input_dir, *args, **kwargs)
        if module is not None:
            load_checkpoint(Path(self._folder) / FOLDER, module, optimizer)

    @contextmanager
    def _apart(self) -> Iterator[tuple[ParallelModule | None, Any]]:
        """Takes the parallel module and its optimizer out of what Accelerate saves and loads itself."""
        models, optimizers = self._models, self._optimizers
        parallel = [model for model in models if isinstance(model, ParallelModule)]
        if len(parallel) > 1 or (parallel and len(optimizers) > 1):
            raise InputError(
                f"an accelerator saves one parallel module with one optimizer, and here are {len(parallel)} with "
                f"{len(optimizers)}: save each with autopar.save_checkpoint(path, module, optimizer)"
            )
        if parallel:
            self._models, self._optimizers = [model for model in models if model is not parallel[0]], []
        try:
            yield parallel[0] if parallel else None, optimizers[0].optimizer if parallel and optimizers else None
        finally:
            self._models, self._optimizers = models, optimizers
