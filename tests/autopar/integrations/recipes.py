"""Runs the recipes of docs/integrations.md on processes, and the same lines with a framework's own class in one.

``python -m tests.autopar.integrations.recipes`` prints what they logged, wrote and hold as JSON. It is a process of its
own, so that the frameworks are imported once for all ranks and for nobody else.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autopar.measure.local_processes import LocalProcesses, RankError

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## (.*?)\n\n```python\n(.*?)```", PAGE, flags=re.MULTILINE | re.DOTALL))
ACCELERATE, TRAINER, LIGHTNING, TRL = RECIPES
OWN = {
    "autopar.integrations.accelerate import Parallel": "accelerate import Accelerator as Parallel",
    "autopar.integrations.transformers import Parallel": "transformers import Trainer as Parallel",
    "autopar.integrations.trl import Parallel": "trl import SFTTrainer as Parallel",
    "from autopar.integrations.lightning import PlanStrategy": "",
    "strategy=PlanStrategy(), devices=2": "devices=1",
}
"""What makes a recipe one of the framework alone, in one process."""
PRELOAD = (
    "tests.conftest",
    *("torch", "torch._export.non_strict_utils", "torch._functorch.aot_autograd", "networkx", "peft", "datasets"),
    *("transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate", "lightning.pytorch"),
    *("trl.trainer.sft_trainer", "autopar.driver.parallelize", "autopar.verification.float64"),
    *(f"autopar.integrations.{name}" for name in ("accelerate", "transformers", "lightning", "trl")),
)
"""What all processes need: imported once."""
PLANS: dict[str, dict[str, Any]] = {
    ACCELERATE: {"data": 2, "tensor": 2, "zero": 3},
    TRAINER: {"pipeline": 2, "data": 2, "micro_batches": 2},
    LIGHTNING: {"data": 4, "zero": 3},
    TRL: {"data": 2, "tensor": 2, "zero": 2},
}
"""Of four processes."""
OTHERS: dict[str, dict[str, Any]] = {
    ACCELERATE: {"tensor": 2},
    TRAINER: {"data": 2, "zero": 3},
    LIGHTNING: {"tensor": 2},
    TRL: {"data": 2, "zero": 3},
}
"""Of two processes, which go on from what the four saved."""
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
OF_TIME = ("runtime", "per_second", "preparation_time", "entropy", "token_accuracy", "num_tokens")
"""Logged, and of one run alone, or of TRL's own loss."""


def own(recipe: str) -> str:
    """A recipe as one writes it without autopar."""
    for ours, theirs in OWN.items():
        recipe = recipe.replace(ours, theirs)
    return recipe


def llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=16, use_cache=False, **sizes)
    return LlamaForCausalLM(config).double()


def samples(count: int, seed: int) -> list[dict[str, Any]]:
    """Of which some have many labels that do not count, so that a mean of means is another number."""
    import torch

    made = torch.randint(0, 64, (count, 16), generator=torch.Generator().manual_seed(seed))
    counts = torch.arange(16) >= (7 * torch.arange(count) % 13)[:, None]
    return [{"input_ids": ids, "labels": torch.where(kept, ids, -100)} for ids, kept in zip(made, counts, strict=True)]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(62)} | {"<eos>": 62, "<pad>": 63}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def texts() -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"text": " ".join(f"w{i * j % 60}" for j in range(5 + i % 7))} for i in range(24)])


def accuracy(predictions: Any) -> dict[str, float]:
    hits = predictions.predictions.argmax(-1)[:, :-1] == predictions.label_ids[:, 1:]
    return {"accuracy": float(hits.mean()), "rows": float(len(predictions.predictions))}


def in_one_process(model: Any, *_: Any, **__: Any) -> Any:
    """The model itself, with what a recipe asks of a parallel one."""
    model.optimizer = lambda make, **options: make([p for p in model.parameters() if p.requires_grad], **options)
    model.shard = lambda batch: batch
    return model


