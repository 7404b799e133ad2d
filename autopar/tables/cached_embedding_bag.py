"""An embedding bag whose table has its home on the host, or on disk, and on the device only the rows that are hot.

A row is one piece of memory: its weights, and what the optimizer keeps of them. Before a look-up the rows that are
missing are fetched, in place of those that are looked up least often; rows that were updated are written back when they
leave, on a thread: what is to be read from home, and written there, goes on in order while the device computes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autopar.operators.embedding_slabs import checked_ids
from autopar.tables.row_optimizers import ROW_OPTIMIZERS, Name
from autopar.tables.table_home import PIECE, TableHome
from planner.base.errors import InputError
from planner.tables.cached_rows import CachePrediction, predict_cache
from planner.tables.embedding_table import EmbeddingTable

ABSENT = -1


@dataclass
class MovedRows:
    """Distinct rows of all look-ups so far.

    Attributes:
        looked_up: of each batch, added up.
        fetched: of these, that were not on the device.
        written_back: rows that had been updated when they left.
    """

    looked_up: int = 0
    fetched: int = 0
    written_back: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of looked-up rows that were on the device."""
        return 1 - self.fetched / self.looked_up if self.looked_up else 1.0


@dataclass(frozen=True)
class _Looked:
    """A look-up until the next step: the slots of its rows, and a copy of the rows, which gets their gradient."""

    slots: Tensor
    rows: Tensor


@dataclass(frozen=True)
class _Fetching:
    """Rows that are on their way, as they are at home."""

    rows: Tensor
    values: Future[Tensor]


