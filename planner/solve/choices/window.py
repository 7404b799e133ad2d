"""Turn a model into its proven optimum: bound, prune, search, and split over the largest transient.

Held bytes are a sum that elimination can bound; the largest transient is not. A window is the part of the problem
whose largest transient is at least a floor, which is set aside from the limit. Where the transients of its choices
reach far above the floor the window is split in two, so that the sum becomes nearly the whole truth.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

import numpy as np

from planner.solve.choices.best import BestFound
from planner.solve.choices.eliminate import Elimination, choice_bounds, decode, eliminate, pair_bounds
from planner.solve.choices.labels import search_labels
from planner.solve.choices.model import (
    HALF_BYTE,
    WALL,
    ChoiceModel,
    Mask,
    Weights,
    drop_forbidden,
    drop_moments,
    restrict,
    total,
)
from planner.solve.choices.relax import Multipliers, Relaxation, relax
from planner.solve.choices.tree import build_tree
from planner.solve.problem import Floats

MAX_ENTRIES = 5_000_000  # of an elimination table; beyond, its bucket is split

_NARROW = 300  # labels kept by the first search
_WIDER = ((3_000, 0.3), (30_000, 0.7), (300_000, 0.8))  # by later ones, if the last closed that part of the gap
_AIMS = (*(0.0005 * 2**i for i in range(11)), math.inf)  # how far above the bound to search, relative to it
_MAX_PAIRS = 200_000  # allowed in a mixed-integer program
_SHRUNK = 0.9  # bound again once pruning left at most this part of the choices
_SPLIT = 0.5  # part of the gap that a window's transient range may account for


@dataclass(frozen=True, eq=False)
class TransientWindow:
    """Assignments of ``model`` whose largest transient is at least ``floor_bytes``; none is faster than ``bound``."""

    model: ChoiceModel
    floor_bytes: float = 0.0
    bound: float = -math.inf
    multipliers: Multipliers = field(default_factory=Multipliers)

    @property
    def room_bytes(self) -> float:
        """What may be held beside the floor."""
        return self.model.limit_bytes - self.floor_bytes

    def keep(self, masks: list[Mask]) -> TransientWindow | None:
        """The window with only the kept choices and what they allow; None when no assignment is left."""
        kept = restrict(self.model, masks)
        model = None if kept is None else drop_forbidden(kept)
        if model is None:
            return None
        needed = max((float(values.min()) for values in model.transient), default=0.0)
        window = replace(self, model=model, floor_bytes=max(self.floor_bytes, needed))
        if model is self.model or not len(model.rooms):
            return window
        model = drop_moments(model)
        return replace(window, model=model, multipliers=self.multipliers.moved(self.model, model))


@dataclass(frozen=True, eq=False)
class Bounded:
    """A window with its relaxation, what each choice costs at least, and held bytes along the same tree."""

    window: TransientWindow
    held: Elimination
    relaxation: Relaxation
    least_s: list[Floats]


def search(model: ChoiceModel, best: BestFound, deadline: float) -> float:
    """Improve ``best`` until nothing useful is left, or until ``deadline``; the lower bound proven.

    What lies just above the bound is searched first and the aim raised only when nothing was found there: the work
    grows steeply with the distance from the bound.
    """
    free = eliminate(model, build_tree(model, MAX_ENTRIES), Multipliers().weights(model))
    best.offer_assignment(model, decode(free))
    if free.bound >= best.target_s:
        return free.bound
    root = _bound(TransientWindow(model, bound=free.bound), best, deadline)
    if root is None:
        return best.target_s
    bound = start = root.window.bound
    for distance in _AIMS:
        best.aim_s = start + distance * abs(start) if distance < math.inf else math.inf
        below = root.window.keep([least < best.target_s for least in root.least_s])
        proven = best.target_s if below is None else _search_windows(below, best, deadline)
        if proven < best.target_s or best.target_s == best.useful_s:
            return max(bound, proven)
        bound = best.aim_s
    raise AssertionError("the last aim is everything useful")


def _search_windows(start: TransientWindow, best: BestFound, deadline: float) -> float:
    """Improve ``best`` until nothing below its target is left, or until ``deadline``; the lower bound proven."""
    waiting, left_open = [start], math.inf
    while waiting:
        window = min(waiting, key=lambda window: window.bound)
        waiting.remove(window)
        if window.bound >= best.target_s:
            continue
        if time.monotonic() > deadline:
            left_open = min(left_open, window.bound)
            continue
        bounded = _bound(window, best, deadline)
        if bounded is None:
            continue
        left = _search(bounded, best, _NARROW, deadline)
        parts = _split(bounded, best) if left < best.target_s else []
        waiting += parts
        if not parts:
            left_open = min(left_open, _close(bounded, left, best, deadline))
    return min(left_open, best.target_s)


def _bound(window: TransientWindow, best: BestFound, deadline: float) -> Bounded | None:
    """Bound and prune in turn while pruning helps; None when no assignment below the target is left."""
    while True:
        model = window.model
        tree = build_tree(model, MAX_ENTRIES)
        held = eliminate(model, tree, held_only(model))
        lightest = decode(held)
        best.offer_assignment(model, lightest)
        if held.bound > window.room_bytes + HALF_BYTE:
            return None
        fitting = window.keep(_fitting(window, held))
        if fitting is None:
            return None
        if _shrunk(window, fitting):
            window = fitting
            continue
        relaxation = relax(model, tree, window.room_bytes, best.target_s, window.multipliers, [lightest], deadline)
        for assignment in relaxation.assignments:
            best.offer_assignment(model, assignment)
        bound = max(window.bound, relaxation.bound)
        window = replace(window, bound=bound, multipliers=relaxation.multipliers)
        least_s = _least_times(window, relaxation)
        promising = window.keep([least < best.target_s for least in least_s])
        if promising is None or bound >= best.target_s:
            return None
        if not _shrunk(window, promising) or time.monotonic() > deadline:
            return Bounded(window, held, relaxation, least_s)
        window = promising


def held_only(model: ChoiceModel) -> Weights:
    """Weights that count held bytes, whatever they cost."""
    return Weights(np.array([0.0, 0.0, 1.0, 1.0]), 1.0, np.zeros(len(model.rooms)))


def _fitting(window: TransientWindow, held: Elimination) -> list[Mask]:
    """Choices whose least peak is within the limit."""
    model = window.model
    least = zip(choice_bounds(held), model.transient, model.spans, strict=True)
    most = model.limit_bytes + HALF_BYTE
    return [
        (held_bytes + np.maximum(values, window.floor_bytes) <= most)
        & np.all([held_bytes + s.bytes <= model.rooms[s.first : s.last].min() + HALF_BYTE for s in spans], axis=0)
        for held_bytes, values, spans in least
    ]


def _least_times(window: TransientWindow, relaxation: Relaxation) -> list[Floats]:
    """The relaxed time of each choice, bytes over the limit charged at their price."""
    price, limit = relaxation.multipliers.price, window.model.limit_bytes
    least = zip(choice_bounds(relaxation.elimination), window.model.transient, strict=True)
    return [seconds + price * (np.maximum(values, window.floor_bytes) - limit) for seconds, values in least]


def _wall_off(bounded: Bounded, target_s: float) -> ChoiceModel:
    """The model with every pair forbidden whose relaxed time is not below the target."""
    model, relaxation = bounded.window.model, bounded.relaxation
    most = target_s + relaxation.multipliers.price * bounded.window.room_bytes
    pairs = {}
    for pair, least in pair_bounds(relaxation.elimination).items():
        pairs[pair] = model.pairs[pair].copy()
        pairs[pair][..., WALL] = np.where(least < most, model.pairs[pair][..., WALL], math.inf)
    return replace(model, pairs=pairs)


def _shrunk(before: TransientWindow, after: TransientWindow) -> bool:
    return sum(after.model.sizes) <= _SHRUNK * sum(before.model.sizes)


def _search(bounded: Bounded, best: BestFound, width: int, deadline: float) -> float:
    """Offer what a label search of this width finds; a bound on what it may have missed below the target."""
    model, relaxation, held = bounded.window.model, bounded.relaxation, bounded.held
    others = [eliminate(model, held.tree, other.weights(model)) for other in relaxation.multipliers.around()]
    guides = [relaxation.elimination, *others]
    found = search_labels(model, guides, held, bounded.window.floor_bytes, best.target_s, width, deadline)
    if found.assignment is not None:
        best.offer_assignment(model, found.assignment)
    return found.dropped_bound


def _split(bounded: Bounded, best: BestFound) -> list[TransientWindow]:
    """The window cut in two between its transients, or nothing where they explain little of the gap."""
    window, relaxation = bounded.window, bounded.relaxation
    transients = np.unique(np.concatenate(window.model.transient))
    above = transients[transients > window.floor_bytes]
    if len(above) == 0:
        return []
    relaxed = total(window.model, decode(relaxation.elimination))
    if relaxed.held_bytes <= window.room_bytes and relaxed.peak_bytes > window.model.limit_bytes:
        # Neither part admits the relaxed assignment.
        floor = relaxed.transient_bytes
    elif relaxation.multipliers.price * (above[-1] - window.floor_bytes) > _SPLIT * (best.target_s - window.bound):
        floor = float(above[above >= (window.floor_bytes + above[-1]) / 2][0])
    else:
        return []
    low = window.keep([values < floor for values in window.model.transient])
    high = replace(window, floor_bytes=floor)
    return [high] if low is None else [low, high]


def _close(bounded: Bounded, left: float, best: BestFound, deadline: float) -> float:
    """Search wider while that soon closes the gap, else solve exactly; a bound on what was missed below the target."""
    for width, promising in _WIDER:
        closed = left - bounded.window.bound
        if left >= best.target_s or closed < promising * (best.target_s - bounded.window.bound):
            break
        again = _bound(bounded.window, best, deadline)
        if again is None:
            return math.inf
        bounded = again
        left = _search(bounded, best, width, deadline)
    model, floor = _wall_off(bounded, best.target_s), bounded.window.floor_bytes
    if left < best.target_s and model.pairs_allowed <= _MAX_PAIRS and time.monotonic() <= deadline:
        from planner.solve.choices.mip import solve_mip  # imports a solver, which most problems do not need

        outcome = solve_mip(model, floor, best.target_s, deadline - time.monotonic())
        left = max(left, outcome.bound)
        if outcome.assignment is not None:
            best.offer_assignment(model, outcome.assignment)
    return max(left, bounded.window.bound)
