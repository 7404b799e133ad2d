"""Real processes: the parallel module on gloo against the original model in one process, in float64.

What the processes do is in ``workers.py``. A case is a model, pins, and a number of ranks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import autopar
from autopar.measure.local_processes import LocalProcesses, RankError
from autopar.verification.float64 import exact
from planner.plan.moving.bill import moving_bill
from planner.plan.plan import Plan
from tests.autopar import by_hand, checkpoints, compiled, elastic, faces, stacked, whole_parameters, workers

pytestmark = pytest.mark.processes

BY_MODULE = {"transformer.wte": 0, "transformer.wpe": 2, "*.ln_?": 0, "transformer.h.*": 3, "*": 0}
"""How GPT-2's parameters are stored on the axis of the data, and gathered."""
STREAMED = {"*.up_proj": {"tensor": "n.ring"}, "*.down_proj": {"tensor": "k.ring"}}
CASES: list[tuple[str, dict[str, Any] | None, int]] = [
    ("mlp", {"data": 4, "zero": 3}, 4),
    ("gpt2", None, 4),
    ("gpt2", {"data": 2, "zero": BY_MODULE}, 2),
    ("gpt2", {"zero": {"transformer.h.0.*": 0, "transformer.h.1.*": 3}, "recompute": "none", "pipeline": 1}, 2),
    ("gpt2", {"data": 2, "zero": BY_MODULE, "offload": "host"}, 2),
    ("gpt2", {"tensor": 2, "sequence_parallel": True}, 2),
    ("gpt2", {"context": 4, "context_kind": "gather", "recompute": "resharded"}, 4),
    ("gpt2", {"tensor": [2, 2]}, 4),
    ("gpt2", {"tensor": [1, 2]}, 2),
    ("llama", {"data": 2, "context": 2, "context_kind": "ring"}, 4),
    ("llama", {"data": 2, "tensor": 2, "sequence_parallel": True, "zero": 3, "layers": STREAMED}, 4),
    ("llama", {"replicate": 2, "data": 2, "zero": 3}, 4),
    ("spectral", {"data": 2, "zero": 3}, 2),
    ("crowded", {"expert": 4}, 4),
    ("mixtral", {"expert": 2, "offload": "host", "recompute": "full"}, 2),
    ("llama", {"data": 2, "zero": 3, "offload": "host"}, 2),
    ("gpt2", {"replicate": 2, "data": 2, "zero": 2, "recompute": "full", "offload": "host"}, 4),
]


MICRO_BATCHED_PLANS: list[tuple[str, dict[str, Any], int]] = [
    ("gpt2", {"micro_batches": 4, "pipeline": 2, "tensor": 2, "schedule": "1f1b"}, 4),
    ("llama", {"micro_batches": 2, "data": 2, "tensor": 2, "zero": 3, "recompute": "full"}, 4),
    ("gpt2", {"micro_batches": 2, "replicate": 2, "data": 2, "zero": 3}, 4),
    ("gpt2", {"micro_batches": 2, "pipeline": 2, "data": 2, "zero": 3, "schedule": "gpipe"}, 4),
    ("gpt2", {"micro_batches": 2, "data": 2, "zero": {**BY_MODULE, "transformer.wpe": 0}}, 2),
    ("gpt2", {"micro_batches": 2, "pipeline": 2, "data": 2, "zero": {"*.mlp.*": 1, "transformer.wte": 0}}, 4),
    ("llama", {"micro_batches": 8, "pipeline": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}, 2),
    ("gpt2", {"micro_batches": 2, "pipeline": 2, "context": 2, "context_kind": "ring", "recompute": "full"}, 4),
    ("llama", {"micro_batches": 8, "pipeline": 4, "schedule": "zero_bubble"}, 4),
    ("gpt2", {"micro_batches": 4, "pipeline": 2, "schedule": "zbv"}, 2),
    ("mixtral", {"micro_batches": 4, "pipeline": 2, "expert": 2, "recompute": "full"}, 4),
]


COMPILED: list[tuple[str, dict[str, Any], float]] = [
    ("gpt2", {"data": 2, "zero": 3, "recompute": "full"}, 0.1),
    ("llama", {"micro_batches": 4, "pipeline": 2, "schedule": "zero_bubble", "recompute": "full"}, 0.0),
]


