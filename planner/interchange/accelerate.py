"""Accelerate's YAML: FSDP2 with ``parallelism_config``, or DDP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml

from planner.base.errors import ConfigError
from planner.interchange.format import Format, Limit, check_known, degree, parse_yaml, take
from planner.interchange.limits import (
    equal_labels,
    into_data,
    micro_batches_elsewhere,
    model_dtype,
    no_disk,
    no_experts,
    no_pipeline,
    nothing_gathered_again,
    own_products,
    together,
    whole_layers,
)
from planner.interchange.parallelism import Parallelism, checked

TOP = (
    *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes"),
    *("machine_rank", "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend"),
    *("same_network", "main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config"),
    *("fsdp_config", "parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16", "tpu_name"),
    *("tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env"),
    *("dynamo_config", "fp16", "dynamo_backend"),
)
FSDP = tuple(
    f"fsdp_{name}"
    for name in (
        *("version", "offload_params", "min_num_params", "sharding_strategy", "reshard_after_forward"),
        *("auto_wrap_policy", "transformer_layer_cls_to_wrap", "backward_prefetch", "state_dict_type"),
        *("forward_prefetch", "use_orig_params", "cpu_ram_efficient_loading", "sync_module_states"),
        *("activation_checkpointing", "activation_checkpointing_offload"),
    )
)
PREFIX = "parallelism_config_"
SIZES = {"dp_replicate_size": "replicate", "dp_shard_size": "data", "tp_size": "tensor", "cp_size": "context"}
OTHERS = ("cp_backend", "cp_comm_strategy", "sp_size", "sp_backend", "sp_seq_length")
PARALLELISM = tuple(PREFIX + name for name in (*SIZES, *OTHERS, "sp_seq_length_is_variable", "sp_attn_implementation"))
PRECISION = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
STRATEGIES = {"allgather": "zigzag_gather", "alltoall": "zigzag"}
"""How context parallel ranks attend: ``alltoall`` sends keys around, one rank's at a time."""
TOOL = "Accelerate"


def write(d: Parallelism) -> str:
    """FSDP2 where parameters are sharded, or tensors or sequences; else DDP."""
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if d.zero else "MULTI_GPU",
        "mixed_precision": PRECISION[d.dtype],
        "num_processes": d.size,
    }
    if d.zero:
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": d.zero == 3,
            "fsdp_activation_checkpointing": d.recompute == "full",
            "fsdp_offload_params": d.offload != "none",
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        config["parallelism_config"] = {PREFIX + name: getattr(d, ours) for name, ours in SIZES.items()}
        if d.context > 1:
            strategy = next((name for name, kind in STRATEGIES.items() if kind == d.context_kind), "allgather")
            config["parallelism_config"][f"{PREFIX}cp_comm_strategy"] = strategy
    return yaml.safe_dump(config, sort_keys=False)


def read(text: str) -> Parallelism:
    """What the file says; DDP where it has no FSDP."""
    config = parse_yaml(text, "Accelerate configuration")
    check_known(config, TOP, "the Accelerate configuration")
    kind = take(config, "distributed_type", str, "")
    if kind not in ("FSDP", "MULTI_GPU", "MULTI_CPU", "NO"):
        way = "lint its deepspeed_config as --format deepspeed" if kind == "DEEPSPEED" else "give FSDP or MULTI_GPU"
        raise ConfigError(f"'distributed_type' is {kind!r}; FSDP, MULTI_GPU, MULTI_CPU and NO are known here: {way}")
    devices = degree(config, "num_processes")
    precision = take(config, "mixed_precision", str, "no")
    dtypes = {name: dtype for dtype, name in PRECISION.items()}
    if precision not in dtypes:
        raise ConfigError(f"'mixed_precision' is {precision!r}; it is one of {', '.join(dtypes)}")
    found = Parallelism(devices=devices, dtype=dtypes[precision])
    if kind != "FSDP":
        if config.get("fsdp_config") or config.get("parallelism_config"):
            raise ConfigError(f"it has an 'fsdp_config' or a 'parallelism_config', which {kind} ignores: give FSDP")
        return checked(replace(found, data=devices, stored=""))
    fsdp = take(config, "fsdp_config", dict, {})
    check_known(fsdp, FSDP, "'fsdp_config'")
    sizes = take(config, "parallelism_config", dict, {})
    check_known(sizes, PARALLELISM, "'parallelism_config'")
    if take(fsdp, "fsdp_version", int, 1) != 2:
        raise ConfigError(f"'fsdp_version' is {fsdp.get('fsdp_version', 1)}; 'parallelism_config' and this need 2")
    if degree(sizes, f"{PREFIX}sp_size") > 1:
        raise ConfigError(f"'{PREFIX}sp_size' is Ulysses of DeepSpeed, and goes with DEEPSPEED alone: give cp_size")
    degrees = {ours: degree(sizes, PREFIX + name) for name, ours in SIZES.items()} if sizes else {"data": devices}
    strategy = take(sizes, f"{PREFIX}cp_comm_strategy", str, "allgather")
    if strategy not in STRATEGIES:
        raise ConfigError(f"'{PREFIX}cp_comm_strategy' is {strategy!r}; it is one of {', '.join(STRATEGIES)}")
    recomputes = take(fsdp, "fsdp_activation_checkpointing", bool, False)
    return checked(
        replace(
            replace(found, **degrees),  # type: ignore[arg-type]
            zero=3 if take(fsdp, "fsdp_reshard_after_forward", bool, True) else 2,
            context_kind=STRATEGIES[strategy] if degrees.get("context", 1) > 1 else "",
            recompute="full" if recomputes else "none",
            offload="host" if take(fsdp, "fsdp_offload_params", bool, False) else "none",
        )
    )


