"""Optimizers over sharded parameters: gradients reduced once, master weights in float32, any elementwise optimizer."""
