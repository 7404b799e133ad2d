"""Branch and bound over parallel configurations: the best plan for a cluster, with a proof or a gap.

A folded graph, a cluster and pins turn into candidates (mesh, pipeline, micro-batches); each is bounded, pruned or
solved, and the incumbent is checked by simulation. Where nothing fits, the room says which limit is in the way and
what would have to change.
"""
