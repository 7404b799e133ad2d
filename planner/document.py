"""The document that a plan is: decisions, and next to them what was predicted of each.

Values only. ``planner.account`` fills in the details, ``planner.plan`` gives the document its doors
(files, views), ``planner.report`` and ``planner.explain`` read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.cluster import ClusterSpec
from planner.conversion import Collective
from planner.formulate import Assignment
from planner.layout import Mesh
from planner.predict import Prediction


@dataclass(frozen=True)
class Search:
    """What the search did: ``status`` is ``optimal`` with gap 0, or ``feasible`` with the proven gap.

    ``seconds`` is by step of planning; every candidate is a mesh with its ``status``, ``step_time_s``,
    ``bound_s`` (``None``: proven infeasible) and ``peak_bytes``.
    """

    status: str
    gap: float
    seconds: Mapping[str, float]
    candidates: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class BlockPlan:
    """One distinct block: how often it occurs, and the decision of each of its operators and values.

    ``ops`` maps ``"module path: operator"`` to the strategy on every axis (``"data:m tensor:n"``);
    ``values`` maps the same keys to the layout in which a result with several readers is delivered;
    ``at`` numbers its instances among all blocks in execution order.
    """

    name: str
    count: int
    ops: Mapping[str, str]
    values: Mapping[str, str]
    at: tuple[int, ...] = ()


@dataclass(frozen=True)
class Move:
    """A conversion of one value, ``times`` per step over all instances of a block.

    Attributes:
        value: the operator (of this block, or ``"name in block"``) or the leaf that it comes from.
        source, target: layouts before and after.
        steps: local types along the route, axis by axis: ``"S>R data"``.
        calls: its collectives, forward and backward. Gradients of parameters that are summed together
            with others of their block are listed alone here and together in the block's collectives.
        forward_s, backward_s: seconds of one occurrence.
    """

    value: str
    source: str
    target: str
    steps: tuple[str, ...] = ()
    calls: tuple[Collective, ...] = ()
    forward_s: float = 0.0
    backward_s: float = 0.0
    times: int = 1


@dataclass(frozen=True)
class OpDetail:
    """What one operator of a block does under the plan; seconds and bytes are of one occurrence on one rank.

    Attributes:
        path: the owning module, ``*`` where the instances of the block differ.
        meaning: per axis, what the strategy shards, in words: ``batch``, ``sequence``, ``columns`` ...
        operands: (where it comes from, layout in which the operator takes it).
        results: layout of each result.
        shape: of the first result, whole.
        parameters: names of the parameters that it reads.
        flops: forward operations of the whole operator.
        forward_s, backward_s: computing.
        inner: collectives of the operator's own local form; ``inner_s`` their seconds.
        before, after: conversions of its operands, and of its results right after it.
    """

    path: str
    meaning: tuple[str, ...]
    operands: tuple[tuple[str, str], ...]
    results: tuple[str, ...]
    shape: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    flops: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    saved_bytes: int = 0
    transient_bytes: int = 0
    inner: tuple[Collective, ...] = ()
    inner_s: float = 0.0
    before: tuple[Move, ...] = ()
    after: tuple[Move, ...] = ()


@dataclass(frozen=True)
class BlockDetail:
    """What a distinct block does: its operators by the names of :class:`BlockPlan`, and its calls per step."""

    ops: Mapping[str, OpDetail] = field(default_factory=dict)
    collectives: tuple[tuple[Collective, int], ...] = ()


@dataclass(frozen=True)
class LeafDetail:
    """A parameter, buffer or input: whole shape, dtype, how many share the entry, bytes of one on one rank.

    ``state_bytes`` is what the rank holds with it: gradient and optimizer state.
    """

    shape: tuple[int, ...]
    dtype: str
    count: int
    local_bytes: int
    state_bytes: int = 0
    after: tuple[Move, ...] = ()


@dataclass(frozen=True)
class Document:
    """A plan for one model on one cluster.

    Attributes:
        model: class name, number of parameters, and fingerprint of the captured graph.
        cluster: what it was planned for.
        mesh: the axes, major first.
        pin: what the user had fixed.
        inputs, parameters, buffers: layout of every leaf, one local type per axis, by original name
            (``*`` where the instances of a block share it).
        values: layout in which leaves with several readers are delivered.
        blocks: every distinct block once.
        outputs: layout of every output.
        predicted: the step's time, memory and collectives.
        search: status, bound and seconds.
        coverage: operators that the op table does not know -> how often they occur; they run replicated.
        details: what each block does, aligned with ``blocks``; what ``predicted`` consists of.
        leaves: details of parameters, buffers and inputs by name.
        assignment: the decisions themselves, where the plan was made in this process; not part of the file.
    """

    model: Mapping[str, Any]
    cluster: ClusterSpec
    mesh: Mesh
    pin: Mapping[str, Any]
    inputs: Mapping[str, str]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    values: Mapping[str, str]
    blocks: tuple[BlockPlan, ...]
    outputs: tuple[str, ...]
    predicted: Prediction
    search: Search
    coverage: Mapping[str, int] = field(default_factory=dict)
    details: tuple[BlockDetail, ...] = ()
    leaves: Mapping[str, LeafDetail] = field(default_factory=dict)
    assignment: Assignment | None = field(default=None, compare=False, repr=False)
