"""Published runs of modern stacks, imitated: a plan on a cluster whose ``software`` says what those stacks do.

As :mod:`benchmarks.planned_runs` does it, but with compiled layers, gathers and tensor parallelism beside products, and
float8 where the run had them, by name. What else torchtitan's own code does and a plan does not is priced besides, by
the same cost model, and held besides, by sizes alone. :data:`HELD_OUT` are runs that nothing was looked at for: as the
others should be, so should they.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch

from autopar.driver.trace import Traced, trace
from benchmarks.planned_runs import Run, copies_s, priced, repriced, skipped_s
from benchmarks.published import llama_cluster
from planner.analysis.pipeline.staged import in_one_piece
from planner.analysis.prediction import collectives
from planner.cost.software import Software
from planner.formulation.remat.levels import Amount, Kept, Recompute
from planner.formulation.training import Training
from planner.ir.folding import Block
from planner.ir.graph import Ref, TensorType
from planner.ir.layout import Axis
from planner.ops import OPS, attends
from planner.search.branch_and_bound import Searched

FULL, BY_OPERATOR = "full", "by operator"
EAGER = {"overlaps": ["gathers"]}
COMPILED = {"compile": "layers", "overlaps": ["gathers"]}
ASYNC = {"compile": "layers", "overlaps": ["gathers", "tensor"]}
FLOAT8 = {"float8": True}
FOREACH = {"optimizer": "foreach"}
"""Until torchtitan #881 (February 2025) its default."""
SIZES = {"Llama 3 8B": (32, 4096, 14336, 32), "Llama 3 70B": (80, 8192, 28672, 64), "Qwen3 32B": (64, 5120, 25600, 64)}
"""Layers, width, hidden features of the perceptron, and heads."""
NAMES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
TRAINING = Training(optimizer_bytes_per_element=10)
"""FSDP2's shards are the masters: 12 bytes of parameters and Adam's moments, no half copy of what is not gathered."""
RESERVED = 62.51 / 52.13
"""What torch's caching allocator reserves over what is allocated at most, which is what runs log: measured by the
authors of FSDP2 for Llama 7B with selective recomputation (pytorch/torchtitan #135); nearly empty devices have more."""
NARROW, HALF, WIDE = 1, 2, 4
"""Bytes of float8, of bfloat16, and of float32, in which FSDP2 reduces gradients."""
TAKEN = {False: 24 / 132, True: 16 / 132}
"""Share of an H100's multiprocessors that a collective of NCCL's takes, in a node and across: one for each channel, of
which it logs 24 on eight GPUs and 16 on more. Others measured 19 % on average (arXiv 2507.03114)."""
STRIDED = 2
"""Times that eager ``torch.cat`` takes for what is cut along the sequence to be scattered. It moves strided tensors one
element at a time, and in bfloat16 as many a second as in float32 (the table of pytorch #150233, before vectors)."""
ROTARY = 20 - 4
"""Bytes of an element of queries and keys that inductor moves in three kernels for torchtitan's complex rotation, for
which it has no code and calls the eager operator (to float32, times, and back), less those of one kernel."""
CLIPPED = 3 * WIDE
"""Bytes of an element of gradients that ``clip_grad_norm_`` moves: read for the norm, read, and written."""
SUMMED = 0.33
"""Share of the memory's bandwidth at which ``torch.sum`` adds up the pieces of an asynchronous reduction, which is
exposed: 23 to 43 % (pytorch #191803)."""
TURNED = 10 * HALF
"""Bytes of an element that eager layers of Qwen move to rotate it: two products, halves negated and joined, a sum."""
DIFFERS = (
    "All devices are the torchtitan team's H100 with 96 GB at 2.4 TB/s and 500 W, given all the memory that is "
    "needed. Transformers' models, which repeat heads of keys as the runs do; torchtitan compiles each layer by "
    "itself. *By operator* recomputation keeps attention and every other product of a layer. *Besides* is what "
    "torchtitan does and no plan: the copies of FSDP2's buffers; clipped gradients; its last reduction, which nothing"
    " is left to hide, in float32; *beside*, the multiprocessors that its other collectives take from what computes; "
    "what is gathered or scattered along the sequence is put in order (`torch.cat`, whole), as DTensor has it unless "
    "a fused product does it in pieces (less than a plan's copies, hence below zero), and slower where eager "
    "scatters; fused products add up those pieces at the end (*sums*), and no product is fused with the scatters of "
    "backward, which have a sum of several and are *waited for* (pytorch #149946); layers in float8 gather in float8 "
    "(torchao's `float8_tensor_parallel`); compiled layers of Llama rotate queries and keys as complex numbers, which"
    " inductor does not fuse; layers of Qwen gather queries and keys from the tensor group behind their norms and "
    "rotate them *whole* (torchtitan #1867, October 2025); eager layers are recomputed whole, without an early stop, "
    "since torchtitan #1580 (August 2025). Peaks are those of plans, with shards that are the masters, embedding and "
    "head gathered all along, what eager layers cache of kept products though backward needs it not, and one copy "
    "more of the logits in the loss of DTensors; times 1.2, which the allocator reserves (torchtitan #135). pytorch "
    "#149990 does not say its local batch: that of the team's later runs is taken, and what it calls GB is what "
    "torchtitan logs, GiB. It, torchtitan #929, #996 and #1690 do not say the power limit of their devices: at 700 W "
    "the held out run of #1690 would be 2.5 % too quick, and its first under tensor parallelism 5.1 %. What float8, "
    "foreach kernels and sums of fused products take was stated after the held out runs had been seen: they are held "
    "out no more, and three of them came out worse by it"
)


