"""Pipelines by themselves: schedules, their simulation, and chains of blocks cut into stages.

Knows nothing of models, meshes or clusters; :mod:`planner.chain` and :mod:`planner.turns` bring these here.
"""