def name_of(value: object) -> str:
    if isinstance(value, dict):
        return "+".join(f"{k}{v}" for k, v in value.items())
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("model, pin, ranks", CASES, ids=name_of)
def test_trains_as_the_original(pool: LocalProcesses, model: str, pin: dict[str, Any] | None, ranks: int) -> None:
    document = workers.plan_exactly(model, pin, ranks)
    losses = pool.run(workers.trains_alike, model, document, ranks=ranks)
    assert len(set(losses)) == 1


@pytest.mark.parametrize("model, pin, dropout", COMPILED, ids=name_of)
def test_trains_compiled(pool: LocalProcesses, model: str, pin: dict[str, Any], dropout: float) -> None:
    """However deep a model is: of two blocks alike each has the segments of one."""
    with exact():
        document = workers.plan_of(model, pin, 2, dropout)
    found = pool.run(compiled.trains_compiled, model, document, dropout, ranks=2)
    assert all(0 < each.segments <= each.graphs for each in found)


def test_deep_models_compile_as_often_as_shallow_ones_and_find_their_code_on_disk(pool: LocalProcesses) -> None:
    segments, graphs, _ = pool.run(compiled.compiles_once, 4, torch.float64, ranks=1)[0]
    assert pool.run(compiled.compiles_once, 8, torch.float64, ranks=1)[0] == (segments, graphs, 0)


def test_trains_with_rows_in_flight(pool: LocalProcesses) -> None:
    pin = {"data": 2, "expert": 2, "zero": 3, "recompute": "full", "layers": {"*experts": {"expert": "t.dispatch"}}}
    found = pool.run(workers.trains_alike_in_flight, "qwen2-moe", workers.plan_exactly("qwen2-moe", pin, 4), ranks=4)
    assert found == [2 * 3 * 4] * 4, "of two layers forward, again and backward, in four steps"


@pytest.mark.parametrize("model, pin, ranks", MICRO_BATCHED_PLANS, ids=name_of)
def test_trains_micro_batched(pool: LocalProcesses, model: str, pin: dict[str, Any], ranks: int) -> None:
    document = workers.plan_exactly(model, pin, ranks)
    losses = pool.run(workers.trains_micro_batched, model, document, ranks=ranks)
    assert len(set(losses)) == 1


@pytest.mark.parametrize("name, pin, ranks, recompute", [
    ("crowded", {"expert": 2}, 2, "none"),
    ("crowded", {"data": 2, "tensor": 2, "layers": {"*.experts": {"tensor": "e"}}}, 4, "full"),
    ("mixtral", {"data": 2, "tensor": 2, "zero": 3, "layers": {"*.experts": {"tensor": "f"}}}, 4, "none"),
], ids=name_of)  # fmt: skip
def test_a_prediction_is_right_once_the_load_of_experts_is_known(
    pool: LocalProcesses, name: str, pin: dict[str, Any], ranks: int, recompute: str
) -> None:
    """Seen however experts run, on any number of ranks, it says what the busiest of four is going to hold. Of the
    crowded ones two of four experts have all tokens. What a block recomputes is not counted again.
    """
    others = {"pipeline": 1, "micro_batches": 1, "recompute": recompute}
    before = workers.plan_of(name, {**pin, **others}, ranks, dtype=torch.float32)
    load = pool.run(workers.peak_of_a_step, name, before, ranks=ranks)[0][1]
    if name == "crowded":
        assert load.imbalances == (2, 2) and [sorted(call) for call in load.tokens] == [[0, 0, 128, 128]] * 4
    assert {sum(call) for call in load.tokens} == {256}, "each token is counted once for each of its experts"
    cluster = workers.cluster_of(4).model_copy(update={"expert_imbalance": load.imbalances})
    document = workers.plan_of(name, {"expert": 4, **others}, 4, dtype=torch.float32, cluster=cluster)
    found = pool.run(workers.peak_of_a_step, name, document, ranks=4)
    assert {seen.tokens[:2] for _, seen in found} == {load.tokens[:2]}
    assert Plan.from_dict(document).predicted.peak_bytes == pytest.approx(max(peak for peak, _ in found), rel=0.05)


