"""The file that describes the jobs of a fleet, turned into checked values.

A job says how many samples remain, within which global batches it may be trained, when it arrives, and how fast it is:
by a table of step times, or by naming a model, whose plans say so. What a batch does to training is the user's to
judge: the file's limits are all that is known of it here.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, model_validator

from planner.base.errors import ClusterError, FleetError
from planner.base.files import read_yaml
from planner.base.units import FROZEN, Bytes, Count, Described, Seconds, check_data

PLACE = re.compile(r"^(?:\w+|\[\d+\]|\.)+")
"""What is wrong, at the beginning of a complaint: ``jobs[2].samples``."""


class StatedStep(Described):
    """What a step takes on so many devices, with so many samples in the global batch."""

    devices: int = Field(ge=1, examples=["8"])
    batch: int = Field(ge=1, examples=["256"])
    step_s: Seconds = Field(gt=0, examples=["120 ms"])


class StatedJob(Described):
    """One job.

    Attributes:
        samples: that remain.
        batch: the least and the most samples that a global batch may have.
        steps: how fast it is; or else ``model`` names, as the command line does, what is planned to find out.
        sequence, dtype: of a model, as ``autopar plan`` takes them.
        optimizer_bytes: per parameter element, of a model.
        state_bytes: what is moved when its devices change; of a model it is known.
        restart_s: what that takes beside.
    """

    name: str = Field(min_length=1, examples=["llama-8b"])
    samples: Count = Field(gt=0, examples=["1e6"])
    batch: Annotated[tuple[int, int], FROZEN] | None = Field(default=None, examples=["[64, 512]"])
    arrival_s: Seconds = Field(default=0.0, ge=0, examples=["600 s"])
    steps: Annotated[tuple[StatedStep, ...], FROZEN] | None = Field(
        default=None, min_length=1, examples=["[{devices: 8, batch: 256, step_s: 120 ms}, ...]"]
    )
    model: str | None = Field(default=None, min_length=1, examples=["models.py:llama"])
    sequence: int | None = Field(default=None, ge=1, examples=["4096"])
    dtype: str | None = Field(default=None, examples=["bfloat16"])
    optimizer_bytes: int = Field(default=8, ge=0, examples=["8"])
    state_bytes: Bytes | None = Field(default=None, ge=0, examples=["80 GB"])
    restart_s: Seconds = Field(default=30.0, ge=0, examples=["30 s"])

    @model_validator(mode="after")
    def _of_one_kind(self) -> StatedJob:
        if (self.steps is None) == (self.model is None):
            has = "neither steps nor model" if self.steps is None else "both steps and model"
            raise ClusterError(f"job {self.name!r} has {has}: give one, a table of step times or a model to plan")
        if self.model is not None and self.batch is None:
            raise ClusterError(f"job {self.name!r}: batch is missing; write for example batch: [64, 512]")
        return self

    @model_validator(mode="after")
    def _within_limits(self) -> StatedJob:
        if self.batch is not None and not 1 <= self.batch[0] <= self.batch[1]:
            raise ClusterError(f"batch is {list(self.batch)}: give the least and the most, such as [64, 512]")
        steps = self.steps or ()
        if twice := [each for each, count in Counter((s.devices, s.batch) for s in steps).items() if count > 1]:
            raise ClusterError(f"steps has {twice[0][0]} devices with batch {twice[0][1]} twice: keep one")
        if steps and self.batch and not any(self.batch[0] <= each.batch <= self.batch[1] for each in steps):
            has = ", ".join(map(str, sorted({each.batch for each in steps})))
            raise ClusterError(f"steps has batches {has}, none within {list(self.batch)}: mend batch, or the steps")
        return self

    @property
    def limits(self) -> tuple[int, int]:
        """The least and the most samples of a global batch; of a table, where nothing is said, those that it has."""
        batches = [each.batch for each in self.steps or ()]
        return self.batch or (min(batches), max(batches))


class FleetFile(Described):
    """Jobs, and the time by which all shall have ended, if there is one."""

    jobs: Annotated[tuple[StatedJob, ...], FROZEN] = Field(
        min_length=1, examples=["[{name: a, samples: 1e6, steps: [...]}, ...]"]
    )
    until_s: Seconds | None = Field(default=None, gt=0, examples=["86400 s"])

    @model_validator(mode="after")
    def _each_once_and_in_time(self) -> FleetFile:
        first: dict[str, int] = {}
        for number, job in enumerate(self.jobs):
            if first.setdefault(job.name, number) != number:
                raise ClusterError(
                    f"jobs[{number}].name is {job.name!r}, as that of jobs[{first[job.name]}]: give each job a name of "
                    "its own"
                )
            if self.until_s is not None and job.arrival_s >= self.until_s:
                raise ClusterError(
                    f"jobs[{number}].arrival_s is {job.arrival_s:g}: {job.name!r} arrives "
                    f"{job.arrival_s - self.until_s:g} s after the end, until_s {self.until_s:g}; let it arrive "
                    "before, or leave until_s out"
                )
        return self

    @staticmethod
    def load(path: str | os.PathLike[str]) -> FleetFile:
        """Read a YAML or JSON file.

        Raises:
            FleetError: naming what is wrong, and the line.
        """
        try:
            data = read_yaml(path, "jobs file")
        except ClusterError as error:
            raise FleetError(str(error)) from None
        try:
            return FleetFile.from_dict(data)
        except FleetError as error:
            lines = _with_lines(str(error).split("\n"), yaml.compose(Path(path).read_text(encoding="utf-8")))
            raise FleetError("\n".join([f"jobs file {os.fspath(path)!r}:", *lines])) from None

    @staticmethod
    def from_dict(data: object) -> FleetFile:
        """The same from plain values; quantities may be text with units."""
        if not isinstance(data, Mapping):
            raise FleetError(
                f"a jobs file is a mapping with the fields {', '.join(FleetFile.model_fields)}; got {data!r}"
            )
        try:
            check_data(data)
            return FleetFile(**data)
        except ClusterError as error:
            raise FleetError(str(error)) from None


def _with_lines(complaints: Iterable[str], root: yaml.Node | None) -> Iterable[str]:
    """Each complaint behind the line of what it is about, as far as that is in the file."""
    for complaint in complaints:
        found = PLACE.match(complaint)
        node: Any = root
        for step in re.findall(r"\w+", found[0]) if found else ():
            node = _inside(node, step) or node
        yield f"line {node.start_mark.line + 1}: {complaint}" if node is not None else complaint


def _inside(node: yaml.Node, step: str) -> yaml.Node | None:
    """What a node has under a name or a number, if it has that."""
    if isinstance(node, yaml.MappingNode):
        return next((value for key, value in node.value if key.value == step), None)
    if isinstance(node, yaml.SequenceNode) and step.isdigit() and int(step) < len(node.value):
        return node.value[int(step)]  # type: ignore[no-any-return]
    return None
