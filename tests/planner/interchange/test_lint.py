"""What our model says of a configuration that runs: its cost, whether it fits, the best plan, the change next to it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from planner.base.errors import ConfigError
from planner.formulation.training import Training
from planner.interchange.lint import Lint, lint
from planner.interchange.model_sizes import model_sizes
from planner.interchange.parallelism import Parallelism
from planner.interchange.pins import pins_of, unpinned
from tests.planner.formulation.test_pins import attention
from tests.planner.plans import cluster, plan_of, residual_mlp

MLP = residual_mlp(layers=4, batch=64)


def deepspeed(stage: int) -> str:
    return json.dumps({"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": stage}})


def linted(text: str, memory: int | str = "1 GiB", limit_s: float = 4.0) -> Lint:
    return lint(text, None, MLP, cluster(4, memory), Training(), time_limit_s=limit_s)


def test_it_costs_what_the_best_plan_with_its_pins_costs() -> None:
    found = linted(deepspeed(3))
    pinned = plan_of(MLP, pin={"data": 4, "zero": 3, "pipeline": 1, "micro_batches": 1, "recompute": "none"})
    assert found.runs
    assert found.cost is not None
    assert found.cost.step_s == pytest.approx(pinned.predicted.step_time_s, rel=0.02)
    assert found.cost.rank_bytes == (pinned.predicted.peak_bytes,)
    assert found.best is not None
    assert found.best.step_s <= found.cost.step_s
    assert found.change is not None
    assert found.change.cost.step_s < found.cost.step_s
    text = str(found)
    assert f"change: {found.change.what} ({', '.join(found.change.fields)})" in " ".join(text.split())


def test_a_pipeline_is_said_to_fit_rank_by_rank() -> None:
    found = linted("--pipeline-model-parallel-size 2 --micro-batch-size 8 --global-batch-size 64 --num-layers 4")
    assert found.runs, found
    assert found.cost is not None
    assert len(found.cost.rank_bytes) == 2
    assert "on a device of each pipeline rank" in str(found)


def test_what_does_not_fit_is_said_with_a_change_that_does() -> None:
    whole = linted(deepspeed(0), limit_s=2)
    shards = linted(deepspeed(3), limit_s=2)
    assert whole.cost is not None
    assert shards.cost is not None
    between = int((whole.cost.peak_bytes + shards.cost.peak_bytes) / 2 / 0.9)
    found = linted(deepspeed(0), between, limit_s=10)
    assert not found.runs
    assert "needs" in found.misfit or "no plan that fits" in found.misfit
    assert found.change is not None
    assert found.change.cost.peak_bytes <= found.usable_bytes
    assert "runs, and does not fit" in str(found)


def test_of_what_does_not_run_the_best_plan_is_said_alone() -> None:
    found = linted(json.dumps({"tp_size": 3, "fsdp_size": 1}))
    assert found.best is not None
    assert found.change is None
    assert not found.runs
    assert found.cost is None
    assert "set fsdp_size" in str(found) or "take degrees" in str(found)
    with pytest.raises(ConfigError, match="there is no format 'yaml'"):
        lint("{}", "yaml", MLP, cluster(4), Training())


def test_a_model_in_another_dtype_is_noted() -> None:
    config = json.loads(deepspeed(3)) | {"bf16": {"enabled": True}}
    found = linted(json.dumps(config), limit_s=0)
    assert "it computes in bfloat16, and figures are of the model as it is given, in float32" in found.note
    assert found.note in " ".join(str(found).split())


def test_sizes_are_those_of_the_graph() -> None:
    assert model_sizes(MLP).layers == 4
    assert model_sizes(MLP).heads == 0
    assert model_sizes(attention()).heads > 0


def test_what_no_pin_says_is_said_not_to_be_priced() -> None:
    text = (
        "--pipeline-model-parallel-size 2 --micro-batch-size 8 --global-batch-size 64 --num-layers 4 "
        "--pipeline-model-parallel-layout Et*3|tL --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 1"
    )
    found = linted(text)
    assert found.unpinned == ("layers of each stage (3+1)", "layers that recompute (2)")
    assert "not priced as configured, but as the search or the model has it: layers of each" in " ".join(
        str(found).split()
    )


def test_norms_alone_recompute_where_these_are_named() -> None:
    modules = ["h.0", "h.0.norm1", "h.0.mlp.up", "h.0.attn"]
    d = Parallelism(recompute="selective", recompute_modules=("layernorm",))
    assert pins_of(d, modules)["recompute"] == {"keep": ["h.0", "h.0.mlp.up", "h.0.attn"]}
    assert pins_of(d, ["h.0"])["recompute"] == "none"
    attended = replace(d, recompute_modules=("core_attn",))
    assert "recompute" not in pins_of(attended, modules)
    assert unpinned(attended, "float32") == ("modules that recompute (core_attn)",)
    assert unpinned(replace(d, stored="bfloat16"), "float32") == ("dtype of parameters (bfloat16)",)
