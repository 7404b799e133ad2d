"""Simulates one block of a micro-batched step by itself: forward and backward of one micro-batch.

``(Assignment, block, level, Surroundings) -> BlockMemory``. What a stage or a rank holds is put together from these
(:mod:`planner.analysis.pipeline.stage_memory`), so that a block is simulated once however often it occurs. Bytes are
those of a block alone: of what it makes, not of what it is given. Parameters that are gathered once a step are given as
they are used.

In the first backward of a step gradients of parameters stay as they come; later ones are added to them at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from planner.analysis.memory.autograd_tape import Frame, Tape, Value
from planner.analysis.memory.backward import reached_from, receive, run_node
from planner.analysis.memory.forward import output_at, run
from planner.analysis.memory.gather import keeps_gradients
from planner.analysis.memory.steady_state import Wiring
from planner.analysis.memory.storages import Held, Storage, StorageTracker
from planner.analysis.memory.walk import Walk
from planner.formulation.assignment import Assignment
from planner.formulation.decision_names import called
from planner.formulation.remat.backward_slice import Again
from planner.formulation.remat.levels import Level
from planner.formulation.resharding import local_bytes
from planner.ir.folding import Block
from planner.ir.graph import Ref
from planner.ir.layout import MICRO, Layout, R, Shard

GATHERED = "gathered"
NONE, PLAIN, SHARED = 0, 1, 2
"""Of the gradient of a value: it has not come; it has, and more is added in place; it has, and is a view or somebody
else's, so that a sum is another tensor."""


class Surroundings(NamedTuple):
    """What a block finds around it in its stage.

    Attributes:
        given: of each input, the gradient that has come from later blocks.
        ends: of each input, whether backward of no earlier block needs its memory, nor anybody else.
        settles: of each input that is a parameter of several blocks, whether its gradient is complete after this one.
        returns: of each output, whether a gradient comes.
        stays: of each output, whether that gradient came from another stage, and is there as long as backward of this.
        part: ``B`` the whole backward; ``I`` that of inputs, ``W`` that of weights.
    """

    given: tuple[int, ...]
    ends: tuple[bool, ...]
    settles: tuple[bool, ...]
    returns: tuple[bool, ...]
    stays: tuple[bool, ...]
    part: str = "B"


class BlockMoment(NamedTuple):
    """Something that runs.

    Attributes:
        bytes: most that is alive while it does.
        later: the same where gradients are added to those of micro-batches before.
        beside_next: whether parameters of the block that runs next are on their way.
        beside_sent: whether gradients that the block before it sent to be reduced are there.
    """

    what: str
    bytes: int
    later: int
    beside_next: bool
    beside_sent: bool

    def beside(self, size: int) -> BlockMoment:
        """The same beside so many bytes more."""
        return self._replace(bytes=self.bytes + size, later=self.later + size) if size else self


class Output(NamedTuple):
    """A value that a block hands on.

    Attributes:
        bytes: of its memory; ``is_saved``: whether backward of the block needs that.
        like: the number of the first output in the same memory, or that of an input, counted from the end (-1 is the
            first one).
    """

    bytes: int
    is_saved: bool
    like: int


class BlockMemory(NamedTuple):
    """Bytes of one micro-batch in a block, without what it is given.

    Attributes:
        forward, backward: what runs, in order.
        own_bytes: of what is saved for backward and is nobody else's.
        outputs: what is handed on.
        saves: of each input, whether backward needs its memory.
        gradients: of each input, its gradient when backward is over.
        gradient_bytes: of gradients of parameters that are complete.
        coming_bytes: of parameters on their way to it in forward; ``again_bytes``: in backward.
        sent_bytes: of gradients of parameters that are being reduced when it is over.
        parted_bytes: of gradients that backward of inputs leaves for that of weights; ``found_bytes``: of those that
            the latter finds, before they are added up.
    """

    forward: tuple[BlockMoment, ...]
    backward: tuple[BlockMoment, ...]
    own_bytes: int
    outputs: tuple[Output, ...]
    saves: tuple[bool, ...]
    gradients: tuple[int, ...]
    gradient_bytes: int
    coming_bytes: int
    again_bytes: int
    sent_bytes: int
    parted_bytes: int
    found_bytes: int

    @property
    def saved_bytes(self) -> int:
        """Of all that is saved and that the block makes."""
        outputs = (each.bytes for at, each in enumerate(self.outputs) if each.is_saved and each.like == at)
        return self.own_bytes + sum(outputs)

    @property
    def working_bytes(self) -> int:
        """Most that backward has beside that."""
        return max(0, max(moment.later for moment in self.backward) - self.saved_bytes)


