"""Resharding: which collectives turn one layout into another, and what they cost.

A *step* changes the local type on one mesh axis; each legal step has a fixed collective forward and a
fixed one backward (the table :data:`STEPS`). A resharding between two layouts is the cheapest route of
legal steps, found once for all pairs of layouts of a tensor.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from planner.formulation.choices import Laid
from planner.ir.graph import TensorType
from planner.ir.layout import MICRO, Axis, I, Layout, LocalType, Mesh, P, R, Shard, local_shape
from planner.solve.choices.model import Mask
from planner.solve.problem import Floats, Ints

# (from, to) -> (collective forward, collective backward). "S>S" is a shard moving to another dim.
STEPS: dict[str, tuple[str, str]] = {
    "I>R": ("", "all_reduce"),
    "R>I": ("", ""),
    "P>I": ("all_reduce", ""),
    "P>R": ("all_reduce", "all_reduce"),
    "P>S": ("reduce_scatter", "all_gather"),
    "S>R": ("all_gather", "reduce_scatter"),
    "S>I": ("all_gather", ""),
    "I>S": ("", "all_gather"),
    "R>S": ("", ""),
    "S>S": ("all_to_all", "all_to_all"),
    "I>P": ("", ""),
    "R>P": ("", ""),
}
GATHERED = frozenset({"I>R", "S>R"})
"""Steps that a block makes for several parameters in one call: to gather them, and to reduce their gradients."""
SUMS = frozenset({"all_reduce", "reduce_scatter"})
"""Collectives that add up what ranks have."""


@dataclass(frozen=True)
class Collective:
    """One call of a collective: ``bytes_in`` is the size of the tensor each rank passes in."""

    kind: str
    axis: str
    bytes_in: int
    phase: str

    def __str__(self) -> str:
        return f"{self.phase} {self.kind} of {self.bytes_in:,} bytes on axis {self.axis!r}"


@dataclass(frozen=True)
class ReshardStep:
    """One axis of a layout changes from ``src`` to ``dst``; ``before`` is the whole layout it acts on."""

    axis: int
    src: LocalType
    dst: LocalType
    before: Layout

    @property
    def rule(self) -> str:
        return f"{_letter(self.src)}>{_letter(self.dst)}"

    @property
    def after(self) -> Layout:
        return (*self.before[: self.axis], self.dst, *self.before[self.axis + 1 :])

    def collectives(self, tensor: TensorType, mesh: Mesh, widening: int = 1) -> tuple[Collective, ...]:
        """The calls this step makes for a tensor, backward only where a gradient flows.

        Args:
            widening: see :class:`ReshardingTable`.
        """
        axis = mesh.axes[self.axis]
        before, after = (local_bytes(tensor, layout, mesh) for layout in (self.before, self.after))
        return _collectives(self.rule, axis, before, after * widened(STEPS[self.rule][1], axis, widening), tensor.grad)


def widened(kind: str, axis: Axis, widening: int) -> int:
    """By how much backward widens a gradient for a collective: to sum it over ranks, not over micro-batches."""
    return widening if kind in SUMS and axis.size > 1 and axis.name != MICRO else 1


def _collectives(rule: str, axis: Axis, before: int, after: int, grad: bool) -> tuple[Collective, ...]:
    """The calls of a step on ``axis`` from ``before`` bytes forward and ``after`` bytes backward, per rank."""
    if axis.size == 1:
        return ()
    forward, backward = STEPS[rule]
    calls = []
    if forward:
        calls.append(Collective(forward, axis.name, before, "forward"))
    if backward and grad:
        calls.append(Collective(backward, axis.name, after, "backward"))
    return tuple(calls)


def together_on(axis: Axis, together: int) -> int:
    """How many parameters one call on an axis gathers: nothing is called among micro-batches, nor where there is one
    rank.
    """
    return 0 if axis.size == 1 or axis.name == MICRO else together


Route = tuple[ReshardStep, ...]
PriceOf = Callable[[str, Axis, Ints, bool], Floats]
"""Seconds of a collective of a kind, on an axis, of bytes that each rank passes in; whether parameters share it."""


class Hidden(NamedTuple):
    """What runs beside the communication of one value, and hides it.

    Attributes:
        seconds: that it lasts, each way.
        kinds: of the collectives that it hides.
        in_pieces: whether ranks communicate piece by piece, and wait for one.
    """

    seconds: float
    kinds: tuple[str, ...]
    in_pieces: bool

    def of(self, kind: str, axis: Axis) -> float:
        """The share of a collective that may be hidden."""
        if kind not in self.kinds or axis.name == MICRO:
            return 0.0
        return 1 - 1 / axis.size if self.in_pieces else 1.0


def _letter(local_type: LocalType) -> str:
    return "S" if isinstance(local_type, Shard) else local_type.letter


def local_bytes(tensor: TensorType, layout: Layout, mesh: Mesh) -> int:
    """Bytes that one rank holds of ``tensor``."""
    shape = local_shape(tensor.shape, layout, mesh.sizes)
    assert shape is not None, f"{layout} does not divide {tensor.shape} on {mesh.sizes}"
    return math.prod(shape) * tensor.item_bytes


_RULES = tuple(STEPS)
_KINDS = ("", *sorted({kind for kinds in STEPS.values() for kind in kinds if kind}))
_FORWARD = np.array([_KINDS.index(STEPS[rule][0]) for rule in _RULES])
_BACKWARD = np.array([_KINDS.index(STEPS[rule][1]) for rule in _RULES])
_IS_GATHERED = np.array([int(rule in GATHERED) for rule in _RULES])


class Passes(NamedTuple):
    """How often a step passes over a rank's part before and after it in memory, beside its call: read or written."""

    before: int
    after: int


Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, Phase] = ("forward", "backward")


