"""What a search expects plans to take by what others taught."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from planner.formulation.unsharding import PER_MICRO_BATCH, PER_STEP, Unsharding
from planner.ir.layout import Mesh
from planner.search.branch_and_bound import _of_turn
from planner.search.candidates import Branch, FoundPlan, begin
from planner.search.expectations import Expectations
from planner.search.parallel_config import ParallelConfig
from planner.solve.pipeline.stages import Pipeline
from planner.solve.problem import Evaluation

BATCH = 64


def config(stages: int, ranks: int, micro_batches: int, unsharding: Unsharding = PER_STEP) -> ParallelConfig:
    return ParallelConfig(stages, Mesh.of(all=ranks).micro_batched(micro_batches), unsharding)


def branch(
    of: ParallelConfig, bounded_by: ParallelConfig | None = None, bound_s: float = 10.0, virtual_stages: int = 1
) -> Branch:
    pipeline = Pipeline("1f1b", of.stages, of.mesh.micro_batches, virtual_stages)
    return replace(begin(of, bound_s), pipeline=pipeline, bounded_by=bounded_by or of)


def found_of(of: ParallelConfig, time_s: float) -> FoundPlan:
    evaluation = Evaluation(time_s, 0.0, 0, True)
    return FoundPlan(of, (), Pipeline("1f1b", of.stages, of.mesh.micro_batches), ((), ()), False, evaluation)


def test_what_micro_batches_add_is_in_proportion_to_them_and_to_ranks() -> None:
    expectations = Expectations(BATCH)
    expectations.learn_work({config(2, 4, 2).any_micro_batches: {2: 10.0, 34: 12.0}})  # 20 % by 32 more on 4 ranks
    few, many = config(4, 8, 2), config(4, 8, 18)
    bounded = branch(many, few)
    assert expectations.of(bounded) == pytest.approx(bounded.expected_s * 1.2)  # 16 more on 8
    assert expectations.of(branch(many)) == branch(many).expected_s  # by costs of its own


def test_what_is_known_of_a_mesh_counts_there() -> None:
    expectations, few, many = Expectations(BATCH), config(4, 8, 2), config(4, 8, 18)
    of_others = {config(2, ranks, 2).any_micro_batches: {2: 10.0, 34: 14.0} for ranks in (2, 4)}
    expectations.learn_work({**of_others, few.any_micro_batches: {2: 10.0, 18: 10.5, 34: math.inf}})
    assert expectations.of(branch(many, few)) == pytest.approx(branch(many, few).expected_s * 1.05)


def test_excess_is_expected_of_what_holds_no_less() -> None:
    expectations, cut = Expectations(BATCH), branch(config(4, 8, 16), bound_s=10.0, virtual_stages=2)
    best = found_of(config(2, 16, 16), 12.0)
    expectations.learn_excess(cut, best)  # none was found below
    more = 12.0 / (10.0 * (1 + 3 / 32))
    for stages, micro_batches, virtual_stages, unsharding, excess in (
        (4, 16, 2, PER_STEP, more),
        (4, 8, 4, PER_STEP, more),
        (4, 32, 2, PER_STEP, 1.0),  # smaller micro-batches
        (4, 16, 1, PER_STEP, 1.0),  # fewer in flight
        (8, 16, 2, PER_STEP, 1.0),
        (4, 16, 2, PER_MICRO_BATCH, 1.0),
    ):
        other = branch(config(stages, 8, micro_batches, unsharding), virtual_stages=virtual_stages)
        assert expectations.of(other) == pytest.approx(other.expected_s * excess)


def test_the_best_schedule_says_how_much_it_is() -> None:
    expectations, cut = Expectations(BATCH), branch(config(4, 8, 16))
    best = found_of(config(2, 16, 16), 15.0)
    expectations.learn_excess(cut, best)
    candidate = replace(cut.candidate, objective_s=cut.expected_s)  # it takes what was expected
    expectations.learn_excess(replace(cut, candidate=candidate), best)
    assert expectations.of(cut) == cut.expected_s


def test_until_a_plan_is_known_pipelines_far_behind_others_wait() -> None:
    """Where one schedule of a mesh does not fit, others of it hardly do, and cutting each takes time."""
    near, far, unbegun = branch(config(4, 8, 16)), branch(config(2, 8, 16), bound_s=18.0), begin(config(8, 8, 16), 1.0)
    far, slow = (replace(far, candidate=replace(far.candidate, proof=proof)) for proof in ("packing", "work"))
    waiting, expectations = [far, near, slow, unbegun], Expectations(BATCH)

    def chosen(turn: int, best: FoundPlan | None) -> list[Branch]:
        return _of_turn(waiting, turn, best, expectations, is_settled=False)[0]

    assert chosen(0, None) == chosen(0, found_of(config(2, 8, 16), 20.0)) == [unbegun]
    assert chosen(1, None) == chosen(2, None) == [near, slow]  # what is slow by its work alone may fit
    assert chosen(2, found_of(config(2, 8, 16), 20.0)) == [far, near, slow]


def test_once_the_best_plan_is_settled_three_of_four_are_for_the_proof() -> None:
    lowest, other = branch(config(4, 8, 16), bound_s=10.0), branch(config(2, 8, 16), bound_s=11.0)
    best, expectations = found_of(config(2, 8, 16), 20.0), Expectations(BATCH)
    evaluated = [_of_turn([other, lowest], number, best, expectations, is_settled=True) for number in range(8)]
    assert [is_proof for _, is_proof in evaluated] == 2 * [False, True, True, True]
    assert all(branches == [lowest] for branches, is_proof in evaluated if is_proof)
    assert all(other in branches for branches, is_proof in evaluated if not is_proof)
    priced = [replace(each, is_priced=True) for each in (other, lowest)]
    assert not any(_of_turn(priced, number, best, expectations, is_settled=True)[1] for number in range(8))
