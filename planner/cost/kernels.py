"""What one operator runs on one device, as far as its speed depends on more than flops and bytes.

A kernel is a matrix product of some shape, a flash attention, or a *stream* of bytes through an operator of some
family. :func:`kernel_of` names the kernel of an operator from its name and the shapes of its local operands;
``backward`` turns it into what its backward runs. :class:`planner.cost.model.CostModel` prices it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Shape = tuple[int, ...]
Family = Literal[
    "add", "multiply", "activation", "normalization", "softmax", "loss", "embedding", "random", "copy", "reduction",
    "optimizer",
]  # fmt: skip

# Families of operators that run at different rates where arithmetic, not memory, is the limit (a CPU). All that is
# not listed multiplies.
_FAMILIES: dict[str, str] = {
    "add": "add sub rsub subtract neg negative masked_fill where clamp relu",
    "activation": "gelu silu sigmoid tanh exp log erf pow softplus mish elu hardswish sin cos log_sigmoid",
    "normalization": "layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm batch_norm instance_norm",
    "softmax": "softmax log_softmax _softmax _log_softmax logsumexp",
    "loss": "cross_entropy_loss nll_loss nll_loss_nd nll_loss_forward",
    "embedding": "embedding index_select index gather",
    "random": "dropout native_dropout alpha_dropout feature_dropout rand randn bernoulli",
    "copy": "clone copy contiguous _to_copy to cat concat stack repeat pad constant_pad_nd reshape",
    "reduction": "sum mean var std amax amin max min norm prod argmax any all cumsum",
}
FAMILY_OF: dict[str, Family] = {op: family for family, ops in _FAMILIES.items() for op in ops.split()}  # type: ignore[misc]


@dataclass(frozen=True)
class Product:
    """``batch`` matrix products ``[m, k] x [k, n]``; or the two of its backward.

    A backward computes ``[m, n] x [n, k]`` and ``[k, m] x [m, n]``.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    is_backward: bool = False

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


def kernel_of(op: str, operands: Sequence[Shape], causal: bool = False) -> Kernel | None:
    """The kernel of an operator on one device; ``None`` for one whose flops say enough (a convolution, an einsum).

    Args:
        op: as a graph names it, ``"aten.linear.default"``.
        operands: shapes of its tensor operands, as one device holds them.
        causal: of an attention, whether it skips what lies ahead.
    """
    name = op.removeprefix("aten.").partition(".")[0]
    if name == "linear" and len(operands[1]) == 2:
        (*rows, k), (n, _) = operands[0], operands[1]
        return Product(math.prod(rows), n, k)
    if name in ("mm", "bmm", "matmul", "addmm", "baddbmm"):
        return _matmul(*operands[-2:])
    if name == "scaled_dot_product_attention" and len(operands[0]) >= 2:
        *heads, queries, depth = operands[0]
        return Attention(math.prod(heads), queries, operands[1][-2], depth, causal)
    if name in ("einsum", "outer", "mv", "dot", "addmv", "linear") or "conv" in name:
        return None
    return Stream(FAMILY_OF.get(name, "multiply"))


def _matmul(a: Shape, b: Shape) -> Product | None:
    """By torch.matmul's rules: a matrix on the right lets all leading dims of the left be rows."""
    if len(a) < 2 or len(b) < 2:
        return None
    if len(b) == 2:
        return Product(math.prod(a[:-1]), b[-1], a[-1])
    return Product(a[-2], b[-1], a[-1], max(math.prod(a[:-2]), math.prod(b[:-2])))
