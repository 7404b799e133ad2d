"""What tokens by expert, as they were seen, mean for ranks that share experts."""

from __future__ import annotations

import pytest

from autopar.runtime.spmd.expert_load import ExpertLoad
from planner.cost.cluster import ClusterSpec

SEEN = ExpertLoad(((6, 2, 4, 4), (0, 8, 0, 8)))


def test_any_number_of_ranks_has_an_imbalance() -> None:
    """Of halves of 16 tokens the busiest has 8 in both calls; of quarters 6, then 8; of eighths half as much as its
    quarter, and a rank with one and a third of four experts has 6 and 2 / 3, or 8 and two thirds of none.
    """
    assert [SEEN.imbalance(ranks) for ranks in (1, 2, 4, 8)] == [1, 1, (1.5 + 2) / 2, (1.5 + 2) / 2]
    assert SEEN.imbalance(3) == pytest.approx(((6 + 2 / 3) * 3 / 16 + 8 * 3 / 16) / 2)
    assert SEEN.worst(4) == 2 and SEEN.imbalances == (1, 1.75)
    assert str(SEEN).endswith("rows: 1.00 of 2, 1.75 of 4 (2.00 in the most uneven call)")


def test_a_cluster_states_it_of_any_number_of_ranks() -> None:
    local = ClusterSpec.local(4)
    for stated, found in ((None, [1, 1, 1, 1]), (1.5, [1, 1.5, 1.5, 1.5]), (SEEN.imbalances, [1, 1, 1.75, 1.75])):
        spec = ClusterSpec.from_dict({**local.to_dict(), "expert_imbalance": stated})
        assert [spec.imbalance(ranks) for ranks in (1, 2, 3, 64)] == found
        assert ClusterSpec.from_dict(spec.to_dict()) == spec
        assert local.model_copy(update={"expert_imbalance": stated}).imbalance(3) == found[2]
