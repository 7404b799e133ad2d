"""Attention whose queries are sharded along the sequence, on processes: exact, and nothing as long as it is kept.

Every way to shard it is compared with the operator in ``test_layers``, rank by rank in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.measure.local_processes import LocalProcesses
from autopar.operators.attention import attention as windowed
from autopar.runtime.layers import attention
from autopar.runtime.layers.partial_attention import _base, _check_scores_count
from autopar.runtime.spmd.random_state import RandomState
from planner.base.errors import InputError
from planner.ops import attention_pieces
from planner.ops.attention import Sight
from planner.ops.attention_pieces import pieces, sent_keys, zigzag

LENGTH, HEADS, KV, HEAD = 256, 4, 2, 6


class Largest(TorchDispatchMode):
    """The largest tensor that anything gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = found if isinstance(found, tuple) else (found,)
        self.numel = max(self.numel, *(t.numel() if isinstance(t, Tensor) else 0 for t in made))
        return found


def operands() -> list[Tensor]:
    """Query, key, value and a gradient, equal on all ranks; sharp, so that no block of keys is like another."""
    torch.manual_seed(0)
    sizes = ((HEADS, HEAD), (KV, HEAD), (KV, 10), (HEADS, 10))
    return [2 * torch.randn(2, heads, LENGTH, size, dtype=torch.float64) for heads, size in sizes]


def attends(kind: str, causal: bool, window: int | None = None, softcap: float | None = None) -> tuple[float, ...]:
    """Attention on all ranks, against one: the largest error of the result and of each gradient.

    Asserts that nothing of the size of scores is made, and that what is saved are shards.
    """
    group = dist.group.WORLD
    assert group is not None
    ranks, rank = group.size(), group.rank()
    whole = operands()
    wholes = [t.clone().requires_grad_() for t in whole[:3]]
    if window is None and softcap is None:
        expected = scaled_dot_product_attention(*wholes, is_causal=causal, enable_gqa=True)
    else:
        expected = windowed(*wholes, is_causal=causal, enable_gqa=True, window=window, softcap=softcap)
    gradients = torch.autograd.grad(expected, wholes, whole[3])
    is_ring = kind in ("ring", "zigzag")
    mine = [t.chunk(ranks, 2)[rank] if is_ring or at in (0, 3) else t for at, t in enumerate(whole)]
    mine = [t.contiguous().requires_grad_(at < 3) for at, t in enumerate(mine)]
    saved: list[Tensor] = []
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ways = {"ring_groups": (group,) * is_ring, "zigzag_groups": (group,) * ("zigzag" in kind)}
        seen = {"is_causal": causal, "window": window, "softcap": softcap}
        out = attention(*mine[:3], **seen, enable_gqa=True, query_groups=(group,), **ways)  # type: ignore[arg-type]
        found = torch.autograd.grad(out, mine[:3], mine[3])
    assert softcap or largest.numel < LENGTH // ranks * LENGTH, "no scores, and no mask"
    if is_ring:
        kept = {id(t): t.numel() for t in saved}
        assert sum(kept.values()) == sum(t.numel() for t in (*mine[:3], out)) + out.numel() // 10, "shards and the lse"
    errors = [_error(out, expected.chunk(ranks, 2)[rank])]
    for at, (each, right) in enumerate(zip(found, gradients, strict=True)):
        if at and not is_ring:  # a term of a sum
            dist.all_reduce(each, group=group)
        errors.append(_error(each, right.chunk(ranks, 2)[rank] if is_ring or not at else right))
    return tuple(errors)


RATE = 0.3


