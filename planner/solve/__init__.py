"""Pure optimisation that knows nothing of models or devices, so that each solver can be tested against brute force.

``choices`` picks one option per decision under pairwise costs and a budget, ``pipeline`` cuts chains into stages and
simulates schedules, ``transfers`` decides what moves between memory tiers when. Problems come in as plain numbers and
answers go out with what is proved about them; :func:`~planner.solve.problem.evaluate` is the one definition of cost.
"""
