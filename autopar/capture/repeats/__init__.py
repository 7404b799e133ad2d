"""Repeated blocks: found before export, captured once, and replayed for every further instance."""
