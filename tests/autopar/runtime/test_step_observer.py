"""Observing steps: what fails is raised as it is, nothing is left behind, and only steps that end are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from autopar.runtime.module import ParallelModule
from autopar.runtime.pipeline.actions import StageActions
from autopar.runtime.pipeline.executor import PipelineStep
from planner.base.errors import InputError
from tests.autopar.runtime.test_overlaps import MICRO, micro_batched


def hooks(module: ParallelModule) -> int:
    """How many the programs of stages, and those that they call, have."""
    step = module.program
    assert isinstance(step, PipelineStep)
    programs = [each for stage in step.spec.stages.values() for each in stage.program.modules()]
    return sum(
        len(each._forward_hooks) + len(each._forward_pre_hooks) for each in programs if isinstance(each, GraphModule)
    )


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_step_that_fails_is_not_counted(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three steps the second is profiled; four micro-batches each, of one stage."""
    backward = StageActions.backward

    def fails(*args: Any, **kwargs: Any) -> None:
        raise ValueError("what the user did")

    def observe(module: ParallelModule, part: torch.Tensor) -> None:
        with module.observe():
            for number in range(1, 4):
                monkeypatch.setattr(StageActions, "backward", fails if number == failing else backward)
                module(part)[0].backward()

    with micro_batched({**MICRO, "zero": 0}, {}) as (module, part, _):
        before = hooks(module)
        with pytest.raises(ValueError, match="what the user did"):
            observe(module, part)
        step, seen = module.program, module._seen
        assert isinstance(step, PipelineStep) and step.spec.recorder.watcher is None
        assert hooks(module) == before and not torch.autograd._profiler_enabled()
        assert seen is not None and len(seen.overlaps) == (failing > 2)
        timed = 4 if failing > 1 else 0
        assert {len(each) for each in (*seen.actions.values(), *seen.blocks.values())} == ({timed} if timed else set())
        assert {*seen.actions} == ({(0, "F"), (0, "B")} if timed else set())


def test_what_is_observed_is_not_observed_twice() -> None:
    """The outer one goes on."""
    with micro_batched({**MICRO, "zero": 0}, {}) as (module, part, _):
        with module.observe():
            with pytest.raises(InputError, match=r"observed already: leave the `with pmodel.observe\(\):` around"):
                module.observe().__enter__()
            module(part)[0].backward()
        assert module._seen is not None and len(module._seen.actions[0, "F"]) == 4
        with module.observe():
            module(part)[0].backward()
