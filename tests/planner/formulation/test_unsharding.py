"""Unsharding: what a choice comes to in a step of each kind."""

import pytest

from planner.formulation.unsharding import PER_MICRO_BATCH, PER_STEP, Unsharding

ELSEWHERE = (False, False, False, False)
IN_ONE = (False, True, True, False)


@pytest.mark.parametrize(
    "micro_batched, on_device, once, each",
    [
        (False, False, ELSEWHERE, ELSEWHERE),
        (True, False, ELSEWHERE, ELSEWHERE),
        (False, True, IN_ONE, IN_ONE),
        (True, True, (True, False, False, False), (False, True, False, True)),
    ],
)
def test_only_a_micro_batched_step_on_the_device_has_a_choice(
    micro_batched: bool, on_device: bool, once: tuple[bool, ...], each: tuple[bool, ...]
) -> None:
    for choice, wanted in ((PER_STEP, once), (PER_MICRO_BATCH, each)):
        found = choice.of_step(micro_batched, on_device)
        facts = found.once_per_step, found.overlaps_gather, found.overlaps_reduce, found.all_reduces_once
        assert facts == wanted
        assert found.prefetches == found.overlaps_gather
        assert found.unshards_again("gathered") != found.once_per_step and not found.unshards_again("none")


@pytest.mark.parametrize("waits", [False, True])
def test_plan_files_name_the_choice(waits: bool) -> None:
    for choice, name in ((PER_STEP, "once"), (PER_MICRO_BATCH, "each")):
        found = Unsharding.named(choice.name, waits)
        assert (choice.name, found.once_per_step, found.prefetch) == (name, choice.once_per_step, not waits)
        assert not (waits and found.of_step(True, True).prefetches)
