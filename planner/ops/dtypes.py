"""In which dtypes a model is stored and computes."""

from __future__ import annotations

from collections import Counter

import numpy as np

from planner.ir.graph import Graph
from planner.ops import OPS

PRODUCTS = ("linear", "matmul", "attention", "other")
"""Kernels that do most of the arithmetic."""


def dtypes(graph: Graph) -> dict[str, str]:
    """In which dtypes a model has its ``parameters``, does ``compute`` matrix products, and has ``gradients``.

    Where there are several, that of most elements comes first; what has less than a hundredth of them is left out.
    """
    columns = graph.columns
    found: dict[str, Counter[str]] = {"parameters": Counter(), "compute": Counter(), "gradients": Counter()}
    for first, times in zip(columns.firsts, np.bincount(columns.first).tolist(), strict=True):
        row = OPS.get(first.op)
        if first.op == "param":
            tensor = first.results[0]
            found["parameters"][tensor.dtype] += times * tensor.numel
            found["gradients"][tensor.dtype] += times * tensor.numel * tensor.grad
        elif row is not None and row.kernel in PRODUCTS:
            found["compute"][first.results[0].dtype] += times * first.results[0].numel
    return {use: told for use, counts in found.items() if (told := _most(counts))}


def _most(counts: Counter[str]) -> str:
    total = counts.total()
    return ", ".join(dtype for dtype, count in counts.most_common() if count > total / 100)
