"""torchtitan's configuration: a Python function that takes a ``Trainer.Config`` and sets how it runs in parallel."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planner.base.errors import ConfigError
from planner.interchange.format import Format, Limit, check_known, degree, take
from planner.interchange.limits import (
    model_dtype,
    nothing_gathered_again,
    offload_to_host,
    own_products,
    together,
)
from planner.interchange.parallelism import REST, Parallelism, Recomputation, checked

TOOL = "torchtitan"
SIZES = {
    "data_parallel_replicate_degree": "replicate",
    "data_parallel_shard_degree": "data",
    "tensor_parallel_degree": "tensor",
    "context_parallel_degree": "context",
    "pipeline_parallel_degree": "pipeline",
    "expert_parallel_degree": "expert",
}
PARALLELISM = (
    *SIZES,
    *("fsdp_reshard_after_forward", "enable_fsdp_symm_mem", "enable_sequence_parallel", "spmd_backend"),
    *("module_fqns_per_model_part", "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_schedule"),
    *("pipeline_parallel_last_stage_less_layers", "pipeline_parallel_layers_per_stage"),
    *("pipeline_parallel_schedule_csv", "pipeline_parallel_microbatch_size", "context_parallel_load_balancer"),
    *("context_parallel_ptrr_mask_key",),
)
TRAINING = (
    *("local_batch_size", "global_batch_size", "seq_len", "max_norm", "steps", "enable_cpu_offload", "dtype"),
    *("disable_cuda_graphs", "mixed_precision_param", "mixed_precision_reduce", "gc_freq", "gc_debug"),
)
SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved_1f1b": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
LIKE = {"InterleavedZeroBubble": "interleaved_1f1b", "LoopedBFS": "interleaved_1f1b"}
"""Schedules that we do not have, by the nearest that we have."""
LOOPED = ("interleaved_1f1b", "zbv", "dualpipev")
RESHARD = {3: "always", 2: "never"}
CHECKPOINTS = {"full": "FullAC", "selective": "SelectiveAC"}


def write(d: Parallelism) -> str:
    """A function over a configuration of torchtitan's own, whose model, data and optimizer stay as they are."""
    sizes = {name: getattr(d, ours) for name, ours in SIZES.items()}
    if d.zero == 0:
        sizes |= {"data_parallel_replicate_degree": d.replicate * d.data, "data_parallel_shard_degree": 1}
    parallel: dict[str, Any] = {name: size for name, size in sizes.items() if size > 1 or "shard" in name}
    if d.zero:
        parallel["fsdp_reshard_after_forward"] = RESHARD[d.zero]
    if d.tensor > 1:
        parallel["enable_sequence_parallel"] = d.sequence_parallel
    if d.context > 1:
        parallel["context_parallel_load_balancer"] = "headtail" if "zigzag" in d.context_kind else None
    training: dict[str, Any] = {}
    if d.batch is not None:
        each = d.batch // d.batch_ranks
        micro = each // d.micro_batches
        training = {"local_batch_size": each if d.pipeline > 1 else micro, "global_batch_size": d.batch}
        if d.pipeline > 1:
            parallel["pipeline_parallel_microbatch_size"] = micro
    if d.pipeline > 1:
        parallel["pipeline_parallel_schedule"] = SCHEDULES[d.schedule]
        stages = d.pipeline * d.virtual_stages
        if d.stage_layers or (d.virtual_stages > 2 and d.layers and d.layers % stages == 0):
            parallel["module_fqns_per_model_part"] = _parts(d.stage_layers or ((d.layers or 0) // stages,) * stages)
    if d.sequence is not None:
        training["seq_len"] = d.sequence
    training |= {"dtype": d.stored, "mixed_precision_param": d.dtype}
    if d.offload != "none":
        training["enable_cpu_offload"] = True
    if d.pipeline > 1 or d.expert > 1:
        training["disable_cuda_graphs"] = True
    checkpoint = CHECKPOINTS.get(d.recompute)
    imports = ["from torchtitan.config import ParallelismConfig"]
    if checkpoint:
        imports.append(f"from torchtitan.distributed.activation_checkpoint import {checkpoint}")
    lines = [
        *imports,
        "from torchtitan.trainer import Trainer",
        "",
        "",
        "def parallelized(config: Trainer.Config) -> Trainer.Config:",
        "    config.parallelism = ParallelismConfig(",
        *_keywords(parallel),
        "    )",
        *(f"    config.training.{name} = {value!r}" for name, value in training.items()),
        f"    config.activation_checkpoint = {f'{checkpoint}.Config()' if checkpoint else None}",
        "    return config",
    ]
    return "\n".join(lines) + "\n"


def _keywords(values: Mapping[str, Any]) -> Iterator[str]:
    """Arguments, a line each; lists of lists with a line for each."""
    for name, value in values.items():
        if isinstance(value, list):
            yield f"        {name}=["
            yield from (f"            {part!r}," for part in value)
            yield "        ],"
        else:
            yield f"        {name}={value!r},"


def _parts(stage_layers: tuple[int, ...]) -> list[list[str]]:
    """Names of torchtitan's modules by stage."""
    parts, first = [], 0
    for count in stage_layers:
        parts.append([f"layers.{number}" for number in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return parts


def read(text: str) -> Parallelism:
    """What is set in the file, wherever in it; what takes more than reading the file to know is refused."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"this is no Python file: {error}") from error
    parallel: dict[str, Any] = {}
    training: dict[str, Any] = {}
    recompute: Recomputation = "selective"
    for name, value in _settings(tree):
        group, _, leaf = name.partition(".")
        if group == "activation_checkpoint":
            recompute = value
        elif group == "parallelism":
            parallel[leaf] = value
        else:
            training[leaf] = value
    calls = (_last(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))
    if not parallel and "ParallelismConfig" not in calls:
        raise ConfigError("it sets nothing of ParallelismConfig: a torchtitan configuration has one")
    check_known(parallel, PARALLELISM, "ParallelismConfig")
    check_known(training, TRAINING, "TrainingConfig")
    sizes = {ours: degree(parallel, name) for name, ours in SIZES.items() if ours != "data"}
    data = take(parallel, "data_parallel_shard_degree", int, -1)
    reshard = take(parallel, "fsdp_reshard_after_forward", str, "default")
    if reshard not in ("default", *RESHARD.values()):
        raise ConfigError(f"'fsdp_reshard_after_forward' is {reshard!r}; it is one of default, always, never")
    schedule, micro = take(parallel, "pipeline_parallel_schedule", str, "1F1B"), 1
    if parallel.get("pipeline_parallel_layers_per_stage") is not None:
        raise ConfigError("'pipeline_parallel_layers_per_stage' is not read here: say 'module_fqns_per_model_part'")
    named = {name.lower(): ours for ours, name in SCHEDULES.items()} | {name.lower(): LIKE[name] for name in LIKE}
    if parallel.get("pipeline_parallel_schedule_csv"):
        raise ConfigError("'pipeline_parallel_schedule_csv' is a schedule in a file of its own, which is not read here")
    if schedule.lower() not in named:
        known = ", ".join((*SCHEDULES.values(), *LIKE))
        raise ConfigError(f"'pipeline_parallel_schedule' is {schedule!r}; it is one of {known}")
    ours, pipeline = named[schedule.lower()], sizes["pipeline"]
    local = degree(training, "local_batch_size", 8)
    micro = degree(parallel, "pipeline_parallel_microbatch_size") if pipeline > 1 else local
    if micro < 1 or local % micro:
        raise ConfigError(f"'local_batch_size' {local} does not divide by 'pipeline_parallel_microbatch_size' {micro}")
    batch = take(training, "global_batch_size", int, -1)
    is_whole = data == 1 and sizes["context"] == 1
    zero = 2 if reshard == "never" or (reshard == "default" and pipeline > 1) else 3
    if is_whole:
        sizes |= {"replicate": 1}
    found = replace(
        Parallelism(**sizes),  # type: ignore[arg-type]
        data=degree(parallel, "data_parallel_replicate_degree") if is_whole else max(data, REST),
        zero=0 if is_whole else zero,
        expert_tensor=1 if sizes["expert"] > 1 and sizes["tensor"] > 1 else 0,
        sequence_parallel=take(parallel, "enable_sequence_parallel", bool, True) and sizes["tensor"] > 1,
        context_kind=("zigzag_gather" if parallel.get("context_parallel_load_balancer", "headtail") else "gather")
        if sizes["context"] > 1
        else "",
        schedule=ours if pipeline > 1 else "1f1b",
        virtual_stages=2 if pipeline > 1 and ours in LOOPED else 1,
        stage_layers=_stage_layers(parallel.get("module_fqns_per_model_part")),
        micro_batches=REST if batch > 0 else local // micro,
        micro_batch=micro,
        recompute=recompute,
        dtype=take(training, "mixed_precision_param", str, "bfloat16"),
        stored=take(training, "dtype", str, "float32"),
        offload="host" if take(training, "enable_cpu_offload", bool, False) else "none",
        batch=batch if batch > 0 else None,
        sequence=take(training, "seq_len", int, 2048),
    )
    if pipeline > 1 and not take(training, "disable_cuda_graphs", bool, False):
        raise ConfigError("CUDA graphs do not support pipelines: set training.disable_cuda_graphs to True")
    if found.stage_layers:
        stages = len(found.stage_layers)
        if stages % pipeline:
            raise ConfigError(
                f"'module_fqns_per_model_part' has {stages} parts, which {pipeline} pipeline ranks do not divide"
            )
        is_even = len({*found.stage_layers}) == 1
        layers, stage_layers = sum(found.stage_layers), () if is_even else found.stage_layers
        found = replace(found, virtual_stages=stages // pipeline, layers=layers, stage_layers=stage_layers)
    if pipeline > 1 and (found.virtual_stages > 1) != (ours in LOOPED):
        raise ConfigError(
            f"'pipeline_parallel_schedule' {schedule} takes {'2 stages or more' if ours in LOOPED else '1 stage'} of "
            f"a rank, and there are {found.virtual_stages}"
        )
    return checked(found)


def _settings(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """``("parallelism.tensor_parallel_degree", 2)`` of what the file sets, in its order."""
    groups = {"ParallelismConfig": "parallelism", "TrainingConfig": "training"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (group := groups.get(_last(node.func))):
            for keyword in node.keywords:
                if keyword.arg is None:
                    raise ConfigError(f"{_last(node.func)} takes **, which only running it would tell: write it out")
                yield f"{group}.{keyword.arg}", _value(keyword.value, keyword.arg)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "Config":
            for kind, name in CHECKPOINTS.items():
                if _last(node.func.value) == name:
                    yield "activation_checkpoint", kind
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            target = node.targets[0]
            if target.attr == "activation_checkpoint" and _is_none(node.value):
                yield "activation_checkpoint", "none"
            elif (group := _last(target.value)) in groups.values():
                yield f"{group}.{target.attr}", _value(node.value, target.attr)


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _value(node: ast.AST, name: str) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ConfigError(
            f"{name!r} is {ast.unparse(node)}, which only running the file would tell: write it out"
        ) from error


def _stage_layers(parts: Any) -> tuple[int, ...]:
    if parts is None:
        return ()
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        raise ConfigError("'module_fqns_per_model_part' is no list of lists of names of modules")
    return tuple(sum(str(name).startswith("layers.") for name in part) for part in parts)


LIMITS = (
    model_dtype(),
    Limit(
        "half precision is bfloat16",
        lambda d: d.dtype == "float16" or d.stored not in ("", "float32", "bfloat16"),
        lambda d: replace(
            d,
            dtype="bfloat16" if d.dtype == "float16" else d.dtype,
            stored="bfloat16" if d.stored == "float16" else "float32" if d.stored != "bfloat16" else d.stored,
        ),
    ),
    own_products(TOOL),
    Limit(
        "it has no such schedule",
        lambda d: d.pipeline > 1 and d.schedule not in SCHEDULES,
        lambda d: replace(d, schedule="interleaved_1f1b" if d.virtual_stages > 1 else "1f1b"),
    ),
    Limit(
        "keys are gathered, in zigzag order or not",
        lambda d: d.context > 1 and d.context_kind not in ("", "gather", "zigzag_gather"),
        lambda d: replace(d, context_kind="zigzag_gather" if "zigzag" in d.context_kind else "gather"),
    ),
    Limit(
        "experts are shared whole",
        lambda d: d.expert > 1 and d.expert_tensor > 1,
        lambda d: replace(d, expert_tensor=1),
    ),
    together(TOOL),
    Limit(
        "all layers recompute, or none does",
        lambda d: d.recompute_layers is not None,
        lambda d: replace(d, recompute_layers=None),
    ),
    nothing_gathered_again(TOOL),
    Limit(
        "parameters of a context-parallel group are sharded",
        lambda d: d.context > 1 and d.zero == 0,
        lambda d: replace(d, zero=2),
    ),
    offload_to_host("FSDP"),
)
FORMAT = Format(
    "torchtitan",
    f"{TOOL} 0.3.0",
    ".py",
    write,
    read,
    {
        **{ours: name for name, ours in SIZES.items()},
        "zero": "fsdp_reshard_after_forward, data_parallel_shard_degree",
        "sequence_parallel": "enable_sequence_parallel",
        "schedule": "pipeline_parallel_schedule",
        "stage_layers": "module_fqns_per_model_part",
        "micro_batches": "local_batch_size / pipeline_parallel_microbatch_size",
        "batch": "global_batch_size",
        "recompute": "activation_checkpoint",
        "offload": "enable_cpu_offload",
        "sequence": "seq_len",
    },
    LIMITS,
    "call parallelized() on a configuration of torchtitan's registry, in a function of your own module",
    ("ParallelismConfig", "config.parallelism"),
)
