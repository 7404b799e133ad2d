"""Megatron-LM's arguments, as a shell array that a launch script sources."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace

from planner.base.errors import ConfigError
from planner.base.units import nearest
from planner.interchange.format import Format, Limit
from planner.interchange.limits import (
    equal_labels,
    model_dtype,
    own_products,
    stored_in_float32,
)
from planner.interchange.parallelism import NORMS, REST, Parallelism, Recomputation, checked

TOOL = "Megatron-LM"
SIZES = {
    "--tensor-model-parallel-size": "tensor",
    "--pipeline-model-parallel-size": "pipeline",
    "--context-parallel-size": "context",
    "--expert-model-parallel-size": "expert",
    "--expert-tensor-parallel-size": "expert_tensor",
    "--num-distributed-optimizer-instances": "replicate",
    "--global-batch-size": "batch",
    "--seq-length": "sequence",
    "--num-layers": "layers",
}
NUMBERS = (
    *("--micro-batch-size", "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"),
    *("--recompute-num-layers",),
)
WORDS = (
    *("--cp-comm-type", "--pipeline-model-parallel-layout", "--recompute-granularity", "--recompute-method"),
    *("--recompute-modules", "--data-parallel-sharding-strategy", "--moe-token-dispatcher-type", "--ckpt-format"),
)
FLAGS = (
    *("--sequence-parallel", "--use-distributed-optimizer", "--use-megatron-fsdp", "--bf16", "--fp16"),
    *(
        "--optimizer-cpu-offload",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--no-gradient-accumulation-fusion",
    ),
    *("--recompute-activations", "--use-precision-aware-optimizer"),
    *("--use-torch-fsdp2", "--torch-fsdp2-no-reshard-after-forward"),
)
UNREAD = (
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--hierarchical-context-parallel-sizes",
)
"""Arguments that say the stages in a way that is not read here."""
LONGEST = 100_000
"""So many letters a layout has at most, written out."""
LIKE = 0.85
"""An argument that is so like one of these is taken for a slip of the pen; all others are of the model or training."""
KINDS = {"zigzag_gather": "all_gather", "zigzag": "p2p", "ulysses": "a2a"}
"""How context parallel ranks attend; the batch is cut in zigzag order whichever it is."""
STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
"""What of a layer may recompute; the first one does where none is named."""


def write(d: Parallelism) -> str:
    """Degrees are always said, all else where it is not the default."""
    return "\n".join(["PARALLEL_ARGS=(", *(f"    {line}" for line in _lines(d)), ")", ""])


def _lines(d: Parallelism) -> Iterator[str]:
    for name, ours in SIZES.items():
        value = getattr(d, ours)
        default = {"replicate": 1, "expert": 1, "expert_tensor": 0}.get(ours)
        if value is not None and value != default:
            yield f"{name} {value}"
    if d.sequence_parallel:
        yield "--sequence-parallel"
    if d.batch is not None:
        yield f"--micro-batch-size {d.batch // (d.batch_ranks * d.micro_batches)}"
    if d.context > 1 and d.context_kind:
        yield f"--cp-comm-type {KINDS[d.context_kind]}"
    if d.expert > 1:
        yield "--moe-token-dispatcher-type alltoall"
    if d.stage_layers:
        yield f'--pipeline-model-parallel-layout "{layout(d.stage_layers)}"'
    elif d.virtual_stages > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {d.virtual_stages}"
    if d.zero >= 1:
        yield "--use-distributed-optimizer"
    if d.zero in STRATEGIES:
        yield "--use-megatron-fsdp"
        yield f"--data-parallel-sharding-strategy {STRATEGIES[d.zero]}"
        yield "--no-gradient-accumulation-fusion"
        yield "--ckpt-format fsdp_dtensor"
    if d.recompute == "full":
        method = ("uniform", 1) if d.recompute_layers is None else ("block", _of_each_stage(d))
        yield f"--recompute-granularity full --recompute-method {method[0]} --recompute-num-layers {method[1]}"
    elif d.recompute == "selective":
        yield f"--recompute-granularity selective --recompute-modules {' '.join(d.recompute_modules)}"
    if d.dtype != "float32":
        yield {"bfloat16": "--bf16", "float16": "--fp16"}[d.dtype]
    if d.offload != "none":
        yield "--optimizer-cpu-offload --use-precision-aware-optimizer"


def _recomputing(d: Parallelism, of_each: int) -> int:
    """How many layers recompute where so many of each stage do: Megatron counts them for every stage of a rank."""
    stages = d.pipeline * d.virtual_stages
    if not d.stage_layers and not d.layers:
        return of_each * stages
    even = [(d.layers or 0) // stages + (number < (d.layers or 0) % stages) for number in range(stages)]
    return sum(min(of_each, layers) for layers in d.stage_layers or even)


def _of_each_stage(d: Parallelism) -> int:
    """The fewest layers of each stage with which as many recompute as are to."""
    wanted = d.recompute_layers or 0
    most = max(d.stage_layers, default=wanted)
    return next((each for each in range(1, most) if _recomputing(d, each) >= wanted), most)


def _in_equal_parts(d: Parallelism) -> Parallelism:
    """As many of each stage recompute; where all do, that is said of all."""
    count = _recomputing(d, _of_each_stage(d))
    return replace(d, recompute_layers=None if d.layers and count >= d.layers else count)


def layout(stage_layers: tuple[int, ...]) -> str:
    """``Et*6|t*2L``: what each stage has, of embedding, Transformer layers and loss."""
    stages = [f"t*{count}" if count > 1 else "t" * count for count in stage_layers]
    return f"E{'|'.join(stages)}L"


def read_layout(text: str) -> tuple[int, ...]:
    """Layers of each stage; raises :class:`ConfigError` where it is none of a Transformer."""
    spelled = text.replace(",", "")
    while group := re.search(r"\(([^()]*)\)\*(\d+)|([Etm|L])\*(\d+)", spelled):
        what, count = (group[1], group[2]) if group[1] is not None else (group[3], group[4])
        if int(count) * len(what) + len(spelled) > LONGEST:
            raise ConfigError(f"--pipeline-model-parallel-layout {text!r} says more than {LONGEST:,} layers and stages")
        spelled = spelled.replace(group[0], what * int(count), 1)
    if not re.fullmatch(r"E[t|]*L", spelled):
        raise ConfigError(
            f"--pipeline-model-parallel-layout is {text!r}; it is of E, t, |, L, *N and (...)*N, from E to L"
        )
    return tuple(stage.count("t") for stage in spelled.split("|"))


def read(text: str) -> Parallelism:
    """What the arguments say; data parallelism takes the ranks that are left."""
    given = dict(_arguments(text))
    sizes = {ours: _number(name, given[name]) for name, ours in SIZES.items() if name in given}
    numbers = {name: _number(name, given[name]) for name in NUMBERS if name in given}
    if {"--bf16", "--fp16"} <= given.keys():
        raise ConfigError("--bf16 and --fp16 are both given: leave one out")
    pipeline, layers = sizes.get("pipeline", 1), sizes.get("layers")
    stage_layers, virtual = _stages(given, numbers, pipeline, layers)
    recompute, of_each = _recompute(given, numbers)
    strategy = given.get("--data-parallel-sharding-strategy", ["no_shard"])[0]
    zeros = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    if strategy not in zeros:
        raise ConfigError(f"--data-parallel-sharding-strategy is {strategy!r}; it is one of {', '.join(zeros)}")
    if zeros[strategy] and "--use-megatron-fsdp" not in given:
        raise ConfigError(f"--data-parallel-sharding-strategy {strategy} needs --use-megatron-fsdp: give it")
    zero = max(zeros[strategy], int("--use-distributed-optimizer" in given))
    if "--use-torch-fsdp2" in given:
        zero = 2 if "--torch-fsdp2-no-reshard-after-forward" in given else 3
        sizes_beside = [name for name in ("pipeline", "expert") if sizes.get(name, 1) > 1]
        if sizes_beside or "--use-distributed-optimizer" in given:
            what = f"{sizes_beside[0]} parallelism" if sizes_beside else "--use-distributed-optimizer"
            raise ConfigError(f"--use-torch-fsdp2 does not go with {what}: use --use-megatron-fsdp")
    kinds = {name: kind for kind, name in KINDS.items()}
    kind = given.get("--cp-comm-type", ["p2p"])[0]
    if kind not in kinds:
        raise ConfigError(f"--cp-comm-type is {kind!r}; it is one of {', '.join(kinds)}")
    if "--micro-batch-size" not in given:
        raise ConfigError("it has no --micro-batch-size, without which Megatron-LM does not start: give it")
    found = Parallelism(**sizes)  # type: ignore[arg-type]
    found = replace(found, virtual_stages=virtual, stage_layers=stage_layers)
    found = replace(found, recompute=recompute, recompute_layers=of_each, recompute_modules=_modules(given, recompute))
    if of_each is not None:
        count = _recomputing(found, of_each)
        found = replace(found, recompute_layers=None if found.layers and count >= found.layers else count)
    return checked(
        replace(
            found,
            data=REST,
            zero=zero,
            sequence_parallel="--sequence-parallel" in given,
            context_kind=kinds[kind] if found.context > 1 else "",
            schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
            micro_batches=REST,
            micro_batch=numbers["--micro-batch-size"],
            dtype="bfloat16" if "--bf16" in given else "float16" if "--fp16" in given else "float32",
            offload="host" if "--optimizer-cpu-offload" in given else "none",
        )
    )


def _arguments(text: str) -> Iterator[tuple[str, list[str]]]:
    """Every argument with its values."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"these are no arguments of a shell: {error}") from error
    words = [word for word in words if word != ")" and not re.fullmatch(r"\w+=\(", word)]
    if not any(word.startswith("--") for word in words):
        raise ConfigError("there is no argument in it: Megatron-LM's look like --tensor-model-parallel-size 2")
    known = (*SIZES, *NUMBERS, *WORDS, *FLAGS)
    at = next(i for i, word in enumerate(words) if word.startswith("--"))
    name, values = "", []
    for word in words[at:]:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            if name in UNREAD:
                raise ConfigError(f"{name} is not read here: say the stages with --pipeline-model-parallel-layout")
            if name not in known and (near := difflib.get_close_matches(name, known, 1, LIKE)):
                raise ConfigError(f"{TOOL} has no argument {name!r}; did you mean {near[0]!r}?")
            values = [value] if equals else []
            yield name, values
        elif "$" in word and name in known:
            raise ConfigError(f"{word!r} is a variable of the shell: write its value")
        else:
            values.append(word)


