"""Checkpoints: a model and its optimizer in files that any plan, any number of ranks and one process can read."""
