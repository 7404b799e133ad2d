"""What ``test_disk.py`` does in one process, and ``test_offload.py`` in several: train with model data in files."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.runtime.module import ParallelModule
from planner.base.errors import DiskError, InfeasibleError, InputError
from planner.cost.cluster import ClusterSpec
from planner.plan.plan import Plan
from tests.autopar.carried import adamw_of_both, another, loss_of, model_of, same_gradients, same_values


def plan_of(ranks: int, disk: str | None = "1 GB", **pin: object) -> Plan:
    model, batch = model_of("mlp")
    cluster = ClusterSpec.local(ranks, "1 GiB", cores=2, host_memory_bytes="1 GiB", disk_bytes=disk)
    return autopar.plan(
        model, cluster, example_kwargs=batch, pin={"offload": "disk", "pipeline": 1, "micro_batches": 1, **pin}
    )


def parallel(model: nn.Module, plan: Plan, path: str | None) -> ParallelModule:
    batch = model_of("mlp")[1]
    return autopar.parallelize(model, plan.cluster, plan=plan, example_kwargs=batch, offload_path=path)


def files() -> int:
    """Bytes of files without names that this process has mapped."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("(deleted)") and "/offload/" in line:
            begin, end = (int(each, 16) for each in line.split()[0].split("-"))
            found += end - begin
    return found


def trains(document: dict[str, Any], path: str) -> None:
    """Steps of AdamW with clipping, some over two batches, as those of the original; the directory stays empty."""
    model, _ = model_of("mlp")
    plan = Plan.from_dict(document)
    pmodel = parallel(copy.deepcopy(model), plan, path)
    optimizers = adamw_of_both(model, pmodel)
    both = list(zip((model, pmodel), optimizers, strict=True))
    sizes = []
    for step in range(3):
        for m, optimizer in both:
            optimizer.zero_grad()
            for seed in range(1 + step % 2):
                loss_of(m, another("mlp", 2 * step + seed)).backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            optimizer.step()
        same_gradients(pmodel, model)
        sizes.append(files())
    same_values(pmodel, model, rtol=1e-9, atol=1e-12)
    own = sum(parameter.to_local().nbytes for parameter in pmodel.parameters())  # type: ignore[attr-defined]
    assert sizes[0] >= 4 * own and not os.listdir(path)
    again = pmodel.optimizer(torch.optim.AdamW)
    again.load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    before = files()
    again.step()
    assert files() >= before + 2 * own  # what was loaded is in files after the next step
    del again


class Counting(torch.optim.AdamW):
    """Counts in its group, and how many parameters each call updates."""

    def __init__(self, groups: Any):
        super().__init__(groups, lr=0.1)
        self.param_groups[0]["count"], self.updated = 0, []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["count"] += 1
        self.updated.append(sum(parameter.grad is not None for parameter in self.param_groups[0]["params"]))
        super().step(closure)


def begins_one_by_one(plan: Plan, path: str) -> None:
    """The host's memory holds the state of one parameter at a time; gradients and what groups keep stay as they are."""
    pmodel = parallel(model_of("mlp")[0], plan, path)
    optimizer = pmodel.optimizer(Counting)
    loss_of(pmodel, another("mlp", 0)).backward()
    grads = [parameter.grad for parameter in pmodel.parameters()]
    optimizer.step()
    assert optimizer.updated == [1] * len(grads)
    optimizer.step()
    assert optimizer.updated[-1] == len(grads) and optimizer.param_groups[0]["count"] == 2
    assert all(p.grad is grad for p, grad in zip(pmodel.parameters(), grads, strict=True))


def refuses(plan: Plan, path: str) -> None:
    """What cannot be a home, and a disk that is full later."""
    model, _ = model_of("mlp")
    with pytest.raises(InputError, match="offload_path is None: give autopar"):
        parallel(model, plan, None)
    with pytest.raises(InputError, match=r"offload_path '/nowhere/at/all' of rank 0 cannot hold files \(No such file"):
        parallel(model, plan, "/nowhere/at/all")
    file = Path(path).parent / "file"
    file.touch()
    with pytest.raises(InputError, match=r"file' of rank 0 cannot hold files \(Not a directory\)"):
        parallel(model, plan, str(file))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.runtime.host.disk._free_bytes", lambda folder: 1000)
        with pytest.raises(
            InfeasibleError, match=r"take [\d,]+ bytes \(.*\), and 1,000 bytes are free there"
        ) as caught:
            parallel(model, plan, path)
        assert caught.value.excess_bytes > 0
    assert not os.listdir(path)

    pmodel = parallel(copy.deepcopy(model), plan, path)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1), pmodel.optimizer(torch.optim.Adam, lr=0.1)]
    both = list(zip((model, pmodel), optimizers, strict=True))

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    for step in range(2):
        for m, optimizer in both:
            optimizer.zero_grad()
            loss_of(m, another("mlp", step)).backward()
        optimizers[0].step()
        if step:
            optimizers[1].step()
            continue
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.posix_fallocate", full)
            with pytest.raises(
                InfeasibleError, match=r"no [\d,]+ bytes .*in .* for optimizer state .exp_avg. \(No space left"
            ):
                optimizers[1].step()
    same_values(pmodel, model, rtol=1e-9, atol=1e-12)
    with pytest.raises(InputError, match="which say when they have stepped: take one"):
        pmodel.optimizer(Own)