@dataclass(frozen=True)
class Published:
    """A row of a source.

    Attributes:
        sharded, tensor: ranks of FSDP, and of tensor parallelism with a sharded sequence.
        batch: samples of a data rank.
        software: what the stack does, as a cluster file says it.
        early_stop: whether recomputing an eager layer ends with what backward needs.
    """

    model: str
    sharded: int
    tensor: int
    batch: int
    sequence: int
    recompute: str
    software: Mapping[str, Any]
    tokens_per_s: float
    gib: float | None = None
    early_stop: bool = True

    @property
    def is_compiled(self) -> bool:
        return "compile" in self.software

    @property
    def is_asynchronous(self) -> bool:
        return "tensor" in self.software["overlaps"]

    @property
    def gathers_float8(self) -> bool:
        """Whether tensor parallelism gathers what is cast already, as torchao does where a tensor has one scale."""
        return "float8" in self.software and self.tensor > 1

    @property
    def name(self) -> str:
        tensor = f" x TP {self.tensor}" if self.tensor > 1 else ""
        return f"{self.model}, FSDP {self.sharded}{tensor}, batch {self.batch}"


RUNS = (
    Published("Llama 3 8B", 8, 1, 2, 8192, BY_OPERATOR, EAGER | FOREACH, 5762, 82.4),
    Published("Llama 3 8B", 8, 1, 2, 8192, BY_OPERATOR, COMPILED | FOREACH, 6667, 77.0),
    Published("Llama 3 8B", 128, 1, 2, 8192, BY_OPERATOR, EAGER | FOREACH, 5605, 67.0),
    Published("Llama 3 8B", 128, 1, 2, 8192, BY_OPERATOR, COMPILED | FOREACH, 6514, 62.0),
    Published("Llama 3 70B", 16, 8, 16, 8192, FULL, COMPILED, 598, 71.51),
    Published("Llama 3 70B", 16, 8, 16, 8192, FULL, ASYNC, 673, 71.08),
    Published("Qwen3 32B", 4, 8, 16, 4096, FULL, EAGER, 876, 43.45, early_stop=False),
    Published("Qwen3 32B", 4, 8, 32, 4096, FULL, EAGER, 883, 70.79, early_stop=False),
    Published("Qwen3 32B", 8, 8, 32, 4096, FULL, EAGER, 873, 63.27, early_stop=False),
)
"""``../shared/validation``: torchtitan's benchmarks of December 2024, pytorch #149990, and torchtitan #1690."""
HELD_OUT = (
    Published("Llama 3 70B", 32, 8, 16, 8192, FULL, COMPILED, 597.3),
    Published("Llama 3 70B", 32, 8, 16, 8192, FULL, ASYNC, 652.4),
    Published("Llama 3 70B", 32, 8, 16, 8192, FULL, COMPILED | FLOAT8, 809.8),
    Published("Llama 3 70B", 32, 8, 16, 8192, FULL, ASYNC | FLOAT8, 942.4),
    Published("Llama 3 8B", 8, 8, 12, 8192, BY_OPERATOR, COMPILED, 4378),
    Published("Llama 3 8B", 8, 8, 12, 8192, BY_OPERATOR, ASYNC, 4809.4),
    Published("Llama 3 8B", 8, 1, 2, 8192, BY_OPERATOR, COMPILED | FLOAT8 | FOREACH, 8532, 76.8),
    Published("Llama 3 8B", 128, 1, 2, 8192, BY_OPERATOR, COMPILED | FLOAT8 | FOREACH, 8380, 61.8),
    Published("Llama 3 70B", 32, 8, 16, 8192, FULL, COMPILED | FLOAT8 | FOREACH, 829, 71.9),
    Published("Llama 3 70B", 32, 8, 16, 8192, FULL, ASYNC | FLOAT8 | FOREACH, 876, 67.6),
    Published("Llama 3 8B", 8, 1, 1, 8192, BY_OPERATOR, EAGER, 5959, 49.58),
    Published("Llama 3 8B", 8, 1, 1, 8192, BY_OPERATOR, COMPILED, 6500, 47.65),
    Published("Qwen3 32B", 8, 1, 2, 4096, FULL, COMPILED, 1874, 81.85),
)
"""pytorch/torchtitan, ``benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md`` (bfloat16 and tensorwise float8), the
float8 rows of ``benchmarks/llama3_h100_202412_torchtitan.md``, and what was logged in #996, #929 (about 6.5 thousand
tokens) and #1690 (compiled)."""


