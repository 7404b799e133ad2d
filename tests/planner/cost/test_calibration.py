"""Calibration: what was measured becomes prices that grow with size and have no cliffs; bad files say the way out."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from planner.base.errors import ClusterError
from planner.cost.calibration import Calibration
from planner.cost.cluster import ClusterSpec
from planner.cost.kernels import Attention, Product, Stream
from planner.cost.model import CostModel
from planner.ir.layout import Axis

MEASURED: dict[str, Any] = {
    "format": "autopar-calibration",
    "version": 2,
    "device": "cpu",
    "ranks": 4,
    "launch_s": 1e-5,
    "products": [{"dtype": "float32", "m": [10, 100], "n": [10, 100], "k": [10, 100],
                  "seconds": [1e-6, 1e-5, 1e-5, 1e-4, 1e-5, 1e-4, 1e-4, 1e-3]}],
    "attention": [{"dtype": "float32", "backward": False, "keys": [64, 256], "depth": [32, 64],
                   "seconds": [1e-5, 2e-5, 16e-5, 32e-5]}],
    "streams": [{"family": "add", "backward": False, "bytes": [1000, 1000000], "seconds": [1e-5, 1e-3]},
                {"family": "copy", "backward": False, "bytes": [1000, 1000000], "seconds": [1e-5, 5e-4]}],
    "collectives": [{"kind": "all_reduce", "size": 2, "bytes": [1000, 1000000], "seconds": [1e-4, 1e-2]},
                    {"kind": "all_reduce", "size": 2, "beside": True, "bytes": [1000, 1000000],
                     "seconds": [5e-5, 4e-3]},
                    {"kind": "all_reduce", "size": 4, "bytes": [1000, 1000000], "seconds": [3e-4, 3e-2]},
                    {"kind": "broadcast", "size": 4, "bytes": [1000, 1000000], "seconds": [1e-4, 1e-2]}],
}  # fmt: skip


def measured() -> Calibration:
    return Calibration.from_dict(MEASURED)


def costs(devices: int = 4) -> CostModel:
    return CostModel(ClusterSpec.local(devices, "1 GiB", cores=2).calibrated(measured()))


def edited(*path: str | int, value: object) -> dict[str, Any]:
    data = copy.deepcopy(MEASURED)
    place: Any = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return data


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in MEASURED.items() if name != field}


def test_a_product_between_measured_ones_by_hand() -> None:
    table = measured()
    assert table.product_s(Product(10, 100, 10), "float32") == pytest.approx(1e-5)
    # Half way between 10 and 100 in logarithms, time grows as m does.
    assert table.product_s(Product(round(10**1.5), 10, 10), "float32") == pytest.approx(10**-5.5, rel=0.02)
    assert table.product_s(Product(400, 100, 100), "float32") == pytest.approx(4e-3)  # beyond: in proportion
    assert table.product_s(Product(1, 10, 10), "float32") == pytest.approx(1e-6)  # below: level
    assert table.product_s(Product(10, 10, 10, batch=7), "float32") == pytest.approx(7e-6)
    assert table.product_s(Product(10, 100, 10).backward, "float32") == pytest.approx(2e-5)
    assert table.product_s(Product(10, 10, 10), "bfloat16") is None


def test_an_attention_by_hand() -> None:
    table = measured()
    assert table.attention_s(Attention(3, 64, 64, 32, causal=True), "float32") == pytest.approx(3e-5)
    assert table.attention_s(Attention(3, 64, 64, 32, causal=False), "float32") == pytest.approx(6e-5)
    assert table.attention_s(Attention(1, 32, 128, 32, causal=True), "float32") == pytest.approx(1e-5)
    assert table.attention_s(Attention(1, 64, 64, 32, causal=True).backward, "float32") is None


def test_measured_prices_go_first() -> None:
    priced = costs()
    assert priced.compute_s(1.0, 1.0, "float32", kernel=Product(10, 100, 10)) == pytest.approx(1e-5)
    assert priced.compute_s(0.0, 1e6, "float32", kernel=Stream("add")) == pytest.approx(1e-3)
    assert priced.compute_s(0.0, 1e6, "float32") == pytest.approx(5e-4)  # bytes alone are a copy
    assert priced.compute_s(0.0, 0.0, "float32", 0) == 0.0  # every figure holds one start of 10 us
    assert priced.compute_s(0.0, 1e6, "float32", 3, kernel=Stream("add")) == pytest.approx(1e-3 + 2e-5)
    assert priced.collective_s("all_reduce", Axis("a", 2, 1), 1e6) == pytest.approx(1e-2)
    assert priced.collective_s("all_reduce", Axis("a", 2, 2), 1e6) == pytest.approx(1e-2)
    assert priced.collective_s("all_reduce", Axis("a", 1, 4), 1e6) == 0.0


def test_a_call_beside_computing_costs_what_was_measured_there() -> None:
    """Where it was not, it costs as much as one that is waited for: nothing is known to hide it."""
    priced, stated = costs(), CostModel(ClusterSpec.local(4, "1 GiB", cores=2))
    pair, everyone = Axis("a", 2, 1), Axis("a", 4, 1)
    assert priced.collective_s("all_reduce", pair, 1e6, beside=True) == pytest.approx(4e-3)
    assert priced.collective_s("all_reduce", pair, 500500.0, beside=True) == pytest.approx((5e-5 + 4e-3) / 2)
    assert priced.collective_s("broadcast", everyone, 1e6, beside=True) == pytest.approx(1e-2)
    for model, kind in ((stated, "all_reduce"), (priced, "all_gather")):
        waited_s = model.collective_s(kind, everyone, 1e6)
        assert model.collective_s(kind, everyone, 1e6, beside=True) == waited_s


def test_what_was_not_measured_has_its_closed_form() -> None:
    priced, stated = costs(), CostModel(ClusterSpec.local(4, "1 GiB", cores=2))
    unmeasured = [(Stream("softmax"), "float32"), (Stream("add").backward, "float32"), (Product(9, 9, 9), "bfloat16")]
    for kernel, dtype in unmeasured:
        found_s, stated_s = (each.compute_s(5e6, 1e6, dtype, kernel=kernel) for each in (priced, stated))
        assert found_s == stated_s
    everyone = Axis("a", 4, 1)
    assert priced.collective_s("all_gather", everyone, 1e6) == stated.collective_s("all_gather", everyone, 1e6)


def test_groups_that_leave_what_was_measured_cost_no_less_than_inside() -> None:
    device = ClusterSpec.local(4, "1 GiB", cores=2).device
    wire = {"latency_s": 0, "bandwidth_bytes_per_s": 1e12}
    levels = [{"name": "node", "size": 4, **wire}, {"name": "cluster", "size": 8, **wire}]
    spec = ClusterSpec.from_dict({"name": "x", "device": device.model_dump(), "levels": levels, "backend": "gloo",
                                  "calibration": MEASURED})  # fmt: skip
    priced = CostModel(spec)
    prices = [priced.collective_s("all_reduce", Axis("a", size, 1), 10**6) for size in (2, 4, 8, 16, 32)]
    assert prices[0] == pytest.approx(1e-2) and prices[1] == pytest.approx(3e-2)
    assert prices == sorted(prices)
    assert priced.collective_s("all_reduce", Axis("a", 8, 4), 10**6) < 1e-3  # between nodes: as stated


@st.composite
def noisy(draw: st.DrawFn) -> Calibration:
    """Measurements that are all noise."""
    seconds = st.floats(1e-7, 1.0)

    def points(count: int) -> list[float]:
        return draw(st.lists(seconds, min_size=count, max_size=count))

    data = copy.deepcopy(MEASURED)
    data["products"][0] |= {"m": [16, 64, 256], "seconds": points(12)}
    data["attention"][0]["seconds"] = points(4)
    for curve in (*data["streams"], *data["collectives"]):
        curve |= {"bytes": [1000, 20000, 10**6], "seconds": points(3)}
    return Calibration.from_dict(data)


SIZES = st.integers(1, 10**4)
SLACK = 1 + 1e-9


@given(noisy(), SIZES, SIZES, SIZES, st.sampled_from("mnk"), st.integers(1, 1000))
def test_a_larger_product_never_costs_less(table: Calibration, m: int, n: int, k: int, which: str, more: int) -> None:
    sizes = {"m": m, "n": n, "k": k}
    smaller, larger = Product(**sizes), Product(**sizes | {which: sizes[which] + more})
    for a, b in ((smaller, larger), (smaller.backward, larger.backward)):
        price, next_price = table.product_s(a, "float32"), table.product_s(b, "float32")
        assert price is not None and next_price is not None and 0 < price <= next_price * SLACK


@given(noisy(), st.sampled_from([2, 3, 4]), st.integers(0, 10**8), st.integers(0, 10**8))
def test_more_bytes_and_more_ranks_never_cost_less(table: Calibration, size: int, first: int, second: int) -> None:
    fewer, more = sorted((first, second))
    assert table.collective_s("all_reduce", size, fewer) <= table.collective_s("all_reduce", size, more) * SLACK
    smaller = table.collective_s("all_reduce", size - 1, more) if size > 2 else 0.0
    assert smaller <= table.collective_s("all_reduce", size, more) * SLACK
    curve = table.stream(Stream("add"))
    assert curve is not None and curve.price(fewer) <= curve.price(more) * SLACK


@given(noisy(), st.integers(1, 10**8))
def test_there_are_no_cliffs(table: Calibration, size: int) -> None:
    """Prices are continuous: a thousandth more bytes adds at most a thousandth of the steepest stretch."""
    curve = table.stream(Stream("add"))
    points = list(curve.bytes)
    prices = [curve.price(at) for at in points]
    slopes = [(b - a) / (y - x) for (x, a), (y, b) in zip(zip(points, prices), zip(points[1:], prices[1:]))]  # noqa: B905
    steepest = max(*slopes, prices[-1] / points[-1])
    assert curve.price(size * 1.001) - curve.price(size) <= size * 0.001 * steepest * SLACK + 1e-15


def test_arrays_are_priced_entry_by_entry() -> None:
    sizes = np.array([0, 1000, 5000, 10**6, 10**9])
    for kind in ("all_reduce", "all_gather"):
        found = costs().collective_s(kind, Axis("a", 4, 1), sizes)
        assert found.tolist() == pytest.approx([costs().collective_s(kind, Axis("a", 4, 1), int(s)) for s in sizes])


def test_a_file_reads_back_and_a_cluster_refers_to_it(tmp_path: Path) -> None:
    measured().save(tmp_path / "calibration.yaml")
    assert Calibration.load(tmp_path / "calibration.yaml") == measured()
    spec = ClusterSpec.local(4, "1 GiB", cores=2)
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(spec.to_dict() | {"calibration": "calibration.yaml"}))
    loaded = ClusterSpec.load(tmp_path / "cluster.yaml")
    assert loaded == spec.calibrated(measured()) and hash(loaded) == hash(spec.calibrated(measured()))
    loaded.save(tmp_path / "whole.json")
    assert ClusterSpec.load(tmp_path / "whole.json") == loaded


@pytest.mark.parametrize(
    "data, parts",
    [
        (without("launch_s"), ["launch_s is missing", "launch_s: 1.0e-05"]),
        (without("ranks"), ["ranks is missing", "ranks: 4"]),
        (edited("launch_s", value=0.0), ["launch_s is 0.0", "greater than 0"]),
        (edited("version", value=1), ["version 1", "reads version 2: measure again"]),
        (edited("format", value="x"), ["format is 'x'", "autopar-calibration"]),
        (edited("streams", 0, "seconds", value=[0.0, 1.0]), ["streams[0].seconds[0] is 0.0", "greater than 0"]),
        (edited("streams", 0, "seconds", value=[1.0, -1.0]), ["streams[0].seconds[1] is -1.0"]),
        (edited("streams", 0, "seconds", value=[1.0, math.nan]), ["streams[0].seconds[1] is nan", "finite"]),
        (edited("streams", 0, "bytes", value=[10, 10]), ["streams[0].bytes is [10, 10]", "grow"]),
        (edited("streams", 0, "bytes", value=[10]), ["streams[0].bytes is [10]", "at least 2"]),
        (edited("streams", 0, "bytes", value=[10, 20, 30]), ["streams[0].seconds has 2 values for 3 points"]),
        (edited("streams", 0, "family", value="adds"), ["streams[0].family is 'adds'", "'add'"]),
        (edited("streams", 1, "family", value="add"), ["streams measures add False twice"]),
        (edited("products", 0, "seconds", value=[1.0] * 7), ["products[0].seconds has 7 values for 8 points"]),
        (edited("products", 0, "dtype", value="float7"), ["products[0].dtype is 'float7'", "float32"]),
        (edited("products", 0, "m", value=[0, 10]), ["products[0].m is [0, 10]", "from 1"]),
        (edited("collectives", 0, "kind", value="gossip"), ["collectives[0].kind is 'gossip'"]),
        (edited("collectives", 0, "size", value=8), ["groups of 8, but ranks is 4"]),
        (edited("collectives", value=3), ["collectives is 3"]),
        (edited("rank", value=3), ["rank: there is no such field", "did you mean 'ranks'?"]),
        (edited("streams", 0, "byte", value=3), ["streams[0].byte: there is no such field"]),
        (edited(3, value=3), ["3 cannot be the name of a field"]),
        ([], ["a calibration is a mapping"]),
    ],
)  # fmt: skip
def test_what_is_wrong_names_the_field_and_the_value(data: object, parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "calibration.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ClusterError) as caught:
        Calibration.load(path)
    for part in (*parts, str(path), "autopar profile --out"):
        assert part in str(caught.value)


@pytest.mark.parametrize("content, part", [(None, "cannot be read"), ("a: [", "neither YAML nor JSON")])
def test_files_that_are_none(tmp_path: Path, content: str | None, part: str) -> None:
    if content is not None:
        (tmp_path / "calibration.yaml").write_text(content)
    spec = ClusterSpec.local(4, "1 GiB", cores=2).to_dict() | {"calibration": "calibration.yaml"}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(spec))
    with pytest.raises(ClusterError, match=part) as caught:
        ClusterSpec.load(tmp_path / "cluster.yaml")
    assert str(tmp_path / "calibration.yaml") in str(caught.value)


def test_a_calibration_of_another_machine() -> None:
    with pytest.raises(ClusterError, match=r"calibration is of 4 ranks, but a level has 2 devices; .*--ranks 2"):
        ClusterSpec.local(2, "1 GiB", cores=2).calibrated(measured())
    with pytest.raises(ClusterError, match="calibration is of 'cpu', but the device is 'NVIDIA H100"):
        ClusterSpec.preset("dgx-h100").calibrated(measured())
    with pytest.raises(ClusterError, match=r"calibration is 'x\.yaml'"):
        ClusterSpec.from_dict(ClusterSpec.local(4, "1 GiB", cores=2).to_dict() | {"calibration": "x.yaml"})


def test_a_failed_save_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "calibration.yaml"
    path.mkdir()
    with pytest.raises(ClusterError, match="cannot be written"):
        measured().save(path)
    assert list(tmp_path.iterdir()) == [path]
