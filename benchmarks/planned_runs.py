"""Planned runs: published step times beside what the planner predicts for the published configuration.

Unlike :mod:`benchmarks.published`, which puts the same constants into textbook formulas, this goes the whole way: a
model on the meta device is captured, the published configuration is pinned, and the step is the plan's own. What is
priced is therefore the program that autopar would emit. It is not the program of the run: :data:`DIFFERS` says how,
and :func:`besides` prices what the run does and the plan leaves out, by the same cost model.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.driver.trace import Traced, trace
from benchmarks.plan_time import llama
from benchmarks.published import FULL, HALF, MEGATRON_CHOICES, ROWS, Compared, llama_cluster
from planner.analysis.pipeline.staged import in_one_piece
from planner.analysis.prediction import predict, predict_micro_batched
from planner.base.errors import AutoparError, InfeasibleError
from planner.cost.cluster import ClusterSpec
from planner.formulation.assignment import Assignment
from planner.formulation.constraints.pins import Pins
from planner.formulation.remat.levels import LEVELS, Amount, Recompute
from planner.formulation.resharding import local_bytes
from planner.formulation.training import Training
from planner.ir.graph import Node, Ref
from planner.ir.layout import Axis
from planner.search.branch_and_bound import Searched
from planner.search.candidates import PROVED
from planner.search.search import search

TRAINING = Training(optimizer_bytes_per_element=12)
"""Adam's two moments and the master copy of half precision parameters, in float32."""
MEGATRON_TRAINING = Training(optimizer_bytes_per_element=16)
"""And gradients once more in float32: 20 bytes per parameter, as Megatron's documentation has it for parameters and
gradients in float16 whose optimizer is not distributed."""
LIMIT_S, FREE_LIMIT_S = 60.0, 30.0
DROPOUT = 0.1
"""Megatron's, of attention's probabilities and of what joins the residual."""
FREE = ("7.5B", "145B", "128 GPUs")
"""Runs whose clusters search also plans freely."""
STAGES, TENSOR, MICRO = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8), (1, 2, 4, 8)
"""What the runs of 2021 are compared with besides: stages, ranks of a tensor group, and samples of a micro-batch."""
DIFFERS = (
    "Megatron: every operator of the model is a kernel of the run's, but for dropout of what joins the residual, which "
    "the run fuses with its sum; a plan's full recomputation does not run the last sum of a layer again, nor what is "
    "summed over ranks there; a plan sends between stages beside computing, and from every rank all that its "
    "neighbour needs, where the run sends each part once and gathers it. *Besides* is what the run does of this and "
    "the plan does not, by the same prices. Gradients are reduced when backward is over",
    "Llama: Transformers' model, which repeats heads of keys as torchtitan's does (a plan of today shares them), every "
    "eager kernel by itself (a compiled run has no plan of its own); the source says "
    "selective recomputation, its configuration knows it by operator (which also makes every other product again, and "
    "a plan's none) and by block; gradients are reduced in bfloat16, parameters are gathered without copies and, in "
    "blocks that recompute nothing, held until backward; the device is given all the memory that is needed",
)


