"""Embedding tables at home on the host or on disk, with their hot rows on the device; a module that trains its rows."""