LIMITS = (
    model_dtype(),
    no_pipeline(TOOL),
    no_experts(TOOL),
    own_products("the model's tp_plan"),
    Limit(
        "tensor parallelism keeps norms and residuals whole",
        lambda d: d.sequence_parallel,
        lambda d: replace(d, sequence_parallel=False),
    ),
    Limit(
        "context parallelism keeps a zigzag order, and gathers keys or sends them around",
        lambda d: d.context > 1 and d.context_kind not in ("", *STRATEGIES.values()),
        lambda d: replace(d, context_kind="zigzag" if d.context_kind == "ring" else "zigzag_gather"),
    ),
    Limit(
        "beside tensor or context parallelism parameters are sharded over data-parallel ranks, not only copied",
        lambda d: (d.tensor > 1 or d.context > 1) and d.data == 1 and d.replicate > 1,
        lambda d: replace(d, data=d.replicate, replicate=1, zero=d.zero or 2),
        refused=True,
    ),
    Limit(
        "FSDP2 needs data-parallel or context-parallel ranks to shard over: tensor parallelism alone is no "
        "configuration of it",
        lambda d: d.replicate * d.data * d.context == 1 and d.tensor > 1,
        lambda d: into_data(d, tensor=1, products={}),
        refused=True,
    ),
    Limit(
        "only plain data parallelism stores parameters whole",
        lambda d: d.zero == 0 and d.tensor * d.context * d.replicate > 1,
        lambda d: replace(d, zero=2),
    ),
    together(TOOL),
    whole_layers(TOOL),
    nothing_gathered_again(TOOL),
    Limit(
        "it says recomputation and offload beside FSDP alone; model.gradient_checkpointing_enable() is in code",
        lambda d: d.zero == 0 and (d.recompute != "none" or d.offload != "none"),
        lambda d: replace(d, zero=2),
    ),
    no_disk(TOOL),
    Limit(
        "FSDP2 beside Accelerate steps parameters in float32",
        lambda d: d.zero > 0 and d.stored not in ("", "float32"),
        lambda d: replace(d, stored="float32"),
    ),
    Limit("said in code: the model comes in its dtype", lambda d: d.stored not in ("", "float32"), about="stored"),
    equal_labels("weight them in your loop"),
    micro_batches_elsewhere("Accelerator(gradient_accumulation_steps=...)"),
)
FORMAT = Format(
    "accelerate",
    f"{TOOL} 1.15.0",
    ".yaml",
    write,
    read,
    {
        **{ours: PREFIX + name for name, ours in SIZES.items()},
        "zero": "fsdp_reshard_after_forward",
        "recompute": "fsdp_activation_checkpointing",
        "offload": "fsdp_offload_params",
        "devices": "num_processes",
    },
    LIMITS,
    "accelerate launch --config_file FILE train.py",
    ("distributed_type",),
)
