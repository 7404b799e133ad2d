"""Times that know how they grow: a number as planned, and the formula in batch, sequence and micro-batches
behind it.

:class:`Seconds` is to ``float`` what :class:`planner.base.symbolic_int.Size` is to ``int``: whatever adds up times adds
up formulas as well, and what has no formula is an error; but ``math.fsum`` sees the numbers alone, so where times may
have formulas it is given ``float(...)`` of each. A formula is a sum of *atoms* with coefficients: powers of batch,
sequence and micro-batches, and the largest or the smallest of several formulas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from planner.base.symbolic_int import CONSTANT, Powers, Size, added, product, terms_of

ROUNDING = 1e-12
"""The part of a sum that may be left of it where it should be nothing."""


@dataclass(frozen=True)
class Pick:
    """The largest of several formulas, or the smallest."""

    largest: bool
    options: tuple[tuple[tuple[Atom, Any], ...], ...]


Atom = Powers | Pick
Formula = Mapping[Atom, Any]
"""Coefficients, fractions or floats, by atom."""


class Seconds(float):
    """A time at the planned sizes, as a sum of atoms; made by :func:`growing`, :func:`largest`, :func:`smallest` and
    arithmetic.
    """

    formula: Formula

    def __add__(self, other: object) -> float:
        if not isinstance(other, (int, float)):
            return NotImplemented
        return _made(float(self) + float(other), added(self.formula, formula_of(other)))

    __radd__ = __add__

    def __sub__(self, other: object) -> float:
        return self + other * -1 if isinstance(other, (int, float)) else NotImplemented

    def __rsub__(self, other: object) -> float:
        return self * -1 + other if isinstance(other, (int, float)) else NotImplemented

    def __mul__(self, other: object) -> float:
        """By a plain number, or a size."""
        if not isinstance(other, (int, float)) or isinstance(other, Seconds):
            return NotImplemented
        return _made(float(self) * float(other), times(self.formula, other))

    __rmul__ = __mul__

    def __truediv__(self, other: object) -> float:
        """By a plain number, or a number of micro-batches."""
        if not isinstance(other, (int, float)) or isinstance(other, Seconds):
            return NotImplemented
        if isinstance(other, Size):
            return _made(float(self) / int(other), divided(self.formula, other))
        return self * (1 / other)

    def _without(self, *_: object) -> Any:
        raise TypeError(
            f"what is made of {float(self):.3g} s here has no formula: take float(...) of it if the number will do"
        )

    __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _without
    __neg__ = __pos__ = __abs__ = __round__ = __floor__ = __ceil__ = __trunc__ = __pow__ = __rpow__ = _without


def growing(start_s: float, seconds_per_unit: float, size: float) -> Seconds:
    """A start, and a rate for a :class:`planner.base.symbolic_int.Size` of bytes or operations."""
    formula = times(formula_of(size), seconds_per_unit)
    return _made(start_s + seconds_per_unit * float(size), added(formula, {CONSTANT: start_s}))


def largest(options: Iterable[float]) -> float:
    """The largest at any size."""
    return _pick(list(options), is_largest=True)


def smallest(options: Iterable[float]) -> float:
    """The smallest at any size."""
    return _pick(list(options), is_largest=False)


def rest(whole_s: float, part_s: float) -> float:
    """What a part leaves of the whole, but for what is rounding alone."""
    left, of = whole_s - part_s, formula_of(whole_s)
    if not isinstance(left, Seconds):
        return left if abs(left) > ROUNDING * abs(whole_s) else 0.0
    real = {atom: value for atom, value in left.formula.items() if abs(value) > ROUNDING * abs(of.get(atom, 0))}
    return _made(left, real)


def at_least_zero(seconds: float) -> float:
    """The same, or 0 where it is below."""
    return largest((0.0, seconds)) if isinstance(seconds, Seconds) else max(0.0, seconds)


def formula_of(number: float) -> Formula:
    """That of seconds, or of a number of bytes or operations; a plain number is a constant."""
    if isinstance(number, Seconds):
        return number.formula
    if isinstance(number, Size):
        return dict[Atom, Any](number.terms.items())
    return {CONSTANT: number} if number else {}


def undominated(options: Iterable[Formula], *, is_largest: bool = True) -> list[Formula]:
    """Without those that another one exceeds in every coefficient, and so at all sizes."""
    found: list[Formula] = []
    for option in options:
        if any(_exceeds(other, option, is_largest) for other in found):
            continue
        found = [other for other in found if not _exceeds(option, other, is_largest)]
        found.append(option)
    return found


def times(formula: Formula, factor: float | Fraction) -> Formula:
    """The product with a number, or with a size, which is nowhere below zero."""
    found: Formula = {}
    for powers, coefficient in (factor.terms if isinstance(factor, Size) else {CONSTANT: factor}).items():
        found = added(found, {_moved(atom, powers): value * coefficient for atom, value in formula.items()})
    return found


def divided(formula: Formula, micro_batches: int) -> Formula:
    """The quotient by a number of micro-batches, or of ranks and micro-batches."""
    (((i, j, k), coefficient),) = terms_of(micro_batches).items()
    assert not i and not j
    return {_moved(atom, (0, 0, -k)): value / coefficient for atom, value in formula.items()}


def _moved(atom: Atom, powers: Powers) -> Atom:
    """An atom times some power of sizes, none of which is below zero."""
    if powers == CONSTANT:
        return atom
    if isinstance(atom, Pick):
        options = (tuple((_moved(each, powers), value) for each, value in option) for option in atom.options)
        return Pick(atom.largest, tuple(options))
    return product(atom, powers)


def _pick(options: list[float], *, is_largest: bool) -> float:
    number = max(options) if is_largest else min(options)
    kept = undominated(map(formula_of, options), is_largest=is_largest)
    if len(kept) == 1:
        return _made(float(number), kept[0])
    return _made(float(number), {Pick(is_largest, tuple(tuple(each.items()) for each in kept)): 1})


def _exceeds(one: Formula, other: Formula, is_largest: bool) -> bool:
    """Whether ``one`` makes ``other`` needless; no atom is below zero in any option but that of a difference."""
    low, high = (other, one) if is_largest else (one, other)
    return all(low.get(atom, 0) <= high.get(atom, 0) for atom in {*low, *high})


def _made(number: float, formula: Formula) -> Seconds:
    seconds = float.__new__(Seconds, number)
    seconds.formula = {atom: value for atom, value in formula.items() if value}
    return seconds
