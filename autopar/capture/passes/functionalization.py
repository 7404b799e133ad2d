"""Functionalization: writes in place become new values, so that the graph is functional."""

from __future__ import annotations

import warnings

from torch import fx
from torch.export import ExportedProgram

from autopar.capture.repeats.markers import writes_in_place


def functionalization(exported: ExportedProgram) -> ExportedProgram:
    """Have torch take writes in place out of the graph, if there are any; the buffers' new values become outputs."""
    if not mutates(exported):
        return exported
    with warnings.catch_warnings():  # of torch about its own copying
        warnings.simplefilter("ignore", FutureWarning)
        return exported.run_decompositions({})


def mutates(exported: ExportedProgram) -> bool:
    """Whether the graph writes to a tensor in place."""
    graphs = [module.graph for module in exported.graph_module.modules() if isinstance(module, fx.GraphModule)]
    return any(writes_in_place(node) for graph in graphs for node in graph.nodes)
