"""Embedding tables that are looked up together, so that whole tables may be given to ranks.

A model that looks up in many tables holds them in one :class:`EmbeddingTables`. Where they shall be is found for a
cluster (:mod:`planner.tables.place_tables`), and :meth:`EmbeddingTables.placed` lays them out for it: whole tables, and
columns of them, lie in slabs, one for each rank or node, and the slab is a dim like another. To shard it is to give
tables to ranks; its results, sharded by slab, become sharded by sample in an all-to-all. Both are ordinary decisions of
a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from autopar.operators.embedding_slabs import checked_ids
from autopar.tables.table_slabs import TablePart, TableSlabs
from planner.base.errors import InputError
from planner.tables.embedding_table import EmbeddingTable
from planner.tables.placement import Placement

Mode = Literal["sum", "mean"]


class EmbeddingTables(nn.Module):
    """As many ``nn.EmbeddingBag`` side by side, each with bags of one size.

    Attributes:
        tables: their sizes.
        mode: how bags are pooled.
        bags: one module for each, by name.
    """

    def __init__(self, tables: Sequence[EmbeddingTable], mode: Mode = "sum"):
        super().__init__()
        names = [table.name for table in tables]
        if len({*names}) != len(names) or not all(name.isidentifier() for name in names):
            raise InputError(f"embedding tables need names of their own, which modules may have: {', '.join(names)}")
        if mode not in ("sum", "mean"):
            raise InputError(f"mode is 'sum' or 'mean', not {mode!r}; for maxima use nn.EmbeddingBag")
        self.tables, self.mode = tuple(tables), mode
        self.bags = nn.ModuleDict({t.name: nn.EmbeddingBag(t.rows, t.features, mode=mode) for t in tables})

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        """``ids[b, c]``, the ids of all tables side by side -> of each table in order, its bags ``[b, features]``."""
        each = _checked(self.tables, ids).split([table.pooling for table in self.tables], 1)
        return tuple(self.bags[table.name](part) for table, part in zip(self.tables, each, strict=True))

    def table_weights(self) -> dict[str, Tensor]:
        """The weights of all tables, each ``[rows, features]``, by name."""
        return {name: bag.weight.detach() for name, bag in self.bags.items()}  # type: ignore[operator]

    def placed(self, placement: Placement) -> PlacedEmbeddingTables:
        """The same tables with the same values, laid out for a placement; parameters are new ones."""
        found = PlacedEmbeddingTables(self.tables, self.mode, placement, self.table_weights())
        return found.train(self.training)


class PlacedEmbeddingTables(nn.Module):
    """:class:`EmbeddingTables` that are laid out for a placement, and look up the same.

    Attributes:
        tables, mode: as there.
        placement: what they are laid out for.
        bags: of tables that all ranks share, by name; rows that do not divide by the ranks are filled up.
        slabs: tables, and columns of tables, that ranks or nodes hold, by these and their features.
    """

    def __init__(
        self, tables: Sequence[EmbeddingTable], mode: Mode, placement: Placement, weights: Mapping[str, Tensor]
    ):
        super().__init__()
        if [table.name for table in tables] != [table.name for table in placement.tables]:
            raise InputError("a placement is of other tables: place those of this module, in their order")
        self.tables, self.mode, self.placement = tuple(tables), mode, placement
        self.bags, self.slabs = nn.ModuleDict(), nn.ModuleDict()
        parts: dict[tuple[int, str], list[TablePart]] = {}
        for table, first, placed in zip(self.tables, _columns(self.tables), placement.tables, strict=False):
            like, option = weights[table.name], placed.option
            if placed.kind in ("row", "data"):
                rows = table.rows if placed.kind == "data" else -(-table.rows // placement.ranks) * placement.ranks
                bag = nn.EmbeddingBag(rows, table.features, mode=mode, device=like.device, dtype=like.dtype)
                self.bags[table.name] = bag
                continue
            features = table.features // option.parts
            key = len(option.groups), f"{'ranks' if len(option.groups[0]) == 1 else 'nodes'}_{features}"
            parts.setdefault(key, []).extend(TablePart(table, first, features, slab) for slab in placed.groups)
        for (count, name), each in parts.items():
            like = weights[each[0].table.name]
            self.slabs[name] = TableSlabs(each, count, multiple=placement.ranks // count, like=like)
        with torch.no_grad():
            for name, views in self._views(dict(self.named_parameters())).items():
                for view, values in zip(views, weights[name].chunk(len(views), 1), strict=True):
                    view.copy_(values)

    def table_weights(self, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The weights of all tables, each ``[rows, features]``, by name.

        Args:
            state: of this module, as it is in a checkpoint or in ``pmodel.full_state_dict()``, or gradients by the
            names
                of parameters; its own when left out.
        """
        found = dict(self.named_parameters()) if state is None else state
        return {name: torch.cat(parts, 1).detach() for name, parts in self._views(found).items()}

    def _views(self, state: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        """The parts of every table, side by side, as views of tensors of this module."""
        found: dict[str, list[Tensor]] = {}
        for key, slabs in self._slabs().items():
            for part, view in zip(slabs.parts, slabs.views(state[f"slabs.{key}.weight"]), strict=True):
                found.setdefault(part.table.name, []).append(view)
        for table in self.tables:
            if table.name in self.bags:
                found[table.name] = [state[f"bags.{table.name}.weight"][: table.rows]]
        return {table.name: found[table.name] for table in self.tables}

    def _slabs(self) -> dict[str, TableSlabs]:
        return dict(self.slabs.items())  # type: ignore[arg-type]

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        """As :meth:`EmbeddingTables.forward`."""
        ids = _checked(self.tables, ids)
        places = dict(zip((table.name for table in self.tables), pairwise(_columns(self.tables)), strict=True))
        bags = {name: bag(ids[:, slice(*places[name])]) for name, bag in self.bags.items()}
        for slabs in self._slabs().values():
            means = self.mode == "mean"
            sums = zip(slabs.tables, slabs(ids), strict=True)
            bags |= {table.name: bag / table.pooling if means else bag for table, bag in sums}
        return tuple(bags[table.name] for table in self.tables)


def _columns(tables: Sequence[EmbeddingTable]) -> list[int]:
    """Where the ids of each table begin among those of a sample, and where the last ones end."""
    return [*accumulate((table.pooling for table in tables), initial=0)]


def _checked(tables: Sequence[EmbeddingTable], ids: Tensor) -> Tensor:
    """The ids, if there are as many for each sample as tables take, and each is a row of its table.

    Raises:
        InputError: names the table and the id.
    """
    count = _columns(tables)[-1]
    if ids.dim() != 2 or ids.shape[1] != count or ids.is_floating_point():
        raise InputError(
            f"embedding tables take ids [batch, {count}], for each sample those of all {len(tables)} tables side by "
            f"side, not {ids.dtype} {list(ids.shape)}"
        )
    names, rows, pooling = zip(*((table.name, table.rows, table.pooling) for table in tables), strict=True)
    return checked_ids(ids, names, rows, pooling)
