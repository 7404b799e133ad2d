"""What a thing costs on one device or over one link: seconds of kernels and collectives, from a description of the
cluster.

A cluster file or preset becomes a :class:`~planner.cost.cluster.ClusterSpec`; a node of the graph becomes a kernel with
operations and bytes, and a collective becomes seconds by the alpha-beta model. No decision is taken here: the same
functions serve the search, the report and the check of a prediction.
"""
