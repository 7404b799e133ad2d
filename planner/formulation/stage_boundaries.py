"""What the ranks of a pipeline send one another in a step, call by call.

``Assignment, where its stages are and where they are cut -> Exchanges``. Stages lie on meshes of their own, side by
side, so that a rank has to do with those alone that hold the same part of other stages. They send values on and
gradients back, tell each other the loss, and sum the gradients of parameters that several of them read.

What crosses from one block to the next is :func:`crossing`, whoever asks: the price of a cut, the programs of its
stages, and this list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.formulation.assignment import Assignment
from planner.formulation.resharding import local_bytes
from planner.ir.folding import Folded
from planner.ir.graph import Ref

LOSS_BYTES = 16
"""The loss is told in float64, with the scale that its backward assumed."""


@dataclass(frozen=True)
class Exchange:
    """One call among the ranks of a pipeline.

    Attributes:
        kind: ``send``, ``broadcast`` or ``all_reduce``.
        ranks: of the pipeline: sender and receiver, or all that take part.
        bytes_in: size of the tensor that is sent, or that each rank passes in.
        phase: ``forward`` or ``backward``.
        boundary: what a send crosses: that between this stage and the next one.
    """

    kind: str
    ranks: tuple[int, ...]
    bytes_in: int
    phase: str
    boundary: int | None = None

    def is_made_by(self, rank: int) -> bool:
        """Whether a rank passes something in; who only receives does not."""
        return rank == self.ranks[0] if self.kind == "send" else rank in self.ranks

    def __str__(self) -> str:
        if self.kind == "send":
            between = "?" if self.boundary is None else f"{self.boundary} and {self.boundary + 1}"
            where = f"from pipeline rank {self.ranks[0]} to {self.ranks[1]}, between stages {between}"
        else:
            where = f"over pipeline ranks {', '.join(map(str, self.ranks))}"
        return f"{self.phase} {self.kind} of {self.bytes_in:,} bytes {where}"


Exchanges = Counter[Exchange]


def crossing(folded: Folded) -> list[list[Ref]]:
    """After each block, the values that it or earlier ones made and later ones read, in the order they are made in."""
    made = {ref: at for at, instance in enumerate(folded.instances) for ref in instance.block.outputs}
    last = {ref: at for at, instance in enumerate(folded.instances) for ref in instance.block.inputs}
    found: list[list[Ref]] = [[] for _ in folded.instances]
    for ref, first in made.items():
        for at in range(first, last.get(ref, first)):
            found[at].append(ref)
    return found


def sent(assignment: Assignment, refs: Iterable[Ref]) -> dict[Ref, int]:
    """Bytes of values as they are sent from stage to stage."""
    space = assignment.space
    return {ref: local_bytes(space.graph.type_of(ref), assignment.consumer_layout(ref), space.mesh) for ref in refs}


def ties(assignment: Assignment, placed: Sequence[int], bounds: Sequence[int]) -> dict[tuple[int, ...], list[str]]:
    """The ranks of a pipeline -> the trained parameters that blocks of just these ranks read, where they are several.

    Args:
        placed: the rank of every stage.
        bounds: stage ``s`` has the blocks from ``bounds[s]`` up to, not including, ``bounds[s + 1]``.
    """
    graph, readers = assignment.space.graph, dict[str, set[int]]()
    for rank, (low, high) in zip(placed, pairwise(bounds), strict=True):
        for instance in assignment.space.folded.instances[low:high]:
            for ref in instance.block.inputs:
                if ref in graph.differentiated and graph.by_name[ref.node].op == "param":
                    readers.setdefault(ref.node, set()).add(rank)
    found: dict[tuple[int, ...], list[str]] = {}
    for name, ranks in readers.items():
        if len(ranks) > 1:
            found.setdefault(tuple(sorted(ranks)), []).append(name)
    return found


def exchanges(assignment: Assignment, placed: Sequence[int], bounds: Sequence[int]) -> Exchanges:
    """Every call among the ranks of one pipeline in a step, forward and backward; arguments as for :func:`ties`."""
    space, found = assignment.space, Exchanges()
    everybody = tuple(sorted(set(placed)))
    if len(everybody) == 1:
        return found
    for call in _sends(assignment, placed, bounds):
        found[call] += space.mesh.micro_batches
    if space.graph.loss is not None:
        found[Exchange("broadcast", everybody, LOSS_BYTES, "forward")] += 1
    for ranks, names in ties(assignment, placed, bounds).items():
        for name in names:
            size = local_bytes(space.graph.type_of(Ref(name)), assignment.produced(Ref(name)), space.mesh)
            found[Exchange("all_reduce", ranks, size, "backward")] += 1
    return found


def _sends(assignment: Assignment, placed: Sequence[int], bounds: Sequence[int]) -> Iterator[Exchange]:
    """What crosses from rank to rank for one micro-batch. What a later stage reads goes through all stages between;
    gradients come back for what has one.
    """
    space, values = assignment.space, crossing(assignment.space.folded)
    for boundary, (sender, receiver) in enumerate(pairwise(placed)):
        if sender == receiver:
            continue
        for ref, size in sent(assignment, values[bounds[boundary + 1] - 1]).items():
            yield Exchange("send", (sender, receiver), size, "forward", boundary)
            if ref in space.graph.differentiated:
                yield Exchange("send", (receiver, sender), size, "backward", boundary)
