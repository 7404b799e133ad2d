"""What operators take on one rank: all choices at once, and each by the kernel that it runs."""

from __future__ import annotations

import numpy as np
import pytest

from planner.formulation.choices import Choices
from planner.formulation.local_costs import SHAPED
from planner.ops import OPS
from tests.planner.analysis.test_staged import space_of
from tests.planner.plans import cluster


@pytest.mark.parametrize("which", ["residual", "chain", "tapped"])
def test_what_is_priced_by_bytes_takes_as_long_all_at_once_as_one_by_one(which: str) -> None:
    space, seen = space_of(which, cluster(4), 2, 4, outer=2, inner=2), set[str]()
    assert space.cost.is_closed
    for variable, names in space.members.items():
        node, options = space.graph.by_name[names[0]], space.options[variable]
        row = OPS.get(node.op)
        if not isinstance(options, Choices) or (row is not None and row.kernel in SHAPED):
            continue
        traffic, held = space.traffic(node), space.sizes_of(node, options)
        if not (traffic.runs or traffic.starts):
            continue
        flops = np.linspace(1e6, 1e9, len(options))
        together = space._streamed_s(node, options, traffic, held, flops)
        assert together.tolist() == space._shaped_s(node, options, traffic, held, flops).tolist()
        assert (together > 0.0).any()
        seen.add(node.op)
    assert len(seen) >= 2, seen
