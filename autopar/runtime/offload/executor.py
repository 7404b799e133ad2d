"""Carrier: moves chunks between the host and the device as a transfer schedule says, while the program runs.

It is told when the program, and then backward, enters a block (:mod:`autopar.runtime.offload.block_hooks`), and does
what stands in the transfer schedule on entering that moment. A micro-batched step
(:mod:`autopar.runtime.pipeline.executor`) says for which micro-batch.

A step that goes another way than the transfer schedule (backward of two calls, a second backward) is carried on demand
until
the next call: each block's chunks are fetched as it is entered. That is slower, and said once.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from autopar.runtime.autograd.recompute import memory_of
from autopar.runtime.autograd.saved_handle import Held
from autopar.runtime.host.disk import Disk
from autopar.runtime.offload.activations import Activations
from autopar.runtime.offload.chunk_memory import Arena, Chunk, Gradients, Homes, Link, Parameters, Sums
from autopar.runtime.offload.early_update import AFTER, Updates, let_go, may_update
from planner.analysis.memory.storages import BEFORE
from planner.analysis.offload.chunks import of_micro_batch, shared
from planner.base.errors import InputError, TransferScheduleError
from planner.solve.transfers import TransferSchedule

A_STEP = "a new step"
ON_DEMAND = (
    "a step goes another way than its transfer schedule (backward of several calls of the model at once, or a second "
    "time): "
    "until the next call parameters are fetched where they are used, which is slower"
)


@dataclass(frozen=True)
class Carried:
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
class CarriedSaved:
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


class _Lost(Held):
    """A tensor that autograd saved, and that is gone in backward.

    Args:
        name: the chunk in whose memory it is; ``during``: when it was saved.
    """

    __slots__ = ("_during", "_name")

    def __init__(self, tensor: Tensor, name: str, during: str):
        super().__init__(tensor)
        self._name, self._during = name, during

    def read(self) -> Tensor:
        """Refuse to.

        Raises:
            TransferScheduleError: always.
        """
        raise TransferScheduleError(
            f"backward reads some of {self._name} that autograd saved in {self._during}, but there the transfer "
            "schedule "
            "does not have it on the device: plan without pin 'offload', and report this"
        )


class Carrier:
    """What is on the device, and what the transfer schedule says of it.

    Args:
        table: the step's transfer schedule.
        carried: its chunks.
        moments: the names of the moments of each block's forward and backward, by its number.
        device: where the program computes.
        disk: where parameters and gradients are at home, if not in the host's memory.
        is_micro_batched: whether a step is several micro-batches, whose gradients are added up.
        saved: what leaves between forward and backward.
        homes: bytes of the memories at home in which that takes turns, falling.

    Attributes:
        arena: what the device may hold of chunks.
        bytes_moved: of the last whole step, by direction.
        micro_batch: the one that is computed of a micro-batched step.
        token: while the program runs, what every block takes as it is left, so that backward comes to parameters last.
    """

    def __init__(
        self,
        table: TransferSchedule,
        carried: Sequence[Carried],
        moments: Mapping[int, tuple[str, str]],
        device: torch.device,
        disk: Disk | None = None,
        is_micro_batched: bool = False,
        saved: Sequence[CarriedSaved] = (),
        homes: Sequence[int] = (),
    ):
        self.table, self.arena, self.link = table, Arena(table.budget_bytes), Link(device, disk)
        self.bytes_moved: dict[str, int] = {}
        self.is_micro_batched, self.micro_batch = is_micro_batched, 0 if is_micro_batched else None
        self._moments = moments
        self._parameters = {
            each.name: Parameters(each.name, each.bytes, each.starts, device, self.arena, self.link) for each in carried
        }
        self._gradients: dict[str, Gradients] = {}
        self._sharing = self._used_early() & {each.gradients for each in carried}
        sizes = shared(item.bytes for item in table.trace.items if item.name in self._sharing)
        self._shared = Homes(sizes, self.link, "gradients", self._settle_next)
        saved_homes = Homes(homes, self.link, "activations")
        saved_homes.make()
        self._saved = {
            (each.micro_batch, each.left, each.savers): Activations(
                each.name, each.sizes, device, self.arena, self.link, saved_homes
            )
            for each in saved
        }
        self._last_left: dict[tuple[int | None, tuple[int, ...]], int] = {}
        for micro_batch, left, savers in self._saved:
            self._last_left[micro_batch, savers] = max(left, self._last_left.get((micro_batch, savers), left))
        self._held: dict[int, list[tuple[int, Held]]] = {}
        self._leaves: frozenset[int] = frozenset()
        self._chunks: dict[str, Chunk] = {**self._parameters, **{each.name: each for each in self._saved.values()}}
        self._blocks = {number: [each for each in carried if number in each.entered] for number in moments}
        self._chunk_of = {name: each for each in carried for name in each.starts}
        self._given: Mapping[str, DTensor] = {}
        self._at: int | None = None
        self._absent: set[str] = set()
        self._on_demand = self._is_watched = False
        self._number: int | None = None
        self._checked: frozenset[int] = frozenset()
        self._device = device
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()
        self._updates: weakref.ref[Updates] | None = None
        self._is_updating: bool | None = None
        self._backward: int | None = None
        self.token: Tensor | None = None

    # ---- what it holds -----------------------------------------------------------------------------------------

    def carries(self, item: str) -> bool:
        """Whether a chunk of parameters moves, by its name in the transfer schedule; others stay on the device."""
        return item in self._parameters

    def holds(self, name: str) -> bool:
        """Whether a parameter is in a chunk."""
        return name in self._chunk_of

    def keep(self, name: str, part: Tensor) -> Tensor:
        """Take a parameter into its chunk; its new self, at home."""
        carried = self._chunk_of[name]
        chunk = self._parameters[carried.name]
        own = chunk.keep(name, part)
        if carried.gradients is not None and chunk.kept.keys() == carried.starts.keys():
            like = {each: chunk.kept[each] for each in carried.trained}
            gradients: Gradients
            if self.is_micro_batched:
                gradients = Sums(carried.gradients, like, chunk, self.arena, self.link)
            else:
                homes = self._shared if carried.gradients in self._sharing else None
                gradients = Gradients(carried.gradients, like, self.arena, self.link, homes)
            self._gradients[carried.name] = self._chunks[gradients.name] = gradients
        return own

    def begin_with(self, parameters: Mapping[str, DTensor]) -> None:
        """The program begins with these parameters.

        Raises:
            InputError: they are not what was kept, or others are trained than planned; or a step has not ended.
        """
        if self.updates is not None:
            self.updates.check_ended()
        elif self._updates is not None:  # the optimizer is no more
            let_go(parameters.values())
        self._given, self._is_updating = parameters, None
        for name, parameter in parameters.items():
            carried = self._chunk_of[name]
            if parameter._local_tensor.data_ptr() != self._parameters[carried.name].kept[name].data_ptr():
                raise InputError(
                    f"{name} is no longer where the plan keeps it: change parameters in place "
                    "(parameter.data.copy_(...), load_state_dict without assign=True) instead of replacing them"
                )
            if parameter.requires_grad and name not in carried.trained:
                raise InputError(
                    f"{name} requires a gradient, but the plan makes none: call requires_grad_(True) before planning"
                )

    # ---- the transfer schedule
    # -----------------------------------------------------------------------------------------

    def enter(self, number: int, is_backward: bool) -> None:
        """The program enters a block."""
        place = self.table.trace.place[self._moment(number, is_backward)]
        self._number = None if is_backward or number <= BEFORE else number
        if place == 0:
            self._begin()
        if is_backward:
            self._begin_backward()
        self._on_demand = self._on_demand or self._at is None or place <= self._at
        if is_backward and self._on_demand:
            self._check_first()
        if self._on_demand:
            self._demand(place)
        else:
            self._follow(place)
        moment = self.table.trace.moments[place]
        for item, _ in self.table.trace.used[place]:
            self._chunks[item.name].check_present(moment.name)

    def go_on_with(self, micro_batch: int) -> None:
        """A micro-batched step goes on with this micro-batch; what the one before still held for backward stays."""
        self.micro_batch = micro_batch
        self._held.clear()

    def called_block(self, number: int) -> str:
        """A block by its number and path."""
        return self._moments[number][0].removeprefix("forward ")

    def _moment(self, number: int, is_backward: bool) -> str:
        """The name of the moment in which a block is entered."""
        return of_micro_batch(self._moments[number][is_backward], self.micro_batch)

    def _begin(self) -> None:
        """A step begins: as the one before ended, or with the transfer schedule's beginning."""
        self.link.compute_here()
        if self._on_demand or self._at != len(self.table.entries) - 1:
            for gradients in self._gradients.values():
                gradients.forget()
            for chunk in self._chunks.values():
                self._send_home(chunk, A_STEP)
            self._absent = {name for name, state in self.table.beginning.items() if state == "leaving"}
            self.arena.enter(0)
            for name, state in self.table.beginning.items():
                if state in ("coming", "resident"):
                    self._chunks[name].act("fetch", A_STEP)
                if state == "resident":
                    self._chunks[name].act("fetched", A_STEP)
        self._at, self._on_demand = -1, False
        self.link.bytes_moved.clear()

    def _begin_backward(self) -> None:
        """Forget what a backward made that broke off, at the beginning of the next one, which makes it again."""
        backward = torch._C._current_graph_task_id()
        if not self.is_micro_batched and backward != self._backward:
            self._backward = backward
            for gradients in self._gradients.values():
                gradients.forget()

    def _follow(self, place: int) -> None:
        """Do what stands in the transfer schedule up to a moment; blocks that backward does not reach are passed."""
        assert self._at is not None
        for passed in range(self._at + 1, place + 1):
            moment = self.table.trace.moments[passed]
            self.arena.enter(moment.other_bytes)
            for action, name in self.table.entries[passed].actions():
                if action == "evicted" and name in self._absent:
                    self._absent.remove(name)
                else:
                    self._chunks[name].act(action, moment.name)
            self.arena.check(moment.name)
            if moment.on == "host":
                self._update(passed)
        self._at = place

    def _demand(self, place: int) -> None:
        """Have on the device what a moment uses, and nothing else."""
        if self._at is not None and self._at >= 0:
            warnings.warn(ON_DEMAND, stacklevel=3)
        moment, used = self.table.trace.moments[place], dict(self._uses(place))
        for name, chunk in self._chunks.items():
            if name not in used or chunk.state != "resident":
                self._send_home(chunk, moment.name)
        self.arena.enter(moment.other_bytes)
        for name, reads in used.items():
            chunk = self._chunks[name]
            if chunk.state == "home":
                chunk.act("fetch" if reads else "make", moment.name)
                if reads:
                    chunk.act("fetched", moment.name)
        self._at = None

    def _uses(self, place: int) -> list[tuple[str, bool]]:
        return [(item.name, use.reads) for item, use in self.table.trace.used[place]]

    def _send_home(self, chunk: Chunk, moment: str) -> None:
        """Take a chunk off the device; gradients that nothing else holds go to their home."""
        if chunk.state == "coming":
            chunk.act("fetched", moment)
        if chunk.state == "resident" and isinstance(chunk, Gradients) and not chunk.is_empty:
            chunk.act("evict", moment)
        if chunk.state == "resident":
            chunk.act("drop", moment)
        if chunk.state == "leaving":
            chunk.act("evicted", moment)

    # ---- the first step ----------------------------------------------------------------------------------------

    @contextmanager
    def running(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        """While the program runs, given these; for the first time, no backward may read a parameter that it has not."""
        pack = self.hold if self._is_watched else self._watched
        is_watching = self._saved or not self._is_watched
        self._leaves = frozenset(map(memory_of, leaves)) if self._saved else frozenset()
        try:
            with saved_tensors_hooks(pack, Held.read) if is_watching else nullcontext():
                yield
        finally:
            self.token, self._number = None, None
            self._held.clear()
        if not torch.is_grad_enabled():
            for chunk in self._parameters.values():  # then nothing else says when homes may be changed
                self.link.settle(chunk.started)

    def _at_memory(self, tensor: Tensor) -> Parameters | None:
        """The chunk whose memory on the device a tensor shares."""
        memory = memory_of(tensor)
        chunks = self._parameters.values()
        return next((each for each in chunks if each.here is not None and memory_of(each.here) == memory), None)

    def _watched(self, tensor: Tensor) -> Held:
        """What autograd saves; of what is detached afterwards, and so never read, parameters may be gone."""
        self._is_watched = True
        chunk = self._at_memory(tensor)
        if chunk is not None and self._number is not None:
            place = self.table.trace.place.get(self._moment(self._number, True))
            if place is None or chunk.name not in dict(self._uses(place)):
                return _Lost(tensor, chunk.name, self._moment(self._number, False))
        return self.hold(tensor)

    # ---- what blocks save --------------------------------------------------------------------------------------

    @property
    def lets_saved_leave(self) -> bool:
        """Whether anything that blocks save leaves between forward and backward."""
        return bool(self._saved)

    def hold(self, tensor: Tensor) -> Held:
        """Hold a tensor for backward, which a block saves."""
        held = Held(tensor)
        if self._saved and self._number is not None:
            self._held.setdefault(memory_of(tensor), []).append((self._number, held))
        return held

    def left(self, number: int, needed: Sequence[Tensor]) -> None:
        """The forward of a block is over: what is saved and not needed any more may leave.

        What the same blocks were planned to leave later waits: an operator may have saved a copy of its operand, which
        others need, where the plan has it save that.

        Args:
            needed: what later blocks read, or leaves the model.
        """
        self._number = None
        parameters = {memory_of(each.here) for each in self._parameters.values() if each.here is not None}
        stays, needed_memory = parameters | self._leaves, set(map(memory_of, needed))
        groups: dict[tuple[int, ...], list[list[Held]]] = {}
        for memory in [each for each in self._held if each not in needed_memory]:
            savers = tuple(sorted({saver for saver, _ in self._held[memory]}))
            place = self.micro_batch, number, savers
            if place not in self._saved and number < self._last_left.get((self.micro_batch, savers), number):
                continue
            found = self._held.pop(memory)
            if memory not in stays:
                groups.setdefault(savers, []).append([held for _, held in found])
        for savers, storages in groups.items():
            if (self.micro_batch, number, savers) in self._saved:
                self._saved[self.micro_batch, number, savers].hold(storages)

    def check_leaving(self, number: int, values: Sequence[Tensor]) -> None:
        """Raise :class:`TransferScheduleError` if a block hands on the memory of parameters that are its own."""
        for value in values if not self._is_checked(number) else ():
            chunk = self._at_memory(value)
            if chunk is not None and chunk.name in {each.name for each in self._blocks.get(number, ())}:
                raise TransferScheduleError(
                    f"a block hands on a view of {chunk.name}, which may be gone when it is read: plan without pin "
                    "'offload', and report this"
                )

    def _is_checked(self, number: int) -> bool:
        """Whether a block's results were looked at before; they are of the same memory every time."""
        seen, self._checked = number in self._checked, self._checked | {number}
        return seen

    def apart(self, value: Any) -> Any:
        """A result of the program in memory of its own, where it shares that of parameters."""
        return value.clone() if isinstance(value, Tensor) and self._at_memory(value) is not None else value

    # ---- what the program and autograd call --------------------------------------------------------------------

    def values(self, number: int) -> tuple[Tensor, ...]:
        """The parameters that a block hands to the program, on the device."""
        return tuple(value for each in self._blocks[number] for value in self._parameters[each.name].values())

    def adding(self, number: int) -> tuple[Tensor, ...]:
        """The same with micro-batches, where backward adds up their gradients as soon as it has made them."""
        found = (leaf for each in self._blocks[number] for leaf in self._parameters[each.name].leaves.items())
        return tuple(leaf.requires_grad_(self._given[name].requires_grad) for name, leaf in found)

    def versions(self, number: int) -> list[tuple[str, Tensor, int]]:
        """Parameters of chunks that backward of a block may read, and how often each was changed in place so far."""
        place = self.table.trace.place.get(self._moment(number, True))
        read = [name for name, reads in self._uses(place) if reads] if place is not None else []
        chunks = (self._parameters[name] for name in read if name in self._parameters)
        found = ((name, self._given[name]) for chunk in chunks for name in chunk.starts)
        return [(name, parameter, parameter._version) for name, parameter in found]

    def check_unchanged(self, versions: Sequence[tuple[str, Tensor, int]]) -> None:
        """Raise :class:`InputError` if parameters that backward of a block may read were changed since."""
        if self.updates is not None and self.updates.is_over:
            self._check_first()
        changed = [name for name, parameter, version in versions if parameter._version != version]
        if changed:
            raise InputError(
                f"{changed[0]}{f' and {len(changed) - 1} more' if len(changed) > 1 else ''} changed in place between "
                "forward and backward, which needs the values of forward: call backward() before optimizer.step()"
            )

    def made(self, number: int, grads: Sequence[Tensor | None]) -> None:
        """Backward made the gradients of what a block was handed."""
        found = dict(zip((name for each in self._blocks[number] for name in each.starts), grads, strict=True))
        for each in self._blocks[number]:
            if each.name in self._gradients:
                gradients = self._gradients[each.name]
                gradients.check_present("backward")
                gradients.made({name: found[name] for name in each.trained})

    def finish(self, call: Any) -> dict[str, Tensor]:
        """Backward of a call is over: gradients, at home, by name; without those by which parameters were updated."""
        if not self._on_demand and self._at is not None and self._at >= 0:
            self._follow(len(self.table.entries) - 1)
            self.bytes_moved = dict(self.link.bytes_moved)
        else:
            for gradients in self._gradients.values():
                self._send_home(gradients, "the end of backward")
        self._calls.discard(call)
        found = self._taken()
        if self.updates is not None and self.updates.is_begun:
            self.updates.finish()
        return found

    def end_micro_batches(self) -> dict[str, Tensor]:
        """All micro-batches run their backward: the sums of their gradients, at home, by name."""
        self._follow(len(self.table.entries) - 1)
        self.bytes_moved = dict(self.link.bytes_moved)
        return self._taken()

    def _taken(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for gradients in self._gradients.values():
            found.update(gradients.take())
        return found

    # ---- updates in backward -----------------------------------------------------------------------------------

    def _used_early(self) -> set[str]:
        """The items that the host uses before all blocks run their backward."""
        places = (place for place, moment in enumerate(self.table.trace.moments[:-1]) if moment.on == "host")
        return {item.name for place in places for item, _ in self.table.trace.used[place]}

    @property
    def updates_in_backward(self) -> bool:
        """Whether the host updates some chunks before all blocks run their backward."""
        return any(moment.on == "host" for moment in self.table.trace.moments[:-1])

    @property
    def updates(self) -> Updates | None:
        """What updates in backward, if an optimizer does."""
        return None if self._updates is None else self._updates()

    def update_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer update in backward, in place of the one before, for as long as it lives."""
        if self.updates is not None:
            self.updates.replace()
        self._updates = weakref.ref(Updates(optimizer, self._device))

    def _settle_next(self) -> bool:
        """Wait for an update that holds gradients at home; whether there was one."""
        return self.updates is not None and self.updates.settle_next()

    def settle(self) -> None:
        """Wait for updates that go on after a backward that was not finished: parameters are left alone then."""
        if self.updates is not None:
            self.updates.settle()

    def called(self, call: Any) -> None:
        """A call of the model, of which backward may come: its node of autograd."""
        self._calls.add(call)

    def _update(self, place: int) -> None:
        """The host computes: gradients that it uses go to the optimizer as soon as they are at home."""
        if self._is_updating is None:
            self._is_updating = self.updates is not None and may_update(self._calls, self._given)
            if self._is_updating:
                self._calls.clear()  # no graph so far can be undone from here on
        for name, _ in self._uses(place) if self._is_updating else ():
            chunk = self._chunks[name]
            if isinstance(chunk, Gradients) and self.updates is not None:
                found, arriving = chunk.leave()
                given = {self._given[each]: grad for each, grad in found.items()}
                grads: dict[DTensor, Tensor] = {
                    each: DTensor(grad, each._spec, requires_grad=False) for each, grad in given.items()
                }
                self.updates.start(name, grads, arriving)

    def _check_first(self) -> None:
        """Raise :class:`InputError` if the backward before has updated parameters, and another one begins."""
        if self.updates is not None and self.updates.is_begun:
            raise InputError(
                "a second backward in one step, whose first one has already updated parameters (pin 'update' is "
                f"'backward'): {AFTER}"
            )
