"""What is known of a configuration without looking: below every way to cut the work, and every assignment."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.calibration import Calibration
from planner.cost.cluster import ClusterSpec
from planner.cost.kernels import Attention, Kernel, Product
from planner.cost.model import CostModel
from planner.cost.software import Software
from planner.formulation.remat.levels import pareto_frontier
from planner.ir.layout import Mesh
from planner.search.parallel_config import SLOW, Arithmetic, ParallelConfig, seeds
from planner.solve.problem import evaluate
from tests.planner.analysis.test_staged import assignments, space_of
from tests.planner.plans import named
from tests.planner.search.test_optimum import graph_of, random_cluster

COSTS = [CostModel(ClusterSpec.preset(name)) for name in ("dgx-h100", "dgx-v100", "cpu")]
COMPILED = {"software": Software(compile="all", float8=True)}
COSTS.append(CostModel(COSTS[0].cluster.model_copy(update=COMPILED)))
OFF = [{"work": "compute", "ratio": 1.3, "spread": 0.1, "count": 5}]
FACTS = {"format": "autopar-calibration", "version": 2, "device": COSTS[0].cluster.device.kind, "ranks": 1}
CORRECTED = COSTS[0].cluster.calibrated(Calibration.from_dict({**FACTS, "launch_s": 1e-6, "corrections": OFF}))
COSTS.append(CostModel(CORRECTED))
cuts, sizes = st.sampled_from([1, 2, 3, 8, 64]), st.integers(1, 5000)


def check(cost: CostModel, kernel: Product | Attention, part: Kernel, parts: int, moved: int) -> None:
    """Parts on a device each take no less than the least of the whole, their starts aside."""
    flops, start_s = kernel.flops, cost.least_start_s
    for dtype in ("float32", "bfloat16"):
        least_s = cost.least_s(flops, moved, dtype, kernel)
        cut_s = parts * (cost.compute_s(flops / parts, moved / parts, dtype, kernel=part) - start_s)
        assert 0 < least_s <= cut_s * (1 + 1e-9)


@given(st.sampled_from(COSTS), st.tuples(sizes, sizes, sizes, sizes), st.tuples(cuts, cuts, cuts, cuts), st.booleans())
def test_no_cut_of_a_product_takes_less(
    cost: CostModel, size: tuple[int, int, int, int], cut: tuple[int, int, int, int], is_backward: bool
) -> None:
    (m, n, k, batch), (m_cut, n_cut, k_cut, batch_cut) = size, cut
    whole = Product(m * m_cut, n * n_cut, k * k_cut, batch * batch_cut, is_backward)
    check(cost, whole, Product(m, n, k, batch, is_backward), m_cut * n_cut * k_cut * batch_cut, 4 * m * n)


@given(st.sampled_from(COSTS), sizes, sizes, sizes, cuts, cuts, st.booleans())
def test_no_cut_of_an_attention_takes_less(
    cost: CostModel, heads: int, queries: int, keys: int, head_cut: int, query_cut: int, is_backward: bool
) -> None:
    whole = Attention(heads * head_cut, queries * query_cut, keys, 64, True, is_backward)
    part = Attention(heads, queries, keys, 64, True, is_backward)
    check(cost, whole, part, head_cut * query_cut, 4 * heads * queries)


@pytest.mark.parametrize("which", ["residual", "chain"])
@pytest.mark.parametrize("stages, micro_batches", [(1, 1), (1, 4), (2, 1), (2, 8), (4, 2), (4, 4), (4, 8)])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_no_assignment_beats_the_arithmetic(which: str, stages: int, micro_batches: int, schedule: str) -> None:
    rng = random.Random(f"{which} {stages} {micro_batches}")
    for number in range(3):
        spec = random_cluster(rng, (2, 4)).model_copy(update=COMPILED if number == 2 else {})
        space = space_of(which, spec, stages, micro_batches, schedule, all=8 // stages)
        config = ParallelConfig(stages, Mesh.of(all=8 // stages).micro_batched(micro_batches))
        bound_s = Arithmetic(space.decision_graph, space.cost, space.training).bound_s(config, schedule)
        assert bound_s > 0
        steps = pareto_frontier(space.folded, named(space.folded))
        bound = space.problem(None, steps[0])
        for choices, _ in assignments(space, rng, 3):
            assert bound_s <= evaluate(bound, choices).time_s * (1 + 1e-9)


def test_shapes_of_many_samples_that_are_little_work_are_not_first_in_so_many_micro_batches() -> None:
    cluster = ClusterSpec.preset("dgx-h100")
    batch = 65_536
    graph = graph_of(1, 4, batch)
    sizes = [(stages, 2**power) for stages in (1, 2, 4) for power in range(17)]
    configs = [ParallelConfig(stages, Mesh.of(all=8 // stages).micro_batched(count)) for stages, count in sizes]
    starting_s = {config: 1e-3 * (1 + config.mesh.micro_batches / 32) for config in configs}
    least_s, (first, larger) = min(starting_s.values()), seeds(starting_s, cluster, graph)
    assert first and all(starting_s[config] <= SLOW * least_s for config in (*first, *larger))
    assert max(config.mesh.micro_batches for config in first) == 32
    alike = dict.fromkeys(configs, 1e-3)
    assert max(config.mesh.micro_batches for config in seeds(alike, cluster, graph)[0]) == batch
