"""Optimizers over sharded parameters: gradients reduced once, master weights in float32, whole parameters at owners.

A torch optimizer's class turns into one that steps the parts this rank holds, and whose norms, overflow checks and
checkpoints are those of the whole model. It keeps torch's interface, so that schedulers, clipping and gradient scalers
work unchanged. Where a plan says so, backward steps each block's parameters already (``early_update``).
"""
