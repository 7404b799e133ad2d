"""Simulates the memory of one rank through a training step, exactly as the emitted program allocates it.

The program is simulated statement by statement: forward, where a value lives until the last statement that reads it
and longer where backward needs it; then backward, where autograd runs the node that was made last first, gradients
come into being and saved tensors go. Views hold the storage of what they view. What an operator saves, passes on and
needs while it works stands in its row (:mod:`planner.ops.table`).

A block that recomputes discards, when it returns, what it can recompute from what it keeps; the first node of backward
that needs one of these values makes them all, in the order of forward (:mod:`planner.formulation.remat.levels`).

A block's inputs are held by its caller until it returns; gradients of parameters stay; outputs other than the loss are
taken to be dropped before backward starts (``loss = pmodel(**batch).loss``). Optimizer state and parameters
are there throughout, unless they are with their home on the host: then they, and gradients of parameters, are left out
    here
(:mod:`planner.analysis.offload.step_timing`). Where instances do nothing that is new
(:mod:`planner.analysis.memory.steady_state`), only the first and the last of them are simulated. Blocks handed out by
the allocator are larger than what is asked for by the cluster's ``reserve_fraction`` at most, which is not counted
here.

The state of a step that is simulated is a :class:`planner.analysis.memory.walk.Walk`, which the other files pass on:
``step`` from the leaves to the last gradient, ``forward`` for blocks and operators, ``convert`` for layouts that
change, ``bring`` for parameters that are gathered, ``backward`` for gradients, ``skip`` for instances that others stand
for.
"""

from planner.analysis.memory.readers import enters_before, readers_of, shares_of
from planner.analysis.memory.skip import LARGEST
from planner.analysis.memory.step import usage
from planner.analysis.memory.usage import Usage

__all__ = ["LARGEST", "Usage", "enters_before", "readers_of", "shares_of", "usage"]
