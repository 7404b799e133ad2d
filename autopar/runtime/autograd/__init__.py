"""Backward under a plan: recomputation, split backward, and gradients that go where the plan wants them."""
