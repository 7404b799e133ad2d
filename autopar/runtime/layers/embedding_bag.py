"""Embedding bags whose table is sharded by rows, or of whose ids each rank has a slice."""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import torch
from spmd_types import I, R, V
from torch import Tensor

from autopar.operators.embedding_bag import embedding_bag
from autopar.runtime.layers.collectives import all_reduce
from autopar.runtime.layers.ids import check_ids, rows_of_table
from autopar.runtime.spmd.rank_index import (
    Groups,
    as_partial,
    cut,
    first,
    ranks,
)
from planner.ops.embedding import MAX, MEAN, SUM


def sharded_embedding_bag(
    weight: Tensor,
    indices: Tensor,
    starts: Tensor | None,
    per_sample_weights: Tensor | None,
    mode: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
    *,
    vocab_groups: Groups = (),
    id_groups: Groups = (),
    path: str = "",
) -> Tensor:
    """``autopar.embedding_bag`` where each rank holds a slice of the rows, of the ids, or of both.

    Args:
        weight: ``[v / ranks, h]``, ``S(0)`` on ``vocab_groups``.
        indices: global ids ``[b, l]`` or ``[n]``, ``S(0)`` on ``id_groups``, which shard ``n`` alone.
        starts: ``[b]``, global places of ids, equal on all ranks; ``None`` for ids ``[b, l]``.
        per_sample_weights: like ``indices``.
        mode, padding_idx: as in the operator.
        scale_grad_by_freq: ``False`` where anything is sharded.
        vocab_groups: the mesh axes that shard the rows, major first.
        id_groups: those that shard ids which lie one behind the other, major first.
        path: of the module, for errors.

    Returns:
        The bags ``[b, h]``, ``P`` on all groups; of maxima ``I`` on ``vocab_groups``.

    Raises:
        InputError: on a CPU, of an id that is beyond the table.
    """
    if not vocab_groups and not id_groups:
        try:
            return embedding_bag(weight, indices, starts, per_sample_weights, mode, padding_idx, scale_grad_by_freq)
        except RuntimeError as error:
            failed = error
        if indices.device.type == "cpu":
            check_ids(indices, weight.shape[0], rows_of_table(path))
        raise failed
    assert not scale_grad_by_freq, "counts of ids keep the table whole"
    begins = _local_starts(starts, indices, id_groups)
    if vocab_groups:
        rows = weight.shape[0] * ranks(vocab_groups)
        check_ids(indices, rows, rows_of_table(path))
        row = first(rows, vocab_groups, indices.device)
        if mode == MAX:
            return _VocabBagMaxima.apply(weight, indices, begins, row, padding_idx, vocab_groups)
        bags = VocabBagSums.apply(weight, indices, begins, per_sample_weights, row, padding_idx, vocab_groups)
    else:
        bags = embedding_bag(weight, indices, begins, per_sample_weights, SUM, padding_idx, False)
    if mode == MEAN:
        bags = bags / _counts(indices, starts, begins, padding_idx, id_groups)
    return as_partial(bags, (*vocab_groups, *id_groups))


def _local_starts(starts: Tensor | None, indices: Tensor, groups: Groups) -> Tensor | None:
    """Where each bag begins among this rank's ids: those that began before begin at 0, later ones behind the last."""
    if starts is None or not groups:
        return starts
    here = indices.shape[0]
    with spmd.no_typecheck():
        begin = cut(torch.arange(0, here * ranks(groups), here, device=indices.device), groups)
        local = (starts - begin).clamp(0, here)
    if spmd.is_type_checking():
        types: dict[Any, Any] = dict(spmd.get_local_type(starts))
        spmd.assert_type(local, types | {spmd.normalize_axis(group): V for group in groups})
    return local


def _bag_of_each(indices: Tensor, starts: Tensor | None) -> Tensor:
    """The bag that each id is of, in the order of the ids: ``[ids]``."""
    if starts is None:
        return torch.arange(indices.shape[0], device=indices.device).repeat_interleave(indices.shape[1])
    return torch.bucketize(torch.arange(indices.shape[0], device=indices.device), starts, right=True) - 1


def _counts(indices: Tensor, starts: Tensor | None, begins: Tensor | None, padding_idx: int, groups: Groups) -> Tensor:
    """How many ids each bag has on all ranks, without padding, and at least 1: ``[b, 1]``."""
    counted = indices != padding_idx
    if starts is None:
        return counted.sum(1, keepdim=True).clamp_min(1)
    with spmd.no_typecheck():
        if padding_idx == -1:
            counts = torch.diff(starts, append=starts.new_full((1,), indices.shape[0] * ranks(groups)))
        else:
            bags = _bag_of_each(indices, begins)
            counts = torch.zeros_like(starts).index_add(0, bags, counted.to(starts.dtype))
    if spmd.is_type_checking():
        spmd.assert_type(counts, dict(spmd.get_local_type(starts if padding_idx == -1 else indices)))
    for group in groups if padding_idx != -1 else ():
        counts = spmd.all_reduce(counts, group, src=V, dst=R)
    return counts.clamp_min(1).unsqueeze(-1)


