"""Offload: a step of a plan whose model data is at home on the host, as a trace, and the timetable that it obeys.

Parameters come in *chunks*, one for all that the same blocks read: a parameter that one block reads is in that block's
chunk. A chunk is an item of the trace, fetched for forward, and again for backward where autograd reads the parameters'
own memory there; its gradients are another, made by backward and evicted. The host then updates all of them at once:
whatever optimizer the user brings steps over memory of the host, and so does clipping.

What several blocks read, or what is converted before them, enters the program before the first block, and its gradient
leaves it when the last is undone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from planner.chain import Link as BlockLink
from planner.chain import links_of
from planner.conversion import local_bytes
from planner.errors import InfeasibleError
from planner.formulate import Assignment
from planner.graph import Ref
from planner.memory import BEFORE, Usage, enters_before, readers_of
from planner.predict import Prediction, predict
from planner.timetable import Item, Link, Moment, Timetable, Trace, Use, shortest_step, simulate
from planner.words import in_bytes

ALIGN_BYTES = 64
"""Parameters begin at multiples of it in their chunk."""
UPDATE = "update"


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
        """The number of the block that hands it to the program, or :data:`planner.memory.BEFORE`."""
        return BEFORE if self.is_before else self.readers[0]


def chunks_of(assignment: Assignment) -> tuple[Chunk, ...]:
    """The chunks of a model, in the order in which they are first read; what no block reads is in none."""
    together: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for name, readers in readers_of(assignment).items():
        together.setdefault((readers, enters_before(assignment, name, readers)), []).append(name)
    return tuple(_chunk(assignment, names, *key) for key, names in together.items())


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


def forward(number: int, called: str) -> str:
    """The moment of a block's forward; that of :data:`BEFORE` comes before the first block's."""
    return f"forward {called}" if number != BEFORE else "begin"


def backward(number: int, called: str) -> str:
    """The moment of a block's backward; that of :data:`BEFORE` comes after the first block's."""
    return f"backward {called}" if number != BEFORE else "end"


def parameters(chunk: Chunk) -> str:
    """The item of a chunk's parameters."""
    return f"parameters {chunk.name}"


def gradients(chunk: Chunk) -> str:
    """The item of a chunk's gradients."""
    return f"gradients {chunk.name}"


def moments_of(assignment: Assignment) -> dict[int, tuple[str, str]]:
    """The names of the moments of each block's forward and backward, by its number; :data:`BEFORE` with the others if
    several blocks read a parameter.
    """
    numbers = [*range(len(assignment.space.folded.instances))]
    called = {number: label(assignment, number) for number in numbers}
    if any(chunk.is_before for chunk in chunks_of(assignment)):
        called[BEFORE] = ""
    return {number: (forward(number, name), backward(number, name)) for number, name in called.items()}


def undone(assignment: Assignment) -> list[int]:
    """The numbers of the blocks that have a backward, in the order of forward."""
    space = assignment.space
    return [
        number
        for number, instance in enumerate(space.folded.instances)
        if any(ref in space.graph.differentiated for ref in instance.block.outputs)
    ]


def trace_of(assignment: Assignment, usage: Usage, prediction: Prediction) -> Trace:
    """A step of an assignment, block by block.

    Args:
        usage: what the step holds besides chunks and gradients.
        prediction: of the step; its seconds on the device are shared out by what the blocks take.
    """
    chunks, host = chunks_of(assignment), assignment.space.cost.cluster.host_memory
    numbers = range(len(assignment.space.folded.instances))
    before = [BEFORE] if any(chunk.is_before for chunk in chunks) else []
    trained = [chunk for chunk in chunks if chunk.gradient_bytes]
    after = [BEFORE] if any(chunk.is_before for chunk in trained) else []
    called = {BEFORE: "", **{number: label(assignment, number) for number in numbers}}
    forwards, backwards = [*before, *numbers], [*reversed(undone(assignment)), *after]
    seconds = _seconds(assignment, prediction)
    moments = [
        Moment(forward(n, called[n]), seconds["forward", n], usage.by_block.get(("forward", n), 0)) for n in forwards
    ]
    moments += [
        Moment(backward(n, called[n]), seconds["backward", n], usage.by_block.get(("backward", n), 0))
        for n in backwards
    ]
    if trained:
        moments.append(Moment(UPDATE, prediction.time_s["optimizer"], on="host"))
    items = []
    for chunk in chunks:
        uses = [Use(forward(n, called[n])) for n in (*[BEFORE] * chunk.is_before, *chunk.readers)]
        read = [n for n in reversed(chunk.readers) if _is_read_again(chunk, usage, n)]
        uses += [Use(backward(n, called[n])) for n in read if n in backwards]
        if chunk.gradient_bytes:
            uses.append(Use(UPDATE, "rw"))
        items.append(Item(parameters(chunk), chunk.bytes, tuple(uses)))
        if chunk.gradient_bytes and (made := chunk.entered) in backwards:
            uses = [Use(backward(made, called[made]), "w"), Use(UPDATE)]
            items.append(Item(gradients(chunk), chunk.gradient_bytes, tuple(uses)))
    return Trace(tuple(moments), tuple(items), {"host": Link(host.link_bytes_per_s, host.link_bytes_per_s)})


