"""TRL's ``SFTTrainer`` for parallel modules."""

from __future__ import annotations

from typing import Any

from transformers import Trainer
from trl import SFTTrainer

from autopar.integrations.transformers import ParallelTrainer
from autopar.runtime.module import ParallelModule
from planner.base.errors import InputError

REFUSED = {
    "peft_config": "wrap the model in its adapters, peft.get_peft_model(model, config), before autopar.parallelize",
    "chat_template_path": "it may resize the model: set up model and tokenizer before autopar.parallelize",
    "activation_offloading": "the plan decides what is kept where: pin 'offload'",
}


class _PlannedLoss(SFTTrainer):
    """An ``SFTTrainer`` whose loss is the model's own, which is the same mean over labels."""

    compute_loss = Trainer.compute_loss


class ParallelSFTTrainer(ParallelTrainer, _PlannedLoss):
    """A ``trl.SFTTrainer`` of what :func:`autopar.parallelize` returns; see
    :class:`autopar.integrations.transformers.ParallelTrainer`.

    Datasets, templates and collators are TRL's. It gives a model another ``forward`` that returns log-probabilities of
    labels, from which it computes the loss; a plan has the model's own, so token accuracy, entropy and the number of
    tokens are not logged. What is recomputed in backward is in the plan: ``SFTConfig`` must say
    ``activation_checkpointing=False``, since TRL's default is ``True``.

    Raises:
        InputError: the trainer is to change the model, to recompute, or to compute another loss.
    """

    def __init__(self, model: ParallelModule, args: Any = None, *rest: Any, **options: Any):
        for name, way_out in REFUSED.items():
            if options.get(name) is not None or getattr(args, name, None):
                raise InputError(f"{name} is for models that are not parallelized yet: {way_out}")
        if getattr(args, "loss_type", "nll") != "nll":
            raise InputError(f"loss_type={args.loss_type!r}: the loss is a part of the plan, which has the model's own")
        if args is None or args.activation_checkpointing:
            raise InputError(
                "activation_checkpointing is on, by default or as given, and what is recomputed is decided by the "
                "plan: give SFTConfig(..., activation_checkpointing=False), and pin 'recompute' to choose"
            )
        super().__init__(model, args, *rest, **options)
        base = self._original.get_base_model() if hasattr(self._original, "get_base_model") else self._original
        vars(base).pop("forward", None)  # the original stays as it was, and may be captured again
