"""A mixture of experts of which each rank has some.

Where tokens are whole on the ranks that share experts, each adds what its own experts make of them. Where tokens are
sharded on the same axis, they are dispatched: each token goes to the ranks of its experts, and what these make of it
comes back (Lepikhin et al. 2021, without a limit: no token is dropped). On several axes rows go along one after the
other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._local_tensor import LocalTensor

from autopar.functions.ranks import for_each_rank
from autopar.operators.expert import Expert
from autopar.operators.experts import by_expert, known, put, routed, take, through
from autopar.runtime.spmd.expert_load import Routed
from autopar.runtime.spmd.rank_index import Groups, GroupsOrMicroBatches, among_ranks, as_partial, cut, first, ranks
from autopar.runtime.spmd.row_exchange import (
    RowsInFlight,
    Splits,
    begin_rows,
    end_rows,
    exchange_counts,
    exchange_rows,
    splits,
)
from autopar.runtime.spmd.run_state import RunState


def experts(
    state: RunState,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *arguments: Any,
    sample_groups: GroupsOrMicroBatches = (),
    holding_groups: Groups = (),
    dispatch_groups: Groups = (),
    sent: _Dispatch | None = None,
) -> Tensor:
    """``autopar.experts`` of this rank's experts.

    Args:
        state: that it is a region of: what it keeps of its rows is made anew where it runs again.
        x, indices, weights: ``[t, h]``, ``[t, k]``, ``[t, k]``; ``S`` on ``dispatch_groups``, ``R`` on the other
            ``holding_groups``.
        up, down, up_bias, down_bias: ``S`` on ``holding_groups`` along their experts.
        *arguments: as in the operator.
        sample_groups: those that shard tokens.
        holding_groups: the mesh axes that shard experts, major first.
        dispatch_groups: those of them that shard tokens, too.
        sent: what :func:`begin_experts` sent of the tokens.

    Returns:
        ``[t, h]``, ``S`` on ``dispatch_groups``, ``P`` on the other ``holding_groups``.
    """
    matrices = (up, down, up_bias, down_bias)
    whole = tuple(group for group in holding_groups if group not in dispatch_groups)
    with state.random.region():
        if x.is_meta or isinstance(x, FakeTensor):
            found = torch.ops.autopar.experts.default(x, indices, weights, *matrices, *arguments)
            return as_partial(found, whole)
        count, is_simulated = len(up) * ranks(holding_groups), isinstance(x, LocalTensor)
        # Nobody is told where rows were counted already, or are of all ranks at once.
        is_seen = not (state.random.is_replaying or is_simulated)
        sharing = ranks(tuple(dict.fromkeys((*holding_groups, *among_ranks(sample_groups)))))
        seen = partial(_note, state, holding_groups, count, sharing) if is_seen else None
        if not dispatch_groups:
            run = partial(routed, form=Expert(*arguments), count=count, seen=seen)
            at = first(count, whole, x.device) if is_simulated else len(up) * state.random.coordinate(whole)
            found = for_each_rank(run, x, indices, weights, *matrices, at)
        else:
            ways = _Ways(holding_groups, dispatch_groups, len(up), x.device)
            run = partial(_made, form=Expert(*arguments), seen=seen)
            found = _dispatched(sent or _sent(x, indices, ways), weights, matrices, ways, run)
    return as_partial(found, whole)


def begin_experts(
    state: RunState,
    x: Tensor,
    indices: Tensor,
    each: int,
    *,
    holding_groups: Groups = (),
    dispatch_groups: Groups = (),
) -> _Dispatch | None:
    """Send tokens to their experts, for :func:`experts` to wait for them; arguments as there.

    Args:
        state: that it is a region of, too.
        each: experts of one rank.
    """
    with state.random.region():
        if x.is_meta or isinstance(x, FakeTensor):
            return None
        return _sent(x, indices, _Ways(holding_groups, dispatch_groups, each, x.device), is_awaited=False)


class _Ways:
    """Where tokens go: the experts of a rank are numbered by its place on every axis that shards experts, major first.

    Attributes:
        dispatch: the axes along which tokens go, major first.
        each: experts of one rank.
        count: experts that the tokens of this rank may go to from here.
        here: this rank's place on each of the other axes.
    """

    def __init__(self, holding: Groups, dispatch: Groups, each: int, device: torch.device):
        self._holding, self.dispatch, self.each = holding, dispatch, each
        self.count = each * ranks(dispatch)
        others = (group for group in holding if group not in dispatch)
        self.here = [cut(torch.arange(group.size(), device=device), (group,)).squeeze(0) for group in others]

    def start(self, x: Tensor, indices: Tensor, *here: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A row for each token and expert, sorted by where it goes; which token and place each is of; how many go."""
        number = known(indices, self.each * ranks(self._holding))
        if here:
            number = self._among_those_here(number, here)
        slots, counts = by_expert(number, self.count)
        return take(x, slots, indices.shape[-1]), slots, counts

    def _among_those_here(self, chosen: Tensor, here: Sequence[Tensor]) -> Tensor:
        """Experts as they are numbered among those that tokens may go to; ``count`` where others have an expert."""
        block, goes, number = chosen // self.each, torch.ones_like(chosen, dtype=torch.bool), torch.zeros_like(chosen)
        places = iter(here)
        for at, group in enumerate(self._holding):
            place = block // ranks(self._holding[at + 1 :]) % group.size()
            if group in self.dispatch:
                number = number * group.size() + place
            else:
                goes &= place == next(places)
        return torch.where(goes, number * self.each + chosen % self.each, self.count)