def passes(rule: str, phase: Phase, together: int, widening: int = 1) -> Passes:
    """What a step copies, forward or backward.

    Args:
        together: parameters that one call gathers; 0: the value is no parameter that is gathered.
        widening: of their gradients, see :class:`ReshardingTable`.
    """
    cast = 1 + widening if widening > 1 and phase == "backward" else 0  # one of both is read, and the other written
    if together and rule == "I>R":  # gradients are put behind one another
        return Passes(0, 2 + 2 * cast) if phase == "backward" else Passes(0, 0)
    if together and rule == "S>R":  # parts are put behind one another, and what comes into shape; gradients into parts
        if phase == "backward":
            return Passes(cast, cast or 2)
        return Passes(2, 2) if together > 1 else Passes(1, 1)
    if rule in ("I>R", "R>I"):
        return Passes(0, 2 * cast if rule in GATHERED else 0)
    return Passes(1 + cast, 1 + cast) if rule in GATHERED else Passes(1, 1)


def _rule_number(src: LocalType, dst: LocalType, grad: bool) -> int:
    """The row of :data:`STEPS` for a step between two types; -1 where there is none."""
    rule = f"{_letter(src)}>{_letter(dst)}"
    if src == dst or rule not in STEPS or (not grad and I in (src, dst)):
        return -1
    if isinstance(src, Shard) and isinstance(dst, Shard) and src.dim == dst.dim:
        return -1
    return _RULES.index(rule)


