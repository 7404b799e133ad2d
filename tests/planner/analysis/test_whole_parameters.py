"""Owners of whole parameters, and what they cost on paper."""

from __future__ import annotations

import pytest

from planner.analysis.whole_parameters import StoredParameter, bill, owners
from planner.ir.layout import Mesh, parse_layout
from tests.planner.cost.test_model import model

MESH = Mesh.of(data=2, tensor=3)


def test_the_largest_come_first_each_to_who_owns_least() -> None:
    """Over three ranks: 9, 6, 5 apart, then 4 to the last, of 5, and 2 to the middle one, of 6."""
    layout = parse_layout("R S(0)", 2)
    found = owners([(elements, layout) for elements in (5, 9, 2, 6, 4)], MESH)
    assert found == [2, 0, 1, 1, 2]


def test_ranks_of_all_axes_are_counted_together() -> None:
    """One rank owns 6 of what both axes cut, so what one axis cuts goes to others, and their copies own it, too."""
    both, data, neither = (parse_layout(text, 2) for text in ("S(0) S(1)", "S(0) R", "R R"))
    assert owners([(6, both), (4, data), (3, data), (100, neither)], MESH) == [0, 1, 1, 0]


NODES = model((8, 1e-6, 100e9), (128, 10e-6, 20e9))
"""128 nodes of 8, with 1 and 10 us, 100 and 20 GB/s."""


def test_the_bill_of_1024_ranks_by_hand() -> None:
    """161 matrices of 4 MiB. Their 322 norms climb 7 hops in a node and 7 levels of a tree over nodes, and come back.

    An all-to-all sends 7 messages in a node and 127 between them, and 1016 of 1024 parts leave at 20 GB/s: 8 MiB of a
    parameter with its gradient, and 4 MiB back. 161 of the ranks own one matrix each.
    """
    matrix = StoredParameter((1024, 1024), 4, parse_layout("S(0)", 1))
    found = bill([matrix] * 161, Mesh.of(data=1024), NODES, state_bytes=8)
    assert found.norms == 322
    assert found.norms_s == pytest.approx(2 * (7 * 1e-6 + 7 * 10e-6) + 2 * 4 * 322 / 100e9, rel=1e-9)
    messages_s = 7 * 1e-6 + 127 * 10e-6
    assert found.moved_s == pytest.approx(2 * messages_s + 12 * 2**20 * 1016 / 1024 / 20e9, rel=1e-9)
    assert (found.owned, found.even) == (2**20, 161 * 2**10)
    assert (found.state_bytes, found.owned_state_bytes) == (161 * 8 * 2**10, 8 * 2**20)
    assert found.factored_bytes == 4 * 2 * 1024 and found.moved_bytes == 12 * 2**20 * 1023 // 1024
    assert str(found).splitlines() == [
        "a step's update, beside one that is elementwise; of the fullest rank",
        "                         communication                time      state",
        "  by norms (LAMB, LARS)  322 norms summed             154.0 us  1.3 MiB",
        "  whole (Muon)           12.0 MiB to owners and back  3.2 ms    8.0 MiB",
        "  whole (Adafactor)      the same                     3.2 ms    8.0 KiB",
        "  the fullest of 1,024 ranks steps 1,048,576 elements, 164,864 if all did as many",
    ]


def test_what_is_whole_costs_nothing_and_axes_that_lie_together_are_one() -> None:
    """Nothing is sent of what all have; what both axes cut is summed over 8 ranks, what the outer one cuts over 2."""
    mesh = Mesh.of(data=2, tensor=4)

    def of(*layouts: str) -> float:
        parameters = [StoredParameter((64, 64), 4, parse_layout(each, 2)) for each in layouts]
        return bill(parameters, mesh, NODES, 8).norms_s

    assert of("R R") == 0.0
    assert of("S(0) S(1)") == NODES.collective_s("all_reduce", Mesh.of(all=8).axes[0], 8)
    assert of("S(0) R", "S(0) S(1)", "R R") == of("S(0) R") + of("S(0) S(1)")
    halves = bill([StoredParameter((64, 64), 4, parse_layout("S(0) R", 2))] * 4, mesh, NODES, 8, stages=2)
    assert (halves.norms, halves.owned, halves.even) == (4, 64 * 64, 64 * 64)
