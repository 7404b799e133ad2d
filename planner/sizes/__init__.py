"""The same plan at other sizes: batch, sequence length, depth and micro-batches, as numbers and as closed forms.

A plan's decisions and new sizes turn into a prediction without the model, by propagating sizes through the planned
graph; with symbolic sizes the same walk gives formulas (:mod:`~planner.sizes.closed_form`). Where an operator's shapes
do not follow from the sizes, the error names it.
"""