WHOLE_PARAMETERS: list[tuple[str, dict[str, Any], int, list[str]]] = [
    ("gpt2", {"data": 2, "tensor": 2, "zero": 3}, 4, ["Lamb", "Adafactor"]),
    ("gpt2", {"pipeline": 2, "data": 2, "zero": 3, "micro_batches": 2}, 4, ["Lars", "Adafactor"]),
    ("gpt2", {"tensor": [1, 2]}, 2, ["Lars", "Muon"]),
    ("mixtral", {"expert": 2}, 2, ["Lamb", "Adafactor"]),
    ("llama", {"context": 2, "zero": 3, "context_kind": "gather"}, 2, ["Lamb"]),
]


@pytest.mark.parametrize("model, pin, ranks, optimizers", WHOLE_PARAMETERS, ids=name_of)
def test_optimizers_go_by_whole_parameters(
    pool: LocalProcesses, model: str, pin: dict[str, Any], ranks: int, optimizers: list[str]
) -> None:
    """Strips over one axis of two, owners in both stages, a grid, experts, and ranks of a sequence."""
    document = workers.plan_exactly(model, pin, ranks)
    pool.run(whole_parameters.steps_alike, model, document, optimizers, ranks=ranks)


def test_what_owners_keep_goes_on_under_any_plan(pool: LocalProcesses, tmp_path: Path) -> None:
    """Matrices, vectors of rows and columns, a second optimizer for what is no matrix; and in one process."""
    labels, path = ["Muon", "Adafactor"], str(tmp_path)
    plans = [workers.plan_exactly("mlp", pin, 2) for pin in ({"tensor": 2}, {"data": 2, "zero": 3})]
    begun = pool.run(whole_parameters.begins, "mlp", plans[0], path, labels, ranks=2)[0]
    others = pool.run(whole_parameters.goes_on, "mlp", plans[1], path, labels, ranks=2)
    for found in (*others, whole_parameters.goes_on("mlp", None, path, labels)):
        for mine, theirs in zip(found, begun, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-10)
    low = workers.plan_of("mlp", {"data": 2, "zero": 3}, 2, dtype=torch.bfloat16)
    pool.run(whole_parameters.masters_step_whole, "mlp", low, ranks=2)


def test_each_rank_stores_what_is_pinned(pool: LocalProcesses) -> None:
    document = workers.plan_of("gpt2", {"data": 2, "zero": BY_MODULE}, 2)
    for stored in pool.run(workers.parts_stored, "gpt2", document, ranks=2):
        sharded = {name for name, part in stored.items() if part == 0.5}
        assert {*stored.values()} == {0.5, 1.0}
        blocks = {name for name in stored if name.startswith("transformer.h.") and ".ln_" not in name}
        assert sharded == blocks | {"transformer.wpe.weight"} and len(blocks) == 16


def test_an_observed_step_is_written_as_a_predicted_one(pool: LocalProcesses, tmp_path: Path) -> None:
    pin = {"micro_batches": 4, "pipeline": 2, "data": 2, "schedule": "zero_bubble", "virtual_stages": 1}
    document = workers.plan_of("gpt2", pin, 4)
    said = pool.run(workers.saves_traces, document, str(tmp_path))
    for early, unwritable in said:
        assert "no step was seen yet" in early
        assert "cannot write the trace" in unwritable and "nowhere/observed.json" in unwritable
    assert [path.name for path in tmp_path.iterdir()] == ["observed.json"]
    traces = [Plan.from_dict(document).timeline().trace(), json.loads((tmp_path / "observed.json").read_text())]
    named, done = ([[e for e in trace["traceEvents"] if e["ph"] == phase] for trace in traces] for phase in "MX")
    assert named[0] == named[1]
    forms = [{(e["pid"], e["tid"], e["name"], e["cat"]) for e in events if e["cat"] != "update"} for events in done]
    once = [{form for form in each if form[3] not in ("wait", "gather", "reduce")} for each in forms]
    assert once[0] == once[1] and len(once[0]) == 2 * 3 * 4
    assert {e["name"] for e in done[0]} - {e["name"] for e in done[1]} <= {"update"}
    assert all(e["ts"] >= 0 and e["dur"] >= 0 and e["args"]["kind"] for e in done[1])


