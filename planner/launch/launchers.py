"""Every launcher, by name."""

from __future__ import annotations

from planner.base.errors import InputError
from planner.base.units import nearest
from planner.launch import kubernetes, slurm, torchrun
from planner.launch.job import Job, Launcher

LAUNCHERS: dict[str, Launcher] = {each.LAUNCHER.name: each.LAUNCHER for each in (torchrun, slurm, kubernetes)}


def launcher_of(name: str) -> Launcher:
    """The launcher of a name; raises :class:`InputError` where there is none."""
    if name not in LAUNCHERS:
        raise InputError(f"there is no launcher {name!r}; {nearest(name, LAUNCHERS)}")
    return LAUNCHERS[name]


def launched(launcher: Launcher, job: Job) -> str:
    """What starts a job.

    Raises:
        InputError: the launcher must be told more of it; all that it lacks.
    """
    wrong = [why for limit in launcher.limits if (why := limit(job)) is not None]
    if wrong:
        raise InputError(f"{launcher.name}: {'; '.join(wrong)}")
    return launcher.write(job)
