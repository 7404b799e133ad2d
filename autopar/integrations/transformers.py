"""Transformers' ``Trainer`` for parallel modules, from which others that derive from it can derive, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, TRAINING_ARGS_NAME

from autopar.checkpoint.load import load_checkpoint
from autopar.checkpoint.save import save_checkpoint
from autopar.integrations import FOLDER
from autopar.integrations.accelerate import ParallelAccelerator
from autopar.runtime.module import ParallelModule
from planner.base.errors import CheckpointError, InputError


class ParallelTrainer(Trainer):
    """A ``transformers.Trainer`` of what :func:`autopar.parallelize` returns.

    All processes compute one batch together, as one process of a ``Trainer`` does: ``per_device_train_batch_size`` and
    ``per_device_eval_batch_size`` are sizes of global batches. Order of samples, collators, gradient accumulation,
    clipping, evaluation, metrics and what is logged are as in that process. A ``checkpoint-N`` has the weights in
    Transformers' files, and module, optimizer and scheduler in an autopar checkpoint, from which any plan on any
    number of processes resumes.

    What the trainer asks of a model when it is made, it asks of the original.

    ``class Mine(ParallelTrainer, Theirs)`` is one of another class, if it trains the model's own loss.

    Args:
        model: the parallel module.
        args, rest, options: of the trainer.

    Raises:
        InputError: the model is no parallel module, or the trainer is to do what is a part of the plan.
    """

    optimizer: Any
    processing_class: Any

    def __init__(self, model: Any, args: Any = None, *rest: Any, **options: Any):
        if not isinstance(model, ParallelModule):
            kind = type(model).__name__
            raise InputError(f"the model is a {kind}: give what autopar.parallelize(model, ...) returns")
        self._original: Any = model._original[0]
        super().__init__(self._original, args, *rest, **options)
        self._set_signature_columns_if_needed()
        for_loss = [name for name, _ in model.planned_form.inputs if name not in self._signature_columns]
        self._signature_columns += for_loss
        if for_loss and self.args.label_names is None:
            self.label_names = for_loss
        self.model = self.model_wrapped = self.callback_handler.model = model
        another_loss = "have autopar.parallelize(..., loss_fn=...) compute it"
        in_plan = {
            "compute_loss_func": (self.compute_loss_func, another_loss),
            "label_smoothing_factor": (self.label_smoother, another_loss),
            "activation_checkpointing": (self.args.activation_checkpointing, "pin 'recompute'"),
            "torch_compile": (self.args.torch_compile, "give autopar.parallelize(..., compile=True)"),
        }
        for name, (value, way_out) in in_plan.items():
            if value:
                raise InputError(f"{name} is decided by the plan of a parallel module: leave it out, and {way_out}")

    # ---- processes that have the same batch ----

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_options: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return self._accelerator_options

    def create_accelerator_and_postprocess(self) -> None:
        """As of ``Trainer``, with an accelerator of processes that compute one batch together."""
        super().create_accelerator_and_postprocess()
        self.accelerator = ParallelAccelerator(**self._accelerator_options)
        self.gather_function = self.accelerator.gather_for_metrics

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Where a parallel module lies is in its plan, and the original may be on the meta device."""

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of an update of the optimizer."""
        return int(self._train_batch_size * args.gradient_accumulation_steps)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        whole = super()._prepare_inputs(inputs)
        self._items = self._get_num_items_in_batch([whole], self.args.device)
        parts: dict[str, Any] = self.model.shard(whole)
        return parts

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of the whole batch; where gradients accumulate, its share by the number of its labels.

        ``Trainer`` gives a model the number of all labels to divide by; the plan's loss is a mean over the batch's own.
        """

        def outputs_of(**given: Any) -> Any:
            found = model(**given)
            return {"loss": found} if isinstance(found, torch.Tensor) else found  # of a loss_fn

        loss, outputs = super().compute_loss(outputs_of, inputs, return_outputs=True)
        if num_items_in_batch is not None and model.training:
            loss = loss * (self._items / num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """As of ``Trainer``: logits and labels are those of the whole batch."""
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if labels is not None:
            whole = self._prepare_input(inputs)
            found = tuple(whole.get(name) for name in self.label_names)
            labels = found[0] if len(found) == 1 else found
        return loss, None if prediction_loss_only else self._whole(logits), labels

    def _whole(self, outputs: Any) -> Any:
        """Outputs of the whole batch on every process; with a pipeline, from the stage that returns them."""
        mine, pipeline = self.accelerator.gather(outputs), self.model.pipeline
        if pipeline is None:
            return mine
        found: list[Any] = [None] * pipeline.size
        dist.all_gather_object(found, tree_map(torch.Tensor.cpu, mine), group=pipeline.ranks)
        given = [each for each in found if not isinstance(each, tuple) or each]
        if len(given) > 1:
            raise InputError(
                f"{len(given)} stages of the pipeline return outputs, which are not put together: set ignore_keys or "
                "prediction_loss_only, or have the model return those of its last layers alone"
            )
        return tree_map(lambda each: each.to(self.args.device), given[0]) if given else mine

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """Those of a batch by Transformers' rule, shared out among processes, over which the trainer adds up."""
        name = getattr(self._original, "main_input_name", "input_ids")
        if name not in inputs or not hasattr(self._original, "num_parameters"):
            return 0.0
        each = 6 * self._original.num_parameters(exclude_embeddings=True)
        return float(inputs[name].numel() * each / self.args.world_size)

    # ---- the optimizer ----

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer that ``args`` describe, over the parameters that this process holds.

        Raises:
            InputError: it is not made of a list of parameters, or not elementwise, and the plan shards parameters.
        """
        if self.optimizer is not None:
            return self.optimizer
        original = self._original
        make, given = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, original)
        odd = {"params", "model", "optimizer_dict"} & given.keys()
        if odd:
            raise InputError(
                f"{make.__name__} is made with {', '.join(sorted(odd))} of a whole model: choose an elementwise "
                "optimizer, or give optimizers=(pmodel.optimizer(...), None)"
            )
        trained = [name for name, parameter in original.named_parameters() if parameter.requires_grad]
        decayed = {*self.get_decay_parameter_names(original)}
        groups = [
            {"params": [name for name in trained if name in decayed], "weight_decay": self.args.weight_decay},
            {"params": [name for name in trained if name not in decayed], "weight_decay": 0.0},
        ]
        self.optimizer = self.model.optimizer(make, [group for group in groups if group["params"]], **given)
        return self.optimizer

    # ---- saving and resuming ----

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if not hasattr(self.model, "save_pretrained"):
            super()._save(str(folder), self.model.full_state_dict())
            return
        self.model.save_pretrained(folder)
        if self.args.should_save:
            processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if processing is not None:
                processing.save_pretrained(folder)
            torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        path, extra = Path(output_dir) / FOLDER, {"scheduler": self.lr_scheduler}
        save_checkpoint(path, self.model, self.optimizer.optimizer, extra=extra)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not (Path(resume_from_checkpoint) / FOLDER).exists():  # else with the optimizer, see below
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        path = Path(self.state.best_model_checkpoint) / FOLDER
        if path.exists():
            load_checkpoint(path, self.model)
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = Path(checkpoint) / FOLDER
        if path.exists():
            load_checkpoint(path, self.model, self.optimizer.optimizer, extra={"scheduler": self.lr_scheduler})
        elif (Path(checkpoint) / OPTIMIZER_NAME).exists():
            raise CheckpointError(
                f"{checkpoint!r} has the optimizer of a trainer of whole models, whose state no part of a parameter "
                f"takes: delete its {OPTIMIZER_NAME} to go on from the weights alone"
            )
