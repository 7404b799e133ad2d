"""Counts the collectives that a program really calls, in the terms of the plan's prediction.

:func:`count_collectives` counts those along the axes of a mesh, :func:`count_exchanges` what the ranks of a pipeline
pass one another. Both work wherever torch dispatches: real process groups (gloo, nccl), and all ranks simulated in one
process (there a call by all ranks together counts once, as on one rank). :func:`count_messages` counts what stages
that are all in one process pass one another.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import SymInt, Tensor
from torch.distributed import ProcessGroup
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.distributed_c10d import GroupName
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.pipeline.executor import PipelineStep
from autopar.runtime.pipeline.p2p import Message, StageLinks, crossed_by, tag_of
from autopar.runtime.spmd.pipeline_ranks import PipelineRanks
from planner.formulation.resharding import Collective
from planner.formulation.stage_boundaries import Exchange

Call = TypeVar("Call", Collective, Exchange)

UNKNOWN_AXIS = "?"
"""The axis of a call on a process group that belongs to no axis."""


@contextlib.contextmanager
def count_collectives(groups: Mapping[str, ProcessGroup]) -> Iterator[Counter[Collective]]:
    """Count every collective call made inside the context, as this rank sees it.

    Args:
        groups: the process group of each mesh axis, by name (:func:`autopar.runtime.spmd.mesh.groups_of`).

    Yields:
        The counts so far; comparable with :func:`planner.analysis.prediction.collectives` and with
        ``Counter(dict(plan.predicted.collectives))``. A call is in the phase ``backward`` while autograd runs.
    """
    calls = Counter[Collective]()
    axis_of = _Axes(groups)

    def note(made: _CountedCall) -> None:
        calls[Collective(made.kind, axis_of(made.group), made.bytes_in, made.phase)] += 1

    with _CollectiveWatch(note):
        yield calls


@contextlib.contextmanager
def count_exchanges(pipeline: PipelineRanks) -> Iterator[Counter[Exchange]]:
    """Count every call inside the context by which this rank passes something to others of a pipeline.

    Yields:
        The counts so far; comparable with those of :func:`planner.formulation.stage_boundaries.exchanges` that this
        rank makes.
    """
    calls, members = Counter[Exchange](), dist.get_process_group_ranks(pipeline.ranks)

    def note(made: _CountedCall) -> None:
        group = _group(made.group)
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == 1 or not {*ranks} <= {*members}:
            return
        if made.kind == "send":
            boundary, phase = crossed_by(made.tag)
            way = pipeline.rank, members.index(dist.get_global_rank(group, made.receiver))
            calls[Exchange("send", way, made.bytes_in, phase, boundary)] += 1
        else:
            phase = "backward" if made.kind == "all_reduce" else "forward"  # only gradients are summed
            calls[Exchange(made.kind, tuple(sorted(map(members.index, ranks))), made.bytes_in, phase)] += 1

    with _CollectiveWatch(note):
        yield calls


@contextlib.contextmanager
def count_messages(step: PipelineStep, placed: Sequence[int]) -> Iterator[Counter[Exchange]]:
    """Count what the stages of a step that are all in one process pass one another, as if they were on several ranks.

    Args:
        placed: the rank of every stage.

    Yields:
        The counts so far; comparable with the sends of :func:`planner.formulation.stage_boundaries.exchanges`.
    """
    calls, spec = Counter[Exchange](), step.spec
    step.spec = replace(spec, links=_NotingLinks(spec.links, placed, calls))
    try:
        yield calls
    finally:
        step.spec = spec


class _NotingLinks:
    """Links that note what goes from rank to rank."""

    def __init__(self, links: StageLinks, placed: Sequence[int], calls: Counter[Exchange]):
        self.open, self.take, self.share, self.close = links.open, links.take, links.share, links.close
        self._links, self._placed, self._calls = links, placed, calls

    def put(self, message: Message, tensors: Sequence[Tensor]) -> None:
        boundary, phase = crossed_by(tag_of(message))
        ranks = self._placed[boundary], self._placed[boundary + 1]
        way = ranks if phase == "forward" else ranks[::-1]
        for tensor in tensors if way[0] != way[1] else ():
            self._calls[Exchange("send", way, tensor.numel() * tensor.element_size(), phase, boundary)] += 1
        self._links.put(message, tensors)


@dataclass(frozen=True)
class _TensorForm:
    """How one operator of ``torch.distributed`` states its call."""

    kind: str
    tensors: str
    group: str


_FORMS: dict[str, _TensorForm] = {
    "c10d.allreduce_.default": _TensorForm("all_reduce", "tensors", "process_group"),
    "c10d.allreduce_coalesced_.default": _TensorForm("all_reduce", "tensors", "process_group"),
    "c10d.allgather_.default": _TensorForm("all_gather", "input_tensors", "process_group"),
    "c10d._allgather_base_.default": _TensorForm("all_gather", "input_tensor", "process_group"),
    "c10d.allgather_into_tensor_coalesced_.default": _TensorForm("all_gather", "inputs", "process_group"),
    "c10d.reduce_scatter_.default": _TensorForm("reduce_scatter", "input_tensors", "process_group"),
    "c10d._reduce_scatter_base_.default": _TensorForm("reduce_scatter", "input_tensor", "process_group"),
    "c10d.reduce_scatter_tensor_coalesced_.default": _TensorForm("reduce_scatter", "inputs", "process_group"),
    "c10d.alltoall_.default": _TensorForm("all_to_all", "input_tensors", "process_group"),
    "c10d.alltoall_base_.default": _TensorForm("all_to_all", "input", "process_group"),
    "c10d.broadcast_.default": _TensorForm("broadcast", "tensors", "process_group"),
    "c10d.reduce_.default": _TensorForm("reduce", "tensors", "process_group"),
    "c10d.gather_.default": _TensorForm("gather", "input_tensors", "process_group"),
    "c10d.scatter_.default": _TensorForm("scatter", "input_tensors", "process_group"),
    "c10d.send.default": _TensorForm("send", "tensors", "process_group"),
    "_c10d_functional.all_reduce.default": _TensorForm("all_reduce", "input", "group_name"),
    "_c10d_functional.all_reduce_.default": _TensorForm("all_reduce", "input", "group_name"),
    "_c10d_functional.all_reduce_coalesced.default": _TensorForm("all_reduce", "inputs", "group_name"),
    "_c10d_functional.all_gather_into_tensor.default": _TensorForm("all_gather", "input", "group_name"),
    "_c10d_functional.all_gather_into_tensor_out.default": _TensorForm("all_gather", "input", "group_name"),
    "_c10d_functional.all_gather_into_tensor_coalesced.default": _TensorForm("all_gather", "inputs", "group_name"),
    "_c10d_functional.reduce_scatter_tensor.default": _TensorForm("reduce_scatter", "input", "group_name"),
    "_c10d_functional.reduce_scatter_tensor_coalesced.default": _TensorForm("reduce_scatter", "inputs", "group_name"),
    "_c10d_functional.all_to_all_single.default": _TensorForm("all_to_all", "input", "group_name"),
    "_c10d_functional.broadcast.default": _TensorForm("broadcast", "input", "group_name"),
    "_dtensor.shard_dim_alltoall.default": _TensorForm("all_to_all", "input", "group_name"),
}


@dataclass(frozen=True)
class _CountedCall:
    """One call, its group as the operator names it; ``receiver`` (in the group) and ``tag`` of a send."""

    kind: str
    group: Any
    bytes_in: int
    phase: str
    receiver: int = -1
    tag: int = -1


class _CollectiveWatch(TorchDispatchMode):
    """Tells of every call."""

    def __init__(self, note: Callable[[_CountedCall], None]):
        super().__init__()
        self._note = note

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
            bytes_in = sum(map(_bytes_of, tensors))
            phase = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
            to = (given["dst"], given["tag"]) if form.kind == "send" else ()
            kind = "send" if is_one_message(given) else form.kind
            self._note(_CountedCall(kind, given[form.group], bytes_in, phase, *to))
        return func(*args, **kwargs)


def is_one_message(given: Mapping[str, Any]) -> bool:
    """Whether an all-to-all is one message from each rank to another (:mod:`autopar.runtime.spmd.messages`).

    It is flat, with nothing for the others; rows that are exchanged have features.
    """
    sizes = given.get("input_split_sizes", ())
    return len(sizes) > 1 and given["input"].dim() == 1 and sum(_of_first(size) > 0 for size in sizes) == 1


def _of_first(number: int | SymInt) -> int:
    """Where ranks are simulated together, the number of the first."""
    local = getattr(getattr(number, "node", None), "_local_ints", None)
    return int(number) if local is None else next(iter(local.values()))


def _bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor; where ranks that are simulated together send different amounts, of the average one."""
    if isinstance(tensor, LocalTensor):
        each = [part.numel() for part in tensor._local_tensors.values()]
        return sum(each) * tensor.element_size() // len(each)
    return tensor.numel() * tensor.element_size()


