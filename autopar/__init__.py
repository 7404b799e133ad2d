"""Automatic parallelism for PyTorch: plan a model over a cluster, then run the plan."""
