"""Rematerialization: what a block saves for backward, what it recomputes instead, and what each choice saves in bytes."""
