"""A fleet: which training job of several has how many devices of one cluster, with which batch, from when to when.

From the jobs' step times over devices and batch, and a cluster, to a schedule whose average completion time is proved
by CP-SAT where the fleet is small, and found by evolutionary search where it is large.
"""
