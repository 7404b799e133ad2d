"""Details: what each operator, resharding and leaf of a plan does and costs; ``account`` beside it makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.formulation.resharding import Collective


@dataclass(frozen=True)
class Move:
    """A resharding of one value, ``times`` per step over all instances of a block.

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
        stands_for: what the ``*`` are, see :func:`planner.formulation.decision_names.fillings`; empty where there is
            one instance.
        meaning: per axis, what the strategy shards, in words: ``batch``, ``sequence``, ``columns`` ...
        operands: (where it comes from, layout in which the operator takes it).
        results: layout of each result.
        shape: of the first result, whole.
        parameters: names of the parameters that it reads.
        flops: forward operations of the whole operator.
        forward_s, backward_s: computing.
        inner: collectives of the operator's own local form; ``inner_s`` their seconds.
        before, after: reshardings of its operands, and of its results right after it.
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
    stands_for: str = ""


@dataclass(frozen=True)
class BlockDetail:
    """What a distinct block does: its operators by the names of :class:`BlockPlan`, and its calls per step."""

    ops: Mapping[str, OpDetail] = field(default_factory=dict)
    collectives: tuple[tuple[Collective, int], ...] = ()


@dataclass(frozen=True)
class LeafDetail:
    """A parameter, buffer or input: whole shape, dtype, how many share the entry, bytes of one on one rank.

    ``state_bytes`` is what the rank holds with it: gradient and optimizer state. ``stands_for`` says what the ``*`` of
    its name are, see :func:`planner.formulation.decision_names.fillings`.
    """

    shape: tuple[int, ...]
    dtype: str
    count: int
    local_bytes: int
    state_bytes: int = 0
    after: tuple[Move, ...] = ()
    stands_for: str = ""


@dataclass(frozen=True)
class Account:
    """Details of every distinct block, in the plan's order, and of every leaf by name."""

    blocks: tuple[BlockDetail, ...] = ()
    leaves: Mapping[str, LeafDetail] = field(default_factory=dict)

    def is_needed_in_backward(self, op: OpDetail, parameter: str) -> bool:
        """Whether backward of an operator reads a parameter of it: that of a product reads no bias."""
        leaf = self.leaves.get(parameter)
        return leaf is None or not op.flops or len(leaf.shape) > 1