@pytest.mark.parametrize(
    "pin", [{"pipeline": 4}, {"pipeline": 2, "data": 2, "zero": 3, "recompute": "full"}], ids=name_of
)
def test_trains_one_update_late(pool: LocalProcesses, pin: dict[str, Any]) -> None:
    document = workers.plan_exactly("gpt2", {"schedule": "2bw", "micro_batches": 4, **pin}, 4)
    assert len(set(pool.run(workers.trains_one_update_late, "gpt2", document))) == 1


def test_stages_draw_as_one_does(pool: LocalProcesses) -> None:
    pins: list[dict[str, Any]] = [{"micro_batches": 4, "pipeline": stages} for stages in (2, 4)]
    pins.append({"micro_batches": 4, "pipeline": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2, "data": 1})
    plans = [workers.plan_of("gpt2", pin, pin["pipeline"], workers.DROPOUT) for pin in pins]
    two = pool.run(workers.drops_alike_in_stages, "gpt2", [plans[0], plans[2]], ranks=2)
    four = pool.run(workers.drops_alike_in_stages, "gpt2", [plans[1]], ranks=4)
    assert two[0] == pytest.approx(four[0], rel=1e-12)


def test_stages_run_in_low_precision(pool: LocalProcesses) -> None:
    document = workers.plan_of("llama", {"micro_batches": 2, "pipeline": 2, "tensor": 2}, 4, dtype=torch.float32)
    pool.run(workers.runs_in_low_precision, "llama", document)


Documents = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def documents() -> Documents:
    """Plans by (model, pins, ranks), each made once."""
    made: dict[str, dict[str, Any]] = {}

    def document(model: str, pin: dict[str, Any] | None, ranks: int, dropout: float = 0.0) -> dict[str, Any]:
        key = repr((model, pin, ranks, dropout))
        if key not in made:
            made[key] = workers.plan_of(model, pin, ranks, dropout)
        return made[key]

    return document


DATA_TENSOR, STAGES = {"data": 2, "tensor": 2}, {"micro_batches": 2, "pipeline": 2}
WORKS: list[tuple[Callable[..., Any], str, dict[str, Any], int, float]] = [
    (workers.takes_gradients_in_every_way, "gpt2", DATA_TENSOR, 4, 0.0),
    (workers.gives_gradients_away, "gpt2", {"data": 4}, 4, 0.0),
    (workers.copies, "gpt2", DATA_TENSOR, 4, workers.DROPOUT),
    (workers.copies_stages, "gpt2", {"micro_batches": 2, "pipeline": 4}, 4, 0.0),
    (workers.evaluates, "gpt2", DATA_TENSOR, 4, workers.DROPOUT),
    (workers.evaluates, "mlp", DATA_TENSOR, 4, workers.DROPOUT),
    (workers.keeps_running_statistics, "mlp", {"data": 4}, 4, 0.0),
    (workers.keeps_tied, "gpt2", DATA_TENSOR, 4, 0.0),
    (workers.drops_in_step, "gpt2", DATA_TENSOR, 4, workers.DROPOUT),
    (workers.drops_in_step, "gpt2", {"context": 4}, 4, workers.DROPOUT),
    (workers.saves_and_loads, "gpt2", DATA_TENSOR, 4, 0.0),
    (workers.saves_and_loads, "mixtral", {"expert": 2, "tensor": 2}, 4, 0.0),
    (workers.scales_apart, "gpt2", STAGES, 2, 0.0),
    (workers.takes_any_optimizer, "mlp", {**DATA_TENSOR, "zero": 3}, 4, 0.0),
    *((workers.initialises_meta, name, {"data": 2, "zero": 3}, 2, 0.0) for name in ("mlp", "gpt2", "spectral")),
    (workers.refuses_wrong_inputs, "mlp", {"data": 2}, 2, 0.0),
    (workers.refuses_wrong_state_everywhere, "llama", STAGES, 2, 0.0),
    (workers.refuses_to_go_on_after_half_a_step, "llama", STAGES, 2, 0.0),
]
"""What ranks do, with a model, the pins of its plan, ranks, and the model's dropout."""


