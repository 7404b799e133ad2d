"""Look-ups: every member reads its own table."""

from __future__ import annotations

import torch

from autopar.arrays.rules.calls import Emitted, OperatorCall, dim_behind


def embedding(call: OperatorCall) -> Emitted:
    """Rows of tables; one selection for all where members look up the same."""
    table, ids = call.tensor("weight"), call.tensor("indices")
    if not table.stacked:
        return call.run()
    if call["scale_grad_by_freq"] or call["sparse"]:
        return NotImplemented
    width = table.shape[1]
    if ids.stacked:
        flat = ids.data.reshape(call.members, -1, 1).expand(-1, -1, width)
        rows = torch.gather(table.data, 1, flat)
    else:
        rows = table.data.index_select(1, ids.data.reshape(-1))
    rows = rows.reshape(call.members, *ids.shape, width)
    if call["padding_idx"] < 0:
        return rows
    padding = (ids.data == call["padding_idx"]).unsqueeze(-1)
    return torch.where(padding, rows.detach(), rows)


def index(call: OperatorCall) -> Emitted:
    """Advanced indexing of members' tensors by what is the same for all, in dims side by side."""
    if any(value is not None and value.stacked for value in call["indices"]):
        return NotImplemented
    places = [place for place, value in enumerate(call["indices"]) if value is not None]
    if places != [*range(places[0], places[-1] + 1)]:
        return NotImplemented
    return call.run(self=call.tensor("self").data, indices=[None, *call["indices"]])


def index_select(call: OperatorCall) -> Emitted:
    """Indices that are the same for all."""
    if call.is_stacked("index") or not call.tensor("self").rank:
        return NotImplemented
    return call.run(self=call.tensor("self").data, dim=dim_behind(call["dim"]))


def index_add(call: OperatorCall) -> Emitted:
    """Indices that are the same for all."""
    into, added = call.tensor("self"), call.tensor("source")
    if call.is_stacked("index") or not (into.rank and added.rank):
        return NotImplemented
    return call.run(self=call.front(into), source=call.front(added), dim=dim_behind(call["dim"]))
