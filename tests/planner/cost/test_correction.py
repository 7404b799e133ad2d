"""Corrections and intervals, by hand and by drawing: as much lies in an interval as it says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from planner.base.errors import ClusterError
from planner.cost.calibration import Calibration
from planner.cost.cluster import ClusterSpec
from planner.cost.correction import CONFIDENCE, Correction, Pair, corrections, interval_s, student_t
from planner.cost.kernels import Product
from planner.cost.model import CostModel
from planner.ir.layout import Axis


def calibration(**corrected: float) -> Calibration:
    return Calibration(
        format="autopar-calibration",
        version=2,
        device="cpu",
        ranks=4,
        launch_s=1e-5,
        corrections=[Correction(work=work, ratio=ratio, spread=0.1, count=9) for work, ratio in corrected.items()],
    )


def test_ratio_and_spread_by_hand() -> None:
    """Twice, and eight times as long: four times in the mean, and each off by a factor of two."""
    (found,) = corrections([Pair("compute", 1.0, 2.0), Pair("compute", 1.0, 8.0)])
    assert found.ratio == pytest.approx(4.0) and found.count == 2
    assert found.spread == pytest.approx(math.sqrt(2) * math.log(2))
    assert found.factors is None  # of two observations no interval follows


def test_corrections_of_corrected_predictions_multiply() -> None:
    before = corrections([Pair("compute", 1.0, 2.0), Pair("all_reduce", 1.0, 3.0)])
    found = {each.work: each.ratio for each in corrections([Pair("compute", 2.0, 3.0)], before)}
    assert found == pytest.approx({"compute": 3.0, "all_reduce": 3.0})


@pytest.mark.parametrize(("freedom", "tabled"), [(3, 2.353), (5, 2.015), (9, 1.833), (30, 1.697)])
def test_student_t_is_that_of_tables(freedom: int, tabled: float) -> None:
    assert student_t(0.9, freedom) == pytest.approx(tabled, rel=0.005)


def test_held_out_values_lie_in_their_intervals() -> None:
    """Of 4,000 ratios drawn beside 8 others of the same distribution, 90 % do, to four standard errors."""
    drawn = np.random.default_rng(0).normal(0.3, 0.2, (4000, 9))
    inside = 0
    for *known, new in drawn.tolist():
        (found,) = corrections(Pair("compute", 1.0, math.exp(each)) for each in known)
        assert found.factors is not None
        low, high = (factor * found.ratio for factor in found.factors)
        inside += low <= math.exp(new) <= high
    assert inside / len(drawn) == pytest.approx(CONFIDENCE, abs=4 * math.sqrt(0.09 / len(drawn)))


def test_prices_are_multiplied() -> None:
    spec = ClusterSpec.local(4, "1 GiB", cores=2)
    plain, corrected = CostModel(spec), CostModel(spec.calibrated(calibration(compute=1.5, all_reduce=2.0)))
    product, axis = Product(64, 64, 64), Axis("data", 4, 1)
    assert corrected.compute_s(0.0, 0.0, "float32", kernel=product) == pytest.approx(
        1.5 * plain.compute_s(0.0, 0.0, "float32", kernel=product)
    )
    for kind, ratio in (("all_reduce", 2.0), ("all_gather", 1.0)):
        assert corrected.collective_s(kind, axis, 1e6) == pytest.approx(ratio * plain.collective_s(kind, axis, 1e6))
    sizes = np.array([1e5, 1e6])
    assert corrected.compute_s(sizes, sizes, "float32") == pytest.approx(1.5 * plain.compute_s(sizes, sizes, "float32"))


def test_an_interval_adds_up_the_uses_of_a_step() -> None:
    known = Correction(work="compute", ratio=1.2, spread=0.1, count=9)
    low, high = known.factors or (0.0, 0.0)
    assert interval_s({"compute": 2.0, "optimizer": 1.0, "communication": 4.0}, [known]) == pytest.approx(
        (3 * low + 4, 3 * high + 4)
    )
    assert interval_s({"compute": 2.0}, []) is None


def test_a_kind_of_work_is_corrected_once() -> None:
    twice = [Correction(work="compute", ratio=1.0, spread=0.0, count=1)] * 2
    with pytest.raises(ClusterError, match="corrections measures compute twice"):
        Calibration(**{**dict(calibration()), "corrections": twice})


def test_a_calibration_with_corrections_is_read_as_it_was_written() -> None:
    found = calibration(compute=1.1)
    assert Calibration.from_dict(found.to_dict()) == found
