"""Predicts the step of a plan, wherever its model data lies: the one place where that is decided.

``(Assignment, how it runs micro-batched, memory) -> (transfer schedules, Prediction)``. A new plan, one that is read
and priced again, and the search, which compares plans that offload, all ask here.
"""

from __future__ import annotations

from dataclasses import replace

from planner.analysis.memory import Usage, usage
from planner.analysis.offload.step_timing import offloaded
from planner.analysis.pipeline.staged import Staged
from planner.analysis.prediction import Prediction, predict, predict_micro_batched
from planner.formulation.assignment import Assignment
from planner.solve.transfers import TransferSchedule


def planned_step(
    assignment: Assignment, staged: Staged | None, time_s: float, memory: Usage | None = None
) -> tuple[tuple[TransferSchedule, ...], Prediction]:
    """What is predicted of a step, and the transfer schedules that it obeys; none where all data is on the device.

    Args:
        staged: how it runs micro-batched, if it does.
        time_s: seconds of the step by the search's reckoning, if it is not micro-batched.
        memory: of a step that is not micro-batched, simulated; left out, it is simulated here.

    Raises:
        InfeasibleError: the host's memory, or the disk, does not hold the model's data.
    """
    if staged is None:
        memory = memory or usage(assignment)
        predicted = predict(assignment, time_s, memory)
    else:
        memory, predicted = None, predict_micro_batched(assignment, staged)
    if assignment.space.training.tier == "device":
        return (), predicted
    if staged is not None:
        assignment = replace(assignment, recompute=staged.recompute(assignment.space.folded))
    return offloaded(assignment, memory, predicted, staged)
