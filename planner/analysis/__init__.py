"""What an assignment does when it runs: predicted seconds, bytes at every moment of a step, and traffic between tiers.

An :class:`~planner.formulation.assignment.Assignment` turns into a prediction by simulating its program: ``memory``
follows one rank's storages through a step, ``pipeline`` composes stages and micro-batches, ``offload`` adds the host
and the disk. It takes no decision, so that a plan that was searched and a plan that was pinned are judged alike.
"""
