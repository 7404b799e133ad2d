"""Plans as configurations of other tools.

A plan turns into a description (:mod:`planner.plan.export.described`), and that into text and what the text costs
(:mod:`planner.plan.export.export`).
"""
