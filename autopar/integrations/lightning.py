"""A Lightning strategy whose processes hold one parallel module together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.checkpoint.load import load_checkpoint
from autopar.checkpoint.save import save_checkpoint
from autopar.integrations import FOLDER
from autopar.runtime.module import ParallelModule
from planner.base.errors import InputError

STATE = "lightning.pt"
"""Of a saved checkpoint: all that Lightning knows, beside the module and its optimizer."""


class PlanStrategy(ModelParallelStrategy):
    """A strategy for a LightningModule whose ``configure_model`` calls :func:`autopar.parallelize`.

    Every process is handed whole global batches, of which ``pmodel.shard(batch)`` takes the part; what is logged is
    global as it is. Accumulation and clipping are the Trainer's. A checkpoint is a folder with an autopar checkpoint
    of module and optimizer, from which any plan on any number of processes resumes.

    Args:
        options: ``process_group_backend`` and ``timeout``, as of ``ModelParallelStrategy``.
    """

    def __init__(self, **options: Any):
        super().__init__(data_parallel_size=1, **options)

    def setup_environment(self) -> None:
        """As of ``ModelParallelStrategy``: one rank of data, so that samplers share nothing out."""
        self._tensor_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @property
    def parallel_module(self) -> ParallelModule:
        """The one that ``configure_model`` made.

        Raises:
            InputError: there is none or several, or the LightningModule has parameters beside it.
        """
        module = self.lightning_module
        assert module is not None
        found = [each for each in module.modules() if isinstance(each, ParallelModule)]
        if len(found) != 1:
            raise InputError(
                f"{type(module).__name__} holds {len(found)} parallel modules: let configure_model set one attribute "
                "to what autopar.parallelize(...) returns"
            )
        inside = {id(parameter) for parameter in found[0].parameters()}
        outside = [name for name, parameter in module.named_parameters() if id(parameter) not in inside]
        if outside:
            raise InputError(
                f"{outside[0]} of {type(module).__name__} is no parameter of its parallel module, and no process would "
                "share its gradient: make it a part of the model that is parallelized"
            )
        return found[0]

    def setup_optimizers(self, trainer: Any) -> None:
        """As of ``ModelParallelStrategy``, where the module can be trained and saved."""
        assert self.parallel_module is not None
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise InputError(f"configure_optimizers returns {len(self.optimizers)} optimizers, and a plan has one")

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The value as it is, whatever the operation: one of the global batch is one value, not one a process."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The value as it is, likewise, without a further dimension, as in one process."""
        return self.reduce(tensor)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """As of ``ModelParallelStrategy``: what processes decide by their own clocks and files may differ."""
        votes = super().reduce(torch.tensor(int(decision), device=self.root_device), reduce_op=ReduceOp.SUM)
        return int(votes) == self.world_size if all else bool(votes)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: :meth:`save_checkpoint` saves parameters where they are."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing, likewise."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save all of it to a folder; every process calls it.

        Raises:
            InputError: ``storage_options`` are given, which no checkpoint of a plan has.
        """
        if storage_options is not None:
            raise InputError("a plan's checkpoint is a folder without storage_options: leave them out")
        path = Path(self.broadcast(filepath))
        optimizer = self.optimizers[0] if "optimizer_states" in checkpoint else None
        save_checkpoint(path / FOLDER, self.parallel_module, optimizer)
        if self.is_global_zero:
            torch.save(checkpoint, path / STATE)
        self.barrier()

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load all of it, under any plan; the optimizer where there is one, while fitting."""
        path = Path(self.broadcast(checkpoint_path))
        state: dict[str, Any] = torch.load(path / STATE, map_location="cpu", weights_only=weights_only is not False)
        optimizer = self.optimizers[0] if self.optimizers and "optimizer_states" in state else None
        load_checkpoint(path / FOLDER, self.parallel_module, optimizer)
        return state
