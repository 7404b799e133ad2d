"""Parts of tensors, live bytes, and what the front door says outside of a process group; in this process alone."""

from __future__ import annotations

import gc
import itertools
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.driver.plan import assign, plan_traced
from autopar.driver.trace import trace
from autopar.emit.initialization import _cut, _reader
from autopar.graph.rows import take
from autopar.runtime.spmd.mesh import groups_of, part_of, put_part, rows_of
from autopar.verification.collective_counter import count_collectives, differences
from autopar.verification.memory_meter import LiveBytes, held_tensors
from autopar.verification.simulator import Simulation
from autopar.verification.typecheck import typecheck
from planner.base.errors import InputError, PlanError
from planner.cost.cluster import ClusterSpec
from planner.formulation.constraints.pins import Pins
from planner.formulation.training import Training
from planner.ir.layout import I, Layout, Mesh, R, Shard, local_shape
from planner.plan.plan import Plan
from tests.autopar import workers

MESH = Mesh.of(data=2, tensor=3)
LAYOUTS: list[Layout] = [
    (I, R),
    (Shard(0), I),
    (Shard(0), Shard(0)),
    (Shard(1), Shard(0)),
    (R, Shard(0, 2)),
    (Shard(0), Shard(0, 2)),
    (Shard(1, 3), Shard(0, 4)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_make_up_the_whole(layout: Layout) -> None:
    whole = torch.arange(24 * 12).reshape(24, 12)
    rebuilt = torch.zeros_like(whole)
    for rank in range(MESH.size):
        part = part_of(whole, layout, MESH, rank)
        assert part.is_contiguous()
        assert tuple(part.shape) == local_shape((24, 12), layout, MESH.sizes)
        put_part(rebuilt, part, layout, MESH, rank)
    assert torch.equal(rebuilt, whole)


def test_a_part_of_strips_by_hand() -> None:
    # Six columns as 2 strips of 3; the tensor axis takes one column of each strip.
    whole = torch.arange(6)[None].expand(2, 6)
    assert part_of(whole, (R, Shard(1, 2)), MESH, 1)[0].tolist() == [1, 4]


def test_contiguous_parts_are_slices() -> None:
    rows = rows_of((24, 12), (Shard(0), Shard(1)), MESH, 4)
    assert rows == (slice(12, 24), slice(4, 8))
    whole = torch.zeros(24, 12)
    assert take(whole, rows).untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


class Recorded:
    """A stored tensor that remembers what was read of it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        self.read: tuple[slice, ...] = ()

    def get_shape(self) -> Any:
        return self.tensor.shape

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        self.read = index
        return self.tensor[index]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rank", [0, 4])
def test_checkpoints_are_read_in_slices(layout: Layout, rank: int) -> None:
    stored = Recorded(torch.arange(24 * 12).reshape(24, 12))
    got = _cut(stored, rows_of((24, 12), layout, MESH, rank))
    assert torch.equal(got, part_of(stored.tensor, layout, MESH, rank))
    for index, rows in zip(stored.read, rows_of((24, 12), layout, MESH, rank), strict=True):
        assert index == (rows if isinstance(rows, slice) else slice(None))


def test_a_state_dict_in_a_file_is_mapped(tmp_path: Path) -> None:
    """A slice of it reads no more than that: what the process has in memory does not grow by the rest."""
    path, size = tmp_path / "model.pt", 2**22
    torch.save({"weight": torch.arange(size, dtype=torch.float32)}, path)
    before = _resident_bytes()
    read = _reader(path)
    assert read is not None
    found = read(["other", "weight"])
    assert found is not None and tuple(found.get_shape()) == (size,)
    assert torch.equal(found[(slice(5, 8),)], torch.arange(5.0, 8.0)) and read(["other"]) is None
    assert _resident_bytes() - before < size  # a quarter of the file
    for wrong in ([torch.ones(2)], {"weight": torch.ones(2), "step": 3}):
        torch.save(wrong, path)
        with pytest.raises(InputError, match=r"model.pt' holds no state dict, which maps names to tensors, but"):
            _reader(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match=r"cannot read the checkpoint .* state dict that torch\.save wrote, or what"):
        _reader(path)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_live_bytes_by_hand() -> None:
    # 4 MB of weights, twice as much optimizer state; a step adds gradients (4 MB) and what forward saves.
    model, inputs = nn.Linear(1000, 1000, bias=False), torch.randn(500, 1000)
    optimizer = torch.optim.Adam(model.parameters())
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    held = held_tensors(model, optimizer)
    with LiveBytes(held) as live:
        assert live.now == pytest.approx(12e6, abs=100)
        hidden = model(inputs)  # 2 MB
        assert live.now == pytest.approx(14e6, abs=100)
        hidden.relu_()
        view = hidden.view(-1)
        assert live.now == pytest.approx(14e6, abs=100), "views and in-place results are no new bytes"
        del hidden, view
        assert live.now == pytest.approx(12e6, abs=100)
        assert live.peak == pytest.approx(14e6, abs=100)


@pytest.mark.parametrize("name, dtype, pin", [
    *(("llama", torch.bfloat16, pin) for pin in workers.LOW_PRECISION_PINS),
    *(("gpt2", torch.float16, pin) for pin in workers.LOW_PRECISION_PINS),
], ids=str)  # fmt: skip
def test_types_of_narrow_models_are_right(name: str, dtype: torch.dtype, pin: dict[str, Any]) -> None:
    """What they compute is tested on processes."""
    model, batch = workers.model_of(name, dtype=dtype), workers.batch_of(name)
    plan = Plan.from_dict(workers.plan_of(name, pin, workers.ranks_of(pin), dtype=dtype))
    traced = trace(model, None, batch, workers.loss_fn)
    typecheck(traced.captured, assign(traced, plan))


@pytest.mark.parametrize("name, dtype, pin", [
    ("llama", torch.bfloat16, {"tensor": 2, "sequence_parallel": True}),
    ("gpt2", torch.float16, {"data": 2, "zero": 3}),
], ids=str)  # fmt: skip
def test_narrow_models_train_on_simulated_ranks(name: str, dtype: torch.dtype, pin: dict[str, Any]) -> None:
    model, batch = workers.model_of(name, dtype=dtype), workers.batch_of(name)
    plan = Plan.from_dict(workers.plan_of(name, pin, workers.ranks_of(pin), dtype=dtype))
    traced = trace(model, None, batch, workers.loss_fn)
    assignment = assign(traced, plan)
    with Simulation(model, traced.captured, assignment) as simulation:
        module = simulation.module
        with count_collectives(groups_of(module.device_mesh)) as calls:
            loss = module(**simulation.inputs((), batch)[1])
            loss.backward()
        assert not differences(dict(plan.predicted.collectives), calls)
        layouts = {leaf.name: leaf.layout for leaf in module.interface.leaves}
        gradients = {
            key: simulation.whole(p.grad, layouts[key], tuple(p.shape)) for key, p in module.named_parameters()
        }
        loss = simulation.whole(loss, (), ())
    workers.near(name, dtype, loss, gradients)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def test_outside_of_torchrun_it_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(PlanError, match=r"torchrun --nproc-per-node 2 .*autopar.verify"):
        autopar.parallelize(Small(), ClusterSpec.local(2), example_kwargs={"x": torch.zeros(4, 8)})


def test_a_plan_for_another_cluster_is_refused() -> None:
    batch = {"x": torch.zeros(4, 8)}
    plan = autopar.plan(Small(), ClusterSpec.local(2), example_kwargs=batch)
    with pytest.raises(PlanError, match="the plan is for 2 devices, the cluster has 4"):
        autopar.parallelize(Small(), ClusterSpec.local(4), plan=plan, example_kwargs=batch)


@pytest.mark.parametrize("by_name", [True, False])
def test_inputs_by_position_and_by_name_are_not_mixed_up(by_name: bool) -> None:
    x = torch.zeros(4, 8)
    traced = trace(Small(), None, {"x": x}) if by_name else trace(Small(), (x,))
    assignment = assign(traced, plan_traced(traced, ClusterSpec.local(2), Pins(), Training()))
    with Simulation(Small(), traced.captured, assignment) as simulation:
        if by_name:
            said = r"by position \(1\), but.* by name, \['x'\]: call pmodel\(\*\*pmodel.shard\(\{'x': \.\.\.\}\)\)"
            wrong: list[Any] = [lambda: simulation.module(x), lambda: simulation.module.shard((x,))]
        else:
            said = r"by name, \['x'\], but.* by position \(1\): call pmodel\(\*pmodel.shard\(\(\.\.\.,\)\)\)"
            wrong = [lambda: simulation.module(x=x), lambda: simulation.module.shard({"x": x})]
        for call in wrong:
            with pytest.raises(InputError, match=said):
                call()


def test_the_front_door_is_the_function_even_after_its_module_was_imported() -> None:
    import importlib

    importlib.import_module("autopar.verification.verify")
    for name, _ in itertools.product(("verify", "plan", "parallelize"), range(2)):
        assert callable(getattr(autopar, name)), name
