"""Simulates every rank of a small mesh in one process, without launching anything.

A fake process group gives the mesh its groups; ``LocalTensorMode`` holds all ranks' tensors at once and
carries out the collectives between them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.capture.capture import Captured
from autopar.emit.build import MicroBatched, build
from autopar.graph.slabs import joined
from autopar.runtime.module import ParallelModule
from autopar.runtime.spmd.interface import LeafSpec
from autopar.runtime.spmd.mesh import coordinates, device_mesh, part_of, put_part
from planner.base.errors import PlanError
from planner.formulation.assignment import Assignment
from planner.ir.layout import Layout, Mesh, P, R


@contextlib.contextmanager
def fake_process_group(size: int, rank: int = 0) -> Iterator[None]:
    """A process group of ``size`` ranks that moves no data; this process is one of them."""
    if dist.is_initialized():
        raise PlanError("a process group is already initialised: call autopar.verify outside of torchrun")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Simulation:
    """A parallelized model whose ranks all live in this process.

    Use as a context: inside it, ``module`` is the parallel module, holding every rank's tensors, and of a pipeline all
    stages.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        assignment: Assignment,
        seed: int = 0,
        micro_batched: MicroBatched | None = None,
    ):
        self.mesh: Mesh = assignment.space.mesh.micro_batched(1)
        self._micro_batched = micro_batched
        self._model, self._captured, self._assignment, self._seed = model, captured, assignment, seed
        self._stack = contextlib.ExitStack()
        self.module: ParallelModule

    def __enter__(self) -> Simulation:
        full = {name: t.detach() for name, t in _tensors(self._model).items()}
        full = joined(self._captured.slabs, full)
        full.update(dict(self._captured.constants))
        self._stack.enter_context(fake_process_group(self.mesh.size))
        self.mode = self._stack.enter_context(LocalTensorMode(self.mesh.size))

        def make_part(leaf: LeafSpec) -> Tensor:
            return self.parts(full[leaf.name], leaf.layout)

        try:
            mesh = device_mesh(self.mesh, "cpu")
            self.module = build(
                self._model, self._captured, self._assignment, mesh, 0, make_part, self._seed, self._micro_batched
            )
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where the blocks are cut into stages, if they are."""
        return () if self._micro_batched is None else self._micro_batched.bounds

    @property
    def late(self) -> tuple[int, ...]:
        """Of how many micro-batches each stage finds the gradients of weights later than others."""
        return () if self._micro_batched is None else self._micro_batched.schedule.late

    @property
    def placed(self) -> tuple[int, ...]:
        """The rank of every stage, as if they were not all in this process."""
        return (0,) if self._micro_batched is None else self._micro_batched.schedule.rank_of

    @property
    def is_late(self) -> bool:
        """Whether a step hands over the gradients of the step before."""
        return self._micro_batched is not None and self._micro_batched.schedule.overlaps

    def parts(self, full: Tensor, layout: Layout) -> Tensor:
        """Every rank's part of a global tensor."""
        return self.mode.rank_map(lambda rank: part_of(full.detach(), layout, self.mesh, rank))

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Every rank's part of a global batch."""
        interface = self.module.interface
        layouts = {leaf.name: leaf.layout for leaf in interface.leaves if leaf.kind == "input"}
        flat = interface.flatten(args, dict(kwargs))
        parts = [
            value if name is None else self.parts(value, layouts[name])
            for name, value in zip(interface.input_names, flat, strict=True)
        ]
        return pytree.tree_unflatten(parts, interface.in_spec)

    def whole(self, value: Tensor, layout: Layout, shape: tuple[int, ...]) -> Tensor:
        """Put a global tensor together from every rank's part; terms of a sum are added.

        Raises:
            DivergedError: ranks that should hold the same values do not.
        """
        with self.mode.disable():
            local = value.to_local() if isinstance(value, DTensor) else value
            each = (
                local._local_tensors if isinstance(local, LocalTensor) else dict.fromkeys(range(self.mesh.size), local)
            )
            parts = {rank: part.detach() for rank, part in each.items()}
            summed = [i for i, t in enumerate(layout) if t == P]
            kept = tuple(R if t == P else t for t in layout)
            full = torch.zeros(shape, dtype=parts[0].dtype)
            for terms in self._ranks_by_coordinate(summed):
                term = torch.empty(shape, dtype=parts[0].dtype)
                for rank in terms:
                    put_part(term, parts[rank], kept, self.mesh, rank)
                for rank in terms:
                    _same(part_of(term, kept, self.mesh, rank), parts[rank], rank)
                full = full + term if summed else term
            return full

    def _ranks_by_coordinate(self, axes: list[int]) -> list[list[int]]:
        """Ranks grouped by where they stand on ``axes``."""
        grouped: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.mesh.size):
            place = coordinates(self.mesh, rank)
            grouped.setdefault(tuple(place[axis] for axis in axes), []).append(rank)
        return list(grouped.values())


class DivergedError(AssertionError):
    """Ranks that should hold the same values do not."""


def _same(expected: Tensor, got: Tensor, rank: int) -> None:
    exact = not (got.is_floating_point() or got.is_complex())
    # Replicas are computed in the same order on every rank, collectives included.
    if not (
        torch.equal(expected, got) if exact else torch.allclose(expected, got, rtol=1e-9, atol=1e-12, equal_nan=True)
    ):
        raise DivergedError(f"rank {rank} holds other values than another rank that should hold the same")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