@dataclass(frozen=True)
class Imitated(Run):
    """A run and its plan.

    Attributes:
        held: bytes that the run holds besides at the peak, by what.
    """

    held: Mapping[str, float] = field(default_factory=dict)

    @property
    def reserved_gib(self) -> float:
        """What the allocator takes of the device."""
        return RESERVED * (self.gib + math.fsum(self.held.values()) / 2**30)


def runs(rows: Iterable[Published]) -> list[Imitated]:
    """The plan of every row."""
    traced: dict[object, Traced] = {}
    found = []
    for row in rows:
        key = (row.model, row.sharded * row.batch, row.sequence)
        if key not in traced:
            traced.clear()  # one at a time is enough to hold
            traced[key] = _traced(*key)
        found.append(_planned(row, traced[key]))
    return found


def _planned(row: Published, traced: Traced) -> Imitated:
    pin: dict[str, Any] = {"data": row.sharded, "zero": 3}
    pin["recompute"] = "selective" if row.recompute == BY_OPERATOR else "full"
    if row.tensor > 1:
        pin |= {"tensor": row.tensor, "sequence_parallel": True}
    published_s = row.batch * row.sequence / (row.tokens_per_s * row.tensor)
    spec = llama_cluster(row.sharded * row.tensor)
    roomy = spec.device.model_copy(update={"memory_bytes": 2**40})
    cluster = spec.model_copy(update={"device": roomy, "software": Software(**row.software)})
    run, found = priced(Imitated("imitated", row.name, pin, published_s, row.gib), traced, cluster, TRAINING)
    assert isinstance(run, Imitated)
    if found is None:
        return run
    if row.recompute == BY_OPERATOR:
        found = _with_every_other_product(found)
        run = repriced(run, found)
    return replace(run, besides=_besides(row, found), held=_held(row, found))


def _layer(found: Searched) -> tuple[Block, int]:
    """The block that repeats most, and how often."""
    instances = max(found.assignment.space.folded.kinds, key=len)
    return instances[0].block, len(instances)


def _with_every_other_product(found: Searched) -> Searched:
    """The same decisions where layers keep attention and every other product, the first of them."""
    amounts = []
    for kind, amount in zip(found.assignment.space.folded.kinds, found.assignment.recompute.amounts, strict=True):
        amounts.append(Amount.of({_every_other(kind[0].block): len(kind)}) if len(kind) > 1 else amount)
    staged = in_one_piece(replace(found.assignment, recompute=Recompute(tuple(amounts))))
    return replace(found, best=replace(found.best, staged=staged))


def _products(block: Block) -> list[int]:
    """The positions of linear layers."""
    rows = [(at, OPS.get(node.op)) for at, node in enumerate(block.nodes) if not attends(node.op)]
    return [at for at, row in rows if row is not None and row.contracts]


def _every_other(block: Block) -> Kept:
    return tuple(sorted([*_products(block)[::2], *(at for at, node in enumerate(block.nodes) if attends(node.op))]))


def _vocabulary(found: Searched) -> TensorType:
    """The weight of the head, which is also that of the embedding."""
    leaves = (leaf.results[0] for leaf in found.assignment.space.graph.leaves if leaf.op == "param")
    return max(leaves, key=lambda tensor: tensor.numel)


def _elements(found: Searched) -> int:
    """Of all parameters."""
    return sum(leaf.results[0].numel for leaf in found.assignment.space.graph.leaves if leaf.op == "param")


