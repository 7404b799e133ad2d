"""Chunks: the parameters, gradients or activations of a block that move between host and device as one piece.

A parameter that one block reads is in that block's chunk; one that several read, or that is converted before them, is
in a chunk that enters the program before the first block, and its gradient leaves it when the last runs its backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from planner.analysis.memory import enters_before, readers_of
from planner.analysis.memory.offloadable import OffloadableActivations
from planner.analysis.memory.storages import BEFORE
from planner.formulation.assignment import Assignment
from planner.formulation.resharding import local_bytes
from planner.ir.graph import Ref

ALIGN_BYTES = 64
"""Parameters begin at multiples of it in their chunk."""
SAVED = "saved "
"""What items of activations begin with."""


@dataclass(frozen=True)
class Chunk:
    """Parameters that move together, in memory that is theirs alone.

    Attributes:
        name: the path of their block; the first of them and how many more, where they enter before all blocks.
        leaves: their names in the graph, in order.
        readers: the numbers of the blocks that read them.
        starts: the byte at which each begins; the last is where the chunk ends.
        gradient_bytes: of the gradients of those that are trained.
        is_before: whether they enter the program before the first block, and their gradients leave it after all.
    """

    name: str
    leaves: tuple[str, ...]
    readers: tuple[int, ...]
    starts: tuple[int, ...]
    gradient_bytes: int
    is_before: bool

    @property
    def bytes(self) -> int:
        """Of the chunk."""
        return self.starts[-1]

    @property
    def entered(self) -> int:
        """The number of the block that hands it to the program, or :data:`planner.analysis.memory.storages.BEFORE`."""
        return BEFORE if self.is_before else self.readers[0]


def chunks_of(assignment: Assignment, blocks: Collection[int] | None = None) -> tuple[Chunk, ...]:
    """The chunks of a model, in the order in which they are first read; what no block reads is in none.

    Args:
        blocks: the numbers of those whose chunks are wanted; left out: all.
    """
    together: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for name, readers in readers_of(assignment).items():
        together.setdefault((readers, enters_before(assignment, name, readers)), []).append(name)
    found = (_chunk(assignment, names, *key) for key, names in together.items())
    return tuple(chunk for chunk in found if blocks is None or any(number in blocks for number in chunk.readers))


def _chunk(assignment: Assignment, names: list[str], readers: tuple[int, ...], is_before: bool) -> Chunk:
    graph, starts, gradients = assignment.space.graph, [0], 0
    for name in names:
        tensor = graph.by_name[name].results[0]
        size = local_bytes(tensor, assignment.produced(Ref(name)), assignment.space.mesh)
        starts.append(-(-(starts[-1] + size) // ALIGN_BYTES) * ALIGN_BYTES)
        gradients += size if tensor.grad else 0
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    called = f"{graph.by_name[names[0]].target}{more}" if is_before else label(assignment, readers[0])
    return Chunk(called, tuple(names), readers, tuple(starts), gradients, is_before)


def label(assignment: Assignment, number: int) -> str:
    """A block by its number and its path."""
    folded = assignment.space.folded
    instance = folded.instances[number]
    return f"{number} {instance.block.path or folded.names[instance.kind]}"


def parameters(chunk: Chunk) -> str:
    """The item of a chunk's parameters."""
    return f"parameters {chunk.name}"


def gradients(chunk: Chunk) -> str:
    """The item of a chunk's gradients."""
    return f"gradients {chunk.name}"


def saved_item(assignment: Assignment, saved: OffloadableActivations) -> str:
    """The item of what blocks save for backward."""
    of = "" if saved.savers == (saved.left,) else f" of {', '.join(map(str, saved.savers))}"
    return f"{SAVED}{label(assignment, saved.left)}{of}"


def update(chunk: Chunk) -> str:
    """The moment in which the host updates a chunk in the middle of backward."""
    return f"update {chunk.name}"


def before(stage: int) -> int:
    """The number that stands for what is done before the first block of a stage, and undone after it."""
    return BEFORE - stage


def moments_of(assignment: Assignment, stages: int = 1) -> dict[int, tuple[str, str]]:
    """The names of the moments of each block's forward and backward, by its number; those of :func:`before` come
    before the forwards of a stage and after its backwards, where anything moves then.
    """
    numbers = range(len(assignment.space.folded.instances))
    called = {number: label(assignment, number) for number in numbers}
    of_stages = (f" stage {stage}" if stages > 1 else "" for stage in range(stages))
    ends = {before(stage): (f"begin{of_stage}", f"end{of_stage}") for stage, of_stage in enumerate(of_stages)}
    return {**ends, **{n: (f"forward {name}", f"backward {name}") for n, name in called.items()}}


def of_micro_batch(moment: str, micro_batch: int | None) -> str:
    """The name of a moment of one micro-batch; ``None``: a step has but one."""
    return moment if micro_batch is None else f"{moment}, micro-batch {micro_batch}"


def run_in_backward(assignment: Assignment) -> list[int]:
    """The numbers of the blocks that have a backward, in the order of forward."""
    graph = assignment.space.graph
    blocks = [instance.block for instance in assignment.space.folded.instances]
    return [n for n, block in enumerate(blocks) if any(ref in graph.differentiated for ref in block.outputs)]


def updated_early(assignment: Assignment, chunks: Iterable[Chunk]) -> list[Chunk]:
    """Those whose gradients are complete before all blocks run their backward, and the host does not wait for that."""
    if assignment.space.training.update != "backward":
        return []
    blocks = {*run_in_backward(assignment)}
    return [chunk for chunk in chunks if not chunk.is_before and chunk.entered in blocks]


def shared(sizes: Iterable[int]) -> tuple[int, ...]:
    """Bytes of the memories at home in which gradients of such sizes take turns that are used as they arrive.

    One is used by the host and another one filled, while a third waits for the host; each gradient has one that is
    large enough.
    """
    return tuple(sorted(sizes, reverse=True)[:3])


def moving_bytes(assignment: Assignment, chunks: Collection[Chunk]) -> int:
    """What chunks that move take at home: :func:`home_bytes`, but gradients that are used as they arrive take turns."""
    early = [chunk.gradient_bytes for chunk in updated_early(assignment, chunks)]
    return home_bytes(assignment, chunks) - sum(early) + sum(shared(early))


def home_bytes(assignment: Assignment, chunks: Collection[Chunk]) -> int:
    """What chunks take where they are held whole: parameters, gradients and optimizer state."""
    space = assignment.space
    names = [name for chunk in chunks for name in chunk.leaves]
    state = sum(space.state_bytes(space.graph.by_name[name], assignment.produced(Ref(name))) for name in names)
    return sum(chunk.bytes + chunk.gradient_bytes for chunk in chunks) + state