@pytest.mark.parametrize("work, model, pin, ranks, dropout", WORKS, ids=name_of)
def test_what_ranks_do(
    pool: LocalProcesses,
    documents: Documents,
    work: Callable[..., Any],
    model: str,
    pin: dict[str, Any],
    ranks: int,
    dropout: float,
) -> None:
    pool.run(work, model, documents(model, pin, ranks, dropout), ranks=ranks)


ALONE = [
    (workers.drops_differently_where_sharded, 4),
    (workers.scales_unlike_stages, 2),
    (workers.refuses_what_differs_between_ranks, 2),
    (workers.layers_compute_the_whole, 2),
    (workers.raises_on_every_rank, 2),
    (stacked.trains_members_on_ranks, 2),
]


@pytest.mark.parametrize("work, ranks", ALONE, ids=name_of)
def test_what_ranks_do_without_a_plan(pool: LocalProcesses, work: Callable[..., Any], ranks: int) -> None:
    pool.run(work, ranks=ranks)


NARROW = [
    *zip(
        ("llama", "gpt2", "gpt2", "llama"),
        (torch.bfloat16, torch.float16, torch.bfloat16, torch.float16),
        workers.LOW_PRECISION_PINS,
        strict=True,
    )
]
"""Every pin, and every pair of a model and a dtype."""


@pytest.mark.parametrize("model, dtype, pin", NARROW, ids=str)
def test_trains_in_its_own_precision(pool: LocalProcesses, model: str, dtype: torch.dtype, pin: dict[str, Any]) -> None:
    ranks = workers.ranks_of(pin)
    document = workers.plan_of(model, pin, ranks, dtype=dtype)
    pool.run(workers.trains_in_its_own_precision, model, document, dtype, ranks=ranks)


@pytest.mark.parametrize("pin", [{"tensor": 2, "sequence_parallel": True}, {"data": 2, "zero": 3}], ids=name_of)
def test_runs_in_low_precision(pool: LocalProcesses, pin: dict[str, Any]) -> None:
    document = workers.plan_of("llama", pin, 2, dtype=torch.float32)
    pool.run(workers.runs_in_low_precision, "llama", document, ranks=2)


def test_a_checkpoint_goes_on_under_any_plan(pool: LocalProcesses, tmp_path: Path) -> None:
    """A fused query-key-value weight in strips, parameters tied over stages, and one process without a group."""
    path = str(tmp_path / "checkpoint")
    begun = pool.run(checkpoints.begins, "gpt2", workers.plan_exactly("gpt2", {"tensor": 2}, 2), path, ranks=2)
    others: tuple[tuple[int, dict[str, Any]], ...] = (
        (4, {"pipeline": 2, "data": 2, "zero": 3, "micro_batches": 2}),
        (2, {"data": 2, "zero": 3, "offload": "host"}),
    )
    for ranks, pin in others:
        other = workers.plan_exactly("gpt2", pin, ranks)
        assert pool.run(checkpoints.goes_on, "gpt2", other, path, ranks=ranks)[0] == pytest.approx(begun[0], rel=1e-10)
    alone = checkpoints.goes_on_alone("gpt2", path)
    assert alone == pytest.approx(begun[0], rel=1e-10)


@pytest.mark.parametrize(
    "model, pin, ranks",
    [("mlp", DATA_TENSOR, 4), ("gpt2", {"pipeline": 2, "micro_batches": 2}, 2), ("mlp", {"offload": "host"}, 1)],
    ids=name_of,
)
def test_a_checkpoint_goes_on_to_the_bit(
    pool: LocalProcesses, tmp_path: Path, model: str, pin: dict[str, Any], ranks: int
) -> None:
    document, path = workers.plan_of(model, pin, ranks, 0.2, torch.float32), str(tmp_path / "checkpoint")
    saved = pool.run(checkpoints.goes_on_to_the_bit, model, document, path, ranks=ranks)[0]
    alone = workers.model_of(model, dtype=torch.float32)
    autopar.load_checkpoint(path, alone)
    assert all(torch.equal(value, saved[name]) for name, value in alone.state_dict().items())