class _Tracker(StorageTracker):
    """Follows what one block makes, apart from what it was given."""

    def __init__(self, watched: tuple[int, bool] | None = None) -> None:
        self.given: dict[Storage, None] = {}
        self.given_bytes = self.settled_bytes = 0
        self.settled: dict[Storage, str] = {}
        self.is_beside, self.has_sent = False, False
        self.all: list[tuple[int, int, bool, bool]] = []
        self.names: list[str] = []
        self.watched = watched
        self.seen: tuple[Held, ...] = ()
        super().__init__()

    def give(self, name: str, use: str, size: int) -> Storage:
        """A storage that is there before, and stays."""
        storage = super().new(name, use, size)
        self.given[storage] = None
        self.given_bytes += storage.bytes
        return storage

    def let_go(self, storage: Storage) -> None:
        """What was given is held by the block alone from here on."""
        del self.given[storage]
        self.given_bytes -= storage.bytes
        self.drop(storage)

    def moment(self, what: str) -> None:
        now = self.total - self.given_bytes
        self.names.append(what)
        self.all.append((now, now - self.settled_bytes, self.is_beside, not self.has_sent))
        self._look()

    def starts_next(self) -> None:
        self.is_beside = True
        if self.names:
            self.moment(self.names[-1])

    def settle(self, storage: Storage | None, name: str) -> None:
        if storage is not None and storage not in self.settled:
            self.settled[storage] = name
            self.settled_bytes += storage.bytes

    def new(self, name: str, use: str, size: int, times: int = 1) -> Storage:
        storage = self._add(Held(name, use, size, times, self._block[1]))
        if self.all:
            now, (most, later, before_next, before_sent) = self.total - self.given_bytes, self.all[-1]
            if now > most or now - self.settled_bytes > later:
                self.all[-1] = max(most, now), max(later, now - self.settled_bytes), before_next, before_sent
                self._look()
        return storage

    def called(self, storage: Storage) -> Held:
        """What it is, by the name of the parameter if it is a complete gradient of one."""
        name = self.settled.get(storage)
        if name is None:
            return replace(storage.held, use="temporary") if storage.held.use == "gradients" else storage.held
        use = GATHERED if name.startswith(GATHERED) else "gradients"
        return replace(storage.held, name=f"gradient of {name}", use=use)

    def _look(self) -> None:
        if self.watched is None or len(self.all) - 1 != self.watched[0]:
            return
        settled = self.settled if self.watched[1] else {}
        found = tuple(self.called(each) for each in self.alive if each not in self.given and each not in settled)
        if sum(each.all_bytes for each in found) == self.all[-1][self.watched[1]]:
            self.seen = found


class _NextFrame(Frame):
    """Stands for the block that runs its backward next, and gathers parameters again."""

    def __init__(self, tracker: _Tracker):
        super().__init__(Block((), (), (), ""), Again(frozenset(), frozenset(), frozenset(), (), (), ()), None)  # type: ignore[arg-type]
        self.tracker = tracker

    def start(self, heap: StorageTracker) -> None:
        self.tracker.starts_next()


