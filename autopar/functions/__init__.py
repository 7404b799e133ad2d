"""``torch.autograd.Function``s of a model become operators of its graph, so that their own backward runs in the plan.

While a model is captured each ``apply`` calls an operator instead, and the emitted program calls the same one on local
tensors. What its dims mean is what :func:`autopar.register` declares, checked on slices, since nothing tells it from
code; one that is not declared runs whole on every rank, and what either keeps for backward is seen by running it once
on tensors without data.
"""