def _number(name: str, values: list[str]) -> int:
    if len(values) != 1 or not values[0].isdigit() or int(values[0]) < 1:
        raise ConfigError(f"{name} is {' '.join(values) or 'empty'}; it takes a whole number from 1")
    return int(values[0])


def _stages(
    given: dict[str, list[str]], numbers: dict[str, int], pipeline: int, layers: int | None
) -> tuple[tuple[int, ...], int]:
    """Layers of each stage if they are said, and stages of each rank."""
    ways = ("--pipeline-model-parallel-layout", *NUMBERS[1:3])
    if len(said := [way for way in ways if way in given]) > 1:
        raise ConfigError(f"{' and '.join(said)} say the stages twice: leave one out")
    if ways[0] in given:
        if len(given[ways[0]]) != 1:
            raise ConfigError(f"{ways[0]} takes one word in quotes")
        stage_layers = read_layout(given[ways[0]][0])
        if len(stage_layers) % pipeline:
            raise ConfigError(
                f"{ways[0]} has {len(stage_layers)} stages, which {pipeline} pipeline ranks do not divide: add or join "
                "stages, or change --pipeline-model-parallel-size"
            )
        return stage_layers, len(stage_layers) // pipeline
    if ways[1] in given:
        return (), numbers[ways[1]]
    if ways[2] in given:
        if layers is None:
            raise ConfigError(f"{ways[2]} needs --num-layers to be understood: give it")
        if layers % (pipeline * numbers[ways[2]]):
            raise ConfigError(
                f"{layers} layers do not divide by {pipeline} pipeline ranks x {numbers[ways[2]]} layers of each stage"
            )
        return (), layers // (pipeline * numbers[ways[2]])
    return (), 1