class BlockRun:
    """One simulated run of a block.

    Args:
        number: of the block.
        watched: the number of a moment, of forward and backward together, and whether later micro-batches count:
            :attr:`seen` is what is alive then.

    Attributes:
        kept: what is saved for backward and is nobody else's.
    """

    def __init__(
        self,
        assignment: Assignment,
        number: int,
        level: Level,
        around: Surroundings,
        watched: tuple[int, bool] | None = None,
    ):
        self.assignment, self.space, self.number = assignment, assignment.space, number
        self.instance = self.space.folded.instances[number]
        self.around, self.heap = around, _Tracker(watched)
        self.walk = Walk(Wiring(assignment), [], range(number, number + 1), heap=self.heap)
        self.walk.number = number
        if keeps_gradients(self.space):
            self.walk.buckets = self.heap.give("gradients", "gradients", 0)
        self.walk.before = self.next_frame = _NextFrame(self.heap)
        self.inputs: dict[Ref, Value] = {}
        self.sent_bytes = 0
        self.memory = self._follow(level)

    @property
    def complete(self) -> tuple[Held, ...]:
        """Gradients of parameters that are complete when it is over."""
        return tuple(map(self.heap.called, self.heap.settled))

    @property
    def seen(self) -> tuple[str, tuple[Held, ...]]:
        """What runs at the watched moment, and what is alive then."""
        assert self.heap.watched is not None
        return self.heap.names[self.heap.watched[0]], self.heap.seen

    def _follow(self, level: Level) -> BlockMemory:
        heap, walk, block = self.heap, self.walk, self.instance.block
        self._enter(block)
        caller = [heap.hold(each) for each in heap.given]
        heap.enter("forward", self.number)
        heap.moment(f"forward {block.path or block.nodes[0].name}")
        outputs = run(walk, self.instance, level, dict(self.inputs))
        left = [output_at(walk, at, outputs) for at, ref in enumerate(self.space.leaving) if ref in outputs]
        roots = self._roots(outputs, left)
        for value in left:
            heap.drop(value.storage)
        handed, saves = self._handed(outputs)
        own_bytes = sum(each.all_bytes for each in self.kept)
        forward = len(heap.all)
        for storage in (*(value.storage for value in outputs.values()), *caller):
            heap.drop(storage)
        for ref, ends in zip(block.inputs, self.around.ends, strict=True):
            if ends:
                heap.let_go(self.inputs[ref].storage)
        heap.is_beside = False
        heap.enter("backward", self.number)
        heap.moment(f"backward {block.path or block.nodes[0].name}")
        parts = {"B": self._backward, "I": self._backward_of_inputs, "W": self._backward_of_weights}
        found_bytes = parts[self.around.part](roots)
        moments = tuple(BlockMoment(what, *each) for what, each in zip(heap.names, heap.all, strict=True))
        before = walk.before
        found = BlockMemory(
            forward=moments[:forward],
            backward=moments[forward:],
            own_bytes=own_bytes,
            outputs=handed,
            saves=saves,
            gradients=tuple(self._gradient(self.inputs[ref]) for ref in block.inputs),
            gradient_bytes=heap.settled_bytes,
            coming_bytes=sum(each.bytes for each in walk.ahead if each not in heap.given),
            again_bytes=0 if before is None or before is self.next_frame else sum(s.bytes for s in before.gathers),
            sent_bytes=self.sent_bytes,
            parted_bytes=0,
            found_bytes=found_bytes,
        )
        return found._replace(parted_bytes=self._left_bytes(found)) if self.around.part == "I" else found

    def _handed(self, outputs: Mapping[Ref, Value]) -> tuple[tuple[Output, ...], tuple[bool, ...]]:
        """What the block hands on when its forward is over, and which inputs it saved; notes what it saved besides."""
        heap, block = self.heap, self.instance.block
        made = [outputs[ref].storage if ref in outputs else None for ref in block.outputs]
        holders = Counter(each for each in made if each is not None)
        like = {each: at for at, each in reversed([*enumerate(made)]) if each is not None}
        like |= {self.inputs[ref].storage: -1 - at for at, ref in reversed([*enumerate(block.inputs)])}
        self.kept = tuple(each.held for each in heap.alive if each not in heap.given and each not in holders)
        given = (self.inputs[ref].storage for ref in block.inputs)  # which is held, and the caller holds it, too
        return (
            tuple(
                Output(0, False, at) if each is None else Output(each.bytes, each.holders > holders[each], like[each])
                for at, each in enumerate(made)
            ),
            tuple(each.holders > 2 + holders[each] for each in given),
        )

    def _left_bytes(self, found: BlockMemory) -> int:
        """Bytes that are there beside gradients of inputs and of parameters, and what forward saved."""
        heap = self.heap
        came = dict.fromkeys(value.made[0].incoming[0] for value in self.inputs.values() if value.made is not None)
        of_inputs = sum(each.bytes for each in came if each is not None and each not in heap.settled)
        return heap.total - heap.given_bytes - heap.settled_bytes - of_inputs - found.saved_bytes

    # ---- what is given -----------------------------------------------------------------------------------------------

    def _enter(self, block: Block) -> None:
        """Let inputs, and parameters as they are used, be there."""
        graph, mesh, once = self.space.graph, self.space.mesh, self.space.unsharding.once_per_step
        for ref, settles in zip(block.inputs, self.around.settles, strict=True):
            node, tensor = graph.by_name[ref.node], graph.type_of(ref)
            size = local_bytes(tensor, self.assignment.consumer_layout(ref), mesh)
            is_param = node.op == "param"
            use = "parameters" if node.op in ("param", "buffer") else "activations"
            is_there = is_param and (once or self.walk.is_away)
            storage = self.heap.give(called(node), use, 0 if is_there else size)
            is_trained = tensor.grad and not (is_param and once)
            tape = self._leaf(called(node), settles) if is_trained and (is_param or not node.is_leaf) else None
            self.inputs[ref] = Value(storage, size, None if tape is None else (tape, 0))
            if is_param:
                self.walk.parts[ref], self.walk.leaves[storage] = storage, ref.node
                if tape is not None:
                    tape.leaves = self.walk.is_away
        for node in block.nodes if once else ():
            for ref, layout in zip(node.inputs, self.assignment.choice(node).operands, strict=True):
                if graph.by_name[ref.node].op == "param" and (ref, layout) not in self.walk.used:
                    name, tensor = self.walk.called(ref), graph.type_of(ref)
                    size = local_bytes(tensor, self._in_all(layout), mesh)
                    if size > local_bytes(tensor, self.assignment.produced(ref), mesh):
                        name = f"{GATHERED} {name}"
                    tape = self._leaf(name, True) if tensor.grad else None
                    made = None if tape is None else (tape, 0)
                    self.walk.used[ref, layout] = Value(self.heap.give(name, "parameters", size), size, made)

    def _in_all(self, layout: Layout) -> Layout:
        """The layout of a parameter before a micro-batch takes its part of it."""
        pairs = zip(self.space.mesh.axes, layout, strict=True)
        return tuple(R if axis.name == MICRO and isinstance(each, Shard) else each for axis, each in pairs)

    def _leaf(self, name: str, settles: bool) -> Tape:
        """Where the gradient of something that is given arrives."""
        tape = self.walk.tape(name, 1)
        tape.keeps, tape.awaits = True, int(settles)
        return tape

    # ---- backward ----------------------------------------------------------------------------------------------------

    def _roots(self, outputs: dict[Ref, Value], left: list[Value]) -> list[tuple[Tape, int, int, bool, str]]:
        """Where backward begins: node, result, bytes of the gradient, whether it is held besides, and its name."""
        found = []
        for ref, returns, stays in zip(
            self.instance.block.outputs, self.around.returns, self.around.stays, strict=True
        ):
            value = outputs.get(ref)
            if returns and value is not None and value.made is not None:
                found.append((*value.made, value.bytes, stays, f"gradient of {self.walk.called(ref)}"))
        places = [at for at, ref in enumerate(self.space.leaving) if ref in outputs]
        for at, value in zip(places, left, strict=True):
            if at in self.space.graph.roots and value.made is not None:
                found.append((*value.made, value.bytes, False, "gradient of the loss"))
        return found

    def _begin(self, roots: list[tuple[Tape, int, int, bool, str]]) -> list[Tape]:
        """Let the gradients be there that came; returns the nodes to run, in order."""
        heap, walk = self.heap, self.walk
        reached = reached_from(walk, [tape for tape, *_ in roots])
        arriving = Counter(target.tape for tape in reached for target in tape.targets)
        for tape in walk.tapes:
            tape.awaits = arriving[tape] if tape.awaits else 0
        for ref, given in zip(self.instance.block.inputs, self.around.given, strict=True):
            value = self.inputs[ref]
            if given and value.made is not None:
                tape, _ = value.made
                tape.incoming[0] = heap.new(f"gradient of {walk.called(ref)}", "temporary", value.bytes)
                if given == SHARED:
                    tape.views.add(0)
        for tape, result, size, stays, name in roots:
            if tape.incoming[result] is None:
                storage = heap.hold(heap.give(name, "temporary", size)) if stays else heap.new(name, "temporary", size)
                tape.incoming[result] = storage
        return [tape for tape in reversed(walk.tapes) if tape in reached and not tape.keeps]

    def _backward(self, roots: list[tuple[Tape, int, int, bool, str]]) -> int:
        for tape in self._begin(roots):
            self.heap.has_sent |= tape.sends
            run_node(self.walk, tape)
        self.sent_bytes = 0 if self.walk.sent is None else self.walk.sent.bytes
        receive(self.walk)
        return 0

    def _backward_of_inputs(self, roots: list[tuple[Tape, int, int, bool, str]]) -> int:
        """Only what leads to inputs; what came to operators that also lead to weights stays, and all that is saved."""
        heap, order, reaching = self.heap, self._begin(roots), self._reaching
        for frame in {frame for tape in order for frame, _ in tape.again}:
            for storage in frame.held:
                heap.hold(storage)
        for tape in order:
            if tape not in reaching:
                continue
            targets = [target for target in tape.targets if target.tape in reaching]
            for storage in (*tape.saved, *(filter(None, tape.incoming) if len(targets) < len(tape.targets) else ())):
                heap.hold(storage)
            run_node(self.walk, replace(tape, targets=targets))
        return 0

    def _backward_of_weights(self, roots: list[tuple[Tape, int, int, bool, str]]) -> int:
        """What leads to weights, one operator after the other; what they find is added up when all have."""
        heap, order, reaching = self.heap, self._begin(roots), self._reaching
        for frame in {frame for tape in order for frame, _ in tape.again}:
            for storage in frame.held:
                heap.hold(storage)
        for tape in order:
            for storage in filter(None, tape.incoming):
                heap.drop(storage)
        found: list[Storage] = []
        for tape in order:
            aside = [target for target in tape.targets if target.tape not in reaching]
            if tape not in reaching or not aside:
                continue
            heap.moment(f"backward {tape.name}, of weights")
            made = [frame.take(heap, storage) for frame, storage in tape.again]
            works = heap.new(tape.name, "temporary", tape.works)
            for target in aside:
                found.append(heap.new(f"gradient in {tape.name}", "temporary", target.bytes))
            for storage in (works, *made):
                heap.drop(storage)
        return sum(storage.bytes for storage in found)

    @property
    def _reaching(self) -> set[Tape]:
        """The nodes that lead to inputs, parameters aside."""
        inputs = (ref for ref in self.inputs if self.space.graph.by_name[ref.node].op != "param")
        found = {made[0] for ref in inputs if (made := self.inputs[ref].made) is not None}
        for tape in self.walk.tapes:
            if any(target.tape in found for target in tape.targets):
                found.add(tape)
        return found

    def _gradient(self, value: Value) -> int:
        """How the gradient of an input is there."""
        if value.made is None:
            return NONE
        tape, _ = value.made
        storage = tape.incoming[0]
        if storage is None or storage in self.heap.settled:
            return NONE
        return SHARED if 0 in tape.views or storage.holders > 1 else PLAIN
