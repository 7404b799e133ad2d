"""Published runs: step times of real clusters beside those that the cost model and textbook formulas give.

An analytic estimate, without capture or search, to see whether the physical constants are right. Everything that a
formula needs and a source does not say stands in :data:`ASSUMED`, and is printed with the table.

*Megatron* (Narayanan et al. 2021, sections 2 to 5): every layer is computed forward, once more for backward, and
backward; two all-reduces over the tensor group in each of the three; a pipeline of p stages in v pieces idles for
(p - 1) / v micro-batches; gradients are reduced at the end, and nothing overlaps. Scores are stored, as before flash
attention.

*Llama 3 8B under FSDP2*: gathers and reductions run beside compute; what is longer than the compute it hides
behind counts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.cost.cluster import ClusterSpec
from planner.cost.kernels import Attention, Kernel, Product
from planner.cost.model import CostModel
from planner.ir.layout import Axis

ROWS = Path(__file__).parents[2] / "shared" / "validation" / "published_runs.json"
ASSUMED = (
    "Megatron: half precision gradients, accumulated and reduced as such; fused softmax, GELU and dropout-add kernels, "
    "as in its 2021 sources; embeddings and the loss on the first and last stage; point-to-point transfers exposed, "
    "cut over the tensor group; micro-batch and pieces per stage from the authors' scripts",
    "Llama: parameters gathered in bfloat16, gradients reduced in float32, recomputation by operator as its "
    "configuration has it (all but attention and every other product); torch's FlashAttention-2; eager kernels one by "
    "one, of compiled layers fused into one pass per group; an H100 of 500 W runs at "
    "the clock that a 700 W one has times ((500 - 200) / (700 - 200)) ** 0.4: 200 W for memory, links and leakage, "
    "the rest growing as the 2.5th power of the clock",
)
MEGATRON_CHOICES = {
    "1.7B": (16, 1), "3.6B": (16, 1), "7.5B": (16, 1), "18B": (8, 1), "39B": (4, 1), "76B": (2, 3), "145B": (2, 2),
    "310B": (1, 2), "530B": (1, 3), "1T": (1, 1),
}  # fmt: skip
"""Micro-batch and pieces per stage, from the authors' own ``examples/sc21/run_table_1.sh`` in NVIDIA/Megatron-LM."""
HALF, FULL, MASK = 2, 4, 1
"""Bytes of an element: half precision, float32, a dropout mask."""


@dataclass(frozen=True)
class Pass:
    """One operator: a kernel whose shape decides, or none, and the bytes that it moves."""

    bytes_moved: float
    kernel: Kernel | None = None


class Compared:
    """A run's step: ``seconds`` predicted by use, and the published ones."""

    seconds: Mapping[str, float]
    published_s: float

    @property
    def predicted_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def error(self) -> float:
        """Relative, positive where the prediction is too long."""
        return self.predicted_s / self.published_s - 1


@dataclass(frozen=True)
class Estimate(Compared):
    """A run's step by formulas, and what was chosen where a source is silent."""

    name: str
    seconds: Mapping[str, float]
    published_s: float
    chosen: str = ""


def product(m: int, n: int, k: int, batch: int = 1) -> Pass:
    """A matrix product in half precision, bias and all."""
    return Pass(HALF * batch * (m * k + k * n + m * n), Product(m, n, k, batch))


def forward_s(cost: CostModel, passes: Iterable[Pass]) -> float:
    return sum(_pass_s(cost, p.bytes_moved, p.kernel) for p in passes)


def backward_s(cost: CostModel, passes: Iterable[Pass]) -> float:
    """Twice the bytes; each kernel's own backward."""
    return sum(_pass_s(cost, 2 * p.bytes_moved, None if p.kernel is None else p.kernel.backward) for p in passes)


def _pass_s(cost: CostModel, bytes_moved: float, kernel: Kernel | None) -> float:
    launches = len(kernel.parts) if isinstance(kernel, Product) else 1
    return cost.compute_s(0.0, bytes_moved, "bfloat16", launches, kernel)