def _is_read_again(chunk: Chunk, usage: Usage, number: int) -> bool:
    """Whether backward of a block reads a chunk; what is brought into the program before all blocks may be anywhere."""
    names: Collection[str] = {*usage.read_again.get(number, ()), *usage.read_again.get(BEFORE, ())}
    return not set(chunk.leaves).isdisjoint(names)


def _seconds(assignment: Assignment, prediction: Prediction) -> dict[tuple[str, int], float]:
    """Seconds on the device of every block, by direction and number, that add up to the prediction's."""
    recompute, skeleton = assignment.recompute, assignment.space.skeleton
    found = {("forward", BEFORE): 0.0, ("backward", BEFORE): 0.0}
    for number, (link, (kind, nth)) in enumerate(zip(links_of(assignment), skeleton.numbers, strict=True)):
        found["forward", number] = link.block.forward_s + link.gather_s
        found["backward", number] = link.block.input_s + link.block.weight_s + link.reduce_s
        found["backward", number] += _again_s(link, recompute.level(kind, nth))
    on_device = sum(seconds for use, seconds in prediction.time_s.items() if use not in ("optimizer", "offload"))
    scale = on_device / (sum(found.values()) or 1.0)
    return {key: seconds * scale for key, seconds in found.items()}


def _again_s(link: BlockLink, level: str) -> float:
    ways = dict(zip(link.levels, link.block.savings, strict=True))
    return ways[level].recompute_s if level in ways else 0.0


def needed_bytes(assignment: Assignment, usage: Usage) -> int:
    """The largest working set of a step: the chunks that a moment uses, and all that is there beside them."""
    return max(trace_of(assignment, usage, predict(assignment, 0.0, usage)).needed_bytes)


def offloaded(assignment: Assignment, usage: Usage, prediction: Prediction) -> tuple[Timetable, Prediction]:
    """The timetable of a step, and what is predicted of the step that obeys it.

    On a cluster of CPU processes nothing moves while something else is computed: moving takes the same cores.

    Raises:
        InfeasibleError: the host's memory does not hold the model's data.
    """
    space = assignment.space
    trace = trace_of(assignment, usage, prediction)
    _check_host(assignment)
    table = shortest_step(trace, space.cost.cluster.device.usable_bytes)
    on_device = sum(moment.seconds for moment in trace.moments if moment.on == "device")
    update_s = prediction.time_s["optimizer"]
    if space.cost.cluster.backend == "gloo":
        waits_s = sum(table.link_s.values())
    else:
        waits_s = max(0.0, simulate(table).step_s - on_device - update_s)
    place = table.occupied_bytes.index(table.high_water_bytes)
    moment = trace.moments[place]
    beside = moment.other_bytes
    return table, replace(
        prediction,
        step_time_s=on_device + update_s + waits_s,
        peak_bytes=table.high_water_bytes,
        time_s={**prediction.time_s, "offload": waits_s},
        memory_bytes={"chunks": table.high_water_bytes - beside, "beside": beside},
        fullest_at=moment.name,
        largest=(),
    )


def home_bytes(assignment: Assignment) -> int:
    """Bytes of the host's memory that a rank's parameters, gradients and optimizer state take."""
    space, found = assignment.space, 0
    for leaf in space.graph.leaves:
        if leaf.op == "param":
            tensor = leaf.results[0]
            size = local_bytes(tensor, assignment.produced(Ref(leaf.name)), space.mesh)
            state = size // tensor.item_bytes * space.training.optimizer_bytes_per_element
            found += 2 * size + state if tensor.grad else size
    return found


def _check_host(assignment: Assignment) -> None:
    host, needed = assignment.space.cost.cluster.host_memory, home_bytes(assignment)
    if needed > host.memory_bytes:
        raise InfeasibleError(
            f"the host has {host.memory_bytes:,} bytes for each device ({in_bytes(host.memory_bytes)}), and a device's "
            f"part of parameters, gradients and optimizer state is {needed:,} bytes: shard them over more devices (pin "
            "'zero' 2 or 3, or 'tensor'), or take hosts with more memory",
            needed - host.memory_bytes,
        )
