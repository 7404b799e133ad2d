"""Backward under a plan: recomputation, split backward, and gradients that go where the plan wants them.

A block's program and what it may discard turn into a forward whose backward runs part of it again (``recompute``); a
backward turns into two, for inputs and for weights, where a pipeline's schedule wants them apart (``split_backward``).
torch's own checkpointing recomputes whole functions, where a plan says for each value whether it is kept.
"""