def names(pin: Mapping[str, Any] | None, world: int, count: int) -> dict[str, Any]:
    """What a recipe finds around it; without a pin, in one process."""
    import torch

    import autopar

    parallelize = in_one_process if pin is None else partial(autopar.parallelize, pin=pin)
    return {
        "torch": torch,
        "DataLoader": torch.utils.data.DataLoader,
        "default_collate": torch.utils.data.default_collate,
        "autopar": SimpleNamespace(parallelize=parallelize),
        "cluster": autopar.ClusterSpec.local(world),
        "model": llama(),
        "dataset": samples(count, 1),
        "held_out": samples(12, 2),
        "accuracy": accuracy,
        "tokenizer": tokenizer(),
        "texts": texts(),
        "options": {**QUIET, "max_epochs": 1, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        "seen": [],
    }


def collecting(seen: list[float]) -> Any:
    """A callback of Lightning that takes what was logged at every step."""
    import lightning

    class Collect(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append(trainer.callback_metrics["loss"].item())

        def on_train_end(self, trainer: Any, *_: Any) -> None:
            strategy = trainer.strategy
            seen.append(strategy.all_gather(trainer.callback_metrics["loss"]).sum().item())
            seen.append(strategy.reduce_boolean_decision(True))
            seen.append(strategy.reduce_boolean_decision(trainer.is_global_zero, all=False))

    return Collect()


def _set_up(folder: str) -> None:
    """Of one of some processes, as torchrun does it."""
    import torch
    import torch.distributed as dist
    from accelerate.state import AcceleratorState

    gc.freeze()  # trainers collect garbage again and again, and what was imported is a million objects
    for name in ("transformers", "lightning.pytorch", "datasets", "trl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "recipes"}
    os.environ["ACCELERATE_USE_CPU"] = str(world != "1").lower()  # or Accelerate takes each for the only one
    AcceleratorState._reset_state(reset_partial_state=True)  # which processes keep from one accelerator to the next
    os.chdir(folder)
    torch.manual_seed(0)


def carry_out(title: str, pin: Mapping[str, Any] | None, folder: str, go_on: bool = False) -> dict[str, Any]:
    """A recipe in one of some processes: what it logged, wrote and holds in the end.

    Args:
        go_on: from the state that the recipe saved in this folder, in its middle.
    """
    import torch.distributed as dist

    from autopar.verification.float64 import exact

    _set_up(folder)
    world = dist.get_world_size()
    text = RECIPES[title] if pin is not None else own(RECIPES[title])
    found = names(pin, world, 24 if title == LIGHTNING else 20)  # else a last batch that is smaller
    if title == LIGHTNING:
        found["options"]["callbacks"] = [collecting(found["seen"])]
    if go_on:
        text = RESUME[title](text)
    text = text.replace("devices=2", f"devices={world}")
    with exact():
        exec(compile(text, f"docs/integrations.md, {title}", "exec"), found)
        return AFTERWARDS[title](found)


def written(found: Mapping[str, Any]) -> dict[str, float]:
    """Every tensor in ``run/final``, as its product with random numbers."""
    import torch.distributed as dist
    from safetensors.torch import load_file

    dist.barrier()
    return {
        name: projected(value)
        for path in Path("run/final").glob("*.safetensors")
        for name, value in load_file(path).items()
    }


def projected(value: Any) -> float:
    import torch

    return float(
        value.double().flatten() @ torch.randn(value.numel(), generator=torch.Generator().manual_seed(3)).double()
    )


def of_trainer(found: Mapping[str, Any]) -> dict[str, Any]:
    logged = [
        {key: value for key, value in each.items() if not key.endswith(OF_TIME)}
        for each in found["trainer"].state.log_history
    ]
    return {"logged": logged, "weights": written(found)}


def of_lightning(found: Mapping[str, Any]) -> dict[str, Any]:
    pmodel = found["causal"].pmodel
    state = pmodel.full_state_dict() if hasattr(pmodel, "full_state_dict") else pmodel.state_dict()
    return {"logged": found["seen"], "weights": {name: projected(value) for name, value in state.items()}}


AFTERWARDS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    ACCELERATE: lambda found: {"logged": found["seen"], "weights": written(found)},
    TRAINER: of_trainer,
    LIGHTNING: of_lightning,
    TRL: of_trainer,
}
RESUME: dict[str, Callable[[str], str]] = {
    ACCELERATE: lambda text: text.replace("for batch in", 'accelerator.load_state("run/state")\nfor batch in', 1),
    TRAINER: lambda text: text.replace(".train()", '.train(resume_from_checkpoint="run/checkpoint-1")'),
    LIGHTNING: lambda text: (
        text.replace("batch_size=8))", 'batch_size=8), ckpt_path="run/state.ckpt")')
        .replace("**options", "**{**options, 'max_epochs': 2}")
        .replace("shard(batch)).loss)", 'shard(batch)).loss, sync_dist=True, reduce_fx="sum")')
    ),
    TRL: lambda text: text.replace(".train()", '.train(resume_from_checkpoint="run/checkpoint-1")'),
}


def refused(folder: str) -> dict[str, str]:
    """What is said of what does not go together; in one of one processes."""
    import lightning
    import torch
    from accelerate.utils import DataLoaderConfiguration
    from transformers import TrainingArguments
    from trl import SFTConfig

    import autopar
    from autopar.integrations.accelerate import ParallelAccelerator
    from autopar.integrations.lightning import PlanStrategy
    from autopar.integrations.transformers import ParallelTrainer
    from autopar.integrations.trl import ParallelSFTTrainer

    os.chdir(folder)
    warnings.simplefilter("ignore")
    dataset, model = samples(8, 1), llama()
    batch = torch.utils.data.default_collate(dataset)
    pmodel = autopar.parallelize(model, autopar.ClusterSpec.local(1), example_kwargs=batch)
    accelerator, args = ParallelAccelerator(), TrainingArguments("run", save_only_model=True)
    trainer = ParallelTrainer(pmodel, args, train_dataset=dataset)
    compiling = copy.copy(args)  # others would begin Accelerate's state anew
    compiling.torch_compile = True  # as an argument it would be one of the environment, too
    layerwise = (torch.optim.SGD, {"optimizer_dict": {}})
    Path("run/theirs").mkdir(parents=True)
    Path("run/theirs/optimizer.pt").touch()

    def two() -> None:
        strategy, holder = PlanStrategy(), lightning.LightningModule()
        holder.layer = torch.nn.Linear(2, 2)
        strategy._lightning_module = holder
        with contextlib.suppress(autopar.InputError):
            strategy.parallel_module  # noqa: B018
            raise AssertionError("no parallel module, and not a word")
        holder.pmodel = pmodel
        strategy.parallel_module  # noqa: B018

    cases: dict[str, Callable[[], Any]] = {
        "parts": lambda: accelerator.prepare(pmodel.dataloader(dataset)),
        "modules": lambda: (setattr(accelerator, "_models", [pmodel, pmodel]), accelerator.save_state("run/two")),
        "original": lambda: ParallelTrainer(model, args),
        "loss": lambda: ParallelTrainer(pmodel, args, compute_loss_func=print),
        "recomputed": lambda: ParallelTrainer(pmodel, TrainingArguments("run", activation_checkpointing=True)),
        "compiled": lambda: ParallelTrainer(pmodel, compiling),
        "optimizer": lambda: ParallelTrainer(pmodel, args, optimizer_cls_and_kwargs=layerwise).create_optimizer(),
        "whole state": lambda: trainer._load_optimizer_and_scheduler("run/theirs"),
        "adapters": lambda: ParallelSFTTrainer(pmodel, SFTConfig("run", bf16=False), peft_config=object()),
        "another loss": lambda: ParallelSFTTrainer(pmodel, SFTConfig("run", bf16=False, loss_type="dft")),
        "recomputed by default": lambda: ParallelSFTTrainer(pmodel, SFTConfig("run", bf16=False)),
        "dispatched": lambda: ParallelAccelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)),
        "parameters": two,
    }
    said = {}
    for name, case in cases.items():
        try:
            case()
            said[name] = "nothing"
        except autopar.AutoparError as error:
            said[name] = str(error)
    return said