@functools.lru_cache(maxsize=2**12)
def _steps(
    layouts: tuple[Layout, ...], axis: int, types: tuple[LocalType, ...], grad: bool, first_is_last: bool
) -> tuple[Ints, Ints, Ints]:
    """Every legal step on one axis: numbers of the layouts before and after, and of the rule.

    Args:
        types: the local types in the layouts.
        grad, first_is_last: see :class:`ReshardingTable`.
    """
    known = {t: number for number, t in enumerate(types)}
    if not layouts:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing
    codes = np.array([[known[t] for t in layout] for layout in layouts]).reshape(len(layouts), -1)
    place = len(types) ** np.arange(codes.shape[1])
    number = np.full(len(types) ** codes.shape[1], -1)
    number[codes @ place] = np.arange(len(codes))
    every = np.arange(len(types))
    rule = np.array([[_rule_number(src, dst, grad) for dst in types] for src in types])[codes[:, axis]]
    after = number[(codes @ place)[:, None] + (every - codes[:, axis, None]) * place[axis]]
    legal = (rule >= 0) & (after >= 0)
    # A minor axis that cuts the same strips would be cut anew.
    is_shard = np.array([isinstance(t, Shard) for t in types])
    for minor in range(axis + 1, codes.shape[1]):
        legal &= ~(is_shard & (codes[:, minor, None] == every))
        legal &= ~(is_shard[codes[:, axis]] & (codes[:, minor] == codes[:, axis]))[:, None]
    if first_is_last and axis:
        legal &= (codes[:, 0] != known[R])[:, None]
    src, to = np.nonzero(legal)
    return src, after[src, to], rule[src, to]


@functools.cache
def _passes_of_all(phase: Phase, together: int, widening: int) -> Ints:
    """Those of every rule."""
    return np.array([passes(rule, phase, together, widening) for rule in _RULES])