def drops(kind: str, causal: bool) -> tuple[float, Tensor]:
    """Attention with dropout on all ranks: the largest error of the result and of gradients, by the weights that were
    kept, and which those of this rank's queries were.

    Values that are the identity tell them; what is drawn with the same seed is the same.
    """
    group = dist.group.WORLD
    assert group is not None
    ranks, rank, is_ring = group.size(), group.rank(), kind in ("ring", "zigzag")
    query, key, value, cotangent = operands()
    identity = torch.eye(LENGTH, dtype=torch.float64).expand(2, KV, LENGTH, LENGTH)
    ways = {"ring_groups": (group,) * is_ring, "zigzag_groups": (group,) * ("zigzag" in kind)}

    def attended(values: Tensor) -> tuple[Tensor, list[Tensor]]:
        mine = [t.chunk(ranks, 2)[rank] if is_ring or not at else t for at, t in enumerate((query, key, values))]
        mine = [t.contiguous().requires_grad_() for t in mine]
        with RandomState(5).drawing((group,)):
            return attention(
                *mine,
                None,
                RATE,
                causal,
                enable_gqa=True,
                query_groups=(group,),
                **ways,  # type: ignore[arg-type]
            ), mine

    weights = attended(identity)[0].detach()
    wholes = [t.clone().requires_grad_() for t in (query, key, value)]
    q, (k, v) = wholes[0].chunk(ranks, 2)[rank], (t.repeat_interleave(HEADS // KV, 1) for t in wholes[1:])
    scores = q @ k.mT / HEAD**0.5
    if causal:
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1).chunk(ranks)[rank]
        scores = scores.masked_fill(hidden, -torch.inf)
    softmax = scores.softmax(-1)
    expected = (softmax * (weights != 0) / (1 - RATE)) @ v
    out, mine = attended(value)
    found = torch.autograd.grad(out, mine, cotangent.chunk(ranks, 2)[rank])
    errors = [_error(out, expected), _error(weights, softmax * (weights != 0) / (1 - RATE))]
    for at, right in enumerate(torch.autograd.grad(expected, wholes, cotangent.chunk(ranks, 2)[rank])):
        dist.all_reduce(right, group=group)
        each = found[at]
        if at and not is_ring:
            dist.all_reduce(each, group=group)
        errors.append(_error(each, right.chunk(ranks, 2)[rank] if is_ring or not at else right))
    return max(errors), weights != 0


def _error(found: Tensor, expected: Tensor) -> float:
    expected = expected.detach()
    return float((found.detach() - expected).abs().max() / expected.abs().max())


@pytest.mark.processes
@pytest.mark.parametrize(
    "ranks, kind", [(2, "gather"), (4, "gather"), (2, "ring"), (4, "ring"), (4, "zigzag"), (4, "zigzag_gather")]
)
def test_equals_attention_on_one_device(pool: LocalProcesses, ranks: int, kind: str) -> None:
    """No gradient is divided by the ranks, and every block of keys is met once."""
    for causal in (True, False) if kind == "ring" else (True,):  # without, the operator itself runs
        for errors in pool.run(attends, kind, causal, ranks=ranks):
            assert max(errors) < 1e-13, (causal, errors)


@pytest.mark.processes
@pytest.mark.parametrize("kind, causal", [("ring", False), ("zigzag", True), ("gather", True)])
def test_weights_are_dropped_as_on_one_device(pool: LocalProcesses, kind: str, causal: bool) -> None:
    """Of each query and head by itself, by as many ranks as there are, and the same in backward."""
    found = pool.run(drops, kind, causal, ranks=4)
    kept = torch.cat([each for _, each in found], 2)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(0 if causal else LENGTH)
    for error, _ in found:
        assert error < 1e-12
    rates = 1 - kept[..., seen].double().flatten(0, -2).mean(-1)
    count = int(seen.sum())
    assert (rates - RATE).abs().max() < 5 * (RATE * (1 - RATE) / count) ** 0.5
    parts = kept.chunk(2, 1) if causal else kept.chunk(4, 2)
    assert not any(torch.equal(a, b) for at, a in enumerate(parts) for b in parts[:at])


@pytest.mark.processes
@pytest.mark.parametrize("window, softcap", [(40, None), (100, 0.5)])
@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_windows_and_soft_caps_equal_attention_on_one_device(
    pool: LocalProcesses, kind: str, window: int, softcap: float | None
) -> None:
    """Within the keys of the rank before, or of two before."""
    for errors in pool.run(attends, kind, True, window, softcap, ranks=4):
        assert max(errors) < 1e-13


def test_queries_that_finite_numbers_hide_from_all_keys_are_refused() -> None:
    mask = torch.zeros(1, 1, 8, 16)
    mask[..., 3, :] = torch.finfo(torch.float32).min
    with pytest.raises(InputError, match="hide by -inf or by a mask of booleans"):
        _check_scores_count(mask)
    _check_scores_count(mask.masked_fill(mask < 0, -torch.inf))
    base = _base(mask, torch.float32)
    assert base is not None and base.flatten().tolist() == [0] * 3 + [torch.finfo(torch.float32).min] + [0] * 4


@pytest.mark.parametrize("starts, run, firsts, keys, count", [
    ([8], 4, [0], 16, 2), ([0, 8], 4, [4], 4, 1), ([4], 4, [4], 4, 1), ([12], 4, [0], 8, 1), ([0], 8, [4], 4, 1),
    (zigzag(1, 4, 32), 4, [0], 32, 4), (zigzag(0, 2, 16), 4, zigzag(0, 2, 16), 4, 1),
    (zigzag(0, 2, 16), 4, zigzag(1, 2, 16), 4, 1), (zigzag(1, 2, 16), 4, zigzag(0, 2, 16), 4, 1),
    ([0, 4, 16], 4, [2, 8], 5, 5),
])  # fmt: skip
def test_pieces_of_a_causal_mask(starts: Sequence[int], run: int, firsts: Sequence[int], keys: int, count: int) -> None:
    """Every pair of a query and a key that it sees is in one piece, and no other; of zigzag order one kernel a step."""
    seen, number = torch.zeros(len(starts) * run, len(firsts) * keys, dtype=torch.int64), 0
    for piece in pieces(starts, run, firsts, keys, Sight(True)):
        block, number = seen[piece.queries, piece.keys], number + 1
        assert block.numel() and (not piece.is_square or block.shape[0] == block.shape[1])
        block += torch.ones_like(block).tril() if piece.is_square else 1
    queries, places = (
        torch.cat([torch.arange(start, start + length) for start in each])
        for each, length in ((starts, run), (firsts, keys))
    )
    assert torch.equal(seen, (queries.unsqueeze(1) >= places).long()) and number == count


@pytest.mark.parametrize("least", [1, 4, 128])
@pytest.mark.parametrize("window", [1, 3, 4, 9, 40])
@pytest.mark.parametrize(
    "starts, run, first, keys", [([0], 24, 0, 24), ([8], 8, 8, 8), ([8], 8, 3, 5), ([0, 12], 4, 0, 24)]
)
def test_pieces_of_a_window(
    monkeypatch: pytest.MonkeyPatch, least: int, window: int, starts: Sequence[int], run: int, first: int, keys: int
) -> None:
    """Likewise, and few pairs besides."""
    monkeypatch.setattr(attention_pieces, "LEAST", least)
    seen, met = torch.zeros(len(starts) * run, keys, dtype=torch.int64), 0
    for piece in pieces(starts, run, [first], keys, Sight(True, window)):
        block = seen[piece.queries, piece.keys]
        rows, columns = (torch.arange(size) for size in block.shape)
        back, met = rows.unsqueeze(1) + (piece.band or 0) - columns, met + block.numel()
        is_seen = torch.ones_like(block) if piece.band is None else ((back >= 0) & (back < window)).long()
        block += is_seen.tril() if piece.is_square else is_seen
    queries = torch.cat([torch.arange(start, start + run) for start in starts])
    back = queries.unsqueeze(1) - torch.arange(first, first + keys)
    assert torch.equal(seen, ((back >= 0) & (back < window)).long())
    assert met <= len(queries) * min(keys, 3 * max(window, least))


def test_of_a_window_only_the_keys_that_it_holds_are_sent() -> None:
    assert sent_keys(4, 8, None) == [(8, 3)]
    assert sent_keys(4, 8, 1) == [] and sent_keys(4, 8, 4) == [(3, 1)] and sent_keys(4, 8, 9) == [(8, 1)]
    assert sent_keys(4, 8, 12) == [(8, 1), (3, 1)] and sent_keys(4, 8, 100) == [(8, 3)]
