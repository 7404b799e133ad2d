"""Limits that several formats have: what they cannot say, and what comes nearest."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from planner.interchange.format import Limit
from planner.interchange.parallelism import Parallelism, is_along, standard

DENSE = "their ranks share the batch and parameters instead"


def into_data(d: Parallelism, **changes: object) -> Parallelism:
    """A description in which the ranks of what is given up share batch and parameters, in fewer micro-batches if the
    batch has no more samples.
    """
    left = replace(d, **changes)  # type: ignore[arg-type]
    data = d.data * d.size // left.size
    micro_batches = d.micro_batches
    while d.batch is not None and micro_batches > 1 and d.batch % (d.replicate * data * micro_batches):
        micro_batches -= 1
    return replace(left, data=data, zero=d.zero or 2, micro_batches=micro_batches)


def no_pipeline(tool: str) -> Limit:
    """No stages at all."""
    return Limit(
        f"{tool} has no stages in its configuration: {DENSE}",
        lambda d: d.pipeline > 1,
        lambda d: into_data(d, pipeline=1, schedule="1f1b", virtual_stages=1, stage_layers=()),
    )


def no_experts(tool: str) -> Limit:
    """Experts are parameters like others."""
    return Limit(
        f"{tool} has no expert parallelism: experts are stored in shards, and gathered",
        lambda d: d.expert > 1,
        lambda d: replace(d, expert=1, expert_tensor=0, zero=d.zero or 2 * (d.data * d.context > 1)),
    )


def no_context(tool: str) -> Limit:
    """Sequences stay whole."""
    return Limit(
        f"{tool} does not cut sequences: {DENSE}",
        lambda d: d.context > 1,
        lambda d: into_data(d, context=1, context_kind=""),
    )


def own_products(tool: str) -> Limit:
    """Which layers are sharded, and how, is the tool's."""
    return Limit(
        f"{tool} decides by itself how layers are sharded",
        lambda d: d.tensor > 1 and bool(d.deviating),
        lambda d: replace(d, products={path: kind for path, kind in d.products.items() if path not in d.deviating}),
        about="products",
    )


def whole_layers(tool: str) -> Limit:
    """A layer recomputes all of it, and so does every other."""
    return Limit(
        f"with {tool} all layers recompute, each as a whole",
        lambda d: d.recompute == "selective" or (d.recompute == "full" and d.recompute_layers is not None),
        lambda d: replace(d, recompute="full", recompute_layers=None),
    )


def nothing_gathered_again(tool: str) -> Limit:
    """What tensor parallelism gathers of activations is saved so."""
    return Limit(
        f"with {tool} what was gathered of activations is saved, not gathered again",
        lambda d: d.recompute == "resharded",
        lambda d: replace(d, recompute="none", recompute_layers=None),
    )


def recompute_elsewhere(why: str) -> Limit:
    """Recomputation is said in code."""
    return Limit(why, lambda d: d.recompute in ("selective", "full"), about="recompute")


def together(tool: str) -> Limit:
    """Parameters are sharded wherever optimizer state is."""
    return Limit(
        f"{tool} shards parameters wherever it shards optimizer state",
        lambda d: d.zero == 1,
        lambda d: replace(d, zero=2),
    )


def no_disk(tool: str) -> Limit:
    """The host is the furthest home of model data."""
    return Limit(f"{tool} has no offload to disk", lambda d: d.offload == "disk", lambda d: replace(d, offload="host"))


def micro_batches_elsewhere(where: str) -> Limit:
    """Micro-batches are said in code."""
    return Limit(
        f"said in code: {where}",
        lambda d: d.micro_batches > 1 and d.pipeline == 1,
        about="micro_batches",
    )


def model_dtype() -> Limit:
    """What is no mixed precision is the dtype of the model."""
    return Limit(
        "products are in the model's own dtype, unless in half precision",
        lambda d: d.dtype not in ("float32", "bfloat16", "float16"),
        lambda d: replace(d, dtype="float32"),
    )


def stored_in_float32(tool: str) -> Limit:
    """Of parameters in half precision the optimizer steps copies."""
    return Limit(
        f"the optimizer of {tool} steps parameters in float32",
        lambda d: d.stored not in ("", "float32"),
        lambda d: replace(d, stored="float32"),
    )


def equal_labels(way: str) -> Limit:
    """Parts of the batch count alike, however many labels they have; a plan's loss is the mean of the whole batch."""
    return Limit(
        "micro-batches, and data-parallel ranks, have the same weight, which makes the mean over all labels where each "
        f"has as many: else {way}",
        lambda d: d.batch_ranks * d.micro_batches > 1,
        about="the loss of a batch",
    )


def dtypes_elsewhere(way: str) -> tuple[Limit, Limit]:
    """Parameters and products are in the dtype that the model has."""
    return (
        Limit(f"said in code: {way}", lambda d: d.stored not in ("", "float32"), about="stored"),
        Limit("said in code: torch.autocast", lambda d: d.dtype != (d.stored or "float32"), about="dtype"),
    )


def offload_to_host(tool: str) -> Limit:
    """Model data is on the host if it is sharded, and not on disk."""

    def nearest(d: Parallelism) -> Parallelism:
        is_shared = d.data * d.context > 1
        return replace(d, offload="host", zero=d.zero or 2) if is_shared else replace(d, offload="none")

    return Limit(
        f"offload is that of {tool}, of what is sharded, and to the host",
        lambda d: d.offload == "disk" or (d.offload != "none" and d.zero == 0),
        nearest,
    )


def layers_alone(tool: str, kinds: Collection[str]) -> Limit:
    """Layers are shared in few ways; one that is not makes those around it meet what they do not expect."""

    def unsaid(d: Parallelism) -> dict[str, str]:
        return {path: kind for path, kind in d.products.items() if kind not in kinds and not is_along(kind)}

    def rest(d: Parallelism) -> dict[str, str]:
        left_out = unsaid(d)
        if not any("*" in path for path in left_out):
            return {path: kind for path, kind in d.products.items() if path not in left_out}
        usual = {path: standard(path) for path in d.products}
        return usual if all(kind in kinds for kind in usual.values()) else {}

    return Limit(
        f"{tool} shares whole linear layers and look-ups, and the layers of a model only together",
        lambda d: d.tensor > 1 and bool(unsaid(d)),
        lambda d: replace(d, products=rest(d)),
    )


def heads_from_shapes(way: str) -> Limit:
    """Modules compute with parts without being asked."""
    return Limit(
        f"modules must take the number of their heads from shapes, as Llama's do, which nobody checks: {way}",
        lambda d: d.tensor > 1,
        about="tensor",
    )
