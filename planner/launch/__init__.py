"""Launching: what starts the processes of a plan on the machines of people, in the order of its ranks.

:mod:`planner.launch.job` is a neutral description: how many machines, how many processes on each, which ranks. A
launcher is a module of its own with a function ``write(job) -> text`` and a list of limits: what it must be told.
"""
