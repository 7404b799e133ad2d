"""DeepSpeed's JSON: ZeRO and offload, AutoTP, Ulysses and AutoEP."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from planner.base.errors import ConfigError
from planner.interchange.format import Format, Limit, check_known, degree, parse_json, take
from planner.interchange.limits import (
    equal_labels,
    into_data,
    layers_alone,
    model_dtype,
    no_pipeline,
    nothing_gathered_again,
    recompute_elsewhere,
    stored_in_float32,
    whole_layers,
)
from planner.interchange.parallelism import REST, Parallelism, checked, is_along

TOOL = "DeepSpeed"
TOP = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "scheduler"),
    *("fp16", "bf16", "torch_autocast", "zero_optimization", "zero_allow_untested_optimizer"),
    *("zero_force_ds_cpu_optimizer", "gradient_clipping", "prescale_gradients", "gradient_predivide_factor"),
    *("communication_data_type", "seq_parallel_communication_data_type", "data_types"),
    *("tensor_parallel", "expert_parallel", "sequence_parallel_size", "data_parallel_size", "pipeline"),
    *("activation_checkpointing", "compile", "aio", "checkpoint", "comms_logger"),
    *("csv_monitor", "data_efficiency", "dataloader_drop_last", "disable_allgather", "dump_state"),
    *("flops_profiler", "hybrid_engine", "memory_breakdown", "steps_per_print"),
    *("seed", "tensorboard", "timers", "use_data_before_expert_parallelism", "wandb"),
    *("wall_clock_breakdown", "weight_quantization", "zero_quantized_weights", "check_grad_overflow", "comet"),
    *("gradient_allreduce_op", "managed_gradient_accumulation", "vocabulary_size", "log_level", "disable_python_gc"),
)
ZERO = (
    *("stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce"),
    *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "compute_grad_norm", "elastic_checkpoint"),
    *("offload_param", "offload_optimizer", "zenflow", "sub_group_size", "prefetch_bucket_size"),
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_module_granularity_threshold"),
    *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "ignore_unused_parameters"),
    *("stage3_gather_16bit_weights_on_model_save", "round_robin_gradients", "parameter_alignment"),
    *("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights"),
    *("zero_quantized_gradients", "memory_efficient_linear", "pipeline_loading_checkpoint"),
    *("override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks", "leaf_module"),
    *("save_muon_momentum_buffer_in_memory", "load_from_fp32_weights"),
)
TENSOR = (
    *("autotp_size", "dtype", "tp_overlap_comm", "vocab_parallel_lm_head", "vocab_parallel_ce_backend", "tp"),
    *("tensor_parallel", "injection_policy_tuple", "partition_config", "preset_model", "keep_module_on_host"),
    *("replace_with_kernel_inject",),
)
EXPERT = (
    *("enabled", "autoep_size", "expert_tensor_parallel_size", "validate_folding_routing", "async_split_plan"),
    *("preset_model", "moe_layer_pattern", "expert_pattern", "router_pattern", "use_grouped_mm", "route_norm"),
    *("disable_triton_grouped_mm", "route_scale", "score_apply", "combine_impl", "row_weighting_impl"),
    *("gate_up_impl", "comm_backend", "comm_num_sm", "comm_qp_margin", "comm_max_tokens_per_rank"),
    *("num_expert_groups", "num_limited_groups", "score_func", "top_k", "load_balance_coeff"),
)
REMOVED = (
    *("amp", "compression_training", "eigenvalue", "elasticity", "graph_harvesting", "nebula", "quantize_training"),
    *("sparse_attention", "sparse_gradients", "curriculum_learning", "progressive_layer_drop", "mics_shard_size"),
    *("mics_hierarchical_params_gather", "zeropp_loco_param"),
)
"""Fields of earlier versions, which this one refuses."""
AUTO = {
    "train_batch_size": "per_device_train_batch_size x gradient_accumulation_steps x data-parallel ranks",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "that of TrainingArguments",
}
"""Numbers that Transformers puts in a configuration's place, and which they are."""
HOMES = {"cpu": "host", "nvme": "disk", "none": "none"}
KINDS = ("column", "row")
LOOK_UPS = ("vocabulary", "features")


