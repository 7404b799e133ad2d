"""What a checkpoint holds of an array's optimizer: state of rows, stacked as the parameters that they are rows of.

Nothing of it belongs to the ranks that hold members, so that it loads under any plan, and in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.arrays.member_rows import MemberRows, set_running
from autopar.checkpoint.contents import SCALARS
from autopar.runtime.module import ParallelModule
from autopar.runtime.optim.parts import like, local
from planner.base.errors import CheckpointError
from planner.formulation.constraints.labels import RUNNING_MODELS

MEMBERS, STOPPED = "members", "stopped"
OPTIONS, STACKED, APART = "options", "stacked", "apart"
"""What a member has: hyper-parameters, keys of its state that is stacked, and its other state, by parameter."""


class MemberState:
    """An array's optimizer as :func:`autopar.save_checkpoint` and :func:`autopar.load_checkpoint` take one.

    It has one group, of the stacked parameters. Options of that group say what members have by themselves: hyper-
    parameters, state that does not lie as a parameter (a number of steps), and who is stopped.

    Args:
        optimizer: whose groups are of rows.
        array: with the buffer that says who is trained.
        parallel: what ``autopar.parallelize`` made of it, if that is trained.
        rows: of every stacked parameter, by its name.
        members: of the optimizer's groups.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        array: nn.Module,
        parallel: ParallelModule | None,
        rows: Mapping[str, MemberRows],
        members: Sequence[int],
    ):
        self.param_groups = [{"params": [each.stacked for each in rows.values()]}]
        self.defaults: dict[str, Any] = {MEMBERS: {}, STOPPED: ()}
        self._optimizer, self._array, self._parallel, self._rows, self._members = (
            optimizer,
            array,
            parallel,
            rows,
            members,
        )

    def state_dict(self) -> dict[str, Any]:
        """As an optimizer's; every rank must call it."""
        members: dict[int, dict[str, Any]] = {}
        for member, group in zip(self._members, self._optimizer.param_groups, strict=True):
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            members[member] = {OPTIONS: options, STACKED: {}, APART: {}}
        dtypes: dict[str, dict[str, torch.dtype]] = {name: {} for name in self._rows}
        for name, rows in self._rows.items():
            for member, row in rows.of.items():
                state = self._optimizer.state.get(row, {})
                stacked = {key: value for key, value in state.items() if _lies_as(row, key, value)}
                dtypes[name].update({key: value.dtype for key, value in stacked.items()})
                members[member][STACKED][name] = sorted(stacked)
                members[member][APART][name] = {key: value for key, value in state.items() if key not in stacked}
        members, dtypes = self._of_all_ranks(members, dtypes)
        each = enumerate(self._rows.items())
        state = {
            number: {key: self._stacked(rows, key, dtypes[name][key]) for key in sorted(dtypes[name])}
            for number, (name, rows) in each
        }
        runs = self._array.get_buffer(RUNNING_MODELS).tolist()
        stopped = [member for member, is_trained in enumerate(runs) if not is_trained]
        return {"state": state, "param_groups": [{MEMBERS: members, STOPPED: stopped, "params": [*state]}]}

    def _stacked(self, rows: MemberRows, key: str, dtype: torch.dtype) -> Tensor:
        """State of all rows; nought for a member that has none."""
        every = [self._optimizer.state.get(row, {}).get(key) for row in rows.of.values()]
        values = [
            torch.zeros_like(row, dtype=dtype) if value is None else value
            for row, value in zip(rows.of.values(), every, strict=True)
        ]
        return like(rows.stacked, torch.stack([each.detach() for each in values]))

    def _of_all_ranks(
        self, members: dict[int, dict[str, Any]], dtypes: dict[str, dict[str, torch.dtype]]
    ) -> tuple[dict[int, dict[str, Any]], dict[str, dict[str, torch.dtype]]]:
        """The same of all members and parameters, of which a rank knows some."""
        found: list[Any] = [(members, dtypes)]
        if self._parallel is not None and dist.is_initialized():
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, (members, dtypes))
        every: dict[int, dict[str, Any]] = {}
        kinds: dict[str, dict[str, torch.dtype]] = {}
        for of_rank, of_parameters in found:
            for member, has in of_rank.items():
                known = every.setdefault(member, {OPTIONS: has[OPTIONS], STACKED: {}, APART: {}})
                for part in (STACKED, APART):
                    known[part].update(has[part])
            for name, own in of_parameters.items():
                kinds.setdefault(name, {}).update(own)
        return dict(sorted(every.items())), kinds

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` gave, and tell the array, and what was made of it, who is stopped."""
        (group,) = state["param_groups"]
        groups, values = [], {}
        for member, own in zip(self._members, self._optimizer.state_dict()["param_groups"], strict=True):
            saved = group[MEMBERS][member]
            lacks = sorted(self._optimizer.defaults.keys() - saved[OPTIONS].keys())
            if lacks:
                raise CheckpointError(
                    f"the checkpoint's optimizer has no option {lacks[0]!r}, which this one "
                    f"({type(self._optimizer).__name__}) has: give an optimizer of the kind that was saved"
                )
            groups.append({**saved[OPTIONS], "params": own["params"]})
            held = [(number, *each) for number, each in enumerate(self._rows.items()) if member in each[1].of]
            for place, (number, name, rows) in zip(own["params"], held, strict=True):
                at = [*rows.of].index(member)
                stacked = {key: local(state["state"][number][key])[at].clone() for key in saved[STACKED].get(name, ())}
                values[place] = {**saved[APART].get(name, {}), **stacked}
        has = {place: each for place, each in values.items() if each}
        self._optimizer.load_state_dict({"state": has, "param_groups": groups})
        running = self._array.get_buffer(RUNNING_MODELS)
        running.fill_(True)
        running[group[STOPPED]] = False
        if self._parallel is not None:
            set_running(self._parallel, running)


def _lies_as(row: Tensor, key: str, value: Any) -> bool:
    """Whether state of a row is stacked as the row is."""
    return isinstance(value, Tensor) and value.shape == row.shape and not (row.ndim == 0 and key in SCALARS)
