"""Names the axes of a mesh that was searched by what the plan found shards on them.

The search tries meshes whose axes have no meaning. Once decisions are taken each has one, and takes the name of the pin
(:mod:`planner.formulation.constraints.roles`) that shards the same. The name decides nothing: only where pins give
sizes do the names of axes have roles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.formulation.assignment import Assignment
from planner.formulation.constraints.labels import Labels, label_blocks, sharded_parts
from planner.formulation.constraints.pins import FREE_AXES
from planner.ir.graph import Node, Ref
from planner.ir.layout import MICRO, Mesh, Shard
from planner.ops import OPS
from planner.ops.attention import shares_heads
from planner.ops.sharding_rule import AxisStrategy
from planner.search.branch_and_bound import Searched
from planner.search.search_context import SearchContext

IDLE = "idle"
"""An axis on which everything that weighs runs whole, on every rank alike."""
EXPERTS = ("expert", "expert_tensor")
NAMED = (
    ("model", "models"),
    *zip(EXPERTS, ("expert", "expert features"), strict=True),
    ("data", "batch"),
    ("context", "context"),
)
"""Names of axes, and the labels of what they shard; what else is sharded are weights."""


def named(context: SearchContext, found: Searched) -> Searched:
    """The same result with the axes of its plan named; a mesh stays as it is where pins say what its axes are, or name
    them, and so does that of one device.
    """
    config, pins = found.best.config, context.pins
    if pins.sizes or config.mesh.size == 1 or any({*FREE_AXES} & wanted.keys() for wanted in pins.layers.values()):
        return found
    names = iter(_distinct(_meanings(found.assignment), found.assignment))
    axes = (axis if axis.name == MICRO else replace(axis, name=next(names)) for axis in config.mesh.axes)
    mesh = Mesh(tuple(axes))
    rows = (
        replace(row, config=replace(config, mesh=mesh)) if row.config == config else row for row in found.candidates
    )
    return replace(found, best=replace(found.best, space=found.best.space.called(mesh)), candidates=tuple(rows))


def _meanings(assignment: Assignment) -> list[str]:
    """What each axis of ranks shards most, counted in operations and, where there are none, in elements; heads of
    attention aside, which are shared where weights are, and where the sequence is. Experts are shared beside the batch
    and beside weights, so an axis is named for them only if it shards nothing else.
    """
    space, graph = assignment.space, assignment.space.graph
    shards = {axis: label_blocks(space.decision_graph, label) for axis, label in NAMED}
    weights = [Counter[str]() for _ in space.mesh.axes]
    for members in space.members.values():
        node = graph.by_name[members[0]]
        if node.is_leaf:
            continue
        row, rule = OPS.get(node.op), space.rules[node.name]
        flops = row.flops(node, graph.input_types(node), rule) if row is not None else 0
        weight = len(members) * (flops + sum(result.numel for result in node.results))
        for axis, strategy in enumerate(assignment.choice(node).axes):
            if strategy.factor and not shares_heads(node, strategy):
                weights[axis][_shards(assignment, node, strategy, shards)] += weight
    names = zip(space.mesh.names, weights, strict=True)
    return [
        max(found, key=lambda name: (name not in EXPERTS, found[name]), default=IDLE)
        for axis, found in names
        if axis != MICRO
    ]


def _shards(assignment: Assignment, node: Node, strategy: AxisStrategy, shards: Mapping[str, Labels]) -> str:
    """The name for an axis that does the same with every operator."""
    rule = assignment.space.rules[node.name]
    parts = sharded_parts(rule, strategy)
    for name, labels in shards.items():
        if not parts.isdisjoint(labels.parts(node, rule)):
            return name
    return "tensor"


def _distinct(names: Sequence[str], assignment: Assignment) -> list[str]:
    """Of two axes for data the first that stores parameters whole replicates; others of one name are told apart."""
    found = list(names)
    first = len(assignment.space.mesh.axes) - len(found)  # the axis of micro-batches has no name to find
    whole = [at for at, name in enumerate(found) if name == "data" and _stores_whole(assignment, first + at)]
    if found.count("data") == 2 and whole:
        found[whole[0]] = "replicate"
    letters = {name: iter("abc") for name, times in Counter(found).items() if times > 1}
    return [f"{name}_{next(letters[name])}" if name in letters else name for name in found]


def _stores_whole(assignment: Assignment, axis: int) -> bool:
    """Whether most elements of parameters are stored whole on an axis."""
    graph, numel = assignment.space.graph, Counter[bool]()
    for leaf in graph.leaves:
        if leaf.op == "param":
            numel[isinstance(assignment.produced(Ref(leaf.name))[axis], Shard)] += leaf.results[0].numel
    return numel[False] >= numel[True]
