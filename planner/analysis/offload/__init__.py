"""Steps whose data is partly on the host or on disk: chunks, what a step moves, and how long it waits.

The parameters, gradients and activations of blocks turn into chunks (``chunks``), a rank's step into a trace of what
each moment uses (``step_trace``), and a transfer schedule of that into seconds (``step_timing``). How to schedule is
:mod:`planner.solve.transfers`'s to say, which knows no models; here is what it is asked, and what its answer means.
"""
