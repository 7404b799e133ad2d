"""How unevenly tokens went to experts, as it was seen, and what that means for any number of ranks that share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from planner.base.errors import InputError


class Routed(NamedTuple):
    """How many tokens went to each of the experts from number ``first`` on, of ``experts``, in one call on one rank;
    ``sharing``: ranks that have other tokens, or other experts. All others count what one of these does.
    """

    first: int
    experts: int
    tokens: tuple[int, ...]
    sharing: int


@dataclass(frozen=True)
class ExpertLoad:
    """How many tokens went to each expert, call by call: of each layer and each step, or micro-batch.

    Attributes:
        tokens: of every call, by expert.
    """

    tokens: tuple[tuple[int, ...], ...]

    @property
    def imbalances(self) -> tuple[float, ...]:
        """Of 2, 4, 8 ranks and so on to one for each expert: what a cluster states as ``expert_imbalance``."""
        most = max(map(len, self.tokens))
        return tuple(self.imbalance(2**power) for power in range(1, max(2, (most - 1).bit_length() + 1)))

    def imbalance(self, ranks: int) -> float:
        """How many rows the busiest of so many ranks has over the average rank, on the average of all calls."""
        return float(np.mean(self._ratios(ranks)))

    def worst(self, ranks: int) -> float:
        """The same of the most uneven call."""
        return float(np.max(self._ratios(ranks)))

    def _ratios(self, ranks: int) -> list[float]:
        """Of each call; where ranks do not divide experts, as if each had a part of the one at its border."""
        found = []
        for tokens in self.tokens:
            upto = np.concatenate([[0], np.cumsum(tokens)])
            borders = np.interp(np.linspace(0, len(tokens), ranks + 1), np.arange(len(upto)), upto)
            found.append(float(np.diff(borders).max()) * ranks / (upto[-1] or 1))
        return found

    def __str__(self) -> str:
        ranks = [2**power for power in range(1, len(self.imbalances) + 1)]
        each = ", ".join(f"{self.imbalance(n):.2f} of {n}" for n in ranks)
        return (
            f"in {len(self.tokens)} calls of experts the busiest rank had so many times the average rank's rows: "
            f"{each} ({self.worst(ranks[-1]):.2f} in the most uneven call)"
        )


def load_of(calls: Sequence[Routed], stage: int) -> ExpertLoad:
    """The load of all ranks, on each of them; every rank must call it.

    Args:
        calls: what this rank's experts had, call by call.
        stage: whose experts these are; ranks of one stage make the same calls.

    Raises:
        InputError: nothing was seen.
    """
    everybody: list[tuple[int, Sequence[Routed]]] = [(stage, calls)] * dist.get_world_size()
    dist.all_gather_object(everybody, (stage, calls))
    found = []
    for number in sorted({each for each, _ in everybody}):
        for call in zip(*(seen for each, seen in everybody if each == number), strict=True):
            tokens = np.zeros(call[0].experts, np.int64)
            for part in call:
                tokens[part.first : part.first + len(part.tokens)] += part.tokens
            found.append(tuple((tokens // (len(call) // call[0].sharing)).tolist()))
    if not found:
        raise InputError("no load of experts was seen: run a step first, of a model with experts (autopar.experts)")
    return ExpertLoad(tuple(found))