def _root_elements(row: Published, found: Searched) -> float:
    """Elements of embedding and head that a rank has gathered; FSDP2 keeps its root's until backward is over."""
    return 2 * _vocabulary(found).numel / row.tensor


def _rotated_elements(row: Published, found: Searched) -> float:
    """Elements of a rank's queries and keys in all layers; they are rotated forward, again, and backward."""
    layer, count = _layer(found)
    graph = found.assignment.space.graph
    queries, keys = (graph.type_of(Ref(layer.nodes[at].name)).numel for at in _products(layer)[:2])
    return count * (queries + keys) / (row.sharded * row.tensor)


def _besides(row: Published, found: Searched) -> dict[str, float]:
    """Seconds of what torchtitan does and the plan does not; see :data:`DIFFERS`."""
    assignment = found.assignment
    space = assignment.space
    own = _elements(found) / (row.sharded * row.tensor)
    left = {"copies": copies_s(found) / row.tensor, "clipped": space.cost.compute_s(0.0, CLIPPED * own, "float32", 0)}
    data = _axis(found, "data")
    left["last reduction"] = space.cost.collective_s("reduce_scatter", data, WIDE * _root_elements(row, found))
    if row.tensor > 1:
        left |= _tensor_parallel(row, found)
        if row.model.startswith("Qwen"):
            left["whole queries"] = _whole_queries_s(row, found)
    if row.is_compiled and row.model.startswith("Llama"):
        left["rotated"] = space.cost.compute_s(0.0, 3 * ROTARY * _rotated_elements(row, found), "bfloat16", 0)
    if row.recompute == FULL and not row.early_stop and not row.is_compiled:
        left["recomputed whole"] = _layer(found)[1] * skipped_s(assignment)
    left["beside"] = TAKEN[row.sharded * row.tensor > space.cost.cluster.spans[0]] * _gathering_s(row, found)
    return left


def _gathering_s(row: Published, found: Searched) -> float:
    """Seconds in which FSDP2 gathers parameters, twice, and reduces their gradients, next to all beside computing."""
    space = found.assignment.space
    data = _axis(found, "data")
    elements = _elements(found) / row.tensor
    gathered_s = space.cost.collective_s("all_gather", data, HALF * elements / row.sharded)
    return 2 * gathered_s + space.cost.collective_s("reduce_scatter", data, WIDE * elements)


def _tensor_parallel(row: Published, found: Searched) -> dict[str, float]:
    """Of what is gathered and scattered along the sequence: what puts it in order, less the plan's one pass over the
    whole and one over the part; what fused products do instead; and what is saved by gathering in float8.

    Gathers are fused with the products that read them, scatters with the one that makes them, which backward adds up.
    """
    space = found.assignment.space
    tensor = _axis(found, "tensor")
    device, scattered = space.cost.slowest, 1 if row.is_compiled else STRIDED
    narrow = NARROW / HALF if row.gathers_float8 else 1.0
    exposed = 1 / row.tensor if row.is_asynchronous else 1.0
    calls = {call: count for call, count in collectives(found.assignment).items() if call.axis == "tensor"}
    summed = {  # what is gathered forward is scattered backward, a sum of products
        call.bytes_in * row.tensor: count
        for call, count in calls.items()
        if call.kind == "all_gather" and call.phase == "forward"
    }
    ordered, left = 0.0, {"sums": 0.0, "waited for": 0.0, "in float8": 0.0}
    for call, count in calls.items():
        seconds = space.cost.collective_s(call.kind, tensor, call.bytes_in)
        whole = call.bytes_in * (row.tensor if call.kind == "all_gather" else 1)
        part = whole / row.tensor
        if call.kind == "all_gather":
            moved = count * 2 * narrow * (part if row.is_asynchronous else whole)
            left["in float8"] -= count * (1 - narrow) * exposed * seconds
        elif call.kind == "reduce_scatter":
            by_sums = min(count, summed.get(whole, 0)) if call.phase == "backward" else 0
            fused = count - by_sums if row.is_asynchronous else 0
            moved = (count - fused) * 2 * scattered * whole
            left["sums"] += fused * (whole + part) / (SUMMED * device.memory_bandwidth_bytes_per_s)
            left["waited for"] += by_sums * (1 - exposed) * seconds
        else:
            continue
        ordered += moved - count * (whole + part)
    left["put in order"] = ordered / (device.memory_efficiency * device.memory_bandwidth_bytes_per_s)
    return {what: seconds for what, seconds in left.items() if seconds}


