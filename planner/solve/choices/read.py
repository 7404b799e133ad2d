"""Turn a file in the public format of the contest on intra-operator parallelism (iopddl) into a :class:`Problem`.

The file is JSON, plain or gzipped: ``problem.nodes`` has ``intervals``, ``costs`` and ``usages``, one entry per node,
and ``problem.edges`` has ``nodes`` and row-major ``costs``. A node's usage counts at the moments of its interval
``[first, last)``; the sum must stay within ``problem.usage_limit``. A cost of 10^18 or more is forbidden.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from planner.base.errors import AutoparError
from planner.solve.problem import Edge, Floats, Ints, Problem, Span, Vertex

FORBIDDEN = 10**18
_EXACT = 2**53  # whole numbers up to this are exact as floats
_SHOWN = 40  # digits of a number in an error, at most


def read_problem(path: Path) -> Problem:
    """The problem in a file; raises :class:`AutoparError` naming the field and the place of what is wrong.

    Costs become ``time_s``. Nodes and edges with equal costs share one array.
    """
    try:
        raw = path.read_bytes()
        document = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise AutoparError(f"{path}: cannot be read as JSON, plain or gzipped: {error}") from None
    problem = _field(document, "", "problem")
    vertices = _vertices(_field(problem, "problem", "nodes"))
    limit = _field(problem, "problem", "usage_limit") if "usage_limit" in problem else None
    if limit is not None:
        limit = _whole(limit, "problem.usage_limit")
    return Problem(vertices, _edges(_field(problem, "problem", "edges"), vertices), limit)


def _vertices(nodes: Any) -> tuple[Vertex, ...]:
    where = "problem.nodes"
    costs = _list(_field(nodes, where, "costs"), f"{where}.costs")
    usages = _list(_field(nodes, where, "usages"), f"{where}.usages", len(costs))
    intervals = _list(_field(nodes, where, "intervals"), f"{where}.intervals", len(costs))
    vertices = []
    for i, (cost, usage, interval) in enumerate(zip(costs, usages, intervals, strict=True)):
        time_s = _with_forbidden(_numbers(cost, f"{where}.costs[{i}]"))
        held = _numbers(usage, f"{where}.usages[{i}]", len(time_s))
        wrong = (held != np.floor(held)) | (held > _EXACT)
        if wrong.any():
            at = int(wrong.argmax())
            raise AutoparError(f"{where}.usages[{i}][{at}]: must be whole, 2^53 at most, is {_shown(usage[at])}")
        first, last = _two_whole(interval, f"{where}.intervals[{i}]")
        if last < first:
            raise AutoparError(f"{where}.intervals[{i}]: must not end before it starts, is [{first}, {last}]")
        spans = (Span(first, last, held.astype(np.int64)),) if first < last else ()
        nothing, no_bytes = _nothing(len(time_s))
        vertices.append(Vertex(f"node {i}", time_s, nothing, nothing, no_bytes, no_bytes, spans))
    return tuple(vertices)


def _edges(edges: Any, vertices: tuple[Vertex, ...]) -> tuple[Edge, ...]:
    where = "problem.edges"
    ends = _list(_field(edges, where, "nodes"), f"{where}.nodes")
    costs = _list(_field(edges, where, "costs"), f"{where}.costs", len(ends))
    shared: dict[tuple[int, tuple[float, ...]], Edge] = {}
    result = []
    for i, (pair, cost) in enumerate(zip(ends, costs, strict=True)):
        tail, head = _two_whole(pair, f"{where}.nodes[{i}]")
        if max(tail, head) >= len(vertices):
            raise AutoparError(f"{where}.nodes[{i}]: there is no node {max(tail, head)}, only {len(vertices)} nodes")
        rows, columns = vertices[tail].choices, vertices[head].choices
        key = columns, tuple(_list(cost, f"{where}.costs[{i}]", rows * columns))
        if _types(cost) or key not in shared:
            time_s = _with_forbidden(_numbers(cost, f"{where}.costs[{i}]", rows * columns)).reshape(rows, columns)
            nothing, no_bytes = _nothing(rows, columns)
            shared[key] = Edge(tail, head, time_s, nothing, no_bytes)
        like = shared[key]
        result.append(Edge(tail, head, like.time_s, like.background_s, like.held_bytes))
    return tuple(result)


@cache
def _nothing(*shape: int) -> tuple[Floats, Ints]:
    return np.zeros(shape), np.zeros(shape, np.int64)


def _with_forbidden(costs: Floats) -> Floats:
    return np.where(costs >= FORBIDDEN, math.inf, costs)


def _field(value: Any, where: str, name: str) -> Any:
    if not isinstance(value, dict):
        raise AutoparError(f"{where or 'the document'}: must be an object, is {_kind(value)}")
    if name not in value:
        raise AutoparError(f"{where}.{name}: missing".lstrip("."))
    return value[name]


def _list(value: Any, where: str, length: int | None = None) -> list[Any]:
    if not isinstance(value, list):
        raise AutoparError(f"{where}: must be a list, is {_kind(value)}")
    if length is not None and len(value) != length:
        raise AutoparError(f"{where}: must have {length} entries, has {len(value)}")
    return value


def _numbers(value: Any, where: str, length: int | None = None) -> Floats:
    """A list of numbers, at least one and none negative."""
    values = _list(value, where, length)
    if not values:
        raise AutoparError(f"{where}: must have at least one entry")
    if _types(values):
        at = next(i for i, entry in enumerate(values) if type(entry) not in (int, float))
        raise AutoparError(f"{where}[{at}]: must be a number, is {_kind(values[at])}")
    try:
        numbers: Floats = np.array(values, dtype=np.float64)
    except OverflowError:
        most = sys.float_info.max
        at = next(i for i, entry in enumerate(values) if type(entry) is int and abs(entry) > most)
        raise AutoparError(f"{where}[{at}]: must be {most:.3g} at most, is {_shown(values[at])}") from None
    wrong = ~(numbers >= 0)
    if wrong.any():
        at = int(wrong.argmax())
        raise AutoparError(f"{where}[{at}]: must be 0 or more, is {_shown(values[at])}")
    return numbers


def _types(values: list[Any]) -> set[type]:
    """What is in the list beside numbers."""
    return set(map(type, values)) - {int, float}


def _two_whole(value: Any, where: str) -> tuple[int, int]:
    pair = _list(value, where, 2)
    return _whole(pair[0], f"{where}[0]"), _whole(pair[1], f"{where}[1]")


def _whole(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value <= _EXACT:
        raise AutoparError(f"{where}: must be a whole number, 0 or more and 2^53 at most, is {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    """A value in an error: a number, or what it is instead."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _kind(value)
    digits = str(abs(value))
    return str(value) if len(digits) <= _SHOWN else f"a number of {len(digits)} digits"


def _kind(value: Any) -> str:
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return "null" if value is None else kinds.get(type(value), "a number")