# ---- Megatron --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Megatron:
    """One row of the table, with a choice of micro-batch (sequences) and pieces per stage."""

    row: Mapping[str, Any]
    sequence: int
    vocab: int
    micro: int
    pieces: int

    def __getattr__(self, name: str) -> int:
        return int(self.row[name])

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro * self.sequence

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.data * self.micro)

    @property
    def parameters(self) -> float:
        """Of the fullest device."""
        layer = 12 * self.hidden**2 / self.tensor
        return self.layers / self.pipeline * layer + self.vocab * self.hidden / self.tensor

    def layer(self) -> list[Pass]:
        """One transformer layer, forward, on one device of the tensor group."""
        rows, h, t, s = self.tokens, self.hidden, self.tensor, self.sequence
        heads, depth = self.micro * self.heads // t, self.hidden // self.heads
        scores = heads * s * s
        norm = Pass(2 * HALF * rows * h)
        add = Pass((3 * HALF + MASK) * rows * h)  # bias, dropout, residual
        return [
            norm, product(rows, 3 * h // t, h),
            product(s, s, depth, heads), Pass(2 * HALF * scores), Pass((2 * HALF + MASK) * scores),
            product(s, depth, s, heads), Pass(2 * HALF * rows * h / t), product(rows, h, h // t), add,
            norm, product(rows, 4 * h // t, h), Pass(2 * HALF * rows * 4 * h / t), product(rows, h, 4 * h // t), add,
        ]  # fmt: skip

    def bias_sums(self) -> Pass:
        """Gradients of the four biases: each reads the gradient of its sum once more."""
        return Pass(HALF * self.tokens * self.hidden * (2 + 7 / self.tensor))

    def loss(self) -> list[Pass]:
        """Final norm, logits, and a cross-entropy in float32: cast, maximum, difference, exponential, sum, quotient."""
        rows, logits = self.tokens, self.tokens * self.vocab / self.tensor
        norm = Pass(2 * HALF * rows * self.hidden)
        return [norm, product(rows, self.vocab // self.tensor, self.hidden), Pass(38 * logits)]

    def estimate(self, cost: CostModel) -> Estimate:
        t, p, d = self.tensor, self.pipeline, self.data
        tensor, data, stages = Axis("tensor", t, 1), Axis("data", d, t), Axis("pipeline", p, t * d)
        activation = self.tokens * self.hidden * HALF
        layers = self.layers / p
        forward, backward = forward_s(cost, self.layer()), backward_s(cost, self.layer())
        compute_s = layers * (2 * forward + backward + forward_s(cost, [self.bias_sums()]))
        reduce_s = cost.collective_s("all_reduce", tensor, activation)
        tensor_s = layers * 6 * reduce_s
        send_s = 0.0
        if p > 1:
            part = activation / t
            transfer_s = cost.collective_s("send", stages, part) + cost.collective_s("all_gather", tensor, part)
            send_s = 2 * self.pieces * transfer_s
        accumulate_s = cost.compute_s(0.0, 3 * HALF * self.parameters, "bfloat16")
        micro_s = compute_s + tensor_s + send_s + accumulate_s
        # The last stage also computes the loss, and the first sums up embeddings: each micro-batch waits for it.
        loss_s = forward_s(cost, self.loss()) + backward_s(cost, self.loss()) + reduce_s
        m = self.micro_batches
        return Estimate(
            self.row["name"],
            {
                "compute": m * (compute_s + accumulate_s),
                "loss": m * loss_s,
                "tensor": m * tensor_s,
                "send": m * send_s,
                "bubble": (p - 1) / self.pieces * micro_s,
                "data": cost.collective_s("all_reduce", data, self.parameters * HALF),
                # Unscale, norm, Adam on float32 copies, cast: reads and writes per parameter.
                "optimizer": cost.compute_s(0.0, 40 * self.parameters, "bfloat16"),
            },
            published_s=0.0,
            chosen=f"micro-batch {self.micro}, pieces {self.pieces}",
        )


def megatron(data: Mapping[str, Any]) -> list[Estimate]:
    """Every row, at the best micro-batch and pieces that fit and divide."""
    found = []
    s, vocab = data["model"]["sequence"], data["model"]["vocab"]
    for row in data["rows"]:
        cost = CostModel(ClusterSpec.preset("dgx-a100", devices=row["gpus"]))
        b, h, depth = row["global_batch"], row["hidden"], row["layers"]
        flops = 96 * b * s * depth * h**2 * (1 + s / (6 * h) + vocab / (16 * depth * h))
        published_s = flops / (row["gpus"] * row["achieved_tflops_per_gpu"] * 1e12)
        best = Megatron(row, s, vocab, *MEGATRON_CHOICES[row["name"]]).estimate(cost)
        found.append(Estimate(best.name, best.seconds, published_s, best.chosen))
    return found


# ---- Llama -----------------------------------------------------------------------------------------------------------


def llama_cluster(gpus: int) -> ClusterSpec:
    """The source's H100: 96 GB of HBM2e at 2.4 TB/s, 500 W."""
    spec = ClusterSpec.preset("dgx-h100", devices=gpus)
    device = spec.device.at_clock(((500 - 200) / (700 - 200)) ** 0.4)
    return spec.model_copy(update={"device": device.model_copy(update={"memory_bandwidth_bytes_per_s": 2.4e12})})


def llama_layer(model: Mapping[str, int], sequences: int, compiled: bool) -> list[Pass]:
    """One layer forward: rotary embedding and norms in float32, grouped queries repeated, gated unit."""
    s, h, ffn, heads = model["sequence"], model["hidden"], model["ffn_hidden"], model["heads"]
    rows, depth = sequences * s, h // heads
    kv = model["kv_heads"] * depth
    # Bytes per element: cast, square, mean, scale, cast, weight one by one, or one read and one write.
    norm = Pass((2 * HALF if compiled else 36) * rows * h)
    rotate = Pass((2 * HALF if compiled else 28) * rows * (h + kv))
    repeat = Pass(2 * HALF * rows * h)
    gate = Pass((3 * HALF if compiled else 5 * HALF) * rows * ffn)
    add = Pass(3 * HALF * rows * h)
    flash = Pass(4 * HALF * rows * h, Attention(sequences * heads, s, s, depth, causal=True))
    return [
        norm, product(rows, h, h), product(rows, kv, h), product(rows, kv, h), rotate, repeat, repeat, flash,
        product(rows, h, h), add, norm, product(rows, ffn, h), product(rows, ffn, h), gate, product(rows, h, ffn), add,
    ]  # fmt: skip


def made_again_s(cost: CostModel, layer: Iterable[Pass]) -> float:
    """Recomputation by operator: all but attention and every other product."""
    streams = [each for each in layer if each.kernel is None]
    products = [each for each in layer if isinstance(each.kernel, Product)]
    return forward_s(cost, streams) + forward_s(cost, products) / 2


def llama(data: Mapping[str, Any]) -> list[Estimate]:
    """Every row."""
    model, found = data["model"], []
    h, depth = model["hidden"], model["layers"]
    kv = model["kv_heads"] * h // model["heads"]
    layer_parameters = 2 * h * h + 2 * h * kv + 3 * h * model["ffn_hidden"] + 2 * h
    ends = model["vocab"] * h
    for row in data["rows"]:
        cost = CostModel(llama_cluster(row["gpus"]))
        shard = Axis("shard", row["data_shard"], 1)
        rows = row["local_batch"] * model["sequence"]
        layer = llama_layer(model, row["local_batch"], row["compiled"])
        logits = rows * model["vocab"]
        loss = [Pass(2 * HALF * rows * h), product(rows, model["vocab"], h)]
        # Cast to float32, log-softmax, pick; backward reads the softmax and writes gradients twice. It is not compiled.
        loss += [Pass(14 * logits)]
        forward, backward = forward_s(cost, layer), backward_s(cost, layer)
        compute_s = depth * (forward + made_again_s(cost, layer) + backward)
        gather_s = cost.collective_s("all_gather", shard, layer_parameters * HALF / row["gpus"])
        scatter_s = cost.collective_s("reduce_scatter", shard, layer_parameters * FULL)
        ends_s = cost.collective_s("all_gather", shard, ends * HALF / row["gpus"])
        exposed = depth * (max(0.0, gather_s - forward) + max(0.0, gather_s + scatter_s - backward))
        exposed += 2 * ends_s + cost.collective_s("reduce_scatter", shard, ends * FULL)
        # Gathered buffers are copied out into parameters, twice; gradients are cast and copied in for reduction.
        copies_s = cost.compute_s(0.0, (2 * 2 * HALF + HALF + FULL) * (depth * layer_parameters + 2 * ends), "bfloat16")
        own = (depth * layer_parameters + 2 * ends) / row["gpus"]
        found.append(
            Estimate(
                f"{row['gpus']} GPUs{', compiled' if row['compiled'] else ''}",
                {
                    "compute": compute_s,
                    "loss": forward_s(cost, loss) + backward_s(cost, loss),
                    "shard": exposed,
                    "copies": copies_s,
                    # Passes over tensors in float32: 20 of AdamW's foreach kernels, 3 of the norm and what it clips.
                    "optimizer": cost.compute_s(0.0, 23 * FULL * own, "bfloat16"),
                },
                published_s=rows / row["tokens_per_s_per_gpu"],
            )
        )
    return found


def estimates() -> dict[str, list[Estimate]]:
    """Every row of every published set that there is an estimate for, by set."""
    known = {"megatron-a100-2021": megatron, "torchtitan-llama3-8b-h100-2024": llama}
    sets = json.loads(ROWS.read_text(encoding="utf-8"))["sets"]
    return {each["id"]: known[each["id"]](each) for each in sets if each["id"] in known}


def table(found: Iterable[Estimate]) -> list[dict[str, str]]:
    """Rows for people."""
    return [
        {
            "run": e.name,
            "published s": f"{e.published_s:.2f}",
            "predicted s": f"{e.predicted_s:.2f}",
            "error": f"{100 * e.error:+.1f} %",
            "of which": ", ".join(f"{use} {s / e.predicted_s:.0%}" for use, s in e.seconds.items() if s > 0),
            "chosen": e.chosen,
        }
        for e in found
    ]


def errors(found: Iterable[Estimate]) -> tuple[float, float]:
    """Mean and largest absolute error."""
    sizes = [abs(e.error) for e in found]
    return math.fsum(sizes) / len(sizes), max(sizes)


def main() -> None:
    for name, found in estimates().items():
        mean, worst = errors(found)
        print(f"\n{name}: mean error {mean:.1%}, worst {worst:.1%}")
        for row in table(found):
            print("  " + "  ".join(row.values()))
    print("\nAssumed:", *ASSUMED, sep="\n  ")


if __name__ == "__main__":
    main()
