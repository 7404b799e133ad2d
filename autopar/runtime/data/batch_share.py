"""Which samples of a global batch a rank loads, and what it takes of these for every input of the model.

A plan cuts each input in its own way, most of them along the batch, some not at all. So a rank loads the samples that
any of its inputs needs, and once they are collated takes of each input what the plan stores there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.graph.rows import Rows, as_slice, take
from autopar.runtime.spmd.interface import LeafSpec
from autopar.runtime.spmd.mesh import rows_of
from planner.base.errors import InputError
from planner.ir.layout import Mesh


@dataclass(frozen=True)
class InputCut:
    """What a rank takes of an input.

    Attributes:
        whole: its shape in the global batch.
        loaded: its shape as it is collated of the samples that the rank loads.
        rows: of each dim of that.
    """

    whole: tuple[int, ...]
    loaded: tuple[int, ...]
    rows: Rows

    @property
    def is_all(self) -> bool:
        """Whether nothing is left to cut."""
        return self.rows == tuple(slice(0, size) for size in self.loaded)


@dataclass(frozen=True)
class BatchShare:
    """What one rank loads of a global batch.

    Attributes:
        size: how many samples the global batch has.
        samples: which of them this rank loads, ascending.
        cuts: what it then takes of every input.
    """

    size: int
    samples: tuple[int, ...]
    cuts: Mapping[str, InputCut]

    @classmethod
    def of(cls, inputs: Sequence[LeafSpec], mesh: Mesh, rank: int, size: int | None) -> BatchShare:
        """The share of ``rank``.

        Args:
            inputs: of the plan, with their layouts on ``mesh``. Those as long as the batch in dim 0 run along it; of
                others every rank is given the whole.
            size: of the global batch; left out: the one that inputs are planned with.

        Raises:
            InputError: the plan is for another size, or its inputs leave open for which.
        """
        size = _size_of(inputs, size)
        held = {leaf.name: rows_of(leaf.shape, leaf.layout, mesh, rank) for leaf in inputs}
        along = [leaf.name for leaf in inputs if leaf.shape and leaf.shape[0] == size]
        samples = sorted({number for name in along for number in _numbers(held[name][0], size)})
        place = {number: at for at, number in enumerate(samples)}
        cuts = {}
        for leaf in inputs:
            loaded, rows = leaf.shape, held[leaf.name]
            if leaf.name in along:
                own = torch.tensor([place[number] for number in _numbers(rows[0], size)])
                loaded, rows = (len(samples), *loaded[1:]), (as_slice(own), *rows[1:])
            cuts[leaf.name] = InputCut(leaf.shape, loaded, rows)
        return cls(size, tuple(samples), cuts)

    @property
    def cut_further(self) -> list[str]:
        """The inputs of which a rank takes less than it loads."""
        return [name for name, cut in self.cuts.items() if not cut.is_all]

    def part(self, leaf: LeafSpec, value: Any) -> Tensor:
        """This rank's part of an input, which is collated of the samples that the rank loads.

        Raises:
            InputError: it is not as planned.
        """
        cut = self.cuts[leaf.name]
        if not isinstance(value, Tensor) or tuple(value.shape) != cut.loaded:
            found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise InputError(
                f"input {leaf.name!r} is {found} when the {len(self.samples)} samples that this rank loads of each "
                f"global batch of {self.size} are collated, but the plan takes a tensor of shape {cut.loaded}: let "
                "collate_fn make that of them (pad and cut samples to the planned length), or plan again with example "
                "inputs of this form"
            )
        return take(value, cut.rows).contiguous()


def _size_of(inputs: Sequence[LeafSpec], given: int | None) -> int:
    """The size of the global batch: dim 0 of the inputs."""
    sizes = {leaf.name: leaf.shape[0] for leaf in inputs if leaf.shape}
    known = sorted({*sizes.values()})
    planned = ", ".join(f"{name!r} of {size}" for name, size in sizes.items()) or "none that has any dims"
    if given is not None and given not in known:
        raise InputError(
            f"batch_size is {given}, but the inputs were planned with these sizes in dim 0: {planned}. batch_size "
            "counts the samples of the global batch, over all ranks: leave it out, or plan again for this size"
        )
    if given is None and len(known) != 1:
        raise InputError(
            f"the inputs were planned with these sizes in dim 0: {planned}. Say which is the batch: batch_size=..."
        )
    return known[0] if given is None else given


def _numbers(rows: slice | Tensor, size: int) -> Sequence[int]:
    return range(size)[rows] if isinstance(rows, slice) else rows.tolist()
