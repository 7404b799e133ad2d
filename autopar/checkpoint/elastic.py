"""A training loop that is saved as it goes and on SIGTERM, and that goes on from there on whatever ranks there are.

It is what a script needs that ``torchrun`` starts anew whenever a rank is lost or one comes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.checkpoint import files
from autopar.checkpoint.load import load_checkpoint
from autopar.checkpoint.save import save_checkpoint
from autopar.checkpoint.together import Ranks
from planner.base.errors import CheckpointError, InputError

TERMINATED = 128 + signal.SIGTERM
"""The exit status of a process that ended when it was asked to."""


class ElasticRun:
    """A training run of which every generation of processes carries out the steps that are left.

    ::

        run = autopar.ElasticRun("run/latest", pmodel, optimizer, pmodel.dataloader(dataset), every=100)
        for part in run.steps(10_000):
            loss = pmodel(**part).loss
            ...
            optimizer.step()

    It loads the checkpoint at ``path``, if there is one, under whatever plan the module has.

    Args:
        path: a directory, on a file system that all ranks share, of the one checkpoint.
        module, optimizer: as of :func:`autopar.save_checkpoint`.
        loader: of global batches, ``module.dataloader(...)``.
        every: after so many steps a checkpoint is saved, in the background.
        extra: further objects with ``state_dict()`` and ``load_state_dict()``, by name.

    Attributes:
        step: how many steps were made, in all generations.

    Raises:
        InputError: ``every`` is no number of steps.
        CheckpointError: the checkpoint is damaged, or of another model, or ``extra`` has plain data.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        module: nn.Module,
        optimizer: Any,
        loader: Any,
        *,
        every: int,
        extra: Mapping[str, Any] | None = None,
    ):
        _check_count("every", every)
        taken = {"loader", "step"} & {*(extra or {})}
        if taken:
            raise CheckpointError(f"extra has {sorted(taken)}, which a run saves by itself: give it another name")
        self.path, self.every, self.step = files.place(path), every, 0
        self._module, self._optimizer, self._loader = module, optimizer, loader
        self._extra = {**(extra or {}), "loader": loader}
        self._ranks = Ranks.all()  # a save in the background has others
        if any(self._ranks.each("looking for a checkpoint", lambda: files.is_saved(self.path))):
            self.step = load_checkpoint(self.path, module, optimizer, extra=self._extra)["step"]

    def steps(self, until: int) -> Iterator[Any]:
        """The parts of global batches that are left until so many steps were made; saves between them.

        SIGTERM on any rank saves on all of them when the step is over, and ends the process with status 143.

        Raises:
            SystemExit: so.
            InputError: ``until`` is no number of steps, or the loader has no batch.
            CheckpointError, DiskError: it cannot be saved.
        """
        _check_count("until", until)
        with _terminations() as asked:
            empty = 0  # passes on end; a run that was saved behind the last batch of one begins with such
            while self.step < until:
                empty += 1
                for part in self._loader:
                    yield part
                    self.step, empty = self.step + 1, 0
                    ends = self._any(bool(asked))
                    if ends or self.step == until or self.step % self.every == 0:
                        self._save(wait=ends or self.step == until)
                    if ends:
                        raise SystemExit(TERMINATED)
                    if self.step == until:
                        return
                if empty > 1:
                    raise InputError("the loader has no batch: give it a dataset of at least one global batch")

    def _any(self, asked: bool) -> bool:
        """Whether any rank was asked to end."""
        if self._ranks.group is None:
            return asked
        found = torch.tensor(asked, dtype=torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MAX, self._ranks.group)
        return bool(found)

    def _save(self, wait: bool) -> None:
        extra = {**self._extra, "step": self.step}
        save_checkpoint(self.path, self._module, self._optimizer, extra=extra, wait=wait)


@contextmanager
def _terminations() -> Iterator[list[int]]:
    """A list that has an entry for every SIGTERM that came, which otherwise does nothing."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_count(name: str, steps: object) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"{name} is {steps!r}: give a number of steps, 1 or more")
