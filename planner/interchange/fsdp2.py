"""Plain PyTorch: FSDP2, ``parallelize_module`` and ``torch.distributed.pipelining``, as a module to read and run.

The text begins with constants that say all that was decided; the rest of it is what these need, in straight lines.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planner.base.errors import ConfigError
from planner.interchange.format import Format, Limit, check_known, degree, take
from planner.interchange.limits import (
    dtypes_elsewhere,
    equal_labels,
    heads_from_shapes,
    into_data,
    layers_alone,
    no_context,
    no_experts,
    nothing_gathered_again,
    offload_to_host,
    together,
)
from planner.interchange.parallelism import Parallelism, Recomputation, checked

TOOL = "PyTorch"
AXES = ("pipeline", "replicate", "data", "tensor")
KINDS = ("column", "gathered column", "row", "split row", "vocabulary", "features")
SCHEDULES = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
}
CONSTANTS = {
    "MESH": dict,
    "ZERO": int,
    "LAYERS": str,
    "MICRO_BATCHES": int,
    "PRODUCTS": dict,
    "ALONG_SEQUENCE": dict,
    "RECOMPUTE": str,
    "RECOMPUTED_LAYERS": int,
    "STAGES": list,
    "SCHEDULE": str,
    "OFFLOAD": bool,
}
IMPORTS = {
    "fsdp": "from torch.distributed.fsdp import fully_shard",
    "offload": "from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard",
    "tensor": "from torch.distributed.tensor import DTensor, Replicate\n"
    "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, "
    "parallelize_module\n"
    "from torch.distributed.tensor.parallel.style import ParallelStyle",
    "sequence": "from torch.distributed.tensor import DTensor, Replicate, Shard\n"
    "from torch.distributed.tensor.parallel import (\n    ColwiseParallel,\n    PrepareModuleOutput,\n"
    "    RowwiseParallel,\n    SequenceParallel,\n    parallelize_module,\n)\n"
    "from torch.distributed.tensor.parallel.style import ParallelStyle",
    "pipeline": "from torch.distributed.pipelining import PipelineStage, {schedule}",
    "recompute": "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper",
    "selective": "from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts",
}

TENSOR = '''
def style_of(kind: str) -> ParallelStyle:
    """How a layer is shared. What is gathered or split is whole outside of it."""
    if kind in ("column", "gathered column", "features"):
        return ColwiseParallel() if kind == "column" else ColwiseParallel(output_layouts=Replicate())
    if kind in ("row", "split row", "vocabulary"):
        return RowwiseParallel() if kind == "row" else RowwiseParallel(input_layouts=Replicate())
    return SequenceParallel(sequence_dim=int(kind.removeprefix("along ")), use_local_output=True)


def shard_products(model: nn.Module, mesh: DeviceMesh) -> None:
    """Share the weights of layers among the ranks of the tensor axis."""
    parallelize_module(model, mesh, {path: style_of(kind) for path, kind in PRODUCTS.items()})

'''
SEQUENCE = '''
def style_of(kind: str) -> ParallelStyle:
    """How a layer is shared: it takes all tokens, and leaves each rank its own."""
    if kind in ("column", "gathered column"):
        outputs = Shard(-1) if kind == "column" else Replicate()
        return ColwiseParallel(input_layouts=TOKENS, output_layouts=outputs)
    if kind in ("row", "split row"):
        inputs = Shard(-1) if kind == "row" else TOKENS
        return RowwiseParallel(input_layouts=inputs, output_layouts=TOKENS, use_local_output=False)
    if kind == "features":
        return ColwiseParallel(output_layouts=TOKENS, use_local_output=False)
    if kind == "vocabulary":
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=TOKENS, use_local_output=False)
    return SequenceParallel(sequence_dim=int(kind.removeprefix("along ")), use_local_output=True)


def shard_products(model: nn.Module, mesh: DeviceMesh) -> None:
    """Share the weights of layers among the ranks of the tensor axis, and tokens between them."""
    parallelize_module(model, mesh, {path: style_of(kind) for path, kind in PRODUCTS.items()})
    parallelize_module(model, mesh, {path: SequenceParallel(sequence_dim=TOKENS.dim) for path in ALONG_SEQUENCE})
    gather = PrepareModuleOutput(output_layouts=TOKENS, desired_output_layouts=Replicate(), use_local_output=False)
    gathered = [path for path, kind in ALONG_SEQUENCE.items() if kind.startswith("gathered")]
    parallelize_module(model, mesh, dict.fromkeys(gathered, gather))  # once for all layers that read it

'''
SELECTIVE = '''
KEPT = ("mm", "bmm", "addmm", "convolution", "_scaled_dot_product")
"""How the names begin of operators whose results are kept."""


def policy(context: object, op: torch._ops.OpOverload, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Keep what products and attention make, and recompute the rest."""
    is_kept = op.name().removeprefix("aten::").startswith(KEPT)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective() -> tuple[object, object]:
    """What forward and recomputation run in."""
    return create_selective_checkpoint_contexts(policy)

