"""The planner's schedules are those of ``torch.distributed.pipelining``, action by action."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from planner.solve.pipeline.schedule import Schedule, schedule

RANKS = (1, 2, 3, 4, 8)
COUNTS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 32)


class Recorder:
    """A stage that computes nothing and writes down what it is asked for."""

    def __init__(self, stage: int, stages: int):
        self.stage_index = self.group_rank = stage
        self.num_stages = self.group_size = stages
        self.is_first, self.is_last, self.has_backward = stage == 0, stage == stages - 1, True
        self.calls: list[str] = []

    def forward_one_chunk(self, micro_batch: int, *args: Any, **kwargs: Any) -> None:
        self.calls.append(f"{self.stage_index}F{micro_batch}")

    def backward_one_chunk(self, micro_batch: int, **kwargs: Any) -> None:
        self.calls.append(f"{self.stage_index}B{micro_batch}")

    def get_fwd_recv_ops(self, micro_batch: int) -> list[Any]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, factor: int) -> None:
        pass


def ran(kind: type, stage: int, stages: int, count: int) -> list[str]:
    """What one rank of torch's schedule for single stages does when it steps."""
    recorder = Recorder(stage, stages)
    found = kind.__new__(kind)
    found.__dict__.update(
        _stage=recorder, _num_stages=stages, _n_microbatches=count, scale_grads=True, _has_backward=True, _loss_fn=None
    )
    found._check_inputs = lambda *args: ([()] * count, [{}] * count)
    found._initialize_stage = found._maybe_compute_loss = found._update_losses = lambda *args: None
    found._maybe_get_loss = lambda *args: None
    found._step_microbatches()
    return recorder.calls


def generated(kind: type, ranks: int, count: int, virtual: int) -> list[list[str]]:
    """Every rank's list from torch's generator, moments of waiting left out and pairs one after the other."""
    found = kind.__new__(kind)
    rounds = max(1, count // ranks)
    found.__dict__.update(
        pp_group_size=ranks,
        _num_stages=ranks * virtual,
        num_stages=ranks * virtual,
        n_local_stages=virtual,
        _n_microbatches=count,
        number_of_rounds=rounds,
        microbatches_per_round=count // rounds,
    )
    rows = [found._calculate_single_rank_operations(rank) for rank in range(ranks)]
    return [[str(a) for action in row if action for a in action.sub_actions or (action,)] for row in rows]


def ours(found: Schedule) -> list[list[str]]:
    return [[str(action) for action in row] for row in found.rows]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_single_stages_run_as_torch_runs_them(ranks: int, count: int) -> None:
    for name, kind in (("gpipe", theirs.ScheduleGPipe), ("1f1b", theirs.Schedule1F1B)):
        assert ours(schedule(name, ranks, count)) == [ran(kind, rank, ranks, count) for rank in range(ranks)]


IN_ROUNDS = [(ranks, count) for ranks in RANKS for count in COUNTS if count % max(1, count // ranks) == 0]
"""Torch refuses other counts: its rounds must divide them."""


@pytest.mark.parametrize("ranks, count", IN_ROUNDS)
def test_interleaved_orders_are_torchs_wherever_torch_has_one(ranks: int, count: int) -> None:
    kinds = (
        ("interleaved_1f1b", theirs.ScheduleInterleaved1F1B),
        ("zero_bubble", theirs.ScheduleInterleavedZeroBubble),
    )
    for name, kind in kinds:
        for virtual in (2, 3, 4):
            assert ours(schedule(name, ranks, count, virtual)) == generated(kind, ranks, count, virtual)
    assert ours(schedule("zero_bubble", ranks, count)) == generated(
        theirs.ScheduleInterleavedZeroBubble, ranks, count, 1
    )


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_v_shaped_orders_are_torchs_wherever_torch_has_one(ranks: int, count: int) -> None:
    assert ours(schedule("zbv", ranks, count, 2)) == generated(theirs.ScheduleZBVZeroBubble, ranks, count, 2)
    if count >= 2 * ranks:
        assert ours(schedule("dualpipev", ranks, count, 2)) == generated(theirs.ScheduleDualPipeV, ranks, count, 2)


@pytest.mark.parametrize("name, virtual", [("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2), ("dualpipev", 2)])
@pytest.mark.parametrize("count", [1, 7, 11])
def test_torch_finds_every_schedule_valid(name: str, virtual: int, count: int) -> None:
    found = schedule(name, 4, count, virtual)
    lines = [[theirs._Action.from_str(action) for action in row] for row in ours(found)]
    homes = theirs._validate_schedule(dict(enumerate(lines)), 4, found.stages, count)
    assert tuple(homes[stage] for stage in range(found.stages)) == found.rank_of
