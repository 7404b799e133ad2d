"""Benchmarks: how long planning takes, and how long steps take beside torch's own hand-written plans."""
