"""From a folded graph, a mesh and pins to an optimisation problem, and from its answer back to decisions about tensors.

Each operator gets its strategies, each edge the cost of resharding, each block its ways to recompute and to store
parameters; together they are a :class:`~planner.solve.problem.Problem`. The solver's answer is read back as an
:class:`~planner.formulation.assignment.Assignment`, which everything after the search works on.
"""
