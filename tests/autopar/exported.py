"""Exported configurations that can run here, run: loss and gradients beside the original's, and a tool's own reader.

``benchmarks/exporters.py`` records what ``test_exported`` runs.
"""

from __future__ import annotations

import json
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

import autopar
from autopar import ClusterSpec
from autopar.measure.local_processes import LocalProcesses
from autopar.verification.float64 import exact
from planner.interchange import accelerate
from planner.plan.export.export import Export

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attn_implementation": "sdpa",
}


GRADIENTS = 4 * 11 + 3
"""So many parameters it has; its norms of queries and keys are whole on every rank, and see the heads of one."""


def decoder(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES)).double()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (8, 16))
    return {"input_ids": ids, "labels": ids}


def reference() -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the original on the global batch."""
    model: Any = decoder()
    with exact():
        loss = model(**batch()).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def check(loss: float, gradients: dict[str, Tensor]) -> None:
    """Every gradient that a rank has, whole, and the loss, to float64's rounding."""
    expected, originals = reference()
    assert abs(loss - expected) < 1e-12, (loss, expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, originals[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """By the original's names."""
    found = {}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        found[name.replace("_checkpoint_wrapped_module.", "")] = whole
    return found


def exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that casts nothing to less than float64."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with exact():
            return function(*args, **kwargs)

    return called


PINS: dict[str, dict[str, dict[str, Any]]] = {
    "fsdp2": {
        "copies and shards, recomputing": {
            **{"replicate": 2, "data": 2, "zero": 3, "recompute": "full", "micro_batches": 2},
        },
        "tensor, recomputing": {"data": 2, "tensor": 2, "zero": 1, "recompute": "selective", "micro_batches": 2},
        "tensor and sequence, sharded": {
            **{"data": 2, "tensor": 2, "sequence_parallel": True, "zero": 3, "recompute": "full", "micro_batches": 1},
        },
        "interleaved, sharded": {"pipeline": 2, "data": 2, "zero": 1, "micro_batches": 4, "virtual_stages": 2},
    },
    "hf": {"tensor, sharded": {"data": 2, "tensor": 2, "zero": 3, "micro_batches": 1}},
}
"""Format -> what is run of it, and the pins of its plan for four processes."""


def four_devices() -> ClusterSpec:
    """Whose messages begin at once, so that small ones are sent as large ones would be."""
    described = ClusterSpec.local(4).to_dict()
    described["levels"][0]["latency_s"] = 1e-9
    return ClusterSpec.from_dict(described)


def gradients_alike(processes: LocalProcesses, to: str, name: str) -> int:
    """Run one of :data:`PINS`; how many gradients all processes, or all those of a pipeline together, found alike."""
    pin = PINS[to][name]
    model = decoder().float()  # in float64, plans would gather what norms cast to less
    plan = autopar.plan(model, four_devices(), example_kwargs=batch(), pin=pin, time_limit_s=10)
    exported = plan.export(to, time_limit_s=1)
    text = exported.text
    if to == "fsdp2":
        assert exported.description.sequence_parallel == pin.get("sequence_parallel", False)
        count, rest = divmod(sum(processes.run(run_fsdp2, text)) * pin.get("pipeline", 1), 4)
        assert not rest
        return count
    with tempfile.TemporaryDirectory() as folder:
        model: Any = decoder()
        model.save_pretrained(folder)
        return min(processes.run(run_hf, text, folder))


def run_hf(text: str, folder: str) -> int:
    """The configuration, loaded; returns how many gradients were compared."""
    config = DistributedConfig.from_dict(json.loads(text))
    model: Any = Qwen3ForCausalLM.from_pretrained(folder, distributed_config=config, dtype=torch.float64)
    ranks = config.dp_replicate_size * config.fsdp_size
    mine = dist.get_rank() // config.tp_size
    part = {name: value.chunk(ranks)[mine] for name, value in batch().items()}
    with exact():
        loss = model(**part).loss
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    found = gradients_of(model)
    check((total / dist.get_world_size()).item(), found)
    return len(found)


def run_fsdp2(text: str) -> int:
    """The exported module, executed; returns how many gradients this rank compared."""
    module = types.ModuleType("exported")
    exec(compile(text, "exported.py", "exec"), module.__dict__)
    model: Any = decoder()
    if "RECOMPUTE" in vars(module):
        for layer in model.model.layers:
            layer.forward = exactly(layer.forward)  # in backward, too
    built = module.build(model, "cpu")
    with exact():
        loss = module.train_step(model, built, batch()).item()
    if "STAGES" not in vars(module):
        found = gradients_of(model)
    else:
        found, stages, first = {}, module.STAGES, None
        for stage, number in zip(
            built[1], range(built[0].get_local_rank("pipeline"), len(stages), built[0]["pipeline"].size()), strict=True
        ):
            first = sum(stages[:number])
            for name, gradient in gradients_of(stage).items():
                kind, _, rest = name.partition(".")
                if kind == "head":
                    found[f"lm_head.{rest}"] = gradient
                    continue
                if rest.startswith("layers."):
                    _, own, rest = rest.split(".", 2)
                    rest = f"layers.{first + int(own)}.{rest}"
                found[f"model.{rest}"] = gradient
    check(loss, found)
    with exact():
        again = module.train_step(model, built, batch()).item()
    assert abs(again - loss) < 1e-12, "a second step on the same parameters"
    if "PRODUCTS" in vars(module):
        original = decoder()
        with exact():
            module.check(original, model, built, batch())
        refuse_counted_heads(module)
    return len(found)


def refuse_counted_heads(module: Any) -> None:
    """What is built of an attention that counts its heads itself is not taken for the original."""
    model: Any = decoder()
    for layer in model.model.layers:
        count_heads(layer.self_attn)
        layer.forward = exactly(layer.forward)
    original, built = decoder(), module.build(model, "cpu")
    with exact(), pytest.raises(RuntimeError, match=r"gradients of \d+ parameters are not .*counts its"):
        module.check(original, model, built, batch())


def count_heads(attention: Any) -> None:
    """As OPT's attention: as many heads as the configuration has, whatever part of the features there is."""

    def forward(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        samples = len(hidden_states)
        q, k, v = (
            projection(hidden_states).view(samples, -1, SIZES["num_key_value_heads"], SIZES["head_dim"]).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        rows = min(q.shape[2], k.shape[2])
        mixed = nn.functional.scaled_dot_product_attention(q, k[:, :, :rows], v[:, :, :rows], is_causal=True)
        return attention.o_proj(mixed.transpose(1, 2).reshape(*hidden_states.shape[:2], -1)), None

    attention.forward = forward


# ---- tools that read -------------------------------------------------------------------------------------------------

PLANS = ("dense", "pipelined", "sequence", "sparse")
EXPORTED = Path(__file__).parents[1] / "planner" / "golden" / "export"
"""Where plans of eight devices lie."""


@dataclass(frozen=True)
class Reader:
    """What reads a format.

    Attributes:
        module: that has to be there.
        package: that it is of.
        what: it is.
        check: that it takes what is written, and reads what that means.
        plans: of which there is something to read.
    """

    module: str
    package: str
    what: str
    check: Callable[[Export], None]
    plans: tuple[str, ...] = PLANS


def read_by_accelerate(exported: Export) -> None:
    """``accelerate launch`` makes its arguments of it."""
    from accelerate.commands import launch

    with tempfile.TemporaryDirectory() as folder:
        exported.save(f"{folder}/config.yaml")
        words = ["--config_file", f"{folder}/config.yaml", "train.py"]
        args, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    assert args.use_fsdp and int(args.fsdp_version) == 2 and int(args.num_processes) == 8
    sizes = accelerate.SIZES.items()
    said = {ours: int(getattr(args, f"parallelism_config_{name}")) for name, ours in sizes}
    assert said == {ours: getattr(exported.description, ours) for _, ours in sizes}
    assert (str(args.fsdp_reshard_after_forward).lower() == "true") == (exported.description.zero == 3)


def read_by_deepspeed(exported: Export) -> None:
    """As on the first of so many ranks that share the batch."""
    from deepspeed.runtime.config import DeepSpeedConfig

    said, description = json.loads(exported.text), exported.description
    ranks = types.SimpleNamespace(get_data_parallel_world_size=lambda: description.batch_ranks)
    with patch("deepspeed.comm.get_rank", return_value=0):
        found = DeepSpeedConfig(said, mpu=ranks)
    assert found.zero_config.stage == description.zero
    assert found.gradient_accumulation_steps == description.micro_batches
    assert found.train_batch_size == description.batch


def read_by_megatron(exported: Export) -> None:
    """Stages are of as many layers."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    words, description = exported.text.split(), exported.description
    layout = words[words.index("--pipeline-model-parallel-layout") + 1].strip('"')
    found = PipelineParallelLayerLayout.from_str(layout, description.pipeline)
    ranks = [[sum(layer.name == "decoder" for layer in stage) for stage in rank] for rank in found.layout]
    stages = [count for virtual in zip(*ranks, strict=True) for count in virtual]
    assert tuple(stages) == description.stage_layers


def read_by_torchtitan(exported: Export) -> None:
    """Its dataclasses have slots, so that no other field can be set; what holds them imports kernels of a GPU."""
    from torchtitan.config import ParallelismConfig, TrainingConfig

    said, description = types.ModuleType("exported"), exported.description
    trainer = types.SimpleNamespace(Trainer=types.SimpleNamespace(Config=object))
    with patch.dict("sys.modules", {"torchtitan.trainer": trainer}):
        exec(compile(exported.text, "exported.py", "exec"), said.__dict__)
    config = types.SimpleNamespace(training=TrainingConfig())
    found = said.parallelized(config)
    assert vars(found).keys() == {"parallelism", "training", "activation_checkpoint"}
    assert isinstance(found.parallelism, ParallelismConfig)
    assert (found.training.global_batch_size, found.training.seq_len) == (description.batch, description.sequence)
    degrees = found.parallelism.tensor_parallel_degree, found.parallelism.pipeline_parallel_degree
    assert degrees == (description.tensor, description.pipeline)
    assert (found.activation_checkpoint is None) == (description.recompute == "none")


READERS = {
    "accelerate": Reader(
        "accelerate.commands.launch", "accelerate", "the parser of `accelerate launch`", read_by_accelerate
    ),
    "deepspeed": Reader("deepspeed.runtime.config", "deepspeed", "`DeepSpeedConfig`", read_by_deepspeed),
    "megatron": Reader(
        "megatron.core.transformer.pipeline_parallel_layer_layout",
        "megatron_core",
        "its reader of layouts of stages",
        read_by_megatron,
        ("pipelined",),
    ),
    "torchtitan": Reader("torchtitan.config", "torchtitan", "its dataclasses", read_by_torchtitan),
}
"""Format -> what reads it."""
