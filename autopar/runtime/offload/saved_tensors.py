"""Saved tensors: which of what blocks save for backward leaves the device after forward.

Autograd's hooks put all that it saves into handles (:class:`autopar.runtime.autograd.saved_handle.SavedHandle`), by the
block whose forward runs; when a block is left, those of storages that nothing reads before backward go into the chunks
that the plan lets leave. In the first step parameters are looked for among what is saved, since in backward they may be
gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autopar.runtime.autograd.recompute import memory_of
from autopar.runtime.autograd.saved_handle import SavedHandle
from autopar.runtime.offload.activations import Activations
from autopar.runtime.offload.chunk_memory import Parameters, chunk_at
from autopar.runtime.offload.transfers import Transfers
from planner.base.errors import TransferScheduleError


class _LostHandle(SavedHandle):
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
            "schedule does not have it on the device: plan with pin 'offload' 'none', and report this"
        )


class SavedTensors:
    """What blocks save for backward, until their forward is over.

    Args:
        transfers: where the step is.
        parameters: the chunks of parameters, whose memory leaves with them.
        chunks: where what is saved may leave, by micro-batch, the block that is left, and the blocks that save it.

    Attributes:
        block: the number of the block whose forward runs.
    """

    def __init__(
        self,
        transfers: Transfers,
        parameters: Mapping[str, Parameters],
        chunks: Mapping[tuple[int | None, int, tuple[int, ...]], Activations],
    ):
        self.block: int | None = None
        self._transfers, self._parameters, self._chunks = transfers, parameters, chunks
        self._last_left: dict[tuple[int | None, tuple[int, ...]], int] = {}
        for micro_batch, left, savers in chunks:
            self._last_left[micro_batch, savers] = max(left, self._last_left.get((micro_batch, savers), left))
        self._held: dict[int, list[tuple[int, SavedHandle]]] = {}
        self._leaves: frozenset[int] = frozenset()
        self._is_watched = False

    @property
    def may_leave(self) -> bool:
        """Whether anything that blocks save leaves between forward and backward."""
        return bool(self._chunks)

    @contextmanager
    def running(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        """While the program runs, given these; for the first time, no backward may read a parameter that it has not."""
        pack = self.hold if self._is_watched else self._watched
        is_watching = self._chunks or not self._is_watched
        self._leaves = frozenset(map(memory_of, leaves)) if self._chunks else frozenset()
        try:
            with saved_tensors_hooks(pack, SavedHandle.read) if is_watching else nullcontext():
                yield
        finally:
            self.block = None
            self._held.clear()

    def hold(self, tensor: Tensor) -> SavedHandle:
        """Hold a tensor for backward, which a block saves."""
        held = SavedHandle(tensor)
        if self._chunks and self.block is not None:
            self._held.setdefault(memory_of(tensor), []).append((self.block, held))
        return held

    def stay(self) -> None:
        """What is still held for backward stays on the device."""
        self._held.clear()

    def leave(self, number: int, needed: Sequence[Tensor]) -> None:
        """The forward of a block is over: what is saved and not needed any more may leave.

        What the same blocks were planned to leave later waits: an operator may have saved a copy of its operand, which
        others need, where the plan has it save that.

        Args:
            needed: what later blocks read, or leaves the model.
        """
        self.block, micro_batch = None, self._transfers.micro_batch
        parameters = {memory_of(each.here) for each in self._parameters.values() if each.here is not None}
        stays, needed_memory = parameters | self._leaves, set(map(memory_of, needed))
        groups: dict[tuple[int, ...], list[list[SavedHandle]]] = {}
        for memory in [each for each in self._held if each not in needed_memory]:
            savers = tuple(sorted({saver for saver, _ in self._held[memory]}))
            is_planned = (micro_batch, number, savers) in self._chunks
            if not is_planned and number < self._last_left.get((micro_batch, savers), number):
                continue
            found = self._held.pop(memory)
            if memory not in stays:
                groups.setdefault(savers, []).append([held for _, held in found])
        for savers, storages in groups.items():
            if (micro_batch, number, savers) in self._chunks:
                self._chunks[micro_batch, number, savers].hold(storages)

    def _watched(self, tensor: Tensor) -> SavedHandle:
        """What autograd saves; of what is detached afterwards, and so never read, parameters may be gone."""
        self._is_watched = True
        chunk = chunk_at(self._parameters, tensor)
        if chunk is None or self.block is None:
            return self.hold(tensor)
        during, backward = (self._transfers.moment(self.block, is_backward) for is_backward in (False, True))
        is_there = chunk.name in self._transfers.uses(backward)
        return self.hold(tensor) if is_there else _LostHandle(tensor, chunk.name, during)
