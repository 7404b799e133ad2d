"""Roles: what the axes of a recipe are for, a row for each; a new kind of axis is a row here.

What a row says is all that pins, meshes and filters ask of an axis by its name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from planner.ir.layout import Mesh

WEIGHTS = "weights"
"""The factors of parameters, in the operators that contract with one."""


@dataclass(frozen=True)
class Role:
    """What the ranks along one axis share.

    Attributes:
        name: of the pin and of the axis.
        shards: the factors that it shards: those of one of :data:`planner.formulation.constraints.labels.LABELS`, some
            of which its ranks must divide, or :data:`WEIGHTS`.
        parameters: how it stores them: ``whole``, as pin ``zero`` says, ``sharded``, or in ``any`` way.
        elsewhere: the label that it shards in operators that lack these factors; if there is none, or they lack that
            too, they run whole. What holds no weight is free instead: it may shard all but the batch, and the sequence
            as pin ``sequence_parallel`` says.
        activations: the labels that operators without a weight shard on it, as far as its ranks divide them: norms the
            first, where they have it, others any. Left out, they shard what they like.
        pin: the pin that gives its size along with those of others; left out, that of its name.
        is_alone: no other axis shards what it shards.
        takes_rest: it has the ranks that the sizes of the others leave, where its own is not pinned.
    """

    name: str
    shards: str
    parameters: Literal["whole", "zero", "sharded", "any"]
    elsewhere: str = ""
    activations: tuple[str, ...] = ()
    pin: str = ""
    is_alone: bool = False
    takes_rest: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        """What it shards, first what it shards where it can."""
        return (self.shards, self.elsewhere) if self.elsewhere else (self.shards,)


ROLES = {
    role.name: role
    for role in (
        Role("model", "models", "any"),
        Role("replicate", "batch", "whole"),
        Role("data", "batch", "zero", takes_rest=True),
        Role("depth", "batch", "whole"),
        Role("expert", "expert", "zero", elsewhere="batch", is_alone=True),
        Role("expert_tensor", "expert features", "zero", elsewhere="batch", is_alone=True),
        Role("context", "context", "zero"),
        Role("ulysses", "context", "zero"),
        Role("table", "table", "any", elsewhere="batch"),
        Role("tensor", WEIGHTS, "any"),
        Role("row", "batch", "sharded", pin="tensor"),
        Role("column", WEIGHTS, "any", activations=("features",), pin="tensor"),
        Role("input", WEIGHTS, "any", activations=("tokens", "features"), pin="tensor"),
        Role("output", WEIGHTS, "any", activations=("features", "tokens"), pin="tensor"),
        Role("weight", "batch", "sharded", pin="tensor"),
    )
}
"""By name, major first: the tensor axis is contiguous. The stages of a pipeline stride wider yet. Axes of grids are in
:mod:`planner.formulation.constraints.grids`."""

REST = next(name for name, role in ROLES.items() if role.takes_rest)


def pinnable() -> tuple[str, ...]:
    """The names of the axes that have pins of their own."""
    return tuple(name for name, role in ROLES.items() if not role.pin)


def sharing(label: str) -> tuple[str, ...]:
    """The names of the axes that shard a label."""
    return tuple(name for name, role in ROLES.items() if label in role.labels)


def ranks_sharing(mesh: Mesh, label: str) -> int:
    """How many ranks of a mesh share the dims of a label, such as a batch, or a micro-batch."""
    return math.prod(axis.size for axis in mesh.axes if axis.name in sharing(label))


def described(label: str, names: tuple[str, ...]) -> str:
    """The pins of a label among ``names``, as an error speaks of what they make together: ``pin 'tensor' (row)``."""
    roles = [ROLES[name] for name in sharing(label) if name in names]
    found = [f"{role.pin!r} ({role.name})" if role.pin else repr(role.name) for role in roles]
    return f"the product of pins {' and '.join(found)}" if len(found) > 1 else f"pin {''.join(found) or repr(REST)}"