class _Axes:
    """The mesh axis of a group, however an operator names it."""

    def __init__(self, groups: Mapping[str, ProcessGroup]):
        self._by_name: dict[str, str] = {group.group_name: axis for axis, group in groups.items()}
        self._by_ranks = {tuple(dist.get_process_group_ranks(group)): axis for axis, group in groups.items()}

    def __call__(self, given: Any) -> str:
        if isinstance(given, str) and given in self._by_name:
            return self._by_name[given]
        group = _group(given)
        ranks = tuple(dist.get_process_group_ranks(group))
        return self._by_name.get(group.group_name, self._by_ranks.get(ranks, UNKNOWN_AXIS))


def _group(given: Any) -> ProcessGroup:
    """A group that an operator names."""
    if isinstance(given, torch.ScriptObject):
        return ProcessGroup.unbox(given)
    return dist.distributed_c10d._resolve_process_group(GroupName(given)) if isinstance(given, str) else given


def differences(predicted: Mapping[Call, int], observed: Mapping[Call, int]) -> list[str]:
    """One line for every call that is not as often observed as predicted; empty when all are."""
    calls = set(predicted) | set(observed)
    return [
        f"{call}: predicted {predicted.get(call, 0)}, observed {observed.get(call, 0)}"
        for call in sorted(calls, key=lambda call: (call.phase, str(call)))
        if predicted.get(call, 0) != observed.get(call, 0)
    ]
