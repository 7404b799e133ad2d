"""Rematerialization: what a block saves for backward, what it recomputes instead, and the bytes of each choice."""