'''
STAGE = '''
class Elsewhere(nn.Module):
    """Stands for a module that another stage has."""

    def forward(self, *args: object) -> object:
        raise RuntimeError("this module is in another stage, and the model calls it in this one: cut it by hand")


class Stage(nn.Module):
    """Some layers of a decoder of Transformers: from tokens on in the first stage, up to logits in the last."""

    def __init__(self, model: nn.Module, number: int) -> None:
        super().__init__()
        names = {p: name for name, p in model.named_parameters()}
        decoder_path, _, layers_name = LAYERS.rpartition(".")
        self.is_first, self.is_last = number == 0, number == len(STAGES) - 1
        self.decoder = model.get_submodule(decoder_path)
        self.head = model.get_output_embeddings() if self.is_last else None
        start = sum(STAGES[:number])
        layers = getattr(self.decoder, layers_name)
        setattr(self.decoder, layers_name, layers[start : start + STAGES[number]])
        self.decoder.config.num_hidden_layers = STAGES[number]
        children = [name for name, _ in self.decoder.named_children()]
        for name, child in list(self.decoder.named_children()):
            is_before = children.index(name) < children.index(layers_name)
            if name == layers_name or next(child.parameters(), None) is None:
                continue
            if is_before and not self.is_first:
                setattr(self.decoder, name, Elsewhere())
            if not is_before and not self.is_last:
                setattr(self.decoder, name, nn.Identity())
        self.names = {name: names[p] for name, p in self.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.decoder(**{"input_ids" if self.is_first else "inputs_embeds": x}, use_cache=False)[0]
        return self.head(hidden) if self.head is not None else hidden

'''
CHECK = '''

def check(original: nn.Module, model: nn.Module, built: {built}, batch: dict[str, Tensor]) -> None:
    """Raise unless a step has the gradients of the original, both without dropout; none are left behind."""
    {parts}
    trained = [module for module in (original, *modules) if module.training]
    for module in (original, *modules):
        module.eval()
        module.zero_grad()
    train_step(model, built, batch)
    original(**batch).loss.backward()
    expected = {{name: p.grad for name, p in original.named_parameters() if p.grad is not None}}
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    wrong = []
    for module in modules:
        for name, p in module.named_parameters():
            name = {name}
            if p.grad is not None:
                gradient = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                eps = torch.finfo(gradient.dtype).eps
                if (gradient - expected[name]).norm() > eps**0.5 * expected[name].norm() + eps * whole:
                    wrong.append(name)
    for module in (original, *modules):
        module.zero_grad()
    for module in trained:
        module.train()
    if wrong:
        raise RuntimeError(
            f"gradients of {{len(wrong)}} parameters are not the original's, as {{wrong[0]}}: a module counts its "
            "heads by itself, so that its weights cannot be shared on the tensor axis, or some parts of the batch "
            "have fewer labels"
        )
'''
NAMES = 'name.replace("_checkpoint_wrapped_module.", "")'
SHARD = '''
def shard_parameters(model: nn.Module, layers: nn.ModuleList, mesh: DeviceMesh) -> None:
    """Share parameters, gradients and optimizer state among the ranks that share the batch: FSDP2, layer by layer."""
    options = {{"mesh": mesh, "reshard_after_forward": {reshard}{offload}}}
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)