class ReshardingTable:
    """All reshardings of one tensor type on one mesh.

    Args:
        first: the local types on the first axis, where they are not all that are possible.
        first_is_last: nothing else changes any more once the first axis is replicated.
        together: see :func:`passes`.
        is_gathered: the value is a parameter that its block gathers with others. One call reduces their gradients to
            where they are stored; so none is gathered by itself to have its gradient summed whole.
        hidden: what hides communication, once of a whole route.
        widening: of a parameter's gradient, how many bytes are reduced over ranks for one that is stored.
        shared: of a value that comes in each micro-batch, the collectives over ranks that are made once for all of
            them, of which ``price`` gives the share of one; ``None``: of another value, which has no :attr:`least_s`.

    Attributes:
        layouts: every layout considered, valid for the shape.
        held: bytes that one rank holds in each of them.
        forward_s, backward_s: matrices [from, to] of seconds along the chosen route; ``inf`` when there is none.
    """

    def __init__(
        self,
        tensor: TensorType,
        mesh: Mesh,
        shards: Iterable[Shard],
        price: PriceOf,
        touch_s_per_byte: float,
        launch_s: float,
        first: Collection[LocalType] | None = None,
        first_is_last: bool = False,
        together: int = 0,
        is_gathered: bool = False,
        hidden: Hidden | None = None,
        widening: int = 1,
        shared: Collection[str] | None = None,
    ):
        self.tensor, self.mesh, self._hidden = tensor, mesh, hidden
        types: list[LocalType] = [R, P, *sorted(shards)] if not tensor.grad else [R, I, P, *sorted(shards)]
        others = [types] * (len(mesh.axes) - 1)
        every = itertools.product([t for t in types if first is None or t in first], *others)
        local = ((layout, local_shape(tensor.shape, layout, mesh.sizes)) for layout in every)
        held_in = {layout: math.prod(shape) * tensor.item_bytes for layout, shape in local if shape is not None}
        self.layouts = tuple(held_in)
        self.index = {layout: i for i, layout in enumerate(self.layouts)}
        count = len(self.layouts)
        forward = np.full((count, count), np.inf)
        backward = np.full((count, count), np.inf)
        np.fill_diagonal(forward, 0.0)
        np.fill_diagonal(backward, 0.0)
        is_last = np.zeros((count, count), np.bool_)  # steps that nothing follows but others such
        hideable, shared_s = np.zeros((2, 2, count, count))
        held = self.held = np.array([*held_in.values()], np.int64)
        for number, axis in enumerate(mesh.axes):
            silent = np.zeros(count)

            def prices_of(sizes: Mapping[str, Ints], axis: Axis = axis, silent: Floats = silent) -> Floats:
                is_together = (False, True) if together else (False,)
                is_silent = [axis.size == 1 or not kind for kind in _KINDS]
                return np.stack(
                    [
                        [
                            silent if nothing else price(kind, axis, sizes[kind], is_shared)
                            for kind, nothing in zip(_KINDS, is_silent, strict=True)
                        ]
                        for is_shared in is_together
                    ]
                )

            src, dst, rules = _steps(self.layouts, number, tuple(types), tensor.grad, first_is_last)
            wide = {kind: widened(kind, axis, widening) for kind in _KINDS}
            prices = backward_prices = prices_of(dict.fromkeys(_KINDS, held))
            if max(wide.values()) > 1:
                backward_prices = prices_of({kind: held * times for kind, times in wide.items()})
            there, back = (
                _passes_of_all(phase, together_on(axis, together), max(wide.values()))[rules].T for phase in PHASES
            )

            def moved_s(times: Ints, src: Ints = src, dst: Ints = dst) -> Floats:
                copied_s = touch_s_per_byte * (times[0] * held[src] + times[1] * held[dst])
                return np.where(times.any(axis=0), launch_s + copied_s, 0.0)

            is_shared = _IS_GATHERED[rules] if together else 0
            calls_s = (
                prices[is_shared, _FORWARD[rules], src],
                backward_prices[is_shared, _BACKWARD[rules], dst] if tensor.grad else np.zeros(len(src)),
            )
            forward[src, dst] = calls_s[0] + moved_s(there)
            backward[src, dst] = calls_s[1] + moved_s(back) if tensor.grad else 0.0
            for phase, (call_s, kinds) in enumerate(zip(calls_s, (_FORWARD[rules], _BACKWARD[rules]), strict=True)):
                if hidden is not None:
                    shares = np.array([hidden.of(kind, axis) for kind in _KINDS])
                    hideable[phase, src, dst] = shares[kinds] * np.nan_to_num(call_s)
                if shared and axis.name != MICRO:
                    shared_s[phase, src, dst] = np.isin(_KINDS, [*shared])[kinds] * np.nan_to_num(call_s)
            if is_gathered:
                is_last[src, dst] = rules == _RULES.index("S>I")
        if shared is not None:
            self._steps = np.maximum(0.0, np.stack([forward, backward]) - shared_s), is_last
        self._via, self._before_last = _route(forward, backward, is_last, len(mesh.axes))
        self.forward_s: Floats = forward
        self.backward_s: Floats = backward
        if hidden is not None:
            for seconds, each in zip((forward, backward), hideable, strict=True):
                seconds -= np.minimum(self._along_routes(each), hidden.seconds)

    @cached_property
    def least_s(self) -> tuple[Floats, Floats]:
        """Matrices [from, to] of what a value that comes in each micro-batch takes in one of them at least, however
        many there are: seconds both ways, of the route for which these are the least, and forward alone, of another.

        Calls that are made once for all are free, so that no route is chosen for the share of them that one micro-batch
        has; and as much is hidden as may be, each way.
        """
        (forward, backward), is_last = self._steps
        nothing, found = np.where(np.isinf(backward), np.inf, 0.0), []
        for both, ways in (((forward, backward), 2), ((forward, nothing), 1)):
            there, back = (each.copy() for each in both)
            _route(there, back, is_last, len(self.mesh.axes))
            hidden_s = 0.0 if self._hidden is None else ways * self._hidden.seconds
            found.append(np.maximum(0.0, there + back - hidden_s))
        return found[0], found[1]

    def numbers(self, laid: Laid) -> Ints:
        """The number of the layout that each of several choices gives the value."""
        found: Ints = np.array([self.index[layout] for layout in laid.layouts], np.int64)[laid.numbers]
        return found

    @cached_property
    def summing_s(self) -> Floats:
        """Matrix [from, to] of seconds of the route backward that sum gradients of all micro-batches."""
        types = {layout[0]: None for layout in self.layouts}
        first = np.array([[*types].index(layout[0]) for layout in self.layouts])
        sums = (first[:, None] != first) & np.isfinite(self.backward_s)
        return self._along_routes(np.where(sums, self.backward_s, 0.0))

    def _along_routes(self, step_s: Floats) -> Floats:
        """Matrix [from, to] of what steps have, added up along the routes."""
        found = step_s.copy()
        _add_up(found, self._via, found)
        _add_up(found, self._before_last, step_s)
        return found

    def route(self, src: Layout, dst: Layout) -> Route:
        """The steps from ``src`` to ``dst``; empty when they are equal."""
        steps: list[ReshardStep] = []
        for i, j in self._hops(self.index[src], self.index[dst]):
            before, after = self.layouts[i], self.layouts[j]
            axis = next(k for k, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
            steps.append(ReshardStep(axis, before[axis], after[axis], before))
        return tuple(steps)

    def _hops(self, i: int, j: int) -> list[tuple[int, int]]:
        assert np.isfinite(self.forward_s[i, j]), f"no resharding {self.layouts[i]} -> {self.layouts[j]}"
        before = int(self._before_last[i, j])
        return [*self._hops(i, before), (before, j)] if before >= 0 else self._closed(i, j)

    def _closed(self, i: int, j: int) -> list[tuple[int, int]]:
        if i == j:
            return []
        middle = int(self._via[i, j])
        return [(i, j)] if middle < 0 else self._closed(i, middle) + self._closed(middle, j)


def _route(forward: Floats, backward: Floats, is_last: Mask, axes: int) -> tuple[Ints, Ints]:
    """Seconds of routes instead of steps, in place; and see :func:`_close` and :func:`_lengthen`."""
    lasts = np.where(is_last, np.stack([forward, backward]), np.inf)
    forward[is_last] = backward[is_last] = np.inf
    return _close(forward, backward), _lengthen(forward, backward, lasts, axes)


def _close(forward: Floats, backward: Floats) -> Ints:
    """All-pairs cheapest routes by total seconds (Floyd–Warshall), in place; a middle layout of each, or -1."""
    middles = np.full(forward.shape, -1)
    _shorten(forward, backward, middles, range(len(forward)), None)
    return middles


def _lengthen(forward: Floats, backward: Floats, lasts: Floats, axes: int) -> Ints:
    """Routes that go on by steps which only others such follow, at most one on each axis, in place.

    The layout before the last step of each, or -1.

    Args:
        lasts: seconds of such steps, forward and backward.
    """
    befores = np.full(forward.shape, -1)
    froms = np.flatnonzero(np.isfinite(lasts[0]).any(1)).tolist()
    for _ in range(axes if froms else 0):
        _shorten(forward, backward, befores, froms, lasts)
    return befores


def _shorten(forward: Floats, backward: Floats, middles: Ints, through: Iterable[int], lasts: Floats | None) -> None:
    """Take routes through a layout, and on from there by routes or by the steps given, where that is quicker."""
    on_forward, on_backward = (forward, backward) if lasts is None else lasts
    both = forward + backward
    onward = both if lasts is None else on_forward + on_backward
    enough = both * (1 - 1e-12) - 1e-18
    flat_forward, flat_backward, flat_both, flat_enough, flat_middles = (
        each.reshape(-1) for each in (forward, backward, both, enough, middles)
    )
    for k in through:
        longer = both[:, k, None] + onward[k]
        quicker = (longer < enough).reshape(-1).nonzero()[0]
        if len(quicker):
            src, dst = quicker // len(both), quicker % len(both)
            flat_both[quicker] = found = longer.reshape(-1)[quicker]
            flat_enough[quicker] = found * (1 - 1e-12) - 1e-18
            flat_forward[quicker] = forward[src, k] + on_forward[k, dst]
            flat_backward[quicker] = backward[src, k] + on_backward[k, dst]
            flat_middles[quicker] = k


def _add_up(found: Floats, middles: Ints, onward: Floats) -> None:
    """Sums along routes, in place, where these are put together of two: one to a middle, and one on from there."""
    src, dst = np.nonzero(middles >= 0)
    found[src, dst] = math.nan
    while len(src):
        middle = middles[src, dst]
        found[src, dst] = found[src, middle] + onward[middle, dst]
        is_open = np.isnan(found[src, dst])
        src, dst = src[is_open], dst[is_open]
