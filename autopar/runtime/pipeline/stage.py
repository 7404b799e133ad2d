"""The programs of one pipeline stage, and what it takes and gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import GraphModule


@dataclass(frozen=True)
class Passed:
    """A value that goes from one stage to the next: its shape on one rank, and whether a gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(frozen=True)
class Stage:
    """What a rank runs of one stage.

    Attributes:
        first_block: the number of the first of its blocks among all of the model.
        parameters, leaves: what ``gather``, and what ``program`` and ``count`` take of the model, by name.
        received, sent: what comes from the stage before, and goes to the one after.
        outputs: the positions of what leaves the model here.
        gather: (parameters) -> parameters as operators use them, or as micro-batches gather them with gradients that
            are summed over ranks; once a step. ``None``: blocks convert them as they are stored.
        count: (leaves) -> what a micro-batch adds to what is known of all before the first, such as of how many tokens
            a loss is the mean; ``None`` where nothing is.
        program: (used parameters, leaves, received, counts) -> (sent, outputs); once for each micro-batch.
    """

    number: int
    first_block: int
    parameters: tuple[str, ...]
    leaves: tuple[str, ...]
    received: tuple[Passed, ...]
    sent: tuple[Passed, ...]
    outputs: tuple[int, ...]
    gather: GraphModule | None
    count: GraphModule | None
    program: GraphModule


def programs_in(program: GraphModule) -> list[tuple[str, GraphModule]]:
    """The programs of blocks that a program calls, by name."""
    return [(name, module) for name, module in program.named_children() if isinstance(module, GraphModule)]