def write(d: Parallelism) -> str:
    """The parallel part of a configuration: optimizer and scheduler are the user's."""
    config: dict[str, Any] = {}
    if d.batch is not None:
        if d.tensor == 1:  # beside tensor parallelism it is counted as if every rank had samples of its own
            config["train_batch_size"] = d.batch
        config["train_micro_batch_size_per_gpu"] = d.batch // (d.batch_ranks * d.micro_batches)
    config["gradient_accumulation_steps"] = d.micro_batches
    config["zero_optimization"] = {"stage": d.zero}
    if d.offload != "none":
        device = next(name for name, home in HOMES.items() if home == d.offload)
        config["zero_optimization"]["offload_optimizer"] = {"device": device}
        if d.zero == 3:
            config["zero_optimization"]["offload_param"] = {"device": device}
    if d.dtype != "float32":
        config[{"bfloat16": "bf16", "float16": "fp16"}[d.dtype]] = {"enabled": True}
    if d.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": d.tensor}
        if specs := [_spec(kind, d) for kind in KINDS if kind in d.products.values()]:
            config["tensor_parallel"]["partition_config"] = {"use_default_specs": False, "layer_specs": specs}
    if d.context > 1:
        config |= {"sequence_parallel_size": d.context, "data_parallel_size": d.data}
    if d.expert > 1:
        config["expert_parallel"] = {"enabled": True, "autoep_size": d.expert}
        if d.expert_tensor > 1:
            config["expert_parallel"]["expert_tensor_parallel_size"] = d.expert_tensor
    return json.dumps(config, indent=2) + "\n"


def _spec(kind: str, d: Parallelism) -> dict[str, Any]:
    paths = [path for path, each in d.products.items() if each == kind]
    patterns = [re.escape(path).replace(r"\*", r"\d+") + r"\.weight$" for path in paths]
    return {"patterns": patterns, "partition_type": kind}