class CachedEmbeddingBag(nn.Module):
    """``nn.EmbeddingBag`` that trains its own rows: :meth:`step` after backward takes the place of an optimizer's.

    It runs in one process, beside what a plan runs, and not in a captured model.

    Attributes:
        table: sizes; its histogram says which rows are hot. Without one they are those that were looked up most often.
        capacity: rows that the device holds.
        mode: how bags are pooled.
        options: of the optimizer.
        moved: how many rows were looked up and moved.
    """

    def __init__(
        self,
        table: EmbeddingTable,
        capacity: int,
        *,
        optimizer: Name = "adagrad",
        mode: Literal["sum", "mean", "max"] = "sum",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        path: str | os.PathLike[str] | None = None,
        **options: Any,
    ):
        """``path``: a new file, in which the table has its home; ``options``: of the optimizer."""
        super().__init__()
        if optimizer not in ROW_OPTIMIZERS:
            raise InputError(f"there is no optimizer {optimizer!r} of rows; there are: {', '.join(ROW_OPTIMIZERS)}")
        self._optimizer = ROW_OPTIMIZERS[optimizer]
        if unknown := options.keys() - self._optimizer.defaults.keys():
            known = ", ".join(self._optimizer.defaults)
            raise InputError(f"{optimizer} has no option {min(unknown)!r}; it has: {known}")
        lr = options.get("lr", 0.0)
        if isinstance(lr, bool) or not isinstance(lr, int | float) or not lr >= 0:
            raise InputError(f"lr of table {table.name!r} is {lr!r}; give a number from 0")
        if mode not in ("sum", "mean", "max"):
            raise InputError(f"mode is 'sum', 'mean' or 'max', not {mode!r}")
        if not 0 < capacity <= table.rows:
            raise InputError(
                f"table {table.name!r} has {table.rows} rows, of which a device holds 1 to {table.rows}, not {capacity}"
            )
        try:
            device = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as error:
            raise InputError(
                f"device of table {table.name!r} is {str(device)!r}, and holds no tensors here ({str(error)[:80]}): "
                "give 'cpu', 'cuda' or the like"
            ) from error
        if path is not None and not os.path.isdir(folder := os.path.dirname(os.path.abspath(path))):
            raise InputError(f"there is no folder {folder!r} for the file of table {table.name!r}: make it first")
        if path is not None and os.path.exists(path):
            raise InputError(
                f"there is a file {os.fspath(path)!r}, which the home of table {table.name!r} would write over: give "
                "another path, or remove it; what was trained goes on from a state_dict"
            )
        _refuse_ranks(table)
        self.table, self.capacity, self.mode = table, capacity, mode
        self.options = {**self._optimizer.defaults, **options}
        self.moved = MovedRows()
        widths = (table.features, *self._optimizer.widths(table.features))
        self._columns = [slice(*pair) for pair in pairwise(accumulate(widths, initial=0))]
        self._home = TableHome(table.rows, table.features, sum(widths), dtype, path)
        self._cache = torch.zeros(capacity, sum(widths), dtype=dtype, device=device)
        self._slot_of = torch.full((table.rows,), ABSENT)
        self._row_in = torch.full((capacity,), ABSENT)
        self._is_updated = torch.zeros(capacity, dtype=torch.bool)
        self._is_counted = table.histogram is None
        self._heat = torch.arange(table.rows - 1, -1, -1)  # of equally hot rows the first is hotter
        if not self._is_counted:
            hottest = torch.from_numpy(table.frequencies()).sort(descending=True, stable=True).indices
            self._heat[hottest] = self._heat.clone()
        self._heat_in = torch.full((capacity,), ABSENT)
        self._steps = 0
        self._looked: list[_Looked] = []
        self._fetching: _Fetching | None = None
        self._behind: Future[Any] | None = None
        self.reset_parameters()

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        table, name = self.table, next(n for n, each in ROW_OPTIMIZERS.items() if each is self._optimizer)
        cached = f"{self.capacity:,} of {table.rows:,} rows cached on {self._cache.device}"
        return f"{table.name!r}, {cached}, features={table.features}, mode={self.mode!r}, optimizer={name!r}"

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Standard normal weights, as ``nn.EmbeddingBag`` has, with a new optimizer state.

        They follow from one number that torch's generator draws, and each row's are made when it is first fetched.
        """
        self._settle()
        self._home.begin(int(torch.randint(2**63 - 1, ())))
        self._begin()

    @torch.no_grad()
    def load_weight(self, weight: Tensor) -> None:
        """Take over the weights ``[rows, features]`` of a table, with a new optimizer state.

        Raises:
            InputError: they have another shape or dtype.
        """
        self._check_like(weight, self.table.features, "weights")
        self._settle()
        self._home.fill(weight)
        self._begin()

    def _begin(self, steps: int = 0) -> None:
        """Put the hottest rows on the device, where a histogram says which these are."""
        self._looked, self._fetching, self._steps = [], None, steps
        self._slot_of.fill_(ABSENT)
        self._row_in.fill_(ABSENT)
        self._heat_in.fill_(ABSENT)
        self._is_updated.zero_()
        if not self._is_counted:
            hottest = self._heat.topk(self.capacity).indices
            for rows, slots in zip(hottest.split(PIECE), torch.arange(self.capacity).split(PIECE), strict=True):
                self._put(rows, slots, self._home[rows])

    @property
    def weight(self) -> Tensor:
        """All weights ``[rows, features]``, as they are at home after :meth:`write_back`; a file is then full."""
        self.write_back()
        return self._home.whole()[:, self._columns[0]]

    def get_extra_state(self) -> dict[str, Any]:
        """The table with the optimizer's state, for ``state_dict``."""
        self.write_back()
        return {"rows": self._home.whole(), "steps": self._steps}

    @torch.no_grad()
    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`get_extra_state` gave, of a table of this size, dtype and optimizer.

        Raises:
            InputError: it is of another.
        """
        self._check_like(state["rows"], self._cache.shape[1], "weights with the optimizer's state")
        self._settle()
        self._home.fill(state["rows"])
        self._begin(state["steps"])

    def _check_like(self, given: Tensor, width: int, what: str) -> None:
        shape, dtype = (self.table.rows, width), self._cache.dtype
        if given.shape != shape or given.dtype != dtype:
            raise InputError(
                f"table {self.table.name!r} takes {what} of shape {list(shape)} in {dtype}, not "
                f"{list(given.shape)} in {given.dtype}: make the table with their sizes, dtype and optimizer"
            )

    def predict(self, batch: int) -> CachePrediction:
        """What batches of so many samples are expected to move, by the histogram."""
        kept = self._cache.shape[1] / self.table.features - 1
        return predict_cache(self.table, self.capacity, batch, kept)

    def forward(self, ids: Tensor) -> Tensor:
        """``ids[b, pooling]`` -> bags ``[b, features]`` on the cache's device."""
        rows, inverse = self._distinct(ids)
        if self._is_counted:
            self._heat[rows] += torch.bincount(inverse.flatten(), minlength=len(rows)) * self.table.rows
        slots = self._resident(rows).to(self._cache.device)
        values = self._cache[slots, self._columns[0]].requires_grad_(torch.is_grad_enabled())
        if values.requires_grad:
            self._looked.append(_Looked(slots, values))
        return F.embedding_bag(inverse.to(self._cache.device), values, mode=self.mode)

    def prefetch(self, ids: Tensor) -> None:
        """Read the rows that the next batch misses from home while this one computes.

        Call it between the look-ups of both.
        """
        rows, _ = self._distinct(ids)
        missing = rows[self._slot_of[rows] == ABSENT]
        self._fetching = _Fetching(missing, self._submit(lambda: self._home[missing]))

    @torch.no_grad()
    def step(self) -> None:
        """Update the rows that were looked up since the last step, and got gradients, by these."""
        _refuse_ranks(self.table)
        looked = [(each.slots, each.rows.grad) for each in self._looked if each.rows.grad is not None]
        self._looked = []
        if not looked:
            return
        self._steps += 1
        slots, grad = looked[0]
        if len(looked) > 1:
            slots, inverse = torch.unique(torch.cat([slots for slots, _ in looked]), return_inverse=True)
            grad = grad.new_zeros(len(slots), self.table.features)
            for (_, term), places in zip(looked, inverse.split([len(term) for _, term in looked]), strict=True):
                grad.index_add_(0, places, term)
        rows = self._cache[slots]
        weight, *state = (rows[:, columns] for columns in self._columns)
        self._optimizer.update(weight, tuple(state), grad, self._steps, self.options)
        self._cache[slots] = rows
        self._is_updated[slots.cpu()] = True

    @torch.no_grad()
    def write_back(self) -> None:
        """Bring the home up to date; rows stay on the device."""
        self._write(self._is_updated.nonzero().flatten())
        self._settle()

    def __getstate__(self) -> dict[str, Any]:
        """What copies are made of; nothing is on its way in them."""
        self._settle()
        return {**self.__dict__, "_fetching": None}

    # ---- rows on the device ------------------------------------------------------------------------------------------

    def _distinct(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of some ids, each once, on the host; and for each id which of them."""
        if isinstance(ids, FakeTensor):
            raise InputError(
                f"table {self.table.name!r} is cached, and moves rows between look-ups, which no graph holds: look up "
                "outside of the model, and give it the bags as inputs"
            )
        name, pooling = self.table.name, self.table.pooling
        if ids.dim() != 2 or ids.shape[1] != pooling or ids.dtype not in (torch.int64, torch.int32):
            raise InputError(
                f"table {name!r} takes ids [batch, {pooling}] of whole numbers, not {list(ids.shape)} in {ids.dtype}"
            )
        checked = checked_ids(ids.cpu(), [name], [self.table.rows], [pooling])
        rows, inverse = torch.unique(checked, return_inverse=True)
        return rows, inverse

    @torch.no_grad()
    def _resident(self, rows: Tensor) -> Tensor:
        """The slots of some rows, after those that are missing have been fetched.

        Raises:
            InputError: they are too many, by themselves or with those that wait for a step.
        """
        slots = self._slot_of[rows]
        is_missing = slots == ABSENT
        missing = rows[is_missing]
        self.moved.looked_up += len(rows)
        self.moved.fetched += len(missing)
        held = torch.zeros(self.capacity, dtype=torch.bool)
        held[slots[~is_missing]] = True
        self._heat_in[slots[~is_missing]] = self._heat[rows[~is_missing]]
        for each in self._looked:
            held[each.slots.cpu()] = True
        room = self.capacity - int(held.sum())
        if len(missing) > room:
            waiting = f", {self.capacity - room} of them for rows of look-ups that wait for step()" * bool(self._looked)
            raise InputError(
                f"a batch looks up {len(rows)} distinct rows of table {self.table.name!r}, and its cache holds "
                f"{self.capacity}{waiting}: give it more rows, or take smaller batches"
            )
        fetched = self._fetched(missing)
        hottest = torch.iinfo(torch.int64).max
        free = self._heat_in.masked_fill(held, hottest).topk(len(missing), largest=False, sorted=False).indices
        leaving = free[self._row_in[free] != ABSENT]
        self.moved.written_back += int(self._is_updated[leaving].sum())
        self._write(leaving[self._is_updated[leaving]])
        self._slot_of[self._row_in[leaving]] = ABSENT
        self._put(missing, free, fetched)
        return self._slot_of[rows]

    def _fetched(self, missing: Tensor) -> Tensor:
        """Rows as they are at home, as far as they have been fetched from there.

        What is fetched was not on the device, and is at home as it was: only a look-up fetches rows, and
        ends what is on its way.
        """
        fetching, self._fetching = self._fetching, None
        if fetching is None:
            return self._submit(lambda: self._home[missing]).result()
        values = fetching.values.result()
        if torch.equal(fetching.rows, missing):
            return values
        found = torch.isin(missing, fetching.rows)
        fetched = values.new_empty(len(missing), values.shape[1])
        fetched[found] = values[torch.isin(fetching.rows, missing)]
        fetched[~found] = self._submit(lambda: self._home[missing[~found]]).result()
        return fetched

    def _put(self, rows: Tensor, slots: Tensor, values: Tensor) -> None:
        self._cache[slots.to(self._cache.device)] = values.to(self._cache.device)
        self._slot_of[rows], self._row_in[slots], self._heat_in[slots] = slots, rows, self._heat[rows]
        self._is_updated[slots] = False

    def _write(self, slots: Tensor) -> None:
        """Have rows written to their home; what reads them there does so after."""
        if len(slots):
            rows, values = self._row_in[slots], self._cache[slots.to(self._cache.device)].cpu()
            self._submit(lambda: self._home.__setitem__(rows, values))
            self._is_updated[slots] = False

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Read from home, or write there, on a thread, after all that is to be read and written already."""
        before = self._behind

        def run() -> Any:
            if before is not None:
                before.result()
            with torch.no_grad():
                return work()

        thread = ThreadPoolExecutor(1, thread_name_prefix=f"rows of {self.table.name}")
        self._behind = thread.submit(run)
        thread.shutdown(wait=False)
        return self._behind

    def _settle(self) -> None:
        """Wait for what is to be read from home and written there."""
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.result()


def _refuse_ranks(table: EmbeddingTable) -> None:
    """Each rank would train rows of its own by its part of the batch alone."""
    if dist.is_initialized() and (ranks := dist.get_world_size()) > 1:
        raise InputError(
            f"table {table.name!r} is cached, which works in one process, and this one is one of {ranks}, whose tables "
            "would come to differ: use nn.EmbeddingBag, which a plan places, or look it up without a process group"
        )
