"""Observe: count the collectives that a program really makes, in the words of the plan's prediction.

Works wherever torch dispatches: real process groups (gloo, nccl), and all ranks simulated in one process
(there a call by all ranks together counts once, as on one rank).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName
from torch.utils._python_dispatch import TorchDispatchMode

from planner.conversion import Collective

UNKNOWN_AXIS = "?"
"""The axis of a call on a process group that belongs to no axis."""


@contextlib.contextmanager
def observe(groups: Mapping[str, ProcessGroup]) -> Iterator[Counter[Collective]]:
    """Count every collective call made inside the context, as this rank sees it.

    Args:
        groups: the process group of each mesh axis, by name (:func:`autopar.runtime.mesh.groups_of`).

    Yields:
        The counts so far; comparable with :func:`planner.predict.collectives` and with
        ``Counter(dict(plan.predicted.collectives))``. A call is in the phase ``backward`` while autograd runs.
    """
    counter = _Counter(groups)
    with counter:
        yield counter.calls


@dataclass(frozen=True)
class _Form:
    """How one operator of ``torch.distributed`` states its call."""

    kind: str
    tensors: str
    group: str


_FORMS: dict[str, _Form] = {
    "c10d.allreduce_.default": _Form("all_reduce", "tensors", "process_group"),
    "c10d.allreduce_coalesced_.default": _Form("all_reduce", "tensors", "process_group"),
    "c10d.allgather_.default": _Form("all_gather", "input_tensors", "process_group"),
    "c10d._allgather_base_.default": _Form("all_gather", "input_tensor", "process_group"),
    "c10d.allgather_into_tensor_coalesced_.default": _Form("all_gather", "inputs", "process_group"),
    "c10d.reduce_scatter_.default": _Form("reduce_scatter", "input_tensors", "process_group"),
    "c10d._reduce_scatter_base_.default": _Form("reduce_scatter", "input_tensor", "process_group"),
    "c10d.reduce_scatter_tensor_coalesced_.default": _Form("reduce_scatter", "inputs", "process_group"),
    "c10d.alltoall_.default": _Form("all_to_all", "input_tensors", "process_group"),
    "c10d.alltoall_base_.default": _Form("all_to_all", "input", "process_group"),
    "c10d.broadcast_.default": _Form("broadcast", "tensors", "process_group"),
    "c10d.reduce_.default": _Form("reduce", "tensors", "process_group"),
    "c10d.gather_.default": _Form("gather", "input_tensors", "process_group"),
    "c10d.scatter_.default": _Form("scatter", "input_tensors", "process_group"),
    "_c10d_functional.all_reduce.default": _Form("all_reduce", "input", "group_name"),
    "_c10d_functional.all_reduce_.default": _Form("all_reduce", "input", "group_name"),
    "_c10d_functional.all_reduce_coalesced.default": _Form("all_reduce", "inputs", "group_name"),
    "_c10d_functional.all_gather_into_tensor.default": _Form("all_gather", "input", "group_name"),
    "_c10d_functional.all_gather_into_tensor_out.default": _Form("all_gather", "input", "group_name"),
    "_c10d_functional.all_gather_into_tensor_coalesced.default": _Form("all_gather", "inputs", "group_name"),
    "_c10d_functional.reduce_scatter_tensor.default": _Form("reduce_scatter", "input", "group_name"),
    "_c10d_functional.reduce_scatter_tensor_coalesced.default": _Form("reduce_scatter", "inputs", "group_name"),
    "_c10d_functional.all_to_all_single.default": _Form("all_to_all", "input", "group_name"),
    "_c10d_functional.broadcast.default": _Form("broadcast", "input", "group_name"),
    "_dtensor.shard_dim_alltoall.default": _Form("all_to_all", "input", "group_name"),
}


class _Counter(TorchDispatchMode):
    def __init__(self, groups: Mapping[str, ProcessGroup]):
        super().__init__()
        self.calls: Counter[Collective] = Counter()
        self._by_name: dict[str, str] = {group.group_name: axis for axis, group in groups.items()}
        self._by_ranks = {tuple(dist.get_process_group_ranks(group)): axis for axis, group in groups.items()}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        form = _FORMS.get(str(func))
        if form is not None:
            assert isinstance(func, torch._ops.OpOverload)
            names = (argument.name for argument in func._schema.arguments)
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            tensors = [t for t in pytree.tree_leaves(given[form.tensors]) if isinstance(t, torch.Tensor)]
            bytes_in = sum(t.numel() * t.element_size() for t in tensors)
            phase = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
            self.calls[Collective(form.kind, self._axis(given[form.group]), bytes_in, phase)] += 1
        return func(*args, **kwargs)

    def _axis(self, given: Any) -> str:
        """The mesh axis of a group, however the operator names it."""
        if isinstance(given, torch.ScriptObject):
            given = ProcessGroup.unbox(given)
        name = given if isinstance(given, str) else given.group_name
        if name in self._by_name:
            return self._by_name[name]
        group = dist.distributed_c10d._resolve_process_group(GroupName(name)) if isinstance(given, str) else given
        return self._by_ranks.get(tuple(dist.get_process_group_ranks(group)), UNKNOWN_AXIS)


def differences(predicted: Mapping[Collective, int], observed: Mapping[Collective, int]) -> list[str]:
    """One line for every call that is not as often observed as predicted; empty when all are."""
    calls = sorted({*predicted, *observed}, key=lambda c: (c.phase, c.axis, c.kind, c.bytes_in))
    return [
        f"{call.phase} {call.kind} of {call.bytes_in:,} bytes on axis {call.axis!r}: "
        f"predicted {predicted.get(call, 0)}, observed {observed.get(call, 0)}"
        for call in calls
        if predicted.get(call, 0) != observed.get(call, 0)
    ]
