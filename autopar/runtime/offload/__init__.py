"""Data on the host or on disk: executes the planner's transfer schedule, and updates where parameters are at home.

Hooks tell it which block the program enters (``block_hooks``); the entries of the schedule for that moment turn into
copies between memory at home and on the device (``transfers``, ``chunk_memory``), and gradients that arrived into
updates (``autopar.runtime.optim.early_update``). Nothing is fetched, evicted or dropped but as scheduled, so a budget
that was planned holds.
"""
