"""Whatever a description says, each format rounds it to what it can say, says that, and reads it again."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from planner.interchange.formats import FORMATS
from planner.interchange.parallelism import WORDS, Parallelism, Recomputation, resolved
from planner.solve.pipeline.schedule import VIRTUAL_STAGES

LINEAR = {"model.layers.*.self_attn.q_proj": "column", "model.layers.*.self_attn.o_proj": "row", "lm_head": "column"}


def descriptions(count: int) -> Iterator[Parallelism]:
    """Random ones, of models of 5 to 33 layers, some without a name, and of a batch that all degrees divide."""
    draw = random.Random(0)
    while count:
        layers, is_named = draw.choice((5, 16, 24, 33)), draw.random() < 0.8
        degrees = {name: draw.choice((1, 1, 2, 4)) for name in ("replicate", "data", "tensor", "context", "pipeline")}
        schedule, virtual = "1f1b", 1
        if degrees["pipeline"] > 1:
            schedule = draw.choice([*VIRTUAL_STAGES])
            least, most = VIRTUAL_STAGES[schedule]
            virtual = draw.choice((least, most or 2 * least))
        stages = degrees["pipeline"] * virtual
        if layers < stages:
            continue
        cut = [*[layers // stages] * (stages - 1), layers - layers // stages * (stages - 1)]
        draw.shuffle(cut)
        zero = draw.choice((0, 1, 2, 3)) if degrees["data"] * degrees["context"] > 1 else 0
        if not zero:
            degrees["data"], degrees["replicate"] = degrees["data"] * degrees["replicate"], 1
        inner = degrees["data"] * degrees["context"] * degrees["tensor"]
        expert, kinds = draw.choice([1, 1, 1, inner]), ("gather", "zigzag", "ring", "ulysses", "hybrid")
        recompute: Recomputation = draw.choice(("none", "resharded", "selective", "full"))
        yield Parallelism(
            **degrees,
            zero=zero,
            sequence_parallel=degrees["tensor"] > 1 and draw.random() < 0.5,
            context_kind=draw.choice(kinds) if degrees["context"] > 1 else "",
            expert=expert,
            expert_tensor=1 if expert > 1 and degrees["tensor"] > 1 else 0,
            schedule=schedule,
            virtual_stages=virtual,
            stage_layers=tuple(cut) if len({*cut}) > 1 else (),
            micro_batches=draw.choice((1, 4, 8)),
            recompute=recompute,
            recompute_layers=draw.choice((None, draw.randrange(1, layers)))
            if recompute in ("selective", "full")
            else None,
            dtype=draw.choice(("float64", "float32", "bfloat16", "float16")),
            stored=draw.choice(("float64", "float32", "bfloat16", "float16")),
            offload=draw.choice(("none", "none", "host", "disk")),
            products=LINEAR if degrees["tensor"] > 1 else {},
            along_sequence={"model.layers.*.norm": "gathered along 1"} if draw.random() < 0.5 else {},
            batch=1024,
            sequence=2048,
            layers=layers,
            layer_path="model.layers.*" if is_named else "",
        )
        count -= 1


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_rounded_is_written_and_read_again(name: str) -> None:
    form = FORMATS[name]
    for d in descriptions(300):
        rounded, lost = form.round(d)
        assert rounded.size == d.size, "ranks of what cannot be said do something else"
        assert form.round(rounded)[0] == rounded, "once rounded, nothing is left to round"
        assert bool(lost) >= (rounded != d), "what is rounded is said"
        found = resolved(form.read(form.write(rounded)), d.size, d.batch)
        differ = {each for each in WORDS if getattr(found, each) != getattr(rounded, each)}
        assert differ <= form.elsewhere, (d, [(each, getattr(rounded, each), getattr(found, each)) for each in differ])