def read(text: str) -> Parallelism:
    """What the file says; data parallelism takes the ranks that are left."""
    config = parse_json(text, "DeepSpeed configuration")
    zero = take(config, "zero_optimization", dict, {})
    for name in (name for name in (*config, *zero) if name in REMOVED):
        raise ConfigError(f"{name!r} was removed from {TOOL}, which refuses it: leave it out")
    check_known(config, TOP, "the DeepSpeed configuration")
    check_known(zero, ZERO, "'zero_optimization'")
    tensor = take(config, "tensor_parallel", dict, {})
    check_known(tensor, TENSOR, "'tensor_parallel'")
    expert = take(config, "expert_parallel", dict, {})
    check_known(expert, EXPERT, "'expert_parallel'")
    for name, number in AUTO.items():
        if config.get(name) == "auto":
            raise ConfigError(f"{name!r} is 'auto', which Transformers fills in when training begins: write {number}")
    stage = take(zero, "stage", int, 0)
    homes = {name: _home(take(zero, name, dict, {})) for name in ("offload_optimizer", "offload_param")}
    if homes["offload_param"] != "none" and stage != 3:
        raise ConfigError(f"'offload_param' is only for stage 3 of ZeRO, and 'stage' is {stage}: give stage 3")
    if homes["offload_optimizer"] != "none" and stage == 0:
        raise ConfigError("'offload_optimizer' goes with ZeRO, and 'stage' is 0: give stage 1, 2 or 3")
    precise = [dtype for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")) if _enabled(config, name)]
    if len(precise) > 1:
        raise ConfigError("'bf16' and 'fp16' are both enabled: enable one of them")
    batch, micro = (take(config, name, int, None) for name in ("train_batch_size", "train_micro_batch_size_per_gpu"))
    micro_batches = degree(config, "gradient_accumulation_steps")
    if batch is None and micro is None:
        raise ConfigError("it has neither 'train_batch_size' nor 'train_micro_batch_size_per_gpu': give one of them")
    data, size = REST, take(tensor, "autotp_size", int, 0) or 1
    if batch is not None and micro is not None and "gradient_accumulation_steps" in config:
        each = max(micro * micro_batches * size, 1)
        data, rest = divmod(batch, each)
        if rest or not data:
            raise ConfigError(
                f"'train_batch_size' {batch} is no multiple of {each}, 'train_micro_batch_size_per_gpu' {micro} x "
                f"'gradient_accumulation_steps' {micro_batches}{f' x autotp_size {size}' * (size > 1)}: give "
                f"{each * (data + 1)}"
            )
    if size > 1 and micro is not None:
        batch = None  # counted as if every rank had samples of its own
    return checked(
        Parallelism(
            data=data,
            zero=stage,
            tensor=size,
            context=degree(config, "sequence_parallel_size"),
            context_kind="ulysses" if degree(config, "sequence_parallel_size") > 1 else "",
            expert=degree(expert, "autoep_size") if take(expert, "enabled", bool, False) else 1,
            expert_tensor=take(expert, "expert_tensor_parallel_size", int, int(size > 1)) if expert else 0,
            micro_batches=micro_batches if micro is None or batch is None or data else REST,
            micro_batch=micro,
            dtype=precise[0] if precise else "float32",
            offload=homes["offload_optimizer"],
            products=_products(take(tensor, "partition_config", dict, {})),
            batch=batch,
        )
    )


def _home(section: dict[str, Any]) -> str:
    device = take(section, "device", str, "none")
    if device not in HOMES:
        raise ConfigError(f"'device' of an offload is {device!r}; it is one of {', '.join(HOMES)}")
    return HOMES[device]


def _enabled(config: dict[str, Any], name: str) -> bool:
    return bool(take(take(config, name, dict, {}), "enabled", bool, False))


def _products(partition: dict[str, Any]) -> dict[str, str]:
    """Modules by how they are sharded; patterns that name no module plainly are the tool's to understand."""
    found = {}
    for spec in take(partition, "layer_specs", list, []):
        kind = take(spec, "partition_type", str, "column").lower()
        if kind not in (*KINDS, "skip"):
            raise ConfigError(f"'partition_type' is {kind!r}; it is one of column, row, skip")
        for pattern in take(spec, "patterns", list, []):
            path = pattern.removesuffix("$").removesuffix(r"\.weight").replace(r"\d+", "*").replace("\\", "")
            if kind != "skip" and re.fullmatch(r"[\w.*]+", path) and not path.startswith(".*"):
                found[path] = kind
    return found


def _said(d: Parallelism) -> dict[str, str]:
    """The layers of which it can be said how they are sharded: what a last layer makes is not gathered for the loss."""
    return {
        path: kind for path, kind in d.products.items() if "*" in path and kind not in LOOK_UPS and not is_along(kind)
    }


LIMITS = (
    model_dtype(),
    stored_in_float32(TOOL),
    equal_labels("weight them in your loop"),
    no_pipeline(TOOL),
    Limit(
        "ZeRO shards over all data-parallel ranks, without copies",
        lambda d: d.replicate > 1,
        lambda d: replace(d, data=d.data * d.replicate, replicate=1, zero=d.zero or 1),
    ),
    Limit(
        "tensor parallelism keeps norms and residuals whole",
        lambda d: d.sequence_parallel,
        lambda d: replace(d, sequence_parallel=False),
    ),
    Limit(
        "columns and rows of linear layers can be said; look-ups are whole, and the last layer is DeepSpeed's to shard",
        lambda d: bool(d.products.keys() - _said(d)),
        lambda d: replace(d, products=_said(d)),
    ),
    layers_alone(TOOL, KINDS),
    Limit(
        "sequences are shared by Ulysses",
        lambda d: d.context > 1 and d.context_kind not in ("", "ulysses"),
        lambda d: replace(d, context_kind="ulysses"),
    ),
    Limit(
        "attention is told so in code: UlyssesSPAttentionHF.register_with_transformers(...)",
        lambda d: d.context > 1,
        about="context",
    ),
    Limit(
        "sequence parallelism has groups of its own, which tensor parallelism does not know",
        lambda d: d.context > 1 and d.tensor > 1,
        lambda d: into_data(d, context=1, context_kind=""),
        refused=True,
    ),
    Limit(
        "experts under stage 3 of ZeRO do not go with sequence parallelism",
        lambda d: d.expert > 1 and d.context > 1 and d.zero == 3,
        lambda d: replace(d, zero=2),
        refused=True,
    ),
    Limit(
        "experts under stage 3 of ZeRO are whole on their ranks",
        lambda d: d.expert > 1 and d.expert_tensor > 1 and d.zero == 3,
        lambda d: replace(d, expert_tensor=1),
        refused=True,
    ),
    Limit(
        "stages 1 and 2 of ZeRO keep parameters whole between steps, where the plan stores them in shards",
        lambda d: d.zero in (1, 2) and d.data > 1,
        about="zero",
    ),
    whole_layers("gradient checkpointing"),
    recompute_elsewhere("said in code: model.gradient_checkpointing_enable(), all of each layer"),
    nothing_gathered_again(TOOL),
    Limit(
        "offload goes with ZeRO",
        lambda d: d.offload != "none" and d.zero == 0,
        lambda d: replace(d, zero=1),
        refused=True,
    ),
)
FORMAT = Format(
    "deepspeed",
    f"{TOOL} 0.19.8",
    ".json",
    write,
    read,
    {
        "data": "data-parallel ranks (processes / autotp_size / sequence_parallel_size)",
        "zero": "zero_optimization.stage",
        "tensor": "tensor_parallel.autotp_size",
        "context": "sequence_parallel_size",
        "expert": "expert_parallel.autoep_size",
        "expert_tensor": "expert_parallel.expert_tensor_parallel_size",
        "micro_batches": "gradient_accumulation_steps",
        "batch": "train_batch_size",
        "offload": "zero_optimization.offload_optimizer",
    },
    LIMITS,
    "deepspeed.initialize(model=model, config=FILE, ...)",
    ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization"),
)
