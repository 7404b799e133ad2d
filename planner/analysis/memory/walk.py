"""The state of a simulated step."""

from __future__ import annotations

from collections.abc import Mapping

from planner.analysis.memory.autograd_tape import Frame, Tape, Value
from planner.analysis.memory.offloadable import Saves
from planner.analysis.memory.readers import read_alone
from planner.analysis.memory.steady_state import Skip, Wiring
from planner.analysis.memory.storages import BEFORE, Storage, StorageTracker
from planner.formulation.decision_names import called
from planner.ir.graph import Ref
from planner.ir.layout import Layout


class Walk:
    """Where a step that is simulated is: what it holds, what autograd remembers, which block runs.

    Args:
        skips: the instances that others stand for.
        blocks: the numbers of those of a stage; left out: all.
        away: see :class:`planner.analysis.memory.storages.StorageTracker`.
        heap: what it holds; left out: nothing yet.

    Attributes:
        frame: of the block that runs and recomputes; ``before``: of the last one that gathers parameters again.
        parts: the storages of leaves.
        following: the instances that gather ahead -> the one after; ``underway``: what is sent and comes, by block and
            chunk.
        ahead: what parameters came in that were gathered ahead.
        sent: what was sent to be reduced; ``buckets``: where sums of gradients lie, where they stay.
        using: gradients that are used when the next block's are complete; ``alone``: what each block alone reads, where
            backward uses its gradients.
        number: of the block that runs.
        is_away: whether parameters are at home elsewhere.
        leaves: their names; ``kept``: what skipped instances hold between forward and backward.
        used: parameters as operators use them, by layout, where they are made of the stored ones before the step.
        read_again, holding: the leaves that backward of a block reads, and what a block that recomputes keeps for it.
    """

    def __init__(
        self,
        wiring: Wiring,
        skips: list[Skip],
        blocks: range | None = None,
        away: Mapping[int, int] | None = None,
        heap: StorageTracker | None = None,
    ):
        self.blocks = blocks or range(len(wiring.instances))
        self.assignment, self.space, self.wiring, self.skips = wiring.assignment, wiring.space, wiring, skips
        self.instances = self.space.folded.instances
        self.graph, self.mesh = self.space.graph, self.space.mesh
        self.heap, self.saves = heap or StorageTracker(away), Saves() if self.space.training.activations else None
        self.tapes: list[Tape] = []
        self.used: dict[tuple[Ref, Layout], Value] = {}
        self.frame: Frame | None = None
        self.parts: dict[Ref, Storage] = {}
        self.following: dict[int, int] = {}
        self.underway: dict[tuple[int, int], tuple[Storage, Storage]] = {}
        self.before: Frame | None = None
        self.ahead: list[Storage] = []
        self.sent: Storage | None = None
        self.buckets: Storage | None = None
        self.using: list[Storage] = []
        self.alone = read_alone(self.assignment) if self.space.training.updates_on_device else {}
        self.number = BEFORE
        self.is_away = self.space.training.tier != "device"
        self.leaves: dict[Storage, str] = {}
        self.kept: dict[Skip, list[Storage]] = {}
        self.read_again: dict[int, frozenset[str]] = {}
        self.holding: list[Storage] = []

    def tape(self, name: str, results: int) -> Tape:
        """A new node of autograd."""
        tape = Tape(name, self.number, [None] * results)
        self.tapes.append(tape)
        return tape

    def called(self, ref: Ref) -> str:
        """A value's name."""
        return called(self.graph.by_name[ref.node])