def test_masters_step_as_one_process_would_and_go_on_under_any_plan(pool: LocalProcesses, tmp_path: Path) -> None:
    """Bit for bit where gradients are equal, on strips of a weight, shards, and stages that share one."""
    path, pins = str(tmp_path / "checkpoint"), ({"tensor": 2}, {"pipeline": 2, "micro_batches": 2}, {"zero": 3})
    plans = [workers.plan_of("gpt2", pin, 2, dtype=torch.bfloat16) for pin in pins]
    pool.run(by_hand.begins, "gpt2", plans[0], path, ranks=2)
    for document in plans[1:]:
        pool.run(by_hand.goes_on, "gpt2", document, path, ranks=2)
    by_hand.goes_on("gpt2", None, path)


def test_ranks_that_stay_reshard_from_memory(pool: LocalProcesses, tmp_path: Path) -> None:
    """4 ranks, 3 of them, and these with another one: to the bit what checkpoints would, and the original's losses."""
    plans = [elastic.plan_of(4, elastic.FOUR), elastic.plan_of(3, elastic.THREE), elastic.plan_of(4, elastic.STAGED)]
    found = pool.run(elastic.reshards, [plan.to_dict() for plan in plans], str(tmp_path), ranks=4)
    whole = elastic.Run().steps(9)
    assert found[0]["losses"] == pytest.approx(whole, rel=1e-10)
    assert found[1]["losses"] == pytest.approx(whole[6:], rel=1e-10)
    bill = moving_bill(plans[0], plans[1], (0, 2, 3))
    sent = [sum(rank.sent_bytes.values()) for rank in bill.ranks]
    assert [found[rank]["sent"] for rank in (0, 2, 3)] == [[size] for size in sent] and min(sent) > 0


def test_checkpoints_fail_together(pool: LocalProcesses, tmp_path: Path) -> None:
    document = workers.plan_of("gpt2", {"pipeline": 2, "micro_batches": 2}, 2)
    pool.run(checkpoints.fails_together, "gpt2", document, str(tmp_path / "checkpoint"), ranks=2)


