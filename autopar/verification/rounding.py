"""How far rounding alone takes the results of a model: the tolerance of a comparison in the model's own dtype.

In float64 errors stand out from rounding, and one small number is tolerance enough. A bfloat16 model of thirty layers
may be right and differ by some per cent. So what rounding does to a model is measured on the model itself, by Monte
Carlo arithmetic (Parker, *Monte Carlo Arithmetic*, UCLA CSD-970002, 1997; CESTAC of Vignes before it): the original
runs again, and every result of every operator, forward and backward, is multiplied by ``1 + e``, ``e`` uniform in
``[-a, a]``. What an output or a gradient then differs by is a rounding error of it, as it grows with the model's own
depth, lengths of sums and cancellations.

**a.** A plan computes what the original computes but for the order of sums. Where ranks hold terms of a sum, each
rounds its own, and adding ``r`` of them rounds ``r - 1`` times: less than ``2 r`` errors of at most ``u``, the unit
roundoff, relative to what is rounded. In the worst case they add up to ``2 r u``; as independent errors of either sign,
which is what is found, to ``a = u sqrt(2 r)`` (Higham and Mary, *A New Approach to Probabilistic Rounding Error
Analysis*, SIAM J. Sci. Comput. 41(5), 2019). Every operator is taken for such a sum, also those that are none. What
kernels add up within a rank they add in float32, in another order where a part is smaller: nothing beside the ``u``
of a narrower dtype, and :data:`LANES` errors more in float32.

**The tolerance** of a value is twice the largest difference in :data:`RUNS` such runs, which counts as ``a`` where it
is less: a mean may happen to stay, and torch does not tell of all that it writes into buffers. Twice, since the plan is
one more run of the kind, and few runs do not show the largest difference; most of its operators round less.

A reduction that is left out, or made twice, changes a value by a large part of itself, which stands out from some per
cent. Where rounding alone changes it by a quarter or more (a router that sends tokens elsewhere), agreement says
little, and :func:`autopar.verify` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

RUNS = 4
"""How often the original runs with results rounded at random."""
FACTOR = 2.0
LANES = 32
"""So many sums do kernels make at once, and add them up at last: four vectors of eight float32."""
BLUNT = 0.5
"""A tolerance from which on agreement says little."""


def size_of(dtype: torch.dtype, ranks: int) -> float:
    """``a``: how large rounding errors of what so many ranks add up in ``dtype`` are, relative; 0 where it is exact.

    The unit roundoff of a dtype is half the distance from 1 to the next number.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    eps = torch.finfo(dtype).eps
    lanes = LANES if eps <= torch.finfo(torch.float32).eps else 0
    return eps / 2 * math.sqrt(2 * ranks + lanes)


class RandomRounding(TorchDispatchMode):
    """Inside, every number that an operator computes is off by up to ``a`` of itself (:func:`size_of`).

    Views, what is made from no tensor, and whole numbers are left alone: another operator made their numbers, or they
    are exact, as counts are that are kept in floats.
    """

    def __init__(self, ranks: int, seed: int):
        super().__init__()
        self._ranks, self._generator = ranks, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[position] if position < len(args) else kwargs.get(argument.name)
                for value in (leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, Tensor)):
                    value.copy_(self._rounded(value))
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return results
        if any(each.alias_info is not None for each in func._schema.returns):
            return results
        return pytree.tree_map_only(Tensor, self._rounded, results)

    def _rounded(self, value: Tensor) -> Tensor:
        if not (value.is_floating_point() or value.is_complex()) or value.layout != torch.strided:
            return value
        if not value.is_complex() and bool((value == value.round()).all()):
            return value
        wide = torch.complex128 if value.is_complex() else torch.float64
        error = torch.rand(value.shape, dtype=torch.float64, generator=self._generator).to(value.device) * 2 - 1
        return (value.to(wide) * (1 + error * size_of(value.dtype, self._ranks))).to(value.dtype)


@dataclass(frozen=True)
class Tolerance:
    """How far each value may be from the original's, relative to its largest element.

    Attributes:
        dtypes: in which values are compared: ``float64``, or those of the model.
        common: for all that ``own`` does not name.
        own: by what messages call a value; infinite where rounding alone changes numbers that are no floats.
    """

    dtypes: str
    common: float
    own: Mapping[str, float] = field(default_factory=dict)

    def of(self, name: str) -> float:
        """The relative error that is allowed of a value."""
        return self.own.get(name, self.common)

    @property
    def widest(self) -> float:
        """The largest that says anything."""
        return max((allowed for allowed in self.own.values() if allowed < BLUNT), default=self.common)

    @property
    def blunt(self) -> list[str]:
        """The values of which agreement says little."""
        return [name for name, allowed in self.own.items() if allowed >= BLUNT]

    def __str__(self) -> str:
        if not self.own:
            return f"in {self.dtypes}, relative errors up to {self.common:.0e} allowed"
        least = min(self.own.values())
        return (
            f"in {self.dtypes}, relative errors up to {least:.1e} to {self.widest:.1e} allowed, by value: "
            f"{FACTOR:g} times what random rounding does to the model"
        )


def measured(
    values: Mapping[str, Tensor],
    again: Callable[[RandomRounding], Mapping[str, Tensor]],
    error: Callable[[str, Tensor, Tensor], float],
    ranks: int,
) -> dict[str, float]:
    """The relative error that is allowed of each of a step's values.

    Args:
        values: of the original, by name.
        again: runs the original once more, in a mode.
        error: the relative error of the value of a name: what was got, what was expected.
        ranks: on how many the plan runs.
    """
    largest = dict.fromkeys(values, 0.0)
    for seed in range(RUNS):
        found = again(RandomRounding(ranks, seed))
        for name, expected in values.items():
            largest[name] = max(largest[name], error(name, found[name], expected))
    return {name: FACTOR * max(largest[name], size_of(value.dtype, ranks)) for name, value in values.items()}
