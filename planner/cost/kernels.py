"""What one operator runs on one device, as far as its speed depends on more than flops and bytes.

A kernel is a matrix product of some shape, a flash attention, or a *stream* of bytes through an operator of some
family. :func:`kernel_of` names the kernel of an operator from its row and the shapes of its local operands;
``backward`` turns it into what its backward runs. :class:`planner.cost.model.CostModel` prices it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from planner.ops import OPS
from planner.ops.attention import Sight
from planner.ops.attention_pieces import QueryShards
from planner.ops.table import Family

Shape = tuple[int, ...]
Scaling = Literal["tensorwise", "rowwise"]
"""What of an operand in float8 has a scale of its own."""
FLOAT8 = "float8_e4m3fn"


class Casts(NamedTuple):
    """What it takes to scale and cast operands in half precision to float8.

    An element that is cast takes five bytes: read for its maximum, read, and written; where the scale is known, three.

    Attributes:
        operand: bytes of an element of an operand in forward.
        again: and in backward, which casts both again, the other way round.
        gradient: of the result's gradient, an operand of both products of backward.
        starts: kernels that are started for them, forward and backward.
    """

    operand: int
    again: int
    gradient: int
    starts: tuple[int, int] = (0, 0)


FUSED_CASTS = Casts(5, 3, 5)
"""Of torchao's dynamic scaling by tensor, compiled: with what is beside them, so that they start nothing."""
SCALE, CAST = 7, 1
"""Kernels that find a scale (largest magnitude, least, quotient, logarithm, floor, power, inverse), and that cast."""
CASTS: Mapping[Scaling, Casts] = {
    "tensorwise": Casts(5, 3, 8, (2 * (SCALE + CAST), SCALE + 4 * CAST)),
    "rowwise": Casts(5, 5, 10, (2 * (SCALE + CAST), 4 * (SCALE + CAST))),
}
"""Of autopar's own (:mod:`autopar.runtime.layers.float8_linear`). By rows, backward has other rows than forward, and
two scales of the gradient."""


@dataclass(frozen=True)
class Product:
    """``batch`` matrix products ``[m, k] x [k, n]``; or the two of its backward.

    A backward computes ``[m, n] x [n, k]`` and ``[k, m] x [m, n]``.

    Attributes:
        scaling: how its operands are scaled to float8; ``None``: they are not.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    is_backward: bool = False
    scaling: Scaling | None = None

    @property
    def backward(self) -> Product:
        """The products of the gradients of both operands."""
        return replace(self, is_backward=True)

    @property
    def parts(self) -> tuple[Product, ...]:
        """The forward-shaped products that this consists of."""
        if not self.is_backward:
            return (self,)
        return Product(self.m, self.k, self.n, self.batch), Product(self.k, self.n, self.m, self.batch)

    @property
    def cast_bytes(self) -> int:
        """Bytes that casting its operands to float8 passes over, or those of its backward."""
        casts = FUSED_CASTS if self.scaling is None else CASTS[self.scaling]
        operands, result = self.m * self.k + self.k * self.n, self.m * self.n
        return casts.again * operands + casts.gradient * result if self.is_backward else casts.operand * operands

    @property
    def starts(self) -> int:
        """Kernels that are started, or one for the two of its backward, with those that cast."""
        return 1 if self.scaling is None else 1 + CASTS[self.scaling].starts[self.is_backward]

    @property
    def flops(self) -> float:
        """Operations, a multiply-add counted as two."""
        return 2.0 * self.batch * self.m * self.n * self.k * len(self.parts)


@dataclass(frozen=True)
class Attention:
    """Scaled dot-product attention as one kernel that never stores scores (Dao et al., 2022).

    ``heads`` counts those of all sequences; ``depth`` is the size of one. A causal mask skips half of the pairs.
    """

    heads: int
    queries: int
    keys: int
    depth: int
    causal: bool
    is_backward: bool = False

    @property
    def backward(self) -> Attention:
        """The kernel of the gradients of queries, keys and values."""
        return replace(self, is_backward=True)

    @property
    def flops(self) -> float:
        """Two products per pair forward; five backward, which computes the scores again (Dao, 2023, section 2.3)."""
        pairs = self.heads * self.queries * self.keys / (2 if self.causal else 1)
        return 2.0 * pairs * self.depth * (5 if self.is_backward else 2)


@dataclass(frozen=True)
class Stream:
    """An operator that passes once over its operands and results."""

    family: Family
    is_backward: bool = False

    @property
    def backward(self) -> Stream:
        """The kernels of its backward."""
        return replace(self, is_backward=True)


Kernel = Product | Attention | Stream


def attention_kernels(operands: Sequence[Shape], seen: Sight, shards: QueryShards) -> dict[Attention, int]:
    """The kernels that the busiest rank runs where ranks share the queries of attention, and how often each.

    Args:
        operands: as of :func:`kernel_of`.
        seen: by queries of keys.
    """
    *heads, queries, depth = operands[0]
    found = shards.pieces(queries, operands[1][-2], seen)
    return {Attention(math.prod(heads), n, m, depth, is_causal): times for (n, m, is_causal), times in found.items()}


def kernel_of(op: str, operands: Sequence[Shape], causal: bool = False) -> Kernel | None:
    """The kernel of an operator on one device; ``None`` for one whose flops say enough (a convolution, an einsum).

    Args:
        op: as a graph names it, ``"aten.linear.default"``.
        operands: shapes of its tensor operands, as one device holds them.
        causal: of an attention, whether it skips what lies ahead.
    """
    row = OPS.get(op)
    runs = "multiply" if row is None else row.kernel
    if runs == "matmul":
        return _matmul(*operands[-2:])
    if runs == "linear":
        rows, weight = operands[0], operands[1]
        return Product(math.prod(rows[:-1]), weight[0], rows[-1]) if len(weight) == 2 else None
    if runs == "attention":
        *heads, queries, depth = operands[0]
        return Attention(math.prod(heads), queries, operands[1][-2], depth, causal)
    return None if runs == "other" else Stream(runs)


def _matmul(a: Shape, b: Shape) -> Product | None:
    """By torch.matmul's rules: a matrix on the right lets all leading dims of the left be rows."""
    if len(a) < 2 or len(b) < 2:
        return None
    if len(b) == 2:
        return Product(math.prod(a[:-1]), b[-1], a[-1])
    return Product(a[-2], b[-1], a[-1], max(math.prod(a[:-2]), math.prod(b[:-2])))
