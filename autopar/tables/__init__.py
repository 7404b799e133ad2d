"""Embedding tables as modules that a model looks up in: placed on ranks, or with their hot rows on the device."""
