"""Checks in the first steps that ranks which must hold the same data do, by a checksum of every input.

A plan holds some inputs alike on several ranks: those that compute one sample together. If each drew its own batch,
they would train on a mixture of samples, and no number would say so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from autopar.runtime.host.error_notes import add_note
from autopar.runtime.spmd.interface import LeafSpec
from autopar.runtime.spmd.mesh import coordinates
from planner.base.errors import InputError
from planner.ir.layout import Mesh, Shard

VARIABLE = "AUTOPAR_CHECK_DATA"
"""``1``: every call is checked; ``0``: none; unset: the first :data:`CALLS`."""
CALLS = 3
GOLDEN = -0x61C8864680B583EB
"""2**64 over the golden ratio, as a signed number: the step of the generator SplitMix64 (Steele, Lea, Flood, 2014)."""
MIXERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Its two multipliers."""


def calls_to_check() -> float:
    """How many calls of a module are checked, as the environment says.

    Raises:
        InputError: in a word that is not known.
    """
    setting = os.environ.get(VARIABLE, "")
    calls = {"": CALLS, "0": 0, "1": math.inf}
    if setting not in calls:
        raise InputError(f"{VARIABLE}={setting}: give 1 to check all calls, 0 to check none, or leave it out")
    return calls[setting]


@dataclass
class DataAgreement:
    """Compares the inputs of all ranks in the calls that are left to check; later it costs nothing.

    Attributes:
        mesh: of one stage; a rank's number modulo its size is its place.
        device: where all ranks communicate.
        calls: how many are left.
    """

    mesh: Mesh
    device: torch.device
    calls: float

    def check(self, inputs: Sequence[LeafSpec], parts: Mapping[str, Tensor]) -> None:
        """Compare this call's inputs; every rank must call this.

        Args:
            inputs: with their layouts on the mesh.
            parts: this rank's, by name.

        Raises:
            InputError: ranks that must hold the same part of an input do not; on every rank.
        """
        if not self.calls or (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return
        self.calls -= 1
        held = [leaf for leaf in inputs if len({*self._places(leaf)}) < dist.get_world_size()]
        if not held:
            return
        # Neither counted nor recorded as a part of the step: a plan does not have it.
        with _disable_current_modes(), torch.no_grad():
            mine = torch.stack([checksum(parts[leaf.name]).to(self.device) for leaf in held])
            sums = _gathered(mine).tolist()
        for number, leaf in enumerate(held):
            self._compare(leaf, [each[number] for each in sums])

    def _places(self, leaf: LeafSpec) -> list[tuple[int, ...]]:
        """Of every rank, which part of an input it holds."""
        cut = [axis for axis, local_type in enumerate(leaf.layout) if isinstance(local_type, Shard)]
        stage = [coordinates(self.mesh, rank) for rank in range(self.mesh.size)]
        each = [tuple(place[axis] for axis in cut) for place in stage]
        return each * (dist.get_world_size() // self.mesh.size)

    def _compare(self, leaf: LeafSpec, sums: Sequence[int]) -> None:
        alike: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(self._places(leaf)):
            alike.setdefault(place, []).append(rank)
        wrong = [ranks for ranks in alike.values() if len({sums[rank] for rank in ranks}) > 1]
        if wrong:
            ranks = wrong[0]
            others = [rank for rank in ranks if sums[rank] != sums[ranks[0]]]
            more = f", and {len(wrong) - 1} more groups of ranks likewise" if len(wrong) > 1 else ""
            raise InputError(
                f"input {leaf.name!r} differs between ranks that compute the same samples together: {_listed(ranks)} "
                f"must hold the same part of the global batch, but {_listed(others)} got other data than rank "
                f"{ranks[0]}{more}. Load data by pmodel.dataloader(dataset), or give pmodel.shard the same global "
                "batch on every rank (same order, seed and random augmentations). The first "
                f"{CALLS} calls are checked; {VARIABLE}=1 checks all, {VARIABLE}=0 none"
            )


def _gathered(mine: Tensor) -> Tensor:
    """What all ranks have, ``[ranks, ...]``."""
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    try:
        dist.all_gather(found, mine)
    except RuntimeError as error:
        add_note(
            error,
            f"while ranks compared their inputs, as they do in the first {CALLS} calls of a parallel module: another "
            "rank has ended, or does not call it",
        )
        raise
    return torch.stack(found)


def checksum(value: Tensor, at_once: int = 2**20) -> Tensor:
    """A number that depends on every bit of a tensor and on where it is, ``int64[]`` on its device.

    Args:
        at_once: so many elements are summed at a time.
    """
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for number, piece in enumerate(flat.view(width[flat.element_size()]).split(at_once)):
        place = torch.arange(number * at_once, number * at_once + len(piece), device=value.device)
        total += _mixed(place.mul_(GOLDEN).add_(piece)).sum()
    return total


def _mixed(value: Tensor) -> Tensor:
    """SplitMix64's output function in place, modulo 2**64: one to one, so that no single change is lost; not linear.

    A sum of linear terms would miss rearrangements: ``[1, 0, 0, 1]`` and ``[0, 1, 1, 0]``.
    """
    for shift, mixer in zip((30, 27), MIXERS, strict=True):
        value.bitwise_xor_(_shifted(value, shift)).mul_(mixer)
    return value.bitwise_xor_(_shifted(value, 31))


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Shifted right, with zeros from the left; torch itself repeats the sign."""
    return (value >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def _listed(ranks: Sequence[int], shown: int = 8) -> str:
    numbers = ", ".join(map(str, ranks[:shown])) + (", ..." if len(ranks) > shown else "")
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
