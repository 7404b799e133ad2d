"""Transformers' ``DistributedConfig``, as the JSON that it is made from."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from planner.base.errors import ConfigError
from planner.interchange.format import Format, Limit, check_known, degree, parse_json, take
from planner.interchange.limits import (
    dtypes_elsewhere,
    heads_from_shapes,
    into_data,
    layers_alone,
    micro_batches_elsewhere,
    no_context,
    nothing_gathered_again,
    offload_to_host,
    recompute_elsewhere,
    together,
    whole_layers,
)
from planner.interchange.parallelism import Parallelism, checked

TOOL = "Transformers"
FIELDS = (
    *("tp_size", "tp_plan", "enable_sequence_parallel", "enable_expert_parallel", "fsdp_size", "dp_replicate_size"),
    *("fsdp_plan", "fsdp_cpu_offload", "fsdp_mixed_precision", "pp_size", "ep_size", "ep_plan", "ep_implementation"),
)
STYLES = {
    "column": "colwise",
    "gathered column": "colwise_gather_output",
    "row": "rowwise",
    "split row": "rowwise_split_input",
    "vocabulary": "embedding_rowwise",
    "features": "embedding_colwise",
}
SUMMED = "replicated_with_grad_allreduce"
"""Of what is whole, and meets parts of what it is used with."""
TENSOR_STYLES = (
    *STYLES.values(),
    *("colwise_rep", "rowwise_rep", "packed_colwise", "packed_rowwise", "sequence_parallel"),
    *("local_params", "replicate", SUMMED, "all_reduce"),
    *("moe_tp_experts", "moe_identity_expert", "mla_kv_a_proj"),
)
FSDP_STYLES = {3: "free_full_weight", 2: "keep_full_weight"}
IMPLEMENTATIONS = ("auto", "all_to_all", "all_reduce", "deepgemm_megamoe")


def write(d: Parallelism) -> str:
    """The fields that are not the default."""
    config: dict[str, Any] = {}
    shards = d.data if d.zero else 1
    copies = d.replicate if d.zero else d.replicate * d.data
    if d.tensor > 1:
        config["tp_size"] = d.tensor
        if d.products:
            config["tp_plan"] = {path: STYLES.get(kind, SUMMED) for path, kind in d.products.items()}
    config["fsdp_size"] = shards
    if copies > 1:
        config["dp_replicate_size"] = copies
    if shards * copies > 1 and d.layer_path:
        config["fsdp_plan"] = {d.layer_path: FSDP_STYLES[3 if d.zero == 3 else 2]}
    if d.offload != "none":
        config["fsdp_cpu_offload"] = True
    if d.pipeline > 1:
        config["pp_size"] = d.pipeline
    if d.expert > 1:
        config |= {"ep_size": d.expert, "ep_implementation": "all_to_all"}
    return json.dumps(config, indent=2) + "\n"


def read(text: str) -> Parallelism:
    """What the fields say; one rank of what they leave out."""
    config = parse_json(text, "DistributedConfig of Transformers")
    check_known(config, FIELDS, "DistributedConfig, which leaves out what it does not know,")
    plans = {name: _plan(config.get(name), name) for name in ("tp_plan", "fsdp_plan", "ep_plan")}
    for path, style in plans["tp_plan"].items():
        if style not in TENSOR_STYLES:
            raise ConfigError(f"'tp_plan' has {style!r} for {path!r}; it is one of {', '.join(TENSOR_STYLES)}")
    for path, style in plans["fsdp_plan"].items():
        if style not in FSDP_STYLES.values():
            raise ConfigError(f"'fsdp_plan' has {style!r} for {path!r}; it is one of {', '.join(FSDP_STYLES.values())}")
    implementation = take(config, "ep_implementation", str, "auto")
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(f"'ep_implementation' is {implementation!r}; it is one of {', '.join(IMPLEMENTATIONS)}")
    sizes = {name: degree(config, name) for name in ("tp_size", "fsdp_size", "dp_replicate_size", "pp_size")}
    expert, tensor = degree(config, "ep_size"), sizes["tp_size"]
    if implementation == "all_reduce" and expert != tensor:
        raise ConfigError(f"'ep_implementation' all_reduce needs 'ep_size' = 'tp_size'; they are {expert} and {tensor}")
    kinds = {style: kind for kind, style in STYLES.items()} | {"colwise_rep": "gathered column"}
    shards = sizes["fsdp_size"] > 1
    keeps = any(style == FSDP_STYLES[2] for path, style in plans["fsdp_plan"].items() if "*" in path)
    return checked(
        Parallelism(
            replicate=sizes["dp_replicate_size"] if shards else 1,
            data=sizes["fsdp_size"] if shards else sizes["dp_replicate_size"],
            zero=(2 if keeps else 3) if shards else 0,
            tensor=tensor,
            sequence_parallel=take(config, "enable_sequence_parallel", bool, False),
            expert=expert,
            expert_tensor=1 if expert > 1 and tensor > 1 else 0,
            pipeline=sizes["pp_size"],
            dtype="bfloat16" if take(config, "fsdp_mixed_precision", bool, False) else "float32",
            stored="",
            offload="host" if take(config, "fsdp_cpu_offload", bool, False) else "none",
            products={path: kinds[style] for path, style in plans["tp_plan"].items() if style in kinds},
        )
    )


def _plan(value: Any, name: str) -> dict[str, str]:
    if value in (None, "auto") and (value is None or name == "tp_plan"):
        return {}
    if not isinstance(value, dict) or not all(isinstance(style, str) for style in value.values()):
        raise ConfigError(f"{name!r} is {value!r}; it maps modules to styles")
    return value


LIMITS = (
    no_context(TOOL),
    Limit(
        "data parallelism and pipelines do not go together: pipeline ranks share the batch and parameters instead",
        lambda d: d.pipeline > 1 and d.data * d.replicate > 1,
        lambda d: into_data(d, pipeline=1, schedule="1f1b", virtual_stages=1, stage_layers=()),
        refused=True,
    ),
    Limit(
        "experts that tokens are sent to do not go with pipelines",
        lambda d: d.pipeline > 1 and d.expert > 1,
        lambda d: replace(d, expert=1, expert_tensor=0),
        refused=True,
    ),
    Limit(
        "a pipeline has one stage a rank, cut and scheduled by Transformers",
        lambda d: d.pipeline > 1 and (d.virtual_stages > 1 or bool(d.stage_layers) or d.schedule != "1f1b"),
        lambda d: replace(d, virtual_stages=1, stage_layers=(), schedule="1f1b"),
    ),
    Limit(
        "enable_sequence_parallel is reserved, and does nothing yet",
        lambda d: d.sequence_parallel,
        lambda d: replace(d, sequence_parallel=False),
    ),
    layers_alone(TOOL, STYLES),
    heads_from_shapes("compare a loss with the original's"),
    Limit(
        "ranks that share experts are a multiple of tensor-parallel ones",
        lambda d: d.expert > 1 and d.expert % d.tensor > 0,
        lambda d: replace(d, expert=d.tensor),
        refused=True,
    ),
    Limit(
        "experts are shared whole",
        lambda d: d.expert > 1 and d.tensor > 1 and d.expert_tensor != 1,
        lambda d: replace(d, expert=min(d.expert * d.tensor, d.data * d.tensor), expert_tensor=1),
    ),
    Limit(
        "ranks that share experts store all else in shards",
        lambda d: d.expert > 1 and d.zero == 0 and d.data > 1,
        lambda d: replace(d, zero=3),
    ),
    together(TOOL),
    whole_layers("gradient checkpointing"),
    nothing_gathered_again(TOOL),
    recompute_elsewhere("said in code: model.gradient_checkpointing_enable()"),
    offload_to_host("FSDP"),
    *dtypes_elsewhere("from_pretrained(..., dtype=...)"),
    Limit(
        "which parameters stay gathered until backward is said layer by layer, and the model has none",
        lambda d: d.zero == 2 and not d.layer_path,
        lambda d: replace(d, zero=3),
    ),
    micro_batches_elsewhere("TrainingArguments(gradient_accumulation_steps=...)"),
)
FORMAT = Format(
    "hf",
    f"{TOOL} 5.23",
    ".json",
    write,
    read,
    {
        "replicate": "dp_replicate_size",
        "data": "fsdp_size",
        "zero": "fsdp_plan",
        "tensor": "tp_size",
        "sequence_parallel": "enable_sequence_parallel",
        "expert": "ep_size",
        "pipeline": "pp_size",
        "products": "tp_plan",
        "offload": "fsdp_cpu_offload",
    },
    LIMITS,
    "from_pretrained(..., distributed_config=DistributedConfig.from_dict(json.load(open(FILE))))",
    ("tp_size", "fsdp_size", "pp_size", "ep_size", "tp_plan", "dp_replicate_size"),
)
