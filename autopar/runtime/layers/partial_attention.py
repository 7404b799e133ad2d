"""Attention to the keys of a sequence, some at a time, without scores or masks of the whole.

Of a causal mask two pieces are left: queries and keys at the same places see one another as in a small sequence, and
later queries see earlier keys, all of them. What attention makes of each piece is merged by the log-sum-exp of its
scores (Milakov and Gimelshein 2018; Dao et al. 2022).

Keys are whole on every rank, or each rank holds some, and they go around the ranks in a ring (Li et al. 2021, Liu et
al. 2023): while a rank attends to the keys that it has, the next ones come. In backward they go around once more, and
their gradients with them, one step behind. Saved are the shards that a rank has, its result, and the log-sum-exp. In
zigzag order (:mod:`autopar.runtime.layers.zigzag`) halves are exchanged before and after, in backward too. Of a sliding
window only those of the last keys before a rank's own come that it sees, and gradients go straight home.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import spmd_types as spmd
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from autopar.functions.ranks import for_each_rank_no_grad
from autopar.runtime.layers.attention_kernel import AttentionPiece, Drawn, additive
from autopar.runtime.layers.zigzag import Zigzag
from autopar.runtime.spmd.messages import shift, wait
from autopar.runtime.spmd.rank_index import Groups, cut
from planner.base.errors import InputError
from planner.ops.attention import Sight
from planner.ops.attention_pieces import SeenPart, pieces, sent_keys, zigzag

SEEDS = 2**62
"""So many there are."""


@dataclass(frozen=True)
class Places:
    """Where the queries and keys of this rank lie in the sequence.

    Attributes:
        starts: ``[r]``, the first places of the runs of queries that this rank has.
        run: queries in each run.
        source: ``[]``, this rank's place in the ring.
        ring: the ranks that keys go around; ``None``: every rank has all of them.
        zigzag: the exchange that gives it these queries, and in a ring their keys.
    """

    starts: Tensor
    run: int
    source: Tensor
    ring: ProcessGroup | None
    zigzag: Zigzag | None = None

    @staticmethod
    def of(
        queries: int, groups: Groups, strips: Sequence[int], ring: ProcessGroup | None, is_zigzag: bool = False
    ) -> Places:
        """
        Args:
            queries: of the whole sequence.
            groups, strips: that shard them, as :func:`autopar.runtime.spmd.rank_index.cut` takes them.
            is_zigzag: the one group has them in zigzag order.
        """
        if is_zigzag:
            (group,) = groups
            count = group.size()
            with torch.device("cpu"), spmd.no_typecheck():
                source = cut(torch.arange(count), groups).squeeze(0)
                (starts,) = for_each_rank_no_grad(lambda at: (torch.tensor(zigzag(int(at), count, queries)),), source)
            return Places(starts, queries // (2 * count), source, ring, Zigzag(group, source))
        run, length = queries, queries
        for group, count in zip(groups, strips or (1,) * len(groups), strict=True):
            run, length = math.gcd(run, length // (count * group.size())), length // group.size()
        with torch.device("cpu"), spmd.no_typecheck():
            starts = cut(torch.arange(0, queries, run), groups, strips)
            source = torch.zeros(1) if ring is None else cut(torch.arange(ring.size()), (ring,))
        return Places(starts, run, source.squeeze(0), ring)

    @property
    def steps(self) -> int:
        """How often this rank has other keys."""
        return 1 if self.ring is None else self.ring.size()

    def runs_of_keys(self, block: int, keys: int, here: int) -> tuple[Sequence[int], int]:
        """Where the runs of keys of a block begin, of a rank of the ring or of all, and how long each is.

        Args:
            keys: in the block.
            here: of these, as many of the last as have come.
        """
        if self.zigzag is None or self.ring is None:
            return ((block + 1) * keys - here,), here
        return zigzag(block, self.steps, keys * self.steps), keys // 2

    def entered(
        self, rows: tuple[Tensor, ...], columns: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What lies beside queries, and what beside keys, as this rank meets them."""
        if self.zigzag is None:
            return rows, columns
        return self.zigzag.enter(*rows), columns if self.ring is None else self.zigzag.enter(*columns)

    def left(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, ...]:
        """The gradients of what this rank holds, of those of what it met."""
        if self.zigzag is None:
            return dq, dk, dv
        each = ((dq,), (dk, dv)) if self.ring is not None else ((dq,),)
        back = [t for some in each for t in self.zigzag.leave(some, tuple(map(torch.empty_like, some)))]
        return (*back, dk, dv)[:3]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    seen: Sight,
    scale: float,
    places: Places,
    softcap: float | None = None,
) -> Tensor:
    """Attention of this rank's queries to all keys.

    Args:
        query: ``[b, h, n, d]``.
        key, value: ``[b, h or kv, m, d]`` and ``[b, h or kv, m, e]``; all of them, or those that this rank holds.
        mask: broadcasts to ``[b, h, n, keys of all ranks]``; of booleans, or added to scores. Its gradient is made of
            scores of a piece.
        dropout_p: the share of weights that is dropped; what seeds it is drawn here.
        seen: by queries of keys, beside what ``mask`` hides.
        softcap: what scores are at most: ``softcap * tanh(score / softcap)``, before a mask is added.

    Returns:
        ``[b, h, n, e]``.
    """
    with torch.device("cpu"), spmd.no_typecheck():
        seed = torch.randint(SEEDS, ()) if dropout_p else None
    trains = mask is not None and mask.requires_grad
    call = partial(AttentionPiece, scale=scale, dropout_p=dropout_p, softcap=softcap, trains=trains)
    base = _base(mask, key.dtype) if trains or softcap is not None else None
    visits = _Visits(call, seen, places, key.shape[-2], _shown(mask, places.steps), seed, base)
    return _Attend.apply(query, key, value, mask, visits)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        visit: _Visits,
    ) -> Tensor:
        ctx.visit, places = visit, visit.places
        wide = torch.promote_types(query.dtype, torch.float32)
        out, lse = _result(query, value, wide).zero_(), query.new_full(query.shape[:-1], -torch.inf, dtype=wide)
        rows, (keys, values) = places.entered((query,), (key, value))
        held = _Packed.of(keys, values, packs=visit.goes_around)
        for step, sent in enumerate([*visit.sent, 0]):
            coming = held.last(sent).send(places.ring) if sent else None
            out, lse = visit.forward(step, *rows, *held.parts, mask, out, lse)
            held = coming() if coming is not None else held
        out = out.to(query.dtype)
        if places.zigzag is not None:
            (out,) = places.zigzag.leave((out,), (_result(query, value, query.dtype),))
        ctx.save_for_backward(query, key, value, mask, out, lse)
        return out

    @staticmethod
    def spmd_typecheck(*, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, visit: _Visits) -> Any:
        masks = () if mask is None else (mask,)
        return spmd.rules.einsum(
            f"bhqd,bgkd,bgke{',wxyz' * len(masks)}->bhqe", query, key, value, *masks, linear_in=(2,)
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        visit, places = ctx.visit, ctx.visit.places
        ring = places.ring
        (query, gradient, out), (key, value) = places.entered((query, gradient, out), (key, value))
        rest = mask, gradient, out, lse
        dq, held = torch.zeros_like(query, dtype=lse.dtype), _Packed.of(key, value, packs=visit.goes_around)
        home, behind = held.zeros(lse.dtype), None
        of_mask = (torch.zeros_like(mask, dtype=lse.dtype),) if ctx.needs_input_grad[3] else ()
        for step, sent in enumerate([*visit.sent, 0]):
            coming = held.last(sent).send(ring) if sent else None
            found = held.zeros(lse.dtype) if step else home
            dq, *_ = visit.backward(step, query, *held.parts, *rest, dq, *found.parts, *of_mask)
            if behind is not None:
                (found if visit.goes_around else home).add(behind())
            behind = found.send(ring, 1 if visit.goes_around else -step) if step else None
            held = coming() if coming is not None else held
        if behind is not None:
            home.add(behind())
        dk, dv = (part.to(key.dtype) for part in home.parts)
        dq, dk, dv = places.left(dq.to(query.dtype), dk, dv)
        return dq, dk, dv, of_mask[0].to(mask.dtype) if of_mask else None, None


@dataclass(frozen=True)
class _Visits:
    """What one rank does with the keys that it has at each step.

    Attributes:
        call: of a kernel, but for what is met.
        keys: that a rank of the ring has, or all.
        shown: whether any query of this rank sees anything of each block of keys, where a mask says so.
        seed: ``[]``, of what is dropped, from which that of each piece follows, so that it is drawn again in backward.
        base: ``[.., n, 1]``, see :func:`_base`; without it, queries that have one are refused in a ring.
        drawn: what kernels drew instead, by step and number of the piece.
    """

    call: Callable[..., AttentionPiece]
    seen: Sight
    places: Places
    keys: int
    shown: Tensor | None
    seed: Tensor | None
    base: Tensor | None
    drawn: dict[tuple[int, int], Drawn] = field(default_factory=dict)

    @property
    def sent(self) -> list[int]:
        """How many keys are passed on in each step but the last."""
        return [n for n, times in sent_keys(self.places.steps, self.keys, self.seen.window) for _ in range(times)]

    @property
    def goes_around(self) -> bool:
        """Whether every rank has the keys of every other in turn."""
        return self.places.steps > 1 and self.seen.window is None

    def forward(self, step: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return self._on_ranks(self._forward, step, tensors)

    def backward(self, step: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return self._on_ranks(self._backward, step, tensors)

    def _on_ranks(
        self, run: Callable[..., tuple[Tensor, ...]], step: int, tensors: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        places = self.places
        known = self.shown, self.seed, self.base, places.starts, places.source
        return for_each_rank_no_grad(partial(run, step), *known, *tensors)

    def _forward(self, step: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        met, (out, lse) = _Met(*tensors[:MET]), tensors[MET:]
        for number, (at, piece) in enumerate(self._pieces(step, met)):
            found, its_lse, self.drawn[step, number] = piece.forward()
            _merge(out[:, :, at.queries], lse[:, :, at.queries], found, its_lse)
        return out, lse

    def _backward(self, step: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        met, (gradient, out, lse, *totals) = _Met(*tensors[:MET]), tensors[MET:]
        for number, (at, piece) in enumerate(self._pieces(step, met)):
            drawn, rows, keys = self.drawn[step, number], at.queries, at.keys
            found = piece.backward(gradient[:, :, rows], out[:, :, rows], lse[:, :, rows], drawn)
            parts = [total[:, :, part] for total, part in zip(totals, (rows, keys, keys), strict=False)]
            parts += [_of_piece(of_mask, rows, self._among_all(step, met, keys)) for of_mask in totals[3:]]
            for part, new in zip(parts, found, strict=True):
                part += new
        return tuple(totals)

    def _block(self, step: int, met: _Met) -> int:
        """Whose keys are here."""
        return (int(met.source) - step) % self.places.steps

    def _among_all(self, step: int, met: _Met, keys: slice) -> slice:
        """The places among the keys of all ranks of some that are here, which are the last of a rank's."""
        first = (self._block(step, met) + 1) * self.keys - met.key.shape[-2]
        return slice(first + keys.start, first + keys.stop)

    def _pieces(self, step: int, met: _Met) -> Iterator[tuple[SeenPart, AttentionPiece]]:
        """The pieces of this step."""
        block, keys = self._block(step, met), met.key.shape[-2]
        if met.base is None and met.mask is not None and self.places.steps > 1 and not step:
            _check_scores_count(met.mask)
        if met.shown is not None and not met.shown[block]:
            return
        runs = self.places.runs_of_keys(block, self.keys, keys)
        for number, each in enumerate(pieces(met.starts.tolist(), self.places.run, *runs, self.seen)):
            hidden = _part(met.mask, each.queries, self._among_all(step, met, each.keys), met.key.dtype)
            band = _band(each, self.seen.window, met.key)
            if band is not None:
                hidden = band if hidden is None else hidden + band
            operands = met.query[:, :, each.queries], met.key[:, :, each.keys], met.value[:, :, each.keys]
            base = _part(met.base, each.queries, each.keys, met.key.dtype)
            seed = 0 if met.seed is None or met.seed.is_meta else int(met.seed) + number * self.places.steps + step
            yield each, self.call(*operands, hidden, each.is_square, seed=seed, base=base)


class _Met(NamedTuple):
    """What one rank meets in a step: what :class:`_Visits` knows, its places as in :class:`Places`, and operands."""

    shown: Tensor | None
    seed: Tensor | None
    base: Tensor | None
    starts: Tensor
    source: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None


MET = len(_Met._fields)


def _part(mask: Tensor | None, queries: slice, keys: slice, dtype: torch.dtype) -> Tensor | None:
    """A mask for some queries and keys, to be added to scores."""
    return None if mask is None else additive(_of_piece(mask, queries, keys), dtype)


def _of_piece(mask: Tensor, queries: slice, keys: slice) -> Tensor:
    """A view of a mask, or of its gradient, for some queries and keys."""
    mask = mask if mask.shape[-1] == 1 else mask[..., keys]
    return mask if mask.shape[-2] == 1 else mask[..., queries, :]


def _band(piece: SeenPart, window: int | None, key: Tensor) -> Tensor | None:
    """The mask of a piece whose queries see some of its keys, as it is added to scores."""
    if piece.band is None or window is None:
        return None
    queries, keys, _ = piece.form
    rows, columns = (torch.arange(count, dtype=torch.int32, device=key.device) for count in (queries, keys))
    back = rows.unsqueeze(-1) + piece.band - columns
    return additive((back >= 0) & (back < window), key.dtype)


def _shown(mask: Tensor | None, blocks: int) -> Tensor | None:
    """``[blocks]``: whether any query of this rank sees anything of each block of keys."""
    if mask is None or mask.is_meta or mask.shape[-1] == 1:
        return None
    shown = mask if mask.dtype == torch.bool else mask != -torch.inf
    return shown.unflatten(-1, (blocks, -1)).transpose(-1, -2).flatten(0, -2).any(0).cpu()


def _base(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """``[.., n, 1]``: the number that hides a query from all keys, if its scores are lost in it, else 0; taken off what
    is left, it makes that as small a number as other scores.
    """
    if mask is None or not mask.is_floating_point():
        return None
    largest = mask.amax(-1, keepdim=True).to(dtype)
    return largest.masked_fill((largest >= torch.finfo(dtype).min / 2) | (largest == -torch.inf), 0)


def _check_scores_count(mask: Tensor) -> None:
    """Refuse a mask in whose numbers the scores of a query are lost."""
    base = None if mask.is_meta else _base(mask, mask.dtype)
    if base is not None and bool(base.any()):
        raise InputError(
            "a mask hides a query from all keys by large finite numbers, in which scores are lost, so that what it "
            "sees is no sum over parts of the keys: hide by -inf or by a mask of booleans, or pin 'context_kind' "
            "'gather' or 'ulysses'"
        )


def _result(query: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """As kernels have it: heads lie in memory as those of queries do."""
    if query.shape[-1] == value.shape[-1]:
        return torch.empty_like(query, dtype=dtype)
    batch, heads, rows, _ = query.shape
    size = batch, rows, heads, value.shape[-1]
    return query.new_empty(size, dtype=dtype).transpose(1, 2)


def _merge(out: Tensor, lse: Tensor, more: Tensor, its_lse: Tensor) -> None:
    """Add to what queries have seen, ``out`` and ``lse``, what they see in further keys."""
    both = torch.logaddexp(lse, its_lse.to(lse.dtype))
    base = both.masked_fill(both == -torch.inf, 0)
    out.mul_((lse - base).exp().unsqueeze(-1)).add_(more * (its_lse - base).exp().unsqueeze(-1))
    lse.copy_(both)


@dataclass(frozen=True)
class _Packed:
    """Keys and values, or their gradients.

    Attributes:
        parts: both.
        whole: flat, both of them, of which they are views; ``None`` where they are not sent.
    """

    parts: tuple[Tensor, ...]
    whole: Tensor | None

    @staticmethod
    def of(key: Tensor, value: Tensor, packs: bool) -> _Packed:
        """``packs``: put them together, to be sent."""
        if not packs:
            return _Packed((key, value), None)
        return _Packed.views(torch.cat([key.reshape(-1), value.reshape(-1)]), (key.shape, value.shape))

    @staticmethod
    def views(whole: Tensor, shapes: Sequence[torch.Size]) -> _Packed:
        parts = whole.split([shape.numel() for shape in shapes])
        return _Packed(tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True)), whole)

    def zeros(self, dtype: torch.dtype) -> _Packed:
        """Zeros for both."""
        if self.whole is None:
            return _Packed(tuple(torch.zeros_like(part, dtype=dtype) for part in self.parts), None)
        return _Packed.views(torch.zeros_like(self.whole, dtype=dtype), self._shapes)

    def add(self, more: _Packed) -> None:
        """Add others to them, those of fewer keys to the last."""
        if self.whole is not None and more.whole is not None and self.whole.shape == more.whole.shape:
            self.whole.add_(more.whole)
            return
        for part, other in zip(self.parts, more.parts, strict=True):
            part[:, :, -other.shape[-2] :].add_(other)

    def last(self, keys: int) -> _Packed:
        """Of so many keys, the last; to be sent."""
        if self.whole is not None and keys == self.parts[0].shape[-2]:
            return self
        key, value = (part[:, :, -keys:] for part in self.parts)
        return _Packed.of(key, value, packs=True)

    def send(self, ring: ProcessGroup | None, by: int = 1) -> Callable[[], _Packed]:
        """Send both to the next rank in a ring, or one that is so many further, as one message.

        Returns:
            What waits for those that a rank as far before sends.
        """
        assert ring is not None and self.whole is not None
        arriving, shapes = shift(self.whole, ring, by), self._shapes
        return lambda: _Packed.views(wait(arriving), shapes)

    @property
    def _shapes(self) -> list[torch.Size]:
        return [part.shape for part in self.parts]
