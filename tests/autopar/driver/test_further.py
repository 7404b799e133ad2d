"""Plans of further programs: what they keep, and what is said where there is none; in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.driver.further import _many
from autopar.driver.plan import assign, staged
from autopar.driver.trace import trace
from autopar.runtime.spmd.input_form import flat_call
from autopar.verification.float64 import exact
from autopar.verification.typecheck import typecheck
from planner.base.errors import InfeasibleError, InputError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.stored_layouts import tensors_of
from planner.plan.further import stored_tensors
from planner.plan.plan import Plan
from tests.autopar import workers
from tests.autopar.other_forms import VOCAB, WIDTH, batch_of, tiny
from tests.autopar.workers import cluster_of


@pytest.mark.parametrize("pin", [{"data": 2, "zero": 3}, {"pipeline": 2, "micro_batches": 2}], ids=str)
def test_a_further_plan_keeps_what_is_stored_and_is_verified(pin: dict[str, int], tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "further.json"
    plan = autopar.plan(model, cluster_of(2), example_kwargs=batch_of(), pin=pin)
    assert plan.assignment is not None and stored_tensors(plan) == tensors_of(plan.assignment)
    assert autopar.plan_inputs(model, plan, example_kwargs=batch_of(4)).search.status == "kept"
    for training, batch in ((True, batch_of(3, 10, mask=True)), (False, batch_of(2, labels=False))):
        model.train(training)
        autopar.plan_inputs(model, plan, example_kwargs=batch).save(path)
        found = Plan.load(path)
        assert stored_tensors(found) == stored_tensors(plan)
        autopar.verify(model, found, example_kwargs=batch)


def test_a_further_program_that_does_not_fit_says_by_how_much() -> None:
    model, cluster = tiny(), ClusterSpec.local(2, memory_bytes="1 MiB", cores=4)
    plan = autopar.plan(model, cluster, example_kwargs=batch_of(), pin={"data": 2})
    with pytest.raises(InfeasibleError, match=r"beside what is stored as planned: .* too many .*drop_last") as caught:
        autopar.plan_inputs(model, plan, example_kwargs=batch_of(999))
    assert caught.value.excess_bytes > 0


def test_many_programs_are_told_by_the_inputs_that_vary() -> None:
    ids = torch.zeros(4, 12, dtype=torch.int64)
    calls = [{"ids": ids, "scale": number / 2, "use_cache": number > 4} for number in range(9)]
    forms = [flat_call((), call).form({"ids": (4, 12)}, True) for call in calls]
    assert _many(forms) == (
        "8 further programs were planned so far, all of which are kept: scale came in 9 forms, and each new one takes "
        "a capture and a plan; give scale as a tensor, torch.as_tensor(value)"
    )


def test_a_model_that_was_changed_is_refused() -> None:
    model = tiny()
    plan = autopar.plan(model, cluster_of(2), example_kwargs=batch_of(), pin={"data": 2})
    model.later = nn.Linear(4, 4)
    with pytest.raises(InputError, match=r"has later.weight, later.bias, which it did not have when it was planned"):
        autopar.plan_inputs(model, plan, example_kwargs=batch_of(4))
    resized = tiny()
    resized.embed = nn.Embedding(VOCAB + 4, WIDTH).double()
    resized.head.weight = resized.embed.weight
    with pytest.raises(InputError, match=r"embed.weight is now float64 28x16, .* as it was planned, float64 24x16"):
        autopar.plan_inputs(resized, plan, example_kwargs=batch_of(4))
    with pytest.raises(InputError, match=r"is now bfloat16 .* planned, float64 .*, and \d+ more were changed: leave"):
        autopar.plan_inputs(tiny().bfloat16(), plan, example_kwargs=batch_of(4))


class Weighted(nn.Module):
    """Four blocks with batch norms, and a weight of every row that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x.square() if weight is None else x.square() * weight).mean()


def test_batch_norms_of_micro_batches_stay_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Weighted().double(), torch.randn(16, 8, dtype=torch.float64)
    pin = {"pipeline": 2, "micro_batches": 4, "batch_norm": "micro_batch"}
    plan = autopar.plan(model, cluster_of(2), example_kwargs={"x": x}, pin=pin)
    for training, batch in ((True, {"x": x, "weight": x.abs()}), (False, {"x": x, "weight": x.abs()})):
        model.train(training)
        autopar.plan_inputs(model, plan, example_kwargs=batch).save(tmp_path / "further.json")
        found = Plan.load(tmp_path / "further.json")
        assert found.mesh.micro_batches == 4
        autopar.verify(model, found, example_kwargs=batch)


def test_a_second_program_of_a_block_takes_no_other_blocks_name() -> None:
    """Both halves of a layer are called after it; the first has two programs, since layers are entered differently."""
    with exact():
        model, batch = workers.model_of("llama"), workers.batch_of("llama")
        pin = {"micro_batches": 2, "tensor": 2}
        plan = autopar.plan(model, cluster_of(2), example_kwargs=batch, loss_fn=workers.loss_fn, pin=pin)
        ids = {"input_ids": batch["input_ids"]}
        found = autopar.plan_inputs(model.eval(), plan, example_kwargs=ids, loss_fn=workers.loss_fn)
        traced = trace(model, None, ids)
        typecheck(traced.captured, *staged(found, assign(traced, found)))