def without_a_share(folder: str) -> dict[str, Any]:
    """What an accelerator gives one of some processes that have the same values."""
    import torch
    import torch.distributed as dist

    from autopar.integrations.accelerate import ParallelAccelerator

    _set_up(folder)
    accelerator = ParallelAccelerator()
    if dist.get_rank() == 1:
        accelerator.set_trigger()
    with accelerator.split_between_processes([1, 2, 3]) as share:
        return {
            "reduced": [accelerator.reduce(torch.tensor(3.0), kind).item() for kind in ("sum", "mean", "max")],
            "gathered": accelerator.gather_for_metrics([{"text": "a"}]),
            "share": share,
            "triggered": [accelerator.check_trigger(), accelerator.check_trigger()],
        }


def under_autocast(folder: str) -> list[float]:
    """A loss with Accelerate's mixed precision, of two modules; before that is on; and under torch's own autocast."""
    import copy

    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    import autopar
    from autopar.integrations.accelerate import ParallelAccelerator

    batch = torch.utils.data.default_collate(samples(8, 1))
    pmodel = autopar.parallelize(llama().float(), autopar.ClusterSpec.local(1), example_kwargs=batch)
    plain = pmodel(**pmodel.shard(batch)).loss.item()
    with torch.autocast("cpu", torch.bfloat16):
        expected = pmodel(**pmodel.shard(batch)).loss.item()
    loader = pmodel.dataloader(samples(8, 1))
    assert Accelerator().prepare(loader) is loader  # and not shared out once more
    AcceleratorState._reset_state()  # which processes keep from one accelerator to the next
    prepared = ParallelAccelerator(mixed_precision="bf16").prepare(pmodel, copy.deepcopy(pmodel))
    return [*(each(**pmodel.shard(batch)).loss.item() for each in prepared), plain, expected]


