"""Pipelined and micro-batched steps: executes a schedule's actions and passes tensors between stages."""
