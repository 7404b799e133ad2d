"""What identifies a model in a plan, and which of its operators no table knows."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from planner.formulation.decision_names import short_op
from planner.ir.graph import Graph, Node, static
from planner.ops import OPS
from planner.ops.dtypes import dtypes
from planner.ops.function import FOUND_OUT, PREFIX, is_unregistered


def fingerprint(graph: Graph) -> str:
    """A hash of what is computed: operators, arguments, shapes, dtypes, names of leaves, outputs and updates."""
    columns = graph.columns
    results = {found: repr(found) for found in {first.results for first in columns.firsts}}
    said = [_said(first, results[first.results]) for first in columns.firsts]
    used, place = np.unique(columns.first, return_index=True)
    numbers: dict[str, int] = {}  # in order of first occurrence, whatever is held as a copy of what
    number = np.zeros(len(said), dtype=np.int64)
    for first in used[np.argsort(place)].tolist():
        number[first] = numbers.setdefault(said[first], len(numbers))
    hasher = hashlib.sha256(repr((list(numbers), columns.targets)).encode())
    for column in (number[columns.first], columns.makers, columns.indices):
        hasher.update(np.asarray(column, dtype="<i8").tobytes())
    hasher.update(repr([(graph.position[ref.node], ref.index) for ref in graph.outputs]).encode())
    hasher.update(repr([(buffer, graph.position[ref.node], ref.index) for buffer, ref in graph.updates]).encode())
    if graph.roots != replace(graph, output_names=()).roots:
        hasher.update(repr(graph.roots).encode())
    return hasher.hexdigest()[:16]


def _said(node: Node, results: str) -> str:
    """What a fingerprint takes of a node but for its target and what it reads."""
    args = [(k, v) for k, v in node.args if not (k in FOUND_OUT and node.op.startswith(PREFIX))]
    return repr((node.op, [(name, static(value)) for name, value in args])) + results


def model_facts(graph: Graph, name: str, mode: str = "train") -> dict[str, Any]:
    """What identifies a model in a plan; ``mode`` is ``train`` or ``eval``."""
    params = sum(node.results[0].numel for node in graph.applying("param").firsts)
    facts = {"class": name, "parameters": params, "mode": mode, "dtypes": dtypes(graph)}
    return {**facts, "fingerprint": fingerprint(graph)}


def coverage(graph: Graph) -> dict[str, int]:
    """Operators without a row, and Functions that nobody registered -> how often they occur."""
    columns = graph.columns
    found: Counter[str] = Counter()
    for first, times in zip(columns.firsts, np.bincount(columns.first).tolist(), strict=True):
        if not first.is_leaf and first.op not in OPS:
            found[first.op] += times
        if is_unregistered(first):
            found[f"{short_op(first.op)} (not registered)"] += times
    return dict(sorted(found.items()))
