"""The planner: from a graph of typed tensors and a cluster to a plan. It never imports torch."""
