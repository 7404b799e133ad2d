"""The tensor-parallel family on paper: what 1-D, 2-D, 2.5-D and 3-D plans send and take on their papers' clusters.

A transformer on the meta device is captured, and each paper's algorithm pinned; bytes are those of every collective
that the emitted program would call. Beside them stand the formulas of the papers' volumes, and the speed-ups that
abstracts state. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from autopar.driver.trace import Traced, trace
from benchmarks.planned_runs import GPT, TRAINING
from planner.analysis.prediction import predict
from planner.base.errors import InfeasibleError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.search.branch_and_bound import Searched
from planner.search.search import search

DEVICES, LAYERS, SEQUENCE, VOCAB, HALF = 64, 24, 512, 51200, 2
LIMIT_S = 60.0
MOVED = {
    "all_gather": lambda ranks: ranks - 1,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
}
"""What a rank sends, as times what it passes in, in a ring."""
WIDENING, NARROWING = ("*.qkv", "*.up"), ("*.mix", "*.down")
COLUMNS = {glob: {"column": "n"} for glob in (*WIDENING, *NARROWING)}
ASSUMED = (
    "What abstracts do not state is assumed. Shapes: GPT of 24 layers in half precision, sequences of 512, heads of "
    "64, hidden sizes and batches as in the table. Clusters: 16 nodes of four GPUs; Frontera's are Quadro RTX 5000 on "
    "PCIe 3, with 56 Gb/s a node, TACC's V100 on NVLink, with 100 Gb/s, Tesseract's A100 on NVLink, with 200 Gb/s. "
    "Nothing is recomputed, but 2-D and 2.5-D gather again for backward; memory is ample"
)


@dataclass(frozen=True)
class Scheme:
    """One algorithm of the family.

    Attributes:
        pin: the grid. ``layers`` and ``again`` make it the paper's: which factor each product shards, and that what was
            gathered is gathered again in backward.
        volume: elements that a rank sends for one layer in a step, of ``bsh`` and ``hh`` (hidden size squared).
    """

    pin: Mapping[str, Any]
    layers: Mapping[str, Mapping[str, str]]
    volume: tuple[float, float]
    again: bool = False

    def pins(self, is_free: bool) -> dict[str, Any]:
        """As the paper has it, or, where ``is_free``, as the search likes it in the same grid."""
        if is_free:
            return {**self.pin, "recompute": "none"}
        whole = {"sequence_parallel": False} if isinstance(self.pin["tensor"], int) else {}
        recompute = "resharded" if self.again else "none"
        return {**self.pin, **whole, "layers": self.layers, "recompute": recompute}


def _swapped(first: str, second: str) -> dict[str, dict[str, str]]:
    wide = {glob: {first: "n", second: "k"} for glob in WIDENING}
    return {**wide, **{glob: {first: "k", second: "n"} for glob in NARROWING}}


SCHEMES = {
    "1-D": Scheme(
        {"tensor": 64},
        {**{glob: {"tensor": "n"} for glob in WIDENING}, **{glob: {"tensor": "k"} for glob in NARROWING}},
        (8 * 63 / 64, 0.0),
    ),
    "2-D": Scheme({"tensor": [8, 8]}, COLUMNS, (3 * 7 / 64 * 7, 3 * 7 / 64 * 12), again=True),
    "2.5-D": Scheme(
        {"tensor": [4, 4], "depth": 4}, COLUMNS, (3 * 3 / 16 * 7 / 4, 3 * 3 / 16 * 12 + 2 * 3 / 4 * 12 / 16), again=True
    ),
    "3-D": Scheme({"tensor": [4, 4, 4]}, _swapped("input", "output"), (2 * 3 / 64 * 16, 2 * 3 / 64 * 12)),
}


@dataclass(frozen=True)
class Claim:
    """How much faster an abstract says that one scheme is than another; ``batch`` 0: each with its largest."""

    paper: str
    cluster: str
    faster: str
    slower: str
    claimed: float
    hidden: int
    batch: int


CLAIMS = (
    Claim("Optimus (Xu et al. 2021)", "frontera", "2-D", "1-D", 1.48, 8192, 64),
    Claim("3-D (Bian et al. 2021)", "longhorn", "3-D", "1-D", 2.32, 8192, 64),
    Claim("3-D (Bian et al. 2021)", "longhorn", "3-D", "2-D", 1.57, 8192, 64),
    Claim("Tesseract (Wang et al. 2022)", "a100", "2.5-D", "1-D", 1.38, 4096, 64),
    Claim("Tesseract (Wang et al. 2022)", "a100", "2.5-D", "2-D", 1.53, 4096, 64),
)
LARGEST = 8.0
"""How many times Megatron's largest batch Optimus' is, says its abstract."""


def cluster_of(name: str, memory: str = "1 TiB") -> ClusterSpec:
    """One of the papers' clusters; ``NAME, even links``: with links inside nodes no faster than between them."""
    name, _, even = name.partition(",")
    preset = {"frontera": "dgx-v100", "longhorn": "dgx-v100", "a100": "dgx-a100-40gb"}[name]
    fields = ClusterSpec.preset(preset, devices=DEVICES).to_dict()
    inside, node_gbits = {"frontera": ("10 GB/s", 56), "longhorn": ("75 GB/s", 100), "a100": ("230 GB/s", 200)}[name]
    node, network = fields["levels"]
    node |= {"size": 4, "bandwidth_bytes_per_s": inside}
    network |= {"size": DEVICES // 4, "bandwidth_bytes_per_s": f"{node_gbits / 8 / 4 * 0.96:.3f} GB/s"}
    if even:
        node |= {name: network[name] for name in ("bandwidth_bytes_per_s", "latency_s")}
    fields["device"]["memory_bytes"] = memory
    if name == "frontera":  # Quadro RTX 5000 datasheet (2018)
        fields["device"] |= {
            "kind": "NVIDIA Quadro RTX 5000",
            "memory_bandwidth_bytes_per_s": "448 GB/s",
            "multiprocessors": 48,
            "peak_flops_per_s": {"float64": "0.35 TFLOP/s", "float32": "11.2 TFLOP/s", "float16": "89.2 TFLOP/s"},
        }
        fields["device"].pop("cache_bandwidth_bytes_per_s", None)
    return ClusterSpec.from_dict({**fields, "name": name})


@cache
def traced(hidden: int, batch: int) -> Traced:
    """The model, captured."""
    with torch.device("meta"):
        model = GPT(hidden, LAYERS, hidden // 64, VOCAB, SEQUENCE).half()
        ids = torch.zeros(batch, SEQUENCE, dtype=torch.long)
    return trace(model, (ids, ids), {}, None)


def planned(hidden: int, batch: int, cluster: ClusterSpec, pin: Mapping[str, Any]) -> Searched:
    """The plan of one batch without pipelines or micro-batches."""
    pins = Pins.parse({"pipeline": 1, "micro_batches": 1, "offload": "none", **pin})
    return search(traced(hidden, batch).graph, cluster, pins, TRAINING, time_limit_s=LIMIT_S)


@dataclass(frozen=True)
class Step:
    """What a plan sends, takes and needs; ``split`` says what its time goes to."""

    sent_bytes: float
    step_s: float
    peak_bytes: int
    split: Mapping[str, float] = field(default_factory=dict)


def step_of(found: Searched) -> Step:
    """Read off a plan."""
    mesh = found.assignment.space.mesh
    sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
    predicted = predict(found.assignment, found.best.evaluation.time_s)
    sent = sum(count * MOVED[call.kind](sizes[call.axis]) * call.bytes_in for call, count in predicted.collectives)
    return Step(sent, predicted.step_time_s, predicted.peak_bytes, predicted.time_s)


@cache
def step(scheme: str, cluster: str, hidden: int, batch: int, is_free: bool) -> Step:
    """A scheme's step on a cluster with ample memory."""
    return step_of(planned(hidden, batch, cluster_of(cluster), SCHEMES[scheme].pins(is_free)))


@cache
def unpinned(cluster: str, hidden: int, batch: int) -> Step:
    """The step of what the search finds with nothing pinned but that there is one batch."""
    return step_of(planned(hidden, batch, cluster_of(cluster), {"recompute": "none"}))


def formula_bytes(scheme: str, hidden: int, batch: int) -> float:
    """Bytes that the layers send by the papers' formulas; embedding, head and norms are left out."""
    tokens, weights = SCHEMES[scheme].volume
    return HALF * LAYERS * (tokens * batch * SEQUENCE * hidden + weights * hidden**2)


def largest_batch(scheme: str, cluster: str, hidden: int, memory: str) -> int:
    """The largest multiple of 8 sequences that fits, each layer recomputed, by doubling and halving."""

    def fits(batch: int) -> bool:
        pin = {**SCHEMES[scheme].pins(False), "recompute": "full"}
        try:
            planned(hidden, batch, cluster_of(cluster, memory), pin)
        except InfeasibleError:
            return False
        return True

    low, high = 0, 8
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(8, low // 16):
        middle = (low + high) // 16 * 8
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Row:
    """A claim beside what is found: ratios of bytes, by formulas and by calls, and of predicted times.

    Attributes:
        even_time: where links inside nodes are as slow as those between.
        free_time: where the search decides what the grid leaves.
        unpinned_time: of the slower one's to that of what is found with nothing pinned.
    """

    claim: Claim
    formula: float
    calls: float
    time: float
    even_time: float
    free_time: float
    unpinned_time: float


def rows() -> list[Row]:
    """Every claim."""
    found = []
    for claim in CLAIMS:
        at = claim.cluster, claim.hidden, claim.batch
        fast, slow = (step(name, *at, False) for name in (claim.faster, claim.slower))
        even = [step(name, f"{claim.cluster}, even links", *at[1:], False) for name in (claim.slower, claim.faster)]
        formulas = [formula_bytes(name, claim.hidden, claim.batch) for name in (claim.slower, claim.faster)]
        found.append(
            Row(
                claim,
                formulas[0] / formulas[1],
                slow.sent_bytes / fast.sent_bytes,
                slow.step_s / fast.step_s,
                even[0].step_s / even[1].step_s,
                slow.step_s / step(claim.faster, *at, True).step_s,
                slow.step_s / unpinned(*at).step_s,
            )
        )
    return found


def table(found: list[Row]) -> list[dict[str, str]]:
    """The rows as text."""
    return [
        {
            "paper": row.claim.paper,
            "on": f"64 of {row.claim.cluster}, hidden {row.claim.hidden}, batch {row.claim.batch}",
            "compared": f"{row.claim.faster} over {row.claim.slower}",
            "claimed speed": f"{row.claim.claimed:.2f} x",
            "fewer bytes, by formulas": f"{row.formula:.2f} x",
            "by calls": f"{row.calls:.2f} x",
            "predicted speed": f"{row.time:.2f} x",
            "on even links": f"{row.even_time:.2f} x",
            "freely in this grid": f"{row.free_time:.2f} x",
            "nothing pinned": f"{row.unpinned_time:.2f} x",
        }
        for row in found
    ]


def split(found: list[Row]) -> str:
    """Where the predicted steps of the papers' algorithms go, in words."""
    shown: dict[tuple[str, str], str] = {}
    for claim in (row.claim for row in found):
        for scheme in (claim.slower, claim.faster):
            one = step(scheme, claim.cluster, claim.hidden, claim.batch, False)
            sends = one.split["communication"] + one.split["gradients"]
            shown[claim.cluster, scheme] = f"{scheme} on {claim.cluster} {one.step_s:.2f} s, {sends:.2f} of it sending"
    return "; ".join(shown.values())


def notes(found: list[Row]) -> str:
    """What the columns are, and where predictions and papers differ."""
    one, two = (largest_batch(scheme, "frontera", 8192, "16 GiB") for scheme in ("1-D", "2-D"))
    return "\n\n".join(
        [
            "1-D, 2-D, 2.5-D and 3-D tensor parallelism, each pinned as its paper has it and planned for the paper's "
            "cluster. Nothing is run. *Fewer bytes* is what a rank sends in a step, by the papers' formulas for "
            "layers, and in all calls of the plan. *On even links*: those inside nodes are as slow as those between. "
            "*Freely in this grid*: the search decides what each product shards. *Nothing pinned*: but one batch "
            "without a pipeline.",
            f"{ASSUMED}.",
            "**Agrees.** Calls send what formulas say; the rest is norms, embedding, head and loss. Optimus' speed "
            f"over 1-D. Its largest batch in 16 GiB, recomputing every layer, is {two} sequences, and that of 1-D "
            f"{one}: {two / one:.0f} x, where the paper has {LARGEST:.0f} x with buffers of its own.",
            "**Differs: 3-D.** It sends least, and is predicted to gain less time than bytes. Two of its axes have "
            "one rank in each node, so that four groups share the way out, while one ring over all 64 ranks leaves "
            "each node once, with all of its bandwidth (`planner/cost/model.py`). What the paper measured lies "
            "between this and even links. Which of the axes is inside nodes is not free: weights are cut along the "
            "last one.",
            "**Differs: Tesseract.** It measured 2-D slower than 1-D (1.53 over 1.38), which neither bytes nor links "
            "explain: prices here are of gathers, one call for each operand, and SUMMA's broadcasts and reductions "
            "wait for one another, panel after panel, which small shapes feel most. Its shapes are not known here.",
            "**What the search adds.** In 2-D it scatters the sums of a layer's last products instead of gathering "
            "what enters them. With nothing pinned it takes none of these grids: few ranks share weights inside a "
            "node, and the batch is shared between.",
            f"Predicted: {split(found)}.",
        ]
    )
