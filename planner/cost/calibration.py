"""Calibration: what was measured on one machine, as a small file, and costs interpolated from it.

``autopar profile`` writes the file; a cluster refers to it (``calibration: file.yaml``) or holds it. Every
measurement is taken with all ``ranks`` processes busy at once, as they are in training.

Prices grow with size and have no cliffs, whatever noise was measured: tables are first raised to the largest
value before them, then read along straight lines. Below its smallest point a table stays level, beyond its largest
it grows in proportion.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, overload

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from planner.base.errors import ClusterError
from planner.base.files import read_yaml, write_text
from planner.base.units import FROZEN, BytesPerS, Described, Seconds, check_data
from planner.cost.correction import Correction
from planner.cost.kernels import Attention, Product, Stream
from planner.ops.table import Family

VERSION = 2
"""Of files; in the first one collectives were measured back to back."""
Floats = NDArray[np.float64]
Sizes = NDArray[np.number]
Positive = Annotated[Seconds, Field(gt=0)]
Grid = Annotated[tuple[int, ...], FROZEN, Field(min_length=2, examples=["[64, 256, 1024]"])]
Points = Annotated[tuple[Positive, ...], FROZEN, Field(min_length=2, examples=["[0.001, 0.02, 0.1]"])]
Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
Dtype = Literal["float64", "float32", "float16", "bfloat16"]


class Curve(Described):
    """Measured seconds against bytes."""

    bytes: Grid = Field(examples=["[4096, 65536, 1048576]"])
    seconds: Points

    @model_validator(mode="after")
    def _matches(self) -> Curve:
        _check_grid("bytes", self.bytes)
        _check_count("seconds", self.seconds, len(self.bytes))
        return self

    @cached_property
    def _rising(self) -> Floats:
        return np.maximum.accumulate(np.array(self.seconds))

    @overload
    def price(self, size: float) -> float: ...
    @overload
    def price(self, size: Sizes) -> Floats: ...
    def price(self, size: float | Sizes) -> float | Floats:
        """Seconds for a number of bytes, or for an array of them."""
        last = self.bytes[-1]
        sizes = np.asarray(size, dtype=np.float64)
        found = np.interp(sizes, self.bytes, self._rising) * np.maximum(1.0, sizes / last)
        return found if isinstance(size, np.ndarray) else float(found)


class ProductTable(Described):
    """Seconds of ``x[m, k] @ w[n, k].T`` on a grid; ``seconds`` runs over k fastest, then n, then m."""

    dtype: Dtype = Field(examples=["float32"])
    m: Grid
    n: Grid
    k: Grid
    seconds: Points

    @model_validator(mode="after")
    def _matches(self) -> ProductTable:
        for name in ("m", "n", "k"):
            _check_grid(name, getattr(self, name))
        _check_count("seconds", self.seconds, len(self.m) * len(self.n) * len(self.k))
        return self

    @cached_property
    def _table(self) -> Floats:
        return _log_rising(self.seconds, (len(self.m), len(self.n), len(self.k)))

    def price(self, product: Product) -> float:
        """Seconds of a product, or of the two of a backward; a batch of them takes that many times as long."""
        axes = (self.m, self.n, self.k)
        return sum(p.batch * _read(self._table, axes, (p.m, p.n, p.k)) for p in product.parts)


class AttentionTable(Described):
    """Seconds per head of causal attention of as many queries as keys; ``seconds`` runs over depth fastest."""

    dtype: Dtype = Field(examples=["float32"])
    backward: bool
    keys: Grid
    depth: Grid
    seconds: Points

    @model_validator(mode="after")
    def _matches(self) -> AttentionTable:
        for name in ("keys", "depth"):
            _check_grid(name, getattr(self, name))
        _check_count("seconds", self.seconds, len(self.keys) * len(self.depth))
        return self

    @cached_property
    def _table(self) -> Floats:
        return _log_rising(self.seconds, (len(self.keys), len(self.depth)))

    def price(self, kernel: Attention) -> float:
        """Seconds of an attention: as long as the square one with as many pairs, twice that without a mask."""
        length = math.sqrt(kernel.queries * kernel.keys)
        per_head = _read(self._table, (self.keys, self.depth), (length, kernel.depth))
        return kernel.heads * per_head * (1 if kernel.causal else 2)


class StreamCurve(Curve):
    """Seconds of an operator against the bytes of its operands and results, twice those for its backward."""

    family: Family = Field(examples=["add"])
    backward: bool


class CollectiveCurve(Curve):
    """Seconds of a collective in groups of ``size`` against the bytes that a rank passes in.

    As many groups run at once as there are ranks for. ``beside``: not of one that is waited for, but by which computing
    becomes longer that it runs beside.
    """

    kind: Kind = Field(examples=["all_reduce"])
    size: int = Field(ge=2, examples=["4"])
    beside: bool = False


class HostUpdate(Described):
    """What a device's share of the host's cores pass over in an update with state of one dtype, beside a GPU."""

    dtype: Dtype = Field(examples=["float32"])
    bytes_per_s: BytesPerS = Field(gt=0, examples=["80 GB/s"])


class Calibration(Described):
    """What was measured with ``ranks`` busy processes on one kind of device.

    Attributes:
        device: the device's kind, as the cluster names it.
        launch_s: seconds to start an operator that does next to nothing.
        products, attention, streams, collectives: the tables; what is missing is priced by the closed forms.
        host_link_bytes_per_s: between host and device memory, where those differ.
        host_updates: how fast the host updates what is at home there.
        corrections: by what prices are multiplied, since steps that ran were seen to take so much longer.
    """

    format: Literal["autopar-calibration"] = Field(examples=["autopar-calibration"])
    version: int = Field(examples=["2"])
    device: str = Field(min_length=1, examples=["cpu"])
    ranks: int = Field(ge=1, examples=["4"])
    launch_s: Seconds = Field(gt=0, examples=["1.0e-05"])
    host_link_bytes_per_s: BytesPerS | None = Field(default=None, gt=0, examples=["50 GB/s"])
    host_updates: Annotated[tuple[HostUpdate, ...], FROZEN] = ()
    products: Annotated[tuple[ProductTable, ...], FROZEN] = ()
    attention: Annotated[tuple[AttentionTable, ...], FROZEN] = ()
    streams: Annotated[tuple[StreamCurve, ...], FROZEN] = ()
    collectives: Annotated[tuple[CollectiveCurve, ...], FROZEN] = ()
    corrections: Annotated[tuple[Correction, ...], FROZEN] = ()

    @field_validator("version", mode="before")
    @classmethod
    def _is_read(cls, version: object) -> object:
        if version != VERSION:
            raise ClusterError(
                f"the calibration is of version {version!r}, whose figures mean something else; this autopar reads "
                f"version {VERSION}: measure again with autopar profile"
            )
        return version

    @model_validator(mode="after")
    def _said_once(self) -> Calibration:
        tables: dict[str, list[tuple[object, ...]]] = {
            "products": [(t.dtype,) for t in self.products],
            "attention": [(t.dtype, t.backward) for t in self.attention],
            "streams": [(c.family, c.backward) for c in self.streams],
            "collectives": [(c.kind, c.size, *["beside"] * c.beside) for c in self.collectives],
            "host_updates": [(h.dtype,) for h in self.host_updates],
            "corrections": [(each.work,) for each in self.corrections],
        }
        for name, keys in tables.items():
            twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
            if twice is not None:
                raise ClusterError(f"{name} measures {' '.join(map(str, twice))} twice: keep one")
        for curve in self.collectives:
            if curve.size > self.ranks:
                raise ClusterError(f"collectives has groups of {curve.size}, but ranks is {self.ranks}")
        return self

    @cached_property
    def _rows(self) -> Mapping[object, Any]:
        rows: dict[object, Any] = {("product", t.dtype): t for t in self.products}
        rows |= {("attention", t.dtype, t.backward): t for t in self.attention}
        rows |= {("stream", c.family, c.backward): c for c in self.streams}
        return rows

    @property
    def has_tables(self) -> bool:
        """Whether rates were measured, and not only closed forms corrected."""
        return any((self.products, self.attention, self.streams, self.collectives))

    def ratio(self, work: str) -> float:
        """What predicted seconds of a kind of work are multiplied by."""
        return next((each.ratio for each in self.corrections if each.work == work), 1.0)

    def product_s(self, product: Product, dtype: str) -> float | None:
        """Seconds of a matrix product, its start included; ``None`` if the dtype was not measured."""
        table = self._rows.get(("product", dtype))
        return None if table is None else float(table.price(product))

    def attention_s(self, kernel: Attention, dtype: str) -> float | None:
        """Seconds of an attention; ``None`` if it was not measured."""
        table = self._rows.get(("attention", dtype, kernel.is_backward))
        return None if table is None else float(table.price(kernel))

    def stream(self, kernel: Stream) -> Curve | None:
        """Seconds by bytes of an operator's family, its start included; ``None`` if it was not measured."""
        found: Curve | None = self._rows.get(("stream", kernel.family, kernel.is_backward))
        return found

    def host_update_bytes_per_s(self, dtype: str) -> float | None:
        """What the host passes over in an update of a dtype, else of the first measured; ``None`` if none was."""
        found = [each for each in self.host_updates if each.dtype == dtype] or self.host_updates
        return found[0].bytes_per_s if found else None

    @cached_property
    def _groups(self) -> Mapping[tuple[str, bool], list[CollectiveCurve]]:
        groups: dict[tuple[str, bool], list[CollectiveCurve]] = {}
        for curve in sorted(self.collectives, key=lambda c: c.size):
            groups.setdefault((curve.kind, curve.beside), []).append(curve)
        return groups

    def measures(self, kind: str) -> bool:
        """Whether a collective was measured."""
        return (kind, False) in self._groups

    @overload
    def collective_s(self, kind: str, size: int, bytes_in: float, *, beside: bool = False) -> float: ...
    @overload
    def collective_s(self, kind: str, size: int, bytes_in: Sizes, *, beside: bool = False) -> Floats: ...
    def collective_s(self, kind: str, size: int, bytes_in: float | Sizes, *, beside: bool = False) -> float | Floats:
        """Seconds of a measured collective in groups of ``size``, between the sizes that were measured.

        Larger groups never cost less: a smaller one that was measured to cost more counts instead. What was not
        measured ``beside`` computing costs what it does where it is waited for.
        """
        curves = self._groups.get((kind, beside)) or self._groups[kind, False]
        prices = np.maximum.accumulate(np.array([curve.price(bytes_in) for curve in curves]))
        sizes = [math.log(curve.size) for curve in curves]
        place = np.interp(math.log(size), sizes, np.arange(len(sizes)))
        low = int(place)
        high = min(low + 1, len(sizes) - 1)
        found = prices[low] + (place - low) * (prices[high] - prices[low])
        found = found * max(1.0, size / curves[-1].size)
        return found if isinstance(bytes_in, np.ndarray) else float(found)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a calibration file; raises :class:`ClusterError` naming what is wrong."""
        name = os.fspath(path)
        data = read_yaml(path, "calibration file")
        try:
            return cls.from_dict(data)
        except ClusterError as error:
            raise ClusterError(
                f"calibration file {name!r}:\n{error}\n(autopar profile --out {name} writes a new one)"
            ) from None

    @classmethod
    def from_dict(cls, data: object) -> Calibration:
        """The inverse of :meth:`to_dict`."""
        if not isinstance(data, Mapping):
            raise ClusterError(
                f"a calibration is a mapping with the fields {', '.join(cls.model_fields)}; got {data!r}"
            )
        check_data(data)
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for YAML or JSON."""
        return self.model_dump(mode="json", exclude_none=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write YAML, one table per line or two; a reader sees the old file or the new one, whole."""
        text = "# Measured by autopar profile. Sizes in elements or bytes, times in seconds.\n"
        text += yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None, width=120)
        try:
            write_text(Path(path), text)
        except OSError as error:
            raise ClusterError(f"calibration file {os.fspath(path)!r} cannot be written: {error.strerror}") from error


def _check_grid(name: str, points: Sequence[int]) -> None:
    if points[0] < 1 or any(a >= b for a, b in itertools.pairwise(points)):
        raise ClusterError(f"{name} is {list(points)}: give whole numbers from 1 that grow")


def _check_count(name: str, values: Sequence[float], count: int) -> None:
    if len(values) != count:
        raise ClusterError(f"{name} has {len(values)} values for {count} points")


def _log_rising(seconds: Sequence[float], shape: tuple[int, ...]) -> Floats:
    """Logarithms of a table, each raised to the largest of those at no larger sizes."""
    table = np.array(seconds).reshape(shape)
    for axis in range(len(shape)):
        table = np.maximum.accumulate(table, axis=axis)
    logarithms: Floats = np.log(table)
    return logarithms


def _read(table: Floats, axes: Sequence[Sequence[int]], sizes: Sequence[float]) -> float:
    """Seconds at ``sizes``, by straight lines between logarithms: power laws in between, monotone in each size."""
    beyond = 1.0
    for axis, size in zip(axes, sizes, strict=True):
        points = np.log(axis)
        place = float(np.interp(math.log(max(1.0, size)), points, np.arange(len(axis))))
        low = int(place)
        high = min(low + 1, len(axis) - 1)
        table = table[low] + (place - low) * (table[high] - table[low])  # takes away the leading axis
        beyond *= max(1.0, size / axis[-1])
    return float(np.exp(table)) * beyond