def unnamed(path: str) -> list[int]:
    """Descriptors of the files without names that this process has mapped."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        try:
            place = os.readlink(f"/proc/self/fd/{each}")
        except OSError:  # that of the list itself
            continue
        if place.startswith(f"{path}/") and os.fstat(int(each)).st_nlink == 0:
            found.append(int(each))
    return found


def loses_nothing(document: dict[str, Any], path: str) -> None:
    """Each file in turn cannot be read for a step, which is an error of that step, and then can be read again."""
    (model, _), (pmodel, _) = both = _both(document, path)
    for each in both:
        _trains(*each, 0)
    failed = []
    for seed, file in enumerate(unnamed(path), 1):
        size = os.fstat(file).st_size
        kept = os.pread(file, size, 0)
        os.ftruncate(file, 0)
        with pytest.raises(
            DiskError, match=r"cannot (read|write) .* \(Bad address\): the disk fails, or somebody"
        ) as error:
            _trains(*both[1], seed)
        failed.append(getattr(error.value, "__notes__", ["step"])[0].split(" ")[0])
        os.ftruncate(file, size)
        assert os.pwrite(file, kept, 0) == size
        for each in both:
            _trains(*each, seed)
        same_gradients(pmodel, model)
    assert {*failed} == {"fetch", "evict", "step"}
    _are_same(pmodel, model)


def is_not_ended(document: dict[str, Any], path: str) -> None:
    """Each file in turn cannot be used, and what is ours reads and writes them outside steps."""
    (model, _), (pmodel, optimizer) = both = _both(document, path)
    for each in both:
        _trains(*each, 0)
    saved, full = Path(path).parent / "saved", pmodel.full_state_dict()
    autopar.save_checkpoint(saved, pmodel, optimizer)
    uses = {
        "full": pmodel.full_state_dict,
        "put": lambda: pmodel.load_state_dict(full),
        "save": lambda: autopar.save_checkpoint(saved, pmodel, optimizer),
        "beside": lambda: autopar.save_checkpoint(saved, pmodel, optimizer, wait=False).wait(),
        "load": lambda: autopar.load_checkpoint(saved, pmodel, optimizer),
        "norm": lambda: nn.utils.clip_grad_norm_(pmodel.parameters(), 1e9),
        "norms": lambda: nn.utils.clip_grad_norm_(pmodel.parameters(), 1e9, foreach=False),
    }
    seen = []
    for file in unnamed(path):
        size = os.fstat(file).st_size
        kept = os.pread(file, size, 0)
        os.ftruncate(file, 0)
        seen.append("".join(f"{name} " for name, use in uses.items() if _fails(use)))
        assert os.pwrite(file, kept, 0) == size
        autopar.load_checkpoint(saved, pmodel, optimizer)
    state = 2 * len([*model.parameters()])
    assert sorted(seen) == sorted(["full put save beside load ", "norm norms ", *["save beside load "] * state])
    for each in both:
        _trains(*each, 1)
    _are_same(pmodel, model)


def _both(document: dict[str, Any], path: str) -> tuple[tuple[nn.Module, Any], tuple[Any, Any]]:
    """The original and the parallel model, each with its optimizer."""
    model, _ = model_of("mlp")
    pmodel = parallel(copy.deepcopy(model), Plan.from_dict(document), path)
    original = model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    return original, (pmodel, pmodel.optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-4))


def _trains(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    loss_of(model, another("mlp", seed)).backward()
    optimizer.step()


def _are_same(pmodel: Any, model: nn.Module) -> None:
    same_values(pmodel, model, rtol=1e-9, atol=1e-12)


def _fails(use: Callable[[], object]) -> bool:
    """Whether what is used is in a file that cannot be; the error names it."""
    try:
        use()
    except DiskError as error:
        what = r"(((model|optim)\.)?layers\.\d\.\S+|gradients under '.*')"
        pattern = rf"cannot (read|write) .* of {what}, in a file \(Bad address\): the disk fails"
        return re.search(pattern, str(error)) is not None
    return False


def fails_on_all_stages(document: dict[str, Any], path: str) -> str:
    """The second stage cannot write its parameters: none of both loads any."""
    pmodel = parallel(model_of("mlp")[0], Plan.from_dict(document), path)
    full = pmodel.full_state_dict()
    if dist.get_rank():
        for file in unnamed(path):
            os.ftruncate(file, 0)
    with pytest.raises(DiskError) as error:
        pmodel.load_state_dict(full)
    return str(error.value)


class Own:
    """Made, but of no known kind."""

    def __init__(self, groups: Any):
        self.defaults: dict[str, Any] = {}
        self.param_groups = groups

    def step(self) -> None:
        pass
