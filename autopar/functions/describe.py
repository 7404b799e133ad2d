"""Describe: what the planner is told of a Function, called on tensors of some shapes; see :mod:`planner.ops.function`.

What the user declared is taken as it is. What was not is proved (:mod:`autopar.functions.proof`), and runs in full on
every rank where it cannot be.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.functions.carry import Carried
from autopar.functions.costs import costs, unseen
from autopar.functions.declared import Declared
from autopar.functions.joint import Joint, NotTraced, Operand, trace
from autopar.functions.keeping import kept
from autopar.functions.kept import Kept
from autopar.functions.proof import Followed, Proof, Refuted, difference
from autopar.functions.reach import refuse_reach
from planner.base.errors import CaptureError
from planner.ir.graph import TensorType
from planner.ir.layout import P, R, Shard
from planner.ops.signature import is_floating

Seat = tuple[int, int] | None
Seats = tuple[Seat, ...]
MOST_RESULTS = 3
"""Results of which every choice may go without a gradient; of more, each alone, and all together."""


@dataclass(frozen=True)
class Factor:
    """What may be sharded.

    Attributes:
        seats: for every operand, then result, the dim and the product of the factors major to it.
        strided: whether it may be sharded strip by strip.
        same: results that are the same on every rank where it is.
        followed: the proof; ``None`` where it was declared.
    """

    seats: Seats
    strided: bool = False
    same: tuple[int, ...] = ()
    followed: Followed | None = None


@dataclass
class Description:
    """A Function on tensors of some shapes.

    Attributes:
        arguments: what its node says.
        ungraded: operands to which its backward gives no gradient.
        untrained: results that it does not differentiate.
        joint: of the whole; ``None`` if it could not be traced.
        factors: of the node, in order.
        is_unseen: whether it is not known what it keeps, so that it is taken to keep all that floats.
    """

    carried: Carried
    operands: tuple[Operand, ...]
    arguments: tuple[tuple[str, object], ...]
    ungraded: frozenset[int] = frozenset()
    untrained: frozenset[int] = frozenset()
    joint: Joint | None = None
    factors: tuple[Factor, ...] = ()
    is_unseen: bool = False
    _checked: dict[object, str] = field(default_factory=dict)

    def difference(self, cuts: Sequence[tuple[Seats, int]]) -> str:
        """How the Function differs on slices from what was proved: ``""`` if it does not, or was declared.

        Args:
            cuts: factors, and how many ranks cut each.
        """
        by_seats = {factor.seats: factor for factor in self.factors}
        if any(seats not in by_seats for seats, _ in cuts):
            return "it was planned for tensors of another dtype"
        found = [(by_seats[seats].followed, ranks) for seats, ranks in cuts]
        proved = [(followed, ranks) for followed, ranks in found if followed is not None]
        key = tuple(cuts)
        if proved and key not in self._checked:
            assert self.joint is not None
            self._checked[key] = _differs(self.carried, self.operands, self.joint, proved)
        return self._checked.get(key, "")


def describe(carried: Carried, operands: Sequence[Operand], results: Sequence[TensorType]) -> Description:
    """What is known of a Function on such operands.

    Raises:
        CaptureError: they are not what was declared, or it may find a model's tensors by itself.
    """
    key, known = (tuple(operands), carried.declared), carried.described
    if key not in known:
        known[key] = _describe(carried, tuple(operands), tuple(results))
    found: Description = known[key]
    return found


def _describe(carried: Carried, operands: tuple[Operand, ...], results: tuple[TensorType, ...]) -> Description:
    declared, joint, why = carried.declared, None, ""
    factors: tuple[Factor, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    terms = False
    try:
        joint = trace(carried, operands)
        proof = Proof([joint, *_others(carried, operands, joint)])
        terms = _holds(proof, {})
        linear = _linear(proof, joint)
        if declared is None:
            factors, why = _factors(carried, operands, joint, proof)
    except NotTraced as error:
        why, carried.is_opaque = str(error), True
    if declared is not None:
        factors, why = _declared(carried, declared, operands, results), ""
    ungraded, untrained = frozenset[int](), frozenset[int]()
    if joint is not None:
        asked = [place for place, operand in enumerate(operands) if operand.trained]
        ungraded = frozenset(place for place in asked if joint.gradients[place] is None)
        untrained = frozenset(place for place, given in enumerate(joint.given) if given is None)
    cuts = [factor.followed.shards for factor in factors if factor.followed is not None]
    known = _kept(carried, operands) if joint is None else None
    arguments = {
        "factors": tuple(factor.seats for factor in factors),
        "strided": tuple(factor.strided for factor in factors),
        "same": tuple(factor.same for factor in factors),
        "linear": linear,
        "terms": terms,
        **(unseen(operands, results, known) if joint is None else costs(carried, operands, joint, cuts)),
        "why": why,
    }
    is_unseen = joint is None and known is None
    return Description(carried, operands, tuple(arguments.items()), ungraded, untrained, joint, factors, is_unseen)


def _kept(carried: Carried, operands: tuple[Operand, ...]) -> Kept | None:
    """What a Function keeps that cannot be traced; ``None`` where nobody knows.

    Raises:
        CaptureError: it finds a model's tensors by itself, or might where it cannot be watched.
    """
    try:
        found = kept(carried, operands)
        if not found.is_whole:
            refuse_reach(carried)
        return found
    except CaptureError:
        raise
    except Exception:
        refuse_reach(carried)
        return None if carried.declared is None else carried.declared.kept


def _others(carried: Carried, operands: tuple[Operand, ...], joint: Joint) -> Iterable[Joint]:
    """The Function where gradients come to some of its results alone."""
    trained = [place for place, given in enumerate(joint.given) if given is not None]
    sizes = range(1, len(trained)) if len(trained) <= MOST_RESULTS else (1,)
    for size in sizes:
        for given in itertools.combinations(trained, size):
            yield trace(carried, operands, frozenset(trained) - frozenset(given))


def _holds(proof: Proof, supposed: dict[int, Any]) -> bool:
    try:
        proof.follow(supposed)
    except Refuted:
        return False
    return True


def _linear(proof: Proof, joint: Joint) -> tuple[tuple[int, ...], ...]:
    """Sets of operands of which terms of a sum make terms of the results."""
    floating = [p for p, ref in enumerate(joint.operands) if is_floating(joint.graph.type_of(ref))]
    found = []
    for places in dict.fromkeys([*((place,) for place in floating), tuple(floating)]):
        try:
            if places and all(t == P for t in proof.follow(dict.fromkeys(places, P)).results):
                found.append(places)
        except Refuted:
            pass
    return tuple(found)


# ---- factors ---------------------------------------------------------------------------------------------------------


def _factors(
    carried: Carried, operands: tuple[Operand, ...], joint: Joint, proof: Proof
) -> tuple[tuple[Factor, ...], str]:
    """Every factor that is proved; where there is none, why."""
    found: dict[Seats, Factor] = {}
    why = ""
    for place, operand in enumerate(operands):
        for dim, size in enumerate(operand.shape):
            for strips in proof.cuts(place, dim) if size > 1 else ():
                if size % strips or any((at := seats[place]) and at[0] == dim for seats in found):
                    continue
                try:
                    factor = _factor(carried, operands, joint, proof, place, Shard(dim, strips))
                except Refuted as error:
                    why = why or f"dim {dim} of operand {place}: {error}"
                    continue
                if factor is not None and not any(_overlap(factor.seats, seats) for seats in found):
                    found[factor.seats] = factor
    if not found and not why:
        why = "its operands have no dim that may be cut"
    return tuple(found.values()), "" if found else why


def _factor(
    carried: Carried, operands: tuple[Operand, ...], joint: Joint, proof: Proof, place: int, shard: Shard
) -> Factor | None:
    """The factor that lies at a cut of an operand."""
    followed = proof.follow({place: shard})
    size = _size(joint, followed)
    if size == 1:
        return None
    ranks = _least_divisor(size)
    why = _differs(carried, operands, joint, [(followed, ranks)])
    if why:
        raise Refuted(why)
    finest = Shard(shard.dim, shard.outer * (size // ranks))
    strided = size == ranks or _holds_alike(proof, place, finest, followed)
    seats = tuple((t.dim, t.outer) if isinstance(t, Shard) else None for t in (*followed.operands, *followed.results))
    return Factor(seats, strided, tuple(i for i, t in enumerate(followed.results) if t == R), followed)


def _holds_alike(proof: Proof, place: int, finest: Shard, followed: Followed) -> bool:
    """Whether the finest strips go where slices go, finer alike."""
    try:
        found = proof.follow({place: finest})
    except Refuted:
        return False
    first = followed.operands[place]
    assert isinstance(first, Shard)
    wanted = [
        Shard(t.dim, t.outer * (finest.outer // first.outer)) if isinstance(t, Shard) else t
        for t in (*followed.operands, *followed.results)
    ]
    return wanted == [*found.operands, *found.results]


def _size(joint: Joint, followed: Followed) -> int:
    """Into how many parts every slice can be cut."""
    refs = (*joint.operands, *joint.results)
    shapes = [joint.graph.type_of(ref).shape for ref in refs]
    types = (*followed.operands, *followed.results)
    parts = [shape[t.dim] // t.outer for shape, t in zip(shapes, types, strict=True) if isinstance(t, Shard)]
    return math.gcd(*parts)


def _overlap(some: Seats, others: Seats) -> bool:
    """Whether two factors would have one seat."""
    return any(a is not None and a == b for a, b in zip(some, others, strict=True))


def _differs(
    carried: Carried, operands: tuple[Operand, ...], joint: Joint, cuts: Sequence[tuple[Followed, int]]
) -> str:
    """How the Function differs on slices from the whole; ``""`` if it does not."""
    shapes = []
    for place, operand in enumerate(operands):
        shape = list(operand.shape)
        for followed, ranks in cuts:
            found = followed.operands[place]
            if isinstance(found, Shard):
                shape[found.dim] //= ranks
        shapes.append(tuple(shape))
    parts = [Operand(s, o.dtype, o.device, o.trained) for s, o in zip(shapes, operands, strict=True)]
    try:
        part = trace(carried, parts)
    except NotTraced as error:
        return f"it does not run on slices ({error})"
    return difference(joint, part, [(followed.shards, ranks) for followed, ranks in cuts])


def _least_divisor(size: int) -> int:
    return next(d for d in itertools.count(2) if size % d == 0)


def _declared(
    carried: Carried, declared: Declared, operands: tuple[Operand, ...], results: tuple[TensorType, ...]
) -> tuple[Factor, ...]:
    """The factors that the user named."""
    sizes = declared.sizes(carried.name, [o.shape for o in operands])
    declared.check(carried.name, [t.shape for t in results], sizes)
    labels = (*declared.operands, *declared.results)
    return tuple(
        Factor(tuple((names.index(name), 1) if name in names else None for names in labels))
        for name, size in sizes.items()
        if size > 1 and name not in declared.whole
    )
