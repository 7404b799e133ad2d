"""Kept: what a Function's forward leaves for its backward, as it was seen or as a user says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kept:
    """What backward of a Function needs, as far as autograd and its context tell.

    Attributes:
        saves: words for operands and results (``in0``, ``out1``) that autograd saves, and backward asks for.
        holds: those that the context holds by itself (``ctx.x = x``), or that backward does not ask for: they are never
            let go and recomputed.
        others: what else there is, as pairs of the operand or result next in size, and bytes for each of its elements.
        works: bytes of the tensors that backward makes, at the fullest of its moments, but for the gradients it gives,
            for each byte of the first operand or result, whichever is larger.
        is_whole: whether backward ran to its end.
    """

    saves: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    others: tuple[tuple[int, float], ...] = ()
    works: float = 0.0
    is_whole: bool = True