# ---- models ----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Operator by operator what Megatron's fused kernels of 2021 pass over.

    One product makes queries, keys and values, head by head. Scores are stored; that they are scaled and masked costs
    nothing in the run's softmax kernel, and is left out here.
    """

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.drop_scores, self.drop1, self.drop2 = nn.Dropout(DROPOUT), nn.Dropout(DROPOUT), nn.Dropout(DROPOUT)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.mix = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, self.heads, 3, -1).permute(3, 0, 2, 1, 4).unbind()
        mixed = self.drop_scores(F.softmax(q @ k.transpose(2, 3), dim=-1)) @ v
        x = x + self.drop1(self.mix(mixed.transpose(1, 2).reshape(batch, length, hidden)))
        added: Tensor = self.drop2(self.down(F.gelu(self.up(self.norm2(x)))))
        return x + added


class GPT(nn.Module):
    """With the head's weights those of the token embedding, and the loss in float32."""

    def __init__(self, hidden: int, layers: int, heads: int, vocab: int, sequence: int):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, hidden), nn.Parameter(torch.empty(sequence, hidden))
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.drop, self.norm = nn.Dropout(DROPOUT), nn.LayerNorm(hidden)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.drop(self.token(ids) + self.position)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Free:
    """What search finds where the configuration is its own choice, or one of those that the run's software had.

    Attributes:
        pinned: all that is, in words.
        step_s: predicted for its plan, of the shape ``config``.
        place: of the published configuration among all configurations of which search has a plan, by predicted step.
        planned, configs: how many have a plan, the published configuration with them, and how many there are.
    """

    pinned: str
    step_s: float
    config: str
    place: int
    planned: int
    configs: int

    def told(self, published_s: float) -> str:
        """In words, beside what is predicted for the published configuration."""
        given = f"with {self.pinned} " if self.pinned else ""
        return (
            f"{given}{self.step_s:.2f} s: {self.config}; the published one is number {self.place} of {self.planned} "
            f"with a plan ({self.configs} in all), {published_s / self.step_s:.2f} x"
        )


R = TypeVar("R", bound="Run")


@dataclass(frozen=True)
class Run(Compared):
    """A published run and its plan.

    Attributes:
        seconds, bytes: predicted, by use; empty where there is no plan, and ``why`` says why not.
        besides: seconds of what the run does and the plan leaves out, by what.
        plan_s: wall seconds from the module to the plan.
        gap: what the plan may be above the best one with these pins.
        free: what search finds for this cluster, freely and with the run's recomputation.
    """

    set: str
    name: str
    pin: Mapping[str, Any]
    published_s: float
    published_gib: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)
    besides: Mapping[str, float] = field(default_factory=dict)
    plan_s: float = 0.0
    gap: float = 0.0
    why: str = ""
    free: tuple[Free, ...] = ()

    @property
    def error_besides(self) -> float:
        """The same with what the plan leaves out."""
        return (self.predicted_s + sum(self.besides.values())) / self.published_s - 1

    @property
    def gib(self) -> float:
        return sum(self.bytes.values()) / 2**30


def runs(names: Iterable[str] | None = None) -> list[Run]:
    """Every row of both sets, or those of some names."""
    sets = {each["id"]: each for each in json.loads(ROWS.read_text(encoding="utf-8"))["sets"]}
    wanted = None if names is None else set(names)
    found = []
    for which, make in (("megatron-a100-2021", megatron), ("torchtitan-llama3-8b-h100-2024", titan)):
        for row in sets[which]["rows"]:
            if wanted is None or row_name(row) in wanted:
                found += make(which, sets[which]["model"], row)
    return found


def row_name(row: Mapping[str, Any]) -> str:
    return str(row.get("name") or f"{row['gpus']} GPUs{', compiled' if row['compiled'] else ''}")


