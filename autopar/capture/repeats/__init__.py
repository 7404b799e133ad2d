"""Repeated blocks: found before export, captured once, and replayed for every further instance.

A module's equal submodules turn into one traced body and a mark for each call of it (``candidates``, ``markers``). The
first call is recorded function by function, later ones run their own Python against that record and compute nothing
(``replay``, ``proxies``), so that capture does not take longer for every layer more.
"""
