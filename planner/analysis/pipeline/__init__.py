"""Micro-batched and pipelined steps: what each rank holds and does, composed from single blocks over a schedule."""
