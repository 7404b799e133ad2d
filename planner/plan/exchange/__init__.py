"""Plans as configurations of other tools, and such configurations held against what would be best.

A plan turns into a description (:mod:`planner.plan.exchange.described`), that into text and into what the text costs
(:mod:`planner.plan.exchange.export`); a text turns into findings (:mod:`planner.plan.exchange.lint`).
"""
