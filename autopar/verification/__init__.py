"""Checks a plan in one process, without a cluster: types, outputs, every gradient, every collective, memory.

A plan and the original model turn into a report of differences: all ranks of the mesh are simulated in one process and
compared in float64, and collectives are counted against what the plan predicts. It is called ``verification`` since
``autopar.verify`` is the function that users call.
"""