def _whole_queries_s(row: Published, found: Searched) -> float:
    """Seconds to gather queries and keys of all heads behind their norms, and to rotate those of others, too: forward
    and again.
    """
    space, queries = found.assignment.space, _rotated_elements(row, found)
    moved = 2 * HALF * row.tensor * queries + TURNED * (row.tensor - 1) * queries
    gathered_s = space.cost.collective_s("all_gather", _axis(found, "tensor"), HALF * queries)
    return 2 * (gathered_s + space.cost.compute_s(0.0, moved, "bfloat16", 0))


def _axis(found: Searched, name: str) -> Axis:
    return next(axis for axis in found.assignment.space.mesh.axes if axis.name == name)


def _held(row: Published, found: Searched) -> dict[str, float]:
    """Bytes of what torchtitan holds at the peak and the plan does not, or the other way round; see :data:`DIFFERS`."""
    space = found.assignment.space
    graph, (layer, count) = space.graph, _layer(found)
    held = {"root": 2 * _root_elements(row, found)}
    if row.recompute == BY_OPERATOR and not row.is_compiled:
        last = layer.nodes[_products(layer)[-1]]
        held["cached"] = count * graph.type_of(Ref(last.name)).size_bytes / (row.sharded * row.tensor)
    if row.tensor > 1:
        held["logits"] = WIDE * row.batch * row.sequence * _vocabulary(found).shape[0] / row.tensor
    return held


def _traced(model: str, batch: int, sequence: int) -> Traced:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = dict(zip(NAMES, SIZES[model], strict=True))
    common = {**sizes, "num_key_value_heads": 8, "use_cache": False, "max_position_embeddings": sequence}
    with torch.device("meta"):
        if model == "Qwen3 32B":
            made = Qwen3ForCausalLM(Qwen3Config(head_dim=128, vocab_size=151936, **common))
        else:
            made = LlamaForCausalLM(LlamaConfig(vocab_size=128256, **common))
        made = made.to(torch.bfloat16).train()
        ids = torch.zeros(batch, sequence, dtype=torch.long)
    # Capture lets attention share heads of keys; these stacks repeat them.
    with patch("autopar.capture.flatten.grouped_heads", lambda program: program):
        return trace(made, example_kwargs={"input_ids": ids, "labels": ids.clone()})


def table(rows: Iterable[Published], found: Iterable[Imitated]) -> list[dict[str, str]]:
    """Rows for people."""
    told = []
    for row, run in zip(rows, found, strict=True):
        with_it = run.predicted_s + sum(run.besides.values())
        shares = {use: seconds / with_it for use, seconds in run.seconds.items()}
        told.append(
            {
                "run": row.name,
                "recompute": row.recompute,
                "software": ", ".join(_words(row.software)),
                "published s": f"{run.published_s:.2f}",
                "predicted s": f"{with_it:.2f}",
                "error": f"{run.error_besides:+.1%}",
                "of which": ", ".join(f"{use} {share:.0%}" for use, share in shares.items() if share > 0.005),
                "besides s": ", ".join(f"{what} {s:.2f}" for what, s in run.besides.items()),
                "peak GiB": f"{run.reserved_gib:.1f}",
                "published GiB": "" if run.published_gib is None else f"{run.published_gib:.1f}",
                "peak's error": "" if run.published_gib is None else f"{_peak_error(run):+.1%}",
                "of which GiB": f"plan {run.gib:.1f}, "
                + ", ".join(f"{what} {size / 2**30:.1f}" for what, size in run.held.items()),
            }
        )
    return told


def _words(software: Mapping[str, Any]) -> Iterable[str]:
    yield from (["compiled layers"] if software.get("compile") else ["eager"])
    yield from (f"{each} overlapped" for each in software.get("overlaps", ()))
    yield from (["float8"] if software.get("float8") else [])


def _peak_error(run: Imitated) -> float:
    return run.reserved_gib / (run.published_gib or math.nan) - 1


def errors(found: Iterable[Imitated]) -> str:
    """Mean and worst, in words."""
    found = list(found)
    steps, peaks = [abs(run.error_besides) for run in found], [abs(_peak_error(run)) for run in found]
    peaks = [size for size in peaks if not math.isnan(size)]
    return "; ".join(
        f"{what} mean error {math.fsum(sizes) / len(sizes):.1%}, worst {max(sizes):.1%}"
        for what, sizes in (("steps", steps), ("peaks", peaks))
    )
