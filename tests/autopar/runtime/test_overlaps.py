"""Overlaps: what is planned to be on its way while blocks compute is what a trace shows, and a fault is noticed."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.driver.plan import assign, staged
from autopar.driver.trace import Traced, trace
from autopar.emit.build import build
from autopar.runtime.module import ParallelModule
from autopar.runtime.pipeline import p2p
from autopar.runtime.spmd import parameters, prefetch_gather
from autopar.runtime.spmd.interface import LeafSpec
from autopar.runtime.spmd.mesh import device_mesh, part_of, pipeline_mesh
from autopar.verification.simulator import fake_process_group
from planner.analysis.overlaps import ObservedFlight, Overlap, overlaps, scheduled_overlaps
from planner.plan.overlap_comparison import compare_overlaps
from planner.plan.plan import Plan
from tests.autopar.runtime.test_gather import WIDTH, Residuals, planned

ZERO_3: Mapping[str, Any] = {"data": 2, "zero": 3, "recompute": "full"}


def traced(pin: Mapping[str, Any], model: Residuals) -> tuple[list[Overlap], list[ObservedFlight]]:
    """What is planned, and what a rank does whose collectives carry nothing."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if "reduce_dtype" in pin else torch.float32
    model, x = model.to(dtype), torch.randn(4, WIDTH, dtype=dtype)
    found = trace(model, (x,))
    assignment = assign(found, planned(found, **pin))
    with _rank(found, assignment, model) as module:
        optimizer = module.optimizer(torch.optim.SGD, lr=0.0)
        part = module.shard((x,))[0]
        with module.observe():
            for _ in range(2):
                module(part)[0].backward()
                optimizer.step()
                optimizer.zero_grad()
        assert module._seen is not None
        (step,) = module._seen.overlaps
    return overlaps(assignment), step


@contextlib.contextmanager
def _rank(found: Any, assignment: Any, model: Residuals) -> Iterator[ParallelModule]:
    mesh, whole = assignment.space.mesh, dict(model.named_parameters())

    def make_part(leaf: LeafSpec) -> torch.Tensor:
        return part_of(whole[leaf.name].detach(), leaf.layout, mesh, 0).clone()

    with fake_process_group(mesh.size):
        yield build(model, found.captured, assignment, device_mesh(mesh, "cpu"), 0, make_part, 0)