def megatron(which: str, model: Mapping[str, Any], row: Mapping[str, Any]) -> list[Run]:
    """With the micro-batch and the pieces per stage of the authors' scripts."""
    b, h, depth, s, vocab = row["global_batch"], row["hidden"], row["layers"], model["sequence"], model["vocab"]
    flops = 96 * b * s * depth * h**2 * (1 + s / (6 * h) + vocab / (16 * depth * h))
    micro, pieces = MEGATRON_CHOICES[row["name"]]
    pin: dict[str, Any] = {name: row[name] for name in ("pipeline", "tensor", "data")}
    pin |= {"micro_batches": b // (row["data"] * micro), "zero": 0, "recompute": "full"}
    if row["tensor"] > 1:
        pin["sequence_parallel"] = False
    if row["pipeline"] > 1:
        pin |= {"schedule": "interleaved_1f1b" if pieces > 1 else "1f1b", "virtual_stages": pieces}
    run = Run(which, row["name"], pin, flops / (row["gpus"] * row["achieved_tflops_per_gpu"] * 1e12))
    with torch.device("meta"):
        made = GPT(h, depth, row["heads"], vocab, s).to(torch.bfloat16).train()
        ids = torch.zeros(b, s, dtype=torch.long)
    cluster = ClusterSpec.preset("dgx-a100", devices=row["gpus"]).model_copy(update={"overlap": 0.0})
    traced = trace(made, example_kwargs={"ids": ids, "labels": ids.clone()})
    run, found = priced(run, traced, cluster, MEGATRON_TRAINING)
    if found is not None:
        run = replace(run, besides=besides(found))
    run = _freely(run, traced, cluster, MEGATRON_TRAINING)
    if run.free and found is not None:
        run = replace(run, free=(*run.free, _among(run, traced, cluster, b)))
    return [run]


def titan(which: str, model: Mapping[str, Any], row: Mapping[str, Any]) -> list[Run]:
    """The source says "selective"; both that its configuration knows, on a device with room for what they take."""
    name, published_s = row_name(row), row["local_batch"] * model["sequence"] / row["tokens_per_s_per_gpu"]
    pin = {"data": row["data_shard"], "zero": 3}
    if row["compiled"]:
        why = "compiled kernels are not what the runtime emits"
        return [Run(which, name, pin, published_s, row["peak_memory_gib"], why=why)]
    made, batch = llama(model["layers"], row["local_batch"] * row["gpus"], model["sequence"])
    # Capture lets attention share heads of keys; torchtitan's model repeats them, so that its run did.
    with patch("autopar.capture.flatten.grouped_heads", lambda program: program):
        traced, cluster = trace(made, example_kwargs=batch), llama_cluster(row["gpus"])
    roomy = cluster.model_copy(update={"device": cluster.device.model_copy(update={"memory_bytes": 2**40})})
    runs = []
    for level in ("selective", "full"):
        run = Run(which, name, {**pin, "recompute": level}, published_s, row["peak_memory_gib"])
        run, found = priced(run, traced, roomy, TRAINING)
        if found is None:
            runs.append(run)
            continue
        left = {"copies": copies_s(found)}
        if level == "full":
            run = repriced(replace(run, pin={**pin, "recompute": "full in every other block"}), _half(found))
        runs.append(_freely(replace(run, besides=left), traced, cluster, TRAINING))
    return runs


def priced(run: R, traced: Traced, cluster: ClusterSpec, training: Training) -> tuple[R, Searched | None]:
    """The run with its plan, if there is one."""
    start = time.perf_counter()
    try:
        found = search(traced.graph, cluster, Pins.parse(run.pin), training, time_limit_s=LIMIT_S)
    except AutoparError as error:
        return replace(run, why=str(error)), None
    plan_s = traced.capture_s + time.perf_counter() - start
    return repriced(replace(run, plan_s=plan_s, gap=found.gap), found), found


def repriced(run: R, found: Searched) -> R:
    """The run as a plan predicts it."""
    predicted = (
        predict(found.assignment, found.evaluation.time_s)
        if found.staged is None
        else predict_micro_batched(found.assignment, found.staged)
    )
    return replace(run, seconds=dict(predicted.time_s), bytes=dict(predicted.memory_bytes))


def _half(found: Searched) -> Searched:
    """The same decisions with half of the blocks of every kind recomputed in full."""
    space = found.assignment.space
    amounts = tuple(Amount.of({"full": len(kind) // 2 if len(kind) > 1 else 0}) for kind in space.folded.kinds)
    staged = in_one_piece(replace(found.assignment, recompute=Recompute(amounts)))
    return replace(found, best=replace(found.best, staged=staged))


def _freely(run: Run, traced: Traced, cluster: ClusterSpec, training: Training) -> Run:
    """The run with what search picks on its own, if it is one of :data:`FREE`."""
    if run.name not in FREE:
        return run
    same = {name: value for name, value in run.pin.items() if name == "recompute" and value in LEVELS}
    return replace(
        run, free=tuple(_free(run, traced, cluster, training, pin) for pin in ([{}, same] if same else [{}]))
    )


def _free(run: Run, traced: Traced, cluster: ClusterSpec, training: Training, pin: Mapping[str, Any]) -> Free:
    """What search picks with few pins."""
    found = search(traced.graph, cluster, Pins.parse(pin), training, time_limit_s=FREE_LIMIT_S)
    candidates = found.candidates
    planned = [each.objective_s for each in candidates if math.isfinite(each.objective_s)]
    return Free(
        _told(pin),
        found.evaluation.time_s,
        str(found.best.config),
        1 + sum(seconds < run.predicted_s for seconds in planned),
        1 + len(planned),
        len(candidates),
    )


def _among(run: Run, traced: Traced, cluster: ClusterSpec, batch: int) -> Free:
    """The best of what Megatron could be told in 2021, and the place of the published configuration among all that.

    Parameters and sequences are whole on every rank, and every layer is recomputed in full; the schedule is the best,
    and of each configuration so are the micro-batches, but for the published one those of its run.
    """
    fixed, planned, tried = {"zero": 0, "recompute": "full"}, [], set()
    for pipeline, tensor, micro in itertools.product(STAGES, TENSOR, MICRO):
        data, rest = divmod(cluster.world_size, pipeline * tensor)
        micro_batches = 0 if rest or batch % (data * micro) else batch // (data * micro)
        if micro_batches < pipeline:
            continue
        sizes = {"pipeline": pipeline, "tensor": tensor, "data": data, "micro_batches": micro_batches}
        whole = {"sequence_parallel": False} if tensor > 1 else {}
        tried.add((pipeline, tensor))
        try:
            pins = Pins.parse({**sizes, **fixed, **whole})
            found = search(traced.graph, cluster, pins, MEGATRON_TRAINING, time_limit_s=LIMIT_S)
        except InfeasibleError:
            continue
        planned.append((found.evaluation.time_s, _told(sizes), (pipeline, tensor)))
    step_s, best, _ = min(planned)
    faster = {config for each_s, _, config in planned if each_s < run.predicted_s * (1 - PROVED)}
    place = 1 + len(faster - {(run.pin["pipeline"], run.pin["tensor"])})
    told = (
        f"{_told(fixed)}, whole sequences, tensor at most {TENSOR[-1]} and of each configuration the best micro-batches"
    )
    return Free(told, step_s, best, place, len({config for *_, config in planned}), len(tried))


def _told(pin: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in pin.items())


# ---- what the run does besides ---------------------------------------------------------------------------------------


def besides(found: Searched) -> dict[str, float]:
    """Seconds of a Megatron run that its plan leaves out, by what, less what is not in the run; see :data:`DIFFERS`.

    Work of the layers waits in the pipeline as all work does: it counts for the micro-batches and for the bubble. A
    dropout that the run fuses with the sum behind it writes and reads one tensor less, in forward and again.
    """
    assignment = found.assignment
    space, mesh = assignment.space, assignment.space.mesh
    stages, micro_batches = space.stages, mesh.micro_batches
    pieces = 1 if found.staged is None else found.staged.pipeline.virtual_stages
    layers = max(space.folded.kinds, key=len)
    left = {"recomputed": skipped_s(assignment), "fused": 0.0}
    for node in layers[0].block.nodes:
        if node.op == "aten.dropout.default":
            size = local_bytes(node.results[0], assignment.choice(node).results[0], mesh)
            if any(reader.op == "aten.add.Tensor" for reader, _ in space.graph.users[Ref(node.name)]):
                left["fused"] -= 2 * space.cost.compute_s(0.0, 2 * size, "bfloat16")
    count = len(layers) / stages * (micro_batches + (stages - 1) / pieces)
    left = {what: each_s * count for what, each_s in left.items()}
    if stages > 1:
        left["sends"] = 2 * pieces * micro_batches * _sending_s(assignment, layers[0].block.outputs)
    return {what: each_s for what, each_s in left.items() if each_s}


def skipped_s(assignment: Assignment) -> float:
    """Seconds of what one layer does forward and full recomputation does not do again: its last sum."""
    space, skipped_s = assignment.space, 0.0
    kind, layers = max(enumerate(space.folded.kinds), key=lambda each: len(each[1]))
    again = space.decision_graph.blocks.again(kind, "full")
    for at, node in enumerate(layers[0].block.nodes):
        if at not in again.operators:
            work = space.work(node, assignment.choice(node))
            skipped_s += work.forward_s + work.inner_forward_s
            skipped_s += sum(_gathering_s(assignment, node, position) for position in range(len(node.inputs)))
    return skipped_s


def copies_s(found: Searched) -> float:
    """Seconds in which FSDP2 copies gathered buffers into parameters, twice, and gradients, cast, into a buffer."""
    space = found.assignment.space
    elements = sum(leaf.results[0].numel for leaf in space.graph.leaves if leaf.op == "param")
    return float(space.cost.compute_s(0.0, (2 * 2 * HALF + HALF + FULL) * elements, "bfloat16"))


def _sending_s(assignment: Assignment, values: Iterable[Ref]) -> float:
    """Seconds to send what leaves a layer on, each rank of the tensor group a part, and to gather it there."""
    space = assignment.space
    tensor = next(axis for axis in space.mesh.axes if axis.name == "tensor")
    whole = max(local_bytes(space.graph.type_of(ref), assignment.consumer_layout(ref), space.mesh) for ref in values)
    part = whole / tensor.size
    pipeline = Axis("pipeline", space.stages, space.mesh.size)
    return space.cost.collective_s("send", pipeline, part) + space.cost.collective_s("all_gather", tensor, part)


def _gathering_s(assignment: Assignment, node: Node, position: int) -> float:
    """Seconds to bring an activation into the layout in which an operator reads it."""
    space, ref = assignment.space, node.inputs[position]
    if space.graph.by_name[ref.node].op == "param":
        return 0.0
    table, wanted = space.table(ref), assignment.choice(node).operands[position]
    return float(table.forward_s[table.index[assignment.consumer_layout(ref)], table.index[wanted]])


# ---- the table -------------------------------------------------------------------------------------------------------


def table(found: Iterable[Run]) -> list[dict[str, str]]:
    """Rows to read."""
    rows = []
    for run in found:
        is_planned = bool(run.seconds)
        shares = ", ".join(f"{use} {s / run.predicted_s:.0%}" for use, s in run.seconds.items() if s > 0)
        more = ", ".join(f"{what} {s:.2f}" for what, s in run.besides.items())
        rows.append(
            {
                "run": run.name,
                "pinned": _told(run.pin),
                "published s": f"{run.published_s:.2f}",
                "predicted s": f"{run.predicted_s:.2f}" if is_planned else run.why,
                "error": f"{run.error:+.1%}" if is_planned else "",
                "of which": shares,
                "besides s": more,
                "error with it": f"{run.error_besides:+.1%}" if run.besides else "",
                "peak GiB": f"{run.gib:.1f}" if is_planned else "",
                "published GiB": "" if run.published_gib is None else f"{run.published_gib:.1f}",
                "above the best with these pins": f"at most {run.gap:.1%}" if is_planned else "",
                "free": "; ".join(each.told(run.predicted_s) for each in run.free),
            }
        )
    return rows


def summary(found: Iterable[Run]) -> str:
    """Mean and worst absolute errors of the rows that have a plan, in words."""
    planned = [run for run in found if run.seconds]
    errors = [abs(run.error) for run in planned]
    told = [f"all rows: mean error {math.fsum(errors) / len(errors):.1%}, worst {max(errors):.1%}"]
    for which in dict.fromkeys(run.set for run in planned):
        of_set = [run for run in planned if run.set == which]
        for what, sizes in (
            ("", [abs(run.error) for run in of_set]),
            (" with what it leaves out", [abs(run.error_besides) for run in of_set if run.besides]),
        ):
            if sizes:
                told.append(f"{which}{what}: mean error {math.fsum(sizes) / len(sizes):.1%}, worst {max(sizes):.1%}")
    return "; ".join(told)


def main() -> None:
    found = runs()
    for run, row in zip(found, table(found), strict=True):
        print("  ".join(text for text in row.values() if text), f"(planned in {run.plan_s:.1f} s)")
    print(summary(found), *DIFFERS, sep="\n")


if __name__ == "__main__":
    main()