'''


def write(d: Parallelism) -> str:
    """Constants, and the functions that need them."""
    return "\n".join(_lines(d)).replace("\n\n\n\n", "\n\n\n")


def _lines(d: Parallelism) -> Iterator[str]:
    data = {"replicate": d.replicate * d.data, "data": 1} if d.zero == 0 else {"replicate": d.replicate, "data": d.data}
    sizes = {"pipeline": d.pipeline, **data, "tensor": d.tensor}
    sharded = [name for name in ("replicate", "data") if sizes[name] > 1]
    if sharded == ["replicate"]:
        sharded.append("data")
    mesh = {name: size for name, size in sizes.items() if size > 1 or name in sharded} or {"data": 1}
    stages = list(d.stage_layers) or _even(d)
    yield '"""A model in parallel with PyTorch alone: build() once, then train_step() for every global batch."""\n'
    if d.pipeline > 1:
        yield "import copy\n"
    yield "import torch\nimport torch.distributed as dist\nfrom torch import Tensor, nn"
    if d.recompute in ("full", "selective"):
        yield IMPORTS["recompute"]
    yield "from torch.distributed.device_mesh import DeviceMesh, init_device_mesh"
    if sharded:
        yield IMPORTS["offload" if d.offload != "none" else "fsdp"]
    if d.pipeline > 1:
        yield IMPORTS["pipeline"].format(schedule=SCHEDULES[d.schedule])
    if d.tensor > 1:
        yield IMPORTS["sequence" if d.sequence_parallel else "tensor"]
    if d.recompute == "selective":
        yield IMPORTS["selective"]
    yield f"\nMESH = {_dict(mesh)}"
    yield f'LAYERS = "{d.layer_path.removesuffix(".*")}"'
    yield f"MICRO_BATCHES = {d.micro_batches}"
    yield f"ZERO = {d.zero if sharded else 0}"
    if d.tensor > 1:
        yield "PRODUCTS = {"
        yield from (f'    "{path}": "{kind}",' for path, kind in d.products.items())
        yield "}"
    if d.sequence_parallel:
        yield "ALONG_SEQUENCE = {"
        yield from (f'    "{path}": "{kind}",' for path, kind in d.along_sequence.items())
        yield "}"
        yield f"TOKENS = Shard({next(iter(_dims(d.along_sequence)))})  # every rank has some between layers"
    if d.recompute in ("full", "selective"):
        yield f'RECOMPUTE = "{d.recompute}"'
        if d.recompute_layers is not None:
            yield f"RECOMPUTED_LAYERS = {d.recompute_layers}"
    if d.pipeline > 1:
        yield f"STAGES = {stages}"
        yield f'SCHEDULE = "{d.schedule}"'
    if d.offload != "none":
        yield "OFFLOAD = True"
    yield ""
    if d.sequence_parallel:
        yield SEQUENCE
    elif d.tensor > 1:
        yield TENSOR
    if d.recompute == "selective":
        yield SELECTIVE
    if d.pipeline > 1:
        yield STAGE
    if sharded:
        reshard = d.zero == 3
        yield SHARD.format(reshard=reshard, offload=', "offload_policy": CPUOffloadPolicy()' * (d.offload != "none"))
    yield from _build(d, sharded)
    yield ""
    yield from (_pipelined_step if d.pipeline > 1 else _plain_step)(d, sharded)
    if d.tensor > 1:
        if d.pipeline > 1:
            yield CHECK.format(built="Built", parts="modules = built[1]", name=f"module.names[{NAMES}]").rstrip()
        else:
            yield CHECK.format(built="DeviceMesh", parts="modules = [model]", name=NAMES).rstrip()
    yield ""


def _dims(along_sequence: Mapping[str, str]) -> set[str]:
    """Along which tokens are."""
    return {kind.rpartition(" ")[2] for kind in along_sequence.values()}


def _dict(values: dict[str, Any]) -> str:
    return "{" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}"


def _even(d: Parallelism) -> list[int]:
    """Layers by stage, the first ones with one more where they do not divide."""
    stages, layers = d.pipeline * d.virtual_stages, d.layers or d.pipeline * d.virtual_stages
    return [layers // stages + (number < layers % stages) for number in range(stages)]


def _recomputing(d: Parallelism, indent: str) -> Iterator[str]:
    """Lines that wrap layers, each with its own checkpoint."""
    if d.recompute not in ("full", "selective"):
        return
    yield f'{indent}if hasattr(model, "config"):'
    yield f"{indent}    model.config.use_cache = False  # of keys and values, which recomputation would lengthen"
    context = ", context_fn=selective" if d.recompute == "selective" else ""
    if d.recompute_layers is None:
        yield f"{indent}for number in range(len(layers)):"
    elif d.pipeline > 1:
        yield f"{indent}for number in range(max(0, min(len(layers), RECOMPUTED_LAYERS - sum(STAGES[:stage_number])))):"
    else:
        yield f"{indent}for number in range(RECOMPUTED_LAYERS):"
    yield f"{indent}    layers[number] = checkpoint_wrapper(layers[number]{context})"


def _build(d: Parallelism, sharded: list[str]) -> Iterator[str]:
    names = ", ".join(f'"{name}"' for name in sharded)
    if d.pipeline == 1:
        yield "\ndef build(model: nn.Module, device: str) -> DeviceMesh:"
        yield '    """Share the model among all processes, in place; make the optimizer after this."""'
        yield "    mesh = init_device_mesh(device, tuple(MESH.values()), mesh_dim_names=tuple(MESH))"
        yield f"    layers = {'model.get_submodule(LAYERS)' if d.layer_path else 'nn.ModuleList()'}"
        if d.tensor > 1:
            yield '    shard_products(model, mesh["tensor"])'
        yield from _recomputing(d, "    ")
        if sharded:
            yield f"    shard_parameters(model, layers, mesh[{names}])"
        yield "    return mesh\n"
        return
    yield "\nBuilt = tuple[DeviceMesh, list[Stage], list[PipelineStage]]"
    yield "\n\ndef build(model: nn.Module, device: str) -> Built:"
    yield '    """The stages of this rank, of a model that every process has; optimize their parameters."""'
    yield "    mesh = init_device_mesh(device, tuple(MESH.values()), mesh_dim_names=tuple(MESH))"
    yield "    if model.get_input_embeddings().weight is model.get_output_embeddings().weight:"
    yield '        raise RuntimeError("the first and the last stage would share a weight: untie the embeddings")'
    yield '    group, ranks = mesh["pipeline"].get_group(), MESH["pipeline"]'
    yield "    modules, stages = [], []"
    yield '    for stage_number in range(mesh.get_local_rank("pipeline"), len(STAGES), ranks):'
    if d.tensor > 1:
        yield "        own = copy.deepcopy(model)"
        yield '        shard_products(own, mesh["tensor"])'
        yield "        module = Stage(own, stage_number)"
    else:
        yield "        module = Stage(copy.deepcopy(model), stage_number)"
    yield '        layers = getattr(module.decoder, LAYERS.rpartition(".")[2])'
    yield from _recomputing(d, "        ")
    if sharded:
        yield f"        shard_parameters(module, layers, mesh[{names}])"
    yield "        modules.append(module)"
    yield "        stages.append(PipelineStage(module, stage_number, len(STAGES), torch.device(device), group=group))"
    yield "    return mesh, modules, stages\n"


def _mine(sharded: list[str]) -> Iterator[str]:
    """Lines that say which part of the batch a rank computes with."""
    terms = "0"
    for name in sharded:
        terms = (
            f'mesh.get_local_rank("{name}")'
            if terms == "0"
            else f'{terms} * MESH["{name}"] + mesh.get_local_rank("{name}")'
        )
    ranks = " * ".join(f'MESH["{name}"]' for name in sharded) or "1"
    yield f"    mine, ranks = {terms}, {ranks}"


def _plain_step(d: Parallelism, sharded: list[str]) -> Iterator[str]:
    yield "\ndef train_step(model: nn.Module, mesh: DeviceMesh, batch: dict[str, Tensor]) -> Tensor:"
    yield '    """The loss of a global batch that every process has, with gradients: the mean over its samples."""'
    yield from _mine(sharded)
    yield "    parts = {name: value.chunk(ranks)[mine].chunk(MICRO_BATCHES) for name, value in batch.items()}"
    yield "    losses = []"
    yield "    for number in range(MICRO_BATCHES):"
    if sharded and d.zero in (1, 2) and d.micro_batches > 1:
        yield "        is_last = number == MICRO_BATCHES - 1"
        yield "        model.set_requires_gradient_sync(is_last)  # once a step"
        yield "        model.set_reshard_after_backward(is_last)"
    yield "        loss = model(**{name: each[number] for name, each in parts.items()}).loss / MICRO_BATCHES"
    yield "        loss.backward()"
    yield "        losses.append(loss.detach())"
    yield "    total = torch.stack(losses).sum()"
    yield "    dist.all_reduce(total)"
    yield "    return total / dist.get_world_size()"


def _pipelined_step(d: Parallelism, sharded: list[str]) -> Iterator[str]:
    yield "\ndef train_step(model: nn.Module, built: Built, batch: dict[str, Tensor]) -> Tensor:"
    yield '    """The loss of a global batch that every process has, with gradients; the model says how it is made."""'
    yield "    mesh, modules, stages = built"
    yield from _mine(sharded)
    yield '    ids, labels = (batch[name].chunk(ranks)[mine] for name in ("input_ids", "labels"))'
    yield ""
    yield "    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:"
    yield "        return model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size)"
    yield ""
    several = d.schedule == "interleaved_1f1b"
    own = "stages" if several else "stages[0]"
    yield f"    schedule = {SCHEDULES[d.schedule]}({own}, MICRO_BATCHES, loss_fn=loss_of)"
    yield "    losses: list[Tensor] = []"
    yield "    inputs = (ids,) if modules[0].is_first else ()"
    yield '    last = {"target": labels, "losses": losses} if modules[-1].is_last else {}'
    yield "    schedule.step(*inputs, **last)"
    yield "    total = torch.stack(losses).mean() if losses else torch.zeros((), device=ids.device)"
    yield "    dist.all_reduce(total)"
    yield '    return total / (dist.get_world_size() // MESH["pipeline"])'


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(text: str) -> Parallelism:
    """What the constants say."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"this is no Python file: {error}") from error
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in CONSTANTS:
            name = node.targets[0].id
            try:
                found[name] = ast.literal_eval(node.value)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
                raise ConfigError(f"{name!r} is no constant, but {ast.unparse(node.value)}") from error
            take(found, name, CONSTANTS[name], ...)
    if "MESH" not in found:
        raise ConfigError("it has no 'MESH', the sizes of axes by name: autopar export --to fsdp2 did not write this")
    mesh = found["MESH"]
    check_known(mesh, AXES, "'MESH'")
    sizes = {name: degree(mesh, name) for name in AXES}
    products = found.get("PRODUCTS", {})
    for path, kind in products.items():
        if kind not in KINDS and not re.fullmatch(r"along \d", str(kind)):
            raise ConfigError(f"'PRODUCTS' has {kind!r} for {path!r}; it is one of {', '.join(KINDS)}")
    along = found.get("ALONG_SEQUENCE", {})
    for path, kind in along.items():
        if not re.fullmatch(r"(gathered )?along \d", str(kind)):
            raise ConfigError(f"'ALONG_SEQUENCE' has {kind!r} for {path!r}; it is 'along 1' or 'gathered along 1'")
    if sizes["tensor"] > 1 and not products:
        raise ConfigError("'MESH' has a tensor axis, and there are no 'PRODUCTS' to share on it: name the layers")
    recompute = found.get("RECOMPUTE", "none")
    if recompute not in ("none", "selective", "full"):
        raise ConfigError(f"'RECOMPUTE' is {recompute!r}; it is one of selective, full")
    schedule = found.get("SCHEDULE", "1f1b")
    if schedule not in SCHEDULES:
        raise ConfigError(f"'SCHEDULE' is {schedule!r}; it is one of {', '.join(SCHEDULES)}")
    stages, pipeline = found.get("STAGES", []), sizes["pipeline"]
    if not all(isinstance(count, int) and count >= 0 for count in stages):
        raise ConfigError(f"'STAGES' is {stages!r}; it says how many layers each stage has")
    if pipeline > 1 and (not stages or len(stages) % pipeline):
        raise ConfigError(f"'STAGES' has {len(stages)} stages, which {pipeline} pipeline ranks do not divide")
    zero, copies = found.get("ZERO", 0), sizes["replicate"]
    return checked(
        Parallelism(
            replicate=copies if zero else 1,
            data=sizes["data"] if zero else copies * sizes["data"],
            zero=zero,
            tensor=sizes["tensor"],
            sequence_parallel=bool(along) and sizes["tensor"] > 1,
            along_sequence=along,
            pipeline=pipeline,
            schedule=schedule,
            virtual_stages=len(stages) // pipeline if pipeline > 1 else 1,
            stage_layers=tuple(stages) if len({*stages}) > 1 else (),
            micro_batches=found.get("MICRO_BATCHES", 1),
            recompute=_recompute(recompute),
            recompute_layers=found.get("RECOMPUTED_LAYERS"),
            stored="",
            offload="host" if found.get("OFFLOAD") else "none",
            products=products,
            layers=sum(stages) or None,
            layer_path=f"{found['LAYERS']}.*" if found.get("LAYERS") else "",
        )
    )


def _recompute(text: str) -> Recomputation:
    return "full" if text == "full" else "selective" if text == "selective" else "none"


LIMITS = (
    Limit(
        "stages are made of layers that are alike, and the model has none",
        lambda d: d.pipeline > 1 and not d.layer_path,
        lambda d: into_data(d, pipeline=1, schedule="1f1b", virtual_stages=1, stage_layers=()),
    ),
    layers_alone("FSDP2 code", KINDS),
    heads_from_shapes("call check() once"),
    equal_labels("weight them in train_step"),
    Limit(
        "no layer is named whose weight tensor-parallel ranks might share",
        lambda d: d.tensor > 1 and not any("*" in path for path in d.products),
        lambda d: into_data(d, tensor=1, sequence_parallel=False, products={}),
    ),
    no_context("FSDP2 code"),
    no_experts("FSDP2 code"),
    Limit(
        "pipelining hands on plain tensors, and tokens in parts are none",
        lambda d: d.sequence_parallel and d.pipeline > 1,
        lambda d: replace(d, sequence_parallel=False),
    ),
    Limit(
        "tensor-parallel ranks share tokens where norms are named, all along one dim, and here are none",
        lambda d: d.sequence_parallel and (d.tensor == 1 or len(_dims(d.along_sequence)) != 1),
        lambda d: replace(d, sequence_parallel=False),
    ),
    Limit(
        "schedules are 1F1B, GPipe and interleaved 1F1B",
        lambda d: d.pipeline > 1 and d.schedule not in SCHEDULES,
        lambda d: replace(d, schedule="interleaved_1f1b" if d.virtual_stages > 1 else "1f1b"),
    ),
    together("FSDP2"),
    nothing_gathered_again("FSDP2 code"),
    Limit(
        "layers that are alike recompute, and the model has none",
        lambda d: d.recompute in ("selective", "full") and not d.layer_path,
        lambda d: replace(d, recompute="none", recompute_layers=None),
    ),
    offload_to_host("FSDP"),
    *dtypes_elsewhere("the model comes in its dtype"),
)
FORMAT = Format(
    "fsdp2",
    f"{TOOL} 2.13",
    ".py",
    write,
    read,
    {
        **{name: f"MESH[{name!r}]" for name in AXES},
        "zero": "ZERO",
        "schedule": "SCHEDULE",
        "stage_layers": "STAGES",
        "virtual_stages": "STAGES",
        "micro_batches": "MICRO_BATCHES",
        "recompute": "RECOMPUTE",
        "products": "PRODUCTS",
        "sequence_parallel": "ALONG_SEQUENCE",
        "offload": "OFFLOAD",
    },
    LIMITS,
    "import FILE; FILE.build(model, device), then FILE.train_step(...) in every process that torchrun starts",
    ("MESH = ",),
)