@pytest.mark.parametrize("pin", [
    {"data": 2, "zero": 0},
    {"data": 2, "zero": 2, "recompute": "none"},
    ZERO_3,
    {**ZERO_3, "update": "backward"},
    {"data": 2, "zero": 0, "update": "backward"},
    {"data": 2, "zero": 0, "reduce_dtype": "float32"},
    {"data": 2, "tensor": 2, "zero": 0},
    {"data": 2, "tensor": 2, "zero": 3, "recompute": "none"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("form", [{}, {"frozen": 1, "shifted": 1, "beside": 1}], ids=str)
def test_what_is_planned_is_what_a_trace_shows(pin: Mapping[str, Any], form: Mapping[str, int]) -> None:
    expected, step = traced(pin, Residuals(**form))
    assert Counter(each.overlap for each in step) == Counter(expected)
    assert any(each.beside for each in expected)


def scheduled(
    pin: Mapping[str, Any], form: Mapping[str, int], ranks: int = 1
) -> list[tuple[list[Overlap], list[ObservedFlight]]]:
    """The same of every rank of a micro-batched step; what they receive is not what others send."""
    made = []
    for rank in range(ranks):
        with micro_batched(pin, form, ranks, rank) as (module, part, expected):
            with module.observe():
                for _ in range(2):
                    module(part)[0].backward()
            assert module._seen is not None
            (seen,) = module._seen.overlaps
            made.append((expected, seen))
    return made


@functools.cache
def of_all_ranks(
    pin: tuple[tuple[str, Any], ...], form: tuple[tuple[str, int], ...]
) -> tuple[Residuals, torch.Tensor, Traced, Plan]:
    """A model, its inputs, what is captured of it, and its plan: made once for all ranks, and whatever goes wrong."""
    torch.manual_seed(0)
    model, x = Residuals(**dict(form)), torch.randn(16, WIDTH)
    found = trace(model, (x,))
    return model, x, found, planned(found, **dict(pin))


@contextlib.contextmanager
def micro_batched(
    pin: Mapping[str, Any], form: Mapping[str, int], ranks: int = 1, rank: int = 0
) -> Iterator[tuple[ParallelModule, torch.Tensor, list[Overlap]]]:
    """A rank whose collectives and messages carry nothing, what it takes of a batch, and what it is planned to do."""
    model, x, found, plan = of_all_ranks((*pin.items(),), (*form.items(),))
    assignment, step = staged(plan, assign(found, plan))
    assert step is not None
    whole, mesh = dict(model.named_parameters()), plan.mesh.micro_batched(1)

    def make_part(leaf: LeafSpec) -> torch.Tensor:
        return part_of(whole[leaf.name].detach(), leaf.layout, mesh, 0).clone()

    with fake_process_group(mesh.size * ranks, mesh.size * rank):
        devices, pipeline = pipeline_mesh(mesh, "cpu", ranks)
        own = replace(step, pipeline=pipeline)
        module = build(model, found.captured, assignment, devices, 0, make_part, 0, own)
        expected = scheduled_overlaps(assignment, own.schedule, own.bounds, None if ranks == 1 else rank)
        yield module, module.shard((x,))[0], expected


MICRO: Mapping[str, Any] = {"micro_batches": 4, "recompute": "none", "data": 2}


@pytest.mark.parametrize("pin", [
    {**MICRO, "zero": 0},
    {**MICRO, "zero": 2},
    {**MICRO, "zero": 3, "recompute": "full"},
    {**MICRO, "zero": 3, "recompute": "full", "replicate": 2},
], ids=str)  # fmt: skip
def test_what_micro_batches_are_planned_to_do_is_what_a_trace_shows(pin: Mapping[str, Any]) -> None:
    ((expected, step),) = scheduled(pin, {"frozen": 1, "shifted": 1, "beside": 1})
    assert Counter(each.overlap for each in step) == Counter(expected)
    assert any(each.beside for each in expected) == ("recompute" in pin and pin["recompute"] == "full")


PIPELINE: Mapping[str, Any] = {"micro_batches": 4, "recompute": "none", "pipeline": 2}
ONE_F_ONE_B = {**PIPELINE, "schedule": "1f1b"}


@pytest.mark.parametrize("pin", [
    ONE_F_ONE_B,
    {**PIPELINE, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    {**PIPELINE, "schedule": "zero_bubble", "virtual_stages": 1},
    {**PIPELINE, "schedule": "2bw"},
    {**ONE_F_ONE_B, "data": 2, "zero": 3, "recompute": "full"},
], ids=str)  # fmt: skip
def test_what_a_pipeline_is_planned_to_do_is_what_a_trace_shows(pin: Mapping[str, Any]) -> None:
    for expected, step in scheduled(pin, {}, ranks=2):
        assert Counter(each.overlap for each in step) == Counter(expected)
        assert any(each.kind == "send" and each.beside for each in expected)


def test_messages_that_are_waited_for_at_once_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: the first of two ranks runs two forwards, and then backward and forward in turn."""
    put, receive = p2p.RankLinks.put, p2p.RankLinks._receive

    def put_and_wait(links: p2p.RankLinks, message: p2p.Message, tensors: Any) -> None:
        put(links, message, tensors)
        links._let_go(message)

    def receive_and_wait(links: p2p.RankLinks, sender: int) -> None:
        receive(links, sender)
        if sender in links._coming:
            links._put_aside(sender)

    expected, step = scheduled(ONE_F_ONE_B, {}, ranks=2)[0]
    sends = {str(each.of): [*map(str, each.beside)] for each in expected if each.kind == "send"}
    assert sends == {"1F0": ["0F1"], "1F1": ["0B0", "0F2"], "1F2": ["0B1", "0F3"], "1F3": ["0B2"]}
    for name, fault, kind in (("put", put_and_wait, "send"), ("_receive", receive_and_wait, "receive")):
        with monkeypatch.context() as patch:
            patch.setattr(p2p.RankLinks, name, fault)
            expected, step = scheduled(ONE_F_ONE_B, {}, ranks=2)[0]
        (row,) = (each for each in compare_overlaps(expected, [step], {}, None) if each.kind == kind)
        assert (row.planned, row.observed, len(row.differing)) == (4, 0, 4)
        if kind == "send":
            assert row.differing[1] == "of 1F1: planned beside 0B0+0F2, observed beside none"


class Arrived:
    """A message that is there at once, and says so, as over NCCL."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


def test_what_was_sent_is_let_go_by_answers_however_early_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """All forwards are sent before the first backward answers."""
    monkeypatch.setattr(torch.distributed, "isend", lambda *_: Arrived())
    for expected, step in scheduled({**PIPELINE, "schedule": "gpipe"}, {}, ranks=2):
        assert Counter(each.overlap for each in step) == Counter(expected)


def test_by_hand() -> None:
    """ZeRO 3: gathers are a block ahead both ways, and gradients are on their way beside one block of backward."""
    expected, _ = traced(ZERO_3, Residuals(layers=3))
    assert Counter(expected) == Counter(
        [
            Overlap("all_gather", "backward", 0, (1,)),
            Overlap("all_gather", "backward", 1, (2,)),
            Overlap("all_gather", "backward", 2, ()),
            Overlap("all_gather", "forward", 0, ()),
            Overlap("all_gather", "forward", 1, (0,)),
            Overlap("all_gather", "forward", 2, (1,)),
            Overlap("reduce_scatter", "backward", 0, ()),
            Overlap("reduce_scatter", "backward", 1, (0,)),
            Overlap("reduce_scatter", "backward", 2, (1,)),
        ]
    )


class Late(prefetch_gather.PrefetchedGather):
    """Is started by nobody but who asks for it."""

    def __init__(self, parts: Any, axis: Any, previous: Any = (), again: Any = ()):
        super().__init__(parts, axis)


class Waiting(parameters._Sent):
    """Waits for gradients where they are sent."""

    def put(self, work: Any, sent: torch.Tensor) -> None:
        super().put(work, sent)
        self.wait()


@pytest.mark.parametrize("name, fault, kind", [
    ("PrefetchedGather", Late, "all_gather"),
    ("_Sent", Waiting, "reduce_scatter"),
])  # fmt: skip
def test_what_is_not_as_planned_is_named(name: str, fault: type, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, name, fault)
    expected, step = traced(ZERO_3, Residuals(layers=3))
    assert {each.overlap.beside for each in step if each.overlap.kind == kind} == {()}
    for row in compare_overlaps(expected, [step], {number: f"block {number}" for number in range(5)}, 0.0):
        if row.kind != kind:
            assert (row.planned, row.differing) == (row.observed, ())
        elif (row.kind, row.phase) == ("all_gather", "forward"):
            assert row.differing == (
                "of block 1: planned beside block 0, observed beside none",
                "of block 2: planned beside block 1, observed beside none",
            )
        else:
            assert (row.planned, row.observed, len(row.differing)) == (2, 0, 2)