def around(pin: Mapping[str, Any] | None, folder: str) -> dict[str, Any]:
    """What a Trainer does beside training its own loss: evaluates and predicts at once, loads the best model, takes
    the optimizer that it is given, trains a loss that is computed beside the model, reads an iterable dataset.
    """
    import torch
    import torch.distributed as dist
    from transformers import Trainer, TrainingArguments

    import autopar
    from autopar.integrations.transformers import ParallelTrainer
    from autopar.verification.float64 import exact
    from tests.autopar.integrations.classifier import Samples, Scores, ScoresAndLoss, loss_of, rows

    _set_up(folder)
    kind, cluster = Trainer if pin is None else ParallelTrainer, autopar.ClusterSpec.local(dist.get_world_size())
    parallelize = in_one_process if pin is None else autopar.parallelize
    sizes = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "learning_rate": 1e-2}

    def args(**options: Any) -> Any:
        return TrainingArguments("run", **{"save_strategy": "no", "logging_steps": 1, **sizes, **options})

    def losses(trainer: Any) -> list[Any]:
        return [each[key] for each in trainer.state.log_history for key in ("loss", "eval_loss") if key in each]

    dataset, held_out = samples(16, 1), samples(12, 2)
    batch = torch.utils.data.default_collate(dataset[:8])
    with exact():
        pmodel = parallelize(llama(), cluster, example_kwargs=batch, pin=pin)
        trainer = kind(pmodel, args(), eval_dataset=held_out, compute_metrics=accuracy)
        measured = trainer.evaluate()
        predicted = trainer.predict([{"input_ids": each["input_ids"]} for each in held_out[:8]]).predictions
        best = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "eval_strategy": "steps"}
        steps = {"max_steps": 3, "save_steps": 1, "eval_steps": 1, "save_strategy": "steps"}
        made = (pmodel.optimizer(torch.optim.AdamW, lr=1e-2), None)
        data = {"train_dataset": Samples(dataset), "eval_dataset": held_out}
        trainer = kind(pmodel, args(**best, **steps), **data, compute_metrics=accuracy, optimizers=made)
        trainer.train()
        last, restored = losses(trainer)[-1], trainer.evaluate()["eval_loss"]
        model = Scores() if pin else ScoresAndLoss()
        given = {"example_kwargs": torch.utils.data.default_collate(rows()[:8]), "loss_fn": loss_of, "pin": pin}
        scored = kind(
            parallelize(model, cluster, **given), args(max_steps=2), train_dataset=rows(), eval_dataset=rows()
        )
        scored.train()
        scored.evaluate()
    return {
        "evaluated": [measured["eval_loss"], measured["eval_accuracy"]],
        "predicted": projected(torch.from_numpy(predicted)),
        "best": [losses(trainer), last, restored, trainer.state.best_metric, trainer.state.best_global_step],
        "scored": losses(scored),
    }


def main() -> None:
    """Print a JSON object: recipe -> run -> what every rank found, or the error."""
    with LocalProcesses(4, PRELOAD) as processes, tempfile.TemporaryDirectory() as folder:

        def run(title: str, name: str, ranks: int, *args: Any) -> list[Any] | str:
            place = Path(folder) / re.sub(r"\W", "", title) / name
            place.mkdir(parents=True, exist_ok=True)
            try:
                return processes.run(carry_out, title, args[0], str(place), *args[1:], ranks=ranks)
            except RankError as error:
                return str(error)

        found: dict[str, Any] = {
            "refused": processes.run(refused, folder, ranks=1)[0],
            "around": [
                processes.run(around, pin, tempfile.mkdtemp(dir=folder), ranks=ranks)
                for ranks, pin in ((1, None), (2, {"data": 2, "zero": 3}))
            ],
            "without a share": processes.run(without_a_share, folder, ranks=2),
            "autocast": processes.run(under_autocast, folder, ranks=1)[0],
        }
        for title in sys.argv[1:] or RECIPES:
            found[title] = {
                "own": run(title, "own", 1, None),
                "own, going on": run(title, "own", 1, None, True),
                "four": run(title, "four", 4, PLANS[title]),
                "two, going on": run(title, "four", 2, OTHERS[title], True),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