def _recompute(given: dict[str, list[str]], numbers: dict[str, int]) -> tuple[Recomputation, int | None]:
    """What recomputes, and of how many layers of each stage; ``None``: of all."""
    granularity = given.get("--recompute-granularity", ["selective" if "--recompute-activations" in given else "none"])
    method = given.get("--recompute-method", [""])[0]
    if granularity == ["none"]:
        return "none", None
    if granularity == ["selective"]:
        if method:
            raise ConfigError(f"--recompute-method {method} goes with --recompute-granularity full: leave it out")
        return "selective", None
    if granularity != ["full"]:
        raise ConfigError(f"--recompute-granularity is {' '.join(granularity)!r}; it is full or selective")
    if method not in ("uniform", "block"):
        raise ConfigError(
            f"--recompute-granularity full needs --recompute-method uniform or block, and has {method or 'none'!r}"
        )
    if "--recompute-num-layers" not in numbers:
        raise ConfigError("--recompute-granularity full needs --recompute-num-layers: give 1")
    return "full", numbers["--recompute-num-layers"] if method == "block" else None


def _modules(given: dict[str, list[str]], recompute: Recomputation) -> tuple[str, ...]:
    """What of each layer recomputes."""
    if recompute != "selective":
        return ()
    named = given.get("--recompute-modules", [*MODULES[:1]])
    if not named:
        raise ConfigError(f"--recompute-modules names none; they are {', '.join(MODULES)}")
    for name in named:
        if name not in MODULES:
            raise ConfigError(f"--recompute-modules has {name!r}; {nearest(name, MODULES)}")
    return tuple(dict.fromkeys(named))