def test_a_kill_leaves_a_checkpoint_that_loads(pool: LocalProcesses) -> None:
    """The old one until the one moment at which the new one takes its place. In memory, where fsync takes no time."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    with tempfile.TemporaryDirectory(dir=memory) as directory, ProcessPoolExecutor(1, context) as process:
        values = process.submit(checkpoints.survives_kills, f"{directory}/checkpoint").result()
    assert len(values) > 30
    assert values == sorted(values) and set(values) == {1.0, 2.0}


def test_a_checkpoint_survives_a_lost_rank(pool: LocalProcesses, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    with pytest.raises(RankError, match="rank 1: the process ended with exit code -9"):
        pool.run(checkpoints.loses_a_rank_while_saving, path, ranks=2)
    assert checkpoints.value_at(path) == 1.0


@pytest.mark.parametrize(
    "model, pin",
    [
        ("llama", {"tensor": 2, "pipeline": 2, "micro_batches": 2}),
        ("mlp", {"replicate": 2, "data": 2, "zero": 3}),
    ],
    ids=str,
)
def test_an_overflow_on_one_rank_is_one_on_all(pool: LocalProcesses, model: str, pin: dict[str, Any]) -> None:
    pool.run(workers.scales_and_skips_together, model, workers.plan_exactly(model, pin, 4))


@pytest.mark.parametrize("form", ["state dict", "file", "directory", "torch file", "checkpoint"])
def test_loads_models_on_the_meta_device(pool: LocalProcesses, documents: Documents, tmp_path: Path, form: str) -> None:
    path = None
    if form == "checkpoint":
        path = str(tmp_path)
        autopar.save_checkpoint(path, workers.model_of("gpt2"))
    elif form == "torch file":
        path = str(tmp_path / "model.pt")
        torch.save(workers.model_of("gpt2").state_dict(), path)
    elif form != "state dict":
        state = workers.model_of("gpt2").state_dict()
        del state["lm_head.weight"]  # as Transformers saves tied weights: once
        names = sorted(state)
        shards = {"model.safetensors": names}
        if form == "directory":
            shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
            index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        for shard, held in shards.items():
            save_file({name: state[name].contiguous() for name in held}, tmp_path / shard)
        path = str(tmp_path / "model.safetensors" if form == "file" else tmp_path)
    pool.run(workers.loads_meta, "gpt2", documents("gpt2", {"tensor": 2}, 2), path, ranks=2)


def test_ranks_given_different_plans_say_so(pool: LocalProcesses, documents: Documents) -> None:
    both = [documents("mlp", {"data": 2}, 2), documents("mlp", {"tensor": 2}, 2)]
    pool.run(workers.refuses_other_plans, both, ranks=2)
    pool.run(workers.refuses_other_world_sizes, documents("mlp", {"data": 4}, 4), ranks=2)


@pytest.mark.parametrize("pin", [{"data": 2, "zero": 3}, {"pipeline": 2, "micro_batches": 2}], ids=name_of)
def test_it_has_the_face_of_its_model(pool: LocalProcesses, pin: dict[str, Any], tmp_path: Path) -> None:
    pool.run(faces.has_the_face_of_its_model, workers.plan_of("gpt2", pin, 2), str(tmp_path), ranks=2)


def test_a_rank_that_fails_ends_the_call(pool: LocalProcesses) -> None:
    with pytest.raises(RankError):
        pool.run(workers.fails_alone)
    pool.run(workers.drops_differently_where_sharded)  # and the processes can be used again


def test_what_a_call_made_is_gone_in_the_next(pool: LocalProcesses, documents: Documents) -> None:
    left = []
    for pin in ({"data": 2, "zero": 3}, {"tensor": 2}):
        pool.run(workers.makes_a_module, "mlp", documents("mlp", pin, 2), ranks=2)
        left.append(pool.run(workers.finds_it_gone, ranks=2))
    assert left[0] == left[1]


def test_what_a_call_that_was_left_answers_is_not_the_next_one_s(pool: LocalProcesses) -> None:
    def leave(rank: int, value: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.run(workers.says, 1, ranks=2, on_event=leave)
    assert pool.run(workers.says, 2, ranks=2) == [2, 2]


def test_who_waits_for_a_lost_rank_is_told_so(pool: LocalProcesses, tmp_path: Path) -> None:
    document = workers.plan_of("llama", {"micro_batches": 4, "pipeline": 4}, 4)
    with pytest.raises(RankError, match="rank 2: the process ended with exit code 3"):
        pool.run(workers.loses_a_rank, "llama", document, 2, tmp_path)
    said = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
    assert set(said) == {0, 1, 3}
    for neighbour in (1, 3):
        assert re.search(r"micro-batch \d for stage \d: rank 2 \(number 2 of the pipeline\) has gone", said[neighbour])
    assert "rank 1 (number 1 of the pipeline) has gone" in said[0]


PROGRAM = """
import faulthandler
faulthandler.dump_traceback_later(240, exit=True)  # who hangs, at the very end too, fails and says where

import autopar, torch, torch.distributed as dist
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).double()
batch = {"input": torch.randn(8, 16).double(), "target": torch.randn(8, 8).double()}

def loss_fn(output, batch):
    return nn.functional.mse_loss(output, batch["target"])

expected = loss_fn(model(batch["input"]), batch)
cluster = autopar.ClusterSpec.local(4)
pin = {"data": 2, "tensor": 2, "zero": 3}
pmodel = autopar.parallelize(model, cluster, example_kwargs=batch, loss_fn=loss_fn, pin=pin)
loss = pmodel(**pmodel.shard(batch))
loss.backward()
torch.nn.utils.clip_grad_norm_(pmodel.parameters(), 1.0)
torch.optim.AdamW(pmodel.parameters()).step()
assert abs(loss.item() - expected.item()) < 1e-10
print(f"rank {dist.get_rank()} of {dist.get_world_size()} agrees")
dist.destroy_process_group()
"""


def test_runs_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    root = str(Path(__file__).parents[3])
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr
    assert all(f"rank {rank} of 4 agrees" in result.stdout for rank in range(4))
    # What torch says of functions that spmd_types calls, and of reductions over two axes one after the other.
    assert "FutureWarning" not in result.stderr
    assert "redistributing" not in result.stderr
