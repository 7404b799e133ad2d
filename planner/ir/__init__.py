"""The intermediate representation that is planned: a graph of typed tensors, and its repeated blocks folded into one.

A captured program becomes a :class:`~planner.ir.graph.Graph` of nodes; equal blocks become one block with a count
(:mod:`~planner.ir.folding`), so that planning time does not grow with depth. A layout says per mesh axis what each rank
holds of a tensor and what its gradient is (:mod:`~planner.ir.layout`).
"""