def _present(indices: Tensor, row: Tensor, rows: int, padding_idx: int) -> tuple[Tensor, Tensor]:
    """Flat local rows, 0 for ids of other ranks and padding; and which ids are neither."""
    ids = indices.reshape(-1)
    local = ids - row
    present = (local >= 0) & (local < rows) & (ids != padding_idx)
    return local.masked_fill(~present, 0), present


class VocabBagSums(torch.autograd.Function):
    """``weight[v, h], ids, starts[b], scales, row[] -> y[b, h]``: sums of the rows that are here.

    Ids of other ranks, and padding, are put into bags of their own, which are dropped: no weight makes an infinite row
    nothing. Backward skips them: they become -1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        indices: Tensor,
        starts: Tensor | None,
        scales: Tensor | None,
        row: Tensor,
        padding_idx: int,
        groups: Groups,
    ) -> Tensor:
        local, present = _present(indices, row, weight.shape[0], padding_idx)
        flat = None if scales is None else scales.reshape(-1)
        ctx.shape, ctx.rows = indices.shape, weight.shape[0]
        trains_scales = scales is not None and ctx.needs_input_grad[3]
        ctx.save_for_backward(local.masked_fill(~present, -1), starts, flat, weight if trains_scales else None)
        bags = (indices if starts is None else starts).shape[0]
        bag = _bag_of_each(indices, starts) + bags * ~present
        order = bag.argsort(stable=True)
        begins = torch.searchsorted(bag[order], torch.arange(2 * bags, device=bag.device))
        ordered = None if flat is None else flat[order]
        return embedding_bag(weight, local[order], begins, ordered, SUM, -1, False)[:bags].clone()

    @staticmethod
    def spmd_typecheck(
        *, weight: Tensor, indices: Tensor, starts: Tensor | None, scales: Tensor | None, row: Tensor, groups: Groups
    ) -> Any:
        spmd.rules.ignore(row)
        return _type_of_bags(weight, indices, starts, scales)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        local, starts, flat, weight = ctx.saved_tensors
        each = grad[_bag_of_each(local.view(ctx.shape), starts)]
        scales = rows = None
        if weight is not None:
            found = torch.nn.functional.embedding(local.clamp_min(0), weight)
            scales = (found * each).sum(-1).masked_fill(local < 0, 0).view(ctx.shape)
        if ctx.needs_input_grad[0]:
            each = each if flat is None else each * flat.unsqueeze(-1)
            rows = torch.ops.aten.embedding_dense_backward(each, local, ctx.rows, -1, False)
        return rows, None, None, scales, None, None, None


class _VocabBagMaxima(torch.autograd.Function):
    """``weight[v, h], ids, starts[b], row[] -> y[b, h]``: maxima over the rows of all ranks of ``groups``, on each.

    The ranks share the largest elements, then the first places of ids that have them, which is where gradients go: to
    rows that are here without further communication.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        indices: Tensor,
        starts: Tensor | None,
        row: Tensor,
        padding_idx: int,
        groups: Groups,
    ) -> Tensor:
        local, present = _present(indices, row, weight.shape[0], padding_idx)
        bags, features = (indices if starts is None else starts).shape[0], weight.shape[1]
        bag = _bag_of_each(indices, starts).unsqueeze(1).expand(-1, features)
        found = torch.nn.functional.embedding(local, weight).masked_fill_(~present.unsqueeze(1), -torch.inf)
        largest = found.new_full((bags, features), -torch.inf).scatter_reduce_(0, bag, found, "amax")
        largest = all_reduce(largest, "max", groups)
        place = torch.arange(local.shape[0], device=local.device).unsqueeze(1)
        nowhere = local.shape[0]
        has_it = (found == largest.gather(0, bag)) & present.unsqueeze(1)
        place = torch.where(has_it, place, nowhere)
        at = place.new_full((bags, features), nowhere).scatter_reduce_(0, bag, place, "amin")
        at = all_reduce(at, "min", groups)
        empty = at == nowhere
        at = at.masked_fill(empty, 0)
        ctx.rows = weight.shape[0]
        ctx.save_for_backward(local[at], present[at] & ~empty)
        return largest.masked_fill(empty, 0)

    @staticmethod
    def spmd_typecheck(*, weight: Tensor, indices: Tensor, starts: Tensor | None, row: Tensor, groups: Groups) -> Any:
        spmd.rules.ignore(row)
        bags = _type_of_bags(weight, indices, starts, None)
        for group in groups:
            bags = spmd.rules.all_reduce(bags, group, src=V, dst=I)
        return bags

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        row, mine = ctx.saved_tensors
        rows = grad.new_zeros(ctx.rows, grad.shape[1]).scatter_add_(0, row, grad.masked_fill(~mine, 0))
        return rows, None, None, None, None, None


def _type_of_bags(weight: Tensor, indices: Tensor, starts: Tensor | None, scales: Tensor | None) -> Any:
    """What the type checker makes of sums of the rows that are here."""
    ids = "bl" if starts is None else "n"
    given = [weight, indices, *(each for each in (starts, scales) if each is not None)]
    named = ["vh", ids, *([] if starts is None else ["b"]), *([] if scales is None else [ids])]
    return spmd.rules.einsum(f"{','.join(named)}->bh", *given, linear_in=(0,))