LIMITS = (
    model_dtype(),
    stored_in_float32(TOOL),
    equal_labels("give --calculate-per-token-loss"),
    own_products(TOOL),
    Limit(
        "gradients are summed once a step in either stage, and stage 1 needs no Megatron-FSDP",
        lambda d: d.zero == 2,
        lambda d: replace(d, zero=1),
    ),
    Limit(
        "schedules are 1F1B and interleaved 1F1B",
        lambda d: d.pipeline > 1 and d.schedule not in ("1f1b", "interleaved_1f1b"),
        lambda d: replace(d, schedule="interleaved_1f1b" if d.virtual_stages > 1 else "1f1b"),
    ),
    Limit(
        "experts beside tensor parallelism need sequence parallelism",
        lambda d: d.expert > 1 and d.tensor > 1 and not d.sequence_parallel,
        lambda d: replace(d, sequence_parallel=True),
        refused=True,
    ),
    Limit(
        "sequence parallelism is over tensor-parallel ranks, of which there is one",
        lambda d: d.sequence_parallel and d.tensor == 1,
        lambda d: replace(d, sequence_parallel=False),
        refused=True,
    ),
    Limit(
        "attention over cut sequences gathers keys or sends them around, both in zigzag order, or shares heads",
        lambda d: d.context > 1 and d.context_kind not in ("", *KINDS),
        lambda d: replace(d, context_kind="zigzag_gather" if d.context_kind == "gather" else "zigzag"),
    ),
    Limit(
        "norms have a checkpoint of their own; activation functions and what is elementwise beside them do not",
        lambda d: d.recompute == "selective" and not d.recompute_modules,
        lambda d: replace(d, recompute_modules=(NORMS,)),
    ),
    Limit(
        "selective recomputation is of all layers",
        lambda d: d.recompute == "selective" and d.recompute_layers is not None,
        lambda d: replace(d, recompute_layers=None),
    ),
    Limit(
        "equally many layers of each stage recompute",
        lambda d: d.recompute == "full" and d.recompute_layers is not None and _in_equal_parts(d) != d,
        _in_equal_parts,
    ),
    Limit(
        "what sequence parallelism gathers for products is gathered again by itself; parameters are not, unless ZeRO "
        "is 3",
        lambda d: d.recompute == "resharded",
        lambda d: replace(d, recompute="none", recompute_layers=None),
    ),
    Limit(
        "nothing can be on disk",
        lambda d: d.offload == "disk",
        lambda d: replace(d, offload="host"),
    ),
    Limit(
        "optimizer state can be on the host, parameters and gradients not",
        lambda d: d.offload == "host",
        about="offload",
    ),
    Limit(
        "copies of the group that shares optimizer state need a distributed optimizer",
        lambda d: d.replicate > 1 and d.zero == 0,
        lambda d: replace(d, data=d.data * d.replicate, replicate=1),
        refused=True,
    ),
)
FORMAT = Format(
    "megatron",
    f"{TOOL} with core 0.16.1",
    ".sh",
    write,
    read,
    {
        **{ours: name for name, ours in SIZES.items()},
        "data": "data-parallel ranks (those left by the other sizes)",
        "zero": "--data-parallel-sharding-strategy",
        "sequence_parallel": "--sequence-parallel",
        "virtual_stages": "--num-virtual-stages-per-pipeline-rank",
        "stage_layers": "--pipeline-model-parallel-layout",
        "micro_batches": "--global-batch-size / (--micro-batch-size x data-parallel ranks)",
        "recompute": "--recompute-granularity",
        "offload": "--optimizer-cpu-offload",
    },
    LIMITS,
    'source FILE; torchrun ... pretrain_gpt.py "${PARALLEL_ARGS[@]}" ...',
    (*SIZES, *NUMBERS, *WORDS, *FLAGS),
    even_stages=True,
)
