"""Pipelines by themselves: schedules, their simulation, and chains of blocks cut into stages.

Knows nothing of models, meshes or clusters; :mod:`planner.analysis.pipeline.chain` and
:mod:`planner.analysis.pipeline.staged` bring these here.
"""
