"""What all ranks of a mesh do alike: device mesh, sharded parameters, gathering, resharding, random state.

A plan's mesh and layouts turn into process groups and local tensors (``mesh``, ``parameters``), steps of a resharding
into collectives (``resharding``), and one seed into the random numbers of every rank (``random_state``). Every rank
calls the same functions in the same order, which is what keeps collectives from waiting for one another.
"""
