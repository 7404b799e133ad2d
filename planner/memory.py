"""Memory: what one rank holds at every moment of a training step, exactly as the emitted program allocates it.

The program is followed statement by statement: forward, where a value lives until the last statement that reads it
and longer where backward needs it; then backward, where autograd runs the node that was made last first, gradients
come into being and saved tensors go. Views hold the storage of what they view. What an operator saves, passes on and
needs while it works stands in its row (:mod:`planner.ops.table`).

A block that recomputes gives up, when it returns, what it can make again from what it keeps; the first node of backward
that needs one of these values makes them all, in the order of forward (:mod:`planner.recompute`).

A block's inputs are held by its caller until it returns; gradients of parameters stay; outputs other than the loss are
taken to be dropped before backward starts (``loss = pmodel(**batch).loss``). Optimizer state and parameters
are there throughout, unless they are at home on the host: then they, and gradients of parameters, are left out here
(:mod:`planner.offload`). Where instances do nothing that is new (:mod:`planner.runs`), only the first and the last of
them are followed. Blocks handed out by the allocator are larger than what is asked for by the cluster's
``reserve_fraction`` at most, which is not counted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from planner.again import shares
from planner.asked import brought_again
from planner.assignment import Assignment, Chunk
from planner.conversion import Route, Step, local_bytes
from planner.exchange import crossing
from planner.fold import Block, Instance
from planner.graph import Node, Ref, TensorType
from planner.heap import BEFORE, Direction, Fullest, Heap, Held, Place, Storage, is_before
from planner.kept import is_own, own_bytes
from planner.layout import MICRO, Shard
from planner.names import called, state_of
from planner.ops import OPS
from planner.ops.function import holds, works
from planner.runs import Skip, Wiring, skips
from planner.saved import Saved, Saves, first_of
from planner.tape import Frame, Tape, Target, Value

LARGEST = 5
"""So many tensors are named at the fullest moment."""
EXACT = ("own", "mask")
"""What operators keep besides operands and results and whose bytes are known to the last one."""
ENDS = LARGEST
"""So many periods of a run are followed at either end: enough to see that they do the same, and for :data:`LARGEST`."""


@dataclass(frozen=True)
class Usage:
    """Bytes of one rank through a step.

    Attributes:
        peak_bytes: at the fullest moment.
        peak_at: what runs then.
        moments: (what runs, bytes alive while it does), in order. Where instances of a block do the same, each with
            so many bytes more or less than the one before it, those in the middle are left out.
        alive: every storage at the peak, largest first.
        kept: every storage when forward is over.
        left: every storage when backward is over.
        by_block: the most that is alive in a block, forward and backward, by direction and its number; a number of
            :data:`BEFORE` stands for what is done before the first block, and undone after it.
        leaf_bytes: of leaves.
        saved_bytes: of what is held between forward and backward, without leaves.
        read_again: the leaves whose own memory backward of a block may read, by its number; where parameters are at
            home on the host.
        saved: what blocks save that may leave in between, where the plan lets it; then ``by_block`` and ``saved_bytes``
            are without it.
    """

    peak_bytes: int
    peak_at: str
    moments: tuple[tuple[str, int], ...]
    alive: tuple[Held, ...]
    kept: tuple[Held, ...]
    left: tuple[Held, ...]
    by_block: Mapping[tuple[Direction, int], int]
    leaf_bytes: int
    saved_bytes: int
    read_again: Mapping[int, frozenset[str]]
    saved: tuple[Saved, ...] = ()

    @property
    def fullest(self) -> Fullest:
        """The fullest moment."""
        return Fullest(self.peak_bytes, self.peak_at, self.alive)

    def __str__(self) -> str:
        """The fullest moment and what fills it, largest first."""
        return str(self.fullest)

    def by_use(self) -> dict[str, int]:
        """Bytes at the peak by use."""
        return self.fullest.by_use()


def readers_of(assignment: Assignment) -> dict[str, tuple[int, ...]]:
    """The numbers of the blocks that may read each parameter, by its name; without those that none reads.

    Where a block hands on a view of a parameter, all later ones may.
    """
    space = assignment.space
    found: dict[str, set[int]] = {}
    for number, instance in enumerate(space.folded.instances):
        views = {ref: ref.node for ref in instance.block.inputs if space.graph.by_name[ref.node].op == "param"}
        for name in views.values():
            found.setdefault(name, set()).add(number)
        for node in instance.block.nodes:
            for index, shared in enumerate(shares_of(node)):
                if shared >= 0 and node.inputs[shared] in views:
                    views[Ref(node.name, index)] = views[node.inputs[shared]]
        for name in (views[ref] for ref in instance.block.outputs if ref in views):
            found[name].update(range(number, len(space.folded.instances)))
    return {name: tuple(sorted(numbers)) for name, numbers in found.items()}


def shares_of(node: Node) -> tuple[int, ...]:
    """For each result of an operator: the operand in whose memory it is, or -1."""
    return shares(node) or (-1,) * len(node.results)


def enters_before(assignment: Assignment, name: str, readers: tuple[int, ...]) -> bool:
    """Whether a parameter enters the program before the first block, since several read it or it is converted there."""
    return len(readers) > 1 or bool(assignment.relay_route(Ref(name)))


def usage(assignment: Assignment, blocks: range | None = None) -> Usage:
    """Follow one training step of an assignment on the fullest rank, in turns that of one micro-batch.

    Args:
        blocks: the numbers of those of a stage, which takes values from the stage before and hands others on; left out:
            all.
    """
    wiring = Wiring(assignment)
    if assignment.space.training.activations:
        return _Step(wiring, [], blocks).leaving()
    found = [each for each in skips(wiring, ENDS) if blocks is None or _is_inside(each, blocks)]
    try:
        return _Step(wiring, found, blocks).usage()
    except _UnevenError:
        return _Step(wiring, [], blocks).usage()


def _is_inside(skip: Skip, blocks: range) -> bool:
    """Whether blocks have a run with its ends."""
    return blocks.start <= skip.start - ENDS * skip.period and skip.end + ENDS * skip.period <= blocks.stop


class _UnevenError(Exception):
    """Instances that were taken to do the same do not: none may be left out."""


# ---- the run ---------------------------------------------------------------------------------------------------------


def _is_index(word: str, types: Sequence[TensorType]) -> bool:
    """Whether what backward needs is an operand that only says where to read, such as the tokens of an embedding."""
    return word.startswith("in") and "float" not in types[int(word[2:])].dtype


def _are_parameters(values: Iterable[Value]) -> bool:
    """Whether gradients of these values are those of parameters."""
    return all(value.made[0].keeps for value in values if value.made)


class _Step:
    def __init__(
        self,
        wiring: Wiring,
        skips: list[Skip],
        blocks: range | None = None,
        away: Mapping[int, int] | None = None,
    ):
        self.blocks = blocks or range(len(wiring.instances))
        self.assignment, self.space, self.wiring, self.skips = wiring.assignment, wiring.space, wiring, skips
        self.instances = self.space.folded.instances
        self.graph, self.mesh = self.space.graph, self.space.mesh
        self.heap, self.saves = Heap(away), Saves() if self.space.training.activations else None
        self.tapes: list[Tape] = []
        self.frame: Frame | None = None
        self.parts: dict[Ref, Storage] = {}
        self.following = self._following()
        self.underway: dict[tuple[int, int], tuple[Storage, Storage]] = {}
        self.before: Frame | None = None
        self.sent: Storage | None = None
        self.buckets: Storage | None = None
        self.number = BEFORE
        self.is_away = self.space.training.tier != "device"
        self.leaves: dict[Storage, str] = {}
        self.kept: dict[Skip, list[Storage]] = {}
        self.read_again: dict[int, frozenset[str]] = {}
        self.holding: list[Storage] = []

    def usage(self) -> Usage:
        heap = self.heap
        values = self._leaves()
        self.parts = {ref: value.storage for ref, value in values.items()}
        leaf_bytes = heap.total
        heap.moment("forward")
        if self.space.cost.cluster.backend == "gloo" and not self.is_away:  # see autopar/runtime/buckets.py
            self.buckets = heap.new("gradients", "gradients", self._bucket_bytes(values))
        values = {ref: self._relayed(ref, value) for ref, value in values.items()}
        received, sent = self._received(), self._crossing_after(self.blocks.stop - 1)
        for value in received.values():
            heap.hold(value.storage)
        values.update(received)
        dropped = self._read_last(sent)
        skips = {skip.start: skip for skip in self.skips}
        number = self.blocks.start
        while number < self.blocks.stop:
            if number in skips:
                self._skip(skips[number], values)
                number = skips[number].end
            self.number = number
            heap.enter("forward", number)
            instance = self.instances[number]
            inputs, before = {ref: values[ref] for ref in instance.block.inputs}, len(self.tapes)
            values.update(self._recomputing(instance, self.space.skeleton.numbers[number][1], inputs))
            for ref in dropped.get(number, ()):
                if ref in values:
                    heap.drop(values.pop(ref).storage)
            if self.saves is not None:
                self._note_saved(self.saves, instance, inputs, self.tapes[before:])
            number += 1
        self.number = BEFORE
        leaving = {at: self._output(at, values) for at in self._leaving_here()}
        starts = [values[ref] for ref in sent] + [leaving[at] for at in self.graph.roots if at in leaving]
        for value in (*values.values(), *leaving.values()):
            heap.drop(value.storage)
        kept, saved_bytes = tuple(each.held for each in heap.alive), heap.total - leaf_bytes
        self._backward(starts)
        totals = heap.totals()
        for skip in self.skips:
            self._fill(skip, totals)
        alive = sorted(heap.at_peak(), key=lambda held: -held.bytes)
        left = tuple(each.held for each in heap.alive)
        return Usage(
            heap.peak,
            heap.peak_at,
            tuple(heap.moments),
            tuple(alive),
            kept,
            left,
            heap.by_block,
            leaf_bytes,
            saved_bytes,
            self.read_again,
        )

    def leaving(self) -> Usage:
        """:meth:`usage`, and what of all that is saved may leave; ``by_block`` and ``saved_bytes`` are beside that."""
        found = self.usage()
        assert self.saves is not None
        saved = first_of(self.saves.found, self.space.training.activations)
        away = {number: each.left for each in saved for number in each.storages}
        beside = _Step(self.wiring, [], self.blocks, away).usage()
        return replace(found, by_block=beside.by_block, saved_bytes=beside.saved_bytes, saved=saved)

    def _note_saved(self, saves: Saves, instance: Instance, inputs: Mapping[Ref, Value], tapes: Iterable[Tape]) -> None:
        """Note what an instance, whose forward is over, has saved."""
        own = [*(storage for tape in tapes for storage in tape.saved), *self.holding]
        saves.add(self.number, own)
        made = (Ref(node.name, at) for node in instance.block.nodes for at, t in enumerate(node.results) if t.grad)
        if any(ref not in self.graph.differentiated for ref in made):
            saves.stay((*own, *(value.storage for value in inputs.values())))
        saves.left(self.number)

    def _reads_again(self, storages: Iterable[Storage]) -> None:
        """Note that backward of this block reads the memory of leaves among these."""
        names = {self.leaves[each] for each in storages if each in self.leaves}
        self.read_again[self.number] = self.read_again.get(self.number, frozenset()) | names

    def _crossing_after(self, number: int) -> list[Ref]:
        """The values that go on from a stage whose last block this is."""
        return [] if number < 0 or number + 1 == len(self.instances) else crossing(self.space.folded)[number]

    def _received(self) -> dict[Ref, Value]:
        """What comes from the stage before, held; its gradients stay until they are sent back."""
        found = {}
        for ref in self._crossing_after(self.blocks.start - 1):
            size = local_bytes(self.graph.type_of(ref), self.assignment.delivered(ref), self.mesh)
            made = None
            if ref in self.graph.differentiated:
                tape = self._tape(ref.node, 1)
                tape.keeps = True
                made = (tape, 0)
            found[ref] = Value(self.heap.new(self._called(ref), "activations", size), size, made)
        return found

    def _leaving_here(self) -> list[int]:
        """The positions of the outputs that leave the model here; those that no block makes, with the last."""
        made = {ref for number in self.blocks for ref in self.instances[number].block.outputs}
        is_last = self.blocks.stop == len(self.instances)
        return [
            at for at, ref in enumerate(self.space.leaving) if ref in made or (is_last and ref not in self.wiring.made)
        ]

    def _read_last(self, sent: Iterable[Ref]) -> dict[int, list[Ref]]:
        """The values that each block is the last to read, those left out that something else needs."""
        leaving = {*self.space.leaving, *sent}
        found: dict[int, list[Ref]] = {}
        for ref, number in self.wiring.last.items():
            if ref not in leaving:
                found.setdefault(number, []).append(ref)
        return found

    def _leaves(self) -> dict[Ref, Value]:
        values = {}
        readers = readers_of(self.assignment) if self.is_away else {}
        skipped, read = self._skipped_leaves(), self._read_here()
        for name in self.graph.leaves.names:
            times = skipped.get(name, 1)
            if not times or (read is not None and name not in read):
                continue
            leaf = self.graph.by_name[name]
            tensor, layout = leaf.results[0], self.assignment.produced(Ref(leaf.name))
            size = local_bytes(tensor, layout, self.mesh)
            use = "parameters" if leaf.op in ("param", "buffer") else "activations"
            is_away = self.is_away and leaf.op == "param"
            storage = self.heap.new(called(leaf), use, 0 if is_away else size, times)
            self.leaves[storage] = leaf.name
            made = None
            if leaf.op == "param" and tensor.grad:
                state = size // tensor.item_bytes * self.space.training.optimizer_bytes_per_element
                self.heap.new(state_of(leaf), "optimizer", 0 if is_away else state, times)
                tape = self._tape(leaf.target, 1)
                own = is_away and not enters_before(self.assignment, leaf.name, readers.get(leaf.name, ()))
                tape.keeps, tape.leaves = True, own
                made = (tape, 0)
            if leaf.name not in skipped:
                values[Ref(leaf.name)] = Value(self.heap.hold(storage), size, made)
        return values

    def _read_here(self) -> set[str] | None:
        """The leaves that a stage reads; ``None``: it is the only one."""
        if len(self.blocks) == len(self.instances):
            return None
        refs = [ref for number in self.blocks for ref in self.instances[number].block.inputs]
        return {ref.node for ref in (*refs, *(self.space.leaving[at] for at in self._leaving_here()))}

    def _called(self, ref: Ref) -> str:
        return called(self.graph.by_name[ref.node])

    def _tape(self, name: str, results: int) -> Tape:
        tape = Tape(name, self.number, [None] * results)
        self.tapes.append(tape)
        return tape

    # ---- what is not followed ----

    def _skipped_leaves(self) -> dict[str, int]:
        """The leaves that only an instance reads which is not followed -> for how many of its role it stands."""
        own, role_of = self.space.skeleton.own, self.space.role_of
        numbers = (each for skip in self.skips for each in range(skip.start, skip.end))
        names = (ref.node for each in numbers for ref in self.instances[each].block.inputs)
        found = [name for name in names if name in own]
        times = Counter(role_of[name] for name in found)
        return {name: times.pop(role_of[name], 0) for name in found}

    def _skip(self, skip: Skip, values: dict[Ref, Value]) -> None:
        """Let what instances hand on be handed on by those that do the same at the end of ``skip``."""
        moved: dict[Ref, Value] = {}  # all before any: a twin may be among those that hand on, too
        for number in range(skip.start - ENDS * skip.period, skip.start):
            twin = self.instances[number + skip.times * skip.period].block
            for ref, other in zip(self.instances[number].block.outputs, twin.outputs, strict=True):
                if ref in values:
                    moved[other] = values.pop(ref)
        values.update(moved)
        # What lives on from one period into the next is gone after that.
        whole = range(skip.start - 2 * skip.period, skip.start - skip.period)
        self.kept[skip] = self.heap.repeat("forward", whole, skip.times)
        last = self.instances[skip.end - 1].block.span[-1]
        self.heap.moment(f"forward {last.path or last.name}: {last.op}")

    def _undo_skipped(self, skip: Skip) -> None:
        for storage in self.kept.pop(skip):
            self.heap.drop(storage)
        whole = range(skip.end + skip.period, skip.end + 2 * skip.period)
        self.heap.repeat("backward", whole, skip.times)

    def _fill(self, skip: Skip, totals: Mapping[Place, list[int]]) -> None:
        """What :class:`Usage` says by block, for blocks that were not followed.

        Raises:
            _UnevenError: bytes do not rise or fall by as much in every period that was followed.
        """

        def rise(direction: Direction, before: int, after: int) -> int:
            each = [
                [total for number in range(start, start + skip.period) for total in totals.get((direction, number), ())]
                for start in (before, after)
            ]
            rises = [b - a for a, b in zip(*each, strict=False)]
            if len(each[0]) != len(each[1]) or any(rise != rises[0] for rise in rises):
                raise _UnevenError
            return rises[0] if rises else 0

        period, times, by_block = skip.period, skip.times, self.heap.by_block
        first, last = skip.start - 2 * period, skip.end
        forward, backward = rise("forward", first - period, first), rise("backward", last + period, last)
        if rise("forward", first, last) != forward * (times + 2):
            raise _UnevenError
        if rise("backward", last, skip.start - period) != backward * (times + 1):
            raise _UnevenError
        for number in range(skip.start, skip.end):
            past, at = divmod(number - skip.start, period)
            by_block["forward", number] = by_block["forward", first + at] + forward * (past + 2)
            if ("backward", last + at) in by_block:
                by_block["backward", number] = by_block["backward", last + at] + backward * (times - past)
            if first + at in self.read_again:
                names = zip(self.instances[first + at].block.inputs, self.instances[number].block.inputs, strict=True)
                twin = {theirs.node: ours.node for theirs, ours in names}
                if not self.read_again[first + at] <= twin.keys():
                    raise _UnevenError
                self.read_again[number] = frozenset(twin[name] for name in self.read_again[first + at])

    # ---- forward ----

    def _recomputing(self, instance: Instance, nth: int, inputs: dict[Ref, Value]) -> dict[Ref, Value]:
        """Run one instance at its level of recomputation."""
        level = self.assignment.recompute.level(instance.kind, nth)
        self.holding = []
        if level == "none":
            return self._block(instance, inputs)
        before = len(self.tapes)
        self.frame = Frame(instance.block, self.space.skeleton.again(instance.kind, level), self.before)
        outputs = self._block(instance, inputs)
        self.frame.gives_up(self.heap, self.tapes[before:])
        self.holding = self.frame.held
        if self.frame.gathers and brought_again(self.assignment, instance, level):
            self.before = self.frame
        if self.is_away:
            self._reads_again(self.frame.held)
        self.frame = None
        return outputs

    def _block(self, instance: Instance, inputs: dict[Ref, Value]) -> dict[Ref, Value]:
        """Run one instance; returns its outputs, each held once."""
        heap, block = self.heap, instance.block
        frame = dict(inputs)
        for value in frame.values():
            heap.hold(value.storage)
        last = {ref: i for i, node in enumerate(block.nodes) for ref in node.inputs}
        kept = set(block.outputs)
        ready = self._brought(block, frame)
        for i, node in enumerate(block.nodes):
            heap.moment(f"forward {node.path or node.name}: {node.op}")
            for ref, value in self._operator(node, frame, ready).items():
                if ref in kept or ref in last:
                    frame[ref] = value
                else:
                    heap.drop(value.storage)
            for ref in dict.fromkeys(node.inputs):
                if last[ref] == i and ref not in kept:
                    heap.drop(frame.pop(ref).storage)
                    if ref in ready:
                        heap.drop(ready.pop(ref).storage)
        return {ref: frame[ref] for ref in block.outputs if ref in frame}

    def _bucket_bytes(self, values: Mapping[Ref, Value]) -> int:
        """Bytes of the sums that leave as gradients of parameters, whose memory the host keeps for the next step."""
        times = Counter(range(len(self.instances)))
        for skip in self.skips:
            times.subtract(range(skip.start, skip.end))
            times.update(dict.fromkeys(range(skip.start - skip.period, skip.start), skip.times))
        relayed = [value for ref, value in values.items() if self._summed(ref) and _are_parameters([value])]
        found = sum(value.bytes for value in relayed if value.made)
        for number in +times:
            for chunk in self.assignment.chunks(self.instances[number].block):
                steps = self._crossing(next(iter(chunk.values())))  # like those of the others
                chunked = [values[ref] for ref in chunk]
                if steps and steps[0].rule == "I>R" and _are_parameters(chunked):
                    found += sum(value.bytes for value in chunked if value.made) * times[number]
        return found

    def _summed(self, ref: Ref) -> list[Step]:
        """The steps by which a parameter is delivered to several readers, if its gradient is only summed."""
        return self._crossing(self.assignment.relay_route(ref)) if self.assignment.relays_by_sums(ref) else []

    def _crossing(self, route: Route) -> list[Step]:
        """The steps that cross ranks."""
        return [step for step in route if self._is_crossing(step)]

    def _is_crossing(self, step: Step) -> bool:
        axis = self.mesh.axes[step.axis]
        return axis.size > 1 and axis.name != MICRO

    def _brought(self, block: Block, frame: dict[Ref, Value]) -> dict[Ref, Value]:
        """Parameters that are gathered, and whose gradients are reduced, together: an autograd node per axis; held."""
        ready: dict[Ref, Value] = {}
        ahead = self.assignment.ahead(block)
        for number, chunk in enumerate(self.assignment.chunks(block)):
            current = [frame[ref] for ref in chunk]
            for value in current:
                self.heap.hold(value.storage)
            for place, steps in enumerate(zip(*chunk.values(), strict=True)):
                if self._is_crossing(steps[0]):
                    is_ahead = place == ahead.get(number)
                    current = self._brought_on(current, chunk, steps, number if is_ahead else None)
            ready.update(zip(chunk, current, strict=True))
        return ready

    def _brought_on(
        self, values: list[Value], chunk: Chunk, steps: tuple[Step, ...], ahead: int | None = None
    ) -> list[Value]:
        """The same held values after one step, held in their place.

        Args:
            ahead: the number of the chunk, if this step is perhaps underway.
        """
        types = [self.graph.type_of(ref) for ref in chunk]
        is_sum = steps[0].rule == "I>R"
        tape = self._tape("sum of gradients" if is_sum else "gathering", len(values))
        tape.together = sum(value.bytes for value in values if value.made)
        tape.bucket = self.buckets if is_sum and _are_parameters(values) else None
        tape.targets = [Target(*value.made, value.bytes) for value in values if value.made]
        made = [(tape, number) if value.made else None for number, value in enumerate(values)]
        if is_sum:
            return [replace(value, made=each) for value, each in zip(values, made, strict=True)]
        sizes = [local_bytes(tensor, step.after, self.mesh) for tensor, step in zip(types, steps, strict=True)]
        names = [f"gathered {self._called(ref)}" for ref in chunk]
        tape.works = sum(size for size, value in zip(sizes, values, strict=True) if value.made)
        tape.sends = not self.is_away and _are_parameters(values)
        storages = self._gathered([value.storage for value in values], names, sizes, steps, ahead)
        return [Value(*each) for each in zip(storages, sizes, made, strict=True)]

    def _following(self) -> dict[int, int]:
        """The instances that are followed and gather ahead -> the one after."""
        skipped = {number for skip in self.skips for number in range(skip.start, skip.end)}
        followed = [number for number in range(len(self.instances)) if number not in skipped]
        return dict(pairwise(number for number in followed if self.assignment.ahead(self.instances[number].block)))

    def _start_following(self) -> None:
        """Gather what the next block uses."""
        following = self.following.get(self.number)
        if following is None:
            return
        block = self.instances[following].block
        chunks = self.assignment.chunks(block)
        for number, place in self.assignment.ahead(block).items():
            if (following, number) not in self.underway:
                steps = {ref: route[place] for ref, route in chunks[number].items()}
                sizes = [local_bytes(self.graph.type_of(ref), step.after, self.mesh) for ref, step in steps.items()]
                names = [f"gathered {self._called(ref)}" for ref in steps]
                self.underway[following, number] = self._started([self.parts[ref] for ref in steps], names, sizes)

    def _started(self, parts: list[Storage], names: list[str], sizes: list[int]) -> tuple[Storage, Storage]:
        """Storages of what is sent of parts and of what comes, both held."""
        heap = self.heap
        if len(parts) == 1:
            return heap.hold(parts[0]), heap.new(names[0], "gathered", sum(sizes))
        own = heap.new("parts of a chunk", "temporary", sum(part.held.bytes for part in parts))
        return own, heap.new("a chunk", "gathered", sum(sizes))

    def _gathered(
        self, parts: list[Storage], names: list[str], sizes: list[int], steps: tuple[Step, ...], ahead: int | None
    ) -> list[Storage]:
        """Storages of whole parameters, made of those of their parts, which are no longer held."""
        heap = self.heap
        underway = None if ahead is None else self.underway.pop((self.number, ahead), None)
        own, every = underway or self._started(parts, names, sizes)
        if ahead is not None:
            self._start_following()
            if self.frame is not None:
                self.frame.ahead += [own, every]
        if own is not parts[0]:
            self._makes(own, parts)
        for storage in parts:
            heap.drop(storage)
        self._makes(every, [own])
        heap.drop(own)
        cut = steps[0].src
        if len(parts) == 1 and isinstance(cut, Shard) and cut.dim == 0 and cut.outer == 1:
            found = [heap.hold(every)]
        else:
            found = [heap.new(name, "gathered", size) for name, size in zip(names, sizes, strict=True)]
            for storage in found:
                self._makes(storage, [every])
        heap.drop(every)
        return found

    def _makes(self, storage: Storage, sources: list[Storage]) -> None:
        if self.frame is not None:
            self.frame.makes(self.heap, storage, sources, keeps=False)

    def _operator(self, node: Node, frame: dict[Ref, Value], ready: dict[Ref, Value]) -> dict[Ref, Value]:
        """Convert the operands, make the results, remember what backward needs; returns the results, held."""
        heap, choice, types = self.heap, self.assignment.choice(node), self.graph.input_types(node)
        converted: dict[tuple[Ref, object], Value] = {}
        operands = []
        for position, ref in enumerate(node.inputs):
            key = (ref, choice.operands[position])
            if key not in converted:
                brought = ready.get(ref)
                route = () if brought else self.assignment.operand_route(node, position)
                keeps = self.frame is not None and position not in self.frame.again.taken[self.frame.at[node.name]]
                converted[key] = self._converted(brought or frame[ref], types[position], route, ref, keeps)
            operands.append(converted[key])
        results = self._results(node, types, operands)
        for value in converted.values():
            heap.drop(value.storage)
        relayed = {}
        for number, value in enumerate(results):
            ref = Ref(node.name, number)
            relayed[ref] = self._relayed(ref, value) if self.space.is_read(ref) else value
        return relayed

    def _results(self, node: Node, types: tuple[TensorType, ...], operands: list[Value]) -> list[Value]:
        heap, row, choice = self.heap, OPS.get(node.op), self.assignment.choice(node)
        sizes = [local_bytes(t, layout, self.mesh) for t, layout in zip(node.results, choice.results, strict=True)]
        shares = shares_of(node)
        storages = [
            heap.hold(operands[shared].storage) if shared >= 0 else heap.new(called(node), "activations", size)
            for shared, size in zip(shares, sizes, strict=True)
        ]
        if self.frame is not None:
            at, sources = self.frame.at[node.name], self.frame.again.sources
            for index, (storage, shared) in enumerate(zip(storages, shares, strict=True)):
                if shared < 0:
                    operands_ = (value.storage for value in operands)
                    self.frame.makes(heap, storage, operands_, keeps=(at, index) in sources)
        flows = [
            tensor.grad and Ref(node.name, i) in self.graph.differentiated for i, tensor in enumerate(node.results)
        ]
        if not any(flows):
            return [Value(s, size) for s, size in zip(storages, sizes, strict=True)]
        tape = self._tape(f"{node.path or node.name}: {node.op}", len(sizes))
        saves = row.saved(node, types) if row is not None else tuple(f"in{i}" for i in range(len(operands)))
        tensors = {f"in{i}": value.storage for i, value in enumerate(operands)}
        if self.is_away and not all(
            _is_index(word, types) for word in (*saves, *holds(node))
        ):  # then autograd saves whatever it computes with
            self._reads_again(tensors.values())
        tensors |= {f"out{i}": storage for i, storage in enumerate(storages)}
        for word in saves:
            if is_own(word, node):
                before = len(tape.saved)
                tensors_bytes = [*(value.bytes for value in operands), *sizes]
                size = own_bytes(word, node, types, tensors_bytes, self.space.cost.cluster.backend)
                tape.saved.append(heap.new(f"what {called(node)} keeps", "activations", size))
                if self.frame is not None and self.frame.again.operators:
                    copied_bytes = sum(value.bytes for value in operands) if word == "scores" and size else 0
                    if self.frame.at[node.name] in self.frame.again.drawing:
                        read = [value.storage for value in operands]
                        self.frame.draws(heap, tape.saved[-1], read, storages[0], copied_bytes)
                    else:  # the copies stay, and the operands are there for what is made again
                        tape.saved.append(heap.new(f"copies for {called(node)}", "activations", copied_bytes))
                if self.saves is not None and word not in EXACT:
                    copied = [value.storage for value in operands] if word == "scores" and size else []
                    self.saves.stay((*tape.saved[before:], *copied))
            elif word in tensors:
                tape.saved.append(heap.hold(tensors[word]))
        for word in holds(node):
            tape.saved.append(heap.hold(tensors[word]))
            tape.holds.append(tensors[word])
            if self.saves is not None:
                self.saves.stay([tensors[word]])
        more = row.works + works(node) if row is not None else 0
        tape.works = more * max(operands[0].bytes, sizes[0]) if operands else 0
        passes = row.passes if row is not None else ()
        for i, (value, tensor) in enumerate(zip(operands, types, strict=True)):
            if value.made is not None and tensor.grad:
                same = value.bytes == sizes[0] and tensor.dtype == node.results[0].dtype and not saves
                tape.targets.append(Target(*value.made, value.bytes, passes=i in passes and same))
        return [
            Value(s, size, (tape, i) if flow else None)
            for i, (s, size, flow) in enumerate(zip(storages, sizes, flows, strict=True))
        ]

    def _relayed(self, ref: Ref, value: Value) -> Value:
        """A held value, converted to the layout in which its readers find it; held."""
        sums = self._summed(ref)
        for step in sums:
            (value,) = self._brought_on([value], {ref: (step,)}, (step,))
        if sums:
            return value
        route = self.assignment.relay_route(ref)
        keeps = self.frame is not None and (self.frame.at[ref.node], ref.index) not in self.frame.again.values
        result = self._converted(value, self.graph.type_of(ref), route, ref, keeps)
        self.heap.drop(value.storage)
        return result

    def _output(self, position: int, values: dict[Ref, Value]) -> Value:
        ref = self.space.leaving[position]
        return self._converted(values[ref], self.graph.type_of(ref), self.assignment.output_route(position), ref)

    def _converted(self, value: Value, tensor: TensorType, route: Route, ref: Ref, keeps: bool = False) -> Value:
        """``value`` after a route; the result is held once more. ``keeps``: it is not converted again in backward."""
        heap = self.heap
        heap.hold(value.storage)
        gathered = self.graph.by_name[ref.node].op == "param"
        for step in route:
            if self.mesh.axes[step.axis].size == 1:
                continue
            if self.mesh.axes[step.axis].name == MICRO:
                value = self._of_this_turn(value, tensor, step, f"{self._called(ref)} as {step.dst}")
                continue
            following = self._stepped(value, tensor, step, f"{self._called(ref)} as {step.dst}", gathered)
            if self.frame is not None and following.storage is not value.storage:
                self.frame.makes(
                    heap, following.storage, (value.storage,), keeps, self._scratch_bytes(step, value, tensor)
                )
            heap.drop(value.storage)
            value = following
        return value

    def _of_this_turn(self, value: Value, tensor: TensorType, step: Step, name: str) -> Value:
        """A held value as one turn sees it, a part of what is the same in all or the value itself, in its memory."""
        size = local_bytes(tensor, step.after, self.mesh)
        if value.made is None or size == value.bytes:
            return replace(value, bytes=size)
        tape = self._tape(name, 1)
        tape.targets = [Target(*value.made, value.bytes)]
        return Value(value.storage, size, (tape, 0))

    def _stepped(self, value: Value, tensor: TensorType, step: Step, name: str, gathered: bool) -> Value:
        heap = self.heap
        size = local_bytes(tensor, step.after, self.mesh)
        use = "gathered" if gathered and size > value.bytes else "activations"
        if step.rule in ("I>R", "R>I"):
            storage = heap.hold(value.storage)
        else:
            scratch = heap.new(name, "temporary", self._scratch_bytes(step, value, tensor))
            storage = heap.new(name, use, size)
            heap.drop(scratch)
        made = None
        if value.made is not None:
            tape = self._tape(name, 1)
            tape.targets = [Target(*value.made, value.bytes, passes=step.rule in ("R>I", "P>I"))]
            made = (tape, 0)
        return Value(storage, size, made)

    def _scratch_bytes(self, step: Step, value: Value, tensor: TensorType) -> int:
        """What a step of a conversion needs besides: a shard of an inner dim is put in order before it is sent, or
        after it was received.
        """
        apart = [t for t in (step.src, step.dst) if isinstance(t, Shard) and (t.dim > 0 or t.outer > 1)]
        return max(local_bytes(tensor, step.after, self.mesh), value.bytes) if apart else 0

    # ---- backward ----

    def _backward(self, roots: list[Value]) -> None:
        heap = self.heap
        starts = [(*value.made, value.bytes) for value in roots if value.made is not None]
        reached = self._reached([tape for tape, *_ in starts])
        for tape in self.tapes:
            if tape not in reached:
                if self.skips and (tape.saved or tape.again):
                    raise _UnevenError
                for storage in tape.saved:
                    heap.drop(storage)
                for frame, storage in tape.again:
                    frame.uses[storage] -= 1
        for tape, result, size in starts:
            tape.incoming[result] = heap.new("gradient of the loss", "temporary", size)
        skipped = list(self.kept)
        for tape in reversed([tape for tape in self.tapes if tape in reached]):
            while skipped and not is_before(tape.block) and tape.block < skipped[-1].end:
                self._undo_skipped(skipped.pop())
            self._undo(tape)
        for skip in reversed(skipped):
            self._undo_skipped(skip)
        self._arrived()

    def _arrived(self) -> None:
        """What was sent to be reduced is no longer needed."""
        if self.sent is not None:
            self.heap.drop(self.sent)
            self.sent = None

    @staticmethod
    def _reached(roots: list[Tape]) -> dict[Tape, None]:
        found = dict.fromkeys(roots)
        waiting = list(found)
        while waiting:
            for target in waiting.pop().targets:
                if target.tape not in found:
                    found[target.tape] = None
                    waiting.append(target.tape)
        return found

    def _undo(self, tape: Tape) -> None:
        """Run one node of backward."""
        heap = self.heap
        if tape.keeps:
            return
        heap.enter("backward", tape.block)
        heap.moment(f"backward {tape.name}")
        saved = [*tape.saved, *(frame.take(heap, storage) for frame, storage in tape.again)]
        if tape.sends:
            self._arrived()
        works = heap.new(tape.name, "temporary", tape.works)
        if tape.sends:
            self.sent = heap.hold(works)
        size = 0 if all(target.tape.leaves for target in tape.targets) else tape.together
        together = heap.hold(tape.bucket) if tape.bucket else heap.new("gradients", "gradients", size)
        arriving = []
        for target in tape.targets:
            came = tape.incoming[target.of]
            if tape.together:
                storage = heap.hold(together)
            elif target.passes and came is not None:
                storage = heap.hold(came)
            else:
                stays = target.tape.keeps or target.tape.together
                size = 0 if target.tape.leaves else target.bytes
                storage = heap.new(f"gradient in {tape.name}", "gradients" if stays else "temporary", size)
            arriving.append((target, storage))
        for storage in (together, works, *filter(None, tape.incoming), *saved):
            heap.drop(storage)
        for target, storage in arriving:
            self._arrive(target.tape, target.result, storage)

    def _arrive(self, target: Tape, number: int, storage: Storage) -> None:
        """Add a gradient to what has arrived: in place where nobody else holds one of the two."""
        heap, present = self.heap, target.incoming[number]
        if present is None:
            target.incoming[number] = storage
        elif present.holders == 1:
            heap.drop(storage)
        elif storage.holders == 1:
            heap.drop(present)
            target.incoming[number] = storage
        else:
            target.incoming[number] = heap.new(target.name, "temporary", storage.held.bytes)
            heap.drop(present)
            heap.drop(storage)