def _note(state: RunState, holding: Groups, count: int, sharing: int, tokens: Sequence[int]) -> None:
    """Remember how many tokens went to each expert of this rank."""
    state.routed.append(Routed(state.random.coordinate(holding) * len(tokens), count, tuple(tokens), sharing))


@dataclass(frozen=True, eq=False, repr=False)
class _Dispatch:
    """Rows on their way along the first axis.

    Attributes:
        rows: what arrives.
        slots: which token and place each row that was sent is of.
        arrived: how many rows arrive for each expert.
        sent, received: rows for and from each rank.
        flight: what to wait for, if they are not there.
    """

    rows: Tensor
    slots: Tensor
    arrived: Tensor
    sent: Splits
    received: Splits
    flight: RowsInFlight | None


def _sent(x: Tensor, indices: Tensor, ways: _Ways, is_awaited: bool = True) -> _Dispatch:
    rows, slots, counts = for_each_rank(ways.start, x, indices, *ways.here)
    group = ways.dispatch[0]
    sent, arrived = splits(counts, group), exchange_counts(counts, group)
    received = splits(arrived, group)
    if is_awaited:
        return _Dispatch(exchange_rows(rows, sent, received, group), slots, arrived, sent, received, None)
    rows, flight = begin_rows(rows, sent, received, group)
    return _Dispatch(rows, slots, arrived, sent, received, flight)


def _dispatched(
    begun: _Dispatch,
    weights: Tensor,
    matrices: tuple[Tensor | None, ...],
    ways: _Ways,
    run: Callable[..., Tensor],
) -> Tensor:
    """What the experts of all ranks make of this rank's tokens; ``run``: what one rank does with its rows."""
    rows = begun.rows if begun.flight is None else end_rows(begun.rows, begun.flight)
    sent, received, arrived = begun.sent, begun.received, begun.arrived
    counts, back, sources = arrived, [], 1
    sizes = [*(group.size() for group in ways.dispatch), ways.each]
    for number, (group, following) in enumerate(zip(ways.dispatch, sizes[1:], strict=True)):
        if number:
            sent, arrived = splits(counts, group), exchange_counts(counts, group)
            received = splits(arrived, group)
            rows = exchange_rows(rows, sent, received, group)
        sources *= group.size()
        # Rows are sorted by where they come from, then by where they go next, and are to be the other way round.
        rows, counts, order = for_each_rank(partial(_regrouped, shape=(sources, following, -1)), rows, arrived)
        back.append((group, sent, received, order))
    rows = for_each_rank(run, rows, counts.view(ways.each, -1).sum(1), *matrices)
    for group, sent, received, order in reversed(back):
        rows = exchange_rows(for_each_rank(_restored, rows, order), received, sent, group)
    return for_each_rank(_weighted, rows, weights, begun.slots)


def _regrouped(rows: Tensor, counts: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in runs of ``counts[a * b * c]``, sorted by ``(b, a, c)`` instead of ``(a, b, c)``; their new counts, and
    which row is where.
    """
    sources, following, _ = shape
    place = torch.arange(len(counts), device=counts.device).view(following, sources, -1).transpose(0, 1).flatten()
    order = torch.argsort(place.repeat_interleave(counts), stable=True)
    return take(rows, order), counts.view(shape).transpose(0, 1).flatten(), order


def _restored(rows: Tensor, order: Tensor) -> Tensor:
    return put(rows, order, len(rows))


def _made(
    rows: Tensor,
    counts: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    *,
    form: Expert,
    seen: Callable[[Sequence[int]], None] | None,
) -> Tensor:
    each = counts.tolist()
    if seen is not None:
        seen(each)
    return through(rows, each, up, down, up_bias, down_bias, form=form).to(rows.dtype)


def _weighted(rows: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """The sum of what experts made of each token."""
    k = weights.shape[-1]
    weighted = rows * weights.reshape(-1).index_select(0, slots).unsqueeze(-1)
    return put(weighted, slots, math.prod(weights.shape[:-1]), k).to(rows.dtype)
