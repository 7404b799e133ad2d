"""Sizes that know how they grow: a number as planned, and the polynomial in batch, sequence and
micro-batches behind it.

A :class:`Size` is an ``int``, so that all which counts elements and bytes counts with sizes as well, and the result
knows its formula. Comparisons for order look at the number; two sizes are *equal* only if they grow alike, so that
nothing is taken for the same because two numbers happen to be. Micro-batches are what a size is cut by, so that their
exponent may be below zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, TypeVar

Powers = tuple[int, int, int]
"""Exponents of the batch, of the sequence length and of the number of micro-batches."""
CONSTANT: Powers = (0, 0, 0)
Terms = Mapping[Powers, Fraction]
Atom = TypeVar("Atom")


class Size(int):
    """A number at the planned sizes, as ``sum of coefficient * batch^i * sequence^j * micro_batches^k``; made by
    :func:`batch_of`, :func:`sequence_of`, :func:`micro_batches_of` and arithmetic.
    """

    terms: Terms

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.terms == other.terms

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        return f"{int(self)} = {describe(self)}"

    def __neg__(self) -> int:
        return self * -1

    def __add__(self, other: object) -> int:
        if not isinstance(other, int):
            return NotImplemented
        return _size(int.__add__(self, other), added(self.terms, terms_of(other)))

    __radd__ = __add__

    def __sub__(self, other: object) -> int:
        return self + -1 * other if isinstance(other, int) else NotImplemented

    def __rsub__(self, other: object) -> int:
        return -1 * self + other if isinstance(other, int) else NotImplemented

    def __mul__(self, other: object) -> int:
        if not isinstance(other, int):
            return NotImplemented
        found: dict[Powers, Fraction] = {}
        for mine, times in self.terms.items():
            for theirs, also in terms_of(other).items():
                powers = product(mine, theirs)
                found[powers] = found.get(powers, Fraction(0)) + times * also
        return _size(int.__mul__(self, other), found)

    __rmul__ = __mul__

    def __floordiv__(self, other: object) -> int:
        """The quotient, which must be exact and by a single term."""
        return _exact(self, other) if isinstance(other, int) else NotImplemented

    def __rfloordiv__(self, other: object) -> int:
        return _exact(other, self) if isinstance(other, int) else NotImplemented


def batch_of(number: int) -> Size:
    """The batch, which is ``number`` as planned."""
    return _made(number, {(1, 0, 0): Fraction(1)})


def sequence_of(number: int) -> Size:
    """The sequence length, which is ``number`` as planned."""
    return _made(number, {(0, 1, 0): Fraction(1)})


def micro_batches_of(number: int) -> Size:
    """The number of micro-batches, which is ``number`` as planned."""
    return _made(number, {(0, 0, 1): Fraction(1)})


def along(micro_batches: int, start: Fraction, each: Fraction) -> int:
    """``start + each * micro_batches``, which is whole as planned."""
    found = start + each * int(micro_batches)
    assert found.denominator == 1
    terms = terms_of(micro_batches).items()
    return _size(int(found), added({CONSTANT: start}, {powers: each * times for powers, times in terms}))


def product(one: Powers, other: Powers) -> Powers:
    """The exponents of a product."""
    (i, j, k), (a, b, c) = one, other
    return i + a, j + b, k + c


def added(one: Mapping[Atom, Any], other: Mapping[Atom, Any]) -> dict[Atom, Any]:
    """The sum of two formulas, each coefficients by powers, or by what else they are made of."""
    total = dict(one)
    for atom, value in other.items():
        total[atom] = total.get(atom, 0) + value
    return total


def terms_of(number: int) -> Terms:
    """Coefficients by powers; a plain number is a constant."""
    if isinstance(number, Size):
        return number.terms
    return {CONSTANT: Fraction(number)} if number else {}


def quotient(number: int, divisor: int) -> int | None:
    """``number / divisor`` where that is whole as planned, and ``divisor`` one term that divides; else ``None``.

    Any size can be cut into micro-batches.
    """
    below = terms_of(divisor)
    if len(below) != 1 or int.__mod__(number, divisor):
        return None
    (((i, j, k), coefficient),) = below.items()
    found = {product(powers, (-i, -j, -k)): value / coefficient for powers, value in terms_of(number).items()}
    if any(batch < 0 or sequence < 0 for batch, sequence, _ in found):
        return None
    return _size(int.__floordiv__(number, divisor), found)


def _exact(number: int, divisor: int) -> int:
    found = quotient(number, divisor)
    if found is None:
        raise ArithmeticError(f"{describe(number)} is not always a multiple of {describe(divisor)}")
    return found


def at_sizes(number: int, batch: int, sequence: int) -> int:
    """What a size that no micro-batches cut is at another batch and sequence length, which may themselves be sizes."""
    if not isinstance(number, Size):
        return number
    assert not any(micro_batches for *_, micro_batches in number.terms)
    below = math.lcm(*(value.denominator for value in number.terms.values()))
    terms = [(int(value * below), *[batch] * i, *[sequence] * j) for (i, j, _), value in number.terms.items()]
    return sum(map(math.prod, terms)) // below


def describe(number: int) -> str:
    """In words: ``"batch * sequence - batch"``."""
    if not isinstance(number, Size):
        return str(number)
    words = []
    for (i, j, k), value in sorted(number.terms.items(), reverse=True):
        factors = ["batch"] * i + ["sequence"] * j + ["micro-batches"] * k
        if abs(value) != 1 or not factors:
            factors.insert(0, str(abs(value)))
        cut = " / micro-batches" * -k
        words.append(("- " if value < 0 else "+ ") + " * ".join(factors) + cut)
    return " ".join(words).removeprefix("+ ")


def _size(number: int, terms: Mapping[Powers, Fraction]) -> int:
    """A size, or a plain number if nothing moves."""
    kept = {powers: value for powers, value in terms.items() if value}
    return _made(number, kept) if any(powers != CONSTANT for powers in kept) else int(number)


def _made(number: int, terms: Terms) -> Size:
    size = int.__new__(Size, number)
    size.terms = terms
    return size
