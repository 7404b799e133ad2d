"""Micro-batched and pipelined steps: what each rank holds and does, composed from single blocks over a schedule.

The blocks of an assignment turn into a chain with seconds and bytes of each (``chain``), a cut of it into the step of
every rank (``staged``), and that into bytes at every moment (``rank_memory``, ``peak_report``). Blocks are simulated
once and composed, since a step of hundreds of micro-batches would take too long to follow statement by statement.
"""
