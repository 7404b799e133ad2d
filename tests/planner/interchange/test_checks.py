"""Thirty configurations with a mistake each, five of a format, and thirty good ones: what is wrong, before planning.

The model has 8 layers, 16 heads, 8 of keys and values, and 32 experts; a batch is 16 samples of 2,048 tokens, on 8
devices.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml

from planner.base.errors import ConfigError
from planner.interchange.checks import check
from planner.interchange.formats import FORMATS, format_of, guess
from planner.interchange.model_sizes import ModelSizes

MODEL = ModelSizes(batch=16, sequence=2048, layers=8, heads=16, key_value_heads=8, experts=32)


def megatron(**words: Any) -> str:
    """Arguments, where ``None`` leaves one out and ``True`` makes a flag of it."""
    given = {"micro_batch_size": 2, "global_batch_size": 16, "seq_length": 2048, "num_layers": 8, **words}
    lines = [f"--{name.replace('_', '-')} {'' if value is True else value}" for name, value in given.items() if value]
    return "ARGS=(\n    " + "\n    ".join(lines) + "\n)\n"


def deepspeed(stage: int = 3, micro: int = 2, accumulation: int = 1, **more: Any) -> str:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
    }
    return json.dumps({**config, **more})


def accelerate(fsdp: dict[str, Any] | None = None, processes: int = 8, kind: str = "FSDP", **sizes: int) -> str:
    config: dict[str, Any] = {"distributed_type": kind, "num_processes": processes, "mixed_precision": "bf16"}
    if kind == "FSDP":
        config["fsdp_config"] = {"fsdp_version": 2, "fsdp_reshard_after_forward": True, **(fsdp or {})}
        config["parallelism_config"] = {f"parallelism_config_{name}_size": size for name, size in sizes.items()}
    return yaml.safe_dump(config)


def hf(**fields: Any) -> str:
    return json.dumps(fields)


def torchtitan(local: int = 2, total: int = 16, training: str = "", **words: Any) -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in words.items())
    return (
        f"def mine(config):\n    config.parallelism = ParallelismConfig({given})\n"
        f"    config.training.local_batch_size = {local}\n    config.training.global_batch_size = {total}\n"
        f"    config.training.seq_len = 2048\n{training}    return config\n"
    )


def fsdp2(mesh: dict[str, int], **constants: Any) -> str:
    given = {"MESH": mesh, "LAYERS": "model.layers", "ZERO": 3, "MICRO_BATCHES": 1, **constants}
    return "".join(f"{name} = {value!r}\n" for name, value in given.items() if value is not None)


CPU = {"device": "cpu"}
NO_GRAPHS = "    config.training.disable_cuda_graphs = True\n"
LINEAR = {"model.layers.*.mlp.up_proj": "column", "model.layers.*.mlp.down_proj": "row"}
MISTAKES: dict[str, list[tuple[str, str]]] = {
    "megatron": [
        (megatron(tensor_model_parallel_size=3), r"8 devices do not divide by 3 \(3 tensor parallel\)"),
        (
            megatron(pipeline_model_parallel_size=8, num_virtual_stages_per_pipeline_rank=2),
            "8 layers are fewer",
        ),
        (
            megatron(tensor_model_parallel_size=2, expert_model_parallel_size=4),
            "experts beside tensor parallelism need sequence parallelism: sequence parallel off -> on",
        ),
        (
            megatron(recompute_granularity="full", recompute_num_layers=1),
            "--recompute-granularity full needs --recompute-method",
        ),
        (
            megatron(pipeline_model_parallel_size=2, pipeline_model_parallel_layout='"Et*4|t*3L"'),
            r"its stages have 4\+3 = 7 layers, and the model has 8: mend --pipeline-model-parallel-layout",
        ),
    ],
    "deepspeed": [
        (deepspeed(train_batch_size=24), "it takes 12 data = 12 devices, and the cluster has 8"),
        (deepspeed(stage=2, zero_optimization={"stage": 2, "offload_param": {"device": "cpu"}}), "only for stage 3"),
        (deepspeed(stage=1, tensor_parallel={"autotp_size": 16}), "8 devices do not divide by 16"),
        (deepspeed(stage=1, expert_parallel={"enabled": True, "autoep_size": 3}), "32 experts, which 3 ranks do not"),
        (deepspeed(bf16={"enabled": True}, fp16={"enabled": True}), "'bf16' and 'fp16' are both enabled"),
    ],
    "accelerate": [
        (accelerate(dp_shard=4, tp=4), r"num_processes is 8, and 4 data x 4 tensor = 16: set it to 16"),
        (accelerate({"fsdp_version": 1}, dp_shard=8), "'fsdp_version' is 1"),
        (
            accelerate(dp_replicate=4, dp_shard=1, tp=2),
            "are sharded over data-parallel ranks, not only copied",
        ),
        (accelerate(dp_shard=1, tp=8), "FSDP2 needs data-parallel or context-parallel ranks"),
        (accelerate(dp_shard=4, sp=2), "'parallelism_config_sp_size' is Ulysses of DeepSpeed"),
    ],
    "hf": [
        (hf(fsdp_size=4, pp_size=2), "data parallelism and pipelines do not go together"),
        (
            hf(tp_size=4, fsdp_size=4),
            "4 data x 4 tensor = 16 devices, and the cluster has 8: set fsdp_size to 2",
        ),
        (hf(fsdp_size=8, ep_size=3), "32 experts, which 3 ranks do not divide: set ep_size to 2"),
        (hf(tp_size=4, fsdp_size=2, ep_size=2), "ranks that share experts are a multiple of tensor-parallel ones"),
        (hf(fsdp_size=8, fsdp_plan={"model.layers.*": "reshard"}), "'fsdp_plan' has 'reshard'"),
    ],
    "torchtitan": [
        (
            torchtitan(4, pipeline_parallel_degree=2, data_parallel_shard_degree=4),
            "CUDA graphs do not support pipelines: set training.disable_cuda_graphs",
        ),
        (
            torchtitan(3, 24, NO_GRAPHS, pipeline_parallel_degree=2, pipeline_parallel_microbatch_size=2),
            "'local_batch_size' 3 does not divide by 'pipeline_parallel_microbatch_size' 2",
        ),
        (torchtitan(data_parallel_shard_degree=3, tensor_parallel_degree=2), "3 data x 2 tensor = 6 devices"),
        (torchtitan(1, 16, "", data_parallel_shard_degree=8, pipeline_parallel_schedule="OneFOneB"), "is 'OneFOneB'"),
        (torchtitan(2, 16, "", data_parallel_shard_degree=8, expert_parallel_degree=6), "32 experts, which 6 ranks"),
    ],
    "fsdp2": [
        (fsdp2({"data": 4}), "it takes 4 data = 4 devices, and the cluster has 8: set MESH"),
        (fsdp2({"data": 4, "tensor": 2}), "there are no 'PRODUCTS'"),
        (
            fsdp2({"pipeline": 2, "data": 4}, STAGES=[4, 3, 1], SCHEDULE="1f1b", MICRO_BATCHES=4),
            "2 pipeline ranks do not",
        ),
        (
            fsdp2({"data": 8}, MICRO_BATCHES=3),
            "8 data-parallel ranks x 3 micro-batches: set MICRO_BATCHES to 2",
        ),
        (fsdp2({"data": 8}, ZERO=4), "ZeRO is 4; there are stages 0 to 3"),
    ],
}
GOOD: dict[str, list[str]] = {
    "megatron": [
        megatron(use_distributed_optimizer=True),
        megatron(tensor_model_parallel_size=4, sequence_parallel=True, micro_batch_size=8),
        megatron(pipeline_model_parallel_size=4, num_virtual_stages_per_pipeline_rank=2, micro_batch_size=1),
        megatron(expert_model_parallel_size=8, num_experts=32, moe_token_dispatcher_type="alltoall"),
        megatron(
            context_parallel_size=2, cp_comm_type="p2p", recompute_activations=True, bf16=True, micro_batch_size=4
        ),
    ],
    "deepspeed": [
        deepspeed(train_batch_size=16),
        deepspeed(0, 1, 2, fp16={"enabled": True}),
        deepspeed(
            3,
            zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
        ),
        deepspeed(1, 8, tensor_parallel={"autotp_size": 4}, optimizer={"type": "AdamW"}),
        deepspeed(2, expert_parallel={"enabled": True, "autoep_size": 4}),
    ],
    "accelerate": [
        accelerate(dp_shard=8),
        accelerate(dp_replicate=2, dp_shard=4),
        accelerate(dp_shard=2, tp=4),
        accelerate(dp_shard=4, cp=2),
        accelerate(kind="MULTI_GPU"),
    ],
    "hf": [
        hf(fsdp_size=8),
        hf(tp_size=4, fsdp_size=2, tp_plan={"model.layers.*.self_attn.q_proj": "colwise"}),
        hf(fsdp_size=8, ep_size=8),
        hf(tp_size=4, pp_size=2),
        hf(dp_replicate_size=2, fsdp_size=4, fsdp_plan={"model.layers.*": "keep_full_weight"}),
    ],
    "torchtitan": [
        torchtitan(),
        torchtitan(tensor_parallel_degree=4, local=8),
        torchtitan(4, 16, NO_GRAPHS, pipeline_parallel_degree=2, data_parallel_shard_degree=4),
        torchtitan(2, 16, NO_GRAPHS, expert_parallel_degree=8, data_parallel_shard_degree=8),
        torchtitan(4, 16, context_parallel_degree=2, data_parallel_shard_degree=4),
    ],
    "fsdp2": [
        fsdp2({"data": 8}),
        fsdp2({"data": 4, "tensor": 2}, PRODUCTS=LINEAR, ALONG_SEQUENCE={"model.norm": "along 1"}),
        fsdp2({"pipeline": 2, "data": 4}, STAGES=[4, 4], SCHEDULE="1f1b", MICRO_BATCHES=4, ZERO=2),
        fsdp2({"replicate": 2, "data": 4}, RECOMPUTE="full"),
        fsdp2({"pipeline": 4, "data": 2}, STAGES=[1] * 8, SCHEDULE="interleaved_1f1b", MICRO_BATCHES=4, ZERO=2),
    ],
}


def cases() -> Iterator[Any]:
    for name, texts in MISTAKES.items():
        yield from (pytest.param(name, *each, id=f"{name} {number}") for number, each in enumerate(texts))


@pytest.mark.parametrize(("name", "text", "message"), [*cases()])
def test_a_mistake_is_found_and_the_way_out_said(name: str, text: str, message: str) -> None:
    _, mistakes = check(text, format_of(name), MODEL, 8)
    assert 0 < len(mistakes) < 3, [str(each) for each in mistakes]
    assert mistakes[0].change
    assert re.search(message, str(mistakes[0])), str(mistakes[0])


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in GOOD.items() for text in texts])
def test_a_good_one_passes(name: str, text: str) -> None:
    d, mistakes = check(text, format_of(name), MODEL, 8)
    assert not mistakes, [str(each) for each in mistakes]
    assert d is not None
    assert d.size == 8
    assert guess(text).name == name


def test_norms_that_have_some_tokens_say_along_which_dim() -> None:
    text = fsdp2({"data": 4, "tensor": 2}, PRODUCTS=LINEAR, ALONG_SEQUENCE={"model.norm": "sequence"})
    _, mistakes = check(text, format_of("fsdp2"), MODEL, 8)
    assert "has 'sequence' for 'model.norm'; it is 'along 1' or 'gathered along 1'" in str(mistakes[0])


def test_there_are_thirty_of_each() -> None:
    assert {*MISTAKES} == {*GOOD} == {*FORMATS}
    assert [len(texts) for texts in (*MISTAKES.values(), *GOOD.values())] == [5] * 12


UNREADABLE = [
    ("megatron", "", "there is no argument in it"),
    ("megatron", "--tensor-model-parallel-size two", "--tensor-model-parallel-size is two; it takes a whole number"),
    ("megatron", "--tensor-model-paralel-size 2", "did you mean '--tensor-model-parallel-size'"),
    ("megatron", "--micro-batch-size $MBS", r"'\$MBS' is a variable of the shell"),
    ("megatron", "--micro-batch-size '2", "no arguments of a shell"),
    ("megatron", megatron(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|x|L"), "it is of E, t"),
    (
        "megatron",
        megatron(recompute_granularity="selective", recompute_modules="layernorms"),
        "--recompute-modules has 'layernorms'; did you mean 'layernorm'",
    ),
    ("deepspeed", "{", "it is not JSON"),
    (
        "deepspeed",
        deepspeed(train_batch_size="auto"),
        "'train_batch_size' is 'auto', which Transformers fills in when training begins: write per_device",
    ),
    ("deepspeed", "[]", "it is a list, not an object"),
    ("deepspeed", deepspeed(zero_optimisation={}), "no field 'zero_optimisation'; did you mean 'zero_optimization'"),
    ("deepspeed", deepspeed(zero_optimization={"stage": "3"}), "'stage' is '3'; it takes a whole number"),
    ("deepspeed", deepspeed(sparse_gradients=True), "'sparse_gradients' was removed"),
    ("accelerate", "distributed_type: [", "it is not YAML"),
    (
        "accelerate",
        accelerate({"fsdp_reshard": True}, dp_shard=8),
        "has no field 'fsdp_reshard'; did you",
    ),
    ("accelerate", accelerate(kind="DEEPSPEED"), "lint its deepspeed_config as --format deepspeed"),
    ("accelerate", accelerate(dp_shard=0), "'parallelism_config_dp_shard_size' is 0; it is"),
    ("hf", hf(tp_sise=2), "no field 'tp_sise'; did you mean 'tp_size'"),
    ("hf", hf(tp_size=2, tp_plan={"a": "columnwise"}), "'tp_plan' has 'columnwise' for 'a'"),
    ("torchtitan", "def f(:", "this is no Python file"),
    ("torchtitan", "x = 1", "it sets nothing of ParallelismConfig"),
    (
        "torchtitan",
        "ParallelismConfig(tensor_parallel_degree=TP)",
        "is TP, which only running the file",
    ),
    ("torchtitan", "ParallelismConfig(tensor_paralel_degree=2)", "did you mean 'tensor_parallel_degree'"),
    ("fsdp2", "x = 1", "it has no 'MESH'"),
    ("fsdp2", fsdp2({"dp": 8}), "'MESH' has no field 'dp'"),
    ("fsdp2", "MESH = sizes()", "'MESH' is no constant"),
]


@pytest.mark.parametrize(("name", "text", "message"), UNREADABLE)
def test_what_cannot_be_read_is_said_by_its_place(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        format_of(name).read(text)


def test_a_text_of_no_format_or_of_two_is_not_guessed() -> None:
    with pytest.raises(ConfigError, match="is of no format that is known here: say which with --format"):
        guess("hello")
    with pytest.raises(ConfigError, match="may be hf or deepspeed"):
        guess('{"train_batch_size": 1, "tp_size": 2}')


@pytest.mark.parametrize(
    ("text", "name"),
    [("---\n" + accelerate(dp_shard=8), "accelerate"), ("# ---- degrees ----\n" + torchtitan(), "torchtitan")],
)
def test_dashes_are_not_megatron_s_arguments(text: str, name: str) -> None:
    assert guess(text).name == name


def test_ranks_that_are_left_are_as_ranks_that_are_said() -> None:
    """Torchtitan's ``-1``: the stage of ZeRO is that of the ranks, however these are said."""
    for pipeline, shards, zero in ((2, 4, 2), (1, 8, 3)):
        given = {"pipeline_parallel_degree": pipeline, "data_parallel_replicate_degree": 1}
        said, left = (
            check(
                torchtitan(16 // shards, 16, NO_GRAPHS, data_parallel_shard_degree=n, **given),
                format_of("torchtitan"),
                MODEL,
                8,
            )
            for n in (shards, -1)
        )
        assert said == left
        assert said[0] is not None
        assert said[0].zero == zero
    copies, _ = check(torchtitan(data_parallel_replicate_degree=8), format_of("torchtitan"), MODEL, 8)
    assert copies is not None
    assert (copies.replicate, copies.data, copies.zero) == (1, 8, 0)


def test_megatron_counts_layers_that_recompute_for_every_stage() -> None:
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    for words, count in (({}, 4), ({"pipeline_model_parallel_layout": '"E|t*2|t*3|t*3L"'}, 3)):
        text = megatron(pipeline_model_parallel_size=4, micro_batch_size=1, **block, **words)
        assert format_of("megatron").read(text).recompute_layers == count
    looped = megatron(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2, **block)
    assert format_of("megatron").read(looped).recompute_layers == 4


def test_sizes_that_the_model_lacks_are_not_checked() -> None:
    bare = replace(MODEL, heads=0, key_value_heads=0, experts=0, layers=0)
    assert not check(hf(tp_size=8), format_of("hf"), bare, 8)[1]
    assert "the model has none: set ep_size to 1" in str(
        check(hf(fsdp_size=8, ep_size=8), format_of("hf"), bare, 8)[1][0]
    )


JUNK = ("null", "None", "true", "-1", "0", "9" * 20, "1.5", '"x"', "[]", "{}", "[[1]]", '{"a": 1}', "(", "NaN", "$X")
VALUE = re.compile(r'-?\d+|"[^"]*"|true|True|\{[^{}]*\}|\[[^\[\]]*\]')


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_text_is_read_or_refused_without_a_raw_error(name: str) -> None:
    draw = random.Random(0)
    for text in (*GOOD[name], *(text for text, _ in MISTAKES[name])):
        for _ in range(40):
            damaged = text
            for _ in range(draw.randint(1, 3)):
                spans = [*(found.span() for found in VALUE.finditer(damaged)), (draw.randint(0, len(damaged)),) * 2]
                start, end = draw.choice(spans)
                damaged = damaged[:start] + draw.choice((*JUNK, "")) + damaged[end:]
            check(damaged, format_of(name), MODEL, 8)
