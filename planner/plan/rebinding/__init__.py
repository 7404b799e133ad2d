"""Rebinding: the decisions of a plan carried to another model, batch or cluster, as far as they hold.

``(plan, graph, cluster) -> plan``. Blocks and operators are matched with those of the plan, the mesh is laid on the
other cluster, each decision narrows the space to what agrees with it, and what is left open is decided by the solver.
"""
