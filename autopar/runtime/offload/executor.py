"""Offload executor: what the running program asks of model data that has its home on the host or on disk.

It is told when the program, and then backward, enters a block (:mod:`autopar.runtime.offload.block_hooks`), and has
:class:`~autopar.runtime.offload.transfers.Transfers` do what stands in the transfer schedule there. A micro-batched
step (:mod:`autopar.runtime.pipeline.executor`) says for which micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.runtime.autograd.saved_handle import SavedHandle
from autopar.runtime.host.disk import OffloadFiles
from autopar.runtime.offload.activations import Activations
from autopar.runtime.offload.chunk_memory import ChunkMemory, CopyEngine, Gradients, Homes, Parameters, Sums, chunk_at
from autopar.runtime.offload.saved_tensors import SavedTensors
from autopar.runtime.offload.transfers import Transfers
from autopar.runtime.optim.early_update import EarlyUpdates, in_thread
from planner.analysis.memory.storages import BEFORE
from planner.analysis.offload.chunks import shared
from planner.base.errors import InputError, TransferScheduleError
from planner.solve.transfers import TransferSchedule


@dataclass(frozen=True)
class ChunkSpec:
    """A chunk of a plan.

    Attributes:
        name: its item of parameters.
        bytes: of its parameters, with what lies between them.
        starts: the byte at which each parameter begins, by name.
        entered: the number of the block that hands them to the program, or those of what comes before the blocks of
            stages.
        gradients: its item of gradients, if backward makes any.
        trained: the names of the parameters that have gradients.
    """

    name: str
    bytes: int
    starts: Mapping[str, int]
    entered: tuple[int, ...]
    gradients: str | None
    trained: Sequence[str]


@dataclass(frozen=True)
class SavedSpec:
    """What blocks save for backward, in a chunk of its own.

    Attributes:
        name: its item.
        sizes: bytes of its storages.
        left: the number of the block in whose forward it is left.
        savers: the numbers of the blocks that save it.
        micro_batch: in whose forward and backward they do; ``None``: a step has but one.
    """

    name: str
    sizes: tuple[int, ...]
    left: int
    savers: tuple[int, ...]
    micro_batch: int | None = None


class OffloadExecutor:
    """Hands blocks their parameters on the device, and takes the gradients that backward makes of them.

    Args:
        table: the step's transfer schedule.
        chunks: its chunks of parameters and gradients.
        moments: the names of the moments of each block's forward and backward, by its number.
        device: where the program computes.
        disk: where parameters and gradients are at home, if not in the host's memory.
        micro_batched: whether a step is several micro-batches, whose gradients are added up.
        saved: what leaves between forward and backward.
        homes: bytes of the memories at home in which that takes turns, falling.

    Attributes:
        transfers: what moves when.
        saved: what blocks save for backward.
        early: updates that the host makes while backward runs.
        token: while the program runs, what every block takes as it is left, so that backward comes to parameters last.
    """

    def __init__(
        self,
        table: TransferSchedule,
        chunks: Sequence[ChunkSpec],
        moments: Mapping[int, tuple[str, str]],
        device: torch.device,
        disk: OffloadFiles | None = None,
        micro_batched: bool = False,
        saved: Sequence[SavedSpec] = (),
        homes: Sequence[int] = (),
    ):
        self.engine, self.micro_batched = CopyEngine(device, disk), micro_batched
        self.early = EarlyUpdates(partial(in_thread, device))
        self.transfers = Transfers(table, moments, self.engine, micro_batched, partial(_update, self.early))
        self.parameters = {
            each.name: Parameters(each.name, each.bytes, each.starts, device, self.transfers.arena, self.engine)
            for each in chunks
        }
        self.gradients: dict[str, Gradients] = {}
        self._sharing = self.transfers.used_early & {each.gradients for each in chunks}
        sizes = shared(item.bytes for item in table.trace.items if item.name in self._sharing)
        self._shared = Homes(sizes, self.engine, "gradients", self.early.settle_next)
        saved_homes = Homes(homes, self.engine, "activations")
        saved_homes.make()
        leaving = {
            (each.micro_batch, each.left, each.savers): Activations(
                each.name, each.sizes, device, self.transfers.arena, self.engine, saved_homes
            )
            for each in saved
        }
        self.saved = SavedTensors(self.transfers, self.parameters, leaving)
        self.transfers.chunks |= {**self.parameters, **{each.name: each for each in leaving.values()}}
        self.token: Tensor | None = None
        self._blocks = {number: [each for each in chunks if number in each.entered] for number in moments}
        self._chunk_of = {name: each for each in chunks for name in each.starts}
        self._given: Mapping[str, DTensor] = {}
        self._checked: set[int] = set()
        self._backward: int | None = None

    # ---- parameters at home ----------------------------------------------------------------------------------------

    def moves(self, item: str) -> bool:
        """Whether a chunk of parameters moves, by its name in the transfer schedule; others stay on the device."""
        return item in self.parameters

    def holds(self, name: str) -> bool:
        """Whether a parameter is in a chunk."""
        return name in self._chunk_of

    def keep(self, name: str, part: Tensor) -> Tensor:
        """Take a parameter into its chunk; its new self, at home."""
        spec = self._chunk_of[name]
        chunk = self.parameters[spec.name]
        own = chunk.keep(name, part)
        if spec.gradients is not None and chunk.kept.keys() == spec.starts.keys():
            like = {each: chunk.kept[each] for each in spec.trained}
            gradients: Gradients
            if self.micro_batched:
                gradients = Sums(spec.gradients, like, chunk, self.transfers.arena, self.engine)
            else:
                homes = self._shared if spec.gradients in self._sharing else None
                gradients = Gradients(spec.gradients, like, self.transfers.arena, self.engine, homes)
            self.gradients[spec.name] = self.transfers.chunks[gradients.name] = gradients
        return own

    @property
    def updates_in_backward(self) -> bool:
        """Whether the host updates some chunks before all blocks run their backward."""
        return any(moment.on == "host" for moment in self.transfers.table.trace.moments[:-1])

    def begin_with(self, parameters: Mapping[str, DTensor]) -> None:
        """The program begins with these parameters.

        Raises:
            InputError: they are not what was kept, or others are trained than planned; or a step has not ended.
        """
        self.early.begin_with(parameters)
        self._given = parameters
        for name, parameter in parameters.items():
            spec = self._chunk_of[name]
            if parameter._local_tensor.data_ptr() != self.parameters[spec.name].kept[name].data_ptr():
                raise InputError(
                    f"{name} is no longer where the plan keeps it: change parameters in place "
                    "(parameter.data.copy_(...), load_state_dict without assign=True) instead of replacing them"
                )
            if parameter.requires_grad and name not in spec.trained:
                raise InputError(
                    f"{name} requires a gradient, but the plan makes none: call requires_grad_(True) before planning"
                )

    # ---- forward and backward --------------------------------------------------------------------------------------

    @contextmanager
    def running(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        """While the program runs, given these."""
        try:
            with self.saved.running(leaves):
                yield
        finally:
            self.token = None
        if not torch.is_grad_enabled():
            for chunk in self.parameters.values():  # then nothing else says when homes may be changed
                self.engine.settle(chunk.started)

    def enter(self, number: int, is_backward: bool) -> None:
        """The program, or backward, enters a block."""
        place = self.transfers.table.trace.place[self.transfers.moment(number, is_backward)]
        self.saved.block = None if is_backward or number <= BEFORE else number
        if is_backward:
            self._forget_if_new()
        self.transfers.begin_at(place)
        if is_backward and self.transfers.on_demand:
            self.early.check_first()
        self.transfers.enter(place)

    def hold(self, tensor: Tensor) -> SavedHandle:
        """Hold a tensor for backward, which a block saves."""
        return self.saved.hold(tensor)

    def go_on_with(self, micro_batch: int) -> None:
        """A step goes on with this micro-batch; what the one before still held for backward stays."""
        self.transfers.micro_batch = micro_batch
        self.saved.stay()

    def values(self, number: int) -> tuple[Tensor, ...]:
        """The parameters that a block hands to the program, on the device."""
        return tuple(value for each in self._blocks[number] for value in self.parameters[each.name].values())

    def adding(self, number: int) -> tuple[Tensor, ...]:
        """The same of a micro-batch, where backward adds up their gradients as soon as it has made them."""
        found = (leaf for each in self._blocks[number] for leaf in self.parameters[each.name].leaves.items())
        return tuple(leaf.requires_grad_(self._given[name].requires_grad) for name, leaf in found)

    def made(self, number: int, grads: Sequence[Tensor | None]) -> None:
        """Backward made the gradients of what a block was handed."""
        found = dict(zip((name for each in self._blocks[number] for name in each.starts), grads, strict=True))
        for each in self._blocks[number]:
            if each.name in self.gradients:
                gradients = self.gradients[each.name]
                gradients.check_present("backward")
                gradients.made({name: found[name] for name in each.trained})

    def finish(self, call: Any) -> dict[str, Tensor]:
        """Backward of a call is over: gradients, at home, by name; without those by which parameters were updated."""
        self.transfers.end()
        found = self._taken()
        self.early.finish(call)
        return found

    def finish_micro_batches(self) -> dict[str, Tensor]:
        """All micro-batches run their backward: the sums of their gradients, at home, by name."""
        self.transfers.follow_to_end()
        return self._taken()

    def _taken(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for gradients in self.gradients.values():
            found.update(gradients.take())
        return found

    def _forget_if_new(self) -> None:
        """Forget what a backward made that broke off, at the beginning of the next one, which makes it again."""
        backward = torch._C._current_graph_task_id()
        if not self.micro_batched and backward != self._backward:
            self._backward = backward
            self.transfers.forget_gradients()

    # ---- what must not be read or changed in between ---------------------------------------------------------------

    def versions(self, number: int) -> list[tuple[str, Tensor, int]]:
        """Parameters of chunks that backward of a block may read, and how often each was changed in place so far."""
        uses = self.transfers.uses(self.transfers.moment(number, True))
        chunks = (self.parameters[name] for name, reads in uses.items() if reads and name in self.parameters)
        found = ((name, self._given[name]) for chunk in chunks for name in chunk.starts)
        return [(name, parameter, parameter._version) for name, parameter in found]

    def check_unchanged(self, versions: Sequence[tuple[str, Tensor, int]]) -> None:
        """Raise :class:`InputError` if parameters that backward of a block may read were changed since."""
        self.early.check_not_over()
        changed = [name for name, parameter, version in versions if parameter._version != version]
        if changed:
            raise InputError(
                f"{changed[0]}{f' and {len(changed) - 1} more' if len(changed) > 1 else ''} changed in place between "
                "forward and backward, which needs the values of forward: call backward() before optimizer.step()"
            )

    def check_leaving(self, number: int, values: Sequence[Tensor]) -> None:
        """Raise :class:`TransferScheduleError` if a block hands on the memory of parameters that are its own; looked at
        once, since results are of the same memory every time.
        """
        if number in self._checked:
            return
        self._checked.add(number)
        own = {each.name for each in self._blocks.get(number, ())}
        for value in values:
            chunk = chunk_at(self.parameters, value)
            if chunk is not None and chunk.name in own:
                raise TransferScheduleError(
                    f"a block hands on a view of {chunk.name}, which may be gone when it is read: plan without pin "
                    "'offload', and report this"
                )

    def apart(self, value: Any) -> Any:
        """A result of the program in memory of its own, where it shares that of parameters."""
        is_shared = isinstance(value, Tensor) and chunk_at(self.parameters, value) is not None
        return value.clone() if is_shared else value


def _update(early: EarlyUpdates, chunks: Iterable[ChunkMemory]) -> None:
    """The host computes: gradients that it uses go to the optimizer as soon as they have arrived."""
    for chunk in chunks if early.updates() else ():
        if isinstance(chunk, Gradients):
            found, arriving = chunk.leave()
            grads = {early.given[name]: grad for name, grad in found.items()}
            early.use(chunk.name, grads, partial(CopyEngine.settle, arriving))
