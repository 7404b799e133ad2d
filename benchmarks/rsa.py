"""Ring self-attention on paper: the largest batch and the longest sequence beside those of tensor parallelism.

What Li et al. (2021) report of BERT base on P100s of 16 GB, planned: sequences shared by 64 GPUs in a ring, against
tensor parallelism on 12, as many as there are heads. Kernels today store no scores; where those of 2021 did, they are
added: what a rank has of one float32 for each head, query and key in each layer, twice, since a softmax keeps its
result beside them. What a sample takes is measured, too: of a rank's program of two layers, on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.driver.plan import plan_traced
from autopar.driver.trace import trace
from benchmarks.memory import observed_peak
from planner.base.errors import InfeasibleError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.search.search import search

LAYERS, HIDDEN, HEADS, VOCAB = 12, 768, 12, 30720
BATCH, LENGTH, RANKS = 64, 512, 64
MEMORY_BYTES = 16 * 2**30
CLAIMED = {"batch": 13.7, "length": 3.0}
"""How many times as large as tensor parallelism's, says the abstract."""
LIMIT_S = 30.0
PRODUCTS = ("*.qkv", "*.mix", "*.up", "*.down")
SMALL_LAYERS, SMALL_VOCAB, SMALL_BATCHES = 2, 3072, (8, 16)
PLAIN = {"pipeline": 1, "micro_batches": 1, "offload": "none", "zero": 0}
Kept = Literal["all but scores", "scores, too", "what enters layers"]
"""What of activations is kept for backward."""


class BertLayer(nn.Module):
    """Norms after sums, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mix = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x).unflatten(-1, (HEADS, 3, -1)).unbind(3))
        x = self.norm1(x + self.mix(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class BertBase(nn.Module):
    """BERT base, whose head says every token."""

    def __init__(self, length: int, layers: int = LAYERS, vocab: int = VOCAB):
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, HIDDEN), nn.Parameter(torch.empty(length, HIDDEN))
        self.layers, self.head = nn.Sequential(*(BertLayer() for _ in range(layers))), nn.Linear(HIDDEN, vocab)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.layers(self.token(ids) + self.place))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Shared:
    """How GPUs share BERT: ``step`` is what a length must be a multiple of."""

    name: str
    ranks: int
    pin: Mapping[str, Any]
    step: int


MEGATRON = {name: {"tensor": "k" if name in ("*.mix", "*.down") else "n"} for name in (*PRODUCTS, "head")}
"""What tensor parallelism shares of each product. Left to the search, memory would be saved by sharing input features
of all of them, at four times the seconds."""
SHARED = (
    Shared("tensor parallel", HEADS, {"tensor": HEADS, "sequence_parallel": False, "layers": MEGATRON}, 48),
    Shared("ring", RANKS, {"context": RANKS, "context_kind": "ring"}, RANKS),
)


@dataclass(frozen=True)
class Most:
    """The largest batch of sequences of :data:`LENGTH`, and the longest sequences in a batch of :data:`BATCH`."""

    name: str
    ranks: int
    kept: Kept
    batch: int
    length: int


def fits(shared: Shared, batch: int, length: int, kept: Kept) -> bool:
    """Whether a plan fits."""
    scores = 2 * 4 * LAYERS * batch * HEADS * length**2 // shared.ranks if kept == "scores, too" else 0
    fields = ClusterSpec.preset("dgx-v100").to_dict()
    room = MEMORY_BYTES - int(scores / (1 - fields["device"]["reserve_fraction"]))
    if room <= 0:
        return False
    fields["device"] |= {"memory_bytes": room, "kind": "NVIDIA P100 16GB"}
    fields["levels"] = [{**fields["levels"][1], "size": shared.ranks}]
    with torch.device("meta"):
        model, ids = BertBase(length), torch.zeros(batch, length, dtype=torch.long)
    recompute = "full" if kept == "what enters layers" else "none"
    graph = trace(model, (ids, ids), {}, None).graph
    pins = Pins.parse({**PLAIN, "recompute": recompute, **shared.pin})
    try:
        search(graph, ClusterSpec.from_dict(fields), pins, Training(), time_limit_s=LIMIT_S)
    except InfeasibleError:
        return False
    return True


def most(holds: Callable[[int], bool], step: int) -> int:
    """The largest multiple of a step that holds, to one part in 32, by doubling and halving."""
    low, high = 0, step
    while holds(high):
        low, high = high, 2 * high
    while high - low > max(step, low // 32):
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def found() -> list[Most]:
    """Of both, by what is kept."""
    return [
        Most(
            each.name,
            each.ranks,
            kept,
            most(lambda batch, each=each, kept=kept: fits(each, batch, LENGTH, kept), 4),  # type: ignore[misc]
            most(lambda length, each=each, kept=kept: fits(each, BATCH, length, kept), each.step),  # type: ignore[misc]
        )
        for kept in get_args(Kept)
        for each in SHARED
    ]


def ratios(of: list[Most], kept: Kept) -> dict[str, float]:
    """How many times as much the ring holds."""
    tensor, ring = (each for each in of if each.kept == kept)
    return {"batch": ring.batch / tensor.batch, "length": ring.length / tensor.length}


@dataclass(frozen=True)
class PerSample:
    """Bytes that one more sequence of :data:`LENGTH` takes on a rank at the peak, as planned and as measured."""

    name: str
    ranks: int
    predicted: float
    measured: float


def per_sample() -> list[PerSample]:
    """Of a rank's own program, run on this machine, of both."""
    rows = []
    for shared in SHARED:
        peaks = []
        for batch in SMALL_BATCHES:
            model, ids = BertBase(LENGTH, SMALL_LAYERS, SMALL_VOCAB), torch.zeros(batch, LENGTH, dtype=torch.long)
            nn.init.zeros_(model.place)
            traced = trace(model, (ids, ids), {}, None)
            pins = Pins.parse({**PLAIN, "recompute": "none", **shared.pin})
            plan = plan_traced(traced, ClusterSpec.local(shared.ranks), pins, Training())
            assert plan.assignment is not None
            peaks.append((plan.predicted.peak_bytes, observed_peak(model, traced, plan.assignment)))
        few, many = SMALL_BATCHES
        predicted, measured = ((last - first) / (many - few) for first, last in zip(*peaks, strict=True))
        rows.append(PerSample(shared.name, shared.ranks, predicted, measured))
    return rows
